"""Every family: read as transformers saved it, to Megatron and back; its config.json, and Megatron's arguments."""

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pico
import pytest
import repository
import torch
from conversions import run
from hypothesis import given, settings, strategies as st
from in_memory import InMemory, to_hf, to_megatron
from installed import BEFORE_5_23
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from precisionctl.architectures.families import (
    from_hf_config,
    from_megatron_args,
    supported,
    table_of,
    to_hf_config,
)
from precisionctl.architectures.megatron.megatron_args import otherwise_in_megatron, to_megatron_args
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.dtypes import DType
from precisionctl.errors import (
    DamagedCheckpoint,
    MappingError,
    PrecisionctlError,
    ShapeMismatch,
    UnknownArchitecture,
    UnmappedTensor,
)
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Parallelism, TensorSpec
from precisionctl.planning.make_plan import make_plan
from precisionctl.verify.compare import compare

ALL = list(pico.FAMILIES)


def opened(directory: Path, family: str, **settings: Any) -> HuggingFaceReader:
    pico.save(directory, family, dtype=torch.bfloat16, **settings)
    return HuggingFaceReader(directory)


def values(reader: HuggingFaceReader) -> dict[str, Tensor]:
    return {name: read_tensor(reader, name) for name in reader.specs}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_there_is_a_model_of_every_family_and_a_line_in_the_docs() -> None:
    page = (repository.DOCS / "families.md").read_text(encoding="utf-8")
    table, _, _ = page.partition("| made by | `model_type` |")[2].partition("\n\n")
    assert sorted(re.findall(r"`([\w-]+)`", table)) == sorted(supported())
    own = {pico.settings(family)["model_type"] for family in ALL}
    own |= {its["model_type"] for its in pico.ABSENT.values()}
    assert own | pico.ALSO.keys() == supported().keys() and own >= {*pico.ALSO.values()}


@pytest.mark.parametrize("family", pico.representing(pico.rows))
def test_to_megatron_and_back_gives_every_bit_back(tmp_path: Path, family: str) -> None:
    if family == "glm-5.3" and BEFORE_5_23:
        pytest.skip("transformers before 5.23 saves GLM-5.3's names in memory, and published ones are written")
    reader = opened(tmp_path, family)
    assert_same(to_hf(to_megatron(reader)).tensors, values(reader))


@pytest.mark.parametrize("family", pico.representing(pico.rows))
def test_hugging_face_to_hugging_face_keeps_every_tensor(tmp_path: Path, family: str) -> None:
    reader = opened(tmp_path, family)
    assert_same(to_hf(reader).tensors, values(reader))


def test_names_that_only_megatron_bridge_has_are_told(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "gemma3")
    for target in ("megatron", "hf"):
        notes = plan_command(Request(tmp_path / "hf", tmp_path / "out", target)).notes  # type: ignore[arg-type]
        assert any("Megatron-Bridge's names" in note for note in notes) == (target == "megatron")


@pytest.mark.parametrize("family", ALL)
def test_a_config_that_is_written_is_read_as_the_same_model(family: str) -> None:
    model = from_hf_config(pico.config(family))
    assert from_hf_config(to_hf_config(model, "bfloat16")) == model


@pytest.mark.parametrize("family", pico.representing(pico.switches, most=40))
def test_transformers_computes_the_same_with_a_config_that_is_written(family: str) -> None:
    """The judge of what config.json says is transformers: the same weights, the same logits, to the last bit."""
    theirs = pico.make(family)
    config = to_hf_config(from_hf_config(theirs.config.to_dict()), "float32")
    ours = pico.as_its_config_says(type(theirs)(type(theirs.config)(**config)).eval())
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


_OF_SHAPES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("vocab_size", "padded_vocab_size", "mla", "mtp_num_layers"),
)


def _function(model: ModelShape) -> ModelShape:
    """A model but for what the shapes and names of its tensors tell, too."""
    moe = model.moe and dataclasses.replace(model.moe, layer_freq=(), shared_ffn_hidden_size=None)
    found = object.__new__(ModelShape)
    found.__dict__.update(vars(model) | dict.fromkeys(_OF_SHAPES) | {"moe": moe, "window_layers": model.window_layers})
    return found


@pytest.mark.parametrize("family", pico.representing(pico.block_kinds))
def test_a_key_that_is_left_out_means_what_transformers_takes_it_for(family: str) -> None:
    """Any key; test_class_defaults.py has those of its table for every family."""
    if family == "mimo-v2-flash" and BEFORE_5_23:
        pytest.skip("before transformers 5.23 its window was one token shorter")
    theirs = AutoConfig.for_model(**pico.settings(family))
    config = theirs.to_dict()
    compared = 0
    for key in config:
        less = {name: value for name, value in config.items() if name != key}
        with suppress(PrecisionctlError):
            ours = from_hf_config(less)
            told = type(theirs)(**deepcopy(less)).to_dict()  # as `from_dict`, which prints it too
            assert _function(ours) == _function(from_hf_config(told)), key
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt-oss"])
def test_a_config_says_that_there_is_no_window_where_the_class_has_one(family: str) -> None:
    theirs = AutoConfig.for_model(**pico.settings(family))
    model = dataclasses.replace(from_hf_config(theirs.to_dict()), sliding_window=None, window_layers=None)
    written = type(theirs).from_dict(to_hf_config(model, "bfloat16"))
    assert written.sliding_window is None and "sliding_attention" not in (getattr(written, "layer_types", None) or ())


def test_a_class_that_takes_no_null_for_a_window_gets_one_that_no_layer_has() -> None:
    settings = pico.settings("cwm") | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    written = to_hf_config(from_hf_config(settings), "bfloat16")
    assert AutoConfig.for_model(**written).layer_types == ["full_attention"]
    assert from_hf_config(written).sliding_window is None


@pytest.mark.parametrize(
    "family", ["gpt-oss", "olmo3", "mellum", "vaultgemma", "cohere2", "exaone4", "qwen2-window", "afmoe", "smollm3"]
)
def test_a_null_window_beside_layers_that_have_one_is_refused(family: str) -> None:
    """transformers makes no mask for them (`create_sliding_window_causal_mask`)."""
    settings = pico.settings(family)
    kinds = ["sliding_attention"] * (settings["num_hidden_layers"] - 1) + ["full_attention"]
    with pytest.raises(DamagedCheckpoint, match="there are layers with a window, and no sliding_window says"):
        from_hf_config(settings | {"layer_types": kinds, "sliding_window": None})


@pytest.mark.parametrize(("family", "rope"), [("cohere2", (False,) * 4), ("exaone4", None)])
def test_a_null_window_says_where_rotary_embeddings_are_if_nothing_is_listed(family: str, rope: object) -> None:
    settings = pico.settings(family) | {"num_hidden_layers": 4, "layer_types": None, "sliding_window": None}
    model = from_hf_config(settings)
    assert (model.sliding_window, model.rope_layers) == (None, rope)


UNTOLD = {
    "llama-attention-bias": {"mlp_bias": True},  # one switch for all linears
    "phi3": {"architecture": "llama"},  # the same function
    "internlm3": {"architecture": "llama"},
    "iquestcoder": {"architecture": "llama"},
    "hyperclovax-without-post-norm": {"architecture": "llama", "query_pre_attn_scalar": None},
    "cwm": {"architecture": "mistral"},
    "helium": {"architecture": "glm"},
    "gpt-bigcode-by-head": {"architecture": "gpt2"},
    "minicpm3-plain": {"architecture": "youtu", "rounded_embedding_multiplier": False},
    "seed-oss": {"architecture": "qwen2"},
    "ministral": {"architecture": "mistral"},
    "solar-open": {"architecture": "glm4_moe"},
    "hy-v3": {"architecture": "dots1"},
    "exaone": {"architecture": "llama"},
    "ling-2": {"architecture": "glm4_moe"},
    "sarvam-moe": {"architecture": "dots1"},
    "sarvam-mla": {"architecture": "deepseek_v3"},
}
"""What Megatron's arguments have no words for, and what is read instead."""


@pytest.mark.parametrize("family", [f for f in ALL if not otherwise_in_megatron(pico.shape(f))])
def test_megatrons_arguments_describe_the_model_and_its_family(family: str) -> None:
    model = from_hf_config(pico.config(family)).padded(1)
    found = from_megatron_args(to_megatron_args(model), model.padded_vocab_size, "args")
    assert found == dataclasses.replace(model, **UNTOLD.get(family, {}))


JUNK = st.sampled_from(
    (
        *(None, 0, -1, 1, 3, 10**9, 2**62, 10**400, 0.5, -1.0, float("nan"), float("inf"), "x", "", True, False),
        *([], [1], ["x"], [[1]], ["sliding_attention"], {}, {"a": 1}, {"rope_type": ["x"]}, "1" * 100_000, (1, 2)),
        *({"rope_type": "yarn"}, {"rope_type": "longrope", "short_factor": [1], "long_factor": "x"}),
        *({"full_attention": 3}, {"full_attention": {"rope_type": "linear", "factor": "z"}}),
    )
)
"""What a stranger's file may have where a size, a switch or a table should be."""

CONFIGS = {family: pico.config(family) for family in ALL}
OLDER_KEYS = (
    *("rope_scaling", "rope_theta", "rope_local_base_freq", "rotary_pct", "rotary_emb_base", "rotary_dim"),
    *("partial_rotary_factor", "original_max_position_embeddings", "sliding_window_pattern", "n_inner"),
    *(
        "global_head_dim",
        "num_global_key_value_heads",
        "mlp_only_layers",
        "decoder_sparse_step",
        "topk_method",
        "scoring_func",
        "use_sliding_window",
    ),
)


@given(st.data(), st.sampled_from(ALL))
@settings(max_examples=400, deadline=2000)
def test_a_config_with_junk_in_it_is_a_model_or_one_error(data: st.DataObject, family: str) -> None:
    keys = st.sampled_from(sorted({*CONFIGS[family], *OLDER_KEYS} - {"model_type"}))
    with suppress(PrecisionctlError):
        assert from_hf_config(CONFIGS[family] | data.draw(st.dictionaries(keys, JUNK, min_size=1, max_size=3)))


@given(st.data(), st.sampled_from(ALL))
@settings(max_examples=250, deadline=2000)
def test_arguments_with_junk_in_them_are_a_model_or_one_error(data: st.DataObject, family: str) -> None:
    args = to_megatron_args(from_hf_config(CONFIGS[family]))
    keys = st.sampled_from([*args, "rope_type", "softmax_type", "moe_latent_size", "quick_geglu"])
    with suppress(PrecisionctlError):
        junk = data.draw(st.dictionaries(keys, JUNK, min_size=1, max_size=3))
        assert from_megatron_args(args | junk, 256, "args")


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("gemma3", "sliding_window_pattern"),
        ("qwen2-moe", "max_window_layers"),
        ("cohere2-moe", "sliding_window_pattern"),
        ("smollm3", "use_sliding_window"),
    ],
)
def test_what_says_no_number_of_layers_is_an_error_in_the_file_that_it_is_in(family: str, key: str) -> None:
    config = {**CONFIGS[family], "sliding_window": 4, "use_sliding_window": True, "layer_types": None, key: "two"}
    with pytest.raises(DamagedCheckpoint, match=key) as error:
        from_hf_config(config, "here/config.json")
    assert error.value.where == "here/config.json"


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("ernie4-5-moe", {"moe_layer_start_index": [1, 1]}, r"moe_layer_start_index is \[1, 1\], not a whole number"),
        ("glm-moe-dsa", {"indexer_types": None, "index_topk_freq": "4"}, "index_topk_freq is '4', not a whole number"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is .*, not a list of 0 or 1 for each of 4 layers"),
        ("smollm3", {"no_rope_layers": ["0"] * 4}, "no_rope_layers is .*, not a list of 0 or 1 for each of 4 layers"),
        ("nemotron-h", {"n_groups": 2, "mamba_n_groups": 4}, "mamba_n_groups is 4 and n_groups, which is the same, 2"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "1"}, "max_window_layers is '1', not a whole"),
    ],
)
def test_a_key_that_says_no_layers_or_contradicts_its_synonym_is_named(
    family: str, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(DamagedCheckpoint, match=words):
        from_hf_config(pico.settings(family) | changes)


@pytest.mark.parametrize("family", ["mixtral", "minimax-m2"])
def test_noise_of_routers_in_training_makes_no_other_model(family: str) -> None:
    settings = pico.settings(family)
    assert from_hf_config(settings | {"router_jitter_noise": 0.1}) == from_hf_config(settings)


def test_biases_that_megatrons_one_switch_would_give_to_experts_are_refused(tmp_path: Path) -> None:
    reader = opened(tmp_path, "qwen3-moe", attention_bias=True)
    make_plan(reader, "hf")
    with pytest.raises(MappingError, match="routers and experts would have biases"):
        make_plan(reader, "megatron")


def test_an_unsupported_family_is_refused_with_what_adding_one_takes(tmp_path: Path) -> None:
    pico.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "rwkv"}))
    with pytest.raises(UnknownArchitecture, match="`rwkv`.* A table is one file"):
        make_plan(HuggingFaceReader(tmp_path), "megatron")


def test_llama_4_experts_one_by_one_are_those_of_one_tensor(tmp_path: Path) -> None:
    pico.save(tmp_path / "one", "llama4", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    apart = {}
    for name, values in tensors.items():
        module, _, kind = name.rpartition(".")
        if not module.endswith(".experts"):
            apart[name] = values
            continue
        for number, each in enumerate(values):
            parts = {"down_proj": each.T} if kind == "down_proj" else dict(zip(GATE_UP, each.T.chunk(2), strict=True))
            apart |= {f"{module}.{number}.{linear}.weight": part.contiguous() for linear, part in parts.items()}
    shutil.copytree(tmp_path / "one", tmp_path / "apart")
    save_file(apart, tmp_path / "apart" / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "apart", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert tensors.keys() == back.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)


GATE_UP = ("gate_proj", "up_proj")

FUSED = {"qwen3-moe": "mlp", "mixtral": "block_sparse_moe", "deepseek-v3": "mlp"}


def fuse(tensors: Mapping[str, Tensor], experts: int, module: str) -> dict[str, Tensor]:
    """The same checkpoint as transformers 5 has it in memory: experts stacked, gate above up."""
    gate, up, down = ("w1", "w3", "w2") if module == "block_sparse_moe" else ("gate_proj", "up_proj", "down_proj")
    made = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in sorted({name.split(f".{module}.experts.")[0] for name in tensors if f".{module}.experts." in name}):
        numbered = [f"{layer}.{module}.experts.{number}" for number in range(experts)]
        fused = [torch.cat([tensors[f"{e}.{gate}.weight"], tensors[f"{e}.{up}.weight"]]) for e in numbered]
        made[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(fused)
        made[f"{layer}.mlp.experts.down_proj"] = torch.stack([tensors[f"{e}.{down}.weight"] for e in numbered])
    return {name.replace(f"{module}.gate.", "mlp.gate."): values for name, values in made.items()}


@pytest.mark.parametrize("family", FUSED)
def test_fused_experts_are_the_same_experts(tmp_path: Path, family: str) -> None:
    reader = opened(tmp_path, family)
    numbered, apart = to_megatron(reader), values(reader)
    assert reader.model.moe is not None
    file = tmp_path / "model.safetensors"
    save_file(fuse(load_file(file), reader.model.moe.num_experts, FUSED[family]), file)
    fused = HuggingFaceReader(tmp_path)
    assert any(name.endswith("gate_up_proj[0]") for name in fused.specs)
    assert_same(to_megatron(fused).tensors, numbered.tensors)
    assert_same(to_hf(to_megatron(fused)).tensors, apart)  # written as the model's own class saves it
    assert_same(to_hf(fused).tensors, values(fused))  # and left as it is where nothing asks
    assert_same(to_hf(fused, naming="as saved").tensors, apart)
    assert compare(fused, numbered).equal


def test_transformers_fuses_experts_as_we_do() -> None:
    """The judge of the two spellings: what transformers has in memory, and what it saves of that."""
    model = pico.make("qwen3-moe").state_dict()
    name = "model.layers.1.mlp.experts"
    assert model[f"{name}.gate_up_proj"].shape == (8, 96, 64)
    assert model[f"{name}.down_proj"].shape == (8, 64, 48)


def with_prediction_layer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A DeepSeek-V3 with the layer that transformers leaves out: random, but for its copies."""
    torch.manual_seed(1)
    made = dict(tensors)
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        made[name.replace("layers.2.", "layers.3.")] = torch.randn_like(tensors[name])
    for name in ("enorm", "hnorm", "shared_head.norm"):
        made[f"model.layers.3.{name}.weight"] = torch.randn(64, dtype=torch.bfloat16)
    made["model.layers.3.eh_proj.weight"] = torch.randn(64, 128, dtype=torch.bfloat16)
    made["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    made["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return made


def prediction(tmp_path: Path) -> HuggingFaceReader:
    pico.save(tmp_path, "deepseek-v3", dtype=torch.bfloat16)
    file = tmp_path / "model.safetensors"
    save_file(with_prediction_layer(load_file(file)), file)
    return HuggingFaceReader(tmp_path)


def test_multi_token_prediction_layers_go_to_megatron_and_back_with_their_copies(tmp_path: Path) -> None:
    reader = prediction(tmp_path)
    megatron = to_megatron(reader)
    mine = {name for name in megatron.tensors if name.startswith("mtp.")}
    layer = "mtp.layers.0.transformer_layer"
    assert {"mtp.layers.0.eh_proj.weight", "mtp.layers.0.final_layernorm.weight"} < mine
    assert {f"{layer}.self_attention.linear_kv_up_proj.weight", f"{layer}.mlp.experts.linear_fc1.weight7"} < mine
    assert not any("embed" in name or "head" in name for name in mine)
    theirs = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
    for ours, name in theirs.items():  # all but eh_proj have one shape: a mix-up would come back unseen
        stored = read_tensor(reader, f"model.layers.3.{name}.weight")
        assert torch.equal(megatron.tensors[f"mtp.layers.0.{ours}.weight"], stored)
    for norm, name in {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}.items():
        stored = read_tensor(reader, f"model.layers.3.{name}.weight")
        assert torch.equal(megatron.tensors[f"{layer}.{norm}.weight"], stored)
    assert_same(to_hf(megatron).tensors, values(reader))
    assert_same(to_hf(reader).tensors, values(reader))


def test_mimo_is_qwen2_and_joins_the_inputs_of_a_prediction_layer_the_other_way_around(tmp_path: Path) -> None:
    """transformers does not know it: the names and the order are Megatron-Bridge's and vLLM's."""
    pico.save(tmp_path, "qwen2", dtype=torch.bfloat16, tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    as_mimo = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | as_mimo))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    qwen2 = dict(tensors)
    for name, each in qwen2.items():
        if name.startswith("model.layers.1."):
            tensors[name.replace("model.layers.1.", "model.mtp_layers.0.")] = torch.randn_like(each)
    hidden, token = torch.randn(2, 64, 64, dtype=torch.bfloat16)
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.cat([hidden, token], 1)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"model.mtp_layers.0.{name}.weight"] = torch.randn(64, dtype=torch.bfloat16)
    save_file(tensors, file)
    reader = HuggingFaceReader(tmp_path)
    megatron = to_megatron(reader)
    assert torch.equal(megatron.tensors["mtp.layers.0.eh_proj.weight"], torch.cat([token, hidden], 1))
    for ours, theirs in {"enorm": "token_layernorm", "hnorm": "hidden_layernorm"}.items():
        stored = tensors[f"model.mtp_layers.0.{theirs}.weight"]
        assert torch.equal(megatron.tensors[f"mtp.layers.0.{ours}.weight"], stored)
    assert_same(to_hf(megatron).tensors, values(reader))
    without = {name: each for name, each in megatron.tensors.items() if not name.startswith("mtp.")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(qwen2, file)
    assert_same(without, to_megatron(HuggingFaceReader(tmp_path)).tensors)


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_a_copy_of_a_prediction_layer_that_differs_is_damage(tmp_path: Path, name: str) -> None:
    prediction(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.layers.3.{name}.weight"][7, 7] += 1
    save_file(tensors, file)
    with pytest.raises(DamagedCheckpoint, match=f"{name}.* should be a copy"):
        to_megatron(HuggingFaceReader(tmp_path))


def test_a_copy_of_another_shape_is_refused_before_it_is_read(tmp_path: Path) -> None:
    reader = prediction(tmp_path)
    reader.specs["model.layers.3.embed_tokens.weight"] = TensorSpec((10, 64), DType.bfloat16)
    with pytest.raises(ShapeMismatch, match=r"embed_tokens.weight` is \[10, 64\], the model's sizes say \[250, 64\]"):
        make_plan(reader, "megatron")


def test_a_config_that_claims_prediction_layers_without_tensors_is_read_without(tmp_path: Path) -> None:
    """As transformers saves every DeepSeek-V3."""
    reader = opened(tmp_path, "deepseek-v3")
    assert reader.model.mtp_num_layers == 1
    plan = make_plan(reader, "megatron")
    assert plan.model.mtp_num_layers == 0
    assert not any(name.startswith("mtp.") for name in plan.targets)


def test_a_router_that_its_class_has_in_fp32_is_not_rounded(tmp_path: Path) -> None:
    pico.save(tmp_path, "deepseek-v3")
    plan = make_plan(HuggingFaceReader(tmp_path), "megatron", dtype=DType.bfloat16)
    kept = {name for name, spec in plan.targets.items() if spec.dtype != DType.bfloat16}
    router = [f"decoder.layers.{layer}.mlp.router" for layer in (1, 2)]
    assert kept == {f"{name}.{part}" for name in router for part in ("expert_bias", "weight")}


@pytest.mark.parametrize("family", ALL)
def test_what_a_class_keeps_in_fp32_is_not_rounded(family: str) -> None:
    """`_keep_in_fp32_modules_strict` of transformers: a parameter with one of these in its name is FP32 in a model in
    BF16 (modeling_utils.py: _get_dtype_plan)."""
    settings = AutoConfig.for_model(**pico.settings(family))
    bases = AutoModelForCausalLM._model_mapping[type(settings)].__mro__
    kept = {part for base in bases for part in vars(base).get("_keep_in_fp32_modules_strict") or ()}
    model = pico.shape(family)
    for row in table_of(model).spelled({}, model, "in memory"):
        if row.of_prediction or row.unused or not row.count(model):
            continue
        wide = [name for name in row.hf if any(part in name for part in kept)]
        assert row.keeps_dtype or row.wide_beside or not wide


def test_gpt2_as_the_hub_has_it_is_the_same_model(tmp_path: Path) -> None:
    """Without a prefix, and with the mask that each layer stored."""
    expected = to_megatron(opened(tmp_path, "gpt2"))
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): values for name, values in load_file(file).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 128, 128)}, file)
    hub = HuggingFaceReader(tmp_path)
    assert_same(to_megatron(hub).tensors, expected.tensors)
    assert compare(hub, expected).equal


def test_gpt_oss_experts_are_transposed_and_their_gates_gathered(tmp_path: Path) -> None:
    """An independent spelling, after transformers' GptOssExperts: x @ gate_up_proj[e], gate = [..., ::2]."""
    reader = opened(tmp_path, "gpt-oss")
    found, theirs = to_megatron(reader).tensors, load_file(tmp_path / "model.safetensors")
    x = torch.randn(3, 64, dtype=torch.float64)
    both = x @ theirs["model.layers.1.mlp.experts.gate_up_proj"][2].double()
    fc1 = x @ found["decoder.layers.1.mlp.experts.linear_fc1.weight2"].double().t()
    torch.testing.assert_close(fc1, torch.cat([both[..., ::2], both[..., 1::2]], -1))
    down = theirs["model.layers.1.mlp.experts.down_proj"][2]
    assert torch.equal(found["decoder.layers.1.mlp.experts.linear_fc2.weight2"], down.t())


def test_norms_that_only_megatron_stores_less_one_become_whole(tmp_path: Path) -> None:
    """A Llama that was trained with --apply-layernorm-1p."""
    reader = opened(tmp_path, "llama-2")
    megatron = to_megatron(reader)
    centered = dataclasses.replace(megatron.model, zero_centered_gamma=True)
    shifted = {
        name: (values.float() - 1).bfloat16() if "norm" in name else values for name, values in megatron.tensors.items()
    }
    back = to_hf(InMemory(centered, "megatron", shifted)).tensors
    assert_same(back, values(reader))


OF_MIXERS = (".mixer.norm.weight", ".mamba_mixer.norm.weight")
"""Norms of Mamba-2 mixers, which Megatron-Core stores whole in any case (ssm/mamba_mixer.py)."""


def _is_whole(model: ModelShape) -> bool:
    return not (model.zero_centered_gamma or model.hf_zero_centered_gamma or model.dsa)


WHOLE = [family for family in ALL if _is_whole(pico.shape(family))]


def norms(family: str) -> set[str]:
    return {megatron for megatron, *_ in pico.rows(family) if "norm" in megatron}


@pytest.mark.parametrize("family", pico.representing(norms, WHOLE))
def test_all_norms_of_a_family_may_be_stored_less_one(tmp_path: Path, family: str) -> None:
    pico.save(tmp_path, family)
    reader = HuggingFaceReader(tmp_path)
    megatron = to_megatron(reader)
    centered = dataclasses.replace(megatron.model, zero_centered_gamma=True)
    shifted = {
        name: values - 1 if "norm" in name and name.endswith("weight") and not name.endswith(OF_MIXERS) else values
        for name, values in megatron.tensors.items()
    }
    torch.testing.assert_close(dict(to_hf(InMemory(centered, "megatron", shifted)).tensors), values(reader))


@pytest.mark.parametrize(
    ("family", "parallelism", "message"),
    [
        ("llama-2", Parallelism(tensor=3), "cannot be divided evenly among 3 tensor-parallel"),
        ("llama-2", Parallelism(pipeline=3), "2 layers cannot be cut into 3 pipeline stages"),
        ("llama-2", Parallelism(pipeline=2, virtual=2), "2 layers cannot be cut into 4 pipeline stages"),
        ("llama-2", Parallelism(expert=2), "without experts"),
        ("mixtral", Parallelism(expert=3), "4 experts cannot be divided evenly among 3"),
        ("mixtral", Parallelism(tensor=2, expert=2, expert_tensor=5), "experts.* cannot be cut into 5"),
    ],
)
def test_ranks_that_do_not_divide_a_model_are_refused(
    tmp_path: Path, family: str, parallelism: Parallelism, message: str
) -> None:
    with pytest.raises(ShapeMismatch, match=message):
        make_plan(opened(tmp_path, family), "megatron", parallelism=parallelism)


def test_experts_are_cut_by_their_own_tensor_parallel_size(tmp_path: Path) -> None:
    reader = opened(tmp_path, "mixtral", intermediate_size=90)
    make_plan(reader, "megatron", parallelism=Parallelism(tensor=4, expert_tensor=1))
    with pytest.raises(ShapeMismatch, match="experts"):
        make_plan(reader, "megatron", parallelism=Parallelism(tensor=4))


@dataclasses.dataclass
class WithOptimizer(InMemory):
    optimizer_specs: Mapping[str, TensorSpec] = dataclasses.field(default_factory=dict)


def test_an_optimizer_goes_along_as_parallel_as_its_parameters(tmp_path: Path) -> None:
    megatron = to_megatron(opened(tmp_path, "mixtral"))
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight1"
    state = {f"optimizer.state.{kind}.{name}": TensorSpec((192, 64), DType.float32) for kind in ("exp_avg", "param")}
    source = WithOptimizer(megatron.model, "megatron", megatron.tensors, optimizer_specs=state)
    plan = make_plan(source, "megatron", optimizer=True)
    assert plan.targets.keys() == megatron.tensors.keys() | state.keys()
    for each in state:
        assert plan.targets[each] == TensorSpec((192, 64), DType.float32, plan.targets[name].parallel)
    assert plan.gemms == make_plan(source, "megatron").gemms
    assert make_plan(source, "megatron").targets.keys() == megatron.tensors.keys()
    source.optimizer_specs = {"optimizer.state.exp_avg.decoder.stranger": TensorSpec((1,), DType.float32)}
    with pytest.raises(MappingError, match="stranger.* not the state of a parameter"):
        make_plan(source, "megatron", optimizer=True)


@pytest.mark.parametrize("family", pico.representing(pico.block_kinds, most=5))
def test_a_stray_tensor_is_refused_in_every_family(tmp_path: Path, family: str) -> None:
    reader = opened(tmp_path, family)
    specs = {**reader.specs, "model.layers.0.stranger.weight": TensorSpec((1,), DType.bfloat16)}
    with pytest.raises(UnmappedTensor, match="stranger"):
        make_plan(dataclasses.replace(_Specs(reader.model), specs=specs), "megatron")


@dataclasses.dataclass
class _Specs:
    model: ModelShape
    specs: Mapping[str, TensorSpec] = dataclasses.field(default_factory=dict)
    layout: Any = "hf"
    path: Path | None = None

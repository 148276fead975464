"""Gemma 4, dense, with experts and small: what its config.json says, in the words of published files and of
transformers, what is not computed, logits and gradients, and the forms of its experts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pico
import pytest
import tiny_wrappers
import torch
from any_models import export, load_whole
from conversions import run
from gpt_models import VOCABULARY, as_gpt, assert_text_is_computed, backward, converted, transformers_model
from safetensors.torch import load_file, save_file
from soaking import first, in_soak
from trained_models import trained
from trainer_directories import hf_trainer, pytorch
from transformers import AutoConfig, AutoModelForCausalLM

from precisionctl.architectures.families import from_hf_config, read_model, to_hf_config
from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, PrecisionError, RecipeError, ShapeMismatch, UnknownArchitecture
from precisionctl.evaluate.stored import load
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import Parallelism
from precisionctl.recipe import ParallelSettings
from precisionctl.trainer.measure.parameters import Parameters, weights_used
from precisionctl.trainer.parallel.shards import check as check_ranks
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check

PUBLISHED = pico.settings("gemma4")
"""In the words of published files."""

EXPERTS = pico.settings("gemma4-moe")
SMALL = pico.settings("gemma4-small")
KINDS = ("gemma4", "gemma4-moe", "gemma4-small")
WHOLE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "head_dim": 64,
    "global_head_dim": 64,
}
"""Sizes of whole blocks."""
GATE_UP = ("gate_proj", "up_proj")


def as_saved(**changes: Any) -> dict[str, Any]:
    """As transformers writes it."""
    config: dict[str, Any] = AutoConfig.for_model(**PUBLISHED | changes).to_dict()
    return config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_global_key_value_heads": None},
        {"num_global_key_value_heads": 4},
        {"global_head_dim": 16},
        {"global_head_dim": 16, "num_global_key_value_heads": None},
        {"num_hidden_layers": 12},
        {"num_hidden_layers": 8},
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
        {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
        {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
        {"attention_k_eq_v": False},
        {"attention_k_eq_v": False, "num_global_key_value_heads": None, "global_head_dim": 16},
        {"num_hidden_layers": 8, "num_kv_shared_layers": 2},
        {"num_hidden_layers": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        {"use_double_wide_mlp": True},
        {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 250},
        SMALL,
        SMALL
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
        | {"use_double_wide_mlp": False},
    ],
    ids=str,
)
def test_published_words_and_those_of_transformers_are_the_same_model(changes: dict[str, Any]) -> None:
    """The judge is the class: its layers' kinds, and the shapes of its heads."""
    published, saved = from_hf_config(PUBLISHED | changes), from_hf_config(as_saved(**changes))
    assert published == saved == from_hf_config(to_hf_config(saved, "bfloat16"))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PUBLISHED | changes))
    for layer, module in enumerate(theirs.model.layers):
        attention, here = module.self_attn, saved.attention_of(saved.in_window(layer))
        assert saved.in_window(layer) == attention.is_sliding
        assert attention.is_kv_shared_layer == saved.shares_kv(layer)
        if not saved.shares_kv(layer):
            assert (attention.v_proj is None) == here.keys_are_values
            assert attention.k_proj.out_features == here.key_size
        assert attention.q_proj.out_features == here.query_size
        assert attention.head_dim == here.kv_channels
        assert module.enable_moe_block == saved.has_experts(layer)
        wide = saved.kv_shared_ffn_hidden_size if saved.shares_kv(layer) else saved.ffn_hidden_size
        assert module.mlp.gate_proj.out_features == wide
        assert module.hidden_size_per_layer_input == (saved.per_layer_embed_dim or 0)
        if saved.moe:
            assert module.experts.gate_up_proj.shape == (saved.moe.num_experts, saved.expert_fc1_size, 64)
            assert module.router.config.top_k_experts == saved.moe.topk
            assert module.mlp.gate_proj.out_features == saved.moe.shared_ffn_hidden_size


@pytest.mark.parametrize("said", [{}, {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0}], ids=str)
def test_what_no_key_says_is_what_the_class_takes(said: dict[str, Any]) -> None:
    said = {"model_type": "gemma4_text"} | said
    told = AutoConfig.for_model(**said).to_dict()
    numbers = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    short = said | {name: told[name] for name in (*numbers, "num_attention_heads")}
    assert from_hf_config(short) == from_hf_config(told)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("attention_bias", True),
        ("use_bidirectional_attention", "all"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("published", [PUBLISHED, EXPERTS, SMALL], ids=KINDS)
def test_another_gemma_4_is_refused_by_the_setting_s_name(
    setting: str, value: object, wrapped: bool, published: dict[str, Any]
) -> None:
    config = as_saved(**published) | {setting: value}
    config = {"model_type": "gemma4", "text_config": config} if wrapped else config
    model = read_model(config, stored=["model.language_model.embed_tokens.weight"] if wrapped else [])
    assert isinstance(model, UntabledModel)
    with pytest.raises(UnknownArchitecture, match=f"no gemma4_text known here has {setting}={value!r}") as refused:
        _ = model.num_layers
    assert "has a table" not in str(refused.value)


def test_what_no_published_small_model_has_is_refused() -> None:
    with pytest.raises(UnknownArchitecture, match="has vocab_size_per_layer_input=262144"):
        from_hf_config({key: value for key, value in SMALL.items() if key != "vocab_size_per_layer_input"})
    experts = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
    with pytest.raises(UnknownArchitecture, match="has use_double_wide_mlp=True beside experts"):
        from_hf_config(SMALL | experts)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_shared_layers": 6},
        {"num_kv_shared_layers": 7},
        {"num_kv_shared_layers": -1},
        {"num_kv_shared_layers": "x"},
        {"layer_types": ["sliding_attention"] * 6},
        {"layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 3},
        {"hidden_size_per_layer_input": -1},
        {"hidden_size_per_layer_input": "x"},
    ],
    ids=str,
)
def test_layers_without_keys_to_share_are_damage(changes: dict[str, Any]) -> None:
    with pytest.raises(DamagedCheckpoint):
        from_hf_config(SMALL | changes)


@pytest.mark.parametrize("shared", [0, 1, 3])
def test_a_layer_reads_the_keys_of_the_last_of_its_kind_that_has_any(shared: int) -> None:
    """The judge is the class, whose layers say which of them store theirs."""
    told = AutoConfig.for_model(**SMALL | {"num_kv_shared_layers": shared})
    model = from_hf_config(told.to_dict())
    with torch.device("meta"):
        theirs = [layer.self_attn for layer in AutoModelForCausalLM.from_config(told).model.layers]
    assert [model.shares_kv(layer) for layer in range(6)] == [each.is_kv_shared_layer for each in theirs]
    for layer in range(6):
        source = model.kv_layer(layer)
        assert model.in_window(layer) == model.in_window(source)
        assert theirs[source].store_full_length_kv if model.shares_kv(layer) else source == layer


@pytest.mark.parametrize(
    "layers",
    [
        {"0": {"head_dim": 32}},
        {"0": {"head_dim": 32}, "2": {"head_dim": 32}},
        {"2": {"head_dim": 32, "intermediate_size": 7}},
        {"7": {"head_dim": 32}},
        {"x": {"head_dim": 32}},
    ],
    ids=str,
)
def test_single_layers_of_other_sizes_are_refused(layers: dict[str, Any]) -> None:
    with pytest.raises(UnknownArchitecture, match="is not one number and size of heads for all layers without"):
        from_hf_config(as_saved() | {"per_layer_config": layers})


@pytest.mark.parametrize("said", [3, [], {"2": 3}, {"2": {"head_dim": "x"}}, {"2": {"num_key_value_heads": -1}}])
def test_sizes_of_layers_that_are_none_are_damage(said: Any) -> None:
    with pytest.raises(DamagedCheckpoint):
        from_hf_config(as_saved() | {"per_layer_config": said})


@pytest.mark.parametrize(
    ("container", "sizes"),
    [
        ("torch", Parallelism(tensor=2, pipeline=3)),
        ("torch_dist", Parallelism(tensor=2, expert=4)),
        *in_soak(("torch_dist", Parallelism()), ("torch_dist", Parallelism(tensor=2, pipeline=2))),
        *in_soak(("torch", Parallelism(tensor=4)), ("torch", Parallelism(tensor=2, expert=2, expert_tensor=1))),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", KINDS)
def test_every_bit_comes_back_from_megatron(family: str, container: Any, sizes: Parallelism, tmp_path: Path) -> None:
    if family != "gemma4-moe" and sizes.expert > 1:
        pytest.skip("no experts")
    if family == "gemma4-small" and sizes.tensor > 2:
        pytest.skip("two groups of queries")
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", container=container, parallelism=sizes)
    run(tmp_path / "megatron", tmp_path / "back", "hf", verify=True)
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((tmp_path / side / "config.json").read_text()) for side in ("hf", "back")]
    assert configs[0] == configs[1]


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("family", "saved"),
    [("gemma4-moe", pytorch), *in_soak(("gemma4-small", hf_trainer), ("gemma4", hf_trainer))],
    ids=["gemma4-moe", "gemma4-small", "gemma4"],
)
def test_an_optimizer_goes_through_both_containers_and_has_no_state_of_a_layer_s_factor(
    family: str, saved: Callable[[Path, Any, Any], Path], tmp_path: Path
) -> None:
    """transformers has the factor as a buffer, so a trainer's optimizer does not count it."""
    model, optimizer = trained(family, dtype=torch.bfloat16)
    assert not any(name.endswith("layer_scalar") for name, _ in model.named_parameters())
    run(saved(tmp_path / "run", model, optimizer), tmp_path / "first", "megatron")
    sizes = Parallelism(tensor=2, pipeline=3)
    run(tmp_path / "first", tmp_path / "legacy", "megatron", container="torch", parallelism=sizes)
    run(tmp_path / "legacy", tmp_path / "second", "megatron", parallelism=Parallelism())
    first, second = (WithOptimizer(open_checkpoint(tmp_path / name)) for name in ("first", "second"))
    assert first.specs.keys() == second.specs.keys()
    assert all(torch.equal(read_tensor(first, name), read_tensor(second, name)) for name in first.specs)
    kept = sorted(name for name in first.specs if name.endswith("layer_scalar"))
    assert kept == [f"decoder.layers.{layer}.layer_scalar" for layer in range(model.config.num_hidden_layers)]


def test_ranks_divide_the_groups_of_both_kinds_of_attention(tmp_path: Path) -> None:
    model = from_hf_config(PUBLISHED)
    assert [each.num_query_groups for each in model.attentions] == [2, 4]
    with pytest.raises(RecipeError, match="2 query groups cannot be shared evenly by 4 ranks"):
        check_ranks(model.padded(4), ParallelSettings(tensor=4))
    pico.save(tmp_path / "hf", "gemma4", num_attention_heads=6, num_key_value_heads=6, num_global_key_value_heads=2)
    with pytest.raises(ShapeMismatch, match="6 heads in 2 query groups cannot be divided evenly among 3"):
        run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor=3))


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("gemma4", {}),
    ("gemma4-moe", {}),
    ("gemma4-moe", {"top_k_experts": 1}),
    ("gemma4-moe", {"top_k_experts": 8, "rms_norm_eps": 0.1}),
    ("gemma4-moe", {"num_experts": 4, "top_k_experts": 2, "final_logit_softcapping": 5.0}),
    ("gemma4-moe", {"moe_intermediate_size": 128, "intermediate_size": 16, "layer_types": ["full_attention"] * 3}),
    ("gemma4-small", {}),
    ("gemma4-small", {"use_double_wide_mlp": False, "num_kv_shared_layers": 0}),
    ("gemma4-small", {"hidden_size_per_layer_input": 0, "layer_types": ["full_attention"] * 6}),
    ("gemma4-small", {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 1}),
    ("gemma4-moe", {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 3, "attention_k_eq_v": False}),
]


@pytest.mark.parametrize(("family", "changes"), first(2, SETTINGS), ids=str)
def test_logits_and_gradients_are_those_of_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Their gradients, as a checkpoint that goes to Megatron, are ours, but for the order of sums."""
    theirs = transformers_model(family, **changes)
    ours = as_gpt(converted(theirs, tmp_path))
    tokens = torch.randint(VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(1))
    # asked for hidden states, it computes all tokens in all layers: else it fails where keys are shared without
    # embeddings for each layer
    expected, found = theirs(tokens, output_hidden_states=True).logits, ours(tokens)
    difference = (found[..., :VOCABULARY] - expected).abs().max()
    assert difference < 1e-5 * expected.std()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    backward(found, tokens)
    with torch.no_grad():
        for parameter in theirs.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    gradients = converted(theirs, tmp_path).tensors
    trained_here = {name: one for name, one in ours.named_parameters() if not name.endswith("layer_scalar")}
    assert len(trained_here) == len(gradients) - theirs.config.num_hidden_layers
    for name, parameter in trained_here.items():
        assert parameter.grad is not None, name
        if changes.get("top_k_experts") == 1 and ".router." in name:
            continue  # one expert has a constant weight, and the norm after it undoes that: rounding alone is left
        assert gradients[name].any(), name
        largest = float(gradients[name].abs().max())
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize(
    "changes", [{"num_experts": None}, {"top_k_experts": 0}, {"moe_intermediate_size": "x"}, {"top_k_experts": 9}]
)
def test_experts_without_their_sizes_are_damage(changes: dict[str, Any]) -> None:
    with pytest.raises(DamagedCheckpoint):
        from_hf_config(EXPERTS | changes)


E2B = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_key_value_heads": 1} | {
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
}
E4B = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_key_value_heads": 2} | {
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
    "num_kv_shared_layers": 18,
    "use_double_wide_mlp": False,
}


@pytest.mark.parametrize("sizes", [E2B, E4B], ids=["E2B", "E4B"])
def test_the_small_ones_have_the_parameters_of_their_class(sizes: dict[str, Any]) -> None:
    told = {"vocab_size": 262144, "num_attention_heads": 8, "head_dim": 256, "global_head_dim": 512}
    model = from_hf_config({"model_type": "gemma4_text", **told, "max_position_embeddings": 131072, **sizes})
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **told, **sizes))
    assert Parameters.of(model).all == pytest.approx(sum(each.numel() for each in theirs.parameters()), rel=1e-3)


def test_the_26b_has_the_parameters_that_its_model_card_says() -> None:
    """25.2 billion of the text model, of which 3.8 billion are used for a token, the output layer not counted."""
    sizes = {"vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256}
    sizes |= {"global_head_dim": 512, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    model = from_hf_config(EXPERTS | sizes)
    assert round(Parameters.of(model).all / 1e9, 1) == 25.2
    assert round(weights_used(model) / 1e9, 1) == 3.8


def one_by_one(directory: Path, out: Path) -> None:
    """The same checkpoint with experts under a number each, as llm-compressor has them."""
    shutil.copytree(directory, out)
    apart = {}
    for name, values in load_file(directory / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if not module.endswith(".experts"):
            apart[name] = values
            continue
        for number, each in enumerate(values):
            parts = {"down_proj": each} if kind == "down_proj" else dict(zip(GATE_UP, each.chunk(2), strict=True))
            apart |= {f"{module}.{number}.{linear}.weight": part.contiguous() for linear, part in parts.items()}
    save_file(apart, out / "model.safetensors", metadata={"format": "pt"})


def test_experts_one_by_one_are_those_of_one_tensor(tmp_path: Path) -> None:
    pico.save(tmp_path / "one", "gemma4-moe", dtype=torch.bfloat16)
    one_by_one(tmp_path / "one", tmp_path / "apart")
    run(tmp_path / "apart", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    run(tmp_path / "apart", tmp_path / "again", "hf")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    for other in ("back", "again"):
        found = load_file(tmp_path / other / "model.safetensors")
        assert tensors.keys() == found.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("target", "scheme"), [("sglang", "block"), *in_soak(("vllm", "dynamic"), ("tensorrt-llm", "mxfp8"))]
)
def test_engines_get_codes_of_experts_one_by_one(target: str, scheme: Any, tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "gemma4-moe", dtype=torch.bfloat16, **WHOLE)
    one_by_one(tmp_path / "hf", tmp_path / "apart")
    export(tmp_path / "hf", tmp_path / "fp8", scheme, target)
    values, codes = (load_file(tmp_path / name / "model.safetensors") for name in ("apart", "fp8"))
    assert values.keys() <= codes.keys()
    for name, expected in values.items():
        if ".experts." in name:
            assert codes[name].dtype == torch.float8_e4m3fn
        elif "router" in name or "norm" in name:
            assert torch.equal(codes[name], expected), name
    assert compare(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "fp8")).equal
    assert not check(open_checkpoint(tmp_path / "fp8"), engine_named(target))
    found = check(open_checkpoint(tmp_path / "fp8"), engine_named("transformers"))
    if target == "vllm":
        assert any(each.what == "experts of a layer one by one" for each in found)
        with pytest.raises(PrecisionError, match=r"one by one.*--drop-encodings"):
            export(tmp_path / "fp8", tmp_path / "out", scheme, "transformers")
        run(tmp_path / "fp8", tmp_path / "values", "hf", "bf16", drop_encodings=True)
        export(tmp_path / "values", tmp_path / "out", scheme, "transformers")


@pytest.mark.parametrize("scheme", ["block", *in_soak("nvfp4a16", "dynamic")])
def test_codes_of_experts_one_by_one_are_computed_with_as_they_decode(scheme: Any, tmp_path: Path) -> None:
    """Against transformers with the decoded weights: beside these, inputs alone are rounded, to eight bits or not."""
    pico.save(tmp_path / "hf", "gemma4-moe", dtype=torch.bfloat16, **WHOLE)
    export(tmp_path / "hf", tmp_path / "codes", scheme)
    run(tmp_path / "codes", tmp_path / "values", "hf", "bf16")
    theirs = pico.as_its_config_says(AutoModelForCausalLM.from_pretrained(tmp_path / "values", dtype=torch.bfloat16))
    ours, words = load(open_checkpoint(tmp_path / "codes"))
    assert "codes" in words or "weights from NVFP4" in words
    tokens = torch.randint(VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(tokens)[..., :VOCABULARY]
    assert torch.cosine_similarity(found.float().flatten(), expected.float().flatten(), dim=0) > 0.95


@pytest.mark.parametrize("scheme", ["dynamic", *in_soak("block")])
def test_transformers_gets_experts_as_its_class_has_them(scheme: Any, tmp_path: Path) -> None:
    theirs = pico.make_and_save(tmp_path / "hf", "gemma4-moe", dtype=torch.bfloat16, **WHOLE)
    export(tmp_path / "hf", tmp_path / "fp8", scheme, "transformers")
    experts = {name: values for name, values in theirs.state_dict().items() if ".experts." in name}
    loaded = load_whole(type(theirs), tmp_path / "fp8").state_dict()
    assert len(experts) == 6 and all(torch.equal(loaded[name], values) for name, values in experts.items())


WRAPPED = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}


def test_the_wrapper_s_text_with_experts_is_computed_and_comes_back_with_its_towers(tmp_path: Path) -> None:
    theirs = tiny_wrappers.save(tmp_path / "hf", "gemma4", **WRAPPED)
    assert read_model(theirs.config.to_dict(), stored=theirs.state_dict()).moe
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(expert=2, pipeline=2))
    run(tmp_path / "megatron", tmp_path / "back", "hf", verify=True)
    before, after = (tiny_wrappers.stored(tmp_path / side) for side in ("hf", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert len(tiny_wrappers.towers(before)) > 10
    assert any(name.endswith("language_model.layers.0.experts.gate_up_proj") for name in before)
    assert_text_is_computed(theirs, tmp_path / "hf")


def test_the_wrapper_s_experts_are_exported_one_by_one(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "gemma4", dtype=torch.bfloat16, **WRAPPED)
    export(tmp_path / "hf", tmp_path / "fp8", "dynamic")
    codes = tiny_wrappers.stored(tmp_path / "fp8")
    assert codes["model.language_model.layers.1.experts.3.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert not check(open_checkpoint(tmp_path / "fp8"), engine_named("vllm"))
    assert compare(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "fp8")).equal

"""How engines divide a family's weights among GPUs: as vLLM's own classes say it, and the same for an export as for
`verify`."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import pico
import pytest
import tiny_wrappers
import torch
from target_checks import check_directory
from transformers import AutoConfig

from precisionctl.architectures.families import from_hf_config, table_of
from precisionctl.architectures.param_map import Row, filled
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.engines.base import engines
from precisionctl.engines.serving import Cut, ServingLayout
from precisionctl.errors import PrecisionError
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import TensorSpec
from precisionctl.planning.served_model import served
from precisionctl.quant_methods.base import CHANNEL, CODES, SQUARE, TENSOR

_BY_CLASS = {
    "outputs": (  # ColumnParallelLinear, MergedColumnParallelLinear or QKVParallelLinear
        *("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv"),
        *("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "input_linear"),
        *("c_fc", "c_fc_0", "c_fc_1", "fc1", "fc_in", "dense_h_to_4h"),
        *("q_b_proj", "kv_b_proj", "wq_b", "wo_a", "o_a_proj"),  # deepseek_v2.py, deepseek_v4/attention.py
        *("q_gate_proj",),  # transformers, of A.X K2
        *("linear_gate",),  # hy_v4/nvidia/attention.py; of MLPs, as transformers saves Hunyuan 4's
        *("wq", "wkv_b"),  # as mistral_large_3.py renames Mistral's to DeepSeek's; Mistral Large 4's class was not read
        *("in_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "g_proj", "g_b_proj"),  # layers/mamba/
        *("index_q_proj",),  # linear.py MinimaxM3QKVParallelLinearWithIndexer
    ),
    "inputs": (  # RowParallelLinear
        *("o_proj", "out_proj", "dense", "c_proj", "fc2", "fc_out", "dense_4h_to_h"),
        *("down_proj", "w2", "output_linear", "wo_b", "o_b_proj", "wo"),
    ),
    "nothing": (  # ReplicatedLinear, or disable_tp=True
        *("q_a_proj", "kv_a_proj_with_mqa", "wkv_a_with_mqa", "wq_a", "wkv", "kv_proj"),
        *("fc1_latent_proj", "fc2_latent_proj"),  # nemotron_h.py
        *("g_a_proj", "index_k_proj"),  # gdn/kimi_gdn_linear_attn.py, linear.py
    ),
}
READ_IN_VLLM = {linear: along for along, linears in _BY_CLASS.items() for linear in linears}
"""vLLM 0.33: the linears of the classes that serve these families, and what transformers' `base_model_tp_plan` says of
those that its Transformers backend serves (GPT-NeoX, Phi, StarCoder2, OLMo, ...)."""


def model_of(family: str, **changes: Any) -> ModelShape:
    config = AutoConfig.for_model(**pico.settings(family) | changes)
    return from_hf_config(config.to_dict())


Spelling = Literal["first", "in_memory", "for_engines", "other"]


def coded(model: ModelShape, spelling: Spelling = "first") -> dict[str, TensorSpec]:
    """The tensors of which exports may make codes."""
    found, rows = {}, list[Row]()
    for each in table_of(model).rows:
        rows += [each] if isinstance(each, Row) else getattr(each, spelling) or each.first
    for row in rows:
        if (row.gemm or row.only_exported) and row.count(model) and row.present.in_layout("hf", model):
            for place in row.places(model):
                for template, shape in zip(row.hf, row.shapes(model, "hf"), strict=True):
                    if template not in row.values and not template.endswith("]"):
                        found[filled(template, place)] = TensorSpec(shape, CODES)
    return found


def cut(model: ModelShape, module: str, spelling: Spelling = "first") -> tuple[Cut, TensorSpec]:
    """That of the first weight whose module ends so, and the weight."""
    weights = coded(model, spelling)
    name = next(name for name in weights if name.endswith(f"{module}.weight"))
    found = served(model, weights, 1, expert_parallel=False).cuts
    assert found is not None
    return found[name], weights[name]


@pytest.mark.parametrize("family", pico.FAMILIES)
@pytest.mark.parametrize("spelling", get_args(Spelling))
def test_every_weight_is_cut_as_vllm_cuts_it(family: str, spelling: Spelling) -> None:
    model = pico.shape(family)
    weights = coded(model, spelling)
    found = served(model, weights, 1, expert_parallel=False).cuts
    assert found is not None and found.keys() >= weights.keys()
    for name in weights:
        assert found[name].along == READ_IN_VLLM[name.removesuffix(".weight").rpartition(".")[2]], name


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A directory with `hf`, a small model, and `out`, its export to vLLM for one GPU."""

    def made(family: str, scheme: str = "dynamic", **changes: Any) -> Path:
        here = tmp_path_factory.mktemp(family)
        if family == "glm4-moe-lite":  # vLLM goes by this number, which pico's layers are not said by
            changes = {"first_k_dense_replace": 1, "mlp_layer_types": ["dense", "sparse", "sparse"], **changes}
        pico.save(here / "hf", family, dtype=torch.bfloat16, **changes)
        if family in ("nemotron-nas", "deepseek"):  # of which vLLM reads config.json by the model's own code
            (here / "hf" / "configuration_own.py").touch()
            config = json.loads((here / "hf" / "config.json").read_text())
            config["auto_map"] = {"AutoConfig": "configuration_own.Own"}
            (here / "hf" / "config.json").write_text(json.dumps(config))
        execute(plan_command(Request.export(here / "hf", here / "out", "vllm", scheme)), workers=1)
        return here

    return made


def refusal(here: Path, ranks: int, scheme: str = "dynamic") -> str | None:
    """Why so many GPUs are refused, by an export and by `verify` alike; None if they are not. Settings of pico's models
    that vLLM passes over or refuses have rules of their own, whatever the number of GPUs."""
    config = json.loads((here / "out" / "config.json").read_text())
    fixed = [*engines()["vllm"].passed_over(config), *engines()["vllm"].refused(config)]
    checked = check_directory(here / "out", "vllm", ranks)
    found = replace(checked, findings=[each for each in checked.findings if each not in fixed])
    why = None
    try:
        plan_command(Request.export(here / "hf", here / "other", "vllm", scheme, ranks=ranks))
    except PrecisionError as error:
        why = str(error)
    assert found.passes == (why is None), (why, found.findings)
    if why:
        assert found.findings[0].what in why
    else:
        assert not found.findings
    return why


UNSERVED = ("gpt2", "deepseek-v4", "gemma3n", "gpt-neo", "bamba", "mpt", "mamba", "falcon-mamba")
"""GPT-2, whose dynamic export is refused, DeepSeek-V4, which is served in blocks alone, and those of which vLLM has no
class (an export says so, `verify` refuses), or makes all linears without quantization."""


@pytest.mark.parametrize(
    "family",
    pico.representing(pico.gemms, (each for each in pico.FAMILIES if each not in UNSERVED)),
)
def test_what_is_exported_for_several_gpus_is_what_verify_lets_them_serve(
    exported: Callable[..., Path], family: str
) -> None:
    here = exported(family, **pico.fp8_sizes(family))
    for ranks in (2, 3, 4):
        refusal(here, ranks)


def test_heads_that_gpus_do_not_divide_are_refused(exported: Callable[..., Path]) -> None:
    """vLLM's ModelConfig asks that GPUs divide the heads, its QKVParallelLinear that they divide the key-value heads,
    or are a multiple of them."""
    here = exported("gpt-neox")
    assert refusal(here, 2) is None
    for ranks in (3, 7):
        assert f"4 attention heads on {ranks} GPUs" in str(refusal(here, ranks))
    twelve = {"hidden_size": 192, "num_attention_heads": 12, "head_dim": 64, "intermediate_size": 192}
    here = exported("llama-3", **twelve, num_key_value_heads=6)
    assert [ranks for ranks in range(1, 13) if refusal(here, ranks) is None] == [1, 2, 3, 6, 12]
    assert "12 attention heads in 6 query groups on 4 GPUs" in str(refusal(here, 4))
    told = check_directory(here / "hf", "vllm", 4)  # of values too
    assert not told.passes and len([each for each in told.findings if each.rule.fatal]) == 1


@pytest.mark.parametrize("family", ["phi", "starcoder2", "llama-3"])
def test_linears_of_any_name_are_cut(exported: Callable[..., Path], family: str) -> None:
    here = exported(family, num_key_value_heads=4)
    assert refusal(here, 2) is None
    assert "24" in str(refusal(here, 4))  # of 96


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (6, 2), (8, 8), (12, 6)])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_weights_stored_as_one_are_served_on_as_many_gpus_as_others(heads: int, groups: int, ranks: int) -> None:
    """Phi-3 is a Llama but for names."""
    sizes = {"hidden_size": 16 * heads, "num_attention_heads": heads, "num_key_value_heads": groups}
    passes = []
    for family in ("llama-3", "phi3"):
        model = model_of(family, **sizes, intermediate_size=128)
        layout = served(model, coded(model), ranks, expert_parallel=False)
        refused = (layout.refusal(name, spec, CHANNEL, "last") for name, spec in coded(model).items())
        passes.append(layout.uneven is None and not any(refused))
    assert passes[0] == passes[1] == (heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0))


def test_verify_reads_heads_as_the_family_spells_them(exported: Callable[..., Path]) -> None:
    """GPT-J's config.json has `n_head`."""
    assert refusal(exported("gpt-j", n_embd=128, n_head=4), 2) is None


def test_the_part_of_a_gpu_has_whole_heads() -> None:
    """The sizes are those of vLLM's layers, worked out from its classes by hand."""
    model = model_of("phi3", num_attention_heads=8, num_key_value_heads=2, hidden_size=128)
    found, weight = cut(model, "qkv_proj")
    assert found.share(weight.rows, weight.columns, 4) == ([32, 16, 16], 128)  # two of eight heads, one of two
    found, weight = cut(pico.shape("falcon"), "query_key_value")
    assert found.share(weight.rows, weight.columns, 2) == ([32, 16, 16], 64)  # all have the one key-value head
    found, weight = cut(pico.shape("gpt2"), "c_attn")
    assert found.transposed and found.share(weight.columns, weight.rows, 2) == ([32, 32, 32], 64)
    model = pico.shape("minimax-m3")
    assert model.msa
    found, weight = cut(model, "index_q_proj", "for_engines")
    assert found.share(weight.rows, 64, 2) == ([weight.rows // 2], 64)
    assert found.share(weight.rows, 64, 4) == ([weight.rows // model.num_query_groups], 64)
    alone = replace(model, msa=replace(model.msa, n_heads=1))  # as SGLang's MiniMaxM3Attention takes it
    found, weight = cut(alone, "index_q_proj", "for_engines")
    assert found.share(weight.rows, 64, 2) == ([weight.rows], 64)


def test_the_one_group_of_a_mixer_goes_to_every_gpu_and_needs_scales_of_rows() -> None:
    """vLLM's mamba_v2_sharded_weight_loader copies rows of weight_scale; of one number it takes the slice of a rank."""
    model = model_of("granite-hybrid", mamba_n_groups=1)
    found, weight = cut(model, "in_proj")
    assert model.mamba
    gates, state, heads = model.mamba.num_heads * model.mamba.head_dim, model.mamba.state_dim, model.mamba.num_heads
    assert found.share(weight.rows, 64, 2)[0] == [gates // 2, gates // 2, state, state, heads // 2]
    layout = served(model, coded(model), 2, expert_parallel=False)
    name = next(name for name in coded(model) if name.endswith("in_proj.weight"))
    assert layout.refusal(name, weight, CHANNEL, "last") is None
    for block in (TENSOR, SQUARE):
        assert "scale for each row" in str(layout.refusal(name, weight, block, "last"))
    assert layout.uneven is None
    shared = {name: engine.division.check_groups(layout) for name, engine in engines().items()}
    assert [name for name, found in shared.items() if found] == ["sglang"]  # MambaMixer2 asserts it
    assert not engines()["sglang"].division.check_groups(served(model, coded(model), 1, expert_parallel=False))
    of_two = served(model_of("granite-hybrid", mamba_n_groups=2), {}, 4, expert_parallel=False)
    assert of_two.uneven == "2 groups of mixers on 4 GPUs"


@pytest.mark.parametrize("kind", ["mistral3", "qwen3_5"])
def test_the_text_model_of_a_wrapper_is_cut_as_ever_and_its_towers_are_not_known(tmp_path: Path, kind: str) -> None:
    tiny_wrappers.save(tmp_path, kind, dtype=torch.bfloat16)
    reader = open_checkpoint(tmp_path)
    layout = served(reader.model, reader.specs, 2, expert_parallel=False)
    found = {name: cut.along for name, cut in (layout.cuts or {}).items()}
    assert reader.model.wrapper
    assert any(name.endswith("mlp.down_proj.weight") and along == "inputs" for name, along in found.items())
    text = {name for name in reader.specs if reader.model.wrapper.is_text(name)}
    assert found.keys() & reader.specs.keys() <= text and layout.unknown(reader.specs.keys() - text)
    assert not any(name.endswith(("in_proj_a.weight", "in_proj_b.weight")) for name in found)  # stay values


def test_how_a_model_without_a_table_is_divided_is_told_by_names_and_what_is_not_known_is_said() -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    names = [f"model.layers.0.{module}.weight" for module in ("self_attn.q_proj", "mlp.gate_up_proj", "mlp.wonder")]
    assert ServingLayout.of(heads, 1).unknown(names) == []
    assert ServingLayout.of(heads, 2).unknown(names) == names[2:]
    assert ServingLayout.of({}, 2).unknown(names) == [names[0], names[2]]
    assert ServingLayout.of(heads, 3).uneven == "8 attention heads in 2 query groups on 3 GPUs"
    experts = ["model.layers.0.mlp.experts.3.wonder.weight"]
    assert ServingLayout.of(heads, 2).unknown(experts)
    assert not ServingLayout.of(heads, 2, expert_parallel=True).unknown(experts)

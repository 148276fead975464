"""What each engine accepts, on the specs and configs of a small Llama in each spelling."""

import shlex
from dataclasses import replace

import pytest
import torch
from engine_exports import BF16, ENGINES, LAYER, METHODS, exported

from precisionctl.dtypes import DType
from precisionctl.engines.base import Engine
from precisionctl.engines.serving import HeadCounts, ServingLayout, precision_group
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import CHANNEL, CODES, FOUR_BITS, SQUARE

EVERY = pytest.mark.parametrize(
    "engine, scheme",
    [(engine, scheme) for engine in ENGINES.values() for scheme in engine.spells if scheme not in FOUR_BITS],
)


IGNORED = {"fp8": "modules_to_not_convert", "mxfp8": "ignored_layers"}


def scale(engine, scheme, module):
    return f"{LAYER}.{module}.{METHODS[engine.spells[scheme]].weight_scales[0]}"


def ignored(engine, scheme, config):
    return config["quantization_config"][IGNORED.get(engine.spells[scheme], "ignore")]


def one(name):
    return torch.ones(1)


def findings(engine, config, specs, read=one):
    return [str(finding) for finding in engine.check(config, specs, read)]


def test_every_engine_reads_what_it_is_written_in():
    for engine in ENGINES.values():
        for scheme, method in engine.spells.items():
            assert FOUR_BITS.get(scheme, scheme) in engine.formats(method)


@EVERY
def test_an_export_breaks_no_rule_of_its_engine(engine, scheme):
    assert findings(engine, *exported(engine, scheme)) == []


@EVERY
def test_a_bf16_directory_breaks_no_rule(engine, scheme):
    assert findings(engine, {}, BF16) == []


def test_static_compressed_tensors_are_not_for_tensorrt_llm():
    config, specs = exported(ENGINES["vllm"], "static")
    (finding,) = ENGINES["tensorrt-llm"].check(config, specs, one)
    assert finding.rule.fatal
    assert "a scale for each tensor, inputs in FP8 by fixed scales" in finding.what


@EVERY
def test_a_missing_scale_is_one_line_that_names_it(engine, scheme):
    config, specs = exported(engine, scheme)
    name = scale(engine, scheme, "mlp.down_proj")
    del specs[name]
    (line,) = findings(engine, config, specs)
    assert name in line


def test_channel_scales_without_their_second_dimension_stop_vllm():
    config, specs = exported(ENGINES["vllm"], "dynamic")
    name = f"{LAYER}.self_attn.o_proj.weight_scale"
    (line,) = findings(ENGINES["vllm"], config, specs | {name: TensorSpec((256,), DType.float32)})
    assert line.startswith(f"{name}: shape [256], not [256, 1]")


@pytest.mark.parametrize(
    "engine, scheme",
    [
        (engine, scheme)
        for engine in ENGINES.values()
        for scheme in engine.spells
        if scheme in ("static", "dynamic", "block")
    ],
)
def test_scales_as_llm_compressor_rounds_them_still_load(engine, scheme):
    config, specs = exported(engine, scheme)
    name = scale(engine, scheme, "self_attn.o_proj")
    rounded = TensorSpec(specs[name].shape, DType.bfloat16)
    assert findings(engine, config, specs | {name: rounded}) == []
    (line,) = findings(engine, config, specs | {name: TensorSpec(rounded.shape, DType.int32)})
    assert "int32" in line


@EVERY
def test_a_weight_that_no_fp8_gemm_takes_is_named(engine, scheme):
    config, specs = exported(engine, scheme)
    name = f"{LAYER}.mlp.down_proj.weight"
    (line,) = findings(engine, config, specs | {name: TensorSpec((256, 376), CODES)})
    assert line.startswith(f"{name}: shape [256, 376]")


@EVERY
def test_a_linear_left_in_bf16_must_be_ignored_by_name(engine, scheme):
    config, specs = exported(engine, scheme)
    module = f"{LAYER}.mlp.down_proj"
    values = {name: spec for name, spec in specs.items() if not name.startswith(module)}
    values[f"{module}.weight"] = TensorSpec((256, 384), DType.bfloat16)
    (line,) = findings(engine, config, values)
    assert line.startswith(f"{module}.weight") and "not ignored" in line
    ignored(engine, scheme, config).append(module)
    assert findings(engine, config, values) == []
    (line,) = findings(engine, config, specs)
    assert "is ignored" in line


@EVERY
def test_e5m2_weights_are_refused(engine, scheme):
    config, specs = exported(engine, scheme)
    name = f"{LAYER}.self_attn.o_proj.weight"
    (line,) = findings(engine, config, specs | {name: TensorSpec((256, 256), DType.float8_e5m2)})
    assert "float8_e5m2" in line


@EVERY
def test_part_of_a_fused_group_in_bf16_is_refused(engine, scheme):
    config, specs = exported(engine, scheme)
    module = f"{LAYER}.self_attn.k_proj"
    specs = {name: spec for name, spec in specs.items() if not name.startswith(module)}
    specs[f"{module}.weight"] = TensorSpec((128, 256), DType.bfloat16)
    ignored(engine, scheme, config).append(module)
    lines = findings(engine, config, specs)
    assert ["not all that it is fused with" in line for line in lines] == [True] * bool(engine.fused.groups)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("kind", ["weight", "input"])
def test_scales_that_differ_in_a_fused_group_cost_accuracy(engine, kind):
    def read(name):
        return torch.tensor(0.5 if name == f"{LAYER}.mlp.up_proj.{kind}_scale" else 1.0)

    (finding,) = engine.check(*exported(engine, "static"), read)
    assert not finding.rule.fatal
    assert f"{kind} scales [1.0, 0.5]" in finding.what


BY_LINEAR = {  # rows and columns that `quant_method: fp8` was found to load, or not; and on how many GPUs
    "a latent projection as DeepSeek has it": ("kv_a_proj_with_mqa", (576, 512), 1, {"transformers"}),
    "the last of a fused group": ("self_attn.v_proj", (192, 256), 1, {"sglang", "tensorrt-llm", "transformers"}),
    "another of a fused group": ("self_attn.k_proj", (192, 256), 1, set(ENGINES)),
    "alone": ("self_attn.o_proj", (192, 256), 1, {"transformers"}),
    "less than a block, alone": ("self_attn.o_proj", (64, 256), 1, set()),
    "inputs that end in a block": ("self_attn.o_proj", (256, 192), 1, set(ENGINES)),
    "inputs cut in a block": ("mlp.down_proj", (256, 768), 4, set(ENGINES)),
    "inputs cut between blocks": ("mlp.down_proj", (256, 768), 2, set()),
    "outputs cut in a block": ("mlp.gate_proj", (640, 256), 2, set(ENGINES)),
    "keys cut in a block": ("self_attn.k_proj", (256, 256), 4, set(ENGINES)),
    "keys of as many GPUs as heads": ("self_attn.k_proj", (256, 256), 2, set()),
    "heads copied to more GPUs": ("self_attn.k_proj", (256, 256), 4, set(), {"num_key_value_heads": 2}),
    "as many as cannot be cut": ("mlp.gate_proj", (640, 256), 3, set(ENGINES)),
}


@pytest.mark.parametrize("case", BY_LINEAR.values(), ids=BY_LINEAR)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_blocks_are_cut_and_joined_whole(engine, case):
    """vLLM: validate_fp8_block_shape; SGLang the same for the last of a fused group too; transformers divides."""
    module, shape, ranks, refusing, *settings = case
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4} | (settings[0] if settings else {})
    weight = TensorSpec(shape, CODES)
    name = f"model.layers.1.{module}.weight"
    served = ServingLayout.of(heads, ranks)
    finding = engine.shapes.check_shape(name, weight, SQUARE, served, "fp8")
    assert (finding is not None) == (engine.name in refusing), finding
    if finding:
        assert finding.rule == engine.shapes.blocks and finding.rule.fatal


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("linear, shape", [("gate_proj", (768, 2048)), ("down_proj", (2048, 768))])
def test_experts_are_cut_unless_they_are_dealt_out_whole(engine, linear, shape):
    """Qwen3-30B-A3B on 8 GPUs. vLLM: FusedMoEParallelConfig.make; SGLang: check_quantized_moe_compatibility divides
    moe_intermediate_size by tp_size // ep_size."""
    name, weight = f"{LAYER}.mlp.experts.0.{linear}.weight", TensorSpec(shape, CODES)
    qwen3_30b = ServingLayout((HeadCounts(32, 4),), 8)
    cut = engine.shapes.check_shape(name, weight, SQUARE, qwen3_30b, "fp8")
    assert cut and "on each of 8 GPUs" in cut.what and "--expert-parallel" in cut.what
    assert not engine.shapes.check_shape(name, weight, SQUARE, replace(qwen3_30b, expert_parallel=True), "fp8")


def test_what_expert_parallelism_does_not_help_is_refused_without_a_word_of_it():
    vllm, layout = ENGINES["vllm"], ServingLayout((HeadCounts(4, 4),), 2)
    shared = f"{LAYER}.mlp.shared_experts.gate_proj.weight"  # engines cut it as any other linear
    for served in (layout, replace(layout, expert_parallel=True)):
        cut = vllm.shapes.check_shape(shared, TensorSpec((640, 256), CODES), SQUARE, served, "fp8")
        assert cut and cut.what.endswith("are not a multiple of 128")
        whole = vllm.shapes.check_shape(
            f"{LAYER}.mlp.experts.7.gate_proj.weight", TensorSpec((192, 256), CODES), SQUARE, served, "fp8"
        )
        assert whole and "--expert-parallel" not in whole.what
    assert "shape [192, 256]," in whole.what


def test_experts_that_are_one_linear_each_are_a_group_and_are_dealt_out_whole():
    experts = [f"{LAYER}.mlp.experts.{number}.weight" for number in (0, 3)]
    assert set(map(precision_group, experts)) == {f"{LAYER}.mlp.experts"}
    assert ServingLayout((), 2).unknown(experts) == experts
    assert ServingLayout((), 2, expert_parallel=True).unknown(experts) == []


def test_a_joined_linear_is_refused_by_its_parts():
    joined = TensorSpec((384, 256), CODES)
    refused = ENGINES["vllm"].shapes.check_shape(
        f"{LAYER}.mlp.gate_up_proj.weight", joined, SQUARE, ServingLayout(()), "fp8"
    )
    assert refused and refused.what == "shape [384, 256], whose outputs, in parts of 192, 192, are not multiples of 128"


def test_a_part_of_a_gpu_that_no_fp8_gemm_takes_is_refused_in_any_scheme():
    vllm, served = ENGINES["vllm"], ServingLayout((HeadCounts(4, 4),), 2)
    finding = vllm.shapes.check_shape(
        f"{LAYER}.mlp.gate_proj.weight", TensorSpec((48, 64), CODES), CHANNEL, served, "fp8"
    )
    assert finding and finding.what == "shape [24, 64] on each of 2 GPUs, of which FP8 GEMMs need multiples of 16"
    assert not vllm.shapes.check_shape(
        f"{LAYER}.mlp.gate_proj.weight", TensorSpec((64, 64), CODES), CHANNEL, served, "fp8"
    )


def test_weights_stored_as_one_are_told_apart_by_their_heads():
    """Phi-3's `qkv_proj`: 4 heads of 96 for queries, 2 for keys: 384, 192, 192."""
    vllm, served = ENGINES["vllm"], ServingLayout((HeadCounts(4, 2),))
    name = f"{LAYER}.self_attn.qkv_proj.weight"
    assert vllm.shapes.check_shape(name, TensorSpec((768, 256), CODES), SQUARE, served, "fp8")
    assert not vllm.shapes.check_shape(name, TensorSpec((1024, 256), CODES), SQUARE, served, "fp8")


def test_what_deepseek_leaves_unnamed_is_known_to_be_bf16():
    config, specs = exported(ENGINES["vllm"], "block")
    specs["model.layers.3.mlp.gate.weight"] = TensorSpec((8, 256), DType.bfloat16)
    config["quantization_config"]["modules_to_not_convert"] = []
    assert findings(ENGINES["vllm"], config, specs) == []


def test_latent_projections_are_one_linear_to_engines():
    config, specs = exported(ENGINES["vllm"], "block")
    module = f"{LAYER}.self_attn"
    specs[f"{module}.q_a_proj.weight"] = TensorSpec((128, 256), DType.bfloat16)
    config["quantization_config"]["modules_to_not_convert"].append(f"{module}.q_a_proj")
    weight = TensorSpec((576, 256), CODES)
    specs |= {f"{module}.kv_a_proj_with_mqa.weight": weight}
    specs[f"{module}.kv_a_proj_with_mqa.weight_scale_inv"] = TensorSpec((5, 2), DType.float32)
    (line,) = findings(ENGINES["vllm"], config, specs)
    assert "not all that it is fused with" in line


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_command_that_serves_a_directory_can_be_pasted_whatever_its_name(engine: Engine) -> None:
    assert "my models/it's" in shlex.split(engine.serve("my models/it's", 2, fp8_cache=True))


def test_the_command_that_serves_a_directory_says_that_experts_stay_whole() -> None:
    """As in the engines' documentation: vLLM spreads experts over all GPUs, the others are told over how many."""
    words = {name: shlex.split(engine.serve("x", 8, expert_parallel=True)) for name, engine in ENGINES.items()}
    assert words["vllm"][-3:] == ["--tensor-parallel-size", "8", "--enable-expert-parallel"]
    assert words["sglang"][-4:] == ["--tp", "8", "--ep-size", "8"]
    assert words["tensorrt-llm"][-4:] == ["--tp_size", "8", "--ep_size", "8"]
    for name, engine in ENGINES.items():
        assert name == "transformers" or len(shlex.split(engine.serve("x", 8))) < len(words[name])

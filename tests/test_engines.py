"""What each engine accepts, on the specs and configs of a small Llama in each spelling."""

import pytest
import torch

from precisionctl.engines.base import engines
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import CODES, quant_methods

ENGINES = engines()
METHODS = quant_methods()
LAYER = "model.layers.0"
LINEARS = {
    f"{LAYER}.self_attn.q_proj": (32, 32),
    f"{LAYER}.self_attn.k_proj": (16, 32),
    f"{LAYER}.self_attn.v_proj": (16, 32),
    f"{LAYER}.self_attn.o_proj": (32, 32),
    f"{LAYER}.mlp.gate_proj": (48, 32),
    f"{LAYER}.mlp.up_proj": (48, 32),
    f"{LAYER}.mlp.down_proj": (32, 48),
}
BF16 = {
    "model.embed_tokens.weight": TensorSpec((64, 32), torch.bfloat16),
    f"{LAYER}.input_layernorm.weight": TensorSpec((32,), torch.bfloat16),
    "lm_head.weight": TensorSpec((64, 32), torch.bfloat16),
}
EVERY = pytest.mark.parametrize(
    "engine, scheme", [(engine, scheme) for engine in ENGINES.values() for scheme in engine.spells]
)


def exported(engine, scheme):
    """config.json and specs of an export to `engine`, as its own quant method spells it."""
    method = METHODS[engine.spells[scheme]]
    specs = dict(BF16)
    for module, shape in LINEARS.items():
        name, weight = f"{module}.weight", TensorSpec(shape, CODES)
        specs |= {name: weight} | method.spelling.specs(method.scales(name, weight, scheme), weight)
    return {"quantization_config": method.spelling.config(scheme, ["lm_head", "model.embed_tokens"])}, specs


def one(name):
    return torch.ones(1)


def findings(engine, config, specs, read=one):
    return [str(finding) for finding in engine.check(config, specs, read)]


def test_every_engine_reads_what_it_is_written_in():
    for engine in ENGINES.values():
        assert {(method, scheme) for scheme, method in engine.spells.items()} <= engine.reads


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
    assert "compressed-tensors with static" in finding.what


@EVERY
def test_a_missing_scale_is_one_line_that_names_it(engine, scheme):
    config, specs = exported(engine, scheme)
    del specs[f"{LAYER}.mlp.down_proj.weight_scale"]
    (line,) = findings(engine, config, specs)
    assert f"{LAYER}.mlp.down_proj.weight_scale" in line


def test_channel_scales_without_their_second_dimension_stop_vllm():
    config, specs = exported(ENGINES["vllm"], "dynamic")
    name = f"{LAYER}.self_attn.o_proj.weight_scale"
    (line,) = findings(ENGINES["vllm"], config, specs | {name: TensorSpec((32,), torch.float32)})
    assert line.startswith(f"{name}: shape [32], not [32, 1]")


@EVERY
def test_scales_as_llm_compressor_rounds_them_still_load(engine, scheme):
    config, specs = exported(engine, scheme)
    name = f"{LAYER}.self_attn.o_proj.weight_scale"
    rounded = TensorSpec(specs[name].shape, torch.bfloat16)
    assert findings(engine, config, specs | {name: rounded}) == []
    (line,) = findings(engine, config, specs | {name: TensorSpec(rounded.shape, torch.int32)})
    assert "torch.int32" in line


@EVERY
def test_a_weight_that_no_fp8_gemm_takes_is_named(engine, scheme):
    config, specs = exported(engine, scheme)
    name = f"{LAYER}.mlp.down_proj.weight"
    (line,) = findings(engine, config, specs | {name: TensorSpec((32, 40), CODES)})
    assert line.startswith(f"{name}: shape [32, 40]")


@EVERY
def test_a_linear_left_in_bf16_must_be_ignored_by_name(engine, scheme):
    config, specs = exported(engine, scheme)
    module = f"{LAYER}.mlp.down_proj"
    values = {name: spec for name, spec in specs.items() if not name.startswith(module)}
    values[f"{module}.weight"] = TensorSpec((32, 48), torch.bfloat16)
    (line,) = findings(engine, config, values)
    assert line.startswith(f"{module}.weight") and "not ignored" in line
    config["quantization_config"]["ignore"].append(module)
    assert findings(engine, config, values) == []
    (line,) = findings(engine, config, specs)
    assert "is ignored" in line


@EVERY
def test_e5m2_weights_are_refused(engine, scheme):
    config, specs = exported(engine, scheme)
    name = f"{LAYER}.self_attn.o_proj.weight"
    (line,) = findings(engine, config, specs | {name: TensorSpec((32, 32), torch.float8_e5m2)})
    assert "float8_e5m2" in line


@EVERY
def test_part_of_a_fused_group_in_bf16_is_refused(engine, scheme):
    config, specs = exported(engine, scheme)
    module = f"{LAYER}.self_attn.k_proj"
    specs = {name: spec for name, spec in specs.items() if not name.startswith(module)}
    specs[f"{module}.weight"] = TensorSpec((16, 32), torch.bfloat16)
    config["quantization_config"]["ignore"].append(module)
    (line,) = findings(engine, config, specs)
    assert "not all that it is fused with" in line


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("kind", ["weight", "input"])
def test_scales_that_differ_in_a_fused_group_cost_accuracy(engine, kind):
    def read(name):
        return torch.tensor(0.5 if name == f"{LAYER}.mlp.up_proj.{kind}_scale" else 1.0)

    (finding,) = engine.check(*exported(engine, "static"), read)
    assert not finding.rule.fatal
    assert f"{kind} scales [1.0, 0.5]" in finding.what

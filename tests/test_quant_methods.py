"""The spellings of FP8 in a Hugging Face directory, written and read back."""

import json

import pytest
import torch

from precisionctl.errors import DamagedCheckpoint, PrecisionError
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import (
    CHANNEL,
    CODES,
    TENSOR,
    Scales,
    Scheme,
    encoding,
    quant_methods,
    recognise,
    stored_scales,
)

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
METHODS = quant_methods()
BOTH = pytest.mark.parametrize(
    "method", [METHODS["compressed-tensors"], METHODS["modelopt"]], ids=lambda method: method.name
)
WRITTEN: list[tuple[str, Scheme]] = [
    *((name, scheme) for name in ("compressed-tensors", "modelopt") for scheme in ("static", "dynamic", "mxfp8")),
    ("fp8", "block"),
    ("mxfp8", "mxfp8"),
]
EACH = pytest.mark.parametrize(
    "method, scheme",
    [(METHODS[name], scheme) for name, scheme in WRITTEN],
    ids=lambda given: getattr(given, "name", given),
)


def exported(method, scheme):
    """The config.json and the specs of a model of one FP8 linear, as its own spelling gives them."""
    specs = {WEIGHT: TensorSpec((32, 16), CODES), "lm_head.weight": TensorSpec((64, 16), torch.bfloat16)}
    specs |= method.spelling.specs(method.scales(WEIGHT, specs[WEIGHT], scheme), specs[WEIGHT], scheme)
    return {"quantization_config": method.spelling.config(scheme, ["lm_head"])}, specs


def test_methods_are_found_by_the_name_in_config_json():
    assert set(METHODS) == {"compressed-tensors", "modelopt", "fp8", "mxfp8", "mxfp4"}


@EACH
def test_what_a_method_writes_it_reads_back(method, scheme):
    config, specs = exported(method, scheme)
    config = json.loads(json.dumps(config))
    assert recognise(config) is method
    assert method.read(config["quantization_config"]).scheme == scheme
    assert stored_scales(config, specs) == {WEIGHT: method.scales(WEIGHT, specs[WEIGHT], scheme)}


@pytest.mark.parametrize(
    "name, scheme, shapes",
    [
        ("compressed-tensors", "static", {"weight_scale": (1,), "input_scale": (1,)}),
        ("compressed-tensors", "dynamic", {"weight_scale": (32, 1)}),
        ("modelopt", "static", {"weight_scale": (), "input_scale": ()}),
        ("modelopt", "dynamic", {"weight_scale": (32,)}),
        ("fp8", "block", {"weight_scale_inv": (1, 1)}),
    ],
)
def test_scales_have_the_shapes_that_the_engines_loaders_take(name, scheme, shapes):
    module = WEIGHT.removesuffix(".weight")
    method, weight = METHODS[name], TensorSpec((32, 16), CODES)
    assert method.spelling.specs(method.scales(WEIGHT, weight, scheme), weight, scheme) == {
        f"{module}.{scale}": TensorSpec(shape, torch.float32) for scale, shape in shapes.items()
    }


@BOTH
def test_ignored_modules_stand_in_the_config_by_their_full_names(method):
    assert method.spelling.config("static", ["lm_head"])["ignore"] == ["lm_head"]


def test_modelopt_says_the_same_in_both_of_its_files():
    method = METHODS["modelopt"].spelling
    flat = method.config("static", ["lm_head"])
    (text,) = method.files(flat).values()
    nested = json.loads(text)
    assert nested["quantization"]["quant_algo"] == flat["quant_algo"]
    assert nested["quantization"]["exclude_modules"] == flat["ignore"]
    assert nested["producer"] == flat["producer"]


def test_llm_compressors_longer_config_reads_as_the_scheme_that_it_is():
    nulls = dict.fromkeys(["actorder", "block_structure", "group_size", "observer", "scale_dtype", "zp_dtype"])
    config = METHODS["compressed-tensors"].spelling.config("dynamic", ["lm_head"])
    group = config["config_groups"].pop("group_0")
    longer = {key: nulls | value if isinstance(value, dict) else value for key, value in group.items()}
    config["config_groups"]["FP8_DYNAMIC"] = longer | {"output_activations": None, "format": "float-quantized"}
    assert METHODS["compressed-tensors"].read(config | {"version": "0.20.0"}).scheme == "dynamic"


def test_groups_of_no_size_and_eight_bit_integers_are_refused_and_a_block_without_a_size_too():
    config = METHODS["compressed-tensors"].spelling.config("dynamic", [])
    for weights in ({"num_bits": 4, "type": "float", "strategy": "tensor_group"}, {"num_bits": 8, "type": "int"}):
        config["config_groups"]["group_0"]["weights"] = weights
        with pytest.raises(
            PrecisionError, match="(?s)of a kind that can be read.*(no 8-bit floating point|groups of None)"
        ):
            METHODS["compressed-tensors"].read(config)
    config["config_groups"]["group_0"]["weights"] = {"num_bits": 8, "type": "float", "strategy": "block"}
    with pytest.raises(PrecisionError, match="size of a block"):
        METHODS["compressed-tensors"].read(config)
    with pytest.raises(PrecisionError, match="inputs are scaled too"):
        METHODS["modelopt"].read({"quant_algo": "NVFP4_AWQ"})


@pytest.mark.parametrize("groups", [[1], {"group_0": 1}, {"group_0": {"weights": [1]}}, "abc", None])
def test_groups_that_are_none_are_refused(groups):
    with pytest.raises(PrecisionError, match="config groups are not of a kind"):
        quant_methods()["compressed-tensors"].read({"config_groups": groups})


def test_an_unknown_quant_method_is_refused_by_name():
    with pytest.raises(PrecisionError, match="'gptq'.*compressed-tensors, fp8, modelopt"):
        recognise({"quantization_config": {"quant_method": "gptq"}})


def test_a_model_without_quantisation_has_no_scales():
    assert stored_scales({}, {WEIGHT: TensorSpec((32, 16), torch.bfloat16)}) == {}


def test_codes_that_nothing_explains_are_damage():
    with pytest.raises(DamagedCheckpoint, match="no `quantization_config`"):
        stored_scales({}, {WEIGHT: TensorSpec((32, 16), CODES)})


@EACH
def test_a_missing_scale_is_named(method, scheme):
    config, specs = exported(method, scheme)
    for name in method.scales(WEIGHT, specs[WEIGHT], scheme).names:
        rest = {other: spec for other, spec in specs.items() if other != name}
        with pytest.raises(DamagedCheckpoint, match=name):
            stored_scales(config, rest)


@BOTH
def test_a_scale_of_another_size_is_damage(method):
    config, specs = exported(method, "dynamic")
    name = method.scales(WEIGHT, specs[WEIGHT], "dynamic").weight
    with pytest.raises(DamagedCheckpoint, match="shape"):
        stored_scales(config, specs | {name: TensorSpec((31, 1), torch.float32)})


@pytest.mark.parametrize("shape, grid", [((), (1, 1)), ((1,), (1, 1)), ((32,), (32, 1)), ((32, 1), (32, 1))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_every_spelling_of_a_scale_becomes_one_grid_in_the_dtype_that_is_stored(shape, grid, dtype):
    weight, block = TensorSpec((32, 16), CODES), (1, 16) if grid == (32, 1) else (32, 16)
    read = encoding((torch.rand(shape) + 0.5).to(dtype), Scales("scale", None, block), weight)
    assert read.scale_inv.shape == grid and read.scale_inv.dtype == dtype


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_scale_is_damage(value):
    with pytest.raises(DamagedCheckpoint, match="weight_scale holds a scale"):
        encoding(torch.tensor([value]), Scales("weight_scale", None, (32, 16)), TensorSpec((32, 16), CODES))


TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 64]}


def said(method, **config):
    found = METHODS[method].read(config)
    return found.blocks, found.static


def test_groups_and_layers_of_several_kinds_leave_it_to_the_shapes():
    groups = {"a": {"weights": CHANNELS, "input_activations": TOKENS}, "b": {"weights": BLOCKS}}
    assert said("compressed-tensors", config_groups=groups) == ((CHANNEL, (128, 64)), False)
    static = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    groups["b"] = {"weights": {**CHANNELS, "strategy": "tensor"}, "input_activations": static}
    assert said("compressed-tensors", config_groups=groups) == ((CHANNEL, TENSOR), None)
    layers = {"q": {"quant_algo": "FP8"}, "k": {"quant_algo": "MXFP8", "group_size": 32}}
    assert said("modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers) == ((TENSOR, (1, 32)), None)


def test_quant_method_fp8_without_a_block_size_leaves_it_to_the_shapes():
    assert said("fp8", activation_scheme="static") == ((TENSOR, (128, 128)), True)
    assert said("fp8", weight_block_size=None) == ((TENSOR,), False)
    assert said("fp8", weight_block_size=[64, 128]) == (((64, 128),), False)


@pytest.mark.parametrize(
    "method, config",
    [
        ("fp8", {"activation_scheme": "sometimes"}),
        ("fp8", {"weight_block_size": [0, 128]}),
        ("fp8", {"weight_block_size": 128}),
        ("modelopt", {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"q": {"quant_algo": "NVFP4_AWQ"}}}),
        ("modelopt", {"quant_algo": "MIXED_PRECISION"}),
        ("compressed-tensors", {"config_groups": {"a": {"weights": {**CHANNELS, "symmetric": False}}}}),
        ("compressed-tensors", {"config_groups": {"a": {"weights": {**CHANNELS, "strategy": "attn_head"}}}}),
        (
            "compressed-tensors",
            {"config_groups": {"a": {"weights": CHANNELS}}, "sparsity_config": {"format": "sparse-24-bitmask"}},
        ),
        (
            "compressed-tensors",
            {"config_groups": {"a": {"weights": CHANNELS}}, "transform_config": {"config_groups": {"R1": {}}}},
        ),
    ],
)
def test_what_codes_and_scales_alone_do_not_say_is_refused(method, config):
    with pytest.raises(PrecisionError):
        METHODS[method].read(config)


def test_empty_parts_that_tools_write_are_no_reason_to_refuse():
    parts = {"sparsity_config": {"format": "dense"}, "transform_config": {}}
    assert said("compressed-tensors", config_groups={"a": {"weights": CHANNELS}}, **parts) == ((CHANNEL,), False)

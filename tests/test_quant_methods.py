"""The two spellings of FP8 in a Hugging Face directory, written and read back."""

import json

import pytest
import torch

from precisionctl.errors import DamagedCheckpoint, PrecisionError
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import CODES, Scheme, encoding, quant_methods, recognise, stored_scales

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
SCHEMES: tuple[Scheme, ...] = ("static", "dynamic")
METHODS = quant_methods()
BOTH = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
EACH = pytest.mark.parametrize("scheme", SCHEMES)


def exported(method, scheme):
    """The config.json and the specs of a model of one FP8 linear, as its own spelling gives them."""
    specs = {WEIGHT: TensorSpec((32, 16), CODES), "lm_head.weight": TensorSpec((64, 16), torch.bfloat16)}
    specs |= method.specs(WEIGHT, 32, scheme)
    return {"quantization_config": method.config(scheme, ["lm_head"])}, specs


def test_both_methods_are_found_by_the_name_in_config_json():
    assert set(METHODS) == {"compressed-tensors", "modelopt"}


@BOTH
@EACH
def test_what_a_method_writes_it_reads_back(method, scheme):
    config, specs = exported(method, scheme)
    config = json.loads(json.dumps(config))
    assert recognise(config) is method
    assert method.scheme(config["quantization_config"]) == scheme
    assert stored_scales(config, specs) == {WEIGHT: method.scales(WEIGHT, scheme)}


@pytest.mark.parametrize(
    "name, scheme, shapes",
    [
        ("compressed-tensors", "static", {"weight_scale": (1,), "input_scale": (1,)}),
        ("compressed-tensors", "dynamic", {"weight_scale": (32, 1)}),
        ("modelopt", "static", {"weight_scale": (), "input_scale": ()}),
        ("modelopt", "dynamic", {"weight_scale": (32,)}),
    ],
)
def test_scales_have_the_shapes_that_the_engines_loaders_take(name, scheme, shapes):
    module = WEIGHT.removesuffix(".weight")
    assert METHODS[name].specs(WEIGHT, 32, scheme) == {
        f"{module}.{scale}": TensorSpec(shape, torch.float32) for scale, shape in shapes.items()
    }


@BOTH
def test_ignored_modules_stand_in_the_config_by_their_full_names(method):
    assert method.config("static", ["lm_head"])["ignore"] == ["lm_head"]


def test_modelopt_says_the_same_in_both_of_its_files():
    method = METHODS["modelopt"]
    (text,) = method.files("static", ["lm_head"]).values()
    nested, flat = json.loads(text), method.config("static", ["lm_head"])
    assert nested["quantization"]["quant_algo"] == flat["quant_algo"]
    assert nested["quantization"]["exclude_modules"] == flat["ignore"]
    assert nested["producer"] == flat["producer"]


def test_llm_compressors_longer_config_reads_as_the_scheme_that_it_is():
    nulls = dict.fromkeys(["actorder", "block_structure", "group_size", "observer", "scale_dtype", "zp_dtype"])
    config = METHODS["compressed-tensors"].config("dynamic", ["lm_head"])
    group = config["config_groups"].pop("group_0")
    longer = {key: nulls | value if isinstance(value, dict) else value for key, value in group.items()}
    config["config_groups"]["FP8_DYNAMIC"] = longer | {"output_activations": None, "format": "float-quantized"}
    assert METHODS["compressed-tensors"].scheme(config | {"version": "0.20.0"}) == "dynamic"


def test_block_scaled_and_four_bit_groups_are_refused():
    config = METHODS["compressed-tensors"].config("dynamic", [])
    config["config_groups"]["group_0"]["weights"] = {"num_bits": 8, "type": "float", "strategy": "block"}
    with pytest.raises(PrecisionError, match="not FP8 of a kind"):
        METHODS["compressed-tensors"].scheme(config)
    with pytest.raises(PrecisionError, match="NVFP4"):
        METHODS["modelopt"].scheme({"quant_algo": "NVFP4"})


@pytest.mark.parametrize("groups", [[1], {"group_0": 1}, {"group_0": {"weights": [1]}}, "abc", None])
def test_groups_that_are_none_are_refused(groups):
    with pytest.raises(PrecisionError, match="config groups are not FP8"):
        quant_methods()["compressed-tensors"].scheme({"config_groups": groups})


def test_an_unknown_quant_method_is_refused_by_name():
    with pytest.raises(PrecisionError, match="'gptq'.*compressed-tensors, modelopt"):
        recognise({"quantization_config": {"quant_method": "gptq"}})


def test_a_model_without_quantisation_has_no_scales():
    assert stored_scales({}, {WEIGHT: TensorSpec((32, 16), torch.bfloat16)}) == {}


def test_codes_that_nothing_explains_are_damage():
    with pytest.raises(DamagedCheckpoint, match="no `quantization_config`"):
        stored_scales({}, {WEIGHT: TensorSpec((32, 16), CODES)})


@BOTH
@EACH
def test_a_missing_scale_is_named(method, scheme):
    config, specs = exported(method, scheme)
    for name in method.scales(WEIGHT, scheme).names:
        rest = {other: spec for other, spec in specs.items() if other != name}
        with pytest.raises(DamagedCheckpoint, match=name):
            stored_scales(config, rest)


@BOTH
def test_a_scale_of_another_size_is_damage(method):
    config, specs = exported(method, "dynamic")
    name = method.scales(WEIGHT, "dynamic").weight
    with pytest.raises(DamagedCheckpoint, match="shape"):
        stored_scales(config, specs | {name: TensorSpec((31, 1), torch.float32)})


@pytest.mark.parametrize("shape, grid", [((), ()), ((1,), ()), ((32,), (32, 1)), ((32, 1), (32, 1))])
def test_every_spelling_of_a_scale_becomes_one_encoding(shape, grid):
    read = encoding(torch.rand(shape, dtype=torch.bfloat16))
    assert read.scale_inv.shape == grid
    assert read.scale_inv.dtype == torch.float32

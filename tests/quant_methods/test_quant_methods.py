"""The spellings of FP8 in a Hugging Face directory, written and read back."""

import json
from dataclasses import replace

import pytest
import torch
from installed import judge

from precisionctl.codes import elements
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, PrecisionError
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import CHANNEL, CODES, TENSOR, InputFormat, Scheme, block_of, quant_methods
from precisionctl.quant_methods.caches import cache_scales
from precisionctl.quant_methods.coded_weights import coded_weights, encoding, recognise
from precisionctl.quant_methods.compressed_tensors import TensorArguments
from precisionctl.quant_methods.scales import Scales

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


def stored_scales(config, specs):
    """Where the scales of every weight that is codes are, by the weight's name."""
    return {name: coded.scales for name, coded in coded_weights(config, specs).items()}


def exported(method, scheme):
    """The config.json and the specs of a model of one FP8 linear, as its own spelling gives them."""
    specs = {WEIGHT: TensorSpec((32, 16), CODES), "lm_head.weight": TensorSpec((64, 16), DType.bfloat16)}
    form = method.spelling.form(scheme)
    specs |= method.spelling.specs(method.scales(WEIGHT, specs[WEIGHT], scheme), specs[WEIGHT], form)
    return {"quantization_config": method.spelling.config(scheme, ["lm_head"])}, specs


def test_methods_are_found_by_the_name_in_config_json():
    assert set(METHODS) == {"compressed-tensors", "modelopt", "fp8", "mxfp8", "mxfp4", "fbgemm_fp8", "quark"}


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
    assert method.spelling.specs(method.scales(WEIGHT, weight, scheme), weight, method.spelling.form(scheme)) == {
        f"{module}.{scale}": TensorSpec(shape, DType.float32) for scale, shape in shapes.items()
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


def test_modelopt_says_where_groups_are_and_of_how_many_as_modelopt_itself_does():
    spelling = METHODS["modelopt"].spelling
    for scheme, flat, nested in (
        ("static", None, None),
        ("dynamic", None, None),
        ("mxfp8", 32, 32),
        ("nvfp4", None, 16),
    ):
        config = spelling.config(scheme, ["lm_head"])
        (text,) = spelling.files(config).values()
        assert config.get("group_size") == flat
        assert json.loads(text)["quantization"].get("group_size") == nested
        assert json.loads(text)["quantization"]["kv_cache_quant_algo"] is None
        assert ("config_groups" in config) is (scheme in ("static", "nvfp4"))
        for group in config.get("config_groups", {}).values():
            assert group["targets"] == ["Linear"] and group["weights"] == group["input_activations"]
            assert group["weights"]["num_bits"] == (8 if scheme == "static" else 4)
    (text,) = spelling.files(spelling.config("static", []) | spelling.cache.config).values()
    assert json.loads(text)["quantization"]["kv_cache_quant_algo"] == "FP8"


def test_llm_compressors_longer_config_reads_as_the_scheme_that_it_is():
    nulls = dict.fromkeys(["actorder", "block_structure", "group_size", "observer", "scale_dtype", "zp_dtype"])
    config = METHODS["compressed-tensors"].spelling.config("dynamic", ["lm_head"])
    group = config["config_groups"].pop("group_0")
    longer = {key: nulls | value if isinstance(value, dict) else value for key, value in group.items()}
    config["config_groups"]["FP8_DYNAMIC"] = longer | {"output_activations": None, "format": "float-quantized"}
    assert METHODS["compressed-tensors"].read(config | {"version": "0.20.0"}).scheme == "dynamic"


def test_groups_of_no_size_and_eight_bit_integers_are_refused_and_a_block_without_a_size_too():
    config = METHODS["compressed-tensors"].spelling.config("dynamic", [])
    for weights in ({"num_bits": 4, "type": "float", "strategy": "tensor_group"}, {"strategy": "group"}):
        config["config_groups"]["group_0"]["weights"] = weights
        with pytest.raises(
            PrecisionError, match="(?s)of a kind that can be read.*(no 8-bit floating point|groups of None)"
        ):
            METHODS["compressed-tensors"].read(config)
    config["config_groups"]["group_0"]["weights"] = {"num_bits": 8, "type": "float", "strategy": "block"}
    with pytest.raises(PrecisionError, match="size of a block"):
        METHODS["compressed-tensors"].read(config)
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4_AWQ"}}
    for config in ({"quant_algo": "NVFP4_AWQ"}, {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}):
        with pytest.raises(PrecisionError, match="NVFP4_AWQ.* inputs are scaled too"):
            METHODS["modelopt"].read(config)


@pytest.mark.parametrize(
    "said",
    [
        {"num_bits": 8},
        {"type": "float"},
        {"type": "float", "strategy": None, "symmetric": False},
        {"group_size": 64, "num_bits": 4},
        {"group_size": -1, "type": "float"},
        {"dynamic": True, "strategy": "token"},
    ],
)
def test_what_arguments_leave_out_is_as_compressed_tensors_has_it(said):
    judge("compressed_tensors", "its own arguments")
    from compressed_tensors.quantization import QuantizationArgs

    theirs, ours = QuantizationArgs(**said), TensorArguments.of(said)
    assert (ours.bits, ours.kind, ours.strategy) == (theirs.num_bits, theirs.type, theirs.strategy)
    assert (ours.group_size, ours.symmetric, ours.dynamic) == (theirs.group_size, theirs.symmetric, theirs.dynamic)


@pytest.mark.parametrize("beside", [{}, {"format": "mixed-precision"}])
def test_int4_in_bytes_is_refused_by_llm_compressor_s_name_and_read_in_words(beside):
    """What compressed-tensors 0.20 takes for its preset W4AFP8, unless the user names a format
    (compressors/format.py, COMPRESSION_FORMAT_PRIORITY)."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": "int-quantized"}
    read = METHODS["compressed-tensors"].read
    with pytest.raises(PrecisionError, match=r"(?s)a byte for each code \('int-quantized'\).*W4AFP8.*pack-quantized"):
        read({"format": "int-quantized", "config_groups": {"group_0": group}} | beside)
    (form,) = read({"config_groups": {"group_0": group | {"format": "pack-quantized"}}}).formats
    assert form.packing == elements.Packing("INT4", elements.INT4, DType.int32, "_packed")
    assert form.inputs == InputFormat(elements.E4M3) and form.block == (1, 128)


@pytest.mark.parametrize("groups", [[1], {"group_0": 1}, {"group_0": {"weights": [1]}}, "abc", None])
def test_groups_that_are_none_are_refused(groups):
    with pytest.raises(PrecisionError, match="config groups are not of a kind"):
        quant_methods()["compressed-tensors"].read({"config_groups": groups})


def test_an_unknown_quant_method_is_refused_by_name():
    with pytest.raises(PrecisionError, match="'spqr'.*compressed-tensors, fbgemm_fp8, fp8, modelopt"):
        recognise({"quantization_config": {"quant_method": "spqr"}})


def test_a_model_without_quantization_has_no_scales():
    assert stored_scales({}, {WEIGHT: TensorSpec((32, 16), DType.bfloat16)}) == {}


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
        stored_scales(config, specs | {name: TensorSpec((31, 1), DType.float32)})


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


def test_a_scale_of_nothing_but_zeros_may_be_zero():
    read = encoding(torch.tensor([0.0]), Scales("weight_scale", None, (32, 16)), TensorSpec((32, 16), CODES))
    assert float(read.scale_inv) == 0


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
        ("modelopt", {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"q": {"quant_algo": "FP8"}, "k": "FP8"}}),
        ("modelopt", {"quant_algo": None}),
        ("compressed-tensors", {"config_groups": {"a": {"weights": {**CHANNELS, "symmetric": False}}}}),
        ("compressed-tensors", {"config_groups": {"a": {"weights": {**CHANNELS, "strategy": "attn_head"}}}}),
        ("compressed-tensors", {"config_groups": {"a": {"weights": {**CHANNELS, "dynamic": True}}}}),
        (
            "compressed-tensors",
            {"config_groups": {"a": {"weights": {**CHANNELS, "strategy": "token", "group_size": 32}}}},
        ),
        ("compressed-tensors", {"config_groups": {"a": {"weights": CHANNELS}, "b": {"weights": None}}}),
        ("compressed-tensors", {"config_groups": {"a": {"weights": {**CHANNELS, "num_bits": 16}}}}),
        *(
            ("compressed-tensors", {"config_groups": {"a": {"weights": {**CHANNELS, "strategy": "group", **size}}}})
            for size in ({}, {"group_size": 0}, {"group_size": "32"}, {"group_size": True})
        ),
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


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
NOT_FOUR_BITS = [
    *(pytest.param({**INT4, "actorder": order}, "another order", id=order) for order in ("group", "dynamic")),
    *(({**each, "dynamic": True}, "have no scales") for each in (NVFP4, MXFP4, INT4)),
    *(({**each, "symmetric": None}, "have no scales") for each in (NVFP4, INT4)),
    *(({**each, "symmetric": False}, "4-bit 'float' weights") for each in (NVFP4, MXFP4)),
    ({**NVFP4, "group_size": 32}, "groups of 32"),
    ({**NVFP4, "strategy": "group"}, "groups of 16"),
    ({**MXFP4, "strategy": "tensor_group"}, "groups of 32"),
    *(({**INT4, "group_size": size}, "4-bit 'int' weights") for size in (0, -1, None, 2.0, True, 1 << 31)),
    ({**INT4, "strategy": "tensor"}, "of strategy 'tensor'"),
    ({**INT4, "type": "uint"}, "4-bit 'uint' weights"),
]


@pytest.mark.parametrize("weights, why", NOT_FOUR_BITS)
def test_four_bits_of_another_kind_are_refused_with_the_reason(weights, why):
    with pytest.raises(PrecisionError, match=why):
        METHODS["compressed-tensors"].read({"config_groups": {"a": {"weights": weights}}})


def test_inputs_have_fixed_scales_where_they_are_static_and_one_for_a_tensor():
    tensor = {**CHANNELS, "strategy": "tensor"}
    for inputs, static in ((tensor, True), ({**tensor, "dynamic": True}, False), (CHANNELS, False), (None, False)):
        groups = {"a": {"weights": tensor, "input_activations": inputs}}
        assert said("compressed-tensors", config_groups=groups) == ((TENSOR,), static)


PROJECTION = WEIGHT.removesuffix(".weight")
WORDS = TensorSpec((32, 32), DType.uint8)  # of a weight [32, 64]
ONE = TensorSpec((1,), DType.float32)
FOUR_BITS = {
    "nvfp4": (
        NVFP4,
        {
            "weight_packed": WORDS,
            "weight_scale": TensorSpec((32, 4), DType.float8_e4m3fn),
            "weight_global_scale": ONE,
            "input_global_scale": ONE,
        },
    ),
    "mxfp4": (MXFP4, {"weight_packed": WORDS, "weight_scale": TensorSpec((32, 2), DType.uint8)}),
    "int4": (
        INT4,
        {
            "weight_packed": TensorSpec((32, 8), DType.int32),
            "weight_scale": TensorSpec((32, 2), DType.bfloat16),
            "weight_shape": TensorSpec((2,), DType.int64),
        },
    ),
    "int4 zeros": (
        {**INT4, "symmetric": False},
        {
            "weight_packed": TensorSpec((32, 8), DType.int32),
            "weight_scale": TensorSpec((32, 2), DType.bfloat16),
            "weight_shape": TensorSpec((2,), DType.int64),
            "weight_zero_point": TensorSpec((4, 2), DType.int32),
        },
    ),
}


def read_four_bits(kind, **changes):
    """The weights that are codes in a directory of one linear, of whose tensors some are others, or not there."""
    weights, tensors = FOUR_BITS[kind]
    config = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}}
    stored = {f"{PROJECTION}.{name}": spec for name, spec in (tensors | changes).items() if spec is not None}
    return coded_weights({"quantization_config": config}, stored)


def test_groups_are_of_any_size():
    for size in (1, 24, 4096):
        (form,) = (
            METHODS["compressed-tensors"]
            .read({"config_groups": {"a": {"weights": {**INT4, "group_size": size}}}})
            .formats
        )
        assert form.block == (1, size)
    (form,) = (
        METHODS["compressed-tensors"]
        .read({"config_groups": {"a": {"weights": {**INT4, "strategy": "channel"}}}})
        .formats
    )
    assert form.block == (1, None)


def test_four_bits_are_read_with_every_spelling_of_what_is_beside_them():
    for kind, changes in (
        ("nvfp4", {}),
        ("nvfp4", {"weight_global_scale": TensorSpec((), DType.float32)}),
        ("mxfp4", {}),
        ("mxfp4", {"weight_scale": TensorSpec((32, 2), DType.float8_e8m0fnu)}),
        *(("int4", {"weight_scale": TensorSpec((32, 2), dtype)}) for dtype in (DType.float16, DType.float32)),
        ("int4", {"weight_shape": TensorSpec((2,), DType.int32)}),
        ("int4 zeros", {}),
    ):
        (found,) = read_four_bits(kind, **changes).items()
        assert (found[0], found[1].codes, found[1].spec.shape) == (WEIGHT, f"{PROJECTION}.weight_packed", (32, 64))
        assert (found[1].scales.input is not None) is (kind == "nvfp4")
    assert read_four_bits("nvfp4", input_global_scale=None)[WEIGHT].scales.input is None


BROKEN = {
    "words of another dtype": ("mxfp4", {"weight_packed": TensorSpec((32, 32), DType.int32)}, "weight_packed is int32"),
    "values beside codes": ("mxfp4", {"weight": TensorSpec((32, 64), DType.bfloat16)}, "as values, and as codes"),
    "no scales": ("mxfp4", {"weight_scale": None}, "no .*weight_scale for its codes"),
    "scales of another grid": ("mxfp4", {"weight_scale": TensorSpec((32, 1), DType.uint8)}, "has shape .32, 1."),
    "exponents in FP32": ("mxfp4", {"weight_scale": TensorSpec((32, 2), DType.float32)}, r"\(float32\) for a weight"),
    "half a group": ("mxfp4", {"weight_packed": TensorSpec((32, 24), DType.uint8)}, "for a weight of .32, 48."),
    "NVFP4 with scales in BF16": ("nvfp4", {"weight_scale": TensorSpec((32, 4), DType.bfloat16)}, "bfloat16"),
    "no global scale": ("nvfp4", {"weight_global_scale": None}, "no .*weight_global_scale for its codes"),
    "two global scales": ("nvfp4", {"weight_global_scale": TensorSpec((2,), DType.float32)}, r"not \[\] or \[1\]"),
    "a global scale in BF16": ("nvfp4", {"weight_global_scale": TensorSpec((1,), DType.bfloat16)}, "not float32"),
    "two scales of inputs": ("nvfp4", {"input_global_scale": TensorSpec((2,), DType.float32)}, "not one scale"),
    "a scale of inputs in BF16": ("nvfp4", {"input_global_scale": TensorSpec((1,), DType.bfloat16)}, "not float32"),
    "no shape": ("int4", {"weight_shape": None}, "no .*weight_shape for its codes"),
    "a shape of three": ("int4", {"weight_shape": TensorSpec((3,), DType.int64)}, r"has shape \[3\]"),
    "a shape in FP32": ("int4", {"weight_shape": TensorSpec((2,), DType.float32)}, "not int64 or int32"),
    "zero points nobody told of": (
        "int4",
        {"weight_zero_point": TensorSpec((4, 2), DType.int32)},
        "weight_zero_point is beside codes that have none",
    ),
    **{
        f"{name} nobody told of": ("mxfp4", {name: spec}, f"{name} is beside codes that have none")
        for name, spec in {
            "pre_quant_scale": ONE,
            "weight_global_scale": ONE,
            "weight_scale_2": ONE,
            "weight_zero_point": TensorSpec((4, 2), DType.int32),
            "weight_shape": TensorSpec((2,), DType.int64),
        }.items()
    },
    "no zero points": ("int4 zeros", {"weight_zero_point": None}, "no .*weight_zero_point for its codes"),
    "zero points for each row": (
        "int4 zeros",
        {"weight_zero_point": TensorSpec((32, 2), DType.int32)},
        r"not \[4, 2\]",
    ),
    "zero points in bytes": ("int4 zeros", {"weight_zero_point": TensorSpec((4, 2), DType.uint8)}, "not int32"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_four_bits_whose_tensors_cannot_belong_together_are_damage(case):
    kind, changes, message = BROKEN[case]
    with pytest.raises(DamagedCheckpoint, match=message):
        read_four_bits(kind, **changes)


def test_groups_of_inputs_in_another_order_are_refused_by_their_tensor_too():
    with pytest.raises(PrecisionError, match="weight_g_idx puts inputs into groups in another order"):
        read_four_bits("int4", weight_g_idx=TensorSpec((64,), DType.int32))


@EACH
def test_a_fixed_scale_of_inputs_is_one_number(method, scheme):
    config, specs = exported(method, scheme)
    given = method.scales(WEIGHT, specs[WEIGHT], scheme).input
    assert (given is not None) is (scheme == "static")
    if given:
        for shape in ((2,), (2, 2)):
            with pytest.raises(DamagedCheckpoint, match="not one scale"):
                stored_scales(config, specs | {given: TensorSpec(shape, DType.float32)})
        for shape in ((), (1,), (1, 1)):
            found = stored_scales(config, specs | {given: TensorSpec(shape, DType.bfloat16)})
            assert found[WEIGHT].input == given


def test_experts_of_four_bits_have_no_fixed_inputs_beside_fp8_that_has():
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]}
    experts, fp8 = "model.layers.0.mlp.experts.0.w1", "model.layers.0.self_attn.o_proj"
    found = stored_scales(
        {"quantization_config": config},
        {
            f"{experts}.weight": TensorSpec((32, 32), DType.int8),
            f"{experts}.weight_scale_inv": TensorSpec((32, 2), DType.float8_e8m0fnu),
            f"{fp8}.weight": TensorSpec((128, 128), CODES),
            f"{fp8}.weight_scale_inv": TensorSpec((1, 1), DType.float32),
            f"{fp8}.activation_scale": ONE,
        },
    )
    assert (found[f"{experts}.weight"].block, found[f"{experts}.weight"].input) == ((1, 32), None)
    assert found[f"{fp8}.weight"].input == f"{fp8}.activation_scale"


def test_what_names_no_method_is_told_from_what_names_none():
    for nothing in ({}, {"quantization_config": None}, {"quantization_config": {}}):
        assert recognise(nothing) is None
    with pytest.raises(DamagedCheckpoint, match="not an object"):
        recognise({"quantization_config": ["fp8"]})
    for name in (None, ["fp8"], "FP8", "spqr"):
        with pytest.raises(PrecisionError, match="not one that can be read"):
            recognise({"quantization_config": {"quant_method": name, "bits": 4}})


@pytest.mark.parametrize(
    "value", [128, None, [128], [128, 128, 128], [128, 0], [0, 1], [1, 1 << 31], [1, True], [1.0, 1]]
)
def test_a_block_is_a_pair_of_sizes(value):
    with pytest.raises(PrecisionError, match="as the size of a block"):
        block_of(value)
    assert block_of([1, (1 << 31) - 1]) == (1, (1 << 31) - 1) and block_of((64, 128)) == (64, 128)


def test_scales_of_caches_and_of_attention_are_no_weights():
    kinds = ("k", "v", "q", "kv", "prob", "prob_output")
    names = [f"model.layers.0.self_attn.{kind}_scale" for kind in kinds]
    names += [f"model.layers.0.self_attn.{kind}_proj.output_scale" for kind in "kvq"]
    stored = dict.fromkeys([*names, "model.layers.0.self_attn.o_proj.weight_scale"], ONE)
    assert list(cache_scales({"quant_method": "fp8"}, stored)) == names
    assert cache_scales(None, stored) == {}


@pytest.mark.parametrize("below", ["", "attn.", "k_proj.", "qkv_proj.", "mla_attn.mla_attn."])
def test_scales_of_a_cache_are_of_an_attention_that_is_there(below):
    there = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 10)]
    there += ["model.layers.1.linear_attn.out_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    scales = [f"model.layers.{layer}.self_attn.{below}k_scale" for layer in (0, 1, 2, 10, 11)]
    found = cache_scales({"quant_method": "fp8"}, dict.fromkeys(there + scales, ONE))
    assert list(found) == [scales[0], scales[3]]


@pytest.mark.parametrize(
    ("module", "linear", "is_attention"),
    [
        ("model.layers.0.mlp", "down_proj", False),
        ("model.layers.0", "mlp.down_proj", False),
        ("backbone.layers.0.mixer", "down_proj", False),
        ("backbone.layers.0.mixer", "k_proj", True),
        ("transformer.h.0.attn", "c_attn", True),
        ("gpt_neox.layers.0.attention", "dense", True),
        ("layers.0.attn", "wkv", True),
        ("encoder.block.0.layer.0.SelfAttention", "k", True),
    ],
)
def test_a_scale_of_keys_in_a_module_that_is_no_attention_is_a_tensor_like_any_other(module, linear, is_attention):
    scale = f"{module}.k_scale"
    found = cache_scales({"a": 1}, dict.fromkeys((f"{module}.{linear}.weight", scale), ONE))
    assert list(found) == [scale] * is_attention


_FP4 = elements.Packing("MXFP4", elements.E2M1, DType.uint8)


@pytest.mark.parametrize(
    ("scale", "codes"),
    [
        (TensorSpec((), DType.float32), TensorSpec((4, 32), DType.float8_e4m3fn)),
        (TensorSpec((2,), DType.float32), TensorSpec((4, 32), DType.float8_e4m3fn)),
        (
            TensorSpec((), DType.float32),
            TensorSpec((4, 32), elements.E2M1.dtype, packing=_FP4),
        ),
    ],
    ids=["one", "several", "four bits"],
)
def test_a_table_of_n_grams_is_codes_of_fp8_with_one_scale(
    request: pytest.FixtureRequest, scale: TensorSpec, codes: TensorSpec
) -> None:
    table = "model.layers.0.ngram_embedding"
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    specs = {f"{table}.weight_scale": scale, f"{table}.shard_0.weight": codes}
    if request.node.callspec.id != "one":
        with pytest.raises(DamagedCheckpoint, match="not one scale of FP8 codes"):
            coded_weights(config, specs)
    else:
        assert coded_weights(config, specs)[f"{table}.shard_0.weight"].scales.block == (4, 32)


def test_a_fixed_scale_of_inputs_is_the_scale_inv_of_fp8_unless_it_is_global_or_of_integers() -> None:
    """NVFP4's is for codes of four bits with scales of groups (`Scales.input_amax`), INT8's for numbers up to 127."""
    of_all = Scales("scale", "input_scale", (4, 32))
    assert of_all.inputs_in_fp8
    assert not replace(of_all, global_scale="weight_scale_2").inputs_in_fp8
    assert not replace(of_all, input_largest=127.5).inputs_in_fp8

"""How codes of four bits decode and come back: all of them under every scale, and what the real tools say of theirs.

The golden files are what llm-compressor and ModelOpt have stored of one weight (golden/four_bit.py).
"""

import json
from functools import cache

import numpy as np
import pytest
import repository
import torch
from four_bit_directories import E2M1, INT4, SPELLINGS, compressed
from fp8_directories import value_of
from safetensors import safe_open
from torch import Tensor

from precisionctl.codes import elements
from precisionctl.codes.encoding import Encoding, GlobalScale
from precisionctl.dtypes import DType
from precisionctl.errors import PrecisionctlError
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.coded_weights import coded_weights, complete_encoding

GOLDEN = repository.GOLDEN / "four_bit"
SCHEMES = ["MXFP4", "NVFP4", "NVFP4A16", "W4A16", "W4A16_ASYM", "W4A16_G32", "W4A16_G32_ASYM"]
NAMES = [*(f"ct-{name}" for name in SCHEMES), "modelopt-nvfp4", "modelopt-mxfp4"]
MODULE = "model.layers.0.self_attn.k_proj."


@cache
def golden(name: str) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The `quantization_config` of a scheme, and its tensors; `decoded` is what the tool makes of them."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        return json.loads(file.metadata()["quantization_config"]), {key: file.get_tensor(key) for key in file.keys()}


def read(config: dict[str, object], tensors: dict[str, Tensor]) -> tuple[Tensor, Encoding]:
    """A weight's codes as bytes, and its encoding."""
    named = {f"{MODULE}{end}": each for end, each in tensors.items() if end != "decoded"}
    specs = {name: TensorSpec(tuple(each.shape), DType.of(each.dtype)) for name, each in named.items()}
    weight = coded_weights({"quantization_config": config}, specs)[f"{MODULE}weight"]
    packed = named[weight.codes].contiguous().view(torch.uint8)
    return packed, complete_encoding(named.__getitem__, weight.scales, weight.spec)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_real_tools_store_decodes_to_what_they_say_and_comes_back(name: str) -> None:
    """To the bit, but for zeros of ModelOpt's NVFP4: it takes the code of -0 for +0, and that code would be lost."""
    config, tensors = golden(name)
    codes, encoding = read(config, tensors)
    values = encoding.decode_rows(codes, 0).bfloat16()
    if name == "modelopt-nvfp4":
        assert torch.equal(values, tensors["decoded"])
    else:
        assert torch.equal(values.view(torch.int16), tensors["decoded"].view(torch.int16))
    assert torch.equal(encoding.encode_rows(values, 0), codes)


def decoded_slowly(numbers: list[float], scales: list[np.float32]) -> np.ndarray:
    """By scale and byte, its two values: FP32 products of sixteen numbers."""
    pairs = np.array([[numbers[byte & 15], numbers[byte >> 4]] for byte in range(256)], np.float32)
    return np.stack([pairs.reshape(-1) * scale for scale in scales])


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


BYTES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("global_scale", [None, 2096.0, 1 / 2085.2, 3.0e-5])
@pytest.mark.parametrize("divides", [True, False])
def test_every_byte_of_e2m1_decodes_under_every_e4m3_scale_and_comes_back(
    global_scale: float | None, divides: bool
) -> None:
    """With a global scale of either direction, and with none; of scales that are positive numbers."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    above = None if global_scale is None else GlobalScale(torch.tensor(global_scale), divides)
    encoding = Encoding(elements.E2M1, scales.view(-1, 1), (1, 512), above)
    whole = np.float32(1.0 if global_scale is None else global_scale)
    worth = [np.float32(value_of(byte)) for byte in range(1, 127)]
    expected = decoded_slowly(E2M1, [one / whole if divides else one * whole for one in worth])
    codes = BYTES.expand(126, -1).contiguous()
    values = encoding.decode_rows(codes, 0)
    assert torch.equal(bits(values), bits(torch.from_numpy(expected)))
    assert torch.equal(encoding.encode_rows(values.bfloat16(), 0), codes)


def test_every_byte_of_e2m1_decodes_under_every_power_of_two_and_comes_back() -> None:
    """Under all of E8M0 but NaN and the largest two, whose values FP32 does not all hold; BF16 has no room for half of
    the smallest ones."""
    scales = torch.arange(253, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    encoding = Encoding(elements.E2M1, scales.view(-1, 1), (1, 512))
    expected = decoded_slowly(E2M1, [np.exp2(np.float32(byte - 127)) for byte in range(253)])
    codes = BYTES.expand(253, -1).contiguous()
    values = encoding.decode_rows(codes, 0)
    assert torch.equal(bits(values), bits(torch.from_numpy(expected)))
    assert torch.equal(encoding.encode_rows(values, 0), codes)
    assert torch.equal(encoding.encode_rows(values.bfloat16(), 0), codes)


@pytest.mark.parametrize("zero", [None, *range(16)])
def test_every_byte_of_int4_decodes_under_every_zero_point_and_comes_back(zero: int | None) -> None:
    """Under BF16 scales of every mantissa; of a symmetric weight the zero point is 8."""
    scales = torch.arange(0x3C00, 0x3C80, dtype=torch.int16).view(torch.bfloat16).view(-1, 1)
    zeros = None if zero is None else torch.full((len(scales), 1), zero - 8.0)
    encoding = Encoding(elements.INT4, scales, (1, 512), zeros=zeros)
    numbers = [number - (0 if zero is None else zero - 8) for number in INT4]
    expected = decoded_slowly(numbers, [np.float32(float(scale)) for scale in scales.view(-1)])
    codes = BYTES.expand(len(scales), -1).contiguous()
    values = encoding.decode_rows(codes, 0)
    assert torch.equal(values, torch.from_numpy(expected))
    assert torch.equal(encoding.encode_rows(values.bfloat16(), 0), codes)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("ct-NVFP4", {"weight_scale": None}, "no .*weight_scale for its codes"),
        ("ct-NVFP4", {"weight_scale": torch.ones(16, 8)}, r"weight_scale has shape \[16, 8\] \(float32\).*NVFP4"),
        ("ct-NVFP4", {"weight_scale": torch.ones(16, 4).to(torch.float8_e4m3fn)}, r"weight_scale has shape \[16, 4\]"),
        ("ct-NVFP4", {"weight_scale": (-torch.ones(16, 8)).to(torch.float8_e4m3fn)}, "negative, infinite or NaN"),
        ("ct-NVFP4", {"weight_global_scale": None}, "no .*weight_global_scale for its codes"),
        ("ct-NVFP4", {"weight_global_scale": torch.ones(8)}, r"weight_global_scale has shape \[8\], not \[\] or \[1\]"),
        ("ct-NVFP4", {"weight_global_scale": torch.zeros(1)}, "weight_global_scale holds 0, which is no global scale"),
        ("ct-NVFP4", {"weight_global_scale": torch.full((1,), torch.nan)}, "weight_global_scale holds nan"),
        ("ct-NVFP4", {"weight_global_scale": torch.full((1,), -1.0)}, "weight_global_scale holds -1"),
        ("ct-NVFP4", {"weight_global_scale": torch.full((1,), 1e-38)}, "no global scale of these scales"),
        ("ct-NVFP4", {"weight_packed": torch.zeros(16, 0, dtype=torch.uint8)}, "weight_scale has shape"),
        ("ct-NVFP4", {"weight_packed": torch.zeros(16, 64, dtype=torch.int32)}, "weight_packed is int32.*NVFP4"),
        ("ct-MXFP4", {"weight_scale": torch.full((16, 4), 255, dtype=torch.uint8)}, "negative, infinite or NaN"),
        (
            "ct-W4A16",
            {"weight_shape": torch.tensor([16, 127])},
            r"holds \[16, 127\] for codes of \[16, 128\]",
        ),
        ("ct-W4A16", {"weight_shape": torch.tensor([16, 128, 1])}, r"weight_shape has shape \[3\], not \[2\]"),
        ("ct-W4A16", {"weight_shape": None}, "no .*weight_shape for its codes"),
        ("ct-W4A16_ASYM", {"weight_zero_point": None}, "no .*weight_zero_point for its codes"),
        ("ct-W4A16_ASYM", {"weight_zero_point": torch.zeros(8, 1).int()}, r"weight_zero_point has shape \[8, 1\]"),
        ("ct-W4A16", {"weight_g_idx": torch.zeros(128).int()}, "weight_g_idx"),
        ("ct-W4A16_ASYM", {"weight_zero_point": torch.zeros(2, 1)}, "weight_zero_point is float32, not int32"),
        ("ct-W4A16_ASYM", {"weight_zero_point": torch.zeros(2, 1).long()}, "weight_zero_point is int64, not int32"),
        ("ct-W4A16_ASYM", {"weight_zero_point": torch.zeros(2, 1).short()}, "weight_zero_point is int16"),
        ("ct-W4A16_ASYM", {"weight_zero_point": torch.zeros(2, 1).bool()}, "weight_zero_point is bool"),
        ("ct-NVFP4", {"weight_global_scale": torch.ones(1).double()}, "weight_global_scale is float64, not float32"),
        ("ct-NVFP4", {"weight_global_scale": torch.ones(1).int()}, "weight_global_scale is int32"),
        ("ct-NVFP4", {"input_global_scale": torch.ones(1).double()}, "input_global_scale is float64"),
        ("ct-W4A16", {"weight_shape": torch.tensor([16.0, 128.0])}, "weight_shape is float32, not int64 or int32"),
        (
            "ct-W4A16",
            {"weight_zero_point": torch.zeros(2, 1).int()},
            "weight_zero_point is beside codes that have none",
        ),
        ("ct-W4A16", {"weight_global_scale": torch.ones(1)}, "weight_global_scale is beside codes that have none"),
        ("modelopt-nvfp4", {"pre_quant_scale": torch.ones(128)}, "pre_quant_scale is beside codes that have none"),
        ("ct-W4A16", {"weight": torch.zeros(16, 128)}, "weight is there as values, and as codes: .*weight_packed"),
        ("modelopt-nvfp4", {"weight_scale_2": None}, "no .*weight_scale_2 for its codes"),
        ("modelopt-nvfp4", {"weight_scale_2": torch.tensor(torch.inf)}, "weight_scale_2 holds inf"),
        (
            "modelopt-mxfp4",
            {"weight_scale": torch.zeros(16, 8, dtype=torch.uint8)},
            r"weight_scale has shape \[16, 8\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_one_error(name: str, damage: dict[str, Tensor | None], message: str) -> None:
    config, tensors = golden(name)
    tensors = {end: each for end, each in (tensors | damage).items() if each is not None}
    with pytest.raises(PrecisionctlError, match=message):
        read(config, tensors)


@pytest.mark.parametrize(
    ("spelling", "size", "columns"),
    [("ct-nvfp4", 16, 24), ("ct-mxfp4", 32, 48), ("ct-int4-32", 48, 64), ("ct-int4-32", 40, 96)],
)
def test_groups_that_are_cut_off_are_refused(spelling: str, size: int, columns: int) -> None:
    """No tool writes them, and codes would be taken for others: of 64 columns in groups of 48, for two of 32."""
    spelled = SPELLINGS[spelling]
    config = json.loads(json.dumps(spelled.config))
    config["config_groups"]["group_0"]["weights"]["group_size"] = size
    tensors = {
        "weight_packed": torch.zeros(16, columns // (2 * spelled.words.itemsize), dtype=spelled.words),
        "weight_scale": torch.ones(16, -(-columns // size)).to(spelled.scales),
        **({"weight_global_scale": torch.ones(1)} if spelling == "ct-nvfp4" else {}),
        **({"weight_shape": torch.tensor([16, columns])} if spelling == "ct-int4-32" else {}),
    }
    with pytest.raises(PrecisionctlError, match=r"weight_scale has shape .* one per whole block of"):
        read(config, tensors)


@pytest.mark.parametrize("order", [(True, False), (False, True)])
@pytest.mark.parametrize("name", ["ct-W4A16_G32", "ct-W4A16_G32_ASYM"])
def test_of_formats_of_one_size_a_weight_has_that_of_the_tensors_beside_it(name: str, order: tuple[bool, bool]) -> None:
    """Symmetric and asymmetric groups in one config, whichever is named first."""
    kinds = [{"type": "int", "strategy": "group", "group_size": 32, "symmetric": symmetric} for symmetric in order]
    config = compressed(kinds[0], "pack-quantized")
    config["config_groups"] |= {"group_1": compressed(kinds[1], "pack-quantized")["config_groups"]["group_0"]}
    codes, encoding = read(config, golden(name)[1])
    assert torch.equal(encoding.decode_rows(codes, 0).bfloat16(), golden(name)[1]["decoded"])

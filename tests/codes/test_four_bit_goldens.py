"""Four-bit weights as llm-compressor and ModelOpt have stored them (tests/golden/four_bit.py): decoded to what those
tools say, bit for bit, and encoded under their scales to their codes, but for what is named here.

The weight has a row of zeros, one of zeros of both signs, one that is all but zero, and two full of ties.
"""

import pytest
import repository
import torch
from four_bit_weights import FourBitWeight
from safetensors.torch import load_file
from torch import Tensor

from precisionctl.codes import group_scales

FOLDER = repository.GOLDEN / "four_bit"
SCHEMES = sorted(file.stem for file in FOLDER.glob("*-*.safetensors"))
WEIGHT = load_file(FOLDER / "source.safetensors")["weight"]


def golden_of(scheme: str) -> FourBitWeight:
    return FourBitWeight(load_file(FOLDER / f"{scheme}.safetensors"))


def amax(columns: int) -> Tensor:
    return WEIGHT.float().view(len(WEIGHT), -1, columns).abs().amax(-1)


def test_there_is_a_golden_file_of_each_scheme() -> None:
    ours = {"ct-NVFP4", "ct-NVFP4A16", "ct-MXFP4", "modelopt-nvfp4", "modelopt-mxfp4"}
    assert {*SCHEMES} == ours | {f"ct-W4A16{group}{zeros}" for group in ("", "_G32") for zeros in ("", "_ASYM")}
    assert bool((WEIGHT.signbit() & (WEIGHT == 0)).any()) and bool((WEIGHT[1, :32] == 0).all())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_decode_to_what_the_tool_itself_says_bit_for_bit(scheme: str) -> None:
    """But ModelOpt's NVFP4 reads code 8 as +0."""
    golden = golden_of(scheme)
    found, expected = golden.decoded(), golden.stored["decoded"]
    differ = found.view(torch.int16) != expected.view(torch.int16)
    if scheme == "modelopt-nvfp4":
        assert torch.equal(differ, golden.codes == 8) and bool(differ.any())
        assert bool((found[differ] == 0).all()) and bool((expected[differ] == 0).all())
    else:
        assert not bool(differ.any())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_come_back_from_bf16(scheme: str) -> None:
    golden = golden_of(scheme)
    assert torch.equal(golden.encoded(golden.decoded()), golden.codes)


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if "W4A16" not in scheme])
def test_the_weight_has_the_tools_codes_of_e2m1_under_its_scales(scheme: str) -> None:
    """But of zeros, whose sign ours keep: others give 0 always, ModelOpt's MXFP4 8; the latter also rounds ties toward
    zero."""
    golden = golden_of(scheme)
    found, theirs = golden.encoded(WEIGHT), golden.codes
    quotients = (WEIGHT.float() / golden.by_element(golden.multipliers)).abs()
    ties = torch.isin(quotients, torch.tensor([0.75, 1.75, 3.5]))  # that go up to an even code
    zeros = WEIGHT == 0
    assert torch.equal(found[zeros] == 8, WEIGHT[zeros].signbit())
    assert set(theirs[zeros].tolist()) == {8 if scheme == "modelopt-mxfp4" else 0}
    differ = (found != theirs) & ~zeros
    if scheme == "modelopt-mxfp4":
        assert torch.equal(differ, ties) and bool(ties.any())
        assert torch.equal(theirs[ties], found[ties] - 1)
    else:
        assert not bool(differ.any())


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if "W4A16" in scheme])
def test_the_weight_has_the_tools_codes_of_int4_but_where_it_divides_in_bf16(scheme: str) -> None:
    """llm-compressor divides in the weight's dtype, and adds the zero point in it: 1 code in 100 is a neighbour."""
    golden = golden_of(scheme)
    quotients = WEIGHT / golden.by_element(golden.scale)
    if golden.zeros is not None:
        quotients = quotients + golden.by_element(golden.zeros).bfloat16()
    found, theirs = golden.encoded(WEIGHT).int(), golden.codes.int()
    assert torch.equal(quotients.round().clamp(-8, 7).int() + 8, theirs)
    differ = found != theirs
    assert bool(((found - theirs)[differ].abs() == 1).all()) and float(differ.float().mean()) < 0.02
    exact = WEIGHT.float() / golden.by_element(golden.multipliers)
    exact = exact if golden.zeros is None else exact + golden.by_element(golden.zeros)
    assert torch.equal(exact[differ] == quotients[differ].float(), torch.zeros_like(differ[differ]))


def test_scales_of_nvfp4_are_those_of_modelopt_to_the_bit() -> None:
    golden = golden_of("modelopt-nvfp4")
    assert golden.whole is not None
    found = group_scales.nvfp4_scales(amax(16), golden.whole, divisor=False)
    assert torch.equal(found.view(torch.uint8), golden.scale.view(torch.uint8))
    assert {1.0, 2.0**-9} <= set(golden.scale.float().flatten().tolist())  # of zeros, of the tiny


def test_scales_of_nvfp4_are_next_to_those_of_llm_compressor_which_computes_in_bf16() -> None:
    golden = golden_of("ct-NVFP4")
    assert golden.whole is not None
    found = group_scales.nvfp4_scales(amax(16), golden.whole, divisor=True)
    steps = (found.view(torch.uint8).int() - golden.scale.view(torch.uint8).int()).abs()
    floor = golden.scale.float() == 0.125  # stored where a scale would be 0; ours are 1 or 2^-9
    assert int(steps[~floor].max()) <= 1 and int(floor.sum()) == int(
        (found.float() == 1).sum() + (found.float() == 2**-9).sum()
    )
    in_bf16 = ((amax(16).bfloat16() / 6).float() * golden.whole).to(torch.float8_e4m3fn)
    assert torch.equal(golden.scale.float()[~floor], in_bf16.float()[~floor])


def test_scales_of_mxfp4_are_those_of_llm_compressor_and_at_most_those_of_modelopt() -> None:
    found = group_scales.mxfp4_scales(amax(32)).view(torch.uint8)
    assert torch.equal(found, golden_of("ct-MXFP4").scale)
    above = golden_of("modelopt-mxfp4").scale.int() - found.int()
    assert set(above.flatten().tolist()) == {0, 1}


@pytest.mark.parametrize(("scheme", "group"), [("ct-W4A16", 128), ("ct-W4A16_G32", 32)])
def test_scales_of_int4_are_those_of_llm_compressor_but_of_zeros(scheme: str, group: int) -> None:
    found, theirs, zeros = group_scales.int4_scales(amax(group)), golden_of(scheme).scale, amax(group) == 0
    assert torch.equal(found[~zeros], theirs[~zeros])
    assert set(found[zeros].tolist()) <= {1.0} and set(theirs[zeros].tolist()) <= {2.0**-7}

"""FP-Quant: E2M1 codes of rotated weights, decoded and rotated back to BF16 by every command."""

from pathlib import Path

import coded_directories
import pytest
import repository
import torch
from coded_directories import SIZES, of_module
from hostile_codes import UP, Hostile, assert_refused, put, says, stray
from read_as_values import assert_any_cut, assert_golden, assert_read_as_values, golden_cases
from torch import Tensor

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint, PrecisionError, UnmappedTensor

GOLDEN = repository.GOLDEN / "fp_quant_codes.safetensors"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
GROUPS = {"mxfp4": 32, "nvfp4": 16}


def coded(name: str, weight: Tensor, form: str, size: int, generator: torch.Generator) -> tuple[dict, Tensor]:
    """Random codes, scales, global scale and matrix of a weight, and its values."""
    (out, inputs), group = weight.shape, GROUPS[form]
    codes = torch.randint(16, (out, inputs), generator=generator)
    exponents = torch.randint(-9, -2, (out, inputs // group), generator=generator)
    scales = (torch.rand(exponents.shape, generator=generator) * 400).to(torch.float8_e4m3fn)
    held = torch.pow(2.0, exponents) if form == "mxfp4" else scales.float()
    matrix = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q.bfloat16()
    divisor = torch.rand(1, generator=generator) + 2 if form == "mxfp4" else torch.tensor([2000.0])
    numbers = torch.tensor(E2M1).double()[codes] * held.double().repeat_interleave(group, 1)
    values = torch.cat([part @ matrix.double().t() for part in numbers.split(size, 1)], 1) / divisor.double()
    stored = {
        "qweight": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "scales": (exponents + 127).to(torch.uint8) if form == "mxfp4" else scales.view(torch.uint8),
        "weight_global_scale": divisor,
        "act_global_scale": torch.tensor([3.0]),
        "forward_hadamard_matrix": matrix,
        "backward_hadamard_matrix": matrix.clone(),
    }
    return of_module(name, stored), values.float()


def make(directory: Path, form: str, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    said = {"quant_method": "fp_quant", "forward_dtype": form, "hadamard_group_size": size}
    sizes = SIZES | {"intermediate_size": 192}
    return coded_directories.make(
        directory, "llama-3", said, lambda name, weight: coded(name, weight, form, size, generator), **sizes
    )


@pytest.mark.parametrize(("form", "size"), [("mxfp4", 32), ("nvfp4", 64)])
def test_values_are_those_of_a_slow_reader_in_bf16_and_through_megatron(tmp_path: Path, form: str, size: int) -> None:
    values = make(tmp_path / "source", form, size)
    words = f"rotated {form.upper()} codes of fp_quant, read as bfloat16"
    notes, found = assert_read_as_values(tmp_path / "source", values, words, megatron=form == "nvfp4")
    assert any("7 scales of inputs, outputs or a KV cache stay behind" in note for note in notes)
    assert len(values) == 7 and {name.rpartition(".")[2] for name in found} == {"weight"}


@pytest.mark.parametrize("case", golden_cases(GOLDEN))
def test_what_fp_quant_has_coded_is_what_it_makes_of_it(case: str) -> None:
    """Real codes, and weights that only look like them, by two matrices of which one is not symmetric."""
    assert_golden(GOLDEN, case, {"quant_method": "fp_quant", "forward_dtype": case[:5]})


def test_there_is_a_golden_weight_of_each_format() -> None:
    forms = ("mxfp4-32", "mxfp4-128", "nvfp4-16", "nvfp4-64")
    assert {*golden_cases(GOLDEN)} == {f"{form}{kind}" for form in forms for kind in ("", "-pseudo")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    directory = tmp_path_factory.mktemp("fp_quant")
    return directory, make(directory, "nvfp4", 64)


def test_how_rows_are_cut_does_not_matter(
    made: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_any_cut(made[0], UP, made[1][UP], monkeypatch)


def test_scales_may_be_filled_up_as_the_kernels_leave_them(tmp_path: Path) -> None:
    """To a multiple of 128 rows and of 4 columns; and transformers saves tensors of nothing again."""
    generator = torch.Generator().manual_seed(1)

    def filled(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, values = coded(name, weight, "mxfp4", 32, generator)
        place = f"{name.removesuffix('weight')}scales"
        scales = torch.full((-(-len(weight) // 128) * 128, 8 if weight.shape[1] > 128 else 4), 255, dtype=torch.uint8)
        scales[: len(weight), : weight.shape[1] // 32] = stored[place]
        return stored | {
            place: scales,
            name: torch.zeros(0),
            f"{name.removesuffix('weight')}dqweight": torch.zeros(0),
        }, values

    said = {"quant_method": "fp_quant", "forward_dtype": "mxfp4"}
    values = coded_directories.make(tmp_path, "llama-3", said, filled, **SIZES | {"intermediate_size": 192})
    assert torch.equal(read_tensor(open_checkpoint(tmp_path), UP), values[UP].bfloat16())


def test_values_in_the_place_of_codes_are_told_as_what_they_are(tmp_path: Path) -> None:
    """`pseudoquantization`: no codes, and so no way back to any."""
    generator = torch.Generator().manual_seed(1)

    def pseudo(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, values = coded(name, weight, "nvfp4", 64, generator)
        kinds = ("forward_hadamard_matrix", "backward_hadamard_matrix", "act_global_scale", "weight_global_scale")
        kept = {kind: stored[f"{name.removesuffix('weight')}{kind}"] for kind in kinds}
        matrix = kept["forward_hadamard_matrix"].double()
        parts = [part.double() @ matrix for part in values.split(64, 1)]
        return of_module(name, kept | {"dqweight": torch.cat(parts, 1).bfloat16()}), values

    said = {"quant_method": "fp_quant", "forward_dtype": "nvfp4", "store_master_weights": False}
    values = coded_directories.make(tmp_path, "llama-3", said, pseudo, **SIZES | {"intermediate_size": 192})
    reader = open_checkpoint(tmp_path)
    what = "7 weights were rotated values rounded to NVFP4 of fp_quant, read as bfloat16"
    assert f"{what}. There is no way back to that rotation." in list(reader.notes())
    assert torch.allclose(read_tensor(reader, UP).float(), values[UP], rtol=0.02, atol=0.02 * float(values[UP].std()))


NAN = torch.full((192, 8), 127, dtype=torch.uint8)
EYE = torch.eye(64)
HOSTILE: Hostile = {
    "no scales": (put("scales", None), DamagedCheckpoint, "no .*up_proj.scales for its codes"),
    "no codes": (put("qweight", None), DamagedCheckpoint, "no .*up_proj.qweight for its codes"),
    "no matrix": (put("forward_hadamard_matrix", None), DamagedCheckpoint, "no .*hadamard_matrix for its codes"),
    "no global scale": (put("weight_global_scale", None), DamagedCheckpoint, "no .*weight_global_scale for its codes"),
    "a global scale of 0": (put("weight_global_scale", torch.zeros(1)), DamagedCheckpoint, "global_scale holds a"),
    "an infinite global scale": (put("weight_global_scale", torch.ones(1) / 0), DamagedCheckpoint, "scale holds a"),
    "a negative global scale": (put("weight_global_scale", -torch.ones(1)), DamagedCheckpoint, "global_scale holds a"),
    "a scale of NaN": (put("scales", NAN), DamagedCheckpoint, r"scales holds a .*model\.safetensors\)"),
    "negative scales": (put("scales", NAN ^ 0xC0), DamagedCheckpoint, "scales holds a"),
    "a matrix of zeros": (put("forward_hadamard_matrix", EYE * 0), DamagedCheckpoint, "is no rotation"),
    "rows of length 1.02": (put("forward_hadamard_matrix", EYE * 1.02), DamagedCheckpoint, "is no rotation"),
    "a column twice": (put("forward_hadamard_matrix", EYE[:, [0, 0, *range(2, 64)]]), DamagedCheckpoint, "no rotation"),
    "a matrix of NaN": (put("forward_hadamard_matrix", EYE * torch.nan), DamagedCheckpoint, "is no rotation"),
    "a matrix of none": (
        stray("stray.backward_hadamard_matrix", EYE),
        UnmappedTensor,
        "stray.backward_hadamard_matrix",
    ),
    "a scale of no inputs": (
        stray("stray.act_global_scale", torch.ones(1)),
        UnmappedTensor,
        "stray.act_global_scale",
    ),
    "nothing of no module": (stray("stray.scales", torch.ones(0)), UnmappedTensor, "stray.scales"),
    "scales of other groups": (put("scales", NAN[:, :4]), DamagedCheckpoint, "scales is uint8 of shape"),
    "scales in FP32": (put("scales", torch.ones(192, 8)), DamagedCheckpoint, "scales is float32"),
    "codes in INT8": (put("qweight", torch.ones(192, 64).char()), DamagedCheckpoint, "qweight is int8"),
    "flat codes": (put("qweight", torch.ones(192).byte()), DamagedCheckpoint, "no rotated NVFP4 codes"),
    "codes of nothing": (put("qweight", torch.ones(0, 64).byte()), DamagedCheckpoint, "no rotated NVFP4 codes"),
    "codes of half a matrix": (put("qweight", torch.ones(192, 48).byte()), DamagedCheckpoint, "matrix of 64 rows"),
    "a matrix of nothing": (put("forward_hadamard_matrix", torch.ones(0, 0)), DamagedCheckpoint, "matrix of 0 rows"),
    "a huge matrix": (put("forward_hadamard_matrix", torch.ones(2048, 1)), DamagedCheckpoint, "matrix of 2048 rows"),
    "half a matrix": (put("forward_hadamard_matrix", torch.ones(64, 32)), DamagedCheckpoint, "matrix is float32"),
    "a matrix of bytes": (put("forward_hadamard_matrix", torch.ones(64, 64).byte()), DamagedCheckpoint, "is uint8"),
    "a weight as values too": (put("weight", torch.ones(192, 128)), DamagedCheckpoint, "as values, and as codes"),
    "codes, and what they stand for": (put("dqweight", torch.ones(192, 128)), DamagedCheckpoint, "and a `dqweight`"),
    "another format": (says(forward_dtype="mxfp8"), PrecisionError, "`forward_dtype` 'mxfp8'"),
    "a list of formats": (says(forward_dtype=["nvfp4"]), PrecisionError, "`forward_dtype` "),
    "the other format": (says(forward_dtype="mxfp4"), DamagedCheckpoint, "scales is uint8 of shape"),
    "weights to train": (says(store_master_weights=True), PrecisionError, "computes codes anew"),
    "a word for false": (says(store_master_weights="false"), DamagedCheckpoint, "is 'false', not true or false"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_contradicts_itself_or_is_not_read_is_one_error(
    tmp_path: Path, made: tuple[Path, dict[str, Tensor]], case: str
) -> None:
    assert_refused(made[0], tmp_path, HOSTILE[case])

"""Values of two dtypes are compared in one that holds both, and measured in it."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.codes.elements import E4M3
from precisionctl.codes.encoding import Encoding
from precisionctl.verify.compare import compare
from precisionctl.verify.differences import Differences
from precisionctl.verify.hf_tensors import StoredRows
from precisionctl.verify.tensor_comparison import TensorComparison

LARGE = 2**53
CASES: dict[str, tuple[Tensor, Tensor, float | None]] = {
    "FP64 of an FP32 number": (torch.tensor([[0.1]]).double(), torch.tensor([[0.1]]), None),
    "FP64 that FP32 rounds": (
        torch.tensor([[0.1]], dtype=torch.float64),
        torch.tensor([[0.1]]),
        1.4901161138336505e-09,
    ),
    "the last bit of FP64": (torch.ones(1, 1).double(), torch.full((1, 1), 1 + 2**-52, dtype=torch.float64), 2**-52),
    "FP64 and BF16": (torch.tensor([[1.5]], dtype=torch.float64), torch.tensor([[1.5]]).bfloat16(), None),
    "zeros of two signs": (torch.zeros(1, 1).double(), -torch.zeros(1, 1), 0.0),
    "NaNs": (torch.full((1, 1), math.nan).double(), torch.full((1, 1), math.nan).half(), None),
    "integers of two sizes": (torch.tensor([[7, -3]]), torch.tensor([[7, -3]], dtype=torch.int32), None),
    "integers that FP32 has not": (torch.tensor([[2**24]], dtype=torch.int32), torch.tensor([[2**24 + 1]]), 1.0),
    "integers that FP64 has not": (torch.tensor([[LARGE]]), torch.tensor([[LARGE + 1]]), 1.0),
    "an integer and FP64": (torch.tensor([[LARGE + 1]]), torch.tensor([[float(LARGE)]], dtype=torch.float64), 1.0),
    "an integer and what it is": (torch.tensor([[250]]), torch.tensor([[250.0]]).bfloat16(), None),
    "the largest of 64 bits": (
        torch.tensor([[2**64 - 1]], dtype=torch.uint64),
        torch.tensor([[2**64 - 2]], dtype=torch.uint64),
        1.0,
    ),
    "bits that mean two integers": (torch.tensor([[2**64 - 1]], dtype=torch.uint64), torch.tensor([[-1]]), 2.0**64),
    "complex": (torch.tensor([[1 + 2j]]), torch.tensor([[1 + 2.5j]]), 0.5),
    "complex without an imaginary part": (torch.tensor([[1 + 0j]]), torch.tensor([[1.0]]), None),
}


def rows(values: Tensor) -> StoredRows:
    return StoredRows.of(values)


@pytest.mark.parametrize("case", CASES)
def test_no_two_values_become_one(case: str) -> None:
    a, b, error = CASES[case]
    for left, right in ((a, b), (b, a)):
        found = Differences()
        found.see(rows(left), rows(right))
        assert (found.differing, found.largest_error) == ((0, 0.0) if error is None else (1, error))


def test_codes_are_compared_with_values_of_fp64_as_they_are() -> None:
    encoding = Encoding(E4M3, torch.tensor([[0.1]]), (1, 1))
    codes = StoredRows.of(torch.tensor([[3.0]]).to(torch.float8_e4m3fn))
    coded = StoredRows(codes.data, codes.dtype, encoding)
    exact = (torch.tensor([[3.0]]) * torch.tensor([[0.1]])).double()
    for values, differing in ((exact, 0), (exact + 1e-13, 1)):
        found = Differences()
        found.see(coded, rows(values))
        assert found.differing == differing


def test_a_model_of_any_kind_is_compared_in_its_own_dtypes(tmp_path: Path) -> None:
    def compared(a: Tensor, b: Tensor) -> TensorComparison:
        for name, values in (("a", a), ("b", b)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text(
                json.dumps({"model_type": "of nobody", "architectures": ["X"]})
            )
            save_file({"t": values}, tmp_path / name / "model.safetensors", {"format": "pt"})
        (tensor,) = compare(open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")).tensors
        return tensor

    wide = torch.linspace(0, 1, 12, dtype=torch.float64).reshape(3, 4)
    off = wide.clone()
    off[2, 1] += 2**-43
    found = compared(wide, off)
    assert (found.status, found.max_abs_error, found.differing) == ("differs", 2**-43, 1)
    assert found.sqnr_db == pytest.approx(10 * math.log10(float(wide.square().sum()) * 2.0**86))
    assert compared(wide, wide.float()).status == compared(wide.float(), wide).status == "rounded"
    assert compared(off.float(), wide + 2**-20).status == "differs"
    assert compared(wide.float().double(), wide.float()).status == "exact"
    ids = torch.tensor([2**24, 5])
    assert compared(ids.int(), ids).status == "exact" and compared(ids.int(), ids + 1).differing == 2

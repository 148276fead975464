"""FP8 weights in a rank's pickle that say of their codes and scales what cannot be."""

import math
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fp8_directories import make

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.torch_files import torch_zip
from precisionctl.checkpoints.torch_legacy.reader import LegacyReader
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, UnsafePickle
from precisionctl.untrusted.pickle_writer import Global, PersistentId, PickledObject, dumps

MODULE = "transformer_engine.pytorch.tensor.float8_tensor"
BLOCKS = "transformer_engine.pytorch.tensor.float8_blockwise_tensor"
E4M3 = PickledObject(Global("transformer_engine.pytorch.constants", "DType"), (7,))
BF16 = Global("torch", "bfloat16")
NAMES = ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight")


def tensor(key: str, kind: str, shape: tuple[int, ...]) -> PickledObject:
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    storage = PersistentId(("storage", Global("torch", kind), key, "cpu", math.prod(shape)))
    hooks = PickledObject(Global("collections", "OrderedDict"), ())
    return PickledObject(Global("torch._utils", "_rebuild_tensor_v2"), (storage, 0, shape, stride, False, hooks))


CODES, OTHER = tensor("0", "ByteStorage", (4, 4)), tensor("1", "ByteStorage", (4, 4))
SCALE, DOUBLE, NAN, NEGATIVE = (tensor(key, "FloatStorage", (1,)) for key in "2345")
STORAGES = {"0": bytes(range(16)), "1": bytes(16)}
STORAGES |= {key: struct.pack("<f", x) for key, x in zip("2345", (1.0, 2.0, math.nan, -1.0), strict=True)}


def float8(codes: object = CODES, scale: object = SCALE, dtype: object = E4M3) -> PickledObject:
    return PickledObject(Global(MODULE, "_make_float8_tensor_in_reduce_ex"), (codes, dtype, scale, BF16, (4, 4), None))


def in_blocks(scale: object, two: object = True) -> PickledObject:
    make = Global(BLOCKS, "_make_float8_blockwise_tensor_in_reduce_ex")
    return PickledObject(make, ((4, 4), CODES, scale, None, None, E4M3, BF16, None, two, None))


def attribute(of: object, name: str) -> PickledObject:
    return PickledObject(Global("builtins", "getattr"), (of, name))


def read(folder: Path, first: object, second: object) -> list[Any]:
    (folder / "mp_rank_00").mkdir()
    with zipfile.ZipFile(folder / "mp_rank_00" / "model_optim_rng.pt", "w") as file:
        file.writestr("x/data.pkl", dumps({"model": dict(zip(NAMES, (first, second), strict=True))}, 2))
        for key, content in STORAGES.items():
            file.writestr(f"x/data/{key}", content)
    reader = LegacyReader(folder)
    return [reader.encodings[name] for name in NAMES]


def test_the_weights_that_the_attacks_change_are_sound(tmp_path: Path) -> None:
    assert [float(one.scale_inv) for one in read(tmp_path, float8(), float8(OTHER, DOUBLE))] == [1.0, 2.0]


def test_weights_that_share_their_codes_are_refused_before_there_are_many(tmp_path: Path) -> None:
    """A few hundred bytes for each would otherwise stand for a megabyte."""
    storages = {"0": bytes(1 << 20), "2": struct.pack("<f", 1.0)}
    one = float8(tensor("0", "ByteStorage", (1024, 1024)))
    with zipfile.ZipFile(tmp_path / "shared.pt", "w") as file:
        file.writestr("x/data.pkl", dumps({f"weight.{index}": one for index in range(400)}, 2))
        for key, content in storages.items():
            file.writestr(f"x/data/{key}", content)
    with pytest.raises(DamagedCheckpoint, match="tensors of 4194.* bytes that share the bytes"):
        torch_zip.skeleton(tmp_path / "shared.pt")


LIES: dict[str, Callable[[], PickledObject]] = {
    "codes that are text": lambda: float8("codes"),
    "codes that are FP8 weights": lambda: float8(float8()),
    "codes of floats": lambda: float8(tensor("2", "FloatStorage", (1, 1))),
    "flat codes": lambda: float8(tensor("0", "ByteStorage", (16,))),
    "codes beyond their storage": lambda: float8(tensor("0", "ByteStorage", (1 << 40, 4))),
    "codes that are not there": lambda: float8(tensor("9", "ByteStorage", (4, 4))),
    "a scale that is a number": lambda: float8(scale=1.0),
    "a scale of nothing": lambda: float8(scale=tensor("2", "FloatStorage", (0,))),
    "scales of nothing in rows": lambda: in_blocks(tensor("2", "FloatStorage", (1, 0))),
    "a scale in three dimensions": lambda: float8(scale=tensor("2", "FloatStorage", (1, 1, 1))),
    "a scale for each code": lambda: float8(scale=tensor("0", "FloatStorage", (2, 2))),
    "NaN": lambda: float8(scale=NAN),
    "a negative scale": lambda: float8(scale=NEGATIVE),
    "blocks that are parts of rows": lambda: in_blocks(SCALE, False),
    "a truth that is a tensor": lambda: in_blocks(SCALE, SCALE),
    "E5M2": lambda: float8(dtype=PickledObject(Global("transformer_engine_torch", "DType"), (8,))),
    "a dtype of 10**4000": lambda: float8(
        dtype=PickledObject(Global("transformer_engine_torch", "DType"), (10**4000,))
    ),
    "a dtype that is text": lambda: float8(dtype="E4M3"),
    "the codes of another weight": lambda: float8(CODES, DOUBLE),
    "another attribute": lambda: attribute(Global(MODULE, "Float8Tensor"), "__init__"),
    "an attribute of an attribute": lambda: attribute(attribute(Global(MODULE, "DType"), "__class__"), "mro"),
    "another class of the module": lambda: PickledObject(Global(MODULE, "os.system"), ("true",)),
}


@pytest.mark.parametrize("name", LIES)
def test_a_weight_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises((DamagedCheckpoint, UnsafePickle)) as error:
        read(tmp_path, float8(), LIES[name]())
    assert isinstance(error.value, PrecisionctlError) and len(str(error.value)) < 5000


def a_link(path: Path) -> None:
    (path.parents[1] / "secret").write_text("{}")
    path.symlink_to("../secret")


def holes(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("put", [a_link, holes, lambda path: path.write_bytes(b"\xff\xfe{\0}\0")])
def test_what_says_of_codes_how_they_are_read_is_a_small_file_of_its_directory(
    tmp_path: Path, put: Callable[[Path], object]
) -> None:
    """It travels along with the codes: what it leads to would, too."""
    make(tmp_path / "hf", "modelopt-tensor")
    put(tmp_path / "hf" / "hf_quant_config.json")
    with pytest.raises(DamagedCheckpoint):
        _ = HuggingFaceReader(tmp_path / "hf").weight_encodings

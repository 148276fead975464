"""Megatron's legacy files with Transformer Engine's FP8 weights in them, of every release that pickled some.

The classes are stubs that pickle as TE's own do: the same module, name and arguments as __reduce_ex__ gives in
transformer_engine/pytorch/tensor/ at each tag. What comes out is held against the same files with plain values.
"""

import copyreg
import enum
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fp8_directories
import pico
import pytest
import torch
from conversions import carry_out
from safetensors.torch import load_file
from soaking import few

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_legacy.rank_directories import FILE
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import DamagedCheckpoint, PrecisionError, UnsafePickle
from precisionctl.export.weight_encodings import weight_encodings
from precisionctl.param import Parallelism
from precisionctl.verify.compare import compare

E4M3 = torch.float8_e4m3fn
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


@dataclass(frozen=True)
class Form:
    """How a release pickles: the modules of the tensor's class and of DType, E4M3's number, and the arguments."""

    module: str
    dtypes: str
    number: int
    kind: str
    arguments: Callable[[Any], tuple[Any, ...]]
    function: str | None = None


OLD, NEW = "transformer_engine.pytorch.float8_tensor", "transformer_engine.pytorch.tensor.float8_tensor"
BLOCK = "transformer_engine.pytorch.tensor.float8_blockwise_tensor"
MX = "transformer_engine.pytorch.tensor.mxfp8_tensor"
EXTENSIONS, TORCH = "transformer_engine_extensions", "transformer_engine_torch"
CONSTANTS = "transformer_engine.pytorch.constants"


def _float8(t: Any) -> tuple[Any, ...]:
    return t.data, t.fp8_dtype, t.scale_inv, t.dtype


def _blockwise(t: Any) -> tuple[Any, ...]:
    return t.shape, t.data, t.scale_inv, t.data, t.scale_inv, t.fp8_dtype, t.dtype, t.quantizer, True


def _mxfp8(t: Any) -> tuple[Any, ...]:
    return t.data, t.scale_inv, t.data, t.scale_inv, t.fp8_dtype, t.dtype


FORMS = {
    "1.3": Form(OLD, EXTENSIONS, 6, "Float8Tensor", _float8),
    "1.8": Form(OLD, TORCH, 6, "Float8Tensor", _float8),
    "1.13": Form(NEW, TORCH, 6, "Float8Tensor", _float8),
    "2.0": Form(NEW, TORCH, 6, "Float8Tensor", lambda t: (*_float8(t), t.shape)),
    "2.5": Form(NEW, TORCH, 7, "Float8Tensor", lambda t: (*_float8(t), t.shape)),
    "2.16": Form(NEW, TORCH, 7, "Float8Tensor", lambda t: (*_float8(t), t.shape), "_make_float8_tensor_in_reduce_ex"),
    "2.20": Form(
        NEW, CONSTANTS, 7, "Float8Tensor", lambda t: (*_float8(t), t.shape, None), "_make_float8_tensor_in_reduce_ex"
    ),
    "block 2.3": Form(BLOCK, TORCH, 6, "Float8BlockwiseQTensor", _blockwise),
    "block 2.5": Form(BLOCK, TORCH, 7, "Float8BlockwiseQTensor", lambda t: (*_blockwise(t), t.format)),
    "block 2.20": Form(
        BLOCK,
        CONSTANTS,
        7,
        "Float8BlockwiseQTensor",
        lambda t: (*_blockwise(t), None),
        "_make_float8_blockwise_tensor_in_reduce_ex",
    ),
    "mxfp8 2.0": Form(MX, TORCH, 6, "MXFP8Tensor", _mxfp8),
    "mxfp8 2.3": Form(MX, TORCH, 6, "MXFP8Tensor", lambda t: (*_mxfp8(t), t.shape)),
    "mxfp8 2.20": Form(
        MX,
        CONSTANTS,
        7,
        "MXFP8Tensor",
        lambda t: (*_mxfp8(t), t.shape, t.quantizer, False),
        "_make_mxfp8_tensor_in_reduce_ex",
    ),
}


def _make_in_reduce_ex(cls: type, *arguments: object) -> None:
    """A class method, which pickles as a getattr of its name."""


class Stubs:
    """TE's modules of a release, as far as pickling goes."""

    def __init__(self, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
        self.form, self._monkeypatch = form, monkeypatch
        if form.dtypes == CONSTANTS:
            self.dtypes: Any = enum.IntEnum("DType", {"kFloat8E4M3": 7, "kFloat8E5M2": 8}, module=form.dtypes)
        else:
            self.dtypes = type("DType", (), {"__reduce_ex__": lambda d, protocol: self._pybind(d)})
        self._add(form.dtypes, "DType", self.dtypes)
        self.format = self._add(TORCH, "Float8BlockScaleTensorFormat", type("Float8BlockScaleTensorFormat", (), {}))
        quantizer = "MXFP8Quantizer" if form.kind == "MXFP8Tensor" else "Float8BlockQuantizer"
        self.quantizer = self._add(form.module, quantizer, type(quantizer, (), {}))
        cls = type(form.kind, (), {"__reduce_ex__": lambda t, protocol: (self.call, form.arguments(t))})
        cls._make_in_reduce_ex = classmethod(_make_in_reduce_ex)  # type: ignore[attr-defined]
        self.tensor = self._add(form.module, form.kind, cls)
        self.call = cls._make_in_reduce_ex  # type: ignore[attr-defined]
        if form.function:
            function = types.FunctionType((lambda *args: None).__code__, {}, form.function)
            self.call = self._add(form.module, form.function, function)

    def _pybind(self, dtype: Any) -> tuple[Any, ...]:
        """As pybind11's enums pickle: an object without arguments, and its number as state."""
        return copyreg.__newobj__, (self.dtypes,), dtype.number  # type: ignore[attr-defined]

    def _add(self, module: str, name: str, value: Any) -> Any:
        value.__module__, value.__qualname__ = module, name
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            known = ".".join(parts[:end])
            if known not in sys.modules:
                self._monkeypatch.setitem(sys.modules, known, types.ModuleType(known))
        setattr(sys.modules[module], name, value)
        return value

    def dtype(self, number: int) -> Any:
        if self.form.dtypes == CONSTANTS:
            return self.dtypes(number)
        made = self.dtypes()
        made.number = number
        return made

    def make(self, codes: torch.Tensor, scale_inv: torch.Tensor, number: int | None = None) -> Any:
        tensor = self.tensor()
        tensor.data, tensor.scale_inv = codes.view(torch.uint8), scale_inv
        tensor.dtype, tensor.shape = torch.bfloat16, codes.shape
        tensor.fp8_dtype = self.dtype(self.form.number if number is None else number)
        tensor.quantizer, tensor.format = self.quantizer(), self.format()
        tensor.quantizer.dtype, tensor.quantizer.amax_epsilon = tensor.fp8_dtype, 0.0
        return tensor


def quantized(
    shape: torch.Size, kind: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random codes, their scales as TE stores them (padded with what must not be read), and the FP32 values."""
    codes = fp8_directories.random_codes(tuple(shape), generator, E4M3)
    rows, columns = shape
    if kind == "Float8Tensor":
        scale = fp8_directories.random_scales((1,), generator, torch.float32)
        return codes, scale, codes.float() * scale
    if kind == "Float8BlockwiseQTensor":
        grid = fp8_directories.random_scales((-(-rows // 128), -(-columns // 128)), generator, torch.float32)
        dense = grid.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        padded = torch.full((grid.shape[0], -(-grid.shape[1] // 4) * 4), float("nan"))
        padded[:, : grid.shape[1]] = grid
        return codes, padded, codes.float() * dense
    grid = fp8_directories.random_scales((rows, columns // 32), generator, torch.uint8)
    padded = torch.full((-(-rows // 128) * 128, -(-(columns // 32) // 4) * 4), 255, dtype=torch.uint8)
    padded[:rows, : columns // 32] = grid
    return codes, padded, codes.float() * (grid.float() - 127).exp2().repeat_interleave(32, 1)


def make(folder: Path, stubs: Stubs, tensor_parallel: int = 2) -> tuple[Path, Path]:
    """Legacy checkpoints of the same values: FP8 weights as TE pickles them, and plain ones in FP32."""
    pico.save(folder / "hf", "llama-3", dtype=torch.float32, **SIZES)
    for name in ("fp8", "plain"):
        conversion = Request(
            folder / "hf", folder / name, "megatron", container="torch", parallelism=Parallelism(tensor_parallel)
        )
        execute(plan_command(conversion), workers=1)
    generator = torch.Generator().manual_seed(5)
    for file in sorted((folder / "fp8").rglob(FILE)):
        content = torch.load(file, weights_only=False)
        plain = torch.load(folder / "plain" / file.relative_to(folder / "fp8"), weights_only=False)
        for name, values in list(content["model"].items()):
            if isinstance(values, torch.Tensor) and values.dim() == 2 and "linear" in name:
                codes, scale, decoded = quantized(values.shape, stubs.form.kind, generator)
                content["model"][name] = stubs.make(codes, scale)
                plain["model"][name] = decoded
        torch.save(content, file)
        torch.save(plain, folder / "plain" / file.relative_to(folder / "fp8"))
    return folder / "fp8", folder / "plain"


@pytest.mark.parametrize("name", few(FORMS, "1.3", "2.20", "block 2.20", "mxfp8 2.20"))
def test_every_release_is_read_as_what_its_codes_decode_to(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tensor-parallel ranks whose scales differ, of weights cut by rows, by rows in two parts, and by columns."""
    fp8, plain = make(tmp_path, Stubs(FORMS[name], monkeypatch))
    monkeypatch.undo()  # nothing of TE is there when it is read
    reader = open_checkpoint(fp8)
    assert len(reader.encodings) == 8
    for source in (fp8, plain):
        execute(plan_command(Request(source, source.with_name(f"{source.name}-hf"), "hf", "fp32")), workers=1)
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("fp8-hf", "plain-hf"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert compare(reader, open_checkpoint(plain)).equal


def test_moved_scales_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's rows stand elsewhere in Hugging Face's, so scales are moved; a model's together are gigabytes."""
    fp8, _ = make(tmp_path, Stubs(FORMS["block 2.20"], monkeypatch))
    coded = weight_encodings(open_checkpoint(fp8))
    assert coded is not None and len(coded.scales) == 14
    held = [weakref.ref(coded.stored.chunks(scales.weight)[0].place) for scales in coded.scales.values()]
    left = {name for name, grid in zip(coded.scales, held, strict=True) if grid() is not None}
    assert left == {"model.layers.1.mlp.down_proj.weight"}


@pytest.mark.parametrize("form", [FORMS["1.3"], FORMS["block 2.20"]], ids=["tensor", "block"])
def test_values_are_in_bf16_and_the_codes_come_back_in_an_export(
    tmp_path: Path, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TE's one scale for a rank's tensor becomes one for each channel, and every code is the old one. Weights that
    ranks cut by columns have two scales in a row, as blocks have, and no channel is theirs: those get new ones."""
    fp8, plain = make(tmp_path, Stubs(form, monkeypatch))
    execute(plan_command(Request(fp8, tmp_path / "bf16", "hf")), workers=1)
    execute(plan_command(Request(plain, tmp_path / "values", "hf")), workers=1)
    work = carry_out(Request.export(tmp_path / "bf16", tmp_path / "out", "vllm", "dynamic"), workers=1)
    values, reader = load_file(tmp_path / "values" / "model.safetensors"), HuggingFaceReader(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    kept = {
        name
        for name in reader.encodings
        if torch.equal(reader.encodings[name].decode_rows(stored[name], 0), values[name])
    }
    by_columns = ("o_proj.weight", "down_proj.weight")
    whole = {name for name in reader.encodings if not name.endswith(by_columns)}
    assert len(whole) == 10 and kept == (whole if form.kind == "Float8Tensor" else set())
    assert any(f"{len(kept)} of 14 weights have the same codes" in note for note in work.notes)


def test_blocks_that_end_within_a_rank_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "intermediate_size", 128)
    fp8, _ = make(tmp_path, Stubs(FORMS["block 2.20"], monkeypatch))
    with pytest.raises(PrecisionError, match="end at the 64 columns of a rank"):
        execute(plan_command(Request(fp8, tmp_path / "out", "hf")), workers=1)


def saved(tmp_path: Path, stubs: Stubs, change: Callable[[Any, Any], Any]) -> Path:
    fp8, plain = make(tmp_path, stubs, tensor_parallel=1)
    (file,) = fp8.rglob(FILE)
    content = torch.load(plain / file.relative_to(fp8), weights_only=False)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    codes, scale, _ = quantized(torch.Size((512, 256)), stubs.form.kind, torch.Generator().manual_seed(1))
    content["model"][name] = change(stubs, (codes, scale))
    torch.save(content, file)
    return fp8


@pytest.mark.parametrize("number", [0, 5, 8])
def test_codes_that_are_not_e4m3_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    path = saved(tmp_path, Stubs(FORMS["2.5"], monkeypatch), lambda stubs, parts: stubs.make(*parts, number=number))
    with pytest.raises(DamagedCheckpoint, match=f"dtype number {number}, which is not E4M3"):
        open_checkpoint(path)


class Gadget:
    """Pickles as getattr of something of TE's: what the allow-list gives for it must not reach any further."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


@pytest.mark.parametrize("name", ["__globals__", "__class__", "__init__", "__reduce_ex__"])
def test_no_attribute_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = saved(tmp_path, Stubs(FORMS["2.5"], monkeypatch), lambda stubs, parts: Gadget(stubs.tensor, name))
    with pytest.raises(UnsafePickle, match=f"getattr of '{name}', which is not on the allow-list"):
        open_checkpoint(path)


def test_scales_of_another_size_are_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = Stubs(FORMS["block 2.20"], monkeypatch)
    fp8, _ = make(tmp_path, stubs, tensor_parallel=1)
    (file,) = fp8.rglob(FILE)
    reader = open_checkpoint(fp8)
    name = next(iter(reader.encodings))
    found = reader._fp8  # type: ignore[attr-defined]
    key = next(key for key in found if key[1] == reader._tensors[name].shards[0][0].tensor.offset)  # type: ignore[attr-defined]
    short = found[key].scale_inv._replace(shape=(1, 4))
    found[key] = found[key]._replace(scale_inv=short)
    with pytest.raises(DamagedCheckpoint, match=r"has scales of \[1, 4\]"):
        reader.encodings[name]

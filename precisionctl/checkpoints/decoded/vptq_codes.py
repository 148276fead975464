"""VPTQ's vectors of outputs out of codebooks (`quant_method: vptq`), read as values.

A linear has `indices` I32 `[groups, vectors, words]`: of each input of a group, and each `length` outputs, which of
`centroids.weight` `[groups, count * length]` these are, and in the bits above it which of `res_centroids.weight` is
added, as one stream of bits, the first in the lowest. Before them come `outlier_size` inputs, whose vectors have a
length of their own: `outlier_indices` I16 `[1, vectors, outlier_size]` out of `outlier_centroids.weight`. `perm` I16
`[in]` says which input stands where, and each input has its `weight_scale` and `weight_bias`. The last vectors may
reach beyond the last output. A value is `(centroid + residual) * scale + bias`, each step rounded to their dtype, and
then to BF16. The config has the sizes of each module. Source: vptq 0.0.5 (layers/vqlinear.py, VQuantLinear;
layers/model_base.py, make_quant_linear; ops/quant_gemm.py, dequant; utils/pack.py, unpack_index_tensor).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import Box, read_box, read_tensor
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, damage, shown
from precisionctl.quant_methods.base import FLOATS
from precisionctl.torch_when_used import torch
from precisionctl.untrusted.safe_pickle import sizes

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = ("indices", "centroids.weight", "res_centroids.weight", "outlier_indices", "outlier_centroids.weight")
_OF_INPUTS = ("weight_scale", "weight_bias")
_MOST_GROUPS = 256
"""Groups of a weight, of which each takes a step of its own for the same rows. Published weights have one."""


@dataclass(frozen=True)
class _Vectors:
    """The sizes of a module: how many outputs it has; `groups` of `inputs` each, whose vectors have a `length`, out of
    `count` ones, plus one of `residuals` if there are some; and the same of its outliers, in one group, if it has
    `outliers`. `normal`: inputs have scales and biases. `reordered`: they stand in another order."""

    out: int
    groups: int
    inputs: int
    length: int
    count: int
    residuals: int
    outliers: int
    outlier_length: int
    outlier_count: int
    normal: bool
    reordered: bool

    @property
    def bits(self) -> int:
        """Of what an input has for a vector in `indices`."""
        return self.count.bit_length() - 1 + (self.residuals.bit_length() - 1 if self.residuals else 0)

    @property
    def columns(self) -> int:
        return self.outliers + self.groups * self.inputs


class VptqCodes(DecodedWeights):
    """The weights of a directory that VPTQ has saved."""

    def _find(self, quantization: Mapping[str, Any]) -> None:
        own, shared = (self._objects(quantization, key) for key in ("config_for_layers", "shared_layer_config"))
        self._modules: dict[str, _Vectors] = {}
        self.read = set[str]()
        for module in self._modules_with(*_KINDS):
            said = own.get(module, shared.get(module.rpartition(".")[2]))
            if said is None:
                what = f"{module} has codes of VPTQ, and `config_for_layers` does not say which"
                raise DamagedCheckpoint(what, where=self._where)
            with damage(f"what `config_for_layers` says of {shown(module)} makes no sense", self._where):
                self._modules[module] = self._sizes(module, said)
            self._check_tensors(module, self._modules[module])
        self.shapes = {f"{module}.weight": (each.out, each.columns) for module, each in self._modules.items()}
        self.kinds = {f"vectors of {each.length} outputs" for each in self._modules.values()}

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        module = name.removesuffix(".weight")
        each, books = self._modules[module], self._once(module, self._books)
        parts = []
        if each.outliers:
            cuts = self._cuts(module, "outlier_indices", each.outlier_length, row, rows)
            parts.append(torch.cat([self._outliers(module, cut) for cut in cuts]))
        cuts = self._cuts(module, "indices", each.length, row, rows)
        parts += [torch.cat([self._group(module, group, cut) for cut in cuts]) for group in range(each.groups)]
        values = torch.cat(parts, 1)
        if each.reordered:
            values = values.index_select(1, books["perm"])
        if each.normal:
            values = values.mul_(books["weight_scale"]).add_(books["weight_bias"])
        return values, f"{module}.centroids.weight"

    def _cuts(self, module: str, kind: str, length: int, row: int, rows: int) -> list[Box]:
        """Rows of the weight as boxes: which vectors they are in, and in the columns which outputs of these."""
        vectors = self._stored.specs[f"{module}.{kind}"].shape[1]
        return list(Box(0, vectors, 0, length).run(row, rows))

    def _group(self, module: str, group: int, cut: Box) -> Tensor:
        """Rows of the inputs of a group, `[rows, inputs]`."""
        each, books = self._modules[module], self._once(module, self._books)
        wide = -(-each.inputs * each.bits // 32)
        here = Box(group, 1, cut.row * wide, cut.rows * wide)
        codes = _unpacked(read_box(self._stored, f"{module}.indices", here).view(-1, wide), each.bits, each.inputs)
        vectors = _named(books["centroids.weight"][group], each.length, cut, codes & each.count - 1)
        if each.residuals:
            above = codes >> each.count.bit_length() - 1
            vectors += _named(books["res_centroids.weight"][group], each.length, cut, above)
        return _rows(vectors)

    def _outliers(self, module: str, cut: Box) -> Tensor:
        """Rows of the outliers, `[rows, outliers]`. Raises DamagedCheckpoint for an index of none."""
        each, books = self._modules[module], self._once(module, self._books)
        here = Box(0, 1, cut.row * each.outliers, cut.rows * each.outliers)
        codes = read_box(self._stored, f"{module}.outlier_indices", here).view(-1, each.outliers).int() & 0xFFFF
        if int(codes.max()) >= each.outlier_count:
            what = f"{module}.outlier_indices has {int(codes.max())}, and there are {each.outlier_count} centroids"
            raise self._damaged(f"{module}.outlier_indices", what)
        return _rows(_named(books["outlier_centroids.weight"][0], each.outlier_length, cut, codes))

    def _books(self, module: str) -> dict[str, Tensor]:
        """A module's tensors other than indices, `perm` as the place of each input. Raises DamagedCheckpoint if that is
        no order of all inputs."""
        kinds = (*_KINDS, *_OF_INPUTS, "perm")
        there = [kind for kind in kinds if f"{module}.{kind}" in self.read and not kind.endswith("indices")]
        books = {kind: read_tensor(self._stored, f"{module}.{kind}") for kind in there}
        if "perm" in books:
            found, books["perm"] = (books["perm"].view(-1).int() & 0xFFFF).sort()
            if not torch.equal(found, torch.arange(len(found), dtype=found.dtype)):
                raise self._damaged(f"{module}.perm", f"{module}.perm does not have each input once")
        return books

    def _sizes(self, module: str, said: Mapping[str, Any]) -> _Vectors:
        """What the config says of a module. Raises ValueError for what makes no sense, PrecisionError for codes that
        are not read."""
        if self._switch(said, "indices_as_float", False) or not self._switch(said, "is_indice_packed", True):
            raise self._unread(f"{module} has indices that are not packed, which are not read")
        if said.get("vector_quant_dim", "out") != "out":
            raise self._unread(f"{module} has vectors of inputs, which are not read")
        pairs = [said.get(key, [-1, -1]) for key in ("vector_lens", "num_centroids", "num_res_centroids")]
        if any(not isinstance(pair, list) or [type(number) for number in pair] != [int, int] for pair in pairs):
            raise ValueError(f"{shown(pairs)} are no pairs of numbers")
        (outlier_length, length), (outlier_count, count), (outlier_residuals, residuals) = pairs
        groups, inputs = sizes([said["group_num"], said["group_size"]])
        outliers = sizes([said["outlier_size"]])[0] if outlier_length > 1 and outlier_count > 0 else 0
        if outliers and (outlier_residuals > 0 or outlier_count > 1 << 16):
            raise self._unread(f"{module} has {outlier_count} vectors of outliers, and others to add")
        residuals = max(residuals, 0)
        powers = [count, residuals] if residuals else [count]
        if any(number < 2 or number & number - 1 for number in powers) or residuals > count or count > 1 << 16:
            raise self._unread(f"{module} has codebooks of {shown(powers)} vectors, which are not read")
        if groups > _MOST_GROUPS:
            raise self._unread(f"{module} has {groups:,} groups of inputs, which are not read")
        if min(length, groups, inputs) < 1:
            raise ValueError(f"vectors of {length}, {groups} groups of {inputs}")
        out = said.get("out_features", -1)
        vectors = self._present(f"{module}.indices").shape[1:2]
        out = out if type(out) is int and out > 0 else (vectors[0] * length if vectors else 0)
        return _Vectors(
            *(out, groups, inputs, length, count, residuals, outliers, outlier_length, outlier_count),
            normal=self._switch(said, "enable_norm", f"{module}.weight_scale" in self._stored.specs),
            reordered=self._switch(said, "enable_perm", f"{module}.perm" in self._stored.specs),
        )

    def _check_tensors(self, module: str, each: _Vectors) -> None:
        """Raise DamagedCheckpoint for tensors that are not of these sizes, and note which there are."""
        self._check_alone(f"{module}.weight", f"{module}.indices")
        dtype = self._present(f"{module}.centroids.weight").dtype
        floats = (dtype,) if dtype in FLOATS else FLOATS
        wanted: dict[str, tuple[tuple[int, ...], tuple[DType, ...]]] = {
            "indices": ((each.groups, -(-each.out // each.length), -(-each.inputs * each.bits // 32)), (DType.int32,)),
            "centroids.weight": ((each.groups, each.count * each.length), floats),
        }
        if each.residuals:
            wanted["res_centroids.weight"] = (each.groups, each.residuals * each.length), floats
        if each.outliers:
            wanted["outlier_indices"] = (1, -(-each.out // each.outlier_length), each.outliers), (DType.int16,)
            wanted["outlier_centroids.weight"] = (1, each.outlier_count * each.outlier_length), floats
        if each.reordered:
            wanted["perm"] = (each.columns,), (DType.int16,)
        if each.normal:
            wanted |= {kind: ((each.columns,), floats) for kind in _OF_INPUTS}
        for kind, (shape, dtypes) in wanted.items():
            self._check(f"{module}.{kind}", shape, *dtypes)
            if kind.endswith(".weight"):
                self._check_small(f"{module}.{kind}")
        self.read = {*self.read, *(f"{module}.{kind}" for kind in wanted)}


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` numbers of so many bits in each row of int32 words, int64."""
    padded = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    at = torch.arange(count) * bits
    low, high = padded.index_select(1, at // 32), padded.index_select(1, at // 32 + 1)
    shift = at % 32
    return (low >> shift | high << 32 - shift) & (1 << bits) - 1


def _named(book: Tensor, length: int, cut: Box, codes: Tensor) -> Tensor:
    """The vectors of a codebook that codes `[n, inputs]` name, with the outputs of a cut, `[n, inputs, outputs]`."""
    outputs = book.view(-1, length)[:, cut.column : cut.column + cut.columns]
    return outputs.index_select(0, codes.reshape(-1)).view(*codes.shape, -1)


def _rows(vectors: Tensor) -> Tensor:
    """Rows of the weight out of vectors of outputs `[n, inputs, outputs]`."""
    return vectors.transpose(1, 2).reshape(-1, vectors.shape[1])

"""Google's integers of Gemma, `quant_method: gemma`, read as values: two, four or eight bits under a scale of a row.

A linear has `weight` U8 `[out, in * bits / 8]`, the first code in the lowest bits, stored plus 2^(bits - 1); of eight
bits I8 `[out, in]`, stored as it is; and `weight_scale` FP32 `[out, 1]`. An embedding has `embedding_quantized` and
`embedding_scale` in their place; of embeddings for each layer, a row has a scale for each layer's part. A value is
`code * bf16(scale)`, rounded to BF16, as transformers computes in BF16. How many bits a module has, the config says by
patterns of names, and nothing else: there are no shapes. So a width is taken for a whole number of bytes. transformers
fills up the last byte of others: the text's table refuses such ones, and a tower's would be too wide. Scales by which
inputs, outputs and a KV cache are rounded stay behind. Source: transformers 5.24 (integrations/gemma_quant.py,
QuantizedLinear, QuantizedEmbedding, replace_with_quant_layers; quantizers/quantizer_gemma.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import read_rows
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.codes import nibbles
from precisionctl.dtypes import DType
from precisionctl.errors import shown
from precisionctl.torch_when_used import torch
from precisionctl.untrusted.safe_patterns import Patterns

if TYPE_CHECKING:
    from torch import Tensor

_SCALES = {"weight": "weight_scale", "embedding_quantized": "embedding_scale"}
_BEHIND = ("input_activation_scale", "output_activation_scale", "k_cache_scale", "v_cache_scale")
_BITS = (2, 4, 8)


@dataclass(frozen=True)
class _WeightOfBits:
    """A weight's stored tensors, and the bits of its codes."""

    codes: str
    scale: str
    bits: int


class GemmaCodes(DecodedWeights):
    """The weights of a directory of Gemma's own codes."""

    def _find(self, quantization: Mapping[str, Any]) -> None:
        specs = self._stored.specs
        found = dict[str, tuple[str, str]]()
        for name, spec in specs.items():
            module, _, kind = name.rpartition(".")
            if kind in _SCALES and (kind != "weight" or spec.dtype in (DType.uint8, DType.int8)):
                found[module] = name, f"{module}.{_SCALES[kind]}"
                if kind != "weight":
                    self._check_alone(f"{module}.weight", name)
        bits = self._bits_of(found, quantization)
        self._weights = {f"{module}.weight": _WeightOfBits(*names, bits[module]) for module, names in found.items()}
        self.shapes = {name: self._shape(coded) for name, coded in self._weights.items()}
        read = {name for coded in self._weights.values() for name in (coded.codes, coded.scale)}
        strays = (name for name in specs if name.endswith((*_SCALES.values(),)) and name not in read)
        if stray := next(strays, None):
            raise self._damaged(stray, f"{stray} is there, and no codes", "Is every shard there?")
        self.behind = {name for name in specs if name.rpartition(".")[2] in _BEHIND}
        self.read = read | self.behind
        self.kinds = {f"{coded.bits}-bit integers" for coded in self._weights.values()}
        self._tables: dict[int, Tensor] = {}

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        coded = self._weights[name]
        scales = read_rows(self._stored, coded.scale, row, rows).bfloat16().float().unsqueeze(-1)
        packed = read_rows(self._stored, coded.codes, row, rows).reshape(-1)
        if coded.bits == 8:
            numbers = packed.float()
        else:
            if coded.bits not in self._tables:
                half = 1 << coded.bits - 1
                self._tables[coded.bits] = nibbles.numbers_in_bytes(coded.bits, range(-half, half))
            numbers = self._tables[coded.bits].index_select(0, packed.int()).view(torch.float32)
        return numbers.view(rows, scales.shape[1], -1).mul_(scales), coded.scale

    def _shape(self, coded: _WeightOfBits) -> tuple[int, int]:
        """The shape of a weight, `[out, in]`. Raises DamagedCheckpoint for tensors that are no codes and their
        scales."""
        codes, scale = self._stored.specs[coded.codes], self._present(coded.scale)
        word = DType.int8 if coded.bits == 8 else DType.uint8
        fits = codes.dtype == word and len(codes.shape) == 2 and all(codes.shape)
        columns = codes.columns * 8 // coded.bits if fits else 0
        fits = fits and scale.dtype == DType.float32 and len(scale.shape) == 2 and scale.rows == codes.rows
        parts = scale.columns if fits else 0
        if not parts or columns % parts or (parts > 1 and coded.scale.endswith(_SCALES["weight"])):
            there = " and ".join(
                f"{name} {spec.stored_dtype} {list(spec.shape)}"
                for name, spec in ((coded.codes, codes), (coded.scale, scale))
            )
            what = f"{there} are no codes of {coded.bits} bits with a scale for each row"
            raise self._damaged(coded.codes, what)
        return codes.rows, columns

    def _bits_of(self, modules: Iterable[str], quantization: Mapping[str, Any]) -> dict[str, int]:
        """The bits of each module's codes: those of the pattern that matches first in its name; of two that match at
        the same place, the first one."""
        usual, own = quantization.get("num_bits", 4), self._objects(quantization, "module_quant_configs")
        if strange := next((key for said in own.values() for key in said if key != "num_bits"), None):
            raise self._unread(f"{shown(strange)} in `module_quant_configs`, which is not read")
        bits = [said.get("num_bits", usual) for said in own.values()]
        if odd := [each for each in (usual, *bits) if type(each) is not int or each not in _BITS]:
            raise self._unread(f"codes with `num_bits` {shown(odd[0])}, which are not read")
        if not own:
            return dict.fromkeys(modules, usual)
        # each in a group, as in the one pattern that transformers joins them to
        patterns = Patterns(list(own), lambda why: self._unread(f"{why}, in `module_quant_configs`"), "(?:", ")")
        chosen = {module: patterns.first(module, anywhere=True) for module in modules}
        return {module: usual if first is None else bits[first] for module, first in chosen.items()}

"""Linears whose weights are stored as codes, and compute with these codes where engines do."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from precisionctl.checkpoints.base import Reader, packings_of
from precisionctl.checkpoints.chunks import read_tensor, read_values
from precisionctl.codes.elements import E4M3, Packing
from precisionctl.codes.encoding import Encoding, by_rows
from precisionctl.codes.numerics import BLOCK
from precisionctl.evaluate.input_formats import InputFormats
from precisionctl.evaluate.quantizers import (
    GroupInputs,
    InputQuantizer,
    Int8Inputs,
    Int8TokenInputs,
    Mxfp4Inputs,
    NativeStoredBlocks,
    Nvfp4Inputs,
    StaticInputs,
    StoredBlocks,
    StoredIntegers,
    StoredWeight,
    TokenInputs,
    has_block_gemms,
)
from precisionctl.export.weight_encodings import method_of, stored_weight_encodings
from precisionctl.param import gemm_misfit
from precisionctl.planning.plan import Job, Plan
from precisionctl.quant_methods.base import CODES, IN_FP8, InputFormat
from precisionctl.trainer.backends.emulated import GroupedLinear, Linear
from precisionctl.trainer.backends.fp8_gemm import Quantizer, Quantizers
from precisionctl.trainer.model.gpt import GPT


def use_stored_codes(model: GPT, reader: Reader, plan: Plan) -> str | None:
    """Let linears whose weights are stored as codes compute with these codes, where engines do. Returns the precision
    in words; None without codes."""
    stored = [job for job in plan.jobs if not reader.encodings.keys().isdisjoint(job.reads)]
    if not stored:
        return None
    codes, kinds = StoredCodes(reader, plan, stored, model.output_weight.device), dict[str, None]()
    for job in stored:
        module = model.get_submodule(job.module)
        computed = codes.computed(job, module)
        kinds[computed.words] = None
        if isinstance(computed, _WithCodes):
            # a linear requires a quantizer of its gradient too; no gradient is computed here
            inputs = computed.inputs
            quantizers: Quantizers = {"input": inputs, "weight": computed.weight, "grad_output": inputs}
            if isinstance(module, GroupedLinear):
                assert job.expert is not None
                module.quantizers[job.expert] = quantizers
            else:
                assert isinstance(module, Linear), "others are decoded"
                module.quantizers = quantizers
    return " and ".join(kinds) or None


@dataclass(frozen=True)
class _Decoded:
    """A module that computes with decoded weights, in words."""

    words: str


@dataclass(frozen=True)
class _WithCodes:
    """A linear, or one of an expert, that computes with its stored codes: codes of what name, and its quantizers."""

    name: str
    weight: Quantizer
    inputs: InputQuantizer

    @property
    def words(self) -> str:
        return f"{self.name} codes with {self.inputs.words} input scales"


class StoredCodes:
    """The codes of a checkpoint that jobs of its plan read, on a device. A module has one static input scale, the
    largest of its weights and experts, as in engines."""

    def __init__(self, reader: Reader, plan: Plan, stored: list[Job], device: torch.device) -> None:
        self.reader, self.plan, self.device = reader, plan, device
        self.packings, self.encodings = packings_of(reader), stored_weight_encodings(reader)
        method = method_of(self.encodings)
        self.formats = InputFormats(self.encodings, method) if self.encodings and method else None
        self.fixed_scales = dict.fromkeys((job.module for job in stored), 0.0)
        """The static scale_inv of each module's inputs; 0 where it is not static."""
        if self.encodings:
            named = {name: job.module for job in stored for name in job.reads if name in self.encodings.weights}
            for name, at in named.items():
                self.fixed_scales[at] = max(self.fixed_scales[at], self.encodings.input_scale(name) or 0.0)

    def computed(self, job: Job, module: nn.Module) -> _Decoded | _WithCodes:
        """How a module whose weight is stored as codes computes. Linears whose inputs engines leave as they are,
        indexers, DeepSeek-V4's projection by groups, and what is joined of codes and values compute with decoded
        weights."""
        packing, fixed_scale = self.packings.get(job.reads[0]), self.fixed_scales[job.module]
        name = packing.name if packing else "FP8"
        if not isinstance(module, Linear | GroupedLinear):
            return _Decoded(f"weights from {name}")
        if not self.reader.encodings.keys() >= set(job.reads):  # such as a delta net's, whose smallest parts stay BF16
            return _Decoded(f"weights from {name} (not computed: inputs of linears that are codes in part)")
        made = self.formats.of(job.reads) if self.formats else IN_FP8
        if packing and (packed_inputs := self._packed_inputs(job, packing, made)) is not None:
            integers = isinstance(packed_inputs, Int8Inputs | Int8TokenInputs) and self._by_row(job)
            return _WithCodes(name, self._integers(job) if integers else self._blocks(job), packed_inputs)
        if packing or made is None or made.element is None:
            uncomputed = f" (not computed: inputs of {made.words})" if made and made.element is None else ""
            return _Decoded(f"weights from {name}{uncomputed}")
        static = StaticInputs(torch.tensor(fixed_scale, device=self.device)) if fixed_scale else None
        if self._by_row(job):
            weight = self._fp8_by_row(job) if self._in_e4m3(job) else self._blocks(job)
            return _WithCodes(name, weight, static or TokenInputs(made.bound))
        squares = self._squares(job) if self._in_e4m3(job) and not fixed_scale else None
        groups = replace(GroupInputs.like(self.reader.encodings[job.reads[0]]), native=squares is not None)
        return _WithCodes(name, squares or self._blocks(job), static or groups)

    def _packed_inputs(
        self, job: Job, packing: Packing, made: InputFormat | None
    ) -> Nvfp4Inputs | Mxfp4Inputs | Int8Inputs | Int8TokenInputs | TokenInputs | None:
        """How engines round the inputs of weights that are packed codes; None where they do not. Of several scales that
        are computed as one, engines take the largest number that is stored, or, with zero points, the range of all."""
        encodings, device = self.encodings, self.device
        if encodings is None:
            return None
        if given := [scale for name in job.reads if (scale := encodings.stored_input_scale(name)) is not None]:
            stored = torch.stack(given)
            largest = stored.amax().to(device)
            if packing.element.is_integer:
                zeros = [zero for name in job.reads if (zero := encodings.input_zero_point(name)) is not None]
                if not zeros:
                    return Int8Inputs(largest)
                ranges = [stored * (end - torch.tensor(zeros)) for end in (-128, 127)]
                return Int8Inputs.of_range(ranges[0].amin().to(device), ranges[1].amax().to(device))
            return Nvfp4Inputs(largest if encodings.scales[job.reads[0]].divides else largest.reciprocal())
        if made is None or made.element is None:
            return None
        if made.element.is_fp8:
            return TokenInputs()
        return Int8TokenInputs(made.zero_point) if made.element.is_integer else Mxfp4Inputs(made.even)

    def _by_row(self, job: Job) -> bool:
        """Whether the scales can be applied to a GEMM's result: one per output channel, or one for the whole weight."""
        return all(self.reader.encodings[name].scale_inv.shape[1] == 1 for name in job.reads)

    def _in_e4m3(self, job: Job) -> bool:
        """Whether the FP8 codes are those that engines multiply; others, which no engine takes, are decoded."""
        return all(self.reader.specs[name].dtype == CODES for name in job.reads)

    def _merged(self, job: Job, parts: list[Tensor]) -> Tensor:
        """The parts of a fused weight as one."""
        return job.row.source.merge(parts, self.plan.model)

    def _codes(self, job: Job) -> Tensor:
        codes = [read_tensor(self.reader, name).view(torch.uint8) for name in job.reads]  # torch cannot cut FP8 tensors
        return self._merged(job, codes).view(CODES.torch)

    def _fp8_by_row(self, job: Job) -> StoredWeight:
        """A fused weight's codes `[out, in]`, and a scale_inv for each row, FP32 `[out, 1]`."""
        named = [(name, self.reader.specs[name].shape) for name in job.reads]
        by_row = [self.reader.encodings[name].scales(0, *shape).expand(shape[0], 1) for name, shape in named]
        return StoredWeight(self._codes(job).to(self.device), self._merged(job, by_row).to(self.device))

    def _integers(self, job: Job) -> StoredIntegers:
        """A fused weight's numbers, FP32 `[out, in]`, and a scale_inv for each row, FP32 `[out, 1]`."""
        numbers, by_row = [], []
        for name in job.reads:
            encoding, rows = self.reader.encodings[name], self.reader.specs[name].rows
            plain = replace(encoding, scale_inv=torch.ones_like(encoding.scale_inv))
            numbers.append(plain.decode_rows(read_tensor(self.reader, name), 0))
            by_row.append(encoding.scales(0, rows, 1).expand(rows, 1))
        return StoredIntegers(self._merged(job, numbers).to(self.device), self._merged(job, by_row).to(self.device))

    def _squares(self, job: Job) -> NativeStoredBlocks | None:
        """A fused weight in blocks of 128 x 128, if the device has block-scaled GEMMs; None if it has not, if the
        blocks of the fused parts do not line up, or if its sizes do not suit an FP8 GEMM."""
        encodings = [self.reader.encodings[name] for name in job.reads]
        if not has_block_gemms(self.device) or any(encoding.block[1] != BLOCK for encoding in encodings):
            return None
        grids = [by_rows(each, self.reader.specs[name].rows) for each, name in zip(encodings, job.reads, strict=True)]
        codes, grid = self._codes(job), self._merged(job, grids)
        rows, columns = codes.shape
        squares = Encoding(E4M3, grid, (1, BLOCK)).in_blocks(rows, columns, (BLOCK, BLOCK))
        if gemm_misfit((rows, columns)) or columns % BLOCK or bool(squares.isnan().any()):
            return None
        return NativeStoredBlocks(codes.to(self.device), squares.contiguous().to(self.device))

    def _blocks(self, job: Job) -> StoredBlocks:
        """A fused weight decoded, FP32 `[out, in]`."""
        parts = [read_values(self.reader, self.reader.encodings, name) for name in job.reads]
        return StoredBlocks(self._merged(job, parts).to(self.device))

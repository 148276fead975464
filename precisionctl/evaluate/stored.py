"""A checkpoint as a model that computes in the precision it is stored in.

Codes compute as in an engine: the stored codes are the weights, and inputs are cast with their static scale, or with
one scale per token, or per group of a token where weights have blocks; or stay as they are, beside weights that engines
decode. A Megatron checkpoint with delayed-scaling state in its `_extra_state` computes in FP8 with the scales that its
next training step would use, and so does an export for Transformer Engine. A checkpoint of `resume` under an FP8 recipe
without state computes by that recipe; one whose last step was in BF16 computes in BF16, whatever state it carries.
Everything else is plain BF16, FP16 or FP32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from precisionctl.checkpoints.base import Reader, packings_of
from precisionctl.checkpoints.chunks import read_tensor, read_values
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.megatron.logical import EMBEDDING
from precisionctl.checkpoints.module import LiveModel
from precisionctl.codes.elements import E4M3, Packing
from precisionctl.codes.encoding import Encoding, by_rows
from precisionctl.codes.numerics import BLOCK
from precisionctl.codes.statistics import NAMES
from precisionctl.conversion.convert import convert
from precisionctl.conversion.known_state import is_of_weights
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.engines.rules.ignore_lists import in_time
from precisionctl.evaluate.cache import round_cached
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
from precisionctl.export.kv_cache import stored_scales
from precisionctl.export.weight_encodings import method_of, stored_weight_encodings
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8States
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Job, Plan
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import CODES, IN_FP8, InputFormat
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.backends.emulated import GroupedLinear, Linear
from precisionctl.trainer.backends.fp8_gemm import Quantizer, Quantizers
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.saved.run_folder import ended_in_bf16, recipe_of_run


def load(reader: Reader, device: torch.device | str = "cpu", *, plain: bool = False) -> tuple[GPT, str]:
    """The model of a checkpoint, which computes in the precision it is stored in, and that precision in words.

    A `plain` model computes with the values, codes decoded, in the dtype of the values that are not codes."""
    plan = make_plan(reader, "megatron").text
    dtype = plan.targets[EMBEDDING].dtype  # never codes, so that of all values that are none
    in_fp8 = not (plain or ended_in_bf16(reader))
    states = _state_of_next_step(reader) if in_fp8 else None
    precision = _precision(reader, states, plan) if in_fp8 else Precision(fp8=False)
    model = GPT(plan.model, precision, "emulated", dtype.torch, device)
    convert(plan, reader, LiveModel(plan.model, dict(model.named_parameters())))
    stored = dtype.value
    if plain:
        return model, stored
    if not precision.fp8:
        with in_time():
            codes = _use_stored_codes(model, reader, plan)
        words = f"{stored}, with {codes}" if codes and codes.startswith("weights") else codes or stored
        return model, words + _round_cache(model, reader, plan)
    if states:
        for name, linear in fp8_linears(model).items():
            linear.set_fp8_state(states.modules[name])
    return model, f"FP8 with {NAMES[precision.scaling]} scaling, {stored} weights"


def _round_cache(model: GPT, reader: Reader, plan: Plan) -> str:
    """If a directory has scales of an FP8 KV cache, round keys and values as that cache does. Returns the words to add
    to the precision, or nothing."""
    if not isinstance(reader, HuggingFaceReader):
        return ""
    quantization = reader.config.get("quantization_config") or {}
    exported = quantization.get("export")  # Quark's
    by_quark = isinstance(exported, Mapping) and exported.get("kv_cache_group")
    if not (quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo") or by_quark):
        return ""
    scales = stored_scales(reader.weight_encodings, plan)
    for name, scale in scales.items():
        round_cached(model.get_submodule(name), scale)
    return ", FP8 KV cache" if scales else ""


def _state_of_next_step(reader: Reader) -> Fp8States | None:
    """The state that the checkpoint's next training step would compute with; None if that step is not in FP8.

    State in a sidecar is only carried: its modules compute in BF16. State is not used either if an input has no
    recorded scale (a weight may have none: it is 1 for a weight of zeros), or if it was recorded with other weights.
    """
    states = reader.live_fp8 if isinstance(reader, HuggingFaceReader) else reader.fp8
    if states is None or not is_of_weights(states, digest_weights(reader), reader):
        return None
    if isinstance(reader, HuggingFaceReader) or reader.path is None:
        return states
    carried = sidecar.find(reader.path)
    live = states.without(carried.modules) if carried else states
    inputs = [state.roles["input"] for state in live.modules.values() if state.of_gemm]
    return live if inputs and all(part.recorded for part in inputs) else None


def _precision(reader: Reader, states: Fp8States | None, plan: Plan) -> Precision:
    """The precision of the checkpoint's next training step."""
    if states is None:
        recipe = recipe_of_run(reader)
        stateless = recipe is not None and recipe.precision.fp8 and not recipe.precision.keeps_state
        return recipe.precision.of_layers(plan.model.num_layers) if recipe and stateless else Precision(fp8=False)
    kept = tuple(name for name in plan.gemms if name not in states.modules)
    return Precision(fp8=True, delayed=states.recipe, keep_bf16=kept)


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


def _use_stored_codes(model: GPT, reader: Reader, plan: Plan) -> str | None:
    """Let linears whose weights are stored as codes compute with these codes, where engines do. A module has one static
    input scale, the largest of its weights and experts, as in engines. Returns the precision in words; None without
    codes."""
    device, packed = model.output_weight.device, packings_of(reader)
    stored = [job for job in plan.jobs if not reader.encodings.keys().isdisjoint(job.reads)]
    if not stored:
        return None
    encodings = stored_weight_encodings(reader)
    method = method_of(encodings)
    formats = InputFormats(encodings, method) if encodings and method else None
    fixed = dict.fromkeys((job.module for job in stored), 0.0)
    if encodings:
        named = {name: job.module for job in stored for name in job.reads if name in encodings.weights}
        for name, at in named.items():
            fixed[at] = max(fixed[at], encodings.input_scale(name) or 0.0)
    kinds: dict[str, None] = {}
    for job in stored:
        module, packing, fixed_scale = model.get_submodule(job.module), packed.get(job.reads[0]), fixed[job.module]
        computed = _computed(module, job, packing, fixed_scale, reader, plan, encodings, formats, device)
        if isinstance(computed, _WithCodes):
            _set_quantizers(module, job, computed)
        kinds[computed.words] = None
    return " and ".join(kinds) or None


def _computed(
    module: torch.nn.Module,
    job: Job,
    packing: Packing | None,
    fixed_scale: float,
    reader: Reader,
    plan: Plan,
    encodings: WeightEncodings | None,
    formats: InputFormats | None,
    device: torch.device,
) -> _Decoded | _WithCodes:
    """How a module whose weight is stored as codes computes. Linears whose inputs engines leave as they are, indexers,
    DeepSeek-V4's projection by groups, and what is joined of codes and values compute with decoded weights. The scale
    of inputs is static if it is `fixed_scale`, not 0."""
    name = packing.name if packing else "FP8"
    if not isinstance(module, Linear | GroupedLinear):
        return _Decoded(f"weights from {name}")
    if not reader.encodings.keys() >= set(job.reads):  # such as a delta net's, whose smallest parts stay BF16
        return _Decoded(f"weights from {name} (not computed: inputs of linears that are codes in part)")
    made = formats.of(job.reads) if formats else IN_FP8
    if encodings and packing:
        packed_inputs = _packed_inputs(encodings, made, job, packing, device)
        if packed_inputs is not None:
            by_row = isinstance(packed_inputs, Int8Inputs | Int8TokenInputs) and _by_row(reader, job)
            weight = (_stored_integers if by_row else _stored_blocks)(reader, job, plan, device)
            return _WithCodes(name, weight, packed_inputs)
    if packing or made is None or made.element is None:
        uncomputed = f" (not computed: inputs of {made.words})" if made and made.element is None else ""
        return _Decoded(f"weights from {name}{uncomputed}")
    static = _static_inputs(fixed_scale, device)
    if _by_row(reader, job):
        by_rows_of = _stored_weight if _in_e4m3(reader, job) else _stored_blocks
        return _WithCodes(name, by_rows_of(reader, job, plan, device), static or TokenInputs(made.bound))
    native = _in_e4m3(reader, job) and not fixed_scale
    squares = _stored_squares(reader, job, plan, device) if native else None
    groups = replace(GroupInputs.like(reader.encodings[job.reads[0]]), native=squares is not None)
    return _WithCodes(name, squares or _stored_blocks(reader, job, plan, device), static or groups)


def _static_inputs(scale_inv: float, device: torch.device) -> StaticInputs | None:
    return StaticInputs(torch.tensor(scale_inv, device=device)) if scale_inv else None


def _packed_inputs(
    encodings: WeightEncodings, made: InputFormat | None, job: Job, packing: Packing, device: torch.device
) -> Nvfp4Inputs | Mxfp4Inputs | Int8Inputs | Int8TokenInputs | TokenInputs | None:
    """How engines round the inputs of weights that are packed codes; None where they do not. Of several scales that are
    computed as one, engines take the largest number that is stored, or, with zero points, the range of all."""
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


def _by_row(reader: Reader, job: Job) -> bool:
    """Whether the scales can be applied to a GEMM's result: one per output channel, or one for the whole weight."""
    return all(reader.encodings[name].scale_inv.shape[1] == 1 for name in job.reads)


def _in_e4m3(reader: Reader, job: Job) -> bool:
    """Whether the FP8 codes are those that engines multiply; others, which no engine takes, are decoded."""
    return all(reader.specs[name].dtype == CODES for name in job.reads)


def _set_quantizers(linear: torch.nn.Module, job: Job, computed: _WithCodes) -> None:
    # A linear requires a quantizer of its gradient too; no gradient is computed here.
    quantizers: Quantizers = {"input": computed.inputs, "weight": computed.weight, "grad_output": computed.inputs}
    if isinstance(linear, GroupedLinear):
        assert job.expert is not None
        linear.quantizers[job.expert] = quantizers
    else:
        assert isinstance(linear, Linear), "others are decoded"
        linear.quantizers = quantizers


def _stored_weight(reader: Reader, job: Job, plan: Plan, device: torch.device) -> StoredWeight:
    """A fused weight's codes `[out, in]`, and a scale_inv for each row, FP32 `[out, 1]`."""
    named = [(name, reader.specs[name].shape) for name in job.reads]
    by_row = [reader.encodings[name].scales(0, *shape).expand(shape[0], 1) for name, shape in named]
    return StoredWeight(
        _merged_codes(reader, job, plan).to(device), job.row.source.merge(by_row, plan.model).to(device)
    )


def _stored_integers(reader: Reader, job: Job, plan: Plan, device: torch.device) -> StoredIntegers:
    """A fused weight's numbers, FP32 `[out, in]`, and a scale_inv for each row, FP32 `[out, 1]`."""
    numbers, by_row = [], []
    for name in job.reads:
        encoding, rows = reader.encodings[name], reader.specs[name].rows
        plain = replace(encoding, scale_inv=torch.ones_like(encoding.scale_inv))
        numbers.append(plain.decode_rows(read_tensor(reader, name), 0))
        by_row.append(encoding.scales(0, rows, 1).expand(rows, 1))
    merge, model = job.row.source.merge, plan.model
    return StoredIntegers(merge(numbers, model).to(device), merge(by_row, model).to(device))


def _merged_codes(reader: Reader, job: Job, plan: Plan) -> Tensor:
    codes = [read_tensor(reader, name).view(torch.uint8) for name in job.reads]  # torch cannot cut FP8 tensors
    return job.row.source.merge(codes, plan.model).view(CODES.torch)


def _stored_squares(reader: Reader, job: Job, plan: Plan, device: torch.device) -> NativeStoredBlocks | None:
    """A fused weight in blocks of 128 x 128, if the device has block-scaled GEMMs; None if it has not, if the blocks of
    the fused parts do not line up, or if its sizes do not suit an FP8 GEMM."""
    encodings = [reader.encodings[name] for name in job.reads]
    if not has_block_gemms(device) or any(encoding.block[1] != BLOCK for encoding in encodings):
        return None
    grids = [by_rows(each, reader.specs[name].rows) for each, name in zip(encodings, job.reads, strict=True)]
    codes, grid = _merged_codes(reader, job, plan), job.row.source.merge(grids, plan.model)
    rows, columns = codes.shape
    squares = Encoding(E4M3, grid, (1, BLOCK)).in_blocks(rows, columns, (BLOCK, BLOCK))
    if rows % 16 or columns % BLOCK or bool(squares.isnan().any()):
        return None
    return NativeStoredBlocks(codes.to(device), squares.contiguous().to(device))


def _stored_blocks(reader: Reader, job: Job, plan: Plan, device: torch.device) -> StoredBlocks:
    """A fused weight decoded, FP32 `[out, in]`."""
    parts = [read_values(reader, reader.encodings, name) for name in job.reads]
    return StoredBlocks(job.row.source.merge(parts, plan.model).to(device))

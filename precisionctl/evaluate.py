"""evaluate: perplexity on text, in the precision that a checkpoint is stored in.

FP8 codes are evaluated as an engine computes with them: the stored codes as weights, inputs cast with their
static scale, or with one for each token, or for each group of a token where weights have blocks. A Megatron
checkpoint with delayed-scaling state in its `_extra_state` is evaluated in FP8 with the scales it would go on with.
Everything else is plain BF16, FP16 or FP32.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from precisionctl import convert
from precisionctl.checkpoints.base import Reader, read_tensor
from precisionctl.checkpoints.module import LiveModel
from precisionctl.fp8 import numerics, sidecar
from precisionctl.fp8.encoding import Encoding
from precisionctl.fp8.state import Fp8States
from precisionctl.plan import Job, Plan, make_plan
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import CODES
from precisionctl.trainer.backend import fp8_linears
from precisionctl.trainer.data import Rows, load_rows
from precisionctl.trainer.loop import summed_loss
from precisionctl.trainer.model import GPT
from precisionctl.trainer.modules_emulated import GroupedLinear, Linear, Quantized, Quantizers
from precisionctl.trainer.tokenizer import load_tokenizer

ROWS_AT_A_TIME = 4

EMBEDDING = "embedding.word_embeddings.weight"
"""Never FP8 codes: its dtype is that of all values beside them."""

OnRows = Callable[[int, int], None]
"""Hears of rows evaluated, and of all rows."""


@dataclass(frozen=True)
class Evaluation:
    """`loss` is the mean cross entropy in nats over `tokens` targets; perplexity is its exponential."""

    perplexity: float
    loss: float
    tokens: int
    precision: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    reader: Reader,
    data: Path,
    *,
    sequence_length: int = 1024,
    device: torch.device | str = "cpu",
    on_rows: OnRows = lambda done, total: None,
) -> Evaluation:
    """Perplexity of a checkpoint on a text file (or JSONL, as `resume` takes it), with the checkpoint's tokenizer.

    The text is cut into rows of `sequence_length` targets (at most the model's own), each without the context of
    the one before; a shorter rest is left out. Raises DataError for text or a tokenizer that cannot be used.
    """
    length = min(sequence_length, reader.model.max_position_embeddings)
    rows = load_rows(data, load_tokenizer(reader.companions), length)
    rows.require_vocabulary(reader.model.vocab_size)
    model, precision = load(reader, device)
    loss, tokens = _score(model, rows, on_rows)
    return Evaluation(math.exp(loss), loss, tokens, precision)


def _score(model: GPT, rows: Rows, on_rows: OnRows) -> tuple[float, int]:
    total, tokens = 0.0, 0
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        end = min(start + ROWS_AT_A_TIME, len(rows))
        batch = rows.batch(range(start, end)).to(model.output_weight.device)
        with torch.no_grad():
            total += float(summed_loss(model, batch))
        tokens += batch.targets
        on_rows(end, len(rows))
    return total / tokens, tokens


def load(reader: Reader, device: torch.device | str = "cpu") -> tuple[GPT, str]:
    """The model of a checkpoint, ready to compute in the precision it is stored in, and that precision in words."""
    dtype = make_plan(reader, "megatron").targets[EMBEDDING].dtype
    plan = make_plan(reader, "megatron", dtype=dtype)
    states = _live_state(reader)
    model = GPT(plan.model, _precision(states, plan), "emulated", dtype, device)
    convert.run(plan, reader, LiveModel(plan.model, dict(model.named_parameters())))
    stored = str(dtype).removeprefix("torch.")
    if states is None:
        return model, _quantise(model, reader, plan) or stored
    for name, linear in fp8_linears(model).items():
        linear.set_fp8_state(states.modules[name])
    return model, f"FP8 with delayed scaling, {stored} weights"


def _live_state(reader: Reader) -> Fp8States | None:
    """The state that the checkpoint's next step would compute with; None where that step is not in FP8.

    State in a sidecar is carried, not used: its modules are in BF16. State that lacks a scale is none yet.
    """
    states = reader.fp8
    if states is None or reader.layout != "megatron" or reader.path is None:
        return None
    carried = sidecar.find(reader.path)
    live = states.without(carried.modules) if carried else states
    used = [state.roles[role] for state in live.modules.values() if state.of_gemm for role in ("input", "weight")]
    return live if used and all(role.recorded for role in used) else None


def _precision(states: Fp8States | None, plan: Plan) -> Precision:
    if states is None:
        return Precision(fp8=False)
    kept = tuple(name for name in plan.gemms if name not in states.modules)
    return Precision(fp8=True, delayed=states.recipe, keep_bf16=kept)


@runtime_checkable
class _HasInputScales(Protocol):
    """A Hugging Face directory: it knows the static input scale_inv of its weights, by the weight's name."""

    @property
    def input_scales(self) -> Mapping[str, float]: ...


def _quantise(model: GPT, reader: Reader, plan: Plan) -> str | None:
    """Let linears whose weights are stored as codes compute with those, under one input scale for a module, all of its
    experts, as engines do. Returns how, in words.
    """
    scales = reader.input_scales if isinstance(reader, _HasInputScales) else {}
    device = model.output_weight.device
    stored = [job for job in plan.jobs if any(name in reader.encodings for name in job.reads)]
    fixed: dict[str, float] = {}
    for job in stored:
        for name in job.reads:
            fixed[job.module] = max(fixed.get(job.module, 0.0), scales.get(name, 0.0))
    kinds: dict[str, None] = {}
    for job in stored:
        by_row = _by_row(reader, job)
        groups = None if by_row else GroupInputs.like(reader.encodings[job.reads[0]])
        inputs = _inputs(fixed[job.module], groups, device)
        weight = _stored_weight(reader, job, plan, device) if by_row else _stored_blocks(reader, job, plan, device)
        # A linear asks for its gradient's quantizer too; no gradient is taken here.
        _set_quantizers(model, job, {"input": inputs, "weight": weight, "grad_output": inputs})
        kinds[inputs.words] = None
    return f"FP8 codes with {' and '.join(kinds)} input scales" if stored else None


def _inputs(
    fixed: float, groups: "GroupInputs | None", device: torch.device
) -> "StaticInputs | TokenInputs | GroupInputs":
    return StaticInputs(torch.tensor(fixed, device=device)) if fixed else groups or TokenInputs()


def _by_row(reader: Reader, job: Job) -> bool:
    """Whether codes have scales that can be applied to a GEMM's result: one for each output channel, or for all."""
    return all(reader.encodings[name].scale_inv.shape[1] == 1 for name in job.reads)


def _set_quantizers(model: GPT, job: Job, quantizers: Quantizers) -> None:
    linear = model.get_submodule(job.module)
    if isinstance(linear, GroupedLinear):
        assert job.expert is not None
        linear.quantizers[job.expert] = quantizers
    else:
        assert isinstance(linear, Linear), "nothing else has weights that are codes"
        linear.quantizers = quantizers


def _stored_weight(reader: Reader, job: Job, plan: Plan, device: torch.device) -> "StoredWeight":
    """A fused weight's codes `[out, in]`, and a scale_inv for each of its rows."""
    codes = [read_tensor(reader, name).view(torch.uint8) for name in job.reads]  # torch cannot cut FP8 tensors
    named = zip(job.reads, codes, strict=True)
    by_row = [reader.encodings[name].scales(0, *part.shape).expand(len(part), 1) for name, part in named]
    merged = job.row.merge(codes, plan.model).view(CODES)
    return StoredWeight(merged.to(device), job.row.merge(by_row, plan.model).to(device))


def _stored_blocks(reader: Reader, job: Job, plan: Plan, device: torch.device) -> "StoredBlocks":
    """What a fused weight's codes decode to, FP32 `[out, in]`."""
    parts = [reader.encodings[name].decode_rows(read_tensor(reader, name), 0, torch.float32) for name in job.reads]
    return StoredBlocks(job.row.merge(parts, plan.model).to(device))


@dataclass(frozen=True)
class StoredBlocks:
    """A weight whose blocks have scales, decoded. Engines' kernels apply those within the sum, in FP32, so products of
    decoded numbers in FP32 are theirs but for the order of FP32's own roundings."""

    values: Tensor

    def quantize(self, values: Tensor) -> Quantized:
        return Quantized(self.values, self.values.new_ones(()))


@dataclass(frozen=True)
class StoredWeight:
    """A weight that is codes already: `scale_inv` is FP32 `[out, 1]`."""

    codes: Tensor
    scale_inv: Tensor

    def quantize(self, values: Tensor) -> Quantized:
        return Quantized(self.codes, self.scale_inv.t())


@dataclass(frozen=True)
class StaticInputs:
    """Inputs under one fixed scale_inv, FP32 `[]`, multiplied by its reciprocal as vLLM does
    (csrc/quantization/w8a8/fp8/common.cu, static_scaled_fp8_quant)."""

    scale_inv: Tensor
    words = "static"

    def quantize(self, values: Tensor) -> Quantized:
        return Quantized(numerics.encode(values, self.scale_inv.reciprocal(), CODES), self.scale_inv)


SMALLEST_TOKEN_SCALE = 1 / (448 * 512)
"""vLLM's floor for a token's scale_inv (csrc/quantization/utils.cuh, min_scaling_factor)."""


@dataclass(frozen=True)
class TokenInputs:
    """Inputs `[tokens, in]` with a scale_inv for each token, its amax / 448, divided by it as vLLM does
    (dynamic_per_token_scaled_fp8_quant)."""

    words = "dynamic per-token"

    def quantize(self, values: Tensor) -> Quantized:
        amax = values.abs().amax(1, keepdim=True).float()
        scale_inv = (amax / numerics.FP8_MAX[CODES]).clamp_min(SMALLEST_TOKEN_SCALE)
        codes = torch.empty(values.shape, dtype=CODES, device=values.device)
        numerics.encode_by_scale_inv(values, scale_inv, codes, torch.empty(numerics.PIECE, device=values.device))
        return Quantized(codes, scale_inv)


SMALLEST_GROUP_AMAX = 1e-10
"""vLLM's and SGLang's floor for the amax of a group (per_token_group_quant_fp8, eps)."""


@dataclass(frozen=True)
class GroupInputs:
    """Inputs `[tokens, in]` with a scale_inv for so many values of each token, their amax / 448, divided by it as
    vLLM's and SGLang's kernels do (per_token_group_quant_fp8), or by the next power of two where weights have such
    scales. A last group may be shorter."""

    size: int
    power_of_2: bool = False

    @classmethod
    def like(cls, weight: Encoding) -> "GroupInputs":
        """For the inputs of a weight that is encoded so."""
        return cls(weight.block[1], weight.scale_inv.dtype.itemsize == 1)

    @property
    def words(self) -> str:
        return f"dynamic per-{self.size}"

    def quantize(self, values: Tensor) -> Quantized:
        tokens, columns = values.shape
        groups = torch.nn.functional.pad(values.float(), (0, -columns % self.size)).view(-1, self.size)
        amax = groups.abs().amax(1, keepdim=True).clamp_min(SMALLEST_GROUP_AMAX)
        scale_inv = amax / numerics.FP8_MAX[CODES]
        if self.power_of_2:
            scale_inv = numerics.power_of_2_above(scale_inv)
        codes = torch.empty(groups.shape, dtype=CODES, device=values.device)
        numerics.encode_by_scale_inv(groups, scale_inv, codes, torch.empty(numerics.PIECE, device=values.device))
        decoded = numerics.decode(codes, scale_inv).view(tokens, -1)[:, :columns]
        return Quantized(decoded, decoded.new_ones(()))

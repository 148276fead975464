"""How the weights of a checkpoint are encoded, or once were, under the names of a Hugging Face directory.

Encodings are kept beside values unchanged, so a conversion that moves rows need not move scales. Only for codes that
are stored under other names (Megatron's, or experts in one tensor) are scales moved like their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from precisionctl.checkpoints.adapter.reader import AdapterReader
from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.chunks import Chunk, whole
from precisionctl.checkpoints.hf_directory import encodings_file
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.checkpoints.huggingface import HuggingFaceTensors
from precisionctl.codes.encoding import Encoding, by_rows, from_rows
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.dtypes import DType
from precisionctl.errors import MappingError
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import TensorSpec, is_slice
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Job, Plan
from precisionctl.quant_methods.base import QuantMethod
from precisionctl.quant_methods.coded_weights import recognise
from precisionctl.quant_methods.scales import Scales, sibling
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


def weight_encodings(reader: Reader) -> WeightEncodings | None:
    """How a checkpoint's weights are encoded, or once were, under the names that they get in a Hugging Face directory.
    None if they never were, or nothing is known of it."""
    if isinstance(reader, AdapterReader):
        return weight_encodings(reader.base)
    encodings = stored_weight_encodings(reader)
    method = method_of(encodings)
    if method and method.own_names:  # gpt-oss: codes are `[out, in]` under them
        return encodings
    in_one = any(is_slice(name) for name in reader.encodings) and not isinstance(reader.model, UntabledModel)
    if reader.encodings and (reader.layout == "megatron" or in_one):
        encodings = _moved(reader, encodings)
    if reader.encodings and encodings and encodings.has_fixed_scales:
        return replace(encodings, of_weights=digest_weights(reader))
    return encodings


def method_of(encodings: WeightEncodings | None) -> QuantMethod | None:
    """The quant method of the directory that encodings come from; None if they do not come from one."""
    return recognise({"quantization_config": encodings.quantization}) if encodings else None


def stored_weight_encodings(reader: Reader) -> WeightEncodings | None:
    """The encodings in a checkpoint's own files, by the names there; no scales are moved."""
    if isinstance(reader, HuggingFaceTensors):
        return reader.weight_encodings
    return encodings_file.find(reader.path) if reader.path and not reader.encodings else None


def _moved(reader: Reader, encodings: WeightEncodings | None) -> WeightEncodings:
    """The encodings of codes that are stored under other names, with scales moved as a conversion moves their rows.

    `encodings` has what else is known of them, such as input scales.
    """
    method = method_of(encodings)
    kinds = (method.weight_scales[0], method.input_scales[0]) if method else ("weight_scale", "input_scale")
    weights: dict[str, TensorSpec] = {}
    scales: dict[str, Scales] = {}
    plan = make_plan(reader, "hf", naming="as saved")
    stored = _Moved(reader, plan)
    for job in plan.jobs:
        if not any(name in reader.encodings for name in job.reads):
            continue
        if not all(name in reader.encodings for name in job.reads) or not job.row.moves_rows(plan.model):
            continue  # rows of the result are no rows of codes
        given = [encodings.input_amax(name) for name in job.reads] if encodings else [None]
        for name, encoding in zip(job.writes, _encodings(reader, job, plan), strict=False):
            packing = reader.specs[job.reads[0]].packing
            weights[name] = TensorSpec(plan.targets[name].shape, encoding.element.dtype, packing=packing)
            scales[name] = Scales(
                sibling(name, kinds[0]), sibling(name, kinds[1]) if given[0] is not None else None, encoding.block
            )
            stored.add(scales[name].weight, encoding.scale_inv, job, name)
            if (fixed := scales[name].input) is not None:
                amax = torch.stack([amax for amax in given if amax is not None]).amax()
                stored.add_fixed(fixed, scales[name].of_input_amax(amax))
    quantization, files = (encodings.quantization, encodings.files) if encodings else ({}, {})
    return WeightEncodings(weights, scales, stored, quantization, files)


def _encodings(reader: Reader, job: Job, plan: Plan) -> list[Encoding]:
    """The encoding of each tensor that a job writes."""
    read = [reader.encodings[name] for name in job.reads]
    parts = [by_rows(encoding, reader.specs[name].rows) for name, encoding in zip(job.reads, read, strict=True)]
    whole_grid = parts[0] if plan.from_layout == "megatron" else job.row.source.merge(parts, plan.model)
    grids = job.row.split(whole_grid, plan.model)
    columns = [plan.targets[name].columns for name in job.writes]
    return [from_rows(grid, read[0], wide) for grid, wide in zip(grids, columns, strict=False)]


class _Moved:
    """Scales that are moved on access, as all grids of a large model would take gigabytes. Those of the last job are
    cached."""

    def __init__(self, reader: Reader, plan: Plan) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self._reader, self._plan = reader, plan
        self._jobs: dict[str, tuple[Job, str]] = {}
        self._fixed: dict[str, Tensor] = {}
        self._last: tuple[Job, dict[str, Tensor]] | None = None

    def add(self, name: str, scale_inv: Tensor, job: Job, weight: str) -> None:
        """Add the scales of a weight that a job writes; only the shape and dtype of `scale_inv` are kept."""
        self.specs[name] = TensorSpec(tuple(scale_inv.shape), DType.of(scale_inv.dtype))
        self._jobs[name] = job, weight

    def add_fixed(self, name: str, value: Tensor) -> None:
        """Take the one fixed scale of a weight's input."""
        self._fixed[name] = value
        self.specs[name] = TensorSpec((), DType.float32)

    def chunks(self, name: str) -> Sequence[Chunk]:
        if name in self._fixed:
            return [Chunk(whole(self.specs[name]), self._fixed[name])]
        job, weight = self._jobs[name]
        if self._last is None or self._last[0] is not job:
            encodings = zip(job.writes, _encodings(self._reader, job, self._plan), strict=False)
            self._last = job, {written: encoding.scale_inv.contiguous() for written, encoding in encodings}
        return [Chunk(whole(self.specs[name]), self._last[1][weight])]


def check_model(encodings: WeightEncodings, plan: Plan) -> None:
    """Raise MappingError if encodings are not of the model that a plan writes."""
    for name, spec in encodings.weights.items():
        if name not in plan.targets or plan.targets[name].shape != spec.shape:
            raise MappingError(
                f"the encodings are of a `{name}` of {list(spec.shape)}, which this model does not have",
                where=encodings.path,
                do="Are they of another model? Then remove the file, which the model does not need.",
            )

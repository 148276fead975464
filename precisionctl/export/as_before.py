"""The encoding policy for going back to codes: weights that were codes get their old codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.codes.encoding import grid_shape
from precisionctl.errors import DamagedCheckpoint, MissingFp8State, PrecisionError
from precisionctl.export.encode import with_joint_amax, with_one_input
from precisionctl.export.input_scales import is_same_amax
from precisionctl.export.weight_encodings import method_of
from precisionctl.fp8.delayed_scaling import recorded_amax
from precisionctl.fp8.state import Fp8States
from precisionctl.param import TensorSpec
from precisionctl.planning.checks import check_names
from precisionctl.planning.plan import Job, JobCodes, Plan, ScaleGroup
from precisionctl.quant_methods.base import POWERS_OF_2, CodeFormat, QuantMethod, sized
from precisionctl.quant_methods.caches import cache_scales
from precisionctl.quant_methods.coded_weights import ngram_table
from precisionctl.quant_methods.scales import Scales

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AsBefore:
    """Encodes weights that once were codes. Unchanged blocks get their old codes; changed blocks get new scales, and
    have the old size. Input scales come from the amaxes recorded in `states`, joint as engines take them, else the old
    ones are used if they are still valid (`fixed_hold`). Other tensors stay values."""

    encodings: WeightEncodings
    states: Fp8States | None
    fixed_hold: bool

    @cached_property
    def method(self) -> QuantMethod:
        method = method_of(self.encodings)
        assert method is not None, "codes of a Hugging Face directory have a method"
        return method

    def codes(self, plan: Plan) -> Mapping[str, JobCodes]:
        """For each job, its codes. Raises MissingFp8State or PrecisionError if a fixed scale, of an input or of a
        KV cache, is needed and its weights have changed since; UnmappedTensor for a scale of no module of the model."""
        encodings = self.encodings
        formats = self.method.read(encodings.quantization).formats
        weights = {job.name: [name for name in job.writes if name in encodings.weights] for job in plan.jobs}
        coded = [job for job in plan.jobs if weights[job.name]]

        # where an input has another amax than its old scale was made of, what shares that scale gets a new one
        new_input_amax: dict[str, Tensor] = {}
        for sharing, joint in with_joint_amax(coded, self.states) if self.states else ():
            if any(self._recorded_another(job, weights[job.name]) for job in sharing):
                new_input_amax |= dict.fromkeys((job.name for job in sharing), joint)

        # weights of one input share the scale of their joint amax if they had one tensor for it, or global scales
        groups: dict[str, ScaleGroup] = {}
        for jobs in with_one_input(coded):
            names = [name for job in jobs for name in weights[job.name]]
            scales = {name: replace(encodings.scales[name], block=self._block(name, formats)) for name in names}
            in_one_tensor = len({each.weight for each in scales.values()}) < len(scales)
            groups |= dict.fromkeys((job.name for job in jobs), ScaleGroup(scales, tuple(jobs), always=in_one_tensor))

        of_jobs: dict[str, JobCodes] = {}
        for job in coded:
            group = groups[job.name]
            shares = group.always or all(each.global_scale for each in group.weights.values())
            of_jobs[job.name] = JobCodes(
                {name: group.weights[name] for name in weights[job.name]},
                known=self._input_scales(weights[job.name], new_input_amax.get(job.name)),
                group=group if shares else None,
                scale_rounding="powers of 2" if in_powers_of_2(encodings) else "FP32",
            )
        rest = self._cache_scales(plan)
        if of_jobs and rest:  # written by the first job that encodes
            first, codes = next(iter(of_jobs.items()))
            of_jobs[first] = replace(codes, known={**codes.known, **rest})
        return of_jobs

    def tensors(self, weight: str, spec: TensorSpec, scales: Scales) -> Mapping[str, TensorSpec]:
        codes, stored = self.encodings.weights[weight], self.encodings.stored.specs
        beside = {name: stored[name] for name in scales.of_weight}
        if scales.block != self.encodings.scales[weight].block:
            grid = grid_shape(codes.rows, codes.columns, scales.block)
            beside[scales.weight] = replace(beside[scales.weight], shape=grid)
        return {weight: replace(spec, dtype=codes.dtype, packing=codes.packing), **beside}

    def further(self, codes: Iterable[JobCodes]) -> Mapping[str, TensorSpec]:
        stored = self.encodings.stored.specs
        return {name: stored[name] for each in codes for name in each.known}

    def quantization(self, kept: Sequence[str]) -> Mapping[str, Any]:
        return self.encodings.quantization

    def files(self, quantization: Mapping[str, Any]) -> Mapping[str, bytes]:
        return self.encodings.files

    def _block(self, name: str, formats: Iterable[CodeFormat]) -> tuple[int, int]:
        """The block size that a weight had, if it is one of the method's `formats`, else the first of these. Raises
        DamagedCheckpoint where no format has codes such as the weight's."""
        spec = self.encodings.weights[name]
        blocks = [sized(form.block, spec) for form in formats if (form.packing is None) == (spec.packing is None)]
        if not blocks:
            what = f"the encodings have codes of {name}, and their `quantization_config` has no such format"
            raise DamagedCheckpoint(what, where=self.encodings.path)
        had = self.encodings.scales[name].block
        return had if had in blocks or ngram_table(name) else blocks[0]

    def _recorded_another(self, job: Job, names: Sequence[str]) -> bool:
        """Whether the module or expert of a job has recorded another amax since the old scales of these weights were
        made."""
        amaxes = [amax for name in names if (amax := self.encodings.input_amax(name)) is not None]
        before = max(map(float, amaxes), default=0.0)
        state = self.states.modules.get(job.module) if self.states else None
        if state and job.expert is not None:
            state = state.of_expert(job.expert)
        if not (self.states and state and before and state.roles["input"].recorded):
            return False
        recorded = recorded_amax(state.roles["input"], "input", self.states.recipe)
        return not (self.fixed_hold and is_same_amax(before, float(recorded)))

    def _input_scales(self, names: Sequence[str], new_amax: Tensor | None) -> dict[str, float]:
        """The fixed scales of these weights' inputs, by the names of their tensors: those of a `new_amax`, FP32 `[]`,
        which is joint for all, or else the old ones."""
        fixed = [name for name in names if self.encodings.input_amax(name) is not None]  # which checks the scale too
        scales = [self.encodings.scales[name] for name in fixed]
        tensors = [tensor for each in scales for tensor in (each.input, each.input_zero_point) if tensor]
        if new_amax is not None:
            made = {each.input: float(each.of_input_amax(new_amax)) for each in scales if each.input}
            return dict.fromkeys(tensors, 0.0) | made  # an amax gives zero points of 0
        if tensors and not self.fixed_hold:
            raise MissingFp8State(
                f"the weights have changed since the fixed input scales of their codes were made, e.g. of `{names[0]}`",
                do="Record others with `precisionctl calibrate` and give --fp8-state, or use `export-inference "
                "--scheme dynamic`.",
            )
        return {tensor: float(read_tensor(self.encodings.stored, tensor).float().reshape(())) for tensor in tensors}

    def _cache_scales(self, plan: Plan) -> dict[str, float]:
        """The scales that belong to no weight, which are those of a KV cache."""
        stored = self.encodings.stored
        known = {name for scales in self.encodings.scales.values() for name in scales.names}
        rest = {name: spec for name, spec in stored.specs.items() if name not in known}
        of_caches = cache_scales(self.encodings.quantization, {**plan.targets, **rest})
        strange = [name for name in rest if name not in of_caches]
        check_names((), strange, "Are these the encodings of this model?", self.encodings.path or "")
        if rest and not self.fixed_hold:
            raise PrecisionError(
                f"the weights have changed since the scales of their KV cache were made, e.g. `{next(iter(rest))}`",
                do="Record others with `precisionctl calibrate`, and use `export-inference --kv-cache fp8 "
                "--fp8-state`.",
            )
        for name, spec in rest.items():
            if spec.rows * spec.columns != 1:
                what = f"`{name}` is {list(spec.shape)}: only one scale for a whole cache is carried back"
                raise PrecisionError(what)
        return {name: float(read_tensor(stored, name).float().reshape(())) for name in rest}


def in_powers_of_2(encodings: WeightEncodings) -> bool:
    """Whether the quantization config says that scales of blocks are powers of two."""
    return POWERS_OF_2.items() <= encodings.quantization.items()


def all_mxfp4(encodings: WeightEncodings) -> bool:
    """Whether all codes are MXFP4. If its scales are powers of two, FP8 in larger blocks holds their values too, as far
    as E4M3 reaches."""
    return all(spec.packing is not None and spec.packing.name == "MXFP4" for spec in encodings.weights.values())

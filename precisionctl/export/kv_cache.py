"""The scales of an FP8 KV cache: the amax of keys (after rotary embedding) and of values, divided by E4M3's largest
number.

An engine divides what it caches by them and multiplies what it reads, so like every stored scale they are scale_inv.
There is one for all keys of a layer and one for all its values; under tensor parallelism each GPU has both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.checkpoints.megatron.keys import layer_of
from precisionctl.codes.numerics import ScaleRounding, rounded_up
from precisionctl.dtypes import DType
from precisionctl.engines.base import Engine
from precisionctl.engines.rules.cache_rules import attention_and_kind
from precisionctl.errors import DamagedCheckpoint, MissingFp8State, PrecisionError, Unrecordable, shown
from precisionctl.export.encode import WeightFormat
from precisionctl.export.input_scales import OF_PREDICTION, prediction_in_bf16
from precisionctl.fp8.delayed_scaling import recorded_amax
from precisionctl.fp8.state import CACHE, Fp8States, core_attention_of
from precisionctl.param import TensorSpec
from precisionctl.planning.plan import Job, JobCodes, Plan
from precisionctl.quant_methods.base import QuantMethod
from precisionctl.quant_methods.scales import scale_of
from precisionctl.sizes import counted
from precisionctl.torch_when_used import torch

_RECORD = "Record them with `precisionctl calibrate`, and give its file with --fp8-state; or leave --kv-cache out."


@dataclass(frozen=True)
class CacheScale:
    """The scale_inv of keys and of values in one attention layer."""

    k: float
    v: float


def check_engine(plan: Plan, engine: Engine, method: QuantMethod) -> None:
    """Raise PrecisionError if the engine does not use scales of a KV cache, for this kind of model or with this quant
    method."""
    if plan.model.mla is not None:
        raise PrecisionError(
            f"{engine.title} has no use for scales of latents: {engine.latents.text} [{engine.latents.source}]",
            where=f"architecture {plan.model.architecture}",
            do="Leave --kv-cache out"
            + (
                f"; an FP8 cache is asked for when it starts ({engine.serve.on_cache.strip()})."
                if engine.serve.on_cache
                else "."
            ),
        )
    if method.name not in engine.cache:
        raise PrecisionError(
            f"{engine.title} ignores scales of a KV cache beside {method.name} weights",
            do="Leave --kv-cache out"
            + (f", or choose a scheme of {' or '.join(sorted(engine.cache))}." if engine.cache else "."),
        )
    for stem in _attentions(plan):
        if not stem.endswith(".self_attn"):
            raise PrecisionError(
                f"engines look for scales of a KV cache under `self_attn`, and this model has `{stem}`",
                do="Leave --kv-cache out.",
            )


def recorded_scales(states: Fp8States | None, encodings: WeightEncodings | None, plan: Plan) -> dict[str, CacheScale]:
    """The scales of each attention layer, by Hugging Face name: from recorded state, else those stored in the source's
    directory. A layer that reads what another caches has that one's. Raises MissingFp8State if there are
    neither."""
    found, places, attentions = {}, _places(encodings), _attentions(plan)
    stems = {job.module: stem for stem, job in attentions.items()}
    for stem, attention in attentions.items():
        at = layer_of(attention.module)
        # the output projection of the attention whose cache this one reads: mostly its own
        reads = f"decoder.layers.{plan.model.kv_layer(at[0])}.{at[1]}" if at else attention.module
        cached = stems[reads]
        job = attentions[cached]
        scale = (_recorded(states, job) if states else None) or _stored(encodings, places.get(cached, []))
        if scale is None:
            what = f"the keys and values that `{cached}` caches were never recorded"
            if job.row.of_prediction:
                why = f"as {OF_PREDICTION}: {prediction_in_bf16(plan.jobs)}"
                raise Unrecordable(f"{what}, {why}", do="Or leave --kv-cache out.")
            raise MissingFp8State(what, do=_RECORD)
        found[stem] = scale
    return found


def scales_of_state(states: Fp8States, plan: Plan) -> dict[str, CacheScale]:
    """The scales of each attention layer whose keys and values were recorded, by Hugging Face name."""
    found = {stem: _recorded(states, job) for stem, job in _attentions(plan).items()}
    return {stem: scale for stem, scale in found.items() if scale is not None}


def with_cache(plan: Plan, form: WeightFormat, scales: Mapping[str, CacheScale]) -> Plan:
    """Add these scales to an encoded plan; they are written by the job of the attention's output projection."""
    spelling = form.spelling.cache
    rounding: ScaleRounding = "BF16" if spelling.as_bf16 or form.scale_rounding == "BF16" else "FP32"
    targets = dict(plan.targets)
    attentions = {job.name: stem for stem, job in _attentions(plan).items()}
    jobs = []
    for job in plan.jobs:
        if stem := attentions.get(job.name):
            scale = scales[stem]
            found = rounded_up(torch.tensor([scale.k, scale.v]), rounding).tolist()
            values = {f"{stem}.{name}": value for name, value in zip(spelling.names, found, strict=True)}
            targets |= {name: TensorSpec(spelling.shape, DType.float32) for name in values}
            codes = job.codes or JobCodes({}, {})
            job = replace(job, codes=replace(codes, known={**codes.known, **values}))
        jobs.append(job)
    quantization = {**plan.quantization, **spelling.config}
    files = form.spelling.files(quantization)
    return replace(plan, jobs=tuple(jobs), targets=targets, quantization=quantization, files=files)


def notes(engine: Engine, method: QuantMethod, states: Fp8States | None) -> Iterator[str]:
    """Tell where the scales are from, and what the engine does with them."""
    known = states and any(role in state.roles for state in states.modules.values() for role in CACHE)
    yield f"KV cache: scales of keys (after rotary) and values, {'as recorded' if known else 'from the source'}."
    yield f"{engine.title} {engine.cache[method.name]}."


def left_out(encodings: WeightEncodings | None, plan: Plan) -> Iterator[str]:
    """Tell that the source has such scales and the result will not."""
    places = _places(encodings)
    if any(_stored(encodings, places.get(stem, [])) for stem in _attentions(plan)):
        yield "The source's scales of a KV cache are left out; --kv-cache fp8 takes them along."


def of_no_cache(encodings: WeightEncodings | None, plan: Plan) -> Iterator[str]:
    """Tell of scales of the source that belong neither to a weight nor to keys or values of the model, and so have no
    place in an export: those of layers without softmax attention, of queries and of probabilities."""
    if encodings is None:
        return
    of_weights = {name for scales in encodings.scales.values() for name in scales.names}
    attentions, kinds = _attentions(plan), {name: attention_and_kind(name) for name in encodings.stored.specs}
    rest = [name for name, of in kinds.items() if name not in of_weights and (of is None or of[0] not in attentions)]
    if rest:
        what = counted(len(rest), "scale")
        yield f"{what} of the source, of no keys or values that the model caches, stay behind, e.g. {shown(min(rest))}."


def stored_scales(encodings: WeightEncodings | None, plan: Plan) -> dict[str, CacheScale]:
    """The scales that the source's directory came with, by Megatron's name of the module: `….core_attention`."""
    places = _places(encodings)
    return {
        module: scale
        for stem, job in _attentions(plan).items()
        if (module := core_attention_of(job.module)) and (scale := _stored(encodings, places.get(stem, [])))
    }


def _attentions(plan: Plan) -> dict[str, Job]:
    """The job of each attention's output projection, by the attention's Hugging Face name."""
    jobs = [job for job in plan.jobs if job.row.gemm and core_attention_of(job.module)]
    named = [(job.writes if plan.to_layout == "hf" else job.reads)[0] for job in jobs]
    stems = [name.removesuffix(".weight").rpartition(".")[0] for name in named]
    return dict(zip(stems, jobs, strict=True))


def _recorded(states: Fp8States, job: Job) -> CacheScale | None:
    module = core_attention_of(job.module)
    state = states.modules.get(module) if module else None
    if state is None or any(role not in state.roles for role in CACHE):
        return None
    k, v = (float(scale_of(recorded_amax(state.roles[role], role, states.recipe))) for role in CACHE)
    return CacheScale(k, v) if k > 0 and v > 0 else None


def _places(encodings: WeightEncodings | None) -> dict[str, list[tuple[str, str]]]:
    """The scales of caches in a source: for each attention, pairs of `k` or `v` and a tensor's name. Tensors with more
    than one scale are left out."""
    places: dict[str, list[tuple[str, str]]] = {}
    for name, spec in encodings.stored.specs.items() if encodings else ():
        found = attention_and_kind(name)
        if found and spec.rows * spec.columns == 1:
            places.setdefault(found[0], []).append((found[1], name))
    return places


def _stored(encodings: WeightEncodings | None, places: Sequence[tuple[str, str]]) -> CacheScale | None:
    values: dict[str, float] = {}
    for kind, name in places:
        assert encodings is not None, "places are those of a source"
        value = float(read_tensor(encodings.stored, name).float().reshape(()))
        if not 0 < value < float("inf"):
            raise DamagedCheckpoint(f"{name} holds a scale that is not a positive number", where=encodings.path)
        if values.setdefault(kind, value) != value:
            what = f"{name} is {value:.6g}, and another scale of the same cache {values[kind]:.6g}"
            raise DamagedCheckpoint(what, where=encodings.path)
    return CacheScale(values["k"], values["v"]) if values.keys() >= {"k", "v"} else None

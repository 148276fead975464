"""Choose the scheme of an export if none is given: the best that the checkpoint's state and the engine allow."""

from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.engines.base import Engine
from precisionctl.errors import MissingFp8State, PrecisionError, Unrecordable
from precisionctl.export.encode import fp8_jobs
from precisionctl.export.input_scales import input_amaxes, why_too_small
from precisionctl.fp8.state import Fp8States
from precisionctl.planning.plan import Plan
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import CODES, FOUR_BITS, SCHEMES, TENSOR, Scheme, sized
from precisionctl.untabled_model import UntabledModel


def schemes_of(engine: Engine, plan: Plan, precision: Precision) -> list[Scheme]:
    """The schemes of eight bits that an engine takes for a plan in BF16, as far as shapes do not matter."""
    jobs = fp8_jobs(plan, precision)
    names = [name for job in jobs for name in job.writes]
    moved = all(job.row.is_row_permutation(plan.model) for job in jobs)
    return [
        scheme
        for scheme, method in engine.spells.items()
        if scheme not in FOUR_BITS
        and (SCHEMES[scheme].block == TENSOR or moved)
        and not engine.check_experts(names, method, scheme, plan.model.architecture)
        and not engine.check_blocks(plan.model.architecture, scheme, ())
    ]


def best_scheme(
    engine: Engine,
    plan: Plan,
    precision: Precision,
    states: Fp8States | None,
    encodings: WeightEncodings | None,
    why_no_state: str,
    *,
    are_codes: bool,
) -> tuple[Scheme, str]:
    """The scheme for a plan in BF16, and the reason in words. `encodings` is how the source's weights are encoded
    (`are_codes`), or once were; `why_no_state` says why there are no `states`.

    The order of preference: a scheme with which existing codes can stay as they are; `static`, if inputs were recorded
    over several steps, as it saves the engine a pass over each input; the scheme of the codes that weights once were,
    because unchanged weights become those codes again; the first of the engine's other schemes. Of these, a scale per
    channel comes before a scale per block, as every FP8 GPU has kernels for it. Four bits are only written if they are
    asked for. Raises PrecisionError if the engine takes none of them.
    """
    schemes, jobs = schemes_of(engine, plan, precision), fp8_jobs(plan, precision)
    coded = next((scheme for scheme in schemes if encodings and _is_coded(encodings, scheme)), None)
    if coded and are_codes:
        return coded, "the weights are FP8 codes of that kind already"
    why = f"{engine.title} takes no fixed input scales for this model"
    if "static" in schemes:
        try:
            input_amaxes(states, jobs, why_no_state, tabled=not isinstance(plan.model, UntabledModel))
            too_small = why_too_small(states) if states else ""
            if not too_small or len(schemes) == 1:
                return "static", "the FP8 state has an amax for every input, so input scales are fixed"
            why = f"{too_small}. For static input scales, record more with `precisionctl calibrate`"
        except MissingFp8State as missing:
            why = missing.what
            if not isinstance(missing, Unrecordable):
                why += ". For static input scales, record them with `precisionctl calibrate`"
    if coded and coded != "static":
        return coded, "the weights were FP8 codes of that kind, and those that have not changed get them again"
    for scheme in schemes:
        if scheme != "static":
            return scheme, why
    raise PrecisionError(
        f"{engine.title} needs fixed input scales for this model: {why}", do="Then give its file with --fp8-state."
    )


def _is_coded(encodings: WeightEncodings, scheme: Scheme) -> bool:
    """Whether all weights are encoded as a scheme would encode them."""
    return all(
        weight.dtype == CODES
        and encodings.scales[name].block == sized(SCHEMES[scheme].block, weight)
        and (encodings.scales[name].input is not None) == SCHEMES[scheme].fixed_inputs
        for name, weight in encodings.weights.items()
    )

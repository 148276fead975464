"""Which scheme an export gets where none is asked for: the best that the checkpoint's state and the engine allow."""

from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.engines.base import Engine
from precisionctl.errors import MissingFp8State, PrecisionError
from precisionctl.export.export import fp8_jobs
from precisionctl.export.input_scales import input_scales
from precisionctl.fp8.state import Fp8States
from precisionctl.planning.plan import Plan
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import BLOCKS, CODES, Scheme, sized


def best_scheme(
    engine: Engine, plan: Plan, precision: Precision, states: Fp8States | None, coded: WeightEncodings | None
) -> tuple[Scheme, str]:
    """The scheme for a plan of values, and why. `coded` is how the source's weights are codes, if they are.

    Codes that fit a scheme stay what they are. Else recorded inputs are used, which spares the engine a pass over each;
    else each channel has a scale, which any FP8 GPU has kernels for; else each block. Raises PrecisionError where the
    engine takes none of these.
    """
    jobs = fp8_jobs(plan, precision)
    names = [name for job in jobs for name in job.writes]
    moved = all(job.row.moves(plan.model) for job in jobs)
    schemes = [
        scheme
        for scheme, method in engine.spells.items()
        if (scheme == "static" or moved) and not engine.check_experts(names, method, scheme)
    ]
    for scheme in schemes:
        if coded and _is_coded(coded, scheme):
            return scheme, "the weights are FP8 codes of that kind already"
    why = f"{engine.title} takes no fixed input scales for this model"
    if "static" in schemes:
        try:
            input_scales(states, jobs)
            return "static", "every input has been recorded, so the engine need not look at them first"
        except MissingFp8State as missing:
            why = f"{missing.what}; for static input scales, record them with `precisionctl calibrate`"
    for scheme in schemes:
        if scheme != "static":
            return scheme, why
    raise PrecisionError(f"{engine.title} needs fixed input scales for this model: {why}")


def _is_coded(coded: WeightEncodings, scheme: Scheme) -> bool:
    """Whether all weights are codes as a scheme has them."""
    return all(
        weight.dtype == CODES
        and coded.scales[name].block == sized(BLOCKS[scheme], weight)
        and (coded.scales[name].input is not None) == (scheme == "static")
        for name, weight in coded.weights.items()
    )

"""Choose the scheme of an export if none is given: the best that the checkpoint's state and the engine allow."""

from collections.abc import Callable, Sequence

from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.engines.base import Engine
from precisionctl.errors import MissingFp8State, PrecisionError, Unrecordable
from precisionctl.export.input_scales import input_amaxes, why_too_small
from precisionctl.fp8.state import Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.planning.plan import Job
from precisionctl.quant_methods.base import CODES, EXPONENTS, FOUR_BITS, SCHEMES, TENSOR, Scheme, sized
from precisionctl.quant_methods.coded_weights import ngram_table


def schemes_of(engine: Engine, model: ModelShape, jobs: Sequence[Job]) -> list[Scheme]:
    """The schemes of eight bits that an engine takes for the weights of these jobs, as far as shapes do not matter."""
    return [scheme for scheme in engine.spells if scheme not in FOUR_BITS and takes(engine, model, jobs, scheme)]


def takes(engine: Engine, model: ModelShape, jobs: Sequence[Job], scheme: Scheme) -> bool:
    """Whether an engine takes the weights of these jobs in a scheme that it reads, as far as shapes do not matter."""
    names = [name for job in jobs for name in job.writes]
    return (
        (SCHEMES[scheme].block == TENSOR or all(job.row.moves_rows(model) for job in jobs))
        and not engine.check_weights(names, engine.spells[scheme], scheme, model.architecture)
        and not engine.check_values(model.architecture, scheme, ())
    )


def best_scheme(
    engine: Engine,
    model: ModelShape,
    jobs: Sequence[Job],
    states: Fp8States | None,
    encodings: WeightEncodings | None,
    why_no_state: str,
    *,
    of_run: Sequence[Scheme],
    said: str,
    asked: bool,
    recordable: Callable[[Scheme], Sequence[Job]],
    are_codes: bool,
) -> tuple[Scheme, str]:
    """The scheme for the weights of these jobs, and the reason in words. `encodings` is how the source's weights are
    encoded (`are_codes`), or once were; `why_no_state` says why there are no `states`. `of_run` are the schemes, of
    those that the engine takes, in which it computes most like the run that wrote the source, or like a recipe that
    was given, in words `said`. If that was `asked` for, others count only where all of these have fixed inputs. Of
    the jobs that are `recordable` the weights have shapes that the engine takes in a scheme of fixed inputs: no
    calibration records inputs of others.

    The order of preference: a scheme of FP8 with which existing codes can stay as they are; `static`, and of a run in
    NVFP4 `nvfp4`, if inputs were recorded over several steps, as it saves the engine a pass over each input; the run's
    scheme without fixed inputs, whose weights are the numbers that it computed with; the scheme of the codes that
    weights once were, because unchanged weights become those codes again; the first of the engine's other schemes. Of
    these, a scale per channel comes before a scale per block, as every FP8 GPU has kernels for it. Four bits are only
    written if they are asked for, or of a run in them. Raises PrecisionError if the engine takes none of them.
    """
    own = next((scheme for scheme in of_run if not SCHEMES[scheme].fixed_inputs), None)
    others = [] if asked and own else schemes_of(engine, model, jobs)
    schemes = [*of_run, *(scheme for scheme in others if scheme not in of_run)]
    fixed = next((scheme for scheme in schemes if SCHEMES[scheme].fixed_inputs), None)
    coded = next((scheme for scheme in others if encodings and _is_coded(encodings, scheme)), None)
    if coded and are_codes:
        return coded, "the weights are FP8 codes of that kind already"
    why = f"{engine.title} takes no fixed input scales for this model"
    if fixed:
        try:
            input_amaxes(states, recordable(fixed), why_no_state, tabled=not isinstance(model, UntabledModel))
            too_small = why_too_small(states) if states else ""
            if not too_small or len(schemes) == 1:
                in_four_bits = f"{said}, and " if fixed in FOUR_BITS else ""
                return fixed, f"{in_four_bits}the FP8 state has an amax for every input, so input scales are fixed"
            why = f"{too_small}. For {fixed} input scales, record more with `precisionctl calibrate`"
        except MissingFp8State as missing:
            why = missing.what
            if not isinstance(missing, Unrecordable):
                why += f". For {fixed} input scales, record them with `precisionctl calibrate`"
    if own:
        return own, said + (f", and {why}" if own in FOUR_BITS else "")
    if coded and coded != "static":
        return coded, "the weights were FP8 codes of that kind, and those that have not changed get them again"
    for scheme in others:
        if scheme != "static":
            return scheme, why
    raise PrecisionError(
        f"{engine.title} needs fixed input scales for this model: {why}", do="Then give its file with --fp8-state."
    )


def kept_in_four_bits(engine: Engine, encodings: WeightEncodings) -> Scheme | None:
    """The scheme of an engine's four bits in which the weights are stored already; None if there is none."""
    schemes = (scheme for scheme in engine.spells if scheme in FOUR_BITS)
    return next((scheme for scheme in schemes if _is_coded(encodings, scheme)), None)


def _is_coded(encodings: WeightEncodings, scheme: Scheme) -> bool:
    """Whether all weights, tables apart, are encoded as a scheme would encode them."""
    stored = encodings.stored.specs
    return all(
        (weight.codes_name == FOUR_BITS[scheme] if scheme in FOUR_BITS else weight.dtype == CODES)
        and encodings.scales[name].block == sized(SCHEMES[scheme].block, weight)
        and (encodings.scales[name].input is not None) == SCHEMES[scheme].fixed_inputs
        and (scheme != "mxfp8" or stored[encodings.scales[name].weight].dtype in EXPONENTS)
        for name, weight in encodings.weights.items()
        if not ngram_table(name)
    )

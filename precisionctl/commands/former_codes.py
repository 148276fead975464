"""Results whose weights are the codes that they have in the source, or once had."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from precisionctl.commands.build import Result
from precisionctl.commands.notes import format_notes, known_state_notes, rounded_notes
from precisionctl.commands.source import Source
from precisionctl.commands.source_notes import source_notes
from precisionctl.conversion.recoding import recoding_notes
from precisionctl.engines.base import Engine, engines
from precisionctl.engines.serving import served_config
from precisionctl.export.as_before import AsBefore
from precisionctl.export.encode import encode, modules_in_bf16
from precisionctl.export.model_card import INPUTS_BY_ENGINE, INPUTS_IN_BF16, Card, path_in_command
from precisionctl.planning.plan import Plan
from precisionctl.quant_methods.coded_weights import scheme_of


def as_before(source: Source) -> Result:
    """A result with the codes that the weights have, or once had. If the weights have changed since, raises
    MissingFp8State for their fixed input scales, and PrecisionError for scales of their KV cache."""
    reader, known, encodings = source.reader, source.known, source.encodings
    assert encodings is not None, "there were codes before"
    policy = AsBefore(encodings, known.current, fixed_hold=source.fixed_scales is not None)
    plan = encode(source.plan, policy)
    notes = [
        *format_notes(source.request.reference, encodings),
        *recoding_notes(encodings, reader.specs, plan),
        *source_notes(source),
        *rounded_notes(reader, plan),
        *known_state_notes(known, carried=True),
    ]
    scheme = scheme_of(encodings.quantization, encodings.scales, encodings.weights)
    serving = [engine for engine in engines().values() if scheme in engine.formats(policy.method.name)]
    card = _card_as_before(source.request.destination.name, source.plan, policy, scheme, serving)

    def lacks(config: Mapping[str, Any]) -> Iterator[str]:
        """Keys that are not there: one engine's words for others might be none for the next."""
        said = served_config(config)
        return (key for engine in serving for key in engine.lacks(config) if said.get(key) is None)

    return Result(
        plan,
        notes,
        known.current or known.outdated,
        encodings=encodings,
        card=card,
        lacks=lacks,
        trained_in=source.run_precision,
    )


def _card_as_before(name: str, plan: Plan, policy: AsBefore, scheme: str, serving: Sequence[Engine]) -> Card:
    """The model card of a result with its old codes, for the engines that read them."""
    encodings, method = policy.encodings, policy.method
    if any(scales.input is not None for scales in encodings.scales.values()):
        inputs = "as they were, or of what was recorded since"
    elif any(form.inputs for form in method.read(encodings.quantization).formats):
        inputs = INPUTS_BY_ENGINE
    else:
        inputs = INPUTS_IN_BF16
    facts = {
        "weights": ", ".join(sorted({spec.stored_dtype for spec in encodings.weights.values()})),
        "format": method.name,
        "scheme": scheme,
        "codes and scales": "the scales that the weights had before, and codes of their values; new scales where "
        "values have changed",
        "input scales": inputs,
    }
    path = path_in_command(name)
    return Card(
        name,
        title=" or ".join(engine.title for engine in serving) or f"readers of {method.name}",
        tag=method.name,
        command="\n".join(engine.serve(path, 1) for engine in serving) or f"precisionctl inspect {path}",
        facts=facts,
        quantized=list(encodings.weights),
        kept=modules_in_bf16(plan, encodings.weights.keys()),
        codes=" and ".join(sorted({spec.codes_name for spec in encodings.weights.values()})),
    )

"""Compare how the weights of two checkpoints are encoded, or once were: everything that is stored about it besides the
codes."""

from collections.abc import Iterator, Mapping
from typing import Any

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.chunks import in_pieces
from precisionctl.checkpoints.hf_directory.encodings_file import QUANT_CONFIG, WeightEncodings, said_quantization
from precisionctl.untrusted.safe_json import parse_json
from precisionctl.verify.configs import Found, compare_quantization
from precisionctl.verify.hf_tensors import PIECE
from precisionctl.verify.not_compared import NotCompared


def compare_encodings(a: Reader, b: Reader, left: WeightEncodings | None, right: WeightEncodings | None) -> Found:
    """Compare `quantization_config` and, if the weights of both sides are values now, the scales that they had as
    codes. (If both are codes, scales show in the values that codes decode to. If one side is codes, the scales may
    differ.)"""
    in_codes = [bool(side.encodings) for side in (a, b)]
    if not any(in_codes) and (left is None) != (right is None):
        return [], [NotCompared("former encoding", f"only {'B' if left is None else 'A'} knows")]
    here, there = _quantization(a, left), _quantization(b, right)
    if here is None or there is None:
        one = NotCompared("quantization_config", f"only {'B' if here is None else 'A'} has one")
        return [], [] if here is there else [one]
    if in_codes[0] != in_codes[1]:
        having = "A" if in_codes[0] else "B"
        return [], [NotCompared("quantization_config", f"only the weights of {having} are codes now")]
    coded = list(dict.fromkeys(name for side in (left, right) if side for name in side.weights))
    lines, left_out = compare_quantization(here, there, coded)
    files = [encodings.files.get(QUANT_CONFIG) if encodings else None for encodings in (left, right)]
    if files[0] is not None and files[1] is not None:
        nested = [parse_json(data, QUANT_CONFIG) for data in files if data is not None]
        more, also = compare_quantization(nested[0], nested[1], coded, QUANT_CONFIG)
        lines, left_out = [*lines, *more], [*left_out, *also]
    elif files[0] is not files[1]:
        left_out.append(NotCompared("quantization_config", f"{QUANT_CONFIG}, which only one side has"))
    if _names_method(a) != _names_method(b):
        left_out.append(NotCompared("known method", "quant_method"))
    if not any(in_codes) and left is not None and right is not None:
        lines += _grid_differences(left, right)
    return lines, left_out


def _quantization(side: Reader, encodings: WeightEncodings | None) -> Mapping[str, Any] | None:
    """The `quantization_config` of a checkpoint, or of the codes that its weights were."""
    return _stored_quantization(side) if encodings is None else encodings.quantization


def _stored_quantization(side: Reader) -> Mapping[str, Any] | None:
    data = side.companions.files.get("config.json")
    config = parse_json(data, "config.json") if data is not None else {}
    found = said_quantization(config)
    return found if isinstance(found, Mapping) else None


def _names_method(side: Reader) -> bool:
    """Whether a `quantization_config` says its `quant_method`; true where there is none to say it. Readers fill it in
    (huggingface.py)."""
    return "quant_method" in (_stored_quantization(side) or {"quant_method": None})


def _grid_differences(left: WeightEncodings, right: WeightEncodings) -> Iterator[str]:
    for name in sorted(left.weights.keys() ^ right.weights.keys()):
        yield f"{name}: only {'A' if name in left.weights else 'B'} knows how it was coded"
    for name in sorted(left.weights.keys() & right.weights.keys()):
        one, other, spec = left.by_name[name], right.by_name[name], left.weights[name]
        for row, rows in in_pieces(0, spec.rows, spec.columns, PIECE):
            scales = (each.scales(row, rows, spec.columns).expand(rows, -1) for each in (one, other))
            before, after = (each.expand(-1, spec.columns) for each in scales)
            if one.element != other.element or not bool((before == after).all()):
                yield f"{name}: it was coded with other scales in A than in B"
                break

"""`benchmarks/inference.py` as a section: prefill, decode and the largest batch, BF16 and on Transformer Engine."""

import tempfile
from pathlib import Path

import inference
from largest_batch import by_arithmetic

from gpu_sections.common import Place, Report


def measure(place: Place, report: Report) -> None:
    for row in by_arithmetic():
        report({"arithmetic": row})
    with tempfile.TemporaryDirectory() as scratch:
        for row in inference.measured(inference.Place(place.small), Path(scratch)):
            report(row)

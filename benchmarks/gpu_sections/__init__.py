"""The sections of `benchmarks/gpu.py`: each has a `measure(place, report)` that reports its rows as it gets them."""

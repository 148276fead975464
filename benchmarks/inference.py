"""Inference in BF16 against FP8: tokens a second and memory of the target `te`, and the largest batch that fits.

    python benchmarks/inference.py [--out benchmarks/results/inference.json] [--small]

The largest batch by arithmetic is printed anywhere (`largest_batch.py`). On a GPU the rest is measured, on a Llama with
random weights: what is held, prefill and decode with transformers' own model in BF16, and with Transformer Engine's
modules in it, whose weights are FP8 codes, or BF16 and cast in each pass; and the largest batch whose cache can be
allocated beside the weights, and read. `--small` runs the same code on a CPU, emulated: its numbers say nothing.
"""

import argparse
import gc
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from largest_batch import TOKENS, by_arithmetic, table

VOCABULARY = 32000
"""Of the model that is measured."""

AT_ONCE = 16
"""Sequences that attend at once, where thousands would take minutes one by one."""


@dataclass(frozen=True)
class Place:
    """Where it is measured, and how much."""

    small: bool

    @property
    def device(self) -> str:
        return "cpu" if self.small else "cuda"

    @property
    def batches(self) -> tuple[int, ...]:
        return (1, 2) if self.small else (1, 8, 32, 128, 256)

    @property
    def prompt(self) -> int:
        return 16 if self.small else 512

    @property
    def steps(self) -> int:
        return 2 if self.small else 32


def make_directories(scratch: Path, place: Place) -> dict[str, Path]:
    """A Llama in BF16 with recorded state, and its export for Transformer Engine."""
    import convert

    from precisionctl.commands.plan_command import plan_command
    from precisionctl.commands.request import Request
    from precisionctl.conversion.command import execute

    if place.small:
        convert.write_model(scratch / "bf16", 512, 512, 2, VOCABULARY)
    else:
        convert.make_model(scratch / "bf16", 4.0)
    execute(plan_command(Request.export(scratch / "bf16", scratch / "fp8", "te")))
    return {"BF16": scratch / "bf16", "FP8": scratch / "fp8"}


MODELS: dict[str, Literal["bf16", "fp8"] | None] = {"BF16": None, "FP8, cast in each pass": "bf16", "FP8": "fp8"}
"""What is measured, and how Transformer Engine's modules keep its weights, where it has such."""


def load(name: str, directories: dict[str, Path], place: Place) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from precisionctl.te import load_te

    if weights := MODELS[name]:
        return load_te(
            directories["FP8"], weights=weights, device=place.device, backend="emulated" if place.small else "te"
        )
    built: Any = AutoModelForCausalLM.from_pretrained(directories["BF16"], dtype=torch.bfloat16)
    return built.to(place.device).eval().requires_grad_(False)


def speed(model: Any, batch: int, place: Place) -> dict[str, float]:
    """Tokens a second of a prompt and of greedy decoding from its cache, and the peak of memory."""
    import torch

    draw = torch.Generator().manual_seed(batch)
    prompt = torch.randint(0, VOCABULARY, (batch, place.prompt), generator=draw).to(place.device)
    with torch.no_grad():
        model(prompt, use_cache=True)  # what is made once
        _forget_peak(place)
        seconds, out = _timed(lambda: model(prompt, use_cache=True), place)
        name = "cache" if "cache" in out else "past_key_values"  # before transformers 5.24
        cache, token = out[name], out.logits[:, -1:].argmax(-1)
        del out

        def decode() -> None:
            following, kept = token, cache
            for _ in range(place.steps):
                made = model(following, **{name: kept}, use_cache=True)
                following, kept = made.logits[:, -1:].argmax(-1), made[name]

        decoding, _ = _timed(decode, place)
    return {
        "prefill, tokens/s": batch * place.prompt / seconds,
        "decode, tokens/s": batch * place.steps / decoding,
        "peak, GB": _peak(place),
    }


def _timed(work: Callable[[], Any], place: Place) -> tuple[float, Any]:
    import torch

    if not place.small:
        torch.cuda.synchronize()
    start = time.perf_counter()
    made = work()
    if not place.small:
        torch.cuda.synchronize()
    return time.perf_counter() - start, made


def _forget_peak(place: Place) -> None:
    if not place.small:
        import torch

        torch.cuda.reset_peak_memory_stats()


def _held(place: Place) -> float:
    if place.small:
        return float("nan")
    import torch

    return torch.cuda.memory_allocated() / 1e9


def _peak(place: Place) -> float:
    if place.small:
        return float("nan")
    import torch

    return torch.cuda.max_memory_allocated() / 1e9


def largest_measured(model: Any, place: Place, *, fp8_cache: bool, most: int) -> int:
    """The largest batch of which a cache for TOKENS can be allocated beside the weights, and one token attends to it, a
    layer after another; found by halving between one that fits and one that does not, of at most `most`."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(model, middle, place, fp8_cache) else (low, middle)
    return low


def _fits(model: Any, batch: int, place: Place, fp8_cache: bool) -> bool:
    import torch

    try:
        _attend(model.config, batch, place, torch.float8_e4m3fn if fp8_cache else torch.bfloat16)
        return True
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        if not place.small:
            torch.cuda.empty_cache()


def _attend(config: Any, batch: int, place: Place, dtype: Any) -> None:
    """Allocate the cache, and let one token of each sequence attend to it in BF16, as many heads share a key."""
    import torch

    groups, heads = config.num_key_value_heads, config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = (2, batch, groups, TOKENS, size)
    caches = [torch.zeros(shape, dtype=dtype, device=place.device) for _ in range(config.num_hidden_layers)]
    query = torch.zeros(batch, heads, 1, size, dtype=torch.bfloat16, device=place.device)
    for cache in caches:
        for first in range(0, batch, AT_ONCE):  # an engine's kernel casts in registers; so few at a time cost no memory
            some = slice(first, first + AT_ONCE)
            keys, values = cache[:, some].to(torch.bfloat16)
            torch.nn.functional.scaled_dot_product_attention(query[some], keys, values, enable_gqa=True)


def measured(place: Place, scratch: Path) -> Iterator[dict[str, Any]]:
    import torch

    directories = make_directories(scratch, place)
    for name in MODELS:
        model = load(name, directories, place)
        yield {"precision": name, "held, GB": _held(place)}
        for batch in place.batches:
            try:
                yield {"precision": name, "batch": batch, **speed(model, batch, place)}
            except torch.cuda.OutOfMemoryError:
                yield {"precision": name, "batch": batch, "failed": "out of memory"}
                torch.cuda.empty_cache()
        for fp8_cache in (False, True):
            most = 2 if place.small else 16384
            found = largest_measured(model, place, fp8_cache=fp8_cache, most=most)
            yield {"precision": name, "cache": "FP8" if fp8_cache else "BF16", "largest batch": found}
        del model
        gc.collect()
        if not place.small:
            torch.cuda.empty_cache()


def machine(place: Place) -> dict[str, Any]:
    import torch

    device = "CPU" if place.small else torch.cuda.get_device_name()
    return {"date": time.strftime("%Y-%m-%d"), "device": device, "cpus": os.cpu_count(), "torch": torch.__version__} | {
        "python": platform.python_version(),
        "tokens": TOKENS,
    }


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scratch", type=Path, help="directory for the model; else the temporary one")
    parser.add_argument("--small", action="store_true", help="tiny and emulated, on a CPU: to see that it runs")
    options = parser.parse_args()
    fitting = by_arithmetic()
    print(f"The largest batch of {TOKENS} tokens, by arithmetic\n\n{table(fitting)}\n")
    place = Place(options.small)
    rows: list[dict[str, Any]] = []
    if options.small or torch.cuda.is_available():
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            for row in measured(place, Path(scratch)):
                rows.append(row)
                print(json.dumps(row), flush=True)
        for kind in ("held, GB", "batch", "cache"):
            print("\n" + table([row for row in rows if kind in row]))
    else:
        print("Nothing is measured: there is no GPU here.")
    if options.out:
        known = machine(place) if rows else {"date": time.strftime("%Y-%m-%d")}
        options.out.write_text(json.dumps({**known, "arithmetic": fitting, "measured": rows}, indent=2))


if __name__ == "__main__":
    main()

"""What the sections share: where they run, the shapes, a clock, and models that come and go."""

import contextlib
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from precisionctl.errors import EnvironmentProblem
from precisionctl.model.model_shape import ModelShape
from precisionctl.precision import PRESETS, Precision
from precisionctl.recipe import Optimizer, Recipe, Train
from precisionctl.trainer.backends.choose import BackendName, choose_backend
from precisionctl.trainer.measure.flops import training_flops
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.loss import loss
from precisionctl.trainer.optimizer.adamw import MasterAdamW

Row = dict[str, Any]
Report = Callable[[Row], None]

SETTINGS = Optimizer(lr=1e-4)
RECIPES = ("fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4")


@dataclass(frozen=True)
class Place:
    """Where a section runs. `small` runs all of its code on a CPU, emulated, over sizes that say nothing."""

    small: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.small else "cuda")

    @property
    def backend(self) -> BackendName:
        return "emulated" if self.small else "te"


@dataclass(frozen=True)
class Shape:
    """A published model's layers. `layers` is how many it has, `measured` how many are run; `rows` of `length` tokens
    are a step."""

    name: str
    hidden: int
    ffn: int
    heads: int
    groups: int
    layers: int
    vocab: int
    tied: bool
    measured: tuple[int, int]
    rows: int
    length: int = 4096

    def model(self, layers: int) -> ModelShape:
        return ModelShape(
            architecture="llama",
            num_layers=layers,
            hidden_size=self.hidden,
            ffn_hidden_size=self.ffn,
            num_attention_heads=self.heads,
            num_query_groups=self.groups,
            kv_channels=self.hidden // self.heads,
            vocab_size=self.vocab,
            padded_vocab_size=self.vocab,
            max_position_embeddings=self.length,
            tied_embeddings=self.tied,
        )

    def layer_weights(self) -> int:
        """Numbers in a layer's matrices."""
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.groups)
        return attention + 3 * self.hidden * self.ffn

    def flops(self, layers: int) -> int:
        """Of a step, forward and backward."""
        return training_flops(self.model(layers), [self.length] * self.rows)

    def linears(self) -> dict[str, tuple[int, int]]:
        """`(in, out)` of a layer's GEMMs."""
        qkv = self.hidden // self.heads * (self.heads + 2 * self.groups)
        return {
            "qkv": (self.hidden, qkv),
            "proj": (self.hidden, self.hidden),
            "fc1": (self.hidden, 2 * self.ffn),
            "fc2": (self.ffn, self.hidden),
        }


SHAPES = (
    Shape("7B", 4096, 11008, 32, 32, 32, 32000, False, (2, 6), 4),  # Llama-2-7B
    Shape("8B", 4096, 14336, 32, 8, 32, 128256, False, (2, 6), 2),  # Llama-3.1-8B
    Shape("1B", 2048, 8192, 32, 8, 16, 128256, True, (4, 12), 4),  # Llama-3.2-1B
    Shape("3B", 3072, 8192, 24, 8, 28, 128256, True, (3, 9), 4),  # Llama-3.2-3B
    Shape("13B", 5120, 13824, 40, 40, 40, 32000, False, (2, 5), 4),  # Llama-2-13B
)
SMALL = (Shape("tiny", 128, 256, 4, 2, 4, 256, False, (1, 2), 1, 64),)


def shapes(place: Place) -> tuple[Shape, ...]:
    return SMALL if place.small else SHAPES


def recipes(place: Place, report: Report) -> tuple[str, ...]:
    """Those of RECIPES that this machine computes; what it refuses is told with the reason, as Hopper does some."""
    found = []
    for preset in RECIPES:
        try:
            choose_backend(place.backend, PRESETS[preset])
            found.append(preset)
        except EnvironmentProblem as problem:
            report({"recipe": preset, "refused": f"{problem.what}. {problem.do}"})
    return tuple(found)


def gpt(shape: ModelShape, place: Place, preset: str | Precision = "bf16") -> GPT:
    """Weights are the same whatever the precision."""
    torch.manual_seed(0)
    return GPT(shape, PRESETS[preset] if isinstance(preset, str) else preset, place.backend, device=place.device)


def batch(shape: Shape, place: Place) -> Tensor:
    """Tokens of a step, `[B, S + 1]`."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(shape.vocab, (shape.rows, shape.length + 1), generator=generator).to(place.device)


def train_loss(model: GPT, tokens: Tensor) -> Tensor:
    """Mean loss of next tokens; rows `[B, S + 1]`."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    total = loss(model(inputs), labels, torch.ones_like(labels, dtype=torch.bool), model.model.vocab_size)
    return total / labels.numel()


def update(model: GPT, optimizer: MasterAdamW, tokens: Tensor, lr: float = SETTINGS.lr) -> Tensor:
    """A step as the trainer makes it, which waits for no device; its loss, `[]`."""
    value = train_loss(model, tokens)
    value.backward()  # type: ignore[no-untyped-call]
    optimizer.collect()
    numbers = torch.stack([value.detach(), optimizer.clip()])
    optimizer.step(lr, ~numbers.isfinite().all())
    return value.detach()


def recipe_of(shape: Shape, preset: str) -> Recipe:
    """That of an update of one pass."""
    return Recipe(PRESETS[preset], Train(batch_size=shape.rows, micro_batch_size=shape.rows), optimizer=SETTINGS)


def stepper(shape: ModelShape, place: Place, preset: str) -> Callable[[Tensor], Tensor]:
    """`update` of a new model and its optimizer."""
    model = gpt(shape, place, preset)
    return partial(update, model, MasterAdamW(model, SETTINGS))


def wait(place: Place) -> None:
    """Until the GPU has done what it was given."""
    if not place.small:
        torch.cuda.synchronize()


@contextlib.contextmanager
def _clock(place: Place) -> Iterator[Callable[[], float]]:
    """Gives a function that tells, afterwards, the seconds that it took; on a GPU by its own events."""
    wait(place)
    if place.small:
        times = [time.perf_counter()]
        yield lambda: times[1] - times[0]
        times.append(time.perf_counter())
        return
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    yield lambda: before.elapsed_time(after) / 1000
    after.record()
    wait(place)


def timed(function: Callable[[], object], place: Place, repeats: int, warm: int, each: int = 1) -> Row:
    """Seconds of a call: median, least and most of `repeats` of `each` calls running, for which the host may go on
    ahead of the GPU."""
    repeats, warm, each = (2, 1, 1) if place.small else (repeats, warm, each)
    for _ in range(warm):
        function()
    taken = []
    for _ in range(repeats):
        with _clock(place) as seconds:
            for _ in range(each):
                function()
        taken.append(seconds() / each)
    return {"seconds": statistics.median(taken), "least": min(taken), "most": max(taken), "repeats": repeats}


def speed_of(step: Callable[[], object], shape: Shape, layers: int, place: Place) -> Row:
    """Seconds of a training step, two of which are made running, as a run makes them; what that is in tokens and
    TFLOP a second, and the memory it takes."""
    found = timed(step, place, repeats=4, warm=2, each=2)
    return found | {
        "tokens_per_second": shape.rows * shape.length / found["seconds"],
        "tflops": shape.flops(layers) / found["seconds"] / 1e12,
        "memory_gb": peak_gb(place),
    }


@contextlib.contextmanager
def alone(place: Place) -> Iterator[None]:
    """Around a model: nothing of it stays. TE keeps the state of every module that ran in FP8, and updates it in each
    pass."""
    if quantization := sys.modules.get("transformer_engine.pytorch.quantization"):
        quantization.FP8GlobalStateManager.reset()
    gc.collect()  # before, not after: a failure holds what it failed with until it is reported
    if not place.small:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield


def peak_gb(place: Place) -> float | None:
    return None if place.small else torch.cuda.max_memory_allocated() / 1e9


def sqnr(signal: Tensor, other: Tensor) -> float:
    """Decibels."""
    wide, noise = signal.detach().double(), (signal.detach().double() - other.detach().double()).norm()
    return float(20 * torch.log10(wide.norm() / noise.clamp(min=1e-30)))


def attempt(report: Report, row: Row, measure: Callable[[], Row]) -> Row | None:
    """Report what is measured, or why nothing was."""
    try:
        made = row | measure()
    except Exception as problem:  # whatever it is, the other rows are wanted
        what = f"{type(problem).__name__}: {str(problem).partition(chr(10))[0][:300]}"
        report(row | {"error": what, "trace": traceback.format_exc()[-3000:]})
        return None
    report(made)
    return made

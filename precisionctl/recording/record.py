"""Three ways to record training that another program does: around a loop, in transformers' Trainer, in Megatron-LM."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch import nn

from precisionctl.paths import StrPath
from precisionctl.recording.run_recorder import RunRecorder

if TYPE_CHECKING:
    from transformers import TrainerCallback

Arguments = ParamSpec("Arguments")
Model = TypeVar("Model", bound=nn.Module)


@contextmanager
def record(
    model: nn.Module, out: StrPath, *, recipe: str = "fp8-delayed", overrides: tuple[str, ...] = (), every: int = 1
) -> Iterator[RunRecorder]:
    """Record the FP8 state of a model's passes inside the `with`, and write at its end the file that `calibrate` writes
    (docs/recorder.md). Nothing is written if an error leaves it.

    `model` is one of transformers with a table of its family, or of Megatron-Core, in DDP or not; `recipe` and
    `overrides` are those of `resume`; of passes each `every`-th is recorded. Raises DestinationExists, RecipeError,
    UnknownArchitecture for another model, PrecisionError for experts in one tensor, MissingFp8State if there was no
    pass with gradients.
    """
    recorder = RunRecorder(out, recipe=recipe, overrides=overrides, every=every)
    try:
        recorder.attach(model)
        yield recorder
    finally:
        recorder.detach()
    recorder.finish()


def recorder_callback(
    out: StrPath, *, recipe: str = "fp8-delayed", overrides: tuple[str, ...] = (), every: int = 8
) -> "TrainerCallback":
    """As `record`, for transformers' Trainer: `Trainer(..., callbacks=[recorder_callback(OUT)])` records from the
    beginning of its training to the end. A run has many passes, so it is enough to record some (`every`). Arguments and
    errors are those of `record`."""
    from transformers import TrainerCallback

    class RecorderCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed (pyproject.toml)
        recorder: RunRecorder

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.recorder = RunRecorder(out, recipe=recipe, overrides=overrides, every=every)
            self.recorder.attach(others["model"])

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.recorder.iteration = state.global_step
            self.recorder.finish()

    return RecorderCallback()


def recorded_provider(
    provider: Callable[Arguments, Model],
    out: StrPath,
    *,
    passes: int,
    recipe: str = "fp8-delayed",
    overrides: tuple[str, ...] = (),
    every: int = 8,
) -> Callable[Arguments, Model]:
    """As `record`, for Megatron-LM, whose `pretrain` takes a function that makes the model. Returns a function that
    makes the same model and records it. `passes` must be fewer micro-batches than the run makes: the file is written
    when that many have been recorded and the next one begins."""
    recorder = RunRecorder(out, recipe=recipe, overrides=overrides, every=every, passes=passes)

    @wraps(provider)
    def recorded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Model:
        model = provider(*args, **kwargs)
        recorder.attach(model)
        return model

    return recorded

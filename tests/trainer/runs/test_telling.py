"""No step waits for its host, nor a host within a step for its device: a step on a device of which nothing can be read;
and runs whose host reads a step late, which are the same."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pico import shape
from soaking import in_soak
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training import contents, losses, run_with_kills, settings

from precisionctl.errors import PrecisionError
from precisionctl.precision import PRESETS
from precisionctl.recipe import Recipe, Train
from precisionctl.trainer import loop, resume as trainer, sequences
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.data import batch as batches
from precisionctl.trainer.data.batch import Batch, Piece, make_batch
from precisionctl.trainer.measure.meter import PendingStepCost
from precisionctl.trainer.measure.metrics import FILE, read_metrics
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.resume import resume
from precisionctl.trainer.run import Run

make_tensor = torch.tensor


class Copies(TorchDispatchMode):
    """`waiting` is what is copied to the device while the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        made = function(*arguments, **keywords)
        inputs = [value for value in arguments if isinstance(value, Tensor)]
        copies = isinstance(made, Tensor) and made.is_meta and any(not each.is_meta and each.dim() for each in inputs)
        if copies and not keywords.get("non_blocking"):
            self.waiting.append(str(function))
        return made

    def tensor(self, values: Any, **keywords: Any) -> Tensor:
        """`torch.tensor`, which goes by no dispatcher."""
        if torch.device(keywords.get("device") or "cpu").type == "meta":
            self.waiting.append(f"torch.tensor({values})")
        return make_tensor(values, **keywords)


class Unread(torch.optim.AdamW):
    """PyTorch's has no kernel for `meta`; what it is told stays there."""

    def __init__(self, *arguments: Any, fused: bool, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        assert fused

    def step(self, closure: Any = None) -> None:
        assert self.found_inf.is_meta  # type: ignore[attr-defined]


class Texts:
    """Rows to train on, each of some texts of these lengths."""

    def __init__(self, lengths: Collection[int]) -> None:
        self.pieces = [Piece(torch.arange(length + 1).numpy(), None) for length in lengths]

    def order(self, seed: int) -> "Texts":
        return self

    def take(self, position: int, rows: int) -> list[int]:
        return list(range(rows))

    def batch(self, numbers: list[int]) -> Batch:
        return make_batch([self.pieces for _ in numbers], 0, 1)


@contextmanager
def on_meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    monkeypatch.setattr(torch.optim, "AdamW", Unread)
    for module in (sequences, batches):
        monkeypatch.setattr(module, "to_device", lambda values, device: values.to(device, non_blocking=True))
    with Copies() as copies:
        monkeypatch.setattr(torch, "tensor", copies.tensor)
        yield copies


WHOLE, PACKED, PADDED = (32,), (20, 12), (19,)


@pytest.mark.parametrize(
    ("family", "precision", "lengths"),
    [
        ("llama-3", "fp8-delayed", WHOLE),
        *in_soak(("deepseek-v3", "bf16", PADDED)),
        *in_soak(("llama-3", "fp8-current", PADDED), ("gemma2", "fp8-delayed", PACKED), ("gpt2", "bf16", PACKED)),
    ],
)
def test_nothing_is_read_from_the_device_within_a_step_and_nothing_sent_that_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, family: str, precision: str, lengths: tuple[int, ...]
) -> None:
    """`meta` has no numbers: whatever asks for one raises. Experts ask how many tokens each has, so there are none; and
    what is shown to a recorder is looked at without its padding."""
    gpt = GPT(replace(shape(family), moe=None), PRESETS[precision], device="meta")
    recipe = Recipe(PRESETS[precision], Train(batch_size=4, micro_batch_size=2))
    rows: Any = Texts(lengths)
    with on_meta(monkeypatch) as copies:
        run = Run(recipe, gpt, MasterAdamW(gpt, recipe.optimizer), rows)
        if precision == "bf16" and lengths != PADDED:
            run.recorder = Recorder(PRESETS["fp8-delayed"], run.device)
        with run.recording():
            loop.update(run)
            copies.waiting.clear()  # what is made once has been made
            numbers, targets = loop.update(run)
        assert numbers.is_meta and targets == 4 * sum(lengths)
        assert (run.meter.health is not None) == (precision == "fp8-delayed")
        assert PendingStepCost.of(run.meter.flops, run.world, run.device).flops > 0
    assert copies.waiting == []


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(loop, "reports_late", lambda run: run.guard is None)


@pytest.mark.soak
def test_a_run_that_is_told_of_late_skips_is_killed_and_ends_as_one_that_is_told_of_at_once(
    place: Path, tmp_path: Path, broken: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken |= {2, 3, 6}
    changes = {"train__save_every": 3, "data__held_out": str(place / "held_out.txt")}
    outs = [tmp_path / name for name in ("at once", "late", "killed")]
    made = [settings(place / "source", place / "text.txt", out, "fp8", **changes) for out in outs]
    resume(made[0], lambda started: None, lambda step: None)
    monkeypatch.setattr(loop, "reports_late", lambda run: run.guard is None)
    resume(made[1], lambda started: None, lambda step: None)
    run_with_kills(made[2], {1, 2, 4, 5, 6})
    for out in outs[1:]:
        assert str(losses(out)) == str(losses(outs[0]))  # NaN is not itself
        assert contents(out / "iter_0000006") == contents(outs[0] / "iter_0000006")


def test_a_step_is_told_of_when_the_next_one_is_under_way_or_before_it_is_saved(
    place: Path, tmp_path: Path, late: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Run] = []
    before = trainer.train
    monkeypatch.setattr(trainer, "train", lambda run, *how: runs.append(run) or before(run, *how))
    told: list[tuple[int, int]] = []
    made = settings(place / "source", place / "text.txt", tmp_path / "run", "fp8", train__save_every=3)
    resume(made, lambda started: None, lambda step: told.append((step.step, runs[0].step)))
    assert told == [(1, 2), (2, 3), (3, 3), (4, 5), (5, 6), (6, 6)]


def test_too_many_skips_end_a_run_that_is_told_of_late_with_nothing_of_them(
    place: Path, tmp_path: Path, broken: set[int], late: None
) -> None:
    broken |= {3, 4, 5}
    made = settings(place / "source", place / "text.txt", tmp_path / "run", train__max_skipped=1, train__save_every=2)
    with pytest.raises(PrecisionError, match="step 4 has loss nan .* the last of 2 skipped steps in a row"):
        resume(made, lambda started: None, lambda step: None)
    assert [path.name for path in (tmp_path / "run").glob("iter_*")] == ["iter_0000002"]
    assert [row["step"] for row in read_metrics(tmp_path / "run" / FILE)] == [1, 2, 3]

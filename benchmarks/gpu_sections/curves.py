"""The four curves, with real FP8 GEMMs: BF16; BF16 to FP8 with carried, calibrated and cold state; FP8 to BF16; FP8.

A Llama of 400 million parameters over bytes of real text: the Python files of this machine. Every run that goes on does
so from the same weights, moments and batches. BF16 with each batch in two halves shows what roundings alone do.
"""

import random
import statistics
import sysconfig
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_sections.common import SETTINGS, Place, Report, Row, Shape, alone, attempt, gpt, train_loss
from precisionctl.fp8.state import Fp8State
from precisionctl.precision import PRESETS
from precisionctl.recipe import Schedule
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.optimizer.learning_rate import learning_rate

SHAPE = Shape("400M", 1024, 4096, 16, 4, 24, 256, False, (24, 24), 16, 1024)
SMALL = Shape("tiny", 64, 128, 4, 2, 2, 256, False, (2, 2), 4, 64)
START, STEPS, CALIBRATION = 100, 64, 8
EARLY = 20
LR = 6e-4
PRECISION = "fp8-delayed"


@dataclass(frozen=True)
class Plan:
    """Steps before the switch and after it."""

    shape: Shape
    start: int
    steps: int


class Text:
    """Batches of bytes, by step; those below zero are of no step of a run."""

    def __init__(self, plan: Plan, place: Place) -> None:
        shape, self.place = plan.shape, place
        self.rows, self.length = shape.rows, shape.length + 1
        wanted = (plan.start + plan.steps + CALIBRATION) * self.rows * self.length
        self.tokens = torch.frombuffer(bytearray(_text(wanted)), dtype=torch.uint8)
        self.order = torch.randperm(len(self.tokens) // self.length, generator=torch.Generator().manual_seed(0))

    def batch(self, step: int) -> Tensor:
        places = self.order[(torch.arange(self.rows) + step * self.rows) % len(self.order)]
        rows = [self.tokens[place * self.length : (place + 1) * self.length] for place in places.tolist()]
        return torch.stack(rows).long().to(self.place.device)


def _text(size: int) -> bytes:
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    random.Random(0).shuffle(files)
    parts: list[bytes] = []
    found = 0
    for file in files:
        parts.append(file.read_bytes())
        found += len(parts[-1])
        if found > size:
            break
    return b"".join(parts)


class Training:
    """A model, its optimizer and the step it is at."""

    def __init__(self, plan: Plan, place: Place, text: Text, precision: str) -> None:
        self.plan, self.place, self.text, self.step = plan, place, text, 0
        self.model: GPT = gpt(plan.shape.model(plan.shape.layers), place, precision)
        self.optimizer = MasterAdamW(self.model, SETTINGS)
        self.losses: list[Tensor] = []

    def kept(self) -> dict[str, Any]:
        """All that another training goes on from."""
        kinds = {kind: {n: t.clone() for n, t in by.items()} for kind, by in self.optimizer.tensors.items()}
        states = {name: linear.fp8_state() for name, linear in fp8_linears(self.model).items()}
        return {"tensors": kinds, "steps": self.optimizer.steps, "step": self.step, "states": states}

    def go_on_from(self, kept: dict[str, Any]) -> "Training":
        for kind, by_name in kept["tensors"].items():
            for name, values in by_name.items():
                self.optimizer.tensors[kind][name].copy_(values)
        self.optimizer.steps = kept["steps"]
        self.optimizer.publish()
        self.step = kept["step"]
        if kept["states"]:
            self.set(kept["states"])
        return self

    def set(self, states: dict[str, Fp8State]) -> None:
        for name, linear in fp8_linears(self.model).items():
            linear.set_fp8_state(states[name])

    def run(self, until: int, halves: bool = False) -> "Training":
        while self.step < until:
            batch = self.text.batch(self.step)
            parts = batch.chunk(2) if halves else (batch,)
            total = torch.zeros((), device=self.place.device)
            for part in parts:
                loss = train_loss(self.model, part) / len(parts)
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.collect()
                total += loss.detach()
            self.optimizer.clip()
            self.step += 1
            schedule = Schedule(warmup_steps=20)
            self.optimizer.step(learning_rate(self.step, self.plan.start + self.plan.steps, LR, schedule))
            self.losses.append(total)
        return self

    def curve(self) -> list[float]:
        return torch.stack(self.losses).tolist()


def measure(place: Place, report: Report) -> None:
    plan = Plan(SMALL, 6, 6) if place.small else Plan(SHAPE, START, STEPS)
    text = Text(plan, place)
    report({"model": plan.shape.name, "start": plan.start, "steps": plan.steps, "lr": LR, "history": 1024})
    runs: dict[str, list[float]] = {}
    kept: dict[str, dict[str, Any]] = {}
    for name, precision in {"BF16": "bf16", "FP8": PRECISION}.items():
        attempt(report, {"run": name}, partial(throughout, name, precision, plan, place, text, runs, kept))
    ways = {
        "BF16 again": ("BF16", "bf16", "again"),
        "BF16 to FP8, carried": ("BF16", PRECISION, "carried"),
        "BF16 to FP8, calibrated": ("BF16", PRECISION, "calibrated"),
        "BF16 to FP8, cold": ("BF16", PRECISION, "cold"),
        "FP8 to BF16": ("FP8", "bf16", "plain"),
    }
    for name, (source, precision, way) in ways.items():
        if source in kept:
            row = {"run": name, "from": source}
            attempt(report, row, partial(switched, kept[source], runs[source], precision, way, plan, place, text))


def throughout(
    name: str, precision: str, plan: Plan, place: Place, text: Text, runs: dict[str, Any], kept: dict[str, Any]
) -> Row:
    """In one precision; its state at the switch is kept. BF16 collects histories in its last 32 steps before it."""
    with alone(place):
        training = Training(plan, place, text, precision)
        if precision == "bf16":
            training.run(max(0, plan.start - 32))
            recorder = Recorder(PRESETS[PRECISION], place.device)
            with training.model.recorded_by(recorder):
                training.run(plan.start)
            kept[name] = training.kept() | {"collected": recorder.states()}
        else:
            training.run(plan.start)
            kept[name] = training.kept()
        runs[name] = training.run(plan.start + plan.steps).curve()
        del training
    return {"losses": runs[name]}


def switched(
    kept: dict[str, Any], before: list[float], precision: str, way: str, plan: Plan, place: Place, text: Text
) -> Row:
    """On from a kept state; its gaps to the run that was not switched."""
    states = {"carried": kept.get("collected"), "again": None, "plain": None}.get(way)
    with alone(place):
        training = Training(plan, place, text, precision).go_on_from(kept | {"states": {}})
        if way == "calibrated":
            states = _calibrated(training, plan, text)
        if states:
            training.set(states)
        losses = training.run(plan.start + plan.steps, halves=way == "again").curve()
        del training
    gaps = [one / other - 1 for one, other in zip(losses, before[plan.start :], strict=True)]
    return {"losses": losses, "early": max(map(abs, gaps[:EARLY])), "mean": statistics.mean(gaps[EARLY:] or gaps)}


def _calibrated(training: Training, plan: Plan, text: Text) -> dict[str, Fp8State]:
    """From passes over batches that no run trains on."""
    recorder = Recorder(PRESETS[PRECISION], training.place.device)
    with training.model.recorded_by(recorder):
        for number in range(CALIBRATION):
            train_loss(training.model, text.batch(plan.start + plan.steps + number)).backward()  # type: ignore[no-untyped-call]
            training.model.zero_grad()
    return recorder.states()

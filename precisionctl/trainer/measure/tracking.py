"""Trackers of a run's metrics: TensorBoard if it is installed, Weights & Biases if the recipe names a project. Both
libraries are optional, and imported only here."""

import importlib.util
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from precisionctl.checkpoints.output import replace_file
from precisionctl.errors import EnvironmentProblem
from precisionctl.recipe import Tracking


class Tracker(Protocol):
    """A destination for the metrics of steps, by name, until it is closed."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def require(settings: Tracking) -> None:
    """Raise EnvironmentProblem if a tracker that the recipe asks for is not installed."""
    if settings.wandb and importlib.util.find_spec("wandb") is None:
        raise EnvironmentProblem(
            f"tracking.wandb is {settings.wandb!r}, and wandb is not installed",
            do="Install precisionctl[tracking], or leave tracking.wandb out.",
        )


def trackers(folder: Path, step: int, settings: Tracking, config: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of the run in `folder`, which continues after `step` and is described by `config`: TensorBoard if it
    is installed, W&B if it is asked for."""
    found: list[Tracker] = []
    with suppress(ImportError):
        found.append(TensorBoard(folder, step))
    if settings.wandb:
        found.append(WeightsAndBiases(folder, settings, config))
    return found


class TensorBoard:
    """Events in `tensorboard/`."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run of a project, also across processes that continue it; its files are in `wandb/`. W&B ignores steps
    that are made again after a kill."""

    def __init__(self, folder: Path, settings: Tracking, config: Mapping[str, Any]) -> None:
        import wandb

        identity = folder / "wandb" / "run_id"  # made once, and kept
        if not identity.exists():
            identity.parent.mkdir(exist_ok=True)
            replace_file(identity, secrets.token_hex(4))
        self._run: Any = wandb.init(
            project=settings.wandb,
            id=identity.read_text(),
            name=folder.resolve().name,
            dir=str(folder),
            resume="allow",
            mode="offline" if settings.offline else None,  # else what WANDB_MODE says
            config=dict(config),
            settings=wandb.Settings(console="off"),  # or it would log each redraw of the progress panel
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()

"""Megatron's learning rate schedule, continued from a checkpoint, and ours in its form.

The arithmetic is that of megatron/core/optimizer_param_scheduler.py (OptimizerParamScheduler.get_lr), which counts
samples, not updates. The initial rate of warm-up and WSD's decay are not in its state but in Megatron's arguments.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from precisionctl.errors import DamagedCheckpoint, damage, shown
from precisionctl.recipe import MUON_KEYS, Recipe
from precisionctl.untrusted.safe_pickle import is_count

_SKIP = "Use --skip schedule: then the recipe's schedule begins at its start."
DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
_RATES = ("init_lr", "min_lr", "max_lr")


@dataclass(frozen=True)
class MegatronSchedule:
    """Learning rates by number of samples, in the fields of Megatron's scheduler. `num_steps` is the number of samples
    after update `step`. Only WSD has `wsd_decay_steps`, the samples at the end over which it decays in
    `wsd_decay_style`. Raises DamagedCheckpoint for values that Megatron would not accept."""

    max_lr: float
    min_lr: float
    init_lr: float
    lr_warmup_steps: int
    lr_decay_steps: int
    lr_decay_style: str
    num_steps: int
    step: int
    wsd_decay_steps: int = 0
    wsd_decay_style: str = "exponential"

    def __post_init__(self) -> None:
        rates = all(type(getattr(self, name)) in (int, float) for name in _RATES)
        counts = (self.lr_warmup_steps, self.lr_decay_steps, self.num_steps, self.step, self.wsd_decay_steps)
        sound = (
            rates
            and 0 <= self.min_lr <= self.max_lr < 1 << 63
            and 0 <= self.init_lr <= self.max_lr
            and all(map(is_count, counts))
            and self.lr_warmup_steps < self.lr_decay_steps
            and self.lr_decay_style in DECAY_STYLES
            and (self.lr_decay_style != "WSD" or (self.wsd_decay_steps > 0 and self.wsd_decay_style in WSD_STYLES))
        )
        if not sound:
            raise DamagedCheckpoint(f"its schedule is none of Megatron's: {shown(asdict(self))}", do=_SKIP)
        for name in _RATES:
            object.__setattr__(self, name, float(getattr(self, name)))

    def samples(self, step: int, batch_size: int) -> int:
        """The number of samples after update `step`."""
        return self.num_steps + (step - self.step) * batch_size

    def rate(self, step: int, batch_size: int) -> float:
        """The learning rate of update `step`, which begins after the samples of all updates before it."""
        samples = self.samples(step - 1, batch_size)
        if self.lr_warmup_steps > 0 and samples <= self.lr_warmup_steps:
            return self.init_lr + (self.max_lr - self.init_lr) * samples / self.lr_warmup_steps
        if self.lr_decay_style == "constant":
            return self.max_lr
        if samples > self.lr_decay_steps:
            return self.min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.lr_warmup_steps, 1)) / math.sqrt(max(samples, 1)))
        if self.lr_decay_style == "WSD":
            late = samples - (self.lr_decay_steps - self.wsd_decay_steps)
            left = _left(self.wsd_decay_style, late / self.wsd_decay_steps) if late > 0 else 1.0
        else:
            done = (samples - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
            left = _left(self.lr_decay_style, done)
        return self.min_lr + left * (self.max_lr - self.min_lr)

    @property
    def words(self) -> str:
        """For the user, e.g. `cosine, 3.00e-04 to 3.00e-05 over 1000 samples, after 512`."""
        return (
            f"{self.lr_decay_style}, {self.max_lr:.2e} to {self.min_lr:.2e} over {self.lr_decay_steps} samples, "
            f"after {self.num_steps}"
        )


def megatron_scheduler(recipe: Recipe, schedule: MegatronSchedule | None, step: int) -> dict[str, object]:
    """The state of Megatron's scheduler (state_dict in optimizer_param_scheduler.py) after update `step`, so that its
    next rate is the run's: of the `schedule` that the run continues, else of the recipe.

    The recipe's rate of update n is Megatron's after n batches: it counts the coming one.
    """
    batch, decay = recipe.train.batch_size, recipe.optimizer.weight_decay
    samples = recipe.train.steps * batch
    if schedule is not None:
        keys = ("max_lr", "min_lr", "lr_decay_style", "lr_warmup_steps", "lr_decay_steps")
        rates = {key: getattr(schedule, key) for key in keys} | {"num_steps": schedule.samples(step, batch)}
    else:
        rates = {
            "max_lr": recipe.optimizer.lr,
            "min_lr": recipe.min_lr,
            "lr_decay_style": {"wsd": "WSD"}.get(recipe.schedule.kind, recipe.schedule.kind),
            "lr_warmup_steps": recipe.schedule.warmup_steps * batch,
            "lr_decay_steps": samples,
            "num_steps": (step + 1) * batch,
        }
    return rates | {"start_wd": decay, "end_wd": decay, "wd_incr_style": "constant", "wd_incr_steps": samples}


def training_args(recipe: Recipe, schedule: MegatronSchedule | None, position: int) -> dict[str, object]:
    """Megatron's arguments of a run that has taken `position` rows, as a checkpoint with its optimizer has them."""
    train, of_muon = recipe.train, {}
    if recipe.optimizer.by_muon:  # the recipe's keys have its names; tensor ranks orthogonalize a matrix as a whole
        keys = {key: getattr(recipe.optimizer, key) for key in MUON_KEYS}
        of_muon = {"optimizer": "muon", "muon_tp_mode": "duplicated", **keys}
    return {
        "no_save_optim": False,
        "consumed_train_samples": position,
        "micro_batch_size": train.micro_batch_size,
        "global_batch_size": train.batch_size,
        "train_iters": train.steps,
        "clip_grad": recipe.optimizer.clip_norm,
        **_schedule_args(recipe, schedule),
        **of_muon,
    }


def _schedule_args(recipe: Recipe, schedule: MegatronSchedule | None) -> dict[str, object]:
    """What of a schedule is in Megatron's arguments and not in its scheduler's state."""
    if schedule is None:
        decays = recipe.schedule.kind == "wsd"
        return {"lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": recipe.schedule.decay_steps} if decays else {}
    begins: dict[str, object] = {"lr_warmup_init": schedule.init_lr}
    if schedule.lr_decay_style != "WSD":
        return begins
    iterations, rest = divmod(schedule.wsd_decay_steps, recipe.train.batch_size)
    if rest:  # Megatron heeds a decay that is counted in samples only in a run that is
        samples = recipe.train.steps * recipe.train.batch_size
        decay = {"lr_wsd_decay_samples": schedule.wsd_decay_steps, "train_samples": samples}
    else:
        decay = {"lr_wsd_decay_iters": iterations}
    return begins | {"lr_wsd_decay_style": schedule.wsd_decay_style, **decay}


def _left(style: str, done: float) -> float:
    """The share, 1 to 0, that is left of the way from the highest to the lowest rate when the share `done` is over."""
    match style:
        case "linear":
            return 1.0 - done
        case "cosine":
            return 0.5 * (math.cos(math.pi * done) + 1.0)
        case "exponential":
            return 2.0 * math.pow(0.5, done) - 1.0
        case _:  # minus_sqrt
            return 1.0 - math.sqrt(done)


_OLD = {
    "max_lr": "start_lr",
    "lr_warmup_steps": "warmup_steps",
    "lr_decay_steps": "decay_steps",
    "lr_decay_style": "decay_style",
}
"""The names before megatron-core, which Megatron's load_state_dict still reads."""


def read_schedule(
    common: Mapping[str, Any], args: Mapping[str, Any], step: int, where: object
) -> MegatronSchedule | None:
    """The schedule in a checkpoint's common data, from a run that had made `step` updates; None if there is none.

    Raises DamagedCheckpoint for one that is not Megatron's.
    """
    state = common.get("opt_param_scheduler")
    if state is None:
        return None
    with damage("its schedule is none of Megatron's", where, _SKIP):
        fields = {key: state[old] if (old := _OLD.get(key)) in state else state[key] for key in _KEYS}
        iterations = args.get("lr_wsd_decay_iters")
        wsd = args.get("lr_wsd_decay_samples") if iterations is None else iterations * args["global_batch_size"]
        return MegatronSchedule(
            **fields,
            init_lr=args.get("lr_warmup_init") or 0.0,
            step=step,
            wsd_decay_steps=wsd or 0,
            wsd_decay_style=args.get("lr_wsd_decay_style") or "exponential",
        )


_KEYS = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "num_steps")

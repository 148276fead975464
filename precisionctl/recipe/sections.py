"""What a recipe says, section by section: every key, its default, and what it may be."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from precisionctl.errors import RecipeError
from precisionctl.precision import Precision

Bounds = tuple[str, Callable[[float], bool]]
"""What a number must be, in words and as a rule that no NaN passes."""

ABOVE_0: Bounds = ("above 0 and finite", lambda value: 0 < value < math.inf)
FROM_0: Bounds = ("0 or above, and finite", lambda value: 0 <= value < math.inf)
BELOW_1: Bounds = ("from 0 to below 1", lambda value: 0 <= value < 1)
SHARE: Bounds = ("from 0 to 1", lambda value: 0 <= value <= 1)
SEED: Bounds = ("from 0 to 4294967295", lambda value: 0 <= value < 2**32)


def _require(section: str, table: object, **bounds: Bounds) -> None:
    """Raise RecipeError for a value of a section that is out of its bounds."""
    for key, (words, holds) in bounds.items():
        if not holds(value := getattr(table, key)):
            raise RecipeError(f"{section}.{key} = {value} must be {words}")


@dataclass(frozen=True)
class Train:
    """How long, in what batches, and what is kept. Steps are optimizer steps; sizes are sequences. `recompute` of a
    layer keeps its input alone for the backward, and makes the rest once more then. `weight_casts` says how often a
    weight is cast to FP8: in every pass, or once for all passes of an update. `graphs` launches layers as CUDA graphs.
    With `async_save` training goes on while a copy is written. A step whose loss or gradients are no numbers is
    skipped, `max_skipped` running at most. `memory_check` is what becomes of a run that will not fit."""

    steps: int = 1000
    batch_size: int = 32
    micro_batch_size: int = 1
    seed: int = 0
    save_every: int = 500
    keep: int = 2
    eval_every: int = 100
    warmup_passes: int = 8
    recompute: Literal["none", "layer"] = "none"
    weight_casts: Literal["auto", "per-pass", "per-update"] = "auto"
    graphs: bool = False
    async_save: bool = False
    max_skipped: int = 5
    memory_check: Literal["refuse", "warn"] = "refuse"

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "micro_batch_size", "save_every", "keep", "eval_every")
        _require("train", self, seed=SEED, warmup_passes=FROM_0, max_skipped=FROM_0, **dict.fromkeys(counts, ABOVE_0))
        if self.batch_size % self.micro_batch_size:
            raise RecipeError(
                f"train.batch_size {self.batch_size} is not a multiple of "
                f"train.micro_batch_size {self.micro_batch_size}"
            )


@dataclass(frozen=True)
class Share:
    """One data set of a blend, and how many rows of it come for how many of the others."""

    path: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        _require("data.blend", self, weight=ABOVE_0)


@dataclass(frozen=True)
class Data:
    """Training and held-out files (see docs/data.md): one `path`, or several in a `blend`; tokens per sequence, whether
    conversations share one (`packing`), and where tokens are kept (`cache`, else the run's own folder)."""

    path: str = ""
    blend: tuple[Share, ...] = ()
    held_out: str = ""
    sequence_length: int = 1024
    packing: bool = False
    cache: str = ""

    def __post_init__(self) -> None:
        _require("data", self, sequence_length=ABOVE_0)
        if self.path and self.blend:
            raise RecipeError("data.path and data.blend are both given", do="Put the path into the blend.")


@dataclass(frozen=True)
class Optimizer:
    """AdamW (Loshchilov and Hutter, 2019). `clip_norm` bounds the global norm of the gradients; 0 is no bound. `preset`
    says how its state is kept: in FP32, or in FP8 and FP16 as FP8-LM has it (Peng et al., 2023)."""

    preset: Literal["adamw", "fp8-lm"] = "adamw"
    lr: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        _require("optimizer", self, lr=ABOVE_0, beta1=BELOW_1, beta2=BELOW_1)
        _require("optimizer", self, epsilon=ABOVE_0, weight_decay=FROM_0, clip_norm=FROM_0)


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a run, as a share of `optimizer.lr`.

    Linear warm-up over `warmup_steps`; then `cosine` falls to `min_ratio` at the last step, `wsd` stays and
    falls linearly to it over the last `decay_steps`, `constant` stays.
    """

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0
    min_ratio: float = 0.1

    def __post_init__(self) -> None:
        _require("schedule", self, warmup_steps=FROM_0, decay_steps=FROM_0, min_ratio=SHARE)


@dataclass(frozen=True)
class ParallelSettings:
    """How the ranks of torchrun share a model: `replicate` copies of it, each cut for the ranks that have it (1 is
    FSDP, more is HSDP, as many as ranks is DDP). Of those, `tensor` ranks share each layer's GEMMs, and with `sequence`
    the tokens between them; `expert` deals the experts out to so many of the others."""

    replicate: int = 1
    tensor: int = 1
    sequence: bool = False
    expert: int = 1

    def __post_init__(self) -> None:
        _require("parallel", self, replicate=ABOVE_0, tensor=ABOVE_0, expert=ABOVE_0)
        if self.sequence and self.tensor == 1:
            raise RecipeError(
                "parallel.sequence deals tokens out to tensor-parallel ranks, and parallel.tensor is 1",
                do="Set parallel.tensor, or leave parallel.sequence out.",
            )

    @property
    def token_ranks(self) -> int:
        """How many ranks share the tokens of a batch."""
        return self.tensor if self.sequence else 1


@dataclass(frozen=True)
class GuardSettings:
    """What watches FP8. Every `shadow_every` steps (0: never) an update's passes are made in BF16 too, and the gap of
    the losses, training or held-out, is judged: a warning beyond `warn_at`, and `act` when it was beyond `act_at` for
    `act_after` looks running: `stop`, or `bf16` for the next `bf16_steps` steps. A loss beyond the mean of the last
    `jump_within` before a switch to FP8 by more than `jump_at` (0: never), within as many steps after it, takes the run
    back to its last checkpoint, and on in BF16."""

    shadow_every: int = 0
    warn_at: float = 0.0025
    act_at: float = 0.01
    act_after: int = 3
    act: Literal["stop", "bf16"] = "stop"
    bf16_steps: int = 100
    jump_at: float = 0.0
    jump_within: int = 20

    def __post_init__(self) -> None:
        _require(
            "guard", self, jump_at=FROM_0, jump_within=ABOVE_0, shadow_every=FROM_0, warn_at=ABOVE_0, act_at=ABOVE_0
        )
        _require("guard", self, act_after=ABOVE_0, bf16_steps=ABOVE_0)


@dataclass(frozen=True)
class Tracking:
    """Where metrics go beside the run's folder. `wandb` is a project at Weights & Biases; none where it is empty.
    `offline` keeps what would be sent in the run's folder."""

    wandb: str = ""
    offline: bool = False


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run besides its checkpoint."""

    precision: Precision = field(default_factory=lambda: Precision(fp8=False))
    train: Train = field(default_factory=Train)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    tracking: Tracking = field(default_factory=Tracking)

    @property
    def casts_once(self) -> bool:
        """Whether weights that are whole from pass to pass are cast once for all passes of an update. `auto` does that
        where every bit is the same, as scales have no history, and codes are kept for the backward anyway."""
        if self.train.weight_casts == "auto":
            return self.precision.fp8 and not self.precision.keeps_state and self.train.recompute == "none"
        return self.precision.fp8 and self.train.weight_casts == "per-update"

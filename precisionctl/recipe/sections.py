"""The sections of a recipe: every key, its default and its bounds (docs/recipes.md has them as a table).

Steps are optimizer steps (updates). A value out of its bounds, or keys that contradict each other, raise RecipeError.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Literal

from precisionctl.errors import RecipeError
from precisionctl.precision import Precision

Bounds = tuple[str, Callable[[float], bool]]
"""The bounds of a number, in words and as a predicate, which is False for NaN."""

ABOVE_0: Bounds = ("above 0 and finite", lambda value: 0 < value < math.inf)
FROM_0: Bounds = ("0 or above, and finite", lambda value: 0 <= value < math.inf)
BELOW_1: Bounds = ("from 0 to below 1", lambda value: 0 <= value < 1)
SHARE: Bounds = ("from 0 to 1", lambda value: 0 <= value <= 1)
NS_STEPS: Bounds = ("from 1 to 99", lambda value: 1 <= value < 100)
"""Newton-Schulz steps: torch.optim.Muon takes below 100 (torch/optim/_muon.py), and each makes an update longer."""
SEED: Bounds = ("from 0 to 4294967295", lambda value: 0 <= value < 2**32)


def _require(section: str, table: object, **bounds: Bounds) -> None:
    """Raise RecipeError for a value of a section that is out of its bounds."""
    for key, (words, holds) in bounds.items():
        if not holds(value := getattr(table, key)):
            raise RecipeError(f"{section}.{key} = {value} must be {words}")


@dataclass(frozen=True)
class Train:
    """The length of training, batches, checkpoints, and how passes are computed."""

    steps: int = 1000
    """The last step of the run. Steps continue from the checkpoint's, unless its schedule is skipped."""
    batch_size: int = 32
    """Rows of an update, over all ranks."""
    micro_batch_size: int = 1
    """Rows of a pass on a rank; `batch_size` must be a multiple."""
    seed: int = 0
    """Seed of the order of the data, and of PyTorch's generators."""
    save_every: int = 500
    """Steps between two checkpoints."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    eval_every: int = 100
    """Steps between two evaluations of the held-out loss."""
    warmup_passes: int = 8
    """Passes that record the FP8 state a run starts with, if the checkpoint has none."""
    recompute: Literal["none", "layer"] = "none"
    """`layer`: save only each layer's input for the backward, which computes the layer again."""
    weight_casts: Literal["auto", "per-pass", "per-update"] = "auto"
    """How often a weight is cast to FP8: in every pass, or once for all passes of an update (`Recipe.casts_once`)."""
    graphs: bool = False
    """Launch layers as CUDA graphs."""
    async_save: bool = False
    """Continue training while a copy of the run is written."""
    max_skipped: int = 5
    """Most steps in a row that may be skipped because their loss or gradient norm is NaN or infinite."""
    memory_check: Literal["refuse", "warn"] = "refuse"
    """What to do with a run that is estimated not to fit into memory."""

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
    """One data set of a blend."""

    path: str
    weight: float = 1.0
    """Relative number of its rows."""

    def __post_init__(self) -> None:
        _require("data.blend", self, weight=ABOVE_0)


@dataclass(frozen=True)
class Data:
    """Training and held-out data (docs/data.md)."""

    path: str = ""
    """A file, a directory of files, or a Megatron data set; `PATH#KEY` for rows whose text is under another key."""
    blend: tuple[Share, ...] = ()
    """Several data sets in place of `path`."""
    held_out: str = ""
    """Data to evaluate the loss on; none if empty."""
    sequence_length: int = 1024
    """Targets (tokens) of a row."""
    packing: bool = False
    """Pack several conversations into a row."""
    cache: str = ""
    """Folder in which tokens are kept; the run's own folder if empty."""

    def __post_init__(self) -> None:
        _require("data", self, sequence_length=ABOVE_0)
        if self.path and self.blend:
            raise RecipeError("data.path and data.blend are both given", do="Put the path into the blend.")

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all data to train on."""
        return tuple(share.path for share in self.blend) or (self.path,)


@dataclass(frozen=True)
class Optimizer:
    """AdamW (Loshchilov and Hutter, 2019), or Muon (Jordan et al., 2024) as Megatron has it, with AdamW for what is no
    matrix. `clip_norm` limits the global norm of the gradients; 0 means no limit."""

    preset: Literal["adamw", "fp8-lm", "muon"] = "adamw"
    """AdamW with its state in FP32, AdamW with its state in FP8 and FP16 as by FP8-LM (Peng et al., 2023), or Muon."""
    lr: float = 1e-5
    """The highest learning rate; [schedule] varies it. With 0 a run measures and changes nothing."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    muon_momentum: float = 0.9
    """Of the moving average of gradients; this and what follows have the names, meanings and defaults of Megatron-LM's
    arguments."""
    muon_nesterov: bool = False
    """Whether a gradient counts once more beside the average that it is in already."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz steps that make a matrix nearly orthogonal."""
    muon_coefficient_type: Literal["quintic", "simple"] = "quintic"
    """Their coefficients: those of five different steps in turn, or of one (Jordan's own; torch.optim.Muon's)."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """The factor of an update `[out, in]`: the root of max(out, in), of out / in, or of max(1, out / in)."""
    muon_extra_scale_factor: float = 1.0
    """A further factor; 0.2, with `spectral`, makes updates about as large as AdamW's (arXiv 2502.16982)."""
    muon_split_qkv: bool = True
    """Whether queries, keys and values are a matrix each."""

    def __post_init__(self) -> None:
        _require("optimizer", self, lr=FROM_0, beta1=BELOW_1, beta2=BELOW_1)
        _require("optimizer", self, epsilon=ABOVE_0, weight_decay=FROM_0, clip_norm=FROM_0)
        _require("optimizer", self, muon_momentum=BELOW_1, muon_num_ns_steps=NS_STEPS, muon_extra_scale_factor=ABOVE_0)

    @property
    def by_muon(self) -> bool:
        """Whether Muon trains the matrices."""
        return self.preset == "muon"


MUON_KEYS = tuple(each.name for each in fields(Optimizer) if each.name.startswith("muon_"))
"""The settings that Muon alone heeds, as Megatron's arguments call them."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a run, as a share of `optimizer.lr`.

    It rises linearly over `warmup_steps`. Then `cosine` falls to `min_ratio` at the last step; `wsd` (warm-up, stable,
    decay) stays and falls linearly to `min_ratio` over the last `decay_steps`; `constant` stays.
    """

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0
    min_ratio: float = 0.1

    def __post_init__(self) -> None:
        _require("schedule", self, warmup_steps=FROM_0, decay_steps=FROM_0, min_ratio=SHARE)


Coefficient = float | Literal["checkpoint"]
"""A number, or what the checkpoint says."""


@dataclass(frozen=True)
class RouterSettings:
    """What keeps the loads of experts even: coefficients of losses, and the rate of DeepSeek's bias update; 0 is off
    (`trainer/model/router_balance.py`, which has the formulas)."""

    pooled_loss: Coefficient = "checkpoint"
    """transformers' load-balancing loss, of all layers together."""
    aux_loss: Coefficient = "checkpoint"
    """Megatron's, of each layer in a micro-batch."""
    seq_aux_loss: Coefficient = "checkpoint"
    """Of each layer in a row."""
    global_aux_loss: Coefficient = "checkpoint"
    """Of each layer in an update."""
    z_loss: Coefficient = "checkpoint"
    bias_update_rate: Coefficient = "checkpoint"

    def __post_init__(self) -> None:
        said = {key: FROM_0 for key, value in vars(self).items() if value != "checkpoint"}
        _require("router", self, **said)


@dataclass(frozen=True)
class ParallelSettings:
    """How a model is distributed over the ranks of torchrun."""

    replicate: int = 1
    """Copies of the model. Each is sharded over the ranks that have it: 1 is FSDP, more is HSDP, as many as there are
    ranks is DDP."""
    tensor: int = 1
    """Tensor-parallel ranks, which divide each layer's GEMMs."""
    sequence: bool = False
    """Sequence parallelism: tensor-parallel ranks also divide the tokens between GEMMs."""
    expert: int = 1
    """Expert-parallel ranks, which divide each layer's experts."""
    gather: Literal["per-pass", "per-update"] = "per-pass"
    """How often layers are gathered and their gradients reduced; per update, all are held in between."""
    pipeline: int = 1
    """With `--engine megatron-core`: pipeline stages, which divide the layers."""
    virtual: int = 1
    """Stages of each pipeline rank, which interleave (virtual pipeline parallelism)."""
    context: int = 1
    """With `--engine megatron-core`: context-parallel ranks, which divide the tokens of each row."""

    def __post_init__(self) -> None:
        sizes = ("replicate", "tensor", "expert", "pipeline", "virtual", "context")
        _require("parallel", self, **dict.fromkeys(sizes, ABOVE_0))
        if self.virtual > 1 and self.pipeline == 1:
            raise RecipeError("parallel.virtual divides pipeline stages, and parallel.pipeline is 1")
        if self.sequence and self.tensor == 1:
            raise RecipeError(
                "parallel.sequence divides tokens among tensor-parallel ranks, and parallel.tensor is 1",
                do="Set parallel.tensor, or leave parallel.sequence out.",
            )

    @property
    def token_ranks(self) -> int:
        """The number of ranks that divide the tokens of a batch."""
        return self.tensor if self.sequence else 1


@dataclass(frozen=True)
class GuardSettings:
    """The guard of an FP8 run: comparisons with BF16, and a rollback after a jump of the loss.

    In a comparison an update's passes are also made in BF16, and the gap between the losses, (FP8 - BF16) / BF16, is
    judged; with held-out data the larger of the two gaps.
    """

    shadow_every: int = 0
    """Steps between two comparisons; 0 for none."""
    warn_at: float = 0.0025
    """Gap beyond which there is a warning, as a share."""
    act_at: float = 0.01
    """Gap beyond which the guard acts, as a share."""
    act_after: int = 3
    """Number of comparisons in a row with a gap beyond `act_at` after which it acts."""
    act: Literal["stop", "bf16"] = "stop"
    """What it does: stop the run, or train in BF16 for `bf16_steps` steps."""
    bf16_steps: int = 100
    jump_at: float = 0.0
    """If the loss, after a switch to FP8, exceeds the mean loss before the switch by more than this share, the run goes
    back to its last checkpoint and on in BF16; 0 for never."""
    jump_within: int = 20
    """Number of losses before the switch that are averaged, and of steps after it that are watched."""

    def __post_init__(self) -> None:
        _require(
            "guard", self, jump_at=FROM_0, jump_within=ABOVE_0, shadow_every=FROM_0, warn_at=ABOVE_0, act_at=ABOVE_0
        )
        _require("guard", self, act_after=ABOVE_0, bf16_steps=ABOVE_0)


@dataclass(frozen=True)
class Tracking:
    """Trackers of metrics. `wandb` is the name of a Weights & Biases project; none if empty. With `offline` W&B only
    writes into the run's folder."""

    wandb: str = ""
    offline: bool = False


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run besides its checkpoint."""

    precision: Precision = field(default_factory=Precision)
    train: Train = field(default_factory=Train)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    router: RouterSettings = field(default_factory=RouterSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    tracking: Tracking = field(default_factory=Tracking)

    @property
    def min_lr(self) -> float:
        """The lowest learning rate of the schedule: the product of the decimals that the recipe has. Megatron tells
        groups of parameters apart by it, and who gives it 0.00024 does not mean 3e-4 * 0.8, which is less."""
        return float(Decimal(repr(self.optimizer.lr)) * Decimal(repr(self.schedule.min_ratio)))

    @property
    def casts_once(self) -> bool:
        """Whether weights are cast once for all passes of an update (if they are not sharded). `auto` does so where the
        results are the same to the bit, as scalings without history give, and codes are kept for the backward anyway.
        """
        if self.train.weight_casts == "auto":
            return self.precision.fp8 and not self.precision.keeps_state and self.train.recompute == "none"
        return self.precision.fp8 and self.train.weight_casts == "per-update"

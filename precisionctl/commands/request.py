"""Request: everything that a user asks of `convert` or `export-inference`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from precisionctl.checkpoints.huggingface_files import MAX_SHARD_SIZE
from precisionctl.dtypes import DType
from precisionctl.errors import RecipeError, meant
from precisionctl.fp8.extra_state_writer import TeVersion
from precisionctl.fp8.grouped import ColumnOrder
from precisionctl.fp8.state import DelayedScaling
from precisionctl.model_shape import ModelShape
from precisionctl.param import ONE_RANK, Layout, Parallelism
from precisionctl.precision import PRESETS, Precision
from precisionctl.quant_methods.base import Scheme

TE = "te"
"""The target of an export that is not an engine: Transformer Engine, in PyTorch."""

TE_TITLE = "PyTorch with Transformer Engine"

DCP = "dcp"
"""The container of PyTorch's own checkpoints, with an optimizer under Hugging Face's names."""

DEEPSPEED = "deepspeed-universal"
"""The container that DeepSpeed goes on from with any ZeRO, on any number of ranks."""

TORCHTITAN = "torchtitan"
"""The container that torchtitan goes on from: PyTorch's own, under its Llama's names."""

STATE_DICTS = (DCP, TORCHTITAN, DEEPSPEED)
"""Containers of what trainers load: names that a model has in memory, FP32 masters and an optimizer."""

ASKED_AS: Mapping[str, str] = {DCP: "dcp", TORCHTITAN: "torchtitan", DEEPSPEED: "deepspeed"}
"""What `--to` says for each of them."""

StrPath = str | os.PathLike[str]
"""A path, as programs that use the library have it."""

PrecisionChoice = Literal["keep", "bf16", "fp32", "fp8"]

_VALUES: Mapping[PrecisionChoice, DType | None] = {
    "keep": None,
    "bf16": DType.bfloat16,
    "fp32": DType.float32,
    "fp8": DType.bfloat16,
}

CONTAINERS: Mapping[Layout, tuple[str, ...]] = {
    "hf": ("safetensors", "bin", *STATE_DICTS),
    "megatron": ("torch_dist", "torch"),
}
"""The containers that can be written in each layout; the first is the default."""


def layout_and_container(to: str, container: str | None) -> tuple[Layout, str | None]:
    """What `--to` and `--container` ask for, as a Request has it. Raises RecipeError where they contradict."""
    if container is not None and ASKED_AS.get(container, to) != to:
        raise RecipeError(f"--to {to} is not written as {container}", do=f"Give --to {ASKED_AS[container]} alone.")
    for own, asked in ASKED_AS.items():
        if to == asked:
            if container not in (None, own):
                raise RecipeError(f"--to {to} is not written as {container}", do="Leave --container out.")
            return "hf", own
    return cast(Layout, to), container


def check_expert_parallel(expert_parallel: bool, ranks: int) -> None:
    """Raise RecipeError if experts are to be dealt out to a single GPU."""
    if expert_parallel and ranks == 1:
        raise RecipeError("--expert-parallel deals experts out to several GPUs", do="Give their number as --tp.")


@dataclass(frozen=True)
class Request:
    """What to convert, and to what. Paths may be strings. An export is a conversion to Hugging Face's layout in FP8 for
    a `target`. Raises RecipeError for options that contradict each other.

    `to` is `hf` or `megatron`, `container` one of CONTAINERS (None for the first), `precision` that of `convert
    --precision`. `parallelism` has the sizes that a Megatron result is split for. `max_shard_size` is in bytes.

    Without a `recipe` FP8 state keeps its own, or gets TE's defaults; for a target the recipe says which modules stay
    in BF16. A plain Megatron checkpoint does not contain its family, tokenizer or true vocabulary size: `architecture`
    names the family, or `reference` is a Hugging Face directory of the same model, whose config.json and tokenizer are
    used. A PyTorch checkpoint (DCP) needs a `reference` too; for a LoRA adapter it is the base model. With
    `trust_reference` its config.json overrules Megatron's arguments. If its weights are codes that no scheme writes
    (gpt-oss as released), and nothing else says which codes to make, the result gets codes like those. `drop_fp8_state`
    leaves FP8 state behind; `drop_encodings` leaves behind how weights were encoded, and with it the way back to their
    codes. `te_version` is the version of the FP8 payloads to write; `grouped_columns` the order of columns in the
    payloads of experts that are read, if it cannot be inferred.

    `target` is an engine's name in engines/, or TE; it runs on `ranks` GPUs, which get experts whole if
    `expert_parallel`, and else a part of each. Without a `scheme` the best that the checkpoint allows is chosen;
    `static` needs recorded input scales, from the source or from `fp8_state`.
    `keep_misfits` leaves modules in BF16 whose shapes the engine refuses. `kv_cache` stores scales for an FP8 KV cache,
    which must have been recorded, too. `base_model` is the source's name on the Hub, for the model card. `include` and
    `exclude` are patterns of names of modules that are to be FP8, and that are not (`planning/choice.py`).
    """

    source: Path
    destination: Path
    to: Layout
    precision: PrecisionChoice = "keep"
    container: str | None = None
    recipe: Precision | None = None
    parallelism: Parallelism = ONE_RANK
    iteration: int | None = None
    max_shard_size: int = MAX_SHARD_SIZE
    drop_fp8_state: bool = False
    drop_encodings: bool = False
    fp8_state: Path | None = None
    drop_optimizer: bool = False
    architecture: str | None = None
    reference: Path | None = None
    trust_reference: bool = False
    te_version: TeVersion = 2
    grouped_columns: ColumnOrder | None = None
    target: str | None = None
    scheme: Scheme | None = None
    ranks: int = 1
    expert_parallel: bool = False
    keep_misfits: bool = False
    kv_cache: Literal["fp8"] | None = None
    base_model: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def export(
        cls, source: StrPath, destination: StrPath, target: str, scheme: Scheme | None = None, **options: Any
    ) -> "Request":
        """The request of `export-inference`; `options` are further fields."""
        return cls(Path(source), Path(destination), "hf", "fp8", target=target, scheme=scheme, **options)

    def __post_init__(self) -> None:
        for name in ("source", "destination", "fp8_state", "reference"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(path))
        if self.to not in CONTAINERS or self.precision not in _VALUES:
            what = f"no conversion to {self.to} in {self.precision}"
            raise RecipeError(what, do=f"Layouts: {', '.join(CONTAINERS)}; precisions: {', '.join(_VALUES)}.")
        if self.to == "hf" and self.parallelism != ONE_RANK:
            to = ASKED_AS.get(self.container or "", "hf")
            raise RecipeError(f"--to {to} is not split for ranks", do="Leave --tp and its like out.")
        if self.container is not None and self.container not in CONTAINERS[self.to]:
            what, known = f"--to {self.to} is not written as {self.container}", CONTAINERS[self.to]
            raise RecipeError(what, do=f"Known: {', '.join(known)}. {meant(self.container, known)}".rstrip())
        if self.container in ("bin", *STATE_DICTS) and self.for_inference:
            option = "--precision" if self.is_state_dict else "--container"
            raise RecipeError(f"FP8 weights are not written as {self.container}", do=f"Leave {option} out.")
        if self.container == DEEPSPEED and (self.precision not in ("keep", "fp32") or self.drop_optimizer):
            raise RecipeError(
                "DeepSpeed needs FP32 masters and an optimizer",
                do="Leave --precision and --drop-optimizer out; --to hf has the weights alone.",
            )
        if self.architecture is not None and self.reference is not None:
            raise RecipeError("--reference and --architecture both name the family", do="Leave --architecture out.")
        if self.trust_reference and self.reference is None:
            raise RecipeError("--trust-reference, and no reference", do="Give --reference too.")
        if self.recipe is not None and self.precision != "fp8":
            raise RecipeError(
                "--recipe says how FP8 is made, but the result is not FP8",
                do="Give --precision fp8 too, or leave --recipe out.",
            )
        if self.drop_fp8_state and self.for_inference:
            raise RecipeError(
                "the input scales of FP8 weights come from the FP8 state",
                do="Leave --drop-fp8-state out, or use `export-inference --scheme dynamic`.",
            )
        if self.drop_encodings and self.for_inference:
            raise RecipeError(
                "the codes of weights come from their encodings",
                do="Leave --drop-encodings out, or use `export-inference`, which makes others.",
            )
        if self.te_version != 2 and not self.fills_extra_state:
            raise RecipeError(
                "--te-version is for state of Transformer Engine, and this result has none",
                do="Leave --te-version out.",
            )
        if self.grouped_columns and self.for_inference:
            raise RecipeError("--grouped-columns is not for exports", do="Convert with --grouped-columns first.")
        if self.target is not None and not self.for_inference:
            raise RecipeError(
                f"this result is not what {self.target} reads", do="Ask for hf in fp8, as Request.export."
            )
        if self.target is None and (self.scheme or self.kv_cache or self.keep_misfits or self.ranks > 1):
            raise RecipeError("schemes, caches and ranks are for an engine", do="Name a target.")
        if (self.include or self.exclude) and not self.for_engine:
            raise RecipeError(
                "--include and --exclude choose what becomes codes, and this result has none", do="Leave them out."
            )
        if self.target == TE:
            self._check_te()
        check_expert_parallel(self.expert_parallel, self.ranks)

    def _check_te(self) -> None:
        if self.scheme not in (None, "static"):
            raise RecipeError(f"an export for {TE_TITLE} has no scheme {self.scheme}", do="Leave --scheme out.")
        if self.recipe and self.recipe.scaling != "delayed":
            raise RecipeError(f"{self.recipe.scaling} scaling keeps no state", do="Give a recipe of delayed scaling.")
        if self.kv_cache or self.keep_misfits or self.ranks > 1 or self.expert_parallel:
            raise RecipeError(
                f"--kv-cache, --keep-misfits, --tp and --expert-parallel do not apply to {TE_TITLE}",
                do="Leave them out; keep_bf16 in a --recipe.",
            )

    @property
    def for_inference(self) -> bool:
        """Whether the result is a Hugging Face directory in FP8."""
        return self.to == "hf" and self.precision == "fp8"

    @property
    def for_engine(self) -> bool:
        """Whether the result has FP8 codes that an inference engine reads."""
        return self.for_inference and self.target != TE

    @property
    def says_which_codes(self) -> bool:
        """Whether the user chose which codes to make. If not, weights that were codes get their old codes back."""
        return bool(self.target or self.recipe or self.include or self.exclude)

    @property
    def is_state_dict(self) -> bool:
        """Whether the result is what a trainer loads under the names of a model's class."""
        return self.container in STATE_DICTS

    @property
    def keeps_optimizer(self) -> bool:
        """Whether the result has a place for an optimizer."""
        return not self.drop_optimizer and (self.to == "megatron" or self.is_state_dict)

    @property
    def fills_extra_state(self) -> bool:
        """Whether FP8 state is written into `_extra_state`, where a run loads it from; only delayed scaling has any."""
        delayed = self.recipe is None or self.recipe.keeps_state
        return self.to == "megatron" and self.precision in ("keep", "fp8") and delayed

    @property
    def dtype(self) -> DType | None:
        """The dtype of the result's values, before any is encoded; None for the stored dtype, with FP8 codes decoded to
        BF16. DeepSpeed has masters."""
        return DType.float32 if self.container == DEEPSPEED else _VALUES[self.precision]

    @property
    def state_recipe(self) -> DelayedScaling | None:
        """The recipe to change FP8 state to; None to keep its own, as for an engine, which has no recipe."""
        return None if self.for_engine or self.recipe is None else self.recipe.delayed

    def numerics(self, model: ModelShape) -> Precision:
        """The precision asked for, with patterns of layers resolved for this model. Raises UnknownArchitecture where a
        recipe counts the layers of a model that no table describes."""
        precision = self.recipe or PRESETS["fp8-delayed"]
        return precision.of_layers(model.num_layers) if precision.counts_layers else precision

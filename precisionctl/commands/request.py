"""Request: everything that a user asks of `convert` or `export-inference`, and what is decided from that alone."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

from precisionctl.checkpoints.gguf.file_types import GgufType
from precisionctl.checkpoints.hf_directory.huggingface_files import MAX_SHARD_SIZE
from precisionctl.commands.hints import check_hints
from precisionctl.commands.storage import CONTAINERS, DEEPSPEED, Storage
from precisionctl.dtypes import DType
from precisionctl.engines.base import engine_named
from precisionctl.errors import RecipeError
from precisionctl.export.mlx_plan import MlxScheme
from precisionctl.fp8.extra_state_writer import TeVersion
from precisionctl.fp8.grouped import ColumnOrder
from precisionctl.param import ONE_RANK, Layout, Parallelism
from precisionctl.paths import StrPath
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import SCHEMES, Scheme

TE: Final = "te"
LLAMA_CPP: Final = "llama.cpp"
MLX: Final = "mlx"
OTHER_TARGETS: Mapping[str, str] = {TE: "PyTorch with Transformer Engine", LLAMA_CPP: "llama.cpp", MLX: "mlx-lm"}
"""The targets of an export that are not engines, and what each is called in words. An engine reads a directory of
codes; TE reads values with FP8 state, llama.cpp a file, and mlx-lm a directory with codes of its own."""

ResultKind = Literal["values", "codes", "te", "llama.cpp", "mlx"]
"""What a result is made of: values, codes that an engine reads, or what one of OTHER_TARGETS reads."""

PrecisionChoice = Literal["keep", "bf16", "fp32", "fp8"]

_DTYPES: Mapping[PrecisionChoice, DType | None] = {
    "keep": None,
    "bf16": DType.bfloat16,
    "fp32": DType.float32,
    "fp8": DType.bfloat16,
}

_GGUF_TYPES: tuple[GgufType, ...] = get_args(GgufType)
_MLX_SCHEMES: tuple[MlxScheme, ...] = get_args(MlxScheme)


def given_options(options: Mapping[str, object]) -> str:
    """Those of some options that are given, in words."""
    return ", ".join(option for option, given in options.items() if given)


def check_expert_parallel(expert_parallel: bool, ranks: int) -> None:
    """Raise RecipeError if experts are to be dealt out to a single GPU."""
    if expert_parallel and ranks == 1:
        raise RecipeError("--expert-parallel deals experts out to several GPUs", do="Give their number as --tp.")


_Word = TypeVar("_Word")


def _among(words: Iterable[_Word], word: str | None) -> _Word | None:
    """The word, if it is one of `words`, with their type; else None."""
    return next((each for each in words if each == word), None)


@dataclass(frozen=True)
class Request:
    """What to convert, and to what: a field for each option. Paths may be strings. An export is a conversion to Hugging
    Face's layout in FP8 for a `target`. Raises RecipeError for options that contradict each other.

    `to` is `hf` or `megatron`, `container` one of CONTAINERS (None for the first), `precision` that of `convert
    --precision`: values for training in FP8 get state for every GEMM that the `recipe` computes in FP8, if that keeps
    any. Without a `recipe` FP8 state keeps its own, or gets TE's defaults; for a target the recipe says which modules
    stay in BF16. `fp8_state` is a file of recorded state. `drop_fp8_state` leaves FP8 state behind; `drop_encodings`
    leaves behind how weights were encoded, and with it the way back to their codes. If the weights of the `reference`
    are codes that no scheme writes (gpt-oss as released), and nothing else says which codes to make, the result gets
    codes like those. `include` and `exclude` are patterns of names of modules that are to be codes, and that are not
    (`planning/gemm_selection.py`).

    `target` is an engine's name in engines/, or one of OTHER_TARGETS. An engine runs on `ranks` GPUs, which get experts
    whole if `expert_parallel`, and else a part of each. Without a `scheme` the best that the checkpoint allows is
    chosen; `static` needs recorded input scales. For llama.cpp and mlx-lm it is the type of matrices, None for 16-bit
    values. `keep_misfits` leaves modules in BF16 whose shapes the engine refuses. `kv_cache` stores scales for an FP8
    KV cache, which must have been recorded, too. `base_model` is the source's name on the Hub, for the model card.

    The other options are described where they are used: those that say how the source is read at `open_hinted`, those
    of how the result is stored (`storage`) at Storage. What it is made of, its `kind`, follows from all.
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
    scheme: Scheme | GgufType | MlxScheme | None = None
    ranks: int = 1
    expert_parallel: bool = False
    keep_misfits: bool = False
    kv_cache: Literal["fp8"] | None = None
    base_model: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def export(
        cls,
        source: StrPath,
        destination: StrPath,
        target: str,
        scheme: Scheme | GgufType | MlxScheme | None = None,
        **options: Any,
    ) -> "Request":
        """The request of `export-inference`; `options` are further fields."""
        return cls(Path(source), Path(destination), "hf", "fp8", target=target, scheme=scheme, **options)

    def __post_init__(self) -> None:
        for name in ("source", "destination", "fp8_state", "reference"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(path))
        if self.to not in CONTAINERS or self.precision not in _DTYPES:
            what = f"no conversion to {self.to} in {self.precision}"
            raise RecipeError(what, do=f"Layouts: {', '.join(CONTAINERS)}; precisions: {', '.join(_DTYPES)}.")
        check_hints(self.architecture, self.reference, self.trust_reference)
        _ = self.storage  # which refuses options that contradict each other, as what follows does
        if self.kind != "values":
            self._check_fp8_directory()
        checks: Mapping[ResultKind, Callable[[], None]] = {
            "values": self._check_values,
            "codes": self._check_codes,
            TE: self._check_te_state,
            LLAMA_CPP: self._check_gguf_or_mlx,
            MLX: self._check_gguf_or_mlx,
        }
        checks[self.kind]()
        if self.te_version != 2 and not self.fills_extra_state:
            raise RecipeError(
                "--te-version is for state of Transformer Engine, and this result has none",
                do="Leave --te-version out.",
            )

    @cached_property
    def storage(self) -> Storage:
        """How the result is stored."""
        container = CONTAINERS[self.to][0] if self.container is None else self.container
        return Storage(self.to, container, self.parallelism, self.max_shard_size, self.te_version)

    @property
    def kind(self) -> ResultKind:
        """What the result is made of: `values`, unless Hugging Face's layout is asked for in FP8."""
        if self.to != "hf" or self.precision != "fp8":
            return "values"
        others: tuple[ResultKind, ...] = (TE, LLAMA_CPP, MLX)
        return _among(others, self.target) or "codes"

    @property
    def dtype_of_values(self) -> DType | None:
        """The dtype of a result of values; None for the stored one, with FP8 codes decoded to BF16."""
        assert self.kind == "values"
        return DType.float32 if self.storage.container == DEEPSPEED else _DTYPES[self.precision]

    @property
    def scheme_of_codes(self) -> Scheme | None:
        """The scheme that is asked for of a result of codes; None for any other, too."""
        return _among(SCHEMES, self.scheme) if self.kind == "codes" else None

    @property
    def gguf_type(self) -> GgufType | None:
        """The type that is asked for of the matrices of a GGUF file; None for any other result, too."""
        return _among(_GGUF_TYPES, self.scheme) if self.kind == LLAMA_CPP else None

    @property
    def mlx_scheme(self) -> MlxScheme | None:
        """The scheme that is asked for of a directory of mlx-lm; None for any other result, too."""
        return _among(_MLX_SCHEMES, self.scheme) if self.kind == MLX else None

    @property
    def fills_extra_state(self) -> bool:
        """Whether FP8 state is written into `_extra_state`, where a run loads it from."""
        delayed = self.recipe is None or self.recipe.keeps_state
        return self.to == "megatron" and self.precision in ("keep", "fp8") and delayed

    @property
    def chooses_codes(self) -> bool:
        """Whether the user chose which codes to make. If not, weights that were codes get their old codes back."""
        return self.kind != "values" and bool(self.target or self.recipe or self.include or self.exclude)

    def _check_fp8_directory(self) -> None:
        if self.storage.container != CONTAINERS["hf"][0]:
            option = "--precision" if self.storage.is_state_dict else "--container"
            raise RecipeError(f"FP8 weights are not written as {self.container}", do=f"Leave {option} out.")
        if self.drop_fp8_state:
            raise RecipeError(
                "the input scales of FP8 weights come from the FP8 state",
                do="Leave --drop-fp8-state out, or use `export-inference --scheme dynamic`.",
            )
        if self.drop_encodings:
            raise RecipeError(
                "the codes of weights come from their encodings",
                do="Leave --drop-encodings out, or use `export-inference`, which makes others.",
            )
        if self.grouped_columns:
            raise RecipeError("--grouped-columns is not for exports", do="Convert with --grouped-columns first.")

    def _check_values(self) -> None:
        if self.storage.container == DEEPSPEED and (self.precision not in ("keep", "fp32") or self.drop_optimizer):
            raise RecipeError(
                "DeepSpeed needs FP32 masters and an optimizer",
                do="Leave --precision and --drop-optimizer out; --to hf has the weights alone.",
            )
        if self.recipe is not None and self.precision != "fp8":
            raise RecipeError(
                "--recipe says how FP8 is made, but the result is not FP8",
                do="Give --precision fp8 too, or leave --recipe out.",
            )
        if self.target is not None:
            raise RecipeError(
                f"this result is not what {self.target} reads", do="Ask for hf in fp8, as Request.export."
            )
        self._check_no_engine()
        if self.include or self.exclude:
            raise RecipeError(
                "--include and --exclude choose what becomes codes, and this result has none", do="Leave them out."
            )

    def _check_te_state(self) -> None:
        if self.scheme not in (None, "static"):
            what = f"an export for {OTHER_TARGETS[TE]} has no scheme {self.scheme}"
            raise RecipeError(what, do="Leave --scheme out.")
        if self.recipe and self.recipe.scaling != "delayed":
            raise RecipeError(f"{self.recipe.scaling} scaling keeps no state", do="Give a recipe of delayed scaling.")
        if given := given_options(self._of_engines):
            do = "Leave it out, or choose modules with keep_bf16 in a --recipe."
            raise RecipeError(f"{given} cannot be given for {OTHER_TARGETS[TE]}", do=do)

    def _check_gguf_or_mlx(self) -> None:
        title = OTHER_TARGETS[self.kind]
        schemes: tuple[str, ...] = _GGUF_TYPES if self.kind == LLAMA_CPP else _MLX_SCHEMES
        if self.scheme not in (None, *schemes):
            others = "llama-quantize makes others of a BF16 file."
            if self.kind == MLX:
                others = "`mlx_lm.convert` makes others of a BF16 one."
            what = f"{title} does not read {self.scheme}"
            raise RecipeError(what, do=f"Choose --scheme {' or '.join(schemes)}; {others}")
        if given := given_options({**self._of_engines, "--fp8-state": self.fp8_state, "--recipe": self.recipe}):
            raise RecipeError(f"{given} cannot be given for {title}", do="Leave it out.")
        if self.kind == LLAMA_CPP and self.destination.suffix == ".gguf":
            raise RecipeError(
                "an export is a folder, with a card and a manifest beside the file",
                do=f"Give its name, such as {self.destination.stem}: the file in it will be called after it.",
            )

    @property
    def _serving(self) -> Mapping[str, object]:
        """The options that say how an engine serves the result, each with whether it is given."""
        return {
            "--kv-cache": self.kv_cache,
            "--keep-misfits": self.keep_misfits,
            "--tp": self.ranks > 1,
            "--expert-parallel": self.expert_parallel,
        }

    @property
    def _of_engines(self) -> Mapping[str, object]:
        """As `_serving`, with those that say what becomes codes for an engine."""
        return {**self._serving, "--include": self.include, "--exclude": self.exclude}

    def _check_codes(self) -> None:
        if self.scheme not in (None, *SCHEMES):
            if self.target is not None:
                engine_named(self.target, *OTHER_TARGETS)  # whose scheme it is matters of an engine alone
            target = LLAMA_CPP if self.scheme in _GGUF_TYPES else MLX
            raise RecipeError(f"--scheme {self.scheme} is for {target}", do=f"Choose {' or '.join(SCHEMES)}.")
        if self.target is None:
            self._check_no_engine()
        else:
            check_expert_parallel(self.expert_parallel, self.ranks)

    def _check_no_engine(self) -> None:
        if given := given_options({"--scheme": self.scheme, **self._serving}):
            what = f"{given} cannot be given without a target"
            raise RecipeError(what, do="Name one, as Request.export does, or leave it out.")

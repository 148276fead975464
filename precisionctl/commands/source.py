"""Source: an open checkpoint with the user's hints, the plan of the result, and what is known of FP8 in it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from precisionctl.architectures.param_map import Naming
from precisionctl.checkpoints import huggingface
from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings, said_quantization
from precisionctl.checkpoints.huggingface import HuggingFaceReader, HuggingFaceTensors
from precisionctl.checkpoints.megatron.logical import MASTER
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.other_trainers.trainer_run import of_trainer
from precisionctl.checkpoints.run_reader import RunReader, of_run
from precisionctl.commands.hints import open_hinted
from precisionctl.commands.request import LLAMA_CPP, MLX, OTHER_TARGETS, TE, Request
from precisionctl.commands.run_precision import RunPrecision, precision_if_known
from precisionctl.commands.storage import TORCHTITAN
from precisionctl.commands.torchtitan_names import with_torchtitan_names
from precisionctl.conversion.journal import Fingerprints, fingerprints
from precisionctl.conversion.known_state import KnownState, known_state
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.dtypes import DType
from precisionctl.engines.base import Engine, engine_named
from precisionctl.engines.rules.ignore_lists import words
from precisionctl.errors import CheckpointError, PrecisionError, RecipeError
from precisionctl.export.gguf.gguf_plan import hf_names
from precisionctl.export.input_scales import state_of_input_scales
from precisionctl.export.mlx_plan import names_as_codes
from precisionctl.export.weight_encodings import check_model, method_of, stored_weight_encodings, weight_encodings
from precisionctl.fp8.carry import filled_in
from precisionctl.fp8.state import Fp8States
from precisionctl.planning.gemm_selection import choose
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import KEYS_OF_VALUES, SCHEMES, quant_methods
from precisionctl.untrusted.safe_json import parse_json

_DECODED = (LLAMA_CPP, MLX)
"""Kinds of results for which codes of the source are no more than the values that they decode to."""


@dataclass(frozen=True)
class Source:
    """The open checkpoint that a `request` names, and the `plan` of the result in high precision.

    `files` are its files as they were when it was opened. `encodings` is how its weights are encoded, or once were.
    `known` is its FP8 state, from training or `calibrate`. `run_reader` is the reader, if the run's optimizer is
    converted too, else None, and `masters` the reader, if the optimizer's FP32 masters become the weights. `engine` is
    the engine to encode weights for; None if the result has values, or the codes that weights had before.
    """

    request: Request
    reader: Reader
    files: Fingerprints
    plan: Plan
    encodings: WeightEncodings | None
    known: KnownState
    run_reader: RunReader | None
    masters: RunReader | None
    engine: Engine | None

    @cached_property
    def state_of_fixed_scales(self) -> Fp8States | None:
        """State made from the fixed input scales that are stored with the codes."""
        return state_of_input_scales(self.reader, self.encodings, self.plan)

    @property
    def states(self) -> Fp8States | None:
        """The usable state, with roles that were never recorded filled in from the fixed input scales."""
        current, fixed = self.known.current, self.state_of_fixed_scales
        return filled_in(current, fixed) if current and fixed else current or fixed

    @cached_property
    def _run(self) -> tuple[RunPrecision | None, tuple[str, ...]]:
        return precision_if_known(self.reader, self.known.weights_digest)

    @property
    def run_precision(self) -> RunPrecision | None:
        """The precision of the run that wrote the source, where that says it."""
        run, _ = self._run
        return run

    @property
    def unknown_precision(self) -> tuple[str, ...]:
        """A note where the run says its precision in words not known here."""
        _, notes = self._run
        return notes

    @property
    def trained_in(self) -> Precision | None:
        """The FP8 or NVFP4 precision in which a run wrote the source, where that is known."""
        run = self.run_precision
        return run.precision if run and run.trained else None

    @property
    def encodings_now(self) -> WeightEncodings | None:
        """How the weights are encoded, if they are codes now."""
        return self.encodings if self.reader.encodings else None

    @cached_property
    def weights_digest(self) -> str:
        """The digest of the weights."""
        return self.known.weights_digest or digest_weights(self.reader)

    @property
    def fixed_scales(self) -> WeightEncodings | None:
        """The encodings if their fixed scales of inputs and caches are still valid: the weights are the codes that they
        came with, or the values that these decode to."""
        encodings = self.encodings
        return encodings if encodings and (self.encodings_now or encodings.of_weights == self.weights_digest) else None

    @property
    def cache_scales(self) -> WeightEncodings | None:
        """What holds the source's scales of a KV cache that are still valid: `fixed_scales`, or those that are stored
        beside values."""
        lone = self.reader.lone_cache_scales if isinstance(self.reader, HuggingFaceTensors) else None
        return lone or self.fixed_scales


def open_source(request: Request) -> Source:
    """Open the source of a request, and plan the result in high precision.

    Raises RecipeError for hints that contradict the checkpoint or that it does not need;
    RecipeError for BF16 weights beside an optimizer whose FP32 masters the container has no other place for;
    PrecisionError for a release with names of its own (gpt-oss), if it is exported in the scheme that it has already;
    MappingError for state or encodings of another model;
    and as `open_checkpoint` and `make_plan`.
    """
    storage = request.storage
    reader = open_hinted(
        request.source,
        request.iteration,
        architecture=request.architecture,
        reference=request.reference,
        trust_reference=request.trust_reference,
        grouped_columns=request.grouped_columns,
    )
    files = fingerprints(reader.files)
    encodings = _encodings(request, reader)
    run_reader = _run_reader(request, reader)
    masters = None  # of an optimizer that cannot be read, or that is dropped, nothing is used
    if run_reader and storage.is_state_dict:  # which has no other place for them
        masters = run_reader
    elif request.kind == "values" and request.dtype_of_values == DType.float32 and not request.drop_optimizer:
        masters = with_masters(reader)
    were_codes = encodings is not None and bool(encodings.quantization)
    engine = None
    if request.kind == "codes" and (request.chooses_codes or not were_codes):
        engine = engine_named(request.target or "vllm", *OTHER_TARGETS)  # transformers reads what vLLM does
    plan = make_plan(
        reader,
        storage.layout,
        dtype=_dtype_of_values(request, reader),
        parallelism=storage.parallelism,
        optimizer=run_reader is not None,
        masters=masters is not None,
        naming=_naming(request, reader, engine),
        named_as_codes=_named_as_codes(request, reader, encodings, engine),
    )
    if storage.container == TORCHTITAN:
        plan = with_torchtitan_names(plan)
    recipe = request.recipe if request.kind in ("values", TE) else None  # others keep no state that it could change
    known = known_state(
        reader,
        plan.gemms,
        request.fp8_state,
        recipe.delayed if recipe else None,
        drop=request.drop_fp8_state,
        weights_digest=encodings.of_weights if encodings and reader.encodings else None,
    )
    if request.kind == "codes" and (request.include or request.exclude):
        # only now, as what was recorded is of all that a recipe computes in FP8
        plan = choose(plan, request.include, request.exclude)
    if encodings and request.kind != "values":
        check_model(encodings, plan)
    return Source(request, reader, files, plan, encodings, known, run_reader, masters, engine)


def _encodings(request: Request, reader: Reader) -> WeightEncodings | None:
    """How the weights are or were encoded; None if they are values, or if it is of no use for the result. Values of the
    same model as a reference get codes like the reference's (`_encodings_of_reference`) if nobody has chosen others."""
    if request.kind in _DECODED:
        return None
    encodings = None if request.drop_encodings else weight_encodings(reader)
    method = method_of(encodings)
    if request.chooses_codes and encodings and method and method.own_names:
        scheme = request.scheme_of_codes
        if scheme is not None and SCHEMES[scheme].codes in {spec.codes_name for spec in encodings.weights.values()}:
            raise PrecisionError(
                f"the release has its experts in {SCHEMES[scheme].codes}, and all else in BF16; this scheme "
                "would make BF16 of the experts, which are one tensor, and round the rest",
                where=request.source,
                do="An engine serves the release as it is, and `convert --to hf --precision fp8` writes trained "
                "weights in its form.",
            )
        return None  # engines read these codes only as they were released
    if encodings is None and request.reference and request.kind == "codes" and not request.chooses_codes:
        return _encodings_of_reference(request.reference)
    return encodings


def _encodings_of_reference(reference: Path) -> WeightEncodings | None:
    """How the weights of a reference are encoded, if its codes have names of their own, which no scheme writes
    (gpt-oss as released); of any other reference no weights are read."""
    if not huggingface.recognise(reference):
        return None
    companions = read_companions(reference)
    quantization = said_quantization(parse_json(companions.files["config.json"], companions.config_path))
    own = [name for name, each in quant_methods().items() if each.own_names]
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") not in own:
        return None
    return stored_weight_encodings(open_checkpoint(reference))


def _named_as_codes(
    request: Request, reader: Reader, encodings: WeightEncodings | None, engine: Engine | None
) -> Collection[str]:
    """The weights that are to have the names that they have as codes, where values have others: gpt-oss's experts are
    `[in, out]` as values and `[out, in]` as codes, as in GGUF, whose table has those names, in MLX and torchtitan. Of
    a result with its former codes also those that were left as values beside them, as its list of these names them."""
    if request.kind == LLAMA_CPP:
        return hf_names(reader.model)
    if request.kind == MLX or request.storage.container == TORCHTITAN:
        return names_as_codes(reader.model)
    if encodings is None or request.kind == "values":
        return ()
    if request.kind != "codes" or engine:
        return encodings.weights
    listed = (module for key in KEYS_OF_VALUES for module in words(encodings.quantization.get(key)))
    return {*encodings.weights, *(f"{module}.weight" for module in listed)}


def _run_reader(request: Request, reader: Reader) -> RunReader | None:
    """The reader, if its optimizer is converted too; else None."""
    storage = request.storage
    if request.drop_optimizer or not storage.holds_optimizer:
        return None
    if not of_run(reader) or not reader.optimizer_specs:
        return None
    if storage.is_state_dict and request.dtype_of_values == DType.bfloat16:
        raise RecipeError(
            f"BF16 weights lose the optimizer's FP32 masters, which {storage.container} has no other place for",
            where=request.source,
            do="Leave --precision out; --drop-optimizer writes the weights alone.",
        )
    return reader


def with_masters(reader: Reader) -> RunReader | None:
    """The reader, if it has an optimizer that can be read, with FP32 masters."""
    if not of_run(reader):
        return None
    try:
        has_some = any(name.startswith(MASTER) for name in reader.optimizer_specs)
    except CheckpointError:  # a note says what is wrong with it
        return None
    return reader if has_some else None


def _naming(request: Request, reader: Reader, engine: Engine | None) -> Naming:
    """Whose names the result has. A Hugging Face directory's stay. Another trainer's checkpoint has the names in memory
    of the model's class, and the result those that the class saves; llama.cpp and mlx-lm have text models alone."""
    if request.storage.is_state_dict:
        return "in torchtitan" if request.storage.container == TORCHTITAN else "in memory"
    if engine and not engine.loads_own_classes:
        return "for engines"
    if request.kind in _DECODED:
        return "text alone"
    if request.kind != "values" or (of_trainer(reader) and not isinstance(reader, HuggingFaceReader)):
        return "as saved"
    return "as stored"


def _dtype_of_values(request: Request, reader: Reader) -> DType | None:
    """The dtype of a result's values; None keeps the dtype in which each is stored.

    For an engine it is None if most matrices of the source are 16-bit values or codes: then an FP32 tensor is FP32 for
    a reason, and FP16 loses nothing by staying. A source in FP32 becomes BF16, because engines compute in the dtype
    that config.json names.
    """
    if request.kind == "values":
        return request.dtype_of_values
    matrices = [spec for spec in reader.specs.values() if len(spec.shape) > 1]
    narrow = sum(spec.is_codes or spec.dtype in (DType.bfloat16, DType.float16) for spec in matrices)
    return None if request.kind != TE and 2 * narrow > len(matrices) else DType.bfloat16

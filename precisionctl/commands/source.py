"""Source: an open checkpoint with the user's hints, the plan of the result, and what is known of FP8 in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from precisionctl.architectures.families import key_in, read_model
from precisionctl.architectures.param_map import Naming
from precisionctl.architectures.wrappers import is_wrapper
from precisionctl.checkpoints.base import Companions, Hints, Reader
from precisionctl.checkpoints.companions import parse_json, read_companions, without_tokenizer
from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.huggingface_files import file_format_of
from precisionctl.checkpoints.megatron.carried_run import MegatronReader, of_megatron
from precisionctl.checkpoints.megatron.directory import TRUST_REFERENCE
from precisionctl.checkpoints.megatron.towers import TowersOf
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.trainer_run import TrainedReader, of_trainer
from precisionctl.commands.request import TE, TORCHTITAN, Request
from precisionctl.commands.torchtitan_names import with_torchtitan_names
from precisionctl.conversion.journal import Fingerprints, fingerprints
from precisionctl.conversion.known_state import KnownState, known_state
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.dtypes import DType
from precisionctl.engines.base import Engine, engine_named
from precisionctl.errors import DamagedCheckpoint, PrecisionError, RecipeError, UnknownFormat, one_line
from precisionctl.export.input_scales import state_of_input_scales
from precisionctl.export.weight_encodings import check_model, method_of, stored_weight_encodings, weight_encodings
from precisionctl.fp8.carry import merged
from precisionctl.fp8.grouped import ColumnOrder
from precisionctl.fp8.state import Fp8States
from precisionctl.planning.choice import choose
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan
from precisionctl.quant_methods.base import SCHEMES, quant_methods
from precisionctl.same_model import differences
from precisionctl.untabled_model import UntabledModel


@dataclass(frozen=True)
class Source:
    """An open checkpoint, and the `plan` of the result in high precision.

    `files` are its files as they were when it was opened. `encodings` is how its weights are encoded, or once were.
    `known` is its FP8 state, from training or `calibrate`. `trained` is the reader, if its optimizer is converted too,
    else None. `engine` is the engine to encode weights for; None if the result has values, or the codes that weights
    had before.
    """

    reader: Reader
    files: Fingerprints
    plan: Plan
    encodings: WeightEncodings | None
    known: KnownState
    trained: MegatronReader | TrainedReader | None
    engine: Engine | None

    @cached_property
    def state_of_fixed_scales(self) -> Fp8States | None:
        """State made from the fixed input scales that are stored with the codes."""
        return state_of_input_scales(self.reader, self.encodings, self.plan)

    @property
    def states(self) -> Fp8States | None:
        """The usable state, with roles that were never recorded filled in from the fixed input scales."""
        current, fixed = self.known.current, self.state_of_fixed_scales
        return merged(current, fixed) if current and fixed else current or fixed

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


def open_source(request: Request) -> Source:
    """Open the source of a request, and plan the result in high precision.

    Raises RecipeError for hints that contradict the checkpoint or that it does not need;
    RecipeError for BF16 weights beside an optimizer whose FP32 masters the container has no other place for;
    PrecisionError for a release with names of its own (gpt-oss), if it is exported in the scheme that it has already;
    MappingError for state or encodings of another model;
    and as `open_checkpoint` and `make_plan`.
    """
    reader = open_hinted(
        request.source,
        request.iteration,
        request.architecture,
        request.reference,
        request.grouped_columns,
        trusted=request.trust_reference,
    )
    files = fingerprints(reader.files)
    encodings = None if request.drop_encodings else weight_encodings(reader)
    method = method_of(encodings)
    if request.for_inference and request.says_which_codes and method and method.own_names:
        if request.scheme == method.name:
            raise PrecisionError(
                f"the release has its experts in {SCHEMES[request.scheme].codes}, and all else in BF16; this scheme "
                "would make BF16 of the experts, which are one tensor, and round the rest",
                where=request.source,
                do="An engine serves the release as it is, and `convert --to hf --precision fp8` writes trained "
                "weights in its form.",
            )
        encodings = None  # engines read these codes only as they were released
    if encodings is None and request.reference and request.for_inference and not request.says_which_codes:
        encodings = _released_form(request.reference)
    trained = None
    if request.keeps_optimizer and (of_megatron(reader) or of_trainer(reader)) and reader.optimizer_specs:
        trained = reader
    if trained and request.is_state_dict and request.precision == "bf16":
        raise RecipeError(
            f"BF16 weights lose the optimizer's FP32 masters, which {request.container} has no other place for",
            where=request.source,
            do="Leave --precision out; --drop-optimizer writes the weights alone.",
        )
    were_codes = encodings is not None and bool(encodings.quantization)
    engine = None
    if request.for_engine and (request.says_which_codes or not were_codes):
        engine = engine_named(request.target or "vllm", TE)  # transformers reads what vLLM does
    plan = make_plan(
        reader,
        request.to,
        dtype=_dtype_of_values(request, reader),
        parallelism=request.parallelism,
        optimizer=trained is not None,
        naming=_naming(request, reader, engine),
        codes=encodings.weights if encodings and request.for_inference else (),
    )
    if request.container == TORCHTITAN:
        plan = with_torchtitan_names(plan)
    known = known_state(
        reader,
        plan.gemms,
        request.fp8_state,
        request.state_recipe,
        drop=request.drop_fp8_state,
        weights_digest=encodings.of_weights if encodings and reader.encodings else None,
    )
    if request.include or request.exclude:  # what was recorded is of all that a recipe computes in FP8
        plan = choose(plan, request.include, request.exclude)
    if encodings and request.for_inference:
        check_model(encodings, plan)
    return Source(reader, files, plan, encodings, known, trained, engine)


def _naming(request: Request, reader: Reader, engine: Engine | None) -> Naming:
    """Whose names the result has. A Hugging Face directory's stay. Another trainer's checkpoint has the names in memory
    of the model's class, and the result those that the class saves."""
    if request.is_state_dict:
        return "in memory"
    if engine and not engine.loads_own_classes:
        return "for engines"
    if request.for_inference or (of_trainer(reader) and not isinstance(reader, HuggingFaceReader)):
        return "as saved"
    return "as stored"


def _dtype_of_values(request: Request, reader: Reader) -> DType | None:
    """The dtype of a result's values; None keeps the dtype in which each is stored.

    For an engine it is None if most matrices of the source are 16-bit values or codes: then an FP32 tensor is FP32 for
    a reason, and FP16 loses nothing by staying. A source in FP32 becomes BF16, because engines compute in the dtype
    that config.json names.
    """
    matrices = [spec for spec in reader.specs.values() if len(spec.shape) > 1]
    narrow = sum(spec.is_codes or spec.dtype in (DType.bfloat16, DType.float16) for spec in matrices)
    return None if request.for_engine and 2 * narrow > len(matrices) else request.dtype


def open_hinted(
    path: Path,
    iteration: int | None,
    architecture: str | None,
    reference: Path | None,
    order: ColumnOrder | None,
    *,
    trusted: bool = False,
) -> Reader:
    """Open a checkpoint with the user's hints about it, which are fields of a Request. `companions.needed` says what is
    used of a reference. Raises RecipeError for hints that contradict the checkpoint and for other hints that it does
    not need, DamagedCheckpoint for a reference whose config.json describes no model, and as `open_checkpoint`."""
    companions = _companions_of(reference) if reference else None
    if companions:  # one that is broken is not taken for one of another model
        read_model(parse_json(companions.files["config.json"], companions.config_path), companions.config_path)
    towers = _towers_of(reference, companions) if reference and companions else None
    reader = open_checkpoint(path, iteration, Hints(architecture, companions, order, reference, towers, trusted))
    if trusted and not (of_megatron(reader) and reader.args):
        what = "--trust-reference is for a checkpoint with Megatron's arguments, and this has none"
        raise RecipeError(what, where=path, do="Leave --trust-reference out.")
    if order is not None and not of_megatron(reader):
        raise RecipeError("the source has no payloads of Transformer Engine", do="Leave --grouped-columns out.")
    own = reader.own_companions
    if companions and not architecture and without_tokenizer(own) and not without_tokenizer(companions):
        configs = [parse_json(one.files["config.json"], one.config_path) for one in (own, companions)]
        mine, theirs = (config.get("vocab_size") for config in configs)
        if None not in (mine, theirs) and mine != theirs:
            what = "the reference is of another model: its vocabulary has another size"
            raise RecipeError(what, where=reference, do="Give another one.")
    elif companions and not architecture and "config.json" in own.files:
        _check_same_model(reader, companions, reference)
    elif architecture and "config.json" in own.files:
        raise RecipeError(
            "the checkpoint has a config.json of its own, which says which model it is",
            where=path,
            do="Leave --architecture out.",
        )
    if architecture is not None and not of_megatron(reader):
        raise RecipeError(
            f"--architecture is for Megatron checkpoints, this is {reader.container}",
            where=path,
            do="Give --reference, a Hugging Face directory of the same model.",
        )
    if reference is not None:
        try:
            _ = reader.model
        except DamagedCheckpoint as error:
            if trusted or companions is None or error.where not in ("", one_line(str(companions.config_path))):
                raise  # what is wrong is in the checkpoint's own files
            what = f"the reference is of another model: {error.what}"
            do = "Give another one."
            if of_megatron(reader):
                do += f" Or does the checkpoint store other arguments than it trained by? {TRUST_REFERENCE}"
            raise RecipeError(what, where=reference, do=do) from error
    return reader


def _check_same_model(reader: Reader, companions: Companions, reference: Path | None) -> None:
    """Raise RecipeError for a reference whose config.json describes another model than the checkpoint's own."""
    sides = ((one.files["config.json"], one.config_path) for one in (reader.own_companions, companions))
    configs = [(parse_json(data, where), where) for data, where in sides]
    if configs[0][0] == configs[1][0]:
        return
    model, other = (read_model(config, where, reader.specs) for config, where in configs)
    if isinstance(model, UntabledModel) or isinstance(other, UntabledModel):
        differing = ["config.json"]  # no table says which of its keys change nothing
    else:
        fields = [*differences(model, other), *(["vocab_size"] if model.vocab_size != other.vocab_size else [])]
        differing = [key_in(configs[0][0], field) for field in fields]
    if differing:
        what = f"the reference is of another model than the checkpoint's own config.json: {', '.join(differing)}"
        raise RecipeError(what, where=reference, do="Leave --reference out, or give another one.")


_REFERENCE = "--reference takes a Hugging Face directory of the same model: its config.json and tokenizer are enough."


def _companions_of(reference: Path) -> Companions:
    """Config and tokenizer of a directory, or of a Megatron checkpoint that has them. Raises RecipeError for one that
    has none, UnknownFormat for a file."""
    if (reference / "config.json").is_file():
        return read_companions(reference)
    if reference.is_file() and reference.suffix != ".nemo":
        raise UnknownFormat("the reference is a file", where=reference, do=_REFERENCE)
    companions = open_checkpoint(reference, wanted=_REFERENCE).companions
    if "config.json" not in companions.files:
        raise RecipeError("the reference has no config.json", where=reference, do=_REFERENCE)
    return companions


def _released_form(reference: Path) -> WeightEncodings | None:
    """The encodings of a reference whose codes have names of their own, which no scheme writes; values of the same
    model get codes like those. None for any other reference."""
    if not (reference / "config.json").is_file() or file_format_of(reference) is None:
        return None
    companions = read_companions(reference)
    quantization = parse_json(companions.files["config.json"], companions.config_path).get("quantization_config")
    own = [name for name, method in quant_methods().items() if method.own_names]
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") not in own:
        return None  # of these weights nothing is read
    return stored_weight_encodings(open_checkpoint(reference))


def _towers_of(reference: Path, companions: Companions) -> TowersOf | None:
    """The towers of a reference that is a wrapper and has weights; else None. Weights of other references are not
    read."""
    config = parse_json(companions.files["config.json"], companions.config_path)
    has_weights = not (reference / "config.json").is_file() or file_format_of(reference) is not None
    return TowersOf(open_checkpoint(reference)) if has_weights and is_wrapper(config) else None

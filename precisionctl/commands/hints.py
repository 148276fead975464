"""A checkpoint opened with the user's hints: what the user says about it that it does not say itself."""

from pathlib import Path

from precisionctl.architectures.families import key_in, read_model
from precisionctl.architectures.megatron.args_said import TRUST_REFERENCE
from precisionctl.architectures.wrappers import is_wrapper
from precisionctl.checkpoints import huggingface
from precisionctl.checkpoints.base import Companions, Hints, Reader
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.megatron.directory import of_megatron
from precisionctl.checkpoints.megatron.towers import TowersOf
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint, RecipeError, UnknownFormat, one_line
from precisionctl.fp8.grouped import ColumnOrder
from precisionctl.model.same_model import differences
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.untrusted.safe_json import parse_json
from precisionctl.verify.configs import differing_keys


def check_hints(architecture: str | None, reference: Path | None, trust_reference: bool) -> None:
    """Raise RecipeError for hints that contradict each other."""
    if architecture is not None and reference is not None:
        raise RecipeError("--reference and --architecture both name the family", do="Leave --architecture out.")
    if trust_reference and reference is None:
        raise RecipeError("--trust-reference, and no reference", do="Give --reference too.")


def open_hinted(
    path: Path,
    iteration: int | None = None,
    *,
    architecture: str | None = None,
    reference: Path | None = None,
    trust_reference: bool = False,
    grouped_columns: ColumnOrder | None = None,
) -> Reader:
    """Open a checkpoint with the user's hints about it.

    A plain Megatron checkpoint does not contain its family, tokenizer or true vocabulary size: `architecture` names the
    family, or `reference` is a Hugging Face directory of the same model, whose config.json and tokenizer are used. A
    PyTorch checkpoint (DCP) needs a `reference` too; for a LoRA adapter it is the base model. `needed_hints` says what
    is used of it. With `trust_reference` its config.json overrules Megatron's arguments. `iteration` is the one to
    read, None for the newest; `grouped_columns` is the order of columns in the FP8 payloads of experts, if it cannot be
    inferred.

    Raises RecipeError for hints that contradict each other or the checkpoint and for other hints that it does not need,
    DamagedCheckpoint for a reference whose config.json describes no model, and as `open_checkpoint`.
    """
    check_hints(architecture, reference, trust_reference)
    companions, towers = None, None
    if reference:
        companions = _companions_of(reference, path)
        config = parse_json(companions.files["config.json"], companions.config_path)
        read_model(config, companions.config_path)  # one that is broken is not taken for one of another model
        # of a wrapper the towers are read, if its weights are there; no other reference's weights are
        has_weights = huggingface.recognise(reference) or not (reference / "config.json").is_file()
        if has_weights and is_wrapper(config):
            towers = TowersOf(open_checkpoint(reference))
    hints = Hints(
        architecture=architecture,
        companions=companions,
        grouped_columns=grouped_columns,
        reference=reference,
        towers=towers,
        trust_reference=trust_reference,
    )
    reader = open_checkpoint(path, iteration, hints)

    if trust_reference and not (of_megatron(reader) and reader.args):
        what = "--trust-reference is for a checkpoint with Megatron's arguments, and this has none"
        raise RecipeError(what, where=path, do="Leave --trust-reference out.")
    if grouped_columns is not None and not of_megatron(reader):
        raise RecipeError("the source has no payloads of Transformer Engine", do="Leave --grouped-columns out.")
    if architecture is not None and "config.json" in reader.own_companions.files:
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
    if reference and companions:
        _check_reference(reader, reference, companions, trusted=trust_reference)
    return reader


def _check_reference(reader: Reader, reference: Path, companions: Companions, *, trusted: bool) -> None:
    """Raise RecipeError for a reference of another model than the checkpoint's."""
    own = reader.own_companions
    if "config.json" in own.files:
        mine, theirs = (parse_json(one.files["config.json"], one.config_path) for one in (own, companions))
        differing: list[str] = []
        if mine != theirs:
            model = read_model(mine, own.config_path, reader.specs)
            other = read_model(theirs, companions.config_path, reader.specs)
            if isinstance(model, UntabledModel) or isinstance(other, UntabledModel):
                differing = differing_keys(mine, theirs)
            else:
                fields = [*differences(model, other), *(["vocab_size"] if model.vocab_size != other.vocab_size else [])]
                differing = [key_in(mine, field) for field in fields]
        if differing:
            what = f"the reference is of another model than the checkpoint's own config.json: {', '.join(differing)}"
            do = "Leave --reference out, or give another one. If its tokenizer is this model's all the same, copy it "
            raise RecipeError(what, where=reference, do=f"{do}to {own.directory}.")

    try:
        _ = reader.model
    except DamagedCheckpoint as error:
        if trusted or error.where not in ("", one_line(str(companions.config_path))):
            raise  # what is wrong is in the checkpoint's own files
        what = f"the reference is of another model: {error.what}"
        do = "Give another one."
        if of_megatron(reader):
            do += f" Or does the checkpoint store other arguments than it trained by? {TRUST_REFERENCE}"
        raise RecipeError(what, where=reference, do=do) from error


_REFERENCE = "--reference takes a Hugging Face directory of the same model: its config.json and tokenizer are enough."


def _companions_of(reference: Path, source: Path) -> Companions:
    """Config and tokenizer of a directory, in which the source may be, or of a Megatron checkpoint that has them.
    Raises RecipeError for one that has none, UnknownFormat for a file."""
    if (reference / "config.json").is_file():
        return read_companions(reference, source)
    if reference.is_file() and reference.suffix != ".nemo":
        raise UnknownFormat("the reference is a file", where=reference, do=_REFERENCE)
    companions = open_checkpoint(reference, wanted=_REFERENCE).companions
    if "config.json" not in companions.files:
        raise RecipeError("the reference has no config.json", where=reference, do=_REFERENCE)
    return companions

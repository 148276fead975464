"""Notes for the user on a source: what it is, what was guessed of it, and what of it stays behind."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from precisionctl.architectures.families import models_of_megatron_args, table_of
from precisionctl.architectures.megatron.expert_args import CAPACITY
from precisionctl.architectures.megatron.megatron_args import otherwise_in_megatron
from precisionctl.architectures.megatron.sparse_args import INDEXER_NORM_EPSILON, indexer_norm_epsilon
from precisionctl.checkpoints.adapter.reader import AdapterReader
from precisionctl.checkpoints.base import HasNotes, Reader
from precisionctl.checkpoints.deepspeed.reader import step_directory
from precisionctl.checkpoints.hf_directory.companions import is_tokenizer
from precisionctl.checkpoints.hf_directory.config_json import GENERATION
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.megatron.directory import by_arguments, contradictions, of_megatron
from precisionctl.checkpoints.megatron.keys import RUN_FILE, later_notes
from precisionctl.checkpoints.other_trainers.trainer_run import of_trainer
from precisionctl.checkpoints.run_reader import of_run
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_legacy.reader import LegacyReader
from precisionctl.commands.source import Source
from precisionctl.errors import CheckpointError, PrecisionctlError, shown
from precisionctl.export.encode import fp8_jobs
from precisionctl.fp8 import sidecar
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.same_model import in_words
from precisionctl.param import Layout
from precisionctl.planning.plan import Job
from precisionctl.precision import EVERY_GEMM
from precisionctl.sizes import counted, size
from precisionctl.untrusted.safe_files import has_file
from precisionctl.untrusted.safe_json import parse_json

_NAMES = {
    "Megatron-Bridge": "The result has Megatron-Bridge's names, for modules of its own: Megatron-Core alone does not "
    "build this family.",
    "this project": "Neither Megatron-Core nor Megatron-Bridge loads this family so: its names in Megatron are this "
    "project's.",
}
"""Whose names a family has, where not Megatron-Core's."""


def source_notes(source: Source) -> Iterator[str]:
    """Notes on what the source is, and on what the result will not have of it, for any kind of result."""
    reader, plan, reference = source.reader, source.plan, source.request.reference
    yield from opened_notes(source.request.source, reader)
    yield from family_notes(reader, plan.model, plan.to_layout, named=source.request.architecture is not None)
    if plan.to_layout == "hf":
        yield from vocabulary_notes(reader)

    if source.request.trust_reference and of_megatron(reader):
        try:
            found = contradictions(reader.model, by_arguments(reader.args, reader.model, reader.path))
        except PrecisionctlError as error:
            found = error.what
        if found:
            yield f"The reference is taken where Megatron's arguments say otherwise (reference / arguments): {found}."

    if of_megatron(reader):
        tokens, rows, new_rows = reader.model.vocab_size, reader.model.padded_vocab_size, plan.model.padded_vocab_size
        if plan.to_layout == "hf" and rows != tokens:
            yield f"The vocabulary has {tokens} rows: the {rows - tokens} of Megatron's padding are left out."
        if plan.to_layout == "megatron" and rows != new_rows:
            yield (
                f"The vocabulary is padded to {new_rows} rows, as Megatron pads it for this --tp; "
                f"the source has {rows}."
            )

    yield from reading_notes(reader)
    yield from _trained_notes(reader, carried=source.run_reader is not None)

    if taken := [name for name in reader.companions.files if name not in reader.own_companions.files]:
        yield f"The source has none of these, so they are the reference's, {reference}: {', '.join(taken)}."
    yield from reader.companions.notes
    if code := reader.companions.code:
        yield (
            f"The model's own code is copied as it is: {', '.join(code)}. Nothing here has run it; whoever "
            "opens the result with trust_remote_code (vLLM, SGLang: --trust-remote-code) does."
        )
    yield from _missing_notes(reader, plan.to_layout, reference)


def kept_notes(source: Source, jobs: Iterable[Job], *, options: str) -> Iterator[str]:
    """Notes on what the run that wrote the source kept in BF16, or a recipe that was given in its place. The weights of
    these `jobs` become codes; `options` encode others."""
    plan, recipe = source.plan, source.request.recipe
    every = fp8_jobs(plan, EVERY_GEMM)
    if recipe is None:
        yield from (f"{note} What it kept in BF16 may become codes." for note in source.unknown_precision)
        coded = {name for job in jobs for name in job.weights}
        if kept := [name for job in every for name in job.weights if name not in coded]:
            yield (
                f"{counted(len(kept), 'linear stays', 'linears stay')} in BF16, e.g. "
                f"`{kept[0].removesuffix('.weight')}`: the run kept them there, or what is computed with them. "
                f"To encode them: {options}."
            )
        return
    for pattern in recipe.keep_bf16:
        if every and not any(fnmatchcase(job.module, pattern) for job in plan.jobs):
            yield (
                f"keep_bf16 {shown(pattern)} names no module. Whole names are matched, and here these are such as "
                f"`{every[0].module}`."
            )


def opened_notes(given: Path, reader: Reader) -> Iterator[str]:
    """Notes on which directory was opened in the one that was `given`, and that a later iteration is there."""
    if reader.path and reader.path.resolve() != given.resolve():
        yield f"Read: {reader.path}"
    yield from newer_notes(given, reader)


def newer_notes(given: Path, reader: Reader) -> Iterator[str]:
    """A note on a later iteration in the directory that was `given` than the one that its tracker names."""
    if isinstance(reader, TorchDistReader | LegacyReader) and reader.path.resolve() != given.resolve():
        yield from later_notes(reader.path, reader.complete)


def family_notes(reader: Reader, model: ModelShape, to: Layout, *, named: bool) -> Iterator[str]:
    """Notes on the family of the source, whose tensors are this model's, and that it was guessed, unless the command
    named it (`named`)."""
    table = table_of(model)
    if to == "megatron" and table.names_by != "Megatron-Core":
        yield _NAMES[table.names_by]
    if to == "megatron" or of_megatron(reader):
        yield from _other_arithmetic(reader, model, to)
    epsilon = indexer_norm_epsilon(reader.args) if of_megatron(reader) else None
    if epsilon not in (None, INDEXER_NORM_EPSILON):
        yield (
            f"By its arguments Megatron-Core normalises an indexer's keys with epsilon {epsilon:g}; transformers, and "
            f"Megatron by the arguments written here, with {INDEXER_NORM_EPSILON:g}."
        )
    if to == "hf" and of_megatron(reader) and not named and "config.json" not in reader.companions.files:
        fitting = models_of_megatron_args(reader.args, model.padded_vocab_size, reader.path)
        if others := [other.architecture for other in fitting if other.architecture != model.architecture]:
            yield (
                f"Megatron's arguments name no family: taken for {model.architecture}, but {', '.join(others)} would "
                "fit too. Choose with --architecture, or with --reference, which gives the tokenizer as well."
            )


def _other_arithmetic(reader: Reader, model: ModelShape, to: Layout) -> Iterator[str]:
    """Notes on what Megatron-Core and transformers compute differently for the model."""
    # what `resume` trained, it trained as the model
    ours = of_megatron(reader) and has_file(reader.path / RUN_FILE, reader.path)
    if (other := otherwise_in_megatron(model)) and not (ours and to == "hf"):
        named = ", ".join(f"{field} {_in_words(mine)} / {_in_words(theirs)}" for field, (mine, theirs) in other.items())
        if to == "megatron":
            yield (
                "Megatron-Core's arguments cannot express all of this model, so it computes another model (this one / "
                f"Megatron-Core's): {named}. `resume`, and `convert` back, follow the config.json in the result."
            )
        else:
            yield (
                "Megatron-Core's arguments cannot express all of this model. A Megatron-Core that trained it by them "
                f"alone computed another one (the result / Megatron-Core's): {named}."
            )
    if model.mla and not table_of(model).heeds_latents_epsilon and model.norm_epsilon != _MLA_EPSILON:
        yield (
            f"transformers normalises the latents of attention with epsilon {_MLA_EPSILON:g}, whatever config.json "
            f"says; Megatron-Core and `resume` with the model's {model.norm_epsilon:g}."
        )
    if note := table_of(model).otherwise_in_transformers:
        yield note
    if model.has("mamba.gated_norm") and model.norm_epsilon != _MIXER_EPSILON:
        yield (
            f"Megatron-Core normalises what a Mamba-2 mixer gives with epsilon {_MIXER_EPSILON:g}, whatever the "
            f"arguments say; transformers and `resume` with the model's {model.norm_epsilon:g}."
        )


_MLA_EPSILON = 1e-6
"""In transformers (modeling_deepseek_v2.py, modeling_deepseek_v3.py) `q_a_layernorm` and `kv_a_layernorm` do not use
the config's epsilon."""

_MIXER_EPSILON = 1e-5
"""In megatron/core/ssm/mamba_mixer.py the norm behind the state space has no other."""


def _in_words(setting: object) -> str:
    """A setting in words; of rotary scaling only the kind."""
    if isinstance(setting, Mapping):
        return str(setting["rope_type"])
    return in_words(setting)


def reading_notes(reader: Reader) -> Iterator[str]:
    """Notes on what is read otherwise than the source has it, and on what nothing here reads or does of its run."""
    if isinstance(reader, HasNotes):
        yield from reader.notes()
    if of_trainer(reader) and reader.unsupported_state:
        yield f"These parts of the optimizer are not read, and stay behind: {reader.unsupported_state}."
    if isinstance(reader, HuggingFaceReader) and (step := step_directory(reader.path)):
        inside = f"give {step.name} inside" if step != reader.path else "give a folder with its files alone"
        yield f"FP32 masters and the optimizer of DeepSpeed stay behind: {inside} to take them along."
    factor = reader.args.get(CAPACITY) if of_megatron(reader) and reader.model.moe else None
    if isinstance(factor, int | float) and factor >= 0:  # below, it is as if it were not said
        yield (
            f"By its {CAPACITY}={shown(factor)} Megatron-Core leaves out tokens of experts that too many chose, in "
            "evaluation too; transformers and `resume` leave none out."
        )


def _trained_notes(reader: Reader, *, carried: bool) -> Iterator[str]:
    """Notes on what the result will not have of the run's optimizer, which is converted, too, if it is `carried`, and
    of older FP8 state."""
    if carried and of_trainer(reader):
        yield f"Not carried over from the run: {', '.join(reader.trainer_run.left)}."
    if not carried and of_run(reader):
        try:
            optimizer = reader.optimizer_specs
        except CheckpointError as error:
            yield f"The optimizer stays behind: {error.what}."
        else:
            if optimizer:
                what = f"{counted(len(optimizer), 'tensor')}, {size(sum(spec.nbytes for spec in optimizer.values()))}"
                yield f"The optimizer stays behind: {what}. The result is weights only."
    if not of_megatron(reader):
        return
    older = sidecar.find(reader.path)
    if older and reader.fp8 and (names := older.modules.keys() - reader.fp8.modules.keys()):
        of = f"{counted(len(names), 'module')}, e.g. {min(names)}"
        yield f"Older FP8 state of {of}, which the run did not record, stays behind."


def decoded_base_notes(reader: Reader) -> Iterator[str]:
    """A note that the base of an adapter has codes, where the result is to have values."""
    if isinstance(reader, AdapterReader) and reader.base.encodings:
        yield (
            f"{counted(len(reader.base.encodings), 'weight of the base is', 'weights of the base are')} codes; the "
            "result has all weights as values. --to hf --precision fp8 makes codes again."
        )


def _missing_notes(reader: Reader, to: Layout, reference: Path | None) -> Iterator[str]:
    """Notes on what a complete directory has and the source, and so the result, does not. Megatron's needs a tokenizer
    alone, and from Megatron's own nobody expects one."""
    if to == "megatron" and of_megatron(reader):
        return
    files = reader.companions.files
    missing = [] if any(map(is_tokenizer, files)) else ["tokenizer"]
    missing += [] if to == "megatron" or GENERATION in files else [GENERATION]
    if missing and reference is not None:
        yield f"Missing in the source, in the reference {reference}, and so in the result: {', '.join(missing)}."
    elif missing:
        hint = ". --reference HF_DIR takes them from a Hugging Face directory" if "tokenizer" in missing else ""
        yield f"Missing in the source, and so in the result: {', '.join(missing)}{hint}."
    if to == "megatron" or "config.json" in files:
        return
    if parse_json(files.get(GENERATION, b"{}"), GENERATION).get("eos_token_id") is None:
        yield (
            "Nothing names the token that ends a text: `eos_token_id` is null in the result, and programs may generate "
            "without an end."
        )


def vocabulary_notes(reader: Reader) -> Iterator[str]:
    """A note that a Megatron source does not say which rows of its vocabulary are padding."""
    if of_megatron(reader) and "config.json" not in reader.companions.files and not reader.args.get("vocab_size"):
        yield (
            f"{reader.path} does not say how many tokens its vocabulary has: all {reader.model.vocab_size} rows are "
            "taken for tokens, also any that pad it. --reference HF_DIR tells them apart."
        )

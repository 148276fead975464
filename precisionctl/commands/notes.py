"""A command's notes for the user: what is left behind, what was guessed, what was computed anew."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from precisionctl.architectures.expert_args import CAPACITY
from precisionctl.architectures.families import models_of_megatron_args, table_of
from precisionctl.architectures.indexer_args import INDEXER_NORM_EPSILON, indexer_norm_epsilon
from precisionctl.architectures.megatron_args import otherwise_in_megatron
from precisionctl.checkpoints.adapter.reader import AdapterReader
from precisionctl.checkpoints.base import Reader, packings_of
from precisionctl.checkpoints.companions import is_tokenizer
from precisionctl.checkpoints.dcp_model import DcpModelReader
from precisionctl.checkpoints.deepspeed.reader import directory_of
from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.megatron.carried_run import of_megatron
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.trainer_run import of_trainer
from precisionctl.commands.request import Request
from precisionctl.commands.source import Source
from precisionctl.conversion.known_state import KnownState, origin, outdated_note
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, shown
from precisionctl.export.encode import is_slice
from precisionctl.export.input_scales import unreached_experts, why_too_small
from precisionctl.fp8 import sidecar
from precisionctl.fp8.carry import StateChange
from precisionctl.fp8.extra_state_writer import TeVersion
from precisionctl.fp8.four_bit_loss import GAUSSIAN_DB
from precisionctl.fp8.four_bit_loss import NAMES as FOUR_BIT_NAMES
from precisionctl.fp8.state import IN_USE, Fp8States
from precisionctl.model_shape import ModelShape
from precisionctl.param import Layout, Parallelism
from precisionctl.planning.plan import Job, Plan
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import FOUR_BITS
from precisionctl.same_model import in_words
from precisionctl.sizes import counted, size

_NAMES = {
    "Megatron-Bridge": "The result has Megatron-Bridge's names, for modules of its own: Megatron-Core alone does not "
    "build this family.",
    "this project": "Neither Megatron-Core nor Megatron-Bridge loads this family so: its names in Megatron are this "
    "project's.",
}
"""Whose names a family has, where not Megatron-Core's."""


def source_notes(request: Request, source: Source) -> Iterator[str]:
    """Notes on what the source is, and on what the result will not have of it, for any kind of result."""
    reader, plan = source.reader, source.plan
    yield from family_notes(reader, plan.model, plan.target, named=request.architecture is not None)
    if plan.target == "hf":
        yield from vocabulary_notes(reader)
    yield from _padding_notes(reader, plan)
    yield from left_behind_notes(reader, carried=source.trained is not None)
    yield from _adapter_notes(reader)
    yield from _companion_notes(reader)
    if plan.target == "hf":
        yield from _missing_notes(reader)


def family_notes(reader: Reader, model: ModelShape, to: Layout, *, named: bool) -> Iterator[str]:
    """Notes on the family of the source, whose tensors are this model's, and that it was guessed, unless the command
    named it (`named`)."""
    table = table_of(model)
    if to == "megatron" and table.names_by != "Megatron-Core":
        yield _NAMES[table.names_by]
    if to == "megatron" or of_megatron(reader):
        yield from _other_arithmetic(model, to)
    if of_megatron(reader) and model.dsa and (epsilon := indexer_norm_epsilon(reader.args)) != INDEXER_NORM_EPSILON:
        yield (
            f"By its arguments Megatron-Core normalises an indexer's keys with epsilon {epsilon:g}; transformers, and "
            f"Megatron by the arguments written here, with {INDEXER_NORM_EPSILON:g}."
        )
    if to == "hf" and of_megatron(reader) and not named and not reader.companions.files:
        fitting = models_of_megatron_args(reader.args, model.padded_vocab_size, reader.path)
        if others := [other.architecture for other in fitting if other.architecture != model.architecture]:
            yield (
                f"Megatron's arguments name no family: taken for {model.architecture}, but {', '.join(others)} would "
                "fit too. Choose with --architecture, or with --reference, which gives the tokenizer as well."
            )


def _other_arithmetic(model: ModelShape, to: Layout) -> Iterator[str]:
    """Notes on what Megatron-Core and transformers compute differently for the model."""
    if other := otherwise_in_megatron(model):
        named = ", ".join(f"{field} {_in_words(mine)} / {_in_words(theirs)}" for field, (mine, theirs) in other.items())
        if to == "megatron":
            yield (
                "Megatron-Core, by the arguments of the result, computes another model (this one / Megatron's): "
                f"{named}. config.json goes along: `resume` goes by it, and `convert` back."
            )
        else:
            yield (
                "Megatron's arguments do not say all of this model, so a Megatron-Core that trained by them alone "
                f"trained another one (the result / Megatron by them): {named}."
            )
    if model.mla and model.norm_epsilon != _MLA_EPSILON:
        yield (
            f"transformers normalises the latents of attention with epsilon {_MLA_EPSILON:g}, whatever config.json "
            f"says; Megatron-Core and `resume` with the model's {model.norm_epsilon:g}."
        )
    if model.architecture == "nemotron_h":
        yield (
            "transformers 5.23 takes no step (dt) of a Mamba-2 mixer below config.json's time_step_min, 0.001 if it "
            "says none; NVIDIA's own code, Megatron-Core and `resume` take it as it is."
        )
    if model.gated_norm and model.norm_epsilon != _MIXER_EPSILON:
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


def unread_notes(reader: Reader) -> Iterator[str]:
    """Notes on what nothing here reads of the run that saved the source, or does as it did."""
    factor = reader.args.get(CAPACITY) if of_megatron(reader) and reader.model.moe else None
    if isinstance(factor, int | float) and factor >= 0:  # below, it is as if it were not said
        yield (
            f"By its {CAPACITY}={shown(factor)} Megatron-Core leaves out tokens of experts that too many chose, in "
            "evaluation too; transformers and `resume` leave none out."
        )
    if isinstance(reader, DcpModelReader) and reader.left:
        yield f"Not carried over from the run: {counted(len(reader.left), 'tensor')} of its optimizer and other state."
    if of_trainer(reader) and reader.unread:
        yield f"These parts of the optimizer are not read, and stay behind: {reader.unread}."
    if isinstance(reader, HuggingFaceReader) and (step := directory_of(reader.path)):
        yield f"FP32 masters and the optimizer of DeepSpeed stay behind: give {step.name} inside to take them along."


def left_behind_notes(reader: Reader, *, carried: bool = False) -> Iterator[str]:
    """Notes on what the result will not have of the source. `carried` says that the optimizer is converted, too."""
    yield from unread_notes(reader)
    if isinstance(reader, HuggingFaceReader) and (lone := reader.lone_cache_scales):
        yield f"{counted(len(lone), 'scale')} of a KV cache, beside weights that are no codes, stay behind."
    stored = reader.base if isinstance(reader, AdapterReader) else reader
    if isinstance(stored, HuggingFaceReader) and (decoded := stored.decoded) and decoded.specs:
        weights = counted(len(decoded.specs), "weight was", "weights were")
        yield f"{weights} {decoded.words}. There is no way back to those codes."
    if isinstance(stored, HuggingFaceReader) and (idle := stored.idle_biases):
        biases = counted(len(idle), "bias of zeros", "biases of zeros")
        yield f"{biases}, which the model does not have, stay behind: e.g. {shown(idle[0])}."
    if carried and of_trainer(reader):
        yield f"Not carried over from the run: {', '.join(reader.trainer_run.left)}."
    if not carried and (of_megatron(reader) or of_trainer(reader)):
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
    if isinstance(reader, TorchDistReader) and reader.unread_optimizer:
        yield "The optimizer stays behind: it is stored by rank, in a form that newer Megatrons do not write."
    older = sidecar.find(reader.path)
    if older and reader.fp8 and (names := older.modules.keys() - reader.fp8.modules.keys()):
        of = f"{counted(len(names), 'module')}, e.g. {min(names)}"
        yield f"Older FP8 state of {of}, which the run did not record, stays behind."


def _adapter_notes(reader: Reader) -> Iterator[str]:
    """Notes on what an adapter does to its base."""
    if isinstance(reader, AdapterReader):
        tensors = counted(len(reader.base.specs), "tensor")
        changed, replaced = len(reader.changes), len(reader.replaced)
        yield (
            f"Of the base's {tensors} the adapter changes {changed} and replaces {replaced}; the others are the base's."
        )
        if reader.named_base:
            yield f"The adapter names {shown(reader.named_base)} as its base; nothing here proves that this is it."


def decoded_base_notes(reader: Reader) -> Iterator[str]:
    """A note that the base of an adapter has codes, where the result is to have values."""
    if isinstance(reader, AdapterReader) and reader.base.encodings:
        yield (
            f"{counted(len(reader.base.encodings), 'weight of the base is', 'weights of the base are')} codes; the "
            "result has all weights as values. --to hf --precision fp8 makes codes again."
        )


def _companion_notes(reader: Reader) -> Iterator[str]:
    """Notes on files beside the weights that are not copied, and on code among those that are."""
    yield from reader.companions.notes
    if code := reader.companions.code:
        yield (
            f"The model's own code is copied as it is: {', '.join(code)}. Nothing here has run it; whoever "
            "opens the result with trust_remote_code (vLLM, SGLang: --trust-remote-code) does."
        )


def tower_notes(plan: Plan) -> Iterator[str]:
    """A note that a wrapper's towers go to a Megatron checkpoint beside its text model, which Megatron alone reads."""
    if (wrapper := plan.model.wrapper) is None:
        return
    towers = plan.towers
    yield (
        f"Megatron has the text model of this {wrapper.model_type}; its towers, "
        f"{counted(len(towers.targets), 'tensor')}, {size(towers.nbytes)}, are kept beside it as they are. A "
        "checkpoint that Megatron saves later has none of them: give this one as its --reference on the way "
        "to Hugging Face."
    )


def _missing_notes(reader: Reader) -> Iterator[str]:
    """A note on files that a complete directory has and the source, and so the result, does not."""
    files = reader.companions.files
    missing = [] if any(map(is_tokenizer, files)) else ["tokenizer"]
    missing += [] if "generation_config.json" in files else ["generation_config.json"]
    if missing:
        hint = ". --reference HF_DIR takes them from a Hugging Face directory" if "tokenizer" in missing else ""
        yield f"Missing in the source, and so in the result: {', '.join(missing)}{hint}."
    if "config.json" not in files and "generation_config.json" in missing:
        yield (
            "Nothing names the token that ends a text: `eos_token_id` is null in the result, and programs may generate "
            "without an end."
        )


def vocabulary_notes(reader: Reader) -> Iterator[str]:
    """A note that nothing tells the rows of a Megatron source's vocabulary from those that pad it."""
    if of_megatron(reader) and "config.json" not in reader.companions.files and not reader.args.get("vocab_size"):
        yield (
            f"{reader.path} does not say how many tokens its vocabulary has: all {reader.model.vocab_size} rows are "
            "taken for tokens, also any that pad it. --reference HF_DIR tells them apart."
        )


def _padding_notes(reader: Reader, plan: Plan) -> Iterator[str]:
    """A note that rows which pad the vocabulary of a Megatron source are left out, or are another number."""
    if not of_megatron(reader):
        return
    before, after = reader.model, plan.model
    padding = before.padded_vocab_size - before.vocab_size
    if plan.target == "hf" and padding:
        yield f"The vocabulary has {before.vocab_size} rows: the {padding} of Megatron's padding are left out."
    if plan.target == "megatron" and before.padded_vocab_size != after.padded_vocab_size:
        yield (
            f"The vocabulary is padded to {after.padded_vocab_size} rows, as Megatron pads it for this --tp; "
            f"the source has {before.padded_vocab_size}."
        )


def stage_notes(sizes: Parallelism, layers: int) -> Iterator[str]:
    """A note on the flags for pipeline ranks with different numbers of layers, which Megatron does not take from a
    checkpoint's arguments."""
    counts = sizes.layers_of_ranks(layers)
    if len(set(counts)) == 1:
        return
    flags = {
        "decoder-first-pipeline-num-layers": sizes.first_layers,
        "decoder-last-pipeline-num-layers": sizes.last_layers,
        "num-virtual-stages-per-pipeline-rank": sizes.virtual if sizes.virtual > 1 else None,
    }
    words = " ".join(f"--{flag} {value}" for flag, value in flags.items() if value is not None)
    yield f"Pipeline ranks have {', '.join(map(str, counts))} layers: start Megatron with {words}."


GATE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
"""The environment variable without which Transformer Engine 2.16.1, 2.17.1 and 2.18 or later refuse delayed-scaling
state; it must be 1."""


def payload_notes(te: TeVersion, expert_ranks: int | None) -> Iterator[str]:
    """Notes on what Transformer Engine needs to load the FP8 payloads (`resume` needs nothing). `expert_ranks` is the
    number of expert-parallel ranks that experts' payloads are cut for."""
    if te == 1:
        yield (
            "The FP8 payloads are for Transformer Engine 0.6 to 1.14, and hold no recipe: start the run with the FP8 "
            "flags that are among the checkpoint's arguments."
        )
    else:
        yield (
            f"Transformer Engine 2.16.1, 2.17.1, 2.18 and later load FP8 payloads only where {GATE}=1 is set; "
            "`resume` does not need it."
        )
    if te == 2 and expert_ranks:
        yield (
            f"The experts' FP8 state is cut as Megatron cuts that of {counted(expert_ranks, 'expert rank')}: a run "
            "with another --expert-model-parallel-size mixes it up. Convert with its --ep."
        )


def state_notes(change: StateChange) -> Iterator[str]:
    """Notes on scales of weights that were computed from the weights instead of carried, and why."""
    if change.stale:
        yield (
            f"The recorded weight amax of {counted(len(change.stale), 'module')} does not fit the weights and "
            "is computed from them. The state of their inputs may be of other weights too: only an explicit "
            "--fp8-state uses it."
        )
    modules = change.states.modules
    waiting = [  # modules with other roles to record; weights do not count, as a weight of zeros never has a history
        name
        for name in change.from_weights
        if not all(modules[name].roles[role].recorded for role in IN_USE if role != "weight")
    ]
    if waiting:
        yield (
            f"Weight scales of {counted(len(waiting), 'module')} come from the weights; their activations and "
            "gradients have no history yet. `resume` fills them in warm-up passes before its first FP8 step."
        )


def code_notes(encodings: WeightEncodings) -> Iterator[str]:
    """Notes that weights which were codes are values now, and how to make them codes again."""
    formats = Counter(spec.codes_name for spec in encodings.weights.values())
    were = " and ".join(
        f"{counted(count, 'weight was', 'weights were')} {name} codes" for name, count in formats.items()
    )
    yield (
        f"{were}; the result has their decoded values. The scales are kept beside them: `convert --to hf "
        "--precision fp8` writes the same codes again."
    )
    names = {name for scales in encodings.scales.values() for name in scales.names}
    rest = {name: spec.shape for name, spec in encodings.stored.specs.items() if name not in names}
    if several := [name for name, shape in rest.items() if math.prod(shape) != 1]:
        yield (
            f"But not with {counted(len(several), 'scale')} of a KV cache that are no single number, "
            f"e.g. {shown(several[0])} {list(rest[several[0]])}: the way back to codes is refused for them."
        )


def decoded_notes(reader: Reader) -> Iterator[str]:
    """Notes that weights which were codes are values now, and stay values."""
    for name, count in Counter(packing.name for packing in packings_of(reader).values()).items():
        weights = counted(count, "weight was", "weights were")
        yield f"{weights} {name} codes, and are what they decode to. The scales stay behind."


def input_scale_notes(recorded: Fp8States | None, file: Path | None, *, file_is_noted: bool = False) -> Iterator[str]:
    """Notes on where an export's fixed input scales come from: `file` (that of --fp8-state; no note if `file_is_noted`,
    because `KnownState.notes` say it already), else the FP8 state `recorded`, else the fixed scales of the source's
    codes."""
    if file:
        yield from () if file_is_noted else (f"Input scales are those of {file}.",)
    elif recorded:
        yield f"Input scales are those of the checkpoint's FP8 state ({origin(recorded)})."
    else:
        yield "Input scales are the fixed ones of the source's weights."
    if recorded and (why := why_too_small(recorded)):
        yield f"They may be too small: {why}."


def unreached_notes(states: Fp8States | None, jobs: Sequence[Job]) -> Iterator[str]:
    """A note on experts whose inputs were never recorded."""
    if count := unreached_experts(states, jobs):
        inputs = counted(count, "input of an expert", "inputs of experts")
        yield f"{inputs} saw no token: the scale is of the largest amax of the layer's experts."


def rounded_notes(reader: Reader, plan: Plan) -> Iterator[str]:
    """Notes on values that are rounded to BF16 though nobody asked for that."""
    rounded: list[str] = []
    again: list[str] = []
    for job in plan.jobs:
        if any(reader.specs[read].dtype in (DType.float32, DType.float16) for read in job.reads):
            names = [name for name in job.writes if plan.targets[name].dtype == DType.bfloat16]
            (again if job.row.wide_beside and reader.layout == "megatron" else rounded).extend(names)
    if rounded:
        yield (
            f"{counted(len(rounded), 'tensor that stays values is', 'tensors that stay values are')} FP32 or FP16 in "
            f"the source and BF16 in the result, the first is {rounded[0]}."
        )
    if again:
        yield (
            f"{counted(len(again), 'norm is', 'norms are')} FP32 in Megatron so that no bit of BF16 is lost there, and "
            f"BF16 again in the result: exact, unless they were trained. The first is {again[0]}."
        )


def known_state_notes(known: KnownState, *, carried: bool) -> Iterator[str]:
    """Notes on what was replaced of the checkpoint's own FP8 state, and on state that is outdated and therefore only
    `carried` along or left behind."""
    yield from known.notes
    if known.outdated:
        what = "it is carried in the sidecar and used for nothing" if carried else "it stays behind"
        yield outdated_note(known.outdated, what)


def four_bit_notes(request: Request, encodings: WeightEncodings | None, plan: Plan) -> Iterator[str]:
    """Before an export in four bits: what rounding costs weights that are values, and who measures it."""
    name = FOUR_BITS.get(request.scheme or "")
    rounded = [weight for weight in plan.codes if encodings is None or weight not in encodings.weights]
    if name and rounded:
        usual = next(GAUSSIAN_DB[scheme] for scheme, title in FOUR_BIT_NAMES.items() if title == name)
        yield (
            f"{counted(len(rounded), 'weight is', 'weights are')} rounded to {name}: Gaussian ones keep {usual} dB of "
            f"signal over rounding (FP8 keeps 31), those with outliers less. "
            f"`precisionctl inspect {request.source} --fp8` says beforehand what each kind loses, "
            f"`precisionctl eval {request.destination} --data FILE --against {request.source}` what it costs the model."
        )


def in_bf16_notes(plan: Plan, precision: Precision, refused: Mapping[str, str]) -> Iterator[str]:
    """Notes on weights that stay in BF16 although `precision` puts them in FP8: experts that a family stores as one
    tensor, and weights that an engine has `refused` (name -> reason)."""
    if any(is_slice(job.writes[0]) and precision.in_fp8(job.module) for job in plan.jobs if job.row.gemm):
        yield (
            f"Experts stay in BF16: {plan.model.architecture} stores those of a layer as one tensor, "
            "and no engine reads FP8 codes of that."
        )
    if refused:
        name, what = next(iter(refused.items()))
        yield (
            f"Weights that stay in BF16 for their shapes, or for those of what is computed with them: {len(refused)}. "
            f"The first is {name}: {what}."
        )

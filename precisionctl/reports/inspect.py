"""What a checkpoint is: container, layout, architecture, sizes, precision, and the health of its FP8 state."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precisionctl.architectures.read_off import why_not_gemms
from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.dcp_model import DcpModelReader
from precisionctl.checkpoints.fused_experts import stored_name
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.megatron.carried_run import of_megatron
from precisionctl.checkpoints.megatron.towers import tower_names
from precisionctl.checkpoints.trainer_directory import says_its_model
from precisionctl.checkpoints.trainer_run import of_trainer
from precisionctl.codes.statistics import NAMES
from precisionctl.conversion.known_state import is_of_weights, why_outdated
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.engines.serving import ServingLayout
from precisionctl.errors import CheckpointError, PrecisionctlError
from precisionctl.export.encode import along_with, is_slice
from precisionctl.export.weight_encodings import stored_weight_encodings
from precisionctl.fp8.delayed_scaling import recorded_amax
from precisionctl.fp8.state import ATTENTION, ROLES, DelayedScaling, Fp8States, Role, RoleState
from precisionctl.param import TensorSpec
from precisionctl.planning.make_plan import plan_weights, stored_model
from precisionctl.quant_methods.base import CHANNEL
from precisionctl.reports.table import Table
from precisionctl.sizes import counted, size
from precisionctl.torch_when_used import torch
from precisionctl.trainer.saved.run_precision import precision_of_run
from precisionctl.untabled_model import UntabledModel

if TYPE_CHECKING:
    from torch import Tensor

Description = Mapping[str, Any]
"""What `--json` prints. Numbers are numbers: bytes, counts, steps; dtypes are PyTorch's names."""


def describe(reader: Reader) -> Description:
    """Everything that can be said of a checkpoint without reading whole matrices: of those with FP8
    state, only the rows that the digest of the weights samples.

    `model`, as its tensors show it, is None if nothing describes the model of a trainer's checkpoint; `mismatch` says
    why its tensors are not that model's, and is None if they are."""
    specs, model = reader.specs.values(), reader.model if says_its_model(reader) else None
    if model and not isinstance(model, UntabledModel):
        model = stored_model(reader)
    nbytes: Counter[str] = Counter()
    for spec in specs:
        nbytes[spec.stored_dtype] += spec.nbytes
    # What the values are stored in, and what FP8 state is beside them, in a few words
    codes = sorted({reader.specs[name].stored_dtype for name in reader.encodings})
    stored = f"{' and '.join(codes)} codes" if codes else nbytes.most_common(1)[0][0]
    if isinstance(reader, HuggingFaceReader) and reader.decoded and reader.decoded.specs:
        stored = reader.decoded.words
    return {
        "path": str(reader.path),
        "container": reader.container,
        "layout": reader.layout,
        "stored_names": "torchtitan" if isinstance(reader, DcpModelReader) and reader.of_torchtitan else None,
        "architecture": model.model_type if model else None,
        "iteration": reader.iteration,
        "parameters": sum(spec.rows * spec.columns for spec in specs),
        "tensors": _tensors(reader.specs),
        "files": len(reader.files),
        "bytes_by_dtype": dict(nbytes.most_common()),
        "parts": _parts(reader) if model and model.wrapper else None,
        "cut": _cut(reader),
        "precision": f"{stored} with delayed-scaling state" if reader.fp8 else stored,
        "run": _run(reader),
        "coded": _coded(reader),
        "model": model.described() if model else None,
        "mismatch": _mismatch(reader) if model else None,
        "linears": _linears(reader, model) if isinstance(model, UntabledModel) else None,
        "optimizer": _optimizer(reader),
        "fp8": _fp8(reader.fp8, reader) if reader.fp8 else None,
    }


def describe_state(states: Fp8States, path: Path) -> Description:
    """What a file of FP8 state says, as `describe` says it of state in a checkpoint."""
    return {"path": str(path), "fp8": _fp8(states, None)}


def _mismatch(reader: Reader) -> str | None:
    try:
        plan_weights(reader)
    except PrecisionctlError as error:
        return error.what
    return None


_SIZES = {
    "tensor": ("tp", "tensor_model_parallel_size"),
    "pipeline": ("pp", "pipeline_model_parallel_size"),
    "virtual": ("vpp", "virtual_pipeline_model_parallel_size"),
    "first_layers": ("first-stage-layers", "decoder_first_pipeline_num_layers"),
    "last_layers": ("last-stage-layers", "decoder_last_pipeline_num_layers"),
    "expert": ("ep", "expert_model_parallel_size"),
    "expert_tensor": ("etp", "expert_tensor_parallel_size"),
}
"""Fields of a Parallelism: the option of `convert` for each, and Megatron's argument."""


def _run(reader: Reader) -> dict[str, Any] | None:
    """The FP8 precision of the run that wrote the checkpoint: its kind of scaling, the keys of a recipe that are known
    of it, and what says so. None for a run in BF16, or of which nothing is said."""
    run = precision_of_run(reader)
    return {"scaling": run.precision.scaling, "keys": dict(run.keys), "said_by": run.said_by} if run else None


def _cut(reader: Reader) -> dict[str, int] | None:
    """The parallel sizes that a Megatron checkpoint was written for, as far as its arguments say; None for other
    checkpoints."""
    if not of_megatron(reader):
        return None
    return {field: size for field, (_, name) in _SIZES.items() if type(size := reader.args.get(name)) is int}


def _tensors(names: Iterable[str]) -> int:
    """The number of stored tensors: experts that are one in the file are one."""
    return len({stored_name(name)[0] for name in names})


def _parts(reader: Reader) -> dict[str, dict[str, int]]:
    """How much of a wrapper is its text model, and how much its towers."""
    towers = tower_names(reader).values()
    parts = {"text": [name for name in reader.specs if name not in towers], "towers": towers}
    return {
        part: {
            "tensors": _tensors(names),
            "parameters": sum(reader.specs[name].rows * reader.specs[name].columns for name in names),
            "bytes": sum(reader.specs[name].nbytes for name in names),
        }
        for part, names in parts.items()
    }


def _linears(reader: Reader, model: UntabledModel) -> list[dict[str, Any]]:
    """The matrices of a model without a table, in groups whose names differ only in numbers: how many there are, and
    why an FP8 export keeps them as values (None: it does not)."""
    reasons = why_not_gemms(reader.specs)
    linears = {name: spec for name, spec in reader.specs.items() if name not in reasons and not is_slice(name)}
    served = ServingLayout.of(model.config)
    refused = {name: why for name, spec in linears.items() if (why := served.refusal(name, spec, CHANNEL, "last"))}
    reasons |= refused | dict.fromkeys(along_with(refused, linears), "computed with one of a shape that is refused")
    found: dict[tuple[str, str | None], int] = Counter()
    for name, spec in reader.specs.items():
        if len(spec.shape) == 2:
            why = reasons.get(name) or ("experts in one tensor" if is_slice(name) else None)
            found[re.sub(r"(?<=[.\[])\d+(?=[.\]])", "*", name), why] += 1
    return [{"pattern": pattern, "count": count, "why_not_fp8": why} for (pattern, why), count in found.items()]


def _optimizer(reader: Reader) -> dict[str, Any] | None:
    """The size of a trainer's optimizer state, or why it cannot be read; None if there is none."""
    if not (of_megatron(reader) or of_trainer(reader)):
        return None
    try:
        specs = reader.optimizer_specs
    except CheckpointError as error:  # the rest of the checkpoint can be described all the same
        return {"unreadable": str(error)}
    return {"tensors": len(specs), "bytes": sum(spec.nbytes for spec in specs.values())} if specs else None


def _coded(reader: Reader) -> dict[str, Any] | None:
    """How weights are encoded, or were before they became values, and how many weights share scales in each way; None
    if they never were."""
    coded = stored_weight_encodings(reader)
    if coded is None:
        return None
    shared = Counter(_sharing(coded.weights[name], scales.block) for name, scales in coded.scales.items())
    formats = Counter(spec.codes_name for spec in coded.weights.values())
    return {
        "quant_method": coded.quantization.get("quant_method"),
        "formats": dict(formats.most_common()),
        "weights_by_scale": dict(shared.most_common()),
        "static_input_scales": sum(scales.input is not None for scales in coded.scales.values()),
    }


def _sharing(spec: TensorSpec, block: tuple[int, int]) -> str:
    """What shares a scale, in a few words."""
    if block[0] >= spec.rows and block[1] >= spec.columns:
        return "tensor"
    return "channel" if block[0] == 1 and block[1] >= spec.columns else f"block of {block[0]} x {block[1]}"


def _fp8(states: Fp8States, reader: Reader | None) -> dict[str, Any]:
    iteration = reader.iteration if reader else None
    age = None if iteration is None or states.iteration is None else iteration - states.iteration
    of_its = _is_of_its_weights(states, reader) if reader else None
    roles = [*ROLES, *(role for role in ATTENTION if any(role in state.roles for state in states.modules.values()))]
    return {
        "recipe": asdict(states.recipe),
        "producer": states.producer,
        "recorded_at_iteration": states.iteration,
        "age_in_steps": age,
        "of_these_weights": of_its,
        "why_not_used": why_outdated(states) if of_its is False else None,
        "never_recorded": {
            role: sum(role in state.roles and not state.roles[role].recorded for state in states.modules.values())
            for role in roles
        },
        "not_understood": sorted(states.raw),
        "notes": list(states.notes),
        "modules": {
            name: {role: _role(part, role, states.recipe) for role, part in state.roles.items()}
            for name, state in states.modules.items()
        },
    }


def _is_of_its_weights(states: Fp8States, reader: Reader) -> bool | None:
    """Whether FP8 state was recorded with the checkpoint's weights; None if too much of the checkpoint is missing to
    tell."""
    try:
        return is_of_weights(states, digest_weights(reader), reader)
    except PrecisionctlError:
        return None


def _role(state: RoleState, role: Role, recipe: DelayedScaling) -> dict[str, Any]:
    """The largest amax of the history, the scale, and how many rows hold an amax; lists by expert."""
    return {
        "recorded": state.recorded,
        "amax": _plain(recorded_amax(state, role, recipe)),
        "scale": _plain(state.scale),
        "rows_recorded": int((state.amax_history != 0).sum()),
    }


def _plain(values: Tensor) -> Any:
    return values.to(torch.float64).tolist()


def tables(description: Description) -> list[Table]:
    """The description for people."""
    if "container" not in description:  # of a file of state
        return [Table(description["path"], ("", ""), _fp8_rows(description["fp8"])), _by_role(description["fp8"])]
    found = [summary(description)]
    if linears := description["linears"]:
        words = [(each["pattern"], str(each["count"]), each["why_not_fp8"] or "FP8") for each in linears]
        found.append(Table("Matrices, and what an FP8 export makes of them", ("name", "number", ""), words))
    return [*found, _by_role(description["fp8"])] if description["fp8"] else found


def _by_role(fp8: Description) -> Table:
    """How many modules have recorded what, and within which limits."""
    rows = []
    for role, never in fp8["never_recorded"].items():
        recorded = [each[role] for each in fp8["modules"].values() if role in each and each[role]["recorded"]]
        amax, scale = (_range(state[key] for state in recorded) for key in ("amax", "scale"))
        rows.append((role, str(len(recorded)), str(never), amax, scale))
    columns = ("role", "recorded", "never recorded", "amax", "scale")
    return Table("FP8 state by role", columns, rows)


def summary(description: Description) -> Table:
    """What the checkpoint is."""
    names = description["stored_names"]
    files, tensors = counted(description["files"], "file"), counted(description["tensors"], "tensor")
    rows = [
        ("container", description["container"]),
        ("layout", description["layout"] + (f", stored under {names}'s names" if names else "")),
        (
            "architecture",
            description["architecture"] or "not said: give --reference HF_DIR, or copy config.json there",
        ),
        *(
            [("", f"WARNING: {said.splitlines()[0]}. See --dry-run of convert.")]
            if (said := description["mismatch"])
            else []
        ),
        *([] if description["iteration"] is None else [("iteration", str(description["iteration"]))]),
        ("parameters", f"{description['parameters']:,} in {tensors}, {files}"),
        *_part_rows(description),
        *(_shape_rows(description["model"]) if description["model"] else ()),
        *([("split for", _cut_words(cut))] if (cut := description["cut"]) is not None else []),
        ("stored as", ", ".join(f"{dtype} {size(count)}" for dtype, count in description["bytes_by_dtype"].items())),
        ("precision", description["precision"]),
        *([("trained in", _run_words(run))] if (run := description["run"]) else []),
    ]
    if description["layout"] == "megatron" or description["optimizer"]:
        rows.append(("optimizer", _optimizer_words(description["optimizer"])))
    if description["coded"]:
        rows.append(_coded_row(description))
    if description["fp8"]:
        rows += _fp8_rows(description["fp8"])
    return Table(description["path"], ("", ""), rows)


def _part_rows(description: Description) -> list[tuple[str, str]]:
    """What of a wrapper is text, and what is not."""
    if not (parts := description["parts"]):
        return []
    titles = {"text": f"text model, {description['model']['architecture']}", "towers": "towers, as they are"}
    return [
        (titles[part], f"{each['parameters']:,} in {counted(each['tensors'], 'tensor')}, {size(each['bytes'])}")
        for part, each in parts.items()
    ]


def _shape_rows(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows on the sizes of a model, or one row that says that its family has no table."""
    if "no_table" in model:
        return [("table", f"none: {model['no_table']}; converts from Hugging Face to Hugging Face only")]
    padding = model["padded_vocab_size"] - model["vocab_size"]
    per_layer = model["per_layer_embed_dim"]
    beside = f", an embedding of {per_layer} for each layer" if per_layer else ""
    wide = ", twice as wide where keys are shared" if model["use_double_wide_mlp"] else ""
    mlp = f"MLP {model['ffn_hidden_size']}{wide}"
    ahead = f"; {model['mtp_num_layers']} more of multi-token prediction" if model["mtp_num_layers"] else ""
    return [
        ("layers", f"{model['num_layers']} of hidden size {model['hidden_size']}, {mlp}{beside}{ahead}"),
        ("attention", _attention(model) + _in_layers(_attending(model))),
        *_recurrent_rows(model),
        *([("experts", _experts(model["moe"]))] if model["moe"] else []),
        ("vocabulary", f"{model['vocab_size']}" + (f" and {counted(padding, 'row')} of padding" if padding else "")),
    ]


def _run_words(run: Description) -> str:
    return f"FP8 with {NAMES[run['scaling']]} scaling, by {run['said_by']}"


def _cut_words(cut: Mapping[str, int]) -> str:
    """Parallel sizes as options of `convert`, without those that have their default."""
    defaults = {"expert_tensor": cut.get("tensor", 1), "first_layers": None, "last_layers": None}
    words = [f"--{_SIZES[field][0]} {size}" for field, size in cut.items() if size != defaults.get(field, 1)]
    return " ".join(words) or ("one rank" if cut else "not said")


def _optimizer_words(optimizer: Description | None) -> str:
    if optimizer is None:
        return "none"
    if "unreadable" in optimizer:
        return f"cannot be read: {optimizer['unreadable']}"
    return f"{counted(optimizer['tensors'], 'tensor')}, {size(optimizer['bytes'])}"


def _coded_row(description: Description) -> tuple[str, str]:
    coded = description["coded"]
    by_scale = ", ".join(f"{count} with a scale for each {who}" for who, count in coded["weights_by_scale"].items())
    static = coded["static_input_scales"]
    inputs = f"; static input scales for {static}" if static else ""
    kind = " and ".join(coded["formats"])
    title = f"{kind} weights" if "codes" in description["precision"] else f"were {kind} weights"
    return title, f"{coded['quant_method'] or 'of no Hugging Face spelling'}: {by_scale}{inputs}"


def _attention(model: Mapping[str, Any]) -> str:
    if model["mla"]:
        shared = sum(source != layer for layer, source in enumerate(model["mla"]["kv_source_layers"] or ()))
        shares = f"; {counted(shared, 'layer')} read the latent of an earlier one" if shared else ""
        return f"{counted(model['num_attention_heads'], 'head')} of latents of {model['mla']['kv_lora_rank']}{shares}"
    own = model["global_attention"]
    groups = counted(model["num_query_groups"], "key-value group")
    without_window = (
        f", {own['num_query_groups']} in layers without a window" if own and own["num_query_groups"] else ""
    )
    shared = model["num_kv_shared_layers"]
    shares = f"; the last {counted(shared, 'layer')} read keys and values of earlier ones" if shared else ""
    return f"{counted(model['num_attention_heads'], 'head')}, {groups}{without_window}{shares}"


def _attending(model: Mapping[str, Any]) -> list[bool]:
    """Which layers have attention."""
    if mamba := model["mamba"]:
        return [kind in "*P" for kind in mamba["pattern"]]
    others = [part["layers"] for part in (model["gdn"], model["short_conv"]) if part]
    return [not any(layers[i] for layers in others) for i in range(model["num_layers"])]


def _recurrent_rows(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What stands in the place of attention, or beside it."""
    rows = []
    if gdn := model["gdn"]:
        sizes = f"keys of {gdn['key_head_dim']}, values of {gdn['value_head_dim']}" + _in_layers(gdn["layers"])
        name = "Kimi delta attention" if gdn["kda"] else "gated delta nets"
        rows.append((name, f"{counted(gdn['num_value_heads'], 'head')}, {sizes}"))
    if conv := model["short_conv"]:
        rows.append(("short convolutions", f"of {counted(conv['kernel_dim'], 'token')}" + _in_layers(conv["layers"])))
    if mamba := model["mamba"]:
        of_heads = mamba["dt_rank"] is None
        sizes = f"{counted(mamba['num_heads'], 'head')} of {mamba['head_dim']}"
        sizes = f"{sizes if of_heads else counted(mamba['num_heads'], 'channel')}, states of {mamba['state_dim']}"
        sizes += _in_layers([kind in "MP" for kind in mamba["pattern"]])
        rows.append((f"Mamba-{2 if of_heads else 1} mixers", sizes))
    return rows


def _in_layers(layers: Sequence[bool]) -> str:
    """In how many layers, where not in all."""
    return "" if all(layers) else f", in {counted(sum(layers), 'layer')}"


def _experts(moe: Mapping[str, Any]) -> str:
    shared = f", and shared ones of {moe['shared_ffn_hidden_size']}" if moe["shared_ffn_hidden_size"] else ""
    each = f"{moe['topk']} of {moe['num_experts']} for a token, MLP {moe['ffn_hidden_size']}"
    return f"{each}{shared}, in {counted(sum(moe['layer_freq']), 'layer')}"


def _fp8_rows(fp8: Description) -> list[tuple[str, str]]:
    recipe = fp8["recipe"]
    words = (
        f"delayed scaling, {recipe['fp8_format']}, history {recipe['amax_history_len']}, "
        f"{recipe['amax_compute_algo']}, margin {recipe['margin']}"
    )
    recorded = fp8["recorded_at_iteration"]
    when = "recorded at an unknown iteration" if recorded is None else f"recorded at iteration {recorded}"
    age = fp8["age_in_steps"]
    ago = f", {counted(age, 'step')} ago" if age else ""
    of_its = fp8["of_these_weights"]
    used = (
        "; not compared with weights" if of_its is None else "" if of_its else f"; not used: it {fp8['why_not_used']}"
    )
    rows = [
        ("FP8 recipe", words),
        ("FP8 state", f"{counted(len(fp8['modules']), 'module')}, {when}{ago}{used}"),
    ]
    if fp8["not_understood"]:
        rows.append(("kept unread", ", ".join(fp8["not_understood"])))
    return rows + [("", note) for note in fp8["notes"]]


def _range(values: Any) -> str:
    flat = [number for value in values for number in (value if isinstance(value, list) else [value])]
    return f"{min(flat):.4g} to {max(flat):.4g}" if flat else "-"

"""What a checkpoint is: container, layout, architecture, sizes, precision, and the health of its FP8 state."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from precisionctl.architectures.read_off import why_not_gemms
from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.dcp.dcp_model import DcpModelReader
from precisionctl.checkpoints.gguf.reader import GgufReader
from precisionctl.checkpoints.gguf.towers.mmproj_file import PROJECTORS, read_mmproj
from precisionctl.checkpoints.hf_directory.fused_experts import stored_name
from precisionctl.checkpoints.huggingface import HuggingFaceTensors
from precisionctl.checkpoints.megatron.directory import of_megatron
from precisionctl.checkpoints.megatron.towers import tower_names
from precisionctl.checkpoints.other_trainers.trainer_directory import says_its_model
from precisionctl.checkpoints.run_reader import of_run
from precisionctl.codes.statistics import scaling_words
from precisionctl.commands.run_precision import precision_of_run
from precisionctl.engines.serving import ServingLayout
from precisionctl.errors import CheckpointError, PrecisionctlError
from precisionctl.export.encode import along_with
from precisionctl.export.weight_encodings import stored_weight_encodings
from precisionctl.fp8.state import Fp8States
from precisionctl.megatron_flags import PARALLEL_SIZES
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import is_slice
from precisionctl.planning.make_plan import plan_weights, stored_model
from precisionctl.quant_methods.base import CHANNEL
from precisionctl.reports.model_sizes import size_rows
from precisionctl.reports.recorded_state import describe_fp8, fp8_rows, role_table
from precisionctl.reports.table import Table
from precisionctl.sizes import counted, listed, size

Description = Mapping[str, Any]
"""What `--json` prints. Numbers are numbers: bytes, counts, steps; dtypes are PyTorch's names."""


def describe(reader: Reader) -> Description:
    """Everything that can be said of a checkpoint without reading whole matrices: of those with FP8
    state, only the rows that the digest of the weights samples.

    `model`, as its tensors show it, is None if nothing describes the model of a trainer's checkpoint; `mismatch` says
    why its tensors are not that model's, and is None if they are."""
    specs, nbytes = reader.specs.values(), _bytes_stored(reader)
    model = reader.model if says_its_model(reader) else None
    if model and not isinstance(model, UntabledModel):
        model = stored_model(reader)
    # What the values are stored in, and what FP8 state is beside them, in a few words
    codes = sorted({reader.specs[name].stored_dtype for name in reader.encodings})
    stored = f"{' and '.join(codes)} codes" if codes else nbytes.most_common(1)[0][0]
    if isinstance(reader, HuggingFaceTensors) and reader.decoded and reader.decoded.specs:
        stored = reader.decoded.words
    if isinstance(reader, GgufReader):
        stored = reader.words or stored
    run = precision_of_run(reader)
    return {
        "path": str(reader.path),
        "container": reader.container,
        "layout": reader.layout,
        "stored_names": reader.names_of if isinstance(reader, DcpModelReader) else None,
        "architecture": model.model_type if model else None,
        "iteration": reader.iteration,
        "parameters": sum(spec.rows * spec.columns for spec in specs),
        "tensors": _tensors(reader.specs),
        "files": len(reader.files),
        "bytes_by_dtype": dict(nbytes.most_common()),
        "parts": _parts(reader) if model and model.wrapper else None,
        "mmproj": [_mmproj(file) for file in reader.mmproj] if isinstance(reader, GgufReader) else [],
        "cut": _cut(reader),
        "precision": f"{stored} with delayed-scaling state" if reader.fp8 else stored,
        "run": {"scaling": run.precision.scaling, "keys": dict(run.keys), "said_by": run.said_by} if run else None,
        "coded": _coded(reader),
        "model": model.described() if model else None,
        "mismatch": _mismatch(reader) if model else None,
        "linears": _linears(reader, model) if isinstance(model, UntabledModel) else None,
        "optimizer": _optimizer(reader),
        "fp8": describe_fp8(reader.fp8, reader) if reader.fp8 else None,
    }


def _bytes_stored(reader: Reader) -> Counter[str]:
    """Bytes by what tensors are stored as: a dtype, or the name that a format has in GGUF. Of codes that are decoded as
    they are read it is what the files hold; of others, scales are left out."""
    found: Counter[str] = Counter()
    if isinstance(reader, GgufReader):
        for tensor in reader.stored:
            found[str(tensor.format.dtype or tensor.format.name)] += tensor.nbytes
        return found
    specs = reader.stored.specs if isinstance(reader, HuggingFaceTensors) and reader.decoded else reader.specs
    for spec in specs.values():
        found[spec.stored_dtype] += spec.nbytes
    return found


def describe_state(states: Fp8States, path: Path) -> Description:
    """What a file of FP8 state says, as `describe` says it of state in a checkpoint."""
    return {"path": str(path), "fp8": describe_fp8(states, None)}


def _mismatch(reader: Reader) -> str | None:
    try:
        plan_weights(reader)
    except PrecisionctlError as error:
        return error.what
    return None


def _cut(reader: Reader) -> dict[str, int] | None:
    """The parallel sizes that a Megatron checkpoint was written for, as far as its arguments say; None for other
    checkpoints."""
    if not of_megatron(reader):
        return None
    return {field: size for field, (_, name) in PARALLEL_SIZES.items() if type(size := reader.args.get(name)) is int}


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


def _mmproj(file: Path) -> dict[str, Any]:
    """A file of towers beside a GGUF file: its name, llama.cpp's word for its projectors, and its size."""
    head = read_mmproj(file)
    kinds = [head.metadata[key] for key in PROJECTORS if isinstance(head.metadata.get(key), str)]
    return {
        "file": file.name,
        "projectors": kinds,
        "tensors": len(head.tensors),
        "parameters": sum(math.prod(tensor.shape) for tensor in head.tensors.values()),
        "bytes": sum(tensor.nbytes for tensor in head.tensors.values()),
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
    if not of_run(reader):
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
    shared: Counter[str] = Counter()
    for name, scales in coded.scales.items():
        spec, (high, wide) = coded.weights[name], scales.block
        if wide < spec.columns or 1 < high < spec.rows:
            shared[f"block of {high} x {wide}"] += 1
        else:
            shared["tensor" if high >= spec.rows else "channel"] += 1
    formats = Counter(spec.codes_name for spec in coded.weights.values())
    return {
        "quant_method": coded.quantization.get("quant_method"),
        "formats": dict(formats.most_common()),
        "weights_by_scale": dict(shared.most_common()),
        "static_input_scales": sum(scales.input is not None for scales in coded.scales.values()),
    }


def tables(description: Description) -> list[Table]:
    """The description for people."""
    if "container" not in description:  # of a file of state
        return [Table(description["path"], ("", ""), fp8_rows(description["fp8"])), role_table(description["fp8"])]
    found = [summary(description)]
    if linears := description["linears"]:
        words = [(each["pattern"], str(each["count"]), each["why_not_fp8"] or "FP8") for each in linears]
        found.append(Table("Matrices, and what an FP8 export makes of them", ("name", "number", ""), words))
    return [*found, role_table(description["fp8"])] if description["fp8"] else found


def summary(description: Description) -> Table:
    """What the checkpoint is."""
    names = description["stored_names"]
    files, tensors = counted(description["files"], "file"), counted(description["tensors"], "tensor")
    parts = []
    for part, said in (description["parts"] or {}).items():  # of a wrapper
        title = "towers, as they are" if part == "towers" else f"text model, {description['model']['architecture']}"
        parts.append((title, _amount(said)))
    for said in description["mmproj"]:
        kinds = f" ({listed(said['projectors'])})" if said["projectors"] else ""
        parts.append(("towers", f"{_amount(said)}, in {said['file']}{kinds}"))
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
        *parts,
        *(size_rows(description["model"]) if description["model"] else ()),
        *([("split for", _cut_words(cut))] if (cut := description["cut"]) is not None else []),
        ("stored as", ", ".join(f"{dtype} {size(count)}" for dtype, count in description["bytes_by_dtype"].items())),
        ("precision", description["precision"]),
    ]
    if run := description["run"]:
        rows.append(("goes on in", f"{scaling_words(run['scaling'])}, by {run['said_by']}"))
    optimizer = description["optimizer"]
    if optimizer is None and description["layout"] == "megatron":
        rows.append(("optimizer", "none"))
    elif optimizer and "unreadable" in optimizer:
        rows.append(("optimizer", f"cannot be read: {optimizer['unreadable']}"))
    elif optimizer:
        rows.append(("optimizer", f"{counted(optimizer['tensors'], 'tensor')}, {size(optimizer['bytes'])}"))
    if coded := description["coded"]:
        by_scale = ", ".join(f"{count} with a scale for each {who}" for who, count in coded["weights_by_scale"].items())
        static = coded["static_input_scales"]
        inputs = f"; static input scales for {static}" if static else ""
        weights = f"{' and '.join(coded['formats'])} weights"
        title = weights if "codes" in description["precision"] else f"were {weights}"
        rows.append((title, f"{coded['quant_method'] or 'of no Hugging Face spelling'}: {by_scale}{inputs}"))
    if description["fp8"]:
        rows += fp8_rows(description["fp8"])
    return Table(description["path"], ("", ""), rows)


def _amount(part: Description) -> str:
    """How much of a checkpoint a part of it is."""
    return f"{part['parameters']:,} in {counted(part['tensors'], 'tensor')}, {size(part['bytes'])}"


def _cut_words(cut: Mapping[str, int]) -> str:
    """Parallel sizes as options of `convert`, without those that have their default."""
    defaults = {"expert_tensor": cut.get("tensor", 1), "first_layers": None, "last_layers": None}
    words = [f"{PARALLEL_SIZES[field][0]} {size}" for field, size in cut.items() if size != defaults.get(field, 1)]
    return " ".join(words) or ("one rank" if cut else "not said")

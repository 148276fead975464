"""Checks without tensor data: names, dtypes, shapes, and whether tensors can be divided over ranks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from precisionctl.architectures.param_map import Row
from precisionctl.codes.elements import FP8
from precisionctl.dtypes import DType
from precisionctl.errors import (
    DamagedCheckpoint,
    MappingError,
    MissingTensor,
    PrecisionError,
    ShapeMismatch,
    UnmappedTensor,
    one_line,
    shown,
)
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import Parallelism, TensorSpec, divides_heads

_VALUES = (DType.bfloat16, DType.float16, DType.float32, *FP8)
"""The dtypes that a tensor may have. The readers have checked that FP8 codes have scales."""

_INTEGERS = (DType.int32, DType.int64)

_LINES = 8
"""Most lines to show of missing, and of unexpected, names."""

_LONGEST = 90
"""Most characters of a name to show, as a stranger's name may have megabytes."""

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=\.weight)\d+$|(?<=\.bias)\d+$|(?<=\[)\d+(?=\]$)")


def _short(name: str) -> str:
    """A stranger's name, shortened and on one line: with a line break, a part of it could pass for a line of ours."""
    return one_line(name[:_LONGEST])


def without_numbers(name: str) -> str:
    """A name, cut to what can be shown, with `*` for the numbers of layers and experts in it."""
    return _NUMBERS.sub("*", _short(name))


def check_text(names: Iterable[str]) -> None:
    """Raise DamagedCheckpoint for a name that is no text: half a surrogate pair, which a pickle can express and UTF-8
    cannot, as which a result would have it."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            what = f"the name of a tensor is no text: {shown(name)}"
            raise DamagedCheckpoint(what, do="Rename it where the checkpoint was written.") from None


def check_names(missing: Sequence[str], unexpected: Sequence[str], do: str = "", where: object = "") -> None:
    """Raise MissingTensor, or UnmappedTensor if none is missing, with a table of both. Names that differ only in
    numbers share a line, with `*` for the numbers."""
    found = {"missing": missing, "unexpected": unexpected}
    if not missing and not unexpected:
        return
    counts = ", ".join(f"{len(names)} {what}" for what, names in found.items() if names)
    lines = []
    for what, names in found.items():
        alike: dict[str, list[str]] = {}
        for name in names:
            alike.setdefault(without_numbers(name), []).append(_short(name))
        for pattern, those in [*alike.items()][:_LINES]:
            lines.append(f"  {what:<10}  " + (f"{pattern}  ({len(those)})" if len(those) > 1 else those[0]))
        if left := sum(len(those) for those in [*alike.values()][_LINES:]):
            lines.append(f"  {what:<10}  ... and {left} more")
    kind = MissingTensor if missing else UnmappedTensor
    raise kind("\n".join([f"the checkpoint's tensors are not the model's: {counts}", *lines]), where=where, do=do)


def check_dtypes(stored: Mapping[str, TensorSpec], *, integers: bool) -> None:
    """Raise PrecisionError for a dtype that no weight has, or no table of `integers`."""
    for name, spec in stored.items():
        if spec.dtype not in (_INTEGERS if integers else _VALUES) and spec.packing is None:
            known = "Supported are values in BF16, FP16 and FP32, and codes with scales."
            do = "It should be a table of integers, in int32 or int64." if integers else known
            raise PrecisionError(f"`{name}` is {spec.dtype}", do=do)


def check_shapes(stored: Mapping[str, TensorSpec], shapes: Iterable[tuple[int, ...]]) -> None:
    """Raise ShapeMismatch for the first of `stored` whose shape is not the one at the same place in `shapes`."""
    for (name, spec), expected in zip(stored.items(), shapes, strict=True):
        if spec.shape != expected:
            raise ShapeMismatch(
                f"`{name}` is {list(spec.shape)}, the model's sizes say {list(expected)}",
                do="Is config.json, or are Megatron's arguments, of another model?",
            )


def check_division(row: Row, model: ModelShape, parallelism: Parallelism) -> None:
    """Raise ShapeMismatch if the tensors of a row cannot be divided over the tensor-parallel ranks."""
    shape, parallel = row.shape(model), row.cut(model)
    ranks = parallelism.tensor_of(experts=row.of_experts)
    if parallel.kind == "replicated":
        return
    sizes = [shape[1]] if parallel.kind == "columns" else parallel.rows_of_parts(shape[0])
    if row.layers == "mamba" and model.mamba:
        sizes.append(model.mamba.divisible)
    if row.layers == "gdn" and model.gdn:
        sizes.append(model.gdn.num_key_heads)
    if any(size % ranks for size in sizes):
        raise ShapeMismatch(
            f"`{row.megatron.replace('{layer}', '*')}` {list(shape)} cannot be cut into {ranks} tensor-parallel parts",
            do=f"Choose another {'--etp or --tp' if row.of_experts else '--tp'}.",
        )


def check_megatron_has(model: ModelShape) -> None:
    """Raise MappingError for a model that Megatron-Core cannot build, or that no table leads there."""
    if isinstance(model, UntabledModel):
        raise model.why
    do = "It can be read, exported and verified as a Hugging Face directory."
    if model.moe and model.add_bias_linear and not model.moe.router_bias:  # it has one switch for all biases
        raise MappingError(
            f"{model.architecture} with attention_bias has no place in Megatron-Core: routers and experts would have "
            "biases, too",
            do=do,
        )


def with_stages(sizes: Parallelism, layers: int) -> Parallelism:
    """The sizes, completed for a model with this number of layers: if these do not divide evenly over the pipeline
    ranks and no distribution is given, the last rank, which also has the output layer, gets fewer.

    Raises ShapeMismatch for stages that Megatron does not support (TransformerConfig.__post_init__).
    """
    if sizes.pipeline == 1 and (sizes.virtual > 1 or sizes.first_layers or sizes.last_layers):
        raise ShapeMismatch("pipeline stages without a pipeline", do="Give --pp too, or leave the others out.")
    stages = sizes.pipeline * sizes.virtual
    if layers % stages and sizes.first_layers is None and sizes.last_layers is None:
        most = -(-layers // stages) * sizes.virtual
        sizes = replace(sizes, last_layers=layers - most * (sizes.pipeline - 1))
    counts = sizes.layers_of_ranks(layers) if stages <= layers else []
    if sum(counts) != layers or any(count <= 0 or count % sizes.virtual for count in counts):
        raise ShapeMismatch(
            f"{layers} layers cannot be cut into {stages} pipeline stages that are equal but for the first and last",
            do="Choose --first-stage-layers and --last-stage-layers, or another --pp or --vpp.",
        )
    return sizes


def check_ranks(model: ModelShape, parallelism: Parallelism) -> None:
    """Raise ShapeMismatch if experts, or attention heads as Megatron distributes them, do not divide evenly over the
    ranks (TransformerConfig.__post_init__)."""
    ranks = parallelism.tensor
    for heads, groups in ((each.num_attention_heads, each.num_query_groups) for each in model.attentions):
        if not divides_heads(ranks, heads, groups):
            raise ShapeMismatch(
                f"{heads} heads in {groups} query groups cannot be divided evenly among {ranks} tensor-parallel ranks",
                do="Choose --tp that divides the heads, and is a multiple or a divisor of the groups.",
            )
    experts = model.moe.num_experts if model.moe else 0
    if parallelism.expert > 1 and not experts:
        raise ShapeMismatch("a model without experts cannot be cut into expert-parallel parts", do="Leave --ep out.")
    if experts % parallelism.expert:
        raise ShapeMismatch(
            f"{experts} experts cannot be divided evenly among {parallelism.expert} ranks",
            do="Choose --ep that divides the number of experts.",
        )

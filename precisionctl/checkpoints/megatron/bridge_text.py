"""Text models of which Megatron-Bridge has tensors in other places, under other names or with more rows than a plan."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from precisionctl.checkpoints.base import WITH_REFERENCE
from precisionctl.checkpoints.chunks import Box
from precisionctl.checkpoints.megatron.keys import PARAMETER_STATE
from precisionctl.checkpoints.torch_files.dcp_tensors import LogicalTensor, TensorPart
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.model.model_shape import ModelShape

_OUTSIDE_OF_LAYERS = (
    # MiniMax-M3 (models/minimax_m3/modeling_minimax_m3_vl.py)
    (
        re.compile(r"lightning_indexers\.(\d{1,9})\.([qk])_proj\.weight"),
        r"decoder.layers.\1.self_attention.core_attention.indexer.linear_\2.weight",
    ),
    (
        re.compile(r"lightning_indexers\.(\d{1,9})\.([qk])_norm\.weight"),
        r"decoder.layers.\1.self_attention.core_attention.indexer.\2_norm.weight",
    ),
    # Gemma 4 (models/gemma/modeling_gemma4.py)
    (re.compile(r"(per_layer_(?:embedding|model_proj|proj_norm)\.weight)"), r"embedding.\1"),
)
_BESIDE_EXPERTS = "pre_shared_expert_layernorm"
_IN_LAYERS = (
    # in layers of Gemma 4 with this module, its norms, and where a plan has them
    (_BESIDE_EXPERTS, _BESIDE_EXPERTS, "mlp.shared_experts.linear_fc1.layer_norm_"),
    (_BESIDE_EXPERTS, "mlp.post_shared_expert_layernorm", "mlp.shared_experts.linear_fc2.post_layernorm."),
    (_BESIDE_EXPERTS, "pre_mlp_layernorm", "mlp.pre_moe_layernorm."),
    (_BESIDE_EXPERTS, "post_ffn_layernorm", "mlp.post_layernorm."),
    ("post_self_attn_layernorm", "post_self_attn_layernorm", "self_attention.linear_proj.post_layernorm."),
    ("post_mlp_layernorm", "post_mlp_layernorm", "mlp.linear_fc2.post_layernorm."),
)
_LAYER = re.compile(r"(decoder\.layers\.\d{1,9}\.)(.+)")
_NORM = {f"{module}.weight": (having, there) for having, module, there in _IN_LAYERS}
_ATTENTION = re.compile(r"decoder\.layers\.(\d{1,9})\.self_attention(?:_(sliding|global))?\.(.+)")
_APART = ".self_attention_sliding.", ".self_attention_global."
_LAYERS_OF_GEMMA_4 = (*_APART, ".post_self_attn_layernorm.", f".{_BESIDE_EXPERTS}.")
_BRIDGES = (*_LAYERS_OF_GEMMA_4, "lightning_indexers.", "per_layer_")
"""Parts of names, one of which a model has that is otherwise in a plan."""


def as_in_plans(
    found: Mapping[str, LogicalTensor], described: Callable[[], ModelShape | None], where: Path
) -> dict[str, LogicalTensor]:
    """Logical tensors, an optimizer's among them, as a plan has them. `described` is the model of config.json, if there
    is one.

    In `torch_dist`, Bridge counts Gemma 4's layers with a window and those without apart, as the two have attention of
    other sizes. It has rows of keys and values in all of them: values that are copies of keys, and both in layers that
    read those of others, with a norm of their own. Nothing computes with these, Bridge neither; so they are left out.

    Raises UnknownArchitecture without a config.json that says which layers have a window, DamagedCheckpoint where it
    says of another number of layers, and where two tensors have one name.
    """
    parts = {part for name in found for part in _BRIDGES if part in name}
    if not parts:
        return dict(found)
    model = described() if parts.intersection(_LAYERS_OF_GEMMA_4) else None
    if model is None or model.global_attention is None:
        if parts.intersection(_APART):
            what = "Megatron-Bridge counts kinds of layers apart, as of a Gemma 4, and no config.json of one says which"
            raise UnknownArchitecture(f"{what} layers have a window", where=where, do=WITH_REFERENCE)
        model = None
    layers = _layers(found, model, where) if model else {}
    named: dict[str, LogicalTensor] = {}
    for name, one in found.items():
        parameter = _parameter(name)
        there, tensor = _moved(parameter, found), one
        if model and (match := _ATTENTION.fullmatch(parameter)):
            layer = layers[match[2]][int(match[1])] if match[2] else int(match[1])
            there = f"decoder.layers.{layer}.self_attention.{match[3]}"
            if match[3] == "k_layernorm.weight" and model.shares_kv(layer):
                continue
            if match[3] == "linear_qkv.weight" and layer < model.num_layers:
                tensor = _without_unused(one, model, layer)
        there = name.removesuffix(parameter) + there
        if there in named:
            raise DamagedCheckpoint(f"{there} is there twice", where=where)
        named[there] = tensor
    return named


def _parameter(name: str) -> str:
    """The parameter that a tensor is, or that an optimizer's is of."""
    state = PARAMETER_STATE.fullmatch(name)
    return state[2] if state else name


def _layers(names: Iterable[str], model: ModelShape, where: Path) -> dict[str, Mapping[int, int]]:
    """By kind, the layers by the numbers that Bridge has for them: their own if all layers are stored by themselves,
    else the place among those of the kind."""
    numbers: dict[str, set[int]] = {}
    for match in (_ATTENTION.fullmatch(_parameter(name)) for name in names):
        if match and match[2]:
            numbers.setdefault(match[2], set()).add(int(match[1]))
    layers: dict[str, Mapping[int, int]] = {}
    for kind, there in numbers.items():
        own = [layer for layer in range(model.num_layers) if model.in_window(layer) == (kind == "sliding")]
        if there not in ({*own}, {*range(len(own))}):
            what = f"{len(there)} layers are {kind}, and config.json says {len(own)}"
            raise DamagedCheckpoint(what, where=where, do="Is config.json this model's?")
        layers[kind] = dict(zip(sorted(there), own, strict=True))
    return layers


def _moved(parameter: str, names: Collection[str]) -> str:
    """The name of a parameter in a plan, but for the number of its layer."""
    for pattern, there in _OUTSIDE_OF_LAYERS:
        if match := pattern.fullmatch(parameter):
            return match.expand(there)
    layer = _LAYER.fullmatch(parameter)
    if layer and layer[2] in _NORM:
        having, module = _NORM[layer[2]]
        if f"{layer[1]}{having}.weight" in names:
            return f"{layer[1]}{module}weight"
    return parameter


def _without_unused(qkv: LogicalTensor, model: ModelShape, layer: int) -> LogicalTensor:
    """Queries, keys and values, `[q_0 .. q_{r-1}, k, v]` of each query group, without what a layer does not compute
    with. As it is where it has other rows."""
    attention = model.attention_of(in_window=model.in_window(layer))
    groups, channels = attention.num_query_groups, attention.kv_channels
    all_heads = attention.num_attention_heads // groups + 2
    unused = 2 if model.shares_kv(layer) else 1 if attention.keys_are_values else 0
    if not unused or qkv.spec.rows != groups * all_heads * channels:
        return qkv
    kept = (all_heads - unused) * channels
    runs = [(group * kept, group * all_heads * channels, kept) for group in range(groups)]
    spec = replace(qkv.spec, shape=(groups * kept, *qkv.spec.shape[1:]))
    return LogicalTensor(spec, tuple(_rows(qkv.parts, runs)))


def _rows(parts: Sequence[TensorPart], runs: Sequence[tuple[int, int, int]]) -> Iterator[TensorPart]:
    """Runs of rows: where each begins in the result and among the parts', and how many there are."""
    for row, first, rows in runs:
        for part in parts:
            box = part.box
            begin, end = max(first, box.row), min(first + rows, box.row + box.rows)
            if begin < end:
                cut = Box(row + begin - first, end - begin, box.column, box.columns)
                yield TensorPart(cut, part.piece, part.start + (begin - box.row) * box.columns)

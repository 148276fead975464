"""Text models of which Megatron-Bridge has tensors in other places, under other names or with more rows than a plan."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
_OF_KIND = re.compile(r"decoder\.layers\.(\d{1,9})\.self_attention_(sliding|global)\.(.+)")


def as_in_plans(
    found: Mapping[str, LogicalTensor], described: Callable[[], ModelShape | None], where: Path
) -> dict[str, LogicalTensor]:
    """Logical tensors, an optimizer's among them, as a plan has them. `described` is the model of config.json, if there
    is one.

    Bridge counts Gemma 4's layers with a window and those without apart, as the two have attention of other sizes. It
    has rows of keys and values in all of them: values that are copies of keys, and both in layers that read those of
    others, with a norm of their own. No program computes with these, Bridge neither; so they are left out.

    Raises UnknownArchitecture without a config.json that says which layers have a window, DamagedCheckpoint where it
    says of another number of layers, and where two tensors have one name.
    """
    kinds = {match[2]: set[int]() for name in found if (match := _OF_KIND.fullmatch(_parameter(name)))}
    for name in found if kinds else ():
        if match := _OF_KIND.fullmatch(_parameter(name)):
            kinds[match[2]].add(int(match[1]))
    model = described() if kinds else None
    if kinds and (model is None or model.global_attention is None):
        what = "its layers with a window and those without are counted apart, as Megatron-Bridge does of Gemma 4; "
        what += "no config.json of such a model says which layers have one"
        raise UnknownArchitecture(what, where=where, do=WITH_REFERENCE)
    layers = {kind: _layers(kind, numbers, model, where) for kind, numbers in kinds.items() if model}
    named: dict[str, LogicalTensor] = {}
    for name, one in found.items():
        parameter = _parameter(name)
        there, tensor = _moved(parameter, found), one
        if (match := _OF_KIND.fullmatch(parameter)) and model:
            layer = layers[match[2]][int(match[1])]
            there = f"decoder.layers.{layer}.self_attention.{match[3]}"
            if match[3] == "k_layernorm.weight" and model.shares_kv(layer):
                continue
            if match[3] == "linear_qkv.weight":
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


def _layers(kind: str, numbers: Collection[int], model: ModelShape, where: Path) -> Mapping[int, int]:
    """The layers of a kind by the numbers that Bridge has for them: their own if all layers are stored by themselves,
    else the place among those of the kind."""
    own = [layer for layer in range(model.num_layers) if model.in_window(layer) == (kind == "sliding")]
    if {*numbers} == {*own}:
        return {layer: layer for layer in own}
    if {*numbers} != {*range(len(own))}:
        what = f"{len(numbers)} layers are {kind}, and config.json says {len(own)}"
        raise DamagedCheckpoint(what, where=where, do="Is config.json this model's?")
    return dict(enumerate(own))


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

"""Text models of which Megatron-Bridge has tensors in other places, under other names or with more rows than a plan."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from precisionctl.checkpoints.base import WITH_REFERENCE
from precisionctl.checkpoints.chunks import cut_into_runs
from precisionctl.checkpoints.torch_files.dcp_tensors import LogicalTensor, TensorPart
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import kind_and_parameter
from precisionctl.sizes import listed

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
_NORMS_BESIDE_EXPERTS = {
    _BESIDE_EXPERTS: "mlp.shared_experts.linear_fc1.layer_norm_",
    "mlp.post_shared_expert_layernorm": "mlp.shared_experts.linear_fc2.post_layernorm.",
    "pre_mlp_layernorm": "mlp.pre_moe_layernorm.",
    "post_ffn_layernorm": "mlp.post_layernorm.",
}
"""In layers of Gemma 4 with experts, which have the first of these: norms, and what a plan has for them."""
_NORMS = {
    "post_self_attn_layernorm": "self_attention.linear_proj.post_layernorm.",
    "post_mlp_layernorm": "mlp.linear_fc2.post_layernorm.",
}
"""The same in all its layers."""
_LAYER = re.compile(r"(decoder\.layers\.\d{1,9}\.)(.+)\.weight")
_ATTENTION = re.compile(r"decoder\.layers\.(\d{1,9})\.self_attention(?:_(sliding|global))?\.(.+)")
_BY_KIND = ".self_attention_sliding.", ".self_attention_global."
_OF_GEMMA_4 = (*_BY_KIND, ".post_self_attn_layernorm.", f".{_BESIDE_EXPERTS}.")
_SIGNS = (*_OF_GEMMA_4, "lightning_indexers.", "per_layer_")
"""Parts of names, one of which a model has that is otherwise in a plan."""


def as_in_plans(
    found: Mapping[str, LogicalTensor], described: Callable[[], ModelShape | None], where: Path
) -> dict[str, LogicalTensor]:
    """Logical tensors, an optimizer's among them, as a plan has them. `described` is the model of config.json, if there
    is one.

    In `torch_dist`, Bridge counts Gemma 4's layers with a window and those without apart, as the two have attention of
    other sizes. It has rows of keys and values in all of them: values that are copies of keys, and both in layers that
    read those of others, with a norm of their own. Nothing computes with these, Bridge neither; so they are left out,
    by config.json, which `check_unused` compares.

    Raises UnknownArchitecture without a config.json that says which layers have a window, DamagedCheckpoint where it
    says of another number of layers, and where two tensors have one name.
    """
    parts = {part for name in found for part in _SIGNS if part in name}
    if not parts:
        return dict(found)
    model = None if parts.isdisjoint(_OF_GEMMA_4) else described()
    if model and not model.global_attention:  # of another family, which has such names too
        model = None
    if model is None and not parts.isdisjoint(_BY_KIND):
        what = "Megatron-Bridge counts kinds of layers apart, as of a Gemma 4, and no config.json of one says which"
        raise UnknownArchitecture(f"{what} layers have a window", where=where, do=WITH_REFERENCE)

    layers = _layers(found, model, where) if model else {}
    named: dict[str, LogicalTensor] = {}
    for name, one in found.items():
        _, parameter = kind_and_parameter(name)
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


def check_unused(model: ModelShape, said: Mapping[str, object], where: Path) -> None:
    """Raise DamagedCheckpoint if config.json, of which `model` is, says otherwise than the run which keys and values
    are not computed with: these are left out, and no tensor tells them. Values that are keys are no copies of them in a
    run that has trained, for only what computes is trained."""
    configured = {
        "num_kv_shared_layers": model.num_kv_shared_layers,
        "attention_k_eq_v": model.global_keys_are_values,
    }
    for key, by_config in configured.items():
        if key in said and said[key] != by_config:
            what = f"{key} of config.json is {shown(by_config)}, and the run had {shown(said[key])}"
            raise DamagedCheckpoint(what, where=where, do="Is config.json this model's?")


def unused_notes(model: ModelShape, said: Mapping[str, object]) -> Iterator[str]:
    """What config.json alone says is not computed with, where the run does not say it."""
    layers = range(model.num_layers)
    shared = [layer for layer in layers if model.shares_kv(layer)]
    keys = [layer for layer in layers if not model.in_window(layer) and layer not in shared]
    if shared and "num_kv_shared_layers" not in said:
        yield _left_out("Keys and values", shared, "num_kv_shared_layers", "they read those of others")
    if keys and model.global_keys_are_values and "attention_k_eq_v" not in said:
        yield _left_out("Values", keys, "attention_k_eq_v", "they are the keys")


def _left_out(what: str, layers: Iterable[int], key: str, why: str) -> str:
    numbers = listed(map(str, layers))
    return f"{what} of layers {numbers} are left out: {key} of config.json says that {why}, and no tensor tells."


def _layers(names: Iterable[str], model: ModelShape, where: Path) -> dict[str, Mapping[int, int]]:
    """By kind, the layers by the numbers that Bridge has for them: their own if all layers are stored by themselves,
    else the place among those of the kind."""
    numbers: dict[str, set[int]] = {}
    for match in (_ATTENTION.fullmatch(kind_and_parameter(name)[1]) for name in names):
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
    if layer := _LAYER.fullmatch(parameter):
        beside_experts = f"{layer[1]}{_BESIDE_EXPERTS}.weight" in names
        norms = _NORMS | (_NORMS_BESIDE_EXPERTS if beside_experts else {})
        if layer[2] in norms:
            return f"{layer[1]}{norms[layer[2]]}weight"
    return parameter


def _without_unused(qkv: LogicalTensor, model: ModelShape, layer: int) -> LogicalTensor:
    """Queries, keys and values, `[q_0 .. q_{r-1}, k, v]` of each query group, without what a layer does not compute
    with. As it is where it has other rows."""
    attention = model.of_layer(layer)
    groups, channels = attention.num_query_groups, attention.kv_channels
    all_heads = attention.num_attention_heads // groups + 2
    unused = 2 if model.shares_kv(layer) else 1 if attention.keys_are_values else 0
    if not unused or qkv.spec.rows != groups * all_heads * channels:
        return qkv
    kept = (all_heads - unused) * channels
    runs = [(group * kept, group * all_heads * channels, kept) for group in range(groups)]
    spec = replace(qkv.spec, shape=(groups * kept, *qkv.spec.shape[1:]))
    cut = cut_into_runs([part.box for part in qkv.parts], runs)
    parts = ((qkv.parts[number], box, skipped) for number, box, skipped in cut)
    return LogicalTensor(spec, tuple(TensorPart(box, part.piece, part.start + skipped) for part, box, skipped in parts))

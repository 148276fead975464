"""The order of parameters in Megatron's models, which is that of a distributed optimizer's buffers.

It is the order in which `__init__` registers modules (megatron/core/transformer: attention.py,
multi_latent_attention.py, transformer_layer.py, mlp.py, moe/moe_layer.py, multi_token_prediction.py;
megatron/core/ssm/gated_delta_net.py, gated_delta_net/kda.py;
megatron/core/models/gpt/gpt_model.py). It depends on the layer spec: Transformer Engine fuses norms into linears, and
experts are a grouped linear or a list of MLPs.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_NORM, _INNER = ("layer_norm_weight", "layer_norm_bias"), ("weight", "bias")
_GATED = ("norm.weight", "W_down.weight", "W_up.weight")
_EXPERT = re.compile(r"mlp\.experts\.linear_fc([12])\.(weight|bias)(\d{1,9})")


@dataclass(frozen=True)
class Modules:
    """The kind of modules: norms `fused` into linears (Transformer Engine) or not, experts as one `grouped` linear or
    as a list of MLPs."""

    fused: bool
    grouped: bool


EVERY_KIND = tuple(Modules(fused, grouped) for fused in (True, False) for grouped in (True, False))


def _of(module: str, *leaves: str) -> list[str]:
    return [f"{module}.{leaf}" for leaf in leaves]


def _fused_norm(modules: Modules, of: str) -> list[str]:
    return _of(of, *_NORM) if modules.fused else []


def _own_norm(modules: Modules, of: str) -> list[str]:
    return [] if modules.fused else _of(of, *_NORM)


def _layer(modules: Modules) -> dict[str, int]:
    """Position of each name in a layer; all experts have one position."""
    attention = "self_attention"
    names = [
        *_of("input_layernorm", *_INNER, *_GATED),
        *_own_norm(modules, f"{attention}.linear_qkv"),
        *_own_norm(modules, f"{attention}.in_proj"),
        *_of(attention, "dt_bias", "A_log"),
        *_fused_norm(modules, f"{attention}.in_proj"),
        *_of(f"{attention}.in_proj", *_INNER),
        *_of(f"{attention}.conv1d", *_INNER),
        *_of(f"{attention}.out_norm", *_INNER),
        *_of(f"{attention}.out_proj", *_INNER, "post_layernorm.weight"),
        *(f"{attention}.{module}.weight" for module in ("f_a_proj", "f_b_proj", "beta_proj", "g_a_proj", "g_b_proj")),
        f"{attention}.core_attention.softmax_offset",
        *_of(f"{attention}.linear_proj", *_INNER, "post_layernorm.weight"),
        *_fused_norm(modules, f"{attention}.linear_qkv"),
        *_of(f"{attention}.linear_qkv", *_INNER),
        *_of(f"{attention}.linear_q_proj", *_INNER),
        *_of(f"{attention}.linear_q_down_proj", *_INNER),
        *_fused_norm(modules, f"{attention}.linear_q_up_proj"),
        *_of(f"{attention}.linear_q_up_proj", *_INNER),
        *_of(f"{attention}.linear_kv_down_proj", *_INNER),
        *_fused_norm(modules, f"{attention}.linear_kv_up_proj"),
        *_of(f"{attention}.linear_kv_up_proj", *_INNER),
        *_of(f"{attention}.q_layernorm", *_INNER),
        *_of(f"{attention}.k_layernorm", *_INNER),
        f"{attention}.linear_gate.weight",
        *_of(f"{attention}.kv_layernorm", *_INNER),
        *_own_norm(modules, f"{attention}.linear_q_up_proj"),
        *_own_norm(modules, f"{attention}.linear_kv_up_proj"),
        *_of("pre_mlp_layernorm", *_INNER, *_GATED),
        *_own_norm(modules, "mlp.linear_fc1"),
        *_fused_norm(modules, "mlp.linear_fc1"),
        *_of("mlp.linear_fc1", *_INNER),
        *_of("mlp.linear_fc2", *_INNER, "post_layernorm.weight"),
        *_of("mlp.router", *_INNER, "scale", "per_expert_scale"),
        _EXPERTS,
        "mlp.shared_experts.gate_weight",
        *_of("mlp.shared_experts.linear_fc1", *_NORM, *_INNER),
        *_of("mlp.shared_experts.linear_fc2", *_INNER, "post_layernorm.weight"),
        *_of("mlp", "pre_moe_layernorm.weight", "post_moe_layernorm.weight", "post_layernorm.weight"),
    ]
    return {name: rank for rank, name in enumerate(names)}


_EXPERTS = "mlp.experts"
_AROUND = {
    name: rank
    for rank, name in enumerate(
        ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight"]
        + [*_of("embedding.layernorm", *_INNER), "decoder.layers."]
        + _of("decoder.final_layernorm", *_INNER)
        + ["mtp.layers.", "output_layer.weight", "output_layer.bias"]
    )
}
_MTP = {
    name: rank
    for rank, name in enumerate(
        [*_of("enorm", *_INNER), *_of("hnorm", *_INNER), *_of("eh_proj", *_INNER), "transformer_layer."]
        + [*_of("final_layernorm", *_INNER), "output_layer.weight"]
    )
}
_NUMBERED = re.compile(r"(decoder\.layers\.|mtp\.layers\.)(\d{1,9})\.(?:(transformer_layer\.)?)(.+)")

SortKey = tuple[int, ...]


def ordered(names: Iterable[str], modules: Modules) -> list[str] | None:
    """Parameter names sorted in the order of the modules; None if a name is not known here."""
    ranks = _layer(modules)
    places: dict[str, SortKey] = {}
    for name in names:
        place = _sort_key(name, ranks, modules)
        if place is None:
            return None
        places[name] = place
    return sorted(places, key=places.__getitem__)


def _sort_key(name: str, ranks: dict[str, int], modules: Modules) -> SortKey | None:
    match = _NUMBERED.fullmatch(name)
    if not match:
        return (_AROUND[name],) if name in _AROUND else None
    before: SortKey = (_AROUND[match[1]], int(match[2]))
    if match[1].startswith("mtp"):
        inner = _MTP.get(match[3] or match[4])
        if inner is None or not match[3]:
            return None if inner is None else (*before, inner)
        before = (*before, inner)
    if expert := _EXPERT.fullmatch(match[4]):
        linear, leaf, number = int(expert[1]), _INNER.index(expert[2]), int(expert[3])
        inside = (linear, number, leaf) if modules.grouped else (number, linear, leaf)
        return (*before, ranks[_EXPERTS], *inside)
    return (*before, ranks[match[4]]) if match[4] in ranks else None

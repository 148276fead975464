"""Jamba: a Mamba-1 mixer or attention without positions, then an MLP or experts. Each of the two blocks is a layer of
Megatron's hybrid stack, as in Granite 4.

Traps: layers with attention, and those with experts, are each every so many, from one on; with one expert all layers
have MLPs; an expert is as wide as an MLP; the weights of the chosen experts are their scores among all. Megatron-Core
has no Mamba-1 mixers.
"""

from collections.abc import Sequence

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.mamba_keys import mamba_1_sizes
from precisionctl.architectures.shared.mamba_rows import FINAL_NORM, MAMBA_1_OR_ATTENTION
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape

_NAMES = {
    "{layer}": "{hf_layer}",
    ".mixer.": ".mamba.",
    ".mlp.gate.": ".feed_forward.router.",
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
}
_ATTENTION = ("attn_layer_period", "attn_layer_offset")
_EXPERTS = ("expert_layer_period", "expert_layer_offset")
_LAYERS = {
    "num_hidden_layers": 32,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "intermediate_size": 14336,
    "num_experts_per_tok": 2,
}
"""What its class takes for keys that are not there."""
_NUMBER = keys.Key("moe.num_experts", "num_experts", 16, synonym="num_local_experts")


def _read_layers(config: keys.Config) -> keys.Fields:
    config = {**_LAYERS, **config}
    number = _NUMBER.read(config)
    experts = keys.size({"num_experts": number["moe.num_experts"]}, "num_experts")
    ffn = keys.size(config, "intermediate_size")
    attention = _every_so_many(config, _ATTENTION)
    with_experts = _every_so_many(config, _EXPERTS) if experts > 1 else [False] * len(attention)
    pattern = "".join(
        ("*" if attends else "M") + ("E" if chooses else "-")
        for attends, chooses in zip(attention, with_experts, strict=True)
    )
    fields = {
        "num_layers": len(pattern),
        "mamba.pattern": pattern,
        "rope_layers": (False,) * len(pattern),
        "ffn_hidden_size": ffn,
    }
    if "E" not in pattern:
        return fields
    return fields | {
        "moe.num_experts": experts,
        "moe.topk": keys.size(config, "num_experts_per_tok"),
        "moe.ffn_hidden_size": ffn,
        "moe.layer_freq": tuple(block == "E" for block in pattern),
        "moe.pre_softmax": True,
    }


def _every_so_many(config: keys.Config, said_by: tuple[str, str]) -> list[bool]:
    """Whether each layer is one of every so many, from one on, by the keys that say how many and which."""
    (period, offset), number = said_by, keys.layers(config)
    every, first = keys.size(config, period), keys.count(config, offset)
    if first >= every:
        raise DamagedCheckpoint(f"{offset} is {first}, and {period} {every}", do="It must be smaller.")
    return [layer % every == first for layer in range(number)]


def _write_layers(model: ModelShape) -> keys.Config:
    pattern = model.mamba.pattern if model.mamba else ""
    return {
        "num_hidden_layers": len(pattern) // 2,
        **dict(zip(_ATTENTION, _period_and_offset([block == "*" for block in pattern[::2]]), strict=True)),
        **dict(zip(_EXPERTS, _period_and_offset([block == "E" for block in pattern[1::2]]), strict=True)),
        "intermediate_size": model.ffn_hidden_size,
        "num_experts": model.moe.num_experts if model.moe else 1,
        "num_experts_per_tok": model.moe.topk if model.moe else 1,
    }


def _period_and_offset(has: Sequence[bool]) -> tuple[int, int]:
    """The inverse of `_every_so_many`; of layers that are not every so many, those of others."""
    listed = [layer for layer, each in enumerate(has) if each] or [len(has)]
    period = listed[1] - listed[0] if len(listed) > 1 else len(has) + 1
    return period, listed[0] % period


ARCHITECTURE = Architecture(
    model_types={"jamba": "JambaForCausalLM"},
    rows=llama.model_rows(
        *renamed((*MAMBA_1_OR_ATTENTION, *llama.MLP_NORM, *llama.MLP, *moe.MOE_NORM, *moe.ROUTER), _NAMES),
        *(each.renamed(_NAMES) for each in moe.EXPERTS),
        ending=renamed(FINAL_NORM, {"model.norm.": "model.final_layernorm."}),
    ),
    config=(
        keys.Rule((*_LAYERS, *_NUMBER.keys), _read_layers, _write_layers),
        keys.Key("hidden_size", "hidden_size", 4096),
        keys.Key("max_position_embeddings", "max_position_embeddings", 262144),
        keys.VOCABULARY,
        keys.heads(num_attention_heads=32, num_key_value_heads=8),
        mamba_1_sizes("mamba_expand", "mamba_dt_rank", 4096),
        keys.always("mamba.bcdt_layernorm", True),
        keys.Key("mamba.state_dim", "mamba_d_state", 16),
        keys.only("mamba_d_conv", 4),
        keys.only("mamba_conv_bias", True),
        keys.only("mamba_proj_bias", False),
        keys.SILU,
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        keys.tied(False),
    ),
    names_by="this project",
)

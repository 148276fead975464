"""The sizes of a model, as `ModelShape.described` gives them, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from precisionctl.sizes import counted


def size_rows(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows on the sizes of a model, or one row that says that its family has no table."""
    if "no_table" in model:
        return [("table", f"none: {model['no_table']}; converts from Hugging Face to Hugging Face only")]
    padding = model["padded_vocab_size"] - model["vocab_size"]
    per_layer = model["per_layer_embed_dim"]
    beside = f", an embedding of {per_layer} for each layer" if per_layer else ""
    wide = ", twice as wide where keys are shared" if model["use_double_wide_mlp"] else ""
    sizes = model["heterogeneous"]
    if sizes:
        wide = f" at most{_in_layers(list(map(bool, sizes['ffn_hidden_size'])))}"
    mlp = f", MLP {model['ffn_hidden_size']}{wide}"
    if model["mamba"] and not {*"-P"} & {*model["mamba"]["pattern"]}:
        mlp = ""
    experts = []
    if moe := model["moe"]:
        shared = f", and shared ones of {moe['shared_ffn_hidden_size']}" if moe["shared_ffn_hidden_size"] else ""
        each = f"{moe['topk']} of {moe['num_experts']} for a token, MLP {moe['ffn_hidden_size']}"
        experts.append(("experts", f"{each}{shared}, in {counted(sum(moe['layer_freq']), 'layer')}"))
    ahead = f"; {model['mtp_num_layers']} more of multi-token prediction" if model["mtp_num_layers"] else ""
    attending = _attending(model)
    return [
        ("layers", f"{model['num_layers']} of hidden size {model['hidden_size']}{mlp}{beside}{ahead}"),
        *([("attention", _attention(model) + _in_layers(attending))] if any(attending) else []),
        *_recurrent_rows(model),
        *experts,
        ("vocabulary", f"{model['vocab_size']}" + (f" and {counted(padding, 'row')} of padding" if padding else "")),
    ]


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
    if model["heterogeneous"]:
        groups += " at most"
    shared = model["num_kv_shared_layers"]
    shares = f"; the last {counted(shared, 'layer')} read keys and values of earlier ones" if shared else ""
    return f"{counted(model['num_attention_heads'], 'head')}, {groups}{without_window}{shares}"


def _attending(model: Mapping[str, Any]) -> list[bool]:
    """Which layers have attention."""
    if mamba := model["mamba"]:
        return [kind in "*P" for kind in mamba["pattern"]]
    if sizes := model["heterogeneous"]:
        return list(map(bool, sizes["num_query_groups"]))
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

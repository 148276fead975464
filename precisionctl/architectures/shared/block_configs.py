"""Llama-Nemotron's `block_configs`, which say what each layer has: a key of its config.json, which Megatron-Core's
heterogeneous layers read, too (megatron/core/transformer/heterogeneous/heterogeneous_config.py)."""

from collections.abc import Mapping
from typing import Any

from precisionctl.architectures.config_keys import as_list, as_object
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, at, shown
from precisionctl.model.model_parts import Heterogeneous, check_size, real
from precisionctl.model.model_shape import ModelShape

KEY = "block_configs"
_MULTIPLE = 256
"""Channels of an MLP are rounded up to one of these."""


def read_blocks(said: object, heads: int, hidden: int) -> Heterogeneous:
    """Sizes by layer, of a model with so many heads and hidden states so wide. Raises DamagedCheckpoint for what is no
    list of blocks, and UnknownArchitecture for blocks that are something else than attention and an MLP."""
    groups, channels = [], []
    for layer, block in enumerate(as_list(said, KEY, "blocks")):
        with at(f"{KEY}[{layer}]"):
            parts = as_object(block, "a block")
            names = ("attention", "mlp" if "mlp" in parts and "ffn" not in parts else "ffn")  # the first is Megatron's
            if strange := {key: value for key, value in parts.items() if value and key not in names}:
                raise UnknownArchitecture(f"no layer known here has {shown(strange)} beside {' and '.join(names)}")
            attention, mlp = (as_object(parts.get(name), name) for name in names)
            groups.append(_groups(attention, heads))
            channels.append(_channels(mlp, hidden))
    if not any(groups) or not any(channels):
        raise DamagedCheckpoint(f"no layer of {KEY} has {'an MLP' if any(groups) else 'attention'}")
    return Heterogeneous(tuple(groups), tuple(channels))


def write_blocks(model: ModelShape) -> list[dict[str, Any]]:
    """The same as published files say it. Raises UnknownArchitecture for sizes that these cannot say."""
    if model.heterogeneous is None:
        what = f"a model whose layers are alike is none that {KEY} describe"
        raise UnknownArchitecture(what, do="Choose another family.")
    blocks = []
    for layer in range(model.num_layers):
        groups, channels = model.heterogeneous.of_layer(layer)
        if channels % _MULTIPLE:
            raise UnknownArchitecture(f"an MLP of {channels} channels, which are no multiple of {_MULTIPLE}")
        by_group = {"n_heads_in_group": model.num_attention_heads // groups if groups else None}
        by_width = {"ffn_mult": round(3 * channels / (2 * model.hidden_size), 6) if channels else None}
        blocks.append(
            {
                "attention": {"no_op": not groups, "replace_with_linear": False, **by_group},
                "ffn": {"no_op": not channels, "replace_with_linear": False, **by_width},
            }
        )
    return blocks


def _groups(said: Mapping[str, Any], heads: int) -> int:
    """Groups of queries in a layer's attention; 0 if it has none. Megatron-Core also takes their number."""
    if _is_left_out(said, "attention", "n_heads_in_group", "num_query_groups"):
        return 0
    if said.get("num_query_groups") is not None:
        check_size(said["num_query_groups"], "num_query_groups")
        return int(said["num_query_groups"])
    check_size(said.get("n_heads_in_group"), "n_heads_in_group")
    if heads % said["n_heads_in_group"]:
        raise DamagedCheckpoint(f"{heads} heads in groups of {said['n_heads_in_group']}")
    return int(heads // said["n_heads_in_group"])


def _channels(said: Mapping[str, Any], hidden: int) -> int:
    """Channels of a layer's MLP; 0 if it has none. Megatron-Core also takes their number."""
    if _is_left_out(said, "an MLP", "ffn_mult", "ffn_hidden_size"):
        return 0
    if said.get("ffn_hidden_size") is not None:
        check_size(said["ffn_hidden_size"], "ffn_hidden_size")
        return int(said["ffn_hidden_size"])
    channels = int(2 * real(said.get("ffn_mult"), "ffn_mult") * hidden / 3)
    if not channels:
        raise DamagedCheckpoint(f"ffn_mult is {shown(said['ffn_mult'])}: an MLP without channels")
    return -(-channels // _MULTIPLE) * _MULTIPLE


def _is_left_out(said: Mapping[str, Any], what: str, *sizes: str) -> bool:
    """Whether a layer does without. Raises UnknownArchitecture for one that is otherwise than its sizes say."""
    strange = {key: value for key, value in said.items() if value and key not in (*sizes, "no_op")}
    if strange:
        named = ", ".join(f"{key}={shown(value)}" for key, value in strange.items())
        raise UnknownArchitecture(f"no layer known here has {what} with {named}")
    if said.get("no_op", False) not in (False, True):
        raise DamagedCheckpoint(f"no_op is {shown(said['no_op'])}, not true or false")
    return bool(said.get("no_op"))

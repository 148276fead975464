"""Megatron's arguments of heterogeneous layers: a config.json as a word, of which Megatron-Core reads `block_configs`
alone, and Megatron-LM checks the rest against other arguments."""

import json
from collections.abc import Mapping
from typing import Any

from precisionctl.architectures.shared.block_configs import KEY, read_blocks, write_blocks
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import Heterogeneous
from precisionctl.model.model_shape import ModelShape
from precisionctl.untrusted.safe_json import parse_json

ENCODED = "heterogeneous_layers_config_encoded_json"
_PATH, _SWITCH = "heterogeneous_layers_config_path", "heterogeneous_block_specs"
OF_LAYERS = (_PATH, ENCODED)
_SIZES = {"num_hidden_layers": "num_layers", **{name: name for name in ("hidden_size", "num_attention_heads")}}
"""Of the word, and the arguments that must say the same (validate_model_config_args_from_heterogeneous_config,
megatron/training/arguments.py)."""
HETEROGENEOUS = (*OF_LAYERS, _SWITCH)


def heterogeneous_args(model: ModelShape) -> dict[str, Any]:
    """Arguments since megatron-core 0.12. The path is not opened where the word is said, but must be there."""
    if model.heterogeneous is None:
        return {}
    said = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "hidden_act": "silu",
        "tie_word_embeddings": model.tied_embeddings,
        "rope_theta": model.rotary_base,
        "rope_scaling": dict(model.rope_scaling or {}) or None,
        KEY: write_blocks(model),
    }
    return {ENCODED: json.dumps(said), _PATH: "config.json", "use_rotary_position_embeddings": True}


def read_heterogeneous(args: Mapping[str, Any], heads: int, hidden: int) -> Heterogeneous | None:
    """The inverse; None where layers are alike. Raises UnknownArchitecture where layers are said to differ, and a file
    elsewhere says how."""
    said = args.get(ENCODED)
    if not said:
        name = next((name for name in HETEROGENEOUS if args.get(name)), None)
        if name is not None:
            raise UnknownArchitecture(f"Megatron's {name}={shown(args[name])}, and no {ENCODED}")
        return None
    if not isinstance(said, str):
        raise DamagedCheckpoint(f"{ENCODED} is {shown(said)}, not a word")
    config = parse_json(said.encode(), ENCODED)
    for key, name in _SIZES.items():
        if config.get(key, args.get(name)) != args.get(name):
            what = f"{key} of {ENCODED} is {shown(config[key])}, and {name} is {shown(args.get(name))}"
            raise DamagedCheckpoint(what, do="Megatron-LM refuses them, too.")
    return read_blocks(config.get(KEY), heads, hidden)

"""config.json's keys of layers with experts that several families have in common."""

from precisionctl.architectures import config_keys as keys
from precisionctl.model.model_shape import ModelShape


def _read(config: keys.Config) -> keys.Fields:
    return {**keys.EVERY_LAYER_SPARSE.read(config), "moe.ffn_hidden_size": config.get("intermediate_size")}


def _write(model: ModelShape) -> keys.Config:
    return {"intermediate_size": model.moe.ffn_hidden_size} if model.moe else {}


INTERMEDIATE_SIZE_OF_EXPERTS = keys.Rule((), _read, _write)
"""Experts in every layer, of which `intermediate_size` is one's (SIZES read it as an MLP's)."""

JITTER = keys.Rule(("router_jitter_noise",))
"""Noise by which a router's input is multiplied in training alone: `resume` has none."""

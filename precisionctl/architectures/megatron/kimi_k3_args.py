"""Fields of Megatron-Bridge's KimiK3ModelProvider (models/kimi/kimi_k3_provider.py) that describe Kimi K3, both ways,
as arguments. No Megatron-LM knows them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from precisionctl.architectures.config_layers import numbered_layers
from precisionctl.architectures.megatron.args_said import needed
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import GatedDeltaNet
from precisionctl.sizes import counted

BLOCK_SIZE = "kimi_attn_res_block_size"
"""Which is there in Kimi K3 alone."""
_KDA_LAYERS = "kimi_kda_layers"
_SIZES = {  # argument, field of GatedDeltaNet
    "kimi_linear_num_heads": "num_key_heads",
    "kimi_linear_head_dim": "key_head_dim",
    "kimi_linear_conv_kernel_size": "conv_kernel_dim",
    "kimi_kda_gate_lower_bound": "kda_lower_bound",
}
KIMI_K3 = (BLOCK_SIZE, _KDA_LAYERS, *_SIZES)


def kimi_k3_args(model: ModelShape) -> dict[str, Any]:
    """The arguments; none for another model. Numbers of layers count from 1."""
    gdn = model.gdn
    if model.attn_res_block_size is None or gdn is None:
        return {}
    of_kda = [layer + 1 for layer in range(model.num_layers) if gdn.layers[layer]]
    sizes = {argument: getattr(gdn, field) for argument, field in _SIZES.items()}
    return {BLOCK_SIZE: model.attn_res_block_size, _KDA_LAYERS: of_kda, **sizes}


def as_kimi_k3(model: ModelShape, args: Mapping[str, Any]) -> ModelShape:
    """The inverse: what the other arguments describe, with what these do; SiTU, gates and the norm of latents are its
    layers' own. Raises UnknownArchitecture without latent attention, or experts without latents."""
    if args.get(BLOCK_SIZE) is None:
        return model
    if model.mla is None or (model.moe is not None and model.moe.latent_size is None):
        raise UnknownArchitecture("no Kimi K3 known here lacks latents of attention or experts")
    sizes = {field: needed(args, name) for name, field in _SIZES.items()}
    of_kda = numbered_layers(args.get(_KDA_LAYERS), _KDA_LAYERS)
    if not of_kda <= {*range(1, model.num_layers + 1)}:
        what = f"{_KDA_LAYERS} is {shown(sorted(of_kda))}, of {counted(model.num_layers, 'layer')}"
        raise DamagedCheckpoint(what)
    gdn = GatedDeltaNet(
        layers=tuple(layer + 1 in of_kda for layer in range(model.num_layers)),
        num_value_heads=sizes["num_key_heads"],
        value_head_dim=sizes["key_head_dim"],
        kda=True,
        kda_lora_rank=sizes["key_head_dim"],
        kda_full_gate=True,
        **sizes,
    )
    return replace(
        model,
        gdn=gdn,
        moe=model.moe and replace(model.moe, latent_norm=True),
        attn_res_block_size=args[BLOCK_SIZE],
        activation="situ",
        linear_gate="sigmoid per element",
        rope_scaling=None,
    )

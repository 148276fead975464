"""Megatron's arguments that describe gated delta nets and Mamba-2 mixers, both ways; and fields of Megatron-Bridge's
KimiK3ModelProvider (models/kimi/kimi_k3_provider.py), as arguments, which no Megatron-LM knows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from precisionctl.architectures.config_layers import numbered_layers
from precisionctl.architectures.megatron.args_said import all_but_every, needed, one_of
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import GatedDeltaNet, Mamba
from precisionctl.sizes import counted

HYBRID_PATTERN = "hybrid_layer_pattern"
_DELTA_NET = {  # argument, field of GatedDeltaNet
    "linear_num_key_heads": "num_key_heads",
    "linear_num_value_heads": "num_value_heads",
    "linear_key_head_dim": "key_head_dim",
    "linear_value_head_dim": "value_head_dim",
    "linear_conv_kernel_dim": "conv_kernel_dim",
}
DELTA_NET_NAMES = ("gated_delta_net", "gdn")
"""Of `experimental_attention_variant`: the second since 2026, which still takes the first."""
KDA_NAME = "kda"
"""The same of Kimi delta attention, on Megatron-LM's dev branch."""
_MAMBA = {  # argument, field of Mamba
    "hybrid_override_pattern": "pattern",
    "mamba_num_heads": "num_heads",
    "mamba_head_dim": "head_dim",
    "mamba_num_groups": "num_groups",
    "mamba_state_dim": "state_dim",
}
KIMI_K3_BLOCK_SIZE = "kimi_attn_res_block_size"
"""Which is there in Kimi K3 alone."""
_KDA_LAYERS = "kimi_kda_layers"
_OF_KIMI_K3 = {  # argument, field of GatedDeltaNet
    "kimi_linear_num_heads": "num_key_heads",
    "kimi_linear_head_dim": "key_head_dim",
    "kimi_linear_conv_kernel_size": "conv_kernel_dim",
    "kimi_kda_gate_lower_bound": "kda_lower_bound",
}
KIMI_K3 = (KIMI_K3_BLOCK_SIZE, _KDA_LAYERS, *_OF_KIMI_K3)


def delta_net_args(model: ModelShape) -> dict[str, Any]:
    """Arguments since megatron-core 0.15; older versions do not know the words. None says that gates alone are
    projected in one step."""
    gdn = model.gdn
    if gdn is None or gdn.kda_full_gate:
        return {}
    kda = {
        "kda_f_lora_rank": gdn.kda_lora_rank,
        "kda_gate_lora_rank": gdn.kda_lora_rank,
        "kda_safe_gate": gdn.kda_lower_bound is not None,
        "kda_lower_bound": gdn.kda_lower_bound,
    }
    return {
        "experimental_attention_variant": KDA_NAME if gdn.kda else DELTA_NET_NAMES[0],
        **{argument: getattr(gdn, field) for argument, field in _DELTA_NET.items()},
        **(kda if gdn.kda else {}),
        "linear_attention_freq": [int(each) for each in gdn.layers],
    }


def read_delta_net(args: Mapping[str, Any]) -> GatedDeltaNet | None:
    """The inverse: `N` gives attention to every N-th layer, a list has 1 for a delta net. None where there are none."""
    variant = args.get("experimental_attention_variant")
    if variant not in (*DELTA_NET_NAMES, KDA_NAME):
        return None
    fields = {field: needed(args, argument) for argument, field in _DELTA_NET.items()}
    if variant == KDA_NAME:
        rank = args.get("kda_f_lora_rank")
        one_of(args, "kda_gate_lora_rank", (rank,), None)
        bound = needed(args, "kda_lower_bound") if args.get("kda_safe_gate") else None
        fields |= {"kda": True, "kda_lora_rank": rank, "kda_lower_bound": bound}
    return GatedDeltaNet(all_but_every(needed(args, "linear_attention_freq"), args["num_layers"]), **fields)


def kimi_k3_args(model: ModelShape) -> dict[str, Any]:
    """Those of Kimi K3; none for another model. Numbers of layers count from 1."""
    gdn = model.gdn
    if model.attn_res_block_size is None or gdn is None:
        return {}
    of_kda = [layer + 1 for layer in range(model.num_layers) if gdn.layers[layer]]
    sizes = {argument: getattr(gdn, field) for argument, field in _OF_KIMI_K3.items()}
    return {KIMI_K3_BLOCK_SIZE: model.attn_res_block_size, _KDA_LAYERS: of_kda, **sizes}


def as_kimi_k3(model: ModelShape, args: Mapping[str, Any]) -> ModelShape:
    """The inverse: what the other arguments describe, with what these do; SiTU, gates and the norm of latents are its
    layers' own. Raises UnknownArchitecture without latent attention, or experts without latents."""
    if args.get(KIMI_K3_BLOCK_SIZE) is None:
        return model
    if model.mla is None or (model.moe is not None and model.moe.latent_size is None):
        raise UnknownArchitecture("no Kimi K3 known here lacks latents of attention or experts")
    sizes = {field: needed(args, name) for name, field in _OF_KIMI_K3.items()}
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
        attn_res_block_size=args[KIMI_K3_BLOCK_SIZE],
        activation="situ",
        linear_gate="sigmoid per element",
        rope_scaling=None,
    )


def mamba_args(model: ModelShape) -> dict[str, Any]:
    """Arguments of layers of one block each, some of them Mamba-2 mixers."""
    if model.mamba is None:
        return {}
    prediction = {"mtp_hybrid_override_pattern": model.mamba.mtp_pattern} if model.mtp_num_layers else {}
    sizes = {name: getattr(model.mamba, field) for name, field in _MAMBA.items()}
    return {"is_hybrid_model": True, **sizes, **prediction}


def read_mamba(args: Mapping[str, Any]) -> Mamba | None:
    """The inverse; None where there are none."""
    pattern = _hybrid_pattern(args)[0]
    if not (args.get("is_hybrid_model") or pattern):
        return None
    said = {"mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_state_dim": 128} | dict(args)
    said["hybrid_override_pattern"] = pattern
    if said.get("mamba_num_heads") is None:
        said["mamba_num_heads"] = 2 * args["hidden_size"] // said["mamba_head_dim"]
    return Mamba(**{field: said[name] for name, field in _MAMBA.items()})


def read_hybrid_mtp(args: Mapping[str, Any]) -> int:
    """How many prediction layers are stored of a model whose layers are one block each: none, or one, by which a run
    may have predicted several tokens (`mtp_use_repeated_layer`). Raises UnknownArchitecture for others."""
    _, behind = _hybrid_pattern(args)
    kinds: list[Any] = behind or [args.get("mtp_hybrid_override_pattern")]
    depth = len(behind) or args.get("mtp_num_layers") or 0
    if not depth:
        return 0
    if {*kinds} != {Mamba.mtp_pattern} or (depth != 1 and not args.get("mtp_use_repeated_layer")):
        said = f"mtp_num_layers={shown(depth)}, mtp_hybrid_override_pattern={shown(kinds[0])}"
        if behind:
            said = f"{HYBRID_PATTERN}={shown(args.get(HYBRID_PATTERN))}"
        what = f"no family known here has the prediction layers of Megatron's {said}"
        raise UnknownArchitecture(what, do=f"Known is one of {Mamba.mtp_pattern}, also repeated.")
    return 1


def _hybrid_pattern(args: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """A letter for each layer, and those of each prediction layer. Under its name since 2026, which Megatron heeds
    before the older one, there is a `|` where a pipeline stage begins, and prediction layers stand behind a `/` each
    (megatron/core/models/hybrid/hybrid_layer_allocation.py)."""
    said = args.get(HYBRID_PATTERN) or args.get("hybrid_override_pattern")
    if not isinstance(said, str):
        return said, []
    layers, *prediction = said.split("/")
    return layers.replace("|", ""), [each for each in prediction if each]

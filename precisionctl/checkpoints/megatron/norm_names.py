"""Names of layer norms: with Transformer Engine, which fuses a norm into the linear that follows, and without."""

import re
from collections.abc import Iterable, Mapping

from precisionctl.checkpoints.megatron.keys import PARAMETER_STATE

_LAYER_OF = re.compile(r"(decoder\.layers\.\d+\.|mtp\.layers\.\d+\.(?:transformer_layer|mtp_model_layer)\.)(.+)")
# In layers with this weight, rename this prefix (written without Transformer Engine) to that (written with it)
_WITHOUT_TE = (
    ("self_attention.linear_qkv.weight", "input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("self_attention.in_proj.weight", "input_layernorm.", "self_attention.in_proj.layer_norm_"),
    ("mlp.router.weight", "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("mlp.linear_fc1.weight", "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.linear_kv_down_proj.weight", "self_attention.linear_qkv.layer_norm_", "input_layernorm."),
)
_LATENTS_WITHOUT_TE = (
    (
        "self_attention.linear_q_up_proj.weight",
        "self_attention.q_layernorm.",
        "self_attention.linear_q_up_proj.layer_norm_",
    ),
    (
        "self_attention.linear_kv_up_proj.weight",
        "self_attention.kv_layernorm.",
        "self_attention.linear_kv_up_proj.layer_norm_",
    ),
)


def is_indexed(names: Iterable[str]) -> bool:
    """Whether these are names of a model with indexers, or of DeepSeek-V4."""
    parts = (".core_attention.indexer.", ".core_attention.attn_sink")
    return any(part in name for name in names for part in parts)


def te_names(names: Mapping[str, object], indexed: bool) -> dict[str, str]:
    """Layer norms of a run without Transformer Engine: the name they are stored under -> the name with Transformer
    Engine.

    Transformer Engine fuses a norm into the linear that follows, so it is named after that linear. Megatron's local
    specs store some norms under the fused name, too, but not the same ones: it depends on whether a layer has experts
    or multi-latent attention. A norm that two modules read stays a tensor of its own: the one before attention where
    the MLP has none, or where a gate (Laguna), beta_proj (Kimi delta attention) or a low-rank residual (Gemma 3n) reads
    it too; both in Kimi K3; norms of latents in an `indexed` model, whose indexers read them too, and in DeepSeek-V4.
    """
    renamed = {}
    moved = _WITHOUT_TE if indexed else (*_WITHOUT_TE, *_LATENTS_WITHOUT_TE)
    for name in names:
        if "norm" not in name:  # as all names that move have
            continue
        state = PARAMETER_STATE.fullmatch(name)
        layer = _LAYER_OF.fullmatch(state[2] if state else name)
        if layer is None:
            continue
        for having, old, new in moved:
            if layer[2].startswith(old) and layer[1] + having in names and _fuses_norms(layer[1], names):
                before = name.removesuffix(layer[1] + layer[2])
                renamed[name] = before + layer[1] + new + layer[2].removeprefix(old)
    return renamed


def _fuses_norms(layer: str, names: Mapping[str, object]) -> bool:
    if f"{layer}self_attention_res_proj.weight" in names:
        return False
    before_mlp = any(f"{layer}{norm}weight" in names for norm in ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."))
    return before_mlp and not any(f"{layer}{module}.weight" in names for module in _ALSO_READ_IT)


_ALSO_READ_IT = ("self_attention.linear_gate", "self_attention.beta_proj", "laurel.linear_left")

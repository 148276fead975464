"""Sarvam 105B: DeepSeek-V3 without latents of queries, groups of experts and layers of prediction.

Traps: published files have other words than transformers for the numbers of experts and for YaRN (`deepseek_yarn`), and
say in `head_dim` how many numbers vLLM caches for a token, which its class passes over.
"""

from collections.abc import Mapping

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import KEYS, rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows
from precisionctl.architectures.tables.sarvam_moe import COMMON
from precisionctl.model.model_shape import ModelShape

_ROPE = rope()
_YARN = "deepseek_yarn"


def _read_rope(config: keys.Config) -> keys.Fields:
    scaling = config.get("rope_scaling")
    if isinstance(scaling, Mapping) and _YARN in (scaling.get("type"), scaling.get("rope_type")):
        config = {**config, "rope_scaling": {**scaling, "rope_type": "yarn"}}
    return _ROPE.read(config)


def _write_rope(model: ModelShape) -> keys.Config:
    written = dict(_ROPE.write(model))
    scaling = written.get("rope_scaling", {})
    if scaling.get("rope_type") != "yarn":
        return written
    return {**written, "rope_scaling": {"type": _YARN} | {k: v for k, v in scaling.items() if k != "rope_type"}}


def _write_heads(model: ModelShape) -> keys.Config:
    """As vLLM caches them, and as attention multiplies them."""
    if model.mla is None:
        return {}
    turned = model.mla.qk_pos_emb_head_dim
    return {"head_dim": model.mla.kv_lora_rank + turned, "q_head_dim": model.mla.qk_head_dim + turned}


ARCHITECTURE = Architecture(
    model_types={"sarvam_mla": "SarvamMLAForCausalLM"},
    behind={"gate": "experts"},
    rows=deepseek_rows.decoder(deepseek_rows.ATTENTION),
    config=(
        *deepseek_keys.latent_attention(None),
        keys.Rule(("head_dim", "q_head_dim"), write=_write_heads),
        keys.only("rope_interleave", True),
        keys.only("moe_layer_freq", 1),
        *COMMON,
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        keys.Rule(KEYS, _read_rope, _write_rope),
        keys.tied(False),
    ),
)

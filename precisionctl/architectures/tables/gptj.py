"""GPT-J.

Traps: attention and MLP read the same norm and are added together; rotary channels are neighbouring pairs; the head
has a bias.
"""

from precisionctl.architectures.config_keys import Always, Config, Fields, Rule, size, tied
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.shared.llama_rows import (
    EMBEDDING,
    FINAL_LAYER_NORM,
    OUTPUT,
    OUTPUT_BIAS,
    PROJ,
    QKV_LINEAR,
    SEPARATE_LAYER_NORM,
    UNGATED_MLP,
)
from precisionctl.architectures.tables.gpt2 import SIZES
from precisionctl.model.model_shape import ModelShape


def _read_rotary(config: Config) -> Fields:
    head = size(config, "n_embd") // size(config, "n_head")
    turned = head if config.get("rotary_dim", 64) is None else size({"rotary_dim": 64} | dict(config), "rotary_dim")
    return {"rotary_percent": turned / max(1, head), "rotary_interleaved": True}


def _write_rotary(model: ModelShape) -> Config:
    return {"rotary_dim": model.rotary_size}


ARCHITECTURE = Architecture(
    model_types={"gptj": "GPTJForCausalLM"},
    rows=(
        *renamed(
            (*EMBEDDING, *SEPARATE_LAYER_NORM, *QKV_LINEAR, *PROJ, *UNGATED_MLP, *FINAL_LAYER_NORM),
            {
                "model.embed_tokens": "transformer.wte",
                "model.layers.": "transformer.h.",
                ".input_layernorm.": ".ln_1.",
                ".self_attn.o_proj.": ".attn.out_proj.",
                ".self_attn.": ".attn.",
                ".mlp.up_proj.": ".mlp.fc_in.",
                ".mlp.down_proj.": ".mlp.fc_out.",
                "model.norm.": "transformer.ln_f.",
            },
        ),
        *OUTPUT,
        *OUTPUT_BIAS,
    ),
    config=(
        *SIZES,
        Rule(("rotary_dim",), _read_rotary, _write_rotary),
        Always("mlp_bias", True),
        Always("output_bias", True),
        Always("parallel_residual", True),
        Always("shared_layernorm", True),
        tied(False),
    ),
    aliases=(),
    derived=(
        "transformer.h.{layer}.attn.bias",
        "transformer.h.{layer}.attn.masked_bias",
        "transformer.h.{layer}.attn.embed_positions",
    ),
    names_by="this project",
)

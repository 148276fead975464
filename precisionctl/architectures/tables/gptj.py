"""GPT-J.

Traps: attention and MLP read the same norm and are added together; rotary channels are neighbouring pairs; the head
has a bias.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.tables.gpt2 import SIZES


def _read_rotary(config: keys.Config) -> keys.Fields:
    head = keys.size(config, "n_embd") // keys.size(config, "n_head")
    turned = head if config.get("rotary_dim", 64) is None else keys.size(config, "rotary_dim", absent=64)
    return {"rotary_percent": turned / max(1, head), "rotary_interleaved": True}


ARCHITECTURE = Architecture(
    model_types={"gptj": "GPTJForCausalLM"},
    rows=(
        *renamed(
            (
                *llama.EMBEDDING,
                *llama.SEPARATE_LAYER_NORM,
                *llama.QKV_LINEAR,
                *llama.PROJ,
                *llama.UNGATED_MLP,
                *llama.FINAL_LAYER_NORM,
            ),
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
        *llama.OUTPUT,
        *llama.OUTPUT_BIAS,
    ),
    config=(
        *SIZES,
        keys.Rule(("rotary_dim",), _read_rotary, lambda model: {"rotary_dim": model.rotary_size}),
        keys.always("mlp_bias", True),
        keys.always("output_bias", True),
        keys.always("parallel_residual", True),
        keys.always("shared_layernorm", True),
        keys.tied(False),
    ),
    aliases=(),
    derived=(
        "transformer.h.{layer}.attn.bias",
        "transformer.h.{layer}.attn.masked_bias",
        "transformer.h.{layer}.attn.embed_positions",
    ),
    names_by="this project",
)

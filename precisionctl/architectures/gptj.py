"""GPT-J: from Hugging Face to Hugging Face alone.

Traps: attention and MLP read the same norm and are added together; rotary channels are neighbouring pairs; the head
has a bias.
"""

from precisionctl.architectures.config_keys import Always, Config, Fields, Rule, size, tied
from precisionctl.architectures.gpt2 import SIZES
from precisionctl.architectures.param_map import Architecture, Row
from precisionctl.architectures.rearrange import QKV
from precisionctl.model_shape import ModelShape
from precisionctl.param import COLUMNS, ROWS


def _read_rotary(config: Config, where: object) -> Fields:
    head = size(config, "n_embd", where) // size(config, "n_head", where)
    turned = (
        head if config.get("rotary_dim", 64) is None else size({"rotary_dim": 64} | dict(config), "rotary_dim", where)
    )
    return {"rotary_percent": turned / max(1, head), "rotary_interleaved": True}


def _write_rotary(model: ModelShape) -> Config:
    return {"rotary_dim": model.rotary_size}


ARCHITECTURE = Architecture(
    model_types={"gptj": "GPTJForCausalLM"},
    rows=(
        Row("transformer.wte.weight", "embedding.word_embeddings.weight", ("vocab_size", "hidden_size"), parallel=ROWS),
        Row(
            "transformer.h.{layer}.ln_1.weight",
            "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight",
            ("hidden_size",),
        ),
        Row(
            "transformer.h.{layer}.ln_1.bias",
            "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_bias",
            ("hidden_size",),
        ),
        Row(
            (
                "transformer.h.{layer}.attn.q_proj.weight",
                "transformer.h.{layer}.attn.k_proj.weight",
                "transformer.h.{layer}.attn.v_proj.weight",
            ),
            "decoder.layers.{layer}.self_attention.linear_qkv.weight",
            ("qkv_size", "hidden_size"),
            QKV,
            ROWS,
            gemm=True,
        ),
        Row(
            "transformer.h.{layer}.attn.out_proj.weight",
            "decoder.layers.{layer}.self_attention.linear_proj.weight",
            ("hidden_size", "projection_size"),
            parallel=COLUMNS,
            gemm=True,
        ),
        Row(
            "transformer.h.{layer}.mlp.fc_in.weight",
            "decoder.layers.{layer}.mlp.linear_fc1.weight",
            ("fc1_size", "hidden_size"),
            parallel=ROWS,
            gemm=True,
        ),
        Row(
            "transformer.h.{layer}.mlp.fc_in.bias",
            "decoder.layers.{layer}.mlp.linear_fc1.bias",
            ("fc1_size",),
            parallel=ROWS,
        ),
        Row(
            "transformer.h.{layer}.mlp.fc_out.weight",
            "decoder.layers.{layer}.mlp.linear_fc2.weight",
            ("hidden_size", "ffn_hidden_size"),
            parallel=COLUMNS,
            gemm=True,
        ),
        Row(
            "transformer.h.{layer}.mlp.fc_out.bias",
            "decoder.layers.{layer}.mlp.linear_fc2.bias",
            ("hidden_size",),
        ),
        Row("transformer.ln_f.weight", "decoder.final_layernorm.weight", ("hidden_size",)),
        Row("transformer.ln_f.bias", "decoder.final_layernorm.bias", ("hidden_size",)),
        Row("lm_head.weight", "output_layer.weight", ("vocab_size", "hidden_size"), parallel=ROWS),
        Row("lm_head.bias", "output_layer.bias", ("vocab_size",), parallel=ROWS),
    ),
    config=(
        *SIZES,
        Rule(("rotary_dim",), _read_rotary, _write_rotary),
        Always("mlp_bias", True),
        Always("output_bias", True),
        Always("parallel_residual", True),
        tied(False),
    ),
    derived=(
        "transformer.h.{layer}.attn.bias",
        "transformer.h.{layer}.attn.masked_bias",
        "transformer.h.{layer}.attn.embed_positions",
    ),
    refused="a parallel residual",
)

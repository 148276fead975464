"""GPT-J.

Traps: attention and MLP read the same norm and are added together; rotary channels are neighbouring pairs; the head
has a bias.
"""

from precisionctl.architectures.config_keys import Always, Config, Fields, Rule, size, tied
from precisionctl.architectures.head_rearrangements import QKV
from precisionctl.architectures.param_map import Architecture, Row, renamed
from precisionctl.architectures.rearrangements import GAMMA
from precisionctl.architectures.shared.llama_rows import EMBEDDING, OUTPUT, OUTPUT_BIAS, PROJ_BIAS, QKV_BIASES
from precisionctl.architectures.tables.gpt2 import SIZES
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
        *renamed(EMBEDDING, {"model.embed_tokens": "transformer.wte"}),
        Row(
            "transformer.h.{layer}.ln_1.weight",
            "decoder.layers.{layer}.input_layernorm.weight",
            ("hidden_size",),
            GAMMA,
        ),
        Row(
            "transformer.h.{layer}.ln_1.bias",
            "decoder.layers.{layer}.input_layernorm.bias",
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
            (
                "transformer.h.{layer}.attn.q_proj.bias",
                "transformer.h.{layer}.attn.k_proj.bias",
                "transformer.h.{layer}.attn.v_proj.bias",
            ),
            "decoder.layers.{layer}.self_attention.linear_qkv.bias",
            ("qkv_size",),
            QKV,
            ROWS,
            present=QKV_BIASES,
        ),
        Row(
            "transformer.h.{layer}.attn.out_proj.weight",
            "decoder.layers.{layer}.self_attention.linear_proj.weight",
            ("hidden_size", "projection_size"),
            parallel=COLUMNS,
            gemm=True,
        ),
        Row(
            "transformer.h.{layer}.attn.out_proj.bias",
            "decoder.layers.{layer}.self_attention.linear_proj.bias",
            ("hidden_size",),
            present=PROJ_BIAS,
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
        Row("transformer.ln_f.weight", "decoder.final_layernorm.weight", ("hidden_size",), GAMMA),
        Row("transformer.ln_f.bias", "decoder.final_layernorm.bias", ("hidden_size",)),
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
    derived=(
        "transformer.h.{layer}.attn.bias",
        "transformer.h.{layer}.attn.masked_bias",
        "transformer.h.{layer}.attn.embed_positions",
    ),
    names_by="this project",
)

"""Rows of families with norms after attention and MLP, before these are added: Gemma 2 and 3 have them beside the norms
before a block, OLMo 2 and others instead of these."""

from precisionctl.architectures.param_map import Row, renamed
from precisionctl.architectures.rearrangements import GAMMA
from precisionctl.architectures.shared import llama_rows as llama

POST_ATTENTION_NORM = (
    Row(
        "model.layers.{layer}.post_attention_layernorm.weight",
        "decoder.layers.{layer}.self_attention.linear_proj.post_layernorm.weight",
        ("hidden_size",),
        GAMMA,
    ),
)

POST_MLP_NORM = (
    Row(
        "model.layers.{layer}.post_feedforward_layernorm.weight",
        "decoder.layers.{layer}.mlp.linear_fc2.post_layernorm.weight",
        ("hidden_size",),
        GAMMA,
        layers="dense",
    ),
)

PRE_MLP_NORM = renamed(llama.MLP_NORM, {"post_attention": "pre_feedforward"})

AFTER_ATTENTION = (*POST_ATTENTION_NORM, *PRE_MLP_NORM, *llama.MLP, *POST_MLP_NORM)

ROWS = llama.model_rows(*llama.ATTENTION_NORM, *llama.ATTENTION, *AFTER_ATTENTION)

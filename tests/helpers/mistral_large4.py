"""Mistral Large 4's text model by itself: transformers has its layers, and a class for the wrapper alone."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, MistralLarge4TextConfig, MistralLarge4TextModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.mistral_large4.modeling_mistral_large4 import MistralLarge4PreTrainedModel


class MistralLarge4ForCausalLM(MistralLarge4PreTrainedModel, GenerationMixin):
    """The text model, and what the wrapper's class makes of its hidden states."""

    config_class = MistralLarge4TextConfig

    def __init__(self, config: MistralLarge4TextConfig) -> None:
        super().__init__(config)
        self.model = MistralLarge4TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **rest: Any) -> CausalLMOutputWithPast:
        cap = self.config.final_logit_softcapping
        out = self.model(input_ids, **rest)
        logits = torch.tanh(self.lm_head(out.last_hidden_state) / cap) * cap
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


register_checkpoint_conversion_mapping(
    MistralLarge4ForCausalLM.__name__,
    [  # what transformers' table has for the wrapper alone, and not for its text model
        WeightRenaming(r"^model\.tok_embeddings\.", "model.embed_tokens."),
        WeightRenaming(r"^model\.lerope\.alpha", "model.rotary_emb.alpha"),
        WeightRenaming(r"\.wo\.", ".o_proj."),
        WeightRenaming(r"\.(feed_forward|shared_experts)\.w1\.", r".\1.gate_proj."),
        WeightRenaming(r"\.(feed_forward|shared_experts)\.w2\.", r".\1.down_proj."),
        WeightRenaming(r"\.(feed_forward|shared_experts)\.w3\.", r".\1.up_proj."),
    ],
)

"""Mistral Large 4's text model by itself: transformers has its layers, and a class for the wrapper alone."""

import torch
from text_alone import WithHead
from torch import Tensor
from transformers import GenerationMixin, MistralLarge4TextConfig, MistralLarge4TextModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.mistral_large4.modeling_mistral_large4 import MistralLarge4PreTrainedModel


class MistralLarge4ForCausalLM(WithHead, MistralLarge4PreTrainedModel, GenerationMixin):
    config_class = MistralLarge4TextConfig
    text_model = MistralLarge4TextModel

    def logits(self, hidden: Tensor) -> Tensor:
        cap = self.config.final_logit_softcapping
        return torch.tanh(self.lm_head(hidden) / cap) * cap


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

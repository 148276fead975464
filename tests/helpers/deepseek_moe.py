"""DeepSeekMoE: transformers has its layers, as those of DeepSeek-OCR 2's text model, and no class of it."""

from typing import Any

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekOcr2TextConfig,
    DeepseekOcr2TextModel,
    GenerationMixin,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2TextPreTrainedModel


class DeepseekConfig(DeepseekOcr2TextConfig):
    """Which layers have experts is said by DeepSeek's own key, as in published files."""

    model_type = "deepseek"

    def __init__(self, first_k_dense_replace: int = 0, num_hidden_layers: int = 30, **rest: Any) -> None:
        if rest.get("mlp_layer_types") is None:
            dense = min(first_k_dense_replace, num_hidden_layers)
            rest["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (num_hidden_layers - dense)
        super().__init__(num_hidden_layers=num_hidden_layers, **rest)
        self.first_k_dense_replace = first_k_dense_replace


class DeepseekForCausalLM(DeepseekOcr2TextPreTrainedModel, GenerationMixin):
    """The text model, and what the wrapper's class makes of its hidden states."""

    config_class = DeepseekConfig

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        self.model = DeepseekOcr2TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **rest: Any) -> CausalLMOutputWithPast:
        out = self.model(input_ids, **rest)
        logits = self.lm_head(out.last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


register_checkpoint_conversion_mapping("deepseek", get_checkpoint_conversion_mapping("deepseek_v2"))
AutoConfig.register("deepseek", DeepseekConfig)
AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM)

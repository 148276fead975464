"""DeepSeekMoE: transformers has its layers, as those of DeepSeek-OCR 2's text model, and no class of it."""

from typing import Any

from text_alone import WithHead
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekOcr2TextConfig,
    DeepseekOcr2TextModel,
    GenerationMixin,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
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


class DeepseekForCausalLM(WithHead, DeepseekOcr2TextPreTrainedModel, GenerationMixin):
    config_class = DeepseekConfig
    text_model = DeepseekOcr2TextModel


register_checkpoint_conversion_mapping("deepseek", get_checkpoint_conversion_mapping("deepseek_v2"))
AutoConfig.register("deepseek", DeepseekConfig)
AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM)

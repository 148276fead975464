"""The text model of Step 3.7, which is Step 3.5, by itself: transformers has its layers, and a class for the wrapper
alone. Names in files are those that transformers has for the wrapper's text model."""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.conversion_mapping import (
    WeightRenaming,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """The text model, and what the wrapper's class makes of its hidden states."""

    config_class = Step3p7TextConfig

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.model.embed_tokens.padding_idx = None  # whose gradient it would leave out
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **rest: Any) -> CausalLMOutputWithPast:
        logits = self.lm_head(self.model(input_ids, **rest).last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def _of_text(change: Any) -> bool:
    return not isinstance(change, WeightRenaming) or "^" not in str(change.source_patterns)


register_checkpoint_conversion_mapping(
    "step3p5", [change for change in get_checkpoint_conversion_mapping("step3p7") if _of_text(change)]
)

"""GLM-5.3's text model by itself: transformers has its layers, and a class for the wrapper alone."""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, Glm5NextTextConfig, Glm5NextTextModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel


class Glm5NextForCausalLM(Glm5NextPreTrainedModel, GenerationMixin):
    """The text model, and what the wrapper's class makes of its hidden states."""

    config_class = Glm5NextTextConfig

    def __init__(self, config: Glm5NextTextConfig) -> None:
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **rest: Any) -> CausalLMOutputWithPast:
        out = self.model(input_ids, **rest)
        logits = self.lm_head(out.last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

"""Text models that transformers has inside of wrappers alone, each with a head, as a class that loads and saves."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast


class WithHead(nn.Module):
    """A text model, and what the wrapper's class makes of its hidden states. A class has it before the PreTrainedModel
    of its family, and says what makes the `text_model` of a config."""

    text_model: Any
    config: Any
    post_init: Any
    loss_function: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.text_model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def logits(self, hidden: Tensor) -> Tensor:
        """Of hidden states `[rows, tokens, hidden]`."""
        return self.lm_head(hidden)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **rest: Any) -> CausalLMOutputWithPast:
        logits = self.logits(self.model(input_ids, **rest).last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

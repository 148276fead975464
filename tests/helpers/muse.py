"""The text models of Muse by themselves: transformers has their layers, and classes for the wrappers alone."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


def _alone(family: str, name: str) -> type[PreTrainedModel]:
    theirs = import_module(f"transformers.models.{family}.modeling_{family}")
    base: Any = getattr(theirs, f"{name}PreTrainedModel")

    class Alone(base, GenerationMixin):  # type: ignore[misc]
        """The text model, and what the wrapper's class makes of its hidden states."""

        config_class = CONFIG_MAPPING[f"{family}_text"]

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = getattr(theirs, f"{name}TextModel")(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **rest: Any) -> CausalLMOutputWithPast:
            cap = self.config.final_logit_softcapping
            out = self.model(input_ids, **rest)
            logits = self.lm_head(out.last_hidden_state) * self.config.output_multiplier
            logits = torch.tanh(logits / cap) * cap
            loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    Alone.__name__ = f"{name}ForCausalLM"
    return Alone


CLASSES = [
    _alone(family, name)
    for family, name in {"muse_glimmer": "MuseGlimmer", "muse_spark": "MuseSpark"}.items()
    if f"{family}_text" in CONFIG_MAPPING
]
"""Of those that the installed transformers has."""

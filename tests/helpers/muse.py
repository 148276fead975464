"""The text models of Muse by themselves: transformers has their layers, and classes for the wrappers alone."""

from importlib import import_module
from typing import Any

import torch
from text_alone import WithHead
from torch import Tensor
from transformers import CONFIG_MAPPING, GenerationMixin, PreTrainedModel


def _alone(family: str, name: str) -> type[PreTrainedModel]:
    theirs = import_module(f"transformers.models.{family}.modeling_{family}")
    base: Any = getattr(theirs, f"{name}PreTrainedModel")

    class Alone(WithHead, base, GenerationMixin):  # type: ignore[misc]
        config_class = CONFIG_MAPPING[f"{family}_text"]
        text_model = getattr(theirs, f"{name}TextModel")

        def logits(self, hidden: Tensor) -> Tensor:
            cap = self.config.final_logit_softcapping
            return torch.tanh(self.lm_head(hidden) * self.config.output_multiplier / cap) * cap

    Alone.__name__ = f"{name}ForCausalLM"
    return Alone


CLASSES = [
    _alone(family, name)
    for family, name in {"muse_glimmer": "MuseGlimmer", "muse_spark": "MuseSpark"}.items()
    if f"{family}_text" in CONFIG_MAPPING
]
"""Of those that the installed transformers has."""

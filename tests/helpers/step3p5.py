"""The text model of Step 3.7, which is Step 3.5, by itself: transformers has its layers, and a class for the wrapper
alone. Names in files are those that transformers has for the wrapper's text model."""

from typing import Any

from text_alone import WithHead
from transformers import GenerationMixin
from transformers.conversion_mapping import (
    WeightRenaming,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel


class _TextModel(Step3p7TextModel):
    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.embed_tokens.padding_idx = None  # whose gradient it would leave out


class Step3p5ForCausalLM(WithHead, Step3p7PreTrainedModel, GenerationMixin):
    config_class = Step3p7TextConfig
    text_model = _TextModel


def _of_text(change: Any) -> bool:
    return not isinstance(change, WeightRenaming) or "^" not in str(change.source_patterns)


register_checkpoint_conversion_mapping(
    "step3p5", [change for change in get_checkpoint_conversion_mapping("step3p7") if _of_text(change)]
)

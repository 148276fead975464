"""GLM-5.3's text model by itself: transformers has its layers, and a class for the wrapper alone."""

from text_alone import WithHead
from transformers import GenerationMixin, Glm5NextTextConfig, Glm5NextTextModel
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel


class Glm5NextForCausalLM(WithHead, Glm5NextPreTrainedModel, GenerationMixin):
    config_class = Glm5NextTextConfig
    text_model = Glm5NextTextModel

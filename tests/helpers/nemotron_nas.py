"""Llama-Nemotron as its public sources define it (NVIDIA's block_config.py and modeling_decilm.py), of transformers'
Llama: transformers has no class of it. A layer is Llama's, made of a config.json that says its sizes for all layers,
without the blocks that it is said to be without.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

OF_LAYERS = ("num_key_value_heads", "intermediate_size")
"""Which published code sets to null: `block_configs` say them by layer."""


def block(heads_in_group: int | None, ffn_mult: float | None) -> dict[str, Any]:
    """What config.json says of a layer; None for what it does not have."""
    return {
        "attention": {
            "no_op": heads_in_group is None,
            "replace_with_linear": False,
            "n_heads_in_group": heads_in_group,
        },
        "ffn": {"no_op": ffn_mult is None, "replace_with_linear": False, "ffn_mult": ffn_mult},
    }


class DeciLMConfig(PreTrainedConfig):
    """With the defaults of a Llama's."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: list[dict[str, Any]] | None = None, **given: Any) -> None:
        llama = LlamaConfig(**{**given, **dict.fromkeys(OF_LAYERS, 1)}).to_dict()
        del llama["model_type"]
        super().__init__(**{**llama, **dict.fromkeys(OF_LAYERS), "block_configs": block_configs or []})

    def of_layer(self, layer: int) -> LlamaConfig:
        """A Llama's, whose layers all have the sizes of this one."""
        attention, ffn = (self.block_configs[layer][kind] for kind in ("attention", "ffn"))
        heads = self.num_attention_heads // (attention["n_heads_in_group"] or 1)
        channels = int(2 * (ffn["ffn_mult"] or 1) * self.hidden_size / 3)
        if channels % 256:
            channels = channels + 256 - (channels % 256)
        said = {**self.to_dict(), **dict(zip(OF_LAYERS, (heads, channels), strict=True))}
        del said["model_type"], said["block_configs"]
        return LlamaConfig(**said, attn_implementation=self._attn_implementation)


class Nothing(nn.Module):
    """In the place of a norm and of the block behind it: what it gives adds nothing."""

    def forward(self, hidden_states: Tensor, **beside: Any) -> Tensor:
        return hidden_states * 0


class OfAttention(Nothing):
    def forward(self, hidden_states: Tensor, **beside: Any) -> tuple[Tensor, None]:
        return hidden_states * 0, None


class DeciLMForCausalLM(LlamaForCausalLM):
    config_class = DeciLMConfig

    def __init__(self, config: DeciLMConfig) -> None:
        super().__init__(config.of_layer(0))
        config._attn_implementation = self.config._attn_implementation
        self.config = self.model.config = config
        for number, block in enumerate(config.block_configs):
            layer = LlamaDecoderLayer(config.of_layer(number), number)
            if block["attention"]["no_op"]:
                layer.input_layernorm, layer.self_attn = Nothing(), OfAttention()
            if block["ffn"]["no_op"]:
                layer.post_attention_layernorm = layer.mlp = Nothing()
            ordered = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
            layer._modules = {name: layer._modules[name] for name in ordered}  # which Llama's has behind both
            self.model.layers[number] = layer
        self.post_init()


AutoConfig.register("nemotron-nas", DeciLMConfig)
AutoModelForCausalLM.register(DeciLMConfig, DeciLMForCausalLM)

"""Ling 2.0 as its public sources define it (inclusionAI's modeling_bailing_moe_v2.py, which Megatron-Bridge has, too),
slowly and in plain PyTorch: transformers has no class of it. Without layers of prediction.

Names of tensors are those of published files.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class BailingMoeV2Config(PreTrainedConfig):
    """With the defaults of published code."""

    model_type = "bailing_moe_v2"

    def __init__(
        self,
        vocab_size: int = 157184,
        hidden_size: int = 2048,
        intermediate_size: int = 5120,
        num_hidden_layers: int = 20,
        num_attention_heads: int = 16,
        num_key_value_heads: int = 4,
        hidden_act: str = "silu",
        use_qkv_bias: bool = False,
        use_bias: bool = False,
        rms_norm_eps: float = 1e-6,
        tie_word_embeddings: bool = False,
        initializer_range: float = 0.02,
        max_position_embeddings: int = 32768,
        rope_theta: float = 600000.0,
        num_experts: int = 256,
        num_shared_experts: int = 1,
        num_experts_per_tok: int = 8,
        n_group: int = 8,
        topk_group: int = 4,
        moe_intermediate_size: int = 512,
        first_k_dense_replace: int = 1,
        head_dim: int = 128,
        use_qk_norm: bool = True,
        num_nextn_predict_layers: int = 0,
        moe_router_enable_expert_bias: bool = True,
        routed_scaling_factor: float = 1.0,
        partial_rotary_factor: float = 1.0,
        **rest: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "rest", "__class__")}
        super().__init__(tie_word_embeddings=given.pop("tie_word_embeddings"), **rest)
        for name, value in given.items():
            setattr(self, name, value)


class Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), x.shape[-1:], eps=self.epsilon).to(x.dtype)


def turned(x: Tensor, size: int, base: float) -> Tensor:
    """`[tokens, heads, channels]` with the first `size` channels of each head turned, in two halves."""
    angles = torch.arange(len(x))[:, None] / base ** (torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None].to(x), angles.sin()[:, None].to(x)
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., size:]), -1)


class Attention(nn.Module):
    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__()
        self.config, size = config, config.head_dim
        self.heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        self.query_key_value = nn.Linear(config.hidden_size, sum(self.heads) * size, bias=config.use_qkv_bias)
        if config.use_qk_norm:
            self.query_layernorm, self.key_layernorm = (Norm(size, config.rms_norm_eps) for _ in range(2))
        self.dense = nn.Linear(config.num_attention_heads * size, config.hidden_size, bias=config.use_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Of one text, `[tokens, channels]`."""
        config = self.config
        q, k, v = self.query_key_value(x).unflatten(-1, (sum(self.heads), config.head_dim)).split(self.heads, 1)
        if config.use_qk_norm:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        part = int(config.head_dim * config.partial_rotary_factor)
        q, k = (turned(each, part, config.rope_theta) for each in (q, k))
        k, v = (each.repeat_interleave(self.heads[0] // self.heads[1], 1) for each in (k, v))
        scores = torch.einsum("qhc,khc->hqk", q, k) / config.head_dim**0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).float().softmax(-1).to(v.dtype)
        return self.dense(torch.einsum("hqk,khc->qhc", weights, v).flatten(1))


class MLP(nn.Module):
    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(size, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """The weight of each expert for each token, most of them 0."""
        config = self.config
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        groups = (scores + self.expert_bias).unflatten(-1, (config.n_group, -1))
        best = groups.topk(2, -1).values.sum(-1).topk(config.topk_group, -1).indices
        others = torch.ones(groups.shape[:-1], dtype=torch.bool).scatter(-1, best, False)
        chosen = groups.masked_fill(others[..., None], float("-inf")).flatten(-2).topk(config.num_experts_per_tok)
        weights = torch.zeros_like(scores).scatter(-1, chosen.indices, scores.gather(-1, chosen.indices))
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor


class SparseMLP(nn.Module):
    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__()
        size = config.moe_intermediate_size
        self.experts = nn.ModuleList(MLP(config.hidden_size, size) for _ in range(config.num_experts))
        self.gate = Gate(config)
        self.shared_experts = MLP(config.hidden_size, size * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).to(x.dtype)
        routed = sum(weights[:, [number]] * expert(x) for number, expert in enumerate(self.experts))
        return routed + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, config: BailingMoeV2Config, number: int) -> None:
        super().__init__()
        self.attention = Attention(config)
        sparse = number >= config.first_k_dense_replace
        self.mlp = SparseMLP(config) if sparse else MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class BailingMoeV2ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = BailingMoeV2Config
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding | Gate):
            module.weight.normal_(std=self.config.initializer_range)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **rest: Any) -> CausalLMOutputWithPast:
        logits = torch.stack([self.lm_head(self.model(text)) for text in input_ids])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


AutoConfig.register("bailing_moe_v2", BailingMoeV2Config)
AutoModelForCausalLM.register(BailingMoeV2Config, BailingMoeV2ForCausalLM)

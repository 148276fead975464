"""Kimi K3's text model as its public sources define it (arXiv 2607.24653; Megatron-Bridge's kimi_k3_layers.py and
kimi_k3_ops.py; vLLM's models/kimi_k3), slowly and in plain PyTorch: transformers has no class of it.

Names of tensors are those of published files, without the wrapper's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

PADDED = 128
"""A_log's numbers are so many, or a multiple."""


class KimiK3TextConfig(PreTrainedConfig):
    """With the defaults of published code, and the sizes of no model."""

    model_type = "kimi_k3_text"

    def __init__(
        self,
        vocab_size: int = 163840,
        hidden_size: int = 4096,
        intermediate_size: int = 11008,
        num_hidden_layers: int = 32,
        num_attention_heads: int = 32,
        num_key_value_heads: int | None = None,
        hidden_act: str = "silu",
        initializer_range: float = 0.02,
        rms_norm_eps: float = 1e-6,
        moe_intermediate_size: int | None = None,
        moe_renormalize: bool = True,
        moe_router_activation_func: str = "sigmoid",
        num_experts: int | None = None,
        num_experts_per_token: int | None = None,
        num_shared_experts: int = 0,
        routed_scaling_factor: float = 1.0,
        first_k_dense_replace: int = 0,
        moe_layer_freq: int = 1,
        use_grouped_topk: bool = True,
        num_expert_group: int = 1,
        topk_group: int = 1,
        topk_method: str = "noaux_tc",
        q_lora_rank: int | None = None,
        kv_lora_rank: int | None = None,
        qk_nope_head_dim: int | None = None,
        qk_rope_head_dim: int | None = None,
        v_head_dim: int | None = None,
        mla_use_nope: bool = False,
        num_nextn_predict_layers: int = 0,
        linear_attn_config: dict[str, Any] | None = None,
        attn_res_block_size: int | None = None,
        routed_expert_hidden_size: int | None = None,
        latent_moe_use_norm: bool = False,
        activation_situ_beta: float | None = None,
        activation_situ_linear_beta: float | None = None,
        mla_use_output_gate: bool = False,
        max_position_embeddings: int = 4096,
        tie_word_embeddings: bool = False,
        **rest: Any,
    ) -> None:
        said = {name: value for name, value in locals().items() if name not in ("self", "rest") and name[0] != "_"}
        super().__init__(tie_word_embeddings=tie_word_embeddings, **rest)
        for name, value in said.items():
            setattr(self, name, value)
        self.num_key_value_heads = num_key_value_heads or num_attention_heads


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + self.epsilon).sqrt()


def situ(gate: Tensor, up: Tensor, config: KimiK3TextConfig) -> Tensor:
    """SiTU-GLU (equation 12 of the report)."""
    beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
    return beta * (gate / beta).tanh() * gate.sigmoid() * linear_beta * (up / linear_beta).tanh()


class DenseMLP(nn.Module):
    def __init__(self, config: KimiK3TextConfig, inner: int) -> None:
        super().__init__()
        self.config = config
        self.gate_proj, self.up_proj = (linear(config.hidden_size, inner) for _ in range(2))
        self.down_proj = linear(inner, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.config))


class Expert(nn.Module):
    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        self.config = config
        latent, inner = config.routed_expert_hidden_size, config.moe_intermediate_size
        self.w1, self.w2, self.w3 = linear(latent, inner), linear(inner, latent), linear(latent, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(situ(self.w1(x), self.w3(x), self.config))


class Gate(nn.Module):
    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).sigmoid()
        wanted = scores + self.e_score_correction_bias
        groups, best = self.config.num_expert_group, self.config.topk_group
        if best < groups:
            by_group = wanted.view(len(x), groups, -1)
            chosen = by_group.topk(2).values.sum(-1).topk(best).indices
            kept = torch.zeros(len(x), groups).scatter(1, chosen, 1.0)[..., None]
            wanted = torch.where(kept > 0, by_group, -torch.inf).flatten(1)
        experts = wanted.topk(self.config.num_experts_per_token).indices
        weights = scores.gather(1, experts)
        return weights / weights.sum(-1, keepdim=True) * self.config.routed_scaling_factor, experts


class SparseMLP(nn.Module):
    """Equation 11 of the report."""

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        latent, hidden = config.routed_expert_hidden_size, config.hidden_size
        self.gate = Gate(config)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_experts))
        self.routed_expert_down_proj, self.routed_expert_up_proj = linear(hidden, latent), linear(latent, hidden)
        self.routed_expert_norm = Norm(latent, config.rms_norm_eps)
        self.shared_experts = DenseMLP(config, config.moe_intermediate_size * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens)
        read = self.routed_expert_down_proj(tokens)
        given = sum(
            (weights * (chosen == number)).sum(-1, keepdim=True) * expert(read)
            for number, expert in enumerate(self.experts)
        )
        return self.routed_expert_up_proj(self.routed_expert_norm(given)).view_as(x) + self.shared_experts(x)


class DeltaAttention(nn.Module):
    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        said, hidden = config.linear_attn_config, config.hidden_size
        self.heads, self.channels, self.bound = said["num_heads"], said["head_dim"], said["gate_lower_bound"]
        size = self.heads * self.channels
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (linear(hidden, size) for _ in range(4))
        taps = said["short_conv_kernel_size"]
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            nn.Conv1d(size, size, taps, groups=size, bias=False, padding=taps - 1) for _ in range(3)
        )
        self.f_a_proj, self.f_b_proj = linear(hidden, self.channels), linear(self.channels, size)
        self.b_proj = linear(hidden, self.heads)
        self.A_log = nn.Parameter(torch.empty(-(-self.heads // PADDED) * PADDED))
        self.dt_bias = nn.Parameter(torch.full((size,), -4.0))
        self.o_norm = Norm(self.channels, config.rms_norm_eps)
        self.o_proj = linear(size, hidden)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]

        def by_head(made: Tensor) -> Tensor:
            return made.unflatten(-1, (self.heads, self.channels))

        def mixed(projection: nn.Linear, convolution: nn.Conv1d) -> Tensor:
            return by_head(F.silu(convolution(projection(x).mT)[..., :length].mT))

        query, key, value = (
            mixed(getattr(self, f"{part}_proj"), getattr(self, f"{part}_conv1d")) for part in ("q", "k", "v")
        )
        query, key = (each / (each.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
        query = query * self.channels**-0.5
        rate = self.A_log[: self.heads].exp()[:, None]
        decay = (self.bound * (rate * by_head(self.f_b_proj(self.f_a_proj(x)) + self.dt_bias)).sigmoid()).exp()
        beta = self.b_proj(x).sigmoid()
        state, out = x.new_zeros(len(x), self.heads, self.channels, self.channels), []
        for token in range(length):  # equation 1 of arXiv 2510.26692
            state = decay[:, token, :, :, None] * state
            told = torch.einsum("bhkd,bhk->bhd", state, key[:, token])
            learned = beta[:, token, :, None] * (value[:, token] - told)
            state = state + torch.einsum("bhk,bhd->bhkd", key[:, token], learned)
            out.append(torch.einsum("bhkd,bhk->bhd", state, query[:, token]))
        given = self.o_norm(torch.stack(out, 1)) * by_head(self.g_proj(x)).sigmoid()
        return self.o_proj(given.flatten(2))


class LatentAttention(nn.Module):
    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        self.config, heads, hidden = config, config.num_attention_heads, config.hidden_size
        self.own, self.shared, self.values = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.q_a_proj = linear(hidden, config.q_lora_rank)
        self.q_a_layernorm = Norm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = linear(config.q_lora_rank, heads * (self.own + self.shared))
        self.kv_a_proj_with_mqa = linear(hidden, config.kv_lora_rank + self.shared)
        self.kv_a_layernorm = Norm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (self.own + self.values))
        self.g_proj, self.o_proj = linear(hidden, heads * self.values), linear(heads * self.values, hidden)

    def forward(self, x: Tensor) -> Tensor:
        heads, length = self.config.num_attention_heads, x.shape[1]
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (heads, -1))
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.config.kv_lora_rank, self.shared], -1)
        made = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1))
        own, value = made.split([self.own, self.values], -1)
        key = torch.cat([own, shared[:, :, None].expand(-1, -1, heads, -1)], -1)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * (self.own + self.shared) ** -0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        attended = torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2)
        return self.o_proj(attended * self.g_proj(x).sigmoid())


def mean(streams: list[Tensor], norm: Norm, query: nn.Linear) -> Tensor:
    """Equations 8 to 10 of the report."""
    scores = torch.cat([query(norm(stream)) for stream in streams], -1).softmax(-1)
    return sum(scores[..., number, None] * stream for number, stream in enumerate(streams))


class Layer(nn.Module):
    def __init__(self, config: KimiK3TextConfig, number: int) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        of_kda = number + 1 in config.linear_attn_config["kda_layers"]
        self.begins = number % config.attn_res_block_size == 0
        self.self_attn = DeltaAttention(config) if of_kda else LatentAttention(config)
        if number < config.first_k_dense_replace:
            self.mlp = DenseMLP(config, config.intermediate_size)
        else:
            self.block_sparse_moe = SparseMLP(config)
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden, epsilon), Norm(hidden, epsilon)
        self.self_attention_res_norm, self.self_attention_res_proj = Norm(hidden, epsilon), linear(hidden, 1)
        self.mlp_res_norm, self.mlp_res_proj = Norm(hidden, epsilon), linear(hidden, 1)

    def forward(self, stream: Tensor, aside: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        read = mean([*aside, stream], self.self_attention_res_norm, self.self_attention_res_proj)
        given = self.self_attn(self.input_layernorm(read))
        if self.begins:
            aside, stream = [*aside, stream], given
        else:
            stream = stream + given
        read = self.post_attention_layernorm(mean([*aside, stream], self.mlp_res_norm, self.mlp_res_proj))
        return stream + (self.mlp if hasattr(self, "mlp") else self.block_sparse_moe)(read), aside


class Body(nn.Module):
    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.output_attn_res_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.output_attn_res_proj = linear(config.hidden_size, 1)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        stream, aside = self.embed_tokens(tokens), []
        for layer in self.layers:
            stream, aside = layer(stream, aside)
        return self.norm(mean([*aside, stream], self.output_attn_res_norm, self.output_attn_res_proj))


class KimiK3TextForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = KimiK3TextConfig
    base_model_prefix = "model"

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | Gate):
            module.weight.normal_(std=self.config.initializer_range)
        if isinstance(module, DeltaAttention):
            module.A_log.zero_()
            module.A_log[: module.heads].uniform_(2, 16).log_()
        if isinstance(module, nn.Conv1d):
            module.weight.uniform_(-0.5, 0.5)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **rest: Any) -> CausalLMOutputWithPast:
        logits = self.lm_head(self.model(input_ids))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


AutoConfig.register("kimi_k3_text", KimiK3TextConfig)
AutoModelForCausalLM.register(KimiK3TextConfig, KimiK3TextForCausalLM)

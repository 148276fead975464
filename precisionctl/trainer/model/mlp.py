"""The MLP of a layer with Megatron-Core's parameter names: one for all tokens, or a mixture of experts.

Shape letters as in `gpt.py`.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_fields import Activation
from precisionctl.model.model_parts import MoE
from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, Norm, add_post_layernorm, column_linear, norm_of, post_norm_of
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.kernels import kernels_for
from precisionctl.trainer.model.norms import ScaledNorm
from precisionctl.trainer.model.routers import SCORES, RouterLosses, over_their_sum

SITU_GATE: float = 4.0
SITU_LINEAR: float = 25.0
"""What bounds the gate and the linear half of SiTU."""

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda values: F.relu(values).square(),
    "quick_gelu": lambda values: values * torch.sigmoid(1.702 * values),
    "situ": lambda values: SITU_GATE * torch.tanh(values / SITU_GATE) * torch.sigmoid(values),
}


class XIELU(nn.Module):
    """xIELU (arXiv 2411.13010) with its two parameters, and the two numbers that stand beside them in a checkpoint."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        full: Any = {"dtype": backend.dtype, "device": backend.device}
        self.alpha_p = nn.Parameter(torch.full((1,), 0.8, **full).expm1().log())
        self.alpha_n = nn.Parameter(torch.full((1,), 0.3, **full).expm1().log())
        self.beta = nn.Parameter(torch.full((1,), 0.5, **full), requires_grad=False)
        self.eps = nn.Parameter(torch.full((1,), -1e-6, **full), requires_grad=False)

    def forward(self, values: Tensor) -> Tensor:
        below = (torch.expm1(torch.minimum(values, self.eps)) - values) * (self.beta + F.softplus(self.alpha_n))
        return torch.where(values > 0, F.softplus(self.alpha_p) * values * values, below) + self.beta * values


def is_swiglu(model: ModelShape, layer: int) -> bool:
    """Whether the activation of a layer's MLP is SwiGLU and nothing besides."""
    plain = model.activation_clamp is None and not model.glu_offset and not model.swiglu_limit(layer)
    plain = plain and not model.sparsity(layer)
    return model.gated_linear_unit and model.activation == "silu" and plain


def gaussian_topk(gate: Tensor, sparsity: float) -> Tensor:
    """`relu(gate - (mean + std * Φ⁻¹(sparsity)))` of a gate `[T, F]`, mean and std over the channels of a token: about
    a share `sparsity` of the gate becomes 0 (Gemma 3n; modeling_gemma3n.py, _gaussian_topk)."""
    deviations = gate.new_full((), NormalDist().inv_cdf(sparsity))
    return F.relu(gate - (gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, correction=0) * deviations))


def activate(values: Tensor, model: ModelShape, layer: int) -> Tensor:
    """What is between the two linears of a layer's MLP. Rows of a gated linear_fc1: F of the gate, then F of the up
    projection."""
    function = ACTIVATIONS[model.activation]
    if not model.gated_linear_unit:
        return function(values)
    if is_swiglu(model, layer) and (kernels := kernels_for(values)):
        activated: Tensor = kernels.SwiGLU.apply(values)
        return activated
    gate, up = values.chunk(2, -1)
    if sparsity := model.sparsity(layer):
        gate = gaussian_topk(gate, sparsity)
    if model.activation == "situ":
        up = SITU_LINEAR * torch.tanh(up.float() / SITU_LINEAR)
        return (function(gate.float()) * up).to(values.dtype)
    if model.activation_clamp is not None:
        gate, up = gate.clamp(max=model.activation_clamp), up.clamp(-model.activation_clamp, model.activation_clamp)
    gate = function(gate)
    if limit := model.swiglu_limit(layer):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (up + model.glu_offset if model.glu_offset else up)


class MLP(nn.Module):
    """Two linears of `inner` channels between them. `norm` lives in the first; None where the input is normalised."""

    def __init__(
        self, name: str, model: ModelShape, backend: Backend, inner: int, norm: Norm | None, layer: int
    ) -> None:
        super().__init__()
        hidden, bias = model.hidden_size, model.add_bias_linear
        rows = 2 * inner if model.gated_linear_unit else inner
        self.linear_fc1 = column_linear(backend, f"{name}.linear_fc1", hidden, rows, bias, norm)
        self.activation_func: Callable[[Tensor], Tensor] = (
            XIELU(backend) if model.xielu else partial(activate, model=model, layer=layer)
        )
        self.linear_fc2 = backend.linear(f"{name}.linear_fc2", inner, hidden, bias, "row")
        self.factors = model.multipliers.mlp if model.multipliers else None

    def forward(self, hidden: Tensor) -> Tensor:
        """`[T, E]` to the same."""
        read: Tensor = self.linear_fc1(hidden)
        if self.factors:
            gate, up = read.chunk(2, -1)
            read = torch.cat([gate * self.factors[0], up], -1)
        out: Tensor = self.linear_fc2(self.activation_func(read))
        return out * self.factors[1] if self.factors else out


class MoELayer(nn.Module):
    """Each token goes through the experts that the router chooses for it; no token is dropped.

    `shared_experts` is what all tokens go through beside those; with norms of their own, both read what no norm has.
    Around experts of a latent size are two projections, which all tensor ranks have whole and compute of all tokens.
    `routers.py` says what keeps the loads even.
    """

    def __init__(self, name: str, model: ModelShape, moe: MoE, backend: Backend, layer: int) -> None:
        super().__init__()
        self.ranks, self.average = backend.world.tensor, moe.shared_average
        self.router = Router(model, moe, backend, model.is_hashed(layer))
        experts = Experts(f"{name}.experts", model, moe, backend, layer)
        self.experts = backend.world.sharded_experts(experts, backend.dtype)
        self.shared_experts = (
            SharedExperts(f"{name}.shared_experts", model, moe, backend, layer) if model.shared_experts else None
        )
        self.pre_moe_layernorm, self.post_moe_layernorm = (
            backend.norm(model.hidden_size, norm_of(model)) if moe.own_norms else nn.Identity() for _ in range(2)
        )
        self.fc1_latent_proj: nn.Module | None = None
        if moe.latent_size is not None:
            hidden, latent = model.hidden_size, moe.latent_size
            self.fc1_latent_proj = backend.linear(f"{name}.fc1_latent_proj", hidden, latent, False)
            self.fc2_latent_proj = backend.linear(f"{name}.fc2_latent_proj", latent, hidden, False)
            self.routed_expert_norm = backend.norm(latent, norm_of(model)) if moe.latent_norm else nn.Identity()
        self.pre_expert_layernorm: nn.Module = nn.Identity()
        self.post_expert_layernorm: nn.Module | None = None
        if moe.expert_norms:
            self.pre_expert_layernorm = backend.norm(model.expert_hidden_size, norm_of(model))
            self.post_expert_layernorm = ScaledNorm(model.expert_hidden_size, post_norm_of(model), backend)

    def forward(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """`[T, E]`, normalised but for norms of its own, to the same. `ids`, int64 `[T]`, are the tokens, for a router
        whose table chooses by them."""
        tokens = self.ranks.enter(hidden)
        weights, chosen = self.router(tokens, ids)
        if self.fc1_latent_proj is None:
            routed = self.experts(self.pre_moe_layernorm(tokens), weights, chosen, self.post_expert_layernorm)
            out: Tensor = self.post_moe_layernorm(self.ranks.leave(routed))
        else:
            latent = self.pre_expert_layernorm(self.ranks.copy(self.fc1_latent_proj(self.ranks.gather(hidden))))
            given = self.ranks.reduce(self.experts(latent, weights, chosen, self.post_expert_layernorm))
            out = self.ranks.scatter(self.fc2_latent_proj(self.routed_expert_norm(given)))
        if self.shared_experts is None:
            return out
        out = out + self.shared_experts(hidden)
        return out / 2 if self.average else out


class SharedExperts(MLP):
    """An MLP that all tokens go through, times a gate for each token where there is one (Qwen2-MoE)."""

    def __init__(self, name: str, model: ModelShape, moe: MoE, backend: Backend, layer: int) -> None:
        norm = norm_of(model) if moe.own_norms else None
        super().__init__(name, model, backend, moe.shared_ffn_hidden_size or 0, norm, layer)
        if norm:
            add_post_layernorm(self.linear_fc2, backend.norm(model.hidden_size, norm))
        weight = torch.empty(1, model.hidden_size, dtype=backend.dtype, device=backend.device)
        self.gate_weight = nn.Parameter(weight.normal_(std=0.02)) if moe.shared_expert_gate else None

    def forward(self, hidden: Tensor) -> Tensor:
        out = super().forward(hidden)
        return out if self.gate_weight is None else out * product(F.linear, hidden, self.gate_weight).sigmoid()


class Experts(nn.Module):
    """The MLPs of all experts, each for the tokens routed to it; under expert parallelism this rank's experts, for the
    tokens of all ranks. Each tensor rank has a shard of every expert, so the outputs are partial sums."""

    def __init__(self, name: str, model: ModelShape, moe: MoE, backend: Backend, layer: int) -> None:
        super().__init__()
        self.backend, self.model, self.number, self.layer = backend, model.of_experts, moe.num_experts, layer
        self.probs_on_input = moe.probs_on_input
        hidden, inner, bias = model.expert_hidden_size, moe.ffn_hidden_size, model.add_bias_linear
        self.linear_fc1 = backend.grouped_linear(
            f"{name}.linear_fc1", self.number, hidden, model.expert_fc1_size, bias, "column"
        )
        self.linear_fc2 = backend.grouped_linear(f"{name}.linear_fc2", self.number, inner, hidden, bias, "row")

    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Tokens `[T, E]` to the sums of their experts' outputs, each through the `norm`, if there is one, times
        `weights`, FP32 `[T, K]`; `chosen` `[T, K]`."""
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.number).tolist()
        numbers, recorder = order // chosen.shape[1], self.backend.recorder
        dispatch = self.backend.world.experts.token_dispatch(counts, tokens.device)
        with recorder.reordered(numbers, dispatch) if recorder else nullcontext():
            read = tokens[numbers]
            if self.probs_on_input:
                read = (read * weights.flatten()[order, None]).to(tokens.dtype)
            inner = self.linear_fc1(dispatch.dispatch(read), dispatch.counts)
            outputs = dispatch.combine(self.linear_fc2(activate(inner, self.model, self.layer), dispatch.counts))
            outputs = norm(outputs) if norm else outputs
        by_token: Tensor = outputs[order.argsort()].view(*chosen.shape, -1)
        if not self.probs_on_input:
            by_token = by_token * weights[..., None]
        return by_token.sum(1).to(tokens.dtype)


class Router(nn.Module):
    """Chooses each token's experts and their weights; in FP32, whatever the model's dtype. If it is `hashed`, a table
    says which experts each token of the vocabulary has."""

    def __init__(self, model: ModelShape, moe: MoE, backend: Backend, hashed: bool = False) -> None:
        super().__init__()
        self.moe = moe
        self.losses: RouterLosses | None = None
        """What it shows its choices to, if anything."""
        weight = torch.empty(moe.num_experts, model.hidden_size, dtype=backend.dtype, device=backend.device)
        zeros = torch.zeros(moe.num_experts, device=backend.device)
        self.weight = nn.Parameter(weight.normal_(std=0.02))
        self.bias = nn.Parameter(zeros.to(backend.dtype)) if moe.router_bias else None
        self.norm_epsilon = norm_of(model).epsilon
        self.scale, self.per_expert_scale = (
            nn.Parameter(torch.ones(size, dtype=backend.dtype, device=backend.device)) if moe.own_norms else None
            for size in (model.hidden_size, moe.num_experts)
        )
        # FP32 in Megatron too, and no gradient's to change: `RouterLosses.update_biases`
        biased = moe.expert_bias and not hashed
        self.expert_bias = nn.Parameter(zeros.clone(), requires_grad=False) if biased else None
        table = torch.zeros(model.vocab_size, moe.topk, dtype=torch.int64, device=backend.device)
        self.tid2eid = nn.Parameter(table, requires_grad=False) if hashed else None

    def forward(self, tokens: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens `[T, E]` to the weights of their experts, FP32 `[T, K]`, and the experts' numbers, int64 `[T, K]`."""
        bias, read = None if self.bias is None else self.bias.float(), tokens.float()
        if self.scale is not None:
            hidden = read.shape[-1]
            read = F.rms_norm(read, (hidden,), eps=self.norm_epsilon) * self.scale.float() * hidden**-0.5
        logits = F.linear(read, self.weight.float(), bias)
        if self.moe.logit_multiplier != 1:
            logits = logits * self.moe.logit_multiplier
        if self.moe.sparsemixer_eps is not None:
            weights, chosen = _sparsely_mixed(logits, self.moe.topk, self.moe.sparsemixer_eps)
        else:
            weights, chosen = self._of_scores(logits, ids)
        if self.losses and self.tid2eid is None:
            self.losses.see(logits, chosen, self.expert_bias)
        if self.per_expert_scale is not None:
            weights = weights * self.per_expert_scale.float()[chosen]
        return weights * self.moe.topk_scaling_factor, chosen

    def _of_scores(self, logits: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """The weights and numbers of a token's experts: those with the largest scores, or those that a table has for
        its id."""
        softmax_of_chosen = self.moe.score_function == "softmax" and not self.moe.pre_softmax
        unscored = softmax_of_chosen and not self.moe.expert_bias
        scores = logits if unscored else SCORES[self.moe.score_function](logits)
        biased = logits if self.moe.expert_bias_on_logits else scores
        wanted = scores if self.expert_bias is None else biased + self.expert_bias
        if self.tid2eid is None:
            chosen = self._in_best_groups(wanted).topk(self.moe.topk, sorted=False).indices
        else:
            assert ids is not None, "the layer gives them"
            chosen = self.tid2eid[ids]
        if softmax_of_chosen:
            weights = logits.gather(1, chosen).softmax(-1)
        elif self.moe.pre_softmax or self.moe.probs_on_input:
            weights = scores.gather(1, chosen)
        else:
            weights = over_their_sum(scores.gather(1, chosen))
        return weights, chosen

    def _in_best_groups(self, wanted: Tensor) -> Tensor:
        """Scores `[T, experts]` with those outside the best groups at minus infinity."""
        if self.moe.num_groups is None or self.moe.group_topk is None or self.moe.group_scores is None:
            return wanted
        grouped = wanted.view(len(wanted), self.moe.num_groups, -1)
        worth = grouped.topk(self.moe.group_scores).values.sum(-1)
        best = worth.topk(self.moe.group_topk).indices
        outside = torch.ones_like(worth, dtype=torch.bool).scatter(1, best, False)
        inside = grouped.masked_fill(outside[..., None], -torch.inf)
        return inside.flatten(1)


def _sparsely_mixed(logits: Tensor, number: int, eps: float) -> tuple[Tensor, Tensor]:
    """SparseMixer's weights and experts, as without its noise (transformers' modeling_phimoe.py, sparsemixer)."""
    weights, chosen, left = [], [], logits
    for _ in range(number):
        largest, expert = left.max(-1, keepdim=True)
        far = (largest - logits) / logits.abs().clamp(min=largest) > 2 * eps
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, expert))
        chosen.append(expert)
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(weights, -1), torch.cat(chosen, -1)

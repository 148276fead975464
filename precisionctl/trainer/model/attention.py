"""Attention with Megatron-Core's parameter names: over grouped queries, and over latents (MLA).

Shape letters as in `gpt.py`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model_parts import MLA
from precisionctl.model_shape import ModelShape
from precisionctl.sparse_parts import DSA, MSA
from precisionctl.trainer.backends.base import Backend, Norm, column_linear, norm_of
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.block_indexer import BlockIndexer, attend_to_blocks
from precisionctl.trainer.model.embedding import plain_linear
from precisionctl.trainer.model.positions import Positions, rotate, sliding_window_mask, yarn_mscale


class CoreAttention(nn.Module):
    """Softmax over the keys that a query sees, of scores that may be capped (Gemma 2), or fall with distance (BLOOM).
    `softmax_offset` (gpt-oss's sinks) is, for each head, the score of one more key, whose value is zero. In long texts
    an `indexer` chooses which keys those are."""

    def __init__(self, model: ModelShape, backend: Backend, scale: float, msa: MSA | None = None) -> None:
        super().__init__()
        self.scale, self.softcap = scale, model.attn_logit_softcapping
        sinks = torch.zeros(
            model.num_attention_heads // backend.world.tensor.size, dtype=backend.dtype, device=backend.device
        )
        self.softmax_offset = nn.Parameter(sinks) if model.softmax_offset else None
        self.slopes: Tensor | None = None
        if model.alibi:
            mine = torch.tensor(alibi_slopes(model.num_attention_heads)).chunk(backend.world.tensor.size)
            self.slopes = mine[backend.world.tensor.rank].to(backend.device)
        plain = self.softcap is None and self.softmax_offset is None and not model.alibi
        self.kernel = backend.attention(model, scale) if plain else None
        self.msa = msa
        self.indexer: nn.Module | None = BlockIndexer(model, msa, backend) if msa else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Positions, index: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """Queries `[B, S, G * R, D]`, keys `[B, S, G, D]` and values `[B, S, G, channels]`, with the `index` that a
        BlockIndexer makes, if it is to choose; gives `[T, G * R * channels]`."""
        heads, packed, window = (query, key, value, *index), positions.packed, positions.window
        if self.kernel is not None and not index:
            attended: Tensor = self.kernel(query, key, value, packed, window)
        elif packed is None:
            attended = self._attend(heads, window)
        else:
            # each text by itself: a mask over all would grow with the square of the row, and no flash kernel takes one
            laid = (torch.split(tensor.flatten(0, 1)[None], list(packed.lengths), 1) for tensor in heads)
            attended = torch.cat([self._attend(text, window) for text in zip(*laid, strict=True)], 1)
        return attended.reshape(query.shape[:2].numel(), -1)

    def _attend(self, heads: Sequence[Tensor], window: int | None) -> Tensor:
        """Queries, keys and values of texts that are S tokens long, and an index, if there is one; gives
        `[B, S, G * R, channels of a value]`."""
        if self.msa and len(heads) > 3:
            return attend_to_blocks(heads, self.msa, self.scale)
        query, key, value = (tensor.transpose(1, 2) for tensor in heads)
        mask, channels = sliding_window_mask(key.shape[2], window, key.device), value.shape[3]
        if self.softcap is not None:
            batch, groups, length, head = key.shape
            grouped = query.reshape(batch, groups, -1, length, head)
            scores = product(torch.matmul, grouped, key[:, :, None].mT).float() * self.scale  # [B, G, R, S, S]
            scores = self.softcap * torch.tanh(scores / self.softcap)
            if mask is None:
                mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(value.dtype)
            attended = product(torch.matmul, weights, value[:, :, None]).flatten(1, 2)
        else:
            if self.slopes is not None:
                query, key = with_slopes(query, key, self.slopes / self.scale)
            if self.softmax_offset is not None:
                query, key, value = with_sinks(query, key, value, self.softmax_offset.float() / self.scale)
                mask = None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
            attention = partial(
                F.scaled_dot_product_attention,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=True,
            )
            # fused kernels take heads of one size, and a value that is 0 stays so
            narrower = max(0, key.shape[3] - value.shape[3])
            attended = product(attention, query, key, F.pad(value, (0, narrower)) if narrower else value)
            attended = attended[:, :, -heads[0].shape[1] :, :channels]
        return attended.transpose(1, 2)


SINK_CHANNELS = 8
"""How much larger heads are with sinks, or with slopes: kernels take multiples of 8."""


def with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One more query, key and value of zero before those of a text `[B, heads, S, D]`, and eight more channels. Causal
    attention over them gives the text's queries what it gives beside a sink for each head: its key is the first, with
    which every query's product is `sinks`, FP32 `[heads]`. Nothing reads what the first query is given.

    Two of the channels have the sinks in the queries' dtype and what its rounding leaves, and are 1 in the first key.
    """
    rounded = sinks.to(query.dtype)
    parts = torch.stack([rounded, (sinks - rounded.float()).to(query.dtype)], -1)
    here = parts[None, :, None].expand(*query.shape[:3], -1)
    query = F.pad(torch.cat([query, here], -1), (0, SINK_CHANNELS - 2, 1, 0))
    first = F.pad(key.new_ones(2), (key.shape[3], SINK_CHANNELS - 2)).expand(*key.shape[:2], 1, -1)
    key = torch.cat([first, F.pad(key, (0, SINK_CHANNELS))], 2)
    return query, key, F.pad(value, (0, 0, 1, 0))


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head: powers of one number for a power of two, and those of twice as many, every other one, for
    the heads beyond (transformers' modeling_bloom.py, _get_alibi_slopes)."""
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    return slopes + [2 ** (-4 * (2 * head + 1) / whole) for head in range(heads - whole)]


def with_slopes(query: Tensor, key: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys `[B, heads, S, D]` with eight more channels, whose product is the place of the key times a slope
    of the head, FP32 `[heads]`. Softmax does not tell that from a score that falls with distance.

    Both are of two parts: slopes in the queries' dtype and what its rounding leaves, places what 256 divides and the
    rest, which BF16 holds up to 65536."""
    rounded = slopes.to(query.dtype)
    parts = torch.stack([rounded, (slopes - rounded.float()).to(query.dtype)], -1).repeat_interleave(2, -1)
    place = torch.arange(key.shape[2], device=key.device)
    places = torch.stack([place - place % 256, place % 256], -1).to(key.dtype).repeat(1, 2)
    beside = (each.expand(*heads.shape[:3], -1) for each, heads in ((parts[None, :, None], query), (places, key)))
    first, second = (F.pad(each, (0, SINK_CHANNELS - 4)) for each in beside)
    return torch.cat([query, first], -1), torch.cat([key, second], -1)


def gated_by(attended: Tensor, gate: Tensor) -> Tensor:
    """What heads give, `[T, heads * channels]`, times the sigmoid of as many numbers, computed in FP32."""
    return (attended * gate.float().sigmoid().reshape(attended.shape)).to(attended.dtype)


def scaled(query: Tensor, positions: Positions) -> Tensor:
    """Queries `[B, S, heads, D]` as their positions scale them."""
    scale = positions.query_scale
    return query if scale is None else query * scale[..., None, None].to(query.dtype)


class SoftmaxScaling(nn.Module):
    """Two numbers of each head, which with the logarithm of a query's position say what it is multiplied by."""

    def __init__(self, heads: int, backend: Backend) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(heads, dtype=backend.dtype, device=backend.device))
        self.bias = nn.Parameter(torch.ones(heads, dtype=backend.dtype, device=backend.device))

    def forward(self, query: Tensor, positions: Positions) -> Tensor:
        """Queries `[B, S, heads, D]` to the same."""
        assert positions.query_scale is not None, "`query_scale` makes the logarithm"
        factor = positions.query_scale[..., None] * self.scale.float() + self.bias.float()
        return query * factor[..., None].to(query.dtype)


class NormOverHeads(nn.Module):
    """RMSNorm of all heads of a token together, of `size` channels (OLMo 2). A tensor rank has those of its heads, and
    the squares of all ranks are summed."""

    def __init__(self, size: int, norm: Norm, backend: Backend) -> None:
        super().__init__()
        self.ranks, self.size, self.norm = backend.world.tensor, size, norm
        mine = size // self.ranks.size
        self.weight = nn.Parameter(torch.full((mine,), norm.initial_weight, dtype=backend.dtype, device=backend.device))

    def forward(self, heads: Tensor) -> Tensor:
        """`[..., heads, D]` to the same."""
        wide = heads.flatten(-2).float()
        squares = self.ranks.copy(self.ranks.reduce(wide.square().sum(-1, keepdim=True)))
        normed = self.norm.multiplier(self.weight) * (wide * torch.rsqrt(squares / self.size + self.norm.epsilon))
        return normed.to(heads.dtype).view_as(heads)


class GateOfHeads(nn.Module):
    """What heads give is multiplied by what a projection of the hidden states makes, in FP32: its sigmoid or softplus,
    a number for each head or for each channel. A tensor rank has the rows of its heads."""

    def __init__(self, model: ModelShape, backend: Backend) -> None:
        super().__init__()
        sigmoid = (model.linear_gate or "").startswith("sigmoid")
        self.opening: Callable[[Tensor], Tensor] = torch.sigmoid if sigmoid else F.softplus
        rows = model.gate_size // backend.world.tensor.size
        self.weight = plain_linear(model.hidden_size, rows, backend).weight

    def forward(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """What heads give, `[T, heads * channels]`, and hidden states `[T, E]`, to the former times the gate."""
        opened = self.opening(product(F.linear, hidden, self.weight).float())
        gated = attended.view(*opened.shape, -1) * opened[..., None]
        return gated.to(attended.dtype).view_as(attended)


KeysValues = tuple[Tensor, Tensor]
"""Keys and values as attention takes them, `[B, S, G, channels]`. Of latent attention the latent `[T, C]`, normalised
if its norm is no part of the linear that reads it, and the part of keys that heads share, `[B, S, 1, channels]`."""


class SelfAttention(nn.Module):
    """Grouped queries. Rows of linear_qkv, per group: R queries, R output gates if there are, one key, each D rows, one
    value unless keys are values; of a layer that `shares_kv`, queries and gates alone. `model` is that of
    `attention_of` for this kind of layer."""

    def __init__(
        self, name: str, model: ModelShape, backend: Backend, shares_kv: bool = False, msa: MSA | None = None
    ) -> None:
        super().__init__()
        self.name, self.backend = f"{name}.core_attention", backend
        self.groups, self.head = model.num_query_groups // backend.world.tensor.size, model.kv_channels
        norm, hidden = norm_of(model), model.hidden_size
        bias = model.add_bias_linear or model.add_qkv_bias
        own = () if shares_kv else (self.head,) if model.keys_are_values else (self.head, model.value_channels)
        self.own_kv: tuple[int, ...] = own  # rows of the key and value of a group
        rows = model.qkv_size - (model.key_value_size if shares_kv else 0)
        self.fused_layernorm = model.fused_input_layernorm
        self.linear_qkv: Any = column_linear(
            backend, f"{name}.linear_qkv", hidden, rows, bias, norm if self.fused_layernorm else None
        )
        self.q_layernorm: nn.Module = nn.Identity()
        self.k_layernorm: nn.Module = nn.Identity()
        if model.qk_layernorm and model.qk_layernorm_over_heads:
            self.q_layernorm = NormOverHeads(model.query_size, norm, backend)
            self.k_layernorm = NormOverHeads(model.key_size, norm, backend)
        elif model.qk_layernorm:
            self.q_layernorm, self.k_layernorm = backend.norm(self.head, norm), backend.norm(self.head, norm)
        if shares_kv:
            self.k_layernorm = nn.Identity()
            if model.stores_unused:
                self._carry_unused(model, norm)
        self.l2_epsilon = norm.epsilon
        self.qk_l2_norm, self.v_l2_norm = model.qk_l2_norm, model.v_l2_norm
        self.value_scale, self.clip = model.attention_value_scale, model.clip_qkv
        self.interleaved, self.norms_after_rope = model.rotary_interleaved, model.qk_layernorm_after_rope
        self.gated = model.attention_output_gate
        self.key_factor = model.multipliers.key if model.multipliers else 1.0
        self.linear_gate = GateOfHeads(model, backend) if model.linear_gate else None
        scale = 1 / math.sqrt(model.query_pre_attn_scalar or self.head)
        self.core_attention = CoreAttention(model, backend, scale, msa)
        self.linear_proj = backend.linear(
            f"{name}.linear_proj", model.projection_size, hidden, model.add_bias_linear or model.proj_bias, "row"
        )

    def forward(
        self, hidden: Tensor, positions: Positions, shared: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """`[T, E]` to the same, and the keys and values that it read: the `shared` ones of another layer, or its
        own."""
        qkv = self.linear_qkv(hidden).view(*positions.shape, self.groups, -1)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        # split, and not sliced: their gradients are then put together once, instead of added to zeros one by one
        query, *own = torch.split(qkv, [qkv.shape[3] - sum(self.own_kv), *self.own_kv], 3)
        query = query.reshape(*positions.shape, -1, self.head)
        if self.gated:
            of_groups = query.view(*positions.shape, self.groups, 2, -1, self.head)
            query, gate = (part.flatten(2, 3) for part in of_groups.unbind(3))
        query = scaled(self._placed(query, self.q_layernorm, positions), positions)
        if shared is None:
            key = own[0] if self.key_factor == 1 else own[0] * self.key_factor
            key, value = self._placed(key, self.k_layernorm, positions), own[-1]
            if self.v_l2_norm:
                value = F.rms_norm(value, value.shape[-1:], eps=self.l2_epsilon)
            if self.value_scale != 1:
                value = value * self.value_scale
        else:
            key, value = shared
        if recorder := self.backend.recorder:
            recorder.kv_cache(self.name, "k", key)
            recorder.kv_cache(self.name, "v", value)
        attended = self.core_attention(query, key, value, positions, self._index(hidden, positions))
        if self.gated:
            attended = gated_by(attended, gate)
        if self.linear_gate is not None:
            attended = self.linear_gate(attended, self.backend.world.tensor.enter(hidden))
        out: Tensor = self.linear_proj(attended)
        return out, (key, value)

    @torch.no_grad()
    def _index(self, hidden: Tensor, positions: Positions) -> tuple[Tensor, ...]:
        """What an indexer makes of hidden states `[T, E]`, in texts of which it does not choose all keys."""
        core, longest = self.core_attention, positions.packed.longest if positions.packed else positions.shape[1]
        if core.indexer is None or core.msa is None or longest <= core.msa.dense_length:
            return ()
        read = self.linear_qkv.gemm_input(hidden).to(hidden.dtype) if self.fused_layernorm else hidden
        index: tuple[Tensor, ...] = core.indexer(read, positions)
        return index

    def _placed(self, heads: Tensor, norm: nn.Module, positions: Positions) -> Tensor:
        """Queries or keys `[B, S, heads, D]`, normalised and turned by their positions."""
        if self.norms_after_rope:
            heads = norm(rotate(heads, positions, self.interleaved))
        else:
            heads = rotate(norm(heads), positions, self.interleaved)
        if self.qk_l2_norm and positions.cos is not None:
            heads = F.rms_norm(heads, (self.head,), eps=self.l2_epsilon)
        return heads

    def _carry_unused(self, model: ModelShape, norm: Norm) -> None:
        """Parameters that a checkpoint may have, with which nothing computes: whole on all ranks."""
        made: Any = {"bias": False, "dtype": self.backend.dtype, "device": self.backend.device}
        self.unused_linear_k = nn.Linear(model.hidden_size, model.key_size, **made)
        self.unused_linear_v = nn.Linear(model.hidden_size, model.key_size, **made)
        self.unused_k_norm = self.backend.norm(self.head, norm)
        for module in (self.unused_linear_k, self.unused_linear_v, self.unused_k_norm):
            module.requires_grad_(False)


class Indexer(nn.Module):
    """What chooses keys in DeepSeek's sparse attention, carried along: it computes nothing, as all keys are chosen of
    texts as short as those that GPT takes, and no gradient comes to it."""

    def __init__(self, model: ModelShape, dsa: DSA, latent: int, backend: Backend) -> None:
        super().__init__()
        made: Any = {"bias": False, "dtype": backend.dtype, "device": backend.device}
        self.linear_wq_b = nn.Linear(latent, dsa.query_size, **made)
        self.linear_wk = nn.Linear(model.hidden_size, dsa.head_dim, **made)
        self.k_norm = nn.LayerNorm(dsa.head_dim, device=backend.device)  # FP32, as released
        self.linear_weights_proj = nn.Linear(model.hidden_size, dsa.n_heads, **made)
        if model.softmax_scaling:
            self.q_input_norm = nn.LayerNorm(latent, device=backend.device)
            self.softmax_scaling = SoftmaxScaling(dsa.n_heads, backend)
        if dsa.kpool:
            sizes = (dsa.kpool, dsa.head_dim), (dsa.head_dim, model.hidden_size)
            self.index_kpool_compress_ape, self.index_kpool_compress_gate = (
                nn.Parameter(torch.zeros(size, dtype=backend.dtype, device=backend.device)) for size in sizes
            )
        self.requires_grad_(False)


class MLASelfAttention(nn.Module):
    """DeepSeek's latent attention: the keys and values of all heads are made from one small latent for each token,
    queries from another one, or directly. All tensor ranks make the latents, of all tokens, and each its heads.

    Rows of linear_q_up_proj (linear_q_proj), per head: those without positions, then those with; of
    linear_kv_up_proj, per head: key, value; of linear_kv_down_proj: the latent, then the part of the key that has
    positions, which all heads share. Norms of the latents are part of the linears that read them, but not beside an
    indexer. Where queries come with gates, the latter stand behind the queries of their head. A layer that `shares_kv`
    reads the latent of another one.
    """

    def __init__(self, name: str, model: ModelShape, mla: MLA, number: int, backend: Backend) -> None:
        super().__init__()
        self.name, self.backend = f"{name}.core_attention", backend
        self.mla, self.fused_layernorms = mla, model.fused_latent_layernorms
        self.own_channels, self.shared_channels = mla.key_channels(model.has_rope(number))
        shares_kv = model.shares_kv(number)
        norm, hidden = norm_of(model), model.hidden_size
        fused = norm if self.fused_layernorms else None
        self.q_layernorm: nn.Module = nn.Identity()
        self.kv_layernorm = nn.Identity() if fused or shares_kv else backend.norm(mla.kv_lora_rank, norm)
        if mla.q_lora_rank is None:
            self.linear_q_proj = backend.linear(
                f"{name}.linear_q_proj", hidden, model.query_size, False, "inner column"
            )
        else:
            self.linear_q_down_proj = backend.linear(f"{name}.linear_q_down_proj", hidden, mla.q_lora_rank, False)
            self.q_layernorm = nn.Identity() if fused else backend.norm(mla.q_lora_rank, norm)
            self.linear_q_up_proj = column_linear(
                backend,
                f"{name}.linear_q_up_proj",
                model.query_up_inputs,
                model.query_up_size,
                False,
                fused,
                "inner column",
            )
        self.linear_kv_down_proj: nn.Module | None = None
        if not shares_kv:
            rows = mla.kv_lora_rank + self.shared_channels
            self.linear_kv_down_proj = backend.linear(f"{name}.linear_kv_down_proj", hidden, rows, False)
        rows = model.num_attention_heads * (self.own_channels + mla.v_head_dim)
        self.linear_kv_up_proj: Any = column_linear(
            backend, f"{name}.linear_kv_up_proj", mla.kv_lora_rank, rows, False, fused, "inner column"
        )
        heads = model.num_attention_heads // backend.world.tensor.size
        self.softmax_scaling = SoftmaxScaling(heads, backend) if model.softmax_scaling else None
        scale, scaling = 1 / math.sqrt(mla.qk_head_dim + mla.qk_pos_emb_head_dim), model.rope_scaling or {}
        if scaling.get("mscale_all_dim"):  # DeepSeek's YaRN magnifies the part without positions too, by the scores
            scale *= yarn_mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
        self.core_attention = CoreAttention(model, backend, scale)
        if model.dsa and model.has_indexer(number):
            self.core_attention.indexer = Indexer(model, model.dsa, mla.q_lora_rank or hidden, backend)
        self.linear_gate = GateOfHeads(model, backend) if model.linear_gate else None
        self.linear_proj = backend.linear(f"{name}.linear_proj", model.projection_size, hidden, False, "row")

    def forward(
        self, hidden: Tensor, positions: Positions, shared: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """`[T, E]` to the same, and the latent that it read: the `shared` one of another layer, or its own."""
        mla, ranks = self.mla, self.backend.world.tensor
        hidden, heads = ranks.gather(hidden), (*positions.shape, -1)
        if mla.q_lora_rank is None:
            query = self.linear_q_proj(hidden)
        else:
            down = self.linear_q_down_proj(hidden)
            latent = self.q_layernorm(down)
            query = self.linear_q_up_proj(torch.cat([latent, down], -1) if mla.query_gate else latent)
        channels = [self.own_channels, self.shared_channels, mla.v_head_dim if mla.query_gate else 0]
        plain, turned, gate = torch.split(query.view(*heads, sum(channels)), channels, -1)
        if self.linear_kv_down_proj is not None:
            down = self.linear_kv_down_proj(hidden)
            latent, rotary = torch.split(down, [mla.kv_lora_rank, self.shared_channels], -1)
            latent = self.kv_layernorm(latent)
            rotary = ranks.copy(rotary).view(*positions.shape, 1, self.shared_channels)
            rotary = rotate(rotary, positions, interleaved=True)
        else:
            assert shared is not None, "the decoder gives it"
            latent, rotary = shared
        up = self.linear_kv_up_proj(latent).view(*heads, self.own_channels + mla.v_head_dim)
        key, value = torch.split(up, [self.own_channels, mla.v_head_dim], -1)
        if recorder := self.backend.recorder:
            # A KV cache holds neither keys nor values, but what both are made of: the normalised latent and the part
            # with positions, under one scale (vLLM's concat_and_cache_mla). That is `k`, and there is no `v`.
            cached = self.linear_kv_up_proj.gemm_input(latent).to(latent.dtype) if self.fused_layernorms else latent
            recorder.kv_cache(self.name, "k", cached)
            if self.shared_channels:
                recorder.kv_cache(self.name, "k", rotary)
        key = torch.cat([key, rotary.expand(*key.shape[:-1], -1)], -1)
        query = torch.cat([plain, rotate(turned, positions, interleaved=True)], -1)
        query = scaled(query, positions) if self.softmax_scaling is None else self.softmax_scaling(query, positions)
        attended = self.core_attention(query, key, value, positions)
        if self.linear_gate is not None:
            attended = self.linear_gate(attended, ranks.copy(hidden))
        if mla.query_gate:
            attended = gated_by(attended, gate)
        out: Tensor = self.linear_proj(attended)
        return out, (latent, rotary)

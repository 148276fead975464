"""Kimi K3's attention of both kinds, with the parameter names of Megatron-Bridge's KimiK3Attention
(models/kimi/kimi_k3_layers.py).

Shape letters: B batch, S sequence, T tokens, E hidden_size; N heads (a tensor rank's), of D channels of a value.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_parts import MLA
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import GatedDeltaNet
from precisionctl.trainer.backends.base import Backend, norm_of, plain_linear
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.attention.core_attention import CoreAttention
from precisionctl.trainer.model.attention.latent_attention import keys_and_values, record_latent
from precisionctl.trainer.model.attention.self_attention import gated_by
from precisionctl.trainer.model.recurrent.delta_nets import kimi_delta_rule
from precisionctl.trainer.model.recurrent.recurrence import by_text, convolution, convolved
from precisionctl.trainer.sequences import Positions


class KimiK3DeltaAttention(nn.Module):
    """Kimi delta attention with a linear and a convolution each for queries, keys and values, and a gate that is
    projected in one step. Learning rates are made in BF16."""

    def __init__(self, name: str, model: ModelShape, gdn: GatedDeltaNet, backend: Backend) -> None:
        super().__init__()
        ranks, hidden, rank = backend.world.tensor, model.hidden_size, gdn.kda_lora_rank or 0
        dtype, device, heads = backend.dtype, backend.device, gdn.num_value_heads // ranks.size
        self.gdn, self.ranks = gdn, ranks
        self.q_proj = backend.linear(f"{name}.q_proj", hidden, gdn.key_size, False, "inner column")
        self.k_proj = backend.linear(f"{name}.k_proj", hidden, gdn.key_size, False, "inner column")
        self.v_proj = backend.linear(f"{name}.v_proj", hidden, gdn.value_size, False, "inner column")
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            convolution(channels, gdn.conv_kernel_dim, backend) for channels in gdn.conv_parts
        )
        self.f_a_proj = backend.linear(f"{name}.f_a_proj", hidden, rank, False)
        self.f_b_proj = backend.linear(f"{name}.f_b_proj", rank, gdn.key_size, False, "inner column")
        self.b_proj = plain_linear(hidden, heads, backend)
        self.g_proj = backend.linear(f"{name}.g_proj", hidden, gdn.value_size, False, "inner column")
        self.A_log = nn.Parameter(torch.empty(heads, device=device).uniform_(1, 16).log_().to(dtype))
        self.dt_bias = nn.Parameter(torch.ones(gdn.key_size // ranks.size, dtype=dtype, device=device))
        self.o_norm = backend.norm(gdn.value_head_dim, norm_of(model))
        self.o_proj = backend.linear(f"{name}.o_proj", gdn.value_size, hidden, False, "row")

    def forward(self, hidden: Tensor, positions: Positions) -> Tensor:
        """`[T, E]` to the same."""
        hidden = self.ranks.gather(hidden)
        made = [
            *(linear(hidden) for linear in (self.q_proj, self.k_proj, self.v_proj)),
            self.f_b_proj(self.f_a_proj(hidden)),
            self.g_proj(hidden),
            product(F.linear, self.ranks.copy(hidden), self.b_proj.weight),
        ]
        out: Tensor = self.o_proj(by_text(self._attend, torch.cat(made, -1), positions))
        return out

    def _attend(self, made: Tensor) -> Tensor:
        """What the linears make of texts that are S tokens long, as of `KimiDeltaAttention`."""
        parts = (*self.gdn.conv_parts, self.gdn.key_size, self.gdn.value_size, self.gdn.num_value_heads)
        *mixed, f, gate, b = torch.split(made, [rows // self.ranks.size for rows in parts], -1)
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        mixed = [convolved(part, conv) for part, conv in zip(mixed, convs, strict=True)]
        read = kimi_delta_rule(torch.cat(mixed, -1), f, b, self.gdn, self.A_log, self.dt_bias)
        return gated_by(self.o_norm(read), gate).flatten(2)


class KimiK3LatentAttention(nn.Module):
    """Latent attention without positions, whose output a gate multiplies. Rows of q_b_proj, per head: channels whose
    keys are the head's own, then those whose keys heads share; of kv_b_proj, per head: key, value; of
    kv_a_proj_with_mqa: the latent, then the part of the key that heads share. All tensor ranks make the latents, of all
    tokens."""

    def __init__(self, name: str, model: ModelShape, mla: MLA, backend: Backend) -> None:
        super().__init__()
        self.name, self.backend, self.mla = f"{name}.core_attention", backend, mla
        norm, hidden, latent = norm_of(model), model.hidden_size, mla.q_lora_rank or 0
        self.q_a_proj = backend.linear(f"{name}.q_a_proj", hidden, latent, False)
        self.q_a_layernorm = backend.norm(latent, norm)
        self.q_b_proj = backend.linear(f"{name}.q_b_proj", latent, model.query_size, False, "inner column")
        self.kv_a_proj_with_mqa = backend.linear(f"{name}.kv_a_proj_with_mqa", hidden, model.kv_down_size, False)
        self.kv_a_layernorm = backend.norm(mla.kv_lora_rank, norm)
        self.kv_b_proj = backend.linear(
            f"{name}.kv_b_proj", mla.kv_lora_rank, model.key_value_size, False, "inner column"
        )
        self.g_proj = backend.linear(f"{name}.g_proj", hidden, model.gate_size, False, "inner column")
        self.core_attention = CoreAttention(model, backend, 1 / math.sqrt(mla.qk_head_dim + mla.qk_pos_emb_head_dim))
        self.o_proj = backend.linear(f"{name}.o_proj", model.projection_size, hidden, False, "row")

    def forward(self, hidden: Tensor, positions: Positions) -> Tensor:
        """`[T, E]` to the same."""
        mla, ranks = self.mla, self.backend.world.tensor
        hidden, heads = ranks.gather(hidden), (*positions.shape, -1)
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        query = query.view(*heads, mla.qk_head_dim + mla.qk_pos_emb_head_dim)
        down = self.kv_a_proj_with_mqa(hidden)
        latent, shared = torch.split(down, [mla.kv_lora_rank, mla.qk_pos_emb_head_dim], -1)
        latent = self.kv_a_layernorm(latent)
        shared = ranks.copy(shared).view(*positions.shape, 1, mla.qk_pos_emb_head_dim)
        up = self.kv_b_proj(latent)
        if recorder := self.backend.recorder:
            record_latent(recorder, self.name, latent, shared)
        key, value = keys_and_values(up, shared, [mla.qk_head_dim, mla.v_head_dim])
        attended = self.core_attention(query, key, value, positions)
        out: Tensor = self.o_proj(gated_by(attended, self.g_proj(hidden)))
        return out

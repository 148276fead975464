"""GPT: the one model that is trained, a decoder of the Llama family with Megatron-Core's parameter names.

Covers Llama 2 and 3, Mistral and Yi: grouped-query attention, rotate-half rope (with Llama 3's scaling),
sliding windows, tied embeddings, optional biases, a padded vocabulary.

Shape letters: B batch, S sequence, E hidden_size, F ffn_hidden_size, V padded_vocab_size,
G num_query_groups, R query heads per group, D kv_channels (the size of a head).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.errors import UnknownArchitecture
from precisionctl.model_shape import ModelShape
from precisionctl.precision import Precision
from precisionctl.trainer.backend import Backend, BackendName, make_backend


class Positions(NamedTuple):
    """What attention needs to know about places in the sequence."""

    cos: Tensor
    """FP32 `[S, D / 2]`, as `sin`."""
    sin: Tensor
    mask: Tensor | None
    """Bool `[S, S]`, True where a query (row) sees a key; None for plain causal attention."""


class GPT(nn.Module):
    """Logits of a decoder-only transformer.

    `precision` says which GEMMs run in FP8; the embedding and the output layer never do. Parameters and
    activations have `dtype`. Raises PrecisionError for sizes that FP8 GEMMs cannot have, UnknownArchitecture
    for rope scaling other than Llama 3's.
    """

    def __init__(
        self,
        model: ModelShape,
        precision: Precision,
        backend: BackendName = "emulated",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.model, self.precision = model, precision
        self.backend = make_backend(backend, precision, dtype, torch.device(device))
        self.inverse_frequencies = inverse_frequencies(model).to(device)
        self.embedding = Embedding(model, dtype, device)
        self.decoder = Decoder(model, self.backend)
        if model.untied_embeddings:
            self.output_layer = nn.Linear(
                model.hidden_size, model.padded_vocab_size, bias=False, dtype=dtype, device=device
            )
            nn.init.normal_(self.output_layer.weight, std=0.02)
        self._freeze_filled_biases()

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens `[B, S]` int64 to logits `[B, S, V]`. With gradients enabled, each call is one step of
        delayed scaling: forward scales are updated at its end, backward ones at the end of its backward."""
        with self.backend.forward_pass():
            hidden = self.embedding(tokens)
            if hidden.requires_grad:
                hidden.register_hook(lambda _: self.backend.after_backward())  # its gradient is the last one
            hidden = self.decoder(hidden, self._positions(tokens.shape[1]))
        return F.linear(hidden, self.output_weight)

    @property
    def output_weight(self) -> Tensor:
        """`[V, E]`."""
        return self.embedding.word_embeddings.weight if self.model.tied_embeddings else self.output_layer.weight

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run the GEMMs in BF16 and let their amaxes fill the histories, a row per pass: warm-up before FP8,
        or collection during BF16 training. State is updated as in an FP8 pass."""
        self.backend.recording = True
        try:
            yield
        finally:
            self.backend.recording = False

    def _freeze_filled_biases(self) -> None:
        # Megatron has one switch for the biases of attention and MLP; where Hugging Face has only one of the two,
        # the others are zeros, and training them would make a model that Hugging Face cannot hold.
        present = {"linear_qkv": self.model.qkv_bias, "linear_proj": self.model.proj_bias}
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.requires_grad_(present.get(name.split(".")[-2], self.model.mlp_bias))

    def _positions(self, length: int) -> Positions:
        place = torch.arange(length, device=self.inverse_frequencies.device)
        angles = place[:, None] * self.inverse_frequencies
        return Positions(angles.cos(), angles.sin(), sliding_window_mask(place, self.model.sliding_window))


class Embedding(nn.Module):
    def __init__(self, model: ModelShape, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(model.padded_vocab_size, model.hidden_size, dtype=dtype, device=device)
        nn.init.normal_(self.word_embeddings.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[B, S]` to `[B, S, E]`."""
        hidden: Tensor = self.word_embeddings(tokens)
        return hidden


class Decoder(nn.Module):
    def __init__(self, model: ModelShape, backend: Backend) -> None:
        super().__init__()
        names = (f"decoder.layers.{layer}" for layer in range(model.num_layers))
        self.layers = nn.ModuleList(Layer(name, model, backend) for name in names)
        self.final_layernorm = backend.rms_norm(model.hidden_size, model.norm_epsilon)

    def forward(self, hidden: Tensor, positions: Positions) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, positions)
        hidden = self.final_layernorm(hidden)
        return hidden


class Layer(nn.Module):
    """Attention and MLP, each added to the residual stream; their norms live in linear_qkv and linear_fc1."""

    def __init__(self, name: str, model: ModelShape, backend: Backend) -> None:
        super().__init__()
        self.self_attention = SelfAttention(f"{name}.self_attention", model, backend)
        self.mlp = MLP(f"{name}.mlp", model, backend)

    def forward(self, hidden: Tensor, positions: Positions) -> Tensor:
        """`[B, S, E]` to the same."""
        hidden = hidden + self.self_attention(hidden, positions)
        hidden = hidden + self.mlp(hidden)
        return hidden


class SelfAttention(nn.Module):
    """Causal attention. Rows of linear_qkv, per group: R queries, one key, one value, each D rows."""

    def __init__(self, name: str, model: ModelShape, backend: Backend) -> None:
        super().__init__()
        self.groups, self.head = model.num_query_groups, model.kv_channels
        heads = model.num_attention_heads * model.kv_channels
        qkv = heads + 2 * self.groups * self.head
        bias = model.add_bias_linear or model.add_qkv_bias
        self.linear_qkv = backend.layer_norm_linear(
            f"{name}.linear_qkv", model.hidden_size, qkv, bias, model.norm_epsilon
        )
        self.linear_proj = backend.linear(f"{name}.linear_proj", heads, model.hidden_size, model.add_bias_linear)

    def forward(self, hidden: Tensor, positions: Positions) -> Tensor:
        """`[B, S, E]` to the same."""
        batch, length, _ = hidden.shape
        qkv = self.linear_qkv(hidden).view(batch, length, self.groups, -1, self.head)
        query = rotate(qkv[..., :-2, :].flatten(2, 3), positions).transpose(1, 2)
        key = rotate(qkv[..., -2, :], positions).transpose(1, 2)
        value = qkv[..., -1, :].transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=positions.mask, is_causal=positions.mask is None, enable_gqa=True
        )
        out: Tensor = self.linear_proj(attended.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """SwiGLU. Rows of linear_fc1: F of the gate, then F of the up projection."""

    def __init__(self, name: str, model: ModelShape, backend: Backend) -> None:
        super().__init__()
        size, bias = model.ffn_hidden_size, model.add_bias_linear
        self.linear_fc1 = backend.layer_norm_linear(
            f"{name}.linear_fc1", model.hidden_size, 2 * size, bias, model.norm_epsilon
        )
        self.linear_fc2 = backend.linear(f"{name}.linear_fc2", size, model.hidden_size, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.linear_fc1(hidden).chunk(2, -1)
        out: Tensor = self.linear_fc2(F.silu(gate) * up)
        return out


def rotate(heads: Tensor, positions: Positions) -> Tensor:
    """Rope in FP32 over pairs (i, i + D / 2), the rotate-half convention: `[B, S, heads, D]` to the same."""
    cos, sin = positions.cos[:, None], positions.sin[:, None]
    first, second = heads.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(heads.dtype)


def inverse_frequencies(model: ModelShape) -> Tensor:
    """Angle per position of each pair of rope, FP32 `[D / 2]`: `base ** (-2i / D)`, lower under Llama 3's scaling.

    That (Llama 3.1's `rope_type: llama3`) divides the frequencies whose wavelength exceeds the original context
    over `low_freq_factor` by `factor`, keeps those below it over `high_freq_factor`, and blends in between.
    """
    exponents = torch.arange(0, model.kv_channels, 2).float() / model.kv_channels
    frequencies = 1 / torch.pow(model.rotary_base, exponents)
    if model.rope_scaling is None:
        return frequencies
    scaling = model.rope_scaling
    if scaling.get("rope_type") != "llama3":
        raise UnknownArchitecture(
            f"rope scaling of type `{scaling.get('rope_type')}`", do="Only `llama3` is known, and none at all."
        )
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    periods = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((periods - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = frequencies * (kept + (1 - kept) / scaling["factor"])
    return scaled


def sliding_window_mask(place: Tensor, window: int | None) -> Tensor | None:
    """Bool `[S, S]`: a query sees itself and the `window - 1` keys before it. None where all earlier keys are seen."""
    if window is None or window >= len(place):
        return None
    distance = place[:, None] - place
    return (distance >= 0) & (distance < window)


def loss(logits: Tensor, targets: Tensor, mask: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Cross entropy in FP32, summed over the targets where `mask` is True, and their number (int64).

    Sum and count, so that micro-batches add up exactly to their batch. Logits are `[B, S, V]`, targets and mask
    `[B, S]`. Columns beyond `vocab_size` are padding: no tokenizer makes those tokens and their rows hold
    anything, so they take no part in the softmax (as in transformers, whose vocabulary has no such rows).
    """
    wanted = targets.masked_fill(~mask, -100).flatten()
    rows = logits[..., :vocab_size].flatten(0, 1).float()
    return F.cross_entropy(rows, wanted, ignore_index=-100, reduction="sum"), mask.sum()

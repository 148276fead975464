"""Alternating updates of residual streams (AltUp, Baykal et al., NeurIPS 2023), and Gemma 3n's layer between them, with
the parameter names of transformers (modeling_gemma3n.py, Gemma3nTextAltUp).

Shape letters: T tokens, N residual streams, E hidden_size.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_parts import AltUp
from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, norm_of, plain_linear
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.attention.self_attention import KeysValues
from precisionctl.trainer.model.layers.laurel import LowRankResidual
from precisionctl.trainer.model.layers.layer import Layer
from precisionctl.trainer.model.layers.layer_blocks import mixed
from precisionctl.trainer.model.layers.residual_layer import Beside
from precisionctl.trainer.sequences import Positions

_LEAST_SQUARE = 1e-5
"""The least mean square that a stream is divided by the root of (transformers' Gemma3nTextModel)."""


class AlternatingUpdates(nn.Module):
    """Predicts what a layer makes of all streams, of which it computes one, and corrects them by that one. Every tensor
    rank has all of it.

    While gradients are taken, both coefficients are clamped where they are used: stored ones keep their values, and get
    no gradient beyond the clip. transformers clamps prediction_coefs where they are stored, so these get one.
    """

    def __init__(self, model: ModelShape, altup: AltUp, backend: Backend) -> None:
        super().__init__()
        self.streams, self.clip = altup.num_inputs, altup.coef_clip
        size = model.hidden_size
        self.correct_output_scale = nn.Parameter(torch.zeros(size, dtype=backend.dtype, device=backend.device))
        self.correction_coefs = plain_linear(self.streams, self.streams, backend)
        self.prediction_coefs = plain_linear(self.streams, altup.mixing_size, backend)
        self.modality_router = plain_linear(size, self.streams, backend)
        self.router_norm = backend.norm(size, norm_of(model))

    def predict(self, streams: Tensor) -> Tensor:
        """`[T, N, E]` to the same."""
        mix = product(F.linear, self.modalities(streams[:, 0]), self._clamped(self.prediction_coefs))
        mix = mix.view(-1, self.streams, self.streams)
        return torch.matmul(mix, streams) + streams

    def correct(self, predictions: Tensor, made: Tensor) -> Tensor:
        """Predictions `[T, N, E]`, of which the layer made another first stream, `[T, E]`, to streams `[T, N, E]`."""
        weights = product(F.linear, self.modalities(made), self._clamped(self.correction_coefs)) + 1.0
        return (made - predictions[:, 0])[:, None] * weights[..., None] + predictions

    def modalities(self, stream: Tensor) -> Tensor:
        """What a stream `[T, E]` is found to be, `[T, N]`."""
        read = self.router_norm(stream) * (1 / stream.shape[-1])
        return torch.tanh(product(F.linear, read, self.modality_router.weight).float()).to(stream.dtype)

    def _clamped(self, coefficients: nn.Linear) -> Tensor:
        if self.clip is None or not torch.is_grad_enabled():  # in training alone
            return coefficients.weight
        return coefficients.weight.clamp(-self.clip, self.clip)


class AltUpLayer(Layer):
    """A layer that reads and makes the first of the residual streams, with a low-rank residual beside attention. What
    it makes of a token's embedding for this layer is added to the others. Hidden states are `[T, N * E]`."""

    def __init__(
        self, name: str, model: ModelShape, altup: AltUp, number: int, backend: Backend, recompute: bool = False
    ) -> None:
        super().__init__(name, model, number, backend, recompute)
        assert model.laurel_rank, "checked in `computes.py`"
        self.altup = AlternatingUpdates(model, altup, backend)
        self.laurel = LowRankResidual(model, model.laurel_rank, backend)

    def through(self, hidden: Tensor, positions: Positions, beside: Beside) -> tuple[Tensor, KeysValues | None]:
        predictions = self.altup.predict(torch.unflatten(hidden, -1, (self.altup.streams, -1)))
        active = predictions[:, 0]
        normed = self.input_layernorm(active)
        attended, kept = mixed(self.self_attention, normed, positions, beside.shared)
        out = (active + attended + self.laurel(normed)) * 2**-0.5
        streams = self.altup.correct(predictions, out + self.mlp(out))
        first, others = torch.split(streams, [1, self.altup.streams - 1], 1)
        given = self.of_per_layer_input(first[:, 0] * self.altup.correct_output_scale, beside)
        return torch.cat([first, others + given[:, None]], 1).flatten(1), kept


def stream_projections(model: ModelShape, backend: Backend) -> nn.ModuleList:
    """A linear for each stream but the first."""
    assert model.altup, "others have no such streams"
    size = model.hidden_size
    return nn.ModuleList(plain_linear(size, size, backend) for _ in range(model.altup.num_inputs - 1))


def project_streams(hidden: Tensor, projections: nn.ModuleList) -> Tensor:
    """An embedding `[T, E]` and its projections, `[T, N * E]`."""
    return torch.cat([hidden, *_projected(hidden, [hidden] * len(projections), projections)], -1)


def unembed_streams(hidden: Tensor, projections: nn.ModuleList) -> Tensor:
    """The mean of the first of streams `[T, N * E]` and of projections of the others, `[T, E]`."""
    first, *others = hidden.chunk(len(projections) + 1, -1)
    return torch.stack([first, *_projected(first, others, projections)]).mean(0)


def _projected(first: Tensor, streams: Iterable[Tensor], projections: nn.ModuleList) -> list[Tensor]:
    """A projection of each stream, with the magnitude of the first."""
    magnitude, made = _mean_square(first).sqrt(), []
    for stream, projection in zip(streams, projections, strict=True):
        weight: Any = projection.weight
        projected = product(F.linear, stream, weight)
        made.append(projected * magnitude / _mean_square(projected).clamp(min=_LEAST_SQUARE).sqrt())
    return made


def _mean_square(stream: Tensor) -> Tensor:
    return stream.square().mean(-1, keepdim=True)

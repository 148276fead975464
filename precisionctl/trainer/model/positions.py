"""Positions of tokens: as angles of rotary embedding, and in sliding windows.

The arithmetic of rotary embedding is transformers' (modeling_rope_utils.py), whose logits the tests compare with.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.model.model_parts import yarn_mscale
from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.model.kernels import kernels_for
from precisionctl.trainer.sequences import Positions

RopeScaling = Mapping[str, Any]
"""The words of config.json's `rope_scaling` (`rope_parameters`): `rope_type`, and the numbers of that type; `base` and
`original`, the length of the context before scaling, beside them."""


def rotate(heads: Tensor, positions: Positions, interleaved: bool) -> Tensor:
    """Rope in FP32 over pairs (i, i + P), the rotate-half convention: `[B, S, heads, D]` to the same.
    What is beyond the 2 * P rotated dimensions stays as it is. Of `interleaved` ones the pairs are (2i, 2i + 1); they
    come out as halves, in queries and keys alike, so no score changes."""
    if positions.cos is None or positions.sin is None:
        return heads
    if interleaved:
        size = 2 * positions.cos.shape[-1]
        heads = torch.cat([heads[..., :size:2], heads[..., 1:size:2], heads[..., size:]], -1)
    cos, sin = positions.cos[..., None, :], positions.sin[..., None, :]
    rotated: Tensor = _Rotation.apply(heads, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    """A gradient is rotated back by the same angles: what autograd would make of the forward's operations, to the last
    bit, by half as many of them."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = cos, sin
        return _rotate_by(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.angles
        return _rotate_by(gradient, cos, -sin), None, None


def _rotate_by(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if kernels := kernels_for(heads):
        rotated: Tensor = kernels.rotate_by(heads, cos, sin)
        return rotated
    pairs = cos.shape[-1]
    first, second = heads[..., : 2 * pairs].float().chunk(2, -1)
    made = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(heads.dtype)
    return made if 2 * pairs == heads.shape[-1] else torch.cat([made, heads[..., 2 * pairs :]], -1)


class Rope:
    """Angles of the rotated dimensions, in layers with a window or without. Raises UnknownArchitecture for a type of
    scaling that is not known, DamagedCheckpoint for numbers that make no angles."""

    def __init__(self, model: ModelShape, in_window: bool, device: torch.device) -> None:
        model = model.attention_of(in_window)
        size, head = model.rotary_size, model.mla.qk_pos_emb_head_dim if model.mla else model.kv_channels
        base, scaling = model.rotary_base, model.rope_scaling or {}
        if in_window and model.rotary_base_local:
            base, scaling = model.rotary_base_local, {}
        kind = scaling.get("rope_type", "default")
        if kind not in _SCALINGS:
            raise UnknownArchitecture(f"rope scaling of type `{kind}`", do=f"Known: {', '.join(_SCALINGS)}.")
        if size % 2 or not 0 < size <= head:
            raise DamagedCheckpoint(f"{size} of a head's {head} dimensions cannot be rotated in pairs")
        self._original = int(scaling.get("original_max_position_embeddings") or model.max_position_embeddings)
        powers = torch.pow(base, torch.arange(0, size, 2).float() / size)
        factor = float(scaling.get("factor") or model.max_position_embeddings / self._original)
        try:
            frequencies = _SCALINGS[kind](powers, factor, {**scaling, "base": base, "original": self._original})
        except (ArithmeticError, ValueError, RuntimeError) as error:
            raise DamagedCheckpoint(f"rope scaling that cannot be computed: {error}") from None
        self._within, self._beyond = frequencies.within.to(device), frequencies.beyond.to(device)
        self.depends_on_length = not torch.equal(frequencies.within, frequencies.beyond)
        """Whether the angles depend on the length of the text."""
        self._magnitude = frequencies.magnitude

    def at(self, position: Tensor, length: int | Tensor, alpha: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin of every pair's angle at each position `[...]`, in texts of one length or of lengths that
        broadcast with the positions: FP32 `[..., size / 2]`. Angles are multiplied by the exponentials of `alpha`, FP32
        `[size / 2]`."""
        if isinstance(length, int):
            frequencies = self._beyond if length > self._original else self._within
        else:
            frequencies = torch.where((length > self._original)[..., None], self._beyond, self._within)
        angles = position[..., None] * (frequencies if alpha is None else frequencies * alpha.exp())
        return angles.cos() * self._magnitude, angles.sin() * self._magnitude


def query_scale(model: ModelShape, position: Tensor, rope: bool) -> Tensor | None:
    """What queries at each position are multiplied by, FP32 in the shape of `position`, in layers with rotary
    embeddings or without: 1 within the original context (Ministral 3) or the floor (Llama 4). With `softmax_scaling`
    the logarithm. None where nothing is."""
    if model.softmax_scaling:
        return torch.log((position + 1).float())
    if model.query_scaling_beta is None or (model.query_scaling_floor is not None and rope):
        return None
    if model.query_scaling_floor is None:
        contexts = torch.floor(position / model.original_context)
    else:
        contexts = torch.floor((position + 1) / model.query_scaling_floor)
    return 1 + model.query_scaling_beta * torch.log(1 + contexts)


class _Frequencies(NamedTuple):
    """Frequencies (angle per position) of each pair in texts within the original context and in longer ones, and
    what cos and sin are multiplied by. Unscaled ones are `1 / powers`, powers being `base ** (2i / size)`."""

    within: Tensor
    beyond: Tensor
    magnitude: float = 1.0


def _default(powers: Tensor, factor: float, scaling: RopeScaling) -> _Frequencies:
    return _Frequencies(1 / powers, 1 / powers)


def _linear(powers: Tensor, factor: float, scaling: RopeScaling) -> _Frequencies:
    return _Frequencies(1 / powers / factor, 1 / powers / factor)


def _llama3(powers: Tensor, factor: float, scaling: RopeScaling) -> _Frequencies:
    """Llama 3.1: frequencies whose wavelength exceeds the original context over `low_freq_factor` are divided by
    `factor`, those below it over `high_freq_factor` are kept, and those in between are blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    periods = scaling["original"] / powers / (2 * math.pi)
    kept = ((periods - low) / (high - low)).clamp(0, 1)
    scaled = (kept + (1 - kept) / factor) / powers
    return _Frequencies(scaled, scaled)


def _yarn(powers: Tensor, factor: float, scaling: RopeScaling) -> _Frequencies:
    """YaRN (arXiv 2309.00071, section 3.2): pairs that rotate more than `beta_fast` times in the original context keep
    their frequency, those that rotate less than `beta_slow` times are divided by `factor`, with a ramp between."""
    pairs, original = len(powers), scaling["original"]

    def pair_rotating(times: float) -> float:
        return pairs * math.log(original / (times * 2 * math.pi)) / math.log(scaling["base"])

    low, high = pair_rotating(scaling.get("beta_fast") or 32), pair_rotating(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = ((torch.arange(pairs) - low) / (high - low or 0.001)).clamp(0, 1)
    scaled = (1 - ramp) / powers + ramp / (factor * powers)
    mscale, all_dimensions = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if scaling.get("attention_factor") is not None:
        magnitude = float(scaling["attention_factor"])
    elif mscale and all_dimensions:
        magnitude = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dimensions)
    else:
        magnitude = yarn_mscale(factor, 1.0)
    return _Frequencies(scaled, scaled, magnitude)


def _longrope(powers: Tensor, factor: float, scaling: RopeScaling) -> _Frequencies:
    """LongRoPE (arXiv 2402.13753): a divisor for each pair, and another one beyond the original context."""
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(scaling["original"]))
    short, long = (torch.tensor(scaling[name]) for name in ("short_factor", "long_factor"))
    return _Frequencies(1 / (short * powers), 1 / (long * powers), float(magnitude))


def _proportional(powers: Tensor, factor: float, scaling: RopeScaling) -> _Frequencies:
    """The first pairs of a head are rotated as they would be if all were, and the others stay as they are (Gemma 4)."""
    rotated = int(scaling["partial_rotary_factor"] * len(powers))
    if rotated > len(powers):
        raise ValueError(f"{rotated} of {len(powers)} pairs turn")
    scaled = (torch.arange(len(powers)) < rotated) / powers / factor
    return _Frequencies(scaled, scaled)


_SCALINGS: Mapping[str, Callable[[Tensor, float, RopeScaling], _Frequencies]] = {
    "default": _default,
    "dynamic": _default,  # it scales beyond max_position_embeddings alone, and no text here is as long
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


class LayerKind(NamedTuple):
    """The properties of a layer that its positions and masks depend on."""

    in_window: bool
    """Attention is in a sliding window, or in chunks."""
    rope: bool
    """Queries and keys have rotary embeddings."""


def layer_kind(model: ModelShape, layer: int) -> LayerKind:
    """A layer's kind."""
    return LayerKind(model.in_window(layer), model.has_rope(layer))


def keys_seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """As `sliding_window_mask`, and where there is none, that of all earlier keys."""
    mask = sliding_window_mask(length, window, device)
    return torch.ones(length, length, dtype=torch.bool, device=device).tril() if mask is None else mask


def sliding_window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Bool `[S, S]`: a query sees itself and the `window - 1` keys before it. None where all earlier keys are seen."""
    if window is None or window >= length:
        return None
    place = torch.arange(length, device=device)
    first = place[:, None] - window  # of comparisons alone: a matrix of distances would take eight bytes for each pair
    return (place <= place[:, None]) & (place > first)

"""What a user would take instead: a Llama in plain PyTorch, its linears in BF16 or by torch's own FP8 product.

FP32 weights under autocast to BF16, scaled_dot_product_attention, fused AdamW: no word of this project in it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_sections.common import Place, Shape


def to_fp8(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes under the tensor's own amax, and what decodes them, FP32 `[]`."""
    low, high = torch.aminmax(values.detach())
    scale = torch.finfo(dtype).max / torch.maximum(-low, high).float().clamp(min=1e-12)
    limit = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-limit, limit).to(dtype), scale.reciprocal()


def product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], fast: bool) -> Tensor:
    """`left [M, K]` times the transpose of `right [N, K]`, both stored by rows."""
    (a, a_inv), (b, b_inv) = left, right
    return torch._scaled_mm(a, b.t(), scale_a=a_inv, scale_b=b_inv, out_dtype=torch.bfloat16, use_fast_accum=fast)


def turned(codes: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return codes[0].t().contiguous(), codes[1]


class ScaledProduct(torch.autograd.Function):
    """All three GEMMs of a linear by torch._scaled_mm, under current scaling: E4M3, and E5M2 for gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        x, w = to_fp8(values, torch.float8_e4m3fn), to_fp8(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(*x, *w)
        return product(x, w, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, x_inv, w, w_inv = ctx.saved_tensors
        g = to_fp8(gradient, torch.float8_e5m2)
        return product(g, turned((w, w_inv)), fast=False), product(turned(g), turned((x, x_inv)), fast=False)


class Linear(nn.Linear):
    fp8 = False

    def forward(self, values: Tensor) -> Tensor:
        if not self.fp8:
            return F.linear(values, self.weight)
        rows = values.flatten(0, -2).bfloat16()
        product: Tensor = ScaledProduct.apply(rows, self.weight.bfloat16())  # type: ignore[no-untyped-call]
        return product.view(*values.shape[:-1], -1)


def half_turned(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat([-second, first], -1)


class Norm(nn.RMSNorm):
    def forward(self, values: Tensor) -> Tensor:
        return F.rms_norm(values, self.normalized_shape, self.weight.to(values.dtype), self.eps)  # else not fused


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.groups, self.head = shape.heads, shape.groups, shape.hidden // shape.heads
        self.norms = nn.ModuleList(Norm(shape.hidden, 1e-5) for _ in range(2))
        self.linears = nn.ModuleDict({name: Linear(*sizes, bias=False) for name, sizes in shape.linears().items()})

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        sizes = [self.heads * self.head, self.groups * self.head, self.groups * self.head]
        parts = self.linears["qkv"](self.norms[0](hidden)).split(sizes, -1)
        query, key, value = (part.view(batch, length, -1, self.head).transpose(1, 2) for part in parts)
        query, key = (part * cos + half_turned(part) * sin for part in (query, key))
        grouped = self.groups != self.heads
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        hidden = hidden + self.linears["proj"](attended.transpose(1, 2).flatten(2))
        gate, up = self.linears["fc1"](self.norms[1](hidden)).chunk(2, -1)
        out: Tensor = hidden + self.linears["fc2"](F.silu(gate) * up)
        return out


class Llama(nn.Module):
    def __init__(self, shape: Shape, layers: int, fp8: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        self.norm = Norm(shape.hidden, 1e-5)
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.output.weight = self.embedding.weight
        for module in self.modules():
            if isinstance(module, Linear):
                module.fp8 = fp8
        channels = shape.hidden // shape.heads
        angles = torch.arange(shape.length)[:, None] / 10000 ** (torch.arange(0, channels, 2) / channels)
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).bfloat16()
        for layer in self.layers:
            hidden = layer(hidden, self.cos, self.sin)
        logits: Tensor = self.output(self.norm(hidden))
        return logits


def stepper(
    shape: Shape, layers: int, place: Place, fp8: bool = False, change: Callable[[Llama], object] | None = None
) -> Callable[[Tensor], None]:
    """A function that makes a training step of tokens `[B, S + 1]`, of a model that `change` has seen."""
    torch.manual_seed(0)
    with torch.device(place.device):
        model = Llama(shape, layers, fp8)
    if change:
        change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step(tokens: Tensor) -> None:
        with torch.autocast(place.device.type, torch.bfloat16):
            logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step

"""The GEMMs by themselves: BF16, torch's own `_scaled_mm` per tensor and per row, and TE's linear with its casts; and
attention by itself.

At the tokens of a training step, and at the batches of decoding. What an export computes is among them: one scale for
a tensor is `static`, one for each row `channel`; decibels are those to the product of the decoded values in FP32.
Attention is the trainer's, over rows and over packed rows.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gpu_sections.casts import coded
from gpu_sections.common import Place, Report, Row, Shape, alone, attempt, peak_gb, recipes, shapes, sqnr, timed
from gpu_sections.plain import to_fp8
from precisionctl.codes.numerics import BLOCK
from precisionctl.evaluate.quantizers import GroupInputs
from precisionctl.precision import PRESETS
from precisionctl.trainer.backends.choose import make_backend
from precisionctl.trainer.backends.fp8_gemm import NativeBlocks
from precisionctl.trainer.model.attention.core_attention import CoreAttention
from precisionctl.trainer.sequences import PackedSequences, Positions

E4M3 = torch.float8_e4m3fn
DECODING = (1, 16, 64, 256)


def measure(place: Place, report: Report) -> None:
    presets = ("bf16", *recipes(place, report))
    for shape in shapes(place):
        training = shape.rows * shape.length
        for name, (size, out) in shape.linears().items():
            for tokens in (training, *(DECODING if shape is shapes(place)[0] else ())):
                row = {"shape": shape.name, "linear": name, "tokens": tokens, "in": size, "out": out}
                for kind, make in PRODUCTS.items():
                    attempt(report, row | {"by": kind}, partial(of_product, make, tokens, size, out, place))
        for preset in presets:
            row = {"shape": shape.name, "linear": "all of a layer", "tokens": training, "by": f"TE {preset}"}
            attempt(report, row, partial(of_layer, shape, preset, place))
    grouped = min(shapes(place), key=lambda one: one.groups)
    for window in (None, grouped.length // 4):
        for by in ("rows", "packed rows"):
            row = {"shape": grouped.name, "attention": by, "window": window}
            attempt(report, row, partial(of_attention, grouped, window, by == "packed rows", place))


Product = tuple[Callable[[], Tensor], Tensor | None]
"""A function to time, and what it should give."""


def of_product(make: Callable[[Tensor, Tensor], Product], tokens: int, size: int, out: int, place: Place) -> Row:
    torch.manual_seed(0)
    values = torch.randn(tokens, size, device=place.device).bfloat16()
    weight = (torch.randn(out, size, device=place.device) * 0.02).bfloat16()
    function, expected = make(values, weight)
    row = timed(function, place, repeats=20, warm=5)
    if expected is not None:
        row["decibels"] = sqnr(expected, function())
    return row | {"tflops": 2.0 * tokens * size * out / row["seconds"] / 1e12}


def bf16(values: Tensor, weight: Tensor) -> Product:
    return lambda: values @ weight.t(), None


def per_tensor(values: Tensor, weight: Tensor) -> Product:
    (x, x_inv), (w, w_inv) = to_fp8(values, E4M3), to_fp8(weight, E4M3)
    return _scaled(x, w, x_inv, w_inv)


def per_row(values: Tensor, weight: Tensor) -> Product:
    (x, x_inv), (w, w_inv) = _rows_to_fp8(values), _rows_to_fp8(weight)
    return _scaled(x, w, x_inv, w_inv)


def per_block(values: Tensor, weight: Tensor) -> Product:
    """Inputs in groups of 128, weights in squares: what an export in blocks computes."""
    x, w = GroupInputs(BLOCK, native=True).quantize(values).rows, coded(weight, (BLOCK, BLOCK))
    by_element = w[1].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    expected = x.summands() @ (w[0].float() * by_element[: len(weight), : weight.shape[1]]).t()
    return partial(NativeBlocks(*w).gemm, x), expected


def per_tensor_with_cast(values: Tensor, weight: Tensor) -> Product:
    """What dynamic scaling pays in inference: the input is cast in each call."""
    w, w_inv = to_fp8(weight, E4M3)

    def function() -> Tensor:
        x, x_inv = to_fp8(values, E4M3)
        return torch._scaled_mm(x, w.t(), scale_a=x_inv, scale_b=w_inv, out_dtype=torch.bfloat16, use_fast_accum=True)

    return function, None


PRODUCTS = {
    "BF16": bf16,
    "_scaled_mm, a scale per tensor": per_tensor,
    "_scaled_mm, a scale per row": per_row,
    "scaled_mm, a scale per block": per_block,
    "_scaled_mm and the cast of its input": per_tensor_with_cast,
}


def _scaled(x: Tensor, w: Tensor, x_inv: Tensor, w_inv: Tensor) -> Product:
    expected = (x.float() * x_inv) @ (w.float() * w_inv).t()
    scales = {"scale_a": x_inv, "scale_b": w_inv.t() if w_inv.dim() else w_inv}
    return partial(torch._scaled_mm, x, w.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=True), expected


def _rows_to_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    scale = 448 / values.abs().amax(1, keepdim=True).float().clamp(min=1e-12)
    return (values.float() * scale).to(E4M3), scale.reciprocal()


def of_layer(shape: Shape, preset: str, place: Place) -> Row:
    """A layer's four linears, forward and backward, as the trainer makes them."""
    with alone(place):
        row = _layer(shape, preset, place)
    return row | {"tflops": 6.0 * shape.rows * shape.length * shape.layer_weights() / row["seconds"] / 1e12}


def _layer(shape: Shape, preset: str, place: Place) -> Row:
    backend = make_backend(place.backend, PRESETS[preset], torch.bfloat16, place.device)
    linears = [backend.linear(f"decoder.layers.0.{name}", *sizes, False) for name, sizes in shape.linears().items()]
    tokens = shape.rows * shape.length
    inputs = [torch.randn(tokens, size, device=place.device).bfloat16() for size, _ in shape.linears().values()]
    inputs = [values.requires_grad_() for values in inputs]
    gradients = [torch.randn(tokens, out, device=place.device).bfloat16() for _, out in shape.linears().values()]

    def function() -> None:
        with backend.forward_pass():
            outs = [linear(values) for linear, values in zip(linears, inputs, strict=True)]
        torch.autograd.backward(outs, gradients)
        backend.after_backward()

    return timed(function, place, repeats=10, warm=3)


def of_attention(shape: Shape, window: int | None, packed: bool, place: Place) -> Row:
    """One layer's, forward and backward, of rows that are one text each; `packed` as texts that share a row have it."""
    backend = make_backend(place.backend, PRESETS["bf16"], torch.bfloat16, place.device)
    head = shape.hidden // shape.heads
    texts = PackedSequences((shape.length,) * shape.rows) if packed else None
    positions = Positions(None, None, window, texts, (shape.rows, shape.length))
    with alone(place):
        core = CoreAttention(shape.model(1), backend, head**-0.5)
        sizes = [(shape.rows, shape.length, heads, head) for heads in (shape.heads, shape.groups, shape.groups)]
        inputs = [torch.randn(size, device=place.device, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
        gradient = torch.randn(shape.rows * shape.length, shape.hidden, device=place.device, dtype=torch.bfloat16)
        row = timed(lambda: core(*inputs, positions).backward(gradient), place, repeats=10, warm=3)
        return row | {"memory_gb": peak_gb(place)}

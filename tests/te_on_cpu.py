"""Transformer Engine's own Python on a CPU: its compiled functions, and CUDA, are stood in for in plain PyTorch.

`install()` comes before TE is imported, from its Python wheel, which has no compiled code. Modules, autocast,
quantizers, recipe state, extra state and FusedAdam are then TE's source as published; what its kernels compute is
written below after their source (`transformer_engine/common`), as far as linears and norms under per-tensor scaling go.
Tensors "on CUDA" lie in memory.

It proves what is Python in TE: which calls are accepted, which amax lands where, when a scale is updated, what is saved
and loaded. It does not prove what a kernel rounds: `tests/gpu` does, on a GPU.
"""

import enum
import importlib
import os
import sys
import types
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class DType(enum.IntEnum):
    """NVTEDType of transformer_engine.h."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


CODES = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
DTYPES = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
FORWARD = [f"GEMM{gemm}_{role}" for gemm in (1, 2, 3) for role in ("INPUT", "WEIGHT", "OUTPUT")]
BACKWARD = [f"{role}{gemm}" for gemm in (1, 2, 3) for role in ("GRAD_OUTPUT", "GRAD_INPUT")]
LARGEST = torch.finfo(torch.float32).max


def largest_code(dtype: int) -> float:
    return torch.finfo(CODES[DType(dtype)]).max


def current_scale(amax: Tensor, quantizer: Any) -> Tensor:
    """recipe_common.cuh, compute_scale_from_amax."""
    amax = amax.clamp(min=quantizer.amax_epsilon)
    scale = torch.full((), largest_code(quantizer.dtype)) / amax
    scale = torch.where(scale.isinf(), LARGEST, scale)
    scale = torch.where(amax.isfinite() & (amax != 0), scale, 1.0)
    if quantizer.force_pow_2_scales:
        scale = torch.exp2(scale.log2().floor())
    return scale.reshape(1)


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """A cast under a tensor's scale; under delayed scaling its amax is left in the quantizer, by atomic maximum."""
    if quantizer is None:
        return tensor
    values = tensor.detach().float()
    amax = values.abs().amax().nan_to_num(0.0, torch.inf) if values.numel() else torch.zeros(())
    if hasattr(quantizer, "scale"):
        scale = quantizer.scale.detach().reshape(1).clone()
        quantizer.amax.copy_(torch.fmax(quantizer.amax, amax.reshape(quantizer.amax.shape)))
    else:
        scale = current_scale(amax, quantizer)
    limit = largest_code(quantizer.dtype)
    codes = (values * scale).clamp(-limit, limit).to(CODES[DType(quantizer.dtype)]).view(torch.uint8)
    if output is not None:
        output._data.copy_(codes)
        output._scale_inv.copy_(scale.reciprocal())
        if output._transpose is not None:
            output._transpose.copy_(_transposed(codes))
            output._transpose_invalid = False
        return output
    return _stored(codes, scale.reciprocal(), quantizer, tensor.dtype)


def _stored(codes: Tensor, scale_inv: Tensor, quantizer: Any, dtype: torch.dtype) -> Any:
    """As on Hopper: rows for one GEMM, and a transposed copy where another wants columns."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    parts = {
        "data": codes if quantizer.rowwise_usage else None,
        "fp8_scale_inv": scale_inv,
        "fp8_dtype": quantizer.dtype,
        "data_transpose": _transposed(codes) if quantizer.columnwise_usage else None,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(**parts, fake_dtype=dtype)
    return Float8Tensor(shape=codes.shape, dtype=dtype, device=codes.device, **parts)


def _transposed(codes: Tensor) -> Tensor:
    """`[..., columns]` to `[columns, ...]`."""
    return codes.movedim(-1, 0).contiguous()


def dequantize(stored: Any, dtype: int) -> Tensor:
    return _decoded(stored).to(DTYPES[DType(dtype)])


def _decoded(operand: Any) -> Tensor:
    codes, scale_inv = _codes(operand)
    return codes if scale_inv is None else codes * scale_inv


def _codes(operand: Any) -> tuple[Tensor, Tensor | None]:
    """Values as FP32 and what they are multiplied by; None for a tensor that is not FP8."""
    if not hasattr(operand, "_fp8_dtype"):
        return operand.float(), None
    dtype = CODES[DType(operand._fp8_dtype)]
    rows, columns = operand._data, operand._transpose
    if rows is None or (columns is not None and operand._transpose_invalid):
        rows = columns.movedim(0, -1) if rows is None else rows
    return rows.view(dtype).float() if rows.is_contiguous() else rows.contiguous().view(dtype).float(), operand._scale_inv


def generic_gemm(
    A, transa, B, transb, D, quantizer, out_dtype, bias, bias_dtype, gelu, gelu_in, grad, workspace, workspace_size,
    accumulate, use_split_accumulator, comm_overlap=None, comm_type=None, extra_output=None, bulk_overlap=False,
    alpha=1.0, beta=None,
):  # fmt: skip
    """cuBLAS stores columns first: the rows of D are those of op(B) times op(A)."""
    assert not gelu and comm_overlap is None, "not stood in for"
    (left, left_inv), (right, right_inv) = _codes(B), _codes(A)
    shape = left.shape[:-1] if not transb else left.shape[-1:]
    left, right = left.flatten(0, -2), right.flatten(0, -2)
    product = (left.mT if transb else left) @ (right.mT if transa else right)
    for scale_inv in (left_inv, right_inv):
        product = product if scale_inv is None else product * scale_inv
    bias_grad = None
    if bias is not None and grad:
        bias_grad = _decoded(B).flatten(0, -2).sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias.float()
    product = product.view(*shape, product.shape[-1])
    if quantizer is not None:
        return quantize(product, quantizer), bias_grad, None, extra_output
    if D is None:
        kind = DTYPES[DType(out_dtype)] if out_dtype is not None else A.dtype
        return product.to(kind), bias_grad, None, extra_output
    D.copy_(D + product.view(D.shape) if accumulate else product.view(D.shape))
    return D, bias_grad, None, extra_output


def te_general_grouped_gemm(
    A, transa, B, transb, D, D_type, m_splits, bias, bias_type, single_output, pre_gelu_out, grad, workspace,
    workspace_size, accumulate, use_split_accumulator, sm_count,
):  # fmt: skip
    outs = torch.split(D[0], list(m_splits)) if single_output else D
    for i, out in enumerate(outs):
        empty = bias[i].numel() == 0
        _, bias_grad, _, _ = generic_gemm(
            A[i], transa, B[i], transb, out, None, None, None if empty else bias[i], bias_type, False, None, grad,
            None, 0, accumulate, use_split_accumulator,
        )  # fmt: skip
        if bias_grad is not None:
            bias[i].copy_(bias_grad)
    return bias


def bgrad_quantize(grad_output: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    bias_grad = grad_output.detach().float().flatten(0, -2).sum(0).to(grad_output.dtype)
    return bias_grad, quantize(grad_output, quantizer)


def split_quantize(tensor: Tensor, sections: list[int], quantizers: list[Any], disable_bulk: bool = False) -> list[Any]:
    parts = torch.split(tensor, list(sections))
    return [quantize(part.contiguous(), one) for part, one in zip(parts, quantizers, strict=True)]


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _normed(out: Tensor, ln_out: Tensor | None, quantizer: Any, dtype: torch.dtype) -> Any:
    """normalization.cpp: only delayed scaling casts the FP32 values themselves."""
    if quantizer is not None and hasattr(quantizer, "scale"):
        stored = quantize(out, quantizer)
        stored._dtype = dtype
        return stored
    rounded = out.to(dtype)
    if quantizer is not None:
        return quantize(rounded, quantizer)
    return rounded if ln_out is None else ln_out.copy_(rounded)


def rmsnorm_fwd(x, weight, eps, ln_out, quantizer, dtype, sm_margin, zero_centered):
    wide = x.float()
    rsigma = torch.rsqrt(wide.square().mean(-1) + eps)
    out = wide * rsigma[..., None] * _gamma(weight, zero_centered)
    return _normed(out, ln_out, quantizer, x.dtype), None, rsigma


def layernorm_fwd(x, weight, bias, eps, ln_out, quantizer, dtype, sm_margin, zero_centered):
    wide = x.float()
    mu = wide.mean(-1)
    rsigma = torch.rsqrt(wide.var(-1, correction=0) + eps)
    out = (wide - mu[..., None]) * rsigma[..., None] * _gamma(weight, zero_centered) + bias.float()
    return _normed(out, ln_out, quantizer, x.dtype), mu, rsigma


def _norm_gradients(function, dz, x, *parameters):
    leaves = [part.detach().float().requires_grad_() for part in (x, *parameters)]
    with torch.enable_grad():
        function(*leaves).backward(dz.float())
    return [leaf.grad.to(x.dtype) for leaf in leaves]


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered):
    def function(values, weight):
        # eps is in rsigma alone: mean square = rsigma**-2 - eps, with eps constant
        eps = rsigma.float().pow(-2) - x.float().square().mean(-1)
        return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps[..., None]) * _gamma(weight, zero_centered)

    return _norm_gradients(function, dz.view_as(x), x, gamma)


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered):
    def function(values, weight, bias):
        eps = rsigma.float().pow(-2) - x.float().var(-1, correction=0)
        spread = values.var(-1, correction=0, keepdim=True) + eps[..., None]
        normed = (values - values.mean(-1, keepdim=True)) * torch.rsqrt(spread)
        return normed * _gamma(weight, zero_centered) + bias

    return _norm_gradients(function, dz.view_as(x), x, gamma, torch.zeros_like(gamma))


def fused_amax_and_scale_update_after_reduction(reduced, histories, scales, algorithm, dtype, margin):
    """delayed_scaling.cu: one block of threads for each tensor."""
    last = torch.split(reduced, [len(scale) for scale in scales])
    limit = torch.tensor(largest_code(dtype) * 2.0**-margin)
    for history, scale, amaxes in zip(histories, scales, last, strict=True):
        for column in range(len(scale)):
            now = amaxes[column] if amaxes[column] != 0 else history[0, column].clone()
            rows = [now, *history[1:, column]]
            amax = torch.stack(rows).nan_to_num(0.0, torch.inf).amax() if algorithm == "max" else now
            if now != 0:
                history[:, column] = torch.stack([*rows[1:], now]) if len(rows) > 1 else now
            history[0, column] = 0
            if amax > 0 and amax.isfinite():
                new = limit / amax
                scale[column] = LARGEST if new.isinf() else new


def fused_multi_row_padding(source: Tensor, out: Tensor, counts: list[int], padded: list[int]) -> None:
    out.zero_()
    for rows, place in zip(torch.split(source, list(counts)), torch.split(out, list(padded)), strict=True):
        place[: len(rows)] = rows


def fused_multi_row_unpadding(source: Tensor, out: Tensor, padded: list[int], counts: list[int]) -> None:
    for rows, place in zip(torch.split(source, list(padded)), torch.split(out, list(counts)), strict=True):
        place.copy_(rows[: len(place)])


def multi_tensor_adam(chunk, noop, lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay):
    """multi_tensor_adam.cu; mode 1 is AdamW. Lists: gradients, parameters, both moments, and FP32 masters if any."""
    assert mode == 1, "not stood in for"
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, m, v, *master in zip(*lists, strict=True):
        grad, values = gradient.float(), (master[0] if master else parameter).float()
        m.copy_(beta1 * m.float() + (1 - beta1) * grad)
        v.copy_(beta2 * v.float() + (1 - beta2) * grad * grad)
        update = (m.float() / first) / ((v.float() / second).sqrt() + epsilon) + weight_decay * values
        values = values - lr * update
        parameter.copy_(values)
        if master:
            master[0].copy_(values)


def absent(name: str) -> Any:
    def function(*arguments: Any, **keywords: Any) -> None:
        raise NotImplementedError(f"{name} is not stood in for")

    return function


class Members(type):
    """Of a class or an enumeration that only has to be named."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = len(vars(cls))  # one that no other has
        setattr(cls, name, value)
        return value


class Empty(types.ModuleType):
    """A module in which there is everything, and nothing that works."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return Members(name, (), {})
        return absent(f"{self.__name__}.{name}")


CONSTANTS = {
    "DType": DType,
    "FP8FwdTensors": enum.IntEnum("FP8FwdTensors", FORWARD, start=0),
    "FP8BwdTensors": enum.IntEnum("FP8BwdTensors", BACKWARD, start=0),
    "NVTE_Fused_Attn_Backend": enum.IntEnum(
        "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    ),
    "get_cublasLt_version": lambda: 130200,
    "get_cudnn_version": lambda: 92000,
    "get_num_cublas_streams": lambda: 4,
}

STOOD_IN_FOR = (
    quantize, dequantize, generic_gemm, te_general_grouped_gemm, bgrad_quantize, split_quantize, rmsnorm_fwd,
    rmsnorm_bwd, layernorm_fwd, layernorm_bwd, fused_amax_and_scale_update_after_reduction, fused_multi_row_padding,
    fused_multi_row_unpadding, multi_tensor_adam,
)  # fmt: skip


class OnCpu(TorchFunctionMode):
    """What is asked of "cuda" is done on the CPU, and says that it is on CUDA."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if function == torch.Tensor.is_cuda.__get__:
            return True
        if name == "cuda":
            return arguments[0]
        keywords = {key: _cpu(value) for key, value in (keywords or {}).items()}
        return function(*map(_cpu, arguments), **keywords)


def _cpu(value: Any) -> Any:
    is_cuda = (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.partition(":")[0] == "cuda"
    )
    return torch.device("cpu") if is_cuda else value


def _enter_packages() -> None:
    """The stand-in for compiled code, and empty modules for kernels in Triton and for ONNX, which linears do not need."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TE's own switch: its library is not looked for
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
    extension = Empty("transformer_engine_torch")
    vars(extension).update(CONSTANTS | {function.__name__: function for function in STOOD_IN_FOR})
    sys.modules["transformer_engine_torch"] = extension
    root = Path(common.__file__).parents[1]  # type: ignore[arg-type]
    kernels = [path.relative_to(root) for part in ("common", "pytorch") for path in (root / part / "triton").glob("*.py")]
    for path in (*kernels, Path("pytorch/onnx_extensions.py")):
        name = ".".join(("transformer_engine", *path.with_suffix("").parts)).removesuffix(".__init__")
        sys.modules[name] = Empty(name)


def _pretend_cuda() -> None:
    of_hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="none", total_memory=2**30)
    answers = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_properties": of_hopper,
        "get_device_name": "a CPU that stands in",
        "synchronize": None,
        "is_current_stream_capturing": False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.version.cuda = "13.0"


def _in_backward_too() -> None:
    """A mode is left for the functions that it is told of, and one of them runs the backward."""
    run = torch.autograd._engine_run_backward

    def within(*arguments: Any, **keywords: Any) -> Any:
        with OnCpu():
            return run(*arguments, **keywords)

    torch.autograd._engine_run_backward = within


def install() -> None:
    """Enter the stand-ins, for good, and import TE, which warns of what it misses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _enter_packages()
        _pretend_cuda()
        _in_backward_too()
        OnCpu().__enter__()
        importlib.import_module("transformer_engine.pytorch")


def pytest_configure() -> None:
    """As a plugin, `python -m pytest -p te_on_cpu tests/gpu`."""
    install()

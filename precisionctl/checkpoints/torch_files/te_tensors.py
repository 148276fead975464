"""Transformer Engine's FP8 weights in pickles: inert stand-ins for the classes and functions that the pickles name.

A quantized tensor is pickled as a call: of a class method of Float8Tensor and so on (by `getattr`, TE 1.3 to 2.15), or
of a module's function (since 2.16). Arguments have been added over time, always at the end:

    Float8Tensor             data, DType, scale_inv, dtype [, shape [, transposed data]]
    Float8BlockwiseQTensor   shape, data, scale_inv, (both columnwise), DType, dtype, quantizer, 2-D? [, format]
    MXFP8Tensor              data, scale_inv, (both columnwise), DType, dtype [, shape [, quantizer [, swizzled?]]]

(transformer_engine/pytorch/tensor/*.py, __reduce_ex__, of v1.3 to v2.20.) In 2.14 and 2.15 tensors on the CPU were
pickled decoded, as plain tensors. Nothing of Transformer Engine is imported.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from precisionctl.errors import UnsafePickle, shown


class _TeDType:
    """Stands in for TE's enum of dtypes, which is in `transformer_engine_extensions` up to 1.7, then in
    `transformer_engine_torch`, and a Python enum since 2.17. It is pickled as a number (a call, or an object with
    state) or by name."""

    def __init__(self, number: object = None) -> None:
        self.number = number

    def __setstate__(self, number: object) -> None:
        self.number = number


class LocatedFp8Weight(NamedTuple):
    """An FP8 weight: where its codes are (uint8 `[rows, columns]`), where the scale_inv of its blocks is (a grid that
    TE may have padded), and the size of a block in rows and columns; None for one scale_inv for the tensor. It is a
    tuple because a pickle cannot modify a tuple that it has made."""

    codes: Any
    scale_inv: Any
    block: tuple[int, int] | None


def _float8(data: Any, dtype: Any, scale_inv: Any, *rest: Any) -> LocatedFp8Weight:
    if data is None and len(rest) == 3:
        raise ValueError("an FP8 weight that is stored only transposed")
    return _weight(data, dtype, scale_inv, None)


def _blockwise(_shape: Any, data: Any, scale_inv: Any, *rest: Any) -> LocatedFp8Weight:
    dtype, in_2d = rest[2], rest[5]
    if in_2d is not True:
        raise ValueError("an FP8 weight whose blocks are parts of rows")
    return _weight(data, dtype, scale_inv, (128, 128))


def _mxfp8(data: Any, scale_inv: Any, *rest: Any) -> LocatedFp8Weight:
    if len(rest) > 6 and rest[6] is not False:
        raise ValueError("an MXFP8 weight whose scales are swizzled for one GPU's GEMM")
    return _weight(data, rest[2], scale_inv, (1, 32))


def _weight(data: Any, dtype: Any, scale_inv: Any, block: tuple[int, int] | None) -> LocatedFp8Weight:
    if not isinstance(dtype, _TeDType):
        raise ValueError(f"{shown(dtype)} as the dtype of FP8 codes")
    # The numbers changed in 2.4: E4M3 was 6 and became 7, which was E5M2 before; 6 became BF16. As a weight's codes are
    # E4M3 under every recipe (recipe/__init__.py: `Pure E5M2 training is not supported`) and never BF16, both numbers
    # mean E4M3 here
    if type(dtype.number) is not int or dtype.number not in (6, 7):
        raise ValueError(f"FP8 codes of TE's dtype number {shown(dtype.number)}, which is not E4M3")
    if data is None:
        raise ValueError("an FP8 weight that is stored only columnwise")
    return LocatedFp8Weight(data, scale_inv, block)


class _Quantizer:
    """Stands in for the other objects that are pickled with a quantized tensor; it does nothing."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


_NAMES: Mapping[str, Callable[..., Any]] = {
    "Float8Tensor": _float8,
    "_make_float8_tensor_in_reduce_ex": _float8,
    "Float8BlockwiseQTensor": _blockwise,
    "_make_float8_blockwise_tensor_in_reduce_ex": _blockwise,
    "MXFP8Tensor": _mxfp8,
    "_make_mxfp8_tensor_in_reduce_ex": _mxfp8,
    "DType": _TeDType,
    **dict.fromkeys(
        ("Float8Quantizer", "Float8CurrentScalingQuantizer", "Float8BlockQuantizer", "MXFP8Quantizer"), _Quantizer
    ),
    "Float8BlockScaleTensorFormat": _Quantizer,
}
"""A tensor class is replaced by what its class method `_make_in_reduce_ex` does, as pickles use it for nothing else."""

_MODULES = ("transformer_engine", "transformer_engine_torch", "transformer_engine_extensions")


def attribute(owner: Any, name: Any) -> Any:
    """Stands in for `getattr`, which pickles of class methods (and, in some Pythons, of enums) call. It looks nothing
    up. Raises UnsafePickle for any other attribute."""
    for call in (_float8, _blockwise, _mxfp8):
        if owner is call and type(name) is str and name == "_make_in_reduce_ex":
            return call
    if owner is _TeDType and type(name) is str and name == "kFloat8E4M3":
        return _TeDType(7)
    raise UnsafePickle(
        f"a pickle asks for getattr of {shown(name)}, which is not on the allow-list", do="Nothing was executed."
    )


def stand_in(module: str, name: str) -> Any:
    """The stand-in for a global that a pickle names; None if it is not one of TE's."""
    if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):
        return attribute
    return _NAMES.get(name) if module.split(".")[0] in _MODULES else None

"""Write ggml_blocks.safetensors: blocks of each of ggml's formats, and the values that ggml decodes them to; and rows
of values, with the blocks that ggml makes of them.

    python tests/golden/ggml_blocks.py libggml-base.so tests/golden/ggml_blocks.safetensors

The library is llama.cpp's, of llama-cpp-python 0.3.36, built on x86-64. Blocks are random bytes, of those that decode
to finite numbers. Values are random, and at the ends of what a search of scales meets.
"""

import ctypes
import sys

import numpy as np
from safetensors.numpy import save_file

SIZES = {
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q2_K": (256, 84),
    "q3_K": (256, 110),
    "q4_K": (256, 144),
    "q5_K": (256, 176),
    "q6_K": (256, 210),
    "iq4_nl": (32, 18),
    "iq4_xs": (256, 136),
    "mxfp4": (32, 17),
    "nvfp4": (64, 36),
}
"""Values and bytes of a block (ggml-common.h)."""

BLOCKS = {32: 32, 64: 32, 256: 6}


MADE = ("q4_0", "q5_0", "q5_1", "q8_0", "q4_K", "q5_K", "q6_K")
"""Formats whose blocks precisionctl makes."""


def rows(generator: np.random.Generator) -> np.ndarray:
    """FP32 `[rows, 256]`."""
    normal = generator.standard_normal
    sizes = [2.0**power for power in (-148, -140, -126, -100, -70, -50, -40, -24, -15, -6, -6, -6, 0, 8)]
    near_zero = np.where(generator.random((4, 256)) < 0.5, -1, -1e-7 * generator.random((4, 256)))
    found = [
        *(normal((2, 256)) * size for size in sizes),
        normal((4, 256)) * 2.0 ** generator.integers(-60, 10, (4, 256)),  # of many magnitudes in a group
        (normal((4, 16, 16)) * 2.0 ** generator.integers(-60, 10, (4, 16, 1))).reshape(4, 256),  # and in a block
        generator.standard_cauchy((4, 256)).clip(-1e4, 1e4),
        normal((4, 256)) * (generator.random((4, 256)) < 0.05),  # zeros of both signs
        generator.integers(0, 3, (2, 256)) / 4,
        -generator.integers(0, 3, (2, 256)) / 4,
        -(generator.random((4, 256)) ** generator.integers(1, 30, (4, 256))),
        near_zero,  # ggml rounds numbers beyond 2^22 to something else
        np.array([[0.0], [-0.0], [1.0], [-1.0], [0.3], [-0.3], [6e4], [-6e4]]) * np.ones(256),
        generator.uniform(-6e4, 6e4, (2, 256)),
    ]
    values = np.concatenate(found).astype(np.float32)
    values[::2] = (values[::2].view(np.uint32) & 0xFFFF0000).view(np.float32)  # BF16
    return values


def encoded(library: ctypes.CDLL, name: str, values: np.ndarray) -> np.ndarray:
    encode = getattr(library, f"quantize_row_{name}_ref")
    encode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    block, size = SIZES[name]
    found = np.empty((len(values), 256 // block * size), np.uint8)
    encode(values.ctypes.data, found.ctypes.data, values.size)
    return found


def decoded(library: ctypes.CDLL, name: str, block: np.ndarray, values: int) -> np.ndarray:
    decode = getattr(library, f"dequantize_row_{name}")
    decode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    found = np.empty(values, np.float32)
    decode(block.ctypes.data, found.ctypes.data, values)
    return found


def main(path: str, target: str) -> None:
    library, generator = ctypes.CDLL(path), np.random.default_rng(0)
    tensors = {}
    for name, (values, size) in SIZES.items():
        blocks, numbers = [], []
        while len(blocks) < BLOCKS[values]:
            block = generator.integers(0, 256, size, dtype=np.uint8)
            number = decoded(library, name, block, values)
            if np.isfinite(number).all():
                blocks.append(block)
                numbers.append(number)
        tensors |= {f"{name}.blocks": np.stack(blocks), f"{name}.values": np.stack(numbers)}
    values = rows(generator)
    tensors |= {"rows": values, **{f"{name}.of_rows": encoded(library, name, values) for name in MADE}}
    save_file(tensors, target)


main(*sys.argv[1:])

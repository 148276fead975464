"""Write ggml_blocks.safetensors: blocks of each of ggml's formats, and the values that ggml decodes them to.

    python tests/golden/ggml_blocks.py libggml-base.so tests/golden/ggml_blocks.safetensors

The library is llama.cpp's, of llama-cpp-python 0.3.36. Blocks are random bytes, of those that decode to finite numbers.
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
    save_file(tensors, target)


main(*sys.argv[1:])

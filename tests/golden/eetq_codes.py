"""Writes `eetq_codes.safetensors`: weights as EETQ codes them, and as `<case>.decoded` what its codes stand for.

    python eetq_codes.py EETQ     with the sources of NetEase-FuXi/EETQ, 465e972, and g++

Its own `symmetric_quantize` codes them, from csrc/cutlass_kernels/cutlass_preprocessors.cc, with what it needs of CUDA
and CUTLASS in a few lines here: FP16, and the names of layouts and GPUs. It gives the codes in order, too: a value is
one of these times the scale, in FP16.
"""

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

CUDA = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>
using half = _Float16;
namespace fastertransformer {
template <class... T> std::string fmtstr(const char* text, T...) { return text; }
inline int getSMVersion() { return 80; }
}
#define FT_CHECK(ok) if (!(ok)) throw std::runtime_error(#ok)
#define FT_CHECK_WITH_INFO(ok, info) if (!(ok)) throw std::runtime_error(info)
"""
CUTLASS = """
#pragma once
#include <cstdint>
#include <type_traits>
namespace cutlass {
struct half_t; struct bfloat16_t; struct uint4b_t;
template <class T> struct sizeof_bits { static constexpr int value = 8 * sizeof(T); };
template <> struct sizeof_bits<half_t> { static constexpr int value = 16; };
template <> struct sizeof_bits<bfloat16_t> { static constexpr int value = 16; };
template <> struct sizeof_bits<uint4b_t> { static constexpr int value = 4; };
namespace platform { using std::enable_if; }
namespace layout { struct RowMajor; struct ColumnMajor; }
namespace arch {
struct Sm70 { static constexpr int kMinComputeCapability = 70; };
struct Sm75 { static constexpr int kMinComputeCapability = 75; };
struct Sm80 { static constexpr int kMinComputeCapability = 80; };
struct OpMultiplyAdd; struct OpMultiplyAddDequantizeInterleavedBToA;
} }
"""
ENTRY = """
#include "cutlass_preprocessors.cc"
extern "C" void code(int8_t* stored, int8_t* in_order, half* scales, const half* weight, size_t rows, size_t columns) {
  fastertransformer::symmetric_quantize<half, half>(
      stored, in_order, scales, weight, {rows, columns}, fastertransformer::QuantType::INT8_WEIGHT_ONLY);
}
"""
NAMES = ("cutlass", "fast_math", "matrix_coord", "pitch_linear_coord", "layout/matrix", "numeric_types", "arch/arch")


def compiled(sources: Path, folder: Path) -> ctypes.CDLL:
    (folder / "cuda_utils.h").write_text(CUDA)
    (folder / "entry.cc").write_text(ENTRY)
    for name in (*NAMES, "arch/mma", "platform/platform"):
        path = folder / "cutlass" / f"{name}.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CUTLASS if name == "cutlass" else '#include "cutlass/cutlass.h"\n')
    (folder / "cutlass_extensions" / "arch").mkdir(parents=True)
    (folder / "cutlass_extensions" / "arch" / "mma.h").write_text("")
    includes = (folder, sources / "csrc/cutlass_kernels", sources / "csrc/cutlass_extensions/include")
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", *(f"-I{each}" for each in includes)]
    subprocess.run([*command, folder / "entry.cc", "-o", folder / "eetq.so"], check=True)
    return ctypes.CDLL(str(folder / "eetq.so"))


def main() -> None:
    torch.manual_seed(0)
    stored = {}
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(Path(sys.argv[1]), Path(folder))
        for case, (out, inputs) in {"wide": (64, 192), "tall": (128, 64)}.items():
            weight = (torch.randn(out, inputs) * torch.rand(out, 1)).half().t().contiguous()
            words, in_order = torch.zeros(2, inputs, out, dtype=torch.int8)
            scales = torch.zeros(out, dtype=torch.float16)
            pointers = (ctypes.c_void_p(each.data_ptr()) for each in (words, in_order, scales, weight))
            library.code(*pointers, ctypes.c_size_t(inputs), ctypes.c_size_t(out))
            stored |= {f"{case}.weight": words.clone(), f"{case}.weight_scales": scales}
            stored[f"{case}.decoded"] = (in_order.half() * scales).t().contiguous()
    save_file(stored, Path(__file__).with_suffix(".safetensors"))


if __name__ == "__main__":
    main()

"""Writes `nvfp4.safetensors`: what Transformer Engine's own reference of NVFP4 makes of a GEMM's tensors, and of others
at the ends of the range.

    pip install --no-deps --target SITE transformer_engine==2.20.2 einops; pip install --target SITE pydantic
    PYTHONPATH=SITE:tests/helpers python tests/golden/nvfp4.py FILE     on any CPU

The reference is pytorch/custom_recipes/reference_nvfp4.py, with the random Hadamard transform for input and gradient
and 16 x 16 blocks for the weight, as `nvfp4_ref_rht_2d_factory` has it. It rounds gradients to nearest.
"""

import sys
from pathlib import Path

import te_on_cpu
import torch
from safetensors.torch import save_file
from torch import Tensor

TOKENS, IN, OUT = 64, 64, 96


def tensors() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    values, weight, gradient = normal(TOKENS, IN), normal(OUT, IN), normal(TOKENS, OUT)
    values[:, 5] *= 300  # an outlier channel
    values[0, :16] = weight[:16, 16:32] = 0
    gradient[7] /= 1000
    gradient[:, 3] *= 100
    made = {"input": values, "weight": weight, "grad_output": gradient}
    made |= {"spread": normal(16, IN) * torch.exp2(torch.randint(-60, 20, (16, IN), generator=random))}
    made |= {"zeros": torch.zeros(16, 32), "tiny": normal(16, 32) * 2.0**-110}
    made |= {"ties": torch.arange(-512, 512).reshape(16, 64) * (6 / 512)}
    return {name: each.bfloat16() for name, each in made.items()} | {"FP32": normal(16, IN)}


def main(file: Path) -> None:
    te_on_cpu.install()
    from transformer_engine.pytorch.custom_recipes.gemm import GEMMType, MMParams
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef, nvfp4_ref_rht_2d_factory
    from transformer_engine.pytorch.quantization import QuantizerRole

    stored, made = tensors(), {}
    for name, values in tensors().items():
        role = QuantizerRole(module_type="linear", tensor_type="weight" if name == "weight" else "input")
        quantizer: NVFP4QuantizerRef = nvfp4_ref_rht_2d_factory(role)
        made[name] = cast = quantizer.quantize(values)
        for copy, codes, scale_inv, amax in (
            ("rows", cast.data, cast.scale, cast.global_amax_row),
            ("columns", cast.data_t, cast.scale_t, cast.global_amax_col),
        ):
            stored |= {
                f"{name}.{copy}.codes": codes,
                f"{name}.{copy}.scale_inv": scale_inv,
                f"{name}.{copy}.amax": amax,
            }
    x, w, g = (made[name] for name in ("input", "weight", "grad_output"))
    for product, kind, (left, left_scale), (right, right_scale), both in (
        ("y", GEMMType.FPROP, (x.data, x.scale), (w.data, w.scale), (x, w)),
        ("dgrad", GEMMType.DGRAD, (g.data, g.scale), (w.data_t, w.scale_t), (g, w)),
        ("wgrad", GEMMType.WGRAD, (g.data_t, g.scale_t), (x.data_t, x.scale_t), (g, x)),
    ):
        of_both = {"qresult_x": both[0], "qresult_w": both[1]}
        stored[product] = quantizer.qgemm(
            left, right, MMParams(), torch.float32, left_scale, right_scale, gemm_type=kind, **of_both
        )
    save_file({name: each.contiguous() for name, each in stored.items()}, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

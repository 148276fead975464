"""Writes `mlx_codes.safetensors`: `values` as MLX stores them, and as `<case>.decoded` what `mx.dequantize` gives.

    python mlx_codes.py     where `mlx[cpu]` is installed

By MLX 0.32.4 on a CPU. Rows have large and tiny groups, one of zeros and one of equal numbers. `experts` is a stack of
two, each with a global scale.
"""

from pathlib import Path

import mlx.core as mx

AFFINE = [(bits, group, mx.bfloat16) for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 128)]
AFFINE += [(bits, 64, dtype) for bits in (3, 4, 8) for dtype in (mx.float16, mx.float32)]
AFFINE += [(bits, 64, mx.bfloat16) for bits in (4, 8)]


def main() -> None:
    mx.random.seed(0)
    weight = mx.random.normal((12, 128)) * 2.0 ** mx.random.randint(-12, 4, (12, 1))
    weight[2], weight[3] = 0, -0.3
    stored = {"values": weight}
    for bits, group, dtype in AFFINE:
        case = f"affine-{bits}-{group}-{str(dtype).rpartition('.')[2]}"
        made = dict(zip(("weight", "scales", "biases"), mx.quantize(weight.astype(dtype), group, bits), strict=True))
        stored |= {f"{case}.{kind}": each for kind, each in made.items()}
        stored[f"{case}.decoded"] = mx.dequantize(*made.values(), group, bits)
    for mode in ("mxfp4", "mxfp8", "nvfp4"):
        codes, scales = mx.quantize(weight.astype(mx.bfloat16), mode=mode)
        stored |= {f"{mode}.weight": codes, f"{mode}.scales": scales}
        stored[f"{mode}.decoded"] = mx.dequantize(codes, scales, mode=mode)
    experts = mx.stack([weight, 3 * weight[::-1]]).astype(mx.bfloat16)
    largest = mx.abs(experts).max(axis=(1, 2)).astype(mx.float32)
    made = [mx.quantize(one, mode="nvfp4", global_scale=of) for one, of in zip(experts, largest, strict=True)]
    decoded = [mx.dequantize(*one, mode="nvfp4", global_scale=of) for one, of in zip(made, largest, strict=True)]
    of_experts = {"weight": mx.stack([one[0] for one in made]), "scales": mx.stack([one[1] for one in made])}
    of_experts |= {"global_scale": largest, "decoded": mx.stack(decoded)}
    stored |= {f"model.layers.0.mlp.switch_mlp.up_proj.{kind}": each for kind, each in of_experts.items()}
    mx.save_safetensors(str(Path(__file__).with_suffix("")), stored, {"format": "mlx"})


if __name__ == "__main__":
    main()

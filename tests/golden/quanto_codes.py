"""Writes `quanto_codes.safetensors`: weights as optimum-quanto stores them, and as `<case>.decoded` what it makes of
them.

    PYTHONPATH=QUANTO python quanto_codes.py     where optimum-quanto is unpacked; PyTorch, on a CPU

By optimum-quanto 0.2.7. Cases are named as weights of a Llama.
"""

from pathlib import Path

import torch
from optimum.quanto import MaxOptimizer, quantize_weight
from optimum.quanto.tensor import AbsmaxOptimizer, HqqOptimizer, qtypes
from safetensors.torch import save_file

CASES = {
    "q_proj": ("qint8", None, torch.bfloat16),
    "k_proj": ("qint8", None, torch.float16),
    "v_proj": ("qfloat8_e4m3fn", None, torch.bfloat16),
    "o_proj": ("qfloat8_e5m2", None, torch.float32),
    "gate_proj": ("qint4", 64, torch.bfloat16),
    "up_proj": ("qint2", 32, torch.float16),
    "down_proj": ("qint4", None, torch.float32),
}


def main() -> None:
    torch.manual_seed(0)
    stored = {}
    for name, (kind, group, dtype) in CASES.items():
        out, inputs = {"k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64), "q_proj": (64, 64)}.get(
            name, (64, 96) if name == "down_proj" else (96, 64)
        )
        weight = (torch.randn(out, inputs) * torch.rand(out, 1)).to(dtype)
        module = f"model.layers.0.{'self_attn' if out == inputs or out == 32 else 'mlp'}.{name}"
        if qtypes[kind].bits == 8:
            scale = AbsmaxOptimizer()(weight, qtype=qtypes[kind], axis=0)
            coded = quantize_weight(weight, qtype=qtypes[kind], axis=0, scale=scale, optimized=False)
        else:
            optimizer = HqqOptimizer() if name == "down_proj" else MaxOptimizer()
            zeros = {"zeropoint": True} if name == "down_proj" else {}
            scale, shift = optimizer(weight, qtype=qtypes[kind], axis=0, group_size=group, **zeros)
            coded = quantize_weight(
                weight, qtype=qtypes[kind], axis=0, scale=scale, shift=shift, group_size=group, optimized=False
            )
        coded.save_to_state_dict(stored, f"{module}.weight.", keep_vars=False)
        stored[f"{module}.decoded"] = coded.dequantize()
    save_file({name: each.contiguous() for name, each in stored.items()}, Path(__file__).with_suffix(".safetensors"))


if __name__ == "__main__":
    main()

"""Writes `muon.safetensors`: matrices before and after five updates by Megatron-Core's Muon, `<case>.gradient.<update>`
between, and `<case>.momentum` after.

    PYTHONPATH=EMERGING_OPTIMIZERS python muon.py     where Emerging-Optimizers is unpacked; PyTorch, on a CPU

By megatron-core 0.16.1 with emerging_optimizers 0.1.0 (its Triton kernels, which this does not use, left out). `split`
is a linear_qkv with two groups of two query heads of four channels.
"""

from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer.muon import TensorParallelMuon
from safetensors.torch import save_file

CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "plain": ((12, 20), {}),
    "tall": ((20, 12), {"use_nesterov": True, "scale_mode": "unit_rms_norm"}),
    "simple": ((20, 12), {"coefficient_type": "simple", "scale_mode": "shape_scaling", "extra_scale_factor": 0.2}),
    "split": ((32, 12), {"split_qkv": True, "is_qkv_fn": lambda _: True, "qkv_split_shapes": [8, 4, 4]}),
}


def main() -> None:
    torch.manual_seed(0)
    stored = {}
    for case, (shape, settings) in CASES.items():
        parameter = torch.nn.Parameter(torch.randn(shape))
        stored[f"{case}.before"] = parameter.detach().clone()
        muon = TensorParallelMuon(
            [parameter], lr=0.02, **{"momentum_beta": 0.9, "use_nesterov": False, "weight_decay": 0.1, **settings}
        )
        for update in range(5):
            parameter.grad = torch.randn(shape) * 10.0**-update
            stored[f"{case}.gradient.{update}"] = parameter.grad.clone()
            muon.step()
        stored[f"{case}.after"] = parameter.detach().clone()
        stored[f"{case}.momentum"] = muon.state[parameter]["momentum_buffer"]
    save_file(stored, Path(__file__).with_suffix(".safetensors"))


if __name__ == "__main__":
    main()

"""Writes `sinq_codes.safetensors`: weights as SINQ's modules store them, and as `<case>.decoded` what it makes of them.

    PYTHONPATH=SINQ python sinq_codes.py     where sinq and termcolor are installed; PyTorch and transformers, on a CPU

By sinq 0.2.0. The metadata has what it writes beside the index.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sinq.patch_model import BaseSINQHFModel
from sinq.sinqlinear_hf import SINQLinear, sinq_base_quant_config

CASES = [
    *((8, torch.bfloat16), (6, torch.float16), (5, torch.bfloat16), (4, torch.bfloat16), (4, torch.float16)),
    *((3, torch.bfloat16), (2, torch.float32)),
]


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 128) * torch.rand(64, 1)
    modules = {}
    for bits, dtype in CASES:
        linear = torch.nn.Linear(128, 64, bias=False)
        linear.weight.data = weight.to(dtype)
        config = sinq_base_quant_config(nbits=bits, group_size=32, tiling_mode="1D", method="sinq")
        module = SINQLinear(linear_layer=linear, quant_config=config, compute_dtype=dtype, device="cpu")
        modules[f"bits-{bits}-{str(dtype).removeprefix('torch.')}"] = module
    plain = modules["bits-4-plain"] = SINQLinear(None, quant_config=None, compute_dtype=torch.bfloat16, device="cpu")
    half = modules["bits-4-bfloat16"]
    plain.W_q, plain.ready = half.W_q.clone(), True
    plain.meta = half.meta | {kind: whole(half.meta[kind]) for kind in ("scale", "zero")}
    plain.meta |= {"method": "sinq", "scale2": half.meta["scale2"].clone()}
    with tempfile.TemporaryDirectory() as folder:
        BaseSINQHFModel.save_weights_safetensors({name: each.state_dict() for name, each in modules.items()}, folder)
        (shard,) = Path(folder).glob("*.safetensors")
        stored, (said,) = load_file(shard), (path.read_text() for path in Path(folder).glob("*.meta.json"))
    stored |= {f"{name}.decoded": each.dequantize() for name, each in modules.items()}
    save_file(stored, Path(__file__).with_suffix(".safetensors"), metadata={"modules": said})


def whole(codes: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Scales that are no codes themselves, as older versions wrote all."""
    return (codes[0] * codes[1] + codes[2]).view(-1, 1)


if __name__ == "__main__":
    main()

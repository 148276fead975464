"""Writes the golden files in `transposed/`: a weight of 32 outputs and 128 inputs as three tools pack it.

    PYTHONPATH=GPTQMODEL:AUTOAWQ:AUTOROUND python transposed.py     where they are unpacked; PyTorch, transformers

Each has what the tool stores and, as `decoded`, what its own code makes of that with the scales in FP32, `[in, out]`;
its metadata has the `quantization_config`. By GPTQModel 7.7.0, AutoAWQ 0.2.9 and AutoRound 0.16.1, on a CPU.
"""

import json
import sys
import types
from importlib.machinery import PathFinder
from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "transposed"
OUT, IN, GROUP = 32, 128, 32


def grid(bits: int, symmetric: bool) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """A linear layer, scales `[out, groups]` in FP16's numbers, and zero points."""
    torch.manual_seed(bits)
    linear = torch.nn.Linear(IN, OUT, bias=False)
    groups = linear.weight.data.view(OUT, -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = torch.full_like(scales, 2 ** (bits - 1)) if symmetric else (-low / scales).round()
    return linear, scales, zeros


def gptq(bits: int, form: str, desc_act: bool) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    linear, scales, zeros = grid(bits, symmetric=not desc_act)
    order = torch.arange(IN) // GROUP
    order = order[torch.randperm(IN)] if desc_act else order
    module = TorchLinear(bits, GROUP, not desc_act, desc_act, IN, OUT)
    module.pack_original(linear, scales, zeros, order.int())
    half, module.scales = module.scales, module.scales.float()
    decoded = module.dequantize_weight()
    if form == "gptq":
        convert_gptq_v2_to_v1_format_module(module, types.SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    stored = {"qweight": module.qweight, "qzeros": module.qzeros, "scales": half, "g_idx": module.g_idx}
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "desc_act": desc_act,
        "checkpoint_format": form,
    }
    save(f"gptqmodel-{bits}-{form}{'-desc-act' if desc_act else ''}", stored, decoded, config)


def awq() -> None:
    package = types.ModuleType("awq")  # its own imports all models
    package.__path__ = list(PathFinder.find_spec("awq").submodule_search_locations or ())
    sys.modules["awq"] = package
    modules = types.ModuleType("awq.modules")
    modules.__path__ = [f"{package.__path__[0]}/modules"]
    sys.modules["awq.modules"] = modules
    linears = types.ModuleType("awq.modules.linear")
    linears.__path__ = [f"{package.__path__[0]}/modules/linear"]
    sys.modules["awq.modules.linear"] = linears
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear, scales, zeros = grid(4, symmetric=False)
    module = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    stored = {"qweight": module.qweight, "qzeros": module.qzeros, "scales": module.scales}
    decoded = dequantize_gemm(module.qweight, module.qzeros, module.scales.float(), 4, GROUP)
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    save("autoawq-gemm", stored, decoded, config)


def auto_round(bits: int, packing: str) -> None:
    from auto_round.export.export_to_autoround.export import dynamic_import_quant_linear_for_packing
    from auto_round.export.export_to_awq.utils import dequantize_gemm

    linear, scales, zeros = grid(bits, symmetric=False)
    kind = dynamic_import_quant_linear_for_packing(packing, bits, GROUP, False)
    if packing == "auto_round:auto_awq":
        module = kind.from_linear(linear, bits, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
        decoded = dequantize_gemm(module.qweight, module.qzeros, module.scales.float(), bits, GROUP)
        half = module.scales
    else:
        module = kind(bits, GROUP, IN, OUT, bias=False)
        module.device = "cpu"
        module.pack(linear, scales, zeros, None, device="cpu")
        half, module.scales = module.scales, module.scales.float()
        decoded = module(torch.eye(IN))
    stored = {"qweight": module.qweight, "qzeros": module.qzeros, "scales": half}
    config = {"quant_method": "auto-round", "packing_format": packing, "bits": bits, "group_size": GROUP, "sym": False}
    save(f"autoround-{bits}-{packing.rpartition(':')[2]}", stored, decoded, config)


def save(name: str, stored: dict[str, torch.Tensor], decoded: torch.Tensor, config: dict[str, object]) -> None:
    tensors = {kind: tensor.detach().cpu().contiguous() for kind, tensor in (stored | {"decoded": decoded}).items()}
    FOLDER.mkdir(exist_ok=True)
    save_file(tensors, FOLDER / f"{name}.safetensors", {"quantization_config": json.dumps(config, sort_keys=True)})


if __name__ == "__main__":
    awq()
    gptq(4, "gptq", desc_act=False)
    gptq(4, "gptq_v2", desc_act=True)
    gptq(8, "gptq", desc_act=False)
    gptq(8, "gptq_v2", desc_act=True)
    for packing in ("auto_round", "auto_round:auto_gptq"):
        for bits in (2, 4, 8):
            auto_round(bits, packing)
    auto_round(4, "auto_round:auto_awq")

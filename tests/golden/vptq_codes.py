"""Writes `vptq_codes.safetensors`: random codes of VPTQ's modules, and as `<case>.decoded` what VPTQ makes of them.

    PYTHONPATH=VPTQ python vptq_codes.py     where vptq is unpacked; PyTorch, on a CPU

By vptq 0.0.5.post1 (ops/quant_gemm.py, dequant; utils/pack.py, pack_index). The metadata has what a config says of each
module.
"""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

for name in ("vptq", "accelerate", "tqdm", "sentence_transformers", "sentence_transformers.SentenceTransformer"):
    sys.modules[name] = without = ModuleType(name)
    without.SentenceTransformer = None  # type: ignore[attr-defined]
sys.modules["vptq"].__path__ = [f"{folder}/vptq" for folder in sys.path]  # and not what it imports to load models

from vptq.ops.quant_gemm import dequant  # noqa: E402
from vptq.utils.pack import pack_index  # noqa: E402

OUT = 44
CASES = {
    "reordered-float16": dict(groups=1, inputs=64, length=8, count=1024, residuals=64, order=True, norm=True),
    "groups-bfloat16": dict(groups=2, inputs=40, length=6, count=512, residuals=0, order=False, norm=False),
    "outliers-float16": dict(
        groups=1, inputs=56, length=8, count=256, residuals=256, order=True, norm=True, outliers=8
    ),
    "one-bit-float32": dict(groups=3, inputs=20, length=4, count=2, residuals=0, order=True, norm=False),
}


def made(case: str, said: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    dtype, outliers = getattr(torch, case.rpartition("-")[2]), said.get("outliers", 0)
    groups, inputs, length, count, residuals = (
        said[key] for key in ("groups", "inputs", "length", "count", "residuals")
    )
    vectors, columns = -(-OUT // length), outliers + groups * inputs

    def indices(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape).to(torch.uint16).view(torch.int16)

    main, above = indices(count, groups, vectors, inputs), indices(max(residuals, 1), groups, vectors, inputs)
    bits, more = count.bit_length() - 1, residuals.bit_length() - 1 if residuals else 0
    stored = {"indices": pack_index(main, bits, above if residuals else None, more, torch.uint16)}
    stored["centroids.weight"] = torch.randn(groups, count * length).to(dtype)
    if residuals:
        stored["res_centroids.weight"] = torch.randn(groups, residuals * length).to(dtype)
    if outliers:
        stored["outlier_indices"] = indices(50, 1, -(-OUT // 4), outliers)
        stored["outlier_centroids.weight"] = torch.randn(1, 50 * 4).to(dtype)
    if said["order"]:
        stored["perm"] = torch.randperm(columns).to(torch.uint16).view(torch.int16)
    if said["norm"]:
        stored |= {"weight_scale": torch.rand(columns).to(dtype), "weight_bias": torch.randn(columns).to(dtype)}
    stored["decoded"] = dequant(
        indices=stored["indices"],
        centroids=stored["centroids.weight"].view(groups, count, length),
        outlier_indices=stored.get("outlier_indices"),
        outlier_centroids=stored.get("outlier_centroids.weight"),
        res_indices=None,
        res_centroids=stored.get("res_centroids.weight"),
        perm=stored.get("perm"),
        weight_scale=stored.get("weight_scale"),
        weight_bias=stored.get("weight_bias"),
        is_indice_packed=True,
        enable_outlier=bool(outliers),
        enable_residual=bool(residuals),
        enable_perm=said["order"],
        enable_norm=said["norm"],
        num_centroids=count,
        num_outlier_centroids=50,
        num_res_centroids=residuals,
        padding=-OUT % length,
        outlier_padding=-OUT % 4,
        num_codebooks=groups,
        group_size=inputs,
        outlier_size=outliers,
        vector_len=length,
        outlier_vector_len=4,
    )
    return stored, {
        "vector_lens": [4 if outliers else -1, length],
        "num_centroids": [50 if outliers else -1, count],
        "num_res_centroids": [-1, residuals or -1],
        "group_num": groups,
        "group_size": inputs,
        "outlier_size": outliers,
        "in_features": columns,
        "out_features": OUT,
        "indices_as_float": False,
        "is_indice_packed": True,
        "enable_norm": said["norm"],
        "enable_perm": said["order"],
    }


def main() -> None:
    torch.manual_seed(0)
    found = {case: made(case, said) for case, said in CASES.items()}
    stored = {
        f"{case}.{name}": each.contiguous() for case, (tensors, _) in found.items() for name, each in tensors.items()
    }
    config = {"quant_method": "vptq", "config_for_layers": {case: said for case, (_, said) in found.items()}}
    save_file(stored, Path(__file__).with_suffix(".safetensors"), metadata={"quantization_config": json.dumps(config)})


if __name__ == "__main__":
    main()

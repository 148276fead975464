"""Tensors that are made of several stored ones: of experts that are stored one by one, and meet in one tensor."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from click.testing import CliRunner
from conversions import run
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.cli import main
from precisionctl.reports.verify import codes
from precisionctl.verify.code_comparison import CodesComparison
from precisionctl.verify.compare import Comparison, compare


def stored(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def save(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, directory / "model.safetensors", {"format": "pt"}
    )


def with_experts_apart(directory: Path, family: str, experts: str, **changes: Any) -> dict[str, Tensor]:
    """A directory whose experts are stored one by one, `[out, in]`, in BF16; and these."""
    pico.save(directory, family, dtype=torch.bfloat16, **changes)
    tensors, apart = dict[str, Tensor](), dict[str, Tensor]()
    for name, values in stored(directory).items():
        if experts not in name or ".shared_expert" in name:
            tensors[name] = values
            continue
        prefix, _, kind = name.rpartition(".")
        for number, expert in enumerate(values.mT if family == "llama4" else values):
            parts = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            apart |= {f"{prefix}.{number}.{each}.weight": part for each, part in zip(names, parts, strict=True)}
    save(directory, tensors | apart)
    return apart


def say(directory: Path, quantization: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


def compared(a: Path, b: Path, **options: Any) -> Comparison:
    return compare(open_checkpoint(a), open_checkpoint(b), **options)


def group(targets: str, strategy: str, number: str, bits: int = 8, size: int | None = None) -> dict[str, Any]:
    said = {"num_bits": bits, "type": number, "symmetric": True, "strategy": strategy, "group_size": size}
    return {"targets": [targets], "weights": said | {"dynamic": False}, "input_activations": None}


def coded(values: Tensor, number: str) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors that a weight is stored as, by the ends of their names, and what they decode to, FP32: in FP8 or INT8
    under a scale for each channel, in FP8 under one for the tensor, in another dtype."""
    if number in ("float16", "bfloat16", "float64"):
        stored = values.to(getattr(torch, number))
        return {"": stored}, stored.float()
    codes_dtype = torch.int8 if number == "int" else torch.float8_e4m3fn
    amax = values.float().abs().amax() if number == "tensor" else values.float().abs().amax(1, keepdim=True)
    scale = amax.reshape(-1, 1) / 100
    codes = (values.float() / scale).round().to(codes_dtype)
    return {"": codes, "_scale": scale if number != "tensor" else scale.reshape(1)}, codes.float() * scale


GROUPS = {
    "float": group("re:.*gate_proj", "channel", "float"),
    "int": group("re:.*up_proj", "channel", "int"),
    "tensor": group("re:.*up_proj", "tensor", "float"),
}


def mixed(source: Path, to: Path, gate: str, up: str) -> Path:
    """A directory with gates and ups of experts as said, and beside it their values in FP32."""
    experts = with_experts_apart(source, "lara-mini", ".experts.", num_hidden_layers=1)
    every, tensors, values = stored(source), dict[str, Tensor](), dict[str, Tensor]()
    for name, each in every.items():
        number = {"gate_proj": gate, "up_proj": up}.get(name.split(".")[-2]) if name in experts else None
        if number is None:
            tensors[name] = values[name] = each
            continue
        parts, values[name] = coded(each, number)
        tensors |= {name + end: part for end, part in parts.items()}
    for directory, made in ((to, tensors), (to.with_name("fp32"), values)):
        shutil.copytree(source, directory)
        save(directory, made)
    groups = {f"group_{number}": GROUPS[each] for number, each in enumerate((gate, up)) if each in GROUPS}
    if groups:
        method = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
        say(to, method)
    return to


@pytest.mark.parametrize(
    ("gate", "up"),
    [
        ("float16", "bfloat16"),
        ("float", "bfloat16"),
        ("float", "int"),
        ("float", "tensor"),
        ("float", "float"),
        ("float16", "tensor"),
    ],
)
def test_parts_of_a_tensor_in_several_formats_are_what_each_decodes_to(tmp_path: Path, gate: str, up: str) -> None:
    """Values are decoded here, without reading; and a change in either part is seen."""
    made = mixed(tmp_path / "source", tmp_path / "mixed", gate, up)
    for a, b in ((made, tmp_path / "fp32"), (tmp_path / "fp32", made)):
        found = compared(a, b, fp8=True)
        assert found.equal and {tensor.status for tensor in found.tensors} == {"exact"}
    run(made, tmp_path / "converted", "hf", "fp32")
    assert compared(made, tmp_path / "converted").equal
    tensors = stored(made)
    for part in ("gate_proj", "up_proj"):
        name = next(name for name in tensors if name.endswith(f"experts.2.{part}.weight"))
        other = tensors | {name: tensors[name].clone()}
        other[name].view(torch.uint8)[-1, -1] ^= 1
        save(made, other)
        found = compared(made, tmp_path / "fp32")
        assert [(each.name, each.differing) for each in found.tensors if not each.equal] == [
            ("model.layers.0.mlp.experts.gate_up_proj[2]", 1)
        ]


def test_codes_of_experts_that_are_computed_are_looked_at_alone_and_said_not_to_be_between_two(tmp_path: Path) -> None:
    """Llama 4 as llm-compressor writes it. Under a scale of 2^-136 codes fall among BF16's subnormal numbers."""
    experts = with_experts_apart(tmp_path / "hf", "llama4", ".experts.", num_hidden_layers=2)
    tensors = stored(tmp_path / "hf")
    for name, values in experts.items():
        parts, _ = coded(values, "float")
        tensors |= {name + end: part for end, part in parts.items()}
    save(tmp_path / "hf", tensors)
    say(
        tmp_path / "hf",
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group("Linear", "channel", "float")},
        },
    )
    alone = CliRunner().invoke(main, ["verify", str(tmp_path / "hf"), "--fp8", "--json"])
    assert alone.exit_code == 0, alone.output
    assert {weight["name"] for weight in json.loads(alone.stdout)["weights"]} == set(experts)
    found = compared(tmp_path / "hf", tmp_path / "hf", fp8=True)
    (told,) = [each for each in found.not_compared if each.topic == "codes"]
    assert told.what.startswith("8 weights, such as ") and found.equal and not found.codes
    assert not any(each.topic == "codes" for each in compared(tmp_path / "hf", tmp_path / "hf").not_compared)
    name = [*experts][-1]
    tensors[f"{name}_scale"][3] = 2.0**-136
    save(tmp_path / "hf", tensors)
    again = CliRunner().invoke(main, ["verify", str(tmp_path / "hf"), "--fp8", "--json"])
    assert again.exit_code == 1
    assert [each["name"] for each in json.loads(again.stdout)["weights"] if not each["idempotent"]] == [name]


def test_a_weight_without_rows_is_no_code_and_none_is_changed(tmp_path: Path) -> None:
    made = codes([CodesComparison("w", 0, 0, (1.0, 1.0), math.inf, True)])
    assert made.rows == [("w", "0", "0", "1", "inf", "yes")]

"""NVFP4 in GGUF: codes of the source that are kept, with the scales of weights and of inputs."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import four_bit_directories
import gguf_files
import gguf_tokenizers
import numpy as np
import pytest
import torch
from gguf_files import export, source, stored_tensors
from gguf_tokenizers import SIZE
from pico import shape
from safetensors.torch import load_file, save_file

from precisionctl.architectures.families import table_of
from precisionctl.architectures.param_map import names
from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.gguf.families import FAMILIES
from precisionctl.checkpoints.gguf.head import ArrayLength, read_head
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import LLAMA_CPP, Request
from precisionctl.conversion.command import execute
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, PrecisionError
from precisionctl.export.gguf.gguf_plan import hf_names, in_gguf
from precisionctl.export.gguf.gguf_pretokenizers import QWEN2
from precisionctl.param import TensorSpec
from precisionctl.planning.make_plan import make_plan
from precisionctl.verify.compare import compare


def in_nvfp4(folder: Path, spelling: str, family: str, **options: Any) -> dict[str, torch.Tensor]:
    """A directory of such codes; what they are, FP32."""
    changes = {**gguf_files.WRITTEN[family], "moe_intermediate_size": 64, "vocab_size": SIZE, **options}
    values = four_bit_directories.make(folder, spelling, family, **changes)
    gguf_tokenizers.byte_level(QWEN2).save_pretrained(folder)
    return values


@pytest.mark.parametrize(
    ("spelling", "family", "rounded"),
    [
        ("modelopt-nvfp4", "llama-3", 0.0),
        ("ct-nvfp4", "qwen3-moe", 2**-22),  # a divisor, of which the file has the inverse
    ],
)
def test_nvfp4_codes_are_kept_with_the_scales_of_weights_and_of_inputs(
    tmp_path: Path, spelling: str, family: str, rounded: float
) -> None:
    values = in_nvfp4(tmp_path / "hf", spelling, family)
    file = export(tmp_path / "hf", tmp_path / "out", "nvfp4")
    hints = Hints(companions=read_companions(tmp_path / "hf"), reference=tmp_path / "hf")
    written, before = open_checkpoint(file, None, hints), open_checkpoint(tmp_path / "hf")
    for name, expected in values.items():
        assert torch.allclose(read_tensor(written, name), expected, rtol=rounded, atol=0), name
    assert compare(written, before).equal and compare(before, written).equal
    stored, codes = stored_tensors(file), load_file(tmp_path / "hf" / "model.safetensors")
    kinds = {name: tensor.format.name for name, (tensor, _) in stored.items()}
    assert (kinds["blk.0.attn_q.weight"], kinds["token_embd.weight"]) == ("NVFP4", "BF16")
    tensor, data = stored["blk.0.attn_v.input_scale"]
    of_inputs = codes[f"model.layers.0.self_attn.v_proj.input_{'scale' if not rounded else 'global_scale'}"]
    assert tensor.shape == (1,) and np.frombuffer(data, "<f4")[0] == (1 / of_inputs if rounded else of_inputs)


def test_that_inputs_stay_as_they_are_is_said_of_each_weight(tmp_path: Path) -> None:
    in_nvfp4(tmp_path / "hf", "ct-nvfp4a16", "qwen3")
    said = read_head(export(tmp_path / "hf", tmp_path / "out", "nvfp4")).metadata
    assert said["general.tensor_extra.prec_a4"] == [False] * 7
    assert said["general.tensor_extra.name"].length == 7


def test_nvfp4_of_which_llama_cpp_would_lose_the_scale_is_decoded_or_refused(tmp_path: Path) -> None:
    in_nvfp4(tmp_path / "next", "ct-nvfp4", "qwen3-next", num_hidden_layers=4)
    command = plan_command(Request.export(tmp_path / "next", tmp_path / "out", LLAMA_CPP, "nvfp4"))
    assert any("in NVFP4 are decoded, as llama.cpp computes with none there" in note for note in command.notes)
    execute(command, verify=True)
    kinds = {
        name: tensor.format.name for name, (tensor, _) in stored_tensors(tmp_path / "out" / "out-NVFP4.gguf").items()
    }
    assert (kinds["blk.3.attn_q.weight"], kinds["blk.0.ssm_out.weight"]) == ("NVFP4", "BF16")
    in_nvfp4(tmp_path / "gemma", "ct-nvfp4", "gemma")
    for folder, what in (("gemma", "computes with no NVFP4 codes of a `gemma`"), ("qwen", "no weight is NVFP4 codes")):
        made_of = tmp_path / folder if folder == "gemma" else source(tmp_path / "qwen", "qwen3")
        with pytest.raises(PrecisionError, match=what):
            export(made_of, tmp_path / "no", "nvfp4")


@pytest.mark.parametrize("byte", [0x7F, 0xB8])
def test_scales_of_which_ggml_would_make_another_number_are_refused(tmp_path: Path, byte: int) -> None:
    in_nvfp4(tmp_path / "hf", "modelopt-nvfp4", "llama-3")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.weight_scale"].view(torch.uint8)[1, 1] = byte
    save_file(stored, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(DamagedCheckpoint, match="up_proj.weight_scale holds a scale that is neg"):
        export(tmp_path / "hf", tmp_path / "out", "nvfp4")


def test_a_factor_of_the_router_that_is_named_as_a_scale_of_experts_is_no_global_scale(tmp_path: Path) -> None:
    folder = gguf_files.source(tmp_path / "hf", "gemma4-moe", moe_intermediate_size=64)
    written = export(folder, tmp_path / "out")
    said = {key: value for key, value in read_head(written).metadata.items() if not isinstance(value, ArrayLength)}
    number = {"F32": gguf_files.F32, "BF16": gguf_files.BF16}
    tensors = {
        name: (tensor.shape, number[tensor.format.name], data)
        for name, (tensor, data) in stored_tensors(written).items()
    }
    shape, _, _ = tensors["blk.0.ffn_down_exps.weight"]
    ones = bytes([0x38] * 4 + [0x22] * 32)  # of a block of 64: four scales of 1, and codes of 1
    tensors["blk.0.ffn_down_exps.weight"] = (shape, 40, ones * (math.prod(shape) // 64))
    tensors["blk.0.ffn_down_exps.scale"] = gguf_files.plain(torch.full((shape[0],), 3.0))
    file = tmp_path / "other.gguf"
    file.write_bytes(gguf_files.file(said, tensors))
    reader = open_checkpoint(file)
    assert (read_tensor(reader, "model.layers.0.router.per_expert_scale") == 3).all()
    assert (read_tensor(reader, "model.layers.0.experts.down_proj[1]") == 1).all()


def test_codes_of_two_tensors_that_become_one_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a global scale of its own, and a slice of a stack has one. llama.cpp multiplies by none of such a stack
    yet, so one is made up."""
    model, stack = shape("gemma4-moe"), "blk.0.ffn_gate_up_exps.weight[0]"
    specs = {
        name: TensorSpec(size, DType.bfloat16)
        for row in table_of(model).spelled({}, model, "for engines")
        if row.present.in_layout("hf", model)
        for place in row.places(model)
        for name, size in zip(names(row, "hf", place), row.shapes(model, "hf"), strict=True)
    }
    source = SimpleNamespace(path=None, layout="hf", model=model, specs=specs)
    plan = make_plan(source, "hf", named_as_codes=hf_names(model))
    of_slice = [job.reads for job in plan.jobs if "model.layers.0.experts.gate_up_proj[0]" in job.writes]
    assert of_slice == [tuple(f"model.layers.0.experts.0.{part}_proj.weight" for part in ("gate", "up"))]
    family = FAMILIES[model.architecture].of(model)
    monkeypatch.setitem(FAMILIES, model.architecture, replace(family, scaled=(*family.scaled, "ffn_gate_up_exps")))
    kept = in_gguf(plan, "nvfp4", specs).kept
    assert kept["blk.0.attn_q.weight"] == "model.layers.0.self_attn.q_proj.weight" and stack not in kept

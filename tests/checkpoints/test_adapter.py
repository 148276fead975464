"""LoRA adapters of PEFT with their base: merged in FP32, rounded once, and the rest of the base as it was.

tests/peers/test_peft.py has the same of what peft writes and merges itself.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import command_line
import conversions
import four_bit_directories
import fp8_directories
import int8_directories
import pico
import pytest
import scoring
import tiny_wrappers
import torch
from safetensors.torch import load_file, save_file
from soaking import in_soak
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from precisionctl.checkpoints.adapter import lora_config
from precisionctl.checkpoints.adapter.reader import AdapterReader
from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.chunks import read_rows
from precisionctl.checkpoints.hf_directory.companions import TEMPLATES
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import (
    MappingError,
    PrecisionctlError,
    PrecisionError,
    ShapeMismatch,
    UnknownFormat,
    UnsafePickle,
)

PREFIX = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.1


def saved(directory: Path, family: str, **config: Any) -> Path:
    pico.save(directory, family, **config)
    return directory


def adapter(directory: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    named = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors")
    return directory


def linear(module: str, out: int, into: int, rank: int = 4) -> dict[str, Tensor]:
    return {f"{module}.lora_A.weight": random(rank, into), f"{module}.lora_B.weight": random(out, rank)}


def merge(base: Path, out: Path, tensors: Mapping[str, Tensor], **config: Any) -> dict[str, Tensor]:
    made = adapter(out.parent / f"{out.name}-adapter", tensors, **config)
    conversions.run(made, out, "hf", reference=base, verify=True)
    return load_file(out / "model.safetensors")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama") / "base", "llama-3", dtype=torch.bfloat16)


def test_a_product_is_added_in_fp32_and_rounded_once_and_the_rest_is_the_base(llama: Path, tmp_path: Path) -> None:
    tensors = {**linear(Q, 64, 64), **linear("model.layers.1.mlp.down_proj", 64, 96)}
    base, merged = load_file(llama / "model.safetensors"), merge(llama, tmp_path / "out", tensors)
    assert merged.keys() == base.keys()
    touched = {f"{module.partition('.lora')[0]}.weight" for module in tensors}
    for name, before in base.items():
        expected = before
        if name in touched:
            a, b = (tensors[name.replace("weight", f"lora_{factor}.weight")] for factor in "AB")
            expected = (before.float() + b @ a * 2.0).bfloat16()
            assert not torch.equal(expected, before + (b @ a * 2.0).bfloat16()), "rounded twice it would be another"
        assert torch.equal(merged[name], expected), name


IN_MEMORY = {
    "lfm3": ("model.layers.2.self_attn.g_proj", "model.layers.2.self_attn.gate_proj"),
    "axk2": ("model.layers.0.input_layernorm.mlp.fc1", "model.layers.0.input_layernorm.W_down"),
    "laguna": ("model.layers.1.mlp.shared_experts.up_proj", "model.layers.1.mlp.shared_expert.up_proj"),
}
"""By families of transformers: a module by its name in memory, which peft writes, and by that in files."""


@pytest.mark.parametrize("family", [family for family in IN_MEMORY if family not in pico.ABSENT])
def test_a_module_is_found_by_the_name_that_it_has_in_memory(tmp_path: Path, family: str) -> None:
    base, (called, stored) = saved(tmp_path / "base", family, dtype=torch.bfloat16), IN_MEMORY[family]
    before, target = load_file(base / "model.safetensors"), [called.rpartition(".")[2]]
    out, into = before[f"{stored}.weight"].shape
    changed = merge(base, tmp_path / "changed", linear(called, out, into), target_modules=target)
    assert [name for name in before if not torch.equal(changed[name], before[name])] == [f"{stored}.weight"]
    whole = merge(base, tmp_path / "whole", {f"{called}.weight": random(out, into)}, modules_to_save=target)
    assert [name for name in before if not torch.equal(whole[name], before[name])] == [f"{stored}.weight"]


@pytest.mark.parametrize(("kind", "body"), [("mistral3", "language_model.model"), ("qwen2_vl", "model")])
def test_a_module_of_a_wrappers_text_model_is_found_by_either_name(tmp_path: Path, kind: str, body: str) -> None:
    """Files have another name than transformers 5 has in memory, which peft 0.21 writes."""
    tiny_wrappers.save(tmp_path / "base", kind, dtype=torch.bfloat16)
    before, module = load_file(tmp_path / "base" / "model.safetensors"), "layers.0.self_attn.q_proj"
    for called in ("model.language_model", body):
        merged = merge(tmp_path / "base", tmp_path / called, linear(f"{called}.{module}", 128, 128))
        assert [name for name in before if not torch.equal(merged[name], before[name])] == [f"{body}.{module}.weight"]


def test_a_wrappers_tied_head_has_the_change_of_its_embedding(tmp_path: Path) -> None:
    """Files have the head as `language_model.lm_head`."""
    tiny_wrappers.save(tmp_path / "base", "mistral3", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    embedding = "language_model.model.embed_tokens.weight"
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = config["tie_word_embeddings"] = True
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    before = tensors[embedding]
    a, b = random(4, len(before)), random(before.shape[1], 4)
    body = "model.language_model.embed_tokens"
    made = {f"{body}.lora_embedding_A": a, f"{body}.lora_embedding_B": b}
    made |= {"lm_head.lora_A.weight": b.t(), "lm_head.lora_B.weight": a.t()}
    settings = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    merged = merge(tmp_path / "base", tmp_path / "out", made, **settings)
    assert torch.equal(merged[embedding], (before.float() + (b @ a).t() * 2.0).bfloat16())


def test_megatron_gets_the_same_model(llama: Path, tmp_path: Path) -> None:
    made = adapter(tmp_path / "adapter", {**linear(Q, 64, 64), **linear("model.layers.1.mlp.up_proj", 96, 64)})
    conversions.run(made, tmp_path / "hf", "hf", reference=llama)
    conversions.run(made, tmp_path / "megatron", "megatron", reference=llama)
    conversions.run(tmp_path / "megatron", tmp_path / "back", "hf")
    conversions.assert_same_tensors(tmp_path / "hf", tmp_path / "back")


SCALES: dict[str, tuple[dict[str, Any], float]] = {
    "alpha by rank": ({}, 2.0),
    "rslora": ({"use_rslora": True}, 8 / math.sqrt(4)),
    "an alpha of its own": ({"alpha_pattern": {"q_proj": 3}}, 0.75),
    "by the whole name": ({"alpha_pattern": {"model.layers.0.self_attn.q_proj": 3}}, 0.75),
    "by an expression": ({"alpha_pattern": {r"layers\.\d+\.self_attn\.(q|k)_proj": 3}}, 0.75),
    "the first that fits": ({"alpha_pattern": {"k_proj": 1, "q_proj": 3, "self_attn.q_proj": 5}}, 0.75),
    "part of a name": ({"alpha_pattern": {"_proj": 3}}, 2.0),
    "a rank of its own": ({"r": 16, "rank_pattern": {"q_proj": 4}}, 2.0),
}


@pytest.mark.parametrize("name", SCALES)
def test_the_scale_is_what_the_config_says(llama: Path, tmp_path: Path, name: str) -> None:
    config, scale = SCALES[name]
    made = adapter(tmp_path / "adapter", linear(Q, 64, 64), **config)
    reader = open_checkpoint(made, hints=Hints(reference=llama))
    assert isinstance(reader, AdapterReader) and reader.changes[f"{Q}.weight"].scale == scale


@pytest.mark.parametrize(
    ("config", "is_adapted"),
    [
        ({"target_modules": ["q_proj"]}, True),
        ({"target_modules": ["self_attn.q_proj"]}, True),
        ({"target_modules": [Q]}, True),
        ({"target_modules": ".*q_proj"}, True),
        ({"target_modules": "q_proj"}, False),  # of a whole name
        ({"target_modules": r".*\.layers\.(1|2)\..*"}, False),
        ({"target_modules": "(?!k).*"}, True),  # not read
        ({"target_modules": "all-linear"}, True),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*\.0\..*"}, False),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"}, True),
        ({"target_modules": None}, True),
        ({"target_modules": None, "target_parameters": ["mlp.gate.weight"]}, False),
    ],
)
def test_targets_are_the_ends_of_names_or_an_expression(
    tmp_path: Path, config: dict[str, object], is_adapted: bool
) -> None:
    made = adapter(tmp_path / "adapter", linear(Q, 64, 64), **config)
    assert (Q in lora_config.read_lora_config(made).modules) is is_adapted


def test_a_parameter_that_is_adapted_has_the_alpha_of_its_own_name(tmp_path: Path) -> None:
    base, router = saved(tmp_path / "base", "qwen3-moe", dtype=torch.bfloat16), "model.layers.1.mlp.gate"
    before = load_file(base / "model.safetensors")[f"{router}.weight"].float()
    tensors = linear(router, *before.shape)
    config = {"target_modules": ["q_proj"], "target_parameters": ["gate.weight"], "alpha_pattern": {"gate": 3}}
    merged = merge(base, tmp_path / "out", tensors, **config)[f"{router}.weight"]
    a, b = tensors.values()
    assert torch.equal(merged, (before + b @ a * 2.0).bfloat16())


def test_verify_compares_an_adapter_on_its_base_with_the_merged_model(llama: Path, tmp_path: Path) -> None:
    tensors = linear(Q, 64, 64)
    merge(llama, tmp_path / "merged", tensors)
    other = adapter(tmp_path / "other", {name: tensor + 1 for name, tensor in tensors.items()})
    same, found = (
        command_line.run("verify", made, tmp_path / "merged", "--reference", llama)
        for made in (tmp_path / "merged-adapter", other)
    )
    assert same.exit_code == 0, same.output
    assert found.exit_code == 1 and "1 of" in found.stdout
    assert "needs a second checkpoint" in command_line.run("verify", llama, "--reference", llama, "--fp8").stderr


def test_dora_scales_rows_to_their_magnitudes(llama: Path, tmp_path: Path) -> None:
    lengths = 1 + random(64).abs()
    tensors = {**linear(Q, 64, 64), f"{Q}.lora_magnitude_vector": lengths}
    merged = merge(llama, tmp_path / "out", tensors, use_dora=True)
    assert torch.allclose(torch.linalg.norm(merged[f"{Q}.weight"].float(), dim=1), lengths, rtol=4e-3)
    before = load_file(llama / "model.safetensors")[f"{Q}.weight"].double()
    exact = before + 2 * tensors[f"{Q}.lora_B.weight"].double() @ tensors[f"{Q}.lora_A.weight"].double()
    exact *= (lengths / exact.norm(dim=1)).unsqueeze(1)
    assert torch.allclose(merged[f"{Q}.weight"].double(), exact, rtol=2.0**-8)


def test_whole_tensors_take_the_place_of_the_bases(llama: Path, tmp_path: Path) -> None:
    norm, head = "model.norm.weight", "lm_head.weight"
    tensors = {norm: random(64), head: random(250, 64).bfloat16(), **linear(Q, 64, 64)}
    merged = merge(llama, tmp_path / "out", tensors, modules_to_save=["norm", "lm_head"])
    assert torch.equal(merged[norm], tensors[norm].bfloat16()) and torch.equal(merged[head], tensors[head])


def test_an_embedding_is_changed_by_token(llama: Path, tmp_path: Path) -> None:
    name = "model.embed_tokens"
    tensors = {f"{name}.lora_embedding_A": random(4, 250), f"{name}.lora_embedding_B": random(64, 4)}
    before = load_file(llama / "model.safetensors")[f"{name}.weight"]
    merged = merge(llama, tmp_path / "out", {**tensors, f"{name}.base_layer.weight": before})
    a, b = tensors.values()
    assert torch.equal(merged[f"{name}.weight"], (before.float() + (b @ a).t() * 2.0).bfloat16())


def test_an_output_layer_that_is_tied_has_the_change_of_its_embedding(tmp_path: Path) -> None:
    """Its factors are the embedding's, exchanged and transposed."""
    base = saved(tmp_path / "base", "llama-3", dtype=torch.bfloat16, tie_word_embeddings=True)
    before = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    a, b = random(4, 250), random(64, 4)
    embedding = {"model.embed_tokens.lora_embedding_A": a, "model.embed_tokens.lora_embedding_B": b}
    head = {"lm_head.lora_A.weight": b.t(), "lm_head.lora_B.weight": a.t()}
    settings = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    for name, copies in (("plain", {}), ("saved", {"lm_head.base_layer.weight": before.float()})):
        merged = merge(base, tmp_path / name, embedding | head | copies, **settings)
        assert torch.equal(merged["model.embed_tokens.weight"], (before.float() + (b @ a).t() * 2.0).bfloat16())
    for other, setting in (
        (embedding | head | {"lm_head.lora_A.weight": b.t() + 1}, {}),
        (embedding | head, {"alpha_pattern": {"lm_head": 3}}),
        (head, {}),
    ):
        made = adapter(tmp_path / f"other-{len(list(tmp_path.iterdir()))}", other, **settings, **setting)
        with pytest.raises(MappingError, match="ensure_weight_tying: the adapter changes the output layer otherwise"):
            open_checkpoint(made, hints=Hints(reference=base))


@pytest.mark.parametrize("said", [True, False])
def test_a_transposed_weight_takes_the_product_transposed(tmp_path: Path, said: bool) -> None:
    """Whatever `fan_in_fan_out` says: peft sets it for the last module that it adapts, and asks each module's class."""
    base = saved(tmp_path / "base", "gpt2")
    wide, square = (f"transformer.h.0.attn.{name}" for name in ("c_attn", "c_proj"))
    tensors = {wide: linear(wide, 192, 64), square: linear(square, 64, 64)}
    merged = merge(base, tmp_path / "out", tensors[wide] | tensors[square], fan_in_fan_out=said)
    for module, (a, b) in ((module, pair.values()) for module, pair in tensors.items()):
        before = load_file(base / "model.safetensors")[f"{module}.weight"]
        assert torch.equal(merged[f"{module}.weight"], before + (b @ a).t() * 2.0)


@pytest.mark.parametrize("levels", [("", ".base_layer"), (".base_layer", "")])
def test_parameters_of_all_experts_are_told_by_their_shapes(tmp_path: Path, levels: tuple[str, str]) -> None:
    """A has the experts one below the other, B has them alternating (peft, ParamWrapper.get_delta_weight)."""
    base = saved(tmp_path / "base", "qwen3-moe", dtype=torch.bfloat16)
    experts, wide, rank = 8, 48, 2
    module = "model.layers.1.mlp.experts"
    up, down = (f"{module}{level}" for level in levels)
    tensors = {**linear(up, 2 * wide, 64, rank * experts), **linear(down, 64, wide, rank * experts)}
    config = {"r": rank, "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]}
    merged, stored = merge(base, tmp_path / "out", tensors, **config), load_file(base / "model.safetensors")
    delta = {}
    for kind, level in (("up", up), ("down", down)):
        a, b = tensors[f"{level}.lora_A.weight"], tensors[f"{level}.lora_B.weight"]
        delta[kind] = [b[:, e::experts] @ a[rank * e : rank * (e + 1)] * 4.0 for e in range(experts)]
    for e in range(experts):
        parts = dict(zip(("gate_proj", "up_proj"), delta["up"][e].split(wide), strict=True), down_proj=delta["down"][e])
        for part, expected in parts.items():
            name = f"{module}.{e}.{part}.weight"
            assert torch.equal(merged[name], (stored[name].float() + expected).bfloat16()), name


def test_bits_do_not_depend_on_how_rows_are_cut(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama-3", dtype=torch.bfloat16, hidden_size=1536, num_hidden_layers=1)
    tensors = linear(Q, 1536, 1536, rank=32)
    reader = open_checkpoint(adapter(tmp_path / "adapter", tensors, r=32), hints=Hints(reference=base))
    name = f"{Q}.weight"
    at_once = read_rows(reader, name, 0, 1536)
    for step in (1, 7, 170, 171, 500):
        pieces = [
            read_rows(reader, name, row, min(step, 1536 - row)) for row in range(0, 1536 if step > 1 else 40, step)
        ]
        assert torch.equal(torch.cat(pieces), at_once[: sum(map(len, pieces))]), step
    a, b = tensors.values()
    before = load_file(base / "model.safetensors")[name]
    assert torch.equal(at_once, (before.float() + b @ a * 0.25).bfloat16())


def test_resume_trains_the_merged_model_and_whoever_forgets_the_base_is_told_so(tmp_path: Path) -> None:
    """A learning rate of 0 changes nothing."""
    scoring.save(tmp_path / "base", "llama-3", dtype=torch.bfloat16)
    made = adapter(tmp_path / "adapter", linear(Q, 64, 64))
    (tmp_path / "text.txt").write_text("w1 w2 " * 40)
    command = ("resume", made, "--precision", "bf16", "--data", tmp_path / "text.txt", "--out", tmp_path / "run")
    assert "`resume`" in command_line.run(*command).stderr
    for setting in ("optimizer.lr=0", "train.steps=1", "train.batch_size=1", "data.sequence_length=32"):
        command += ("--set", setting)
    told = command_line.run(*command, "--reference", tmp_path / "base")
    assert told.exit_code == 0 and "the adapter changes 1 and replaces 0" in told.stdout
    assert command_line.run("verify", made, tmp_path / "run", "--reference", tmp_path / "base").exit_code == 0
    assert command_line.run("verify", tmp_path / "base", tmp_path / "run").exit_code == 1


def test_of_a_base_in_fp8_only_what_was_touched_has_other_codes(tmp_path: Path) -> None:
    base = tmp_path / "base"
    fp8_directories.make(base, "fp8-block")
    made = adapter(tmp_path / "adapter", linear(Q, 64, 64))
    in_bf16 = conversions.run(made, tmp_path / "bf16", "hf", reference=base)
    again = conversions.run(made, tmp_path / "fp8", "hf", "fp8", reference=base, verify=True)
    conversions.run(tmp_path / "bf16", tmp_path / "by-two-steps", "hf", "fp8")
    before, after = (load_file(each / "model.safetensors") for each in (base, tmp_path / "fp8"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(as_bytes(before[name]), as_bytes(after[name]))}
    assert changed == {f"{Q}.weight", f"{Q}.weight_scale_inv"}
    assert conversions.tensors(tmp_path / "by-two-steps").keys() == conversions.tensors(tmp_path / "fp8").keys()
    two = load_file(tmp_path / "by-two-steps" / "model.safetensors")
    assert all(torch.equal(as_bytes(two[name]), as_bytes(after[name])) for name in after)
    assert any("the adapter changes 1 and replaces 0" in note for note in in_bf16.notes)
    assert any(note.startswith("14 weights of the base are codes") for note in in_bf16.notes)
    assert not any("of the base are codes" in note for note in again.notes)
    flipped = int((as_bytes(before[f"{Q}.weight"]) != as_bytes(after[f"{Q}.weight"])).sum())
    assert any(re.search(rf"\b{flipped:,}\b|\b{flipped}\b", note) for note in again.notes), again.notes
    assert any("13 of 14 weights have the same codes" in note for note in again.notes)


OVERFLOWS = {
    "the product is beyond FP32": (torch.bfloat16, 1e20, 0.0),
    "the sum is beyond FP32": (torch.float32, 1e19, 3e38),
    "BF16 would round the sum to infinity": (torch.bfloat16, 3.5e17, 3.3895e38),
}
"""The dtype of the base, what the factors' numbers are, and the numbers of the base."""


@pytest.mark.parametrize("case", OVERFLOWS)
def test_no_number_becomes_infinite(tmp_path: Path, case: str) -> None:
    dtype, factor, number = OVERFLOWS[case]
    weight, base = f"{Q}.weight", saved(tmp_path / "base", "llama-3", dtype=dtype)
    tensors = load_file(base / "model.safetensors")
    tensors[weight].fill_(number)[0, 0] = -torch.inf
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    a, b = torch.full((4, 64), factor), torch.full((64, 4), factor)
    with pytest.raises(PrecisionError, match=f"`{weight}` with the adapter's changes has values that are infinite"):
        merge(base, tmp_path / "out", {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b})
    assert not (tmp_path / "out").exists()
    small = {f"{Q}.lora_A.weight": a / factor, f"{Q}.lora_B.weight": b / factor}
    merged = merge(base, tmp_path / "small", small)[weight]
    assert merged.isinf().nonzero().tolist() == [[0, 0]], "an infinity that is stored stays one"


def test_no_tensor_that_is_saved_whole_becomes_infinite_nor_a_code_of_the_base(llama: Path, tmp_path: Path) -> None:
    norm = {"model.norm.weight": torch.full((64,), 3.4e38)}
    with pytest.raises(PrecisionError, match=r"norm.weight` .* infinite or NaN in bfloat16"):
        merge(llama, tmp_path / "out", norm, modules_to_save=["norm"])
    fp8_directories.make(tmp_path / "fp8", "modelopt-tensor")
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    down = "model.layers.1.mlp.down_proj.weight"
    stored[f"{down}_scale"].fill_(3e38)
    save_file(stored, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
    out, into = stored[f"{Q}.weight"].shape
    with pytest.raises(PrecisionError, match=f"`{down}` .* infinite"):
        merge(tmp_path / "fp8", tmp_path / "out8", linear(Q, out, into))


def test_of_a_base_in_int8_with_zero_points_no_codes_are_said_to_be_as_before(tmp_path: Path) -> None:
    """What is merged is BF16, in which neighbouring codes may be one value, also where the adapter changes nothing."""
    int8_directories.make(tmp_path / "base", int8_directories.WITH_ZERO_POINTS)
    made = adapter(tmp_path / "adapter", linear(Q, 128, 128))
    notes = conversions.run(made, tmp_path / "again", "hf", "fp8", reference=tmp_path / "base").notes
    assert any(note.startswith("0 of 7 weights have the same codes and scales") for note in notes)
    assert any("have the same scales, and codes of the same BF16 values" in note for note in notes)


def test_of_a_base_in_four_bits_too(tmp_path: Path) -> None:
    base = tmp_path / "base"
    four_bit_directories.make(base, "ct-int4-32")
    before = load_file(base / "model.safetensors")
    sizes = json.loads((base / "config.json").read_text())
    made = adapter(tmp_path / "adapter", linear(Q, sizes["hidden_size"], sizes["hidden_size"]))
    notes = conversions.run(made, tmp_path / "again", "hf", "fp8", reference=base).notes
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(as_bytes(before[name]), as_bytes(after[name]))}
    assert changed == {f"{Q}.weight_packed", f"{Q}.weight_scale"}
    assert any("6 of 7 weights have the same codes" in note for note in notes)


def test_of_a_base_without_a_table_too(tmp_path: Path) -> None:
    config = AutoConfig.for_model("xglm", d_model=64, ffn_dim=96, num_layers=1, attention_heads=4)
    config.vocab_size, config.max_position_embeddings = 250, 32
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(tmp_path / "base")
    module = "model.layers.0.fc1"
    tensors = linear(module, 96, 64)
    merged = merge(tmp_path / "base", tmp_path / "out", tensors)
    a, b = tensors.values()
    before = model.state_dict()[f"{module}.weight"]
    assert torch.equal(merged[f"{module}.weight"], (before.float() + b @ a * 2.0).bfloat16())
    embedding = "model.embed_tokens"  # tied to the output layer
    tensors = {f"{embedding}.lora_embedding_A": random(4, 250), f"{embedding}.lora_embedding_B": random(64, 4)}
    with pytest.raises(MappingError, match="changes one of the two"):
        merge(tmp_path / "base", tmp_path / "other", tensors)


@pytest.mark.parametrize(("out", "into", "wrong"), [(64, 72, "A"), (72, 64, "B")])
def test_the_factor_that_does_not_fit_the_base_is_the_one_that_is_named(
    llama: Path, tmp_path: Path, out: int, into: int, wrong: str
) -> None:
    shape = [4, into] if wrong == "A" else [out, 4]
    told = f"{Q}.lora_{wrong}.weight` is {shape}, but `{Q}.weight` is [64, 64]"
    with pytest.raises(ShapeMismatch, match=re.escape(told)):
        merge(llama, tmp_path / "out", linear(Q, out, into))


def test_an_adapter_without_tensors_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(MappingError, match="the adapter has no tensors"):
        merge(llama, tmp_path / "out", {})


def test_adapters_in_folders_of_its_directory_are_named(llama: Path, tmp_path: Path) -> None:
    made = adapter(tmp_path / "adapter", linear(Q, 64, 64))
    assert not any(
        "not merged" in note for note in conversions.run(made, tmp_path / "one", "hf", reference=llama).notes
    )
    for folder in ("two", "checkpoint-10"):
        adapter(made / folder, linear(Q, 64, 64))
    notes = conversions.run(made, tmp_path / "out", "hf", reference=llama).notes
    assert any(note.startswith("1 adapter in a folder below it is not merged: 'two'.") for note in notes), notes


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_the_same_bytes_by_any_number_of_workers(llama: Path, tmp_path: Path) -> None:
    made = adapter(tmp_path / "adapter", {**linear(Q, 64, 64), **linear("lm_head", 250, 64)})
    for workers in (1, 3):
        conversions.run(made, tmp_path / str(workers), "megatron", reference=llama, workers=workers)
    assert conversions.tree(tmp_path / "1") == conversions.tree(tmp_path / "3")


def test_the_tokenizer_is_the_adapters_where_it_has_one(llama: Path, tmp_path: Path) -> None:
    (llama / "tokenizer.json").write_text('{"base": 1}')
    (llama / "generation_config.json").write_text("{}")
    (llama / "special_tokens_map.json").write_text('{"base": 1}')
    made = adapter(tmp_path / "adapter", linear(Q, 64, 64))
    for directory, name in ((llama, "base"), (made, "adapter")):
        (directory / TEMPLATES).mkdir()
        (directory / TEMPLATES / f"{name}.jinja").write_text(name)
    conversions.run(made, tmp_path / "first", "hf", reference=llama)
    assert (tmp_path / "first" / "tokenizer.json").read_text() == '{"base": 1}'
    assert [path.name for path in (tmp_path / "first" / TEMPLATES).iterdir()] == ["base.jinja"]
    (made / "tokenizer.json").write_text('{"adapter": 1}')
    conversions.run(made, tmp_path / "second", "hf", reference=llama)
    assert [path.name for path in (tmp_path / "second" / TEMPLATES).iterdir()] == ["adapter.jinja"]
    assert (tmp_path / "second" / "tokenizer.json").read_text() == '{"adapter": 1}'
    assert not (tmp_path / "second" / "special_tokens_map.json").exists(), "of another tokenizer"
    assert (tmp_path / "second" / "generation_config.json").is_file()


def test_an_adapter_in_a_pickle_is_read_by_the_allow_list(llama: Path, tmp_path: Path) -> None:
    tensors = {f"{PREFIX}{name}": tensor for name, tensor in linear(Q, 64, 64).items()}
    made = adapter(tmp_path / "safe", linear(Q, 64, 64))
    pickled = adapter(tmp_path / "pickled", {})
    (pickled / "adapter_model.safetensors").unlink()
    torch.save(tensors, pickled / "adapter_model.bin")
    conversions.run(made, tmp_path / "one", "hf", reference=llama)
    conversions.run(pickled, tmp_path / "other", "hf", reference=llama)
    conversions.assert_same_tensors(tmp_path / "one", tmp_path / "other")
    torch.save({**tensors, "x": _Executes()}, pickled / "adapter_model.bin")
    with pytest.raises(UnsafePickle, match="system"):
        conversions.run(pickled, tmp_path / "third", "hf", reference=llama)


class _Executes:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("false",)


def test_an_adapter_alone_is_told_to_need_its_base(tmp_path: Path) -> None:
    made = adapter(tmp_path / "adapter", linear(Q, 64, 64))
    with pytest.raises(UnknownFormat, match=r"adapter of PEFT.*Give `convert`.*--reference BASE.*merge the two"):
        open_checkpoint(made)


def test_the_base_that_an_adapter_names_is_shown_and_not_trusted(llama: Path, tmp_path: Path) -> None:
    made = adapter(tmp_path / "adapter", linear(Q, 64, 64), base_model_name_or_path="org/\x1b[2Jone")
    notes = conversions.run(made, tmp_path / "out", "hf", reference=llama).notes
    assert r"The adapter names 'org/\x1b[2Jone' as its base; nothing here proves that this is it." in notes


def test_a_model_beside_an_adapters_config_is_not_taken_for_the_model(llama: Path, tmp_path: Path) -> None:
    made = adapter(tmp_path / "adapter", linear(Q, 64, 64))
    for file in ("config.json", "model.safetensors"):
        (made / file).write_bytes((llama / file).read_bytes())
    with pytest.raises(UnknownFormat, match=r"a model and an adapter of PEFT[\s\S]*--reference DIR"):
        open_checkpoint(made)
    conversions.run(made, tmp_path / "out", "hf", reference=made)
    apart = adapter(tmp_path / "apart", linear(Q, 64, 64))
    conversions.run(apart, tmp_path / "expected", "hf", reference=llama)
    conversions.assert_same_tensors(tmp_path / "out", tmp_path / "expected")


@pytest.mark.parametrize("to", ["hf", *in_soak("megatron")])
def test_an_adapter_that_is_a_part_of_the_model_travels_beside_it(tmp_path: Path, to: str) -> None:
    """Granite Speech 3.3's, which its class in transformers switches on for sound alone."""
    tiny_wrappers.save(tmp_path / "model", "granite_speech")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"has_lora_adapter": True}))
    plain = conversions.tensors(tmp_path / "model")
    made = adapter(tmp_path / "adapter", linear(Q, 64, 64))
    beside = {file.name: file.read_bytes() for file in made.iterdir()}
    for name, data in beside.items():
        (tmp_path / "model" / name).write_bytes(data)
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "model-00001-of-00001.safetensors")
    assert conversions.tensors(tmp_path / "model").keys() == plain.keys()
    notes = conversions.run(tmp_path / "model", tmp_path / "out", to).notes
    assert any("it is not merged, and travels" in note for note in notes)
    if to != "hf":
        conversions.run(tmp_path / "out", tmp_path / "back", "hf")
    out = tmp_path / ("out" if to == "hf" else "back")
    assert {name: (out / name).read_bytes() for name in beside} == beside
    conversions.assert_same_tensors(out, tmp_path / "model")


def test_one_of_two_tied_tensors_is_refused(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama-tied")
    name = "model.embed_tokens"
    tensors = {f"{name}.lora_embedding_A": random(4, 250), f"{name}.lora_embedding_B": random(64, 4)}
    with pytest.raises(MappingError, match="ties .*changes one of the two"):
        merge(base, tmp_path / "out", tensors)


REFUSED: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Tensor]], str]] = {
    "another kind": ({"peft_type": "IA3"}, lambda: linear(Q, 64, 64), "type 'IA3'"),
    "no kind": ({"peft_type": None}, lambda: linear(Q, 64, 64), "type None"),
    "an unknown setting": ({"use_hydra": 3}, lambda: linear(Q, 64, 64), r"not read: use_hydra \(3\)"),
    "copied layers": ({"layer_replication": [[0, 2]]}, lambda: linear(Q, 64, 64), "layer_replication"),
    "tokens alone": ({"trainable_token_indices": [1]}, lambda: linear(Q, 64, 64), "trainable_token_indices"),
    "activated": ({"alora_invocation_tokens": [1]}, lambda: linear(Q, 64, 64), "alora_invocation_tokens"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, lambda: linear(Q, 64, 64), "pissa_niter_4"),
    "an initialisation that is a list": ({"init_lora_weights": [1]}, lambda: linear(Q, 64, 64), "init_lora_weights"),
    "biases of B": ({"lora_bias": True}, lambda: linear(Q, 64, 64), "lora_bias"),
    "a rank of nothing": ({"r": 0}, lambda: linear(Q, 64, 64), "r is 0"),
    "a rank of a word": ({"r": "4"}, lambda: linear(Q, 64, 64), "r is '4'"),
    "another rank": ({"r": 5}, lambda: linear(Q, 64, 64), "rank 4, adapter_config.json says 5"),
    "an infinite alpha": ({"lora_alpha": float("inf")}, lambda: linear(Q, 64, 64), "lora_alpha is inf"),
    "an alpha that is NaN": ({"lora_alpha": float("nan")}, lambda: linear(Q, 64, 64), "lora_alpha is nan"),
    "a module that is no target": (
        {"target_modules": ["v_proj", "0.k_proj"]},
        lambda: linear(Q, 64, 64),
        rf"`{Q}` is no module that adapter_config.json says to adapt",
    ),
    "a module that is left out": (
        {"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]},
        lambda: linear(Q, 64, 64),
        rf"`{Q}` is no module that adapter_config.json says to adapt",
    ),
    "a layer that is left out": (
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        lambda: linear(Q, 64, 64),
        rf"`{Q}` is no module that adapter_config.json says to adapt",
    ),
    "layers that are no numbers": (
        {"target_modules": ["q_proj"], "layers_to_transform": ["0"]},
        lambda: linear(Q, 64, 64),
        r"layers_to_transform is \['0'\]",
    ),
    "layers that are switched off": (  # False is layer 0 to peft
        {"target_modules": ["q_proj"], "layers_to_transform": False},
        lambda: linear(Q, 64, 64),
        "layers_to_transform is False",
    ),
    "more modules to save than a model has": (
        {"target_modules": ["q_proj"], "modules_to_save": [f"m{number}" for number in range(100_000)]},
        lambda: linear(Q, 64, 64),
        "modules_to_save has 100000 names, more than 1000",
    ),
    "more lists of layers than a model has": (
        {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": ["h"] * 100_000},
        lambda: linear(Q, 64, 64),
        "layers_pattern has 100000 names, more than 1000",
    ),
    "targets that are no names": ({"target_modules": [1]}, lambda: linear(Q, 64, 64), r"target_modules is \[1\]"),
    "patterns in a list": ({"alpha_pattern": ["q_proj"]}, lambda: linear(Q, 64, 64), "are tables"),
    "an expression with a reference": (
        {"alpha_pattern": {r"(k)\1": 3}},
        lambda: linear(Q, 64, 64),
        r"alpha_pattern: the pattern '\(k\)\\\\1' cannot be read: `\\1`",
    ),
    "too many expressions": (
        {"alpha_pattern": {f"{number:0400}": 3 for number in range(1000)}},
        lambda: linear(Q, 64, 64),
        "alpha_pattern: patterns of more than 131072 letters cannot be read",
    ),
    "half an expression": ({"alpha_pattern": {"(q_proj": 3}}, lambda: linear(Q, 64, 64), "cannot be read: missing"),
    "an expression that is not read in a damaged file": (
        {"alpha_pattern": {"(q_proj": 3}, "use_rslora": "x"},
        lambda: linear(Q, 64, 64),
        "neither true nor false",
    ),
    "a switch of a word": ({"use_dora": "yes"}, lambda: linear(Q, 64, 64), "neither true nor false"),
    "parameters in a word": ({"target_parameters": "experts"}, lambda: linear(Q, 64, 64), "not a list of names"),
    "DoRA without magnitudes": ({"use_dora": True}, lambda: linear(Q, 64, 64), "contradict one another"),
    "magnitudes without DoRA": (
        {},
        lambda: {**linear(Q, 64, 64), f"{Q}.lora_magnitude_vector": random(64)},
        "contradict one another",
    ),
    "a module outside the model": ({}, lambda: linear("model.layers.7.self_attn.q_proj", 64, 64), "no such module"),
    "a module outside everything": ({}, lambda: linear("../../q_proj", 64, 64), "no such module"),
    "a whole tensor outside the model": (
        {},
        lambda: {"model.extra.weight": random(2, 64)},
        r"unexpected +model\.extra",
    ),
    "A of another model": ({}, lambda: linear(Q, 64, 128), r"is \[4, 128\], but .* is \[64, 64\]"),
    "B of another model": ({}, lambda: linear(Q, 128, 64), r"is \[64, 64\]"),
    "no B": ({}, lambda: {f"{Q}.lora_A.weight": random(4, 64)}, r"has no lora_B"),
    "an embedding's beside it": (
        {},
        lambda: {**linear(Q, 64, 64), f"{Q}.lora_embedding_A": random(4, 64)},
        "has no lora_embedding_B",
    ),
    "ranks that differ": (
        {},
        lambda: {f"{Q}.lora_A.weight": random(4, 64), f"{Q}.lora_B.weight": random(64, 3)},
        "ranks 4 and 3",
    ),
    "a huge rank": ({"r": 5000}, lambda: linear(Q, 64, 64, 5000), "up to 4096"),
    "a vector for a matrix": (
        {},
        lambda: {f"{Q}.lora_A.weight": random(64), f"{Q}.lora_B.weight": random(64, 4)},
        "no matrix",
    ),
    "a change of a norm": ({}, lambda: linear("model.norm", 64, 64), "only matrices"),
    "integers": ({}, lambda: {f"{Q}.lora_A.weight": torch.ones(4, 64, dtype=torch.int32)}, "no dtype of an adapter's"),
    "another name": ({}, lambda: {f"{Q}.lora_C.weight": random(4, 64)}, "of a kind that is not read"),
    "two whole tensors for one": (
        {},
        lambda: {"model.norm.weight": random(64), "model.norm.base_layer.weight": random(64)},
        r"second that the adapter has for `model\.norm\.weight`",
    ),
    "two changes of one": (
        {},
        lambda: linear(Q, 64, 64) | linear(f"{Q}.base_layer", 64, 64),
        rf"second that the adapter has for `{Q}\.weight`",
    ),
    "a name that is a format": (
        {"target_parameters": ["mlp.experts.down_proj"]},
        lambda: linear("model.{0:>3000000000}.{5}.{0.x}.mlp.experts", 64, 64),
        "no such module",
    ),
    "a name of nesting alone": ({}, lambda: linear(f"x{'.base_layer' * 300}.y", 64, 64), "adapter's base"),
    "a whole tensor of another size": ({}, lambda: {"lm_head.weight": random(260, 64)}, "vocabulary that grew"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_this_function_of_this_base_is_one_clear_error(llama: Path, tmp_path: Path, name: str) -> None:
    config, tensors, message = REFUSED[name]
    with pytest.raises(PrecisionctlError) as refused:
        merge(llama, tmp_path / "out", tensors(), **config)
    assert re.search(message, str(refused.value)), str(refused.value)
    assert refused.value.where and not (tmp_path / "out").exists()

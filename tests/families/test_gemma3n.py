"""Gemma 3n: projections that published files have and nothing reads, through every way that a checkpoint goes; tokens
without embeddings for layers; coefficients that are clamped in training; exports; the wrapper; what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pico
import pytest
import tiny_wrappers
import torch
from any_models import export
from conversions import run
from gguf_files import AS_RELEASED, export as to_gguf, source, stored_tensors
from gpt_models import as_gpt, assert_text_is_computed, converted, transformers_model
from safetensors.torch import load_file
from shared_kv import with_unused
from soaking import in_soak
from torch import Tensor

from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import MLX, Request
from precisionctl.conversion.command import execute
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, RecipeError, UnknownArchitecture
from precisionctl.model.model_parts import AltUp
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Parallelism
from precisionctl.precision import PRESETS
from precisionctl.recipe import ParallelSettings
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.parallel.shards import check as check_shared
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check
from precisionctl.verify.mlx_rules import check_mlx

KINDS = ["sliding_attention"] * 4 + ["full_attention"]
RELEASED = AS_RELEASED["gemma3n"]
SHARING = RELEASED | {"num_hidden_layers": 22, "intermediate_size": [96] * 22, "num_kv_shared_layers": 2}
"""As llama.cpp computes it, with as few layers as may share keys and values there."""


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("published", [True, *in_soak(False)])
def test_all_comes_back_from_megatron(published: bool, tmp_path: Path) -> None:
    """The norm before attention is no part of linear_qkv, and fewer tokens have embeddings for each layer."""
    pico.save(tmp_path / "hf", "gemma3n", dtype=torch.bfloat16)
    before = with_unused(tmp_path / "hf", 3 if published else 6)
    sizes = Parallelism(tensor=2, pipeline=3)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", container="torch", parallelism=sizes)
    run(tmp_path / "megatron", tmp_path / "dist", "megatron")
    run(tmp_path / "dist", tmp_path / "back", "hf", verify=True)
    assert same(before, load_file(tmp_path / "back" / "model.safetensors"))
    assert compare(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "megatron")).equal
    keys = ("layer_types", "intermediate_size", "activation_sparsity_pattern", "vocab_size_per_layer_input")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back")]
    assert [configs[0][key] for key in keys] == [configs[1][key] for key in keys]


def test_coefficients_are_clamped_in_training_alone(tmp_path: Path) -> None:
    theirs = transformers_model("gemma3n", altup_coef_clip=0.05)
    ours, tokens = as_gpt(converted(theirs, tmp_path)), torch.randint(1, 250, (2, 12))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(tokens)
    torch.testing.assert_close(found[..., : expected.shape[-1]], expected, rtol=0, atol=1e-5)
    clamped = theirs.train()(tokens).logits
    assert (clamped - expected).abs().max() > 1e-2
    torch.testing.assert_close(ours(tokens)[..., : expected.shape[-1]], clamped, rtol=0, atol=1e-5)


def test_multipliers_of_embeddings_for_layers_are_rounded_to_bf16_as_in_its_class(tmp_path: Path) -> None:
    """To the last bit. Neither the root of 1/2 nor that of 1/96 is a BF16 number."""
    theirs = transformers_model("gemma3n", hidden_size=96).bfloat16()
    made, tokens = converted(theirs, tmp_path), torch.arange(1, 241)[None]
    hidden = torch.randn(1, 240, 96, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    own = theirs.model.get_per_layer_inputs(tokens)
    expected = theirs.model.project_per_layer_inputs(hidden, own).flatten(0, 1)

    def found(model: ModelShape) -> Tensor:
        gpt = GPT(model, PRESETS["bf16"])
        gpt.load_state_dict(dict(made.tensors))
        per_layer = gpt.embedding.per_layer(tokens, hidden[0])
        assert per_layer is not None
        return torch.stack(per_layer, 1)

    assert torch.equal(found(made.model), expected)
    assert not torch.equal(found(dataclasses.replace(made.model, rounded_per_layer_multipliers=False)), expected)


def test_the_wrapper_s_text_is_computed_and_comes_back_with_its_towers(tmp_path: Path) -> None:
    theirs = tiny_wrappers.save(tmp_path / "hf", "gemma3n")
    before = with_unused(tmp_path / "hf", 2, "model.language_model")
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(pipeline=2))
    run(tmp_path / "megatron", tmp_path / "back", "hf", verify=True)
    assert same(before, tiny_wrappers.stored(tmp_path / "back"))
    assert len(tiny_wrappers.towers(before)) > 10
    assert_text_is_computed(theirs, tmp_path / "hf")


CODED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(("target", "within"), [("vllm", True), *in_soak(("sglang", False))])
def test_streams_and_low_rank_residuals_stay_in_bf16_under_the_names_that_an_engine_looks_for(
    target: str, within: bool, tmp_path: Path
) -> None:
    tiny_wrappers.save(tmp_path / "hf", "gemma3n", dtype=torch.bfloat16)
    values = with_unused(tmp_path / "hf", 2, "model.language_model")
    export(tmp_path / "hf", tmp_path / "fp8", target=target, keep_misfits=True)
    codes = load_file(tmp_path / "fp8" / "model.safetensors")
    for name, expected in values.items():
        if "language_model" in name and name.split(".")[-2] in CODED:
            assert codes[name].dtype == torch.float8_e4m3fn, name
        else:
            assert torch.equal(codes[name], expected), name
    directory = open_checkpoint(tmp_path / "fp8")
    assert not check(directory, engine_named(target))
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    for module in ("altup_projections.0", "per_layer_model_projection"):
        assert f"model.language_model.{module}" in ignored
        assert (f"model.language_model.self_decoder.{module}" in ignored) == within
    others = [name for name in ignored if "self_decoder" not in name]
    config["quantization_config"]["ignore"] = others
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    missed = check(open_checkpoint(tmp_path / "fp8"), engine_named(target))
    assert bool(missed) == within


@pytest.mark.parametrize(
    ("own", "shared", "taken"),
    [
        (KINDS, KINDS, None),
        ([*KINDS[:3], "full_attention", "sliding_attention"], KINDS, [*KINDS[:3], *KINDS[3:]]),
        (["full_attention", *KINDS[:4]], ["sliding_attention"], [*["full_attention"], *KINDS[:2], *KINDS[3:]]),
        ([*KINDS, "full_attention"], ["full_attention"], None),
    ],
)
def test_vllm_takes_the_last_two_layers_for_those_that_are_shared(
    own: list[str], shared: list[str], taken: list[str] | None
) -> None:
    config = {"model_type": "gemma3n_text", "layer_types": own + shared, "num_kv_shared_layers": len(shared)}
    found = {key: value for each in engine_named("vllm").fixed for key, value in each.taken(config)}
    assert found == ({} if taken is None else {"layer_types": taken + shared})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": [96, 96, 96, 48, 48, 48]}, "intermediate_size="),
        ({"altup_active_idx": 1}, "altup_active_idx=1"),
        ({"altup_correct_scale": False}, "altup_correct_scale=False"),
        ({"attention_bias": True}, "attention_bias=True"),
    ],
)
def test_other_models_of_the_family_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownArchitecture, match=message):
        from_hf_config(pico.config("gemma3n", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size_per_layer_input": 251}, "251 tokens with an embedding for each layer, of 250"),
        ({"activation_sparsity_pattern": [0.9]}, "activation_sparsity_pattern is"),
        ({"activation_sparsity_pattern": [1.0] * 6}, "activation_sparsity is 1.0"),
        ({"altup_num_inputs": 0}, "altup.num_inputs is 0"),
        ({"intermediate_size": ["96"] * 6}, "intermediate_size is"),
    ],
)
def test_settings_that_describe_no_model_are_damage(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=message):
        from_hf_config(pico.config("gemma3n") | changes)


def test_what_its_config_does_not_say_is_what_its_class_takes() -> None:
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "intermediate_size")
    said = {"vocab_size": 262400, "hidden_size": 2048, "num_hidden_layers": 35, "max_position_embeddings": 32768}
    model = from_hf_config({"model_type": "gemma3n_text", **said, sizes[-1]: 16384})
    assert (model.altup, model.laurel_rank) == (AltUp(4, 120.0), 64)
    assert model.activation_sparsity == (0.95,) * 10 + (0.0,) * 25
    assert (model.per_layer_tokens, model.num_kv_shared_layers) == (262144, 15)
    assert [model.kv_layer(layer) for layer in (20, 24, 34)] == [18, 19, 19]


def test_ranks_that_have_a_part_of_a_gate_are_refused() -> None:
    model = pico.shape("gemma3n")
    with pytest.raises(RecipeError, match="the largest channels of a gate"):
        check_shared(model, ParallelSettings(tensor=2))
    check_shared(model, ParallelSettings(tensor=1))


def test_a_gguf_file_has_a_row_for_each_token_and_comes_back(tmp_path: Path) -> None:
    """As transformers reads it: those of tokens without embeddings for layers are the first one's."""
    source(tmp_path / "hf", "gemma3n", **SHARING)
    values = with_unused(tmp_path / "hf", 20)
    file = to_gguf(tmp_path / "hf", tmp_path / "gguf")
    table = values["model.embed_tokens_per_layer.weight"]
    tensor, data = stored_tensors(file)["per_layer_token_embd.weight"]
    rows = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(tensor.shape)
    assert len(table) < len(rows) and torch.equal(rows[: len(table)], table)
    assert (rows[len(table) :] == table[0]).all()
    stack, data = stored_tensors(file)["altup_proj.weight"]
    parts = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(stack.shape)
    assert all(torch.equal(parts[n], values[f"model.altup_projections.{n}.weight"]) for n in range(3))
    run(file, tmp_path / "back", "hf", reference=tmp_path / "hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == values.keys()
    assert all(torch.equal(back[name].bfloat16(), values[name]) for name in values)


def test_llama_cpp_and_mlx_ask_for_keys_and_values_that_they_do_not_read(tmp_path: Path) -> None:
    source(tmp_path / "hf", "gemma3n", **SHARING)
    with pytest.raises(UnknownArchitecture, match="without the keys and values of layers that share others'"):
        to_gguf(tmp_path / "hf", tmp_path / "gguf")
    tiny_wrappers.save(tmp_path / "wrapper", "gemma3n", dtype=torch.bfloat16)
    with pytest.raises(UnknownArchitecture, match="layers without keys and values of their own"):
        plan_command(Request.export(tmp_path / "wrapper", tmp_path / "mlx", MLX))
    values = with_unused(tmp_path / "wrapper", 2, "model.language_model")
    execute(plan_command(Request.export(tmp_path / "wrapper", tmp_path / "mlx", MLX)))
    made = load_file(tmp_path / "mlx" / "model.safetensors")
    assert same(made, {name: tensor for name, tensor in values.items() if "language_model" in name})
    assert compare(open_checkpoint(tmp_path / "wrapper"), open_checkpoint(tmp_path / "mlx")).equal
    assert not check_mlx(open_checkpoint(tmp_path / "mlx"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"laurel_rank": 32}, "laurel_rank 32, but with 64"),
        (SHARING | {"layer_types": KINDS * 3 + KINDS[::-1] + KINDS[-2:]}, "not one with a window and one without"),
        *in_soak(
            ({"altup_num_inputs": 3}, "altup.num_inputs 3, but with 4"),
            ({"activation_sparsity_pattern": [0.0] * 20}, "activation_sparsity"),
            ({"hidden_size_per_layer_input": 16}, "per_layer_embed_dim 16, but with 256"),
            (SHARING | {"num_kv_shared_layers": 5}, "num_kv_shared_layers 5, but with 2"),
        ),
    ],
)
def test_llama_cpp_computes_the_released_models_alone(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    source(tmp_path / "hf", "gemma3n", **RELEASED | changes)
    said = RELEASED | changes
    with_unused(tmp_path / "hf", said["num_hidden_layers"] - said["num_kv_shared_layers"])
    with pytest.raises(UnknownArchitecture, match=message):
        to_gguf(tmp_path / "hf", tmp_path / "gguf")

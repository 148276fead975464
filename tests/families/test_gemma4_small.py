"""Gemma 4's small models: projections that published files have and nothing reads, through every way that a checkpoint
goes; exports; the wrapper; rows that texts share; memory that recomputation saves."""

import json
from pathlib import Path
from typing import Any

import pico
import pytest
import tiny_wrappers
import torch
from any_models import export
from command_line import run as command
from conversions import run
from gguf_files import export as to_gguf, source
from gpt_models import VOCABULARY, assert_text_is_computed, backward, converted, transformers_model
from safetensors.torch import load_file, save_file
from shared_kv import UNUSED, with_unused
from soaking import in_soak
from torch import Tensor
from training import add_tokenizer, make_text, run as resumed, settings
from transformers import AutoModelForCausalLM

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.engines.base import engine_named
from precisionctl.errors import MissingTensor
from precisionctl.param import Parallelism
from precisionctl.precision import PRESETS
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.sequences import PackedSequences
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check

SMALL = "gemma4-small"
WHOLE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "global_head_dim": 128}
"""Sizes of whole blocks."""
SHARING = (3, 4, 5)


def published(directory: Path, **settings: Any) -> dict[str, Tensor]:
    """A model with all that published files have, saved; its tensors."""
    pico.save(directory, SMALL, dtype=torch.bfloat16, **settings)
    return with_unused(directory, 3)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("container", "sizes"),
    [*in_soak(("torch_dist", Parallelism(tensor=2))), ("torch", Parallelism(tensor=2, pipeline=3))],
    ids=str,
)
def test_what_published_files_have_and_nothing_reads_comes_back(
    container: Any, sizes: Parallelism, tmp_path: Path
) -> None:
    before = published(tmp_path / "hf")
    assert any(name.endswith("layers.5.self_attn.v_proj.weight") for name in before)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", container=container, parallelism=sizes)
    run(tmp_path / "megatron", tmp_path / "back", "hf", verify=True)
    assert same(before, load_file(tmp_path / "back" / "model.safetensors"))
    run(tmp_path / "hf", tmp_path / "again", "hf", verify=True)
    assert same(before, load_file(tmp_path / "again" / "model.safetensors"))
    assert compare(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "megatron")).equal


def test_they_are_in_a_gguf_file_and_come_back(tmp_path: Path) -> None:
    source(tmp_path / "hf", SMALL)
    before = with_unused(tmp_path / "hf", 3)
    run(to_gguf(tmp_path / "hf", tmp_path / "gguf"), tmp_path / "back", "hf", reference=tmp_path / "hf")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert same(before, {name: tensor.bfloat16() for name, tensor in after.items()})


def test_a_part_of_them_is_a_checkpoint_that_lacks_tensors(tmp_path: Path) -> None:
    tensors = published(tmp_path / "hf")
    del tensors["model.layers.5.self_attn.v_proj.weight"]
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MissingTensor, match=r"layers\.5\.self_attn\.v_proj"):
        run(tmp_path / "hf", tmp_path / "megatron", "megatron")


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_training_carries_them_along_as_they_are(precision: str, tmp_path: Path) -> None:
    before = published(tmp_path / "hf", vocab_size=80)
    add_tokenizer(tmp_path / "hf")
    text = make_text(tmp_path / "text.txt")
    started, _, _ = resumed(settings(tmp_path / "hf", text, tmp_path / "first", precision, train__steps=2))
    assert any("parameters that nothing reads are carried along" in note for note in started.notes)
    resumed(settings(tmp_path / "first", text, tmp_path / "run", precision, train__steps=4))
    run(tmp_path / "run", tmp_path / "back", "hf", verify=True)
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    unused = {f"model.layers.{layer}.self_attn.{name}.weight" for layer in SHARING for name in UNUSED}
    assert unchanged == unused | {f"model.layers.{layer}.layer_scalar" for layer in range(6)}


def test_recomputation_and_a_shared_row_change_no_gradient(tmp_path: Path) -> None:
    """Keys and values of an earlier layer are kept, and their gradients come back to it."""
    made = converted(transformers_model(SMALL), tmp_path)
    tokens, lengths = torch.randint(VOCABULARY, (2, 24)), (9, 15, 24)
    gradients = []
    for recompute in (False, True):
        model = GPT(made.model, PRESETS["bf16"], dtype=torch.float32, recompute=recompute)
        model.load_state_dict(dict(made.tensors))
        backward(model(tokens, packed=PackedSequences(lengths)), tokens)
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.requires_grad})
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    with torch.no_grad():
        shared = model(tokens, packed=PackedSequences(lengths)).flatten(0, 1)
        alone = [model(text[None])[0] for text in torch.split(tokens.flatten(), lengths)]
    torch.testing.assert_close(shared, torch.cat(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "scheme"),
    # a form for each row and one for each block; which engine it is for changes only the words
    [("vllm", "dynamic"), ("transformers", "block"), *in_soak(("sglang", "block"), ("tensorrt-llm", "mxfp8"))],
)
@pytest.mark.parametrize("as_published", [True, *in_soak(False)], ids=["published", "saved"])
def test_exports_have_the_projections_of_a_layer_in_one_form(
    as_published: bool, target: str, scheme: Any, tmp_path: Path
) -> None:
    """Also those that nothing reads; the embedding for each layer, and what is made of it, stays as it is."""
    if as_published:
        values = published(tmp_path / "hf", **WHOLE)
    else:
        pico.save(tmp_path / "hf", SMALL, dtype=torch.bfloat16, **WHOLE)
        values = load_file(tmp_path / "hf" / "model.safetensors")
    export(tmp_path / "hf", tmp_path / "fp8", scheme, target)
    codes = load_file(tmp_path / "fp8" / "model.safetensors")
    assert values.keys() <= codes.keys()
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for name, expected in values.items():
        if name.split(".")[-2] in linears:
            assert codes[name].dtype == torch.float8_e4m3fn, name
        else:
            assert torch.equal(codes[name], expected), name
    assert not check(open_checkpoint(tmp_path / "fp8"), engine_named(target))
    assert compare(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "fp8")).equal


@pytest.mark.soak
def test_fixed_scales_are_those_of_the_layer_whose_keys_are_read(tmp_path: Path) -> None:
    """Of inputs: what an engine fuses has one; of the cache: a layer reads that of another."""
    published(tmp_path / "hf", vocab_size=80, **WHOLE)
    add_tokenizer(tmp_path / "hf")
    text, state = make_text(tmp_path / "text.txt"), tmp_path / "state.safetensors"
    words = ("--data", text, "--out", state, "--passes", 2, "--sequence-length", 32, "--backend", "emulated")
    done = command("calibrate", tmp_path / "hf", *words)
    assert done.exit_code == 0, done.stderr
    done = command("export-inference", tmp_path / "hf", tmp_path / "te", "--target", "te", "--fp8-state", state)
    assert done.exit_code == 0, done.stderr
    assert compare(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "te")).equal
    options = ("--scheme", "static", "--kv-cache", "fp8", "--fp8-state", state)
    done = command("export-inference", tmp_path / "hf", tmp_path / "fp8", "--target", "vllm", *options)
    assert done.exit_code == 0, done.stderr
    codes = load_file(tmp_path / "fp8" / "model.safetensors")
    for layer in range(6):
        attention = f"model.layers.{layer}.self_attn"
        for kind in ("weight_scale", "input_scale"):
            assert len({float(codes[f"{attention}.{name}_proj.{kind}"]) for name in "qkv"}) == 1, (layer, kind)
        if layer in SHARING:
            for cached in ("k_scale", "v_scale"):
                source = f"model.layers.{layer - 3 if layer == 5 else 1}.self_attn"
                assert torch.equal(codes[f"{attention}.{cached}"], codes[f"{source}.{cached}"])
    assert not check(open_checkpoint(tmp_path / "fp8"), engine_named("vllm"))
    done = command("verify", tmp_path / "hf", tmp_path / "fp8")
    assert done.exit_code == 0, done.stdout + done.stderr


def test_a_source_s_scales_of_a_cache_are_those_of_the_layer_that_caches(tmp_path: Path) -> None:
    """Whatever stands at a layer that shares it, or nothing."""
    pico.save(tmp_path / "hf", SMALL, dtype=torch.bfloat16)
    export(tmp_path / "hf", tmp_path / "fp8", "dynamic")
    file = tmp_path / "fp8" / "model.safetensors"
    scales = {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor([layer + start])
        for layer in (0, 1, 2, SHARING[0])
        for kind, start in (("k", 0.25), ("v", 0.5))
    }
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    export(tmp_path / "fp8", tmp_path / "again", "dynamic", kv_cache="fp8")
    made = load_file(tmp_path / "again" / "model.safetensors")
    for layer in range(6):
        cached = f"model.layers.{layer if layer < 3 else {3: 1, 4: 1, 5: 2}[layer]}.self_attn"
        for kind in ("k_scale", "v_scale"):
            assert torch.equal(made[f"model.layers.{layer}.self_attn.{kind}"], scales[f"{cached}.{kind}"]), layer


WRAPPED: dict[str, Any] = {
    "attention_k_eq_v": False,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 80,
}


def test_the_wrapper_s_text_is_computed_and_comes_back_with_its_towers(tmp_path: Path) -> None:
    theirs = tiny_wrappers.save(tmp_path / "hf", "gemma4", **WRAPPED)
    tensors = with_unused(tmp_path / "hf", 2, "model.language_model")
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(pipeline=2))
    run(tmp_path / "megatron", tmp_path / "back", "hf", verify=True)
    assert same(tensors, tiny_wrappers.stored(tmp_path / "back"))
    assert len(tiny_wrappers.towers(tensors)) > 10
    assert_text_is_computed(theirs, tmp_path / "hf")


def test_inspect_tells_them(tmp_path: Path) -> None:
    published(tmp_path / "hf")
    done = command("inspect", tmp_path / "hf")
    assert done.exit_code == 0, done.stderr
    shown = " ".join(done.stdout.split())  # lines of a table are folded
    assert "the last 3 layers read keys and values of earlier ones" in shown
    assert "an embedding of 16 for each layer" in shown
    told = json.loads(command("inspect", tmp_path / "hf", "--json").stdout)
    assert (told["model"]["num_kv_shared_layers"], told["model"]["per_layer_embed_dim"]) == (3, 16)


def test_transformers_takes_what_published_files_have_beside(tmp_path: Path) -> None:
    """It leaves it out; what it then saves goes the same way without."""
    published(tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "saved")
    run(tmp_path / "saved", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf", verify=True)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert same(saved, load_file(tmp_path / "back" / "model.safetensors"))
    assert not any(f"layers.{layer}.self_attn.k_" in name for name in saved for layer in SHARING)

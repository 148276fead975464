"""Conversions end to end: bit-exact there and back, and the same bytes however they are made."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import command_line
import numpy as np
import pico
import pytest
import torch
from conversions import assert_same_tensors, run, tensors, tree
from safetensors.torch import load_file, save_file
from soaking import few, in_soak
from transformers import AutoModelForCausalLM

from precisionctl.architectures.head_rearrangements import Grouped
from precisionctl.checkpoints.chunks import Bytes, read_tensor
from precisionctl.checkpoints.hf_directory.huggingface_files import SAFETENSORS
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion import worker
from precisionctl.conversion.command import execute
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, MissingTensor, ShapeMismatch
from precisionctl.param import Parallelism
from precisionctl.planning.make_plan import make_plan


@pytest.mark.parametrize("tensor_parallel", [2, *in_soak(1)])
@pytest.mark.parametrize("family", pico.representing(pico.mixers, most=4))
def test_there_and_back_is_bit_exact(tmp_path: Path, family: str, tensor_parallel: int) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, max_shard_size="40KB")
    before = tree(tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor_parallel))
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    assert tree(tmp_path / "hf") == before
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads(before[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_keep_their_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    pico.save(tmp_path / "hf", dtype=dtype)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    assert {spec.dtype for spec in open_checkpoint(tmp_path / "megatron").specs.values()} == {DType.of(dtype)}
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_tensors_of_one_matrix_keep_their_own_dtypes_or_it_is_said_that_they_do_not(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    file = tmp_path / "hf" / "model.safetensors"
    wide = {name: each.float() if "gate_proj" in name else each for name, each in load_file(file).items()}
    save_file(wide, file, metadata={"format": "pt"})
    one = run(tmp_path / "hf", tmp_path / "bin", "hf", container="bin", verify=True)
    other = run(tmp_path / "bin", tmp_path / "again", "hf", verify=True)
    assert_same_tensors(tmp_path / "hf", tmp_path / "again")
    said = "2 tensors become FP32, as part of one tensor with others that need it"
    assert not any(said in note for note in (*one.notes, *other.notes))
    told = run(tmp_path / "hf", tmp_path / "megatron", "megatron").notes
    assert any(said in note and "The first is model.layers.0.mlp.up_proj.weight." in note for note in told)
    assert not any("become FP32" in note for note in run(tmp_path / "hf", tmp_path / "m32", "megatron", "fp32").notes)
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    back = tensors(tmp_path / "back")
    assert {name for name in wide if back[name].dtype != wide[name].dtype} == {
        f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)
    }
    assert all(torch.equal(back[name].float(), wide[name].float()) for name in wide)


def test_bf16_rounds_each_value_once_and_says_so_in_the_config(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.float32)
    run(tmp_path / "hf", tmp_path / "bf16", "hf", precision="bf16")
    expected = {name: values.bfloat16() for name, values in tensors(tmp_path / "hf").items()}
    found = tensors(tmp_path / "bf16")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_two_shards_hold_what_one_holds(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-all-biases", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "one", "megatron")
    run(tmp_path / "hf", tmp_path / "two", "megatron", parallelism=Parallelism(2))
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert [len(list((tmp_path / n / "release").glob("__*_0.distcp"))) for n in ("one", "two")] == [1, 2]
    vocabulary = {"embedding.word_embeddings.weight", "output_layer.weight"}  # padded to 128 times the shards
    assert all(torch.equal(one[name], two[name]) for name in one.keys() - vocabulary)
    assert all(torch.equal(one[name][:250], two[name][:250]) for name in vocabulary)


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path, to: str) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "source", "megatron", precision="fp8")
    outputs: list[dict[str, bytes]] = []
    precision = "fp8" if to == "megatron" else "keep"
    for workers in (1, 2, 4):
        run(tmp_path / "source", tmp_path / str(workers), to, precision=precision, workers=workers)
        outputs.append(tree(tmp_path / str(workers)))
    assert outputs[0] == outputs[1] == outputs[2]


def test_all_bytes_are_moved_by_copies_for_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row's merge or split ever sees values: only row numbers, which are integers."""
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16)
    seen: list[np.dtype[Any]] = []
    merge = Grouped.merge
    monkeypatch.setattr(
        Grouped, "merge", lambda s, parts, m: (seen.extend(p.dtype for p in parts), merge(s, parts, m))[1]
    )
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", workers=1)
    assert set(seen) == {np.dtype(np.int64)}


def test_lowered_bytes_are_those_of_the_tensor_path(tmp_path: Path) -> None:
    """The rows applied to whole tensors, against what the copies wrote, TP 2 included."""
    pico.save(tmp_path / "hf", "llama-all-biases", dtype=torch.bfloat16)
    work = run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(2))
    source, written = tensors(tmp_path / "hf"), tensors(tmp_path / "megatron")
    for job in work.plan.jobs:
        assert torch.equal(written[job.name], job.row.merge([source[name] for name in job.reads], work.plan.model))


def test_padding_is_cut_off_whatever_it_holds(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    reader = open_checkpoint(tmp_path / "megatron")
    (chunk,) = reader.chunks("output_layer.weight")
    with open(chunk.place, "r+b") as file:  # type: ignore[arg-type]
        file.seek(chunk.offset + 250 * 64 * 2)
        file.write(b"\x42" * 6 * 64 * 2)
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_a_bias_that_hugging_face_has_no_place_for_must_be_zero(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-attention-bias", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    reader = open_checkpoint(tmp_path / "megatron")
    assert not read_tensor(reader, "decoder.layers.0.mlp.linear_fc1.bias").any()
    chunk, _ = reader.chunks("decoder.layers.0.mlp.linear_fc1.bias")  # gate and up
    with open(chunk.place, "r+b") as file:  # type: ignore[arg-type]
        file.seek(chunk.offset)
        file.write(b"\x01")
    with pytest.raises(ShapeMismatch, match=r"linear_fc1.bias` is not zero"):
        run(tmp_path / "megatron", tmp_path / "back", "hf", workers=2)
    assert not (tmp_path / "back").exists()


def test_a_stored_tied_head_must_equal_the_embedding(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-tied", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    stored["lm_head.weight"][3, 3] += 1
    save_file(stored, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedCheckpoint, match=r"`lm_head.weight` .* differs"):
        run(tmp_path / "hf", tmp_path / "again", "megatron", workers=2)


def test_a_tied_head_that_is_stored_alone_is_the_embedding(tmp_path: Path) -> None:
    """transformers loads such a file."""
    pico.save(tmp_path / "hf", "llama-tied", dtype=torch.bfloat16)
    shutil.copytree(tmp_path / "hf", tmp_path / "head")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    save_file(stored, tmp_path / "head" / "model.safetensors", metadata={"format": "pt"})
    for container in ("hf", "megatron"):
        for name in ("hf", "head"):
            run(tmp_path / name, tmp_path / f"{name} in {container}", container)
        assert_same_tensors(tmp_path / f"hf in {container}", tmp_path / f"head in {container}")
    for command in (
        ("verify", tmp_path / "head", tmp_path / "hf"),
        ("verify", tmp_path / "hf", tmp_path / "head"),
        ("inspect", tmp_path / "head"),
        ("export-inference", tmp_path / "head", tmp_path / "out", "--target", "vllm"),
    ):
        found = command_line.run(*command)
        assert found.exit_code == 0, found.output
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(MissingTensor, match="embed_tokens"):
        run(tmp_path / "head", tmp_path / "untied", "megatron")


def test_whatever_transformers_makes_a_tokenizer_of_travels_there_and_back(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    beside = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model", "spiece.model", "vocab.json")
    for name in beside:
        (tmp_path / "hf" / name).write_text(name)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert [(tmp_path / "back" / name).read_text() for name in beside] == list(beside)


def test_copies_that_are_no_numbers_are_copies(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-tied", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    stored["model.embed_tokens.weight"][3, 5] = torch.nan
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    run(tmp_path / "hf", tmp_path / "out", "megatron")
    assert tensors(tmp_path / "out")["embedding.word_embeddings.weight"][3, 5].isnan()


def test_a_large_model_is_sharded_with_an_index(tmp_path: Path) -> None:
    model = pico.make_and_save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "out", "hf", max_shard_size=40_000)
    index = json.loads((tmp_path / "out" / SAFETENSORS.index).read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in model.state_dict().values())
    assert_same_tensors(tmp_path / "hf", tmp_path / "out")


@pytest.mark.soak
def test_every_source_is_used_once_and_every_target_made_once(tmp_path: Path) -> None:
    for family in pico.first_of_each(pico.rows):
        pico.save(tmp_path / family, family, dtype=torch.bfloat16)
        reader = open_checkpoint(tmp_path / family)
        plan = make_plan(reader, "megatron")
        assert sorted(name for job in plan.jobs for name in job.reads) == sorted(reader.specs)
        assert [name for job in plan.jobs for name in job.writes] == list(plan.targets)


def test_verify_reads_back_what_is_on_the_disk_and_lists_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    work = plan_command(Request(tmp_path / "hf", tmp_path / "out", "megatron", parallelism=Parallelism(2)))
    execute(work, verify=True)
    manifest = json.loads((tmp_path / "out" / "release" / "precisionctl" / "manifest.json").read_text())
    for name, values in tensors(tmp_path / "out").items():
        assert manifest["sha256"][name] == hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert set(manifest["sha256"]) == set(work.plan.targets)

    def flips(target: Any, name: str, row: int, values: Bytes) -> None:
        values = values.copy()
        if name == "decoder.final_layernorm.weight":
            values[0, 0] ^= 1
        write_rows(target, name, row, values)

    write_rows = worker.write_rows
    monkeypatch.setattr(worker, "write_rows", flips)
    with pytest.raises(DamagedCheckpoint, match="`decoder.final_layernorm.weight` reads back other than"):
        execute(plan_command(Request(tmp_path / "hf", tmp_path / "flipped", "megatron")), verify=True)
    assert not (tmp_path / "flipped").exists()


def test_weights_as_transformers_once_saved_them(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "bin", "hf", container="bin", max_shard_size=100_000)
    assert (tmp_path / "bin" / "pytorch_model.bin.index.json").is_file()
    run(tmp_path / "bin", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("family", few(["glm-moe-dsa", "glm4-moe", "deepseek-v3"], "glm-moe-dsa"))
def test_tensors_without_elements_of_no_shared_experts_are_none(tmp_path: Path, family: str) -> None:
    """transformers makes an MLP of width 0, and saves it; what is computed with it is zero."""
    model = pico.make_and_save(tmp_path / "hf", family, n_shared_experts=0)
    assert any(not tensor.numel() for tensor in model.state_dict().values())
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("hf", "back"))
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(before(tokens).logits, after(tokens).logits)

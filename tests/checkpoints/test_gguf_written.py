"""What is written for llama.cpp: a file that is read back as the model that it was made of, and what is refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf_files
import gguf_tokenizers
import gguf_towers
import mxfp4_directories
import numpy as np
import pico
import pytest
import repository
import tiny_wrappers
import torch
from gguf_files import export, source, stored_tensors
from gguf_tokenizers import SIZE
from prediction_layer import add_mtp
from safetensors.torch import load_file, save_file
from target_checks import check_directory

from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.gguf.families import FAMILIES, of_llama_cpp
from precisionctl.checkpoints.gguf.head import read_head
from precisionctl.checkpoints.gguf.mrope_keys import Images
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.codes.ggml_blocks import blocks_of
from precisionctl.codes.ggml_formats import named
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import LLAMA_CPP, Request
from precisionctl.conversion.command import execute
from precisionctl.errors import DamagedCheckpoint, PrecisionError, RecipeError, UnknownArchitecture, UnknownFormat
from precisionctl.export.gguf.gguf_pretokenizers import QWEN2
from precisionctl.param import Parallelism
from precisionctl.verify.compare import compare


def kinds(family: str) -> set[str]:
    """What becomes of a family's tensors, and which metadata it has."""
    entry = FAMILIES[pico.shape(family).architecture]
    keys = {repr(key) for key in (*entry.keys, *entry.more, *entry.reads)}
    return keys | {type(row.change).__name__ for row in entry.rows}


@pytest.mark.parametrize("family", pico.representing(kinds, gguf_files.WRITTEN, most=16))
def test_what_is_written_is_read_as_the_model_that_it_was_made_of(tmp_path: Path, family: str) -> None:
    published = source(tmp_path / "hf", family, **gguf_files.WRITTEN[family])
    file = export(published, tmp_path / "out")
    hints = Hints(companions=read_companions(published), reference=published)
    reader, before = open_checkpoint(file, None, hints), open_checkpoint(published)
    assert reader.model == before.model
    expected = gguf_files.as_read({name: read_tensor(before, name) for name in before.specs})
    assert reader.specs.keys() == expected.keys()
    for name, values in expected.items():
        found = read_tensor(reader, name)
        product = family == "falcon-h1" and torch.allclose(found, values.to(found.dtype), rtol=2**-8, atol=0)
        assert product or torch.equal(found.bfloat16(), values), name


def test_codes_of_heads_that_are_turned_are_known_and_a_reference_describes_what_a_file_does_not(
    tmp_path: Path,
) -> None:
    """ggml's blocks are along other dimensions than the rows of `kv_b_proj`."""
    sizes = {"qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 64, "q_lora_rank": 64}
    published = source(tmp_path / "hf", "deepseek-v3", **gguf_files.WRITTEN["deepseek-v3"] | sizes)
    file = export(published, tmp_path / "out", "q8_0")
    hints = Hints(companions=read_companions(published), reference=published)
    found = compare(open_checkpoint(file, None, hints), open_checkpoint(published))
    turned = [tensor for tensor in found.tensors if tensor.name.endswith("kv_b_proj.weight")]
    assert len(turned) >= 2 and {(tensor.status, tensor.dtypes[:4]) for tensor in turned} == {("encoded", "Q8_0")}
    assert check_directory(file, LLAMA_CPP, reference=published).passes


@pytest.mark.parametrize("scheme", ["q8_0", "q4_k_m"])
def test_a_part_whose_rows_are_no_whole_blocks_is_fp16_beside_codes_of_the_other(tmp_path: Path, scheme: Any) -> None:
    sizes = {"qk_nope_head_dim": 16, "v_head_dim": 32, "kv_lora_rank": 32}  # rows of keys, transposed, have 16 values
    published = source(tmp_path / "hf", "deepseek-v3", **gguf_files.WRITTEN["deepseek-v3"] | sizes)
    file = export(published, tmp_path / "out", scheme)
    name, hints = "model.layers.0.self_attn.kv_b_proj.weight", Hints(reference=published)
    stored = stored_tensors(file)
    parts = [stored[f"blk.0.attn_{part}_b.weight"][0] for part in ("k", "v")]
    assert parts[0].format.name == "F16" and parts[1].format.name in ("Q8_0", "Q5_0")
    before = open_checkpoint(published)
    for place, status in ((None, "encoded"), (parts[0].offset, "differs"), (parts[1].offset + 5, "differs")):
        data = bytearray(file.read_bytes())
        if place:
            data[place] ^= 1
        (tmp_path / "changed.gguf").write_bytes(data)
        found = compare(open_checkpoint(tmp_path / "changed.gguf", None, hints), before)
        (tensor,) = (each for each in found.tensors if each.name == name)
        assert (tensor.status, tensor.dtypes) == (status, f"float16 and {parts[1].format.name} / bfloat16")


@pytest.mark.parametrize(("family", "scheme"), [("deepseek-v3", "q8_0"), ("gpt2", "f16")])
def test_a_matrix_in_fp16_is_the_rounding_of_its_source_also_where_it_is_transposed(
    tmp_path: Path, family: str, scheme: Any
) -> None:
    name = {"deepseek-v3": "model.layers.0.self_attn.kv_b_proj.weight", "gpt2": "transformer.h.0.mlp.c_fc.weight"}[
        family
    ]
    published = source(tmp_path / "hf", family, **gguf_files.WRITTEN[family])
    tensors = load_file(published / "model.safetensors")
    name = name if name in tensors else name.removeprefix("transformer.")
    tensors[name][:, 0] = 2.0**-24 * 1.5  # halfway between two numbers of FP16
    save_file(tensors, published / "model.safetensors", {"format": "pt"})
    file = export(published, tmp_path / "out", scheme)
    found = compare(open_checkpoint(file, None, Hints(reference=published)), open_checkpoint(published))
    assert found.equal and {each.status for each in found.tensors} <= {"exact", "rounded", "encoded"}
    (tensor,) = (each for each in found.tensors if each.name == name)
    assert (tensor.status, tensor.dtypes) == ("rounded", "float16 / bfloat16")


WITH_MTP = ("glm4-moe", "hy-v3", "qwen3-next", "deepseek-v3", "ling-2", "ling-3", "step3p5")


@pytest.mark.parametrize("family", [family for family in WITH_MTP if family not in pico.ABSENT])
def test_prediction_layers_follow_the_decoders_where_llama_cpp_computes_them(tmp_path: Path, family: str) -> None:
    published = source(tmp_path / "hf", family, **gguf_files.WRITTEN[family])
    added = add_mtp(published, torch.bfloat16)
    command = plan_command(Request.export(published, tmp_path / "out", LLAMA_CPP))
    execute(command, verify=True)
    written = open_checkpoint(tmp_path / "out")
    if family == "deepseek-v3":
        assert any("no layers of multi-token prediction" in note for note in command.notes)
        assert not added.keys() & written.specs.keys() and written.model.mtp_num_layers == 0
        return
    assert written.model.mtp_num_layers == 1
    for name, values in added.items():
        assert torch.equal(read_tensor(written, name).bfloat16(), values), name


def test_what_is_written_keeps_llama_cpps_rules_and_what_has_no_tokenizer_does_not(tmp_path: Path) -> None:
    file = export(source(tmp_path / "hf", "qwen3"), tmp_path / "out")
    assert check_directory(file, LLAMA_CPP).findings == check_directory(file.parent, LLAMA_CPP).findings == []
    said = {key: each for key, each in read_head(file).metadata.items() if "tokenizer" not in key}
    bare = {key: int(each) if isinstance(each, int) else each for key, each in said.items()}
    (tmp_path / "bare.gguf").write_bytes(gguf_files.file(bare, _described(file)))
    check = check_directory(tmp_path / "bare.gguf", LLAMA_CPP)
    assert [finding.where for finding in check.findings] == ["tokenizer.ggml.tokens"] and not check.passes
    unsplit = bare | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": [1]}
    (tmp_path / "bare.gguf").write_bytes(gguf_files.file(unsplit, _described(file)))
    found = check_directory(tmp_path / "bare.gguf", LLAMA_CPP).findings
    assert [finding.where for finding in found] == ["tokenizer.ggml.tokens", "tokenizer.ggml.pre"]
    with pytest.raises(UnknownFormat, match="no GGUF file"):
        check_directory(tmp_path / "hf", LLAMA_CPP)


def _described(file: Path) -> dict[str, gguf_files.Described]:
    numbers = {"F32": gguf_files.F32, "BF16": gguf_files.BF16}
    return {name: (each.shape, numbers[each.format.name], data) for name, (each, data) in stored_tensors(file).items()}


def test_the_command_says_of_which_texts_llama_cpp_makes_other_tokens(tmp_path: Path) -> None:
    published = source(tmp_path / "hf")
    assert not [
        note for note in plan_command(Request.export(published, tmp_path / "a", LLAMA_CPP)).notes if "NFC" in note
    ]
    tokenizer = json.loads((published / "tokenizer.json").read_text()) | {"normalizer": {"type": "NFC"}}
    (published / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert [note for note in plan_command(Request.export(published, tmp_path / "b", LLAMA_CPP)).notes if "NFC" in note]


@pytest.mark.parametrize(
    ("wrapper", "changes", "architecture"),
    [
        ("mistral3", {}, "llama"),
        ("llama4", gguf_files.CHUNKS, "llama4"),
        ("qwen3_vl", gguf_files.WRAPPED["qwen3_vl"], "qwen3vl"),
    ],
)
def test_the_text_model_of_a_wrapper_is_written_and_its_towers_are_named(
    tmp_path: Path, wrapper: str, changes: dict[str, Any], architecture: str
) -> None:
    tiny_wrappers.save(tmp_path / "hf", wrapper, vocab_size=SIZE, dtype=torch.bfloat16, **changes)
    gguf_tokenizers.byte_level(QWEN2).save_pretrained(tmp_path / "hf")
    command = plan_command(Request.export(tmp_path / "hf", tmp_path / "out", LLAMA_CPP))
    execute(command)
    assert any("not in it: llama.cpp has those in a second" in note for note in command.notes)
    reader, before = open_checkpoint(tmp_path / "out"), open_checkpoint(tmp_path / "hf")
    assert read_head(reader.files[0]).metadata["general.architecture"] == architecture
    expected = gguf_files.as_read({name: read_tensor(before, name) for name in before.specs})
    for name in reader.specs:
        assert before.model.wrapper
        published = before.model.wrapper.name_of(name)
        assert torch.equal(read_tensor(reader, name).bfloat16(), expected[published]), name


def test_the_text_model_of_a_wrapper_is_compared_with_a_file(tmp_path: Path) -> None:
    changes = gguf_files.WRAPPED["qwen3_vl"]
    tiny_wrappers.save(tmp_path / "hf", "qwen3_vl", vocab_size=SIZE, dtype=torch.bfloat16, **changes)
    gguf_tokenizers.byte_level(QWEN2).save_pretrained(tmp_path / "hf")
    file, wrapper = open_checkpoint(export(tmp_path / "hf", tmp_path / "out")), open_checkpoint(tmp_path / "hf")
    for found, name in ((compare(file, wrapper), "B"), (compare(wrapper, file), "A")):
        assert found.equal and {tensor.name for tensor in found.tensors} == {*file.specs}
        assert [each.what for each in found.not_compared if each.topic == "towers"] == [f"of {name}"]
    weights = tiny_wrappers.stored(tmp_path / "hf")
    weights["model.language_model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    differing = [tensor for tensor in compare(file, open_checkpoint(tmp_path / "hf")).tensors if not tensor.equal]
    assert [(tensor.name, tensor.differing) for tensor in differing] == [("model.layers.1.mlp.up_proj.weight", 1)]


def test_experts_that_a_wrapper_has_in_one_tensor_are_written_one_by_one(tmp_path: Path) -> None:
    changes = gguf_files.WRAPPED["qwen3_vl_moe"]
    tiny_wrappers.save(tmp_path / "hf", "qwen3_vl_moe", vocab_size=SIZE, dtype=torch.bfloat16, **changes)
    gguf_tokenizers.byte_level(QWEN2).save_pretrained(tmp_path / "hf")
    reader = open_checkpoint(export(tmp_path / "hf", tmp_path / "out"))
    stored, layer = tiny_wrappers.stored(tmp_path / "hf"), "layers.1.mlp.experts"
    gate, up = stored[f"model.language_model.{layer}.gate_up_proj"][2].t().chunk(2)
    down = stored[f"model.language_model.{layer}.down_proj"][2].t()
    for name, expected in {"gate": gate, "up": up, "down": down}.items():
        assert torch.equal(read_tensor(reader, f"model.{layer}.2.{name}_proj.weight").bfloat16(), expected), name


@pytest.mark.parametrize("said", [{"mrope_section": [16, 24, 24]}, {"deepstack_visual_indexes": [5]}])
def test_images_of_another_model_than_is_known_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(UnknownArchitecture, match=next(iter(said))):
        Images((24, 20, 20), deepstack=3).check({"rope_parameters": said, "vision_config": said})


@pytest.mark.skipif(bool(pico.ABSENT), reason=f"this transformers has no {', '.join(pico.ABSENT)}")
def test_every_family_that_is_written_is_tested() -> None:
    written = {pico.shape(family).architecture for family in gguf_files.WRITTEN}
    assert written | {"llama", "kimi_k2", "bailing_moe"} == {*FAMILIES}


def test_the_bytes_do_not_depend_on_the_number_of_workers_or_on_the_container(tmp_path: Path) -> None:
    published = source(tmp_path / "hf")
    execute(plan_command(Request(published, tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor=2))))
    files = [export(published, tmp_path / "a" / "out", "q8_0"), export(published, tmp_path / "b" / "out", "q8_0", 3)]
    files.append(export(tmp_path / "megatron", tmp_path / "c" / "out", "q8_0"))
    assert len({file.read_bytes() for file in files}) == 1


def test_codes_are_decoded_and_round_once(tmp_path: Path) -> None:
    published = source(tmp_path / "hf", hidden_size=64, intermediate_size=96)
    execute(plan_command(Request.export(published, tmp_path / "fp8", "vllm", "dynamic", keep_misfits=True)))
    reader = open_checkpoint(tmp_path / "fp8")
    name = next(name for name in reader.encodings if "down_proj" in name)
    values = reader.encodings[name].decode_rows(read_tensor(reader, name), 0)
    written = stored_tensors(export(tmp_path / "fp8", tmp_path / "out", "q8_0"))["blk.0.ffn_down.weight"]
    assert written[1] == blocks_of(named("Q8_0")).encode(values).numpy().tobytes()


def test_gpt_oss_as_it_is_published_is_written_with_the_values_of_its_codes(tmp_path: Path) -> None:
    mxfp4_directories.make(tmp_path / "hf", config={**mxfp4_directories.CONFIG, "vocab_size": SIZE})
    gguf_tokenizers.byte_level(QWEN2).save_pretrained(tmp_path / "hf")
    reader = open_checkpoint(tmp_path / "hf")
    written = open_checkpoint(export(tmp_path / "hf", tmp_path / "out"))
    for name in reader.encodings:
        values = reader.encodings[name].decode_rows(read_tensor(reader, name), 0)
        assert torch.equal(read_tensor(written, name).float(), values), name


def test_gpt_oss_keeps_the_codes_that_it_is_published_in_and_other_models_have_none(tmp_path: Path) -> None:
    mxfp4_directories.make(tmp_path / "hf", config={**mxfp4_directories.CONFIG, "vocab_size": SIZE})
    gguf_tokenizers.byte_level(QWEN2).save_pretrained(tmp_path / "hf")
    decoded = plan_command(Request.export(tmp_path / "hf", tmp_path / "decoded", LLAMA_CPP))
    assert any("--scheme mxfp4 keeps them" in note for note in decoded.notes)
    file = export(tmp_path / "hf", tmp_path / "out", "mxfp4")
    kinds = {name: tensor.format.name for name, (tensor, _) in stored_tensors(file).items()}
    assert {kind for name, kind in kinds.items() if "exps.weight" in name} == {"MXFP4"}
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == "BF16"
    reader, written = open_checkpoint(tmp_path / "hf"), open_checkpoint(file)
    for name in reader.encodings:
        values = reader.encodings[name].decode_rows(read_tensor(reader, name), 0)
        assert torch.equal(read_tensor(written, name), values), name
    with pytest.raises(PrecisionError, match="no weight is MXFP4 codes"):
        export(source(tmp_path / "qwen", "qwen3"), tmp_path / "no", "mxfp4")


def test_norms_and_routers_are_fp32_and_rows_that_are_no_blocks_fp16(tmp_path: Path) -> None:
    published = source(tmp_path / "hf", "qwen3-moe", **gguf_files.WRITTEN["qwen3-moe"], moe_intermediate_size=48)
    stored = stored_tensors(export(published, tmp_path / "out", "q8_0"))
    kinds = {name.removeprefix("blk.0."): tensor.format.name for name, (tensor, _) in stored.items()}
    expected = {"attn_norm.weight": "F32", "ffn_gate_inp.weight": "F32", "ffn_down_exps.weight": "F16"}
    assert {name: kinds[name] for name in expected} == expected and "Q8_0" in kinds.values()


def test_q8_0_is_an_fp16_scale_and_32_bytes() -> None:
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).double()
    values[0, :32], values[1, :32] = 0.0, torch.arange(32) * 63.5 / 31  # a block of zeros; halves
    values[1, 0] = values[2, 0] = -127.0
    values[2, 1:5] = torch.tensor([1.0, -1.0, 3.0, -3.0]).double() * (0.5 - 2.0**-25)  # below halves
    blocks = blocks_of(named("Q8_0")).encode(values.float()).numpy().reshape(12, 34)
    for block, row in zip(blocks, values.view(12, 32).numpy(), strict=True):
        scale = np.float32(abs(row).max()) / np.float32(127)
        assert block[:2].view(np.float16)[0] == np.float16(scale)
        scaled = row.astype(np.float32) * (np.float32(1) / scale) if scale else row * 0
        assert block[2:].view(np.int8).tolist() == [int(each + (0.5 if each > 0 else -0.5)) for each in scaled.tolist()]


def test_q4_0_makes_minus_8_of_the_largest_magnitude() -> None:
    values = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    values[3, 7], values[3, 9], values[4, 7], values[4, 9] = 5.0, -5.0, -5.0, 5.0  # of two such, the first
    for block, row in zip(blocks_of(named("Q4_0")).encode(values).numpy(), values.tolist(), strict=True):
        scale = np.float32(max(row, key=abs)) / np.float32(-8)
        assert block[:2].view(np.float16)[0] == np.float16(scale)
        codes = [min(15, int(np.float32(each) * (np.float32(1) / scale) + np.float32(8.5))) for each in row]
        assert block[2:].tolist() == [low | high << 4 for low, high in zip(codes[:16], codes[16:], strict=True)]


def test_the_metadata_says_where_the_model_is_from_and_how_it_is_sampled(tmp_path: Path) -> None:
    published = source(tmp_path / "hf")
    (published / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 20, "top_p": None}))
    file = export(published, tmp_path / "out", base_model="ORG/Name-1B")
    said = {key: value for key, value in read_head(file).metadata.items() if key.startswith("general.")}
    assert said == {
        "general.architecture": "llama",
        "general.type": "model",
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "general.name": "Name-1B",
        "general.size_label": said["general.size_label"],
        "general.base_model.count": 1,
        "general.base_model.0.name": "Name-1B",
        "general.base_model.0.organization": "ORG",
        "general.base_model.0.repo_url": "https://huggingface.co/ORG/Name-1B",
        "general.file_type": 32,
        "general.quantization_version": 2,
    }
    assert said["general.size_label"].endswith("K")
    (published / "generation_config.json").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match="generation_config.json"):
        export(published, tmp_path / "empty")


KILLED = """
import os, signal, sys
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion import command, convert, worker
convert.SYNC_EVERY = 10_000
calls, write = 0, worker.write_rows
def counted(*arguments):
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    write(*arguments)
worker.write_rows = counted
command.execute(plan_command(Request.export(sys.argv[1], sys.argv[2], "llama.cpp", sys.argv[4])), workers=1)
"""


@pytest.mark.soak
@pytest.mark.parametrize(("towers", "at", "scheme"), [(False, 12, "q8_0"), (True, 50, "q8_0"), (False, 12, "q4_k_m")])
def test_a_kill_leaves_nothing_that_looks_complete_and_the_same_command_goes_on(
    tmp_path: Path, towers: bool, at: int, scheme: str
) -> None:
    published = gguf_towers.save(tmp_path / "hf", "qwen2_vl") if towers else source(tmp_path / "hf")
    export(published, tmp_path / "whole" / "out", scheme)
    command = [sys.executable, "-c", KILLED, published, tmp_path / "out", str(at), scheme]
    killed = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    assert killed.returncode == -signal.SIGKILL and not (tmp_path / "out").exists()
    export(published, tmp_path / "out", scheme)
    whole, continued = (
        {file.name: file.read_bytes() for file in folder.glob("*.gguf")}
        for folder in (tmp_path / "whole" / "out", tmp_path / "out")
    )
    assert whole == continued and len(whole) == 1 + towers


def test_every_published_model_of_a_family_that_is_written_is_one_that_llama_cpp_computes() -> None:
    lines = (repository.GOLDEN / "published_configs.jsonl").read_text().splitlines()
    published = {line["repository"]: line["config"] for line in map(json.loads, lines)}
    written = {
        name: gguf_files.metadata(from_hf_config(config))
        for name, config in published.items()
        if config["model_type"] in FAMILIES
    }
    assert len(written) >= 40
    of_olmo = written["allenai/Olmo-3-1025-7B"]["olmo2.rope.scaling.yarn_attn_factor"]
    assert of_olmo == np.float32(1.2079441541679836)  # what the release says, and YaRN's own


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
ONES = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
KDA = pico.FAMILIES["kimi-linear"]["linear_attn_config"]
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("opt", {}, "`opt` is not among the models"),
        ("qwen3-moe", gguf_files.SPARSE | {"norm_topk_prob": False}, "moe.pre_softmax"),
        ("gemma2", {"query_pre_attn_scalar": 100}, "query_pre_attn_scalar 100"),
        (
            "gemma2",
            {"final_logit_softcapping": None, "query_pre_attn_scalar": 32},
            "final_logit_softcapping None, but with 30",
        ),
        ("llama-3", {"rope_parameters": YARN | {"truncate": False}}, "yarn with truncate False"),
        ("llama-3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}, "rope_layers"),
        ("olmo2", {"tie_word_embeddings": True}, "tied_embeddings True, but with False"),
        ("gemma", {"tie_word_embeddings": False}, "tied_embeddings False, but with True"),
        ("qwen3-next", gguf_files.SPARSE, "gdn.value_head_dim 8, but with 16"),
        ("deepseek-v2", {}, "of 3 layers that projects queries in one step"),
        ("deepseek-v2-groups", {}, "moe.group_scores 1, but with 2"),
        ("deepseek-v3", {}, "yarn with mscale 1.0"),
        ("olmo3", {}, "rotary_base_local 500000.0, but with 150000.0"),
        ("deepseek-v3", {"rope_parameters": YARN}, "yarn with mscale_all_dim None"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused_before_anything_is_written(
    tmp_path: Path, family: str, changes: dict[str, Any], what: str
) -> None:
    published = source(tmp_path / "hf", family, **changes)
    with pytest.raises(UnknownArchitecture, match=what):
        export(published, tmp_path / "out")
    assert [*tmp_path.iterdir()] == [published]


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("qwen3-5", {"linear_value_head_dim": 8}, "gdn.value_head_dim 8, but with 16"),
        ("qwen3-5", {"head_dim": 512}, "turns 128 channels of a head"),
        ("minimax-m2", {"tie_word_embeddings": True}, "tied_embeddings True"),
        ("llama4", {"attention_chunk_size": 4096}, "attention_chunk_size 4096, but with 8192"),
        ("llama4", {"moe_layers": [0, 3]}, "experts in other layers than each of some number"),
        ("glm-moe-dsa", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "MLP in layers behind those with experts"),
        (
            "nemotron-h",
            {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
            "experts in some layers and an MLP",
        ),
        ("lfm2-moe", {"routed_scaling_factor": 1.5}, "moe.topk_scaling_factor 1.5, but with 1.0"),
        ("exaone4", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8}, "of 4 layers with such windows"),
        ("olmoe", {"norm_topk_prob": True}, "moe.pre_softmax False, but with True"),
        ("exaone4", {"head_dim": 32}, "kv_channels 32, but with 16"),
        ("olmoe", {"num_key_value_heads": 2}, "num_query_groups 2, but with 4"),
        ("cohere2", {"layer_types": ["sliding_attention"] * 3 + ["sliding_attention"]}, "rope_layers None"),
        ("afmoe", {"mup_enabled": False}, "embedding_multiplier 1.0, but with 8.0"),
        ("lfm2", {"head_dim": 32}, "kv_channels 32, but with 16"),
        ("lfm2-moe", {"head_dim": 32}, "kv_channels 32, but with 16"),
        ("glm-moe-dsa", {"rope_parameters": ONES}, "scaled as yarn"),
        ("glm-moe-dsa", {"rope_parameters": LINEAR}, "scaled as linear"),
        ("deepseek-v3.2", {"rope_parameters": LINEAR}, "scaled as linear"),
        ("ling-2", {"tie_word_embeddings": True}, "with tied_embeddings True"),
        ("ling-2", {"head_dim": 32}, "whose heads together are not as wide as the hidden states"),
        ("ling-2", {"head_dim": 16, "num_shared_experts": 2}, "with another number of shared experts than one"),
        ("glm4-moe-lite", {"rope_parameters": LINEAR}, "scaled as linear"),
        ("deepseek-v3.2", {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.8}}, "yarn with mscale 0.8"),
        ("deepseek-v3.2", {"rope_parameters": YARN | {"mscale_all_dim": 1.0}}, "yarn with mscale None"),
        ("glm4-moe-lite", {"rope_parameters": YARN | {"mscale_all_dim": 0.8}}, "yarn with mscale None"),
        ("glm4-moe-lite", {"rope_parameters": ONES | {"attention_factor": 1.2}}, "attention_factor 1.2"),
        ("ministral3", {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.8}}, "yarn with mscale 0.8"),
        ("ministral3", {"rope_parameters": YARN | {"mscale_all_dim": 1.0}}, "yarn with mscale None"),
        ("falcon-h1", {"rope_parameters": LINEAR}, "scaled as linear"),
        ("ling-3", {"kda_safe_gate": False}, "whose decays have no bound"),
        ("kimi-linear", {"q_lora_rank": 24}, "mla.q_lora_rank 24, but with None"),
        ("kimi-linear", {"linear_attn_config": KDA | {"num_heads": 8}}, "gdn.num_key_heads 8, but with 16"),
        ("mimo-v2-flash", pico.FAMILIES["mimo-v2-flash"], "global_attention.rotary_percent 0.5"),
        ("mimo-v2-flash", {"layer_types": ["sliding_attention"] * 3}, "windows in all layers or in none"),
    ],
)
def test_settings_that_releases_do_not_have_and_llama_cpp_neither_are_refused(
    family: str, changes: dict[str, Any], what: str
) -> None:
    if family in pico.ABSENT:
        pytest.skip(f"this transformers has no {family}")
    model = from_hf_config(pico.config(family, **gguf_files.AS_RELEASED[family] | changes))
    with pytest.raises(UnknownArchitecture, match=what):
        of_llama_cpp(model)


def test_a_model_without_the_shared_experts_that_llama_cpp_looks_for_is_refused() -> None:
    with pytest.raises(UnknownArchitecture, match="no `glm4_moe` without shared experts"):
        of_llama_cpp(from_hf_config(pico.config("glm4-moe", n_shared_experts=0)))


def test_what_stretches_a_ministral_is_what_llama_cpp_reads_of_it() -> None:
    """As Devstral 2 says it: mscale alone, and factors of 0, scale nothing."""
    scaling = YARN | {"beta_fast": 4.0, "mscale": 1.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0}
    written = gguf_files.metadata(from_hf_config(pico.config("ministral3", rope_parameters=scaling)))
    assert written["mistral3.rope.scaling.yarn_beta_fast"] == 4.0
    assert written["mistral3.rope.scaling.yarn_log_multiplier"] == written["mistral3.attention.temperature_scale"] == 0


def test_betas_of_yarn_that_llama_cpp_reads_from_no_file_are_options_of_its_program(tmp_path: Path) -> None:
    """As Kimi K2 has them; Ministral 3's are read."""
    published = source(tmp_path / "hf", "deepseek-v3", rope_parameters=ONES | {"beta_fast": 1.0})
    command = plan_command(Request.export(published, tmp_path / "out", LLAMA_CPP))
    assert command.notes[-1].endswith("out-BF16.gguf --yarn-beta-fast 1.0 --yarn-beta-slow 1.0")
    assert any("reads no betas of YaRN" in note for note in command.notes)
    execute(command)
    assert (open_checkpoint(tmp_path / "out").model.rope_scaling or {})["beta_fast"] == 1.0
    read = source(
        tmp_path / "ministral", "ministral3", rope_parameters=YARN | {"beta_fast": 4.0, "mscale_all_dim": 0.0}
    )
    assert not any("--yarn" in note for note in plan_command(Request.export(read, tmp_path / "no", LLAMA_CPP)).notes)


def test_groups_of_which_all_are_chosen_from_are_one() -> None:
    changes = gguf_files.AS_RELEASED["nemotron-h"] | {"n_group": 2, "topk_group": 2}
    written = gguf_files.metadata(from_hf_config(pico.config("nemotron-h", **changes)))
    assert [written[f"nemotron_h_moe.expert_group_{key}"] for key in ("count", "used_count")] == [1, 1]


@pytest.mark.parametrize("scheme", ["dynamic", "w4a16"])
def test_a_scheme_of_engines_is_refused_with_what_there_is(tmp_path: Path, scheme: Any) -> None:
    with pytest.raises(RecipeError, match="llama.cpp does not read"):
        Request.export(tmp_path, tmp_path / "out", LLAMA_CPP, scheme)
    with pytest.raises(RecipeError, match="is for llama.cpp"):
        Request.export(tmp_path, tmp_path / "out", "vllm", "q8_0")


@pytest.mark.parametrize("options", [{"ranks": 2}, {"kv_cache": "fp8"}, {"keep_misfits": True}, {"include": ("a",)}])
def test_options_of_engines_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="Leave|cannot be given|choose"):
        Request.export(tmp_path, tmp_path / "out", LLAMA_CPP, **options)


def test_a_file_as_the_destination_is_refused_with_the_name_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="an export is a folder"):
        Request.export(tmp_path, tmp_path / "model.gguf", LLAMA_CPP)


def test_nan_and_numbers_beyond_fp16_are_refused(tmp_path: Path) -> None:
    for number, scheme, what in (
        (float("nan"), "q8_0", "NaN"),
        (1e6, "f16", "too large"),
        (1e8, "q8_0", "8.32e.06, the largest number that is written in"),
    ):
        model = pico.make("llama-3", vocab_size=SIZE, dtype=torch.bfloat16)
        model.model.layers[0].mlp.up_proj.weight.data[0, 0] = number
        model.save_pretrained(tmp_path / f"{number}-{scheme}")
        gguf_tokenizers.byte_level(QWEN2).save_pretrained(tmp_path / f"{number}-{scheme}")
        with pytest.raises(PrecisionError, match=what):
            export(tmp_path / f"{number}-{scheme}", tmp_path / f"out-{number}-{scheme}", scheme)

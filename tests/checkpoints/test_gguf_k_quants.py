"""Files of K-quants: what is written is read, compared, and the same however it is made."""

from collections import Counter
from pathlib import Path
from typing import Any

import gguf_tokenizers
import pico
import pytest
import torch
from gguf_files import WRITTEN, export, source, stored_tensors
from gguf_tokenizers import SIZE

from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.gguf.head import read_head
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.codes.ggml_blocks import blocks_of
from precisionctl.codes.ggml_formats import named
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import PrecisionError
from precisionctl.export.gguf.gguf_pretokenizers import QWEN2
from precisionctl.param import Parallelism
from precisionctl.verify.compare import compare

WIDE = {"hidden_size": 256, "intermediate_size": 256}


def described(published: Path) -> Hints:
    return Hints(companions=read_companions(published), reference=published)


def test_a_file_is_the_encoding_of_its_source_and_another_by_one_code_is_not(tmp_path: Path) -> None:
    published = source(tmp_path / "hf", "qwen3", **WIDE)
    file = export(published, tmp_path / "out", "q4_k_m")
    stored = stored_tensors(file)
    assert Counter(tensor.format.name for tensor, _ in stored.values())["Q4_K"] > 5
    values = read_tensor(open_checkpoint(published), "model.layers.0.mlp.up_proj.weight").float()
    assert stored["blk.0.ffn_up.weight"][1] == blocks_of(named("Q4_K")).encode(values).numpy().tobytes()
    found = compare(open_checkpoint(file), open_checkpoint(published))
    assert found.equal and {tensor.status for tensor in found.tensors} == {"exact", "encoded"}
    data, place = bytearray(file.read_bytes()), stored["blk.1.ffn_up.weight"][0].offset
    data[place + 40] ^= 1
    file.write_bytes(data)
    changed = compare(open_checkpoint(file), open_checkpoint(published))
    differing = [tensor for tensor in changed.tensors if not tensor.equal]
    assert [(tensor.name, tensor.status) for tensor in differing] == [("model.layers.1.mlp.up_proj.weight", "differs")]


def test_blocks_that_are_each_other_but_for_the_signs_of_zeros_are_told_in_these_words(tmp_path: Path) -> None:
    """A block of Q6_K ends with its scale in FP16 (ggml's block_q6_K, of 210 bytes)."""
    model = pico.make("qwen3", vocab_size=SIZE, dtype=torch.bfloat16, **WIDE)
    model.model.layers[1].mlp.up_proj.weight.data[0] = 0
    model.save_pretrained(tmp_path / "hf")
    gguf_tokenizers.byte_level(QWEN2).save_pretrained(tmp_path / "hf")
    file = export(tmp_path / "hf", tmp_path / "out", "q6_k")
    data, place = bytearray(file.read_bytes()), stored_tensors(file)["blk.1.ffn_up.weight"][0].offset
    data[place + 209] ^= 0x80
    (other := tmp_path / "other.gguf").write_bytes(data)
    found = compare(open_checkpoint(file), open_checkpoint(other))
    (odd,) = [tensor for tensor in found.tensors if not tensor.equal]
    assert (odd.name, odd.status, odd.differing) == ("model.layers.1.mlp.up_proj.weight", "signs of zeros", 256)
    assert "encodings of GGUF" in {each.topic for each in found.not_compared}


def test_the_head_is_in_the_order_of_llama_quantize(tmp_path: Path) -> None:
    published = source(tmp_path / "hf", num_hidden_layers=11, rope_parameters=pico.LLAMA3_ROPE)
    head = read_head(export(published, tmp_path / "out", "q5_k_s"))
    assert [*head.metadata][-2:] == ["general.quantization_version", "general.file_type"]
    assert head.metadata["general.file_type"] == 16
    layers = [int(name.split(".")[1]) for name in head.tensors if name.startswith("blk.")]
    assert layers == sorted(layers) and layers[-1] == 10
    assert [*head.tensors][:4] == ["output.weight", "output_norm.weight", "rope_freqs.weight", "token_embd.weight"]


@pytest.mark.parametrize("family", ["qwen2-moe", "kimi-linear", "ernie4-5-moe"])
def test_tensors_are_read_without_the_dimensions_of_1_that_llama_quantize_leaves_out(
    tmp_path: Path, family: str
) -> None:
    """A gate of shared experts, kernels and biases; in a file of values they have these."""
    if family in pico.ABSENT:
        pytest.skip(f"this transformers has no {family}")
    published = source(tmp_path / "hf", family, **WRITTEN[family])
    file, values = export(published, tmp_path / "q6_k", "q6_k"), export(published, tmp_path / "bf16")
    shapes, others = ({name: each.shape for name, each in read_head(each).tensors.items()} for each in (file, values))
    fewer = [name for name, shape in shapes.items() if others[name] == (1, *shape) or others[name] == (1, 1, *shape)]
    assert fewer
    reader = open_checkpoint(file, None, described(published))
    for name, spec in open_checkpoint(published).specs.items():
        assert reader.specs[name].shape == spec.shape, name


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_a_stack_of_one_expert_is_read_without_its_dimension(tmp_path: Path, family: str) -> None:
    changes = WRITTEN[family] | {"num_local_experts": 1, "num_experts_per_tok": 1}
    file = export(source(tmp_path / "hf", family, **changes), tmp_path / "out", "q6_k")
    assert read_head(file).tensors["blk.0.ffn_up_exps.weight"].shape == (96, 64)
    found = compare(open_checkpoint(file), open_checkpoint(tmp_path / "hf")).tensors
    differing = [each.name for each in found if not each.equal]
    # codes along another dimension than that of stored rows are not known as encodings (docs/gguf.md)
    assert all(family == "gpt-oss" and name.endswith("_proj[0]") for name in differing)


def test_a_tensor_of_two_in_several_formats_is_known_to_be_the_encoding(tmp_path: Path) -> None:
    """Queries, keys and values of a delta net have more bits in some layers, and gates have not."""
    published = source(tmp_path / "hf", "qwen3-next", **WRITTEN["qwen3-next"], moe_intermediate_size=64)
    file = export(published, tmp_path / "out", "q4_k_m")
    head, name = read_head(file), "model.layers.0.linear_attn.in_proj_qkvz.weight"
    assert head.tensors["blk.0.attn_qkv.weight"].format != head.tensors["blk.0.attn_gate.weight"].format
    found = compare(open_checkpoint(file, None, described(published)), open_checkpoint(published))
    assert {tensor.name: tensor.status for tensor in found.tensors}[name] == "encoded"


def test_the_bytes_do_not_depend_on_the_number_of_workers_or_on_the_container(tmp_path: Path) -> None:
    published = source(tmp_path / "hf", **WIDE)
    execute(plan_command(Request(published, tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor=2))))
    files = [
        export(published, tmp_path / "a" / "out", "q4_k_m"),
        export(published, tmp_path / "b" / "out", "q4_k_m", 3),
    ]
    files.append(export(tmp_path / "megatron", tmp_path / "c" / "out", "q4_k_m"))
    assert len({file.read_bytes() for file in files}) == 1


def test_matrices_that_stay_values_are_in_fp16_of_a_model_in_fp16(tmp_path: Path) -> None:
    for dtype, kind in ((torch.float16, "F16"), (torch.bfloat16, "BF16")):
        folder = tmp_path / kind
        pico.save(folder, "gemma4-small", vocab_size=SIZE, dtype=dtype, **WRITTEN["gemma4-small"])
        gguf_tokenizers.byte_level(QWEN2).save_pretrained(folder)
        file = export(folder, tmp_path / f"{kind}-out", "q6_k")
        assert stored_tensors(file)["per_layer_model_proj.weight"][0].format.name == kind
        assert open_checkpoint(file).specs.keys() == open_checkpoint(folder).specs.keys()


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (float("nan"), "NaN"),
        (float("inf"), "beyond"),
        (1e8, "beyond 3.14e.06, the largest number that is written in Q4_K"),
    ],
)
def test_numbers_without_a_code_are_refused(tmp_path: Path, number: float, what: str) -> None:
    model = pico.make("llama-3", vocab_size=SIZE, dtype=torch.bfloat16, **WIDE)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = number
    model.save_pretrained(tmp_path / "hf")
    gguf_tokenizers.byte_level(QWEN2).save_pretrained(tmp_path / "hf")
    with pytest.raises(PrecisionError, match=what):
        export(tmp_path / "hf", tmp_path / "out", "q4_k_m")


def test_a_note_says_how_new_codes_are_made_that_may_be_others(tmp_path: Path) -> None:
    file = export(source(tmp_path / "hf", "qwen3", **WIDE), tmp_path / "out", "q4_k_m")
    notes = plan_command(Request(file, tmp_path / "back", "hf")).notes
    made: Any = [note for note in notes if "makes new codes of these values, perhaps others" in note]
    assert len(made) == 1 and "--scheme q4_k_m" in made[0]

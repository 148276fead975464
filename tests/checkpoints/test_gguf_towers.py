"""The file of a wrapper's towers that is written for llama.cpp: its tensors and metadata, what is refused, and how it
is compared."""

import json
from pathlib import Path
from typing import Any

import gguf_files
import gguf_towers
import pytest
import repository
import tiny_wrappers
import torch
from safetensors.torch import save_file
from soaking import few, in_soak
from target_checks import check_directory
from torch import Tensor
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.gguf.head import read_head
from precisionctl.checkpoints.gguf.towers import tower_of
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.codes.ggml_formats import FORMATS
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import LLAMA_CPP, Request
from precisionctl.conversion.command import execute
from precisionctl.errors import DamagedCheckpoint, PrecisionError, UnknownArchitecture, UnknownFormat
from precisionctl.reports.inspect import describe, summary
from precisionctl.verify.compare import Comparison, compare

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def export(published: Path, out: Path, scheme: str | None = None, **how: Any) -> list[str]:
    """Export a directory; returns the notes."""
    command = plan_command(Request.export(published, out, LLAMA_CPP, scheme))
    execute(command, **how)
    return list(command.notes)


def values(file: Path) -> dict[str, Tensor]:
    """The tensors of a GGUF file, as they are stored."""
    found = {}
    for name, (tensor, data) in gguf_files.stored_tensors(file).items():
        found[name] = torch.frombuffer(bytearray(data), dtype=DTYPES[tensor.format.name]).view(tensor.shape)
    return found


def compared(published: Path, out: Path) -> Comparison:
    return compare(open_checkpoint(published), open_checkpoint(out))


def change(published: Path, name: str, by: Any) -> None:
    tensors = tiny_wrappers.stored(published)
    tensors = by(tensors, name) or tensors
    save_file(tensors, published / "model.safetensors", {"format": "pt"})


def one_more(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name].view(-1)[0] += 1


def configure(published: Path, file: str = "config.json", **changes: Any) -> None:
    said = json.loads((published / file).read_text())
    tower = {key.removeprefix("vision."): value for key, value in changes.items() if key.startswith("vision.")}
    whole = {key: value for key, value in changes.items() if not key.startswith("vision.")}
    said |= {key: said.get(key, {}) | value if isinstance(value, dict) else value for key, value in whole.items()}
    if tower:
        said["vision_config"] |= tower
    (published / file).write_text(json.dumps(said))


@pytest.mark.parametrize("kind", few(gguf_towers.TOWERS, "qwen2_5_vl", "qwen3_5", "gemma4", "mistral3", "internvl"))
def test_towers_are_in_a_second_file_which_is_equal_to_the_wrappers(tmp_path: Path, kind: str) -> None:
    published = gguf_towers.save(tmp_path / "hf", kind)
    notes = export(published, tmp_path / "out", verify=True)
    assert {file.name for file in (tmp_path / "out").glob("*.gguf")} == {"out-BF16.gguf", "mmproj-out-BF16.gguf"}
    assert any(note.startswith("The towers, ") and "mmproj-out-BF16.gguf" in note for note in notes)
    assert ("--mmproj" in notes[-1]) and ("llama.cpp computes otherwise" in str(notes)) == (
        kind in ("internvl", "llama4", "gemma4", "step3p7")
    )
    assert check_directory(tmp_path / "out", LLAMA_CPP).findings == []
    found = compared(published, tmp_path / "out")
    towers = {*tiny_wrappers.towers(tiny_wrappers.stored(published))}
    unread = {name for each in found.not_compared if each.topic == "towers" for name in each.what.split(", ")}
    equal = {tensor.name for tensor in found.tensors if tensor.equal}
    assert not found.settings and found.equal and towers == unread | (equal & towers)
    assert bool(unread) == (kind == "gemma3") and all(".head." in name for name in unread)


def test_queries_keys_values_and_two_frames_are_tensors_of_their_own_in_qwen2_vl(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "qwen2_vl")
    export(published, tmp_path / "out")
    stored, made = tiny_wrappers.stored(published), values(tmp_path / "out" / "mmproj-out-BF16.gguf")
    for number, part in enumerate("qkv"):
        rows = slice(64 * number, 64 * (number + 1))
        for end, dtype in (("weight", torch.bfloat16), ("bias", torch.float32)):
            whole, found = stored[f"visual.blocks.1.attn.qkv.{end}"], made[f"v.blk.1.attn_{part}.{end}"]
            assert found.dtype == dtype and torch.equal(found, whole[rows].to(dtype))
    for frame, end in enumerate(("weight", "weight.1")):
        kernel = stored["visual.patch_embed.proj.weight"][:, :, frame].float()
        assert torch.equal(made[f"v.patch_embd.{end}"], kernel)


def test_rotary_pairs_of_pixtral_are_neighbours_and_a_token_ends_a_row(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "mistral3")
    export(published, tmp_path / "out")
    stored, made = tiny_wrappers.stored(published), values(tmp_path / "out" / "mmproj-out-BF16.gguf")
    query, found = stored["vision_tower.transformer.layers.0.attention.q_proj.weight"], made["v.blk.0.attn_q.weight"]
    for head, pair in ((0, 0), (1, 3), (3, 15)):
        row = 32 * head
        assert torch.equal(found[row + 2 * pair : row + 2 * pair + 2], query[[row + pair, row + pair + 16]])
    tokens = json.loads((published / "tokenizer.json").read_text())["added_tokens"]
    token = next(each["id"] for each in tokens if each["content"] == "[IMG_BREAK]")
    embedding = stored["language_model.model.embed_tokens.weight"][token]
    assert torch.equal(made["v.token_embd.img_break"], embedding.float())


def test_layers_whose_features_go_to_the_text_model_have_the_numbers_of_layers(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "qwen3_vl")
    export(published, tmp_path / "out")
    file = tmp_path / "out" / "mmproj-out-BF16.gguf"
    stored, made = tiny_wrappers.stored(published), values(file)
    for number, layer in enumerate([2, 0, 1]):
        name = f"model.visual.deepstack_merger_list.{number}.linear_fc2.weight"
        assert torch.equal(made[f"v.deepstack.{layer}.fc2.weight"], stored[name])
    assert read_head(file).metadata["clip.vision.is_deepstack_layers"] == [True, True, True, False]


def test_gemma_3s_norm_is_one_more_and_its_projection_in_fp16(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "gemma3")
    export(published, tmp_path / "out", "q8_0")
    file = tmp_path / "out" / "mmproj-out-BF16.gguf"
    stored, made = tiny_wrappers.stored(published), values(file)
    norm = stored["multi_modal_projector.mm_soft_emb_norm.weight"].float() + 1
    assert torch.equal(made["mm.soft_emb_norm.weight"], norm)
    projection = stored["multi_modal_projector.mm_input_projection_weight"].half()
    assert made["mm.input_projection.weight"].dtype == torch.float16
    assert torch.equal(made["mm.input_projection.weight"], projection)
    assert read_head(file).metadata["clip.vision.projector.scale_factor"] == 2


def test_rotary_pairs_of_kimi_that_go_by_column_come_first_in_a_head(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "kimi_k25")
    export(published, tmp_path / "out")
    stored, made = tiny_wrappers.stored(published), values(tmp_path / "out" / "mmproj-out-BF16.gguf")
    for end in ("weight", "bias"):
        whole, found = stored[f"vision_tower.encoder.blocks.2.wqkv.{end}"], made[f"v.blk.2.attn_qkv.{end}"]
        for head, pair, axis in ((0, 0, 1), (3, 7, 0), (4, 5, 1)):  # heads of keys are behind the 4 of queries
            here, there = 32 * head + 4 * pair + 2 * axis, 32 * head + 16 * axis + 2 * pair
            assert torch.equal(found[there : there + 2], whole[here : here + 2].to(found.dtype))
        assert torch.equal(found[256:], whole[256:].to(found.dtype))


def test_settings_of_kimi_have_the_names_of_the_release_too(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "kimi_k25")
    export(published, tmp_path / "a" / "out")
    said = json.loads((published / "config.json").read_text())
    tower, names = (
        said["vision_config"],
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    )
    tower |= {f"vt_{name}": tower.pop(name) for name in names}
    tower |= {f"init_pos_emb_{side}": tower.pop(f"pos_emb_{side}") for side in ("height", "width", "time")}
    (published / "config.json").write_text(json.dumps(said))
    export(published, tmp_path / "b" / "out")
    files = [(tmp_path / each / "out" / "mmproj-out-BF16.gguf").read_bytes() for each in "ab"]
    assert files[0] == files[1]


def test_gemma_4s_factors_of_sound_are_softplus_and_colours_come_first(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "gemma4")
    export(published, tmp_path / "out")
    file = tmp_path / "out" / "mmproj-out-BF16.gguf"
    stored, made = tiny_wrappers.stored(published), values(file)
    factors = stored["model.audio_tower.layers.1.self_attn.per_dim_scale"].double()
    assert torch.allclose(made["a.blk.1.per_dim_scale.weight"].double(), (1 + factors.exp()).log(), atol=1e-6)
    kernel, linear = made["v.patch_embd.weight"], stored["model.vision_tower.patch_embedder.input_proj.weight"]
    assert kernel.shape == (128, 3, 14, 14)
    for colour, row, column in ((0, 0, 1), (2, 5, 13)):
        assert torch.equal(kernel[:, colour, row, column], linear[:, 3 * (14 * row + column) + colour].float())
    bound = stored["model.vision_tower.encoder.layers.2.mlp.up_proj.output_max"]
    assert torch.equal(made["v.blk.2.ffn_up.output_max"], bound.reshape(1).float())
    metadata = read_head(file).metadata
    assert metadata["clip.vision.block_count"] == 3 and metadata["clip.audio.block_count"] == 2


def test_gemma_4_without_sound_has_a_tower_of_images_alone(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "gemma4")
    configure(published, audio_config=None)
    change(published, "audio", lambda tensors, name: {n: t for n, t in tensors.items() if name not in n})
    assert "llama.cpp computes otherwise" not in str(export(published, tmp_path / "out"))
    file = tmp_path / "out" / "mmproj-out-BF16.gguf"
    assert not any("audio" in key for key in read_head(file).metadata) and {n[0] for n in values(file)} == {"v", "m"}


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("qwen2_vl", {"vision.hidden_act": "gelu"}, "hidden_act quick_gelu, not with gelu"),
        ("qwen2_vl", {"vision.depth": 4}, "no `visual.blocks.3"),
        ("qwen2_vl", {"vision.depth": 2}, "no tensor for `visual.blocks.2"),
        ("qwen2_vl", {"vision.embed_dim": 128}, "by config.json"),
        ("qwen2_vl", {"vision.embed_dim": True}, "`embed_dim`"),
        ("qwen2_5_vl", {"vision.fullatt_block_indexes": [1, 2]}, "fullatt_block_indexes are [1, 2]"),
        ("qwen3_vl", {"vision.num_position_embeddings": 15}, "no square"),
        ("qwen3_vl", {"vision.deepstack_visual_indexes": [0, [1], 2]}, "deepstack_visual_indexes"),
        ("gemma3", {"mm_tokens_per_image": 9}, "no 9 tokens"),
        ("gemma3", {"vision.layer_norm_eps": "small"}, "epsilon"),
        ("gemma4", {"audio_config": {"num_hidden_layers": 3}}, "has no `audio_tower.layers.2."),
        ("gemma4", {"audio_config": [1]}, "`audio_config` of its config.json is no object"),
        ("kimi_k25", {"vision.num_attention_heads": 5}, "5 heads of a tower of 128"),
        ("llava", {"vision_feature_layer": -2}, "vision_feature_layer -1, not with -2"),
        ("mistral3", {"vision.rope_scaling": {"rope_theta": 5e5}}, "a base of 10000"),
        ("llama4", {"vision.rope_parameters": {"rope_type": "linear", "factor": 4}}, "scales no rotary embeddings"),
        ("internvl", {"vision.attention_bias": True}, "no `vision_tower.encoder.layer.0.attention.q_proj.bias`"),
        ("qwen2_vl", {"vision.depth": 1 << 20}, "`depth`"),
        ("llama4", {"vision.pixel_shuffle_ratio": 0.3}, "pixel_shuffle_ratio of 0.3"),
        ("gemma3", {"vision_config": None}, "no `vision_config`"),
        *in_soak(
            ("step3p7", {"projector_bias": True}, "projector_bias False, not with True"),
            ("step3p7", {"understand_projector_stride": 1}, "understand_projector_stride 2, not with 1"),
            ("qwen2_vl", {"vision.spatial_merge_size": 4}, "spatial_merge_size 2, not with 4"),
            ("qwen2_vl", {"vision.rope_parameters": {"rope_theta": 5e5}}, "a base of 10000"),
            ("qwen2_5_vl", {"vision.fullatt_block_indexes": [1]}, "fullatt_block_indexes are [1]"),
            ("qwen2_5_vl", {"vision.window_size": 56}, "window_size 112, not with 56"),
            ("qwen3_vl", {"vision.deepstack_visual_indexes": [0, 1, 4]}, "deepstack_visual_indexes"),
            ("gemma4", {"vision.hidden_activation": "silu"}, "hidden_activation gelu_pytorch_tanh, not with silu"),
            ("gemma4", {"vision.num_key_value_heads": 2}, "num_key_value_heads 4, not with 2"),
            ("gemma4", {"vision.rope_parameters": {"rope_theta": 1e4}}, "a base of 100,"),
            ("gemma4", {"vision.num_hidden_layers": 2}, "no tensor for `model.vision_tower.encoder.layers.2."),
            ("gemma4", {"audio_config": {"attention_chunk_size": 24}}, "attention_chunk_size 12, not with 24"),
            (
                "gemma4",
                {"text_config": {"use_bidirectional_attention": None}},
                "use_bidirectional_attention vision, not",
            ),
            ("glm4v", {"vision.attention_bias": True}, "attention_bias False, not with True"),
            ("kimi_k25", {"vision.merge_kernel_size": [4, 4]}, "merge_kernel_size [2, 2], not with [4, 4]"),
            ("kimi_k25", {"vision.projector_hidden_act": "relu"}, "projector_hidden_act gelu, not with relu"),
            ("kimi_k25", {"projection_layer_norm_eps": 1e-6}, "projection_layer_norm_eps 1e-05"),
            (
                "mistral3",
                {"vision.rope_parameters": {"rope_type": "default"}, "vision.rope_theta": 5e5},
                "a base of 10000",
            ),
            ("mistral3", {"projector_hidden_act": "relu"}, "projector_hidden_act gelu, not with relu"),
            ("internvl", {"vision.norm_type": "rms_norm"}, "norm_type layer_norm, not with rms_norm"),
            ("step3p7", {"vision.mlp_ratio": 4}, "by config.json"),
            ("step3p7", {"vision.mlp_ratio": "four"}, "`mlp_ratio`"),
            ("step3p7", {"vision.rope_parameters": {"rope_type": "axial", "rope_theta": 100}}, "a base of 10000"),
        ),
    ],
)
def test_a_tower_of_which_llama_cpp_would_compute_something_else_is_not_written_and_the_note_says_why(
    tmp_path: Path, kind: str, changes: dict[str, Any], why: str
) -> None:
    published = gguf_towers.save(tmp_path / "hf", kind)
    configure(published, **changes)
    command = plan_command(Request.export(published, tmp_path / "out", LLAMA_CPP))
    (note,) = (note for note in command.notes if "are not in it" in note)
    assert why in note.replace("'", "").replace('"', ""), note
    assert not any("mmproj" in file.name for file in command.writer.files)  # type: ignore[attr-defined]


def test_a_llava_that_says_no_layer_of_features_has_its_class_s_last_but_one(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "llava")
    said = json.loads((published / "config.json").read_text())
    del said["vision_feature_layer"]
    (published / "config.json").write_text(json.dumps(said))
    assert any("vision_feature_layer -1, not with -2" in note for note in export(published, tmp_path / "out"))


@pytest.mark.parametrize("name", ["mmproj", "my-mmproj-8B"])
def test_a_text_model_is_not_called_as_towers_are(tmp_path: Path, name: str) -> None:
    published = gguf_towers.save(tmp_path / "hf", "gemma3")
    with pytest.raises(PrecisionError, match="mmproj is in the name"):
        export(published, tmp_path / name)


def test_towers_without_a_tensor_or_with_another_are_not_written(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "qwen2_vl")
    name = "visual.blocks.1.norm2.bias"
    change(published, name, lambda tensors, name: {n: t for n, t in tensors.items() if n != name})
    assert any(f"no `{name}`" in note for note in export(published, tmp_path / "without"))
    more = {name: torch.ones(64, dtype=torch.bfloat16), "visual.blocks.1.norm3.weight": torch.ones(64)}
    change(published, name, lambda tensors, name: tensors | more)
    assert any("no tensor for `visual.blocks.1.norm3.weight`" in note for note in export(published, tmp_path / "more"))


@pytest.mark.parametrize(("key", "why"), [("do_rescale", "do_rescale True"), ("do_normalize", "image_mean [0, 0, 0]")])
def test_towers_of_images_that_are_not_scaled_are_not_written(tmp_path: Path, key: str, why: str) -> None:
    published = gguf_towers.save(tmp_path / "hf", "gemma3")
    configure(published, "preprocessor_config.json", **{key: False})
    assert any(why in note for note in export(published, tmp_path / "out"))


def test_the_largest_image_of_kimi_is_in_the_file(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "kimi_k25")
    configure(published, "preprocessor_config.json", media_proc_cfg={"in_patch_limit": 4096})
    export(published, tmp_path / "out")
    metadata = read_head(tmp_path / "out" / "mmproj-out-BF16.gguf").metadata
    assert metadata["clip.vision.image_max_pixels"] == 4096 * 14 * 14
    configure(published, "preprocessor_config.json", media_proc_cfg={"in_patch_limit": "many"})
    assert any(
        "in_patch_limit of its preprocessor_config.json is" in note for note in export(published, tmp_path / "b")
    )


def test_what_gemma_4_is_given_is_as_llama_cpp_makes_it(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "gemma4")
    configure(published, "preprocessor_config.json", image_mean=[0.5, 0.5, 0.5])
    assert any("image_mean [0, 0, 0]" in note for note in export(published, tmp_path / "a"))
    configure(published, "preprocessor_config.json", do_normalize=True)
    assert any("--mmproj" in note for note in export(published, tmp_path / "b"))
    (published / "processor_config.json").write_text(json.dumps({"feature_extractor": {"frame_length_ms": 32.0}}))
    assert any("frame_length_ms 20, not with 32" in note for note in export(published, tmp_path / "c"))


@pytest.mark.parametrize("key", ["image_mean", *in_soak("image_std")])
def test_without_what_images_are_prepared_with_there_is_no_second_file(tmp_path: Path, key: str) -> None:
    published = gguf_towers.save(tmp_path / "hf", "gemma3")
    configure(published, "preprocessor_config.json", **{key: None})
    assert any(f"three numbers as `{key}`" in note for note in export(published, tmp_path / "out"))
    said = {"image_processor": {key: [0.5, 0.5, 0.5]}}
    (published / "processor_config.json").write_text(json.dumps(said))
    export(published, tmp_path / "with")
    metadata = read_head(tmp_path / "with" / "mmproj-with-BF16.gguf").metadata
    assert metadata[f"clip.vision.{key}"] == [0.5, 0.5, 0.5]


@pytest.mark.skipif("step3p7" not in gguf_towers.TOWERS, reason="this transformers has no Step 3.7")
def test_images_of_a_step_are_prepared_as_its_class_does_where_no_file_says_how(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "step3p7")
    (published / "preprocessor_config.json").unlink()
    export(published, tmp_path / "out")
    said = read_head(tmp_path / "out" / "mmproj-out-BF16.gguf").metadata
    for key, numbers in (("mean", OPENAI_CLIP_MEAN), ("std", OPENAI_CLIP_STD)):
        assert said[f"clip.vision.image_{key}"] == pytest.approx(numbers, rel=1e-7)


def test_the_second_file_is_the_same_by_several_workers_and_from_megatron(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "qwen3_vl")
    export(published, tmp_path / "a" / "out", workers=1)
    export(published, tmp_path / "b" / "out", workers=3)
    execute(plan_command(Request(published, tmp_path / "megatron", "megatron")))
    export(tmp_path / "megatron", tmp_path / "c" / "out")
    files = [(tmp_path / each / "out" / "mmproj-out-BF16.gguf").read_bytes() for each in "abc"]
    assert files[0] == files[1] == files[2]


def test_llama_cpp_computes_the_towers_of_releases_but_for_that_of_llava() -> None:
    lines = (repository.GOLDEN / "published_wrappers.jsonl").read_text().splitlines()
    published = {line["config"]["model_type"]: line["config"] for line in map(json.loads, lines)}
    files = {
        "preprocessor_config.json": {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        "tokenizer.json": {"added_tokens": [{"content": "[IMG_BREAK]", "id": 12}]},
    }
    sides = {"mistral3": 1540, "gemma3": 896, "qwen2_5_vl": 560, "qwen3_vl_moe": 768, "llama4": 336}
    for kind, side in sides.items():
        said = files | {"config.json": published[kind]}
        beside = Companions({file: json.dumps(each).encode() for file, each in said.items()})
        tower = tower_of(from_hf_config(published[kind]), beside)
        assert tower.layers == tower.metadata["clip.vision.block_count"]
        assert tower.metadata["clip.vision.image_size"] == side
    beside = Companions({"config.json": json.dumps(published["llava"]).encode()})
    with pytest.raises(UnknownArchitecture, match="no tower of a `llava` but Pixtral's"):
        tower_of(from_hf_config(published["llava"]), beside)


def test_a_value_or_a_setting_of_towers_that_differs_is_named(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "gemma3")
    export(published, tmp_path / "out")
    name = "vision_tower.vision_model.encoder.layers.1.mlp.fc1.weight"
    change(published, name, one_more)
    configure(published, **{"vision.layer_norm_eps": 1e-5})
    for found in (compared(published, tmp_path / "out"), compared(tmp_path / "out", published)):
        assert [(each.name, each.differing) for each in found.tensors if not each.equal] == [(name, 1)]
        assert len(found.settings) == 1 and "layer_norm_epsilon" in found.settings[0]


def test_an_embedding_beside_towers_that_is_another_one_is_named(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "mistral3")
    export(published, tmp_path / "out")
    file = tmp_path / "out" / "mmproj-out-BF16.gguf"
    embedding, data = gguf_files.stored_tensors(file)["v.token_embd.img_break"]
    assert compared(published, tmp_path / "out").equal
    with file.open("r+b") as stored:
        stored.seek(embedding.offset + len(data) - 4)
        stored.write(b"\0\0\x80\x3f")
    for found in (compared(published, tmp_path / "out"), compared(tmp_path / "out", published)):
        (said,) = found.settings
        assert "v.token_embd.img_break of" in said and "is not the embedding of token" in said


def test_towers_of_two_files_are_said_not_to_be_compared(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "gemma3")
    export(published, tmp_path / "out")
    export(published, tmp_path / "again")
    found = compared(tmp_path / "out", tmp_path / "again")
    assert [each.what for each in found.not_compared if each.topic == "towers"] == ["of A, of B"]


def test_of_several_files_of_towers_the_first_is_compared_and_the_others_are_named(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "gemma3")
    export(published, tmp_path / "out")
    (tmp_path / "out" / "mmproj-out-F16.gguf").write_bytes((tmp_path / "out" / "mmproj-out-BF16.gguf").read_bytes())
    found = compared(published, tmp_path / "out")
    assert "mmproj-out-F16.gguf" in [each.what for each in found.not_compared if each.topic == "towers"][0]
    change(published, "vision_tower.vision_model.encoder.layers.1.mlp.fc1.weight", one_more)
    assert not compared(published, tmp_path / "out").equal
    assert len(describe(open_checkpoint(tmp_path / "out"))["mmproj"]) == 2


def test_towers_are_not_compared_without_their_file(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "gemma3")
    export(published, tmp_path / "out")
    (tmp_path / "out" / "mmproj-out-BF16.gguf").unlink()
    found = compared(published, tmp_path / "out")
    assert found.equal and [each.what for each in found.not_compared if each.topic == "towers"] == ["of A"]


def test_a_damaged_file_of_towers_is_one_error_of_what_reads_it(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "qwen2_vl")
    export(published, tmp_path / "out")
    file = tmp_path / "out" / "mmproj-out-BF16.gguf"
    file.write_bytes(file.read_bytes()[:-1000])
    for read in (lambda: compared(published, tmp_path / "out"), lambda: describe(open_checkpoint(tmp_path / "out"))):
        with pytest.raises(DamagedCheckpoint, match="where its head describes") as error:
            read()
        assert error.value.where == str(file)
    execute(plan_command(Request(tmp_path / "out", tmp_path / "text", "hf")))  # the text model is whole


def test_a_vector_of_towers_in_codes_is_one_error(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "qwen2_vl")
    export(published, tmp_path / "out")
    file, numbers = tmp_path / "out" / "mmproj-out-BF16.gguf", {form: number for number, form in FORMATS.items()}
    tensors = {
        name: (each.shape, numbers[each.format], data) for name, (each, data) in gguf_files.stored_tensors(file).items()
    }
    (size,), _, _ = tensors["v.blk.0.ln1.weight"]
    tensors["v.blk.0.ln1.weight"] = ((size,), gguf_files.Q8_0, bytes(size // 32 * 34))
    file.write_bytes(gguf_files.file(read_head(file).metadata, tensors))
    with pytest.raises(DamagedCheckpoint, match="v.blk.0.ln1.weight` is a vector in codes"):
        compared(published, tmp_path / "out")


def test_inspect_says_what_is_in_both_files_and_that_towers_alone_are_no_model(tmp_path: Path) -> None:
    export(gguf_towers.save(tmp_path / "hf", "qwen3_vl"), tmp_path / "out")
    described = describe(open_checkpoint(tmp_path / "out"))
    assert described["files"] == 1 and described["mmproj"][0]["projectors"] == ["qwen3vl_merger"]
    assert any("mmproj-out-BF16.gguf" in words for _, words in summary(described).rows)
    with pytest.raises(UnknownArchitecture, match="towers, and no text model"):
        open_checkpoint(tmp_path / "out" / "mmproj-out-BF16.gguf")
    (tmp_path / "out" / "out-BF16.gguf").unlink()
    with pytest.raises(UnknownFormat, match="0 models in GGUF, and towers alone"):
        open_checkpoint(tmp_path / "out")

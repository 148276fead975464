"""Wrappers that Megatron-Bridge trained: text model and towers become one Hugging Face directory again.

What Bridge stores is made here as its source says (models/*/*_bridge.py and modeling files, August 2026), by PyTorch
alone. tests/peers/test_bridge.py has what Bridge itself saves.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pico
import pytest
import tiny_wrappers
import torch
import torch.distributed.checkpoint as torch_dcp
import yaml
from any_models import load_whole, logits
from conversions import run
from in_memory import InMemory, recorded, to_megatron
from safetensors.torch import save_file
from soaking import in_soak
from tiny_wrappers import WRAPPERS, stored, towers
from torch import Tensor
from transformers import AutoModelForImageTextToText

from precisionctl.architectures.towers_in_bridge import TENSORS_OF_TOWERS, TOWERS_IN_BRIDGE
from precisionctl.architectures.wrappers import WRAPPERS as KNOWN
from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.chunks import Box, Chunk, read_rows, write_rows
from precisionctl.checkpoints.megatron import bridge_towers, provider
from precisionctl.checkpoints.megatron.bridge_towers import BridgeTowers
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, RecipeError, UnknownArchitecture, UnmappedTensor
from precisionctl.fp8 import sidecar
from precisionctl.param import TensorSpec
from precisionctl.reports.inspect import describe

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PREFIXES = {
    "gemma3": {"multi_modal_projector.mm_soft_emb_norm": "multi_modal_projector.mm_soft_embed_norm"},
    "glm4v_moe": {"model.": ""},
    "step3p7": {"vit_large_projector": "image_insert_embedding.align_projector"},
}
"""What Bridge calls otherwise of towers that are Hugging Face's modules."""

IN_BLOCKS = {
    r"model\.visual\.blocks\.(\d+)\.": r"vision_model.decoder.layers.\1.",
    r"\.attn\.(qkv|proj)\.": r".self_attention.linear_\1.",
    r"(layers\.\d+)\.norm1\.": r"\1.self_attention.linear_qkv.layer_norm_",
    r"(layers\.\d+)\.norm2\.": r"\1.mlp.linear_fc1.layer_norm_",
    r"model\.visual\.deepstack_merger_list\.(\d+)\.": r"vision_model.decoder.deepstack_merger_list.\1.",
    r"((?:merger|list\.\d+)\.)norm\.": r"\1patch_norm.",
    r"mlp\.down_proj\.": "mlp.linear_fc2.",
    r"merger\.ln_q\.": "merger.patch_norm.",
    r"merger\.mlp\.0\.": "merger.linear_fc1.",
    r"merger\.mlp\.2\.": "merger.linear_fc2.",
    r"model\.visual\.": "vision_model.",
}
"""What Bridge calls towers that are Megatron's transformers."""

PREDICTION = {  # of EXAONE 4.5
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "final_layernorm": "norm",
    "transformer_layer.self_attention.linear_proj": "layers.0.self_attn.o_proj",
    "transformer_layer.self_attention.linear_proj.post_layernorm": "layers.0.post_attention_layernorm",
    "transformer_layer.mlp.linear_fc2.post_layernorm": "layers.0.post_feedforward_layernorm",
}


RADIO = r"vision_model\.radio_model\.model\."
OF_NEMOTRON = {
    rf"{RADIO}blocks\.(\d+)\.mlp\.fc": r"vision_model.decoder.layers.\1.mlp.linear_fc",
    rf"{RADIO}blocks\.": "vision_model.decoder.layers.",
    rf"{RADIO}patch_generator\.cls_token\.token": "vision_model.class_token",
    rf"{RADIO}patch_generator\.pos_embed": "vision_model.position_embeddings",
    rf"{RADIO}patch_generator\.": "vision_model.",
    r"mlp1\.0\.": "vision_projection.encoder.linear_fc1.layer_norm_",
    r"mlp1\.1\.": "vision_projection.encoder.linear_fc1.",
    r"mlp1\.3\.": "vision_projection.encoder.linear_fc2.",
    r"sound_projection\.norm\.": "sound_projection.encoder.linear_fc1.layer_norm_",
    r"sound_projection\.linear(\d)\.": r"sound_projection.encoder.linear_fc\1.",
    r"sound_encoder\.": "sound_model.",
    **{there: theirs for there, theirs in IN_BLOCKS.items() if there.startswith((r"\.attn", r"(layers"))},
}
"""What Bridge calls Nemotron's towers (nemotron_vl_bridge.py, nemotron_omni_bridge.py)."""


def interleaved(query: Tensor, key: Tensor, value: Tensor, groups: int) -> Tensor:
    """As Bridge's merge_qkv_weights: of each group its queries, its key, its value."""
    parts = [tensor.view(groups, -1, *tensor.shape[1:]) for tensor in (query, key, value)]
    return torch.cat(parts, 1).flatten(0, 1)


def in_bridge(kind: str, of_towers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bridge's tensors for towers under published names."""
    if not any(name.startswith("model.visual.blocks.") for name in of_towers) or kind == "glm4v_moe":
        found = {}
        for name, tensor in of_towers.items():
            if name == "multi_modal_projector.mm_input_projection_weight":
                name, tensor = "multi_modal_projector.proj.weight", tensor.T.contiguous()
            for published, theirs in PREFIXES.get(kind, {}).items():
                name = name.replace(published, theirs)
            found[name] = tensor
        return found
    found, groups = {}, 2 if kind == "exaone4_5" else 4
    for name, tensor in of_towers.items():
        if ".attn.qkv." in name:
            heads = [4 * 32, groups * 32, groups * 32]
            tensor = interleaved(*tensor.split(heads), groups)
        if gate := re.fullmatch(r"model\.visual\.(blocks\.\d+\.mlp\.)(gate|up)_proj\.(\w+)", name):
            name = f"model.visual.{gate[1]}linear_fc1.{gate[3]}_{'w' if gate[2] == 'gate' else 'v'}"
        for pattern, theirs in IN_BLOCKS.items():
            name = re.sub(pattern, theirs, name)
        found[name] = tensor
    return found


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Layers of one kind in one tensor, as Megatron stores them where all are alike."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(re.sub(r"(decoder\.\w+\.)\d+\.", r"\1", name), []).append(tensor)
    return {
        name: torch.stack(each) if "decoder." in name and name not in tensors else each[0]
        for name, each in found.items()
    }


def save(directory: Path, tensors: Mapping[str, Tensor], **model: Any) -> Path:
    """A `torch_dist` of Bridge, as PyTorch writes it; with what its provider says of the `model`, if anything."""
    torch_dcp.save(dict(tensors), storage_writer=torch_dcp.FileSystemWriter(directory), no_dist=True)
    (directory / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    torch.save({"iteration": 7}, directory / "common.pt")
    if model:
        (directory / "run_config.yaml").write_text(yaml.safe_dump({"model": model}))
    return directory


Run = tuple[Path, dict[str, Tensor]]
"""A Hugging Face directory, and all tensors of a run of Bridge with the same model, by Bridge's names."""


def of_nemotron(of_towers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bridge's tensors for Nemotron's towers: without scales of layers, which transformers' class alone has, and what
    normalises pixels."""
    found = {}
    for name, tensor in of_towers.items():
        if re.search("layer_scale|input_conditioner|summary_idxs", name):
            continue
        if ".attn.qkv." in name:
            tensor = interleaved(*tensor.chunk(3), 4)
        for pattern, theirs in OF_NEMOTRON.items():
            name = re.sub(pattern, theirs, name)
        found[name] = tensor
    return found


def trained(room: Path, kind: str, more: Mapping[str, Tensor] | None = None, **text: Any) -> Run:
    tiny_wrappers.save(room / "hf", kind, dtype=torch.bfloat16, **text)
    tensors = stored(room / "hf") | dict(more or {})
    if kind == "gemma3":
        tensors = {as_published(name): tensor for name, tensor in tensors.items()}
    save_file(tensors, room / "hf" / "model.safetensors", metadata={"format": "pt"})
    made = to_megatron(open_checkpoint(room / "hf")).tensors
    language = {f"language_model.{name}": tensor for name, tensor in made.items() if not name.startswith("towers.")}
    of_towers = {name: tensor for name, tensor in towers(tensors).items() if not name.startswith("mtp.")}
    return room / "hf", language | in_bridge(kind, of_towers)


def as_published(name: str) -> str:
    """A name of Gemma 3's, which transformers saves otherwise."""
    return re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("gemma3"), "gemma3")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")


def assert_comes_back(of_run: Run, directory: Path, room: Path, **how: Any) -> None:
    """That what Bridge saved in `directory` becomes the Hugging Face directory, by nothing of it but config.json."""
    run(directory, room / "out", "hf", reference=without_weights(of_run[0], room / "config"), **how)
    before, after = stored(of_run[0]), stored(room / "out")
    assert after.keys() == before.keys()
    assert [name for name, tensor in before.items() if not torch.equal(after[name], tensor)] == []


def without_weights(directory: Path, copy: Path) -> Path:
    """A copy of a Hugging Face directory with config.json and tokenizer alone."""
    return Path(shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("*.safetensors")))


def changed(of_run: Run, room: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the run's Hugging Face directory without weights, with another config.json."""
    copy = without_weights(of_run[0], room / "changed")
    config = json.loads((copy / "config.json").read_text())
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def assert_computes_the_same(one: Path, other: Path) -> None:
    a, b = (load_whole(AutoModelForImageTextToText, directory) for directory in (one, other))
    assert torch.equal(logits(a), logits(b))


def test_gemma_3_comes_back_to_the_last_bit_and_transformers_loads_it(gemma: Run, tmp_path: Path) -> None:
    assert_comes_back(gemma, save(tmp_path / "bridge", gemma[1]), tmp_path, verify=True)
    assert_computes_the_same(tmp_path / "out", gemma[0])


def test_qwen3_vl_whose_tower_is_megatrons_transformer_comes_back(qwen: Run, tmp_path: Path) -> None:
    assert_comes_back(qwen, save(tmp_path / "bridge", stacked(qwen[1])), tmp_path, verify=True)
    assert_computes_the_same(tmp_path / "out", qwen[0])


def test_a_wrapper_that_megatron_fsdp_saved_comes_back(qwen: Run, tmp_path: Path) -> None:
    saved = save(tmp_path / "bridge", {f"model.module.{name}": tensor for name, tensor in qwen[1].items()})
    for file in ("metadata.json", "common.pt"):
        (saved / file).unlink()
    assert_comes_back(qwen, saved, tmp_path)


def test_qwen3_vl_of_bridge_0_3_whose_tower_is_hugging_faces_comes_back(qwen: Run, tmp_path: Path) -> None:
    text = {name: tensor for name, tensor in qwen[1].items() if name.startswith("language_model.")}
    of_towers = {n.replace("model.visual.", "vision_model."): tensor for n, tensor in towers(stored(qwen[0])).items()}
    assert_comes_back(qwen, save(tmp_path / "bridge", text | of_towers), tmp_path)


OTHERS = ("qwen2_5_vl", "glm4v_moe", "mistral3", "kimi_k25", "qwen2_audio", "step3p7")
ALIKE_QWEN_3 = ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


@pytest.mark.soak
@pytest.mark.parametrize("kind", [kind for kind in (*OTHERS, *ALIKE_QWEN_3) if kind in WRAPPERS])
def test_other_wrappers_come_back_from_bridge(kind: str, tmp_path: Path) -> None:
    made = trained(tmp_path, kind)
    assert_comes_back(made, save(tmp_path / "bridge", made[1]), tmp_path)


def of_gemma_4(
    made: Mapping[str, Tensor], windows: list[bool], groups: int, shared: int = 0, *, by_layer: bool = False
) -> dict[str, Tensor]:
    """Bridge's tensors for our text model: layers with a window and those without counted apart; keys a second time as
    values, or zeros for both, where a layer has none of its own (gemma4_bridge.py, gemma4_provider.py,
    modeling_gemma4.py). `groups` are those of layers without a window."""
    moe = any(".router." in name for name in made)
    of_norms = {
        "mlp.shared_experts.linear_fc1.layer_norm_": "pre_shared_expert_layernorm.",
        "mlp.shared_experts.linear_fc2.post_layernorm.": "mlp.post_shared_expert_layernorm.",
        "mlp.pre_moe_layernorm.": "pre_mlp_layernorm.",
        "mlp.post_layernorm.": "post_ffn_layernorm.",
    }
    if not moe:
        of_norms = {
            "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
            "self_attention.linear_proj.post_layernorm.": "post_self_attn_layernorm.",
            "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
            "mlp.linear_fc2.post_layernorm.": "post_mlp_layernorm.",
        }
    found = {}
    for name, tensor in made.items():
        name = name.removeprefix("embedding.") if "per_layer_" in name and "decoder" not in name else name
        for ours, theirs in of_norms.items():
            name = name.replace(ours, theirs)
        if match := re.fullmatch(r"decoder\.layers\.(\d+)\.self_attention\.(.+)", name):
            layer = int(match[1])
            in_window, kind = windows[layer], "sliding" if windows[layer] else "global"
            if match[2] == "linear_qkv.weight":
                channels, of_kind = (32, 2) if in_window else (64, groups)
                heads = tensor.view(of_kind, -1, channels, tensor.shape[-1])
                if layer >= len(windows) - shared:
                    none = torch.zeros_like(heads[:, :1])
                    tensor = torch.cat([heads, none, none], 1).flatten(0, 2)
                    norm = f"language_model.decoder.layers.{layer}.self_attention_{kind}.k_layernorm.weight"
                    found[norm] = torch.ones(channels)  # which nothing reads
                elif not in_window and not shared:
                    tensor = torch.cat([heads, heads[:, -1:]], 1).flatten(0, 2)
            number = layer if by_layer else sum(other == in_window for other in windows[:layer])
            name = f"decoder.layers.{number}.self_attention_{kind}.{match[2]}"
        found[f"language_model.{name}"] = tensor
    return found


ONE_PATTERN = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size": 128,
}
GEMMA_4 = {
    "dense": {},
    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "small": {
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": False,
        "num_global_key_value_heads": None,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 128,
    },
}
SAID_OF_GEMMA_4 = {
    "num_layers": 4,
    "vocab_size": 128,
    "kv_channels": 32,
    "layernorm_epsilon": 1e-6,
    "activation_func": {"_target_": "megatron.core.fusions.fused_bias_geglu.fast_gelu", "_call_": False},
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": True,
}
DENSE_GEMMA_4 = {
    "_target_": "megatron.bridge.models.gemma_vl.gemma4_vl_provider.Gemma4DenseVLProvider",
    "rotary_base": 10000,  # which nothing reads
    "full_attention_rope_base": 1e6,
    "sliding_window_rope_base": 1e4,
    "window_size": [7, 0],
    "window_attn_skip_freq": [True, False] * 2,
}
DESCRIBED_GEMMA_4 = {
    "dense": DENSE_GEMMA_4,
    "small": DENSE_GEMMA_4,
    "experts": {
        "_target_": "megatron.bridge.models.gemma_vl.gemma4_vl_provider.Gemma4VLModelProvider",
        "rotary_base": [1e4, 1e6],
        "softmax_scale": 1.0,
        "qk_layernorm": True,
        "window_size": 8,
        "interleaved_attn_pattern": [1, 1],
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 48,
        "moe_shared_expert_intermediate_size": 96,
        "moe_layer_freq": 1,
        "moe_router_pre_softmax": True,
    },
}


@pytest.mark.parametrize("which", ["experts", *in_soak("dense", "small")])
def test_gemma_4_whose_kinds_of_layers_bridge_counts_apart_comes_back(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, made = trained(tmp_path, "gemma4", **ONE_PATTERN, **GEMMA_4[which])
    text = {n.removeprefix("language_model."): t for n, t in made.items() if n.startswith("language_model.")}
    beside = {name.removeprefix("model."): t for name, t in made.items() if not name.startswith("language_model.")}
    shared = 2 if which == "small" else 0
    theirs = of_gemma_4(text, [True, False] * 2, 2 if shared else 1, shared, by_layer=bool(shared))
    moments = {f"optimizer.state.exp_avg.{name}": tensor.float() for name, tensor in theirs.items()}
    described = ALIKE | SIZES | SAID_OF_GEMMA_4 | DESCRIBED_GEMMA_4[which]
    all_of_text = theirs | moments if shared else stacked(theirs | moments)
    path = save(tmp_path / "bridge", all_of_text | beside, **described)
    assert_comes_back((hf, made), path, tmp_path, verify=True)
    read, parsed = provider.read_yaml, list[Path]()
    monkeypatch.setattr(provider, "read_yaml", lambda *given: parsed.append(given[0]) or read(*given))
    reader = open_checkpoint(path, hints=Hints(companions=open_checkpoint(hf).companions))
    assert reader.towers.specs and reader.args and len(parsed) == 1
    qkv = "decoder.layers.3.self_attention.linear_qkv.weight"
    assert reader.optimizer_specs[f"optimizer.state.exp_avg.{qkv}"].shape == text[qkv].shape
    described["rotary_base" if which == "experts" else "full_attention_rope_base"] = 7.0
    other = save(tmp_path / "other", theirs | beside, **described)
    with pytest.raises(RecipeError, match="rotary_base"):
        run(other, tmp_path / "no", "hf", reference=tmp_path / "config")


MINIMAX_M3 = {
    "_target_": "megatron.bridge.models.minimax_m3.minimax_m3_bridge.MiniMaxM3VLModelProvider",
    "num_layers": 3,
    "kv_channels": 32,
    "ffn_hidden_size": 64,
    "layernorm_epsilon": 1e-6,
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "add_qkv_bias": False,
    "position_embedding_type": "rope",
    "rotary_base": 5e6,
    "rotary_percent": 0.5,
    "activation_func": {"_target_": "megatron.core.fusions.fused_bias_geglu.quick_gelu", "_call_": False},
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 96,
    "moe_layer_freq": [0, 1, 1],
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": 2.0,
    "moe_router_dtype": "fp32",
    "moe_shared_expert_intermediate_size": 64,
    "share_embeddings_and_output_weights": False,
}
"""As minimax_m3_bridge.py says of the tiny one."""


UNUSED = {  # by what Bridge says of a run, and config.json otherwise: what is compared
    "experts": [("attention_k_eq_v", False), ("num_kv_shared_layers", 2)],
    "dense": [("attention_k_eq_v", False), ("num_kv_shared_layers", 2)],
    "small": [("attention_k_eq_v", True), ("num_kv_shared_layers", 1)],
}


@pytest.mark.parametrize("which", ["dense", *in_soak("experts", "small")])
def test_keys_and_values_of_gemma_4_are_left_out_as_the_run_says_or_with_a_note(which: str, tmp_path: Path) -> None:
    """Of the two keys, Bridge's provider of experts has the first alone (gemma4_provider.py), and shares nothing."""
    hf, made = trained(tmp_path, "gemma4", **ONE_PATTERN, **GEMMA_4[which])
    text = {n.removeprefix("language_model."): t for n, t in made.items() if n.startswith("language_model.")}
    beside = {name.removeprefix("model."): t for name, t in made.items() if not name.startswith("language_model.")}
    shared = 2 if which == "small" else 0
    theirs = of_gemma_4(text, [True, False] * 2, 2 if shared else 1, shared, by_layer=bool(shared)) | beside
    said = {"attention_k_eq_v": not shared} | ({} if which == "experts" else {"num_kv_shared_layers": shared})
    path = save(tmp_path / "bridge", theirs, **(ALIKE | SIZES | SAID_OF_GEMMA_4 | DESCRIBED_GEMMA_4[which] | said))
    command = run(path, tmp_path / "out", "hf", reference=hf)
    assert not any("left out" in note for note in command.notes)
    for key, other in UNUSED[which]:
        room = tmp_path / key
        room.mkdir()
        reference = changed((hf, made), room, lambda config, of={key: other}: config["text_config"].update(of))
        with pytest.raises(DamagedCheckpoint, match=rf"{key} of config\.json is {other}, and the run had"):
            run(path, room / "no", "hf", reference=reference)
    command = run(save(tmp_path / "untold", theirs), tmp_path / "told", "hf", reference=hf)
    told = "num_kv_shared_layers of config.json says" if shared else "attention_k_eq_v of config.json says"
    layers = "layers 2, 3" if shared else "layers 1, 3"
    assert [note for note in command.notes if layers in note and told in note and "left out" in note]


@pytest.mark.soak
@pytest.mark.parametrize("which", GEMMA_4)
def test_gemma_4_that_megatron_fsdp_saved_comes_back(which: str, tmp_path: Path) -> None:
    """Its names are those of modules, which have one number for each layer."""
    hf, made = trained(tmp_path, "gemma4", **ONE_PATTERN, **GEMMA_4[which])
    text = {n.removeprefix("language_model."): t for n, t in made.items() if n.startswith("language_model.")}
    beside = {name.removeprefix("model."): t for name, t in made.items() if not name.startswith("language_model.")}
    shared = 2 if which == "small" else 0
    theirs = of_gemma_4(text, [True, False] * 2, 2 if shared else 1, shared, by_layer=True)
    theirs = {re.sub("attention_(sliding|global)", "attention", name): tensor for name, tensor in theirs.items()}
    saved = save(tmp_path / "bridge", {f"model.module.{name}": t for name, t in (theirs | beside).items()})
    for file in ("metadata.json", "common.pt"):
        (saved / file).unlink()
    assert_comes_back((hf, made), saved, tmp_path)


@pytest.mark.soak
def test_the_text_model_of_gemma_4_that_bridge_trained_alone_comes_back(tmp_path: Path) -> None:
    hf, made = trained(tmp_path, "gemma4", **ONE_PATTERN, **GEMMA_4["experts"])
    text = {n.removeprefix("language_model."): t for n, t in made.items() if n.startswith("language_model.")}
    theirs = {n.removeprefix("language_model."): t for n, t in of_gemma_4(text, [True, False] * 2, 1).items()}
    (tmp_path / "alone").mkdir()
    config = json.loads((hf / "config.json").read_text())["text_config"]
    (tmp_path / "alone" / "config.json").write_text(json.dumps(config))
    run(save(tmp_path / "bridge", theirs), tmp_path / "out", "hf", reference=tmp_path / "alone")
    of_text = {n.replace("language_model.", ""): t for n, t in stored(hf).items() if ".language_model." in n}
    after = stored(tmp_path / "out")
    assert after.keys() == of_text.keys() and all(torch.equal(after[name], tensor) for name, tensor in of_text.items())


def test_of_kinds_of_layers_that_no_config_json_tells_apart_it_is_asked_for(tmp_path: Path) -> None:
    name = "decoder.layers.0.self_attention_sliding.linear_proj.weight"
    save(tmp_path / "bridge", {"embedding.word_embeddings.weight": torch.ones(4, 4), name: torch.ones(4, 4)})
    with pytest.raises(UnknownArchitecture, match=r"as of a Gemma 4, and no config\.json.*--reference"):
        open_checkpoint(tmp_path / "bridge")


@pytest.mark.parametrize("numbers", [(0,), (0, 2, 3), (1, 2)])
def test_other_layers_of_a_kind_than_config_json_says_are_refused(numbers: tuple[int, ...], tmp_path: Path) -> None:
    config = pico.config("gemma4-moe")  # with two layers in a window, 0 and 1
    assert pico.shape("gemma4-moe").window_layers == (True, True, False)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    name = "decoder.layers.{}.self_attention_sliding.linear_proj.weight"
    tensors = {name.format(number): torch.ones(4, 4) for number in numbers}
    save(tmp_path / "bridge", tensors | {"embedding.word_embeddings.weight": torch.ones(4, 4)})
    with pytest.raises(DamagedCheckpoint, match=rf"{len(numbers)} layers are sliding, and config\.json says 2"):
        run(tmp_path / "bridge", tmp_path / "out", "hf", reference=tmp_path / "hf")


INDEXERS = {
    "linear_q": "q_proj",
    "linear_k": "k_proj",
    "q_norm": "q_norm",
    "k_norm": "k_norm",
}
"""What Bridge calls the parts of MiniMax-M3's indexers, which it has outside of the layers (minimax_m3_bridge.py)."""


def test_minimax_m3_whose_indexers_are_outside_of_the_layers_comes_back_with_its_optimizer(tmp_path: Path) -> None:
    hf, made = trained(tmp_path, "minimax_m3_vl")
    found = {}
    for name, tensor in made.items():
        if match := re.fullmatch(r".*\.layers\.(\d+)\..*\.indexer\.(\w+)\.weight", name):
            name = f"lightning_indexers.{match[1]}.{INDEXERS[match[2]]}.weight"
        found[name] = tensor
    assert len([name for name in found if name.startswith("lightning_")]) == 4
    moments = {f"optimizer.state.exp_avg.{name}": torch.full_like(each, 0.5).float() for name, each in found.items()}
    path = save(tmp_path / "bridge", found | moments, **(ALIKE | SIZES | MINIMAX_M3))
    assert_comes_back((hf, found), path, tmp_path)
    of_indexer = "decoder.layers.2.self_attention.core_attention.indexer.linear_q.weight"
    reader = open_checkpoint(path, hints=Hints(companions=open_checkpoint(hf).companions))
    assert f"optimizer.state.exp_avg.{of_indexer}" in reader.optimizer_specs


NEMOTRON = {
    "_target_": "megatron.bridge.models.nemotron_omni.nemotron_omni_provider.NemotronOmniModelProvider",
    "is_hybrid_model": True,
    "hybrid_layer_pattern": "ME*-M*",
    "num_layers": 6,
    "kv_channels": 16,
    "gated_linear_unit": False,
    "activation_func": {"_target_": "megatron.core.activations.squared_relu", "_call_": False},
    "position_embedding_type": "none",
    "layernorm_epsilon": 1e-5,
    "mamba_num_heads": 32,
    "mamba_head_dim": 4,
    "mamba_num_groups": 4,
    "mamba_state_dim": 8,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_dtype": "fp32",
    "share_embeddings_and_output_weights": False,
}
"""As nemotron_omni_bridge.py and its provider say of the tiny one."""

NVIDIAS = ("NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3")


@pytest.mark.skipif("nemotron_h_omni" not in WRAPPERS, reason="of transformers 5.23")
@pytest.mark.parametrize(
    ("kind", "within"),
    [
        ("NemotronH_Nano_Omni_Reasoning_V3", ""),
        *in_soak(("nemotron_h_omni", ""), ("NemotronH_Nano_VL_V2", "llava_model.")),
    ],
)
def test_nemotrons_that_see_and_hear_come_back(kind: str, within: str, tmp_path: Path) -> None:
    """Only the reference's weights have what the run had no module for."""
    hf = tmp_path / "hf"
    tiny_wrappers.save(hf, "nemotron_h_omni", dtype=torch.bfloat16)
    config, tensors = json.loads((hf / "config.json").read_text()), stored(hf)
    if kind in NVIDIAS:
        config |= {"model_type": kind, "llm_config": config.pop("text_config")}
        config["sound_config"] = config.pop("audio_config")
    if kind == "NemotronH_Nano_VL_V2":  # which does not hear
        del config["sound_config"]
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("sound_")}
        save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    (hf / "config.json").write_text(json.dumps(config))
    made = to_megatron(open_checkpoint(hf)).tensors
    run_ = {f"language_model.{name}": tensor for name, tensor in made.items() if not name.startswith("towers.")}
    run_ |= of_nemotron(towers(tensors))
    described = ALIKE | SIZES | NEMOTRON | {"sound_config": config.get("sound_config")}
    path = save(tmp_path / "bridge", {within + name: tensor for name, tensor in run_.items()}, **described)
    command = run(path, tmp_path / "out", "hf", reference=hf)
    after = stored(tmp_path / "out")
    assert after.keys() == tensors.keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(after[name], tensor)] == []
    left = sum(bool(re.search("layer_scale|summary_idxs", name)) for name in tensors)
    assert any(f"no module for {left} tensors of the reference's towers" in note for note in command.notes)


def test_a_nemotron_whose_heads_nothing_says_is_refused(tmp_path: Path) -> None:
    stored = InMemory(
        None, "megatron", {"vision_model.decoder.layers.0.self_attention.linear_qkv.bias": torch.zeros(48)}
    )
    config = {"model_type": "NemotronH_Nano_VL_V2", "vision_config": {"args": {"model": "vit_huge_patch16_224"}}}
    BridgeTowers(stored, config, InMemory(None, "hf", {}), tmp_path)
    config["vision_config"]["args"]["model"] = "vit_of_no_known_heads"
    with pytest.raises(DamagedCheckpoint, match=r"linear_qkv\.bias.*null heads in null groups|None heads"):
        BridgeTowers(stored, config, InMemory(None, "hf", {}), tmp_path)


def thinking(room: Path, kind: str, whole: str) -> Run:
    """A model that thinks, as published, and a run of Bridge's with it."""
    tiny_wrappers.save(room / "thinker", kind, dtype=torch.bfloat16)
    if kind == "qwen3_asr":
        tiny_wrappers.publish_qwen3_asr(room / "thinker", room / "hf")
    else:
        shutil.copytree(room / "thinker", room / "hf")
        whole_of = {f"thinker.{name}": tensor for name, tensor in stored(room / "thinker").items()}
        save_file(whole_of, room / "hf" / "model.safetensors", metadata={"format": "pt"})
        config = {"model_type": whole, "thinker_config": json.loads((room / "thinker" / "config.json").read_text())}
        config |= {"dtype": "bfloat16", "enable_audio_output": False}
        (room / "hf" / "config.json").write_text(json.dumps(config))
    tensors = stored(room / "hf")
    made = to_megatron(open_checkpoint(room / "hf")).tensors
    language = {f"thinker.language_model.{n}": tensor for n, tensor in made.items() if not n.startswith("towers.")}
    of_towers = {
        name.replace("thinker.audio_tower.", "thinker.audio_model."): tensor
        for name, tensor in tensors.items()
        if name.startswith(("thinker.audio_tower.", "thinker.visual."))
    }
    return room / "hf", language | of_towers


THINKING = {"qwen3_asr": "qwen3_asr"} | {f"{kind}_thinker": kind for kind in ("qwen2_5_omni", "qwen3_omni_moe")}


@pytest.mark.soak
@pytest.mark.parametrize("kind", [kind for kind in THINKING if kind in WRAPPERS])
def test_what_thinks_and_hears_comes_back(kind: str, tmp_path: Path) -> None:
    made = thinking(tmp_path, kind, THINKING[kind])
    assert_comes_back(made, save(tmp_path / "bridge", made[1]), tmp_path)


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    if "qwen3_asr" not in WRAPPERS:
        pytest.skip("of a later transformers")
    return thinking(tmp_path_factory.mktemp("qwen3_asr"), "qwen3_asr", "qwen3_asr")


def test_what_bridge_says_of_what_thinks_is_compared_with_the_references_config(hearing: Run, tmp_path: Path) -> None:
    """By qwen3_asr_bridge.py."""
    config = json.loads((hearing[0] / "config.json").read_text())["thinker_config"]
    described = TEXT_OF_QWEN_3 | {"thinker_config": {"config_dict": config}, "rotary_base": 1e4}
    described["share_embeddings_and_output_weights"] = True
    path = save(tmp_path / "bridge", hearing[1], **described)
    assert_comes_back(hearing, path, tmp_path)
    (tmp_path / "other").mkdir()
    reference = changed(
        hearing, tmp_path / "other", lambda config: config["thinker_config"]["audio_config"].update(n_window=7)
    )
    with pytest.raises(DamagedCheckpoint, match=r"thinker_config\.audio_config\.n_window of config\.json is 7, and"):
        run(path, tmp_path / "no", "hf", reference=reference)


@pytest.mark.parametrize("weights", [True, False])
def test_a_qwen3_asr_as_transformers_saves_it_is_no_reference_of_one_that_bridge_trained(
    weights: bool, hearing: Run, tmp_path: Path
) -> None:
    reference = hearing[0].parent / "thinker"
    if not weights:
        reference = without_weights(reference, tmp_path / "config")
    path = save(tmp_path / "bridge", hearing[1])
    with pytest.raises((DamagedCheckpoint, RecipeError), match=r"other names|has no thinker_config\.audio_config"):
        run(path, tmp_path / "out", "hf", reference=reference)


def test_what_speaks_is_taken_from_the_reference_or_missed(tmp_path: Path) -> None:
    hf, tensors = thinking(tmp_path, "qwen2_5_omni_thinker", "qwen2_5_omni")
    path = save(tmp_path / "bridge", tensors)
    config = json.loads((hf / "config.json").read_text())
    del config["enable_audio_output"]  # which means that it speaks
    (hf / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=r"does not train what speaks \(`talker\.`\)"):
        run(path, tmp_path / "no", "hf", reference=hf)
    save_file(stored(hf) | {"talker.x": torch.ones(3)}, hf / "model.safetensors", metadata={"format": "pt"})
    run(path, tmp_path / "out", "hf", reference=hf)
    assert stored(tmp_path / "out")["talker.x"].tolist() == [1, 1, 1]


def test_a_nemotron_without_a_part_of_what_it_hears_with_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "nemotron_h_omni", "vision_config": {"num_attention_heads": 4}, "audio_config": {}}
    radio = "vision_model.radio_model.model."
    published = {f"{radio}patch_generator.{name}": (4,) for name in ("cls_token.token", "pos_embed", "embedder.weight")}
    published |= {f"mlp1.{number}.weight": (4,) for number in (0, 1, 3)}
    shapes = {"attn.qkv": (48,)}
    for name in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
        published |= {f"{radio}blocks.0.{name}.{kind}": shapes.get(name, (4,)) for kind in ("weight", "bias")}
    run_ = InMemory(None, "megatron", of_nemotron({name: torch.zeros(shape) for name, shape in published.items()}))
    found = BridgeTowers(run_, config, InMemory(None, "hf", {}), tmp_path)
    with pytest.raises(DamagedCheckpoint, match=r"no `sound_projection\.norm\.weight`"):
        found.check({})
    config["audio_config"] = None
    found.check({})


CHECKED = ("step3p7", "nemotron_h_omni", "minimax_m3_vl", *in_soak("gemma4", "kimi_k25", "gemma3", "mistral3"))
NOT_IN_ALL = re.compile(  # what some settings of their classes leave out, and what a run has no module for
    r"(in|out)put_(min|max)|num_batches_tracked|conv\.\w+_conv\d?\.bias|video_embedder|layer_scale|summary_idxs|\.head\."
)


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A Hugging Face directory, and its towers as a run of Bridge has them."""
    if request.param not in WRAPPERS:
        pytest.skip("of a later transformers")
    hf = tmp_path_factory.mktemp(request.param) / "hf"
    tiny_wrappers.save(hf, request.param, dtype=torch.bfloat16)
    tensors = towers(stored(hf))
    if request.param == "gemma3":
        tensors = {as_published(name): tensor for name, tensor in tensors.items()}
    if request.param == "nemotron_h_omni":
        return hf, of_nemotron(tensors)
    within = "model." if request.param == "gemma4" else ""
    return hf, {name.removeprefix(within): tensor for name, tensor in in_bridge(request.param, tensors).items()}


def config_of(of_run: Run) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((of_run[0] / "config.json").read_text())
    return config


def check(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    where = Path("run")
    BridgeTowers(InMemory(None, "megatron", dict(tensors)), config, InMemory(None, "hf", {}), where).check({})


@pytest.mark.parametrize("checked", CHECKED, indirect=True)
def test_no_tensor_of_a_tower_may_be_missing_in_one_layer_or_in_all(checked: Run) -> None:
    """Of none that transformers' class has whatever its settings are."""
    config, tensors = config_of(checked), checked[1]
    check(config, tensors)
    alike: dict[str, list[str]] = {}
    for name in tensors:
        alike.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    accepted = []
    for names in alike.values():
        for lost in (names, names[-1:]):
            try:
                check(config, {name: tensor for name, tensor in tensors.items() if name not in lost})
            except DamagedCheckpoint:
                continue
            accepted.append(lost[-1])
    assert [name for name in accepted if not NOT_IN_ALL.search(name)] == []


OTHER_WORDS = {
    "step3p7": {"num_hidden_layers": "layers", "hidden_size": "width"},
    "kimi_k25": {"num_hidden_layers": "vt_num_hidden_layers", "hidden_size": "vt_hidden_size"},
}
"""What published config.json files say instead of transformers' own."""


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("checked", ["step3p7", *in_soak("kimi_k25")], indirect=True)
def test_layers_and_width_are_compared_in_published_words_and_in_those_of_transformers(
    published: bool, checked: Run
) -> None:
    config, tensors = config_of(checked), checked[1]
    tower = config["vision_config"]
    words = OTHER_WORDS[config["model_type"]]
    said = {own: tower.get(own, tower.get(word)) for own, word in words.items()}
    said = {words[own] if published else own: size for own, size in said.items()}
    config["vision_config"] = tower = {k: v for k, v in tower.items() if k not in {*words, *words.values()}} | said
    check(config, tensors)
    layers, width = said
    last = {name: t for name, t in tensors.items() if f"s.{tower[layers] - 1}." not in name}
    assert last.keys() < tensors.keys()
    with pytest.raises(DamagedCheckpoint, match=rf"vision_config\.{layers} of config\.json says {tower[layers]}"):
        check(config, last)
    for wrong in (tower[width] + 1, [tower[width]]):
        tower[width] = wrong
        with pytest.raises(DamagedCheckpoint, match=re.escape(f"has not the {wrong} numbers that vision_config says")):
            check(config, tensors)


@pytest.mark.parametrize("checked", ["nemotron_h_omni", *in_soak("gemma4")], indirect=True)
def test_what_hears_is_no_part_of_a_model_whose_config_json_says_nothing_of_it(checked: Run) -> None:
    config, tensors = config_of(checked), checked[1]
    config["audio_config"] = None
    with pytest.raises(DamagedCheckpoint, match=r"part of what hears, and config\.json has no audio_config"):
        check(config, tensors)
    check(config, {name: t for name, t in tensors.items() if "sound_" not in name and "audio" not in name})


def test_of_every_tower_with_layers_the_width_is_compared() -> None:
    for kind, of_kind in TENSORS_OF_TOWERS.items():
        for key, tensors in of_kind.items():
            layers = [name for name in tensors if ".*." in name and "merger_list" not in name]
            assert not layers or any(name.endswith(bridge_towers._OF_WIDTH) for name in layers), (kind, key)


@pytest.mark.skipif("exaone4_5" not in WRAPPERS, reason="of transformers 5.23")
@pytest.mark.parametrize("layer", ["mtp_model_layer", *in_soak("transformer_layer")])
def test_exaone_4_5_with_gated_mlps_and_a_prediction_layer_comes_back(layer: str, tmp_path: Path) -> None:
    """By the name that modules have since Megatron-Core 0.17, and by that of torch_dist."""
    torch.manual_seed(1)
    shapes = {"q": (128, 128), "k": (64, 128), "v": (64, 128), "gate": (96, 128), "up": (96, 128)}
    parts = {part: torch.randn(shape).bfloat16() for part, shape in shapes.items()}
    others = {theirs: torch.randn(128).bfloat16() for theirs in PREDICTION}
    published = {f"mtp.{PREDICTION[theirs]}.weight": tensor for theirs, tensor in others.items()}
    for part, tensor in parts.items():
        published[f"mtp.layers.0.{'self_attn' if part in 'qkv' else 'mlp'}.{part}_proj.weight"] = tensor
    hf, tensors = trained(tmp_path, "exaone4_5", published)
    fused = {
        "transformer_layer.self_attention.linear_qkv": interleaved(parts["q"], parts["k"], parts["v"], 2),
        "transformer_layer.mlp.linear_fc1": torch.cat([parts["gate"], parts["up"]]),
    }
    of_mtp = {name.replace("transformer_layer", layer): tensor for name, tensor in (others | fused).items()}
    tensors |= {f"language_model.mtp.layers.0.{name}.weight": tensor for name, tensor in of_mtp.items()}
    assert_comes_back((hf, tensors), save(tmp_path / "bridge", tensors), tmp_path)


def test_trained_towers_are_taken_and_of_the_reference_only_what_the_run_had_no_module_for(
    gemma: Run, tmp_path: Path
) -> None:
    hf, tensors = gemma
    text = {name: tensor for name, tensor in tensors.items() if name.startswith("language_model.")}
    changed = {name: tensor + 1 for name, tensor in tensors.items() if name not in text and ".head." not in name}
    command = run(save(tmp_path / "bridge", text | changed), tmp_path / "out", "hf", reference=hf)
    before, after = stored(hf), stored(tmp_path / "out")
    assert after.keys() == before.keys()
    differing = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert differing == {name for name in towers(before) if ".head." not in name}
    assert [note for note in command.notes if "11 tensors of the reference's towers" in note]


def test_the_references_spelling_is_kept(gemma: Run, tmp_path: Path) -> None:
    short = {name.replace("vision_model.", ""): tensor for name, tensor in stored(gemma[0]).items()}
    reference = without_weights(gemma[0], tmp_path / "reference")
    save_file(short, reference / "model.safetensors", metadata={"format": "pt"})
    run(save(tmp_path / "bridge", gemma[1]), tmp_path / "out", "hf", reference=reference)
    assert stored(tmp_path / "out").keys() == short.keys()


GEMMA_3 = {  # what Bridge's provider says of Gemma 3's layers otherwise than Megatron
    "_target_": "megatron.bridge.models.gemma_vl.gemma3_vl_provider.Gemma3VLModelProvider",
    "rotary_base": [10000.0, 1000000.0],
    "window_size": 8,
    "interleaved_attn_pattern": [1, 1],
    "layernorm_zero_centered_gamma": True,
    "layernorm_epsilon": 1e-6,
    "kv_channels": 32,
    "activation_func": {"_target_": "megatron.bridge.models.gemma.modules.fast_gelu", "_call_": False},
    "share_embeddings_and_output_weights": True,
}
PROVIDERS = {
    "gemma3": GEMMA_3,
    "qwen2_5_vl": {
        "position_embedding_type": "mrope",
        "rotary_base": 20000.0,
        "add_qkv_bias": True,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "share_embeddings_and_output_weights": False,
        "layernorm_epsilon": 1e-5,
    },
}
SIZES = {"hidden_size": 128, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 80}
ALIKE = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False, "seq_length": 128}

TEXT_OF_QWEN_3 = (
    ALIKE
    | SIZES
    | {
        "num_layers": 2,
        "kv_channels": 32,
        "layernorm_epsilon": 1e-6,
        "rotary_base": 20000.0,
        "qk_layernorm": True,
        "position_embedding_type": "mrope",
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "share_embeddings_and_output_weights": False,
    }
)


@pytest.mark.parametrize("kind", [*in_soak("qwen2_5_vl"), "gemma3"])
def test_what_bridge_describes_is_compared_with_the_references_config(kind: str, gemma: Run, tmp_path: Path) -> None:
    plain = {"use_sliding_window": False, "sliding_window": None}
    hf, tensors = gemma if kind == "gemma3" else trained(tmp_path, kind, **plain)
    described = ALIKE | SIZES | {"num_layers": 4 if kind == "gemma3" else 2, "position_embedding_type": "rope"}
    described |= PROVIDERS[kind]
    assert_comes_back((hf, tensors), save(tmp_path / "bridge", tensors, **described), tmp_path)
    described["rotary_base"] = 3e4
    save(tmp_path / "other", tensors, **described)
    with pytest.raises(RecipeError, match="rotary_base"):
        run(tmp_path / "other", tmp_path / "no", "hf", reference=tmp_path / "config")


def test_state_and_optimizer_of_the_text_model_go_along_and_what_trained_the_towers_stays_behind(
    qwen: Run, tmp_path: Path
) -> None:
    hf, tensors = qwen
    moments = {
        f"optimizer.state.{kind}.{name}": tensor.float() / 8
        for kind in ("exp_avg", "exp_avg_sq", "param")
        for name, tensor in tensors.items()
    }
    path = save(tmp_path / "bridge", tensors | moments)
    command = run(path, tmp_path / "ours", "megatron", reference=hf, drop_optimizer=False)
    of_towers = [name for name in moments if "vision_model" in name]
    assert f"What trained the towers stays behind: {len(of_towers)} tensors of the optimizer." in command.notes
    ours = open_checkpoint(tmp_path / "ours")
    assert len(ours.optimizer_specs) == len(moments) - len(of_towers)
    run(tmp_path / "ours", tmp_path / "back", "hf")
    assert stored(tmp_path / "back").keys() == stored(hf).keys()
    assert describe(ours)["parts"]["towers"]["tensors"] == len(towers(stored(hf)))


def test_fp8_state_of_the_text_model_goes_along_and_that_of_towers_stays_behind(qwen: Run, tmp_path: Path) -> None:
    hf, tensors = qwen
    whole = open_checkpoint(hf)
    text, state = to_megatron(whole), recorded(whole)
    made = {name: tensor for name, tensor in text.tensors.items() if not name.startswith("towers.")}
    run_ = TorchDistWriter(
        tmp_path / "bridge", replace(text.model, wrapper=None), {name: text.specs[name] for name in made}
    )
    run_.lay_out()
    for name, tensor in made.items():
        write_rows(run_, name, 0, tensor)
    run_.finish(state)
    save(
        tmp_path / "towers",
        {name: tensor for name, tensor in tensors.items() if not name.startswith("language_model.")},
    )
    index = dcp_metadata.read_index(tmp_path / "bridge")
    keys = {
        field: {f"language_model.{key}": one for key, one in getattr(index, field).items()} for field in vars(index)
    }
    beside = dcp_metadata.read_index(tmp_path / "towers").tensors
    for file in (tmp_path / "towers").glob("*.distcp"):
        shutil.copy(file, tmp_path / "bridge" / f"towers{file.name}")

    def moved(piece: dcp_metadata.DcpPiece) -> dcp_metadata.DcpPiece:
        path = tmp_path / "bridge" / f"towers{piece.span.path.name}"
        return replace(piece, span=replace(piece.span, path=path))

    keys["tensors"] |= {key: replace(one, pieces=tuple(map(moved, one.pieces))) for key, one in beside.items()}
    qkv = next(key for key in keys["objects"] if "linear_qkv._extra_state/shard_0_" in key)
    keys["objects"][qkv.replace("language_model.", "vision_model.")] = keys["objects"].pop(qkv)
    dcp_metadata.write_index(tmp_path / "bridge", dcp_metadata.Index(**keys))
    command = run(tmp_path / "bridge", tmp_path / "out", "hf", reference=hf)
    assert "FP8 state of the towers stays behind: 1 module." in command.notes
    assert stored(tmp_path / "out").keys() == stored(hf).keys()
    of_text = state.modules.keys() - {"decoder.layers.0.self_attention.linear_qkv"}
    assert sidecar.find(tmp_path / "out").modules.keys() == of_text


def test_a_tower_that_no_row_names_is_an_error_with_its_name(qwen: Run, tmp_path: Path) -> None:
    hf, tensors = qwen
    save(tmp_path / "bridge", tensors | {"vision_model.decoder.layers.0.mlp.gate.weight": torch.zeros(2, 2)})
    with pytest.raises(UnmappedTensor, match=r"vision_model\.decoder\.layers\.0\.mlp\.gate\.weight"):
        run(tmp_path / "bridge", tmp_path / "out", "hf", reference=hf)


@pytest.mark.parametrize("weights", [True, False])
def test_a_tensor_that_one_layer_alone_lacks_is_not_taken_from_elsewhere(
    qwen: Run, weights: bool, tmp_path: Path
) -> None:
    hf, tensors = qwen
    left = {name: t for name, t in tensors.items() if name != "vision_model.decoder.layers.1.mlp.linear_fc2.weight"}
    shutil.copytree(hf, tmp_path / "hf")
    if not weights:
        (tmp_path / "hf" / "model.safetensors").unlink()
    save(tmp_path / "bridge", left)
    with pytest.raises(DamagedCheckpoint, match=r"`model\.visual\.blocks\.1\.mlp\.linear_fc2\.weight` is missing"):
        run(tmp_path / "bridge", tmp_path / "out", "hf", reference=tmp_path / "hf")
    assert not (tmp_path / "out").exists()


MISSING = {  # by what is left out of the run: what the error says
    r"vision_model\.merger\.linear_fc1\.bias": r"no `model\.visual\.merger\.linear_fc1\.bias`, which all towers",
    r"vision_model\.decoder\.layers\.1\.": r"1 layers have .* vision_config\.depth of config\.json says 2",
    r"vision_model\.decoder\.layers\.0\.": r"1 layers have .* vision_config\.depth of config\.json says 2",
    r"vision_model.*\.linear_qkv\.weight": r"no `model\.visual\.blocks\.\*\.attn\.qkv\.weight`",
    r"vision_model\.decoder\.deepstack_merger_list\.2\.": r"2 layers have .*deepstack_visual_indexes.* says 3",
}


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("left_out", MISSING)
def test_towers_without_a_tensor_or_a_layer_that_all_have_are_refused(
    qwen: Run, left_out: str, weights: bool, tmp_path: Path
) -> None:
    hf, tensors = qwen
    path = save(tmp_path / "bridge", {name: one for name, one in tensors.items() if not re.match(left_out, name)})
    reference = hf if weights else without_weights(hf, tmp_path / "config")
    with pytest.raises(DamagedCheckpoint, match=MISSING[left_out]):
        run(path, tmp_path / "out", "hf", reference=reference)
    assert not (tmp_path / "out").exists()


def test_where_config_json_does_not_say_how_many_layers_none_between_may_be_missing(qwen: Run, tmp_path: Path) -> None:
    tensors = {name: one for name, one in qwen[1].items() if "vision_model.decoder.layers.0." not in name}
    reference = changed(qwen, tmp_path, lambda config: config["vision_config"].pop("depth"))
    with pytest.raises(DamagedCheckpoint, match=r"no `model\.visual\.blocks\.0\.norm1\.weight`"):
        run(save(tmp_path / "bridge", tensors), tmp_path / "out", "hf", reference=reference)


@pytest.mark.parametrize("depth", [0, True, "2", 1.0, {}])
def test_a_depth_that_is_no_number_is_refused(depth: object, qwen: Run, tmp_path: Path) -> None:
    reference = changed(qwen, tmp_path, lambda config: config["vision_config"].update(depth=depth))
    with pytest.raises(DamagedCheckpoint, match=r"vision_config\.depth of config\.json is"):
        run(save(tmp_path / "bridge", qwen[1]), tmp_path / "out", "hf", reference=reference)


def test_a_tower_of_another_width_than_config_json_says_is_refused(qwen: Run, tmp_path: Path) -> None:
    reference = changed(qwen, tmp_path, lambda config: config["vision_config"].update(hidden_size=64))
    with pytest.raises(DamagedCheckpoint, match=r"norm1\.weight` has not the 64 numbers that vision_config says"):
        run(save(tmp_path / "bridge", qwen[1]), tmp_path / "out", "hf", reference=reference)


@pytest.mark.parametrize("key", ["num_heads", "spatial_merge_size"])
def test_sizes_of_towers_that_no_shape_says_are_compared_with_what_bridge_describes(
    qwen: Run, key: str, tmp_path: Path
) -> None:
    of_run = {"vision_config": {"config_dict": json.loads((qwen[0] / "config.json").read_text())["vision_config"]}}
    path = save(tmp_path / "bridge", qwen[1], **TEXT_OF_QWEN_3, **of_run)
    assert_comes_back(qwen, path, tmp_path)
    (tmp_path / "other").mkdir()
    reference = changed(qwen, tmp_path / "other", lambda config: config["vision_config"].update({key: 1}))
    with pytest.raises(DamagedCheckpoint, match=rf"vision_config\.{key} of config\.json is 1, and the run had"):
        run(path, tmp_path / "no", "hf", reference=reference)


@pytest.mark.parametrize("has_head", [True, False])
def test_a_config_json_that_says_otherwise_whether_there_is_an_output_layer_is_refused(
    gemma: Run, has_head: bool, tmp_path: Path
) -> None:
    tensors = dict(gemma[1])
    if has_head:
        tensors["language_model.output_layer.weight"] = tensors["language_model.embedding.word_embeddings.weight"] + 1

    def say(config: dict[str, Any]) -> None:
        for part in (config, config["text_config"]):
            part["tie_word_embeddings"] = has_head

    reference = changed(gemma, tmp_path, say)
    with pytest.raises(UnknownArchitecture, match="output layer, and tie_word_embeddings says otherwise"):
        run(save(tmp_path / "bridge", tensors), tmp_path / "out", "hf", reference=reference)


def test_the_config_json_of_another_wrapper_is_refused(qwen: Run, gemma: Run, tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match=r"`vision_model\..*` is not known as part of a `gemma3`"):
        run(save(tmp_path / "bridge", qwen[1]), tmp_path / "out", "hf", reference=gemma[0])


def test_a_tower_of_integers_is_refused(qwen: Run, tmp_path: Path) -> None:
    name = "vision_model.patch_embed.proj.bias"
    save(tmp_path / "bridge", qwen[1] | {name: qwen[1][name].long()})
    with pytest.raises(DamagedCheckpoint, match=rf"`{re.escape(name)}` is int64"):
        run(tmp_path / "bridge", tmp_path / "out", "hf", reference=qwen[0])


def test_a_tower_of_another_shape_than_the_references_is_refused(qwen: Run, tmp_path: Path) -> None:
    hf, tensors = qwen
    name = "vision_model.merger.linear_fc2.weight"
    save(tmp_path / "bridge", tensors | {name: tensors[name][1:].clone()})
    with pytest.raises(DamagedCheckpoint, match=rf"`{re.escape(name)}` is .* in Hugging Face, and the reference's"):
        run(tmp_path / "bridge", tmp_path / "out", "hf", reference=hf)


def test_without_a_wrappers_config_the_error_asks_for_one(qwen: Run, tmp_path: Path) -> None:
    hf, tensors = qwen
    path = save(tmp_path / "bridge", tensors)
    with pytest.raises(UnknownArchitecture, match=r"no config\.json says of which.*--reference"):
        open_checkpoint(path)
    reference = without_weights(hf, tmp_path / "config")
    config = json.loads((reference / "config.json").read_text())["text_config"]
    (reference / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    with pytest.raises(UnknownArchitecture, match=r"config\.json is of a text model"):
        run(path, tmp_path / "out", "hf", reference=reference)


@pytest.mark.parametrize("heads", [3, 0, True, "4", None])
def test_heads_that_the_rows_do_not_fit_are_refused(heads: object, tmp_path: Path) -> None:
    stored = InMemory(
        None, "megatron", {"vision_model.decoder.layers.0.self_attention.linear_qkv.bias": torch.zeros(40)}
    )
    config = {"model_type": "qwen3_vl", "vision_config": {"num_heads": heads}}
    with pytest.raises(DamagedCheckpoint, match=r"linear_qkv\.bias.*(?:heads|rows)"):
        BridgeTowers(stored, config, InMemory(None, "hf", {}), tmp_path)


@pytest.mark.parametrize("shape", [(6,), (2, 3, 1)])
def test_a_projection_that_is_no_matrix_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    run_ = InMemory(None, "megatron", {"multi_modal_projector.proj.weight": torch.zeros(shape)})
    with pytest.raises(DamagedCheckpoint, match=r"`multi_modal_projector\.proj\.weight` is \["):
        BridgeTowers(run_, {"model_type": "gemma3"}, InMemory(None, "hf", {}), tmp_path)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (3,), (1 << 18,)])
def test_gate_and_up_of_no_such_rows_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    run_ = InMemory(None, "megatron", {"vision_model.decoder.layers.0.mlp.linear_fc1.bias": torch.zeros(shape)})
    with pytest.raises(DamagedCheckpoint, match=r"linear_fc1\.bias"):
        BridgeTowers(run_, {"model_type": "exaone4_5"}, InMemory(None, "hf", {}), tmp_path)


def test_query_key_and_value_that_tensor_parallel_ranks_stored_apart_are_read_in_place(tmp_path: Path) -> None:
    name, spec = "vision_model.decoder.layers.0.self_attention.linear_qkv.weight", TensorSpec((96, 5), DType.float32)
    query, key, value = torch.arange(96 * 5.0).view(3, 32, 5)
    (tmp_path / "x").write_bytes(b"??" + interleaved(query, key, value, 4).numpy().tobytes())
    pieces = [Chunk(Box(row, rows, 0, 5), tmp_path / "x", 2 + row * 20) for row, rows in ((0, 36), (36, 12), (48, 48))]
    ranks = SimpleNamespace(specs={name: spec}, chunks=lambda _: pieces)
    config = {"model_type": "qwen3_5", "vision_config": {"num_heads": 4}}
    found = BridgeTowers(ranks, config, InMemory(None, "hf", {}), tmp_path)
    (shown,) = found.specs
    assert torch.equal(read_rows(found, shown, 0, 96), torch.cat([query, key, value]))


def test_a_matrix_that_is_turned_is_not_looked_up_before_its_rows_are_read(tmp_path: Path) -> None:
    """Looking for the pieces of a tensor opens files, and of replicas compares the bytes."""
    name, looked_up = "multi_modal_projector.proj.weight", []

    class Run(InMemory):
        def chunks(self, name: str) -> Sequence[Chunk]:
            looked_up.append(name)
            return super().chunks(name)

    matrix = torch.arange(6.0).view(2, 3)
    found = BridgeTowers(
        Run(None, "megatron", {name: matrix}), {"model_type": "gemma3"}, InMemory(None, "hf", {}), tmp_path
    )
    (shown,) = found.specs
    assert found.chunks(shown) and not looked_up
    assert torch.equal(read_rows(found, shown, 0, 3), matrix.t()) and looked_up


def test_towers_of_another_reference_are_refused(tmp_path: Path) -> None:
    name = "visual.patch_embed.proj.weight"
    run_, beside = (
        InMemory(None, "megatron", {name: torch.zeros(2, 2)}),
        InMemory(None, "hf", {"towers.eyes": torch.zeros(2)}),
    )
    with pytest.raises(RecipeError, match=r"`eyes`, not `visual\.patch_embed"):
        BridgeTowers(run_, {"model_type": "qwen2_5_vl"}, beside, tmp_path)


def test_every_wrapper_of_the_table_is_known() -> None:
    assert TOWERS_IN_BRIDGE.keys() == TENSORS_OF_TOWERS.keys() <= KNOWN.keys()

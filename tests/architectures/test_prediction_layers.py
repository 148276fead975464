"""Layers of multi-token prediction that published files have and transformers leaves out: their names are those that
vLLM's and Megatron-Bridge's sources read, and they go to Megatron and come back."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
import torch.distributed.checkpoint
from conversions import run
from in_memory import recorded, to_hf, to_megatron
from safetensors.torch import load_file, save_file
from soaking import in_soak
from torch import Tensor

from precisionctl.architectures.families import from_hf_config, to_hf_config
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.cli.writing import next_step
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import DamagedCheckpoint, RecipeError, UnknownArchitecture, UnmappedTensor, Unrecordable
from precisionctl.fp8 import sidecar
from precisionctl.launch.frameworks import launch
from precisionctl.precision import Precision
from precisionctl.readiness.assess import assess
from precisionctl.reports.inspect import describe, summary
from precisionctl.trainer.measure.parameters import Parameters
from precisionctl.trainer.model.gpt import GPT

NAMES: dict[str, dict[str, str]] = {
    # vllm/model_executor/models/hy_v3_mtp.py, models/hy_v3/hy_v3_bridge.py
    "hy-v3": {
        "layer": "model.layers.3.",
        "enorm": "model.layers.3.enorm.weight",
        "hnorm": "model.layers.3.hnorm.weight",
        "eh_proj": "model.layers.3.eh_proj.weight",
        "final_layernorm": "model.layers.3.final_layernorm.weight",
    },
    # vllm/model_executor/models/exaone_moe_mtp.py, models/exaone/exaone_moe/exaone_moe_bridge.py
    "exaone-moe": {
        "layer": "mtp.layers.0.",
        "enorm": "mtp.pre_fc_norm_embedding.weight",
        "hnorm": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj": "mtp.fc.weight",
        "final_layernorm": "mtp.norm.weight",
    },
    # transformers/conversion_mapping.py, "Mellum checkpoint layout"
    "mellum": {
        "layer": "mtp.layers.0.",
        "enorm": "mtp.pre_fc_norm_embedding.weight",
        "hnorm": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj": "mtp.fc.weight",
        "final_layernorm": "mtp.norm.weight",
    },
    # vllm/model_executor/models/mimo_v2_mtp.py, models/mimo_v2_flash/mimo_v2_flash_bridge.py
    "mimo-v2-flash": {
        "layer": "model.mtp.layers.0.",
        "enorm": "model.mtp.layers.0.enorm.weight",
        "hnorm": "model.mtp.layers.0.hnorm.weight",
        "eh_proj": "model.mtp.layers.0.eh_proj.weight",
        "final_layernorm": "model.mtp.layers.0.final_layernorm.weight",
    },
}
"""By family: where the layer's own tensors are, and the four others by their names in Megatron."""
SAID: dict[str, dict[str, Any]] = {
    "hy-v3": {"num_nextn_predict_layers": 1, "first_k_dense_replace": 1},
    "exaone-moe": {"num_nextn_predict_layers": 1},
    "mellum": {"num_nextn_predict_layers": 1},
    "mimo-v2-flash": {"num_nextn_predict_layers": 1},
}
LIKE = {"hy-v3": 2, "exaone-moe": 0, "mellum": 1, "mimo-v2-flash": 1}
"""The decoder's layer that has the same tensors: with experts, or dense."""
OF_LAYER = {
    "hy-v3": ("mlp.experts.linear_fc1.weight7", "mlp.router.expert_bias", "pre_mlp_layernorm.weight"),
    "exaone-moe": ("mlp.linear_fc1.weight", "mlp.linear_fc1.layer_norm_weight"),
    "mellum": ("mlp.experts.linear_fc2.weight7", "pre_mlp_layernorm.weight"),
    "mimo-v2-flash": ("self_attention.core_attention.softmax_offset", "mlp.linear_fc1.layer_norm_weight"),
}
"""Some of the layer's parameters in Megatron."""


def published(folder: Path, family: str) -> dict[str, Tensor]:
    """As transformers saves a model, with a random prediction layer."""
    pico.save(folder, family, dtype=torch.bfloat16)
    tensors, names = load_file(folder / "model.safetensors"), NAMES[family]
    torch.manual_seed(1)
    like = f"model.layers.{LIKE[family]}."
    for name in [name for name in tensors if name.startswith(like)]:
        there = name.replace(like, names["layer"])
        if family == "mimo-v2-flash":
            there = there.replace("post_attention_layernorm", "pre_mlp_layernorm")
        tensors[there] = torch.randn_like(tensors[name])
    for ours, name in names.items():
        if ours != "layer":
            shape = (64, 128) if ours == "eh_proj" else (64,)
            tensors[name] = torch.randn(shape).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | SAID[family]
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def test_a_prediction_layer_has_an_indexer_where_the_last_layer_uses_anothers(tmp_path: Path) -> None:
    """As published: `modules_to_not_convert` of GLM-5.2-FP8 lists the indexer of layer 78, and before it that of 74,
    but none of 75 to 77."""
    pico.save(tmp_path, "glm-moe-dsa", dtype=torch.bfloat16, indexer_types=["full", "full", "shared"])
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.startswith(("model.layers.1.self_attn", "model.layers.2."))]:
        if ".2.self_attn." not in name:
            tensors[name.replace(name[:15], "model.layers.3.")] = torch.randn_like(tensors[name])
    for name, shape in {"enorm": (64,), "hnorm": (64,), "eh_proj": (64, 128), "shared_head.norm": (64,)}.items():
        tensors[f"model.layers.3.{name}.weight"] = torch.randn(shape).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    back = to_hf(to_megatron(HuggingFaceReader(tmp_path))).tensors
    assert "model.layers.3.self_attn.indexer.wk.weight" in tensors
    assert [name for name in tensors if not torch.equal(back[name], tensors[name])] == []


@pytest.mark.parametrize("family", NAMES)
def test_a_published_prediction_layer_goes_to_megatron_and_comes_back(tmp_path: Path, family: str) -> None:
    stored = published(tmp_path, family)
    reader = HuggingFaceReader(tmp_path)
    megatron = to_megatron(reader)
    for ours, name in NAMES[family].items():
        if ours != "layer":  # three have one shape: a mix-up would come back unseen
            assert torch.equal(megatron.tensors[f"mtp.layers.0.{ours}.weight"], stored[name])
    inner = {f"mtp.layers.0.transformer_layer.{name}" for name in OF_LAYER[family]}
    assert inner < megatron.tensors.keys()
    for back in (to_hf(megatron).tensors, to_hf(reader).tensors):
        assert back.keys() == stored.keys()
        assert [name for name in stored if not torch.equal(back[name], stored[name])] == []


@pytest.mark.parametrize("family", NAMES)
def test_the_trainer_carries_exactly_the_parameters_of_the_plan(tmp_path: Path, family: str) -> None:
    published(tmp_path, family)
    megatron = to_megatron(HuggingFaceReader(tmp_path))
    model = GPT(megatron.model, Precision(fp8=False), dtype=torch.float32)
    assert {name: tuple(each.shape) for name, each in model.named_parameters()} == {
        name: tuple(each.shape) for name, each in megatron.tensors.items()
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_megatron_fsdp_saves_the_name_that_modules_have(tmp_path: Path) -> None:
    """`mtp_model_layer` since Megatron-Core 0.17, which torch_dist calls `transformer_layer`
    (multi_token_prediction.py)."""
    tensors = published(tmp_path / "hf", "exaone-moe")
    made = to_megatron(HuggingFaceReader(tmp_path / "hf")).tensors
    modules = {f"model.module.{n.replace('transformer_layer', 'mtp_model_layer')}": t for n, t in made.items()}
    assert any(".mtp_model_layer." in name for name in modules)
    writer = torch.distributed.checkpoint.FileSystemWriter(tmp_path / "fsdp")
    torch.distributed.checkpoint.save(modules, storage_writer=writer, no_dist=True)
    run(tmp_path / "fsdp", tmp_path / "out", "hf", reference=tmp_path / "hf")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("family", NAMES)
def test_memory_counts_the_prediction_layer(tmp_path: Path, family: str) -> None:
    """Of matrices: norms and biases are neglected."""
    published(tmp_path, family)
    megatron = to_megatron(HuggingFaceReader(tmp_path))
    matrices = sum(each.numel() for each in megatron.tensors.values() if each.dim() == 2)
    assert Parameters.of(megatron.model).all == matrices


@pytest.mark.parametrize("family", NAMES)
def test_a_config_of_megatrons_says_the_prediction_layer_again(tmp_path: Path, family: str) -> None:
    published(tmp_path, family)
    model = HuggingFaceReader(tmp_path).model
    assert model.mtp_num_layers == 1
    assert from_hf_config(to_hf_config(model, "bfloat16")) == model


def test_mimo_v2_flash_has_three_prediction_layers_of_which_published_files_say_nothing(tmp_path: Path) -> None:
    tensors = published(tmp_path, "mimo-v2-flash")
    for name in [name for name in tensors if name.startswith("model.mtp.layers.0.")]:
        for number in (1, 2):
            tensors[name.replace("layers.0.", f"layers.{number}.")] = torch.randn_like(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    back = to_hf(to_megatron(HuggingFaceReader(tmp_path))).tensors
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_a_copy_of_the_head_that_no_source_of_hy3_has_is_not_dropped(tmp_path: Path) -> None:
    stored = published(tmp_path, "hy-v3")
    stored["model.layers.3.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UnmappedTensor, match="shared_head"):
        to_megatron(HuggingFaceReader(tmp_path))


def test_a_size_of_hy3s_experts_that_transformers_does_not_heed_is_refused() -> None:
    config = pico.config("hy-v3")
    assert from_hf_config(config | {"expert_hidden_dim": 32}).moe
    with pytest.raises(DamagedCheckpoint, match="expert_hidden_dim"):
        from_hf_config(config | {"expert_hidden_dim": 48})


def test_more_than_the_one_layer_that_exaone_has_is_refused() -> None:
    config = pico.config("exaone-moe")
    with pytest.raises(UnknownArchitecture, match="num_nextn_predict_layers=2"):
        from_hf_config(config | {"num_nextn_predict_layers": 2})


@pytest.mark.parametrize("key", ["swiglu_limits", "sliding_windows"])
def test_what_transformers_does_not_compute_of_exaones_settings_is_refused(key: str) -> None:
    config = pico.config("exaone-moe")
    assert from_hf_config(config | {key: None}) == from_hf_config(config)
    with pytest.raises(UnknownArchitecture, match=f"{key}="):
        from_hf_config(config | {key: [4.0] * 4})


def test_mellum_says_what_its_prediction_layer_is_made_of() -> None:
    told = pico.config("mellum")
    config = {key: value for key, value in told.items() if key != "num_nextn_predict_layers"} | {"num_mtp_layers": 1}
    model = from_hf_config(config | {"mtp_mlp_layer_types": ["dense"]})
    assert model.mtp_dense and from_hf_config(to_hf_config(model, "bfloat16")) == model
    assert not from_hf_config(config | {"mtp_mlp_layer_types": ["sparse"]}).mtp_dense
    for key, value in {"mtp_layer_types": ["full_attention"], "num_mtp_layers": 2, "mtp_mlp_layer_types": [1]}.items():
        with pytest.raises(UnknownArchitecture, match=f"{key}="):
            from_hf_config(config | {key: value})


def test_a_dense_prediction_layer_beside_experts_is_not_what_megatron_core_builds(tmp_path: Path) -> None:
    """It builds one like the decoder's last layer: gpt_layer_specs.py, get_gpt_mtp_block_spec_for_backend."""
    published(tmp_path / "source", "exaone-moe")
    request = Request(tmp_path / "source", tmp_path / "megatron", "megatron")
    command = plan_command(request)
    assert any("mtp_dense True / False" in note for note in command.notes)
    assert "launch-args" not in next_step(request, command, compared=False)
    execute(command)
    with pytest.raises(UnknownArchitecture, match="mtp_dense"):
        launch(tmp_path / "megatron", "megatron-lm", None)
    assert any("mtp_dense" in note for note in launch(tmp_path / "megatron", "megatron-bridge", None).notes)


def test_nothing_is_said_of_a_prediction_layer_that_only_config_json_has(tmp_path: Path) -> None:
    published(tmp_path / "source", "exaone-moe")
    pico.save(tmp_path / "bare", "exaone-moe", dtype=torch.bfloat16)
    (tmp_path / "bare" / "config.json").write_bytes((tmp_path / "source" / "config.json").read_bytes())
    request = Request(tmp_path / "bare", tmp_path / "megatron", "megatron")
    command = plan_command(request)
    assert command.reader.model.mtp_dense and not any("mtp_dense" in note for note in command.notes)
    assert "launch-args" in next_step(request, command, compared=False)


@pytest.mark.parametrize("family", NAMES)
def test_inspect_tells_of_a_prediction_layer_that_is_there(tmp_path: Path, family: str) -> None:
    published(tmp_path / "source", family)
    pico.save(tmp_path / "bare", family, dtype=torch.bfloat16)
    (tmp_path / "bare" / "config.json").write_bytes((tmp_path / "source" / "config.json").read_bytes())
    execute(plan_command(Request(tmp_path / "source", tmp_path / "megatron", "megatron")))
    for name in ("source", "megatron", "bare"):
        description = describe(open_checkpoint(tmp_path / name))
        layers, there = dict(summary(description).rows)["layers"], name != "bare"
        assert layers.endswith("; 1 more of multi-token prediction") is there
        assert description["model"]["mtp_num_layers"] == there


@pytest.mark.parametrize("family", [*list(NAMES)[:1], *in_soak(*list(NAMES)[1:])])
def test_what_no_command_records_of_prediction_layers_is_not_asked_for(tmp_path: Path, family: str) -> None:
    """`calibrate` records what is computed; the advice is to leave these layers in BF16, and it can be followed."""
    source = tmp_path / "source"
    published(source, family)
    reader = HuggingFaceReader(source)
    states = recorded(reader)
    computed = {name: state for name, state in states.modules.items() if not name.startswith("mtp.")}
    assert computed and computed.keys() < states.modules.keys()
    sidecar.write(tmp_path / "state.fp8", replace(states, modules=computed))
    export = partial(Request.export, source, tmp_path / "out", "vllm", fp8_state=tmp_path / "state.fp8")
    layer = NAMES[family]["layer"]
    with pytest.raises(Unrecordable, match=re.escape(f"--exclude '{layer}*'")):
        plan_command(export(scheme="static"))
    with pytest.raises(RecipeError, match=re.escape(f"--exclude '{layer}*'")):
        plan_command(export())
    command = plan_command(export(exclude=(f"{layer}*",)))
    assert any(note.startswith("Scheme static") for note in command.notes)
    assert not [name for name in command.plan.codes if name.startswith(layer)]
    found = assess(reader, tmp_path / "state.fp8", lambda total: nullcontext(lambda done: None))
    assert {each.module for each in found.roles} == computed.keys()
    assert "never recorded" not in {finding.kind for each in found.roles for finding in each.findings}
    assert any("multi-token prediction" in note for note in found.notes)

"""The layer of multi-token prediction of Nemotron 3, attention and experts, which transformers leaves out: its names
are those of Megatron-Bridge's nemotron_h_bridge.py, and it goes to Megatron and comes back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_same_tensors, change_args, run
from in_memory import to_hf, to_megatron
from safetensors.torch import load_file, save_file
from soaking import first, in_soak
from torch import Tensor

from precisionctl.architectures.families import from_hf_config, from_megatron_args, to_hf_config
from precisionctl.architectures.megatron.megatron_args import to_megatron_args
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.megatron.arguments import saved_args
from precisionctl.checkpoints.megatron.provider import from_provider, to_provider
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.dtypes import DType
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Parallelism, TensorSpec
from precisionctl.precision import Precision
from precisionctl.trainer.measure.parameters import Parameters
from precisionctl.trainer.model.gpt import GPT
from precisionctl.verify.engine_rules import check

FAMILIES = ("nemotron-h", "nemotron-h-latent")
AROUND = {"enorm": 0, "hnorm": 0, "eh_proj": 0, "final_layernorm": 1}
"""What is not part of a block in Megatron, and beside which block it stands in Hugging Face."""


def published(folder: Path, family: str = "nemotron-h") -> dict[str, Tensor]:
    """As transformers saves a model, with a random prediction layer: attention as its layer has it, and experts."""
    model = pico.make_and_save(folder, family, dtype=torch.bfloat16)
    kinds, tensors = model.config.layers_block_type, load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    for block, kind in enumerate(("full_attention", "moe")):
        like = f"backbone.layers.{kinds.index(kind)}."
        for name in [name for name in tensors if name.startswith(like)]:
            tensors[name.replace(like, f"mtp.layers.{block}.")] = torch.randn_like(tensors[name])
    for name, block in AROUND.items():
        shape = (64, 128) if name == "eh_proj" else (64,)
        tensors[f"mtp.layers.{block}.{name}.weight"] = torch.randn(shape).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    config = json.loads((folder / "config.json").read_text()) | said
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def predicting() -> ModelShape:
    return from_hf_config(pico.config("nemotron-h") | {"num_nextn_predict_layers": 1})


@pytest.mark.parametrize("family", first(1, FAMILIES))
def test_it_has_megatrons_names_and_comes_back(tmp_path: Path, family: str) -> None:
    stored = published(tmp_path, family)
    reader = HuggingFaceReader(tmp_path)
    megatron = to_megatron(reader)
    for name, block in AROUND.items():  # three have one shape: a mix-up would come back unseen
        assert torch.equal(megatron.tensors[f"mtp.layers.0.{name}.weight"], stored[f"mtp.layers.{block}.{name}.weight"])
    inner = "mtp.layers.0.mtp_model_layer.layers."
    same = {
        "0.self_attention.linear_qkv.layer_norm_weight": "0.norm.weight",
        "0.self_attention.linear_proj.weight": "0.mixer.o_proj.weight",
        "1.pre_mlp_layernorm.weight": "1.norm.weight",
        "1.mlp.router.weight": "1.mixer.gate.weight",
        "1.mlp.experts.linear_fc2.weight3": "1.mixer.experts.3.down_proj.weight",
        "1.mlp.shared_experts.linear_fc1.weight": "1.mixer.shared_experts.up_proj.weight",
    }
    for ours, theirs in same.items():
        assert torch.equal(megatron.tensors[inner + ours], stored[f"mtp.layers.{theirs}"])
    assert (f"{inner}1.mlp.fc1_latent_proj.weight" in megatron.tensors) == (family == "nemotron-h-latent")
    for back in (to_hf(megatron).tensors, to_hf(reader).tensors):
        assert back.keys() == stored.keys()
        assert [name for name in stored if not torch.equal(back[name], stored[name])] == []


@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
def test_it_comes_back_from_the_last_of_several_ranks(tmp_path: Path, container: str) -> None:
    published(tmp_path / "hf")
    ranks = Parallelism(tensor=2, pipeline=2, expert=2)
    run(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=ranks, container=container)
    run(tmp_path / "m", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_torch_dist_keeps_the_name_that_hybrid_models_have_in_memory(tmp_path: Path) -> None:
    """multi_token_prediction.py, MultiTokenPredictionLayer.sharded_state_dict: only GPTs' layers get another one."""
    published(tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    found = dcp_metadata.read_index(tmp_path / "m" / "release").tensors
    assert "mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_qkv.weight" in found
    args = TorchDistReader(tmp_path / "m").args
    assert (args["mtp_num_layers"], args["mtp_hybrid_override_pattern"]) == (1, "*E")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_carries_exactly_the_parameters_of_the_plan(tmp_path: Path, family: str) -> None:
    published(tmp_path, family)
    megatron = to_megatron(HuggingFaceReader(tmp_path))
    model = GPT(megatron.model, Precision(fp8=False), dtype=torch.float32)
    assert {name: tuple(each.shape) for name, each in model.named_parameters()} == {
        name: tuple(each.shape) for name, each in megatron.tensors.items()
    }
    assert not any(each.requires_grad for name, each in model.named_parameters() if name.startswith("mtp."))
    matrices = sum(each.numel() for name, each in megatron.tensors.items() if each.dim() == 2)
    assert Parameters.of(megatron.model).all == matrices  # norms and biases are neglected


def test_its_linears_are_exported_as_those_of_other_layers(tmp_path: Path) -> None:
    published(tmp_path / "hf")
    execute(plan_command(Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "dynamic", keep_misfits=True)))
    assert check(HuggingFaceReader(tmp_path / "out"), engine_named("vllm")) == []
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["mtp.layers.0.mixer.o_proj.weight"].dtype == torch.float8_e4m3fn


def test_config_json_says_it_again(tmp_path: Path) -> None:
    model = predicting()
    assert model.mtp_num_layers == 1 and from_hf_config(to_hf_config(model, "bfloat16")) == model
    config = to_hf_config(model, "bfloat16")
    for key, kinds in (("mtp_hybrid_override_pattern", "*-"), ("mtp_layers_block_type", ["moe"])):
        with pytest.raises(UnknownArchitecture, match=f"{key}="):
            from_hf_config(config | {key: kinds})
        assert from_hf_config(config | {key: kinds, "num_nextn_predict_layers": 0}).mtp_num_layers == 0
    with pytest.raises(UnknownArchitecture, match="num_nextn_predict_layers=2"):
        from_hf_config(config | {"num_nextn_predict_layers": 2})
    with pytest.raises(DamagedCheckpoint, match="of a model without experts"):
        from_hf_config(
            {key: each for key, each in config.items() if "block" not in key} | {"hybrid_override_pattern": "M*"}
        )


def test_a_config_that_claims_one_without_tensors_is_read_without(tmp_path: Path) -> None:
    """As transformers saves it."""
    published(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if not name.startswith("mtp.")}, file)
    assert to_megatron(HuggingFaceReader(tmp_path)).model.mtp_num_layers == 0


# Megatron's arguments -------------------------------------------------------------------------------------------------


SAID: dict[str, dict[str, Any]] = {
    "by the older names": {},
    "behind the pattern": {
        **dict.fromkeys(("hybrid_override_pattern", "mtp_hybrid_override_pattern", "mtp_num_layers")),
        "hybrid_layer_pattern": "ME*|-M*/*E",
    },
    "repeated": {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},  # as NVIDIA trains Nemotron 3 Super
    "repeated, behind the pattern": {
        **dict.fromkeys(("hybrid_override_pattern", "mtp_hybrid_override_pattern")),
        "mtp_num_layers": 2,
        "mtp_use_repeated_layer": True,
        "hybrid_layer_pattern": "ME*-M*/*E/*E",
    },
}


@pytest.mark.parametrize("way", SAID)
def test_arguments_of_all_versions_say_it(way: str) -> None:
    model = predicting().padded(1)
    assert from_megatron_args(to_megatron_args(model) | SAID[way], 256, "args") == model


def test_a_checkpoint_without_config_json_comes_back_by_its_arguments(tmp_path: Path) -> None:
    published(tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    shutil.rmtree(tmp_path / "m" / "release" / "precisionctl" / "hf")
    change_args(tmp_path / "m" / "release", **SAID["repeated, behind the pattern"])
    run(tmp_path / "m", tmp_path / "back", "hf", architecture="nemotron_h")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_a_run_that_goes_along_predicts_as_many_tokens_as_before() -> None:
    model, weight = predicting().padded(1), {"weight": TensorSpec((1,), DType.bfloat16)}
    args = to_megatron_args(model) | SAID["repeated"]
    saved = saved_args(args, model, weight, Parallelism(), 7, "torch_dist")
    assert saved["mtp_num_layers"] == 2 and saved["mtp_use_repeated_layer"]
    assert from_megatron_args(saved, 256, "args") == model


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mtp_num_layers": 2}, "mtp_num_layers=2"),
        ({"mtp_hybrid_override_pattern": "*-"}, r"mtp_hybrid_override_pattern='\*-'"),
        ({"mtp_hybrid_override_pattern": None}, "mtp_hybrid_override_pattern=None"),
        ({"hybrid_layer_pattern": "ME*-M*/*E/*E"}, r"hybrid_layer_pattern='ME\*-M\*/\*E/\*E'"),
        ({"hybrid_layer_pattern": "ME*-M*/*-"}, "hybrid_layer_pattern="),
    ],
)
def test_others_are_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(UnknownArchitecture, match=named):
        from_megatron_args(to_megatron_args(predicting().padded(1)) | changes, 256, "args")


def test_bridges_description_says_it() -> None:
    args = to_megatron_args(predicting().padded(1)) | {"params_dtype": "bfloat16"}
    fields = to_provider(args)
    assert (fields["mtp_num_layers"], fields["mtp_hybrid_override_pattern"]) == (1, "*E")
    assert from_megatron_args(from_provider(fields), 256, "args").mtp_num_layers == 1

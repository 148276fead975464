"""Megatron-Bridge, NeMo 2 and Megatron-FSDP: what is around a checkpoint of Megatron's, and describes a model."""

import argparse
import dataclasses
import shutil
import warnings
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
import torch.distributed.checkpoint
import yaml
from conversions import assert_same_tensors, run
from dist_checkpoints import MODEL, NAMES, specs, values, write
from pico import FAMILIES
from torch.distributed.checkpoint import FileSystemWriter
from trained_models import config_of, moments, save, states, trained

from precisionctl.architectures.megatron.heterogeneous_args import ENCODED
from precisionctl.architectures.megatron.megatron_args import read_megatron_args, to_megatron_args
from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.megatron.carried_run import CarriedRun
from precisionctl.checkpoints.megatron.provider import describes, from_provider, to_provider
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint, PrecisionctlError

# fields of megatron.bridge.models.gpt_provider.GPTModelProvider that are not TransformerConfig's
OF_PROVIDER = {
    *("share_embeddings_and_output_weights", "make_vocab_size_divisible_by", "position_embedding_type", "rotary_base"),
    *("rotary_percent", "rope_scaling", "rope_scaling_factor", "seq_len_interpolation_factor", "seq_length"),
    *("vocab_size", "should_pad_vocab", "transformer_layer_spec", "hybrid_override_pattern"),
    *("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim", "yarn_correction_range_round_to_int"),
}
RUN = {"params_dtype": DType.bfloat16, "bf16": True, "fp16": False}


DESCRIBED = [family for family in FAMILIES if describes(pico.shape(family))]


def args_of(family: str) -> dict[str, Any]:
    return to_megatron_args(pico.shape(family).padded(1)) | RUN


@pytest.mark.parametrize("family", DESCRIBED)
def test_a_model_comes_back_from_its_description_for_bridge(family):
    args = args_of(family)
    described = yaml.safe_load(yaml.safe_dump(to_provider(args)))
    rows = args["padded_vocab_size"]
    assert read_megatron_args(from_provider(described), rows, "") == read_megatron_args(args, rows, "")


@pytest.mark.parametrize("family", ["nemotron-h", "deepseek-v3.2", "glm-moe-dsa"])
def test_fields_of_newer_bridges_are_read(family):
    """Nemotron's layers under the name that 0.4 to 0.6 have (mamba_builder.py, hybrid_provider.py), and an indexer as
    the provider of GLM-5 has it (glm5_bridge.py)."""
    args = args_of(family)
    fields = to_provider(args) | {"dsa_indexer_rotate_activation": False}
    if pattern := fields.pop("hybrid_override_pattern", None):
        fields |= {"hybrid_override_pattern": None, "hybrid_layer_pattern": f"{pattern[:2]}|{pattern[2:]}"}
    else:
        words = ("experimental_attention_variant", "dsa_")
        fields |= {name: value for name, value in args.items() if name.startswith(words)}
    rows = args["padded_vocab_size"]
    assert read_megatron_args(from_provider(fields), rows, "") == read_megatron_args(args, rows, "")


@pytest.mark.parametrize("family", [family for family in DESCRIBED if family != "kimi-k3"])
def test_megatron_core_makes_the_same_config_of_the_description_as_of_the_arguments(family):
    """Bridge's providers are dataclasses that add fields to megatron-core's: it gets every field that we write, but
    some of Kimi K3's, whose provider and layers are Bridge's own (tests/families/test_kimi_k3.py)."""
    with warnings.catch_warnings(action="ignore"):
        from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    args, described = args_of(family), to_provider(args_of(family))
    kind = MLATransformerConfig if args["multi_latent_attention"] else TransformerConfig
    kind = HeterogeneousTransformerConfig if ENCODED in args else kind
    known = {field.name for field in dataclasses.fields(kind)}
    assert described.keys() <= known | OF_PROVIDER | {"_target_"}
    fields = {name: _object(value) for name, value in described.items() if name in known}
    with warnings.catch_warnings(action="ignore"):
        config = kind(**fields)
        if "linear_attention_freq" in args:  # as Bridge's own provider has it; making it asks for a GPU
            made = described["transformer_layer_spec"]
            assert _object(made).__name__ == "get_transformer_block_with_experimental_attention_variant_spec"
        elif "hybrid_override_pattern" in args:  # from which Bridge's provider makes the layers by itself
            assert "transformer_layer_spec" not in described
        elif args["num_experts"]:  # as Bridge's own providers of families with experts have it
            made = described["transformer_layer_spec"]
            block = _named(made)(config, use_transformer_engine=False, pp_rank=0)  # True asks for a GPU
            assert (made["_partial_"], made["use_transformer_engine"]) == (True, True)
            experts = ["MoE" in layer.submodules.mlp.module.__name__ for layer in block.layer_specs]
            frequency = config.moe_layer_freq
            assert experts == ([True] * config.num_layers if frequency == 1 else [bool(each) for each in frequency])
    if ENCODED in args:
        sizes = pico.shape(family).heterogeneous
        blocks = config.per_block_parameters
        assert tuple(block.attention.num_query_groups or 0 for block in blocks) == sizes.num_query_groups
        assert tuple(block.mlp.ffn_hidden_size or 0 for block in blocks) == sizes.ffn_hidden_size
    for field, argument in (("num_moe_experts", "num_experts"), ("normalization",) * 2, ("layernorm_epsilon",) * 2):
        assert getattr(config, field) == args[argument]
    assert config.gated_linear_unit == (args["swiglu"] or args.get("gated_linear_unit", False))


def _object(value: Any) -> Any:
    """What Bridge's `instantiate` makes of a name that is not to be called."""
    if not isinstance(value, dict):
        return value
    assert value["_call_"] is False
    return _named(value)


def _named(value: dict[str, Any]) -> Any:
    module, _, name = value["_target_"].rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)


def test_a_checkpoint_has_what_bridge_reads_of_its_run(tmp_path):
    write(tmp_path, values(specs()), run=CarriedRun(args={"no_save_optim": False}))
    config = yaml.safe_load((tmp_path / "run_config.yaml").read_text())
    assert config["model"]["_target_"] == "megatron.bridge.models.gpt_provider.GPTModelProvider"
    assert config["model"]["tensor_model_parallel_size"] == config["model"]["pipeline_model_parallel_size"] == 1
    assert config["checkpoint"] == {
        "save_optim": True,
        "save_rng": False,
        "fully_parallel_save": True,
        "ckpt_format": "torch_dist",
    }


def without_arguments(directory: Path) -> None:
    """As Bridge and NeMo write it: no `args` in common.pt."""
    torch.save({"iteration": 5, "checkpoint_version": 3.0}, directory / "common.pt")


def test_bridges_directory_is_read(tmp_path):
    write(tmp_path / "iter_0000005", values(specs()), run=CarriedRun(5))
    without_arguments(tmp_path / "iter_0000005")
    torch.save(
        {"step": torch.tensor(5), "consumed_train_samples": torch.tensor(80)}, tmp_path / "latest_train_state.pt"
    )
    reader = open_checkpoint(tmp_path)
    assert reader.iteration == 5
    assert reader.model == MODEL


def test_nemos_directory_is_read(tmp_path):
    write(tmp_path / "weights", values(specs()))
    config = yaml.safe_load((tmp_path / "weights" / "run_config.yaml").read_text())["model"]
    (tmp_path / "weights" / "run_config.yaml").unlink()
    without_arguments(tmp_path / "weights")
    (tmp_path / "context").mkdir()
    text = yaml.safe_dump({"_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel", "config": config})
    (tmp_path / "context" / "model.yaml").write_text(
        text + "data: !!python/object/apply:os.system ['touch executed']\n"
    )
    assert open_checkpoint(tmp_path).model == MODEL
    assert not Path("executed").exists()


def verls(tmp_path: Path, place: str) -> Path:
    """`actor` as verl's Megatron workers write it: no arguments beside the tensors, config and tokenizer in
    `huggingface` (verl 0.9 utils/checkpoint/megatron_checkpoint_manager.py; before, without `model`)."""
    pico.save(tmp_path / "hf", "qwen3", dtype=torch.bfloat16)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    run(tmp_path / "hf", tmp_path / "dist", "megatron")
    actor = tmp_path / "actor"
    shutil.copytree(tmp_path / "dist" / "release", actor / place / "dist_ckpt")
    shutil.rmtree(actor / place / "dist_ckpt" / "precisionctl")
    (actor / place / "dist_ckpt" / "run_config.yaml").unlink()
    torch.save({}, actor / place / "dist_ckpt" / "common.pt")
    (actor / place / "huggingface").mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(tmp_path / "hf" / name, actor / place / "huggingface")
    return actor


@pytest.mark.parametrize("given", ["actor", "dist_ckpt"])
@pytest.mark.parametrize("place", [".", "model"])
def test_verls_directory_is_read_with_the_config_beside_it(tmp_path: Path, place: str, given: str) -> None:
    actor = verls(tmp_path, place)
    run(actor if given == "actor" else actor / place / "dist_ckpt", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_verls_optimizer_in_a_directory_of_its_own_comes_with_the_model(tmp_path: Path) -> None:
    """As verl 0.9 divides what Megatron writes in one."""
    actor = verls(tmp_path, "model")
    model, optimizer = trained("qwen3")
    save(tmp_path / "pytorch", states(model, optimizer))
    run(config_of(model, tmp_path / "pytorch"), tmp_path / "whole", "megatron", "bf16")
    whole = next((tmp_path / "whole").glob("iter_*"))
    shutil.rmtree(actor / "model" / "dist_ckpt")
    index, common = dcp_metadata.read_index(whole), torch.load(whole / "common.pt", weights_only=False)
    for part, of_part in (("model", False), ("optimizer", True)):
        shutil.copytree(whole, actor / part / "dist_ckpt")
        tensors = {key: one for key, one in index.tensors.items() if key.startswith("optimizer.") == of_part}
        dcp_metadata.write_index(actor / part / "dist_ckpt", dcp_metadata.Index(tensors, {}))
        torch.save({"optimizer": common["optimizer"]} if of_part else {}, actor / part / "dist_ckpt" / "common.pt")
    (actor / "model" / "dist_ckpt" / "run_config.yaml").unlink()
    run(actor, tmp_path / "back", "hf", container="dcp")
    back: Any = open_checkpoint(tmp_path / "back")
    assert back.trainer_run.updates == 2 and back.trainer_run.settings["betas"] == (0.9, 0.95)
    for name, tensor in moments(model, optimizer, "exp_avg").items():
        assert torch.equal(read_tensor(WithOptimizer(back), f"optimizer.state.exp_avg.{name}"), tensor), name
    torch.save([1], actor / "optimizer" / "dist_ckpt" / "common.pt")
    with pytest.raises(DamagedCheckpoint, match="common data is not a dict .*optimizer/dist_ckpt/common.pt"):
        run(actor, tmp_path / "never", "hf")


def test_a_checkpoint_that_says_no_model_asks_for_a_reference_of_which_config_and_tokenizer_are_enough(
    tmp_path: Path,
) -> None:
    actor = verls(tmp_path, ".")
    (actor / "huggingface").rename(tmp_path / "reference")
    with pytest.raises(CheckpointError, match="does not say which model.*--reference") as refused:
        run(actor, tmp_path / "back", "hf")
    assert not isinstance(refused.value, DamagedCheckpoint)
    run(actor, tmp_path / "back", "hf", reference=tmp_path / "reference")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    run(actor, tmp_path / "again", "hf", reference=tmp_path / "dist")
    assert_same_tensors(tmp_path / "hf", tmp_path / "again")
    (tmp_path / "reference" / "config.json").unlink()
    with pytest.raises(PrecisionctlError):
        run(actor, tmp_path / "other", "hf", reference=tmp_path / "reference")


def test_config_and_tokenizer_of_verls_are_not_looked_for_behind_a_link(tmp_path: Path) -> None:
    actor = verls(tmp_path, ".")
    (actor / "huggingface").rename(tmp_path / "elsewhere")
    (actor / "huggingface").symlink_to(tmp_path / "elsewhere")
    assert not open_checkpoint(actor).companions.files


@pytest.mark.parametrize("step", [{}, {"step": torch.tensor(-1)}, {"step": torch.tensor([1, 2])}, {"step": "5"}, 5])
def test_a_training_state_without_a_step_is_refused(tmp_path, step):
    write(tmp_path / "iter_0000005", values(specs()))
    torch.save(step, tmp_path / "latest_train_state.pt")
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


HOSTILE = {
    "python": "model: !!python/object/apply:os.system ['touch executed']\n",
    "merge": "a: &a {x: 1}\nmodel:\n  <<: [*a, *a]\n",
    "deep": "model: " + "[" * 5000,
    "list": "[]",
    "unhashable": "model: {[1]: 2}",
    "binary": "\0",
    "not a size": "model: {num_layers: .inf, hidden_size: 16, num_attention_heads: 4}",
}


@pytest.mark.parametrize("content", HOSTILE)
def test_a_hostile_description_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "release", values(specs()))
    without_arguments(tmp_path / "release")
    (tmp_path / "release" / "run_config.yaml").write_text(HOSTILE[content])
    with pytest.raises(CheckpointError):
        _ = TorchDistReader(tmp_path / "release").model
    assert not Path("executed").exists()


def fsdp_name(name: str) -> str:
    return f"model.module.{name}"


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_the_index_of_megatron_fsdps_checkpoint_is_read_once(tmp_path, monkeypatch):
    """Of a large model it takes seconds."""
    state = {fsdp_name(name): tensor for name, tensor in values(specs()).items()}
    torch.distributed.checkpoint.save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    read, times = dcp_metadata.read_index, list[Path]()
    monkeypatch.setattr(dcp_metadata, "read_index", lambda directory: times.append(directory) or read(directory))
    assert open_checkpoint(tmp_path).container == "fsdp_dtensor" and times == [tmp_path]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_megatron_fsdps_checkpoint_is_read(tmp_path):
    """As megatron/core/transformer/fsdp_dtensor_checkpoint.py names it, written by PyTorch."""
    tensors = values(specs())
    expert = {f"decoder.layers.1.mlp.experts.linear_fc1.weight{number}": torch.randn(12, 4) for number in range(3)}
    state: dict[str, Any] = {"args": argparse.Namespace(**to_megatron_args(MODEL)), "iteration": 4}
    moments: dict[str, torch.Tensor] = {}
    for name, tensor in (tensors | expert).items():
        halves = {f"{name}_w": tensor.chunk(2)[0], f"{name}_v": tensor.chunk(2)[1]} if "fc1.weight" in name else {}
        for stored, part in (halves or {name: tensor}).items():
            state[fsdp_name(stored)] = part.contiguous()
            moment = part.float() * 2
            of = f"optimizer.state.module.module.module.{stored}"
            state |= {f"{of}.exp_avg": moment, f"{of}.exp_avg_sq": moment.abs(), f"{of}.step": torch.tensor(6.0)}
            decays = {"wd_mult": float(tensor.dim() > 1), "weight_decay": 0.1 * (tensor.dim() > 1), "lr": 2e-3}
            for key, value in (decays | {"max_lr": 4e-3, "betas": (0.9, 0.95), "eps": 1e-8}).items():
                state[f"optimizer.param_to_group_meta.module.module.module.{stored}.{key}"] = value
        moments[f"optimizer.state.exp_avg.{name}"] = tensor.float() * 2
        moments[f"optimizer.state.exp_avg_sq.{name}"] = (tensor.float() * 2).abs()
        if tensor.dtype == torch.float32:
            moments[f"optimizer.state.param.{name}"] = tensor
    path = tmp_path / "iter_0000004"
    torch.distributed.checkpoint.save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    reader = open_checkpoint(tmp_path)
    assert isinstance(reader, TorchDistReader)
    assert reader.container == "fsdp_dtensor"
    assert reader.model == MODEL
    assert reader.iteration == 4
    assert reader.fp8 is None
    assert reader.specs.keys() == NAMES.keys() | expert.keys()
    for name, tensor in (tensors | expert).items():
        assert torch.equal(read_tensor(reader, name), tensor), name
    state_of = argparse.Namespace(specs=reader.optimizer_specs, chunks=reader.chunks)
    assert reader.optimizer_specs.keys() == moments.keys()
    assert all(torch.equal(read_tensor(state_of, name), moment) for name, moment in moments.items())
    inner = reader.common["optimizer"]["optimizer"]
    assert inner["state"] == {"common_step": 6}
    assert [(group["wd_mult"], group["betas"]) for group in inner["param_groups"]] == [
        (1.0, (0.9, 0.95)),
        (0.0, (0.9, 0.95)),
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_megatron_fsdps_run_goes_on_with_masters_and_moments_to_the_last_bit(tmp_path: Path) -> None:
    model, optimizer = trained("qwen3")
    run(config_of(model, save(tmp_path / "run", states(model, optimizer))), tmp_path / "whole", "megatron")
    whole: Any = open_checkpoint(tmp_path / "whole")
    state: dict[str, Any] = {
        "args": argparse.Namespace(**whole.args | {"params_dtype": torch.bfloat16}),
        "iteration": 2,
    }
    for name in whole.specs:
        of = "optimizer.state.module.module.module."
        keys = {
            "": fsdp_name(name),
            **{f"optimizer.state.{kind}.": f"{of}{name}" for kind in ("exp_avg", "exp_avg_sq")},
        }
        ends = ("_w", "_v") if "fc1.weight" in name else ("",)
        for prefix, key in keys.items():
            parts = read_tensor(WithOptimizer(whole), prefix + name).chunk(len(ends))
            kind = prefix.removeprefix("optimizer.state")[:-1]
            state |= {f"{key}{end}{kind}": part.contiguous() for end, part in zip(ends, parts, strict=True)}
        settings = {"wd_mult": 1.0, "weight_decay": 0.1, "lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-8, "step": 2}
        state |= {
            f"optimizer.param_to_group_meta.module.module.module.{name}.{key}": one for key, one in settings.items()
        }
    save(tmp_path / "fsdp" / "iter_0000002", state)
    run(tmp_path / "fsdp" / "iter_0000002", tmp_path / "megatron", "megatron", "bf16")
    run(tmp_path / "megatron", tmp_path / "back", "hf", container="dcp")
    state["optimizer.state.module.module.module.decoder.final_layernorm.weight.step"] = torch.tensor(1.0)
    state["optimizer.state.module.module.module.output_layer.weight.step"] = torch.tensor(2.0)
    other = save(tmp_path / "other" / "iter_0000002", state)
    with pytest.raises(CheckpointError, match=r"different numbers of updates: \[1, 2\].*--drop-optimizer"):
        run(other, tmp_path / "refused", "megatron")
    run(other, tmp_path / "dropped", "megatron", drop_optimizer=True)
    back: Any = open_checkpoint(tmp_path / "back")
    assert (back.trainer_run.updates, back.trainer_run.settings["betas"]) == (2, (0.9, 0.95))
    for name, parameter in model.named_parameters():
        assert torch.equal(read_tensor(back, name), parameter), name
        moment = read_tensor(WithOptimizer(back), f"optimizer.state.exp_avg.{name}")
        assert torch.equal(moment, optimizer.state[parameter]["exp_avg"]), name


@pytest.mark.parametrize("prefix", ["module.", "model.", "model.module."])
def test_names_with_a_prefix_are_the_names(tmp_path, prefix):
    write(tmp_path, values(specs()))
    names = TorchDistReader(tmp_path).specs.keys()
    index = dcp_metadata.read_index(tmp_path)
    moved = {prefix + key: tensor for key, tensor in index.tensors.items()}
    dcp_metadata.write_index(tmp_path, dcp_metadata.Index(moved, index.objects))
    assert TorchDistReader(tmp_path).specs.keys() == names


def test_a_half_without_its_other_half_stays_under_its_own_name(tmp_path):
    write(tmp_path, values(specs()))
    index = dcp_metadata.read_index(tmp_path)
    key = "decoder.layers.mlp.linear_fc1.weight"
    renamed = {f"{key}_w" if name == key else name: tensor for name, tensor in index.tensors.items()}
    dcp_metadata.write_index(tmp_path, dcp_metadata.Index(renamed, index.objects))
    assert "decoder.layers.0.mlp.linear_fc1.weight_w" in TorchDistReader(tmp_path).specs


def test_no_two_tensors_have_one_name(tmp_path):
    write(tmp_path, values(specs()))
    index = dcp_metadata.read_index(tmp_path)
    key = "decoder.final_layernorm.weight"
    embedding = {f"module.{name}": tensor for name, tensor in index.tensors.items()}
    dcp_metadata.write_index(tmp_path, dcp_metadata.Index(embedding | {key: index.tensors[key]}, index.objects))
    with pytest.raises(DamagedCheckpoint, match="there twice"):
        TorchDistReader(tmp_path)

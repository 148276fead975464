"""Nemotron-H: layers of one block each, some of them Mamba-2 mixers, convert and export; the trainer refuses them."""

from contextlib import suppress
from pathlib import Path

import pico
import pytest
import torch
from conversions import run
from safetensors.torch import load_file, save_file
from training import make_text, settings

from precisionctl.architectures.families import from_hf_config, from_megatron_args, to_hf_config
from precisionctl.architectures.megatron_args import otherwise_in_megatron, to_megatron_args
from precisionctl.checkpoints import dcp
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.codes import engine_named
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, ShapeMismatch, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.trainer.resume import resume
from precisionctl.verify.engine_rules import check

CUTS = {"TP 2, PP 2, EP 2": Parallelism(tensor=2, pipeline=2, expert=2), "TP 4": Parallelism(tensor=4, expert_tensor=1)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nemotron")
    pico.save(path, "nemotron-h", dtype=torch.bfloat16)
    return path


def assert_same(one: Path, other: Path) -> None:
    before, after = (load_file(path / "model.safetensors") for path in (one, other))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize(
    ("cut", "container"),
    [("TP 2, PP 2, EP 2", "torch_dist"), ("TP 2, PP 2, EP 2", "torch"), ("TP 4", "torch_dist")],
)
def test_it_comes_back_from_megatron_to_the_last_bit(source: Path, tmp_path: Path, cut: str, container: str) -> None:
    run(source, tmp_path / "m", "megatron", parallelism=CUTS[cut], container=container, workers=1)
    run(tmp_path / "m", tmp_path / "back", "hf", workers=1)
    assert_same(source, tmp_path / "back")


def test_torch_dist_has_the_names_and_parts_of_megatron_cores_hybrid_stack(source: Path, tmp_path: Path) -> None:
    """As MambaMixer.sharded_state_dict cuts them: z, x, B, C and dt, each by itself."""
    run(source, tmp_path / "m", "megatron", parallelism=Parallelism(tensor=2), workers=1)
    found = {name: tensor.shape for name, tensor in dcp.read_index(tmp_path / "m" / "release").tensors.items()}
    mixer, parts = "decoder.layers.0.mixer.", {"z": 128, "x": 128, "B": 32, "C": 32, "dt": 8}
    expected = {f"{mixer}in_proj.weight.{part}": (rows, 64) for part, rows in parts.items()}
    expected |= {f"{mixer}conv1d.weight.{part}": (parts[part], 1, 4) for part in ("x", "B", "C")}
    expected |= {f"{mixer}conv1d.bias.{part}": (parts[part],) for part in ("x", "B", "C")}
    expected |= {mixer + name: (8,) for name in ("A_log", "D", "dt_bias")}
    expected |= {f"{mixer}in_proj.layer_norm_weight": (64,), f"{mixer}norm.weight": (128,)}
    expected |= {f"{mixer}out_proj.weight": (64, 128)}
    assert {name: shape for name, shape in found.items() if name.startswith(mixer)} == expected
    others = ("1.pre_mlp_layernorm.weight", "2.self_attention.linear_qkv.layer_norm_weight")
    others += ("3.mlp.linear_fc1.layer_norm_weight", "1.mlp.shared_experts.linear_fc2.weight")
    assert {f"decoder.layers.{name}" for name in others} | {"decoder.final_norm.weight"} <= found.keys()


def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "nemotron-h", n_groups=1)
    with pytest.raises(ShapeMismatch, match=r"mixer.in_proj.weight.*cannot be cut into 2"):
        plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=Parallelism(2)))


def test_names_in_memory_are_read_and_written_as_published(source: Path, tmp_path: Path) -> None:
    theirs = pico.make("nemotron-h", dtype=torch.bfloat16)
    (tmp_path / "memory").mkdir()
    save_file(theirs.state_dict(), tmp_path / "memory" / "model.safetensors", metadata={"format": "pt"})
    theirs.config.save_pretrained(tmp_path / "memory")
    run(tmp_path / "memory", tmp_path / "m", "megatron", workers=1)
    run(tmp_path / "m", tmp_path / "back", "hf", workers=1)
    assert_same(source, tmp_path / "back")


def test_transformers_computes_the_same_with_a_config_that_is_written() -> None:
    theirs = pico.make("nemotron-h")
    model = from_hf_config(theirs.config.to_dict())
    ours = type(theirs)(type(theirs.config)(**to_hf_config(model, "float32") | pico.NO_TOKENS))
    ours = pico.as_its_config_says(ours.eval())
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(0, 250, (2, 40))
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_megatrons_arguments_describe_it() -> None:
    model = pico.shape("nemotron-h").padded(1)
    assert not otherwise_in_megatron(model)
    told = from_megatron_args(to_megatron_args(model), model.padded_vocab_size, "")
    assert told.architecture == "nemotron_h" and not told.differences(model)


SCHEMES = ("block", "mxfp8", "nvfp4a16", "mxfp4", "w4a16")


@pytest.mark.parametrize("scheme", ["dynamic", *(pytest.param(name, marks=pytest.mark.soak) for name in SCHEMES)])
def test_it_is_exported(source: Path, tmp_path: Path, scheme: str) -> None:
    execute(plan_command(Request.export(source, tmp_path / "out", "vllm", scheme, keep_misfits=True)), workers=1)
    assert check(open_checkpoint(tmp_path / "out"), engine_named("vllm")) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("moe_latent_size", 32), ("num_nextn_predict_layers", 1), ("mlp_hidden_act", "silu"), ("conv_kernel", 3)],
)
def test_what_the_table_does_not_say_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnknownArchitecture, match=key):
        from_hf_config(pico.make("nemotron-h").config.to_dict() | {key: value})


JUNK = (-1, 0, 3.5, "", "MX", [], ["mlp"], [None], ["magic"] * 6, {"a": 1}, True)


@pytest.mark.parametrize("key", ["hybrid_override_pattern", "layers_block_type", "n_groups", "n_shared_experts"])
def test_junk_in_its_config_is_one_error(key: str) -> None:
    config = to_hf_config(pico.shape("nemotron-h"), "bfloat16")
    for junk in JUNK:
        with suppress(DamagedCheckpoint, UnknownArchitecture):
            from_hf_config(config | {key: junk})


def test_the_trainer_refuses_it_by_name(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "m", "megatron", workers=1)
    data = make_text(tmp_path / "text.txt")
    with pytest.raises(PrecisionctlError, match="`nemotron_h` is not computed here with mamba=a Mamba2"):
        resume(settings(tmp_path / "m", data, tmp_path / "run", "bf16"), lambda started: None, lambda step: None)

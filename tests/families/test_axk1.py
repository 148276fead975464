"""A.X K1 as published: without a bias that chooses experts, and with a norm in dense layers that nothing reads."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from command_line import run as command_line
from conversions import run
from gpt_models import VOCABULARY, as_gpt, clear_tokens
from in_memory import to_megatron
from installed import BEFORE_5_23
from safetensors.torch import load_file, save_file
from training import SMALL, make_source, make_text
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, UnknownArchitecture
from precisionctl.model.same_model import differences
from precisionctl.reports.inspect import describe

pytestmark = pytest.mark.skipif("axk1" in pico.ABSENT, reason="this transformers has no A.X K1")

BIAS, NORM, POST_NORM = "mlp.gate.e_score_correction_bias", "post_mlp_layernorm.weight", "post_layernorm.weight"


def publish(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A directory as the released one."""
    pico.save(directory, "axk1", dtype=dtype)
    stored = {n: each for n, each in load_file(directory / "model.safetensors").items() if not n.endswith(BIAS)}
    unused = torch.randn_like(stored[f"model.layers.1.{NORM}"])
    save_file(stored | {f"model.layers.0.{NORM}": unused}, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return publish(tmp_path / "hf")


def test_it_comes_back_bit_for_bit_and_with_a_bias_of_zeros(published: Path, tmp_path: Path) -> None:
    run(published, tmp_path / "m", "megatron")
    run(tmp_path / "m", tmp_path / "back", "hf")
    stored, back = load_file(published / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert [name for name in stored if name not in back or not torch.equal(stored[name], back[name])] == []
    added = back.keys() - stored.keys()
    assert added == {f"model.layers.{layer}.{BIAS}" for layer in (1, 2)}
    assert not any(back[name].any() for name in added)


def test_from_hugging_face_to_hugging_face_nothing_is_added(published: Path, tmp_path: Path) -> None:
    run(published, tmp_path / "copy", "hf")
    stored, copied = load_file(published / "model.safetensors"), load_file(tmp_path / "copy/model.safetensors")
    assert stored.keys() == copied.keys()
    assert [name for name in stored if not torch.equal(stored[name], copied[name])] == []


def test_its_logits_are_those_of_transformers(tmp_path: Path) -> None:
    published = publish(tmp_path / "hf", torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32).eval()
    made = to_megatron(HuggingFaceReader(published))
    ours = as_gpt(made)
    tokens = clear_tokens(ours, (2, 30))
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = ours(tokens)[..., :VOCABULARY]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.std()))


def test_inspect_says_what_its_tensors_show(published: Path) -> None:
    described = describe(open_checkpoint(published))["model"]
    assert described["stores_unused"] and not described["hf_expert_bias"]


@pytest.mark.skipif(BEFORE_5_23, reason="transformers' class has no mlp_layer_types before 5.23")
@pytest.mark.parametrize(
    "said",
    [
        {"mlp_layer_types": None},
        {"mlp_layer_types": None, "first_k_dense_replace": 2},
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "first_k_dense_replace": 3},
        {"num_local_experts": 8},
        {"n_group": 1, "topk_group": 1},
    ],
    ids=str,
)
def test_layers_and_experts_are_those_of_transformers(said: dict[str, Any]) -> None:
    theirs = CONFIG_MAPPING["axk1"].from_dict(pico.config("axk1", **said))
    ours = from_hf_config(pico.config("axk1", **said))
    assert differences(ours, from_hf_config(theirs.to_dict())) == {}
    sparse = [kind == "sparse" for kind in theirs.mlp_layer_types]
    assert [ours.has_experts(layer) for layer in range(3)] == sparse


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ({"moe_layer_freq": 2}, UnknownArchitecture, "moe_layer_freq=2"),
        ({"rope_interleave": False}, UnknownArchitecture, "rope_interleave=False"),
        ({"rope_interleave": None}, UnknownArchitecture, "rope_interleave=None"),
        ({"norm_topk_prob": None}, UnknownArchitecture, "norm_topk_prob=None"),
        ({"attention_bias": True}, UnknownArchitecture, "attention_bias=True"),
        ({"head_dim": 16}, DamagedCheckpoint, "head_dim is 16 and qk_rope_head_dim"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(
    said: dict[str, Any], error: type[PrecisionctlError], words: str
) -> None:
    with pytest.raises(error, match=words):
        from_hf_config(pico.config("axk1", **said))


@pytest.mark.soak
def test_training_carries_the_norm_that_nothing_reads(tmp_path: Path) -> None:
    published = make_source(tmp_path / "hf", family="axk1", **pico.fp8_sizes("axk1"))
    file = published / "model.safetensors"
    stored = load_file(file)
    unused = torch.randn_like(stored[f"model.layers.1.{NORM}"]).bfloat16()
    save_file(stored | {f"model.layers.0.{NORM}": unused}, file, {"format": "pt"})
    keys = {**SMALL, "train.steps": 1, "schedule.kind": "constant", "optimizer.lr": 0.01}
    settings = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    data = make_text(tmp_path / "text.txt")
    command = ("resume", published, "--precision", "fp8", "--data", data, "--out", tmp_path / "out")
    done = command_line(*command, "--backend", "emulated", *settings)
    assert done.exit_code == 0, done.stderr
    assert "parameters that nothing reads are carried along as they are" in done.stdout + done.stderr
    saved = open_checkpoint(tmp_path / "out")
    assert isinstance(saved, TorchDistReader)
    assert [name for name in saved.specs if ".unused_" in name] == [f"decoder.layers.0.mlp.unused_{POST_NORM}"]
    assert not [name for name in saved.optimizer_specs if ".unused_" in name]
    run(tmp_path / "out", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back/model.safetensors")
    assert torch.equal(back[f"model.layers.0.{NORM}"], unused)
    assert not torch.equal(back[f"model.layers.1.{NORM}"], stored[f"model.layers.1.{NORM}"].bfloat16())

"""torchtitan's checkpoints of other models than Llama are read and written under its names. tests/peers has torchtitan
itself."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conversions
import pico
import pytest
import torch
import torch.distributed.checkpoint as dcp
from prediction_layer import add_mtp
from safetensors.torch import load_file
from soaking import in_soak
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from trained_models import config_of, save, states, trained

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.errors import MappingError, PrecisionctlError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STACK = "moe.routed_experts.inner_experts."

NAMES = (
    ("self_attn.q_a_layernorm", "attention.q_norm"),
    ("self_attn.kv_a_layernorm", "attention.kv_norm"),
    ("self_attn.kv_a_proj_with_mqa", "attention.wkv_a"),
    ("self_attn.kv_b_proj", "attention.wkv_b"),
    ("self_attn.q_a_proj", "attention.wq_a"),
    ("self_attn.q_b_proj", "attention.wq_b"),
    ("self_attn.o_proj", "attention.wo"),
    ("self_attn.", "attention."),
    ("post_attention_layernorm", "ffn_norm"),
    ("input_layernorm", "attention_norm"),
    ("embed_tokens", "tok_embeddings"),
    ("mlp.gate.e_score_correction_bias", "moe.expert_bias_E"),
    ("mlp.gate.", "moe.router.gate."),
    ("mlp.router.", "moe.router.gate."),
    ("feed_forward.router.", "moe.router.gate."),
    ("feed_forward.shared_expert.", "moe.shared_experts."),
    ("mlp.shared_experts.", "moe.shared_experts."),
    ("mlp.", "feed_forward."),
    ("gate_proj", "w1"),
    ("down_proj", "w2"),
    ("up_proj", "w3"),
)
"""From the keys of torchtitan's adapters, in this order."""


def in_torchtitan(family: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What torchtitan has for a model of transformers. Its experts are `[experts, out, in]`, as its grouped matrix
    products need them."""
    found = dict[str, Tensor]()
    for name, tensor in state.items():
        name = name.removeprefix("model.")
        if match := re.fullmatch(r"(layers\.\d+\.)(?:mlp|feed_forward)\.experts\.(\w+)", name):
            place, kind = f"{match[1]}{STACK}", match[2]
            matrix = tensor.transpose(1, 2) if family in ("gpt-oss", "llama4") and "bias" not in kind else tensor
            if family == "gpt-oss":
                kind = kind.replace("gate_up_proj", "mlp1_weight").replace("down_proj", "mlp2_weight")
                suffix = {"mlp1_weight": "_EGD", "mlp2_weight": "_EDF", "mlp1_bias": "_EG", "mlp2_bias": "_ED"}
                kind = kind.replace("weight_bias", "bias")
                found[f"{place}{kind}{suffix[kind]}"] = matrix.contiguous()
            elif kind == "down_proj":
                found[f"{place}w2_EDF"] = matrix.contiguous()
            else:
                for new, half in zip(("w1_EFD", "w3_EFD"), matrix.chunk(2, 1), strict=True):
                    found[f"{place}{new}"] = half.contiguous()
            continue
        for old, new in NAMES:
            name = name.replace(old, new)
        latent = family.startswith("deepseek")
        found[re.sub(r"attention\.([qkv])_proj", rf"attention.{'' if latent else 'qkv_linear.'}w\1", name)] = tensor
    return found


def older(name: str) -> str:
    """The name in torchtitan 0.2.2."""
    name = name.replace(STACK, "moe.experts.").replace("qkv_linear.", "").replace("lm_head", "output")
    return re.sub(r"(moe\.\w+(?:\.w\d|\.mlp\d_\w+?)?)_E[DFG]*$", r"\1", name)


@pytest.mark.parametrize(
    ("family", "rename"),
    [
        *((family, str) for family in ("qwen3", "qwen3-moe", "deepseek-v2", "deepseek-v3", "gpt-oss")),
        *((family, older) for family in ("qwen3-moe", "gpt-oss", "llama4")),
    ],
)
def test_its_models_are_those_of_transformers(tmp_path: Path, family: str, rename: Callable[[str], str]) -> None:
    model = pico.make_and_save(tmp_path / "hf", family)
    stored = {rename(name): tensor for name, tensor in in_torchtitan(family, model.state_dict()).items()}
    made = save(tmp_path / "step-1", stored)
    conversions.run(made, tmp_path / "out", "hf", reference=tmp_path / "hf")
    theirs, ours = (load_file(tmp_path / each / "model.safetensors") for each in ("hf", "out"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", *in_soak("qwen3", "deepseek-v3")])
def test_what_is_written_has_its_names_and_comes_back_with_the_optimizer(tmp_path: Path, family: str) -> None:
    model, optimizer = trained(family)
    made = config_of(model, save(tmp_path / "made", states(model, optimizer)))
    for to in ("torchtitan", "dcp"):
        conversions.run(made, tmp_path / to, "hf", container=to, verify=True)
    conversions.run(tmp_path / "torchtitan", tmp_path / "back", "hf", container="dcp")
    for name in (".metadata", "__0_0.distcp", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "dcp" / name).read_bytes()
    keys = FileSystemReader(tmp_path / "torchtitan").read_metadata().state_dict_metadata
    expected = in_torchtitan(family, model.state_dict())
    balanced = {name.replace("router.gate.weight", "expert_bias_E") for name in expected if "router.gate.w" in name}
    of_run = ("optimizer.", "lr_scheduler.", "train_state.")
    assert {key for key in keys if not key.startswith(of_run)} == expected.keys() | balanced
    trains = {re.sub(r"qkv_linear\.w[qkv]\.", "qkv_linear.wqkv.", name) for name in expected if "expert_b" not in name}
    if model.config.tie_word_embeddings:
        trains.remove("lm_head.weight")
    assert {key for key in keys if key.endswith(".exp_avg")} == {f"optimizer.state.{name}.exp_avg" for name in trains}


def test_an_iteration_is_torchtitans_step_where_adam_made_fewer_updates(tmp_path: Path) -> None:
    """Read by PyTorch, as its Trainer (`train_state`) and LRSchedulersContainer ask for it. A DCP has no place."""
    model, optimizer = trained("llama-3", updates=1)
    made = config_of(model, save(tmp_path / "made", states(model, optimizer)))
    (made / "trainer_state.json").write_text(json.dumps({"global_step": 500}))
    conversions.run(made, tmp_path / "megatron", "megatron")
    conversions.run(tmp_path / "megatron", tmp_path / "titan", "hf", container="torchtitan")
    found: dict[str, Any] = {"lr_scheduler": {"last_epoch": 0}, "train_state": {"step": 0}}
    found["optimizer"] = {"state.norm.weight.step": torch.zeros(())}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path / "titan"), no_dist=True)
    assert (found["lr_scheduler"], found["train_state"]) == ({"last_epoch": 500}, {"step": 500})
    assert found["optimizer"] == {"state.norm.weight.step": torch.tensor(1.0)}

    assert open_checkpoint(tmp_path / "titan").iteration == 500
    for source in ("made", "megatron", "titan"):
        notes = conversions.run(tmp_path / source, tmp_path / f"{source}-dcp", "hf", container="dcp").notes
        lost = "Not carried over from the run: its iteration, 500; the result has Adam's count, 1."
        assert [note for note in notes if "its iteration" in note] == [lost]
    assert open_checkpoint(tmp_path / "made-dcp").iteration == 1
    again = conversions.run(tmp_path / "made-dcp", tmp_path / "again", "hf", container="dcp")
    assert not [note for note in again.notes if "its iteration" in note]


def test_a_step_is_read_as_the_tensor_that_older_versions_have(tmp_path: Path) -> None:
    model = pico.make("llama-3")
    stored = in_torchtitan("llama-3", model.state_dict()) | {"train_state.step": torch.tensor(7, dtype=torch.int32)}
    made = config_of(model, save(tmp_path / "made", stored))
    assert open_checkpoint(made).iteration == 7


def test_layers_of_prediction_have_numbers_of_their_own(tmp_path: Path) -> None:
    """They have no copies of the embeddings and the head."""
    pico.save(tmp_path / "hf", "deepseek-v3")
    added = add_mtp(tmp_path / "hf")
    conversions.run(tmp_path / "hf", tmp_path / "torchtitan", "hf", container="torchtitan")
    keys = FileSystemReader(tmp_path / "torchtitan").read_metadata().state_dict_metadata
    expected = {f"mtp_layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "mtp_norm", "ffn_norm")}
    assert expected < {key for key in keys if key.startswith("mtp_")} and "layers.3.enorm.weight" not in keys
    assert not any(key.startswith("mtp_") and ("tok_emb" in key or "head" in key) for key in keys)
    conversions.run(tmp_path / "torchtitan", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert [name for name, tensor in added.items() if not torch.equal(back[name], tensor)] == []


def test_the_bias_that_balanced_experts_stays_behind_with_a_note(tmp_path: Path) -> None:
    model = pico.make("qwen3-moe")
    stored = in_torchtitan("qwen3-moe", model.state_dict()) | {"layers.1.moe.expert_bias_E": torch.ones(4)}
    notes = conversions.run(
        save(tmp_path / "made", stored), tmp_path / "out", "hf", reference=config_of(model, tmp_path / "config")
    ).notes
    assert any("`layers.1.moe.expert_bias_E` and its like" in note for note in notes)


EXPERTS = f"layers.1.{STACK}"


def cut(stored: dict[str, Tensor], name: str, *rows: slice) -> None:
    stored[f"{EXPERTS}{name}"] = stored[f"{EXPERTS}{name}"][rows].contiguous()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda stored: stored.pop(f"{EXPERTS}w3_EFD"), r"missing +model\.layers\.\*\.mlp\.experts\.\*\.up_proj"),
        (
            lambda stored: cut(stored, "w1_EFD", slice(3)),
            r"missing +model\.layers\.\*\.mlp\.experts\.\*\.gate_proj\.weight +\(5\)",
        ),
        (lambda stored: cut(stored, "w2_EDF", slice(None), slice(5)), r"experts\.0\.down_proj\.weight` is \[5,"),
        (
            lambda stored: stored.update({f"{EXPERTS}w1_EFD": torch.ones(4)}),
            r"(?s)missing .*gate_proj.*unexpected .*w1_EFD",
        ),
        (lambda stored: stored.update({"layers.2.ffn_norm.weight": torch.ones(64)}), r"unexpected +model\.layers\.2"),
        (lambda stored: stored.update({"moe.experts.w1": torch.ones(4, 2, 2)}), r"unexpected +moe\.experts\.w1"),
        (
            lambda stored: stored.update({"layers.1.moe.experts.w2": torch.ones(4, 2, 2)}),
            r"are both `model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight`",
        ),
    ],
)
def test_experts_and_layers_that_do_not_fit_the_config_are_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    model = pico.make("qwen3-moe")
    stored = in_torchtitan("qwen3-moe", model.state_dict())
    spoil(stored)
    made = save(tmp_path / "made", stored)
    with pytest.raises(PrecisionctlError, match=message):
        conversions.run(made, tmp_path / "out", "hf", reference=config_of(model, tmp_path / "config"))
    assert not [*tmp_path.glob("out*")]


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("mixtral", {}, "names are known of llama, qwen3.*this is a mixtral"),
        ("llama4", {}, "this is a llama4_text"),
        ("llama-3", {"attention_bias": True}, "torchtitan's llama has no `model.layers.0.self_attn.q_proj.bias`"),
    ],
)
def test_what_torchtitan_has_not_is_not_written(
    tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    pico.save(tmp_path / "hf", family, **changes)
    with pytest.raises(MappingError, match=said):
        plan_command(Request(tmp_path / "hf", tmp_path / "out", "hf", container="torchtitan"))

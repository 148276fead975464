"""OLMo-core's steps are read under its names, with the optimizer. tests/peers has OLMo-core itself."""

import dataclasses
import json
import pickle
import re
import sys
import types
from pathlib import Path
from typing import Any

import conversions
import pico
import pytest
import torch
from safetensors.torch import load_file
from soaking import in_soak
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from trained_models import save

from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.other_trainers.trainer_run import of_trainer
from precisionctl.commands.hints import open_hinted
from precisionctl.errors import PrecisionctlError
from precisionctl.planning.make_plan import make_plan
from precisionctl.reports import inspect

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OLMO = (
    (r"model\.embed_tokens", "embeddings"),
    (r"model\.norm", "lm_head.norm"),
    (r"^lm_head\.weight", "lm_head.w_out.weight"),
    (r"model\.layers", "blocks"),
    (r"(self|linear)_attn\.o_proj", "attention.w_out"),
    (r"(self|linear)_attn\.(\w)_proj", r"attention.w_\2"),
    (r"(self|linear)_attn", "attention"),
    (r"mlp\.gate_proj", "feed_forward.w1"),
    (r"mlp\.down_proj", "feed_forward.w2"),
    (r"mlp\.up_proj", "feed_forward.w3"),
    (r"mlp\.gate\.", "feed_forward_moe.router."),
)
"""From the keys of OLMo-core's converter (nn/hf/convert.py), in this order."""

NORMS = {
    "behind": {"post_attention_layernorm": "attention_norm", "post_feedforward_layernorm": "feed_forward_norm"},
    "before": {"input_layernorm": "attention_norm", "post_attention_layernorm": "feed_forward_norm"},
}


def in_olmo_core(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What OLMo-core has for a published model. All experts of a layer are one matrix, the router is a vector."""
    behind = {name.rpartition(".post_feedforward")[0] for name in state if "post_feedforward_layernorm" in name}
    experts = dict[str, list[Tensor]]()
    found = dict[str, Tensor]()
    for name, tensor in state.items():
        layer = ".".join(name.split(".")[:3])
        for hf, own in NORMS["behind" if layer in behind else "before"].items():
            if f".{hf}." in name:
                name = name.replace(hf, own)
                break
        for pattern, new in OLMO:
            name = re.sub(pattern, new, name)
        if match := re.fullmatch(r"(blocks\.\d+)\.mlp\.experts\.\d+\.(\w+)_proj\.weight", name):
            kind = {"gate": "w1", "down": "w2", "up": "w3"}[match[2]]
            experts.setdefault(f"{match[1]}.feed_forward_moe.experts.mlp.{kind}", []).append(tensor.t())
        else:
            found[name] = tensor.flatten() if name.endswith("router.weight") else tensor
    return found | {name: torch.cat(matrices) for name, matrices in experts.items()}


def save_step(step: Path, weights: dict[str, Tensor], *, updates: int = 0) -> Path:
    """As OLMo-core's Checkpointer: the state dicts flat, moments twice and three times the weights."""
    state: dict[str, Any] = {"model": weights}
    if updates:
        state["optim"] = {f"state.{name}.exp_avg": 2 * one for name, one in weights.items()}
        state["optim"] |= {f"state.{name}.exp_avg_sq": 3 * one for name, one in weights.items()}
        state["optim"] |= {f"state.{name}.step": torch.tensor(float(updates)) for name in weights}
        for name in weights:
            group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "initial_lr": 1e-3}
            state["optim"] |= {f"param_groups.{name}.{key}": value for key, value in group.items()}
    save(step / "model_and_optim", state)
    (step / "train").mkdir()
    (step / "config.json").write_text(json.dumps({"model": {"d_model": 64}, "run_name": "OLMo"}))
    return step


def published(directory: Path, family: str) -> dict[str, Tensor]:
    pico.make_and_save(directory, family)
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("family", ["olmo2", "flex-olmo", "olmo-hybrid", *in_soak("olmo3", "qwen3", "llama-3")])
def test_its_models_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    state = published(tmp_path / "hf", family)
    step = save_step(tmp_path / "step1", in_olmo_core(state))
    conversions.run(step, tmp_path / "out", "hf", reference=tmp_path / "hf", verify=True)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() == state.keys()
    assert [name for name in ours if not torch.equal(ours[name], state[name])] == []
    assert "run_name" not in (tmp_path / "out" / "config.json").read_text()  # which is the run's


def test_its_optimizer_is_read_with_its_weights(tmp_path: Path) -> None:
    state = published(tmp_path / "hf", "flex-olmo")
    step = save_step(tmp_path / "step3", in_olmo_core(state), updates=3)
    reader = open_hinted(step / "model_and_optim", reference=tmp_path / "hf")
    assert of_trainer(reader)
    assert (reader.trainer_run.updates, reader.trainer_run.settings["betas"]) == (3, (0.9, 0.95))
    both = WithOptimizer(reader)
    for times, kind in enumerate(("exp_avg", "exp_avg_sq"), 2):
        for name, tensor in state.items():
            assert torch.equal(read_tensor(both, f"optimizer.state.{kind}.{name}"), times * tensor), (kind, name)


def test_its_own_class_in_the_index_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer has a copy of PyTorch's class, of its own name."""
    state = in_olmo_core(published(tmp_path / "hf", "olmo2"))
    step = save_step(tmp_path / "step1", state)
    name = "olmo_core.distributed.checkpoint.filesystem"
    own = dataclasses.make_dataclass("_StorageInfo", [("relative_path", str), ("offset", int), ("length", int)])
    module = types.ModuleType(name)
    module._StorageInfo = own  # type: ignore[attr-defined]
    own.__module__ = name
    for depth in range(1, 5):
        parent = ".".join(name.split(".")[:depth])
        monkeypatch.setitem(sys.modules, parent, module if parent == name else types.ModuleType(parent))
    file = step / "model_and_optim" / ".metadata"
    metadata = filesystem.FileSystemReader(file.parent).read_metadata()
    infos = metadata.storage_data.items()
    metadata.storage_data = {at: own(info.relative_path, info.offset, info.length) for at, info in infos}
    file.write_bytes(pickle.dumps(metadata))
    description = inspect.describe(open_hinted(step))
    assert (description["architecture"], description["stored_names"]) == (None, "OLMo-core")
    assert description["tensors"] == len(state) and name.encode() in file.read_bytes()


def test_experts_that_drop_no_tokens_are_not_transposed_and_padding_is_left_out(tmp_path: Path) -> None:
    state = published(tmp_path / "hf", "flex-olmo")
    stored = in_olmo_core(state)
    for name in [name for name in stored if name.endswith((".mlp.w1", ".mlp.w3"))]:
        stored[name] = torch.cat([expert.t() for expert in stored[name].split(64)])
    for name in ("embeddings.weight", "lm_head.w_out.weight"):
        stored[name] = torch.cat([stored[name], torch.full((5, 64), 7.0)])
    step = save_step(tmp_path / "step1", stored)
    done = conversions.run(step, tmp_path / "out", "hf", reference=tmp_path / "hf", verify=True)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name in state if not torch.equal(ours[name], state[name])] == []
    assert "5 rows with which OLMo-core pads the vocabulary are left out." in done.notes


def test_square_experts_are_refused_as_nothing_tells_whether_they_are_transposed(tmp_path: Path) -> None:
    pico.make_and_save(tmp_path / "hf", "flex-olmo", intermediate_size=64)
    stored = in_olmo_core(load_file(tmp_path / "hf" / "model.safetensors"))
    with pytest.raises(PrecisionctlError, match="square matrices"):
        open_hinted(save_step(tmp_path / "step1", stored), reference=tmp_path / "hf")


def _fewer(state: dict[str, Tensor]) -> None:
    name = "blocks.0.feed_forward_moe.experts.mlp.w2"
    state[name] = state[name][1:]


def _without_dimensions(state: dict[str, Tensor]) -> None:
    state["blocks.0.feed_forward_moe.experts.mlp.w1"] = torch.ones(())


def _many_rows(state: dict[str, Tensor]) -> None:
    state["embeddings.weight"] = torch.ones(len(state["embeddings.weight"]) + 128, 64)


def _twice(state: dict[str, Tensor]) -> None:
    state["model.norm.weight"] = torch.ones(64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_fewer, r"mlp\.w2` is \[\d+, 64\], and by the config its 8 experts are 64 by \d+"),
        (_twice, r"are both `model\.norm\.weight`"),
        (_without_dimensions, r"mlp\.w1` is \[\], and by the config its 8 experts are"),
        (_many_rows, r"`embeddings\.weight` has 378 rows, and by the config there are 250 tokens: more than pad them"),
    ],
)
def test_tensors_of_another_form_and_two_names_of_one_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    state = in_olmo_core(published(tmp_path / "hf", "flex-olmo"))
    change(state)
    with pytest.raises(PrecisionctlError, match=message):
        open_hinted(save_step(tmp_path / "step1", state), reference=tmp_path / "hf")


def test_a_router_with_a_part_of_one_more_expert_is_refused(tmp_path: Path) -> None:
    state = in_olmo_core(published(tmp_path / "hf", "flex-olmo"))
    state["blocks.0.feed_forward_moe.router.weight"] = torch.ones(8 * 64 + 32)
    reader = open_hinted(save_step(tmp_path / "step1", state), reference=tmp_path / "hf")
    with pytest.raises(PrecisionctlError, match=r"blocks\.0\.feed_forward_moe\.router\.weight"):
        make_plan(reader, "hf")


def config_of_a_run(heads: int, *, older: bool = False) -> dict[str, Any]:
    """As ConfigSaverCallback writes it (3.0.0; `older`: with the name that attention had before): what FlexOlmo's
    reference says, and its number of tokens."""
    rope = {"name": "default", "theta": 500000, "_CLASS_": "olmo_core.nn.rope.RoPEConfig"}
    attention = {"name": "default", "n_heads": heads, "n_kv_heads": 2, "bias": False, "rope": rope}
    block: dict[str, Any] = {"layer_norm": {"name": "rms", "eps": 1e-6}, "name": "moe_reordered_norm"}
    block["feed_forward_moe"] = {"name": "default", "num_experts": 8, "router": {"name": "default", "top_k": 3}}
    block |= {"attention": attention} if older else {"sequence_mixer": {**attention, "type": "attention"}}
    model = {"d_model": 64, "vocab_size": 256, "n_layers": 2, "block": block}
    return {"run_name": "OLMo", "model": model, "dataset": {"tokenizer": {"vocab_size": 250}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        (
            {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
            "n_heads is 4 .2 by .*, n_kv_heads is 2",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}},
            r"theta is 500000 .123\.0 by the reference",
        ),
        ({"rms_norm_eps": 0.1}, r"eps is 1e-06 .0\.1 by"),
        ({"num_experts_per_tok": 1}, r"top_k is 3 .1 by"),
        ({"vocab_size": 240}, r"vocab_size is 250 .240 by"),
    ],
)
@pytest.mark.parametrize("older", [False, *in_soak(True)])
def test_a_reference_that_the_runs_config_contradicts_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str, older: bool
) -> None:
    state = in_olmo_core(published(tmp_path / "hf", "flex-olmo"))
    step = save_step(tmp_path / "step1", state)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (step / "config.json").write_text(json.dumps(config_of_a_run(config["num_attention_heads"], older=older)))
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | changes))
    for path in (step, step / "model_and_optim"):
        if message:
            with pytest.raises(PrecisionctlError, match=f"{message}.*Is the reference of this model"):
                open_hinted(path, reference=tmp_path / "hf")
        else:
            open_hinted(path, reference=tmp_path / "hf")


@pytest.mark.parametrize("model", [[], {"block": 3}, {"block": {"attention": []}, "block_overrides": {"0": None}}])
def test_a_runs_config_that_says_nothing_is_none(tmp_path: Path, model: object) -> None:
    step = save_step(tmp_path / "step1", in_olmo_core(published(tmp_path / "hf", "olmo2")))
    (step / "config.json").write_text(json.dumps({"model": model, "dataset": 5}))
    if model:
        open_hinted(step, reference=tmp_path / "hf")


def test_blocks_of_a_runs_config_may_have_names(tmp_path: Path) -> None:
    """As OLMo Hybrid's, whose delta nets have other heads."""
    state = in_olmo_core(published(tmp_path / "hf", "flex-olmo"))
    step = save_step(tmp_path / "step1", state)
    for heads, message in ((4, ""), (2, r"n_heads is 2 .4 by")):
        config = config_of_a_run(heads)
        net = {"sequence_mixer": {"type": "gated_delta_net", "n_heads": 9}}
        config["model"]["block"] = {"gdn": net, "attn": config["model"]["block"]}
        (step / "config.json").write_text(json.dumps(config))
        if not message:
            open_hinted(step, reference=tmp_path / "hf")
            continue
        with pytest.raises(PrecisionctlError, match=message):
            open_hinted(step, reference=tmp_path / "hf")

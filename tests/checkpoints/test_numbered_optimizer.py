"""AdamW's state under numbers is that of the parameters that it was of, or is refused."""

import json
from pathlib import Path
from typing import Any

import conversions
import pico
import pytest
import torch
from soaking import first, in_soak
from trained_models import RATE, moments, states, train

from precisionctl.architectures.families import table_of
from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.other_trainers.numbered_optimizer import NumberedOptimizer, parameter_order
from precisionctl.checkpoints.other_trainers.trainer_run import ParameterGroup, adam_settings, lost_settings
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.source_notes import reading_notes
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import DelayedScaling, Fp8States
from precisionctl.param import NOT_TRAINED, TensorSpec
from precisionctl.reports import inspect

NOT_KNOWN = (
    "axk2",
    "bamba",
    "jamba",
    "mpt",
    "gpt-j",
    "gpt-neox",
    "llama4",
    "deepseek-v4",
    "hy4",
    "qwen4",
    "falcon",
    "bloom",
    "lfm",
    "olmo-hybrid",
    "kimi-linear",
    "ling-3",
    "mistral-large-4",
    "glm-5.3",
    "kimi-k3",
    "ling-2",
    "muse-spark",
)
"""The convolutions of some are one parameter in memory, and three tensors in files."""


@pytest.mark.parametrize("family", pico.representing(pico.block_kinds))
def test_the_order_of_parameters_is_that_of_the_class_or_not_known(family: str) -> None:
    """What is saved and no parameter is known, too."""
    with torch.device("meta"):
        model = pico.make(family)
    saved = model.state_dict().keys()
    assert [name for name, _ in model.named_buffers() if name in saved and not name.endswith(NOT_TRAINED)] == []
    names = [name for name, _ in model.named_parameters()]
    names = [name for name in names if not name.endswith(("e_score_correction_bias", ".expert_bias"))]  # nothing trains
    names = [name.replace(".mlp.post_mlp_layernorm.", ".post_mlp_layernorm.") for name in names]  # as A.X K1's files
    try:
        order = parameter_order(sorted(names), Path("somewhere"), table_of(pico.shape(family)).behind)
    except CheckpointError:
        assert family.startswith(NOT_KNOWN)
    else:
        assert names == order


OTHERS = (
    *("llama-3", "qwen2", "gemma4", "apertus", "qwen3-moe", "afmoe", "hy-v3", "minimax-m3", "glm-moe-dsa"),
    *("gpt2", "qwen2-moe", "olmoe", "minimax-m2", "dots1", "glm4-moe", "deepseek-v2", "phi", "glm4", "nemotron-h"),
)
"""Families whose parameters have other orders, or experts."""


def groups(model: Any) -> list[dict[str, Any]]:
    """As Hugging Face's Trainer makes them."""
    from transformers import Trainer  # which takes seconds

    decayed = set(Trainer.get_decay_parameter_names(None, model))
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    return [
        {"params": [one for name, one in trained.items() if name in decayed], "weight_decay": 0.1},
        {"params": [one for name, one in trained.items() if name not in decayed], "weight_decay": 0.0},
    ]


def hf_trainer_step(path: Path, family: str, one_group: bool = False, **changes: Any) -> Any:
    """`checkpoint-7` after two updates, as Hugging Face's Trainer saves it, and what was live."""
    model = pico.make_and_save(path, family, **changes)
    optimizer = torch.optim.AdamW(model.parameters() if one_group else groups(model), lr=RATE)
    train(model, optimizer, range(2))
    model.save_pretrained(path)
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
    return model, optimizer


@pytest.mark.parametrize(
    ("family", "one_group", "dtype"),
    [
        ("llama-tied", True, torch.float32),
        ("gemma4-moe", True, torch.bfloat16),
        *in_soak(("gemma3", False, torch.bfloat16), ("deepseek-v3", True, torch.float32)),
        *in_soak(("gpt-oss", False, torch.float32)),
        *in_soak(("gemma4-moe", False, torch.float32), ("mixtral", False, torch.bfloat16)),
        *in_soak(("axk1", False, torch.float32)),
        *in_soak(*((family, False, torch.float32) for family in OTHERS)),
    ],
)
def test_hf_trainers_optimizer_goes_along_and_weights_are_its_masters(
    tmp_path: Path, family: str, one_group: bool, dtype: torch.dtype
) -> None:
    model, optimizer = hf_trainer_step(tmp_path / "checkpoint-7", family, one_group, dtype=dtype)
    conversions.run(tmp_path / "checkpoint-7", tmp_path / "out", "megatron", verify=True)
    reader = open_checkpoint(tmp_path / "out")
    assert isinstance(reader, TorchDistReader) and reader.iteration == 7
    assert reader.common["optimizer"]["optimizer"]["state"] == {"common_step": 2}
    conversions.run(tmp_path / "out", tmp_path / "back", "hf", container="dcp")
    back: Any = open_checkpoint(tmp_path / "back")
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, tensor in moments(model, optimizer, kind).items():
            found = stacked(back, f"optimizer.state.{kind}.{name}")
            assert found.dtype == torch.float32 and torch.equal(found, tensor.float()), (kind, name)
    for name, parameter in model.named_parameters():
        assert torch.equal(stacked(back, name), parameter.float())


@pytest.mark.parametrize("family", ["minimax-m3", "glm-moe-dsa"])
def test_indexers_to_which_no_gradient_comes_have_moments_of_zero(tmp_path: Path, family: str) -> None:
    model, optimizer = hf_trainer_step(tmp_path / "checkpoint-7", family, dtype=torch.float32)
    without = [name for name, parameter in model.named_parameters() if parameter not in optimizer.state]
    assert without and all(".indexer." in name for name in without)
    conversions.run(tmp_path / "checkpoint-7", tmp_path / "back", "hf", container="dcp")
    back: Any = open_checkpoint(tmp_path / "back")
    for name in without:
        assert not any(stacked(back, f"optimizer.state.{kind}.{name}").any() for kind in ("exp_avg", "exp_avg_sq"))


def stacked(reader: Any, name: str) -> torch.Tensor:
    """A tensor, or all experts of a stack."""
    both = WithOptimizer(reader)
    if name in both.specs:
        return read_tensor(both, name)
    experts = sum(one.startswith(f"{name}[") for one in both.specs)
    return torch.stack([read_tensor(both, f"{name}[{expert}]") for expert in range(experts)])


@pytest.mark.parametrize(
    ("family", "spoil", "message"),
    first(
        5,
        [
            ("gpt-neox", lambda saved: None, "order of this model's `dense_4h_to_h` is not known"),
            (
                "llama-3",
                lambda saved: saved["param_groups"][0]["params"].pop(),
                "none of this model's; was a part of it frozen",
            ),
            ("llama-3", lambda saved: saved["state"][3].update(exp_avg=torch.zeros(5)), "not of its shape"),
            ("llama-3", lambda saved: saved["state"][3].update(step=torch.tensor(9.0)), "different numbers of updates"),
            (
                "llama-3",
                lambda saved: saved["state"].update({99: saved["state"][0]}),
                "parameter 99, which is in none of its groups",
            ),
            (
                "llama-3",
                lambda saved: saved["state"][3].update(exp_avg=saved["state"][3]["exp_avg"].to(torch.int8)),
                "exp_avg of parameter 3 is int8",
            ),
            (
                "llama-3",
                lambda saved: saved["state"][3].update({7: saved["state"][3]["exp_avg"]}),
                r"its optimizer has \['7'\], which AdamW has not",
            ),
            (
                "llama-3",
                lambda saved: saved["state"].update({3: {"momentum_buffer": saved["state"][3]["exp_avg"]}}),
                r"its optimizer has \['momentum_buffer'\], which AdamW has not",
            ),
            (
                "llama-3",
                lambda saved: saved["state"][3].update(step=torch.tensor(5.5)),
                "step of parameter 3 is no count of updates: 5.5",
            ),
            ("llama-3", lambda saved: saved.pop("state"), "not what PyTorch saves"),
            ("llama-3", lambda saved: saved["param_groups"].append(7), "not what PyTorch saves"),
        ],
    ),
)
def test_an_optimizer_of_unknown_order_or_another_model_is_refused_and_can_be_dropped(
    tmp_path: Path, family: str, spoil: Any, message: str
) -> None:
    step = tmp_path / "checkpoint-7"
    _, optimizer = hf_trainer_step(step, family)
    spoil(saved := optimizer.state_dict())
    torch.save(saved, step / "optimizer.pt")
    with pytest.raises(CheckpointError, match=rf"{message}.*--drop-optimizer"):
        conversions.run(step, tmp_path / "out", "megatron")
    conversions.run(step, tmp_path / "out", "megatron", drop_optimizer=True)
    told = conversions.run(step, tmp_path / "hf", "hf")
    assert any("optimizer stays behind" in note for note in told.notes)
    assert inspect.describe(open_checkpoint(step))["optimizer"]


def test_an_optimizer_that_has_made_no_update_is_said_to_stay_behind(tmp_path: Path) -> None:
    model = pico.make_and_save(tmp_path / "checkpoint-0", "llama-3")
    torch.save(torch.optim.AdamW(groups(model)).state_dict(), tmp_path / "checkpoint-0" / "optimizer.pt")
    notes = [*reading_notes(open_checkpoint(tmp_path / "checkpoint-0"))]
    assert any("stay behind: optimizer.pt, which has groups of parameters and no state" in note for note in notes)


@pytest.mark.parametrize("family", ["qwen3-moe", *in_soak("llama-tied", "gemma4-moe", "mixtral")])
def test_an_optimizer_of_fsdp_in_one_file_has_names(tmp_path: Path, family: str) -> None:
    """accelerate saves what `get_optimizer_state_dict` gives of all ranks."""
    model, optimizer = hf_trainer_step(tmp_path / "numbers", family)
    hf_trainer_step(tmp_path / "names", family)
    (tmp_path / "names" / "optimizer.pt").unlink()
    saved = states(model, optimizer)["optimizer"]
    torch.save(saved, tmp_path / "names" / "optimizer.bin")
    for way in ("numbers", "names"):
        conversions.run(tmp_path / way, tmp_path / f"of-{way}", "megatron")
    numbers, names = (conversions.tree(tmp_path / f"of-{way}") for way in ("numbers", "names"))
    assert {name for name in numbers | names if numbers[name] != names[name]} == {
        "iter_0000007/precisionctl/manifest.json"
    }
    saved["state"]["of.another"] = next(iter(saved["state"].values()))
    torch.save(saved, tmp_path / "names" / "optimizer.bin")
    with pytest.raises(CheckpointError, match=r"`of.another`, which is no parameter of this model.*--drop-optimizer"):
        conversions.run(tmp_path / "names", tmp_path / "out", "megatron")


@pytest.mark.parametrize("group", [{}, {"params": 3}, {"params": [["a.name"]]}, "no group"])
def test_groups_of_named_parameters_that_are_none_are_damage(tmp_path: Path, group: Any) -> None:
    model, optimizer = hf_trainer_step(tmp_path, "llama-3")
    (tmp_path / "optimizer.pt").unlink()
    (tmp_path / "trainer_state.json").unlink(missing_ok=True)
    torch.save(states(model, optimizer)["optimizer"] | {"param_groups": [group]}, tmp_path / "optimizer.bin")
    reader = open_checkpoint(tmp_path)
    assert reader.iteration is None
    with pytest.raises(DamagedCheckpoint, match="its optimizer is not what PyTorch saves"):
        _ = reader.optimizer_specs  # type: ignore[attr-defined]


def test_an_optimizer_in_a_file_that_nothing_here_reads_is_said_to_stay_behind(tmp_path: Path) -> None:
    hf_trainer_step(tmp_path / "step", "llama-3")
    assert not [note for note in reading_notes(open_checkpoint(tmp_path / "step")) if "stay behind" in note]
    (tmp_path / "step" / "optimizer.npz").write_bytes(b"1")
    (tmp_path / "step" / "optimizer.bin").write_bytes(b"1")
    (note,) = [note for note in reading_notes(open_checkpoint(tmp_path / "step")) if "stay behind" in note]
    assert note.endswith("stay behind: optimizer.bin, optimizer.npz.")


def test_the_trainers_step_counts_where_fp8_state_says_none(tmp_path: Path) -> None:
    hf_trainer_step(tmp_path / "step", "llama-3")
    for iteration, step in ((None, 7), (5, 5)):
        state = Fp8States(DelayedScaling(), {}, iteration=iteration)
        sidecar.write(tmp_path / "step" / sidecar.RELATIVE, state)
        assert open_checkpoint(tmp_path / "step").iteration == step


def test_settings_of_groups_that_a_result_has_no_place_for_are_named() -> None:
    rates = {"lr": 1e-3, "betas": (0.9, 0.95)}
    decaying, plain = ParameterGroup(rates | {"weight_decay": 0.1}), ParameterGroup(rates | {"weight_decay": 0.0})
    assert lost_settings([decaying, plain]) == lost_settings([decaying, plain, decaying]) == ()
    assert lost_settings([decaying]) == ("weight decay of norms and biases",)
    other_rates = ParameterGroup({"lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.0})
    assert lost_settings([decaying, other_rates]) == ("different lr, betas for groups of parameters",)
    other_decay = ParameterGroup(rates | {"weight_decay": 0.2})
    assert lost_settings([decaying, plain, other_decay]) == ("different weight_decay for groups of parameters",)
    assert lost_settings([ParameterGroup(rates | {"weight_decay": 0.0, "decoupled_weight_decay": False})]) == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", float("nan")), ("lr", -1e-3), ("initial_lr", float("inf")), ("eps", -1e-8), ("weight_decay", -0.1)]
    + [("lr", "1e-3"), ("lr", torch.ones(2)), ("lr", True), ("weight_decay", [1]), ("betas", (0.1, 0.2, 0.3))]
    + [
        ("betas", "ab"),
        ("betas", (0.9, "x")),
        ("weight_decay", 1 << 2000),
        ("betas", (0.9, 1.0)),
        ("betas", [-0.1, 0.9]),
        ("betas", (float("nan"), 0.9)),
    ],
)
def test_settings_that_no_adamw_takes_are_refused_in_whichever_group(key: str, value: Any) -> None:
    sound = {"lr": 1e-3, "initial_lr": 1e-3, "eps": 0, "betas": (0.0, 0.95), "weight_decay": 0.1}
    assert adam_settings([ParameterGroup(sound | {"betas": None})], Path("here")).keys() == sound.keys() - {"betas"}
    groups = [ParameterGroup(sound), ParameterGroup(sound | {"weight_decay": 0.0, key: value})]
    assert adam_settings(groups[:1], Path("here")) == sound
    with pytest.raises(DamagedCheckpoint, match=rf"{key} is .*, which AdamW does not take \(here\).*--drop-optimizer"):
        adam_settings(groups, Path("here"))


def test_settings_are_those_of_groups_with_parameters_and_may_be_tensors_of_one_element(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.pt"
    sound = {"lr": torch.tensor(0.5), "betas": (torch.tensor(0.5), torch.tensor([0.75])), "weight_decay": 0.25}
    empty = {"params": [], "lr": -999.0, "weight_decay": 5.0, "betas": (0.1, 0.2)}
    groups = [empty, sound | {"params": [0]}, sound | {"params": [1], "weight_decay": 0.0}]
    moments = [{"exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape)} for shape in ((4, 4), (4,))]
    states = {index: {"step": torch.tensor(3.0), **each} for index, each in enumerate(moments)}
    torch.save({"state": states, "param_groups": groups}, path)
    specs = {"lm_head.weight": TensorSpec((4, 4), DType.float32), "model.norm.weight": TensorSpec((4,), DType.float32)}
    run = NumberedOptimizer(path, specs, {}).run
    assert run.settings == {"lr": 0.5, "betas": (0.5, 0.75), "weight_decay": 0.25}
    assert run.updates == 3 and not any("groups of parameters" in left for left in run.left)

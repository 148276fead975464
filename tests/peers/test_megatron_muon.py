"""Real megatron-core with its own Muon and emerging_optimizers goes on from runs of the bundled trainer and hands them
back, on CPUs with gloo: the same losses but for rounding. What is printed is in docs/muon.md."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import ROUNDING, by_core, finish, losses, start
from judges import LLAMA_3_1
from training import make_source, make_text

from precisionctl import api
from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.param import MOMENTUM, STATE, Parallelism

PACKAGE = "git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers@v0.1.0"
"""What megatron-core 0.16 and 0.17 name in their pyproject.toml. The package index has it since 0.3.0 alone, for later
ones. It imports Triton, which is not in PyTorch for CPUs."""

STEPS, FROM, BACK = 30, 10, 20
MUON = ("optimizer.preset=muon", "optimizer.muon_extra_scale_factor=0.2", f"train.steps={STEPS}")
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "dense": ("llama-3", {"rope_parameters": LLAMA_3_1}, {"tensor": 2, "pipeline": 2}),
    "experts": ("qwen3-moe", {"mlp_only_layers": []}, {"expert": 2}),
    "experts with biases": ("gpt-oss", {}, {"expert": 2}),
    "nesterov, whole": ("qwen2", {"tie_word_embeddings": False}, {}),
}
BOUNDS = {"experts with biases": 0.01}
"""Where not ROUNDING: few experts that are alike, of which a rounded score chooses another. Differences have either
sign, 0.0007 at the first step and 0.0064 at most, and do not grow."""

KEYS = {"nesterov, whole": ("optimizer.muon_nesterov=true", "optimizer.muon_split_qkv=false")}


@pytest.fixture(scope="module", autouse=True)
def _package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """emerging_optimizers where programs that are started find it."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("emerging_optimizers") is None:
            site = tmp_path_factory.mktemp("emerging")
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, PACKAGE, "triton"]
            if done := subprocess.run(command, capture_output=True, text=True, check=False).returncode:
                pytest.skip(f"emerging_optimizers 0.1.0 is not on the package index, and pip ended with {done}")
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
        yield


def run(place: Path, out: str, *options: str, keys: tuple[str, ...] = MUON, ranks: int = 1) -> str:
    return finish(start(place, out, *options, *(word for key in keys for word in ("--set", key)), ranks=ranks))


@pytest.mark.parametrize("case", CASES)
def test_megatrons_muon_goes_on_from_a_bundled_run_and_hands_it_back(tmp_path: Path, case: str) -> None:
    family, changes, sizes = CASES[case]
    make_source(tmp_path / "source", family=family, **changes)
    make_text(tmp_path / "text.txt", words=6000)
    keys, (options, ranks) = (*MUON, *KEYS.get(case, ())), by_core(sizes)
    run(tmp_path, "bundled", keys=keys)
    for begun, before, out in ((FROM, "bundled", "core"), (BACK, "core", "back")):
        name = f"iter_{begun:07d}"
        shutil.copytree(tmp_path / before / name, tmp_path / out / name)
        run(tmp_path, out, *(options if out == "core" else ()), keys=keys, ranks=ranks if out == "core" else 1)
    expected, core, back = (losses(tmp_path, out) for out in ("bundled", "core", "back"))
    assert list(core) == list(range(FROM + 1, STEPS + 1)) and list(back) == list(range(BACK + 1, STEPS + 1))
    differences = [max(abs(found[step] - expected[step]) for step in found) for found in (core, back)]
    print(f"{case}: {expected[FROM]:.4f} to {expected[STEPS]:.4f}; differ by at most {differences}")
    assert max(differences) < BOUNDS.get(case, ROUNDING)
    assert expected[FROM] - expected[STEPS] > 30 * max(differences)  # there was something to learn

    saved = [TorchDistReader(tmp_path / out / f"iter_{BACK:07d}") for out in ("bundled", "core")]
    ours, theirs = ({name: read_tensor(WithOptimizer(one), name) for name in one.optimizer_specs} for one in saved)
    assert ours.keys() == theirs.keys() and any(MOMENTUM in name for name in theirs)
    for name, tensor in ours.items():
        if name.startswith(f"{STATE}{MOMENTUM}."):
            assert (theirs[name] - tensor).norm() < 0.1 * tensor.norm(), name
    assert optimizer_by_inspect(saved[1].path) == optimizer_by_inspect(saved[0].path)
    converted = tmp_path / "converted"
    api.convert(api.Request(saved[1].path, converted, "megatron", parallelism=Parallelism(1, 2)))
    again = WithOptimizer(TorchDistReader(converted))
    assert all(torch.equal(read_tensor(again, name), tensor) for name, tensor in theirs.items())
    # Megatron loads as many optimizers as it has: experts have a Muon of their own, and biases Adam
    if "expert" in sizes:
        api.convert(api.Request(saved[0].path, tmp_path / "by rank", "megatron", parallelism=Parallelism(expert=2)))
        assert groups_of(TorchDistReader(tmp_path / "by rank")) == groups_of(saved[1])
        assert len(groups_of(saved[1])) == 3 + ("biases" in case) and len(groups_of(TorchDistReader(converted))) == 2


def groups_of(reader: TorchDistReader) -> list[list[tuple[Any, ...]]]:
    """What tells the parameter groups of each optimizer apart, and whether one is Muon's."""
    keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    inner = [one["optimizer"]["param_groups"] for one in reader.common["optimizer"].values()]
    return [[(*(group[key] for key in keys), "momentum_beta" in group) for group in groups] for groups in inner]


def optimizer_by_inspect(path: Path) -> Any:
    command = [sys.executable, "-m", "precisionctl", "inspect", path, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["optimizer"]


def test_both_engines_begin_muon_alike_from_weights_from_a_run_by_adamw_and_from_megatrons_momentum(
    tmp_path: Path,
) -> None:
    make_source(tmp_path / "source", rope_parameters=LLAMA_3_1)
    make_text(tmp_path / "text.txt", words=6000)
    options, ranks = by_core({"tensor": 2})
    taken = {"weights": "", "adamw": "momentum begins at zero", "momentum": "moments and momentum of the checkpoint"}
    for begun, words in taken.items():
        keys = (*MUON[:2], f"train.steps={22 if begun == 'momentum' else 12}")
        for out, engine, number in ((f"{begun} bundled", [], 1), (f"{begun} core", options, ranks)):
            assert words in run(tmp_path, out, *engine, keys=keys, ranks=number)
        expected, core = (losses(tmp_path, f"{begun} {name}") for name in ("bundled", "core"))
        assert list(core) == list(expected)
        assert [core[step] for step in core] == pytest.approx([*expected.values()], abs=ROUNDING)
        assert expected[min(expected)] - expected[max(expected)] > 30 * ROUNDING
        if begun == "weights":
            run(tmp_path, "adamw run", keys=("train.steps=2", "schedule.kind=constant"))
        following = {"weights": "adamw run", "adamw": "weights core"}.get(begun)
        if following:
            shutil.rmtree(tmp_path / "source")
            shutil.copytree(tmp_path / following, tmp_path / "source")
            for other in (tmp_path / "source").rglob("run.json"):
                other.unlink()  # as another program's


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optimizer.muon_num_ns_steps=7", "emerging_optimizers 0.1.0 does not take optimizer.muon_num_ns_steps = 7: "),
        ("optimizer.muon_coefficient_type=simple", "megatron-core 0.16.1 has no simple coefficients of Muon"),
    ],
)
def test_settings_that_megatrons_muon_does_not_have_are_refused_by_name(
    tmp_path: Path, setting: str, words: str
) -> None:
    make_source(tmp_path / "source", rope_parameters=LLAMA_3_1)
    make_text(tmp_path / "text.txt")
    started = start(tmp_path, "core", "--engine", "megatron-core", "--set", MUON[0], "--set", setting)
    told, _ = started.communicate(timeout=300)
    assert started.returncode and words in told and not (tmp_path / "core").exists()

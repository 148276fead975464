"""What the real DeepSpeed saves is read as what it has in memory, bit for bit."""

import json
import os
import random
import subprocess
from pathlib import Path

import conversions
import environments
import pico
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.deepspeed.reader import DeepSpeedReader
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.open import open_checkpoint

SCRIPT = Path(__file__).with_name("deepspeed_run.py")
VERSIONS = ("setuptools", "wheel", f"torch=={torch.__version__.partition('+')[0]}")
NOTHING_COMPILED = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
SIZES = {"vocab_size": 97, "intermediate_size": 90}


@pytest.fixture(scope="session")
def python() -> Path:
    packages = (*VERSIONS, f"transformers=={transformers.__version__}")
    own = ("--no-build-isolation", "deepspeed==0.19.8")
    return environments.python_with("deepspeed", packages, own, environment=NOTHING_COMPILED)


def run(python: Path, ranks: int, *arguments: object) -> list[float]:
    """The losses of the five updates after the third."""
    port = random.randint(20_000, 50_000)
    torchrun = [python, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={port}", SCRIPT]
    environment = os.environ | NOTHING_COMPILED
    done = subprocess.run([*torchrun, *map(str, arguments)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("LOSSES")).removeprefix("LOSSES")
    )


def to_universal(python: Path, root: Path) -> Path:
    """DeepSpeed's own tool."""
    program = "import deepspeed.checkpoint.ds_to_universal as tool; tool.main(tool.parse_arguments())"
    source, out = root / "global_step3", root / "global_step3_universal"
    arguments = [
        "--input_folder",
        source,
        "--output_folder",
        out,
        "--inject_missing_state",
        "--num_extract_workers",
        "1",
    ]
    command = [python, "-c", program, *map(str, arguments), "--num_merge_workers", "1"]
    subprocess.run(command, env=os.environ | NOTHING_COMPILED, check=True, capture_output=True)
    return out


class Both:
    """Weights and optimizer of a checkpoint, with experts stacked."""

    def __init__(self, path: Path, reference: Path) -> None:
        reader = open_checkpoint(path, hints=Hints(companions=read_companions(reference)))
        assert isinstance(reader, DeepSpeedReader)
        self.reader, self.specs, self.chunks = reader, {**reader.specs, **reader.optimizer_specs}, reader.chunks

    def read(self, name: str) -> Tensor:
        if name in self.specs:
            return read_tensor(self, name)
        experts = sum(one.startswith(f"{name}[") for one in self.specs)
        return torch.stack([read_tensor(self, f"{name}[{expert}]") for expert in range(experts)])


def assert_is_live(saved: Both, live: dict[str, dict[str, Tensor]], *, masters: bool = True) -> None:
    for kind in ("fp32", "exp_avg", "exp_avg_sq") if masters else ():
        for name, tensor in live[kind].items():
            found = saved.read(name if kind == "fp32" else f"optimizer.state.{kind}.{name}")
            assert torch.equal(found, tensor.view(found.shape)), (kind, name)
            assert kind == "fp32" or found.abs().sum() > 0
    for name, tensor in live["bf16"].items():
        assert torch.equal(saved.read(name).bfloat16(), tensor), name


CASES = [
    ("llama-3", 1, 1, ""),
    ("llama-tied", 1, 2, "groups fp32_gradients"),
    ("llama-3", 1, 2, "groups round_robin"),
    ("llama-tied", 2, 2, "groups frozen"),
    ("llama-tied", 3, 1, ""),
    ("llama-tied", 3, 2, "groups frozen"),
    ("qwen3-moe", 3, 2, "groups subgroups"),
]


@pytest.mark.parametrize(("family", "stage", "ranks", "flags"), CASES)
def test_weights_masters_and_moments_are_the_live_ones(
    tmp_path: Path, python: Path, family: str, stage: int, ranks: int, flags: str
) -> None:
    pico.save(tmp_path / "hf", family, **SIZES)
    run(python, ranks, tmp_path / "hf", tmp_path / "run", stage, *flags.split())
    live = torch.load(tmp_path / "run" / "live.pt")
    assert_is_live(Both(tmp_path / "run", tmp_path / "hf"), live, masters="round_robin" not in flags)
    conversions.run(tmp_path / "run", tmp_path / "bf16", "hf", "bf16", reference=tmp_path / "hf", verify=True)
    conversions.run(tmp_path / "run", tmp_path / "megatron", "megatron", reference=tmp_path / "hf", drop_optimizer=True)
    conversions.run(tmp_path / "megatron", tmp_path / "back", "hf")
    if family != "qwen3-moe":
        masters = live["bf16"] | (live["fp32"] if "round_robin" not in flags else {})
        for name, tensor in conversions.tensors(tmp_path / "back").items():
            assert torch.equal(tensor.to(masters[name].dtype), masters[name].view(tensor.shape)), name
        for name, tensor in load_file(tmp_path / "bf16" / "model.safetensors").items():
            assert torch.equal(tensor, live["bf16"][name]), name
    if "frozen" in flags:
        universal = to_universal(python, tmp_path / "run")
        assert_is_live(Both(universal, tmp_path / "hf"), live)


@pytest.mark.parametrize(
    ("family", "ranks", "stage", "next_stage", "flags"),
    [
        ("llama-tied", 2, 1, 1, "groups fp32_gradients"),
        ("llama-3", 2, 2, 2, "groups"),
        ("qwen3-moe", 2, 3, 3, ""),
        ("llama-tied", 1, 3, 2, ""),
    ],
)
def test_it_goes_on_from_ours_with_the_losses_of_the_run(
    tmp_path: Path, python: Path, family: str, ranks: int, stage: int, next_stage: int, flags: str
) -> None:
    """ZeRO 3 with one group of parameters: of several it counts Adam's steps too often after any universal checkpoint,
    its own tool's too, as all groups get the same tensor."""
    pico.save(tmp_path / "hf", family, **SIZES)
    going_on = run(python, ranks, tmp_path / "hf", tmp_path / "run", stage, *flags.split())
    how = {"container": "deepspeed-universal"}
    conversions.run(tmp_path / "run", tmp_path / "ours", "hf", reference=tmp_path / "hf", **how)
    assert run(python, ranks, tmp_path / "hf", tmp_path / "ours", next_stage, "resume", *flags.split()) == going_on
    if next_stage == 1:
        conversions.run(tmp_path / "run", tmp_path / "megatron", "megatron", "bf16", reference=tmp_path / "hf")
        conversions.run(tmp_path / "megatron", tmp_path / "back", "hf", **how)
        assert run(python, ranks, tmp_path / "hf", tmp_path / "back", next_stage, "resume", *flags.split()) == going_on

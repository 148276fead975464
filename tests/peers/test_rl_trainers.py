"""What trainers for RL and post-training save by their own code is what the run held, and they go on from ours, after
it has been through Megatron, with the losses of the run."""

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import conversions
import environments
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from core_models import of_stages
from peer_runs import as_state_dict, assert_same, read_by_torch, run_ranks
from repository import HELPERS, ROOT
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.run_reader import run_of
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.hints import open_hinted
from precisionctl.param import KINDS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trainers() -> Path:
    """Of the trainers that start engines and games too only the files are there: what they ask for is ten times this,
    and modules that save and load ask for none of it."""
    versions = (f"torch=={torch.__version__.partition('+')[0]}", f"transformers=={transformers.__version__}")
    # pytest for `core_models`, which a script imports
    also = "accelerate peft trl==1.16.0 omegaconf loguru jaxtyping datasets torchdata pytest setuptools wheel".split()
    files = ("skyrl==0.3.0", "areal==1.0.4", "llamafactory==0.9.5", "openrlhf==0.11.2", "ms-swift==4.6.0")
    return environments.python_with(
        "rl",
        (*environments.OUR_VERSIONS, *versions, *also),
        ("--no-build-isolation", "deepspeed==0.19.8"),
        ("--no-deps", *files),
        environment={"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
    )


def losses(run: Path, ranks: int) -> list[list[float]]:
    return [json.loads((run / f"losses-{rank}.json").read_text()) for rank in range(ranks)]


def held(live: Path) -> dict[str, Any]:
    found = torch.load(live)
    kinds = ("exp_avg", "exp_avg_sq", "step")
    states = {kind: {name: one[kind] for name, one in found["state"].items()} for kind in kinds}
    return as_state_dict(found["model"], **states)


def through_megatron(saved: Path, out: Path, container: Any, reference: Path | None) -> None:
    conversions.run(saved, out.parent / "megatron", "megatron", "bf16", reference=reference, verify=True)
    conversions.run(out.parent / "megatron", out, "hf", container=container, verify=True)


def laid_out_for(trainer: str, converted: Path, out: Path) -> None:
    """As docs/trainers.md says: under the names that the trainer asks for."""
    dcp_to_torch_save(converted, out.parent / "both.pt")
    both = torch.load(out.parent / "both.pt", mmap=True, weights_only=False)
    model, optimizer = both["model"], both["optimizer"]
    wanted: dict[str, dict[str, Any]] = {
        "areal": {".": {"dcp": {"model": model, "optim": optimizer}}},
        "llamafactory": {"model": model, "optimizer": optimizer},
        "nemo-rl": {"weights": {"model": model}, "optimizer": {"optim": {"optim": optimizer}}},
        "miles": {
            "iter_0000002/model": {"model_state": {"model": model}},
            "iter_0000002/optimizer": {"optim_state": {"optim": optimizer}},
        },
    }
    for folder, state in wanted[trainer].items():
        dcp.save(state, checkpoint_id=out / folder)
    if trainer == "miles":
        (out / "latest_checkpointed_iteration.txt").write_text("2")


SAVED = {
    "skyrl": "global_step_2/policy",
    "areal": "recover_checkpoint",
    "llamafactory": "checkpoint-2",
    "nemo-rl": "step_2/policy",
    "prime-rl": "checkpoints/step_2/trainer",
    "miles": "iter_0000002",
}
CLONES = {"nemo-rl": "NEMO_RL", "prime-rl": "PRIME_RL", "miles": "MILES"}
"""Of trainers that are in no package: the variables that name them."""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("trainer", SAVED)
def test_weights_moments_and_counts_are_what_the_run_held_and_it_goes_on_from_ours(
    tmp_path: Path, trainer: str, ranks: int
) -> None:
    """SkyRL loads only files of ranks, and prime-rl only with its schedule, which we do not write."""
    if CLONES.get(trainer, "PATH") not in os.environ:
        pytest.skip(f"{CLONES[trainer]} names no clone of {trainer}")
    run_ranks(trainers(), ranks, "rl_save.py", tmp_path, trainer)
    reference = None if trainer == "skyrl" else tmp_path / "config"
    reader: Any = open_hinted(tmp_path / "run", reference=reference)
    assert reader.path == tmp_path / "run" / SAVED[trainer]
    assert (reader.iteration, reader.trainer_run.updates) == (2, 2)
    through_megatron(tmp_path / "run", tmp_path / "back", "dcp", reference)
    expected = held(tmp_path / "live.pt")
    assert_same(read_by_torch(tmp_path / "back", expected), expected)
    if trainer not in ("skyrl", "prime-rl"):
        laid_out_for(trainer, tmp_path / "back", tmp_path / "there")
        run_ranks(trainers(), ranks, "rl_save.py", tmp_path / "on", trainer, tmp_path / "there")
        assert losses(tmp_path / "on", ranks) == losses(tmp_path, ranks)


def test_openrlhf_goes_on_from_ours_with_deepspeeds_own_optimizer(tmp_path: Path) -> None:
    run_ranks(trainers(), 2, "openrlhf_save.py", tmp_path, 2)
    through_megatron(tmp_path / "_actor", tmp_path / "back", "deepspeed-universal", tmp_path / "config")
    for path in (tmp_path / "back").glob("global_step*/*mp_rank_00_model_states.pt"):  # as docs/trainers.md says
        torch.save(torch.load(path) | {"consumed_samples": 8}, path)
    run_ranks(trainers(), 2, "openrlhf_save.py", tmp_path / "on", 2, tmp_path / "back")
    assert losses(tmp_path / "on", 2) == losses(tmp_path, 2)


def test_weights_moments_and_counts_of_trl_are_what_the_run_held(tmp_path: Path) -> None:
    run_ranks(trainers(), 1, "sft_save.py", tmp_path, "plain")
    through_megatron(tmp_path / "run" / "checkpoint-2", tmp_path / "back", "dcp", None)
    assert open_checkpoint(tmp_path / "run" / "checkpoint-2").iteration == 2
    live = torch.load(tmp_path / "live.pt")
    kinds = {
        kind: {name: one[kind] for name, one in live["state"].items()} for kind in ("exp_avg", "exp_avg_sq", "step")
    }
    expected = as_state_dict(live["model"], **kinds)
    assert_same(read_by_torch(tmp_path / "back", expected), expected)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_trl_on_deepspeed_goes_on_from_ours(tmp_path: Path, zero: int) -> None:
    """With ZeRO 3 after the remedy of docs/trainers.md, as it has two groups of parameters."""
    run_ranks(trainers(), 2, "sft_save.py", tmp_path, f"zero{zero}")
    saved = tmp_path / "run" / "checkpoint-2"
    through_megatron(saved / "global_step2", tmp_path / "checkpoint-2", "deepspeed-universal", saved)
    for file in [*saved.glob("rng_state_*"), saved / "trainer_state.json", saved / "scheduler.pt"]:
        shutil.copy(file, tmp_path / "checkpoint-2")
    run_ranks(trainers(), 2, "sft_save.py", tmp_path / "on", f"zero{zero}", tmp_path / "checkpoint-2")
    whole, on = (json.loads((run / "losses.json").read_text()) for run in (tmp_path, tmp_path / "on"))
    assert len(whole) == 5 and on == whole


@pytest.mark.parametrize(
    ("tensor", "pipeline", "way"), [(2, 2, "dp_reshardable"), (2, 1, "fully_reshardable"), (1, 2, "plain")]
)
def test_what_ms_swift_saves_of_megatron_is_what_its_ranks_held(
    tmp_path: Path, tensor: int, pipeline: int, way: str
) -> None:
    """With the megatron-core that we are tested with, for the index has no newer one."""
    found = importlib.util.find_spec("megatron.core")
    assert found and found.origin
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "megatron").symlink_to(Path(found.origin).parents[1])
    path = f"{tmp_path}/packages:{HELPERS}:{ROOT}"
    run_ranks(trainers(), tensor * pipeline, "swift_megatron_save.py", tmp_path, tensor, pipeline, way, PYTHONPATH=path)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**sizes, **heads, rms_norm_eps=1e-5, max_position_embeddings=128)
    config.save_pretrained(tmp_path / "config")
    reader = open_hinted(tmp_path / "checkpoint-1", reference=tmp_path / "config", trust_reference=True)
    assert isinstance(reader, TorchDistReader) and reader.iteration == 1
    live = of_stages(f"{tmp_path}/held", tensor, pipeline)
    for kind in KINDS:
        of_optimizer = of_stages(f"{tmp_path}/held.optimizer.{kind}", tensor, pipeline)
        live |= {f"optimizer.state.{kind}.{name}": tensor for name, tensor in of_optimizer.items()}
    both = WithOptimizer(reader)
    assert both.specs.keys() == live.keys() and run_of(reader).updates == 1
    assert [name for name, tensor in live.items() if not torch.equal(read_tensor(both, name), tensor)] == []
    how = {"reference": tmp_path / "config", "trust_reference": True, "verify": True}
    conversions.run(tmp_path / "checkpoint-1", tmp_path / "back", "hf", container="dcp", **how)

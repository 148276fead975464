"""Megatron-Core in FP8 on Transformer Engine's own Python (`te_on_cpu`), for peers/test_te_on_cpu.py.

`python te_core.py PLACE` trains from the source that `make` made there, whose FP8 state is recorded, and writes
`losses.json`: of the bundled trainer, of Megatron-Core, and of Megatron-Core that goes on from its first iteration; and
`gradients.json`: for each linear, the newest amax of its gradients in Megatron-Core over the bundled trainer's. On
several ranks, which share experts, it trains one step, and each writes `states.RANK.json`: for each linear that keeps
state, whether it began with the source's.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import in_memory
import te_on_cpu
import torch
import torch.distributed as dist
from judges import LLAMA_3_1
from training import make_source, make_text, settings

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.fp8 import sidecar
from precisionctl.fp8.grouped import in_columns
from precisionctl.fp8.state import Fp8State
from precisionctl.mcore import core_checkpoint, train_in_core
from precisionctl.mcore.core_run import CoreRun
from precisionctl.mcore.stand_ins import without_cuda
from precisionctl.trainer.resume import resume

SIZES = {"hidden_size": 64, "intermediate_size": 128, "dtype": torch.bfloat16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-3": {"rope_parameters": LLAMA_3_1},
    "qwen3-moe": {"mlp_only_layers": [], "moe_intermediate_size": 64},
}
KEYS: dict[str, Any] = {"train__steps": 6, "train__save_every": 3, "train__keep": 2, "optimizer__lr": 0.001}
OF_EXPERTS = {"router__pooled_loss": 0, "router__aux_loss": 0.01}


def make(place: Path, family: str) -> None:
    source = make_source(place / "source", family=family, **SIZES, **FAMILIES[family])
    sidecar.write(source / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(source)))
    make_text(place / "text.txt", words=3000)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron-Core's stand-ins for CUDA beside Transformer Engine's, and gloo for NCCL."""
    te_on_cpu.install()
    torch.cuda.set_device = lambda device: None
    own: Any = dist.init_process_group
    dist.init_process_group = lambda backend, **named: own("gloo", **named)
    with without_cuda():
        yield


def train(engine: Any, place: Path, out: str, **keys: Any) -> list[float]:
    losses: list[float] = []
    has_experts = "num_experts" in (place / "source" / "config.json").read_text()
    known = KEYS | (OF_EXPERTS if has_experts else {}) | keys
    asked = settings(place / "source", place / "text.txt", place / out, "fp8", **known)
    engine(replace(asked, backend="te"), lambda started: None, lambda step: losses.append(step.loss))
    return losses


def alone(place: Path) -> None:
    losses = {"bundled": train(resume, place, "bundled"), "core": train(train_in_core.resume, place, "core")}
    shutil.copytree(place / "core" / "iter_0000003", place / "on" / "iter_0000003")
    losses["on"] = train(train_in_core.resume, place, "on")
    (place / "losses.json").write_text(json.dumps(losses))
    bundled, core = (newest_of_gradients(place / out / "iter_0000003") for out in ("bundled", "core"))
    (place / "gradients.json").write_text(json.dumps({name: core[name] / amax for name, amax in bundled.items()}))


def newest_of_gradients(iteration: Path) -> dict[str, float]:
    """The newest amax of `grad_output` of each linear, the largest of a group's."""
    states = open_checkpoint(iteration).fp8
    assert states is not None
    linears = {name: state for name, state in states.modules.items() if "linear" in name}
    return {name: float(one.roles["grad_output"].amax_history[..., -1].max()) for name, one in linears.items()}


def by_ranks(place: Path, rank: int, ranks: int) -> None:
    source = sidecar.find(place / "source")
    assert source is not None
    load, same = core_checkpoint.load, {}

    def loaded(run: CoreRun, *arguments: Any) -> None:
        load(run, *arguments)
        for name, linear in run.stages[0].module.named_modules():
            if "scaling_fwd" in getattr(linear, "fp8_meta", {}):
                state = source.modules[name]
                if state.shape:
                    each = state.shape[0] // ranks
                    state = state.of_expert(slice(rank * each, (rank + 1) * each))
                same[name] = is_same(linear.fp8_meta, state)

    core_checkpoint.load = loaded
    train(train_in_core.resume, place, "core", parallel__expert=ranks, train__steps=1)
    (place / f"states.{rank}.json").write_text(json.dumps(same))


def is_same(meta: dict[str, Any], state: Fp8State) -> bool:
    """Of what is no weight's: those amaxes are the weights' own when a run begins."""
    forward, backward = in_columns(state, "gemm")
    return all(
        torch.equal(here.scale[::roles], there.scale[::roles])
        and torch.equal(here.amax_history[:, ::roles], there.history[:, ::roles])
        for roles, here, there in ((3, meta["scaling_fwd"], forward), (2, meta["scaling_bwd"], backward))
    )


if __name__ == "__main__":
    place = Path(sys.argv[1])
    with on_cpu():
        if "RANK" in os.environ:
            by_ranks(place, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        else:
            alone(place)

"""A Megatron run's checkpoint, with its optimizer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pico
import torch
from in_memory import InMemory, to_megatron
from torch import Tensor

from precisionctl.checkpoints.chunks import write_rows
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.megatron.carried_run import NO_RUN, CarriedRun
from precisionctl.checkpoints.megatron.keys import write_tracker
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.dtypes import DType
from precisionctl.param import TensorSpec
from precisionctl.planning.make_plan import make_plan

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
KINDS = ("exp_avg", "exp_avg_sq", "param")


def trained(
    tmp_path: Path, run: CarriedRun = NO_RUN, kinds: Sequence[str] = KINDS, *, muon: bool = False, **sizes: int
) -> tuple[InMemory, dict[str, Tensor]]:
    """A model with an optimizer, saved by a run at TP 1: 250 tokens and 6 rows of padding that hold something. With
    `muon` linears have that one's state."""

    def kinds_of(name: str) -> Sequence[str]:
        return ("momentum_buffer", "param") if muon and ".linear_" in name and "norm" not in name else kinds

    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16, **sizes)
    source = to_megatron(HuggingFaceReader(tmp_path / "hf"))
    torch.manual_seed(0)
    for name in VOCABULARY:
        source.tensors[name][250:] = 0.5
    optimizer = {
        f"optimizer.state.{kind}.{name}": values.float() if kind == "param" else torch.rand(values.shape)
        for name, values in source.tensors.items()
        for kind in kinds_of(name)
    }
    plan = make_plan(source, "megatron")
    specs = {
        f"optimizer.state.{kind}.{name}": TensorSpec(spec.shape, DType.float32, spec.parallel)
        for name, spec in plan.targets.items()
        for kind in kinds_of(name)
    }
    adam = {"optimizer": {"state": {"common_step": 3}, "param_groups": [{"lr": 0.1, "params": []}]}}
    chained = {0: {"optimizer": {"state": {}, "param_groups": [{"lr": 0.2, "momentum_beta": 0.95}]}}, 1: adam}
    common = {"optimizer": chained if muon else adam}
    writer = TorchDistWriter(
        tmp_path / "run" / "iter_0000003",
        plan.model,
        {**plan.targets, **specs},
        run=replace(run, iteration=3, common=common),
        companions=source.companions,
    )
    writer.lay_out()
    for name, values in {**source.tensors, **optimizer}.items():
        write_rows(writer, name, 0, values)
    writer.finish(None)
    write_tracker(tmp_path / "run", 3)
    return source, {**source.tensors, **optimizer}

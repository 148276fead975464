"""Both engines in FP32, where their order of sums is all that differs, as a program under torchrun:
`core_in_fp32.py FOLDER KEY=VALUE...`. FOLDER has a source and a text; losses of both go to `losses.json` in it."""

import json
import sys
from pathlib import Path

import torch

from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.mcore import core_checkpoint
from precisionctl.mcore.core_model import make_config
from precisionctl.mcore.core_run import CoreRun, core_world
from precisionctl.mcore.stand_ins import stand_ins
from precisionctl.mcore.train_in_core import CORE
from precisionctl.trainer.loop import update
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.parallel.world import together
from precisionctl.trainer.resume import read_data
from precisionctl.trainer.run import Run
from precisionctl.trainer.run_plan import plan_run
from precisionctl.trainer.saved import loading
from precisionctl.trainer.settings import Settings, read_recipe


def skip_one(run: CoreRun) -> None:
    """An update whose loss is not finite, which must leave everything as it is."""
    state = run.stages[0].module.state_dict()
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    next(iter(tensors.values()))[:] = torch.nan
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    assert run.update().skipped == 1
    for name, tensor in tensors.items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), name


def main(folder: Path, keys: list[str]) -> None:
    settings = Settings(
        folder / "source",
        "bf16",
        next(folder.glob("text.*")),
        folder / "run",
        overrides=tuple(keys),
    )
    with together() as ranks, stand_ins():
        recipe = read_recipe(settings)
        with core_world(ranks, recipe) as world:
            plan = plan_run(settings, recipe, ranks.count, CORE)
            rows, _ = read_data(plan, lambda count: None, 1)
            execute(plan_command(Request(folder / "source", folder / "start", "megatron")), ranks=ranks)
            world.barrier()
            dtype, equal_rows = torch.float32, rows.has_equal_rows
            config = make_config(plan.model, recipe, plan.balance, te=False, dtype=dtype, equal_rows=equal_rows)
            run = CoreRun(recipe, plan.model, rows, world, None, config, te=False)
            core_checkpoint.load(run, TorchDistReader(folder / "start"), None)
            core = [run.update().loss for _ in range(recipe.train.steps)]
            skip_one(run)
    if ranks.first:
        model = GPT(plan.model, recipe.precision, "emulated", torch.float32, balance=plan.balance)
        bundled = Run(recipe, model, MasterAdamW(model, recipe.optimizer), rows)
        loading.load_weights(plan.source, bundled)
        updates = (update(bundled) for _ in range(recipe.train.steps))
        expected = [float(made[0][0]) / made[1] for made in updates]
        (folder / "losses.json").write_text(json.dumps([expected, core]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

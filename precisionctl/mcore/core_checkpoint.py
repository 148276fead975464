"""The iterations of a run that Megatron-Core trains, written and read by its own dist_checkpointing, in the folder and
under the name of any run of `resume`: the bundled trainer goes on from them, and the other way around."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from precisionctl.checkpoints.base import has_muon
from precisionctl.checkpoints.hf_directory.companions import write_companions
from precisionctl.checkpoints.megatron.arguments import saved_args
from precisionctl.checkpoints.megatron.carried_run import RESHARDABLE
from precisionctl.checkpoints.megatron.keys import COMPANIONS, EXTRA_STATE, directory_name, expert_of, object_name
from precisionctl.checkpoints.megatron.provider import describes, write_run_config
from precisionctl.checkpoints.megatron.towers import TowersWriter
from precisionctl.checkpoints.output import Output, disk_problems
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.export.weight_encodings import weight_encodings
from precisionctl.fp8.extra_state_writer import ORDER
from precisionctl.fp8.grouped import in_columns
from precisionctl.fp8.state import Fp8States
from precisionctl.mcore.core_muon import begin_states, leave_out_momentum, load_states
from precisionctl.mcore.core_run import CoreRun
from precisionctl.param import Parallelism
from precisionctl.trainer.optimizer.megatron_schedule import megatron_scheduler, training_args
from precisionctl.trainer.run_plan import RunPlan
from precisionctl.trainer.saved.balance import balance_args
from precisionctl.trainer.saved.run_folder import saved_run, sign
from precisionctl.trainer.saved.saving import complete, copy_towers

_CONTENT = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": RESHARDABLE,
}
"""Megatron's metadata of how the optimizer is stored: by parameter, for any parallel sizes."""

_NO_STATE = torch.empty(0, dtype=torch.uint8)
"""What Transformer Engine takes for the `_extra_state` of a module without any."""


def load(run: CoreRun, source: TorchDistReader, updates: int | None) -> None:
    """Load weights, the state of FP8 linears, and the optimizer after this number of `updates`; with None it starts
    from the weights."""
    from megatron.core import dist_checkpointing

    wanted = _sharded_model(run)
    by_muon = run.recipe.optimizer.by_muon
    if updates is not None:
        wanted["core_optimizer"] = run.optimizer.sharded_state_dict(wanted, is_loading=True, metadata=_metadata())
        if by_muon and not has_muon(source):
            leave_out_momentum(wanted["core_optimizer"])
    loaded = dist_checkpointing.load(wanted, str(source.path))
    for stage, name in _named(run).items():
        weights = {key: _NO_STATE if EXTRA_STATE in key else value for key, value in loaded[name].items()}
        run.stages[stage].module.load_state_dict(weights)
    if run.recipe.precision.keeps_state and source.fp8:
        _set_fp8_states(run, source.fp8)
    chained = run.optimizer.chained_optimizers
    if updates is None:
        run.optimizer.reload_model_params()
    elif by_muon:
        load_states(chained, loaded["core_optimizer"], updates)
    else:
        _load_distributed(chained, loaded["core_optimizer"], updates)
    if by_muon:
        begin_states(chained)
    run.updates = updates or 0


def _load_distributed(chained: Sequence[Any], state: dict[Any, Any], updates: int) -> None:
    for one, saved in zip(chained, [state] if len(chained) == 1 else [state[n] for n in sorted(state)], strict=True):
        # The run's own parameter groups: only the count of updates is taken from the checkpoint
        groups = [{k: v for k, v in group.items() if k != "params"} | {"step": updates} for group in one.param_groups]
        saved |= {"optimizer": {"param_groups": groups}, "param_state_sharding_type": RESHARDABLE}
        one.load_state_dict(saved)


def save(run: CoreRun, plan: RunPlan, identity: Mapping[str, Any], sidecar_state: Fp8States | None) -> None:
    """Save the run as an iteration in its folder, atomically, and remove iterations beyond `train.keep`. What belongs
    to the model and is not trained is saved with it, as the bundled trainer's Saver does. Raises DiskProblem."""
    from megatron.core import dist_checkpointing

    output, sizes = Output(plan.out / directory_name(run.step)), run.recipe.parallel
    cut = Parallelism(sizes.tensor, sizes.pipeline, expert=sizes.expert, virtual=sizes.virtual)
    args = training_args(run.recipe, run.schedule, run.position)
    args |= balance_args(plan.balance) if run.model.moe else {}
    args = saved_args(args, run.model, plan.mapping.text.targets, cut, run.step, "torch_dist")
    loadable = args | {"params_dtype": run.config.params_dtype}  # by Megatron, which takes a dtype of PyTorch
    state: dict[str, Any] = {
        "args": argparse.Namespace(**loadable),
        "checkpoint_version": 3.0,
        "iteration": run.step,
        "num_floating_point_operations_so_far": 0,
        "opt_param_scheduler": megatron_scheduler(run.recipe, run.schedule, run.step),
    }
    with disk_problems(output):
        if run.world.first:
            output.begin()
            sign(output.partial, saved_run(run, identity, plan.balance, fp8=run.recipe.precision.fp8))
        run.world.barrier()
        model = _sharded_model(run)
        state |= model | {"optimizer": run.optimizer.sharded_state_dict(model, metadata=_metadata())}
        dist_checkpointing.save(state, str(output.partial), content_metadata=_CONTENT)
        run.world.barrier()
        if run.world.first:
            write_companions(output.partial / COMPANIONS, plan.source.companions)
            if describes(run.model):
                write_run_config(output.partial, args, run.model)
            if plan.model.wrapper:
                towers = plan.mapping.towers
                writer = TowersWriter(output.partial, towers.targets)
                writer.lay_out()
                copy_towers(towers, plan.source, writer)
                writer.finish(None)
            complete(output, run.step, sidecar_state, weight_encodings(plan.source), run.recipe.train.keep)
    run.world.barrier()


def _set_fp8_states(run: CoreRun, states: Fp8States) -> None:
    """Copy the states of linears into Transformer Engine's tensors. It refuses its own pickles of them, and Megatron
    puts those of experts together wrongly if they were cut for another number of ranks (`fp8/grouped.py`)."""
    from megatron.core.fp8_utils import get_fp8_recipe

    for stage, sharded in zip(run.stages, _sharded_model(run).values(), strict=True):
        recipe = get_fp8_recipe(stage.module.config)
        for key, saved in sharded.items():
            place, _, leaf = key.rpartition(".")
            if leaf != EXTRA_STATE[1:]:  # a grouped linear also has `_extra_state1` and so on, of its further experts
                continue
            name = object_name(saved.unique_key) or ""
            state, linear = states.modules.get(name.partition(EXTRA_STATE)[0]), stage.module.get_submodule(place)
            if state is None or not state.of_gemm:
                continue
            if (first := expert_of(name)) is not None:
                state = state.of_expert(slice(first, first + linear.num_gemms))
            linear.fp8_meta["num_gemms"] = state.roles["weight"].scale.numel()
            linear.init_fp8_meta_tensors(recipe)
            for group, columns in zip(("scaling_fwd", "scaling_bwd"), in_columns(state, ORDER[2]), strict=True):
                linear.fp8_meta[group].scale.copy_(columns.scale)
                linear.fp8_meta[group].amax_history.copy_(columns.history)


def _named(run: CoreRun) -> dict[int, str]:
    """For each stage of this rank, the name of its state in Megatron's state dict."""
    return {stage: f"model{stage}" if len(run.stages) > 1 else "model" for stage in range(len(run.stages))}


def _sharded_model(run: CoreRun) -> dict[str, Any]:
    return {
        name: run.stages[stage].module.sharded_state_dict(metadata=_metadata()) for stage, name in _named(run).items()
    }


def _metadata() -> dict[str, Any]:
    """What Megatron asks for beside what it stores."""
    from megatron.core import parallel_state

    return {**_CONTENT, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}

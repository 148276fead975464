"""Real megatron-core saves a model with its optimizer after one update: `python mcore_optimizer.py OUT ARGS.json`.

OUT gets a checkpoint for each way of megatron-core to store an optimizer, and `expected.pt`: the masters and moments
that the plain optimizer holds in memory, by parameter. `rates.json` has, for several schedules, what megatron-core's
scheduler saves and the learning rates of the updates after that.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore_peer import build, queue_without_imports

from precisionctl.mcore.stand_ins import support_pytorch_adam, without_cuda


def optimizer_of(model: Any, distributed: bool, clip: float = 1.0) -> Any:
    """An optimizer that has made no update, and gradients that are the same on all ranks that share a parameter."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    wanted = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    parallel = DistributedDataParallel(model.config, wanted, model)
    for parameter in model.parameters():
        torch.manual_seed(parameter.numel())
        parameter.main_grad.copy_(torch.randn(parameter.shape) * 0.01)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=True,
        use_distributed_optimizer=distributed,
        params_dtype=torch.bfloat16,
        clip_grad=clip,
    )
    return get_megatron_optimizer(settings, [parallel])


def updated(model: Any, distributed: bool) -> Any:
    """An optimizer after an update, without clipping: norms are summed in another order by each kind."""
    support_pytorch_adam()
    optimizer = optimizer_of(model, distributed, clip=0.0)
    optimizer.step()
    return optimizer


def hold_optimizer(model: Any, optimizer: Any, where: str, rank: int) -> None:
    """Write this rank's masters and moments by Megatron's names, but for those that data parallelism cuts."""
    states: dict[Any, Any] = {}
    for one in optimizer.chained_optimizers:
        states |= one.optimizer.state
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        held = {}
        for name, parameter in model.named_parameters():
            master = parameter.main_param
            if master is not None and master.numel() == parameter.numel():
                value = master if kind == "param" else states[master][kind]
                held[name] = value.detach().clone().view(parameter.shape)
        torch.save(held, f"{where}.{kind}.rank{rank}.pt")


SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"lr_decay_style": "cosine"},
    "linear, from above 0": {"lr_decay_style": "linear", "init_lr": 1e-5},
    "constant": {"lr_decay_style": "constant"},
    "inverse": {"lr_decay_style": "inverse-square-root", "min_lr": 4e-4},
    "no warm-up": {"lr_decay_style": "cosine", "lr_warmup_steps": 0},
    **{
        f"WSD {style}": {"lr_decay_style": "WSD", "wsd_decay_steps": 40, "lr_wsd_decay_style": style}
        for style in ("linear", "cosine", "exponential", "minus_sqrt")
    },
}
BATCH = 4


def scheduler_of(optimizer: Any, **changes: Any) -> Any:
    """Warm-up over 20 samples, decay to 100."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    usual = {"init_lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 20, "lr_decay_steps": 100}
    decay = {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": 100, "wd_incr_style": "constant"}
    return OptimizerParamScheduler(optimizer, **{**usual, **decay, **changes})


def rates(updates: int) -> dict[str, Any]:
    """Of each schedule the state after so many updates, and the rates of those to come."""
    found = {}
    for name, changes in SCHEDULES.items():
        groups = [{"lr": 0.0, "weight_decay": 0.0}]
        scheduler = scheduler_of(argparse.Namespace(param_groups=groups), **changes)
        for _ in range(updates):
            scheduler.step(BATCH)
        state, coming = scheduler.state_dict(), []
        for _ in range(30):
            coming.append(groups[0]["lr"])
            scheduler.step(BATCH)
        args = {"lr_warmup_init": scheduler.init_lr, "lr_wsd_decay_style": scheduler.lr_wsd_decay_style}
        args |= {"lr_wsd_decay_samples": scheduler.wsd_decay_steps}
        found[name] = {"state": state, "args": args, "rates": coming}
    return found


def save(out: Path, way: str, args: argparse.Namespace) -> None:
    from megatron.core import dist_checkpointing

    torch.manual_seed(1)
    model = build(args, {"tensor_parallel": 1, "pipeline_parallel": 1})
    kind, _, distributed = way.partition(", ")
    optimizer = optimizer_of(model, way not in ("plain", "torch"))
    optimizer.step()
    scheduler = scheduler_of(optimizer, lr_decay_style="cosine")
    for _ in range(5):
        scheduler.step(BATCH)
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 5}
    state["opt_param_scheduler"] = scheduler.state_dict()
    folder = out / way / "iter_0000005"
    if kind == "torch":
        (rank := folder / "mp_rank_00").mkdir(parents=True)
        if distributed:
            optimizer.save_parameter_state(str(rank / "distrib_optim.pt"))
        state |= {"model": model.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict()}
        torch.save(state, rank / "model_optim_rng.pt")
    else:
        metadata = {"chained_optim_avoid_prefix": True, "distrib_optim_sharding_type": way}
        state["model"] = model.sharded_state_dict()
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
        folder.mkdir(parents=True)
        dist_checkpointing.save(state, str(folder), content_metadata=metadata)
    (out / way / "latest_checkpointed_iteration.txt").write_text("5")
    if way == "plain":
        masters = {name: parameter.main_param for name, parameter in model.named_parameters()}
        states = optimizer.chained_optimizers[0].optimizer.state
        expected = {name: {"param": master, **states[master]} for name, master in masters.items()}
        torch.save(expected, out / "expected.pt")


WAYS = ("plain", "fully_reshardable", "dp_reshardable", "torch", "torch, distributed")


def main() -> None:
    from megatron.core import parallel_state

    out, args = Path(sys.argv[1]), argparse.Namespace(**json.loads(Path(sys.argv[2]).read_text()))
    args.params_dtype, args.bf16 = torch.bfloat16, True
    queue_without_imports()
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    with without_cuda():
        for way in WAYS:
            save(out, way, args)
    (out / "rates.json").write_text(json.dumps(rates(3)))


if __name__ == "__main__":
    main()

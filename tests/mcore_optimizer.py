"""Real megatron-core saves a model with its optimizer after one update: `python mcore_optimizer.py OUT ARGS.json`.

OUT gets a checkpoint for each way of megatron-core to store an optimizer by parameter, and `expected.pt`: the
masters and moments that the plain optimizer holds in memory, by parameter.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore_peer import build, without_cuda


def allow_cpu_optimizers() -> None:
    """They look for `torch.cuda.FloatTensor` and its like in the names of parameters' types."""
    by_name = torch.Tensor.type

    def of_cuda(self: torch.Tensor, *dtype: Any) -> Any:
        return by_name(self, *dtype) if dtype else f"torch.cuda.{by_name(self).rpartition('.')[2]}"

    torch.Tensor.type = of_cuda  # type: ignore[method-assign, assignment]
    without_steps()


def without_steps() -> None:
    """PyTorch's Adam counts updates for each parameter, Apex's and Transformer Engine's for a group of them: loading
    `fully_reshardable` brings no count for a parameter."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    by_name = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, parameter: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, place = self.model_param_group_index_map[parameter]
        master = self.optimizer.param_groups[group]["params"][place]
        by_name(self, parameter, {"step": self.optimizer.state[master]["step"], **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


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
    allow_cpu_optimizers()
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


def save(out: Path, way: str, args: argparse.Namespace) -> None:
    from megatron.core import dist_checkpointing

    torch.manual_seed(1)
    model = build(args, {"tensor_parallel": 1, "pipeline_parallel": 1})
    optimizer = optimizer_of(model, way == "fully_reshardable")
    optimizer.step()
    metadata = {"chained_optim_avoid_prefix": True, "distrib_optim_sharding_type": way}
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 5, "model": model.sharded_state_dict()}
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
    (out / way / "iter_0000005").mkdir(parents=True)
    dist_checkpointing.save(state, str(out / way / "iter_0000005"), content_metadata=metadata)
    (out / way / "latest_checkpointed_iteration.txt").write_text("5")
    if way == "plain":
        masters = {name: parameter.main_param for name, parameter in model.named_parameters()}
        states = optimizer.chained_optimizers[0].optimizer.state
        expected = {name: {"param": master, **states[master]} for name, master in masters.items()}
        torch.save(expected, out / "expected.pt")


def main() -> None:
    from megatron.core import parallel_state

    out, args = Path(sys.argv[1]), argparse.Namespace(**json.loads(Path(sys.argv[2]).read_text()))
    args.params_dtype, args.bf16 = torch.bfloat16, True
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    without_cuda()
    allow_cpu_optimizers()
    for way in ("plain", "fully_reshardable"):
        save(out, way, args)


if __name__ == "__main__":
    main()

"""World: the processes that train together under torchrun, and their collectives.

Data parallelism is PyTorch's FSDP2: each parameter is sharded by rows, a layer is gathered only while it computes, and
gradients are reduced in FP32. A sharded parameter is FP32 and so its own master weight; layers compute with its
rounding, which is the same as in one process. Under tensor parallelism modules are created with a rank's shard of each
parameter (`group_ranks`), which FSDP2 shards again.

Short messages (who is ready, who failed) go through the key-value store of `ranks`. Tensors go through a process group:
those on GPUs by NCCL, those on the CPU by gloo, so that exchanges between hosts do not wait for GPUs.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from precisionctl.conversion.ranks import NO_OTHERS, Ranks, from_environment, number_in
from precisionctl.errors import EnvironmentProblem, RecipeError
from precisionctl.recipe import ParallelSettings, Recipe
from precisionctl.sizes import counted
from precisionctl.trainer.parallel.group_ranks import NO_TENSOR_PARALLELISM, ExpertRanks, TensorRanks

Module = TypeVar("Module", bound=nn.Module)

_TIME_TO_REPORT = 2.0
"""Seconds that other ranks wait while one reports its error: torchrun stops all ranks as soon as one has ended."""


class World:
    """All ranks of a training run, seen from this one.

    `mesh` is `[replicate, shard, tensor]`: the model is sharded over `shard * tensor` ranks, and there are `replicate`
    such copies. Ranks along `tensor` have the same rows of data, all others their own. Without a mesh nothing is
    sharded; in one process all collectives do nothing. With `whole` FSDP2 does not shard, and the optimizer reduces
    gradients itself; with `gathers_once` it gathers parameters and reduces gradients once in an update. `expert_mesh`,
    under expert parallelism, is `[replicate, shard, expert, tensor]` of the same ranks; those along its `shard` have
    the same experts.
    """

    def __init__(
        self,
        ranks: Ranks = NO_OTHERS,
        mesh: DeviceMesh | None = None,
        expert_mesh: DeviceMesh | None = None,
        *,
        sequence: bool = False,
        whole: bool = False,
        gathers_once: bool = False,
    ) -> None:
        self.rank, self.count, self.first = ranks.rank, ranks.count, ranks.first
        self._ranks, self._mesh, self._expert_mesh = ranks, mesh, expert_mesh
        self._whole, self._gathers_once = whole, gathers_once
        self.tensor = NO_TENSOR_PARALLELISM if mesh is None else TensorRanks.of(mesh, sequence)
        self.experts = ExpertRanks() if expert_mesh is None else ExpertRanks.of(expert_mesh)
        self.data_rank, self.data_count = self.rank // self.tensor.size, self.count // self.tensor.size
        self._barriers = 0

    @property
    def shards_parameters(self) -> bool:
        """Whether FSDP2 shards parameters, so that they are gathered only while their layer computes."""
        return self._mesh is not None and not self._whole

    @property
    def sharing(self) -> int:
        """The number of ranks among which FSDP2 shards a parameter, but for those of experts."""
        return self._mesh["shard"].size() if self.shards_parameters and self._mesh else 1

    @property
    def writes(self) -> bool:
        """Whether this rank saves its part of the model, as the ranks of the first copy do."""
        return self._mesh is None or self._mesh.get_local_rank("replicate") == 0

    def sharded_experts(self, module: Module, dtype: torch.dtype) -> Module:
        """As `sharded`, for experts under expert parallelism, which only some of the ranks have."""
        return module if self._expert_mesh is None else self._fully_shard(module, dtype, self._expert_mesh)

    def sharded(self, module: Module, dtype: torch.dtype) -> Module:
        """Shard a module's parameters by FSDP2, if this World does, and return the module. Its parameters become FP32;
        it computes in `dtype`.

        Submodules that are already sharded are left alone, and so are frozen parameters in FP32 or of integers (a
        router's bias, its table), which are small and computed with as they are.
        """
        return self._fully_shard(module, dtype, self._mesh) if self.shards_parameters and self._mesh else module

    def _fully_shard(self, module: Module, dtype: torch.dtype, mesh: DeviceMesh) -> Module:
        as_they_are = (torch.float32, torch.int64)
        kept = {each for each in module.parameters() if not each.requires_grad and each.dtype in as_they_are}
        module.float()
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        sharded = fully_shard(
            module,
            mesh=mesh["replicate", "shard"],
            reshard_after_forward=False if self._gathers_once else None,
            mp_policy=policy,
            ignored_params=kept,
        )
        sharded.set_gradient_divide_factor(1.0)  # losses are divided by the targets of all ranks
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
        return module

    def reshard(self, module: nn.Module) -> None:
        """Free the parameters that FSDP2 has gathered, after passes without a backward, which would free them."""
        for each in module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()

    def begin_pass(self, module: nn.Module, *, last: bool) -> None:
        """Before a pass of an update. Gradients are summed over copies of a model after the last one only, and so, if
        parameters are gathered once, is everything that the ranks of a copy exchange."""
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(last)
            if self._gathers_once:
                module.set_requires_gradient_sync(last)
                module.set_reshard_after_backward(last)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks of values of the same shape."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """The maximum over all ranks of values of the same shape."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def sum_over_data_ranks(self, values: Tensor) -> Tensor:
        """The sum over ranks with different rows of data, of values of the same shape: of tensor ranks, which have the
        same value, only the first is counted."""
        return self.all_reduce_sum(values if self.tensor.rank == 0 else torch.zeros_like(values))

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send row r of `parts` `[ranks, n]` to rank r; returns what all ranks sent to this one, `[ranks, n]`."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return received

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts `[n]` of all ranks, as `[ranks, n]`."""
        parts = part.new_empty(self.count, len(part))
        dist.all_gather(list(parts), part)
        return parts

    def _all_reduce(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.count == 1:
            return values
        values = values.clone()
        dist.all_reduce(values, how)
        return values

    def barrier(self) -> None:
        """Wait until all ranks have got here. Raises OutputError if one failed."""
        self._barriers += 1
        name = f"met {self._barriers}"
        if self.first:
            self._ranks.receive_all(name)
            self._ranks.publish(name)
        else:
            self._ranks.publish(f"{name}.{self.rank}")
            self._ranks.receive(name)


ALONE = World()


def local(values: Tensor) -> Tensor:
    """This rank's shard of a tensor that may be sharded."""
    return values.to_local().detach() if isinstance(values, DTensor) else values.detach()


@contextmanager
def together() -> Iterator[Ranks]:
    """The ranks that torchrun or Slurm describe. If one fails, all end: the first to fail raises its error, the others
    raise SystemExit."""
    ranks = from_environment()
    try:
        with ranks.together():
            yield ranks
    except Exception as error:
        if ranks.store is None:
            raise
        first_to_fail = True
        with suppress(Exception):  # the store may be gone, and then nobody can be asked
            first_to_fail = ranks.store.add("failed ranks", 1) == 1
        if not first_to_fail:
            time.sleep(_TIME_TO_REPORT)
            raise SystemExit(1) from None
        if ranks.first:  # the store dies with this process: wait until all have asked it, unless one is dead
            until = time.monotonic() + _TIME_TO_REPORT / 2  # before the others leave
            with suppress(Exception):
                while ranks.store.add("failed ranks", 0) < ranks.count and time.monotonic() < until:
                    time.sleep(0.02)
        # What PyTorch raises in a collective when another rank has ended. gloo's has no type, but names its source file
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            raise EnvironmentProblem(
                f"another rank ended without a message: {first_line}",
                do="Was it killed? The same command continues from the newest checkpoint.",
            ) from error
        raise


@contextmanager
def world(ranks: Ranks, recipe: Recipe) -> Iterator[World]:
    """The World of a run of this recipe. Raises RecipeError as `check`."""
    check(ranks.count, recipe)
    if ranks.count == 1:
        yield World()
        return
    with process_group(ranks) as device:
        sizes, whole = recipe.parallel, not shards_parameters(ranks.count, recipe)
        once, meshes = sizes.gather == "per-update", _meshes(device, ranks.count, sizes)
        yield World(ranks, *meshes, sequence=sizes.sequence, whole=whole, gathers_once=once)


@contextmanager
def process_group(ranks: Ranks) -> Iterator[str]:
    """PyTorch's process group of all ranks, for tensors on CPUs and on GPUs if there are any. Yields their kind."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        here = number_in(os.environ, "LOCAL_RANK", number_in(os.environ, "SLURM_LOCALID", 0))
        torch.cuda.set_device(here)
    dist.init_process_group(
        {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}[device],
        store=ranks.store or dist.HashStore(),  # type: ignore[attr-defined]  # public, and not in the stubs
        rank=ranks.rank,
        world_size=ranks.count,
    )
    try:
        yield device
    finally:
        with suppress(Exception):  # others may be gone
            dist.destroy_process_group()


def _meshes(device: str, count: int, sizes: ParallelSettings) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The meshes of a World. Tensor ranks are neighbours, as they communicate most; then expert ranks."""
    shard = count // (sizes.replicate * sizes.tensor)
    mesh = init_device_mesh(
        device, (sizes.replicate, shard, sizes.tensor), mesh_dim_names=("replicate", "shard", "tensor")
    )
    if sizes.expert == 1:
        return mesh, None
    dealt = (sizes.replicate, shard // sizes.expert, sizes.expert, sizes.tensor)
    return mesh, init_device_mesh(device, dealt, mesh_dim_names=("replicate", "shard", "expert", "tensor"))


def shards_parameters(count: int, recipe: Recipe) -> bool:
    """Whether FSDP2 shards the parameters of a run on `count` ranks. FP8-LM's optimizer needs whole ones."""
    return count > 1 and recipe.optimizer.preset != "fp8-lm"


def check(count: int, recipe: Recipe) -> None:
    """Raise RecipeError for a recipe that does not fit `count` ranks."""
    sizes = recipe.parallel
    if sizes.pipeline > 1 or sizes.context > 1:
        raise RecipeError(
            "the bundled trainer has neither parallel.pipeline nor parallel.context",
            do="Give --engine megatron-core, or leave them out.",
        )
    if count % (sizes.replicate * sizes.tensor):
        of = f" of {sizes.tensor} tensor-parallel ranks" if sizes.tensor > 1 else ""
        raise RecipeError(
            f"{counted(count, 'rank')} cannot hold parallel.replicate = {sizes.replicate} copies of the model{of}",
            do=f"Choose numbers whose product divides the {counted(count, 'rank')}.",
        )
    shard, rows = count // (sizes.replicate * sizes.tensor), count // sizes.tensor
    if shard % sizes.expert:
        those = counted(shard, "rank that shares", "ranks that share")
        raise RecipeError(
            f"parallel.expert = {sizes.expert} does not divide the {those} a copy of the model",
            do="Choose a divisor of that number, which is all ranks divided by parallel.tensor and parallel.replicate.",
        )
    if recipe.train.batch_size % rows:
        raise RecipeError(
            f"train.batch_size {recipe.train.batch_size} cannot be divided evenly among {rows} ranks",
            do=f"Choose a multiple of {rows}, or another number of ranks.",
        )
    if recipe.optimizer.preset == "fp8-lm" and sizes.replicate != count:
        raise RecipeError(
            "fp8-lm needs the whole model on every rank, and these ranks share one",
            do=f"Give --set parallel.replicate={count} and no parallel.tensor, or leave optimizer.preset out.",
        )
    if count > 1 and recipe.train.weight_casts == "per-update" and recipe.optimizer.preset != "fp8-lm":
        raise RecipeError(
            "train.weight_casts = per-update keeps FP8 weights between passes, and these ranks have only parts of them",
            do="Leave it out.",
        )
    if count > 1 and not recipe.precision.delayed.reduce_amax:
        raise RecipeError(
            "precision.delayed.reduce_amax = false lets each rank have scales of its own, and a checkpoint has one set",
            do="Leave it true.",
        )

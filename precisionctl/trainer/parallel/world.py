"""World: the processes that train together under torchrun, and what each has of the model.

Data parallelism as PyTorch's FSDP2 does it: each parameter is cut by its rows, the whole layer is there only while it
computes, and gradients are summed in FP32. A cut parameter is FP32, and so its own master weight; what layers compute
with is its rounding, the very values that one process has. Tensor parallelism is below that: modules are made with a
rank's part of each parameter (`group_ranks`), and that is what FSDP2 cuts.

Few words (who is ready, who failed) go through the store of `ranks`, tensors through a process group: those on GPUs by
NCCL, those in memory by gloo, so that what hosts tell each other waits for no GPU.
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

from precisionctl.conversion.ranks import ALONE as NO_OTHERS
from precisionctl.conversion.ranks import Ranks, from_environment
from precisionctl.errors import EnvironmentProblem, RecipeError
from precisionctl.recipe import ParallelSettings, Recipe
from precisionctl.trainer.parallel.group_ranks import ALL_OF_IT, ExpertRanks, TensorRanks

Module = TypeVar("Module", bound=nn.Module)

_SPEAKING = 2.0
"""Seconds that the rank which says what happened is given for it: torchrun stops all others when the first one ends."""


class World:
    """`mesh` is `[replicate, shard, tensor]`: the model is cut for `shard * tensor` ranks, and there are `replicate`
    such copies. `tensor` ranks share rows of data; all others have rows of their own. None is one process, which has
    all of the model and waits for nobody. With `whole` nothing is cut, and an optimizer sums gradients itself.

    `expert_mesh`, where experts are dealt out, is `[replicate, shard, expert, tensor]`: the same ranks, of whose
    `shard` those with the same experts are left as such.
    """

    def __init__(
        self,
        ranks: Ranks = NO_OTHERS,
        mesh: DeviceMesh | None = None,
        expert_mesh: DeviceMesh | None = None,
        *,
        sequence: bool = False,
        whole: bool = False,
    ) -> None:
        self.rank, self.count, self.first = ranks.rank, ranks.count, ranks.first
        self._ranks, self._mesh, self._expert_mesh, self._whole = ranks, mesh, expert_mesh, whole
        self.tensor = ALL_OF_IT if mesh is None else TensorRanks.of(mesh, sequence)
        self.experts = ExpertRanks() if expert_mesh is None else ExpertRanks.of(expert_mesh)
        self.data_rank, self.data_count = self.rank // self.tensor.size, self.count // self.tensor.size
        self._meetings = 0

    @property
    def cuts(self) -> bool:
        """Whether parameters are whole only while their layer computes."""
        return self._mesh is not None and not self._whole

    @property
    def writes(self) -> bool:
        """Whether this rank's part of the model is to be saved: that of the first copy is."""
        return self._mesh is None or self._mesh.get_local_rank("replicate") == 0

    def sharded_experts(self, module: Module, dtype: torch.dtype) -> Module:
        """As `sharded`, of experts that are dealt out: only some of the ranks have them."""
        return module if self._expert_mesh is None else self._cut(module, dtype, self._expert_mesh)

    def sharded(self, module: Module, dtype: torch.dtype) -> Module:
        """The module, of whose parameters this rank keeps its rows from now on, in FP32; it computes in `dtype`.

        Modules in it that are cut already are left as they are. So is what is frozen and FP32 (the bias of a router):
        it is small, and computes in FP32.
        """
        return self._cut(module, dtype, self._mesh) if self.cuts and self._mesh else module

    def _cut(self, module: Module, dtype: torch.dtype, mesh: DeviceMesh) -> Module:
        kept = {each for each in module.parameters() if not each.requires_grad and each.dtype == torch.float32}
        module.float()
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        cut = fully_shard(module, mesh=mesh["replicate", "shard"], mp_policy=policy, ignored_params=kept)
        cut.set_gradient_divide_factor(1.0)  # losses are divided by the targets of all ranks
        cut.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        return module

    def rest(self, module: nn.Module) -> None:
        """After passes without a backward, which would have let go of what a model keeps whole until then."""
        if isinstance(module, FSDPModule):
            module.reshard()

    def sum(self, values: Tensor) -> Tensor:
        """Over all ranks, of values of the same shape."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def sum_of_data(self, values: Tensor) -> Tensor:
        """Over all rows of data, of values of the same shape: what tensor ranks have alike counts once."""
        return self.sum(values if self.tensor.rank == 0 else torch.zeros_like(values))

    def largest(self, values: Tensor) -> Tensor:
        """Over all ranks, of values of the same shape."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def exchanged(self, parts: Tensor) -> Tensor:
        """`[ranks, n]`, a part for each rank; gives what they all had for this one."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return received

    def gathered(self, part: Tensor) -> Tensor:
        """`[n]` of each rank, as `[ranks, n]`."""
        parts = part.new_empty(self.count, len(part))
        dist.all_gather(list(parts), part)
        return parts

    def _reduced(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self._mesh is None:
            return values
        values = values.clone()
        dist.all_reduce(values, how)
        return values

    def meet(self) -> None:
        """Wait until all ranks are here. Raises OutputError where one failed."""
        self._meetings += 1
        name = f"met {self._meetings}"
        if self.first:
            self._ranks.hear_all(name)
            self._ranks.tell(name)
        else:
            self._ranks.tell(f"{name}.{self.rank}")
            self._ranks.hear(name)


ALONE = World()


def local(values: Tensor) -> Tensor:
    """What this rank has of a tensor that may be cut."""
    return values.to_local().detach() if isinstance(values, DTensor) else values.detach()


@contextmanager
def together() -> Iterator[Ranks]:
    """The ranks that torchrun or Slurm describe. Where one fails all end, and one of them says why: the others raise
    SystemExit."""
    ranks = from_environment()
    try:
        with ranks.together():
            yield ranks
    except Exception as error:
        if ranks.store is None:
            raise
        speaks = True
        with suppress(Exception):  # the store may be gone, and then nobody can be asked
            speaks = ranks.store.add("speaks", 1) == 1
        if not speaks:
            time.sleep(_SPEAKING)
            raise SystemExit(1) from None
        if ranks.first:
            _hear_out(ranks)
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise EnvironmentProblem(
                f"another rank ended without a message: {str(error).splitlines()[0]}",
                do="Was it killed? The same command continues from the newest checkpoint.",
            ) from error
        raise


def _hear_out(ranks: Ranks) -> None:
    """Wait until all have asked who speaks, as the store ends with the first rank; not for long: one may be dead."""
    assert ranks.store is not None
    until = time.monotonic() + _SPEAKING / 2  # the others leave after all of it
    with suppress(Exception):
        while ranks.store.add("speaks", 0) < ranks.count and time.monotonic() < until:
            time.sleep(0.02)


@contextmanager
def world(ranks: Ranks, recipe: Recipe) -> Iterator[World]:
    """What ranks are to each other in a run of this recipe. Raises RecipeError where they cannot share its work."""
    check(ranks.count, recipe)
    if ranks.count == 1:
        yield World()
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(_local_rank())
    dist.init_process_group(
        {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}[device],
        store=ranks.store,
        rank=ranks.rank,
        world_size=ranks.count,
    )
    try:
        sizes, whole = recipe.parallel, not are_cut(ranks.count, recipe)
        yield World(ranks, *_meshes(device, ranks.count, sizes), sequence=sizes.sequence, whole=whole)
    finally:
        with suppress(Exception):  # others may be gone
            dist.destroy_process_group()


def _meshes(device: str, count: int, sizes: ParallelSettings) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Tensor ranks are neighbours, for they speak most; then those of experts."""
    shard = count // (sizes.replicate * sizes.tensor)
    mesh = init_device_mesh(
        device, (sizes.replicate, shard, sizes.tensor), mesh_dim_names=("replicate", "shard", "tensor")
    )
    if sizes.expert == 1:
        return mesh, None
    dealt = (sizes.replicate, shard // sizes.expert, sizes.expert, sizes.tensor)
    return mesh, init_device_mesh(device, dealt, mesh_dim_names=("replicate", "shard", "expert", "tensor"))


def are_cut(count: int, recipe: Recipe) -> bool:
    """Whether a run of so many ranks has parameters whole only while their layer computes."""
    return count > 1 and recipe.optimizer.preset != "fp8-lm"


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID", "0"))


def check(count: int, recipe: Recipe) -> None:
    """Raise RecipeError for a run that cannot be dealt out to so many ranks."""
    sizes = recipe.parallel
    if count % (sizes.replicate * sizes.tensor):
        of = f" of {sizes.tensor} tensor-parallel ranks" if sizes.tensor > 1 else ""
        raise RecipeError(
            f"{count} ranks cannot hold parallel.replicate = {sizes.replicate} copies of the model{of}",
            do=f"Choose numbers whose product divides the {count} ranks.",
        )
    shard, rows = count // (sizes.replicate * sizes.tensor), count // sizes.tensor
    if shard % sizes.expert:
        raise RecipeError(
            f"parallel.expert = {sizes.expert} does not divide the {shard} ranks that share a copy of the model",
            do="Ranks of experts are taken from those with rows of their own: of all, divided by tensor and replicate.",
        )
    if recipe.train.batch_size % rows:
        raise RecipeError(
            f"train.batch_size {recipe.train.batch_size} cannot be dealt out to {rows} ranks evenly",
            do=f"Choose a multiple of {rows}, or another number of ranks.",
        )
    if recipe.optimizer.preset == "fp8-lm" and sizes.replicate != count:
        raise RecipeError(
            "fp8-lm sums gradients of whole models, and these ranks share one",
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

"""Shards: what a rank has of each parameter of a model under tensor and expert parallelism, and whether a model can be
sharded so.

The rows of the family's table say how a tensor is cut (`param.Parallel`), here as in every Megatron checkpoint.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from precisionctl.architectures.families import architecture_of
from precisionctl.architectures.param_map import names
from precisionctl.checkpoints.base import shard_boxes, whole
from precisionctl.checkpoints.module import TensorShard
from precisionctl.errors import RecipeError
from precisionctl.fp8.state import Role
from precisionctl.model_shape import ModelShape
from precisionctl.param import REPLICATED, TensorSpec
from precisionctl.recipe import ParallelSettings
from precisionctl.trainer.parallel.world import ALONE, World, local

_REPLICATED_IN_REGIONS = ("q_layernorm", "k_layernorm", "router")
"""Modules that all tensor ranks have whole, inside of a region: their gradients there are partial sums."""

_WITH_ALL_TOKENS = ("linear_q_down_proj", "linear_kv_down_proj", "linear_q_up_proj", "linear_kv_up_proj")
"""Modules of MLA that see all tokens whatever `sequence` says, so that norms in them have whole gradients."""


class ModelShards:
    """`tensors`, by Megatron name, of all parameters of a model that the ranks of `world` share."""

    def __init__(self, tensors: Mapping[str, TensorShard], world: World = ALONE) -> None:
        self.tensors, self.world = tensors, world

    @classmethod
    def of(cls, model: ModelShape, dtype: torch.dtype, world: World) -> "ModelShards":
        """What this rank has of a model whose parameters are of `dtype`."""
        mine = world.experts.local_experts(model.moe.num_experts) if model.moe else range(0)
        shards = {}
        for row in architecture_of(model.architecture).spelled({}, model):
            if not row.present.in_layout("megatron", model):
                continue
            untrained = "{mtp}" in row.megatron  # nothing computes with it, and all ranks have all of it
            spec = TensorSpec(row.shape(model), dtype, REPLICATED if untrained else row.parallel)
            replicated = spec.parallel == REPLICATED
            boxes = [whole(spec)] if replicated else shard_boxes(spec, world.tensor.size)[world.tensor.rank]
            for place in row.places(model):
                is_here = "mtp" in place or place.get("expert") in (None, *mine)
                shards[names(row, "megatron", place)[0]] = TensorShard(spec, boxes if is_here else [])
        return cls(shards, world)

    @cached_property
    def saved(self) -> Mapping[str, TensorShard]:
        """What this rank saves: all but what tensor ranks have alike, which the first of those saves."""
        return {name: each if self.is_own(name) else replace(each, boxes=[]) for name, each in self.tensors.items()}

    def is_own(self, name: str) -> bool:
        """Whether no other tensor rank has the same of a parameter, or this is the first of those."""
        return self.world.tensor.rank == 0 or self._is_sharded(name)

    def _is_sharded(self, name: str) -> bool:
        """Whether tensor ranks have different shards of a parameter."""
        return self.tensors[name].spec.parallel != REPLICATED

    def contributes_to_sum(self, module: str, role: Role, scattered: bool = False) -> bool:
        """Whether this rank's statistics of a module's role are to be added to those of other ranks: of what several
        ranks have alike, only the first one's are. Of a `scattered` output each tensor rank has tokens of its own."""
        tensor, data = self.world.tensor, self.world.data_rank
        if role == "weight" and data >= (self.world.experts.size if ".experts." in module else 1):
            return False
        if tensor.rank == 0 or (scattered and role == "grad_output"):
            return True
        if module.endswith("core_attention"):  # latents (MLA) are the same on all tensor ranks
            latent = module.replace("core_attention", "linear_kv_down_proj.weight") in self.tensors
            return role in ("k", "v") and not latent
        shard = self.tensors.get(f"{module}.weight") or self.tensors[f"{module}.weight0"]
        different = {"rows": ("weight", "grad_output"), "columns": ("weight", "input")}
        return role in different.get(shard.spec.parallel.kind, ())

    def all_reduce_partial(self, masters: Mapping[str, Tensor]) -> None:
        """Sum over tensor ranks the gradients of parameters that all of them have whole, and of whose gradients each
        has a partial sum."""
        ranks, partial = self.world.tensor, []
        for name, master in masters.items():
            modules = name.split(".")
            if ranks.size == 1 or not master.requires_grad or self._is_sharded(name) or modules[0] == "mtp":
                continue
            in_region = modules[-2] in _REPLICATED_IN_REGIONS or "experts" in modules
            if in_region or (ranks.sequence and modules[-2] not in _WITH_ALL_TOKENS):
                partial.append(master)
        if not partial:
            return
        for master in partial:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        gradients = [local(master.grad) for master in partial if master.grad is not None]
        total = ranks.all_reduce_sum(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, summed in zip(gradients, torch.split(total, [each.numel() for each in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm of all gradients together, FP32 `[]`: what several ranks have alike counts once."""
        tensor, experts = self.world.tensor, self.world.experts
        if tensor.size == experts.size == 1:
            return _norm(gradients.values())
        squares = torch.zeros((2, 2), device=next(iter(gradients.values())).device)  # [of dealt-out experts, sharded]
        for of_experts in (False, True):
            for sharded in (False, True):
                those = [
                    values
                    for name, values in gradients.items()
                    if (".experts." in name and experts.size > 1) == of_experts and self._is_sharded(name) == sharded
                ]
                squares[int(of_experts), int(sharded)] = _norm(those).square() if those else 0
        squares[:, 1] = tensor.all_reduce_sum(squares[:, 1])
        squares[1] = experts.all_reduce_sum(squares[1])
        return squares.sum().sqrt()


UNSHARDED = ModelShards({})
"""What one process has: all of each parameter."""


def _norm(gradients: Iterable[Tensor]) -> Tensor:
    norm = nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def check(model: ModelShape, sizes: ParallelSettings) -> None:
    """Raise RecipeError for a model that so many tensor and expert ranks cannot share."""
    moe = model.moe
    shared = {
        "attention heads": model.num_attention_heads,
        "query groups": sizes.tensor if model.mla else model.num_query_groups,
        "rows of the vocabulary, padded": model.padded_vocab_size,
        "channels of an MLP": model.ffn_hidden_size if moe is None or not all(moe.layer_freq) else sizes.tensor,
        "channels of an expert": moe.ffn_hidden_size if moe else sizes.tensor,
        "channels of the shared experts": (moe and moe.shared_ffn_hidden_size) or sizes.tensor,
    }
    for what, size in shared.items():
        if size % sizes.tensor:
            raise RecipeError(
                f"{size} {what} cannot be shared evenly by {sizes.tensor} ranks",
                do="Choose a parallel.tensor that divides them.",
            )
    experts = moe.num_experts if moe else 0
    if sizes.expert > 1 and (not experts or experts % sizes.expert):
        raise RecipeError(
            f"{experts} experts cannot be dealt out to parallel.expert = {sizes.expert} ranks evenly",
            do="Choose a number that divides them." if experts else "Leave parallel.expert out.",
        )

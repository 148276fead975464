"""Shares: what a rank has of each parameter of a model that tensor and expert ranks share, and whether they can.

The rows of the family's table say how a tensor is cut (`param.Parallel`), here as in every Megatron checkpoint.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from precisionctl.architectures.families import architecture_of
from precisionctl.architectures.param_map import Row, names
from precisionctl.checkpoints.base import shard_boxes, whole
from precisionctl.checkpoints.module import Part
from precisionctl.errors import RecipeError
from precisionctl.fp8.state import Role
from precisionctl.model_shape import ModelShape
from precisionctl.param import REPLICATED, TensorSpec
from precisionctl.recipe import ParallelSettings
from precisionctl.trainer.parallel.group_ranks import TensorRanks
from precisionctl.trainer.parallel.world import ALONE, World, local

_IN_REGIONS = ("q_layernorm", "k_layernorm", "router")
"""Modules that all tensor ranks have, each for its own part of a layer."""

_ON_ALL = ("linear_q_down_proj", "linear_kv_down_proj", "linear_q_up_proj", "linear_kv_up_proj")
"""Modules of MLA that see all tokens, with whole gradients."""


class Shares:
    """`parts` by Megatron name, of all parameters of a model that the ranks of `world` share. Those that are `saved` by
    this rank are they too, but what tensor ranks have alike: the first of those saves it."""

    def __init__(self, parts: Mapping[str, Part], world: World = ALONE) -> None:
        self.parts, self.world = parts, world

    @cached_property
    def saved(self) -> Mapping[str, Part]:
        return {name: part if self.is_own(name) else replace(part, boxes=[]) for name, part in self.parts.items()}

    def is_own(self, name: str) -> bool:
        """Whether no other tensor rank has the same of a parameter, or this is the first of those."""
        return self.world.tensor.rank == 0 or _is_cut(self.parts[name])

    @classmethod
    def of(cls, model: ModelShape, dtype: torch.dtype, world: World) -> "Shares":
        """What this rank has of a model whose parameters are of `dtype`."""
        mine = world.experts.mine(model.moe.num_experts) if model.moe else range(0)
        parts = {}
        for row in architecture_of(model.architecture).spelled({}, model):
            if row.present.in_layout("megatron", model):
                here, elsewhere = (_part(row, model, dtype, world.tensor, here) for here in (True, False))
                for place in row.places(model):
                    is_here = "mtp" in place or place.get("expert") in (None, *mine)
                    parts[names(row, "megatron", place)[0]] = here if is_here else elsewhere
        return cls(parts, world)

    def counts(self, module: str, role: Role, scattered: bool = False) -> bool:
        """Whether a rank's numbers of what its module is shown are to be added to those of others: of what several have
        alike, the first one's are. Of a `scattered` output each tensor rank has tokens of its own."""
        tensor, data = self.world.tensor, self.world.data_rank
        if role == "weight" and data >= (self.world.experts.size if ".experts." in module else 1):
            return False
        return tensor.rank == 0 or role in self._cut_roles(module) or (scattered and role == "grad_output")

    def _cut_roles(self, module: str) -> tuple[Role, ...]:
        """The roles of a module whose tensors are cut for tensor ranks, so that each rank sees another part."""
        if module.endswith("core_attention"):
            latent = module.replace("core_attention", "linear_kv_down_proj.weight") in self.parts
            return () if latent else ("k", "v")
        part = self.parts.get(f"{module}.weight") or self.parts[f"{module}.weight0"]
        kinds: Mapping[str, tuple[Role, ...]] = {"rows": ("weight", "grad_output"), "columns": ("weight", "input")}
        return kinds.get(part.spec.parallel.kind, ())

    def complete(self, masters: Mapping[str, Tensor]) -> None:
        """Sum what tensor ranks have of the gradients of parameters that all of them have."""
        ranks = self.world.tensor
        partial = [master for name, master in masters.items() if master.requires_grad and self._is_partial(name)]
        if not partial:
            return
        for master in partial:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        gradients = [local(master.grad) for master in partial if master.grad is not None]
        total = ranks.summed(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, summed in zip(gradients, torch.split(total, [each.numel() for each in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def _is_partial(self, name: str) -> bool:
        ranks, modules = self.world.tensor, name.split(".")
        if ranks.size == 1 or _is_cut(self.parts[name]) or modules[0] == "mtp":
            return False
        if modules[-2] in _IN_REGIONS or "experts" in modules:
            return True
        return ranks.sequence and modules[-2] not in _ON_ALL

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm of all gradients together, FP32 `[]`: what several ranks have alike counts once."""
        tensor, experts = self.world.tensor, self.world.experts
        if tensor.size == experts.size == 1:
            return _norm(gradients.values())
        squares = torch.zeros((2, 2), device=next(iter(gradients.values())).device)  # [of experts, cut]
        for of_experts in (0, 1):
            for cut in (0, 1):
                those = [values for name, values in gradients.items() if self._kind(name) == (of_experts, cut)]
                squares[of_experts, cut] = _norm(those).square() if those else 0
        squares[:, 1] = tensor.summed(squares[:, 1])
        squares[1] = experts.summed(squares[1])
        return squares.sum().sqrt()

    def _kind(self, name: str) -> tuple[int, int]:
        """Whether expert ranks have others of it, and tensor ranks other parts."""
        of_experts = ".experts." in name and self.world.experts.size > 1
        return int(of_experts), int(_is_cut(self.parts[name]))


ALL_MINE = Shares({})
"""What one process has: all of each parameter."""


def _part(row: Row, model: ModelShape, dtype: torch.dtype, ranks: TensorRanks, here: bool) -> Part:
    carried = "{mtp}" in row.megatron  # nothing computes with it, and all ranks have all of it
    spec = TensorSpec(row.shape(model), dtype, REPLICATED if carried else row.parallel)
    if not here:
        return Part(spec, [])
    return Part(spec, [whole(spec)] if spec.parallel == REPLICATED else shard_boxes(spec, ranks.size)[ranks.rank])


def _is_cut(part: Part) -> bool:
    """Whether tensor ranks have other parts of it."""
    return part.spec.parallel != REPLICATED


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
    if sizes.expert > 1:
        _check_experts(model, sizes)


def _check_experts(model: ModelShape, sizes: ParallelSettings) -> None:
    experts = model.moe.num_experts if model.moe else 0
    if not experts or experts % sizes.expert:
        raise RecipeError(
            f"{experts} experts cannot be dealt out to parallel.expert = {sizes.expert} ranks evenly",
            do="Choose a number that divides them." if experts else "Leave parallel.expert out.",
        )

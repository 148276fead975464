"""A rank's shard of each parameter under tensor and expert parallelism, and whether a model can be sharded so.

How a tensor is cut is in the rows of the family's table (`param.Parallel`), as for every Megatron checkpoint.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from precisionctl.architectures.families import architecture_of
from precisionctl.architectures.param_map import names
from precisionctl.checkpoints.chunks import Box, shard_boxes, whole
from precisionctl.checkpoints.module import TensorShard, local_rows
from precisionctl.dtypes import DType
from precisionctl.errors import RecipeError
from precisionctl.fp8.state import Role
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import REPLICATED, TensorSpec
from precisionctl.recipe import ParallelSettings
from precisionctl.trainer.parallel.world import ALONE, World, local

_REPLICATED_IN_REGIONS = (
    *("q_layernorm", "k_layernorm", "out_norm", "o_norm", "router", "pre_moe_layernorm", "activation_func"),
)
"""Modules that every tensor rank has whole, but inside a region, so that their gradients are partial sums."""

_OF_LATENTS = (
    *("linear_q_down_proj", "linear_kv_down_proj", "linear_q_up_proj", "linear_kv_up_proj"),
    *("q_layernorm", "kv_layernorm"),
)
"""Modules of MLA that see all tokens even with `sequence` and begin no region, so that gradients of norms are whole."""

_OF_LATENT_KV = ("linear_kv_up_proj", "kv_b_proj")
"""What makes keys and values of a latent, in every layer of latent attention: one that shares a latent makes none."""

_OF_ALL_TOKENS = (
    *("fc1_latent_proj", "fc2_latent_proj", "beta_proj", "f_a_proj", "g_a_proj"),
    *("dt_layernorm", "b_layernorm", "c_layernorm", "routed_expert_norm"),
    *("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"),
)
"""Modules that see all tokens too: around experts of a latent size, those of Kimi delta attention and of Kimi K3's
latent attention that every tensor rank has whole, and norms of what a Mamba-1 mixer's ranks add up."""


class ModelShards:
    """This rank's shards of all parameters of a model that is distributed over the ranks of `world`: `tensors`, by
    Megatron name."""

    def __init__(self, tensors: Mapping[str, TensorShard], world: World = ALONE) -> None:
        self.tensors, self.world = tensors, world

    @classmethod
    def of(cls, model: ModelShape, dtype: torch.dtype, world: World) -> "ModelShards":
        """This rank's shards of a model with parameters of `dtype`."""
        mine = world.experts.local_experts(model.moe.num_experts) if model.moe else range(0)
        shards = {}
        for row in architecture_of(model.architecture).in_megatron(model):
            untrained = row.of_prediction  # not computed with, and whole on all ranks
            spec = TensorSpec(row.shape(model), DType.of(dtype), REPLICATED if untrained else row.cut(model))
            replicated = spec.parallel == REPLICATED
            boxes = [whole(spec)] if replicated else shard_boxes(spec, world.tensor.size)[world.tensor.rank]
            for place in row.places(model):
                is_here = "mtp" in place or place.get("expert") in (None, *mine)
                shards[names(row, "megatron", place)[0]] = TensorShard(spec, boxes if is_here else [])
        return cls(shards, world)

    @cached_property
    def saved(self) -> Mapping[str, TensorShard]:
        """The shards that this rank saves: what all tensor ranks have is saved only by the first."""
        return {name: each if self.is_own(name) else replace(each, boxes=[]) for name, each in self.tensors.items()}

    def is_own(self, name: str) -> bool:
        """Whether this rank stands for its part of a parameter: the tensor ranks have different shards of it, or it is
        the first of them."""
        return self.world.tensor.rank == 0 or self._is_sharded(name)

    def _is_sharded(self, name: str) -> bool:
        """Whether tensor ranks have different shards of a parameter."""
        return self.tensors[name].spec.parallel != REPLICATED

    def contributes_to_sum(self, module: str, role: Role, scattered: bool) -> bool:
        """Whether this rank's statistics of a module's role are added to those of other ranks. Of a tensor that several
        ranks have, only the first rank's are. With `scattered`, each tensor rank has other tokens of the output."""
        tensor, data = self.world.tensor, self.world.data_rank
        if role == "weight" and data >= (self.world.experts.size if ".experts." in module else 1):
            return False
        if tensor.rank == 0 or (scattered and role == "grad_output"):
            return True
        if module.endswith("core_attention"):  # latents (MLA) are the same on all tensor ranks
            ups = (module.replace("core_attention", f"{up}.weight") for up in _OF_LATENT_KV)
            latent = any(up in self.tensors for up in ups)
            return role in ("k", "v") and not latent
        shard = self.tensors.get(f"{module}.weight") or self.tensors[f"{module}.weight0"]
        different = {"rows": ("weight", "grad_output"), "columns": ("weight", "input")}
        return role in different.get(shard.spec.parallel.kind, ())

    def all_reduce_partial(self, masters: Mapping[str, Tensor]) -> None:
        """All-reduce over the tensor ranks, in place, the gradients of parameters that every rank has whole but whose
        gradients are partial sums: those within regions, and with `sequence` those of modules that no list here has,
        as a rank has its own tokens there."""
        ranks, partial = self.world.tensor, []
        for name, master in masters.items():
            modules = name.split(".")
            if ranks.size == 1 or not master.requires_grad or self._is_sharded(name) or modules[0] == "mtp":
                continue
            latent = ".".join(modules[:-2] + ["linear_kv_up_proj.weight"]) in self.tensors
            if modules[-2] in _OF_ALL_TOKENS or (latent and modules[-2] in _OF_LATENTS):
                continue
            if ranks.sequence or modules[-2] in _REPLICATED_IN_REGIONS or "experts" in modules:
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

    def gathered(self, name: str, mine: Tensor, parameter: Tensor) -> Tensor:
        """The whole of a matrix with the shape of a `parameter` of this name, of which each rank has what it has of
        that: `mine`, a plain tensor. All ranks that share the parameter call it, in the same order."""
        if isinstance(parameter, DTensor):
            mesh, places = parameter.device_mesh, parameter.placements
            shape, stride = parameter.shape, parameter.stride()
            mine = DTensor.from_local(mine, mesh, places, run_check=False, shape=shape, stride=stride).full_tensor()
        ranks = self.world.tensor
        if ranks.size == 1 or not self._is_sharded(name):
            return mine
        spec = self.tensors[name].spec
        whole_matrix = mine.new_empty(spec.shape)
        parts = ranks.all_gather(mine).chunk(ranks.size)
        for boxes, part in zip(shard_boxes(spec, ranks.size), parts, strict=True):
            for box, rows in zip(boxes, torch.split(part, [box.rows for box in boxes]), strict=True):
                _in_box(whole_matrix, box).copy_(rows)
        return whole_matrix

    def given_part(self, name: str, made: Tensor | None, parameter: Tensor, number: int) -> Tensor:
        """The inverse of `gathered`: this rank's part of a matrix, as a plain tensor. The rank whose turn `number` is
        has `made` the whole, FP32, and gives it to the others."""
        whole_matrix = made
        if isinstance(parameter, DTensor):
            ranks = parameter.device_mesh["shard"]
            if made is None:
                made = parameter.to_local().new_empty(self.tensors[name].spec.shape, dtype=torch.float32)
            whole_matrix, group = made.contiguous(), ranks.get_group()
            dist.broadcast(whole_matrix, dist.get_global_rank(group, number % ranks.size()), group)
        assert whole_matrix is not None, "a parameter that is not sharded is every rank's turn"
        if self.world.tensor.size > 1 and self._is_sharded(name):
            whole_matrix = torch.cat([_in_box(whole_matrix, box) for box in self.tensors[name].boxes])
        first, rows = local_rows(parameter)
        return whole_matrix[first : first + len(rows)]

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm of all gradients together, FP32 `[]`. What several ranks have is counted once."""
        tensor, experts = self.world.tensor, self.world.experts
        if tensor.size == experts.size == 1:
            return _norm(gradients.values())
        # Indexed by whether parameters are of distributed experts, and whether tensor ranks have different shards
        squares = torch.zeros((2, 2), device=next(iter(gradients.values())).device)
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
"""Of one process, which has all of each parameter."""


def is_turn(number: int, parameter: Tensor) -> bool:
    """Whether it is this rank's turn to do the `number`-th of several things, among those that FSDP2 has sharded a
    parameter over."""
    if not isinstance(parameter, DTensor):
        return True
    ranks = parameter.device_mesh["shard"]
    return number % ranks.size() == ranks.get_local_rank()


def _in_box(matrix: Tensor, box: Box) -> Tensor:
    return matrix[box.row : box.row + box.rows, box.column : box.column + box.columns]


def _norm(gradients: Iterable[Tensor]) -> Tensor:
    norm = nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def check(model: ModelShape, sizes: ParallelSettings) -> None:
    """Raise RecipeError for a model that the bundled trainer cannot divide over these tensor and expert ranks."""
    moe = model.moe
    if model.csa and sizes.tensor > 1:
        what = "attention with compressed keys has one key for all heads, and is not shared by tensor-parallel ranks"
        raise RecipeError(what, do="Leave parallel.tensor out.")
    if model.mhc and model.mhc.lowrank and sizes.tensor > 1:
        what = "what reads residual streams channel by channel is not shared by tensor-parallel ranks"
        raise RecipeError(what, do="Leave parallel.tensor out.")
    if moe and moe.expert_norms and sizes.tensor > 1:
        what = "a norm of what each expert gives cannot be computed of a part of it, as tensor-parallel ranks have it"
        raise RecipeError(what, do="Leave parallel.tensor out.")
    if any(model.activation_sparsity or ()) and sizes.tensor > 1:
        what = "the largest channels of a gate cannot be found in a part of it, as tensor-parallel ranks have it"
        raise RecipeError(what, do="Leave parallel.tensor out.")
    check_divisions(model, sizes)
    for each in model.attentions if not model.mla else ():
        _check_division("query groups", each.num_query_groups, sizes)


def check_divisions(model: ModelShape, sizes: ParallelSettings) -> None:
    """Raise RecipeError for a model whose parts, but for groups of queries, cannot be divided evenly over these tensor
    and expert ranks."""
    moe, dense = model.moe, filter(model.has_dense_mlp, range(model.num_layers))
    groups = model.mamba is None or model.mamba.dt_rank is None
    mixer = model.mamba.divisible if model.mamba else sizes.tensor
    shared = [
        *(("attention heads", each.num_attention_heads) for each in model.attentions),
        ("key heads of a gated delta net", model.gdn.num_key_heads if model.gdn else sizes.tensor),
        ("channels of a short convolution", model.hidden_size if model.short_conv else sizes.tensor),
        ("groups of a Mamba-2 mixer's heads" if groups else "channels of a Mamba-1 mixer", mixer),
        ("rows of the vocabulary, padded", model.padded_vocab_size),
        *(("channels of an MLP", size) for size in sorted({*map(model.ffn_size, dense)})),
        ("channels of an expert", moe.ffn_hidden_size if moe else sizes.tensor),
        ("channels of the shared experts", (moe and moe.shared_ffn_hidden_size) or sizes.tensor),
    ]
    for what, size in shared:
        _check_division(what, size, sizes)
    experts = moe.num_experts if moe else 0
    if sizes.expert > 1 and (not experts or experts % sizes.expert):
        raise RecipeError(
            f"{experts} experts cannot be divided evenly among parallel.expert = {sizes.expert} ranks",
            do="Choose a number that divides them." if experts else "Leave parallel.expert out.",
        )


def _check_division(what: str, size: int, sizes: ParallelSettings) -> None:
    if size % sizes.tensor:
        raise RecipeError(
            f"{size} {what} cannot be shared evenly by {sizes.tensor} ranks",
            do="Choose a parallel.tensor that divides them.",
        )

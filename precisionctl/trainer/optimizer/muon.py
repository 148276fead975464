"""Muon for matrices, AdamW for the other parameters, both over FP32 master weights.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); weight decay and scale as in Liu et
al., "Muon is Scalable for LLM Training" (2025, arXiv 2502.16982). Which parameters are Muon's, and every operation in
its order, are Megatron's: megatron/core/optimizer/muon.py with emerging_optimizers (`orthogonalized_optimizer.py`,
`muon_utils.py`), with its default `fp32_matmul_prec` of `medium`, and a `tp_mode` of `duplicated`.
"""

import math
import re
from collections.abc import Callable, Mapping
from itertools import cycle, islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from precisionctl.errors import RecipeError
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import MOMENTUM, Kind, muon_takes
from precisionctl.recipe import Optimizer
from precisionctl.trainer.optimizer.adamw import MasterAdamW, is_decayed, with_state
from precisionctl.trainer.parallel.shards import UNSHARDED, ModelShards, is_turn
from precisionctl.trainer.parallel.world import local

_COEFFICIENTS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Of a step x -> a x + (b A + c A A) x with A = x x^T; of several sets each step takes the next."""

_SCALES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}

_EPSILON = 1e-7
"""Below this norm a matrix is not made larger, so that one of zeros stays one."""

_QKV = re.compile(r"decoder\.layers\.(\d+)\.self_attention\.linear_qkv\.weight")


def orthogonalized(matrix: Tensor, settings: Optimizer) -> Tensor:
    """A matrix `[out, in]`, FP32, with singular values near 1 and the singular vectors that it had, times the scale of
    an update: Newton-Schulz steps in BF16, of its transpose if it has more rows than columns."""
    rows, columns = matrix.shape
    wide = matrix.mT if rows > columns else matrix
    wide = F.normalize(wide, p=2.0, dim=(-2, -1), eps=_EPSILON).to(torch.bfloat16)  # type: ignore[arg-type]
    for a, b, c in islice(cycle(_COEFFICIENTS[settings.muon_coefficient_type]), settings.muon_num_ns_steps):
        gram = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, alpha=c, beta=b), wide, beta=a)
    made = wide.float()
    scale = _SCALES[settings.muon_scale_mode](rows, columns)
    return (made.mT if rows > columns else made) * scale * settings.muon_extra_scale_factor


def qkv_rows(model: ModelShape, layer: int) -> tuple[int, ...]:
    """The rows that a group of a layer's linear_qkv has of each matrix in it: queries, gates if there are any, keys and
    values (`_get_qkv_split_shapes` in megatron/core/optimizer/emerging_optimizers.py). Raises RecipeError for gates of
    whole heads, which are behind all groups."""
    own = model.of_layer(layer)
    if own.head_wise_attn_gate:
        what = "linear_qkv has gates of heads behind its groups, which Megatron's Muon does not split off"
        raise RecipeError(what, do="Give --set optimizer.muon_split_qkv=false.")
    queries = own.num_attention_heads // own.num_query_groups * own.kv_channels
    of_group = (queries,) * (1 + own.attention_output_gate)
    if model.shares_kv(layer):
        return of_group
    return (*of_group, own.kv_channels, *(() if own.keys_are_values else (own.value_channels,)))


def check(model: ModelShape, settings: Optimizer) -> None:
    """Raise RecipeError as `qkv_rows`, for a model that Muon is to train."""
    if settings.by_muon and settings.muon_split_qkv and not model.mla:
        for layer in filter(model.has_attention, range(model.num_layers)):
            qkv_rows(model, layer)


class MasterMuon(MasterAdamW):
    """Muon as the optimizer of a run (`adamw.RunOptimizer`). `momentum` has, by name, the FP32 average of a matrix's
    gradients, sharded like it. It is orthogonalized as a whole: ranks among which FSDP2 shards matrices take one each,
    put all of them together, and give the results to each other."""

    def __init__(
        self, module: nn.Module, model: ModelShape, settings: Optimizer, shards: ModelShards = UNSHARDED
    ) -> None:
        parameters = with_state(dict(module.named_parameters()))
        taken = {name for name, parameter in parameters.items() if muon_takes(name, parameter.dim())}
        super().__init__(module, settings, shards, others=taken)
        self._settings, self._model = settings, model
        self.momentum = {name: torch.zeros_like(self.masters[name]) for name in parameters if name in taken}

    @property
    def tensors(self) -> Mapping[Kind, Mapping[str, Tensor]]:
        return {**super().tensors, MOMENTUM: self.momentum}

    def step(self, lr: float, skip: Tensor | None = None) -> None:
        gradients, at_once = self.gradients, self._shards.world.sharing
        trained = [name for name in gradients if name in self.momentum]
        with torch.no_grad():
            for first in range(0, len(trained), at_once):
                self._update({name: gradients[name] for name in trained[first : first + at_once]}, lr, skip)
        super().step(lr, skip)

    def _update(self, gradients: Mapping[str, Tensor], lr: float, skip: Tensor | None) -> None:
        """Update the matrices that these are the gradients of: at most as many as there are ranks that share them."""
        averages, mine = {}, {}
        for number, name in enumerate(gradients):
            parameter, beta = self.masters[name], self._settings.muon_momentum
            gradient = local(gradients[name])
            averages[name] = average = local(self.momentum[name]).lerp(gradient, 1 - beta)
            direction = gradient.lerp(average, beta) if self._settings.muon_nesterov else average
            whole = self._shards.gathered(name, direction, parameter)
            if is_turn(number, parameter):
                mine[name] = whole
        made = {name: self._orthogonalized(name, whole) for name, whole in mine.items()}
        for number, name in enumerate(gradients):
            parameter = self.masters[name]
            master, decay = local(parameter), self._settings.weight_decay if is_decayed(name, parameter) else 0.0
            update = self._shards.given_part(name, made.pop(name, None), parameter, number)
            updated = master.add(master, alpha=-decay * lr).add_(update, alpha=-lr)
            for kept, new in ((local(self.momentum[name]), averages.pop(name)), (master, updated)):
                kept.copy_(new if skip is None else torch.where(skip, kept, new))

    def _orthogonalized(self, name: str, matrix: Tensor) -> Tensor:
        """As `orthogonalized`; of a linear_qkv queries, keys and values each by themselves."""
        layer = _QKV.fullmatch(name)
        if layer is None or not self._settings.muon_split_qkv:
            return orthogonalized(matrix, self._settings)
        rows, columns = qkv_rows(self._model, int(layer[1])), matrix.shape[1]
        groups = matrix.view(-1, sum(rows), columns)
        parts = [part.reshape(-1, columns) for part in torch.split(groups, [*rows], dim=1)]
        made = [orthogonalized(part, self._settings).view(len(groups), -1, columns) for part in parts]
        return torch.cat(made, dim=1).view(matrix.shape)

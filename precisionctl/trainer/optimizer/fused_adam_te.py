"""FP8-LM's state and update by Transformer Engine's FusedAdam. Importing this imports Transformer Engine."""

import torch  # before Transformer Engine, which needs torch's libraries to be loaded
from torch import Tensor, nn
from transformer_engine.pytorch.optimizers import FusedAdam

from precisionctl.param import Kind
from precisionctl.recipe import Optimizer
from precisionctl.trainer.optimizer.scaled_tensor import ScaledTensor


class FusedMoments:
    """`fp8_lm.Moments` for a BF16 parameter, with FusedAdam. Each parameter has its own FusedAdam: one for all would
    hold the state of all parameters in FP32 during an update."""

    def __init__(self, parameter: nn.Parameter, settings: Optimizer) -> None:
        self._parameter = parameter
        self._adam = FusedAdam(
            [parameter],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            master_weights=True,
            master_weight_dtype=torch.float16,
            exp_avg_dtype=torch.uint8,
            exp_avg_sq_dtype=torch.float16,
            use_decoupled_grad=True,
        )
        self._adam.initialize_state(parameter, False)
        first = self._adam.state[parameter]["exp_avg"]
        first._quantizer.set_usage(columnwise=False)  # no transposed copy, which Hopper's GEMMs would need
        first.update_usage(rowwise_usage=True, columnwise_usage=False)

    @property
    def kinds(self) -> dict[Kind, ScaledTensor]:
        """Views of FusedAdam's tensors."""
        state, scales = self._adam.state[self._parameter], self._adam._scales[self._parameter]
        first = state["exp_avg"]
        return {
            "param": ScaledTensor(state["master_param"], scales["master_param"]),
            "exp_avg": ScaledTensor(first._data.view(torch.float8_e4m3fn), first._scale_inv),
            "exp_avg_sq": ScaledTensor(state["exp_avg_sq"], scales["exp_avg_sq"]),
        }

    def update(self, gradient: Tensor, lr: float, step: int) -> None:
        """AdamW's update number `step`, counted from 1, with an FP32 gradient."""
        self._adam.param_groups[0].update(lr=lr, step=step - 1)  # it adds one
        self._parameter.decoupled_grad = gradient  # type: ignore[attr-defined]  # FP32, beside a BF16 parameter
        self._adam.step()
        self._parameter.decoupled_grad = None  # type: ignore[attr-defined]
        for scaled in self.kinds.values():
            scaled.zero_underflow()

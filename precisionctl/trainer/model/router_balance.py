"""Balance: which losses, and which update of a bias, keep the loads of experts even, and how much.

Without PyTorch, as commands that only read headers ask what a run was balanced by.
"""

from dataclasses import dataclass, fields

from precisionctl.errors import shown


@dataclass(frozen=True)
class Balance:
    """Coefficients of the losses, and the rate of the bias update; 0 is off.

    With P a router's mean score of an expert and f the mean of how often a token chooses it: `pooled_loss` is
    transformers' load_balancing_loss_func, E sum(f P) with f and P over a micro-batch's tokens in all layers. The next
    three are Megatron's, E / K sum(f P) of each layer (Switch Transformer, arXiv 2101.03961, equation 4): of a
    micro-batch, of each row (DeepSeek-V3, arXiv 2412.19437, equation 17), or with f of all ranks' micro-batches of the
    update so far (arXiv 2501.11873). `z_loss` is each layer's mean of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906,
    equation 5). `bias_update_rate` is added to expert_bias after an update that chose an expert less often than the
    mean, and subtracted after one that chose it more often (arXiv 2408.15664).

    Raises ValueError for a number that makes no sense; the caller knows where it came from.
    """

    pooled_loss: float = 0.0
    aux_loss: float = 0.0
    seq_aux_loss: float = 0.0
    global_aux_loss: float = 0.0
    z_loss: float = 0.0
    bias_update_rate: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) not in (int, float) or not 0 <= value < 1e30:
                raise ValueError(f"{name} is {shown(value)}, not 0 or a positive number below 1e30")

    @property
    def on(self) -> dict[str, float]:
        """Those that are not 0, by name."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name))}


NO_BALANCE = Balance()

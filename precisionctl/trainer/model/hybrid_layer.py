"""A layer of one block, as Megatron-Core's hybrid stack has them (ssm/mamba_block.py)."""

from torch import Tensor, nn

from precisionctl.model_parts import Mamba2
from precisionctl.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, norm_of
from precisionctl.trainer.model.attention import KeysValues, SelfAttention
from precisionctl.trainer.model.mamba_mixer import MambaMixer
from precisionctl.trainer.model.mlp import MLP, MoELayer
from precisionctl.trainer.model.positions import Positions
from precisionctl.trainer.model.residual_layer import ResidualLayer


class HybridLayer(ResidualLayer):
    """A Mamba-2 mixer, attention, an MLP or experts: what the model's pattern says. Its norm lives in the block's first
    linear, except before experts."""

    def __init__(
        self, name: str, model: ModelShape, mamba: Mamba2, number: int, backend: Backend, recompute: bool = False
    ) -> None:
        super().__init__(model, number, backend, recompute)
        self.block, norm = mamba.pattern[number], norm_of(model)
        self.pre_mlp_layernorm: nn.Module = nn.Identity()
        self.mlp: MLP | MoELayer
        if self.block == "M":
            self.mixer = MambaMixer(f"{name}.mixer", model, mamba, backend)
        elif self.block == "*":
            attention = model.attention_of(self.kind.in_window)
            self.self_attention = SelfAttention(f"{name}.self_attention", attention, backend)
        elif self.block == "-":
            self.mlp = MLP(f"{name}.mlp", model, backend, model.ffn_hidden_size, norm)
        else:
            assert model.moe is not None, "a pattern with E has experts, or is refused where it is read"
            self.pre_mlp_layernorm = backend.norm(model.hidden_size, norm)
            self.mlp = MoELayer(f"{name}.mlp", model, model.moe, backend)

    def through(
        self, hidden: Tensor, positions: Positions, per_layer: Tensor | None, shared: KeysValues | None
    ) -> tuple[Tensor, KeysValues | None]:
        if self.block == "M":
            made = self.mixer(hidden, positions)
        elif self.block == "*":
            made, _ = self.self_attention(hidden, positions)
        else:
            made = self.mlp(self.pre_mlp_layernorm(hidden))
        return self.added(hidden, made), None

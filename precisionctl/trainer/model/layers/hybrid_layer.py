"""A layer of one block, as Megatron-Core's hybrid stack has them (ssm/mamba_block.py), or of three, as
Megatron-Bridge's Falcon-H1 (modeling_falconh1/falconh1_layer.py)."""

from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import Mamba
from precisionctl.trainer.backends.base import Backend, norm_of
from precisionctl.trainer.model.attention.self_attention import KeysValues, SelfAttention
from precisionctl.trainer.model.layers.residual_layer import Beside, ResidualLayer
from precisionctl.trainer.model.mlp import MLP, MoELayer
from precisionctl.trainer.model.recurrent.mamba_1 import Mamba1Mixer
from precisionctl.trainer.model.recurrent.mamba_2 import MambaMixer
from precisionctl.trainer.sequences import Positions


class HybridLayer(ResidualLayer):
    """A Mamba mixer, attention, an MLP or experts: what the model's pattern says. Its norm lives in the block's first
    linear, except before experts, and before a mixer beside attention, which both read it."""

    def __init__(
        self, name: str, model: ModelShape, mamba: Mamba, number: int, backend: Backend, recompute: bool = False
    ) -> None:
        super().__init__(model, number, backend, recompute)
        self.block, norm, self.multipliers = mamba.pattern[number], norm_of(model), model.multipliers
        self.pre_mlp_layernorm: nn.Module = nn.Identity()
        self.mlp: MLP | MoELayer
        if self.block == "P":
            self.norm = backend.norm(model.hidden_size, norm)
            self.mamba_mixer = MambaMixer(f"{name}.mamba_mixer", model, mamba, backend)
        if self.block == "M":
            self.mixer: MambaMixer | Mamba1Mixer = (
                MambaMixer(f"{name}.mixer", model, mamba, backend)
                if mamba.dt_rank is None
                else Mamba1Mixer(f"{name}.mixer", model, mamba, mamba.dt_rank, backend)
            )
        if self.block in "*P":
            attention = model.attention_of(self.kind.in_window)
            self.self_attention = SelfAttention(f"{name}.self_attention", attention, backend)
        if self.block in "-P":
            self.mlp = MLP(f"{name}.mlp", model, backend, model.ffn_hidden_size, norm, number)
        if self.block == "E":
            assert model.moe is not None, "a pattern with E has experts, or is refused where it is read"
            self.pre_mlp_layernorm = backend.norm(model.hidden_size, norm)
            self.mlp = MoELayer(f"{name}.mlp", model, model.moe, backend, number)

    def through(self, hidden: Tensor, positions: Positions, beside: Beside) -> tuple[Tensor, KeysValues | None]:
        if self.block == "P":
            hidden = self.added(hidden, self._beside_attention(self.norm(hidden), positions))
            made = self.mlp(hidden)
        elif self.block == "M":
            made = self.mixer(hidden, positions)
        elif self.block == "*":
            made, _ = self.self_attention(hidden, positions)
        else:
            made = self.mlp(self.pre_mlp_layernorm(hidden))
        return self.added(hidden, made), None

    def _beside_attention(self, normed: Tensor, positions: Positions) -> Tensor:
        """What a mixer and attention make of the same hidden states, `[T, E]`, together. Before the MLP computes, only
        their sum is left of it."""
        factors = self.multipliers
        assert factors is not None, "computes.py refuses it"
        mixed = self.mamba_mixer(normed * factors.ssm_in, positions)
        attended, _ = self.self_attention(normed * factors.attention_in, positions)
        out: Tensor = mixed * factors.ssm_out + attended * factors.attention_out
        return out

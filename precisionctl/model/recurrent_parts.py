"""What some models have in the place of attention, or beside it, with a state that passes from token to token: gated
delta nets, short convolutions, Mamba mixers."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.model.model_parts import LARGEST, check_negative, check_numbers, check_size, real


@dataclass(frozen=True)
class GatedDeltaNet:
    """Layers with a gated delta net in the place of attention (arXiv 2412.06464); fields are Megatron's `--linear-*`.

    `layers` has an entry for each layer of the decoder: whether it is one. Each key head, of `key_head_dim` channels,
    serves as many value heads, of `value_head_dim`; queries, keys and values go through a causal convolution of
    `conv_kernel_dim` taps, one for each channel. With `allow_neg_eigval` learning rates are up to 2, and not to 1.
    `norm_epsilon` is the epsilon of the norm of the heads' output (None: that of the model's other norms), which is
    multiplied by a gate through `output_gate`. Such a layer has norms before attention and MLP alone, whatever the
    others have, unless the model's residual streams are normalised as they are read (`mhc.lowrank`).

    With `kda` (Kimi delta attention, arXiv 2510.26692; fields are Megatron's `--kda-*`) a state decays by a number of
    each channel of a key, and the gate is a sigmoid. Decays and gates are projected in two steps, by `kda_lora_rank`
    channels (`--kda-f-lora-rank` and `--kda-gate-lora-rank`), or in one; with `kda_full_gate` (Kimi K3) decays in two,
    and gates in one. Logarithms of decays are above `kda_lower_bound` (`--kda-safe-gate`), or have no bound.
    """

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    allow_neg_eigval: bool = False
    norm_epsilon: float | None = None
    kda: bool = False
    kda_lora_rank: int | None = None
    kda_lower_bound: float | None = None
    kda_full_gate: bool = False
    output_gate: Literal["silu", "sigmoid"] = "silu"

    def __post_init__(self) -> None:
        check_numbers(self, "gdn", other=("kda_lower_bound",))
        if self.num_value_heads % self.num_key_heads or (self.kda and self.num_value_heads != self.num_key_heads):
            raise DamagedCheckpoint(f"{self.num_value_heads} value heads for {self.num_key_heads} key heads")
        if self.kda_lower_bound is not None:
            check_negative(self.kda_lower_bound, "gdn.kda_lower_bound")
        for product in ("key_size", "value_size", "in_proj_size"):
            check_size(getattr(self, product), product, 4 * LARGEST)

    @property
    def key_size(self) -> int:
        """Rows of the keys of all heads, and of the queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Rows of the values of all heads, and of their gate."""
        return self.num_value_heads * self.value_head_dim

    @property
    def in_proj_parts(self) -> tuple[int, ...]:
        """Rows of Megatron's in_proj: queries, keys, values, output gate (z), beta, alpha. Of Kimi delta attention
        queries, keys, values and, if these are projected in one step, decays and output gate."""
        heads, of_conv = self.num_value_heads, (self.key_size, self.key_size, self.value_size)
        if self.kda:
            decays = () if self.kda_lora_rank else (self.key_size,)
            gates = () if self.kda_lora_rank and not self.kda_full_gate else (self.value_size,)
            return (*of_conv, *decays, *gates)
        return (*of_conv, self.value_size, heads, heads)

    @property
    def in_proj_size(self) -> int:
        return sum(self.in_proj_parts)

    @property
    def conv_parts(self) -> tuple[int, ...]:
        """Channels of the convolution: queries, keys, values."""
        return self.in_proj_parts[:3]

    @property
    def conv_size(self) -> int:
        return sum(self.conv_parts)


@dataclass(frozen=True)
class ShortConv:
    """Layers with a short gated convolution in the place of attention (LFM2). `layers` has an entry for each layer of
    the decoder: whether it is one. Each channel of the hidden states goes through a gate, a causal convolution of
    `kernel_dim` taps, and another gate."""

    layers: tuple[bool, ...]
    kernel_dim: int

    def __post_init__(self) -> None:
        check_numbers(self, "short_conv")


@dataclass(frozen=True)
class Mamba:
    """Layers of one block each, with its own norm. `pattern`, Megatron's `--hybrid-override-pattern`, has a letter for
    each: M a Mamba-2 mixer (arXiv 2405.21060), * attention, - an MLP, E experts. In Megatron-Bridge's Falcon-H1 all are
    P: a mixer beside attention, which read one norm, and then an MLP. With `gated_norm` the output of a mixer's state
    space is normalised after its gate. The other fields are Megatron's `--mamba-*`: a mixer has `num_heads` heads of
    `head_dim` channels, which in `num_groups` groups share the vectors by which a state of `state_dim` channels is
    written (B) and read (C).

    With `dt_rank` mixers are Mamba-1's (arXiv 2312.00752), of which Megatron has none: each channel is a head, each
    channel of its state decays at its own rate, and B, C and steps are made of the values behind the convolution; steps
    in two steps, by `dt_rank` channels. With `bcdt_layernorm` B, C and these channels are normalised, as Jamba's; with
    `bcdt_l2_norm_epsilon` by norms without weights, which have this epsilon, as FalconMamba's.
    """

    pattern: str
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    gated_norm: bool = True
    dt_rank: int | None = None
    bcdt_layernorm: bool = False
    bcdt_l2_norm_epsilon: float | None = None

    conv_kernel_dim: ClassVar[int] = 4
    """Taps of the convolution of values, B and C: Megatron-Core's, which no argument changes."""
    mtp_pattern: ClassVar[str] = "*E"
    """The blocks of a layer of multi-token prediction, by the same letters: Nemotron 3's."""

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not ({*self.pattern} <= {*"M*-E"} or {*self.pattern} == {"P"}):
            do = "Known are M, *, - and E, or P alone."
            raise DamagedCheckpoint(f"a pattern of layers {shown(self.pattern)}", do=do)
        check_numbers(self, "mamba")
        if self.num_heads % self.num_groups:
            raise DamagedCheckpoint(f"{self.num_heads} heads of a mixer in {self.num_groups} groups")
        check_size(self.in_proj_size, "rows of a mixer's in_proj", 8 * LARGEST)

    @property
    def parallel(self) -> bool:
        """Whether layers are a mixer beside attention, and an MLP."""
        return self.pattern.startswith("P")

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def divisible(self) -> int:
        """What tensor-parallel ranks must divide: the groups of heads; of Mamba-1 channels, as ranks make the vectors
        for all of them together."""
        return self.num_groups if self.dt_rank is None else self.inner_size

    @property
    def in_proj_parts(self) -> tuple[int, ...]:
        """Rows of in_proj: gate (z), x, B, C, dt; of Mamba-1 x and gate."""
        if self.dt_rank is not None:
            return (self.inner_size, self.inner_size)
        state = self.num_groups * self.state_dim
        return (self.inner_size, self.inner_size, state, state, self.num_heads)

    @property
    def in_proj_size(self) -> int:
        return sum(self.in_proj_parts)

    @property
    def conv_parts(self) -> tuple[int, ...]:
        """Channels of the convolution: x, B, C; of Mamba-1 x."""
        return self.in_proj_parts[:1] if self.dt_rank is not None else self.in_proj_parts[1:4]

    @property
    def conv_size(self) -> int:
        return sum(self.conv_parts)

    @property
    def x_proj_parts(self) -> tuple[int, ...]:
        """Rows of x_proj, which Mamba-1 alone has: what steps are made of, B, C."""
        return () if self.dt_rank is None else (self.dt_rank, self.state_dim, self.state_dim)

    @property
    def x_proj_size(self) -> int:
        return sum(self.x_proj_parts)


@dataclass(frozen=True)
class Multipliers:
    """Fixed factors in layers with a mixer beside attention, and an MLP (Falcon-H1): for the inputs and outputs of
    attention and mixer (`attention_in`, `attention_out`, `ssm_in`, `ssm_out`), keys (`key`), the five parts of the
    mixer's in_proj (`ssm`), and the MLP's gate before its activation and its output (`mlp`)."""

    attention_in: float
    attention_out: float
    key: float
    ssm_in: float
    ssm_out: float
    ssm: tuple[float, ...]
    mlp: tuple[float, ...]

    def __post_init__(self) -> None:
        check_numbers(self, "multipliers")
        for name, values, number in (("ssm", self.ssm, 5), ("mlp", self.mlp, 2)):
            if not isinstance(values, tuple) or len(values) != number:
                raise DamagedCheckpoint(f"multipliers.{name} is {shown(values)}, not {number} numbers")
            for each in values:
                real(each, f"multipliers.{name}")

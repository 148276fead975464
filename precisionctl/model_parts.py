"""What some models have beside plain attention and MLPs: experts, latent, sparse and compressed attention, gated delta
nets, Mamba-2 mixers, several residual streams, a wrapper of images or sound; and what is a size."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from precisionctl.errors import DamagedCheckpoint, shown

LARGEST = 1 << 30
"""The largest size that a model may have: beyond every real one, and products of two fit 64 bits."""

MOST_LAYERS = 1 << 12
"""Some fields have an entry for each layer, whatever number a stranger's file claims."""


def check_size(size: object, name: str, largest: int = LARGEST) -> None:
    """Raise DamagedCheckpoint for what is no size."""
    if type(size) is not int or not 1 <= size <= largest:
        raise DamagedCheckpoint(f"{name} is {shown(size)}, not a size", do="Is config.json this model's?")


def check_count(count: object, name: str, largest: int) -> None:
    """Raise DamagedCheckpoint for what is neither a size nor 0."""
    if type(count) is not int or count != 0:
        check_size(count, name, largest)


def real(value: object, name: str, where: object = "") -> float:
    """A positive number. Raises DamagedCheckpoint."""
    if type(value) not in (int, float) or not 0 < value < 1e30:  # type: ignore[operator]
        raise DamagedCheckpoint(f"{name} is {shown(value)}, not a positive number", where=where)
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True)
class MoE:
    """Layers whose MLP is a mixture of experts; the fields are Megatron's `--moe-*` and `--num-experts`.

    `layer_freq` has an entry for each layer of the decoder: whether it has experts. A router's score is `softmax` over
    all experts (`pre_softmax`) or over the chosen ones, or `sigmoid` or `sqrtsoftplus` (the root of the softplus),
    which are divided by the sum over the chosen ones unless `pre_softmax`; then times `topk_scaling_factor`. With
    groups, only experts of the `group_topk` best of `num_groups` are chosen from; a group is worth the sum of its
    `group_scores` best experts. `expert_bias` is added for the choice alone, to scores over all experts, or, with
    `expert_bias_on_logits`, to their logits; `router_bias` to the logits from which all else is made. In the first
    `n_hash_layers` a table says which experts each token of the vocabulary has, and there is no `expert_bias`. With
    `shared_expert_gate`, what the shared experts give is multiplied by the sigmoid of one more projection of the token.
    With `shared_average` what they and the routed ones give is averaged, and not added. With `probs_on_input` what an
    expert reads is multiplied by its score, which is then divided by no sum, and what it gives is added as it is. With
    a `sparsemixer_eps` (SparseMixer, arXiv 2409.12136) experts are chosen one after the other, and the weight of each
    is its part of a softmax over the logits left that are not further below the largest than by twice this share of the
    larger of it and their own size. Experts of a `latent_size` (Nemotron 3) read a projection of the hidden states to
    so many channels, and what they give together is projected back; router and shared experts read the hidden states.

    With `own_norms` (Gemma 4) the router, the experts and the shared ones each read the hidden states by a norm of
    their own, and what experts give together, and what shared ones give, is normalised before the two are added. The
    router's, an RMSNorm, has no weights: a vector and `hidden_size` to the power -1/2 multiply what it gives. The
    weight of an expert for a token is multiplied by a number of that expert.
    """

    num_experts: int
    topk: int
    ffn_hidden_size: int
    layer_freq: tuple[bool, ...]
    shared_ffn_hidden_size: int | None = None
    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    pre_softmax: bool = False
    topk_scaling_factor: float = 1.0
    expert_bias: bool = False
    router_bias: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    group_scores: int | None = None
    shared_expert_gate: bool = False
    shared_average: bool = False
    probs_on_input: bool = False
    sparsemixer_eps: float | None = None
    own_norms: bool = False
    latent_size: int | None = None
    n_hash_layers: int = 0
    expert_bias_on_logits: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "topk", "ffn_hidden_size"):
            check_size(getattr(self, name), name)
        for name in ("shared_ffn_hidden_size", "num_groups", "group_topk", "group_scores", "latent_size"):
            if getattr(self, name) is not None:
                check_size(getattr(self, name), name)
        check_count(self.n_hash_layers, "n_hash_layers", MOST_LAYERS)
        real(self.topk_scaling_factor, "topk_scaling_factor")
        if self.sparsemixer_eps is not None:
            real(self.sparsemixer_eps, "sparsemixer_eps")
        if self.topk > self.num_experts:
            raise DamagedCheckpoint(f"{self.topk} of {self.num_experts} experts for a token")
        if self.num_groups is not None and self.num_experts % self.num_groups:
            raise DamagedCheckpoint(f"{self.num_experts} experts in {self.num_groups} groups")
        if self.num_groups and self.group_topk:
            size = self.num_experts // self.num_groups
            if (
                self.group_topk > self.num_groups
                or (self.group_scores or 1) > size
                or self.topk > self.group_topk * size
            ):
                what = f"{self.topk} experts of {self.group_topk} of {self.num_groups} groups of {size}"
                raise DamagedCheckpoint(f"{what}, each worth {self.group_scores} of its scores")

    def used(self) -> dict[str, object]:
        """The fields, by their names with `moe.`; None where one routes no token otherwise. Empty where no layer has
        experts."""
        used: dict[str, object] = {f"moe.{name}": value for name, value in vars(self).items()}
        if self.num_groups is None or self.group_topk in (None, self.num_groups):
            used |= dict.fromkeys(("moe.num_groups", "moe.group_topk", "moe.group_scores"))
        if self.score_function != "softmax" and self.probs_on_input:
            used["moe.pre_softmax"] = None
        if not self.expert_bias:
            del used["moe.expert_bias_on_logits"]  # and not None, so that a model with the bias does not differ in it
        if self.shared_ffn_hidden_size is None:
            used |= dict.fromkeys(("moe.shared_expert_gate", "moe.shared_average"))
        return used if any(self.layer_freq) else {}


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention. A query or key has `qk_head_dim` channels without positions, then
    `qk_pos_emb_head_dim` with them (of neighbouring pairs); a value `v_head_dim`. `q_lora_rank` None: queries are
    projected in one step. With an `output_gate` (Ling 3) what a head gives is multiplied by the sigmoid of a number
    that a projection of its own makes for it."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    output_gate: bool = False

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if name != "output_gate" and (name, size) != ("q_lora_rank", None):
                check_size(size, name)
        if self.qk_pos_emb_head_dim % 2:
            raise DamagedCheckpoint(f"qk_pos_emb_head_dim is {self.qk_pos_emb_head_dim}, of which no pairs are made")


@dataclass(frozen=True)
class GlobalAttention:
    """What attention without a window has otherwise than that with one (Gemma 4, Laguna, MiMo): the fields of
    ModelShape of the same names, in those layers. None is for what it does not have otherwise."""

    num_query_groups: int | None = None
    kv_channels: int | None = None
    keys_are_values: bool | None = None
    softmax_offset: bool | None = None
    rotary_percent: float | None = None
    num_attention_heads: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_query_groups", "kv_channels", "num_attention_heads"):
            if getattr(self, name) is not None:
                check_size(getattr(self, name), f"{name} without a window")

    @property
    def said(self) -> dict[str, Any]:
        """The fields that are otherwise."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Wrapper:
    """A model of images or sound around a text model: its `model_type`, and what its Hugging Face names have in place
    of the text model's `model.` and `lm_head.`; `same` are beginnings of names that it has as the text model does. All
    its other tensors are towers."""

    model_type: str
    body: str
    head: str
    same: tuple[str, ...] = ()

    def is_text(self, name: str) -> bool:
        """Whether a tensor of this Hugging Face name is the text model's."""
        return name.startswith((self.body, self.head, *self.same))

    def name_of(self, name: str) -> str:
        """The name in the wrapper of what the text model alone calls so."""
        for alone, here in (("model.", self.body), ("lm_head.", self.head)):
            if name.startswith(alone):
                return here + name.removeprefix(alone)
        return name


@dataclass(frozen=True)
class GatedDeltaNet:
    """Layers with a gated delta net in the place of attention (arXiv 2412.06464); fields are Megatron's `--linear-*`.

    `layers` has an entry for each layer of the decoder: whether it is one. Each key head, of `key_head_dim` channels,
    serves as many value heads, of `value_head_dim`; queries, keys and values go through a causal convolution of
    `conv_kernel_dim` taps, one for each channel. With `allow_neg_eigval` learning rates are up to 2, and not to 1.
    `norm_epsilon` is that of the norm of what heads give (None: as all norms of the model). Such a layer has norms
    before attention and MLP alone, whatever the others have.

    With `kda` (Kimi delta attention, arXiv 2510.26692; fields are Megatron's `--kda-*`) a state decays by a number of
    each channel of a key, and the gate is a sigmoid. Decays and gates are projected in two steps, by `kda_lora_rank`
    channels (`--kda-f-lora-rank` and `--kda-gate-lora-rank`), or in one. Logarithms of decays are above
    `kda_lower_bound` (`--kda-safe-gate`), or have no bound.
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

    def __post_init__(self) -> None:
        sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        for name in (*sizes, *(() if self.kda_lora_rank is None else ("kda_lora_rank",))):
            check_size(getattr(self, name), name)
        if self.norm_epsilon is not None:
            real(self.norm_epsilon, "norm_epsilon of a gated delta net")
        if self.num_value_heads % self.num_key_heads or (self.kda and self.num_value_heads != self.num_key_heads):
            raise DamagedCheckpoint(f"{self.num_value_heads} value heads for {self.num_key_heads} key heads")
        bound = self.kda_lower_bound
        if bound is not None and (type(bound) not in (int, float) or not -1e30 < bound < 0):
            raise DamagedCheckpoint(f"kda_lower_bound is {shown(bound)}, not a negative number")
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
            return of_conv if self.kda_lora_rank else (*of_conv, self.key_size, self.value_size)
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

    def used(self) -> dict[str, object]:
        """The fields, by their names with `gdn.`; None where one changes nothing. Empty where no layer is one."""
        used = {f"gdn.{name}": value for name, value in vars(self).items()} if any(self.layers) else {}
        return used | ({} if self.kda or not used else dict.fromkeys(("gdn.kda_lora_rank", "gdn.kda_lower_bound")))


@dataclass(frozen=True)
class ShortConv:
    """Layers with a short gated convolution in the place of attention (LFM2). `layers` has an entry for each layer of
    the decoder: whether it is one. Each channel of the hidden states has a gate, a causal convolution of `kernel_dim`
    taps of what that lets through, and another gate of what it gives."""

    layers: tuple[bool, ...]
    kernel_dim: int

    def __post_init__(self) -> None:
        check_size(self.kernel_dim, "kernel_dim")

    def used(self) -> dict[str, object]:
        """The fields, by their names with `short_conv.`; empty where no layer is one."""
        return {f"short_conv.{name}": value for name, value in vars(self).items()} if any(self.layers) else {}


@dataclass(frozen=True)
class Mamba2:
    """Layers of one block each, with its own norm: what `pattern`, Megatron's `--hybrid-override-pattern`, says of each
    of them: M a Mamba-2 mixer (arXiv 2405.21060), * attention, - an MLP, E experts. In Megatron-Bridge's Falcon-H1 all
    are P: a mixer beside attention, which read one norm, and then an MLP. With `gated_norm` what a mixer's state space
    gives is normalised after its gate. The other fields are Megatron's `--mamba-*`: a mixer has `num_heads` heads of
    `head_dim` channels, which in `num_groups` groups share the vectors by which a state of `state_dim` channels is
    written (B) and read (C)."""

    pattern: str
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    gated_norm: bool = True

    conv_kernel_dim: ClassVar[int] = 4
    """Taps of the convolution of values, B and C: Megatron-Core's, which no argument changes."""
    mtp_pattern: ClassVar[str] = "*E"
    """The blocks of a layer of multi-token prediction, by the same letters: Nemotron 3's."""

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not ({*self.pattern} <= {*"M*-E"} or {*self.pattern} == {"P"}):
            do = "Known are M, *, - and E, or P alone."
            raise DamagedCheckpoint(f"a pattern of layers {shown(self.pattern)}", do=do)
        for name in ("num_heads", "head_dim", "num_groups", "state_dim"):
            check_size(getattr(self, name), f"mamba_{name}")
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
    def in_proj_parts(self) -> tuple[int, ...]:
        """Rows of in_proj: gate (z), x, B, C, dt."""
        state = self.num_groups * self.state_dim
        return (self.inner_size, self.inner_size, state, state, self.num_heads)

    @property
    def in_proj_size(self) -> int:
        return sum(self.in_proj_parts)

    @property
    def conv_parts(self) -> tuple[int, ...]:
        """Channels of the convolution: x, B, C."""
        return self.in_proj_parts[1:4]

    @property
    def conv_size(self) -> int:
        return sum(self.conv_parts)


@dataclass(frozen=True)
class Multipliers:
    """Fixed factors within layers that are a mixer beside attention, and an MLP (Falcon-H1): of what attention and a
    mixer read and give (`attention_in`, `attention_out`, `ssm_in`, `ssm_out`), of keys, of the five parts of a mixer's
    in_proj (`ssm`), and of an MLP's gate before its activation, and of what the MLP gives (`mlp`)."""

    attention_in: float
    attention_out: float
    key: float
    ssm_in: float
    ssm_out: float
    ssm: tuple[float, ...]
    mlp: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            several = {"ssm": 5, "mlp": 2}.get(name)
            if several and (not isinstance(value, tuple) or len(value) != several):
                raise DamagedCheckpoint(f"{name} multipliers are {shown(value)}, not {several} numbers")
            for each in value if several else (value,):
                real(each, f"{name} multiplier")


@dataclass(frozen=True)
class DSA:
    """DeepSeek's sparse attention; the fields are Megatron's `--dsa-indexer-*`. In the `layers` that have an indexer
    (an entry for each), its `n_heads` heads of `head_dim` channels choose the `topk` keys that a query sees; a layer
    without one sees those that the last indexer chose. The first channels of a head have positions, of neighbouring
    pairs if `rope_interleaved`. Where a text has no more than `topk` tokens, all are chosen."""

    n_heads: int
    head_dim: int
    topk: int
    layers: tuple[bool, ...]
    rope_interleaved: bool = False

    def __post_init__(self) -> None:
        for name in ("n_heads", "head_dim", "topk"):
            check_size(getattr(self, name), f"indexer's {name}")
        if not any(self.layers[:1]):
            raise DamagedCheckpoint("the first layer has no indexer, and no layer before it to choose its keys")

    @property
    def query_size(self) -> int:
        """Rows of the indexer's query projection."""
        return self.n_heads * self.head_dim


@dataclass(frozen=True)
class MSA:
    """MiniMax's sparse attention (arXiv 2606.13392). In the `layers` that have an indexer (an entry for each), its
    `n_heads` heads of `head_dim` channels choose the blocks of `block_size` keys that a query sees, each head for its
    share of the query heads: the last `local_blocks` up to the query's own, and the best others, `topk_blocks` in all.
    A block is worth its best key's product with the query. Where a text has no more than `topk_blocks` blocks, all are
    chosen."""

    n_heads: int
    head_dim: int
    block_size: int
    topk_blocks: int
    local_blocks: int
    layers: tuple[bool, ...]

    def __post_init__(self) -> None:
        for name in ("n_heads", "head_dim", "block_size", "topk_blocks"):
            check_size(getattr(self, name), f"indexer's {name}")
        check_count(self.local_blocks, "indexer's local_blocks", self.topk_blocks)
        check_size(self.query_size, "rows of an indexer's queries", 4 * LARGEST)

    @property
    def query_size(self) -> int:
        """Rows of the indexer's query projection."""
        return self.n_heads * self.head_dim

    @property
    def dense_length(self) -> int:
        """Tokens of the longest text of which all blocks are chosen."""
        return self.topk_blocks * self.block_size


@dataclass(frozen=True)
class CSA:
    """DeepSeek-V4's attention, with one key for all heads, which is also the value (its report, section 2.3). Each
    query sees the last `window_size` tokens and, as `pattern` says of each layer, none before them (W), or keys that
    are made of several tokens each, as many as RATIOS says: of those with an overlap the `topk` that an indexer chooses
    (C), of those without all (H).

    Queries are made of a latent of `q_lora_rank` channels. What heads give is projected in `o_groups` groups to
    `o_lora_rank` channels each, and these together. An indexer has `n_heads` heads of `head_dim` channels. Fields are
    those of Megatron's dev branch, but for `pattern`, which are the letters of its hybrid layers; `n_heads`, `head_dim`
    and `topk` are its `--dsa-indexer-*`.
    """

    pattern: str
    window_size: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_heads: int
    head_dim: int
    topk: int

    RATIOS: ClassVar[Mapping[str, int]] = {"W": 0, "C": 4, "H": 128}

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not {*self.pattern} <= self.RATIOS.keys():
            raise DamagedCheckpoint(f"a pattern of layers {shown(self.pattern)}", do="Known are W, C and H.")
        for name, size in vars(self).items():
            if name != "pattern":
                check_size(size, name)
        for product in ("query_size", "grouped_size"):
            check_size(getattr(self, product), product, 4 * LARGEST)

    @property
    def query_size(self) -> int:
        """Rows of the indexer's query projection."""
        return self.n_heads * self.head_dim

    @property
    def overlapping_size(self) -> int:
        """Rows of the projections of an indexer's keys: of a token for its own window, and for the next."""
        return 2 * self.head_dim

    @property
    def grouped_size(self) -> int:
        """Channels that the groups of heads give together."""
        return self.o_groups * self.o_lora_rank


@dataclass(frozen=True)
class HyperConnections:
    """Several residual streams in the place of one (Xie et al., mHC, 2026); the fields are Megatron's. A block reads a
    weighted sum of the `num_residual_streams`, and is added to each by a weight; beforehand they are mixed by a matrix,
    which `mhc_sinkhorn_iterations` make doubly stochastic. All three are made of the streams. `epsilon` is added to the
    weights, and to the sums that they are divided by."""

    num_residual_streams: int
    mhc_sinkhorn_iterations: int
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_size(self.num_residual_streams, "num_residual_streams", 1 << 10)
        check_size(self.mhc_sinkhorn_iterations, "mhc_sinkhorn_iterations", 1 << 10)
        real(self.epsilon, "epsilon of hyper-connections")

    @property
    def mapping_size(self) -> int:
        """Weights that each token has: one of a stream to read, one to add, and the matrix."""
        return self.num_residual_streams * (2 + self.num_residual_streams)

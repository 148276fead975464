"""What some models have beside plain attention and MLPs: experts, latent attention, other attention without a window,
several residual streams, embeddings of n-grams, a wrapper of images or sound; and what is a size."""

import math
from dataclasses import dataclass, fields
from functools import cache
from math import isqrt
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


def real(value: object, name: str) -> float:
    """A positive number. Raises DamagedCheckpoint."""
    if type(value) not in (int, float) or not 0 < value < 1e30:  # type: ignore[operator]
        raise DamagedCheckpoint(f"{name} is {shown(value)}, not a positive number")
    return float(value)  # type: ignore[arg-type]


def part_of_head(value: object, name: str) -> float:
    """A part of a head: a positive number of at most 1. Raises DamagedCheckpoint."""
    if real(value, name) > 1:
        raise DamagedCheckpoint(f"{name} is {shown(value)}, more than a whole head")
    return float(value)  # type: ignore[arg-type]


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much larger YaRN makes queries and keys where the context is `factor` times as long (DeepSeek's name)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def check_negative(value: object, name: str) -> None:
    """Raise DamagedCheckpoint for what is no negative number."""
    if type(value) not in (int, float) or not -1e30 < value < 0:  # type: ignore[operator]
        raise DamagedCheckpoint(f"{name} is {shown(value)}, not a negative number")


def check_numbers(owner: Any, part: str = "", counts: tuple[str, ...] = (), other: tuple[str, ...] = ()) -> None:
    """Raise DamagedCheckpoint for a field of a model, or of a part of one, that is not the number that its class says:
    an `int` is a size, or one of `counts`, which may be 0, and a `float` a positive number. Fields of `other` are not
    looked at. The error begins with the field's name, behind that of the `part` with a dot (`moe.topk`)."""
    for name, hint in _numbers(owner.__class__):
        value, called = getattr(owner, name), f"{part}.{name}" if part else name
        if name in other or (value is None and hint not in (int, float)):
            continue
        if hint in (float, float | None):
            real(value, called)
        elif name in counts:
            check_count(value, called, LARGEST)
        else:
            check_size(value, called)


@cache
def _numbers(kind: type) -> tuple[tuple[str, Any], ...]:
    """The fields of a class that are numbers, or numbers or None, and which of these."""
    numbers = (int, int | None, float, float | None)
    assert not any(isinstance(field.type, str) for field in fields(kind)), f"{kind}: annotations that are not evaluated"
    return tuple((field.name, field.type) for field in fields(kind) if field.type in numbers)


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
    `shared_expert_gate`, the output of the shared experts is multiplied by the sigmoid of one more projection of the
    token. With `shared_average` the outputs of shared and routed experts are averaged instead of added. With
    `probs_on_input` an expert's input is multiplied by its score, which is not normalised, and its output is added as
    it is. With a `sparsemixer_eps` (SparseMixer, arXiv 2409.12136) experts are chosen one after the other: the one with
    the largest logit `m` of those left, with its weight in a softmax over the logits `l` left for which (m - l) /
    max(m, |l|) <= 2 * sparsemixer_eps. Experts with a `latent_size` (Nemotron 3) read the hidden states projected to so
    many channels, and their summed output is projected back; router and shared experts read the hidden states
    themselves. With `latent_norm` (Kimi K3) the sum is normalised before it is projected back. With `expert_norms`
    (Muse Spark) a norm is between the projection and the experts, and one for all experts of a layer normalises what
    each gives, which it multiplies by its weight first. A router's logits are multiplied by `logit_multiplier`.

    With `own_norms` (Gemma 4) router, routed and shared experts each have a norm of their own before them, and the
    outputs of routed and of shared experts are normalised before they are added. The router's norm is an RMSNorm
    without weights, whose output is multiplied by a vector and by hidden_size^(-1/2). The weight of an expert for a
    token is multiplied by a factor of that expert. With `post_layernorm` (A.X K1) the sum of routed and shared experts
    is normalised, in a model without norms behind blocks. Routed experts have two clamps as
    ModelShape's of these names are: `activation_clamp` (Hunyuan 4), before the activation; None: the model's; and
    `swiglu_limits` (Step 3.5), behind it; None: there are none, whatever the model's are.
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
    latent_norm: bool = False
    n_hash_layers: int = 0
    expert_bias_on_logits: bool = False
    post_layernorm: bool = False
    activation_clamp: float | None = None
    swiglu_limits: tuple[float, ...] | None = None
    expert_norms: bool = False
    logit_multiplier: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "moe", counts=("n_hash_layers",))
        check_count(self.n_hash_layers, "moe.n_hash_layers", MOST_LAYERS)
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


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention. A query or key has `qk_head_dim` channels without positions, then
    `qk_pos_emb_head_dim` with them (of neighbouring pairs), if any; a value `v_head_dim`. `q_lora_rank` None: queries
    are projected in one step. With a `query_gate` (A.X K2) the projection of the latent of queries reads it twice,
    normalised and as it is, and also makes a gate, whose sigmoid multiplies each channel of the heads' output.

    A layer of which `kv_source_layers` names an earlier one reads that one's latent and makes its own keys and values
    of it; None: all have their own. In layers without rotary embeddings all channels of a key are the head's own if
    `nope_keys_by_head` (Mistral Large 4); else heads share the last ones there too, which nothing turns."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    query_gate: bool = False
    nope_keys_by_head: bool = False
    kv_source_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "mla", counts=("qk_pos_emb_head_dim",))
        if self.qk_pos_emb_head_dim % 2:
            what = f"mla.qk_pos_emb_head_dim is {self.qk_pos_emb_head_dim}, of which no pairs are made"
            raise DamagedCheckpoint(what)
        sources = self.kv_source_layers or ()
        for layer, source in enumerate(sources):
            if type(source) is not int or not 0 <= source <= layer or sources[source] != source:
                what = f"layer {layer} reads the latent of layer {shown(source)}"
                raise DamagedCheckpoint(what, do="Known are earlier layers that have a latent of their own.")

    def key_channels(self, rope: bool) -> tuple[int, int]:
        """Channels of a key that are each head's own, and those that all heads share, in layers with rotary embeddings
        or without."""
        own, shared = self.qk_head_dim, self.qk_pos_emb_head_dim
        return (own, shared) if rope or not self.nope_keys_by_head else (own + shared, 0)


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
        check_numbers(self, "global_attention")

    @property
    def said(self) -> dict[str, Any]:
        """The fields that are otherwise."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Heterogeneous:
    """Layers of several sizes, as a search chose them (Llama-Nemotron): for each layer its groups of queries and the
    channels of its MLP, and 0 where it has no attention, or no MLP. Megatron's heterogeneous layers, without those
    whose attention or MLP is one linear."""

    num_query_groups: tuple[int, ...]
    ffn_hidden_size: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, sizes in vars(self).items():
            for each in sizes:
                check_count(each, f"heterogeneous.{name}", LARGEST)
            if not any(sizes):
                raise DamagedCheckpoint(f"no layer has heterogeneous.{name}", do="Is config.json this model's?")

    @property
    def largest(self) -> dict[str, Any]:
        """The fields of ModelShape of the same names: the largest size of any layer."""
        return {name: max(sizes) for name, sizes in vars(self).items()}

    def of_layer(self, layer: int) -> tuple[int, int]:
        """The sizes of a layer."""
        return self.num_query_groups[layer], self.ffn_hidden_size[layer]


@dataclass(frozen=True)
class Wrapper:
    """A model of images or sound around a text model: its `model_type`, and what its Hugging Face names have in place
    of the text model's `model.` (or `backbone.`), `lm_head.` and, where its prediction layers have such names, `mtp.`.
    All its other tensors are towers, and those whose names begin with one of what is `apart`. `body_alone` is what
    published files of the text model alone have in the place of `body`."""

    model_type: str
    body: str
    head: str
    mtp: str | None = None
    apart: tuple[str, ...] = ()
    body_alone: str = "model."

    @property
    def names(self) -> dict[str, str]:
        """Beginnings of names of the text model alone, with those that they have here."""
        names = {"model.": self.body, "backbone.": self.body, "lm_head.": self.head}
        return names if self.mtp is None else names | {"mtp.": self.mtp}

    def is_text(self, name: str) -> bool:
        """Whether a tensor of this Hugging Face name is the text model's."""
        return name.startswith(tuple(self.names.values())) and not name.startswith(self.apart)

    def name_of(self, name: str) -> str:
        """The name in the wrapper of what the text model alone calls so."""
        for alone, here in self.names.items():
            if name.startswith(alone):
                return here + name.removeprefix(alone)
        return name

    def name_alone(self, name: str) -> str:
        """What the text model alone calls in published files what has this name in the wrapper."""
        alone = {here: alone for alone, here in self.names.items()} | {self.body: self.body_alone}
        here = max(filter(name.startswith, alone), key=len, default=None)  # that of a body may be empty
        return name if here is None else alone[here] + name.removeprefix(here)


@dataclass(frozen=True)
class HyperConnections:
    """Several residual streams x_1 .. x_N in the place of one (Xie et al., mHC, arXiv 2512.24880); the fields are
    Megatron's. N is `num_residual_streams`, and e `epsilon`. For each token a projection of its streams, normalised
    together, with factors and biases of its own makes r and a `[N]` and m `[N, N]`. A block f makes of the streams:

        y = f(sum_i (sigmoid(r_i) + e) x_i)
        x_j = sum_i M_ij x_i + magnitude sigmoid(a_j) y

    M is e plus the softmax of each row of m, made doubly stochastic in `mhc_sinkhorn_iterations`: columns and rows are
    divided in turn by e plus their sums. Without iterations (independent hyper-connections, Hunyuan 4) there is no m,
    streams are not mixed, and y is weighted by e more.

    With a `lowrank` (Qwen4-Exp) streams are not mixed, each is normalised by itself to n_i, and there is no e. With
    w `[N, hidden_size]` of an MLP of so many channels, by SiLU, of all n_i, a block reads the mean of sigmoid(w_i) n_i,
    which no other norm normalises. The last norm reads a weighted sum of the streams as a block does, or with
    `mean_head` (GLM-5.3) their mean."""

    num_residual_streams: int
    mhc_sinkhorn_iterations: int | None
    epsilon: float = 1e-6
    magnitude: float = 2.0
    lowrank: int | None = None
    mean_head: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "mhc")
        check_size(self.num_residual_streams, "mhc.num_residual_streams", 1 << 10)
        check_size(self.mhc_sinkhorn_iterations or 1, "mhc.mhc_sinkhorn_iterations", 1 << 10)

    @property
    def mixed(self) -> bool:
        """Whether a matrix mixes the streams."""
        return self.mhc_sinkhorn_iterations is not None

    @property
    def mapping_size(self) -> int:
        """Weights that each token has: one of a stream to read, one to add, and the matrix."""
        return self.num_residual_streams * (2 + self.num_residual_streams * self.mixed)


@dataclass(frozen=True)
class AltUp:
    """Alternating updates (Baykal et al., NeurIPS 2023) of `num_inputs` residual streams x_1 .. x_N, as Gemma 3n has
    them. A layer L reads and makes one stream. The others are predicted before it, and corrected behind it by what it
    has made otherwise than predicted:

        p_j = x_j + sum_i (P m(x_1))_ji x_i
        x_j = p_j + (1 + (C m(L(p_1)))_j) (L(p_1) - p_1) + g (j > 1)

    g is what the layer makes of a token's embedding for it, by a gate of the corrected x_1 (per_layer_embed_dim). m are
    N numbers of a token, between -1 and 1: the tanh of a projection of what they are made of, normalised and divided by
    hidden_size. While a model is trained, P and C are clamped to `coef_clip` (None: they are not). Streams but the
    first begin as projections of the embedding, with its magnitude; the last norm reads the mean of the first and of
    projections of the others, with the first one's magnitude."""

    num_inputs: int
    coef_clip: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "altup")
        check_size(self.num_inputs, "altup.num_inputs", 1 << 10)

    @property
    def mixing_size(self) -> int:
        """Weights by which streams are predicted of one another."""
        return self.num_inputs**2


@dataclass(frozen=True)
class NgramEmbedding:
    """What some `layers` (an entry for each) add to the residual streams before attention: embeddings of the last
    tokens, 2 to `ngram_size` of them (Qwen4-Exp's PLE). An n-gram of each size has `heads_per_ngram` hashes, each with
    a part of the `embed_dim` channels in a table of its own. These tables stand one after the other in the layer's one.
    Each has a prime number of rows, of all layers together the first primes from `vocab_size_base` on, and the whole is
    filled up to a multiple of `vocab_divisor`. Hugging Face stores it in `split_parts`.

    A gate of each stream multiplies what is made of these embeddings, and a causal convolution of `conv_kernel_dim`
    taps, which stand `ngram_size` tokens apart, is added. `end_token` stands for tokens before a text, or before the
    last token of this number.
    """

    layers: tuple[bool, ...]
    embed_dim: int
    conv_kernel_dim: int
    ngram_size: int
    heads_per_ngram: int
    vocab_size_base: int
    vocab_divisor: int
    split_parts: int
    end_token: int

    multipliers_below: ClassVar[int] = (1 << 63) - 1
    """Hashes are products with numbers of 64 bits."""

    def __post_init__(self) -> None:
        check_numbers(self, "ple", counts=("end_token",))
        check_size(self.ngram_size - 1, "ngram_size - 1")
        check_size(self.heads * sum(self.layers), "heads of n-gram embeddings", 1 << 8)
        check_size(self.split_parts * sum(self.layers), "parts of n-gram embeddings", 1 << 16)
        if self.embed_dim % self.heads:
            raise DamagedCheckpoint(f"{self.embed_dim} channels of n-gram embeddings for {self.heads} heads")

    @property
    def heads(self) -> int:
        """Rows of the table that each token reads."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def head_dim(self) -> int:
        """Channels of one of them."""
        return self.embed_dim // self.heads

    @property
    def rows_below(self) -> int:
        """More than any layer's table has."""
        return max(self.table_rows(layer) for layer, has in enumerate(self.layers) if has) + 1

    def head_rows(self, layer: int) -> tuple[int, ...]:
        """Rows that each head has in a layer's table."""
        before = sum(self.layers[:layer]) * self.heads
        return _primes(self.vocab_size_base, self.heads * sum(self.layers))[before : before + self.heads]

    def table_rows(self, layer: int) -> int:
        """Rows of a layer's table."""
        return -(-sum(self.head_rows(layer)) // self.vocab_divisor) * self.vocab_divisor


@cache
def _primes(least: int, number: int) -> tuple[int, ...]:
    """The first prime numbers from `least` on."""
    found: list[int] = []
    while len(found) < number:
        divisors = (2, *range(3, isqrt(least) + 1, 2)) if least > 2 else ()
        if least > 1 and all(least % divisor for divisor in divisors):
            found.append(least)
        least += 1
    return tuple(found)

"""ModelFields: the sizes and switches of a model, under Megatron's names, as its files say them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from precisionctl.model.model_parts import (
    MLA,
    AltUp,
    GlobalAttention,
    Heterogeneous,
    HyperConnections,
    MoE,
    NgramEmbedding,
    Wrapper,
)
from precisionctl.model.recurrent_parts import GatedDeltaNet, Mamba, Multipliers, ShortConv
from precisionctl.model.sparse_parts import CSA, DSA, MSA

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "squared_relu", "quick_gelu", "xielu", "situ"]
"""`gelu_tanh` is GELU by its tanh approximation, `quick_gelu` x * sigmoid(1.702 x); `xielu` has parameters in each
layer; `situ` (Kimi K3), of gated MLPs alone, is 4 tanh(x / 4) * sigmoid(x), and makes 25 tanh(u / 25) of the linear
half u."""

LinearGate = Literal["sigmoid per head", "sigmoid per element", "softplus per head", "softplus per element"]
"""What becomes of a number that a gate makes, and what it is for: a head, or one of its channels."""


@dataclass(frozen=True)
class ModelFields:
    """What both layouts agree on about a decoder-only transformer. Lists by layer have an entry for each layer."""

    architecture: str
    """The Hugging Face `model_type`; of a `wrapper`, that of the text model in it."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    """Channels of a head."""
    vocab_size: int
    padded_vocab_size: int
    max_position_embeddings: int
    make_vocab_size_divisible_by: int = 128
    tied_embeddings: bool = False

    # Norms, and what is added to the residual stream
    norm_epsilon: float = 1e-5
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    zero_centered_gamma: bool = False
    """Megatron's norms store their factor less one."""
    hf_zero_centered_gamma: bool = False
    """Hugging Face's norms store it so."""
    norm_bias: bool = True
    """LayerNorms have biases in Hugging Face; in Megatron they all have."""
    norm_weight: bool = True
    """Norms have weights in Hugging Face; in Megatron they all have."""
    pre_layernorms: bool = True
    """Norms of what attention and MLP read."""
    post_layernorms: bool = False
    """Norms of what attention and MLP give."""
    post_norm_epsilon: float | None = None
    """The epsilon of these (None: `norm_epsilon`)."""
    scaled_post_layernorms: bool = False
    """That of attention has no weight, and that of an MLP multiplies by its weight before it normalises."""
    final_gamma_whole: bool = False
    """The last norm stores its factor itself, where the other norms store it less one."""
    parallel_residual: bool = False
    """Attention and MLP read the same hidden states."""
    shared_layernorm: bool = False
    """... through one norm."""
    norm_gate_rank: int | None = None
    """The output of norms before attention and experts is multiplied by a gate: the sigmoid of an MLP of it, with so
    many channels and SiLU."""
    residual_multiplier: float = 1.0
    """What attention and MLP give is multiplied by this, after their norms, and added."""
    residual_gate_temperature: float | None = None
    """What a block gives, y, is added to the residual stream x as sqrt(1 - b^2) x + b y, with b, for each channel, the
    sigmoid of a parameter over this."""
    layer_scalar: bool = False
    """What a layer gives is multiplied by a number of its own, which is not trained."""
    laurel_rank: int | None = None
    """Beside attention is a learned augmented residual (LAuReL, arXiv 2411.07501): what attention reads, and a
    projection of it through so many channels, normalised. The sum of both and of what attention is added to is divided
    by the root of 2."""
    attn_res_block_size: int | None = None
    """Attention residuals (Kimi K3): before the first layer, and every so many layers, the residual stream is put
    aside, and begins anew with that layer's attention. Attention, MLP and the last norm read a mean of what was put
    aside and the stream, by a softmax over the products of each, normalised, with a vector of their own."""

    # MLP
    activation: Activation = "silu"
    gated_linear_unit: bool = True
    activation_clamp: float | None = None
    """Clamps both halves of a gated MLP before the activation, the gate from above alone. Routed experts have it too if
    `moe.activation_clamp` is None."""
    glu_offset: float = 0.0
    """Added to a gated MLP's linear half, after `activation_clamp`."""
    swiglu_limits: tuple[float, ...] | None = None
    """By layer: clamps both halves of dense MLPs and shared experts behind the activation, the gate from above alone;
    0: does not. Routed experts have `moe.swiglu_limits` alone."""

    activation_sparsity: tuple[float, ...] | None = None
    """By layer: the part of a gated MLP's gate that is zero before the activation, if its channels are normally
    distributed: from all of them their mean and so many of their standard deviations are taken, and what is left below
    zero is zero. 0: nothing is."""

    # Positions
    position_embedding: Literal["rope", "learned_absolute", "alibi"] = "rope"
    """`alibi` (arXiv 2108.12409): scores fall with distance, for each head by a slope of its own."""
    unread_positions: int = 0
    """Rows behind the learned positions, which no text reads."""
    rotary_base: float = 10000.0
    rotary_base_local: float | None = None
    """The base in layers with a window, where no scaling applies (None: `rotary_base`, scaled)."""
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    """Pairs that turn are neighbouring channels, and not one of each half."""
    rope_scaling: Mapping[str, Any] | None = None
    """Hugging Face's mapping, with `rope_type`."""
    lerope: bool = False
    """The angle of each pair is multiplied by the exponential of a number, which is not trained."""
    rope_layers: tuple[bool, ...] | None = None
    """By layer: has it rotary embeddings? None: all have."""

    # Attention
    sliding_window: int | None = None
    """Keys that a query sees in layers with a window, itself among them."""
    attention_chunk_size: int | None = None
    """Instead of a window: a query sees earlier keys of its own chunk of so many tokens."""
    window_layers: tuple[bool, ...] | None = None
    """By layer: has it the window, or chunks? None: all have, if there are any."""
    query_pre_attn_scalar: float | None = None
    """Scores are multiplied by its power -1/2. None: by that of the size of a head."""
    query_scaling_beta: float | None = None
    """Queries are multiplied by `1 + beta * log(1 + floor(position / original context))`."""
    query_scaling_floor: int | None = None
    """In the place of the original context: then in layers without rotary embeddings alone, counting from 1."""
    softmax_scaling: bool = False
    """Queries are multiplied by `scale * log(position) + bias`, positions counting from 1: two numbers of each head. So
    are those of a DSA indexer, which are then made of hidden states, through a norm of their own."""
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    softmax_offset: bool = False
    """Sinks: each head has the score of one more key, whose value is zero."""
    attention_output_gate: bool = False
    """What heads give is multiplied by the sigmoid of as many channels, which the query projection makes too."""
    head_wise_attn_gate: bool = False
    """What a head gives is multiplied by the sigmoid of a number of its own, which linear_qkv makes too."""
    linear_gate: LinearGate | None = None
    """The output of heads is multiplied by a gate: a projection of the hidden states, through this function."""
    attention_output_norm: bool = False
    """What each head gives is normalised by an RMSNorm without weights, before an output gate."""
    clip_qkv: float | None = None
    """Queries, keys and values are clamped to this as they are projected."""
    qk_layernorm: bool = False
    """A norm of each head's query and key."""
    qk_layernorm_over_heads: bool = False
    """... of all heads together."""
    qk_layernorm_after_rope: bool = False
    qk_l2_norm: bool = False
    """An RMSNorm without weights of each head's query and key, in layers with rotary embeddings, after these."""
    qk_l2_norm_everywhere: bool = False
    """... in all layers, before rotary embeddings."""
    v_l2_norm: bool = False
    """Such a norm of each head's value."""
    v_head_dim: int | None = None
    """Channels of a head of values. None: as many as one of keys."""
    attention_value_scale: float = 1.0
    """Values are multiplied by this."""
    keys_are_values: bool = False
    """There is no value projection: a value is the key before its norm and rotary embeddings."""
    global_attention: GlobalAttention | None = None
    """What layers without a window have otherwise. Sizes of attention are therefore asked of `attention_of`."""
    num_kv_shared_layers: int = 0
    """So many last layers have queries alone, and read the keys and values of an earlier one (`kv_layer`)."""
    use_double_wide_mlp: bool = False
    """The MLPs of these layers have twice the channels."""
    stores_unused: bool = False
    """Checkpoints have parameters that no program computes with: key and value projections of the last
    `num_kv_shared_layers`, or of a model with `moe.post_layernorm` such norms in dense layers, too."""

    # Embeddings and logits
    embedding_multiplier: float = 1.0
    rounded_embedding_multiplier: bool = False
    """The multiplier is rounded to the dtype of the embeddings first (Gemma)."""
    embedding_norm: bool = False
    """They are normalised by an RMSNorm without weights."""
    embedding_layernorm: bool = False
    """They are normalised as what attention reads is."""
    per_layer_embed_dim: int | None = None
    """A token has an embedding of so many channels in each layer too, added to as many made of its embedding. After its
    MLP a layer adds what a gate of its hidden states, by the activation, lets through of these (Gemma 4); between
    alternating updates, to the streams but the first, behind their correction (Gemma 3n)."""
    rounded_per_layer_multipliers: bool = False
    """What projections for those, and their sums, are multiplied by is rounded to their dtype first (Gemma 3n)."""
    per_layer_vocab_size: int | None = None
    """So many first tokens of the vocabulary have those, and all others that of the first one (None: all have)."""
    logit_multiplier: float = 1.0
    logits_scaling: float = 1.0
    """Logits are divided by this."""

    # Biases that Hugging Face's tensors have; Megatron has one switch for all linears, and one for QKV alone
    qkv_bias: bool = False
    proj_bias: bool = False
    mlp_bias: bool = False
    output_bias: bool = False
    hf_expert_bias: bool = True
    """Hugging Face has the bias that chooses experts, where Megatron has one."""
    add_bias_linear: bool = False
    add_qkv_bias: bool = False

    # Other kinds of layers
    mla: MLA | None = None
    dsa: DSA | None = None
    msa: MSA | None = None
    csa: CSA | None = None
    mhc: HyperConnections | None = None
    altup: AltUp | None = None
    ple: NgramEmbedding | None = None
    moe: MoE | None = None
    gdn: GatedDeltaNet | None = None
    short_conv: ShortConv | None = None
    mamba: Mamba | None = None
    heterogeneous: Heterogeneous | None = None
    """Sizes by layer. Those of a layer are therefore asked of `of_layer`."""
    multipliers: Multipliers | None = None
    mtp_num_layers: int = 0
    """Layers of multi-token prediction, made as the decoder's last one is, but with attention."""
    mtp_dense: bool = False
    """They have no experts, whatever the last layer has."""
    mtp_output_layers: bool = False
    """Each has an output layer of its own."""
    wrapper: Wrapper | None = None
    """The model of images or sound that this is the text model of."""


PARTS: Mapping[str, Callable[..., object]] = {
    "moe": MoE,
    "mla": MLA,
    "dsa": DSA,
    "msa": MSA,
    "csa": CSA,
    "mhc": HyperConnections,
    "altup": AltUp,
    "ple": NgramEmbedding,
    "gdn": GatedDeltaNet,
    "short_conv": ShortConv,
    "mamba": Mamba,
    "heterogeneous": Heterogeneous,
    "multipliers": Multipliers,
    "global_attention": GlobalAttention,
}
"""The fields that have fields of their own, which are named with a dot (`moe.topk`)."""

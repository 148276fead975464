"""FLOPs of training, and the BF16 peak of GPUs to compare them with.

The convention is that of Megatron-LM's `num_floating_point_operations` (megatron/training/training.py), so that numbers
are comparable. Only GEMMs count, with 2 FLOPs for a multiply-add, times 3 for forward and backward:

- experts: those that a token is routed to
- attention: the half that a causal mask leaves, whatever the window; with chunks, that half of each chunk
- DeepSeek-V4's attention: the window, the compressed keys that a query may choose, and the indexer
- attention to blocks of keys: all pairs, whichever blocks an indexer chooses; the indexer does not count
- gated delta nets: also the convolution, and four products of a state's size for each token
- short convolutions: all products
- embeddings of n-grams: what is projected of them
- Mamba mixers: 7 FLOPs for each number of a state and token
- logits: of the padded vocabulary

Routers, the joining of residual streams, norms, rotary embedding and softmax do not count, nor does what
`train.recompute` and the guard's passes compute additionally: these are FLOPs of the model, not of the machine.
"""

from collections.abc import Iterable, Mapping
from functools import partial

from precisionctl.model_parts import MoE
from precisionctl.model_shape import ModelShape
from precisionctl.recurrent_parts import GatedDeltaNet
from precisionctl.sparse_parts import CSA

FORWARD_AND_BACKWARD = 3
MULTIPLY_ADD = 2
SCAN = 7
"""For each number of a mixer's states and token (mamba_layer_flops in the same file)."""


def training_flops(model: ModelShape, lengths: Iterable[int]) -> int:
    """FLOPs of forward and backward for sequences of these lengths, in tokens. Packed sequences are separate ones."""
    each = list(lengths)
    whole, chunked = (sum(_pairs(length, size) for length in each) for size in (None, model.attention_chunk_size))
    products, scans = sum(each) * weights_used(model), 0
    for layer in range(model.num_layers):
        if model.has_delta_net(layer):
            products += sum(each) * delta_rule(model)
        elif model.short_conv and model.has_short_conv(layer):
            products += sum(each) * model.short_conv.kernel_dim * model.hidden_size
        elif model.csa:
            products += sum(_compressed_attention(model, model.csa, layer, length) for length in each)
        if model.mamba and model.has_mixer(layer):
            scans += sum(each) * SCAN * model.mamba.inner_size * model.mamba.state_dim
        if model.has_attention(layer) and not model.csa:
            attention = model.attention_of(model.in_window(layer))
            # Multiply-adds for each pair of a query and an earlier token: queries with keys, scores with values
            per_pair = attention.query_size + attention.projection_size
            products += (chunked if model.in_window(layer) else whole) * per_pair // 2
    return FORWARD_AND_BACKWARD * (MULTIPLY_ADD * products + scans)


def _compressed_attention(model: ModelShape, csa: CSA, layer: int, length: int) -> int:
    """Multiply-adds of queries with keys, and of weights with values, in a text (_dsv4_hybrid_self_attention_flops of
    Megatron-LM's dev branch): each query has a whole window, and half of the compressed keys that it may choose."""
    keys, scores = length * csa.window_size, 0
    if model.has_indexer(layer):
        ratio = compression(model, layer)
        chosen = min(csa.topk, length // ratio)
        keys += length * chosen - chosen * chosen * ratio // 2
        scores = length * length * csa.query_size // ratio
    elif ratio := compression(model, layer):
        keys += length * length // ratio // 2
    return keys * (model.query_size + model.projection_size) + scores


def _pairs(length: int, chunk: int | None) -> int:
    """Queries times keys of a text, in chunks of so many tokens."""
    if chunk is None:
        return length * length
    whole, rest = divmod(length, chunk)
    return whole * chunk * chunk + rest * rest


def weights_used(model: ModelShape) -> int:
    """The number of weights that a token is multiplied with: all linears', except experts that it is not routed to."""
    layers = sum(projections(model, layer) + mlp_used(model, layer) for layer in range(model.num_layers))
    layers += model.num_layers * per_layer_input(model) + sum(map(partial(norm_gates, model), range(model.num_layers)))
    layers += sum(map(partial(ngram_projections, model), range(model.num_layers)))
    return layers + model.hidden_size * (model.padded_vocab_size + model.per_layer_embed_size)


def delta_rule(model: ModelShape) -> int:
    """The products for each token of a gated delta net between its linears: of the convolution, and of a state with its
    decay, key, value and query."""
    gdn = model.gdn
    if gdn is None:
        return 0
    return gdn.conv_kernel_dim * gdn.conv_size + 4 * gdn.value_size * gdn.key_head_dim


def projections(model: ModelShape, layer: int) -> int:
    """The number of weights in the linears of a layer's attention, or of what it has in its place."""
    hidden, mla, mixer = model.hidden_size, model.mla, 0
    if model.mamba and model.has_mixer(layer):
        mixer = hidden * (model.mamba.in_proj_size + model.mamba.inner_size)
        mixer += model.mamba.inner_size * (model.mamba.x_proj_size + (model.mamba.dt_rank or 0))
    if model.gdn and model.has_delta_net(layer):
        return hidden * (model.gdn.in_proj_size + model.gdn.value_size) + beside_in_proj(model.gdn, hidden)
    if model.has_short_conv(layer):
        return hidden * (model.short_conv_size + hidden)
    if not model.has_attention(layer):
        return mixer
    if model.csa:
        queries = model.csa.q_lora_rank * (hidden + model.query_size)
        given = model.csa.o_lora_rank * model.projection_size + model.csa.grouped_size * hidden
        keys = hidden * (model.kv_channels + 2 * compressed_rows(model, layer))
        return queries + keys + given + (indexer(model) if model.has_indexer(layer) else 0)
    shared, rope = model.shares_kv(layer), model.has_rope(layer)
    model = model.attention_of(model.in_window(layer))
    out = model.projection_size * hidden
    if mla is None:
        return mixer + hidden * (model.qkv_size + model.gate_size - (model.key_value_size if shared else 0)) + out
    rank = mla.q_lora_rank
    up = model.query_up_inputs * model.query_up_size
    queries = hidden * model.query_size if rank is None else rank * hidden + up
    own, of_all = mla.key_channels(rope)
    latents = hidden * ((0 if shared else mla.kv_lora_rank + of_all) + model.gate_size)
    return queries + latents + mla.kv_lora_rank * model.num_attention_heads * (own + mla.v_head_dim) + out


def beside_in_proj(gdn: GatedDeltaNet, hidden: int) -> int:
    """The number of weights in the linears of Kimi delta attention that make learning rates, and decays and gates if it
    makes these in two steps."""
    if not gdn.kda:
        return 0
    of_decays = hidden + gdn.key_size
    of_gates = 0 if gdn.kda_full_gate else hidden + gdn.value_size
    return hidden * gdn.num_value_heads + (gdn.kda_lora_rank or 0) * (of_decays + of_gates)


def compression(model: ModelShape, layer: int) -> int:
    """How many tokens a compressed key of a layer is made of; 0 where there are none."""
    return model.csa.RATIOS[model.csa.pattern[layer]] if model.csa else 0


def compressed_rows(model: ModelShape, layer: int) -> int:
    """Rows of each of the two linears that make compressed keys."""
    rows = {"W": 0, "C": model.overlapping_size, "H": model.kv_channels}
    return rows[model.csa.pattern[layer]] if model.csa else 0


def connections(model: ModelShape) -> int:
    """The number of weights that join a layer's two blocks to the residual streams."""
    mhc = model.mhc
    if mhc is None:
        return 0
    of_block = 2 * mhc.lowrank + mhc.num_residual_streams if mhc.lowrank else mhc.mapping_size
    return 2 * of_block * model.streams_size


def ngram_projections(model: ModelShape, layer: int) -> int:
    """The number of weights in the linears that read a layer's embeddings of n-grams."""
    if model.ple is None or not model.has_ngrams(layer):
        return 0
    return model.ple.embed_dim * (model.streams_size + model.hidden_size)


def per_layer_input(model: ModelShape) -> int:
    """The number of weights in a layer's gate of a token's embedding for it, and in the projection back."""
    return 2 * model.hidden_size * (model.per_layer_embed_dim or 0)


def norm_gates(model: ModelShape, layer: int) -> int:
    """The number of weights in the gates of a layer's norms."""
    return 2 * model.hidden_size * (model.norm_gate_rank or 0) * (1 + model.has_experts(layer))


def indexer(model: ModelShape) -> int:
    """The number of weights in a layer's indexer: DeepSeek-V3.2's multiplies no token here, and MiniMax-M3's those of
    long texts, in the forward alone."""
    if model.csa:
        keys = 2 * model.csa.overlapping_size
        return model.csa.q_lora_rank * model.csa.query_size + model.hidden_size * (keys + model.csa.n_heads)
    if model.msa:
        return model.hidden_size * (model.msa.query_size + model.msa.head_dim)
    if model.dsa is None:
        return 0
    latent = (model.mla.q_lora_rank if model.mla else None) or model.hidden_size
    keys = model.dsa.head_dim * (1 + model.pooled_index_keys)
    return latent * model.dsa.query_size + model.hidden_size * (keys + model.dsa.n_heads)


def mlp(model: ModelShape, inner: int, width: int | None = None) -> int:
    """The number of weights in an MLP with `inner` channels. Its input is the hidden states, unless it has another
    `width`."""
    return (3 if model.gated_linear_unit else 2) * (width or model.hidden_size) * inner


def mlp_used(model: ModelShape, layer: int) -> int:
    """The number of weights that a token is multiplied with in a layer's MLP, or in experts that it is routed to."""
    if model.moe is None or not model.has_experts(layer):
        return mlp(model, model.ffn_size(layer)) if model.has_dense_mlp(layer) else 0
    routed = mlp(model, model.moe.ffn_hidden_size, model.expert_hidden_size)
    return model.moe.topk * routed + beside_experts(model.moe, model)


def beside_experts(moe: MoE, model: ModelShape) -> int:
    """The number of weights in what all tokens go through beside experts: the shared ones, and the projections to a
    latent size and back. Routers do not count."""
    return mlp(model, moe.shared_ffn_hidden_size or 0) + 2 * model.hidden_size * (moe.latent_size or 0)


BF16_PEAK: Mapping[str, float] = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "GB200": 2500e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "H20": 148e12,
    "L40": 181e12,
    "L4": 121e12,
}
"""FLOP/s of dense BF16 GEMMs by a part of the device's name, from NVIDIA's data sheets (without sparsity). The first
that fits is used."""


def bf16_peak(device_name: str) -> float | None:
    """The peak of a device in FLOP/s; None if it is not known."""
    return next((peak for part, peak in BF16_PEAK.items() if part in device_name), None)

"""Bytes that a pass allocates and frees, by formulas: what is saved for the backward, and what it works with.

Counted as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022, arXiv
2205.05198), section 4: the bytes for each token that each operation saves for the backward. Their 34 s b h (equation 1)
is for GPT with dropout and without grouped queries, gates, experts or fused attention; here these are counted as the
trainer's modules save them, which tests compare with what autograd saves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log2

from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import GatedDeltaNet, Mamba
from precisionctl.model.sparse_parts import CSA
from precisionctl.recipe import Recipe
from precisionctl.trainer.backends.choose import BackendName
from precisionctl.trainer.measure.parameters import Parameters, compressed_rows, compression, largest_linear
from precisionctl.trainer.model.attention.core_attention import SINK_CHANNELS
from precisionctl.trainer.model.mlp import is_swiglu
from precisionctl.trainer.model.recurrent.delta_rule import DECAY_BLOCK
from precisionctl.trainer.model.recurrent.recurrence import CHUNK


def pass_bytes(
    model: ModelShape,
    recipe: Recipe,
    backend: BackendName,
    loss_bytes: Callable[[int], int],
    kernels: bool = False,
) -> int:
    """Bytes that are allocated and freed within a pass: activations, and the larger of what the loss takes for so many
    logits, and what a layer's backward takes besides. `kernels` as in BytesKept.

    All here is in bytes of the pass, but for `activated` and `others`, elements for each token, and `_layer`, `beside`
    and the norms and embeddings of `last`, bytes for each token: these are multiplied by `tokens`."""
    kept, length = BytesKept.of(model, recipe, backend, kernels), recipe.data.sequence_length
    tokens, parameters = length * recipe.train.micro_batch_size, Parameters.of(model)
    codes = [kept.codes * each for each in parameters.layers(recipe.parallel)]
    layers = [_layer(model, each, kept, length) * tokens + codes[each] for each in range(model.num_layers)]
    activated = max(model.fc1_size, model.kv_shared_fc1_size)
    others = [each.qkv_size if each.mla is None else each.query_size for each in model.attentions]
    others += [each.in_proj_size for each in (model.gdn, model.mamba) if each]
    others += [model.short_conv_size] if model.short_conv else []
    others.append(model.streams_size)
    if model.moe:
        activated = max(activated, model.moe.topk * model.expert_fc1_size)
        others.append(model.moe.topk * model.expert_hidden_size)
    working = max(kept.activated * activated, kept.working * max(others)) * tokens // kept.tensor
    if model.mamba and model.mamba.dt_rank is not None:
        states = min(length, CHUNK) * recipe.train.micro_batch_size * model.mamba.inner_size * model.mamba.state_dim
        working = max(working, _SCANNED * states // kept.tensor)
    working += 8 * largest_linear(model) if kept.codes else 0
    logits = loss_bytes(model.padded_vocab_size * tokens // kept.tensor)
    last = (
        (kept.norm * (1 + model.embedding_layernorm) + 2 + 4 * model.embedding_norm) * model.hidden_size
        + (_read_streams(model) if model.mhc else 0)
        + _projected_streams(model)
    ) * tokens
    if recipe.train.recompute == "layer":
        inputs = 2 * model.streams_size * tokens * model.num_layers
        beside = (2 + kept.norm) * model.per_layer_embed_size / kept.tokens
        read = {model.kv_layer(each) for each in range(model.num_layers) if model.shares_kv(each)}
        if model.mla:
            beside += 2 * model.kv_down_size * len(read) / kept.tokens
        else:
            beside += sum(2 * 2 * model.of_layer(each).key_size for each in read) / kept.tensor
        held = sum(codes) if recipe.casts_once else 0
        return round(inputs + beside * tokens + last + held + max(logits, max(layers) + working))
    return round(sum(layers) + last + max(logits, working))


_SCANNED = 4 * (3 * int(log2(CHUNK)) + 4)
"""Bytes for each number of the states of a chunk's tokens while the backward computes it again: three FP32 numbers for
each step of the prefix scan, and what is around it."""


_SCALED_NORM = 4 + 2
"""Bytes for each number of what a ScaledNorm reads: in FP32, and multiplied."""


@dataclass(frozen=True)
class BytesKept:
    """Bytes that are saved for the backward, for each element of a norm's input (`norm`), of a GEMM's input (`input`)
    and of a weight (`codes`). Bytes that a layer's backward takes meanwhile, for each element of what an MLP's
    activation reads (`activated`), and of the largest of what other GEMMs read or make (`working`). A layer's channels
    are divided by `tensor` ranks, its tokens between GEMMs by `tokens` ranks. `kernels`: one kernel each computes
    SwiGLU (gpu_kernels.py) and attention (TE's), as on a GPU. So many `rows` are in a pass, and share masks."""

    norm: int
    input: float
    codes: int
    activated: int
    working: int
    tensor: int = 1
    tokens: int = 1
    kernels: bool = False
    rows: int = 1

    @staticmethod
    def of(model: ModelShape, recipe: Recipe, backend: BackendName, kernels: bool = False) -> "BytesKept":
        """Emulated norms save their input in FP32, and RMSNorm with weights also the normalised values; TE's save only
        the input. TE keeps codes of weights for the forward, and transposed ones for the backward."""
        tensor = recipe.parallel.tensor
        tokens = tensor if recipe.parallel.sequence else 1
        emulated, fp8 = backend == "emulated", recipe.precision.fp8
        nvfp4 = fp8 and recipe.precision.scaling == "nvfp4"  # of which TE has two codes in a byte, the emulation one
        codes = 0 if not fp8 else 1 if emulated or nvfp4 else 2
        grouped = 0.25 if recipe.precision.scaling in ("block", "mxfp8", "nvfp4") else 0.0  # scales
        norm = 2 if not emulated else 8 if model.normalization == "RMSNorm" and model.norm_weight else 4
        working = 20 if emulated and nvfp4 else 12 if emulated and fp8 else 8  # numbers drawn, and what they round, too
        # The gradient in BF16, with two FP8 codes of each number of it, or with the gradient of half as many outputs
        kinds = (model, model.of_experts)
        fused = kernels and all(is_swiglu(each, layer) for each in kinds for layer in range(model.num_layers))
        activated = 4 if fused else working
        rows = recipe.train.micro_batch_size
        read = (0.5 if nvfp4 and not emulated else 1) + grouped if fp8 else 2
        return BytesKept(norm, read, codes, activated, working, tensor, tokens, kernels, rows)


def _layer(model: ModelShape, layer: int, kept: BytesKept, length: int) -> float:
    """Bytes that a layer saves for the backward for each token, in rows of `length` tokens."""
    model = model.normed_as(layer)
    norms = 2 * (model.pre_layernorms + model.post_layernorms) - model.one_layernorm
    if model.scaled_post_layernorms:
        norms -= 2
    if model.mamba and not model.parallel_mixers:
        norms = 1
    if model.heterogeneous:
        norms = model.has_attention(layer) + model.has_dense_mlp(layer)
    if model.moe and model.moe.post_layernorm and model.has_experts(layer):
        norms += 1
    made = norms * kept.norm * model.hidden_size / kept.tokens
    if model.scaled_post_layernorms:  # that of attention has no weight
        made += (2 + _SCALED_NORM) * model.hidden_size / kept.tokens
    if model.residual_gate_temperature:  # of both gates, what a block gives and the stream before it
        made += 2 * (2 + 2) * model.hidden_size / kept.tokens
    if model.has_dense_mlp(layer) or model.has_experts(layer):
        made += _inner(model, layer, kept)
    if model.norm_gate_rank:  # what the norm gives, the gate in FP32, and the inner channels before and after SiLU
        gated = (2 + 4) * model.hidden_size + 2 * 2 * model.norm_gate_rank
        made += (1 + model.has_experts(layer)) * gated / kept.tokens
    if model.per_layer_embed_dim:
        made += ((2 + kept.norm) * model.hidden_size + (8 + kept.norm) * model.per_layer_embed_dim) / kept.tokens
    read = kept.input * model.hidden_size
    if model.laurel_rank:  # in FP8 attention keeps codes of what the first projection reads
        made += ((kept.norm + 2 * bool(kept.codes)) * model.hidden_size + 2 * model.laurel_rank) / kept.tokens
    if model.altup:
        # What two norms read and give, what is otherwise than predicted, and the streams before and behind the layer;
        # numbers of a token, in FP32 too, and coefficients
        number = model.altup.num_inputs
        made += (2 * (kept.norm + 2) + 2 + 2 * 2 * number) * model.hidden_size / kept.tokens
        made += (2 * (4 + 2) * number + 2 * number + 2 * model.altup.mixing_size) / kept.tokens
    if model.mhc:
        # For each block what it reads and gives, and the matrix after each half of an iteration, with its sums
        number = model.mhc.num_residual_streams
        halves = 2 * (model.mhc.mhc_sinkhorn_iterations or 0) * 4 * number * (number + 1)
        made += 2 * (_read_streams(model) + (2 if model.mhc.mixed else 4) * model.hidden_size + halves)
    if model.attn_res_block_size:  # the streams, in FP32, that attention and MLP read, and the last norm
        put_aside = layer // model.attn_res_block_size + 1  # with the layer's own
        streams = -(-layer // model.attn_res_block_size) + 1 + put_aside + 1
        streams += put_aside + 1 if layer == model.num_layers - 1 else 0
        made += 4 * streams * model.hidden_size / kept.tokens
    if model.ple and model.has_ngrams(layer):
        # Rows of the table of n-grams and what stands there; what three norms read, in FP32 and normalised, and two of
        # them give; the value, what the convolution reads, and what it gives
        rows = 8 * model.ple.heads + 2 * model.ple.embed_dim
        made += rows + (3 * 8 + 2 * 2 + 2 + 2) * model.streams_size + 2 * model.hidden_size
    if model.csa:
        return made + read + _compressed_attention(model, model.csa, layer, kept, length)
    if model.mamba and model.has_mixer(layer):
        mixer = _mixer if model.mamba.dt_rank is None else _mamba_1_mixer
        made += read + mixer(model.mamba, kept) / kept.tensor
    if model.gdn and model.has_delta_net(layer):
        net = _kimi_delta_attention if model.gdn.kda else _delta_net
        made += read + net(model.gdn, kept) / kept.tensor
    elif model.has_short_conv(layer):
        # The gates and what the first one lets through, what the convolution reads and gives, and what both leave of it
        of_convolution = 2 * model.short_conv_size + (2 + 2 + kept.input) * model.hidden_size
        made += read + of_convolution / kept.tensor
    elif model.has_attention(layer):
        attention, shares_kv = model.of_layer(layer), model.shares_kv(layer)
        of_blocks = model.msa is not None and model.has_indexer(layer) and length > model.msa.dense_length
        made += read + _attention(attention, layer, kept, length, shares_kv, of_blocks) / kept.tensor
        made += _mask(model, layer, kept, length)
    return made


def _mask(model: ModelShape, layer: int, kept: BytesKept, length: int) -> float:
    """Bytes for each token of which tokens each of them sees, where kernels do not know that by themselves: a number of
    BF16 that is added to scores, or with a cap a byte. All rows of a pass share it, and no ranks divide it."""
    if model.attn_logit_softcapping is not None:
        return length / kept.rows
    by_kernels = kept.kernels and not model.softmax_offset
    narrow = model.in_window(layer) and model.sliding_window is not None and model.sliding_window < length
    return 2 * length / kept.rows if narrow and not by_kernels else 0


def _attention(model: ModelShape, layer: int, kept: BytesKept, length: int, shares_kv: bool, of_blocks: bool) -> float:
    """Bytes that attention saves for the backward for each token, without those of the keys and values of another layer
    that it `shares_kv` with; with `of_blocks`, in texts of which an indexer chooses keys."""
    heads, out = model.num_attention_heads, model.projection_size
    capped, sinks = model.attn_logit_softcapping is not None, model.softmax_offset or model.alibi
    kernels = kept.kernels and not capped and not sinks and not of_blocks
    if model.mla:
        made = (kept.norm + kept.input) * (model.mla.q_lora_rank or 0)
        made += (kept.input + (0 if shares_kv else kept.norm)) * model.mla.kv_lora_rank
        key_values = model.key_value_size if model.has_rope(layer) else model.nope_key_value_size
        made += 2 * 2 * model.query_size + 2 * key_values + 2 * model.query_size
        if model.softmax_scaling:  # what is multiplied
            made += 2 * model.query_size
        if model.mla.query_gate:  # the other half of what makes them; their sigmoid, and its other factor
            made += kept.input * (model.mla.q_lora_rank or 0) + (4 + 2) * out
    else:
        keys, values = (0, 0) if shares_kv else (model.key_size, model.key_value_size)
        altered = model.attention_value_scale != 1 or model.value_channels < model.kv_channels
        if capped:  # copies, below
            made = 0
        elif kernels or sinks or (altered and not shares_kv):
            made = 2 * (model.query_size + keys + keys)  # no part of the projection's output, but values by themselves
        else:
            rotated = 0 if model.learned_positions else 2
            made = 2 * (model.qkv_size - model.key_value_size + values) + rotated * (model.query_size + keys)
        if model.clip_qkv is not None:  # what is clamped, too
            made += 2 * model.qkv_size
        if model.head_wise_attn_gate:  # the sigmoid, and its other factor
            made += 4 * model.num_attention_heads + 2 * out
        if model.attention_output_gate:  # the sigmoid, its other factor, and the product
            made += (4 + 4) * model.query_size
        if model.qk_layernorm or model.qk_l2_norm:
            made += kept.norm * (model.query_size + keys)
        if model.v_l2_norm:
            made += kept.norm * keys
    if model.attention_output_norm:
        made += 2 * out
    if model.linear_gate:  # the gate in FP32 after, of a softplus before too, and its other factor
        made += (4 if model.linear_gate.startswith("sigmoid") else 2 + 4 + 4) * model.gate_size + 2 * out
    if capped:  # for each pair FP32 weights, BF16 ones and capped scores; of each head copies, and what is attended
        core = heads * length * (4 + 2 + 4) + 2 * (model.query_size + 2 * out) + 2 * out
    else:
        core = 4 * heads + 2 * out
        if sinks or (out < model.query_size and not kernels):  # what is attended is cut out of wider heads
            core += 2 * model.query_size
        if of_blocks and model.msa:  # a mask for each group, or one, and what groups give, put together
            core += 2 * length * (1 if model.msa.averaged else model.num_query_groups) + 2 * out
        if sinks:
            core += 2 * SINK_CHANNELS * 2 * (heads + model.num_query_groups)
    return made + core + (kept.input * out if kept.input < 2 else 0)


def _delta_net(gdn: GatedDeltaNet, kept: BytesKept) -> float:
    """Bytes that a gated delta net saves for the backward for each token, in rows of several chunks."""
    heads, keys = gdn.num_value_heads, gdn.num_value_heads * gdn.key_head_dim  # for each value head
    made = 4 * gdn.conv_size + 8 * gdn.key_size + 12 * heads
    # All FP32: products of the tokens of a chunk with each other, keys, queries and what they read, values and steps,
    # and the state of each chunk
    rule = 6 * 4 * CHUNK * heads + 9 * 4 * keys + 3 * 4 * gdn.value_size + 4 * keys * gdn.value_head_dim // CHUNK
    return made + rule + (kept.norm + 4 + 4 + 2 + kept.input) * gdn.value_size


def _kimi_delta_attention(gdn: GatedDeltaNet, kept: BytesKept) -> float:
    """The same of Kimi delta attention."""
    heads, keys = gdn.num_value_heads, gdn.key_size
    in_steps = (1 if gdn.kda_full_gate else 2) * kept.input * (gdn.kda_lora_rank or 0)
    made = 4 * gdn.conv_size + 8 * keys + 2 * 2 * keys + 12 * heads + in_steps
    # All FP32: products of the tokens of a chunk with each other; for each channel of a key what decays between tokens
    # of a block, and keys that have decayed so, twice earlier keys, and what is made of keys and queries; values and
    # steps, and the state of each chunk
    of_channel = 2 * DECAY_BLOCK + CHUNK // DECAY_BLOCK + 17
    rule = 3 * 4 * CHUNK * heads + 4 * of_channel * keys + 3 * 4 * gdn.value_size
    rule += 4 * keys * gdn.value_head_dim // CHUNK
    return made + rule + (kept.norm + 4 + 4 + 2 + kept.input) * gdn.value_size


def _mixer(mamba: Mamba, kept: BytesKept) -> float:
    """Bytes that a Mamba-2 mixer saves for the backward for each token, in rows of several chunks."""
    heads, vectors = mamba.num_heads, 2 * mamba.num_groups * mamba.state_dim
    made = 4 * mamba.conv_size + 16 * heads
    # All FP32: products of the tokens of a chunk with each other, B and C, values, and the state of each chunk
    space = (
        2 * 4 * CHUNK * heads
        + 4 * CHUNK * mamba.num_groups
        + 2 * 4 * vectors
        + 5 * 4 * mamba.inner_size
        + 2 * 4 * mamba.inner_size * mamba.state_dim // CHUNK
    )
    return made + space + (kept.norm + 4 + 4 + 4 + kept.input) * mamba.inner_size


def _mamba_1_mixer(mamba: Mamba, kept: BytesKept) -> float:
    """The same of a Mamba-1 mixer."""
    of_steps, state = mamba.x_proj_parts[0], mamba.state_dim
    # What the convolution reads and gives, and this behind SiLU; what norms read, and what steps are made of
    normed = mamba.bcdt_layernorm or mamba.bcdt_l2_norm_epsilon is not None
    made = 3 * 2 * mamba.conv_size + normed * kept.norm * mamba.x_proj_size + 2 * of_steps
    # All FP32: what steps are made of, steps, values and their products, B and C, the state of each chunk; what is
    # read, the gate before and after SiLU
    scan = 7 * 4 * mamba.inner_size + 2 * 4 * state + 4 * mamba.inner_size * state // CHUNK
    return made + scan + kept.input * mamba.inner_size


def _read_streams(model: ModelShape) -> float:
    """Bytes that reading the residual streams saves for each token: they, in FP32 too, normalised. Channel by channel,
    they in FP32, normalised, so weighted, and the weights, with what these are made of before and after SiLU."""
    if model.mhc and model.mhc.lowrank:
        return (4 + 4 + 2 + 4) * model.streams_size + (2 + 2) * model.mhc.lowrank
    return (2 + 4 + 4) * model.streams_size


def _projected_streams(model: ModelShape) -> float:
    """Bytes that the projections before and behind layers save for each token: of each stream but the first what it
    becomes, before and after it has the magnitude of the first; and the streams behind the last layer."""
    others = model.altup.num_inputs - 1 if model.altup else 0
    return (2 * others * (2 + 2) + 2 * (others + 1)) * model.hidden_size if others else 0


def _compressed_attention(model: ModelShape, csa: CSA, layer: int, kept: BytesKept, length: int) -> float:
    """Bytes that attention to a window and to compressed keys saves for each token."""
    heads, out, rows = model.num_attention_heads, model.projection_size, compressed_rows(model, layer)
    ratio = compression(model, layer)
    keys = length + (length // ratio if ratio else 0)
    latents = (kept.norm + kept.input) * csa.q_lora_rank + kept.norm * model.kv_channels
    # Queries as they are, in FP32, and rotated; for each pair FP32 and BF16 weights; keys for each head, twice
    core = (2 + 4 + 2) * out + heads * keys * (4 + 2) + 2 * 2 * out * keys / length
    made = (2 + 2 + 4 + 2) * rows if keys > length else 0
    return latents + core + made + 2 * out + kept.input * csa.grouped_size


def _channel(model: ModelShape, kept: BytesKept, layer: int) -> float:
    """Bytes that a layer's MLP keeps for the backward for each of its channels."""
    read = 4 if kept.kernels and is_swiglu(model, layer) else 6 if model.gated_linear_unit else 2
    channel: float = read + kept.input + (4 if model.activation == "quick_gelu" else 0)
    channel += 4 if model.swiglu_limit(layer) else 0  # both halves as they are clamped
    channel += {"squared_relu": 2, "xielu": 8, "situ": 18}.get(model.activation, 0)
    if model.activation == "relu" and not kept.codes:  # it saves what it gives, which the next GEMM reads
        channel -= 2
    return channel / kept.tensor


def _inner(model: ModelShape, layer: int, kept: BytesKept) -> float:
    """Bytes that the MLP of a layer keeps for the backward for each token, its input included."""
    hidden, moe, channel = model.hidden_size, model.moe, _channel(model, kept, layer)
    if moe is None or not model.has_experts(layer):
        channel += 2 * (model.sparsity(layer) > 0)  # what is left of a gate
        return kept.input * hidden + channel * model.ffn_size(layer)
    router = 4 * hidden + 16 * moe.num_experts
    if moe.sparsemixer_eps:  # a softmax and what it leaves out, for each expert chosen
        router += (4 + 1 + 1) * moe.topk * moe.num_experts
    if moe.own_norms:  # on all tokens the router's (two FP32 values) and the experts'; then those behind experts
        router += (4 + 4 + kept.norm) * hidden
        router += (1 + model.shared_experts) * kept.norm * hidden // kept.tokens
    shared = kept.input * hidden + channel * moe.shared_ffn_hidden_size if moe.shared_ffn_hidden_size else 0
    if moe.shared_expert_gate:
        shared += 2 * hidden  # the gate's other factor
    width = model.expert_hidden_size
    routed = moe.topk * (kept.input * width + _channel(model.of_experts, kept, layer) * moe.ffn_hidden_size + 2 * width)
    if moe.latent_size:  # inputs of the projections to it and back
        routed += kept.input * (hidden + width)
    if moe.expert_norms:
        routed += kept.norm * width + _SCALED_NORM * moe.topk * width
    return router + shared + routed

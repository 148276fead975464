"""Numbers of weights in a model's linears, layer by layer, of which parameters and FLOPs are counted."""

from functools import partial

from precisionctl.model.model_parts import MoE
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import GatedDeltaNet


def weights_used(model: ModelShape) -> int:
    """The number of weights that a token is multiplied with, as Megatron-LM counts them (`flops.py`): neither those of
    experts that it is not routed to, nor those of routers and of most indexers."""
    layers = sum(projections(model, layer) + mlp_used(model, layer) for layer in range(model.num_layers))
    layers += model.num_layers * per_layer_input(model) + sum(map(partial(norm_gates, model), range(model.num_layers)))
    layers += sum(map(partial(ngram_projections, model), range(model.num_layers)))
    return layers + model.hidden_size * (model.padded_vocab_size + model.per_layer_embed_size)


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
    keys = model.dsa.head_dim * (1 + model.has("dsa.kpool"))
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

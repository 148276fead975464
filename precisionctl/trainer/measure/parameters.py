"""Numbers of parameters of a model, layer by layer, and of weights that a token is multiplied with."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from precisionctl.model.model_parts import MoE
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import GatedDeltaNet
from precisionctl.recipe import ParallelSettings


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters: of each layer's dense part, of each layer's experts, and outside of layers (including
    multi-token prediction layers, which are not trained); of these, those of embedding and output layer."""

    dense: tuple[int, ...]
    experts: tuple[int, ...]
    outside: int
    vocabulary: int

    @staticmethod
    def of(model: ModelShape) -> "Parameters":
        """Count linears, embedding and output layer; norms, biases and convolutions, a thousandth, are neglected."""
        moe = model.moe
        table = model.hidden_size * model.padded_vocab_size
        places = model.hidden_size * model.position_rows if model.learned_positions else 0
        dense, experts = [], []
        for layer in range(model.num_layers):
            count = projections(model, layer)
            if model.has_indexer(layer) and not model.csa:  # whose is among its projections
                count += indexer(model)
            if model.stores_unused and model.shares_kv(layer):
                count += model.hidden_size * model.of_layer(layer).key_value_size
            count += per_layer_input(model) + connections(model) + low_rank(model) + _tables(model, layer)
            count += norm_gates(model, layer) + ngram_projections(model, layer)
            if moe and model.has_experts(layer):
                count += beside_experts(moe, model) + moe.num_experts * model.hidden_size
                experts.append(moe.num_experts * mlp(model, moe.ffn_hidden_size, model.expert_hidden_size))
            else:
                count += mlp_used(model, layer)
                experts.append(0)
            dense.append(count)

        ahead = 0
        if model.mtp_num_layers:
            alike = Parameters.of(replace(model.of_prediction, mtp_num_layers=0))
            joining = model.doubled_hidden_size * model.hidden_size + _head(model.of_prediction)
            joining += table * model.mtp_output_layers
            blocks = slice(None if model.mamba else -1, None)
            ahead = model.mtp_num_layers * (sum(alike.dense[blocks]) + sum(alike.experts[blocks]) + joining)
        per_layer = (model.padded_vocab_size + model.hidden_size) * model.per_layer_embed_size
        vocabulary = table * (2 - model.tied_embeddings)
        outside = vocabulary + places + per_layer + ahead + _head(model)
        return Parameters(tuple(dense), tuple(experts), outside, vocabulary)

    @property
    def all(self) -> int:
        return sum(self.dense) + sum(self.experts) + self.outside

    def layers(self, parallel: ParallelSettings) -> list[int]:
        """The parameters of each layer that a rank has while the layer computes."""
        each = zip(self.dense, self.experts, strict=True)
        return [(dense + experts // parallel.expert) // parallel.tensor for dense, experts in each]


def _tables(model: ModelShape, layer: int) -> int:
    """Numbers that are no linear's: the experts of each token, embeddings of n-grams, what is added to the tokens of a
    window or pool, and rates by which the states of a Mamba-1 mixer decay."""
    if model.mamba and model.mamba.dt_rank is not None and model.has_mixer(layer):
        return model.mamba.inner_size * model.mamba.state_dim
    if model.ple and model.has_ngrams(layer):
        return model.ple.table_rows(layer) * model.ple.head_dim
    hashed = model.vocab_size * model.moe.topk if model.moe and model.is_hashed(layer) else 0
    rows = compressed_rows(model, layer)
    if model.csa and model.has_indexer(layer):
        rows += model.csa.overlapping_size
    pooled = (model.dsa.kpool or 0) * model.dsa.head_dim if model.dsa and model.has_indexer(layer) else 0
    return hashed + compression(model, layer) * rows + pooled


def _head(model: ModelShape) -> int:
    """Weights by which one of the residual streams is made, and, of alternating updates, these of one."""
    if model.altup:
        return 2 * (model.altup.num_inputs - 1) * model.hidden_size**2
    if model.mhc is None or model.mhc.mean_head:
        return 0
    return model.streams_size * (2 * model.mhc.lowrank if model.mhc.lowrank else model.mhc.num_residual_streams)


def tensor_sizes(model: ModelShape) -> Iterator[int]:
    """Sizes of the larger linears' weights."""
    of_attention = (size for each in model.attentions for size in (each.qkv_size, each.projection_size))
    yield model.hidden_size * max(model.fc1_size, model.kv_shared_fc1_size, *of_attention)
    yield model.hidden_size * max(model.expert_fc1_size, model.shared_fc1_size)
    yield from (model.hidden_size * each.in_proj_size for each in (model.gdn, model.mamba) if each)
    yield model.hidden_size * model.short_conv_size if model.short_conv else 0


def weights_used(model: ModelShape) -> int:
    """The number of weights that a token is multiplied with, as Megatron-LM counts them (`flops.py`): neither those of
    experts that it is not routed to, nor those of routers and of most indexers."""
    parts = (projections, mlp_used, norm_gates, ngram_projections)
    layers = sum(part(model, layer) for layer in range(model.num_layers) for part in parts)
    layers += model.num_layers * (per_layer_input(model) + low_rank(model))
    layers += _head(model) if model.altup else 0
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
    model = model.of_layer(layer)
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
    """The number of weights that join a layer's two blocks to the residual streams, or predict and correct these."""
    mhc = model.mhc
    if model.altup:
        return model.altup.num_inputs * (model.hidden_size + model.altup.num_inputs + model.altup.mixing_size)
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


def low_rank(model: ModelShape) -> int:
    """The number of weights in a layer's low-rank residual."""
    return 2 * model.hidden_size * (model.laurel_rank or 0)


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

"""ModelShape: what both layouts agree on about a model, and all that follows from it."""

import dataclasses
from dataclasses import dataclass, replace
from typing import Any, get_args

from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.model.model_fields import Activation, LinearGate
from precisionctl.model.model_layers import ModelLayers
from precisionctl.model.model_parts import LARGEST, MOST_LAYERS, check_count, check_numbers, check_size, part_of_head


@dataclass(frozen=True)
class ModelShape(ModelLayers):
    """The fields, checked, and what follows from them: the sizes and switches that rows of a family's table name
    (`Row.sizes`, `Row.present`)."""

    def __post_init__(self) -> None:
        """Sizes come from files of strangers, and loops run over them."""
        if not isinstance(self.architecture, str):
            raise DamagedCheckpoint(f"model_type is {shown(self.architecture)}, not a name")
        counts = ("mtp_num_layers", "num_kv_shared_layers", "unread_positions")
        check_numbers(self, counts=counts, other=("glu_offset",))
        if self.vocab_size > self.padded_vocab_size:
            what = f"vocab_size is {self.vocab_size}, and the embedding has {self.padded_vocab_size} rows"
            raise DamagedCheckpoint(what)
        check_size(self.num_layers, "num_layers", MOST_LAYERS)
        check_count(self.mtp_num_layers, "mtp_num_layers", MOST_LAYERS)
        for field, known in (("activation", get_args(Activation)), ("linear_gate", (None, *get_args(LinearGate)))):
            if getattr(self, field) not in known:
                raise DamagedCheckpoint(f"{field} is {shown(getattr(self, field))}")
        if type(self.glu_offset) not in (int, float) or not abs(self.glu_offset) < 1e30:  # nor NaN
            raise DamagedCheckpoint(f"glu_offset is {shown(self.glu_offset)}, not a number")
        if not self.norm_weight and not self.zero_centered_gamma:
            what = "norms without weights are zeros in Megatron, and layernorm_zero_centered_gamma is off"
            raise DamagedCheckpoint(what, do="Train such a model with --apply-layernorm-1p, which switches it on.")
        part_of_head(self.rotary_percent, "rotary_percent")
        if self.num_attention_heads % self.num_query_groups:
            raise DamagedCheckpoint(f"{self.num_attention_heads} heads in {self.num_query_groups} query groups")
        for product in ("qkv_size", "projection_size", "query_size", "key_value_size"):
            check_size(getattr(self, product), product, 4 * LARGEST)
        self.attention_of(in_window=False)  # whose sizes are checked so, too
        self.check_layers()
        if self.heterogeneous:
            for name, largest in self.heterogeneous.largest.items():
                if getattr(self, name) != largest:
                    raise DamagedCheckpoint(f"{name} is {getattr(self, name)}, and the largest of a layer {largest}")
            _ = self.attentions  # the groups of each layer are checked so, too
        if self.mamba and self.mtp_num_layers and not self.moe:
            raise DamagedCheckpoint(f"prediction layers {self.mamba.mtp_pattern} of a model without experts")
        check_size(self.per_layer_embed_size or 1, "per_layer_embed_size", 4 * LARGEST)
        if self.per_layer_tokens > self.vocab_size:
            what = f"{self.per_layer_tokens} tokens with an embedding for each layer, of {self.vocab_size} in all"
            raise DamagedCheckpoint(what, do="Is config.json this model's?")
        for part in self.activation_sparsity or ():
            if type(part) not in (int, float) or not 0 <= part < 1:
                raise DamagedCheckpoint(f"activation_sparsity is {shown(part)}, not a part of 1")
        check_size(self.streams_size, "streams_size", 4 * LARGEST)
        if self.msa and not self.msa.averaged and self.num_attention_heads % self.msa.n_heads:
            raise DamagedCheckpoint(f"{self.num_attention_heads} heads for {self.msa.n_heads} heads of an indexer")
        if self.csa and self.projection_size % self.csa.o_groups:
            raise DamagedCheckpoint(f"{self.projection_size} channels of heads in {self.csa.o_groups} groups")

    @property
    def model_type(self) -> str:
        """config.json's `model_type`: a wrapper's own, not its text model's."""
        return self.wrapper.model_type if self.wrapper else self.architecture

    def has(self, name: str) -> bool:
        """Whether a field or property is on; of a part, by a name with a dot, which is off where there is no part."""
        part, _, field = name.rpartition(".")
        of = getattr(self, part) if part else self
        return bool(of and getattr(of, field))

    def attention_of(self, in_window: bool) -> "ModelShape":
        """The model with the attention of layers with a window (or without one) in every layer."""
        if in_window or self.global_attention is None:
            return self
        return replace(self, global_attention=None, **self.global_attention.said)

    def of_layer(self, layer: int) -> "ModelShape":
        """The model with this layer's attention, and the size of its MLP, in every layer."""
        model = self.attention_of(self.in_window(layer))
        if self.heterogeneous is None:
            return model
        groups, channels = self.heterogeneous.of_layer(layer)
        return replace(
            model,
            heterogeneous=None,
            num_query_groups=groups or self.num_query_groups,
            ffn_hidden_size=channels or self.ffn_hidden_size,
        )

    @property
    def attentions(self) -> tuple["ModelShape", ...]:
        """The model for each kind of attention that its layers have."""
        if self.heterogeneous:
            groups = self.heterogeneous.num_query_groups
            return tuple(self.of_layer(groups.index(number)) for number in sorted({*groups} - {0}))
        return tuple(map(self.attention_of, sorted({*self.windows})))

    def normed_as(self, layer: int) -> "ModelShape":
        """The model with this layer's norms in every layer."""
        if not self.has_delta_net(layer) or (self.mhc and self.mhc.lowrank):
            return self
        return replace(self, pre_layernorms=True, post_layernorms=False)

    @property
    def of_prediction(self) -> "ModelShape":
        """The model whose last layer is made as its layers of multi-token prediction are. These have indexers of their
        own, also where the decoder's last layer has none (GLM-5.2), and streams only in DeepSeek-V4. Where each layer
        is one block, the model whose layers are the blocks of one."""
        if self.mamba:
            pattern = self.mamba.mtp_pattern
            return replace(
                self,
                num_layers=len(pattern),
                mamba=replace(self.mamba, pattern=pattern),
                moe=self.moe and replace(self.moe, layer_freq=tuple(block == "E" for block in pattern)),
                rope_layers=self.rope_layers and (False,) * len(pattern),
                mtp_num_layers=0,
            )
        csa = self.csa and replace(self.csa, pattern=self.csa.pattern[:-1] + "W")
        dsa = self.dsa and replace(self.dsa, layers=(*self.dsa.layers[:-1], True))
        moe = self.moe and not self.mtp_dense and replace(self.moe, n_hash_layers=0)
        mhc = self.mhc if csa else None
        return replace(
            self, gdn=None, short_conv=None, csa=csa, dsa=dsa, mhc=mhc, global_attention=None, moe=moe or None
        )

    @property
    def of_experts(self) -> "ModelShape":
        """The model whose MLPs compute between their linears what its routed experts do. A clamp before
        the activation that they lack is the model's; one behind it is not."""
        if self.moe is None:
            return self
        clamp = self.activation_clamp if self.moe.activation_clamp is None else self.moe.activation_clamp
        return replace(self, activation_clamp=clamp, swiglu_limits=self.moe.swiglu_limits)

    @property
    def rotary_size(self) -> int:
        """Channels of a head that rotary embeddings turn."""
        return self.mla.qk_pos_emb_head_dim if self.mla else int(self.kv_channels * self.rotary_percent)

    @property
    def rotary_pairs(self) -> int:
        """Pairs of these channels."""
        return self.rotary_size // 2

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection, with output gates."""
        return sum(self.qkv_parts)

    @property
    def qkv_parts(self) -> tuple[int, int]:
        """Rows of groups, and those that make a gate of each head."""
        queries = self.num_attention_heads * (1 + self.attention_output_gate)
        groups = (queries + self.num_query_groups) * self.kv_channels + self.value_size
        return groups, self.num_attention_heads * self.head_wise_attn_gate

    @property
    def projection_size(self) -> int:
        """Input width of the attention's output projection."""
        return self.num_attention_heads * (self.mla.v_head_dim if self.mla else self.value_channels)

    @property
    def query_size(self) -> int:
        """Rows of the query projection."""
        head = self.mla.qk_head_dim + self.mla.qk_pos_emb_head_dim if self.mla else self.kv_channels
        return self.num_attention_heads * head

    @property
    def query_up_size(self) -> int:
        """Rows of the projection from the latent of queries to queries, and to gates if it makes those too."""
        return self.query_size + (self.projection_size if self.mla and self.mla.query_gate else 0)

    @property
    def query_up_inputs(self) -> int:
        """Its input width."""
        return (1 + self.mla.query_gate) * (self.mla.q_lora_rank or 0) if self.mla else 0

    @property
    def gate_size(self) -> int:
        """Rows of the projection that makes a `linear_gate`."""
        if self.linear_gate is None:
            return 0
        return self.projection_size if self.linear_gate.endswith("per element") else self.num_attention_heads

    @property
    def key_size(self) -> int:
        """Rows of the keys of all groups."""
        return self.num_query_groups * self.kv_channels

    @property
    def value_channels(self) -> int:
        """Channels of a head of values."""
        return self.v_head_dim or self.kv_channels

    @property
    def value_size(self) -> int:
        """Rows of the values of all groups; 0 where keys are values."""
        return 0 if self.keys_are_values else self.num_query_groups * self.value_channels

    @property
    def kv_down_size(self) -> int:
        """Rows of MLA's joint down-projection of keys, values and the one positional key."""
        return self.mla.kv_lora_rank + self.mla.qk_pos_emb_head_dim if self.mla else 0

    @property
    def key_value_size(self) -> int:
        """Rows of the key and value projection: of MLA's latents, else of all groups."""
        if self.mla is None:
            return self.key_size + self.value_size
        return self.num_attention_heads * (self.mla.qk_head_dim + self.mla.v_head_dim)

    @property
    def nope_key_value_size(self) -> int:
        """Those of latent attention in layers without rotary embeddings."""
        if self.mla is None:
            return self.key_value_size
        return self.num_attention_heads * (self.mla.key_channels(rope=False)[0] + self.mla.v_head_dim)

    @property
    def alibi(self) -> bool:
        return self.position_embedding == "alibi"

    @property
    def position_rows(self) -> int:
        """Rows of the table of learned positions."""
        return self.max_position_embeddings + self.unread_positions

    @property
    def fc1_size(self) -> int:
        """Rows of a dense MLP's first linear."""
        return self._fc1(self.ffn_hidden_size)

    @property
    def expert_fc1_size(self) -> int:
        return self._fc1(self.moe.ffn_hidden_size) if self.moe else 0

    @property
    def expert_hidden_size(self) -> int:
        """Input and output width of experts."""
        return (self.moe and self.moe.latent_size) or self.hidden_size

    @property
    def overlapping_size(self) -> int:
        """Rows of the projections of compressed keys with an overlap: of a token for its own window, and for the
        next."""
        return 2 * self.kv_channels

    @property
    def group_size(self) -> int:
        """Channels of a group of heads that the output projection reads by itself."""
        return self.projection_size // self.csa.o_groups if self.csa else self.projection_size

    @property
    def streams_size(self) -> int:
        """Channels of a token's residual streams together."""
        number = self.mhc.num_residual_streams if self.mhc else self.altup.num_inputs if self.altup else 1
        return self.hidden_size * number

    @property
    def short_conv_size(self) -> int:
        """Rows of a short convolution's in_proj: the gate before it, the gate behind it, and what it reads."""
        return 3 * self.hidden_size

    @property
    def shared_fc1_size(self) -> int:
        return self._fc1(self.moe.shared_ffn_hidden_size or 0) if self.moe else 0

    @property
    def kv_shared_ffn_hidden_size(self) -> int:
        """Channels of a dense MLP in layers that share keys and values."""
        return self.ffn_hidden_size * (2 if self.use_double_wide_mlp and self.num_kv_shared_layers else 1)

    @property
    def kv_shared_fc1_size(self) -> int:
        return self._fc1(self.kv_shared_ffn_hidden_size)

    def _fc1(self, size: int) -> int:
        return 2 * size if self.gated_linear_unit else size

    @property
    def per_layer_embed_size(self) -> int:
        """Channels of a token's embeddings for all layers."""
        return self.num_layers * (self.per_layer_embed_dim or 0)

    @property
    def per_layer_tokens(self) -> int:
        """Tokens that have such embeddings."""
        return self.per_layer_vocab_size or self.vocab_size

    @property
    def doubled_hidden_size(self) -> int:
        """Input width of a multi-token prediction layer: an embedding beside a hidden state."""
        return 2 * self.hidden_size

    @property
    def untied_embeddings(self) -> bool:
        return not self.tied_embeddings

    @property
    def one_layernorm(self) -> bool:
        """Whether attention and MLP read one norm."""
        return self.pre_layernorms and self.parallel_residual and self.shared_layernorm

    @property
    def global_keys_are_values(self) -> bool:
        return self.attention_of(in_window=False).keys_are_values

    @property
    def global_values(self) -> bool:
        """Whether layers without a window have value projections."""
        return not self.global_keys_are_values

    @property
    def fused_layernorms(self) -> bool:
        """Whether norms before attention and MLP are part of the linears that read them (but not before latent
        attention and experts, where there is no such linear)."""
        return self.pre_layernorms and not self.one_layernorm

    @property
    def fused_input_layernorm(self) -> bool:
        """Whether the norm before grouped attention is part of linear_qkv: not where a gate, a mixer or a low-rank
        residual reads it too."""
        alone = self.linear_gate is None and self.laurel_rank is None and not self.parallel_mixers
        return self.fused_layernorms and alone

    @property
    def parallel_mixers(self) -> bool:
        """Whether each layer has a Mamba-2 mixer beside attention."""
        return self.mamba is not None and self.mamba.parallel

    @property
    def layer_norms(self) -> bool:
        return self.normalization == "LayerNorm"

    @property
    def learned_positions(self) -> bool:
        return self.position_embedding == "learned_absolute"

    @property
    def shared_experts(self) -> bool:
        return self.moe is not None and self.moe.shared_ffn_hidden_size is not None

    @property
    def query_latent(self) -> bool:
        """Whether MLA projects queries in two steps."""
        return self.mla is not None and self.mla.q_lora_rank is not None

    @property
    def fused_latent_layernorms(self) -> bool:
        """Whether norms of MLA's latents are part of the linears that read them: not beside an indexer, which reads the
        normalised latent too."""
        return self.mla is not None and self.dsa is None

    @property
    def original_context(self) -> int:
        """The length of the context before rotary embeddings were scaled; 0 where none is said."""
        return int((self.rope_scaling or {}).get("original_max_position_embeddings") or 0)

    @property
    def query_direct(self) -> bool:
        return self.mla is not None and self.mla.q_lora_rank is None

    @property
    def xielu(self) -> bool:
        return self.activation == "xielu"

    def swiglu_limit(self, layer: int) -> float:
        """What a layer's MLP is clamped to behind its activation; 0 where it is not."""
        return self.swiglu_limits[layer] if self.swiglu_limits else 0.0

    def sparsity(self, layer: int) -> float:
        """The part of a layer's gate that is zero; 0 where nothing is."""
        return self.activation_sparsity[layer] if self.activation_sparsity else 0.0

    def ffn_size(self, layer: int) -> int:
        """Channels of a layer's dense MLP."""
        if self.heterogeneous:
            return self.heterogeneous.ffn_hidden_size[layer]
        return self.kv_shared_ffn_hidden_size if self.shares_kv(layer) else self.ffn_hidden_size

    def described(self) -> dict[str, Any]:
        """Every field, as JSON can have it."""
        return dataclasses.asdict(self)

    def padded(self, tensor_parallel: int) -> "ModelShape":
        """The same model with its vocabulary padded as a run of this tensor-parallel size pads it
        (megatron/core/tokenizers/utils/build_tokenizer.py, vocab_size_with_padding).

        Where only the padded size is known, it is taken for the size: a multiple of more ranks comes out the same.
        """
        multiple = self.make_vocab_size_divisible_by * tensor_parallel
        return replace(self, padded_vocab_size=-(-self.vocab_size // multiple) * multiple)

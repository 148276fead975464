"""ModelLayers: what each layer of a model has, and what it reads of another one."""

from dataclasses import dataclass
from typing import Any

from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_fields import ModelFields
from precisionctl.model.model_parts import check_count


@dataclass(frozen=True)
class ModelLayers(ModelFields):
    """The fields, and what they say of each layer."""

    def check_layers(self) -> None:
        """Raise DamagedCheckpoint for a list that has not an entry for each layer, and for a layer that reads of
        another one what that does not have."""
        sizes = vars(self.heterogeneous) if self.heterogeneous else {}
        by_layer: dict[str, Any] = {
            "window_layers": self.window_layers,
            "rope_layers": self.rope_layers,
            "moe_layer_freq": self.moe and self.moe.layer_freq,
            "swiglu_limits": self.swiglu_limits,
            "activation_sparsity": self.activation_sparsity,
            "moe.swiglu_limits": self.moe and self.moe.swiglu_limits,
            "linear_attention_freq": self.gdn and self.gdn.layers,
            "layers with a short convolution": self.short_conv and self.short_conv.layers,
            "hybrid_override_pattern": self.mamba and self.mamba.pattern,
            "indexer's layers": self.dsa and self.dsa.layers,
            "layers with an indexer of blocks": self.msa and self.msa.layers,
            "layers with n-gram embeddings": self.ple and self.ple.layers,
            "kv_source_layers": self.mla and self.mla.kv_source_layers,
            **{f"heterogeneous.{name}": each for name, each in sizes.items()},
            "csa_compress_ratios": self.csa and self.csa.pattern,
        }
        for field, entries in by_layer.items():
            if entries is not None and len(entries) != self.num_layers:
                raise DamagedCheckpoint(f"{field} has {len(entries)} entries for {self.num_layers} layers")
        for layer, source in enumerate((self.mla and self.mla.kv_source_layers) or ()):
            if self.has_rope(layer) != self.has_rope(source):
                what = f"layer {layer} reads the latent of layer {source}, and one of the two has rotary embeddings"
                raise DamagedCheckpoint(what, do="Is config.json this model's?")
        check_count(self.num_kv_shared_layers, "num_kv_shared_layers", self.num_layers)
        shared = range(self.num_layers - self.num_kv_shared_layers, self.num_layers)
        for layer in sorted({self.in_window(layer): layer for layer in reversed(shared)}.values()):
            self.kv_layer(layer)  # which raises where the first of its kind has none to read

    def in_window(self, layer: int) -> bool:
        """Whether a layer's attention is in a sliding window or in chunks."""
        if self.csa:
            return self.csa.pattern[layer] == "W"
        if self.sliding_window is None and self.attention_chunk_size is None:
            return False
        return self.window_layers is None or self.window_layers[layer]

    @property
    def windows(self) -> list[bool]:
        """`in_window` of each layer."""
        return [self.in_window(layer) for layer in range(self.num_layers)]

    def has_rope(self, layer: int) -> bool:
        """Whether a layer's queries and keys have rotary embeddings."""
        return self.position_embedding == "rope" and (self.rope_layers is None or self.rope_layers[layer])

    def shares_kv(self, layer: int) -> bool:
        """Whether a layer reads the keys and values of another one, or its latent."""
        if self.mla and self.mla.kv_source_layers:
            return self.mla.kv_source_layers[layer] != layer
        return layer >= self.num_layers - self.num_kv_shared_layers

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values, or latent, `layer` reads: itself, or the last one of its kind that has its
        own."""
        if self.mla and self.mla.kv_source_layers:
            return self.mla.kv_source_layers[layer]
        own = self.num_layers - self.num_kv_shared_layers
        if layer < own:
            return layer
        kind = self.in_window(layer)
        found = next((other for other in reversed(range(own)) if self.in_window(other) == kind), None)
        if found is None:
            what = (
                f"layer {layer} shares keys and values, but no layer {'with' if kind else 'without'} a window has any"
            )
            raise DamagedCheckpoint(what, do="Is config.json this model's?")
        return found

    def has_indexer(self, layer: int) -> bool:
        if self.csa:
            return self.csa.pattern[layer] == "C"
        indexed = self.dsa or self.msa
        return indexed is not None and indexed.layers[layer] and self.has_attention(layer)

    def has_ngrams(self, layer: int) -> bool:
        """Whether a layer adds embeddings of n-grams."""
        return self.ple is not None and self.ple.layers[layer]

    def is_hashed(self, layer: int) -> bool:
        """Whether a table chooses a token's experts."""
        return self.moe is not None and layer < self.moe.n_hash_layers

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and self.moe.layer_freq[layer]

    def has_delta_net(self, layer: int) -> bool:
        return self.gdn is not None and self.gdn.layers[layer]

    def has_short_conv(self, layer: int) -> bool:
        return self.short_conv is not None and self.short_conv.layers[layer]

    def has_mixer(self, layer: int) -> bool:
        return self.mamba is not None and self.mamba.pattern[layer] in "MP"

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has softmax attention."""
        if self.mamba:
            return self.mamba.pattern[layer] in "*P"
        if self.heterogeneous:
            return self.heterogeneous.num_query_groups[layer] > 0
        return not self.has_delta_net(layer) and not self.has_short_conv(layer)

    def has_dense_mlp(self, layer: int) -> bool:
        if self.mamba:
            return self.mamba.pattern[layer] in "-P"
        if self.heterogeneous:
            return self.heterogeneous.ffn_hidden_size[layer] > 0
        return not self.has_experts(layer)

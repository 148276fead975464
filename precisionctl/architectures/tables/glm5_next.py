"""GLM-5.3: Kimi delta attention whose decays have a bound, in every fourth layer GLM-5's sparse attention without
positions, whose indexers choose pools of keys; DeepSeek-V4's residual streams; and DeepSeek-V3's experts, with clamps.

Traps: the last norm reads the mean of the streams. A layer of multi-token prediction, which transformers neither reads
nor writes, has one stream and sparse attention, whatever is before it. Published files say sizes of delta attention in
an object of their own, which wins, name layers with sparse attention as DeepSeek does, and number layers from 0, where
Kimi Linear counts from 1. Of a layer without an indexer transformers knows the keys only if the one directly before it
has one. Engines compute all of attention in BF16. Published is the wrapper alone, and of a text model by itself
transformers has no class.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import all_but_every, layers_of
from precisionctl.architectures.param_map import Architecture, as_values, published_or_in_memory, renamed
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.hyper_connection_rows import hyper_connection
from precisionctl.architectures.shared.kda_keys import BESIDE, LISTS, checked, layer_lists, read_sizes, write_sizes
from precisionctl.architectures.shared.kda_rows import in_memory, kda
from precisionctl.architectures.tables.glm_moe_dsa import INDEXERS
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import check_negative
from precisionctl.model.model_shape import ModelShape

_ATTENTION = as_values((*deepseek_rows.INDEXED_ATTENTION[len(llama.SEPARATE_NORM) :], *deepseek_rows.POOLED_KEYS))
_KDA = as_values(kda(low_rank=True))
_SCALES = ("pre", "post", "res")
_STREAMS = (
    *hyper_connection("model.layers.{layer}.attn_hc.", "self_attention", _SCALES),
    *hyper_connection("model.layers.{layer}.ffn_hc.", "mlp", _SCALES),
)
_PUBLISHED = {".attn_hc.": ".hc_attn_", ".ffn_hc.": ".hc_ffn_"}

_KINDS = {
    "linear_attention": True,
    **dict.fromkeys(("deepseek_sparse_attention", "indexed_attention", "full_attention"), False),
}
"""Of layers: has one delta attention? The first word for the others is that of published files."""

_ABSENT = {"head_dim": 128, "num_heads": 64, "short_conv_kernel_size": 4}
"""What its class takes for sizes of delta attention that are not there."""
_BOUND, _BESIDE_BOUND = "gate_lower_bound", "linear_lower_bound"
_UNLISTED = all_but_every(4)


def _read_kda(config: keys.Config) -> keys.Fields:
    """Raises UnknownArchitecture for layers that engines, which go by published lists, have otherwise than
    transformers."""
    found = config.get("linear_attn_config")
    said = checked({} if found is None else found, "glm5_next", _BOUND, "safe_gate")
    sizes = read_sizes(said, config, _ABSENT)
    holds, key = (said, _BOUND) if _BOUND in said else (config, _BESIDE_BOUND)
    bound = holds.get(key, -5.0)
    if bound is None and found is not None and keys.is_on(said, "safe_gate", absent=True):
        bound = -5.0
    if bound is not None:
        check_negative(bound, key)
    of_kda = layers_of(_KINDS, config, _UNLISTED)
    for key, kind in zip(LISTS, (True, False), strict=True):
        numbers = [layer for layer, each in enumerate(of_kda) if each is kind]
        if said.get(key, numbers) != numbers:
            what = f"linear_attn_config.{key} is {shown(said[key])}, and layer_types has {shown(numbers)}"
            raise UnknownArchitecture(what, do="transformers goes by layer_types, engines by the former.")
    indexers = _read_indexers(config, of_kda)
    return {**sizes, "gdn.layers": tuple(of_kda), "gdn.kda_lower_bound": bound, **indexers}


def _read_groups(config: keys.Config) -> keys.Fields:
    heads, said = config.get("num_attention_heads"), config.get("num_key_value_heads", 64)
    if said not in (None, heads):
        what = f"num_key_value_heads is {shown(said)}, of {shown(heads)} heads of latent attention"
        raise DamagedCheckpoint(what, do="transformers refuses that, too.")
    return {}


def _read_indexers(config: keys.Config, of_kda: list[bool]) -> keys.Fields:
    indexed = INDEXERS.read(config)["dsa.layers"]
    for layer, (has_one, linear) in enumerate(zip(indexed, of_kda, strict=False)):
        if not has_one and not linear and (not layer or of_kda[layer - 1] or not indexed[layer - 1]):
            what = f"layer {layer} has no indexer, and none is in the layer before it"
            raise UnknownArchitecture(what, do="transformers does not know which keys it sees.")
    here = (has_one or linear for has_one, linear in zip(indexed, of_kda, strict=False))
    return {"dsa.layers": (*here, *indexed[len(of_kda) :])}  # whose number is checked with the other lists'


def _write_kda(model: ModelShape) -> keys.Config:
    if model.gdn is None:
        return {}
    kinds, bound = list(_KINDS), model.gdn.kda_lower_bound
    return {
        "layer_types": [kinds[not has] for has in model.gdn.layers],
        "linear_attn_config": {
            **write_sizes(model.gdn),
            _BOUND: bound,
            **({"safe_gate": False} if bound is None else {}),
            **layer_lists(model, first=0),
        },
        **INDEXERS.write(model),
    }


ARCHITECTURE = Architecture(
    model_types={"glm5_next_text": "Glm5NextForCausalLM"},
    rows=(
        *llama.model_rows(
            *llama.SEPARATE_NORM,
            *published_or_in_memory((*in_memory(_KDA), *_STREAMS), (*_KDA, *renamed(_STREAMS, _PUBLISHED))),
            *(replace(row, layers="attention") if row.layers == "all" else row for row in _ATTENTION),
            *(*llama.MLP_NORM, *llama.MLP, *moe.MOE_NORM, *deepseek_rows.ROUTING, *moe.EXPERTS),
        ),
        *deepseek_rows.prediction((*llama.SEPARATE_NORM, *_ATTENTION)),
    ),
    config=(
        *deepseek_keys.latent_attention(1536),
        keys.Rule(("num_key_value_heads",), _read_groups),
        keys.only("qk_rope_head_dim", 0),
        keys.only("mla_use_nope", True),
        keys.in_all_layers("rope_layers", False),
        keys.Rule(("indexer_rope_interleave",), write=lambda model: {"indexer_rope_interleave": True}),  # vLLM asks
        *deepseek_keys.experts_of_a_layer(shared=1),
        deepseek_keys.experts_by_list(dense=3, key="first_k_dense_replace", reads_key=False),
        *deepseek_keys.router(1, 1),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.5),
        keys.Key("activation_clamp", "swiglu_limit", 10.0),
        keys.Rule(
            ("layer_types", "linear_attn_config", _BESIDE_BOUND, *BESIDE.values(), *INDEXERS.keys),
            _read_kda,
            _write_kda,
        ),
        keys.Key("dsa.n_heads", "index_n_heads", 32),
        *deepseek_keys.INDEXER,
        keys.Key("dsa.kpool", "index_kpool", 16),
        keys.only("index_kpool_compress", True),
        keys.only("index_kpool_always_select_tail", True),
        keys.only("mhc", True),
        keys.Key("mhc.num_residual_streams", "hc_mult", 4),
        keys.Key("mhc.mhc_sinkhorn_iterations", "hc_sinkhorn_iters", 20),
        keys.Key("mhc.epsilon", "hc_eps", 1e-6),
        keys.always("mhc.mean_head", True),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        keys.Key("mtp_num_layers", "num_nextn_predict_layers", 0),
        keys.only("tie_word_embeddings", False),
    ),
    aliases=tuple(replace(alias, written=False) for alias in deepseek_rows.MTP_ALIASES),
    names_by="this project",
    heeds_latents_epsilon=True,
)

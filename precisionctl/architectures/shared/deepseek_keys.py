"""Keys of config.json that DeepSeek-V2 and V3 have in common."""

from typing import Any

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import listed_layers
from precisionctl.architectures.rope import rope
from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.model.model_parts import LARGEST, check_count
from precisionctl.model.model_shape import ModelShape


def _read_attention(config: keys.Config) -> keys.Fields:
    heads = keys.size(config, "num_attention_heads")
    return {"num_attention_heads": heads, "num_query_groups": heads, "kv_channels": keys.size(config, "v_head_dim")}


def leading_dense(key: str, default: int = 0) -> keys.Rule:
    """How many layers, the first ones, have no experts; `default` where the key is absent."""

    def read(config: keys.Config) -> keys.Fields:
        dense = keys.count(config, key, absent=default)
        return {"moe.layer_freq": tuple(layer >= dense for layer in range(keys.layers(config)))}

    def write(model: ModelShape) -> keys.Config:
        return {key: sum(not model.has_experts(layer) for layer in range(model.num_layers))}

    return keys.Rule((key,), read, write)


def shared_experts(key: str, default: int | None = None, inner: int | None = None) -> keys.Rule:
    """How many shared experts there are, each as large as a routed one; `default` where the key is absent, and `inner`
    where the size of one is."""

    def read(config: keys.Config) -> keys.Fields:
        config = {key: default, "moe_intermediate_size": inner} | dict(config)
        number = keys.count(config, key)
        return {"moe.shared_ffn_hidden_size": number * keys.size(config, "moe_intermediate_size")} if number else {}

    def write(model: ModelShape) -> keys.Config:
        shared = model.moe.shared_ffn_hidden_size if model.moe else None
        none = None if default is None else 0
        return {key: shared // model.moe.ffn_hidden_size if model.moe and shared else none}

    return keys.Rule((key,), read, write)


def _read_size_of_shared(config: keys.Config) -> keys.Fields:
    key = "moe_shared_expert_intermediate_size"
    one = config.get("moe_intermediate_size")
    if config.get(key, one) != one:
        what = f"{key} is {shown(config[key])}, and transformers, which passes over it, takes moe_intermediate_size"
        raise DamagedCheckpoint(what)
    return {}


SHARED_EXPERT_SIZE = keys.Rule(
    ("moe_shared_expert_intermediate_size",),
    _read_size_of_shared,
    lambda model: {"moe_shared_expert_intermediate_size": model.moe.ffn_hidden_size} if model.moe else {},
)
"""Of one shared expert, that of a routed one."""


def experts_of_a_layer(shared: int | None) -> tuple[keys.Entry, ...]:
    """Routed ones, and as many shared ones where no key says how many."""
    return (
        keys.Key("moe.num_experts", "n_routed_experts", synonym="num_local_experts"),
        keys.Key("moe.topk", "num_experts_per_tok"),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size"),
        shared_experts("n_shared_experts", shared),
    )


def experts(shared: int | None, dense: int) -> tuple[keys.Entry, ...]:
    """The same behind leading layers without; `dense` of them where no key says how many."""
    return (*experts_of_a_layer(shared), leading_dense("first_k_dense_replace", dense))


MLPS = {"dense": False, "sparse": True}
"""Of `mlp_layer_types`: have layers of this kind experts?"""


def experts_by_list(dense: int, key: str = "", *, reads_key: bool = True) -> keys.Rule:
    """Which layers have experts, as `mlp_layer_types` lists them; without it, all but the first ones: as many as `key`
    says, else `dense`. Engines go by `key`, which is written where it says the same. Classes that pass over it
    (`reads_key=False`) take `dense`: raises DamagedCheckpoint where it says other layers."""

    def read(config: keys.Config) -> keys.Fields:
        def behind(first: Any) -> tuple[bool, ...]:
            check_count(first, key, LARGEST)
            return tuple(layer >= first for layer in range(keys.layers(config)))

        listed, said = listed_layers(config, MLPS, "mlp_layer_types"), config.get(key)
        by_key = None if said is None else behind(said)
        unlisted = config.get(key, dense) if reads_key else dense
        freq = behind(unlisted) if listed is None else tuple(listed)
        if not reads_key and by_key not in (None, freq):
            what = f"{key} is {shown(said)}, and transformers, which passes over it, takes other layers for dense ones"
            do = "Say in mlp_layer_types which layers are `dense` and `sparse`, and by the number the same."
            raise DamagedCheckpoint(what, do=do)
        return {"moe.layer_freq": freq}

    def write(model: ModelShape) -> keys.Config:
        numbers = range(model.num_layers)
        types = ["sparse" if model.has_experts(layer) else "dense" for layer in numbers]
        first = types.count("dense")
        leading = {key: first} if key and "dense" not in types[first:] else {}
        return {"mlp_layer_types": types, **leading}

    return keys.Rule(("mlp_layer_types", *((key,) if key else ())), read, write)


def latent_attention(q_lora_rank: int | None) -> tuple[keys.Entry, ...]:
    """With the latents of queries of the family's class where the key is absent; null, there are none."""
    return (
        *keys.SIZES,
        keys.SILU,
        keys.Rule(
            ("num_attention_heads",),
            _read_attention,
            lambda model: dict.fromkeys(("num_attention_heads", "num_key_value_heads"), model.num_attention_heads),
        ),
        keys.Key("mla.q_lora_rank", "q_lora_rank", None, absent=q_lora_rank),
        keys.Key("mla.kv_lora_rank", "kv_lora_rank"),
        keys.Key("mla.qk_head_dim", "qk_nope_head_dim"),
        keys.Key("mla.qk_pos_emb_head_dim", "qk_rope_head_dim"),
        keys.Key("mla.v_head_dim", "v_head_dim"),
        keys.only("attention_bias", False),
    )


INDEXER: tuple[keys.Entry, ...] = (
    keys.Key("dsa.head_dim", "index_head_dim", 128),
    keys.Key("dsa.topk", "index_topk", 2048),
)
"""Of an indexer what all families have alike."""

ROTATED_HEAD = keys.synonyms({"head_dim": "qk_rope_head_dim"})
"""For families whose class in transformers computes rotary embeddings for `head_dim`, if config.json has it."""

SIGMOID: tuple[keys.Entry, ...] = (
    keys.only("scoring_func", "sigmoid"),
    keys.only("topk_method", "noaux_tc"),
    keys.always("moe.score_function", "sigmoid"),
    keys.always("moe.expert_bias", True),
)
"""V3's router: scores that are divided by the sum over the chosen ones, and a bias that only chooses."""


def groups(number: int, best: int | None) -> keys.Rule:
    """V3's groups of experts, worth their two best; with the defaults of the family's class. Raises DamagedCheckpoint
    for groups of which no number says how many are chosen from."""

    def read(config: keys.Config) -> keys.Fields:
        found = config.get("n_group", number)
        if found in (None, 1):
            if found and config.get("topk_group") not in (None, 1):
                raise DamagedCheckpoint(f"topk_group is {shown(config['topk_group'])}, of one group")
            return {}
        return {
            "moe.num_groups": keys.size(config, "n_group", absent=number),
            "moe.group_topk": keys.size(config, "topk_group", absent=best),
            "moe.group_scores": 2,
        }

    def write(model: ModelShape) -> keys.Config:
        found = (model.moe.num_groups, model.moe.group_topk) if model.moe else (None, None)
        return {"n_group": found[0] or 1, "topk_group": found[1] or 1}

    return keys.Rule(("n_group", "topk_group"), read, write)


def router(number: int, best: int | None) -> tuple[keys.Entry, ...]:
    """V3's router, with these groups of experts."""
    return (*SIGMOID, keys.only("norm_topk_prob", True), groups(number, best))


COMMON: tuple[keys.Entry, ...] = (
    *latent_attention(1536),
    keys.only("moe_layer_freq", 1),
    keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
    rope(),
    keys.tied(False),
)

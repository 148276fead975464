"""Settings of single families that transformers does not compute as they are said, or at all: refused by name."""

from contextlib import suppress
from typing import Any

import pico
import pytest
import tiny_wrappers
from installed import BEFORE_5_23
from soaking import first
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from precisionctl.architectures.families import from_hf_config, supported, to_hf_config
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture


def config(family: str, **changes: Any) -> dict[str, Any]:
    return pico.config(family) | changes


def test_trinity_without_a_window_has_no_layers_in_one() -> None:
    """transformers makes no mask for them."""
    with pytest.raises(DamagedCheckpoint, match="no sliding_window"):
        from_hf_config(config("afmoe", sliding_window=None))
    model = from_hf_config(config("afmoe", sliding_window=None, layer_types=["full_attention"] * 4))
    assert (model.sliding_window, model.rope_layers) == (None, (False,) * 4)


@pytest.mark.parametrize(
    ("family", "key"), [("qwen3-moe", "num_experts"), ("hy-v3", "num_experts"), ("deepseek-v3", "n_routed_experts")]
)
def test_a_family_of_experts_has_some(family: str, key: str) -> None:
    """Also where all layers are dense: what it writes says how many there are."""
    said = {name: value for name, value in config(family).items() if name != "num_local_experts"}
    with pytest.raises(DamagedCheckpoint, match=f"{key} is 0, not a size"):
        from_hf_config(said | {key: 0, "mlp_layer_types": ["dense"] * 3})


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("qwen3-moe", "moe_intermediate_size"),
        ("deepseek-v4", "num_experts_per_tok"),
        ("kimi-linear", "num_experts_per_token"),
        ("llama-2", "head_dim"),
        ("mixtral", "intermediate_size"),
        ("cohere2-moe", "prefix_dense_intermediate_size"),
        ("granite-moe-shared", "shared_intermediate_size"),
        ("deepseek-v3", "topk_group"),
        ("gpt2", "n_inner"),
        ("jamba", "intermediate_size"),
        ("gemma4", "num_key_value_heads"),
        ("gemma4", "head_dim"),
        ("ling-3", "num_expert_group"),
        *[("minicpm3", key) for key in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "intermediate_size")],
        *[("nemotron-h-latent", key) for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")],
        *[("nemotron-h-latent", key) for key in ("moe_shared_expert_intermediate_size", "moe_latent_size")],
        *[("nemotron-h-latent", key) for key in ("n_group", "topk_group")],
        *[("olmo-hybrid", key) for key in ("linear_num_value_heads", "linear_value_head_dim")],
        *[("glm-5.3", key) for key in ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")],
    ],
)
def test_a_number_is_refused_by_its_own_key(family: str, key: str) -> None:
    """Also where a field of another part of the model has the same name."""
    with pytest.raises(DamagedCheckpoint, match=f"^{key} is -1, not a size"):
        from_hf_config(config(family, **{key: -1}))


@pytest.mark.parametrize(
    ("family", "key", "what"),
    [
        ("nemotron-h", "routed_scaling_factor", "a positive number"),
        ("mimo-v2-flash", "rms_norm_eps", "a positive number"),
        ("cohere2-moe", "rms_norm_eps", "a positive number"),
        ("cohere2-moe-layer-norm", "layer_norm_eps", "a positive number"),
        ("falcon-h1", "key_multiplier", "a positive number"),
        ("falcon-h1", "ssm_multipliers", "5 numbers"),
        ("ling-3", "kda_lower_bound", "a negative number"),
        ("glm-5.3", "linear_lower_bound", "a negative number"),
    ],
)
def test_a_number_that_is_no_size_is_refused_by_its_own_key(family: str, key: str, what: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=f"^{key} is 0, not {what}"):
        from_hf_config(config(family, **{key: 0}))


@pytest.mark.parametrize(
    ("family", "said", "message"),
    [
        ("deepseek-v3", {"topk_group": None}, "no `topk_group`"),
        ("axk2", {"n_group": 2}, "no `topk_group`"),
        ("llama4", {"attn_scale": None}, "attn_scale is None, not a positive number"),
        ("mimo-v2-flash", {"rms_norm_eps": None}, "rms_norm_eps is None, not a positive number"),
        ("cohere2-moe-layer-norm", {"layer_norm_eps": None}, "layer_norm_eps is None, not a positive number"),
    ],
)
def test_null_is_no_number_where_transformers_computes_with_it(family: str, said: dict[str, Any], message: str) -> None:
    """Groups of which none are chosen from, and queries that grow by nothing, were another model in results."""
    with pytest.raises(DamagedCheckpoint, match=message):
        from_hf_config(config(family, **said))


REFUSED = [
    ("afmoe", "attention_bias", True),
    ("afmoe", "score_func", "softmax"),
    ("afmoe", "n_group", 2),
    ("hunyuan-moe", "moe_topk", [3, 2]),
    ("hunyuan-moe", "use_cla", True),
    ("granite-swa", "layer_rope_theta", [1.0, 2.0, 3.0, 2.0, 0, 2.0]),
    ("cohere2-moe", "use_parallel_block", False),
    ("cohere2-moe", "expert_selection_fn", "tanh"),
    ("cohere2-moe", "shared_expert_combination_strategy", "max"),
    ("mimo-v2-flash", "add_full_attention_sink_bias", True),
    ("mimo-v2-flash", "norm_topk_prob", False),
    ("phimoe", "num_experts_per_tok", 3),
    ("phimoe", "tie_word_embeddings", True),
    ("laguna", "gating", False),
    ("laguna", "num_attention_heads_per_layer", [4, 4, 8]),
    ("laguna", "moe_router_logit_softcapping", 2.0),
    ("laguna", "norm_topk_prob", False),
    ("falcon", "alibi", True),
    ("falcon", "parallel_attn", False),
    ("falcon", "num_ln_in_parallel_attn", 2),
    ("falcon-40b", "num_ln_in_parallel_attn", 3),
    ("gpt-bigcode", "scale_attn_weights", False),
    ("minicpm3", "attention_bias", True),
    ("gemma3", "attn_logit_softcapping", 50.0),
    # null is off in transformers
    ("falcon", "parallel_attn", None),
    ("falcon-h1", "mamba_conv_bias", None),
    ("deepseek-v3", "norm_topk_prob", None),
    ("deepseek-v3", "rope_interleave", None),
]


@pytest.mark.parametrize(("family", "key", "value"), REFUSED)
def test_what_is_not_computed_is_refused_by_the_name_of_its_setting(family: str, key: str, value: object) -> None:
    with pytest.raises(UnknownArchitecture, match=f"{key}="):
        from_hf_config(config(family, **{key: value}))


def test_lagunas_number_of_heads_is_a_number_beside_its_list_too() -> None:
    with pytest.raises(DamagedCheckpoint, match="num_attention_heads is 'four', not a size"):
        from_hf_config(config("laguna", num_attention_heads="four"))


WRITTEN = [
    ("mimo-v2-flash", {"sliding_window": 1}),
    ("mimo-v2-flash", {"sliding_window_size": 0}),
    *(
        (
            family,
            {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "proportional",
                        "rope_theta": 5e5,
                        "partial_rotary_factor": 0.5,
                        "factor": 2.0,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
                }
            },
        )
        for family in ("mimo-v2-flash", "laguna")
    ),
]


@pytest.mark.parametrize(("family", "changes"), WRITTEN, ids=str)
def test_what_is_written_of_a_model_is_that_model(family: str, changes: dict[str, Any]) -> None:
    """A window of the token alone, and pairs of which some stand still."""
    model = from_hf_config(config(family, **changes))
    assert from_hf_config(to_hf_config(model, "bfloat16")) == model


@pytest.mark.parametrize("family", ["mimo-v2-flash", "laguna"])
def test_a_share_of_a_head_that_is_null_is_none(family: str) -> None:
    """transformers cannot make such a model, and the share of a class where none is said is a guess."""
    said = config(family)
    said["rope_parameters"]["full_attention"]["partial_rotary_factor"] = None
    with pytest.raises(DamagedCheckpoint, match="`partial_rotary_factor` that is null"):
        from_hf_config(said)


PUBLISHED = {  # XiaomiMiMo/MiMo-V2-Flash: config.json, but for sizes
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "rope_scaling": None,
    "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1],
    "layernorm_epsilon": 1e-05,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 48,
    "swa_v_head_dim": 32,
    "sliding_window": 7,
    "sliding_window_size": 7,
    "attention_chunk_size": 7,
    "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "routed_scaling_factor": None,
    "n_shared_experts": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}


def test_mimo_v2_flash_as_published_is_what_transformers_takes_it_for() -> None:
    sizes = {
        key: value
        for key, value in pico.settings("mimo-v2-flash").items()
        if key not in ("layer_types", "mlp_layer_types", "rope_parameters")
    }
    published = sizes | PUBLISHED
    kept = {key: value for key, value in published.items() if key != "rope_scaling"}  # whose null it stumbles over
    model = from_hf_config(published)
    assert model == from_hf_config(AutoConfig.for_model(**kept).to_dict())
    assert (model.sliding_window, model.window_layers, model.rotary_base) == (8, (False, True, True), 5e6)
    written = to_hf_config(model, "bfloat16")
    told = {key: value for key, value in PUBLISHED.items() if key not in ("attention_chunk_size", "rope_scaling")}
    assert told | {"sliding_window": 8, "routed_scaling_factor": 1.0} == {key: written[key] for key in told}


@pytest.mark.parametrize(
    ("key", "value"),
    {
        "hybrid_layer_pattern": [0, 1, 0],
        "moe_layer_freq": 1,
        "layernorm_epsilon": 1e-6,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 24,
        "swa_v_head_dim": 48,
        "rope_theta": 10000,
        "swa_rope_theta": 5000000,
        "partial_rotary_factor": 0.5,
    }.items(),
)
def test_words_that_say_another_mimo_v2_flash_than_transformers_makes_are_refused(key: str, value: object) -> None:
    sizes = pico.settings("mimo-v2-flash") | {"layer_types": None, "mlp_layer_types": None, "rope_parameters": None}
    with pytest.raises(DamagedCheckpoint, match=f"{key} is .*, and transformers, which passes over it, takes"):
        from_hf_config(sizes | PUBLISHED | {key: value})


@pytest.mark.parametrize(
    "parameters", [{}, {"rope_theta": 1e4}, {"full_attention": {"rope_theta": 1e4}}, {"full_attention": {}}]
)
def test_rotary_parameters_of_a_kind_of_layers_that_are_not_said_are_refused(parameters: dict[str, Any]) -> None:
    """transformers makes no model of them."""
    said = config("mimo-v2-flash") | {"rope_parameters": parameters}
    with pytest.raises(DamagedCheckpoint, match="_attention is without a `rope_theta`"):
        from_hf_config(said)
    with pytest.raises(KeyError):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**said))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"short_mscale": 1.1}, "short_mscale=1.1 and long_mscale=1.2 differ"),
        ({"short_mscale": None}, "short_mscale is None"),
        ({"attention_factor": 1.2}, "attention_factor beside short_mscale"),
        ({"rope_type": "linear", "factor": 2.0}, "rotary scaling of type 'linear'"),
    ],
)
def test_scaling_of_phi_moe_that_is_not_known_is_refused(change: dict[str, Any], words: str) -> None:
    scaling = pico.LONG_ROPE | {"original_max_position_embeddings": 64, "short_mscale": 1.2, "long_mscale": 1.2}
    model = from_hf_config(config("phimoe") | {"rope_parameters": scaling})
    assert (model.rope_scaling or {})["attention_factor"] == 1.2
    assert from_hf_config(to_hf_config(model, "bfloat16")) == model
    with pytest.raises((DamagedCheckpoint, UnknownArchitecture), match=words):
        from_hf_config(config("phimoe") | {"rope_parameters": scaling | change})


@pytest.mark.parametrize(
    ("key", "value"),
    [("mlp_only_layers", [1]), ("decoder_sparse_step", 2), ("gating_types", ["per_element"] * 3)],
)
def test_words_that_say_another_laguna_than_transformers_makes_are_refused(key: str, value: object) -> None:
    said = config("laguna", mlp_only_layers=[0], decoder_sparse_step=1, gating_types=["per_head"] * 3)
    assert from_hf_config(said) == from_hf_config(config("laguna"))
    with pytest.raises(DamagedCheckpoint, match="transformers"):
        from_hf_config(said | {key: value})


def test_rotary_parameters_without_the_share_that_stands_beside_them_are_refused() -> None:
    """Whether transformers heeds it depends on which kind of layers is scaled."""
    said = config("laguna-per-element")
    assert from_hf_config(said | {"partial_rotary_factor": 1.0}) == from_hf_config(said)
    with pytest.raises(DamagedCheckpoint, match="full_attention is without the `partial_rotary_factor`"):
        from_hf_config(said | {"partial_rotary_factor": 0.5})


@pytest.mark.parametrize("family", ["cohere2-moe", "exaone-moe", "mellum"])
def test_a_list_of_mlps_names_one_for_each_layer(family: str) -> None:
    kinds = ["sparse"] * pico.settings(family)["num_hidden_layers"]
    for listed in (kinds[1:], [*kinds, "dense"], "sparse", {"sparse": 1}, 3):
        with pytest.raises(DamagedCheckpoint, match=f"mlp_layer_types is .*, not a list of {len(kinds)} layers"):
            from_hf_config(config(family) | {"mlp_layer_types": listed})
    for kind in ("moe", None, {"a": 1}):
        with pytest.raises(UnknownArchitecture, match=r"layers of type .* in mlp_layer_types"):
            from_hf_config(config(family) | {"mlp_layer_types": [kind, *kinds[1:]]})


@pytest.mark.parametrize("count", [None, -1, 1.5, "1", [1], 2**63])
def test_a_number_of_dense_layers_is_a_number(count: object) -> None:
    said = config("exaone-moe") | {"mlp_layer_types": None, "first_k_dense_replace": count}
    with pytest.raises(DamagedCheckpoint, match="first_k_dense_replace is .*, not a size"):
        from_hf_config(said)


@pytest.mark.parametrize("count", ["x", -1, True])
def test_a_number_of_dense_layers_is_a_number_beside_a_list_too(count: object) -> None:
    with pytest.raises(DamagedCheckpoint, match="first_k_dense_replace is .*, not a size"):
        from_hf_config(config("exaone-moe") | {"first_k_dense_replace": count})


@pytest.mark.parametrize("family", ["deepseek-v3", "youtu", "glm4-moe-lite"])
def test_a_head_of_latent_attention_has_one_size_of_rotary_embeddings(family: str) -> None:
    """transformers makes them for `head_dim`, which its classes set to `qk_rope_head_dim` unless the file says it."""
    said = config(family)
    from_hf_config(said | {"head_dim": said["qk_rope_head_dim"]})
    for size in (2, 2 * said["qk_rope_head_dim"], None):
        with pytest.raises(DamagedCheckpoint, match="head_dim is .* and qk_rope_head_dim, which is the same"):
            from_hf_config(said | {"head_dim": size})


def test_no_share_of_a_wrappers_head_that_turns_is_its_class_default() -> None:
    """GLM-4.6V's is the whole head, and half of it that of the family whose table it has (modeling_glm4v.py,
    compute_default_rope_parameters)."""
    said = tiny_wrappers.make("glm46v").config.to_dict()
    said["text_config"]["partial_rotary_factor"] = None
    assert from_hf_config(said).rotary_percent == 1


def synonyms() -> list[tuple[str, str, str]]:
    """Of each family, each other word that its class takes for a key which the family's table reads."""
    found = []
    for family in pico.FAMILIES:
        model_type = pico.settings(family)["model_type"]
        read = {key for entry in supported()[model_type].config for key in entry.keys}
        words = CONFIG_MAPPING[model_type].attribute_map if model_type in CONFIG_MAPPING else {}
        found += [(family, word, key) for word, key in words.items() if key in read]
    return [each for each in found if each[:2] not in PASSED_OVER]


PASSED_OVER = {("step3p5", "num_local_experts"), ("step3p5", "num_mtp_layers")}
"""Words by which a class calls a key, and of which it takes no notice in a file."""


@pytest.mark.parametrize(("family", "word", "key"), synonyms())
def test_another_word_for_a_key_is_read_as_its_class_reads_it_or_refused(family: str, word: str, key: str) -> None:
    told = AutoConfig.for_model(**pico.settings(family)).to_dict()
    alone = {name: value for name, value in told.items() if name != key} | {word: told[key]}
    assert getattr(AutoConfig.for_model(**alone), key) == told[key]
    try:
        assert from_hf_config(alone) == from_hf_config(told)
    except DamagedCheckpoint as error:
        assert f"no `{key}`" in error.what or f"{key}, which is the same" in error.what
    another = not told[key] if isinstance(told[key], bool) else 2 if told[key] == 1 else 1
    with pytest.raises(DamagedCheckpoint, match=f"({word}.*{key}|{key}.*{word}), which is the same"):
        from_hf_config(told | {word: another})


def test_a_word_for_experts_that_a_class_does_not_know_says_nothing() -> None:
    told = AutoConfig.for_model(**pico.settings("qwen3-5-moe")).to_dict()
    assert from_hf_config(told | {"num_local_experts": 7}) == from_hf_config(told)


WRONG: tuple[object, ...] = ("", "no", [], {})
"""Two that Python takes for false, one for true, and an object: none of them is a size or a switch."""


OF_CLASSES_THAT_CHECK = [
    family
    for family in pico.first_of_each(lambda family: {pico.settings(family)["model_type"]})
    if family not in pico.BY_HAND
]
"""A family for each class of transformers; one by hand takes every value."""


@pytest.mark.skipif(BEFORE_5_23, reason="older classes fail over empty rotary parameters, which newer ones take")
@pytest.mark.parametrize("family", first(30, OF_CLASSES_THAT_CHECK))
def test_a_value_of_a_wrong_type_is_no_absent_one(family: str) -> None:
    """What its class does not take is refused, or plays no part in this model: `num_key_value_heads: []` was read as if
    nothing were said."""
    model_type = pico.settings(family)["model_type"]
    told = AutoConfig.for_model(**pico.settings(family)).to_dict()
    model = from_hf_config(told)
    refused = 0
    for key in sorted({key for entry in supported()[model_type].config for key in entry.keys} & told.keys()):
        for value in WRONG:
            try:
                AutoConfig.for_model(**told | {key: value})
            except Exception:  # of the class's own, or of Python
                refused += 1
                with suppress(DamagedCheckpoint, UnknownArchitecture):
                    assert from_hf_config(told | {key: value}) == model, (key, value)
    assert refused, "the class takes every value"


@pytest.mark.parametrize("head_dim", [{}, {"head_dim": 32}])
def test_minimax_m2s_channels_that_turn_are_those_that_transformers_turns(head_dim: dict[str, int]) -> None:
    """Released files say them by `rotary_dim`, and some leave the size of a head to the class."""
    said = {key: value for key, value in config("minimax-m2").items() if key not in ("head_dim", "rope_parameters")}
    said |= {"rotary_dim": 16, **head_dim}
    theirs = AutoConfig.for_model(**said)
    assert theirs.rope_parameters["partial_rotary_factor"] == 16 / theirs.head_dim
    model = from_hf_config(said)
    assert (model.kv_channels, model.rotary_size) == (theirs.head_dim, 16)


@pytest.mark.parametrize("where", ["beside", "within"])
def test_a_rotary_dim_of_another_share_is_refused(where: str) -> None:
    """transformers takes the share, and engines the number of channels."""
    share = {"partial_rotary_factor": 1.0}
    said = config("minimax-m2", rotary_dim=8, rope_parameters=None, rope_theta=5e6)
    said |= share if where == "beside" else {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default", **share}}
    with pytest.raises(DamagedCheckpoint, match="rotary_dim is 8, and in transformers 16 channels turn"):
        from_hf_config(said)


@pytest.mark.parametrize("family", ["hy-v3", "glm4-moe-lite"])
@pytest.mark.parametrize("said", [0, 2, 3, True, "1"])
def test_dense_layers_that_transformers_does_not_heed_are_refused(family: str, said: object) -> None:
    """Its class takes one layer where no list is, and vLLM the number."""
    told = config(family) | {"mlp_layer_types": None}
    model = from_hf_config(told | {"first_k_dense_replace": 1})
    assert model.moe and model.moe.layer_freq == (False, True, True)
    assert from_hf_config(told) == model
    with pytest.raises(DamagedCheckpoint, match="first_k_dense_replace"):
        from_hf_config(told | {"first_k_dense_replace": said})


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("proportional", {"partial_rotary_factor": 0.5}),
        ("linear", {"factor": 2.0}),
        ("yarn", {"factor": 2.0, "original_max_position_embeddings": 32}),
    ],
)
def test_the_older_word_for_a_kind_of_scaling_says_the_same(kind: str, numbers: dict[str, Any]) -> None:
    """transformers 5 reads both words."""
    said = {"rope_theta": 1e4, **numbers}
    by_word = [from_hf_config(config("llama-3", rope_parameters=said | {word: kind})) for word in ("rope_type", "type")]
    assert by_word[0] == by_word[1]
    assert by_word[0].rope_scaling and by_word[0].rope_scaling["rope_type"] == kind

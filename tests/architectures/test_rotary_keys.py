"""However a config.json spells rotary embeddings, its class in transformers reads the same from it, or it is
refused."""

import json
from dataclasses import replace
from typing import Any

import pico
import pytest
from huggingface_hub.errors import StrictDataclassError
from soaking import in_soak
from transformers import AutoConfig, AutoModelForCausalLM

from precisionctl.architectures.families import architecture_of, from_hf_config, to_hf_config
from precisionctl.architectures.rope import KEYS
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, UnknownArchitecture

LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
PLAIN = {"rope_type": "default"}

SPELLINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a base": {"rope_theta": 7e4},
    "a share": {"partial_rotary_factor": 0.5},
    "a share that is null": {"partial_rotary_factor": None},
    "both of version 4": {"rope_theta": 7e4, "partial_rotary_factor": 0.5},
    "a base in windows": {"rope_theta": 7e4, "rope_local_base_freq": 3e4},
    "nulls": {"rope_parameters": None, "rope_scaling": None},
    "null and a base": {"rope_parameters": None, "rope_theta": 7e4},
    "no base": {"rope_parameters": PLAIN},
    "no base within": {"rope_parameters": PLAIN, "rope_theta": 7e4},
    "a base within": {"rope_parameters": PLAIN | {"rope_theta": 5e4}},
    "two bases": {"rope_parameters": PLAIN | {"rope_theta": 5e4}, "rope_theta": 7e4},
    "a share within": {"rope_parameters": PLAIN | {"rope_theta": 5e4, "partial_rotary_factor": 0.5}},
    "two shares": {
        "rope_parameters": PLAIN | {"rope_theta": 5e4, "partial_rotary_factor": 0.5},
        "partial_rotary_factor": 0.25,
    },
    "scaled": {"rope_scaling": LINEAR},
    "scaled by the older word": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "scaled beside a base": {"rope_scaling": LINEAR, "rope_theta": 7e4},
    "scaled with a base": {"rope_scaling": LINEAR | {"rope_theta": 5e4}, "rope_theta": 7e4},
    "scaled with a share": {"rope_scaling": LINEAR | {"partial_rotary_factor": 0.5}},
    "scaled in version 5": {"rope_parameters": LINEAR | {"rope_theta": 5e4}},
    "YaRN": {"rope_scaling": YARN},
    "YaRN of as many tokens": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "YaRN of two lengths": {"rope_scaling": YARN, "original_max_position_embeddings": 256},
    "YaRN of ends that are not whole": {"rope_scaling": YARN | {"truncate": None}},
    "by kind": {
        "rope_parameters": {
            "full_attention": LINEAR | {"rope_theta": 5e4},
            "sliding_attention": PLAIN | {"rope_theta": 6e4},
        }
    },
    "by kind without bases": {
        "rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN},
        "rope_theta": 7e4,
        "rope_local_base_freq": 3e4,
    },
    "by kind without bases, scaled": {
        "rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN},
        "rope_theta": 7e4,
    },
    "of one kind": {"rope_parameters": {"full_attention": PLAIN | {"rope_theta": 5e4}}},
    "YaRN by kind": {
        "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 5e4, "truncate": False},
            "sliding_attention": PLAIN | {"rope_theta": 6e4},
        },
        "original_max_position_embeddings": 256,
    },
    "YaRN of as many tokens, beside another length": {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
        "original_max_position_embeddings": 32,
    },
    "Pythia's": {"rotary_emb_base": 7e4, "rotary_pct": 0.5},
}


def _entries(family: str) -> set[int]:
    """The entries of a family that read such keys."""
    entries = architecture_of(pico.settings(family)["model_type"]).config
    return {id(entry) for entry in entries if {*KEYS} & {*entry.keys}}


def spelled(family: str, spelling: dict[str, Any]) -> dict[str, Any]:
    """A config.json of the family that says its rotary embeddings in this spelling alone."""
    said = pico.config(family)
    rest = {key: value for key, value in said.items() if key not in (*KEYS, "layer_rope_theta")}
    return rest | json.loads(json.dumps(spelling))  # classes write into what they are given


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
@pytest.mark.parametrize("family", pico.first_of_each(_entries))
def test_rotary_keys_mean_what_transformers_takes_them_for(family: str) -> None:
    kind = type(AutoConfig.for_model(**pico.settings(family)))
    for spelling in SPELLINGS.values():
        try:
            ours = from_hf_config(spelled(family, spelling))
            told = kind(**spelled(family, spelling)).to_dict()
        except (PrecisionctlError, KeyError, AttributeError, StrictDataclassError):  # refused, here or there
            continue
        assert from_hf_config(told) == ours, spelling


@pytest.mark.parametrize("family", ["llama-3", "qwen3", "gpt-oss", "gpt-neox", "smollm3"])
def test_rotary_parameters_by_kind_are_refused_where_the_class_asks_for_those_of_all_layers(family: str) -> None:
    with pytest.raises(UnknownArchitecture, match="rotary parameters of full_attention alone"):
        from_hf_config(spelled(family, SPELLINGS["by kind"]))


@pytest.mark.parametrize(
    ("family", "spelling", "words"),
    [
        ("gemma3", "a base within", "for all layers together"),
        ("olmo3", "scaled in version 5", "for all layers together"),
        ("mellum", "scaled", "for all layers together"),
        ("olmo3", "a base in windows", "rope_local_base_freq is 30000.0, .* takes 500000.0"),
        ("gemma3", "scaled by the older word", "`type` is 'linear', and transformers, which passes over it"),
        ("olmo3", "YaRN by kind", "truncate is False, and transformers passes over it"),
        ("deepseek-v4", "YaRN of ends that are not whole", "truncate is None, and transformers passes over it"),
        ("gemma4", "by kind without bases, scaled", "a kind is without a `rope_theta`"),
        ("mellum", "by kind without bases, scaled", "a kind is without a `rope_theta`"),
        ("gpt-neox", "a base", "rope_theta is 70000.0, .* takes 10000.0"),
        ("cohere2-moe", "scaled", "rope_scaling is .*, and transformers passes over it"),
    ],
)
def test_keys_that_transformers_passes_over_are_refused(family: str, spelling: str, words: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=words):
        from_hf_config(spelled(family, SPELLINGS[spelling]))


def test_a_kind_of_scaling_that_is_no_word_is_refused_whatever_it_is() -> None:
    for kind in (float("nan"), None, 1):  # Python's JSON reads NaN, which does not equal itself
        scaled = pico.config("olmo3") | {"rope_parameters": None, "rope_scaling": {"rope_type": kind}}
        with pytest.raises(UnknownArchitecture, match="rotary scaling of type"):
            from_hf_config(scaled)


@pytest.mark.parametrize("family", ["glm4-moe", *in_soak("glm", "qwen3-next", "nemotron", "phi", "stablelm")])
def test_a_share_that_is_null_is_no_familys_default(family: str) -> None:
    """Of GLM-4.5, GLM-4 and Qwen3-Next transformers turns whole heads, and fails of the others."""
    with pytest.raises(DamagedCheckpoint, match="partial_rotary_factor is null"):
        from_hf_config(spelled(family, SPELLINGS["a share that is null"]))
    assert from_hf_config(spelled(family, {"partial_rotary_factor": 1.0})).rotary_percent == 1
    with pytest.raises(DamagedCheckpoint, match=r"partial_rotary_factor is 7\.0, more than a whole head"):
        from_hf_config(spelled(family, {"partial_rotary_factor": 7.0}))


@pytest.mark.parametrize("within", [True, False])
def test_an_original_context_that_is_null_is_no_other_length(within: bool) -> None:
    """transformers computes with the null (modeling_rope_utils.py, standardize_rope_params), and fails."""
    null = {"original_max_position_embeddings": None}
    said = {"rope_scaling": YARN | null} if within else {"rope_scaling": YARN} | null
    with pytest.raises(DamagedCheckpoint, match="original_max_position_embeddings is null"):
        from_hf_config(spelled("llama-3", said))
    with pytest.raises((TypeError, StrictDataclassError)):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**spelled("llama-3", said)))


def test_the_original_context_of_deepseek_v4_is_that_of_its_parameters_alone() -> None:
    said = spelled("deepseek-v4", SPELLINGS["YaRN of as many tokens, beside another length"])
    told = AutoConfig.for_model(**json.loads(json.dumps(said))).rope_parameters["compress"]
    scaling = from_hf_config(said).rope_scaling
    assert scaling and scaling["original_max_position_embeddings"] == told["original_max_position_embeddings"]
    assert told["original_max_position_embeddings"] == said["max_position_embeddings"] != 32


def test_a_scaling_has_its_keys_in_the_order_in_which_other_families_write_them() -> None:
    scaling = {"factor": 2.0, "rope_type": "yarn", "original_max_position_embeddings": 128}
    others, ours = (
        to_hf_config(replace(pico.shape(name), rope_scaling=scaling), "") for name in ("qwen3", "cohere2-moe")
    )
    assert [*ours["rope_parameters"]] == [*others["rope_scaling"], "rope_theta"]


def test_a_base_beside_parameters_by_kind_is_that_of_kinds_that_say_none() -> None:
    model = from_hf_config(spelled("gemma3", SPELLINGS["by kind without bases"]))
    assert (model.rotary_base, model.rotary_base_local) == (7e4, 3e4)


def test_a_config_that_its_class_has_saved_with_both_keys_is_read() -> None:
    told = AutoConfig.for_model(**pico.settings("cohere2-moe") | {"rope_scaling": LINEAR}).to_dict()
    assert told["rope_scaling"] == LINEAR and told["rope_parameters"]["rope_type"] == "default"
    assert from_hf_config(told).rope_scaling is None


@pytest.mark.parametrize("family", ["glm4", "stablelm", "gpt-neox"])
def test_of_both_keys_one_may_leave_out_a_share_that_is_the_familys(family: str) -> None:
    share = pico.shape(family).rotary_percent
    assert share != 1
    one = pico.config(family, rope_parameters=LINEAR | {"rope_theta": 1e4, "partial_rotary_factor": share})
    assert from_hf_config(one | {"rope_scaling": LINEAR}) == from_hf_config(one)
    with pytest.raises(DamagedCheckpoint, match="are not the same"):
        from_hf_config(one | {"rope_scaling": LINEAR | {"partial_rotary_factor": 0.75}})

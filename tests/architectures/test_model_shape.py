"""ModelShape: sizes from files of strangers that no model has are refused by their names."""

from dataclasses import make_dataclass, replace
from typing import Any

import pytest

from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_parts import LARGEST, MLA, MOST_LAYERS, MoE, check_numbers
from precisionctl.model.model_shape import ModelShape

DENSE = ModelShape("llama", 2, 16, 24, 4, 2, 4, 50, 64, 32)
WINDOWED = replace(DENSE, sliding_window=3)
EXPERTS = MoE(8, 4, 12, (False, True), 8, num_groups=4, group_topk=2, group_scores=1)
LATENT = MLA(6, 6, 4, 4, 6)

SIZES = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "num_layers"),
    *("vocab_size", "padded_vocab_size", "max_position_embeddings", "make_vocab_size_divisible_by"),
    *("mtp_num_layers", "num_kv_shared_layers", "sliding_window"),
)
NUMBERS = ("mtp_num_layers", "num_kv_shared_layers")
REALS = (
    *("norm_epsilon", "rotary_base", "rotary_base_local", "rotary_percent", "activation_clamp"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("embedding_multiplier", "residual_multiplier", "logit_multiplier", "logits_scaling"),
)
OF_EXPERTS = (
    *("num_experts", "topk", "ffn_hidden_size", "shared_ffn_hidden_size"),
    *("num_groups", "group_topk", "group_scores"),
)
OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
WHOLES: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (DENSE, "", SIZES),
    (WINDOWED, "", SIZES),
    (EXPERTS, "moe.", OF_EXPERTS),
    (LATENT, "mla.", OF_LATENTS),
)
"""With what their fields' names begin with in errors."""


@pytest.mark.parametrize("size", [-1, LARGEST + 1, 2.0, True, "4", None])
def test_what_is_no_size_is_refused_by_its_name(size: object) -> None:
    optional = ("sliding_window", "shared_ffn_hidden_size", "num_groups", "group_topk", "group_scores", "q_lora_rank")
    for whole, part, names in WHOLES:
        for name in names:
            if size is None and name in optional:
                continue
            with pytest.raises(DamagedCheckpoint, match=f"^{part}{name} is .*, not a size"):
                replace(whole, **{name: size})


@pytest.mark.parametrize("none", [0.0, False])
def test_no_layers_of_a_kind_are_zero_and_no_other_number(none: object) -> None:
    for name in NUMBERS:
        with pytest.raises(DamagedCheckpoint, match=f"^{name} is {none}, not a size"):
            replace(DENSE, **{name: none})  # type: ignore[arg-type]


def test_no_size_is_zero_but_numbers_of_some_layers() -> None:
    for whole, part, names in WHOLES:
        for name in names:
            if name not in (*NUMBERS, "qk_pos_emb_head_dim"):  # of latent attention without positions
                with pytest.raises(DamagedCheckpoint, match=f"^{part}{name} is 0, not a size"):
                    replace(whole, **{name: 0})


def test_no_more_than_a_head_turns() -> None:
    replace(DENSE, rotary_percent=1)
    with pytest.raises(DamagedCheckpoint, match=r"rotary_percent is 1\.5, more than a whole head"):
        replace(DENSE, rotary_percent=1.5)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_what_is_no_positive_number_is_refused_by_its_name(value: object) -> None:
    for name in REALS:
        with pytest.raises(DamagedCheckpoint, match=f"{name} is .*, not a positive number"):
            replace(DENSE, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(DamagedCheckpoint, match="topk_scaling_factor is .*, not a positive number"):
        replace(EXPERTS, topk_scaling_factor=value)  # type: ignore[arg-type]


def test_annotations_that_are_strings_check_nothing_and_are_no_oversight() -> None:
    """As `from __future__ import annotations` makes them."""
    part = make_dataclass("Part", [("size", "int")])
    with pytest.raises(AssertionError, match="not evaluated"):
        check_numbers(part(-1))


CONTRADICTORY: dict[str, dict[str, Any]] = {
    "model_type is 3, not a name": {"architecture": 3},
    "activation is 'relu6'": {"activation": "relu6"},
    "glu_offset is nan, not a number": {"glu_offset": float("nan")},
    "glu_offset is None, not a number": {"glu_offset": None},
    "glu_offset is 'x', not a number": {"glu_offset": "x"},
    "4 heads in 3 query groups": {"num_query_groups": 3},
    "num_layers is 4097, not a size": {"num_layers": MOST_LAYERS + 1},
    "mtp_num_layers is 4097, not a size": {"mtp_num_layers": MOST_LAYERS + 1},
    "qkv_size is .*, not a size": {"kv_channels": LARGEST},
    "projection_size is .*, not a size": {"mla": replace(LATENT, v_head_dim=LARGEST), "num_attention_heads": 8},
    "query_size is .*, not a size": {"mla": replace(LATENT, qk_head_dim=LARGEST)},
    "key_value_size is .*, not a size": {"mla": replace(LATENT, v_head_dim=LARGEST)},
    "window_layers has 3 entries for 2 layers": {"window_layers": (True, False, True)},
    "rope_layers has 1 entries for 2 layers": {"rope_layers": (True,)},
    "moe_layer_freq has 1 entries for 2 layers": {"moe": replace(EXPERTS, layer_freq=(True,))},
}


@pytest.mark.parametrize("message", CONTRADICTORY)
def test_sizes_that_contradict_one_another_are_refused(message: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=message):
        replace(DENSE, **CONTRADICTORY[message])


NO_ROUTING: dict[str, dict[str, Any]] = {
    "9 of 8 experts for a token": {"topk": 9, "group_topk": 4},
    "8 experts in 3 groups": {"num_groups": 3},
    "of 5 of 4 groups": {"group_topk": 5},
    "each worth 3 of its scores": {"group_scores": 3},
    "5 experts of 2 of 4 groups of 2": {"topk": 5},
}


@pytest.mark.parametrize("message", NO_ROUTING)
def test_experts_that_no_token_could_be_sent_to_are_refused(message: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=message):
        replace(EXPERTS, **NO_ROUTING[message])


def test_the_largest_sizes_are_sizes() -> None:
    assert replace(DENSE, vocab_size=LARGEST, padded_vocab_size=LARGEST).vocab_size == LARGEST
    assert replace(DENSE, num_layers=MOST_LAYERS, mtp_num_layers=MOST_LAYERS).num_layers == MOST_LAYERS
    assert replace(EXPERTS, topk=8, group_topk=4, group_scores=2).topk == 8
    assert replace(EXPERTS, topk=4, group_topk=2, group_scores=None).topk == 4
    assert replace(EXPERTS, num_groups=None, group_topk=None, group_scores=None).num_experts == 8

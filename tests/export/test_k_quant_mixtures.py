"""The types of tensors in files of K-quants. `make peers` compares whole files with llama-quantize's."""

from typing import Any

import numpy as np
import pytest

from precisionctl.checkpoints.gguf.file_types import FILE_TYPES, MIXTURES, scheme_of
from precisionctl.export.gguf.k_quant_mixtures import types_in_mixture


def metadata(architecture: str = "llama", layers: int = 32, **more: int) -> dict[str, Any]:
    said = {"block_count": layers, "attention.head_count": 32, "attention.head_count_kv": 8}
    said |= {key.replace("heads", "attention.head_count"): number for key, number in more.items()}
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": np.uint32(value) for key, value in said.items()},
    }


def shapes(layers: int, columns: int = 512, tied: bool = False) -> dict[str, tuple[int, ...]]:
    matrix = (1024, columns)
    return {
        "token_embd.weight": matrix,
        **({} if tied else {"output.weight": matrix}),
        "output_norm.weight": (columns,),
        **{
            f"blk.{layer}.{name}.weight": matrix
            for layer in range(layers)
            for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        },
        **{f"blk.{layer}.attn_norm.weight": (columns,) for layer in range(layers)},
    }


def layers_in(types: dict[str, str], name: str, type_: str) -> list[int]:
    return [int(each.split(".")[1]) for each, found in types.items() if f".{name}." in each and found == type_]


def test_a_llama_of_8b_has_more_bits_in_half_of_its_layers() -> None:
    """As its published files in Q4_K_M do."""
    types = types_in_mixture("q4_k_m", metadata(), shapes(32))
    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert layers_in(types, "attn_v", "Q6_K") == layers_in(types, "ffn_down", "Q6_K") == more
    assert types["output.weight"] == "Q6_K" and types["token_embd.weight"] == types["blk.0.attn_q.weight"] == "Q4_K"
    assert "output_norm.weight" not in types and "blk.0.attn_norm.weight" not in types


def test_layers_are_counted_in_the_order_of_their_numbers() -> None:
    """`blk.10` stands behind `blk.9`, wherever a plan has them."""
    described = shapes(32)
    turned = dict(reversed(described.items()))
    assert types_in_mixture("q4_k_m", metadata(), turned) == types_in_mixture("q4_k_m", metadata(), described)


@pytest.mark.parametrize(
    ("mixture", "usual", "more", "values", "down"),
    [("q6_k", "Q6_K", "", 0, 0), ("q5_k_m", "Q5_K", "Q6_K", 16, 16), ("q5_k_s", "Q5_K", "", 0, 0)]
    + [("q4_k_m", "Q4_K", "Q6_K", 16, 16), ("q4_k_s", "Q4_K", "Q5_K", 4, 4)],
)
def test_each_mixture_has_its_own_counts(mixture: Any, usual: str, more: str, values: int, down: int) -> None:
    types = types_in_mixture(mixture, metadata(), shapes(32))
    counts = [len(layers_in(types, name, more or usual)) for name in ("attn_v", "ffn_down")]
    assert counts == ([values, down] if more else [32, 32])
    assert {types[f"blk.5.{name}.weight"] for name in ("attn_k", "attn_output", "ffn_up")} == {usual}


def test_an_embedding_that_is_the_output_layer_has_its_type() -> None:
    assert types_in_mixture("q4_k_m", metadata(), shapes(2, tied=True))["token_embd.weight"] == "Q6_K"
    assert types_in_mixture("q4_k_m", metadata("falcon"), shapes(2))["output.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("columns", "mixture", "expected"),
    [
        (96, "q4_k_s", "Q5_0"),
        (96, "q5_k_s", "Q5_1"),
        (96, "q6_k", "Q8_0"),
        (100, "q4_k_m", "F16"),
        (512, "q4_k_m", "Q4_K"),
    ],
)
def test_rows_that_are_no_blocks_of_256_have_a_type_of_32(columns: int, mixture: Any, expected: str) -> None:
    types = types_in_mixture(mixture, metadata(), shapes(32, columns))
    assert types["blk.5.attn_q.weight"] == expected


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("columns", [512, 96])
@pytest.mark.parametrize("more", [{}, {"expert_count": 8}])
def test_a_file_of_a_mixture_names_its_scheme(mixture: Any, columns: int, more: dict[str, int]) -> None:
    types = types_in_mixture(mixture, metadata(**more), shapes(32, columns))
    assert scheme_of(FILE_TYPES[mixture], {*types.values()}) == mixture
    assert scheme_of(FILE_TYPES[mixture], {*types.values(), "Q3_K"}) is None


def test_eight_experts_have_more_bits_in_attention_whatever_the_mixture() -> None:
    for mixture in MIXTURES:
        types = types_in_mixture(mixture, metadata(expert_count=8), shapes(32))
        assert types["blk.5.attn_k.weight"] == types["blk.5.attn_v.weight"] == "Q8_0"
        assert (types["blk.5.attn_output.weight"] == "Q5_K") == (mixture[1] in "45")


@pytest.mark.parametrize(
    ("architecture", "layers", "more", "is_70b"),
    [
        ("llama", 80, {}, True),
        ("llama", 80, {"heads_kv": 32}, False),
        ("llama", 79, {}, False),
        ("qwen2", 80, {}, True),
        ("qwen3", 80, {}, False),
        ("jais2", 68, {}, True),
    ],
)
def test_a_model_of_70b_has_values_in_five_bits(
    architecture: str, layers: int, more: dict[str, int], is_70b: bool
) -> None:
    types = types_in_mixture("q4_k_m", metadata(architecture, layers, **more), shapes(layers))
    assert bool(layers_in(types, "attn_v", "Q5_K")) == is_70b and not layers_in(types, "attn_v", "Q4_K") * is_70b


def test_what_llama_cpp_computes_with_in_full_stays() -> None:
    kept = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv", "attn_q_norm", "per_layer_model_proj")
    described = {f"blk.0.{name}.weight": (512, 512) for name in kept}
    described |= {"position_embd.weight": (512, 512), "blk.0.ffn_gate_inp_shexp.weight": (1, 512)}
    described |= {"blk.0.ssm_a": (512, 512), "blk.0.ffn_up_exps.weight": (4, 512, 512), "blk.0.ssm_x.weight": (64, 512)}
    assert types_in_mixture("q5_k_s", metadata(layers=1), described) == {
        "blk.0.ffn_up_exps.weight": "Q5_K",
        "blk.0.ssm_x.weight": "Q5_K",
    }

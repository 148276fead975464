"""Checks without tensor data: what is not the model's, and what cannot be divided, is refused by its name."""

import re
from dataclasses import replace

import pico
import pytest

from precisionctl.architectures.families import table_of
from precisionctl.architectures.param_map import Either, Row
from precisionctl.dtypes import DType
from precisionctl.errors import MappingError, MissingTensor, PrecisionError, ShapeMismatch, UnmappedTensor
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Parallelism, TensorSpec
from precisionctl.planning.checks import (
    check_division,
    check_dtypes,
    check_megatron_has,
    check_names,
    check_ranks,
    check_shapes,
)


def test_names_that_differ_in_numbers_alone_share_a_line() -> None:
    missing = [f"layers.{layer}.fc{kind}.weight{expert}" for layer in range(3) for kind in (1, 2) for expert in (0, 1)]
    missing += [f"layers.{layer}.fc.bias{layer}" for layer in range(2)] + ["head.weight"]
    with pytest.raises(MissingTensor) as found:
        check_names(missing, ["a.0", "b"])
    assert found.value.what.splitlines() == [
        "the checkpoint's tensors are not the model's: 15 missing, 2 unexpected",
        "  missing     layers.*.fc1.weight*  (6)",
        "  missing     layers.*.fc2.weight*  (6)",
        "  missing     layers.*.fc.bias*  (2)",
        "  missing     head.weight",
        "  unexpected  a.0",
        "  unexpected  b",
    ]


def test_one_missing_name_is_enough() -> None:
    with pytest.raises(MissingTensor, match=r"1 missing\n  missing     a\.$"):
        check_names(["a"], [])
    with pytest.raises(UnmappedTensor, match=r"2 unexpected\n  unexpected  mlp\.experts\.up\[\*\]  \(2\)"):
        check_names([], ["mlp.experts.up[0]", "mlp.experts.up[1]"])


def test_a_strangers_names_are_neither_many_nor_long() -> None:
    check_names([], [])
    names = [f"{chr(97 + number)}.0" for number in range(10)] + ["a.1", "j.1", "x" * 1000]
    with pytest.raises(UnmappedTensor) as found:
        check_names([], names, do="Look.", where="here")
    lines = found.value.what.splitlines()
    assert lines[1] == "  unexpected  a.*  (2)" and lines[2] == "  unexpected  b.0"
    assert lines[9:] == ["  unexpected  ... and 4 more"] and "missing" not in found.value.what
    with pytest.raises(UnmappedTensor, match=r"  x{90}\.$"):
        check_names([], ["x" * 1000])


def test_dtypes_that_no_weight_has_are_refused_by_name() -> None:
    for dtype in (DType.bfloat16, DType.float16, DType.float32, DType.float8_e4m3fn, DType.float8_e5m2):
        check_dtypes({"a": TensorSpec((2,), dtype)}, integers=False)
    for dtype in (DType.float64, DType.int8, DType.int64, DType.bool):
        with pytest.raises(PrecisionError, match=f"`b` is {dtype}"):
            check_dtypes({"a": TensorSpec((2,), DType.float32), "b": TensorSpec((2,), dtype)}, integers=False)


def test_a_shape_is_that_of_its_place() -> None:
    stored = {"a": TensorSpec((2, 3), DType.float32), "b": TensorSpec((3, 2), DType.float32)}
    check_shapes(stored, [(2, 3), (3, 2)])
    with pytest.raises(ShapeMismatch, match=re.escape("`b` is [3, 2], the model's sizes say [2, 3]")):
        check_shapes(stored, [(2, 3), (2, 3)])


def row(model: ModelShape, name: str) -> Row:
    listed = [row for each in table_of(model).rows for row in (each.first if isinstance(each, Either) else (each,))]
    (found,) = [row for row in listed if isinstance(row, Row) and name in row.megatron]
    return found


def test_rows_columns_and_experts_are_divided_each_by_its_own_ranks() -> None:
    model = pico.shape("mixtral")
    dense = replace(pico.shape("llama-3"), hidden_size=80, ffn_hidden_size=96)
    for name, whole, cut in (
        ("mlp.linear_fc1.weight", 32, 64),  # 96 rows of each of gate and up
        ("mlp.linear_fc2.weight", 32, 64),  # 96 columns
    ):
        check_division(row(dense, name), dense, Parallelism(tensor=whole))
        with pytest.raises(ShapeMismatch, match=f"{cut} tensor-parallel parts"):
            check_division(row(dense, name), dense, Parallelism(tensor=cut))
    check_division(row(dense, "final_layernorm.weight"), dense, Parallelism(tensor=7))
    experts = row(model, "experts.linear_fc2.weight")
    size = model.moe.ffn_hidden_size  # type: ignore[union-attr]
    check_division(experts, model, Parallelism(tensor=size + 1, expert_tensor=size))
    for sizes, do in ((Parallelism(size, expert_tensor=size + 1), "--etp or --tp"), (Parallelism(size + 1), "--etp")):
        with pytest.raises(ShapeMismatch, match=rf"cannot be cut into {size + 1}.*\n?.*{do}"):
            check_division(experts, model, sizes)
    attention = row(model, "self_attention.linear_proj.weight")
    with pytest.raises(ShapeMismatch, match="Choose another --tp") as found:
        check_division(attention, model, Parallelism(tensor=7, expert_tensor=1))
    assert "--etp" not in str(found.value)


@pytest.mark.parametrize(
    ("heads", "groups", "ranks"), [(8, 2, 3), (8, 8, 16), (12, 4, 3), (12, 3, 4), (12, 4, 6), (12, 6, 4)]
)
def test_heads_are_dealt_out_as_megatron_does(heads: int, groups: int, ranks: int) -> None:
    """All ranks have as many heads, and whole groups, or each the same part of one."""
    model = replace(pico.shape("llama-3"), num_attention_heads=heads, num_query_groups=groups)
    with pytest.raises(ShapeMismatch, match=f"{heads} heads in {groups} query groups .* {ranks} tensor-parallel ranks"):
        check_ranks(model, Parallelism(tensor=ranks))
    for sound in (1, heads, groups):
        check_ranks(model, Parallelism(tensor=sound))


def test_experts_are_dealt_out_evenly_and_only_where_there_are_some() -> None:
    model = pico.shape("mixtral")
    experts = model.moe.num_experts  # type: ignore[union-attr]
    check_ranks(model, Parallelism(expert=experts))
    with pytest.raises(ShapeMismatch, match=f"{experts} experts cannot be divided evenly among {experts + 1} ranks"):
        check_ranks(model, Parallelism(expert=experts + 1))
    check_ranks(pico.shape("llama-3"), Parallelism())
    with pytest.raises(ShapeMismatch, match="a model without experts"):
        check_ranks(pico.shape("llama-3"), Parallelism(expert=2))


def test_experts_beside_biases_of_attention_have_no_place_in_megatron() -> None:
    """It has one switch for all biases: of attention, routers and experts."""
    model = pico.shape("mixtral")
    check_megatron_has(model)
    with pytest.raises(MappingError, match="routers and experts would have biases, too"):
        check_megatron_has(replace(model, add_bias_linear=True))
    check_megatron_has(replace(model, add_bias_linear=True, moe=replace(model.moe, router_bias=True)))  # type: ignore[type-var]
    check_megatron_has(replace(pico.shape("llama-3"), add_bias_linear=True))

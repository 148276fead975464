"""Two checkpoints in any two formats, and one against an engine's rules."""

import json
import math
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import in_memory
import pico
import pytest
import torch
import trained_models
from click.testing import CliRunner
from conversions import run
from mcore_runs import trained
from safetensors.torch import load_file, save_file

from precisionctl.checkpoints.chunks import read_tensor, write_rows
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.cli import main
from precisionctl.codes.statistics import Statistics
from precisionctl.dtypes import DType
from precisionctl.engines.base import engines
from precisionctl.errors import MissingTensor, UnknownFormat
from precisionctl.fp8.state import Fp8State, RoleState
from precisionctl.param import Parallelism, TensorSpec
from precisionctl.reports.verify import tables, verdict
from precisionctl.verify import differences, engine_rules, hf_tensors
from precisionctl.verify.compare import Comparison, compare
from precisionctl.verify.tensor_comparison import TensorComparison

Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> HuggingFaceReader:
    pico.save(tmp_path / "source", "llama-3", dtype=torch.bfloat16)
    return HuggingFaceReader(tmp_path / "source")


def changed(reader, name, values):
    """The same checkpoint with other values for one tensor; None leaves it out."""
    tensors = {other: read_tensor(reader, other) for other in reader.specs if other != name}
    if values is not None:
        tensors[name] = values
    return in_memory.InMemory(reader.model, reader.layout, tensors, reader.fp8, encodings=reader.encodings)


def of(comparison, name):
    (found,) = [tensor for tensor in comparison.tensors if tensor.name == name]
    return found


@pytest.mark.parametrize("family", pico.representing(pico.mixers))
def test_both_layouts_of_a_model_are_equal_whatever_the_padding(tmp_path, family):
    pico.save(tmp_path, family, dtype=torch.bfloat16)
    hf = HuggingFaceReader(tmp_path)
    ranks = 3 if hf.model.num_attention_heads % 4 else 4
    megatron, wider = in_memory.to_megatron(hf), in_memory.to_megatron(hf, parallelism=Parallelism(ranks))
    assert megatron.model.padded_vocab_size != wider.model.padded_vocab_size
    for a, b in [(hf, megatron), (megatron, hf), (megatron, wider)]:
        comparison = compare(a, b)
        assert comparison.equal
        assert {tensor.status for tensor in comparison.tensors} == {"exact"}


def test_pieces_smaller_than_a_tensor_compare_the_same(source, monkeypatch):
    monkeypatch.setattr(hf_tensors, "PIECE", 5 * 64)
    megatron = in_memory.to_megatron(source)
    assert compare(source, megatron).equal
    megatron.tensors["decoder.layers.1.mlp.linear_fc2.weight"][63, 95] += 1
    assert [tensor.name for tensor in compare(source, megatron).tensors if not tensor.equal] == [DOWN]


def test_what_is_found_does_not_depend_on_the_number_of_workers(source, tmp_path):
    in_memory.export(in_memory.with_state(source), tmp_path / "codes", "compressed-tensors", "dynamic")
    codes, values = open_checkpoint(tmp_path / "codes"), in_memory.to_megatron(source)
    values.tensors["embedding.word_embeddings.weight"][3, 5] += 1
    alone, *shared = (compare(codes, values, fp8=True, workers=workers) for workers in (1, 2, 3))
    assert {tensor.status for tensor in alone.tensors} == {"exact", "encoded", "differs"} and alone.codes
    assert shared == [alone, alone]


def test_values_are_compared_in_one_thread_of_pytorch_which_has_its_own_again_after_it(source, monkeypatch):
    found, before = set(), torch.get_num_threads()
    values = in_memory.to_megatron(source)
    values.tensors["embedding.word_embeddings.weight"][3, 5] += 1
    monkeypatch.setattr(differences, "difference", lambda a, b: found.add(torch.get_num_threads()) or a - b)
    torch.set_num_threads(3)
    try:
        assert not compare(source, values).equal
        assert (found, torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)


def test_a_changed_element_is_measured(source):
    values = read_tensor(source, DOWN).float()
    other = values.clone()
    other[3, 5] += 0.5
    found = of(compare(source, changed(source, DOWN, other)), DOWN)
    signal = float(values.double().square().sum())
    assert found.status == "differs" and not found.equal
    assert found.max_abs_error == 0.5
    assert found.sqnr_db == pytest.approx(10 * math.log10(signal / 0.25), rel=1e-12)
    assert found.dtypes == "bfloat16 / float32"


def test_a_wider_dtype_with_the_same_values_is_exact(source):
    found = of(compare(source, changed(source, DOWN, read_tensor(source, DOWN).float())), DOWN)
    assert found.status == "exact"


def test_values_rounded_to_fp16_are_the_same_unless_one_is_rounded_otherwise_or_to_infinity(source):
    values = read_tensor(source, DOWN).bfloat16()
    values[0, :2] = torch.tensor([2.0**-24 * 1.5, 2.0**-26])  # FP16's smallest numbers are 2^-24 apart
    half = values.half()
    assert half[0, :2].tolist() == [2.0**-23, 0.0]
    off, infinite = half.clone(), values.clone()
    off[0, 0] = 2.0**-24
    infinite[0, 0] = 2.0**17
    for one, other, status in (
        (values, half, "rounded"),
        (values, off, "differs"),
        (infinite, infinite.half(), "differs"),
    ):
        for a, b in ((one, other), (other, one)):
            found = of(compare(changed(source, DOWN, a), changed(source, DOWN, b)), DOWN)
            assert found.status == status and found.equal == (status == "rounded")


@pytest.mark.parametrize(
    ("scale", "status", "remark"),
    [
        (2.0**-14, "rounded", None),  # the smallest normal number
        (2.0**-21, "rounded", "0.0% of values became zero; SQNR "),  # subnormal, with three bits
        (2.0**-26, "lost", "rounding loses the values (SQNR under 10 dB): 100.0% of values became zero"),
        (2.0**-40, "lost", "rounding loses the values (SQNR under 10 dB): 100.0% of values became zero"),
    ],
)
def test_what_fp16_has_no_numbers_for_is_told_apart_from_rounding(source, scale, status, remark):
    signs = torch.randint(0, 2, read_tensor(source, DOWN).shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    values = scale * signs * torch.linspace(1, 1.5, signs.numel()).reshape(signs.shape)
    for a, b in ((values, values.half()), (values.half(), values)):
        result = compare(changed(source, DOWN, a), changed(source, DOWN, b))
        found = of(result, DOWN)
        assert (found.status, found.equal) == (status, status == "rounded")
        assert found.remark.startswith(remark) if remark else not found.remark


def test_a_tenth_that_fp16_makes_zero_is_told(source):
    values = torch.full(read_tensor(source, DOWN).shape, 0.5 + 2**-12)  # not of FP16
    values.view(-1)[: math.ceil(values.numel() / 10)] = 2.0**-26
    found = of(compare(changed(source, DOWN, values), changed(source, DOWN, values.half())), DOWN)
    assert found.status == "rounded" and found.remark.startswith("10.0% of values became zero; SQNR ")


def test_values_rounded_to_bf16_are_the_same_unless_one_is_rounded_otherwise_or_to_infinity(source):
    exact = read_tensor(source, DOWN).float() * (1 + 2**-10)
    exact[0, 0] = 3.4e38  # beyond BF16's largest number
    below = exact.clone()
    below[0, 0] = 1.0
    rounded, off = below.bfloat16(), below.bfloat16()
    off[3, 5] = off[3, 5] * (1 + 2**-7)  # the next number of BF16
    for one, other, status in (
        (below, rounded, "rounded"),
        (below, off, "differs"),
        (exact, exact.bfloat16(), "differs"),
    ):
        for a, b in ((one, other), (other, one)):
            found = of(compare(changed(source, DOWN, a), changed(source, DOWN, b)), DOWN)
            assert found.status == status and found.equal == (status == "rounded")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_equals_nan_and_infinity_infinity_and_nothing_else(source, value):
    values = read_tensor(source, DOWN)
    values[0, 0] = value
    a, b = changed(source, DOWN, values), changed(source, DOWN, values.clone())
    assert compare(a, b).equal
    assert not compare(a, source).equal


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_both_sides_have_that_is_no_number_is_not_in_the_ratio_of_the_others(source, value):
    values = read_tensor(source, DOWN).float() * (1 + 2**-10)  # not of BF16
    values[0, 0] = value
    rounded = values.bfloat16()
    others, error = values.view(-1)[1:].double(), (values - rounded.float()).view(-1)[1:].double()
    true = 10 * math.log10(float(others.square().sum() / error.square().sum()))
    found = of(compare(changed(source, DOWN, values), changed(source, DOWN, rounded)), DOWN)
    assert (found.status, found.remark) == ("rounded", "") and found.sqnr_db == pytest.approx(true, rel=1e-9)
    assert found.max_abs_error == float(error.abs().max())


def test_in_two_dtypes_a_nan_is_one_whatever_its_bits_and_hides_no_other_element(source):
    values = read_tensor(source, DOWN)
    values[0, 0] = math.nan
    one, other = changed(source, DOWN, values), values.float()
    other.view(torch.int32)[0, 0] ^= 1
    assert compare(one, changed(source, DOWN, other)).equal
    for element in (float(other[3, 5]) + 1, math.nan):
        other[3, 5] = element
        assert not compare(one, changed(source, DOWN, other)).equal


def test_zeros_of_two_signs_differ_and_nans_do_not_in_one_dtype_and_in_two(source):
    values = read_tensor(source, DOWN)
    values[0, :2] = torch.tensor([0.0, math.nan])
    for dtype in (torch.bfloat16, torch.float32):
        other = values.clone().to(dtype)
        bits = other.view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
        bits[0, 1] ^= 1  # a NaN with another payload
        assert of(compare(changed(source, DOWN, values), changed(source, DOWN, other)), DOWN).status == "exact"
        other[0, 0] = -0.0
        found = of(compare(changed(source, DOWN, values), changed(source, DOWN, other)), DOWN)
        assert (found.status, found.differing) == ("signs of zeros", 1)
        other[0, 2] += 1
        found = of(compare(changed(source, DOWN, values), changed(source, DOWN, other)), DOWN)
        assert (found.status, found.differing) == ("differs", 2)


def test_a_tensor_on_one_side_only_is_named(tmp_path):
    pico.save(tmp_path / "biased", "llama-attention-bias")
    pico.save(tmp_path / "plain", "llama-2", num_key_value_heads=2)
    biased, plain = HuggingFaceReader(tmp_path / "biased"), HuggingFaceReader(tmp_path / "plain")
    for a, b, status in ((biased, plain, "only in A"), (plain, biased, "only in B")):
        comparison = compare(a, b)
        assert of(comparison, Q.replace("weight", "bias")).status == status
        assert not comparison.equal


def test_a_checkpoint_that_lacks_a_tensor_of_its_own_model_is_an_error(source):
    with pytest.raises(MissingTensor, match=DOWN):
        compare(source, changed(source, DOWN, None))


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_an_export_is_the_encoding_of_its_source(tmp_path, source, method, scheme):
    exported = in_memory.export(in_memory.with_state(source), tmp_path / "exported", method, scheme)
    for comparison in (compare(source, exported), compare(exported, in_memory.to_megatron(source))):
        assert comparison.equal
        assert {t.status for t in comparison.tensors if t.name in exported.encodings} == {"encoded"}
        assert {t.status for t in comparison.tensors if t.name not in exported.encodings} == {"exact"}
        assert 20 < of(comparison, Q).sqnr_db < 60


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_one_code_changed_by_one_step_is_a_difference(tmp_path, source, scheme):
    exported = in_memory.export(in_memory.with_state(source), tmp_path / "exported", "compressed-tensors", scheme)
    codes = read_tensor(exported, Q)
    codes.view(torch.uint8)[2, 3] += 1
    write_rows(exported, Q, 0, codes)
    comparison = compare(source, exported)
    assert [tensor.name for tensor in comparison.tensors if not tensor.equal] == [Q]


def test_infinity_is_not_the_largest_code(tmp_path, source):
    """Though a cast makes that of it."""
    exported = in_memory.export(in_memory.with_state(source), tmp_path / "exported", "compressed-tensors", "static")
    codes = read_tensor(exported, Q)
    codes[2, 3] = 448
    write_rows(exported, Q, 0, codes)
    values = codes.float() * exported.encodings[Q].multipliers
    values[2, 3] = math.inf
    for a, b in ((exported, changed(source, Q, values)), (changed(source, Q, values), exported)):
        assert of(compare(a, b), Q).status == "differs"


def test_an_export_of_another_model_is_a_difference(tmp_path, source):
    exported = in_memory.export(in_memory.with_state(source), tmp_path / "exported", "compressed-tensors", "dynamic")
    other = changed(source, Q, read_tensor(source, Q) * 1.5)
    assert of(compare(other, exported), Q).status == "differs"


def test_two_exports_that_decode_alike_are_equal_and_two_schemes_are_not(tmp_path, source):
    stateful = in_memory.with_state(source)
    static = in_memory.export(stateful, tmp_path / "static", "compressed-tensors", "static")
    modelopt = in_memory.export(stateful, tmp_path / "modelopt", "modelopt", "static")
    dynamic = in_memory.export(stateful, tmp_path / "dynamic", "compressed-tensors", "dynamic")
    assert compare(static, modelopt).equal
    assert of(compare(static, dynamic), Q).status == "differs"


def test_a_setting_that_no_tensor_shows_is_a_difference(source):
    other = replace(source_in_memory(source), model=replace(source.model, rotary_base=7.0, norm_epsilon=0.5))
    found = compare(source, other)
    assert all(tensor.equal for tensor in found.tensors) and not found.equal
    assert [line.split()[0] for line in found.settings] == ["norm_epsilon", "rotary_base"]


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "gelu"},
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"sliding_window": 5},
        {"rotary_interleaved": True},
    ],
)
def test_no_setting_is_hidden(source, changes):
    other = replace(source_in_memory(source), model=replace(source.model, **changes))
    assert [line.split()[0] for line in compare(source, other).settings] == list(changes)


def test_the_longest_context_counts_where_rotary_positions_depend_on_it(tmp_path):
    pico.save(tmp_path, "phi3-long")
    long = HuggingFaceReader(tmp_path)
    other = replace(source_in_memory(long), model=replace(long.model, max_position_embeddings=4096))
    assert compare(long, other).settings == ("max_position_embeddings is 128 in A, 4096 in B",)
    plain = replace(long.model, rope_scaling=None)
    one, two = (
        replace(source_in_memory(long), model=replace(plain, max_position_embeddings=size)) for size in (128, 4096)
    )
    assert compare(one, two).equal


def test_a_tied_model_with_another_head_in_its_file_is_a_difference(tmp_path):
    """Whether a program reads it is for the program to say."""
    pico.save(tmp_path / "tied", "llama-tied", dtype=torch.bfloat16)
    embedding = load_file(tmp_path / "tied" / "model.safetensors")["model.embed_tokens.weight"]
    for name, head in {"same": embedding.clone(), "other": embedding * 2}.items():
        shutil.copytree(tmp_path / "tied", tmp_path / name)
        with_head(tmp_path / name, head)
    tied, same, other = (HuggingFaceReader(tmp_path / name) for name in ("tied", "same", "other"))
    assert compare(tied, same).equal and compare(same, tied).equal
    for a, b in ((tied, other), (other, tied), (same, other), (in_memory.to_megatron(tied), other)):
        assert [tensor.name for tensor in compare(a, b).tensors if not tensor.equal] == ["lm_head.weight"]


def test_two_models_that_share_no_names_are_compared_though_one_stores_a_copy(tmp_path):
    pico.save(tmp_path / "gpt2", "gpt2")
    pico.save(tmp_path / "tied", "llama-tied")
    with_head(tmp_path / "tied", load_file(tmp_path / "tied" / "model.safetensors")["model.embed_tokens.weight"])
    copied, other = HuggingFaceReader(tmp_path / "tied"), HuggingFaceReader(tmp_path / "gpt2")
    for a, b, only in ((copied, other, "only in A"), (other, copied, "only in B")):
        assert of(compare(a, b), "lm_head.weight").status == only


def test_a_copy_that_only_one_side_stores_is_held_against_the_codes_of_the_original(tmp_path):
    pico.save(tmp_path / "coded", "llama-tied", dtype=torch.bfloat16)
    shutil.copytree(tmp_path / "coded", tmp_path / "values")
    tensors = load_file(tmp_path / "coded" / "model.safetensors")
    values = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = values.float().div(2**-8).to(torch.float8_e4m3fn)
    tensors["model.embed_tokens.weight_scale"] = torch.full((len(values), 1), 2**-8)
    save_file(tensors, tmp_path / "coded" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "coded" / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": ["Embedding"], "weights": weights, "input_activations": None}
    method = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    (tmp_path / "coded" / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    with_head(tmp_path / "values", values.clone())
    coded, stored = HuggingFaceReader(tmp_path / "coded"), HuggingFaceReader(tmp_path / "values")
    for a, b in ((coded, stored), (stored, coded)):
        comparison = compare(a, b, fp8=True)
        original, copy = of(comparison, "model.embed_tokens.weight"), of(comparison, "lm_head.weight")
        assert original.status == "encoded" and replace(copy, name=original.name) == original


def with_head(directory: Path, head: torch.Tensor) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"lm_head.weight": head}, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_settings_of_optimizers_that_both_say_are_compared(tmp_path):
    model, optimizer = trained_models.trained("llama-3", 1)

    def saved(name):
        path = trained_models.save(tmp_path / name, trained_models.states(model, optimizer))
        return open_checkpoint(trained_models.config_of(model, path))

    a, group = saved("A"), optimizer.param_groups[0]
    group["initial_lr"] = 0.5  # A does not say it
    changes = {"weight_decay": (0.1, 0.2), "lr": (0.01, 0.02), "betas": ((0.9, 0.95), (0.9, 0.999)), "eps": (1e-8, 0.1)}
    for key, (before, after) in changes.items():
        group[key] = after
        b = saved(key)
        group[key] = before
        found = compare(a, b)
        assert found.optimizer == (f"{key} is {before} in A, {after} in B",)
        assert not found.equal and not found.settings and all(tensor.equal for tensor in found.tensors)
    (table,) = [table for table in tables(found) if table.title == "Settings of the optimizer that differ"]
    assert table.rows == [found.optimizer] and verdict(found) == "Not the same: 1 setting of the optimizer."
    run(tmp_path / "eps", tmp_path / "megatron", "megatron")
    assert compare(b, open_checkpoint(tmp_path / "megatron")).equal
    for state in optimizer.state.values():
        state["step"] += 1
    found = compare(a, saved("two"))
    assert found.optimizer == ("updates is 1 in A, 2 in B",) and not found.equal
    group["lr"] = float("nan")
    b = saved("nan")
    (line,) = compare(a, b).optimizer  # and not the same because nothing can be compared
    assert line.startswith("in B: its optimizer's lr is nan")
    of_both = compare(b, b)
    assert of_both.optimizer == () and any(
        "settings of the optimizer: its" in each.what for each in of_both.not_compared
    )


def test_tied_and_untied_are_two_functions_of_the_same_files(tmp_path):
    pico.save(tmp_path / "untied", dtype=torch.bfloat16)
    shutil.copytree(tmp_path / "untied", tmp_path / "tied")
    config = json.loads((tmp_path / "tied" / "config.json").read_text())
    (tmp_path / "tied" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    found = compare(HuggingFaceReader(tmp_path / "untied"), HuggingFaceReader(tmp_path / "tied"))
    assert found.settings == ("tied_embeddings is False in A, True in B",)


def test_optimizers_are_compared_whatever_the_padding_or_said_not_to_be(tmp_path):
    trained(tmp_path)
    run(tmp_path / "run", tmp_path / "cut", "megatron", parallelism=Parallelism(2))
    run(tmp_path / "run", tmp_path / "bare", "megatron", drop_optimizer=True)
    a, cut = open_checkpoint(tmp_path / "run"), open_checkpoint(tmp_path / "cut")
    name = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    assert compare(a, cut).equal and of(compare(a, cut), name).status == "exact"
    bare = compare(a, open_checkpoint(tmp_path / "bare"))
    assert bare.equal
    assert [each.what for each in bare.not_compared if each.topic == "optimizer"] == ["only A has one"]
    assert [each.what for each in bare.not_compared if each.topic == "run"] == ["of A"]
    total, counted = bytes_of_progress(a, cut)
    assert total == counted > sum(spec.nbytes for spec in a.specs.values())


def test_settings_of_experts_differ_one_by_one(tmp_path):
    pico.save(tmp_path, "mixtral")
    one = HuggingFaceReader(tmp_path)
    other = replace(source_in_memory(one), model=replace(one.model, moe=replace(one.model.moe, topk=1)))
    assert list(compare(one, other).settings) == [f"moe.topk is {one.model.moe.topk} in A, 1 in B"]


def test_the_answer_is_a_line(source):
    other = source_in_memory(source)
    assert verdict(compare(source, other)) == f"The same: all {len(source.specs)} tensors."
    other.tensors[Q][0, 0] += 1
    found = compare(source, replace(other, model=replace(source.model, rotary_base=7.0)))
    assert verdict(found) == f"Not the same: 1 of {len(source.specs)} tensors, 1 setting."


def test_of_two_families_the_settings_come_first_and_few_tensors_after_them(source, tmp_path):
    pico.save(tmp_path / "gpt2", "gpt2")
    found = compare(source, HuggingFaceReader(tmp_path / "gpt2"))
    first, _, worst, *_ = tables(found)
    assert first.title == "Settings that differ" and "architectures" in first.rows[1][0]
    assert first.rows[0] == ("the family is llama in A, gpt2 in B",)
    assert len(worst.rows) == 5 and worst.title == f"{len(found.tensors)} tensors differ, the worst 5"


def test_a_tensor_on_one_side_only_is_listed_before_those_that_have_nothing_in_common(source):
    other = source_in_memory(source)
    for name, values in other.tensors.items():
        other.tensors[name] = -2 * values  # -9.5 dB
    names = [f"t{number}" for number in range(3)]
    found = compare(source, other)
    missing = tuple(TensorComparison(name, "only in A", "bfloat16") for name in names)
    worst = tables(replace(found, tensors=(*found.tensors, *missing)))[1]
    assert [row[0] for row in worst.rows[:3]] == names and len(worst.rows) == 20 < len(found.tensors)


def test_what_is_cut_off_is_counted(source):
    lines = tuple(f"line {number}" for number in range(500))
    tensors = tuple(TensorComparison(f"t{number}", "encoded", "x", 15.0, 1.0, 1, remark="y") for number in range(30))
    found = Comparison(tensors, lines[:25], lines)
    titles = {table.title: len(table.rows) for table in tables(found)}
    assert titles == {
        "Settings that differ, the first 20 of 25": 20,
        "Tensors": 1,
        "What codes and rounding have lost, the first 20 of 30": 20,
        "FP8 state, the first 20 of 500": 20,
    }
    assert verdict(found) == "Not the same: 25 settings, 500 differences of FP8 state."


def test_shapes_that_differ_are_shown(source, tmp_path):
    pico.save(tmp_path / "other", "llama-3", dtype=torch.bfloat16, vocab_size=source.model.vocab_size + 1)
    shown = [row for table in tables(compare(source, HuggingFaceReader(tmp_path / "other"))) for row in table.rows]
    rows, columns = source.model.vocab_size, source.model.hidden_size
    assert any(f"shape [{rows}, {columns}] / [{rows + 1}, {columns}]" in row for row in shown)


def source_in_memory(source):
    return in_memory.InMemory(source.model, "hf", {name: read_tensor(source, name) for name in source.specs})


def test_static_input_scales_are_compared(tmp_path, source):
    stated = in_memory.with_state(source)
    one = in_memory.export(stated, tmp_path / "one", "compressed-tensors", "static")
    in_memory.export(stated, tmp_path / "two", "compressed-tensors", "static")
    file = tmp_path / "two" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.input_scale"] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    found = compare(one, HuggingFaceReader(tmp_path / "two"))
    assert not found.equal and "input scale of model.layers.0.mlp.down_proj.weight" in found.settings[0]


def test_an_infinity_on_one_side_only_is_a_difference_with_no_sqnr(source):
    other = source_in_memory(source)
    other.tensors[Q][0, 0] = float("inf")
    assert of(compare(source, other), Q).sqnr_db == -math.inf


def test_the_largest_error_is_infinite_for_a_nan_on_one_side_and_none_for_one_on_both(source):
    a, b = source_in_memory(source), source_in_memory(source)
    for reader in (a, b):
        reader.tensors[Q][0, :2] = torch.tensor([math.nan, math.inf])
    b.tensors[Q][1, 1] = 2 * (b.tensors[Q][1, 1] + 1)
    assert of(compare(a, b), Q).max_abs_error == float((a.tensors[Q][1, 1].float() - b.tensors[Q][1, 1].float()).abs())
    b.tensors[Q][1, 2] = math.nan
    for one, other in ((a, b), (b, a)):
        assert of(compare(one, other), Q).max_abs_error == math.inf


def test_no_state_on_either_side_is_no_difference(source):
    found = compare(source, source, fp8=True)
    assert found.equal and found.fp8 is None  # and not said to be equal
    assert not any(table.title == "FP8 state" for table in tables(found))


def test_equal_fp8_state_is_no_difference(source):
    assert compare(in_memory.with_state(source), in_memory.with_state(source)).fp8 == ()


def test_state_on_one_side_only_differs_where_it_was_asked_for(source):
    assert compare(in_memory.with_state(source), source).equal
    for a, b, lacking in ((in_memory.with_state(source), source, "B"), (source, in_memory.with_state(source), "A")):
        asked = compare(a, b, fp8=True)
        assert asked.fp8 == (f"no FP8 state in {lacking}",)
        assert not asked.equal


def edited(state, role, change):
    return Fp8State({**state.roles, role: change(state.roles[role])})


STATE_CHANGES = {
    "scale": lambda part: RoleState(part.scale.nextafter(torch.tensor(1e9)), part.amax_history),
    "histories": lambda part: RoleState(part.scale, part.amax_history.roll(1)),
}


@pytest.mark.parametrize("word, change", STATE_CHANGES.items())
def test_state_that_differs_in_the_last_bit_is_named(source, word, change):
    a, b = in_memory.with_state(source), in_memory.with_state(source)
    name = "decoder.layers.1.mlp.linear_fc1"
    modules = {**b.fp8.modules, name: edited(b.fp8.modules[name], "grad_output", change)}
    b.fp8 = replace(b.fp8, modules=modules)
    (line,) = compare(a, b).fp8
    assert line.startswith(f"{name} grad_output") and word in line


def test_another_recipe_a_missing_module_and_an_unread_payload_are_named(source):
    a, b = in_memory.with_state(source), in_memory.with_state(source)
    modules = dict(b.fp8.modules)
    name, _ = modules.popitem()
    recipe = replace(b.fp8.recipe, margin=1)
    b.fp8 = replace(b.fp8, recipe=recipe, modules=modules, raw={"x": torch.zeros(3, dtype=torch.uint8)})
    lines = compare(a, b).fp8
    assert lines[0] == "recipe: margin is 0 and 1"
    assert lines[1] == f"{name}: only in A"
    assert lines[2].startswith("x: payloads")
    assert compare(b, a).fp8[1] == f"{name}: only in B" and compare(b, a).fp8[2] == lines[2]


def test_a_role_payload_or_statistic_that_differs_is_named_and_a_statistic_of_one_side_said(source):
    a, b = in_memory.with_state(source), in_memory.with_state(source)
    name = "decoder.layers.1.mlp.linear_fc1"
    roles = {role: part for role, part in b.fp8.modules[name].roles.items() if role != "grad_output"}
    payload = torch.arange(3, dtype=torch.uint8)
    measured = {"input": Statistics(elements=4, amax=2.0), "weight": Statistics(elements=4)}
    a.fp8 = replace(a.fp8, raw={"x": payload}, statistics={name: measured})
    b.fp8 = replace(a.fp8, raw={"x": payload.clone()})
    assert compare(a, b).fp8 == ()
    b.fp8 = replace(
        b.fp8,
        modules={**b.fp8.modules, name: Fp8State(roles)},
        raw={"x": payload + 1},
        statistics={name: {"input": Statistics(elements=4, amax=3.0)}},
    )
    found = compare(a, b)
    assert found.fp8 == (
        f"{name} grad_output: only in A",
        "x: payloads that were not understood differ",
        f"{name} input: the statistics differ",
    )
    assert [each.what for each in found.not_compared if each.topic == "recording"] == ["1 statistics"]
    assert compare(b, a).fp8[0] == f"{name} grad_output: only in B"


def test_progress_adds_up_to_the_stored_bytes_of_a(tmp_path, source):
    exported = in_memory.export(in_memory.with_state(source), tmp_path / "exported", "modelopt", "dynamic")
    for a in (source, exported):
        stored = sum(spec.nbytes for spec in a.specs.values())
        assert bytes_of_progress(a, in_memory.to_megatron(source)) == (stored, stored)


def bytes_of_progress(a, b):
    """How many bytes `compare` says it will compare, and how many it then has."""
    counts, totals = [], []

    @contextmanager
    def progress(total):
        totals.append(total)
        yield counts.append

    compare(a, b, progress=progress)
    return sum(totals), sum(counts)


def test_a_comparison_is_json(source):
    plain = json.dumps(compare(in_memory.with_state(source), in_memory.with_state(source)).as_json())
    assert json.loads(plain)["equal"] is True


@pytest.mark.parametrize("engine", engines().values(), ids=engines())
@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_our_own_exports_break_no_rule_of_their_engine(tmp_path, source, engine, scheme):
    method = engine.spells[scheme]
    numbers = "BF16" if engine.methods[method].bf16_scales else "FP32"
    exported = in_memory.export(in_memory.with_state(source), tmp_path / "exported", method, scheme, numbers)
    assert engine_rules.check(exported, engine) == []


@pytest.mark.parametrize("engine", engines().values(), ids=engines())
def test_a_directory_without_fp8_weights_is_no_export(source, engine):
    assert engine_rules.check(source, engine)[-1].what == "no weight is codes: all are bfloat16"
    for more in ((), ("--json",)):
        found = CliRunner().invoke(main, ["verify", str(source.path), "--target", engine.name, *more])
        assert found.exit_code == 1 and "no weight is codes: all are bfloat16" in found.output
        assert "an export has codes" in found.output


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0, -0.01, 1e9, 1e-25])
@pytest.mark.parametrize("kind", ["weight_scale", "input_scale", "k_scale"])
def test_scales_of_no_use_are_refused(tmp_path, source, kind, scale):
    exported = in_memory.export(in_memory.with_state(source), tmp_path / "exported", "compressed-tensors", "static")
    stored = {name: read_tensor(exported.stored, name) for name in exported.stored.specs}
    name = f"model.layers.0.self_attn.{kind}" if kind == "k_scale" else DOWN.replace("weight", kind)
    stored[name] = torch.tensor([scale])
    specs = {name: TensorSpec(tuple(each.shape), DType.of(each.dtype)) for name, each in stored.items()}
    for engine in (engines()["vllm"], engines()["transformers"]):
        found = engine.check(exported.config, specs, stored.__getitem__)
        assert [each.what for each in found if each.where == name and each.rule.fatal] == [f"a scale of {scale:.6g}"]


def test_exponents_of_mxfp8_may_be_as_small_as_they_are_and_no_nan(tmp_path, source):
    exported = in_memory.export(source_in_memory(source), tmp_path / "exported", "mxfp8", "mxfp8")
    stored = {name: read_tensor(exported.stored, name) for name in exported.stored.specs}
    name = DOWN.replace("weight", "weight_scale_inv")
    for exponent, wrong in ((0, []), (255, ["a scale of nan"])):
        stored[name].view(-1)[3] = exponent
        found = engines()["sglang"].check(exported.config, exported.stored.specs, stored.__getitem__)
        assert [each.what for each in found if each.where == name] == wrong


@pytest.mark.parametrize("scheme", ["static", "dynamic", "mxfp8", "nvfp4", "mxfp4"])
def test_weights_of_zeros_keep_every_rule(tmp_path, source, scheme):
    zeros = changed(source, DOWN, torch.zeros_like(read_tensor(source, DOWN)))
    zeros.fp8, vllm = in_memory.recorded(source), engines()["vllm"]
    exported = in_memory.export(zeros, tmp_path / scheme, vllm.spells[scheme], scheme)
    assert engine_rules.check(exported, vllm) == [] and compare(zeros, exported).equal


def test_an_engine_is_shown_hugging_face_directories_only(source):
    with pytest.raises(UnknownFormat, match="export-inference"):
        engine_rules.check(in_memory.to_megatron(source), engines()["vllm"])


def test_both_shapes_are_shown_of_a_bias_that_hugging_face_has_no_place_for(tmp_path):
    pico.save(tmp_path / "hf", "llama-attention-bias")
    one = in_memory.to_megatron(HuggingFaceReader(tmp_path / "hf"))
    bias = "decoder.layers.1.mlp.linear_fc2.bias"
    pico.save(tmp_path / "wider", "llama-attention-bias", hidden_size=2 * one.model.hidden_size)
    two = in_memory.to_megatron(HuggingFaceReader(tmp_path / "wider"))
    found = next(tensor for tensor in compare(one, two).tensors if tensor.name == bias)
    size = one.model.hidden_size
    assert (found.status, found.shapes) == ("shape", f"[{size}] / [{2 * size}]")


def test_a_bias_that_hugging_face_has_no_place_for_counts_unless_it_is_zero(tmp_path):
    pico.save(tmp_path / "hf", "llama-attention-bias")
    hf = HuggingFaceReader(tmp_path / "hf")
    megatron = in_memory.to_megatron(hf)
    assert compare(hf, megatron).equal
    megatron.tensors["decoder.layers.1.mlp.linear_fc2.bias"][3] = 0.5
    differing = [tensor for tensor in compare(hf, megatron).tensors if not tensor.equal]
    assert [(tensor.name, tensor.status) for tensor in differing] == [
        ("decoder.layers.1.mlp.linear_fc2.bias", "only in B")
    ]
    assert [tensor.status for tensor in compare(megatron, hf).tensors if not tensor.equal] == ["only in A"]
    other = in_memory.to_megatron(hf)
    assert [tensor.status for tensor in compare(megatron, other).tensors if not tensor.equal] == ["differs"]
    other.tensors["decoder.layers.1.mlp.linear_fc2.bias"][3] = 0.5
    assert compare(megatron, other).equal
    for value, rounded in ((0.5, False), (0.5 + 2**-20, True)):  # in two dtypes
        wide = other.tensors["decoder.layers.1.mlp.linear_fc2.bias"].float()
        wide[3] = value
        narrow = other.tensors["decoder.layers.1.mlp.linear_fc2.bias"].bfloat16()
        one, two = (
            replace(other, tensors=other.tensors | {"decoder.layers.1.mlp.linear_fc2.bias": each})
            for each in (wide, narrow)
        )
        found = compare(one, two)
        assert (
            found.equal
            and [each.status for each in found.tensors if "linear_fc2.bias" in each.name] == ["rounded"] * rounded
        )


def test_files_of_two_models_that_differ_are_said_not_to_be_compared(source):
    def with_files(**files):
        named = {name.replace("_", "."): data for name, data in files.items()}
        return replace(source_in_memory(source), companions=replace(source.companions, files=named))

    config = source.companions.files["config.json"]
    one = with_files(config_json=config, tokenizer_json=b"{}", vocab_txt=b"a")
    other = with_files(config_json=config, tokenizer_json=b"[]", vocab_txt=b"a", merges_txt=b"b")
    for b, what in ((one, []), (other, ["tokenizer.json, merges.txt"]), (with_files(), [])):
        assert [each.what for each in compare(one, b).not_compared if each.topic == "files"] == what


def test_the_sign_of_zero_is_a_difference(source):
    a, b = in_memory.to_megatron(source), in_memory.to_megatron(source)
    a.tensors["decoder.final_layernorm.weight"][0], b.tensors["decoder.final_layernorm.weight"][0] = 0.0, -0.0
    found = compare(a, b)
    count = len(found.tensors)
    assert not found.equal
    assert verdict(found) == f"Not the same: 1 of {count} tensors (1 in the signs of zeros alone)."

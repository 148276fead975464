"""What `verify` says of scales: fixed ones against what was recorded, those of weights against what they lose."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fp8_directories
import in_memory
import matrix
import pico
import pytest
import torch
from checkpoint_mutations import cache_scales
from click.testing import CliRunner
from conversions import run
from safetensors.torch import load_file, save_file
from soaking import few, first, in_soak

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.hf_directory.encodings_file import QUANT_CONFIG
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.cli import main
from precisionctl.codes import numerics
from precisionctl.codes.elements import E4M3
from precisionctl.dtypes import DType
from precisionctl.export.weight_encodings import weight_encodings
from precisionctl.fp8 import delayed_scaling, sidecar
from precisionctl.fp8.state import Fp8State, Fp8States, RoleState
from precisionctl.reports.verify import tables
from precisionctl.verify.compare import Comparison, compare
from precisionctl.verify.encodings import compare_encodings
from precisionctl.verify.losses import LOWEST_DB, Losses

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.0.mlp.down_proj"
OTHER = "model.layers.1.mlp.down_proj"
K, V = "model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with recorded state, of caches too."""
    directory = tmp_path_factory.mktemp("scales") / "hf"
    pico.save(directory, dtype=torch.bfloat16, **matrix.sizes("llama-3", "block"))
    states = in_memory.recorded(HuggingFaceReader(directory))
    caches = {
        f"decoder.layers.{layer}.self_attention.core_attention": Fp8State(
            {role: RoleState(torch.tensor(448.0 / amax), torch.tensor([0.0, 0.0, 0.0, amax]))}  # type: ignore[dict-item]
            | {"v": RoleState(torch.tensor(448.0), torch.tensor([0.0, 0.0, 1.0 + layer, 0.5]))}
        )
        for layer, role, amax in ((0, "k", 5.0), (1, "k", 7.0))
    }
    sidecar.write(directory / sidecar.RELATIVE, replace(states, modules={**states.modules, **caches}))
    return directory


@pytest.fixture(scope="module")
def static(source: Path) -> Path:
    return export(source, source.with_name("static"), "static", "--kv-cache", "fp8")


def export(source: Path, to: Path, scheme: str, *more: str) -> Path:
    arguments = ["export-inference", str(source), str(to), "--target", "vllm", "--scheme", scheme, *more]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return to


def changed(directory: Path, to: Path, change: Callable[[Tensors], object]) -> Path:
    shutil.copytree(directory, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def compared(a: Path, b: Path, **options: Fp8States) -> Comparison:
    return compare(open_checkpoint(a), open_checkpoint(b), **options)  # type: ignore[arg-type]


def swapped(one: str, other: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({one: tensors[other], other: tensors[one]})


CHANGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "k and v swapped": (swapped(K, V), "k scale of model.layers.0.self_attn"),
    "keys of two layers swapped": (swapped(K, K.replace("0", "1")), "k scale of model.layers.0.self_attn"),
    "k a thousandth": (lambda tensors: tensors[K].mul_(0.001), "k scale"),
    "an input a hundredth": (lambda tensors: tensors[f"{DOWN}.input_scale"].mul_(0.01), f"input scale of {DOWN}"),
    "inputs swapped": (swapped(f"{DOWN}.input_scale", f"{OTHER}.input_scale"), f"input scale of {DOWN}"),
    "an input's lowest bit": (
        lambda tensors: tensors[f"{DOWN}.input_scale"].view(torch.int32).add_(1),
        f"input scale of {DOWN}",
    ),
}


def test_fixed_scales_and_the_histories_that_they_came_from_are_the_same(source: Path, static: Path) -> None:
    assert compared(source, static).equal and compared(static, source).equal


@pytest.mark.parametrize("case", few(CHANGES, "k and v swapped", "inputs swapped", "an input's lowest bit"))
def test_fixed_scales_are_held_against_the_histories_that_they_came_from(
    source: Path, static: Path, tmp_path: Path, case: str
) -> None:
    change, named = CHANGES[case]
    other = changed(static, tmp_path / "other", change)
    for found in (compared(source, other), compared(other, source), compared(static, other)):
        assert not found.equal and any(named in line for line in found.settings), found.settings


def test_scales_are_rounded_up_to_bf16_all_or_none(static: Path, tmp_path: Path) -> None:
    """A number of BF16 beside others is itself alone."""
    name = f"{DOWN}.input_scale"
    fixed = [
        key for key in load_file(static / "model.safetensors") if key.endswith((".input_scale", ".k_scale", ".v_scale"))
    ]
    one = changed(static, tmp_path / "one", lambda t: t.update({name: numerics.rounded_up(t[name], "BF16")}))
    every = changed(
        static, tmp_path / "every", lambda t: t.update({key: numerics.rounded_up(t[key], "BF16") for key in fixed})
    )
    (line,) = compared(static, one).settings
    assert line.startswith(f"input scale of {DOWN}.weight")
    assert compared(static, every).equal and compared(every, static).equal


def test_scales_that_one_directory_of_codes_lacks_are_a_difference(static: Path, tmp_path: Path) -> None:
    other = changed(static, tmp_path / "other", lambda tensors: (tensors.pop(K), tensors.pop(V)))
    (line,) = compared(static, other).settings
    assert line == "only A has the k scale of model.layers.0.self_attn, v scale of model.layers.0.self_attn"


def test_scales_that_nothing_explains_are_named_as_not_compared(source: Path, static: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "bare", ignore=shutil.ignore_patterns("precisionctl"))
    found = compared(tmp_path / "bare", static)
    (left_out,) = [each for each in found.not_compared if each.topic == "fixed scales"]
    assert found.equal and "and 15 more" in left_out.what  # 14 inputs, 4 of caches
    shown = [cell for table in tables(found) for row in table.rows for cell in row]
    assert left_out.what in shown and left_out.why in shown


def test_a_file_of_state_stands_for_the_checkpoints_own(source: Path, static: Path, tmp_path: Path) -> None:
    """As in an export from that file, which counts more than what the checkpoint recorded."""
    states = sidecar.read(source / sidecar.RELATIVE)
    name = "decoder.layers.0.mlp.linear_fc2"
    amaxes = torch.tensor([9.0])
    fresh = {**states.modules[name].roles, "input": delayed_scaling.after_one_update(amaxes[0], "input", states.recipe)}
    file = tmp_path / "state.safetensors"
    sidecar.write(file, replace(states, modules={**states.modules, name: Fp8State(fresh)}))
    other = changed(static, tmp_path / "other", lambda t: t.update({f"{DOWN}.input_scale": amaxes / 448}))
    assert not compared(source, other).equal
    assert CliRunner().invoke(main, ["verify", str(source), str(other), "--fp8-state", str(file)]).exit_code == 0
    assert CliRunner().invoke(main, ["verify", str(source), str(static), "--fp8-state", str(file)]).exit_code == 1
    assert CliRunner().invoke(main, ["verify", str(source), "--fp8", "--fp8-state", str(file)]).exit_code == 2


def test_fixed_and_dynamic_inputs_are_two_functions_of_the_same_codes(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "static", "fp8-tensor-vllm", num_hidden_layers=1)
    other = changed(
        tmp_path / "static",
        tmp_path / "dynamic",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("input_scale")],
    )
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"]["activation_scheme"] = "dynamic"
    (other / "config.json").write_text(json.dumps(config))
    lines = compared(tmp_path / "static", other).settings
    assert any("activation_scheme is 'static' in A, 'dynamic' in B" in line for line in lines)
    assert any(line.startswith("only A has the input scale of") for line in lines)


def test_scales_of_former_codes_are_compared_where_the_values_are(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "codes", "compressed-channel", num_hidden_layers=1)
    file = tmp_path / "codes" / "model.safetensors"
    save_file(load_file(file) | cache_scales(1), file, metadata={"format": "pt"})
    run(tmp_path / "codes", tmp_path / "values", "hf", "bf16")
    run(tmp_path / "codes", tmp_path / "megatron", "megatron", "bf16")
    assert compared(tmp_path / "values", tmp_path / "megatron").equal
    assert compared(tmp_path / "codes", tmp_path / "megatron").equal
    (path,) = (tmp_path / "megatron").rglob("precisionctl/encodings.safetensors")
    path.unlink()
    left_out = compared(tmp_path / "values", tmp_path / "megatron").not_compared
    assert any(each.topic == "former encoding" for each in left_out)


def test_a_scale_recorded_since_explains_one_of_codes_and_no_other_of_former_codes(tmp_path: Path) -> None:
    """Values that were codes, whose state went on in one module, against the codes that they become again."""
    fp8_directories.make(tmp_path / "fp8", "modelopt-tensor", num_hidden_layers=1)
    run(tmp_path / "fp8", tmp_path / "values", "hf", "bf16")
    shutil.copytree(tmp_path / "values", tmp_path / "trained")
    states = sidecar.read(tmp_path / "trained" / sidecar.RELATIVE)
    module = "decoder.layers.0.mlp.linear_fc2"
    states.modules[module].roles["input"].amax_history[-1] = 7.0
    only = replace(states, modules={module: states.modules[module]})
    sidecar.write(tmp_path / "trained" / sidecar.RELATIVE, only)
    run(tmp_path / "trained", tmp_path / "again", "hf", "fp8")
    assert compared(tmp_path / "trained", tmp_path / "again").equal
    assert compared(tmp_path / "again", tmp_path / "trained").equal
    assert not compared(tmp_path / "fp8", tmp_path / "again").equal
    (line,) = compared(tmp_path / "values", tmp_path / "again").settings
    assert line.startswith(f"input scale of {DOWN}.weight is ")


def test_former_scales_that_follow_from_the_state_beside_codes_clear_no_scale_of_the_codes(tmp_path: Path) -> None:
    """Values that were codes, against codes of another scale beside the state that the values came with."""
    fp8_directories.make(tmp_path / "fp8", "modelopt-tensor", num_hidden_layers=1)
    run(tmp_path / "fp8", tmp_path / "values", "hf", "bf16")
    run(tmp_path / "values", tmp_path / "again", "hf", "fp8")
    assert open_checkpoint(tmp_path / "again").fp8 is not None
    other = changed(tmp_path / "again", tmp_path / "other", lambda t: t[f"{DOWN}.input_scale"].mul_(100))
    for a, b in (("values", other), (other, "values")):
        (line,) = compared(tmp_path / a, tmp_path / b).settings
        assert line.startswith(f"input scale of {DOWN}.weight is ")


@pytest.mark.parametrize("family", ["qwen3-moe", *in_soak("deepseek-v3")])
def test_experts_get_one_input_scale_on_the_way_back_to_codes_as_in_exports(tmp_path: Path, family: str) -> None:
    """As engines take the largest of a layer's; and the file that it came from explains it, and the result's state."""
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **matrix.sizes(family, "block"))
    reader = HuggingFaceReader(tmp_path / "hf")
    for seed in (0, 1):
        sidecar.write(tmp_path / f"{seed}.safetensors", in_memory.recorded(reader, seed=seed))
    files = [["--fp8-state", str(tmp_path / f"{seed}.safetensors")] for seed in (0, 1)]
    static = export(tmp_path / "hf", tmp_path / "static", "static", *files[0])
    run(static, tmp_path / "values", "hf", "bf16")
    cli = CliRunner()
    arguments = ["convert", str(tmp_path / "values"), str(tmp_path / "again"), "--to", "hf", "--precision", "fp8"]
    result = cli.invoke(main, [*arguments, *files[1]])
    assert result.exit_code == 0, result.output
    anew = load_file(export(tmp_path / "hf", tmp_path / "anew", "static", *files[1]) / "model.safetensors")
    made = load_file(tmp_path / "again" / "model.safetensors")
    scales = [name for name in anew if name.endswith(".input_scale")]
    assert scales and all(torch.equal(made[name], anew[name]) for name in scales)
    again, values = str(tmp_path / "again"), str(tmp_path / "values")
    for a, b in ((values, again), (again, values)):
        result = cli.invoke(main, ["verify", a, b, *files[1]])
        assert result.exit_code == 0, result.output
        assert cli.invoke(main, ["verify", a, b, *files[0]]).exit_code == 1
    name = next(name for name in scales if ".experts.1." in name)
    other = changed(tmp_path / "again", tmp_path / "other", lambda tensors: tensors[name].mul_(2))
    assert cli.invoke(main, ["verify", values, str(other), *files[1]]).exit_code == 1


def test_one_scale_of_a_cache_is_not_one_for_each_head(static: Path, tmp_path: Path) -> None:
    other = changed(static, tmp_path / "other", lambda tensors: tensors.update({K: tensors[K].expand(4).clone()}))
    for a, b in ((static, other), (other, static)):
        (line,) = compared(a, b).settings
        assert line.startswith("k scale of model.layers.0.self_attn is ") and "4 numbers" in line


def test_how_values_were_coded_is_compared_and_how_codes_are_only_where_they_decode_otherwise(tmp_path: Path) -> None:
    made = fp8_directories.make(tmp_path / "codes", "modelopt-channel", num_hidden_layers=1)
    run(tmp_path / "codes", tmp_path / "values", "hf", "bf16")
    values = open_checkpoint(tmp_path / "values")
    had = weight_encodings(values)
    assert had is not None

    def against(**changes: Any) -> list[str]:
        lines, left_out = compare_encodings(values, values, had, replace(had, **changes))
        back, also = compare_encodings(values, values, replace(had, **changes), had)
        assert (len(lines), len(left_out)) == (len(back), len(also))
        return [*lines, *(f"-{each.topic}: {each.what}" for each in left_out)]

    name = f"{DOWN}.weight"
    assert against() == []
    rest = {each: spec for each, spec in had.weights.items() if each != name}
    assert against(weights=rest) == [f"{name}: only A knows how it was coded"]
    stored = {each: read_tensor(had.stored, each) for each in had.stored.specs}
    stored[f"{DOWN}.weight_scale"] = stored[f"{DOWN}.weight_scale"].clone()
    stored[f"{DOWN}.weight_scale"][-1] *= 2
    other = in_memory.InMemory(values.model, "hf", stored)
    assert against(stored=other) == [f"{name}: it was coded with other scales in A than in B"]
    spec = replace(had.weights[name], dtype=DType.float8_e5m2)
    assert against(weights={**had.weights, name: spec}) == [f"{name}: it was coded with other scales in A than in B"]
    had = replace(had, files={QUANT_CONFIG: b'{"quantization": {"quant_algo": "FP8"}}'})
    assert against() == []
    assert against(files={QUANT_CONFIG: b'{"quantization": {"quant_algo": "NVFP4"}}'}) == [
        f"{QUANT_CONFIG} quantization.quant_algo is 'FP8' in A, 'NVFP4' in B"
    ]
    assert against(files={}) == [f"-quantization_config: {QUANT_CONFIG}, which only one side has"]

    zeros = torch.zeros_like(made[name].codes.view(torch.uint8)).view(torch.float8_e4m3fn)
    one = changed(tmp_path / "codes", tmp_path / "one", lambda tensors: tensors.update({name: zeros}))
    double = changed(one, tmp_path / "double", lambda tensors: tensors[f"{DOWN}.weight_scale"].mul_(2))
    assert compared(one, double).equal


SCALES = {"a million times too large": 1e6, "a million times too small": 1e-6, "a thousand times too small": 1e-3}


@pytest.mark.parametrize("factor", first(2, SCALES.values()), ids=SCALES)
@pytest.mark.parametrize("scheme", ["block", *in_soak("static", "dynamic", "mxfp8")])
def test_codes_that_do_not_stand_for_the_values_are_lost_though_they_are_their_encoding(
    source: Path, tmp_path: Path, scheme: str, factor: float
) -> None:
    """One scale of a weight is broken, and its codes are made by it."""
    made, name = export(source, tmp_path / "out", scheme), f"{DOWN}.weight"
    tensors = load_file(made / "model.safetensors")
    scale_name = next(each for each in tensors if each.startswith(f"{DOWN}.weight_scale"))
    if scheme == "mxfp8":
        tensors[scale_name].view(-1)[0] += 20 if factor > 1 else -20
    else:
        tensors[scale_name].view(-1)[0] *= factor
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    values = read_tensor(HuggingFaceReader(source), name)
    tensors[name] = HuggingFaceReader(made).encodings[name].encode_rows(values, 0)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    found = compared(source, made)
    (lost,) = [tensor for tensor in found.tensors if tensor.status == "lost"]
    assert lost.name == name and not found.equal and "SQNR under 10 dB" in lost.remark
    result = CliRunner().invoke(main, ["verify", str(source), str(made)])
    assert result.exit_code == 1 and "Not the same" in result.output


def test_one_outlier_is_told_and_is_no_difference(tmp_path: Path) -> None:
    """Under one scale it sends nearly all other values to zero, and is most of the signal."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    name = f"{DOWN}.weight"
    changed(tmp_path / "hf", tmp_path / "outlier", lambda tensors: tensors[name].view(-1)[7].fill_(3e4))
    reader = HuggingFaceReader(tmp_path / "outlier")
    sidecar.write(tmp_path / "outlier" / sidecar.RELATIVE, in_memory.recorded(reader))
    found = compared(tmp_path / "outlier", export(tmp_path / "outlier", tmp_path / "out", "static"))
    (told,) = [tensor for tensor in found.tensors if tensor.remark]
    assert found.equal and told.name == name and "the largest value is 3e+04" in told.remark
    assert any(told.remark in row for table in tables(found) for row in table.rows)


def test_a_nan_hides_no_loss_of_the_other_values(tmp_path: Path) -> None:
    """Gate and up share a scale: under that of an outlier of one, nothing is left of the other, which has a NaN."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))

    def broken(tensors: Tensors) -> None:
        tensors[up].view(-1)[7] = 3e5
        tensors[gate].view(-1)[5] = torch.nan

    changed(tmp_path / "hf", tmp_path / "broken", broken)
    state = tmp_path / "state.safetensors"
    sidecar.write(state, in_memory.recorded(HuggingFaceReader(tmp_path / "hf")))
    made = export(tmp_path / "broken", tmp_path / "out", "static", "--fp8-state", str(state))
    left = load_file(made / "model.safetensors")[gate].float().view(-1)
    assert left.isnan().nonzero().tolist() == [[5]] and int((left != 0).sum()) == 1
    for a, b in ((tmp_path / "broken", made), (made, tmp_path / "broken")):
        found = compared(a, b)
        (lost,) = [tensor for tensor in found.tensors if tensor.status == "lost"]
        assert lost.name == gate and not found.equal and lost.sqnr_db is not None and lost.sqnr_db <= 0


@pytest.mark.parametrize("outlier", [1.0, 1e3, 1e6, 1e9])
@pytest.mark.parametrize("rounding", ["FP32", "BF16", "powers of 2"])
def test_no_scale_that_an_amax_gives_falls_below_the_floor(outlier: float, rounding: numerics.ScaleRounding) -> None:
    """Whatever the values: the arithmetic in verify/losses.py, tried."""
    generator = torch.Generator().manual_seed(0)
    for values in (
        torch.randn(256, 256, generator=generator),
        torch.randn(256, 256, generator=generator).exp(),
        torch.full((256, 256), 17 / 16 + 1e-4),
        torch.rand(256, 256, generator=generator) ** 40,
    ):
        values = values.clone()
        values[3, 5] = outlier
        scale = numerics.rounded_up(numerics.scale_inv(values.abs().max(), E4M3), rounding)
        codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
        numerics.encode_by_scale_inv(values, scale, codes, numerics.scratch_for(values))
        losses = Losses(256, 256, (256, 256))
        losses.see(0, codes, values, codes.float() * scale)
        assert not losses.why and losses.total.sqnr > 24 > LOWEST_DB + 10


@pytest.mark.parametrize("pieces", [[5, 3, 8, 4], [20], [1] * 20])
def test_blocks_are_judged_whole_however_rows_come(pieces: list[int]) -> None:
    """20 rows in blocks of 8 x 8: the last row of blocks has four, and the last column two."""
    values = torch.rand(20, 26, generator=torch.Generator().manual_seed(0)) + 0.5
    decoded = values.clone()
    decoded[8:16, 8:16] = 0
    decoded[16:, 24:] = 0
    decoded[0, 0] = 0  # 1/64 of a block
    losses, row = Losses(20, 26, (8, 8)), 0
    for rows in pieces:
        here = slice(row, row + rows)
        losses.see(row, decoded[here].to(torch.float8_e4m3fn), values[here], decoded[here])
        row += rows
    assert (losses.lost, losses.blocks) == (2, 12)
    assert losses.total.underflows == 64 + 8 + 1 and losses.total.elements == 520


HALF_A_CODE = 2.0**-10 / (448 * 512)
"""What the smallest code of E4M3, 2^-9, is worth under the smallest scale that vLLM makes, halved: less than that
becomes zero under any scale."""


@pytest.mark.parametrize(("value", "lost"), [(1e-9, False), (HALF_A_CODE, False), (2 * HALF_A_CODE, True)])
def test_a_row_of_next_to_nothing_may_become_zero(value: float, lost: bool) -> None:
    values = torch.ones(2, 64)
    values[1] = value
    losses = Losses(2, 64, (1, 64))
    losses.see(0, torch.zeros(2, 64).to(torch.float8_e4m3fn), values, torch.stack([values[0], torch.zeros(64)]))
    assert bool(losses.why) == lost and losses.lost == lost
    assert losses.remark.startswith("1 of 2 scales lose negligible values") == (not lost)


@pytest.mark.parametrize("value", [1e-9, 1e-30])
@pytest.mark.parametrize("rows", [1, 64])
def test_a_tensor_of_next_to_nothing_may_not_become_zero_as_a_whole(value: float, rows: int) -> None:
    """Whether its rows share a scale or not, and though FP32 has no square of its values."""
    losses = Losses(64, 8, (rows, 8))
    for row in (0, 32):
        zeros = torch.zeros(32, 8)
        losses.see(row, zeros.to(torch.float8_e4m3fn), torch.full((32, 8), value), zeros)
    assert losses.why.endswith("100.0% of values became zero, 0.0% were beyond the largest code")


def test_squares_that_fp32_has_not_hide_no_loss() -> None:
    values = torch.full((2, 64), 1e30)
    losses = Losses(2, 64, (1, 64))
    losses.see(0, torch.full((2, 64), 448.0).to(torch.float8_e4m3fn), values, values / torch.tensor([[1.0], [1e3]]))
    assert losses.lost == 1 and "1 of 2 scales lose" in losses.why


def test_zeros_have_nothing_to_lose() -> None:
    losses, zeros = Losses(2, 64, (1, 64)), torch.zeros(2, 64)
    losses.see(0, zeros.to(torch.float8_e4m3fn), zeros, zeros)
    assert not losses.why and not losses.remark

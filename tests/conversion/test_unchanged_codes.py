"""Codes that are passed on, and what is said or refused where they cannot be."""

from dataclasses import replace
from pathlib import Path

import four_bit_directories
import fp8_directories
import pico
import pytest
import torch
from conversions import assert_same_tensors, carry_out, run, tree
from safetensors.torch import load_file, save_file
from soaking import in_soak

from precisionctl.checkpoints.chunks import read_values
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.codes.elements import E4M3
from precisionctl.codes.encoding import Encoding
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.conversion.unchanged_codes import encodings_if_unchanged
from precisionctl.dtypes import DType
from precisionctl.engines.base import engine_named
from precisionctl.errors import BROKEN_WEIGHTS, PrecisionError
from precisionctl.fp8 import sidecar
from precisionctl.param import TensorSpec
from precisionctl.planning.plan import JobCodes
from precisionctl.planning.segments import Segment
from precisionctl.quant_methods.base import Scheme
from precisionctl.quant_methods.scales import Scales
from precisionctl.verify.engine_rules import check

WHOLE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
UP = "model.layers.0.mlp.up_proj.weight"


def export(source: Path, out: Path, scheme: str | None = None, **settings: object) -> dict[str, torch.Tensor]:
    work = plan_command(Request.export(source, out, "vllm", scheme, **settings))  # type: ignore[arg-type]
    execute(work, workers=1, verify=True)
    return load_file(out / "model.safetensors")


def change(directory: Path, name: str, values: torch.Tensor | None) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    if values is None:
        del tensors[name]
    else:
        tensors[name] = values
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("spelling", ["fp8-block", "compressed-channel", *in_soak("fp8-ue8m0", "compressed-tensor")])
def test_codes_that_are_wanted_are_copied_and_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    """NaN among them, of either sign, and both zeros."""
    fp8_directories.make(tmp_path / "fp8", spelling, **WHOLE)
    before = load_file(tmp_path / "fp8" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    before[name].view(torch.uint8)[0, :4] = torch.tensor([0x7F, 0xFF, 0x00, 0x80], dtype=torch.uint8)
    change(tmp_path / "fp8", name, before[name])
    made_anew = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"} if spelling == "compressed-tensor" else set()

    def unasked(*_: object) -> None:
        raise AssertionError("a code was looked at")

    if not made_anew:  # a fused group shares its scale, and these have several
        monkeypatch.setattr(Encoding, "decode_rows", unasked)
        monkeypatch.setattr(Encoding, "encode_rows", unasked)
    after = export(tmp_path / "fp8", tmp_path / "out")
    codes = [name for name, values in before.items() if values.dtype == torch.float8_e4m3fn]
    kept = [name for name in codes if name.split(".")[-2] not in made_anew]
    assert len(kept) == (4 if made_anew else 14)
    for name in kept:
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name


@pytest.mark.parametrize(
    ("stored", "former", "copied"),
    [(0.5, 0.5, True), (0.5, 0.25, False), (2.0**-140, 2.0**-140, True), (0.0, 0.0, False), (2e38, 2e38, False)],
)
def test_codes_are_copied_only_under_the_scale_that_is_to_be_used_and_of_which_they_are_values(
    stored: float, former: float, copied: bool
) -> None:
    """The largest code, 448, of the last one is infinity. A smaller scale than any normal number costs nothing, as no
    code is decoded."""
    scales, size = Scales("w_scale", None, (2, 4)), TensorSpec((2, 4), DType.float8_e4m3fn)
    found = encodings_if_unchanged(
        JobCodes({"w": scales}, {}),
        [Segment("w", 0, "w", 0, 2)],
        {"w": Encoding(E4M3, torch.tensor([[stored]]), (2, 4))},
        {"w": Encoding(E4M3, torch.tensor([[former]]), (2, 4))},
        {"w": size, "w_scale": TensorSpec((), DType.float32)},
    )
    assert (found is not None) == copied


def test_powers_of_two_are_kept_and_new_blocks_get_some(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "fp8-ue8m0", **WHOLE)
    before = load_file(tmp_path / "fp8" / "model.safetensors")
    values = torch.randn(before[UP].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    change(tmp_path / "fp8", UP, values)
    change(tmp_path / "fp8", f"{UP}_scale_inv", None)
    after = export(tmp_path / "fp8", tmp_path / "out", "block")
    quantization = HuggingFaceReader(tmp_path / "out").config["quantization_config"]
    assert quantization["scale_fmt"] == "ue8m0"
    other = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(after[other].view(torch.uint8), before[other].view(torch.uint8))
    assert torch.equal(after[f"{other}_scale_inv"], before[f"{other}_scale_inv"].float())
    amax = values.float().abs().view(3, 128, 2, 128).amax((1, 3))
    assert torch.equal(after[f"{UP}_scale_inv"], torch.exp2(torch.ceil(torch.log2(amax / 448))))


def test_values_that_were_codes_under_powers_of_two_are_again(tmp_path: Path) -> None:
    """A block that was trained in between, too: an engine that is told `scale_fmt` takes no other scales."""
    fp8_directories.make(tmp_path / "fp8", "fp8-ue8m0", **WHOLE)
    run(tmp_path / "fp8", tmp_path / "megatron", "megatron", "fp32")
    run(tmp_path / "megatron", tmp_path / "values", "hf")
    values = torch.randn(load_file(tmp_path / "values/model.safetensors")[UP].shape) / 50
    change(tmp_path / "values", UP, values)
    direct, after = (export(tmp_path / name, tmp_path / f"of_{name}", "block") for name in ("fp8", "values"))
    for name in ("fp8", "values"):
        told = HuggingFaceReader(tmp_path / f"of_{name}").config["quantization_config"]
        assert told["scale_fmt"] == "ue8m0"
    assert {name for name in direct if not torch.equal(direct[name], after[name])} == {UP, f"{UP}_scale_inv"}
    amax = values.abs().view(3, 128, 2, 128).amax((1, 3))
    assert torch.equal(after[f"{UP}_scale_inv"], torch.exp2(torch.ceil(torch.log2(amax / 448))))


@pytest.mark.parametrize("spelling", ["modelopt-mxfp4", *in_soak("quark-mxfp4")])
def test_values_of_mxfp4_are_exact_in_blocks_whether_they_are_codes_or_were(tmp_path: Path, spelling: str) -> None:
    decoded = four_bit_directories.make(tmp_path / "codes", spelling)
    run(tmp_path / "codes", tmp_path / "values", "hf", "bf16")
    for name in ("codes", "values"):
        export(tmp_path / name, tmp_path / f"of_{name}", "block", keep_misfits=True)
    one, other = (tree(tmp_path / f"of_{name}") for name in ("codes", "values"))
    assert one["model.safetensors"] == other["model.safetensors"] and one["config.json"] == other["config.json"]
    found = HuggingFaceReader(tmp_path / "of_values")
    assert found.config["quantization_config"]["scale_fmt"] == "ue8m0"
    coded = found.encodings.keys() & decoded.keys()
    assert coded and all(torch.equal(read_values(found, found.encodings, name), decoded[name]) for name in coded)


def test_other_schemes_say_nothing_of_powers_of_two(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "fp8-ue8m0", **WHOLE)
    export(tmp_path / "fp8", tmp_path / "out", "dynamic")
    assert "scale_fmt" not in HuggingFaceReader(tmp_path / "out").config["quantization_config"]


@pytest.mark.parametrize("scheme", ["dynamic", "block", "mxfp8"])
def test_an_infinite_weight_is_refused_by_its_name(tmp_path: Path, scheme: str) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, **WHOLE)
    weight = load_file(tmp_path / "hf" / "model.safetensors")[UP]
    weight[5, 7] = -torch.inf
    change(tmp_path / "hf", UP, weight)
    with pytest.raises(PrecisionError, match=f"`{UP}` holds an infinite weight.*{BROKEN_WEIGHTS}"):
        export(tmp_path / "hf", tmp_path / "out", scheme)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("by_way_of", ["megatron", *in_soak("nothing")])
def test_a_file_of_state_counts_more_than_fixed_scales_of_codes(tmp_path: Path, by_way_of: str) -> None:
    """Also where those have become state that waits in a sidecar."""
    fp8_directories.make(tmp_path / "fp8", "modelopt-tensor", **WHOLE)
    execute(plan_command(Request(tmp_path / "fp8", tmp_path / "megatron", "megatron")))
    states = sidecar.read(tmp_path / "megatron" / "release" / sidecar.RELATIVE)
    module = "decoder.layers.0.mlp.linear_fc2"
    states.modules[module].roles["input"].amax_history[-1] = 7.0
    given = tmp_path / "given.safetensors"
    only = replace(states, modules={module: states.modules[module]}, producer="a run", iteration=5)
    sidecar.write(given, only)
    source = tmp_path / ("fp8" if by_way_of == "nothing" else "megatron")
    exported = export(source, tmp_path / "out", "static", fp8_state=given)
    told = Request(source, tmp_path / "back", "hf", precision="fp8", fp8_state=given)
    execute(plan_command(told))
    converted = load_file(tmp_path / "back" / "model.safetensors")
    before = load_file(tmp_path / "fp8" / "model.safetensors")
    for stored in (exported, converted):
        assert stored["model.layers.0.mlp.down_proj.input_scale"].item() == torch.tensor(7.0).div(448).item()
        other = "model.layers.1.mlp.down_proj.input_scale"
        assert stored[other].item() == pytest.approx(before[other].item(), rel=1e-6), "what the file lacks stays"


@pytest.mark.parametrize(
    ("target", "scheme", "left"),
    [
        ("vllm", "block", "*.experts*"),
        ("vllm", "dynamic", "*.layers.0.*"),  # so that the first experts are values, and others codes
        *in_soak(("sglang", "block", "*.experts*"), ("sglang", "mxfp8", "*.layers.1.*"), ("vllm", "dynamic", "*down*")),
    ],
)
def test_experts_left_as_values_have_the_names_that_the_list_beside_the_codes_has(
    tmp_path: Path, target: str, scheme: Scheme, left: str
) -> None:
    """One by one as engines read them, though the class saves a layer's in one tensor."""
    pico.save(tmp_path / "hf", "gemma4-moe", dtype=torch.bfloat16)
    request = Request.export(tmp_path / "hf", tmp_path / "out", target, scheme, exclude=(left,), keep_misfits=True)
    carry_out(request)
    run(tmp_path / "out", tmp_path / "values", "megatron", precision="bf16")
    for source in ("out", "values"):
        run(tmp_path / source, tmp_path / f"of {source}", "hf", precision="fp8")
        assert_same_tensors(tmp_path / "out", tmp_path / f"of {source}")
        again = open_checkpoint(tmp_path / f"of {source}")
        assert not [each for each in check(again, engine_named(target)) if each.rule.fatal]

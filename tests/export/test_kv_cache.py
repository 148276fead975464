"""Scales of an FP8 KV cache: against what transformers caches, and compressed-tensors' own rounding of it there."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pico
import pytest
import tiny_wrappers
import torch
from cache_states import SHORT, cached_amaxes, with_cache_state
from installed import CACHE, need_loader
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scoring import TOKENS, in_fp32, save
from soaking import in_soak
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from precisionctl.checkpoints.hf_directory import encodings_file
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.engines.base import engine_named, engines
from precisionctl.errors import DamagedCheckpoint, MissingFp8State, PrecisionError, UnmappedTensor
from precisionctl.evaluate import load
from precisionctl.fp8 import sidecar
from precisionctl.fp8.delayed_scaling import after_one_update
from precisionctl.fp8.state import CACHE as FP8_CACHE, Fp8State, Fp8States
from precisionctl.planning.served_model import served
from precisionctl.precision import PRESETS
from precisionctl.verify.engine_rules import check

LAYERS = range(2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kv") / "hf"
    save(
        directory, "llama-3", dtype=torch.bfloat16, hidden_size=128, intermediate_size=128, head_dim=64
    )  # whole blocks
    sidecar.write(directory / sidecar.RELATIVE, with_cache_state(directory))
    return directory


def export(source: Path, out: Path, target: str, scheme: str, **settings: object) -> dict[str, torch.Tensor]:
    wanted = Request.export(source, out, target, scheme, kv_cache="fp8", **settings)  # type: ignore[arg-type]
    execute(plan_command(wanted))
    return load_file(out / "model.safetensors")


BELOW = {"compressed-tensors": ("k_scale", "v_scale"), "modelopt": ("k_proj.k_scale", "v_proj.v_scale")}
BELOW["fp8"] = BELOW["mxfp8"] = BELOW["modelopt"]
ALL = {
    (engine.name, scheme): engine.spells[scheme]
    for engine in engines().values()
    for scheme in engine.spells
    if engine.spells[scheme] in engine.cache
}
OF_EACH_METHOD = {(target, method): (target, scheme) for (target, scheme), method in ALL.items()}.values()
"""A scheme for each spelling of an engine's, which is what its cache's scales are stored by."""


@pytest.mark.parametrize(
    ("target", "scheme"), [*OF_EACH_METHOD, *in_soak(*(each for each in ALL if each not in OF_EACH_METHOD))]
)
def test_each_spelling_has_amax_over_448_and_breaks_no_rule(
    source: Path, tmp_path: Path, target: str, scheme: str
) -> None:
    stored = export(source, tmp_path / "out", target, scheme)
    engine = engines()[target]
    method = engine.spells[scheme]  # type: ignore[index]
    for layer, amaxes in enumerate(cached_amaxes(source)):
        for below, amax in zip(BELOW[method], amaxes, strict=True):
            scale = stored[f"model.layers.{layer}.self_attn.{below}"]
            assert scale.dtype == torch.float32
            assert scale.shape == ((1,) if method == "compressed-tensors" else ())
            if method == "compressed-tensors" and target != "transformers":
                assert scale.item() == (torch.tensor(amax) / 448).item()
            else:  # a reader rounds it to BF16: the next such number
                assert amax / 448 <= scale.item() == scale.bfloat16().item() < amax / 448 * (1 + 2**-7)
    reader = HuggingFaceReader(tmp_path / "out")
    ranks = 1 if scheme in ("block", "w4a16") else 2  # whose blocks are as wide as the model
    layout = served(reader.model, reader.specs, ranks, expert_parallel=False)
    found = engine.check(reader.config, reader.stored.specs, stored.__getitem__, layout)
    said = ["its FP8 cache has scale 1, whatever is stored"] if target == "tensorrt-llm" else []
    assert [finding.rule.text for finding in found if not finding.rule.fatal] == said
    assert not any(finding.rule.fatal for finding in found)
    quantization = reader.config["quantization_config"]
    if method in ("fp8", "mxfp8"):
        assert quantization["kv_cache_quant_algo"] == "FP8"
    else:
        said = quantization["kv_cache_scheme"]
        assert (said["num_bits"], said["type"], said["dynamic"]) == (8, "float", False)
    if method == "modelopt":
        nested = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
        assert nested["kv_cache_quant_algo"] == "FP8"


@pytest.mark.parametrize(
    ("method", "other"),
    [("modelopt", {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}), ("fp8", {"kv_cache_quant_algo": "INT8"})],
)
def test_scales_of_another_cache_than_fp8_round_nothing(
    source: Path, tmp_path: Path, method: str, other: dict[str, Any]
) -> None:
    export(source, tmp_path / "out", *next(pair for pair, spelled in ALL.items() if spelled == method))
    assert load(HuggingFaceReader(tmp_path / "out"))[1].endswith(", FP8 KV cache")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"].keys() >= other.keys()
    config["quantization_config"] |= other
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    model, words = load(HuggingFaceReader(tmp_path / "out"))
    assert "cache" not in words
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_logits_are_those_of_compressed_tensors_own_cache_in_transformers(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(source, tmp_path / "out", "transformers", "dynamic")
    need_loader(tmp_path / "out")
    if CACHE == "cache":  # which compressed-tensors 0.20 does not look for
        attend = LlamaAttention.forward
        monkeypatch.setattr(
            LlamaAttention,
            "forward",
            lambda self, past_key_values=None, cache=None, **rest: attend(self, cache=past_key_values, **rest),
        )
    in_fp32(tmp_path / "out")
    model, precision = load(HuggingFaceReader(tmp_path / "out"))
    assert precision == "FP8 codes with dynamic per-token input scales, FP8 KV cache"
    shutil.copytree(tmp_path / "out", tmp_path / "plain")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["quantization_config"]["kv_cache_scheme"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        ours = model(TOKENS)[..., :250]
        expected, plain = (
            AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(TOKENS).logits
            for name in ("out", "plain")
        )
    rounding = (plain - expected).norm()
    assert rounding > 0.001 * expected.norm()
    assert (ours - expected).norm() < 0.01 * rounding


def test_without_recorded_keys_and_values_it_is_refused_with_the_layer_and_what_to_run(
    source: Path, tmp_path: Path
) -> None:
    shutil.copytree(source, tmp_path / "hf")
    states = sidecar.read(source / sidecar.RELATIVE)
    sidecar.write(
        tmp_path / "hf" / sidecar.RELATIVE, states.without(["decoder.layers.1.self_attention.core_attention"])
    )
    with pytest.raises(MissingFp8State, match=r"model.layers.1.self_attn.*precisionctl calibrate.*--fp8-state"):
        export(tmp_path / "hf", tmp_path / "out", "vllm", "static")
    given = tmp_path / "calibrated.safetensors"
    sidecar.write(given, states)
    stored = export(tmp_path / "hf", tmp_path / "out", "vllm", "dynamic", fp8_state=given)
    assert "model.layers.1.self_attn.v_scale" in stored


def test_a_megatron_checkpoint_keeps_them_and_codes_take_them_along(source: Path, tmp_path: Path) -> None:
    expected = export(source, tmp_path / "first", "vllm", "static")
    execute(plan_command(Request(source, tmp_path / "megatron", "megatron")))
    export(tmp_path / "megatron", tmp_path / "second", "vllm", "static")
    files = [tmp_path / name / "model.safetensors" for name in ("first", "second")]
    assert files[0].read_bytes() == files[1].read_bytes()
    again = export(tmp_path / "first", tmp_path / "third", "tensorrt-llm", "static")
    for layer in LAYERS:
        for kind in "kv":
            stem = f"model.layers.{layer}.self_attn"
            scale = again[f"{stem}.{kind}_proj.{kind}_scale"]
            assert scale.item() == pytest.approx(expected[f"{stem}.{kind}_scale"].item(), rel=2**-7)
    work = plan_command(Request.export(tmp_path / "first", tmp_path / "without", "vllm"))
    assert any("left out; --kv-cache fp8" in note for note in work.notes)
    assert not any("k_scale" in name for name in work.plan.targets)


def test_an_output_projection_in_bf16_does_not_lose_its_layers_scales(source: Path, tmp_path: Path) -> None:
    recipe = replace(PRESETS["fp8-delayed"], keep_bf16=("*.linear_proj",))
    stored = export(source, tmp_path / "out", "vllm", "static", recipe=recipe)
    assert stored["model.layers.0.self_attn.o_proj.weight"].dtype == torch.bfloat16
    assert stored["model.layers.0.self_attn.k_scale"] > 0


STAY = "of a KV cache, beside weights that are no codes, stay behind unless `--kv-cache fp8` takes them along."


def test_scales_beside_weights_that_are_no_codes_stay_behind_with_a_note(tmp_path: Path) -> None:
    """In a directory that says to be FP8, and keeps all weights in BF16."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    file = tmp_path / "hf" / "model.safetensors"
    scales = {f"model.layers.0.self_attn.{kind}_proj.{kind}_scale": torch.ones(1) for kind in "kv"}
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    said = f"2 scales {STAY}"
    assert said in plan_command(Request(tmp_path / "hf", tmp_path / "megatron", "megatron")).notes
    assert said in plan_command(Request.export(tmp_path / "hf", tmp_path / "out", "vllm")).notes


OF_CACHE_ALONE = {
    "compressed-tensors": {
        "format": "dense",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    },
    "modelopt": {"quant_algo": None, "kv_cache_quant_algo": "FP8", "producer": {"name": "modelopt"}},
    "modelopt, flat": {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
}
"""As llm-compressor (its example of an FP8 cache alone) and ModelOpt (of `--qformat none`) write it."""


@pytest.mark.parametrize("said", OF_CACHE_ALONE)
def test_a_directory_whose_cache_alone_is_in_fp8_is_read_as_its_values(tmp_path: Path, said: str) -> None:
    """And its scales go into an export that is asked for them."""
    method = said.partition(",")[0]
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **OF_CACHE_ALONE[said]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    file = tmp_path / "hf" / "model.safetensors"
    values = load_file(file)
    scales = [f"model.layers.{layer}.self_attn.{name}" for layer in LAYERS for name in BELOW[method]]
    save_file(values | {name: torch.full((1,), 0.5) for name in scales}, file, metadata={"format": "pt"})
    work = plan_command(Request(tmp_path / "hf", tmp_path / "out", "hf"))
    assert f"4 scales {STAY}" in work.notes
    execute(work)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == values.keys()
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    reader = open_checkpoint(tmp_path / "hf")
    refusing = {name for name, engine in engines().items() if any(each.rule.fatal for each in check(reader, engine))}
    assert ("vllm" in refusing) == (method == "modelopt")  # of which vLLM wants a `quant_algo`
    assert "transformers" not in refusing  # which passes over methods that it does not know
    assert load(open_checkpoint(tmp_path / "hf"))[1].endswith(", FP8 KV cache")
    exported = export(tmp_path / "hf", tmp_path / "exported", "vllm", "dynamic")
    taken = {name: scale.item() for name, scale in exported.items() if name.endswith(("k_scale", "v_scale"))}
    below = BELOW["compressed-tensors"]
    assert taken == {f"model.layers.{layer}.self_attn.{name}": 0.5 for layer in LAYERS for name in below}


@pytest.mark.parametrize(
    ("family", "target", "scheme", "why"),
    [
        (
            "deepseek-v3",
            "vllm",
            "dynamic",
            r"no use for scales of latents.*get_cache_scale_mapper.*--kv-cache-dtype fp8",
        ),
        ("gpt-neox", "vllm", "dynamic", "under `self_attn`, and this model has `gpt_neox.layers.0.attention`"),
    ],
)
def test_what_no_engine_takes_is_refused(
    tmp_path: Path, family: str, target: str, scheme: str, why: str | None
) -> None:
    sizes = {"q_lora_rank": 32, "qk_rope_head_dim": 16} if family == "deepseek-v3" else {}
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **sizes)
    with pytest.raises(PrecisionError, match=why):
        export(tmp_path / "hf", tmp_path / "out", target, scheme)
    assert not (tmp_path / "out").exists()


def test_transformers_does_nothing_with_them_beside_blocks(source: Path, tmp_path: Path) -> None:
    with pytest.raises(PrecisionError, match="ignores scales of a KV cache beside fp8.*compressed-tensors"):
        export(source, tmp_path / "out", "transformers", "block")


def test_a_source_whose_scale_is_no_number_is_refused(source: Path, tmp_path: Path) -> None:
    stored = export(source, tmp_path / "out", "vllm", "dynamic")
    (tmp_path / "out" / sidecar.RELATIVE).unlink(missing_ok=True)
    stored["model.layers.0.self_attn.k_scale"].fill_(torch.nan)
    save_file(stored, tmp_path / "out" / "model.safetensors")
    with pytest.raises(DamagedCheckpoint, match="k_scale holds a scale that is not a positive number"):
        export(tmp_path / "out", tmp_path / "again", "vllm", "dynamic")


@pytest.mark.parametrize("kind", "kv")
def test_half_of_a_caches_scales_are_none(source: Path, tmp_path: Path, kind: str) -> None:
    stored = export(source, tmp_path / "out", "vllm", "dynamic")
    (tmp_path / "out" / sidecar.RELATIVE).unlink(missing_ok=True)
    del stored[f"model.layers.0.self_attn.{kind}_scale"]
    save_file(stored, tmp_path / "out" / "model.safetensors")
    with pytest.raises(MissingFp8State, match="model.layers.0.self_attn"):
        export(tmp_path / "out", tmp_path / "again", "vllm", "dynamic")


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_scales_of_a_layer_that_is_not_there_are_refused_like_any_tensor(source: Path, tmp_path: Path, to: str) -> None:
    """As tensors of the source, and among the encodings that values have beside them."""
    stored = export(source, tmp_path / "out", "vllm", "dynamic")
    execute(plan_command(Request(tmp_path / "out", tmp_path / "values", to)))  # type: ignore[arg-type]
    strange = {f"model.layers.2.self_attn.{kind}_scale": torch.ones(1) for kind in "kv"}
    save_file(stored | strange, tmp_path / "out" / "model.safetensors")
    for precision in ("bf16", "fp8") if to == "hf" else ("bf16",):
        wanted = Request(tmp_path / "out", tmp_path / "again", to, precision=precision)  # type: ignore[arg-type]
        with pytest.raises(
            UnmappedTensor, match=r"2 unexpected\n.*layers\.2\.self_attn\.k_scale\n.*2\.self_attn\.v_scale"
        ):
            plan_command(wanted)
    (file,) = (tmp_path / "values").rglob(encodings_file.RELATIVE.name)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file) | strange, file, metadata)
    with pytest.raises(UnmappedTensor, match="2 unexpected"):
        plan_command(Request(tmp_path / "values", tmp_path / "again", "hf", precision="fp8"))


@pytest.mark.parametrize("kv_cache", ["fp8", None])
def test_two_scales_of_a_cache_that_differ_are_damage(source: Path, tmp_path: Path, kv_cache: str | None) -> None:
    """Under the older name and the newer one, of which one would be taken and the other forgotten."""
    stored = export(source, tmp_path / "out", "vllm", "dynamic")
    attention = "model.layers.0.self_attn"
    older = {f"{attention}.{k}_proj.output_scale": stored[f"{attention}.{k}_scale"].clone() for k in "kv"}
    wanted = Request.export(tmp_path / "out", tmp_path / "again", "vllm", "dynamic", kv_cache=kv_cache)  # type: ignore[arg-type]
    save_file(stored | older, tmp_path / "out" / "model.safetensors")
    plan_command(wanted)
    save_file(stored | {name: 2 * scale for name, scale in older.items()}, tmp_path / "out" / "model.safetensors")
    with pytest.raises(DamagedCheckpoint, match="another scale of the same cache"):
        plan_command(wanted)


@pytest.mark.parametrize("kv_cache", ["fp8", None])
def test_an_export_tells_of_scales_that_are_of_no_cache(source: Path, tmp_path: Path, kv_cache: str | None) -> None:
    """Among the encodings that a Megatron checkpoint keeps: of a layer without attention, say, or of queries."""
    export(source, tmp_path / "out", "vllm", "dynamic")
    execute(plan_command(Request(tmp_path / "out", tmp_path / "m", "megatron")))
    wanted = Request.export(tmp_path / "m", tmp_path / "again", "vllm", "dynamic", kv_cache=kv_cache)  # type: ignore[arg-type]
    assert not any("stay behind, e.g." in note for note in plan_command(wanted).notes)
    (file,) = (tmp_path / "m").rglob(encodings_file.RELATIVE.name)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    names = ("model.layers.0.linear_attn.k_scale", "model.layers.1.self_attn.q_scale")
    save_file(load_file(file) | {name: torch.ones(1) for name in names}, file, metadata)
    told = [note for note in plan_command(wanted).notes if "stay behind, e.g." in note]
    assert told == [
        f"2 scales of the source, of no keys or values that the model caches, stay behind, e.g. '{names[0]}'."
    ]


def test_eight_bits_of_a_cache_need_not_be_said(source: Path, tmp_path: Path) -> None:
    """They are compressed-tensors' default, and vLLM 0.33 (validate_kv_cache_scheme) takes any number of a `float`."""
    stored = export(source, tmp_path / "out", "vllm", "dynamic")
    reader = HuggingFaceReader(tmp_path / "out")
    del reader.config["quantization_config"]["kv_cache_scheme"]["num_bits"]
    assert engines()["vllm"].check(reader.config, reader.stored.specs, stored.__getitem__) == []


BROKEN = {
    "keys' is missing": (lambda q, t: t.pop("model.layers.0.self_attn.k_scale"), "a v_scale without a k_scale", True),
    "values' is missing": (
        lambda q, t: t.pop("model.layers.0.self_attn.v_scale"),
        "no k_scale and v_scale, in 1",
        False,
    ),
    "a strange name": (
        lambda q, t: t.update({"model.layers.0.attention.k_scale": torch.ones(1)}),
        "attention.k_scale: the name of no attention's scale",
        False,
    ),
    "values' scale below the projection of keys": (
        lambda q, t: t.update({"model.layers.0.self_attn.k_proj.v_scale": torch.ones(1)}),
        "k_proj.v_scale: the name of no attention's scale",
        False,
    ),
    "a scale for each head": (
        lambda q, t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(4)}),
        r"shape \[4\], not one scale",
        True,
    ),
    "zero": (lambda q, t: t["model.layers.0.self_attn.k_scale"].zero_(), "a scale of 0; .*positive numbers", True),
    "no strategy is said": (
        lambda q, t: q["kv_cache_scheme"].pop("strategy"),
        "kv_cache_scheme with strategy None",
        True,
    ),
    "nothing says FP8": (lambda q, t: q.pop("kv_cache_scheme"), "nothing says to be FP8", False),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_every_mistake_is_found(source: Path, tmp_path: Path, broken: str) -> None:
    stored = export(source, tmp_path / "out", "vllm", "dynamic")
    config = HuggingFaceReader(tmp_path / "out").config
    change, what, fatal = BROKEN[broken]
    change(config["quantization_config"], stored)  # type: ignore[no-untyped-call]
    save_file(stored, tmp_path / "out" / "model.safetensors")
    specs = HuggingFaceReader(tmp_path / "out").stored.specs
    found = engines()["vllm"].check(config, specs, stored.__getitem__)
    assert any(re.search(what, str(finding)) and finding.rule.fatal is fatal for finding in found), found
    assert fatal or not any(finding.rule.fatal for finding in found)


def test_a_tower_that_attends_and_caches_nothing_has_no_scales_to_miss(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "gemma3")
    reader = open_checkpoint(tmp_path / "hf")
    cached = {role: after_one_update(torch.tensor(3.0), role, SHORT) for role in FP8_CACHE}
    layers = range(reader.model.num_layers)
    modules = {f"decoder.layers.{layer}.self_attention.core_attention": Fp8State(cached) for layer in layers}
    sidecar.write(tmp_path / "state", Fp8States(SHORT, modules))
    settings = {"fp8_state": tmp_path / "state", "keep_misfits": True}
    stored = export(tmp_path / "hf", tmp_path / "out", "vllm", "dynamic", **settings)
    assert any("vision_tower" in name and ".self_attn." in name for name in stored)
    engine = engine_named("vllm")
    assert not check(open_checkpoint(tmp_path / "out"), engine)
    missing = min(name for name in stored if name.endswith(".k_scale"))
    del stored[missing]
    save_file(stored, tmp_path / "out" / "model.safetensors")
    whats = [finding.what for finding in check(open_checkpoint(tmp_path / "out"), engine)]
    assert f"no k_scale and v_scale, in 1 of {len(layers)} layers" in whats


def test_a_cache_that_an_engine_takes_no_notice_of_is_remarked_upon(source: Path, tmp_path: Path) -> None:
    stored = export(source, tmp_path / "out", "vllm", "block")
    reader = HuggingFaceReader(tmp_path / "out")
    found = engines()["transformers"].check(reader.config, reader.stored.specs, stored.__getitem__)
    assert any("knows none but that of compressed-tensors" in str(finding) for finding in found)
    assert not any(finding.rule.fatal for finding in found)


def test_verify_and_readers_pass_over_scales_of_a_cache(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "out", "vllm", "static")
    assert not any("k_scale" in name for name in open_checkpoint(tmp_path / "out").specs)

"""Wrappers: the text model of a model of images goes to Megatron and through training, its towers beside it."""

import json
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import command_line
import pico
import pytest
import repository
import tiny_wrappers
import torch
from any_models import assert_as_tabled, export, load_whole, logits
from conversions import run, tree
from gpt_models import assert_text_is_computed
from safetensors.torch import load_file, save_file
from soaking import few, in_soak
from tiny_wrappers import MISTRAL_4, WRAPPERS, stored, towers
from training import make_text, run_with_kills, settings
from transformers import AutoConfig, AutoModelForImageTextToText, ShieldGemma2ForImageClassification

from precisionctl.architectures.families import architecture_of, from_hf_config, read_model, table_of, to_hf_config
from precisionctl.architectures.param_map import Either
from precisionctl.architectures.wrapped_architecture import wrapped
from precisionctl.architectures.wrappers import NO_WRAPPERS, TEXT_MODELS, WRAPPERS as KNOWN, wrapper_of
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion import worker
from precisionctl.engines.base import engine_named
from precisionctl.errors import (
    DamagedCheckpoint,
    MissingTensor,
    PrecisionError,
    ShapeMismatch,
    UnknownArchitecture,
    UnmappedTensor,
)
from precisionctl.model.model_parts import Wrapper
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import Parallelism
from precisionctl.reports import run as report
from precisionctl.reports.inspect import describe
from precisionctl.trainer.run_plan import dry_run
from precisionctl.verify.engine_rules import check


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def text_and_names(kind: str) -> set[Any]:
    """Wrappers that have these alike differ in their towers alone."""
    of = KNOWN[kind]
    return {WRAPPERS[kind]["model_type"], (of.body, of.head), of.in_memory}


@pytest.mark.parametrize("kind", pico.representing(text_and_names, WRAPPERS, most=10))
def test_the_text_model_computes_what_the_wrapper_computes_of_text(kind: str, tmp_path: Path) -> None:
    theirs = tiny_wrappers.save(tmp_path, kind)
    if kind == "llama4":  # transformers 5.24 has its text model's logits, and fails where it looks for those of images
        theirs = theirs.language_model
    if kind in ("aya_vision", "cohere2_vision"):  # transformers 5.24 does not multiply by it, unlike vLLM's wrappers
        scale = theirs.config.text_config.logit_scale
        theirs.lm_head.register_forward_hook(lambda head, given, out: out * scale)
    if kind.startswith("granite_speech"):  # nor does it divide by this, unlike vLLM's
        divisor = theirs.config.text_config.logits_scaling
        theirs.lm_head.register_forward_hook(lambda head, given, out: out / divisor)
    assert_text_is_computed(theirs, tmp_path)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("mistral3", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("gemma3", {"final_logit_softcapping": 0.5}),
    ],
)
def test_what_the_wrapper_does_not_heed_of_the_text_models_config_is_not_computed(
    kind: str, text: dict[str, Any], tmp_path: Path
) -> None:
    tiny_wrappers.save(tmp_path, kind)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= text
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_text_is_computed(AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32), tmp_path)


IN_MEMORY = ("mistral3", "qwen2_vl", "smolvlm", "voxtral", "hyperclovax_vision_v2")


@pytest.mark.parametrize("kind", [kind for kind in IN_MEMORY if kind in WRAPPERS])
def test_names_in_memory_are_those_that_the_class_has(kind: str, tmp_path: Path) -> None:
    theirs, reader = tiny_wrappers.save(tmp_path, kind), open_checkpoint(tmp_path)
    names = table_of(reader.model).in_memory(reader.specs, reader.model)
    stored_so = {called for name, called in names.items() if name in reader.specs}
    assert stored_so <= theirs.state_dict().keys()
    assert bool(stored_so) == (kind != "smolvlm")  # which is published by them


@pytest.mark.parametrize("place", ["wrapper", "text"])
def test_a_text_model_without_a_causal_mask_has_no_table(place: str, tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path, "mistral3")
    config = json.loads((tmp_path / "config.json").read_text())
    (config if place == "wrapper" else config["text_config"])["is_causal"] = False
    with pytest.raises(UnknownArchitecture, match="is_causal is False"):
        from_hf_config(config)


@pytest.mark.parametrize("kind", few(WRAPPERS, "mistral3", "qwen2_vl", "qwen3_vl_moe", "kimi_k25"))
def test_a_wrapper_comes_back_from_megatron_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    check_there_and_back(kind, tmp_path)


def test_mistral_4_in_the_wrapper_that_it_is_published_in_comes_back_from_megatron(tmp_path: Path) -> None:
    theirs = tiny_wrappers.save(tmp_path / "alone", "mistral3", **MISTRAL_4)
    assert_text_is_computed(theirs, tmp_path / "alone")
    check_there_and_back("mistral3", tmp_path, **MISTRAL_4)


@pytest.mark.parametrize("kind", ["gemma3", *in_soak("mistral3")])
def test_a_wrapper_with_the_names_that_it_has_in_memory_comes_back_from_megatron(kind: str, tmp_path: Path) -> None:
    check_there_and_back(kind, tmp_path, in_memory=True)


def test_prediction_layers_outside_of_the_text_model_are_its_own(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "qwen3_5", dtype=torch.bfloat16)
    published, last = stored(tmp_path / "hf"), "model.language_model.layers.3."
    layer = {name.replace(last, "mtp.layers.0."): tensor for name, tensor in published.items() if last in name}
    norms = {f"mtp.{name}.weight": torch.empty(128) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    made = {"mtp.fc.weight": torch.empty(128, 256)} | norms | layer
    made = {name: torch.randn(tensor.shape).bfloat16() for name, tensor in made.items()}
    save_file(published | made, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor=2, pipeline=2), workers=1)
    run(tmp_path / "megatron", tmp_path / "back", "hf", workers=1)
    assert_same(published | made, stored(tmp_path / "back"))
    assert not [name for name in open_checkpoint(tmp_path / "megatron").specs if name.startswith("towers.mtp")]


@pytest.mark.skipif("hy_v4_vl" not in WRAPPERS, reason="of transformers 5.24")
def test_hunyuan_4_is_read_as_transformers_saves_it_and_written_as_published(tmp_path: Path) -> None:
    """It turns its renamings around, with another result than that of the text model alone."""
    theirs = tiny_wrappers.save(tmp_path / "hf", "hy_v4_vl", dtype=torch.bfloat16)
    published = stored(tmp_path / "hf")
    theirs.save_pretrained(tmp_path / "hf")
    assert published.keys() - stored(tmp_path / "hf").keys() >= {"model.hc_head.hc_head_fn"}
    run(tmp_path / "hf", tmp_path / "m", "megatron", workers=1)
    run(tmp_path / "m", tmp_path / "back", "hf", workers=1)
    assert_same(published, stored(tmp_path / "back"))


@pytest.mark.skipif("exaone4_5" not in WRAPPERS, reason="of transformers 5.23")
def test_exaone_4_5_by_its_first_name_with_prediction_layers_that_travel_like_towers(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "exaone4_5", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["text_config"]["model_type"] = "exaone4_5_text"
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    tensors = stored(tmp_path / "hf") | {"mtp.layers.0.mlp.up_proj.weight": torch.randn(96, 128).bfloat16()}
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor=2))
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert_same(stored(tmp_path / "back"), tensors)


@pytest.mark.skipif("nemotron_h_omni" not in WRAPPERS, reason="of transformers 5.23")
@pytest.mark.parametrize(
    ("model_type", "mtp"),
    [
        ("NemotronH_Super_Omni_Reasoning_V3", "mtp."),
        *in_soak(("nemotron_h_omni", "language_model.mtp."), ("NemotronH_Nano_Omni_Reasoning_V3", "mtp.")),
    ],
)
def test_nemotrons_in_the_words_of_nvidias_code_with_their_prediction_layers(
    model_type: str, mtp: str, tmp_path: Path
) -> None:
    """As Megatron-Bridge's nemotron_omni_bridge.py has their names."""
    tiny_wrappers.save(tmp_path / "hf", "nemotron_h_omni", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    text = config.pop("text_config") | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    config |= {"model_type": model_type, "llm_config": text | {"torch_dtype": "float16"}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    tensors = stored(tmp_path / "hf")
    for block, kind in enumerate(("full_attention", "moe")):
        like = f"language_model.backbone.layers.{text['layers_block_type'].index(kind)}."
        for name in [name for name in tensors if name.startswith(like)]:
            tensors[name.replace(like, f"{mtp}layers.{block}.")] = torch.randn_like(tensors[name])
    for name in ("layers.0.enorm", "layers.0.hnorm", "layers.1.final_layernorm"):
        tensors[f"{mtp}{name}.weight"] = torch.randn(128).bfloat16()
    tensors[f"{mtp}layers.0.eh_proj.weight"] = torch.randn(128, 256).bfloat16()
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor=2), workers=1)
    assert not [name for name in open_checkpoint(tmp_path / "megatron").specs if "towers." in name and "mtp." in name]
    run(tmp_path / "megatron", tmp_path / "back", "hf", workers=1)
    assert_same(tensors, stored(tmp_path / "back"))
    told = json.loads((tmp_path / "back" / "config.json").read_text())
    assert told["llm_config"] == text | {"torch_dtype": "bfloat16"}


@pytest.mark.skipif("deepseek_ocr2" not in WRAPPERS, reason="of transformers 5.24")
def test_deepseek_ocr_in_the_words_of_deepseeks_code_is_the_same_text_model(tmp_path: Path) -> None:
    """Tensors have the names that transformers saves; DeepSeek-VL2, of the same `model_type`, has others."""
    theirs = tiny_wrappers.save(tmp_path / "hf", "deepseek_ocr2", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    text = config.pop("text_config")
    dense = text.pop("mlp_layer_types").index("sparse")
    del text["model_type"]
    no_latents = dict.fromkeys(("kv_lora_rank", "q_lora_rank")) | {"use_mla": False, "first_k_dense_replace": dense}
    no_latents |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0)
    config |= {"model_type": "deepseek_vl_v2", "language_config": text | no_latents}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert_text_is_computed(theirs.float(), tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor=2), workers=1)
    run(tmp_path / "megatron", tmp_path / "back", "hf", workers=1)
    assert_same(stored(tmp_path / "hf"), stored(tmp_path / "back"))
    tensors = {name.replace("model.", "language.model."): each for name, each in stored(tmp_path / "hf").items()}
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    assert isinstance(open_checkpoint(tmp_path / "hf").model, UntabledModel)


@pytest.mark.skipif("glm_ocr" not in WRAPPERS, reason="of transformers 5.23")
def test_the_prediction_layer_of_glm_ocr_travels_like_a_tower(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "glm_ocr", dtype=torch.bfloat16)
    layer = {"model.language_model.layers.16.eh_proj.weight": torch.randn(128, 256).bfloat16()}
    tensors = stored(tmp_path / "hf") | layer
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor=2), workers=1)
    assert {f"towers.{name}" for name in layer} <= open_checkpoint(tmp_path / "megatron").specs.keys()
    run(tmp_path / "megatron", tmp_path / "back", "hf", workers=1)
    assert_same(tensors, stored(tmp_path / "back"))


def check_there_and_back(kind: str, tmp_path: Path, **how: Any) -> None:
    tiny_wrappers.save(tmp_path / "hf", kind, dtype=torch.bfloat16, **how)
    cut = Parallelism(tensor=2, pipeline=2)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=cut, workers=1)
    run(tmp_path / "megatron", tmp_path / "back", "hf", verify=True, workers=1)
    before, after = stored(tmp_path / "hf"), stored(tmp_path / "back")
    assert_same(before, after)
    assert len(towers(before)) > 10
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == json.loads(
        (tmp_path / "back" / "config.json").read_text()
    )


@pytest.mark.parametrize("kind", ["qwen2_5_omni", *in_soak("qwen3_omni_moe")])
def test_what_also_speaks_has_the_text_model_within_what_thinks(kind: str, tmp_path: Path) -> None:
    """In published files, which transformers' class has in one with what speaks."""
    tiny_wrappers.save(tmp_path / "thinker", f"{kind}_thinker", dtype=torch.bfloat16)
    shutil.copytree(tmp_path / "thinker", tmp_path / "hf")
    tensors = {f"thinker.{name}": tensor for name, tensor in stored(tmp_path / "thinker").items()}
    speaks = {
        "talker.model.layers.0.self_attn.q_proj.weight": torch.randn(8, 8).bfloat16(),
        "code2wav.x": torch.ones(3),
    }
    save_file(tensors | speaks, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    thinker = json.loads((tmp_path / "thinker" / "config.json").read_text())
    whole = {"model_type": kind, "thinker_config": thinker, "talker_config": {"text_config": {"hidden_size": 8}}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(whole | {"dtype": "bfloat16"}))
    texts = [replace(open_checkpoint(tmp_path / name).model, wrapper=None) for name in ("hf", "thinker")]
    assert texts[0] == texts[1]
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor=2))
    run(tmp_path / "megatron", tmp_path / "back", "hf", "fp32")
    assert_same(stored(tmp_path / "back"), {name: tensor.float() for name, tensor in (tensors | speaks).items()})
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["dtype"] == config["thinker_config"]["dtype"] == "float32"
    export(tmp_path / "hf", tmp_path / "fp8")
    codes = {name for name, tensor in stored(tmp_path / "fp8").items() if tensor.dtype == torch.float8_e4m3fn}
    assert codes and all(name.startswith("thinker.model.layers.") for name in codes)
    for engine in ("transformers", *(["sglang"] if kind == "qwen3_omni_moe" else [])):
        with pytest.raises(PrecisionError, match=f"computes no codes of a {kind}"):
            export(tmp_path / "hf", tmp_path / "no", target=engine)
    shutil.copytree(tmp_path / "fp8", tmp_path / "as written")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["thinker_config"]["quantization_config"] = config.pop("quantization_config")  # where engines look, too
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    run(tmp_path / "fp8", tmp_path / "values", "hf", "bf16")
    assert stored(tmp_path / "values").keys() == stored(tmp_path / "hf").keys()
    assert "quantization_config" not in json.loads((tmp_path / "values" / "config.json").read_text())["thinker_config"]
    told = command_line.run("verify", tmp_path / "as written", tmp_path / "fp8")
    assert told.exit_code == 0 and "quantization" not in told.output, "it is the same, wherever it stands"


@pytest.mark.skipif("qwen3_asr" not in WRAPPERS, reason="of a later transformers")
def test_qwen3_asr_as_published_is_that_of_transformers_and_transformers_has_no_class_for_it(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "theirs", "qwen3_asr", dtype=torch.bfloat16)
    tiny_wrappers.publish_qwen3_asr(tmp_path / "theirs", tmp_path / "hf")
    texts = [replace(open_checkpoint(tmp_path / name).model, wrapper=None) for name in ("hf", "theirs")]
    assert texts[0] == texts[1]
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor=2))
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert_same(stored(tmp_path / "back"), stored(tmp_path / "hf"))
    export(tmp_path / "hf", tmp_path / "fp8")
    codes = {name for name, tensor in stored(tmp_path / "fp8").items() if tensor.dtype == torch.float8_e4m3fn}
    assert codes and all(name.startswith("thinker.model.layers.") for name in codes)
    for name, fatal in (("hf", True), ("theirs", False)):
        told = command_line.run("verify", tmp_path / name, "--target", "transformers", "--json")
        found = [each["what"] for each in json.loads(told.output)["findings"] if each["rule"]["fatal"]]
        assert found == ["a qwen3_asr with a thinker_config"] * fatal


def test_a_part_for_what_thinks_that_is_no_object_is_not_looked_into() -> None:
    text = tiny_wrappers.TEXT | {"model_type": "qwen2", "rms_norm_eps": 1e-6}
    config = {"model_type": "qwen2_5_omni", "text_config": text}
    assert from_hf_config(config | {"thinker_config": "x"}) == from_hf_config(config)


def test_experts_as_transformers_saves_them_become_those_of_published_files(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "memory", "qwen3_vl_moe", in_memory=True, dtype=torch.bfloat16)
    tiny_wrappers.save(tmp_path / "published", "qwen3_vl_moe", dtype=torch.bfloat16)
    run(tmp_path / "memory", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert_same(stored(tmp_path / "back"), stored(tmp_path / "published"))
    run(tmp_path / "memory", tmp_path / "hf", "hf")
    assert_same(stored(tmp_path / "hf"), stored(tmp_path / "memory"))


@pytest.mark.parametrize(("kind", "in_memory"), [("mistral3", True), ("qwen2_vl", False)])
def test_an_export_is_that_of_a_table_that_is_read_off(
    kind: str, in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_wrappers.save(tmp_path / "source", kind, in_memory=in_memory, dtype=torch.bfloat16)
    assert_as_tabled(tmp_path, "dynamic", monkeypatch)


def test_codes_of_text_and_towers_are_values_in_megatron_and_the_same_codes_again(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "mistral3", dtype=torch.bfloat16)
    export(tmp_path / "hf", tmp_path / "fp8", "dynamic", include=("vision_tower.*",))
    run(tmp_path / "fp8", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "again", "hf", "fp8")
    codes = stored(tmp_path / "fp8")
    assert any(name.startswith("vision_tower.") and name.endswith("scale") for name in codes)
    assert {name: bytes_of(tensor) for name, tensor in codes.items()} == {
        name: bytes_of(tensor) for name, tensor in stored(tmp_path / "again").items()
    }


def test_an_export_says_that_towers_stay_values_unless_some_are_asked_for(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "mistral3", dtype=torch.bfloat16)
    towers = [tensor for name, tensor in stored(tmp_path / "hf").items() if not name.startswith("language_model.")]
    notes = export(tmp_path / "hf", tmp_path / "text").notes
    total = sum(tensor.nbytes for tensor in towers) / 1e6
    assert f"The towers stay values: {len(towers)} tensors, {total:.1f} MB." in notes
    asked = export(tmp_path / "hf", tmp_path / "both", include=("vision_tower.*",)).notes
    assert not any("towers stay" in note for note in asked)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("container", ["torch_dist", "torch"])
def test_a_conversion_that_was_stopped_goes_on_and_ends_with_the_same_bytes(
    container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_wrappers.save(tmp_path / "hf", "llava", dtype=torch.bfloat16)
    options: Any = {"container": container, "parallelism": Parallelism(tensor=2), "workers": 1}
    run(tmp_path / "hf", tmp_path / "whole", "megatron", **options)
    written, write = [], worker.write_rows

    def stop(target: Any, name: str, row: int, values: torch.Tensor) -> None:
        write(target, name, row, values)
        written.append(name)
        if name.startswith("towers.") and len(written) > 40:
            raise KeyboardInterrupt

    monkeypatch.setattr(worker, "write_rows", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "hf", tmp_path / "parts", "megatron", **options)
    assert not (tmp_path / "parts").exists()
    monkeypatch.setattr(worker, "write_rows", write)
    run(tmp_path / "hf", tmp_path / "parts", "megatron", **options)
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")
    run(tmp_path / "parts", tmp_path / "back", "hf")
    assert_same(stored(tmp_path / "hf"), stored(tmp_path / "back"))


def test_towers_of_a_checkpoint_that_megatron_saved_are_taken_from_a_reference(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "qwen3_vl", dtype=torch.bfloat16)
    for name in ("ours", "megatrons"):
        run(tmp_path / "hf", tmp_path / name, "megatron")
    shutil.rmtree(tmp_path / "megatrons" / "release" / "precisionctl")
    for reference in ("hf", "ours"):
        run(tmp_path / "megatrons", tmp_path / f"by {reference}", "hf", reference=tmp_path / reference)
        assert_same(stored(tmp_path / "hf"), stored(tmp_path / f"by {reference}"))
    adapter = shutil.copytree(tmp_path / "hf", tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text("{}")  # of which the weights are a part, or none
    (tmp_path / "hf" / "model.safetensors").unlink()
    for reference in (tmp_path / "hf", adapter):
        with pytest.raises(MissingTensor, match=r"towers of this `qwen3_vl`.*--reference"):
            run(tmp_path / "megatrons", tmp_path / "out", "hf", reference=reference)


def test_a_reference_that_gives_the_tokenizer_leaves_a_checkpoint_its_own_towers(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "gemma3", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    reference = shutil.copytree(tmp_path / "hf", tmp_path / "reference")
    tensors = {name: tensor + 1 for name, tensor in load_file(reference / "model.safetensors").items()}
    save_file(tensors, reference / "model.safetensors", {"format": "pt"})
    (reference / "tokenizer.json").write_text("{}")
    run(tmp_path / "megatron", tmp_path / "back", "hf", reference=reference)
    assert_same(stored(tmp_path / "hf"), stored(tmp_path / "back"))
    assert (tmp_path / "back" / "tokenizer.json").is_file()


def test_towers_in_several_files_need_all_of_them(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "mistral3", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", max_shard_size=300_000)
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert_same(stored(tmp_path / "hf"), stored(tmp_path / "back"))
    shards = sorted((tmp_path / "megatron" / "release" / "precisionctl" / "hf").glob("towers-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(DamagedCheckpoint, match=f"shard {shards[1].name} is missing"):
        open_checkpoint(tmp_path / "megatron")


def test_a_tower_that_is_missing_from_its_file_is_noticed(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "mistral3", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    file = tmp_path / "megatron" / "release" / "precisionctl" / "hf" / "towers.safetensors"
    tensors = load_file(file)
    gone = sorted(tensors)[3]
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, file)
    with pytest.raises(
        DamagedCheckpoint, match=f"says that `{re.escape(gone)}` is in towers.safetensors, but it is not"
    ):
        open_checkpoint(tmp_path / "megatron")


@pytest.mark.parametrize(
    ("kind", "told"),
    [("mistral3", "llava"), ("llava", "mistral3"), ("qwen2_vl", "qwen2_5_vl"), ("idefics2", "smolvlm")],
)
def test_a_config_of_another_wrapper_with_the_same_names_of_text_is_refused(
    kind: str, told: str, tmp_path: Path
) -> None:
    tiny_wrappers.save(tmp_path / "hf", kind, dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    for path in (tmp_path / "hf", tmp_path / "megatron" / "release" / "precisionctl" / "hf"):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"model_type": told}))
    for path, to in ((tmp_path / "hf", "megatron"), (tmp_path / "megatron", "hf")):
        with pytest.raises(UnknownArchitecture, match=f"they are not those of a `{told}`"):
            run(path, tmp_path / "out", to)


def test_inspect_says_what_is_text_and_what_is_tower(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "gemma3", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    there = stored(tmp_path / "hf")
    seen = towers(there)
    for place in ("hf", "megatron"):
        about = describe(open_checkpoint(tmp_path / place))
        assert about["architecture"] == "gemma3" and about["model"]["architecture"] == "gemma3_text"
        assert about["parts"]["towers"] == {
            "tensors": len(seen),
            "parameters": sum(tensor.numel() for tensor in seen.values()),
            "bytes": sum(tensor.nbytes for tensor in seen.values()),
        }
    text = describe(open_checkpoint(tmp_path / "hf"))["parts"]["text"]
    assert text["tensors"] == len(there) - len(seen)


@pytest.mark.parametrize("place", ["hf", "megatron"])
def test_a_dry_run_counts_the_text_model_that_trains_and_says_how_much_is_kept_beside_it(
    tmp_path: Path, place: str
) -> None:
    tiny_wrappers.save(tmp_path / "hf", "gemma3", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    there = stored(tmp_path / "hf")
    beside = sum(tensor.numel() for tensor in towers(there).values())
    trains = sum(tensor.numel() for tensor in there.values()) - beside
    if place == "megatron":  # whose one table of embeddings has 128 rows
        trains += (128 - tiny_wrappers.TEXT["vocab_size"]) * tiny_wrappers.TEXT["hidden_size"]
    data = make_text(tmp_path / "text.txt")
    said = report.dry_run(dry_run(settings(tmp_path / place, data, tmp_path / "run")))
    assert f"Model: {trains:,} parameters; {beside:,} more, of its towers, are kept beside it as they are" in said


@pytest.mark.parametrize("kind", few(WRAPPERS, "qwen2_5_vl"))
def test_a_run_trains_the_text_keeps_the_towers_and_its_result_is_loaded_and_exported(
    kind: str, tmp_path: Path
) -> None:
    taken = {"max_window_layers": 2} if kind == "qwen2_5_vl" else {}  # vLLM takes no windows in some layers alone
    theirs = tiny_wrappers.save(tmp_path / "source", kind, dtype=torch.bfloat16, **taken)
    data = make_text(tmp_path / "text.txt")
    run_with_kills(settings(tmp_path / "source", data, tmp_path / "run", "fp8", train__steps=4), {3})
    run(tmp_path / "run", tmp_path / "back", "hf")
    before, after = stored(tmp_path / "source"), stored(tmp_path / "back")
    assert_same(towers(before), towers(after))
    outputs = ("self_attn.o_proj.weight", "self_attn.out_proj.weight", "mixer.o_proj.weight", "attention.wo.weight")
    trained = [name for name in before.keys() - towers(before) if name.endswith(outputs)]
    assert trained and not any(torch.equal(before[name], after[name]) for name in trained)

    # transformers takes Llama 4's experts for linears, and does not multiply with Hunyuan 4's codes by channel
    scheme = "block" if kind in ("llama4", "hy_v4_vl") else "dynamic"
    export(tmp_path / "run", tmp_path / "codes", scheme, "transformers", keep_misfits=True)
    engine = "transformers" if kind == "muse_spark" else "vllm"  # which loads no codes of it that are written here
    export(tmp_path / "run", tmp_path / "static", "static", engine, keep_misfits=kind == "muse_spark")
    findings = check(open_checkpoint(tmp_path / "static"), engine_named(engine))
    assert all(each.what == f"a {kind}" for each in findings)  # of which it has no class
    assert_same(towers(stored(tmp_path / "static")), towers(before))
    with pytest.raises(PrecisionError, match=f"makes text models, and this is a `{kind}` around one"):
        plan_command(Request.export(tmp_path / "run", tmp_path / "te", "te"))
    if kind == "qianfan_ocr":  # of which transformers 5.24 loads no codes at all: it divides a tensor of the tower
        return
    loader = ShieldGemma2ForImageClassification if kind == "shieldgemma2" else type(theirs)
    values, codes = (load_whole(loader, tmp_path / name) for name in ("back", "codes"))
    if kind == "llama4":  # transformers 5.24 has its text model's logits, and fails where it looks for those of images
        values, codes = values.language_model, codes.language_model
    # routers choose other experts for up to a third of the tokens; states keep the errors of all tokens
    routed = ("qwen3_5_moe", "kimi_k25", "minimax_m3_vl", "minicpmv4_6", "minicpmv4_7", "nemotron_h_omni", "muse_spark")
    least = 0.9 if kind in routed else 0.97
    assert torch.cosine_similarity(logits(values).flatten(), logits(codes).flatten(), dim=0) > least


@pytest.mark.parametrize("kind", [kind for kind in WRAPPERS if WRAPPERS[kind]["model_type"] in TEXT_MODELS])
def test_what_a_text_config_leaves_out_is_what_its_class_takes(kind: str) -> None:
    model_type = WRAPPERS[kind]["model_type"]
    said: dict[str, Any] = {
        "qwen3_vl_moe": {"num_experts": 60},
        "deepseek_ocr2": {"num_experts_per_tok": 6, "mlp_layer_types": ["sparse"] * 32},  # null makes no model
        "minimax_m3_vl": {"partial_rotary_factor": 0.5},  # its class has a rotary_dim of 64, and turns the whole head
    }.get(kind, {})
    text = {"model_type": model_type} | said
    told = AutoConfig.for_model(kind, text_config=dict(text)).to_dict()
    assert told["text_config"]["model_type"] == model_type
    short = told | {"text_config": text}
    ours, theirs = (replace(from_hf_config(config), tied_embeddings=False) for config in (short, told))
    assert ours == theirs


def test_a_flat_config_is_that_of_the_text_model_in_it() -> None:
    flat = {
        "model_type": "qwen2_5_vl",
        **{key: value for key, value in tiny_wrappers.TEXT.items() if key != "head_dim"},
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "use_sliding_window": False,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "vision_config": {},
    }
    theirs = AutoConfig.for_model(**flat).to_dict()
    assert "text_config" in theirs and from_hf_config(flat) == from_hf_config(theirs)
    assert from_hf_config(flat).tied_embeddings


@pytest.mark.skipif("hunyuan_vl" not in WRAPPERS, reason="of transformers 5.24")
def test_a_flat_config_of_hunyuans_has_a_rotary_base_that_a_word_of_its_own_stretches() -> None:
    scaling = {"type": "xdrope", "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0}
    flat = {
        "model_type": "hunyuan_vl",
        **tiny_wrappers.TEXT,
        "attention_head_dim": tiny_wrappers.TEXT["head_dim"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": scaling | {"mscale_all_dim": 1.0, "xdrope_section": [4, 4, 4, 4]},
        "use_qk_norm": True,
        "vision_config": {},
    }
    theirs = AutoConfig.for_model(**flat).to_dict()
    assert theirs["text_config"]["rope_parameters"]["rope_type"] == "dynamic"
    assert from_hf_config(flat) == from_hf_config(theirs)
    assert from_hf_config(flat).rotary_base == pytest.approx(10000 * 1000 ** (32 / 30))


@pytest.mark.parametrize(
    ("said", "head", "tied"),
    [
        ({}, True, False),
        ({}, False, True),
        ({"tie_word_embeddings": True}, True, True),
        ({"tie_word_embeddings": False}, True, False),
        ({"text_config": {"tie_word_embeddings": True}}, False, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, True, False),
        ({"tie_word_embeddings": False}, False, False),
    ],
)
def test_whether_the_head_is_the_embedding_is_told_by_the_config_or_by_the_tensors(
    said: dict[str, Any], head: bool, tied: bool
) -> None:
    config = {"model_type": "mistral3", **said, "text_config": {"model_type": "mistral"} | said.get("text_config", {})}
    names = {"language_model.model.embed_tokens.weight", "multi_modal_projector.patch_merger.merging_layer.weight"}
    names |= {"language_model.lm_head.weight"} if head else set()
    assert read_model(config, "config.json", names).tied_embeddings == tied


@pytest.mark.parametrize("kind", few(WRAPPERS, "llama4", "qwen3_vl"))
def test_results_say_of_a_tied_head_that_it_is_where_transformers_looks(kind: str, tmp_path: Path) -> None:
    model = tiny_wrappers.save(tmp_path / "hf", kind, dtype=torch.bfloat16)
    if not type(model)._tied_weights_keys:
        pytest.skip("its class never ties them")
    tensors = {name: tensor for name, tensor in stored(tmp_path / "hf").items() if not name.endswith("lm_head.weight")}
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for part in (config, config["text_config"]):
        part.pop("tie_word_embeddings", None)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    if to_hf_config(open_checkpoint(tmp_path / "hf").model, "bfloat16").get("tie_word_embeddings") is False:
        pytest.skip("its family has a head of its own")
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    for name in ("hf", "megatron"):
        run(tmp_path / name, tmp_path / f"of {name}", "hf")
        loaded = type(model).from_pretrained(tmp_path / f"of {name}", dtype=torch.bfloat16)
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert command_line.run("verify", tmp_path / "hf", tmp_path / "of megatron").exit_code == 0


def test_a_word_for_a_switch_is_damage_of_the_file_that_it_is_in() -> None:
    config = {"model_type": "mistral3", "tie_word_embeddings": "so", "text_config": {"model_type": "mistral"}}
    with pytest.raises(DamagedCheckpoint, match="tie_word_embeddings") as error:
        read_model(config, "here/config.json")
    assert error.value.where == "here/config.json"


HOSTILE: dict[str, Any] = {
    "a text model of other names": {"model_type": "gpt2"},
    "a text model of no family": {"model_type": "of_tomorrow"},
    "a wrapper": {"model_type": "mistral3", "text_config": {"model_type": "mistral"}},
    "nothing": None,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_wrapper_around_something_else_is_a_model_without_a_table(text: Any) -> None:
    config = {"model_type": "mistral3", "text_config": text}
    assert isinstance(read_model(config, "config.json", ("vision_tower.a",)), UntabledModel)


@pytest.mark.parametrize("kind", NO_WRAPPERS)
def test_a_model_that_is_no_wrapper_says_why_and_sends_nobody_to_its_text_model(kind: str) -> None:
    """Gemma 2 is not what PaliGemma computes: saved alone, it would be trained as another model."""
    found = read_model({"model_type": kind, "text_config": {"model_type": "gemma2"}})
    with pytest.raises(
        UnknownArchitecture, match=re.escape(f"no table for a `{kind}`: {NO_WRAPPERS[kind]}")
    ) as refused:
        _ = found.num_layers
    assert "which has a table" not in str(refused.value) and "docs/any_model.md" in str(refused.value)


def test_the_page_names_those_that_are_no_wrappers_with_why() -> None:
    page = (repository.DOCS / "wrappers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+) \| (.+) \|$", page.rpartition("| `model_type` | why |")[2], re.MULTILINE)
    assert {kind: why for kinds, why in rows for kind in re.findall(r"`([^`]+)`", kinds)} == NO_WRAPPERS


def test_heads_that_transformers_makes_against_the_config_of_a_glm_are_refused_for_their_shapes(tmp_path: Path) -> None:
    """Glm4vTextAttention has heads of hidden_size / num_attention_heads, and turns `head_dim` of their channels; vLLM's
    glm4.py has heads of `head_dim`, and does not load them either."""
    tiny_wrappers.save(tmp_path / "hf", "glm46v", head_dim=16)
    with pytest.raises(ShapeMismatch, match=r"q_proj.weight` is \[128, 128\], the model's sizes say \[64, 128\]"):
        plan_command(Request(tmp_path / "hf", tmp_path / "out", "megatron"))


def test_of_a_family_all_but_names_is_the_wrappers_too() -> None:
    for family in map(architecture_of, ("nemotron_h", "gemma4_text", "qwen2")):
        wrapper = Wrapper("mistral3", "language_model.model.", "language_model.lm_head.")
        kept = {f.name for f in fields(family)} - {"rows", "more_rows", "config", "aliases", "derived"}
        table = wrapped(family, wrapper)
        assert "behind" in kept and all(getattr(table, name) == getattr(family, name) for name in kept)


def test_names_of_a_text_model_come_back_from_every_wrapper() -> None:
    """Those of published files of the text model alone: what GGUF has names for, and `verify` compares with it."""
    for kind, known in KNOWN.items():
        text = WRAPPERS.get(kind, {}).get("model_type") or known.text or "qwen3_5_text"
        family = architecture_of(TEXT_MODELS[text].family if text in TEXT_MODELS else text)
        wrapper = wrapper_of({"model_type": kind}, family)
        in_memory = replace(wrapper, body=known.in_memory[0], head=known.in_memory[1])
        for each in family.rows:
            for row in each.first if isinstance(each, Either) else (each,):
                for name in row.hf:
                    assert name == wrapper.name_alone(wrapper.name_of(name)) != "", (kind, name)
                    assert name == in_memory.name_alone(in_memory.name_of(name)), (kind, name)


@pytest.mark.parametrize("kind", [["llama"], {}, None, 7])
def test_a_text_model_of_a_wrapper_without_a_table_may_have_no_name(kind: Any) -> None:
    config = {"model_type": "foo_vl", "text_config": {"model_type": kind}}
    assert isinstance(read_model(config), UntabledModel)


@pytest.mark.parametrize("text", [7, [], {"model_type": []}, {"model_type": "mistral", "hidden_size": -1}])
def test_a_text_config_that_describes_nothing_is_damage(text: Any) -> None:
    with pytest.raises(DamagedCheckpoint):
        read_model({"model_type": "mistral3", "text_config": text}, "config.json", ())


def test_wrappers_in_wrappers_have_no_depth_that_hurts(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "mistral"}
    for _ in range(900):
        config = {"model_type": "mistral3", "text_config": config}
    assert isinstance(read_model(config), UntabledModel)


def renamed(directory: Path, change: Any) -> None:
    tensors = {change(name): tensor for name, tensor in stored(directory).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_towers_may_have_any_name_that_is_not_the_text_models(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "mistral3", dtype=torch.bfloat16)
    tensors = stored(tmp_path / "hf") | {
        "decoder.layers.0.mlp.linear_fc2.weight": torch.randn(3, 5),
        "towers.vision_tower.ln_pre.weight": torch.randn(3).double(),
        "optimizer.state.exp_avg.x": torch.arange(4),
        "nothing": torch.empty(0, 4),
        "scale": torch.ones(()).half(),
    }
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", "bf16")
    run(tmp_path / "hf", tmp_path / "kept", "megatron")
    run(tmp_path / "kept", tmp_path / "back", "hf", verify=True)
    assert_same(stored(tmp_path / "back"), tensors)


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name.replace("language_model.model.", "model.language_model."),
        lambda name: name.replace("vision_tower.", "model.vision_tower."),
        lambda name: name.replace("language_model.model.", "language_model."),
    ],
)
def test_names_of_two_spellings_are_read_off_and_refused_for_megatron_by_name(change: Any, tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "mistral3", dtype=torch.bfloat16)
    renamed(tmp_path / "hf", change)
    run(tmp_path / "hf", tmp_path / "back", "hf")
    assert_same(stored(tmp_path / "hf"), stored(tmp_path / "back"))
    with pytest.raises(UnknownArchitecture, match="its tensors do not have the names of a `mistral3`"):
        run(tmp_path / "hf", tmp_path / "out", "megatron")


def test_a_text_tensor_among_towers_or_one_too_many_is_refused(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "mistral3", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    beside = tmp_path / "megatron" / "release" / "precisionctl" / "hf" / "towers.safetensors"
    odd = "language_model.model.layers.0.mlp.up_proj.weight"
    save_file(load_file(beside) | {odd: torch.ones(2)}, beside)
    with pytest.raises(UnmappedTensor, match=f"towers.{odd}".replace(".0.", ".*.")):
        run(tmp_path / "megatron", tmp_path / "out", "hf")
    extra = stored(tmp_path / "hf") | {"language_model.model.layers.0.extra.weight": torch.ones(2)}
    save_file(extra, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnmappedTensor, match="layers.*.extra.weight"):
        run(tmp_path / "hf", tmp_path / "out", "megatron")


def test_towers_that_are_not_whole_or_not_values_are_refused(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "mistral3", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    beside = tmp_path / "megatron" / "release" / "precisionctl" / "hf"
    whole = load_file(beside / "towers.safetensors")
    save_file(whole | {"vision_tower.x": torch.ones(4, 4).to(torch.float8_e4m3fn)}, beside / "towers.safetensors")
    with pytest.raises(DamagedCheckpoint, match="the tower `vision_tower.x` is codes"):
        run(tmp_path / "megatron", tmp_path / "out", "hf")
    save_file(whole, beside / "towers.safetensors")
    save_file(whole, beside / "towers-extra.safetensors")
    with pytest.raises(DamagedCheckpoint, match="towers-extra.safetensors is no part of the towers"):
        run(tmp_path / "megatron", tmp_path / "out", "hf")
    (beside / "towers-extra.safetensors").unlink()
    (beside / "towers.safetensors.index.json").unlink()  # older ones have none
    (beside / "towers.safetensors").rename(beside / "towers-00001-of-00002.safetensors")
    with pytest.raises(DamagedCheckpoint, match="1 of 2 files of weights, and no index"):
        run(tmp_path / "megatron", tmp_path / "out", "hf")

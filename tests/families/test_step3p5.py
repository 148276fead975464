"""Step 3.5, and Step 3.7 around it: a published config.json, the rows of gates, prediction layers with output layers of
their own, and the spellings of experts. transformers' text model of Step 3.7 judges what is computed."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf_files
import pico
import pytest
import tiny_wrappers
import torch
import torch.distributed.checkpoint as torch_dcp
import yaml
from any_models import load_whole, logits
from conversions import assert_same_tensors, assert_there_and_back, carry_out, run
from gpt_models import assert_computes_as_transformers
from in_memory import to_megatron
from prediction_layer import add_mtp
from safetensors.torch import load_file, save_file
from soaking import in_soak
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from precisionctl.architectures.families import architecture_of, from_hf_config, to_hf_config
from precisionctl.architectures.megatron.megatron_args import otherwise_in_megatron, to_megatron_args
from precisionctl.checkpoints.gguf.families import FAMILIES, of_llama_cpp
from precisionctl.checkpoints.gguf.head import read_head
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.rotary_tensors import rotary_tensors
from precisionctl.checkpoints.megatron.provider import to_provider
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.commands.request import Request
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, PrecisionError, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.verify.engine_rules import check

if "step3p5" in pico.ABSENT:
    pytest.skip("this transformers has no Step 3.7", allow_module_level=True)

_PERIOD = ["full_attention", *["sliding_attention"] * 3]
FLASH: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "att_impl_type": "GQA",
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 96,
        "num_attention_groups": 8,
        "head_dim": 128,
    },
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "layer_types": _PERIOD * 12,
    "max_position_embeddings": 262144,
    "model_type": "step3p5",
    "moe_intermediate_size": 1280,
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
    "moe_num_experts": 288,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "moe_top_k": 8,
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "num_attention_groups": 8,
    "num_attention_heads": 64,
    "num_hidden_layers": 45,
    "num_nextn_predict_layers": 3,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 131072,
    },
    "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] * 12,
    "share_expert_dim": 1280,
    "sliding_window": 512,
    "swiglu_limits": [0.0] * 43 + [7.0, 7.0] + [0.0] * 3,
    "swiglu_limits_shared": [0.0] * 44 + [16.0] + [0.0] * 3,
    "use_head_wise_attn_gate": True,
    "use_moe": True,
    "use_moe_router_bias": True,
    "use_qk_norm": True,
    "vocab_size": 128896,
    "yarn_only_types": ["full_attention"],
    "zero_centered": True,
}
"""Step-3.5-Flash's as its public sources tell it, without keys that no number depends on."""


def test_a_published_config_describes_what_it_is_written_as_and_199_billion_parameters() -> None:
    model = from_hf_config(FLASH)
    rows = [row for row in architecture_of(model.architecture).spelled({}, model) if row.present.in_layout("hf", model)]
    sizes = (row.count(model) * torch.Size(row.shape(model)).numel() for row in rows)
    assert round(sum(sizes) / 1e9) == 199  # as the Hub counts its files, with prediction layers
    written = to_hf_config(model, "bfloat16")
    assert {key: written.get(key) for key in FLASH} == FLASH
    of_windows = {"rotary_base_local", "global_attention", "swiglu_limits", "moe.swiglu_limits"}
    assert of_windows | {"mtp_dense", "mtp_output_layers"} <= otherwise_in_megatron(model).keys()


_PLAIN = {"rope_parameters": None, "rope_scaling": None}


@pytest.mark.parametrize(
    "said",
    [
        {"swiglu_limits": None, "swiglu_limits_shared": [0.05] * 4, "moe_router_scaling_factor": 1.0},
        *in_soak(
            {"layer_types": ["full_attention"] * 4, "per_layer_config": {}, "rope_theta": 1e5, **_PLAIN},
            {"layer_types": ["sliding_attention"] * 4, "per_layer_config": None, "rope_theta": 1e5, **_PLAIN},
            {"mlp_layer_types": ["sparse", "dense"] * 2},
        ),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_in_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    config = {key: value for key, value in pico.config("step3p5", **said).items() if value is not None}
    assert_computes_as_transformers(config, tmp_path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        *((UnknownArchitecture, {key: False}) for key in ("use_head_wise_attn_gate", "use_qk_norm", "zero_centered")),
        *((UnknownArchitecture, {key: False}) for key in ("use_moe_router_bias", "norm_expert_weight")),
        (UnknownArchitecture, {"moe_router_activation": "softmax"}),
        (UnknownArchitecture, {"attention_bias": True}),
        (UnknownArchitecture, {"gating": "per-element"}),
        (UnknownArchitecture, {"use_rope_layers": [True] * 44 + [False]}),
        (UnknownArchitecture, {"yarn_only_types": ["full_attention", "sliding_attention"]}),
        (UnknownArchitecture, {"query_pre_attn_scalar": 64}),
        (UnknownArchitecture, {"attention_other_setting": {"num_attention_groups": 4}}),
        (UnknownArchitecture, {"attention_other_setting": {"head_dim": 64}}),
        (UnknownArchitecture, {"per_layer_config": {"0": {"num_attention_heads": 8}}}),
        (UnknownArchitecture, {"rope_theta": [5e6, 1e4, 1e4, 2e4] * 12}),
        (UnknownArchitecture, {"partial_rotary_factors": [0.5, 1.0, 0.5, 1.0] * 12}),
        (UnknownArchitecture, {"mtp_layer_types": ["full_attention"] * 3, "layer_types": (_PERIOD * 12)[:45]}),
        (UnknownArchitecture, {"mtp_mlp_layer_types": ["sparse"] * 3}),
        (DamagedCheckpoint, {"mtp_layer_types": 1}),
        (DamagedCheckpoint, {"mtp_mlp_layer_types": 1.5}),
        (DamagedCheckpoint, {"moe_layers_enum": "3,x"}),
        (DamagedCheckpoint, {"moe_layers_enum": "9" * 30}),
        (DamagedCheckpoint, {"partial_rotary_factors": [7.0] * 48}),
        (DamagedCheckpoint, {"partial_rotary_factors": 2**31}),
        (DamagedCheckpoint, {"layer_types": _PERIOD}),
        (DamagedCheckpoint, {"swiglu_limits": [-1.0] * 45}),
        (DamagedCheckpoint, {"swiglu_limits": [7.0] * 44}),
        (DamagedCheckpoint, {"moe_num_experts": 288, "n_routed_experts": 287}),
        (DamagedCheckpoint, {"num_sliding_attention_heads": 64}),
        (DamagedCheckpoint, {"sliding_window": None}),
        (DamagedCheckpoint, {"mlp_layer_types": ["sparse"] * 45}),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_its_name(error: type[Exception], said: dict[str, Any]) -> None:
    with pytest.raises(error, match=next(iter(said))):
        from_hf_config(FLASH | said)


@pytest.mark.parametrize("heads", [32, 48])
def test_heads_are_read_as_transformers_saves_them(heads: int) -> None:
    """Of layers with as many heads as all it says nothing by layer."""
    published = FLASH | {"num_attention_heads": 32, "attention_other_setting": {"num_attention_heads": heads}}
    saved = json.loads(CONFIG_MAPPING["step3p5"](**published).to_json_string())
    assert bool(saved["per_layer_config"]) == (heads != 32)
    assert from_hf_config(saved) == from_hf_config(published)
    with pytest.raises(UnknownArchitecture, match="per_layer_config"):
        from_hf_config(saved | {"per_layer_config": {"1": {"num_attention_heads": 40}}})


def test_both_words_for_rotary_embeddings_say_the_same() -> None:
    kinds = {
        "full_attention": {**FLASH["rope_scaling"], "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }
    assert from_hf_config(FLASH | {"rope_parameters": kinds}) == from_hf_config(FLASH)
    kinds["full_attention"]["rope_theta"] = 4e6
    with pytest.raises(DamagedCheckpoint, match="rope_parameters"):
        from_hf_config(FLASH | {"rope_parameters": kinds})


def published(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """As it is published: with routers and their biases in FP32, and two prediction layers."""
    pico.save(folder, "step3p5", dtype=torch.bfloat16, **changes)
    file = folder / "model.safetensors"
    tensors = {name: tensor.float() if ".moe.gate." in name or "router_bias" in name else tensor
               for name, tensor in load_file(file).items()}  # fmt: skip
    save_file(tensors, file, {"format": "pt"})
    return tensors | add_mtp(folder, torch.bfloat16)


@pytest.mark.parametrize(
    ("parallelism", "container"),
    [(Parallelism(2, 1, expert=2), "torch_dist"), (Parallelism(2), "torch"), *in_soak((Parallelism(1, 2), "torch"))],
    ids=str,
)
def test_a_checkpoint_comes_back_from_any_division(parallelism: Parallelism, container: Any, tmp_path: Path) -> None:
    published(tmp_path / "hf")
    assert_there_and_back(tmp_path / "hf", parallelism=parallelism, container=container)


def test_rows_of_gates_are_behind_those_of_groups_and_parts_of_their_own_in_torch_dist(tmp_path: Path) -> None:
    """Megatron-Bridge's merge_qkvg_weights, and apply_head_wise_attn_gate_sharded_factory of Megatron-LM's dev
    branch."""
    tensors = published(tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=Parallelism(2))
    found = to_megatron(open_checkpoint(tmp_path / "m")).tensors
    layers = {"decoder.layers.0.": "model.layers.0.", "decoder.layers.1.": "model.layers.1."}
    for there, here in (layers | {"mtp.layers.0.transformer_layer.": "model.layers.4."}).items():
        query, key, value, gate = (tensors[f"{here}self_attn.{each}_proj.weight"] for each in "qkvg")
        groups = [part.unflatten(0, (2, -1)) for part in (query, key, value)]
        expected = torch.cat([*torch.cat(groups, 1), gate])
        assert torch.equal(found[f"{there}self_attention.linear_qkv.weight"], expected)
    stored = dcp_metadata.read_index(tmp_path / "m" / "release").tensors
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    assert [stored[f"{name}.{part}"].shape for part in ("_qkv", "_gate")] == [(576, 64), (32, 64)]
    assert name not in stored


def test_prediction_layers_have_the_names_of_megatron_bridge_and_heads_that_it_has_no_place_for(tmp_path: Path) -> None:
    tensors = published(tmp_path / "hf")
    own = "model.layers.4.transformer.shared_head.output.weight"
    assert not torch.equal(tensors[own], tensors["lm_head.weight"])
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    there = {name for name in open_checkpoint(tmp_path / "m").specs if name.startswith("mtp.")}
    for name in ("enorm", "eh_proj", "final_layernorm", "output_layer", "transformer_layer.mlp.linear_fc2"):
        assert f"mtp.layers.0.{name}.weight" in there
    run(tmp_path / "m", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    # as Bridge saves it
    save_file({name: each for name, each in tensors.items() if name != own}, tmp_path / "hf" / "model.safetensors")
    run(tmp_path / "hf", tmp_path / "without", "megatron")
    assert "mtp.layers.0.output_layer.weight" not in open_checkpoint(tmp_path / "without").specs
    run(tmp_path / "without", tmp_path / "again", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "again")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_of_megatron_bridge_is_read_by_the_models_own_config(tmp_path: Path) -> None:
    """With what Step35ModelProvider says, and no argument of Megatron-Core's can."""
    pico.save(tmp_path / "hf", "step3p5", dtype=torch.bfloat16)
    shutil.copytree(tmp_path / "hf", tmp_path / "config", ignore=shutil.ignore_patterns("*.safetensors"))
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    tensors = to_megatron(open_checkpoint(tmp_path / "m")).tensors
    args = to_megatron_args(from_hf_config(pico.config("step3p5")).padded(1)) | {"params_dtype": "bfloat16"}
    provider = to_provider(args) | {
        "head_wise_attn_gate": True,
        "rotary_base_per_layer": [5e6, 1e4, 1e4, 5e6],
        "num_attention_heads": 16,
        "window_size": None,
        "window_attn_skip_freq": None,
    }
    torch_dcp.save(dict(tensors), storage_writer=torch_dcp.FileSystemWriter(tmp_path / "bridge"), no_dist=True)
    (tmp_path / "bridge" / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    torch.save({"iteration": 7}, tmp_path / "bridge" / "common.pt")
    (tmp_path / "bridge" / "run_config.yaml").write_text(yaml.safe_dump({"model": provider}))
    with pytest.raises(PrecisionctlError, match=r"rotary_base_per_layer.*`convert .* --trust-reference`.*Other"):
        run(tmp_path / "bridge", tmp_path / "back", "hf", reference=tmp_path / "config")
    run(tmp_path / "bridge", tmp_path / "back", "hf", reference=tmp_path / "config", trust_reference=True)
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_step_3_7_comes_back_in_published_names(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "step3p7", dtype=torch.bfloat16)
    assert "model.layers.1.moe.gate_proj.weight" in load_file(tmp_path / "hf" / "model.safetensors")
    assert_there_and_back(tmp_path / "hf", parallelism=Parallelism(2))


def test_step_3_7_as_transformers_has_it_in_memory_is_what_transformers_loads_again(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "step3p7", dtype=torch.bfloat16, in_memory=True)
    assert "model.language_model.layers.1.mlp.experts.gate_up_proj" in load_file(tmp_path / "hf" / "model.safetensors")
    run(tmp_path / "hf", tmp_path / "same", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "same")
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    run(tmp_path / "m", tmp_path / "back", "hf")
    models = (load_whole(AutoModelForImageTextToText, tmp_path / name) for name in ("hf", "back"))
    assert torch.equal(*map(logits, models))


_WHOLE = {
    "head_dim": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "share_expert_dim": 128,
}


@pytest.mark.parametrize("scheme", ["block", *in_soak("dynamic")])
def test_engines_get_experts_one_by_one_and_gates_as_values(scheme: Any, tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "step3p5", dtype=torch.bfloat16, **_WHOLE)
    carry_out(Request.export(tmp_path / "hf", tmp_path / "out", "vllm", scheme))
    out = load_file(tmp_path / "out" / "model.safetensors")
    codes = {name for name, tensor in out.items() if tensor.dtype == torch.float8_e4m3fn}
    assert {"model.layers.1.moe.experts.7.down_proj.weight", "model.layers.1.share_expert.up_proj.weight"} < codes
    assert out["model.layers.1.self_attn.g_proj.weight"].dtype == torch.bfloat16
    assert not any(".moe.gate." in name for name in codes)
    findings = check(open_checkpoint(tmp_path / "out"), engine_named("vllm"))
    assert [each.where for each in findings if each.rule.fatal] == []
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["use_head_wise_attn_gate"] and from_hf_config(config) == open_checkpoint(tmp_path / "hf").model


def test_sglang_takes_experts_of_a_layer_out_of_one_tensor_alone(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "step3p5", dtype=torch.bfloat16, **_WHOLE)
    with pytest.raises(PrecisionError, match="SGLang does not load experts of a layer one by one"):
        carry_out(Request.export(tmp_path / "hf", tmp_path / "out", "sglang", "dynamic"))


def test_released_codes_of_all_experts_in_one_tensor_are_read_and_come_back(tmp_path: Path) -> None:
    """As Step-3.5-Flash-FP8 has them, in blocks: `moe.gate_proj.weight` beside `moe.gate_proj.weight_scale_inv`."""
    pico.save(tmp_path / "hf", "step3p5", dtype=torch.bfloat16, **_WHOLE)
    file = tmp_path / "hf" / "model.safetensors"
    tensors, values = load_file(file), {}
    for name in [name for name in tensors if ".moe." in name and "_proj." in name]:
        codes = (tensors[name].float() * 1024).to(torch.float8_e4m3fn)
        scales = torch.rand(8, 1, 1) / 1024
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        values[name] = (codes.float() * scales).bfloat16()
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    kept = [name.removesuffix(".weight") for name in tensors if "_proj.weight" in name and ".moe." not in name]
    config |= {key: True for key, value in FLASH.items() if value is True}
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [*kept, "lm_head"],
    }
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        findings = check(open_checkpoint(tmp_path / "hf"), engine_named(engine))
        assert [each.what for each in findings if each.rule.fatal] == []
    # told to dequantize, it loads codes of down_proj as they are (run): of the three it renames that one alone
    findings = check(open_checkpoint(tmp_path / "hf"), engine_named("transformers"))
    assert "FP8 codes of all experts in one tensor" in [each.what for each in findings]
    run(tmp_path / "hf", tmp_path / "m", "megatron", precision="bf16")
    run(tmp_path / "m", tmp_path / "back", "hf", precision="bf16")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert [name for name, each in values.items() if not torch.equal(back[name], each)] == []


_GGUF: dict[str, Any] = gguf_files.AS_RELEASED["step3p5"]
_TURNS_ALL = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 1.0}

_YARN = pico.YARN_ROPE | {"partial_rotary_factor": 0.5}


def test_factors_in_gguf_are_of_the_half_that_turns_without_a_window_and_1_elsewhere() -> None:
    """By the formula of llama.cpp's conversion/step3.py, in FP64."""
    expected = []
    for frequency in 1.0 / (5e6 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)):
        wave = 2 * math.pi / float(frequency)
        smooth = (131072 / wave - 1) / (32 - 1)
        between = 1 / ((1 - smooth) / 2 + smooth)
        expected.append(1.0 if wave < 131072 / 32 else 2.0 if wave > 131072 else between)
    found = rotary_tensors(from_hf_config(FLASH))["rope_freqs.weight"]
    assert found.tolist() == torch.tensor(expected + [1.0] * 32).tolist()


def in_gguf(folder: Path, *, without: str | None = None) -> Path:
    """A file of a model with a prediction layer, of which a tensor may be missing."""
    published = gguf_files.source(folder / "hf", "step3p5", **_GGUF)
    add_mtp(published, torch.bfloat16)
    tensors = load_file(published / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if name != without}, published / "model.safetensors")
    return gguf_files.export(published, folder / "out")


def test_prediction_layers_in_gguf_may_be_without_output_layers(tmp_path: Path) -> None:
    """As Megatron-Bridge saves them."""
    own = "model.layers.4.transformer.shared_head.output.weight"
    reader = open_checkpoint(in_gguf(tmp_path, without=own))
    assert reader.model.mtp_num_layers == 1 and not reader.model.mtp_output_layers
    assert "model.layers.4.transformer.shared_head.norm.weight" in reader.specs and own not in reader.specs


def test_a_gguf_file_says_windows_limits_and_the_channels_that_turn(tmp_path: Path) -> None:
    """Of layers without a window, llama.cpp turns half of what `rope.dimension_count` says (step35.cpp)."""
    head = read_head(in_gguf(tmp_path))

    def fields(**said: Any) -> dict[str, Any]:
        changed = {f"step35.{key}": each for key, each in said.items()}
        return FAMILIES["step3p5"].read(Described({**head.metadata, **changed}, head.tensors, "step35"))

    shares = ("rotary_percent", "global_attention.rotary_percent")
    of_window, of_all = "rope.dimension_count_swa", "rope.dimension_count"
    for said, expected in (({}, (1, 0.5)), ({of_all: 8}, (0.5, 0.25)), ({of_all: 8, of_window: 16}, (1, 0.25))):
        assert tuple(fields(**said)[share] for share in shares) == expected
    assert fields(swiglu_clamp_shexp=[0.5, 0.0, 0.0, 0.0])["swiglu_limits"] == (0.5, 0, 0, 0)
    assert fields(swiglu_clamp_exp=[0.5, 0.5, 0.0, 0.0, 0.5])["moe.swiglu_limits"] == (0, 0.5, 0, 0)
    for wrong in (["0.5"] * 5, [math.nan] * 5, [True] * 5, 0.5):
        with pytest.raises(DamagedCheckpoint, match="step35.swiglu_clamp_shexp is "):
            fields(swiglu_clamp_shexp=wrong)
    for key in ("attention.head_count", "attention.head_count_kv"):
        with pytest.raises(DamagedCheckpoint, match=f"step35.{key} is "):
            fields(**{key: [4, 0, 8, 4, 8]})
    with pytest.raises(UnknownArchitecture, match="sliding_window_pattern is .*, and .* in a model like this"):
        fields(**{"attention.sliding_window_pattern": [False, True, True, False, False]})
    with pytest.raises(DamagedCheckpoint, match="no `step35.attention.sliding_window_pattern`"):
        fields(**{"attention.sliding_window_pattern": None})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layer_types": ["sliding_attention"] * 4, "per_layer_config": None}, "windows in all layers or in none"),
        (
            {"rope_parameters": _GGUF["rope_parameters"] | {"full_attention": _TURNS_ALL}},
            "global_attention.rotary_percent None, but with 0.5",
        ),
        (
            {"rope_parameters": _GGUF["rope_parameters"] | {"full_attention": _YARN}},
            "scaled as yarn",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(changes: dict[str, Any], why: str) -> None:
    of_llama_cpp(from_hf_config(FLASH))
    with pytest.raises(UnknownArchitecture, match=why):
        of_llama_cpp(from_hf_config(pico.config("step3p5", **_GGUF | changes)))

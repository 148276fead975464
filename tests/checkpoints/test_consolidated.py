"""Mistral's own files and Meta's. tests/peers has mistral-inference and llama-models themselves."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command_line
import conversions
import pytest
import torch
from consolidated_files import (
    DENSE,
    EXPERTS,
    FP8,
    LATENT,
    LLAMAS_MLP,
    META,
    VISION,
    YARN,
    logits,
    save_meta,
    save_mistral,
    saying,
    tensors,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.consolidated.llama_params import llama_config
from precisionctl.checkpoints.consolidated.mistral_params import mistral_config
from precisionctl.checkpoints.consolidated.params import ParamsJson
from precisionctl.checkpoints.consolidated.reader import recognise
from precisionctl.checkpoints.hf_directory.safetensors_file import Places, StoredTensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, PrecisionctlError, PrecisionError
from precisionctl.param import TensorSpec

KINDS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "tied": DENSE | {"tied_embeddings": True},
    "a window": DENSE | {"sliding_window": "6"},
    "a window in every other layer": DENSE | {"_sliding_window": [None, 6]},
    "experts": EXPERTS,
    "llama": META,
    "llama in two parts": META,
    "llama 2 in two parts": {key: value for key, value in META.items() if key not in ("rope_theta", "n_kv_heads")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_what_the_model_does_in_its_own_code(tmp_path: Path, kind: str) -> None:
    params, source = KINDS[kind], tmp_path / "source"
    if "llama" in kind:
        parts = 2 if "parts" in kind else 1
        made = save_meta(source, params, LLAMAS_MLP, parts, embedding_by_columns="2 in" in kind)
        saying(vocab_size=-1)(source)
    else:
        made = save_mistral(source, params)
    conversions.run(source, tmp_path / "hf", "hf", verify=True)
    if kind == "llama in two parts":
        conversions.run(source, tmp_path / "megatron", "megatron")
        conversions.run(tmp_path / "megatron", tmp_path / "back", "hf")
        conversions.assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    if kind == "a window in every other layer" and "ministral" not in CONFIG_MAPPING:
        return
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(20) * 7 % 128
    with torch.no_grad():
        torch.testing.assert_close(model(ids[None]).logits[0], logits(params, made, ids), atol=1e-4, rtol=1e-4)


def turned(rows: Tensor, heads: int) -> Tensor:
    """As transformers' converters permute queries and keys (models/mistral3/convert_mistral3_weights_to_hf.py)."""
    return rows.view(heads, rows.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(rows.shape)


def test_a_wrapper_around_latent_attention_has_published_names(tmp_path: Path) -> None:
    """By the renamings of transformers' models/mistral4/convert_mistral4_weight_to_hf.py."""
    made = save_mistral(tmp_path / "source", LATENT | {"vision_encoder": VISION})
    conversions.run(tmp_path / "source", tmp_path / "hf", "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    text, layer = "language_model.model.", "language_model.model.layers.1."
    tower = "vision_encoder.transformer.layers.0.attention."
    expected = {
        "language_model.lm_head.weight": made["output.weight"],
        f"{text}embed_tokens.weight": made["tok_embeddings.weight"],
        f"{text}layers.0.mlp.up_proj.weight": made["layers.0.feed_forward.w3.weight"],
        f"{layer}self_attn.q_b_proj.weight": made["layers.1.attention.wq_b.weight"],
        f"{layer}self_attn.kv_a_proj_with_mqa.weight": made["layers.1.attention.wkv_a_with_mqa.weight"],
        f"{layer}self_attn.kv_a_layernorm.weight": made["layers.1.attention.kv_a_norm.weight"],
        f"{layer}mlp.gate.weight": made["layers.1.gate.weight"],
        f"{layer}mlp.shared_experts.down_proj.weight": made["layers.1.shared_experts.w2.weight"],
        f"{layer}mlp.experts.gate_up_proj": torch.stack(
            [torch.cat([made[f"layers.1.experts.{each}.w{part}.weight"] for part in (1, 3)]) for each in range(4)]
        ),
        "vision_tower.transformer.layers.0.attention.q_proj.weight": turned(made[f"{tower}wq.weight"], 2),
        "vision_tower.transformer.layers.0.attention.v_proj.weight": made[f"{tower}wv.weight"],
        "multi_modal_projector.norm.weight": made["pre_mm_projector_norm.weight"],
        "multi_modal_projector.linear_2.weight": made["vision_language_adapter.w_out.weight"],
    }
    assert {name for name in expected if not torch.equal(found[name], expected[name])} == set()
    assert len(found) == len(made) - 3 * 4 + 2
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["text_config"]["model_type"]) == ("mistral3", "mistral4")


def in_fp8(made: dict[str, Tensor]) -> dict[str, Tensor]:
    """Linears of layers as Mistral's FP8."""
    found = dict[str, Tensor]()
    for name, value in made.items():
        module = name.removesuffix("weight")
        if value.dim() == 2 and name.startswith("layers") and not module.endswith("gate."):
            scale = value.float().abs().max() / 448
            found[name] = (value.float() / scale).to(torch.float8_e4m3fn)
            found |= {f"{module}qscale_weight": scale, f"{module}qscale_act": torch.tensor(0.25)}
        else:
            found[name] = value
    return found | {"layers.0.attention.kv_fake_quantizer.qscale_act": torch.tensor(1.0)}


@pytest.mark.parametrize("params", [DENSE, LATENT], ids=["dense", "latent"])
def test_codes_come_in_published_order_with_their_scales(tmp_path: Path, params: dict[str, Any]) -> None:
    made = save_mistral(tmp_path / "source", params | FP8, in_fp8(tensors(params)))
    done = conversions.run(tmp_path / "source", tmp_path / "values", "hf")
    assert any("kv_fake_quantizer" in note for note in done.notes)
    conversions.run(tmp_path / "source", tmp_path / "codes", "hf", "fp8")
    values, codes = (load_file(tmp_path / each / "model.safetensors") for each in ("values", "codes"))
    name, own, heads = "model.layers.1.self_attn.q_proj", "layers.1.attention.wq", params["n_heads"]
    if params is LATENT:
        name, own, heads = "model.layers.1.self_attn.q_b_proj", "layers.1.attention.wq_b", 0
    stored = made[f"{own}.weight"].view(torch.uint8)
    assert torch.equal(codes[f"{name}.weight"].view(torch.uint8), turned(stored, heads) if heads else stored)
    assert codes[f"{name}.weight_scale_inv"] == made[f"{own}.qscale_weight"]
    assert codes[f"{name}.activation_scale"] == 0.25
    decoded = (made[f"{own}.weight"].float() * made[f"{own}.qscale_weight"]).bfloat16()
    assert torch.equal(values[f"{name}.weight"], turned(decoded, heads) if heads else decoded)
    said = json.loads((tmp_path / "codes" / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["activation_scheme"], said["weight_block_size"]) == ("fp8", "static", None)
    gates = ["model.layers.1.mlp.gate"] if params is LATENT else []
    assert said["modules_to_not_convert"] == ["lm_head", "model.embed_tokens", *gates]
    command_line.say("export-inference", tmp_path / "source", tmp_path / "served", "--target", "vllm")
    served = load_file(tmp_path / "served" / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"  # of queries, keys and values engines take one scale together
    assert torch.equal(served[name].view(torch.uint8), made["layers.1.attention.wo.weight"].view(torch.uint8))


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    ignored = {"ignore": ["re:vision_encoder.*"], "format": "float-quantized"}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"one": group}, **ignored}}


def by_channel(made: dict[str, Tensor]) -> dict[str, Tensor]:
    found = dict(made)
    for name in [name for name, value in made.items() if value.dim() == 2 and name.startswith("layers")]:
        scale = made[name].float().abs().amax(1, keepdim=True) / 448
        found |= {name: (made[name].float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    return found


def test_scales_of_rows_move_with_them(tmp_path: Path) -> None:
    made = save_mistral(tmp_path / "source", DENSE | compressed("channel"), by_channel(tensors(DENSE)))
    conversions.run(tmp_path / "source", tmp_path / "codes", "hf", "fp8")
    found = load_file(tmp_path / "codes" / "model.safetensors")
    name, own = "model.layers.0.self_attn.k_proj.weight", "layers.0.attention.wk.weight"
    assert torch.equal(found[name].view(torch.uint8), turned(made[own].view(torch.uint8), 2))
    assert torch.equal(found[f"{name}_scale"], turned(made[f"{own}_scale"], 2))
    said = json.loads((tmp_path / "codes" / "config.json").read_text())["quantization_config"]
    assert said["ignore"] == ["lm_head", "model.embed_tokens"]


def test_scales_of_blocks_in_which_are_parts_of_heads_are_refused(tmp_path: Path) -> None:
    made = dict(tensors(DENSE))
    for name in [name for name, value in made.items() if value.dim() == 2 and name.startswith("layers")]:
        made |= {name: made[name].to(torch.float8_e4m3fn)}
        made[f"{name}_scale"] = torch.ones(-(-made[name].shape[0] // 32), -(-made[name].shape[1] // 32))
    save_mistral(tmp_path / "source", DENSE | compressed("block", block_structure=[32, 32]), made)
    with pytest.raises(PrecisionError, match=r"[kq]_proj.*scales of 32 rows.*parts of heads of 24"):
        open_checkpoint(tmp_path / "source")


BASE = {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8}
BASE |= {"norm_eps": 1e-5, "vocab_size": 32000, "rope_theta": 1000000.0, "max_position_embeddings": 262144}
MINISTRAL_3 = BASE | {
    "tied_embeddings": True,
    "yarn": YARN | {"apply_scale": False},
    "llama_4_scaling": {"original_max_position_embeddings": 16384, "beta": 0.1},
}
ROPE = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384}
ROPE |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (
            MINISTRAL_3,
            {
                "model_type": "ministral3",
                "num_key_value_heads": 8,
                "intermediate_size": 14336,
                "tie_word_embeddings": True,
                "rope_parameters": ROPE | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
            },
        ),
        (
            BASE | {"yarn": YARN | {"apply_scale": True}, "kv_lora_rank": None},  # as Devstral 2 has it
            {
                "model_type": "ministral3",
                "tie_word_embeddings": False,
                "rope_parameters": ROPE | {"mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0},
            },
        ),
        (
            BASE | {"sliding_window": [None, 32768, 32768, 32768]},
            {
                "model_type": "ministral",
                "sliding_window": 32768,
                "layer_types": ["full_attention", *["sliding_attention"] * 3] * 8,
            },
        ),
        (BASE, {"model_type": "mistral", "sliding_window": None, "max_position_embeddings": 262144}),
    ],
    ids=["Ministral 3", "Devstral 2", "Ministral 8B", "Mistral"],
)
def test_a_config_says_what_transformers_own_converter_makes_it_say(
    params: dict[str, Any], expected: dict[str, Any]
) -> None:
    """transformers, tests/integrations/mistral/; of windows vLLM, transformers_utils/configs/mistral.py."""
    made = mistral_config(ParamsJson(params)).config
    assert {key: made.get(key) for key in expected} == expected
    from_hf_config(made)


def test_yarn_without_magnitude_magnifies_no_scores_of_latent_attention() -> None:
    """As vLLM computes Mistral Large 3 since its pull request 57563."""
    rope = mistral_config(ParamsJson(LATENT)).config["rope_parameters"]
    assert rope["attention_factor"] == 1.0 and not rope.keys() & {"mscale", "mscale_all_dim"}


def reference(directory: Path, source: Path, **changes: Any) -> Path:
    """The Hugging Face directory of a model, without weights."""
    conversions.run(source, directory, "hf")
    (directory / "model.safetensors").unlink()
    (directory / "tokenizer.json").write_text("{}")
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_reference_gives_the_tokenizer_and_the_numbers_that_params_lack(tmp_path: Path) -> None:
    save_mistral(tmp_path / "whole", DENSE)
    given = reference(tmp_path / "hf", tmp_path / "whole", max_position_embeddings=77, eos_token_id=5)
    save_mistral(tmp_path / "source", {key: value for key, value in DENSE.items() if key != "rope_theta"})
    with pytest.raises(CheckpointError, match=r"no `rope_theta`.*--reference"):
        open_checkpoint(tmp_path / "source")
    conversions.run(tmp_path / "source", tmp_path / "made", "hf", reference=given)
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (config["rope_theta"], config["max_position_embeddings"], config["eos_token_id"]) == (1000000.0, 77, 5)
    assert {"tokenizer.json", "tekken.json"} <= {each.name for each in (tmp_path / "made").iterdir()}


@pytest.mark.parametrize(
    ("params", "changes", "what"),
    [
        (DENSE, {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, and by params.json 1e-05"),
        (DENSE, {"vocab_size": 127}, "vocab_size is 127, and by params.json 128"),
        (LATENT, {"routed_scaling_factor": 2.0}, "routed_scaling_factor is 2.0"),
    ],
)
def test_a_reference_of_another_model_is_refused(
    tmp_path: Path, params: dict[str, Any], changes: dict[str, Any], what: str
) -> None:
    save_mistral(tmp_path / "source", params)
    given = reference(tmp_path / "hf", tmp_path / "source", **changes)
    with pytest.raises(PrecisionctlError, match=re.escape(what)):
        conversions.run(tmp_path / "source", tmp_path / "made", "hf", reference=given)


def test_a_published_config_of_latent_attention_is_of_the_same_model(tmp_path: Path) -> None:
    """It says by `mscale_all_dim`, as transformers' converter does, what params.json says by `apply_scale`."""
    save_mistral(tmp_path / "source", LATENT)
    rope = mistral_config(ParamsJson(LATENT)).config["rope_parameters"] | {"mscale": 1.0, "mscale_all_dim": 1.0}
    del rope["attention_factor"]
    given = reference(tmp_path / "hf", tmp_path / "source", rope_parameters=rope)
    conversions.run(tmp_path / "source", tmp_path / "made", "hf", reference=given)


PUBLISHED = {
    "Llama 2 7B": ({"dim": 4096, "n_layers": 32, "n_heads": 32, "multiple_of": 256}, 11008, 4096),
    "Llama 2 70B": (
        {"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "multiple_of": 4096, "ffn_dim_multiplier": 1.3},
        28672,
        4096,
    ),
    "Llama 3 8B": (
        {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}
        | {"rope_theta": 500000.0, "vocab_size": 128256},
        14336,
        8192,
    ),
    "Llama 3.1 405B": (
        {"dim": 16384, "n_layers": 126, "n_heads": 128, "n_kv_heads": 8, "multiple_of": 4096}
        | {"ffn_dim_multiplier": 1.2, "rope_theta": 500000.0, "use_scaled_rope": True, "vocab_size": 128256},
        53248,
        131072,
    ),
}
"""params.json, and `intermediate_size` and `max_position_embeddings` of the config.json that was published with it."""


def of_embedding(dim: int) -> Callable[[], Places]:
    return lambda: {"tok_embeddings.weight": (Path(), StoredTensor(TensorSpec((32000, dim), DType.bfloat16), 0))}


@pytest.mark.parametrize("release", PUBLISHED)
def test_a_llama_has_its_published_sizes(release: str) -> None:
    params, inner, positions = PUBLISHED[release]
    made = llama_config(ParamsJson(params | {"norm_eps": 1e-5}), of_embedding(params["dim"]))
    model = from_hf_config(made.config)
    assert (model.ffn_hidden_size, model.max_position_embeddings) == (inner, positions)
    assert model.vocab_size == params.get("vocab_size", 32000)
    assert model.num_query_groups == params.get("n_kv_heads", params["n_heads"])
    assert (model.rope_scaling or {}).get("factor") == (8.0 if "3.1" in release else None)


def test_a_reference_knows_the_factor_of_scaled_rotary_embeddings() -> None:
    small = {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "norm_eps": 1e-5, "use_scaled_rope": True}
    small |= {"multiple_of": 256, "ffn_dim_multiplier": 1.5, "rope_theta": 500000.0}
    at_8 = llama_config(ParamsJson(small | {"n_layers": 17}), of_embedding(2048)).config
    scaling = at_8["rope_scaling"] | {"factor": 32.0}
    known = from_hf_config(at_8 | {"num_hidden_layers": 16, "rope_scaling": scaling})
    made = llama_config(ParamsJson(small, known), of_embedding(2048)).config
    assert made["rope_scaling"]["factor"] == 32.0 and made["intermediate_size"] == 8192


def test_of_scaled_rotary_embeddings_a_small_llama_needs_the_factor(tmp_path: Path) -> None:
    small = META | {"dim": 2048, "n_layers": 16, "use_scaled_rope": True}
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "params.json").write_text(json.dumps(small))
    torch.save({"tok_embeddings.weight": torch.zeros(128, 2048)}, tmp_path / "source" / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match=r"use_scaled_rope without a factor.*--reference"):
        open_checkpoint(tmp_path / "source")


def test_a_directory_with_published_files_is_read_by_these(tmp_path: Path) -> None:
    save_mistral(tmp_path / "source", DENSE)
    conversions.run(tmp_path / "source", tmp_path / "hf", "hf")
    for name in ("params.json", "consolidated.safetensors"):
        (tmp_path / "hf" / name).write_bytes(b"damaged")
    assert open_checkpoint(tmp_path / "hf").container == "safetensors"


def test_mistral_large_4_has_mistrals_names_in_hugging_faces_form(tmp_path: Path) -> None:
    save_mistral(tmp_path / "source", DENSE)
    assert recognise(tmp_path / "source")
    (tmp_path / "source" / "config.json").write_text('{"model_type": "mistral_large4"}')
    assert not recognise(tmp_path / "source")


@pytest.mark.parametrize("buffer", ["rope.freqs", "layers.0.attention.inner_attention.rope.freqs"])
def test_buffers_of_the_first_llamas_stay_behind_and_are_named(tmp_path: Path, buffer: str) -> None:
    """They are whole in each part. Llama 1 has them in attention."""
    save_meta(tmp_path / "source", META, LLAMAS_MLP, 2)
    for file in (tmp_path / "source").glob("*.pth"):
        torch.save(torch.load(file) | {buffer: torch.ones(8)}, file)
    done = conversions.run(tmp_path / "source", tmp_path / "hf", "hf")
    assert any(buffer in note for note in done.notes)


def test_a_tied_llama_may_have_a_copy_of_its_embedding(tmp_path: Path) -> None:
    """As Llama 3.2 1B and 3B; config.json says that they are tied."""
    save_meta(tmp_path / "source", META, LLAMAS_MLP)
    file = tmp_path / "source" / "consolidated.00.pth"
    state = torch.load(file)
    torch.save(state | {"output.weight": state["tok_embeddings.weight"].clone()}, file)
    conversions.run(tmp_path / "source", tmp_path / "untied", "hf")
    config = json.loads((tmp_path / "untied" / "config.json").read_text())
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    conversions.run(tmp_path / "source", tmp_path / "tied", "hf", reference=tmp_path / "reference")
    assert json.loads((tmp_path / "tied" / "config.json").read_text())["tie_word_embeddings"] is True
    torch.save(state, file)
    with pytest.raises(PrecisionctlError, match="tie_word_embeddings"):
        conversions.run(tmp_path / "source", tmp_path / "other", "hf", reference=tmp_path / "reference")


def test_of_files_of_both_kinds_those_in_safetensors_are_read(tmp_path: Path) -> None:
    save_mistral(tmp_path / "source", DENSE)
    conversions.run(tmp_path / "source", tmp_path / "alone", "hf")
    torch.save({"norm.weight": torch.zeros(64)}, tmp_path / "source" / "consolidated.00.pth")
    conversions.run(tmp_path / "source", tmp_path / "both", "hf")
    one, other = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("alone", "both"))
    assert one == other


def test_params_beside_other_files_are_not_asked_for(tmp_path: Path) -> None:
    save_mistral(tmp_path / "source", DENSE)
    (tmp_path / "source" / "model.safetensors").write_bytes((tmp_path / "source/consolidated.safetensors").read_bytes())
    with pytest.raises(PrecisionctlError, match="weights without a config"):
        open_checkpoint(tmp_path / "source")

"""Kimi K3 as it is published: a wrapper, experts in MXFP4, A_log filled up with zeros; and as Megatron-Bridge saves
it."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import yaml
from conversions import run, tensors
from gpt_models import (
    as_gpt,
    assert_computes_as_transformers,
    assert_texts_are_apart,
    both_gradients,
    clear_tokens,
    converted as in_megatron,
)
from in_memory import to_megatron
from safetensors.torch import load_file, save_file
from soaking import in_soak
from torch import Tensor

from precisionctl.architectures.families import from_hf_config, table_of, to_hf_config
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, ShapeMismatch, UnknownArchitecture
from precisionctl.model.same_model import differences
from precisionctl.param import Parallelism
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check

FAMILY = "kimi-k3"
WIDE = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
"""FP32 as released."""
TOWERS = {
    "vision_tower.patch_embed.proj.weight": (8, 3, 2, 2),
    "vision_tower.encoder.blocks.0.wqkv.weight": (24, 8),
    "mm_projector.post_norm.weight": (64,),
    "mm_projector.proj.0.weight": (32, 32),
}
QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
"""The released one, which stands in `text_config`."""


def publish(directory: Path, *, codes: bool = True) -> dict[str, Tensor]:
    """A tiny model under published names, with experts in MXFP4, or in BF16."""
    model = pico.make(FAMILY, dtype=torch.bfloat16, initializer_range=0.12)
    torch.manual_seed(1)
    stored: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        name = f"language_model.{name}"
        if ".experts." in name and codes:
            rows, columns = tensor.shape
            stored[f"{name}_packed"] = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
            stored[f"{name}_scale"] = torch.randint(116, 123, (rows, columns // 32), dtype=torch.uint8)
        elif name.endswith(WIDE):
            stored[name] = tensor.float() * 1.001
        else:
            stored[name] = tensor.contiguous()
    stored |= {name: torch.randn(shape).bfloat16() for name, shape in TOWERS.items()}
    directory.mkdir(parents=True)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(wrapped(model.config.to_dict(), codes=codes)))
    return stored


def wrapped(text: dict[str, Any], *, codes: bool = False) -> dict[str, Any]:
    own = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16"}
    quantization = {"quantization_config": QUANTIZATION} if codes else {}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "model_type": "kimi_k3",
        "text_config": text | own | quantization,
        "tie_word_embeddings": False,
        "vision_config": {"vt_hidden_size": 8},
    }


def assert_equal(directory: Path, stored: dict[str, Tensor]) -> None:
    back = load_file(directory / "model.safetensors")
    assert back.keys() == stored.keys()
    assert [n for n in stored if back[n].dtype != stored[n].dtype or not torch.equal(back[n], stored[n])] == []


# The published model, by its config.json and the tensors of its index


def released() -> dict[str, Any]:
    """The keys of the published config.json that anything depends on."""
    full = [*range(4, 93, 4), 93]
    return wrapped(
        {
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "attn_res_block_size": 12,
            "first_k_dense_replace": 1,
            "hidden_act": "situ",
            "hidden_size": 7168,
            "intermediate_size": 33792,
            "kv_lora_rank": 512,
            "latent_moe_use_norm": True,
            "linear_attn_config": {
                "full_attn_layers": full,
                "gate_lower_bound": -5.0,
                "head_dim": 128,
                "kda_layers": [layer for layer in range(1, 94) if layer not in full],
                "num_heads": 96,
                "short_conv_kernel_size": 4,
                "use_full_rank_gate": True,
            },
            "max_position_embeddings": 1048576,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "moe_intermediate_size": 3072,
            "moe_layer_freq": 1,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_attention_heads": 96,
            "num_expert_group": 1,
            "num_experts": 896,
            "num_experts_per_token": 16,
            "num_hidden_layers": 93,
            "num_key_value_heads": 96,
            "num_nextn_predict_layers": 0,
            "num_shared_experts": 2,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-05,
            "routed_expert_hidden_size": 3584,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "use_grouped_topk": True,
            "v_head_dim": 128,
            "vocab_size": 163840,
        },
        codes=True,
    )


OF_TOWERS = (
    2 * 4096 * 4096 // 2 + 7168 * 4096 + 7168  # the projector
    + 27 * (2 * 4096 * 1024 + 2 * 1024 + 1024 * 1536 + 4608 * 1024)
    + 1024 + 64 * 64 * 1024 + 1024 * 3 * 14 * 14
)  # fmt: skip
IN_TOWERS = 3 + 27 * 6 + 3


def test_the_published_model_has_as_many_numbers_in_as_many_tensors_as_its_files_have() -> None:
    """1,503,647,073,024 elements in 497,220 tensors, as a report of the published files counts them: bytes of codes and
    of their scales, one by one."""
    model = from_hf_config(released())
    rows = table_of(model).spelled({}, model)
    assert all(name.startswith("language_model.") for row in rows for name in row.hf)
    elements, number = OF_TOWERS, IN_TOWERS
    for row in (row for row in rows if row.present.in_layout("hf", model)):
        shapes, count = row.shapes(model, "hf"), row.count(model)
        sizes = [math.prod(shape) for shape in shapes]
        if row.of_experts:  # two codes in a byte, and a scale for 32
            sizes = [size // 2 + size // 32 for size in sizes]
        elements += sum(sizes) * count
        number += len(shapes) * (2 if row.of_experts else 1) * count
    assert (elements, number) == (1_503_647_073_024, 497_220)


# Published names, MXFP4, padding


@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
def test_a_published_checkpoint_comes_back_from_any_division(tmp_path: Path, container: str) -> None:
    """Its values, with the towers; then the very codes."""
    stored = publish(tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "m", "megatron", container=container, parallelism=Parallelism(2, 2, expert=2))
    run(tmp_path / "m", tmp_path / "codes", "hf", precision="fp8")
    assert_equal(tmp_path / "codes", stored)
    found = compare(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "codes"))
    assert found.equal


def test_codes_decode_to_what_mxfp4_says(tmp_path: Path) -> None:
    """The first of two codes is in the low bits (OCP Microscaling, and Megatron-Bridge's quantization_utils.py)."""
    stored = publish(tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "values", "hf")
    back = load_file(tmp_path / "values/model.safetensors")
    of_code = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    packed = [name for name in stored if name.endswith("_packed")]
    assert len(packed) == 3 * 3 * 8
    for name in packed:
        weight, codes = name.removesuffix("_packed"), stored[name].long()
        values = of_code[torch.stack([codes & 15, codes >> 4], -1).flatten(1)]
        scales = 2.0 ** (stored[f"{weight}_scale"].float() - 127)
        assert torch.equal(back[weight].float(), values * scales.repeat_interleave(32, 1)), weight
    assert "quantization_config" not in json.loads((tmp_path / "values/config.json").read_text())["text_config"]


def change(directory: Path, changed: Callable[[dict[str, Tensor]], object]) -> None:
    stored = load_file(directory / "model.safetensors")
    changed(stored)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})


A_LOG = "language_model.model.layers.0.self_attn.A_log"


def test_what_a_log_is_filled_up_with_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    stored = publish(tmp_path / "hf")
    assert stored[A_LOG].shape == (128,) and not stored[A_LOG][4:].any()
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    found = tensors(tmp_path / "m")["decoder.layers.0.self_attention.A_log"]
    assert found.dtype == torch.float32 and torch.equal(found, stored[A_LOG][:4])
    digests = {digest_weights(open_checkpoint(tmp_path / name)) for name in ("hf", "m")}
    assert len(digests) == 1  # by which FP8 state is known to be of these weights


@pytest.mark.parametrize("value", [1.0, -1e-30, float("nan")])
def test_a_log_that_is_filled_up_with_others_than_zeros_is_refused(tmp_path: Path, value: float) -> None:
    publish(tmp_path / "hf")
    change(tmp_path / "hf", lambda stored: stored[A_LOG][127:].fill_(value))
    with pytest.raises(DamagedCheckpoint, match=r"4 numbers is filled up to 128 .* \(language_model.*A_log\)"):
        run(tmp_path / "hf", tmp_path / "m", "megatron")
    assert not (tmp_path / "m").exists()


def test_an_a_log_of_another_length_is_refused(tmp_path: Path) -> None:
    publish(tmp_path / "hf")
    change(tmp_path / "hf", lambda stored: stored.update({A_LOG: torch.zeros(64)}))
    with pytest.raises(ShapeMismatch, match="A_log"):
        plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron"))


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (
            "w2.weight_scale",
            "no language_model.model.layers.1.block_sparse_moe.experts.0.w2.weight_scale for its codes",
        ),
        ("w2.weight_packed", "w2.weight"),
        ("mlp_res_proj.weight", "mlp_res_proj"),
        ("routed_expert_norm.weight", "routed_expert_norm"),
        ("output_attn_res_proj.weight", "output_attn_res_proj"),
    ],
)
def test_a_tensor_that_is_not_there_is_named(tmp_path: Path, end: str, message: str) -> None:
    stored = publish(tmp_path / "hf")
    first = next(name for name in sorted(stored) if name.endswith(end))
    change(tmp_path / "hf", lambda there: bool(there.pop(first).any()))
    with pytest.raises(PrecisionctlError, match=message):
        plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron"))


# config.json


def linear(**said: Any) -> dict[str, Any]:
    return {"linear_attn_config": pico.settings(FAMILY)["linear_attn_config"] | said}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"hidden_act": "silu"}, "hidden_act='silu'"),
        ({"hidden_act": None}, "hidden_act=None"),
        ({"activation_situ_beta": 1.0}, "activation_situ_beta=1.0"),
        ({"activation_situ_linear_beta": None}, "activation_situ_linear_beta=None"),
        ({"mla_use_nope": False}, "mla_use_nope=False"),
        ({"mla_use_output_gate": False}, "mla_use_output_gate=False"),
        ({"latent_moe_use_norm": False}, "latent_moe_use_norm=False"),
        ({"moe_renormalize": False}, "moe_renormalize=False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"use_grouped_topk": False}, "use_grouped_topk=False"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        (linear(use_full_rank_gate=False), "use_full_rank_gate=False"),
        (linear(gate_lower_bound=None), "gate_lower_bound=None"),
        (linear(kda_layers=None), "kda_layers=None"),
        (linear(chunk_size=64), "chunk_size=64"),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_name(said: dict[str, Any], words: str) -> None:
    text = pico.config(FAMILY, **said)
    for config in (text, wrapped(text)):
        with pytest.raises(UnknownArchitecture, match=words):
            from_hf_config(config)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"attn_res_block_size": 0}, "attn_res_block_size is 0, not a size"),
        ({"attn_res_block_size": None}, "no `attn_res_block_size`"),
        ({"attn_res_block_size": True}, "attn_res_block_size is True, not a size"),
        ({"routed_expert_hidden_size": None}, "no `routed_expert_hidden_size`"),
        ({"routed_expert_hidden_size": -1}, "routed_expert_hidden_size is -1"),
        ({"q_lora_rank": None}, "no `q_lora_rank`"),
        ({"num_experts": 1 << 40}, "num_experts is 1099511627776, not a size"),
        ({"linear_attn_config": None}, "linear_attn_config is None, not an object"),
        ({"linear_attn_config": [1]}, "not an object"),
        (linear(num_heads=0), "num_heads is 0"),
        (linear(gate_lower_bound=5.0), "not a negative number"),
        (linear(gate_lower_bound="x"), "not a negative number"),
        (linear(kda_layers=[1, 2, 3, 4]), "do not share out layers 1 to 4"),
        (linear(kda_layers=[1, 2]), "do not share out layers 1 to 4"),
        (linear(kda_layers=["1", 2, 4]), "not a list of layers"),
        (linear(full_attn_layers=3), "not a list of layers"),
    ],
    ids=str,
)
def test_what_describes_no_model_is_one_error(said: dict[str, Any], words: str) -> None:
    text = pico.config(FAMILY, **said)
    for config in (text, wrapped(text)):
        with pytest.raises(DamagedCheckpoint, match=words):
            from_hf_config(config)


def test_config_json_is_written_in_published_words() -> None:
    text = from_hf_config(released())
    written, said = to_hf_config(text, "bfloat16"), released()["text_config"]
    own = {"architectures", "model_type", "dtype", "quantization_config"}
    assert {key: written.get(key) for key in said.keys() - own} == {key: said[key] for key in said.keys() - own}


def test_towers_of_kimi_k2_5_are_not_those_of_kimi_k3(tmp_path: Path) -> None:
    publish(tmp_path / "hf")
    change(
        tmp_path / "hf",
        lambda stored: stored.update({"mm_projector.pre_norm.weight": stored.pop("mm_projector.post_norm.weight")}),
    )
    with pytest.raises(UnknownArchitecture, match="mm_projector.pre_norm."):
        plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron"))


# What it computes


@pytest.mark.parametrize(
    "said",
    [
        {"attn_res_block_size": 1},
        {"attn_res_block_size": 3},
        *in_soak(
            {"attn_res_block_size": 9},
            {"first_k_dense_replace": 4},
            {"num_expert_group": 1, "topk_group": 1},
            {"routed_scaling_factor": 2.5},
            linear(gate_lower_bound=-1.0, kda_layers=[2, 3], full_attn_layers=[1, 4]),
        ),
    ],
    ids=str,
)
def test_a_setting_means_what_its_public_sources_say(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config(FAMILY, **said), tmp_path)


def test_the_release_computes_what_its_values_do(tmp_path: Path) -> None:
    publish(tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "values", "hf")
    values = load_file(tmp_path / "values/model.safetensors")
    theirs = pico.make(FAMILY)
    theirs.load_state_dict(
        {name.removeprefix("language_model."): each.float() for name, each in values.items() if name not in TOWERS}
    )
    made = to_megatron(open_checkpoint(tmp_path / "hf"))
    made.tensors = {name: tensor for name, tensor in made.tensors.items() if not name.startswith("towers.")}
    ours = as_gpt(made)
    tokens = clear_tokens(ours, (2, 40))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(tokens)[..., :250]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.std()))


@pytest.mark.soak
def test_gradients_are_those_of_its_public_sources(tmp_path: Path) -> None:
    """Of vectors that weigh streams too, but for the first layer's, which has one stream to read, and so none."""
    theirs = pico.make(FAMILY, initializer_range=0.12)
    ours = as_gpt(in_megatron(theirs, tmp_path))
    tokens = clear_tokens(ours, (3, 100))
    for logits in (theirs(tokens).logits, ours(tokens)[..., : pico.SIZES["vocab_size"]]):
        logits.logsumexp(-1).sum().backward()
    for name, found, expected in both_gradients(theirs, ours):
        atol = 1e-4 * max(float(expected.abs().max()), 1e-2)
        torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=lambda said, name=name: f"{name}: {said}")
        assert bool(expected.any()) != name.startswith("decoder.layers.0.self_attention_res_"), name


@pytest.mark.soak
def test_texts_that_share_a_row_do_not_see_each_other(tmp_path: Path) -> None:
    assert_texts_are_apart(FAMILY, tmp_path)


# Megatron-Bridge


IN_BRIDGE = {
    "language_model.lm_head.": "output_layer.",
    "language_model.model.embed_tokens.": "embedding.word_embeddings.",
    "language_model.model.norm.": "decoder.final_layernorm.",
    "language_model.model.output_attn": "decoder.layers.3.output_attn",
    "language_model.model.layers.": "decoder.layers.",
    ".self_attn.": ".self_attention.",
    ".post_attention_layernorm.": ".pre_mlp_layernorm.",
    ".block_sparse_moe.gate.e_score_correction_bias": ".mlp.router.expert_bias",
    ".block_sparse_moe.gate.": ".mlp.router.",
    ".block_sparse_moe.routed_expert_down_proj.": ".mlp.fc1_latent_proj.",
    ".block_sparse_moe.routed_expert_up_proj.": ".mlp.fc2_latent_proj.",
    ".block_sparse_moe.": ".mlp.",
    ".down_proj.": ".linear_fc2.",
}
"""Of names in Hugging Face, as Bridge's KimiK3Bridge.mapping_registry has them; but for what it joins."""


def of_bridge(published: dict[str, Tensor]) -> dict[str, Tensor]:
    """A published model with experts in BF16 as Bridge's torch_dist has it: no towers, A_log without zeros, gate and up
    joined, all experts of a layer in one tensor (Megatron-Core's TEGroupedMLP.sharded_state_dict)."""
    found: dict[str, Tensor] = {}
    grouped: dict[str, list[Tensor]] = {}
    for name, tensor in published.items():
        if name in TOWERS or re.search(r"\.(up_proj|w3)\.", name):
            continue
        renamed = name
        for old, new in IN_BRIDGE.items():
            renamed = renamed.replace(old, new)
        if gate := re.fullmatch(r"(.*\.)(gate_proj|w1)(\.weight)", renamed):
            up = published[re.sub(r"\.gate_proj\.", ".up_proj.", name).replace(".w1.", ".w3.")]
            renamed, tensor = f"{gate[1]}linear_fc1{gate[3]}", torch.cat([tensor, up])
        if renamed.endswith("A_log"):
            tensor = tensor[:4].clone()
        if expert := re.fullmatch(r"(.*\.mlp\.experts\.)\d+\.(?:linear_fc1|w2)(\.weight)", renamed):
            linear = "linear_fc1" if "linear_fc1" in renamed else "linear_fc2"
            grouped.setdefault(f"{expert[1]}experts.{linear}{expert[2]}", []).append(tensor)
        else:
            found[renamed] = tensor
    return found | {name: torch.stack(each) for name, each in grouped.items()}


PROVIDER: dict[str, Any] = {
    "_target_": "megatron.bridge.models.kimi.kimi_k3_provider.KimiK3ModelProvider",
    "transformer_layer_spec": {"_target_": "megatron.bridge.models.kimi.kimi_k3_spec.build_kimi_k3_spec"},
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
    "gated_linear_unit": True,
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "vocab_size": 250,
    "seq_length": 128,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-2,
    "layernorm_zero_centered_gamma": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "share_embeddings_and_output_weights": False,
    "qk_layernorm": True,
    "multi_latent_attention": True,
    "position_embedding_type": "none",
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "rope_type": "yarn",  # its class's default, which its layers do not heed
    "rotary_scaling_factor": 40,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
    "num_moe_experts": 8,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "moe_latent_size": 32,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_load_balancing_type": "none",
    "moe_layer_freq": [0, 1, 1, 1],
    "kimi_kda_layers": [1, 2, 4],
    "kimi_linear_num_heads": 4,
    "kimi_linear_head_dim": 32,
    "kimi_linear_conv_kernel_size": 4,
    "kimi_kda_gate_lower_bound": -5.0,
    "kimi_attn_res_block_size": 2,
}
"""What KimiK3Bridge.provider_bridge makes of the config.json of `pico`'s model, as far as it describes a model."""


def save_as_bridge(directory: Path, published: dict[str, Tensor], **changes: Any) -> Path:
    torch_dcp.save(of_bridge(published), storage_writer=torch_dcp.FileSystemWriter(directory), no_dist=True)
    (directory / "run_config.yaml").write_text(yaml.safe_dump({"model": PROVIDER | changes, "checkpoint": {}}))
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"iteration": 7}, directory / "common.pt")
    return directory


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_bridge_saved_is_the_text_model_and_the_whole_with_a_reference(tmp_path: Path) -> None:
    stored = publish(tmp_path / "hf", codes=False)
    bridge = save_as_bridge(tmp_path / "bridge", stored)
    run(bridge, tmp_path / "text", "hf")
    text = load_file(tmp_path / "text/model.safetensors")
    prefix = "language_model."
    assert {f"{prefix}{name}" for name in text} == {name for name in stored if name.startswith(prefix)}
    assert [name for name in text if not torch.equal(text[name], stored[prefix + name])] == []
    config = json.loads((tmp_path / "text/config.json").read_text())
    assert not differences(from_hf_config(config), pico.shape(FAMILY))
    run(bridge, tmp_path / "whole", "hf", reference=tmp_path / "hf")
    assert_equal(tmp_path / "whole", stored)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_written_for_megatron_has_bridges_names_and_description(tmp_path: Path) -> None:
    stored = publish(tmp_path / "hf", codes=False)
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    index, expected = dcp_metadata.read_index(tmp_path / "m/release").tensors, of_bridge(stored)
    assert {name: each.shape for name, each in index.items() if "_extra_state" not in name} == {
        name: (256, 64) if "word_emb" in name or "output_layer" in name else tuple(tensor.shape)
        for name, tensor in expected.items()
    }
    described = yaml.safe_load((tmp_path / "m/release/run_config.yaml").read_text())["model"]
    assert {key: described.get(key) for key in PROVIDER if key.startswith("kimi_")} == {
        key: value for key, value in PROVIDER.items() if key.startswith("kimi_")
    }
    assert described["_target_"] == PROVIDER["_target_"]
    notes = plan_command(Request(tmp_path / "hf", tmp_path / "n", "megatron")).notes
    assert any("Megatron-Bridge's names" in note for note in notes)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kimi_kda_layers": ["1"]}, "not a list of layers"),
        ({"kimi_kda_layers": [0, 1, 2]}, r"kimi_kda_layers is \[0, 1, 2\], of 4 layers"),
        *in_soak(
            ({"kimi_kda_layers": None}, "kimi_kda_layers is None, not a list of layers"),
            ({"kimi_linear_num_heads": None}, "num_value_heads|num_key_heads is None"),
            ({"kimi_kda_gate_lower_bound": 1.0}, "not a negative number"),
            ({"kimi_attn_res_block_size": -2}, "attn_res_block_size is -2, not a size"),
        ),
        ({"moe_latent_size": None}, "lacks latents of attention or experts"),
    ],
    ids=str,
)
def test_a_description_of_bridge_that_is_none_is_one_error(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    bridge = save_as_bridge(tmp_path / "bridge", publish(tmp_path / "hf", codes=False), **changes)
    with pytest.raises(PrecisionctlError, match=words):
        plan_command(Request(bridge, tmp_path / "text", "hf"))


# Engines


def test_the_released_codes_keep_every_rule_and_come_back_so(tmp_path: Path) -> None:
    """Whose list says nothing of projections around experts, nor of what weighs residual streams: both engines have
    these without codes (vLLM models/kimi_k3/nvidia/model.py, SGLang models/kimi_k3.py)."""
    publish(tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    run(tmp_path / "m", tmp_path / "codes", "hf", precision="fp8")
    for directory in ("hf", "codes"):
        for target in ("vllm", "sglang"):
            assert check(open_checkpoint(tmp_path / directory), engine_named(target)) == [], target


@pytest.mark.parametrize("target", ["vllm", *in_soak("sglang")])
def test_an_export_has_codes_of_mlps_and_experts_alone(tmp_path: Path, target: str) -> None:
    publish(tmp_path / "hf", codes=False)
    asked = Request.export(tmp_path / "hf", tmp_path / "out", target, "dynamic", keep_misfits=True)
    codes = plan_command(asked).plan.codes
    assert {name.split(".")[-2] for name in codes} == {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
    execute(plan_command(asked))
    said = json.loads((tmp_path / "out/config.json").read_text())
    assert engine_named(target).lacks(said) == []

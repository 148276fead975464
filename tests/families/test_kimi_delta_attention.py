"""Kimi delta attention: the rule against a slow one, and the families that have it, by published names and others."""

import json
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from gpt_models import assert_texts_are_apart
from in_memory import to_hf, to_megatron
from installed import BEFORE_5_23
from safetensors.torch import load_file, save_file
from soaking import in_soak
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

from precisionctl.architectures.families import architecture_of, from_hf_config, from_megatron_args, to_hf_config
from precisionctl.architectures.megatron.megatron_args import to_megatron_args
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import DamagedCheckpoint, ShapeMismatch, UnknownArchitecture
from precisionctl.model.recurrent_parts import GatedDeltaNet
from precisionctl.param import Parallelism
from precisionctl.trainer.model.recurrent.delta_rule import DECAY_BLOCK, gated_delta_rule
from precisionctl.trainer.model.recurrent.recurrence import CHUNK

pytestmark = pytest.mark.skipif(BEFORE_5_23, reason="before 5.23 transformers had Kimi Linear alone")


def inputs(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Two heads with keys of 4 channels and values of 3, of which a channel forgets all by the next token, and one
    nothing: queries, keys, values, decays, learning rates."""
    torch.manual_seed(length)
    query, key = torch.randn(2, 2, length, 2, 4, dtype=dtype).unbind()
    value, decay, beta = torch.randn(2, length, 2, 3), -5 * torch.rand(2, length, 2, 4), torch.rand(2, length, 2)
    decay[..., 1], decay[..., 2] = -100, 0
    return [query, key, value.to(dtype), decay.to(dtype), beta.to(dtype)]


def slowly(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Token by token and head by head, as the paper defines it (equation 1)."""
    out = torch.empty_like(value)
    for row in range(value.shape[0]):
        for head in range(value.shape[2]):
            state = value.new_zeros(key.shape[3], value.shape[3])  # [K, D]
            for token in range(value.shape[1]):
                k, q = key[row, token, head], query[row, token, head]
                k, q = k / (k @ k + 1e-6).sqrt(), q / (q @ q + 1e-6).sqrt() / 2  # the root of 4 channels
                step, v = beta[row, token, head], value[row, token, head]
                forgets = torch.eye(len(k), dtype=k.dtype) - step * torch.outer(k, k)
                state = forgets @ torch.diag(decay[row, token, head].exp()) @ state + step * torch.outer(k, v)
                out[row, token, head] = state.T @ q
    return out


@pytest.mark.parametrize("length", [1, DECAY_BLOCK + 1, CHUNK, 2 * CHUNK + 5])
def test_the_chunked_rule_gives_what_token_by_token_does(length: int) -> None:
    given = inputs(length)
    torch.testing.assert_close(gated_delta_rule(*given), slowly(*given), rtol=0, atol=1e-12)


def test_the_rule_in_fp32_is_that_of_transformers() -> None:
    given = inputs(2 * CHUNK + 9, torch.float32)
    expected, _ = recurrent_kimi_delta_attention(*given, None, False, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(gated_delta_rule(*given), expected, rtol=0, atol=3e-6)


def test_gradients_of_the_rule_are_those_of_small_differences() -> None:
    given = [tensor[:1].requires_grad_() for tensor in inputs(CHUNK + 2)]
    assert torch.autograd.gradcheck(gated_delta_rule, given, fast_mode=True)


@pytest.mark.parametrize("family", ["kimi-linear", *in_soak("ling-3")])
def test_texts_that_share_a_row_neither_see_nor_remember_one_another(tmp_path: Path, family: str) -> None:
    assert_texts_are_apart(family, tmp_path)


def published(folder: Path, family: str) -> dict[str, Tensor]:
    """As a family's files are published: A_log, dt_bias and convolutions in FP32, and Ling's with a layer of
    prediction."""
    pico.save(folder, family, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name in [*tensors]:
        if name.endswith(("A_log", "dt_bias", "conv1d.weight", "_bias")):
            tensors[name] = torch.randn_like(tensors[name], dtype=torch.float32)
        if family == "ling-3" and name.startswith("model.layers.3."):
            tensors[name.replace("model.layers.3.", "model.layers.4.")] = torch.randn_like(tensors[name])
    if family == "ling-3":
        for name, shape in {"enorm": (64,), "hnorm": (64,), "final_layernorm": (64,), "eh_proj": (64, 128)}.items():
            tensors[f"model.layers.4.{name}.weight"] = torch.randn(shape).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize(
    ("family", "container"),
    # a family's rows and a container's files have nothing to do with each other: each is here once
    [("kimi-linear", "torch_dist"), ("ling-3", "torch"), *in_soak(("kimi-linear", "torch"), ("ling-3", "torch_dist"))],
)
def test_a_published_checkpoint_comes_back_from_any_division(tmp_path: Path, family: str, container: str) -> None:
    stored = published(tmp_path / "hf", family)
    sizes = Parallelism(2, 2, expert=2)
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron", container=container, parallelism=sizes)))
    execute(plan_command(Request(tmp_path / "m", tmp_path / "back", "hf")))
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == stored.keys()
    assert [n for n in stored if back[n].dtype != stored[n].dtype or not torch.equal(back[n], stored[n])] == []


OF_EACH = {
    **{f"conv1d.weight.{part}": (512, 1, 4) for part in ("query", "key", "value")},
    **{f"in_proj.weight.{part}": (512, 64) for part in ("query", "key", "value")},
    "beta_proj.weight": (16, 64),
    "A_log": (16,),
    "dt_bias": (512,),
    "out_norm.weight": (32,),
    "out_proj.weight": (64, 512),
}
OWN = {
    "kimi-linear": {
        **{f"{name}_a_proj.weight": (32, 64) for name in ("f", "g")},
        **{f"{name}_b_proj.weight": (512, 32) for name in ("f", "g")},
    },
    "ling-3": {f"in_proj.weight.{part}": (512, 64) for part in ("g", "gate")},
}


@pytest.mark.parametrize("family", OWN)
def test_torch_dist_has_the_parts_as_megatron_core_stores_them(tmp_path: Path, family: str) -> None:
    """Names and shapes of KimiDeltaAttention, of Megatron-LM's dev branch: `in_proj_split_names`, and its modules."""
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=Parallelism(2))))
    index, start = dcp_metadata.read_index(tmp_path / "m/release"), "decoder.layers.0.self_attention."
    found = {key.removeprefix(start): stored for key, stored in index.tensors.items() if key.startswith(start)}
    assert {key: stored.shape for key, stored in found.items()} == OF_EACH | OWN[family]
    pieces = {key: {piece.sizes for piece in stored.pieces} for key, stored in found.items()}
    assert pieces["in_proj.weight.value"] == {(256, 64)} and pieces["beta_proj.weight"] == {(16, 64)}
    assert pieces["dt_bias"] == {(256,)} and pieces["out_proj.weight"] == {(64, 256)}


def respelled(folder: Path, spelling: str, family: str) -> None:
    """Let transformers save a model as it names tensors itself, published or in memory."""
    model = pico.make(family, dtype=torch.bfloat16)
    if spelling == "saved":
        model.save_pretrained(folder)
    else:
        model.save_pretrained(folder, save_original_format=False)


@pytest.mark.parametrize("spelling", ["saved", "in memory"])
@pytest.mark.parametrize("family", ["kimi-linear", *in_soak("ling-3")])
def test_other_spellings_are_the_same_model_and_stay(tmp_path: Path, family: str, spelling: str) -> None:
    pico.save(tmp_path / "published", family, dtype=torch.bfloat16)
    respelled(tmp_path / "other", spelling, family)
    one, other = (HuggingFaceReader(tmp_path / name) for name in ("published", "other"))
    assert one.specs.keys() != other.specs.keys()
    expected, found = to_megatron(one).tensors, to_megatron(other).tensors
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    kept = to_hf(other).tensors
    assert kept.keys() == other.specs.keys()
    assert all(torch.equal(kept[name], read_tensor(other, name)) for name in kept)
    assert to_hf(to_megatron(other)).tensors.keys() == one.specs.keys()


@pytest.mark.parametrize("family", ["kimi-linear", "ling-3"])
def test_transformers_loads_the_names_that_are_written(tmp_path: Path, family: str) -> None:
    model = pico.make_and_save(tmp_path, family)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    for (name, expected), found in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    sizes = {"num_heads": 3, "head_dim": 16, "kda_layers": [1, 2, 4], "full_attn_layers": [3]}
    pico.save(tmp_path / "hf", "kimi-linear", dtype=torch.bfloat16, linear_attn_config=sizes)
    with pytest.raises(ShapeMismatch, match=r"self_attention.in_proj.weight.*cannot be cut into 2"):
        plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=Parallelism(2)))


@pytest.mark.parametrize(
    ("family", "kept"),
    [("kimi-linear", {"f_a_proj", "f_b_proj", "b_proj"}), ("ling-3", {"f_proj", "b_proj"})],
)
def test_exports_leave_what_makes_decays_and_learning_rates_in_bf16(
    tmp_path: Path, family: str, kept: set[str]
) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    asked = Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "dynamic", keep_misfits=True)
    plan = plan_command(asked).plan
    of_first = {name.split(".")[-2] for name in plan.targets if "layers.0." in name and "att" in name.split(".")[3]}
    coded = {name.split(".")[-2] for name in plan.codes if "layers.0." in name}
    values = {name for name in of_first - coded if name.endswith("_proj")}
    assert values == kept


def test_linears_that_stay_values_alone_have_no_part_in_scales_that_others_share(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "kimi-linear", dtype=torch.bfloat16)
    asked = Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "nvfp4a16", keep_misfits=True)
    execute(plan_command(asked))
    stored, made = (load_file(tmp_path / each / "model.safetensors") for each in ("hf", "out"))
    kept = [name for name in stored if name.endswith((".f_a_proj.weight", ".f_b_proj.weight", ".b_proj.weight"))]
    assert len(kept) == 3 * 3 and all(torch.equal(made[name], stored[name]) for name in kept)
    assert "model.layers.0.self_attn.q_proj.weight_packed" in made


# What is published, but for what neither a tensor nor a computation depends on
KIMI = {
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
LING = {
    "first_k_dense_replace": 2,
    "gated_attention_proj_granularity_type": "head_wise",
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 6144,
    "kda_lower_bound": -5.0,
    "kda_safe_gate": True,
    "kv_lora_rank": 512,
    "layer_group_size": 6,
    "max_position_embeddings": 262144,
    "model_type": "bailing_hybrid",
    "moe_intermediate_size": 768,
    "moe_shared_expert_intermediate_size": 768,
    "n_group": 8,
    "no_kda_lora": True,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 42,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "rope_scaling": None,
    "rope_theta": 6000000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "short_conv_kernel_size": 4,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 157184,
}


@pytest.mark.parametrize("config", [KIMI, *in_soak(LING)], ids=["Kimi-Linear-48B-A3B", "Ling-3.0-Flash"])
def test_a_published_config_describes_what_transformers_makes_of_it(config: dict[str, Any]) -> None:
    """Every parameter of its class, at its size, has a row; and what is written is what was read."""
    known = {key: value for key, value in config.items() if key not in ("model_type", "q_lora_rank", "rope_scaling")}
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **known))
    model = from_hf_config(config)
    rows = architecture_of(model.architecture).spelled({}, model, naming="in memory")
    there = [row for row in rows if row.present.in_layout("hf", model) and not row.of_prediction]
    counted = sum(row.count(model) * torch.Size(row.shape(model)).numel() for row in there)
    biases = sum(buffer.numel() for name, buffer in theirs.named_buffers() if name.endswith("e_score_correction_bias"))
    assert counted == sum(parameter.numel() for parameter in theirs.parameters()) + biases
    kinds = [
        "linear_attention" if model.has_delta_net(layer) else "full_attention" for layer in range(len(model.gdn.layers))
    ]
    assert kinds == theirs.config.layer_types
    assert from_hf_config(to_hf_config(model, "bfloat16")) == model
    assert from_hf_config(theirs.config.to_dict()) == model
    written = to_hf_config(model, "bfloat16")
    passed_over = {"head_dim", "rope_scaling", "partial_rotary_factor", "scoring_func", "layer_group_size"}
    told = {key: value for key, value in config.items() if value is not None and key not in passed_over}
    if config is KIMI:
        del told["rope_theta"]
    assert {key: written.get(key) for key in told} == told


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return pico.config(family) | changes


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("kimi-linear", "mla_use_nope", False),
        ("kimi-linear", "hidden_act", "situ"),
        ("kimi-linear", "moe_renormalize", False),
        ("kimi-linear", "num_nextn_predict_layers", 1),
        ("ling-3", "q_lora_rank", 256),
        ("ling-3", "no_kda_lora", False),
        ("ling-3", "gated_attention_proj_granularity_type", "element_wise"),
        ("ling-3", "mtp_use_kda", True),
        ("ling-3", "group_norm_size", 4),  # Ling 2.5's
        ("ling-3", "expert_swiglu_limit_list", [0, 0, 4, 4]),
    ],
)
def test_what_is_not_computed_is_refused_by_the_name_of_its_setting(family: str, key: str, value: object) -> None:
    word = {"moe_renormalize": "norm_topk_prob"}.get(key, key)
    with pytest.raises(UnknownArchitecture, match=f"{word}="):
        from_hf_config(config_of(family, **{key: value}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gate_lower_bound": -5.0}, r"linear_attn_config\.gate_lower_bound=-5\.0"),  # Kimi K3's
        ({"kda_layers": [1, 2]}, "do not share out layers 1 to 4"),
        ({"kda_layers": [1, 2, 3, 4]}, "do not share out layers 1 to 4"),
        ({"kda_layers": [0, 1, 3]}, "do not share out layers 1 to 4"),
        ({"kda_layers": {"a": 1}}, "kda_layers is .*, not a list of layers"),
        ({"num_heads": "x"}, "num_heads is 'x', not a size"),
    ],
)
def test_layers_of_kimi_linear_that_are_not_shared_out_are_refused(change: dict[str, Any], words: str) -> None:
    said = config_of("kimi-linear")
    both = {"layer_types": None, "linear_attn_config": said["linear_attn_config"] | change}
    with pytest.raises((UnknownArchitecture, DamagedCheckpoint), match=words):
        from_hf_config(said | both)


def test_kimi_linear_counts_layers_from_one() -> None:
    said = config_of("kimi-linear")
    assert from_hf_config(said | {"layer_types": None}) == from_hf_config(said)
    assert from_hf_config(said).gdn.layers == (True, True, False, True)
    with pytest.raises(DamagedCheckpoint, match="linear_attn_config is None, not an object"):
        from_hf_config(said | {"linear_attn_config": None})


def test_what_transformers_saves_of_ling_has_the_size_of_heads_under_another_key() -> None:
    saved = config_of("ling-3")
    assert (saved["head_dim"], saved["linear_head_dim"]) == (16, 32)
    assert from_hf_config(saved) == from_hf_config(pico.settings("ling-3"))
    fewer = from_hf_config(saved | {"linear_num_heads": 8})
    assert (
        fewer.gdn
        and fewer.gdn.num_key_heads == AutoConfig.for_model(**saved | {"linear_num_heads": 8}).linear_num_heads
    )
    assert from_hf_config(to_hf_config(fewer, "bfloat16")) == fewer


def test_shared_experts_of_another_size_than_transformers_makes_are_refused() -> None:
    with pytest.raises(DamagedCheckpoint, match="moe_shared_expert_intermediate_size is 48, and transformers"):
        from_hf_config(config_of("ling-3", moe_shared_expert_intermediate_size=48))


@pytest.mark.parametrize("bound", [0, 5.0, float("nan"), "x", True, None])
def test_a_bound_of_decays_is_a_negative_number(bound: Any) -> None:
    with pytest.raises(DamagedCheckpoint, match="kda_lower_bound is .*, not a negative number"):
        from_hf_config(config_of("ling-3", kda_lower_bound=bound))


def test_arguments_that_describe_no_known_delta_attention_are_refused() -> None:
    kimi, ling = (to_megatron_args(pico.shape(family).padded(1)) for family in ("kimi-linear", "ling-3"))
    for args, change in (
        (kimi, {"kda_gate_lora_rank": None}),
        (ling, {"gated_attention_proj_granularity": "elementwise"}),
        (kimi, {"attention_output_gate": True}),
    ):
        with pytest.raises(UnknownArchitecture, match=f"{[*change][0]}|gated_attention_proj_granularity"):
            from_megatron_args(args | change, 256, "args")
    with pytest.raises(DamagedCheckpoint, match="8 value heads for 4 key heads"):
        GatedDeltaNet((True,), 4, 8, 4, 4, 4, kda=True)


def test_a_prediction_layer_of_ling_has_latent_attention(tmp_path: Path) -> None:
    stored = published(tmp_path, "ling-3")
    found = to_megatron(HuggingFaceReader(tmp_path)).tensors
    layer = "mtp.layers.0.transformer_layer.self_attention."
    expected = {
        "linear_gate": "attention.g_proj",
        "linear_proj": "attention.dense",
        "linear_q_proj": "attention.q_proj",
    }
    for ours, theirs in expected.items():
        assert torch.equal(found[f"{layer}{ours}.weight"], stored[f"model.layers.4.{theirs}.weight"])
    norm = "final_layernorm.weight"
    assert torch.equal(found[f"mtp.layers.0.{norm}"], stored[f"model.layers.4.{norm}"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1 and not any("in_proj" in name for name in found if "mtp" in name)

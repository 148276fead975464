"""The arguments that Megatron-LM takes from a checkpoint, and the model that we take from them."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from in_memory import InMemory
from pico import config, make, shape

from precisionctl.architectures.families import from_hf_config, from_megatron_args, to_hf_config
from precisionctl.architectures.megatron.megatron_args import otherwise_in_megatron, to_megatron_args
from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.megatron.directory import model_of
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.commands.source_notes import family_notes
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import ROWS, Parallelism, TensorSpec

MODEL = ModelShape("llama", 2, 16, 24, 4, 2, 4, 50, 64, 32)

# megatron/training/checkpointing.py, load_args_from_checkpoint, the same from core_v0.12.0 to core_v0.19.0
READ = {
    *("num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads", "num_query_groups"),
    *("group_query_attention", "kv_channels", "max_position_embeddings", "position_embedding_type"),
    *("add_position_embedding", "use_rotary_position_embeddings", "rotary_base", "rotary_percent"),
    *("rotary_interleaved", "add_bias_linear", "add_qkv_bias", "squared_relu", "swiglu"),
    *("untie_embeddings_and_output_weights", "apply_layernorm_1p", "normalization", "apply_query_key_layer_scaling"),
    *("attention_dropout", "hidden_dropout", "num_experts", "padded_vocab_size", "ckpt_format"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    "expert_model_parallel_size",
}
READ_SINCE_0_17 = {"mtp_num_layers"}
# the same function: absent means that the command line's value stays
READ_OF_OTHER_MODELS = {
    *("moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_token_dispatcher_type", "moe_grouped_gemm"),
    *("moe_router_pre_softmax", "moe_shared_expert_intermediate_size", "moe_router_score_function"),
    *("moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "moe_latent_size"),
    *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "spec"),
    *("is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio", "hybrid_override_pattern"),
    *("hybrid_layer_pattern", "gdp_num_householder", "mtp_hybrid_override_pattern", "mtp_use_repeated_layer"),
    *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
    *("moe_single_grouped_weight", "moe_single_grouped_bias"),
    *("tokenizer_model", "tokenizer_type", "tiktoken_pattern", "num_layers_per_virtual_pipeline_stage"),
}
# megatron/training/checkpointing.py, check_checkpoint_args and load_checkpoint
COMPARED = {"num_layers", "hidden_size", "num_attention_heads", "make_vocab_size_divisible_by"}
ASKED = {"no_save_optim", "no_save_rng", "iteration"}
# megatron/training/arguments.py (0.12 to 0.15) and megatron/core/transformer/transformer_config.py (since 0.16):
# not taken from a checkpoint, but what `launch-args` and readers of `args` look for
DESCRIBING = {
    *("norm_epsilon", "layernorm_epsilon", "layernorm_zero_centered_gamma", "qk_layernorm", "multi_latent_attention"),
    *("window_size", "window_attn_skip_freq", "use_rope_scaling", "rope_scaling_factor", "vocab_size"),
    *("rotary_seq_len_interpolation_factor", "params_dtype", "bf16", "fp16"),
}


def test_a_checkpoint_has_every_argument_that_some_version_of_megatron_reads_and_no_other(tmp_path):
    spec = TensorSpec((64, 16), DType.float16, ROWS)
    writer = TorchDistWriter(tmp_path, MODEL, {"embedding.word_embeddings.weight": spec}, parallelism=Parallelism(2))
    writer.lay_out()
    writer.finish(None)
    args = TorchDistReader(tmp_path).args
    assert args.keys() == READ | READ_SINCE_0_17 | COMPARED | ASKED | DESCRIBING
    assert not args.keys() & READ_OF_OTHER_MODELS
    assert (args["params_dtype"], args["fp16"], args["bf16"]) == (DType.float16, True, False)
    assert args["tensor_model_parallel_size"] == 2


def test_the_rotary_scaling_of_llama_3_1_is_an_argument():
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = dataclasses.replace(MODEL, rope_scaling={**rope, "original_max_position_embeddings": 8192})
    args = to_megatron_args(model)
    assert (args["use_rope_scaling"], args["rope_scaling_factor"]) == (True, 8.0)
    assert from_megatron_args(args, 64, "args") == model


def test_linear_rotary_scaling_is_an_argument():
    model = dataclasses.replace(MODEL, rope_scaling={"rope_type": "linear", "factor": 4.0})
    args = to_megatron_args(model)
    assert args["rotary_seq_len_interpolation_factor"] == 4.0
    assert from_megatron_args(args, 64, "args") == model


def test_a_window_counts_distances_in_megatron_and_tokens_in_transformers():
    config = make("mistral").config.to_dict()
    assert config["sliding_window"] == 8
    assert to_megatron_args(from_hf_config(config))["window_size"] == (7, 0)


def test_without_grouped_queries_megatrons_number_of_groups_means_nothing():
    args = to_megatron_args(MODEL) | {"group_query_attention": False, "num_query_groups": 1}  # Megatron's defaults
    assert from_megatron_args(args, 64, "args").num_query_groups == MODEL.num_attention_heads


@pytest.mark.parametrize("name", ["norm_epsilon", "layernorm_epsilon"])
def test_older_and_newer_versions_name_epsilon_differently(name):
    args = to_megatron_args(MODEL)
    del args["norm_epsilon"], args["layernorm_epsilon"]
    assert from_megatron_args(args | {name: 1e-6}, 64, "args").norm_epsilon == 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"normalization": "LayerNorm", "rotary_interleaved": True},
        {"swiglu": False},
        {"position_embedding_type": "learned_absolute"},
        {"add_bias_linear": True, "qk_layernorm": True, "num_experts": 8},
    ],
)
def test_arguments_that_no_family_fits_are_refused_with_what_adding_one_takes(changes):
    with pytest.raises(UnknownArchitecture, match="no family known here.*A table is one file"):
        from_megatron_args(to_megatron_args(MODEL) | changes, 64, "args")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rotary_base_per_layer", 5e6),
        ("position_embedding_type", "mrope"),
        ("use_mup", True),
        ("enable_mhc_connections", True),
        ("heterogeneous_layers_config_path", "layers.json"),
        ("moe_mlp_glu_interleave_size", 32),
        ("moe_shared_expert_glu_interleave_size", 32),
    ],
)
def test_arguments_of_modules_that_no_family_has_are_refused_by_name(name, value):
    with pytest.raises(UnknownArchitecture, match=f"{name}={value!r}"):
        from_megatron_args(to_megatron_args(MODEL) | {name: value}, 64, "args")


@pytest.mark.parametrize("balancing", ["sinkhorn", "quantile_balancing"])
def test_routers_that_choose_experts_otherwise_are_refused(balancing):
    """megatron/core/transformer/moe/router.py, TopKRouter.routing: a sinkhorn's scores, for one, are divided by no sum,
    as a Mixtral's are."""
    args = to_megatron_args(from_hf_config(make("mixtral").config.to_dict()))
    for loss in ("aux_loss", ["seq_aux_loss", "global_aux_loss"], "none"):
        assert from_megatron_args(args | {"moe_router_load_balancing_type": loss}, 256, "args", "mixtral").moe
    with pytest.raises(UnknownArchitecture, match=f"moe_router_load_balancing_type={balancing}"):
        from_megatron_args(args | {"moe_router_load_balancing_type": balancing}, 256, "args")


def test_groups_of_experts_need_no_number_of_chosen_experts():
    """megatron/training/arguments.py: --moe-router-topk is 2 by default."""
    args = to_megatron_args(shape("deepseek-v3").padded(1)) | {"moe_router_group_topk": 1}
    said = from_megatron_args(args | {"moe_router_topk": 2}, 256, "args", "deepseek_v3")
    del args["moe_router_topk"]
    assert from_megatron_args(args, 256, "args", "deepseek_v3") == said


@pytest.mark.parametrize(
    ("family", "changes", "difference"),
    [
        ("starcoder2", {}, {}),
        ("starcoder2", {"use_bias": False}, {"activation": ("gelu_tanh", "gelu")}),
        ("gemma", {}, {}),  # of a gate
        ("mixtral", {"num_experts_per_tok": 1}, {"moe.pre_softmax": (False, True)}),
        ("qwen3-moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}, {}),
    ],
)
def test_what_the_config_of_megatron_core_refuses_is_a_difference(
    family: str, changes: dict[str, object], difference: dict[str, object]
) -> None:
    """__post_init__ of TransformerConfig: its fused tanh GELU adds a bias or is a gate's, and a softmax over the one
    chosen expert has no gradient."""
    told = otherwise_in_megatron(from_hf_config(config(family) | changes))
    assert {field: told[field] for field in ("activation", "moe.pre_softmax") if field in told} == difference


@pytest.mark.parametrize(("topk_group", "scores"), [(4, None), (3, (2, 0)), (2, (2, 1)), (1, None)])
def test_groups_that_megatron_chooses_by_other_scores_are_a_difference(
    topk_group: int, scores: tuple[int, int] | None
) -> None:
    """group_limited_topk in megatron/core/transformer/moe/moe_utils.py sums topk // group_topk scores, which may be
    none. With as many groups as there are, all are chosen."""
    changes = {"num_experts_per_tok": 2, "n_group": 4, "topk_group": topk_group}
    model = from_hf_config(config("deepseek-v3") | changes)
    assert otherwise_in_megatron(model).get("moe.group_scores") == scores
    args = to_megatron_args(model)
    if scores != (2, 0):
        found = from_megatron_args(args, 256, "args", "deepseek_v3")
        assert found.moe and found.moe.group_topk == topk_group
        return
    with pytest.raises(UnknownArchitecture, match="moe_router_group_topk=3 beside moe_router_topk=2"):
        from_megatron_args(args, 256, "args")


def test_a_gpt_with_rotary_embeddings_is_a_gpt_neox_of_one_block_after_the_other():
    """Megatron has no argument for blocks beside each other: those of a Pythia describe another model, as they do to
    Megatron-Core, unless config.json says more."""
    found = from_megatron_args(to_megatron_args(shape("gpt-neox").padded(1)), 256, "")
    assert found.architecture == "gpt_neox" and not found.parallel_residual
    assert to_hf_config(found, "bfloat16")["use_parallel_residual"] is False


@pytest.mark.parametrize(("family", "part"), [("mixtral", "moe"), ("deepseek_v3", "mla"), ("mimo_v2_flash", "moe")])
def test_a_family_whose_models_all_have_a_part_does_not_describe_one_without(family: str, part: str) -> None:
    with pytest.raises(UnknownArchitecture, match=f"a model without `{part}` is none .* of {family} describes"):
        to_hf_config(dataclasses.replace(shape("llama-3"), architecture=family), "bfloat16")


def test_latent_attention_has_no_biases_whatever_the_arguments_say():
    """As slime starts GLM-4.7-Flash: multi_latent_attention.py makes its linears without."""
    args = to_megatron_args(shape("glm4-moe-lite").padded(1))
    model = from_megatron_args(args | {"add_qkv_bias": True}, 256, "", "glm4_moe_lite")
    assert model == from_megatron_args(args, 256, "", "glm4_moe_lite")


def test_an_indexer_whose_scores_may_be_negative_is_refused():
    args = to_megatron_args(from_hf_config(make("deepseek-v3.2").config.to_dict()))
    with pytest.raises(UnknownArchitecture, match="dsa_indexer_scoring_relu=False"):
        from_megatron_args(args | {"dsa_indexer_scoring_relu": False}, 64, "args")


@pytest.mark.parametrize("name", ["layernorm_zero_centered_gamma", "apply_layernorm_1p"])
def test_an_indexer_whose_norm_may_be_stored_less_one_is_refused(name: str) -> None:
    args = to_megatron_args(from_hf_config(make("deepseek-v3.2").config.to_dict()))
    with pytest.raises(UnknownArchitecture, match=f"{name}=True"):
        from_megatron_args(args | {name: True}, 64, "args")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"dsa_indexer_k_norm_epsilon": 1e-6}, ""),
        ({"dsa_indexer_k_norm_epsilon": 1e-3}, "epsilon 0.001"),
        ({"dsa_indexer_k_norm_epsilon": None, "layernorm_epsilon": 1e-5}, "epsilon 1e-05"),
        ({"dsa_indexer_k_norm_epsilon": None, "layernorm_epsilon": 1e-6}, ""),
    ],
)
def test_another_epsilon_of_an_indexers_keys_is_told_of(said: dict[str, float | None], told: str) -> None:
    """transformers/models/deepseek_v32/modeling_deepseek_v32.py has 1e-6, whatever config.json says."""
    of_keys = [note for note in notes_on_an_indexer(said) if "indexer's keys" in note]
    assert [told in note for note in of_keys] == [True] * bool(told)


@pytest.mark.parametrize("epsilon", ["1e-6", -1, 0, [1e-6], float("nan")])
def test_an_epsilon_of_an_indexers_keys_that_is_none_is_refused(epsilon: object) -> None:
    with pytest.raises(DamagedCheckpoint, match="dsa_indexer_k_norm_epsilon"):
        notes_on_an_indexer({"dsa_indexer_k_norm_epsilon": epsilon})


def notes_on_an_indexer(said: Mapping[str, object]) -> list[str]:
    """Those of `convert --to hf`, of a checkpoint whose arguments say so."""
    shape = from_hf_config(make("deepseek-v3.2").config.to_dict())
    source: Any = InMemory(shape, "megatron", {}, companions=Companions(files={"config.json": b"{}"}))
    source.args, source.path = to_megatron_args(shape) | said, Path("nowhere")
    return [*family_notes(source, shape, "hf", named=False)]


def test_experts_in_no_layer_describe_a_model_or_none():
    """ERNIE's config.json says the first layer that has some."""
    args = to_megatron_args(from_hf_config(make("ernie4-5-moe").config.to_dict())) | {"moe_layer_freq": [0] * 3}
    with pytest.raises(UnknownArchitecture, match="no family known here"):
        from_megatron_args(args | {"normalization": "LayerNorm"}, 256, "args")


@pytest.mark.parametrize("name", ["moe_layer_freq", "window_attn_skip_freq", "no_rope_freq", "linear_attention_freq"])
def test_a_word_of_as_many_letters_as_there_are_layers_says_nothing_of_them(name):
    args = to_megatron_args(from_hf_config(make("qwen3-next").config.to_dict())) | {"window_size": (7, 0)}
    with pytest.raises(DamagedCheckpoint, match="'rope' where a list has an entry for each layer"):
        from_megatron_args(args | {name: "rope"}, 64, "args")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("mtp_num_layers", value) for value in ([], "", 0.0, False)),
        *(("num_experts", value) for value in ({}, "none")),
        ("add_qkv_bias", "no"),
        ("untie_embeddings_and_output_weights", 2),
        ("moe_router_topk_scaling_factor", []),
        ("kv_channels", ""),
    ],
)
def test_what_is_no_switch_count_or_number_is_named_and_not_taken_for_absent(name, value):
    with pytest.raises(DamagedCheckpoint, match=f"{name} is .*, not (true or false|a whole number|a number)"):
        from_megatron_args(to_megatron_args(MODEL) | {name: value}, 64, "args")


def test_a_missing_argument_is_named():
    args = to_megatron_args(MODEL)
    del args["hidden_size"]
    with pytest.raises(DamagedCheckpoint, match="hidden_size"):
        from_megatron_args(args, 64, "args")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3-next", "linear_attention_freq"),
        ("qwen3-next", "linear_num_key_heads"),
        ("kimi-linear", "kda_lower_bound"),
        ("deepseek-v4", "csa_compress_ratios"),
        ("deepseek-v4", "csa_window_size"),
        ("deepseek-v4", "mhc_sinkhorn_iterations"),
    ],
)
def test_a_missing_argument_of_a_part_is_named(family: str, name: str) -> None:
    args = to_megatron_args(shape(family)) | {"kda_safe_gate": True}
    del args[name]
    with pytest.raises(DamagedCheckpoint, match=f"no `{name}` among Megatron's arguments"):
        from_megatron_args(args, 256, "args")


def test_weights_of_norms_that_have_none_are_zeros_to_which_one_is_added(tmp_path):
    """Without `--apply-layernorm-1p` the zeros that are stored of an OLMo would be its factors."""
    model = shape("olmo")
    args, rows = to_megatron_args(model), model.padded_vocab_size
    off = args | {"apply_layernorm_1p": False, "layernorm_zero_centered_gamma": False}
    config = Companions(files={"config.json": json.dumps(to_hf_config(model, "bfloat16")).encode()})
    specs = {"embedding.word_embeddings.weight": TensorSpec((rows, model.hidden_size), DType.bfloat16)}
    assert model_of(tmp_path, args, config, specs).architecture == "olmo"
    with pytest.raises(DamagedCheckpoint, match="layernorm_zero_centered_gamma is off.*--apply-layernorm-1p"):
        model_of(tmp_path, off, config, specs)


@pytest.mark.parametrize("kind", ["yarn", "linear", "llama3"])
def test_what_nothing_turns_by_is_no_argument(kind: str) -> None:
    """Cohere2 without a window has rotary embeddings nowhere, whatever its config.json says of their scaling."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    nowhere = {"sliding_window": None, "layer_types": ["full_attention"] * 4}
    model = from_hf_config(config("cohere2", **nowhere, rope_parameters=rope))
    args = to_megatron_args(model)
    assert args["position_embedding_type"] == "none"
    assert not args.get("use_rope_scaling") and not args.get("rotary_seq_len_interpolation_factor")
    assert otherwise_in_megatron(model) == otherwise_in_megatron(dataclasses.replace(model, rope_scaling=None))

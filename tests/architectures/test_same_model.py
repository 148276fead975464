"""Is this the same model? One comparison; and who computes which: our GPT, Megatron-Core."""

import dataclasses
import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pico
import pytest
import torch
import yaml
from conversions import assert_same_tensors, run
from soaking import few, in_soak
from transformers import AutoConfig, AutoModelForCausalLM

from precisionctl.architectures.families import from_hf_config, from_megatron_args, to_hf_config
from precisionctl.architectures.megatron.megatron_args import (
    as_config_says,
    otherwise_in_megatron,
    read_megatron_args,
    to_megatron_args,
)
from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.megatron.directory import model_of
from precisionctl.checkpoints.megatron.keys import RUN_FILE
from precisionctl.checkpoints.megatron.provider import described_args, from_provider, to_provider
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.dtypes import DType
from precisionctl.errors import (
    DamagedCheckpoint,
    PrecisionctlError,
    RecipeError,
    ShapeMismatch,
    UnknownArchitecture,
    shown,
)
from precisionctl.launch.frameworks import launch
from precisionctl.model.model_fields import LinearGate
from precisionctl.model.model_parts import (
    MLA,
    AltUp,
    GlobalAttention,
    Heterogeneous,
    HyperConnections,
    MoE,
    NgramEmbedding,
)
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import GatedDeltaNet, Mamba, Multipliers, ShortConv
from precisionctl.model.same_model import STORED, TENSORS, differences
from precisionctl.model.sparse_parts import CSA, DSA, MSA
from precisionctl.param import TensorSpec
from precisionctl.precision import Precision
from precisionctl.recipe import load_recipe
from precisionctl.trainer.model.computes import COMPUTED_BESIDE, named_values
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.settings import check_length

BF16 = Precision(fp8=False)


# Arguments that contradict config.json -------------------------------------------------------------------------------

CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "rotary_interleaved": {"rotary_interleaved": True},
    "rotary_percent": {"rotary_percent": 0.5},
    "normalization": {"normalization": "LayerNorm"},
    "activation": {"swiglu": False, "squared_relu": True},
    "gated activation": {"swiglu": False, "gated_linear_unit": True, "quick_geglu": True},
    "clamp": {"activation_func_clamp_value": 7.0},
    "linear offset": {"glu_linear_offset": 1.0},
    "window": {"window_size": (7, 0)},
    "rope scaling": {"use_rope_scaling": True},
    "interpolation": {"rotary_seq_len_interpolation_factor": 4.0},
    "yarn": {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 8.0},
    "qk_layernorm": {"qk_layernorm": True},
    "softmax type": {"softmax_type": "learnable"},
    "softmax scale": {"softmax_scale": 0.1},
    "learned positions": {"position_embedding_type": "learned_absolute"},
    "experts": {"num_experts": 4},
    "rotary_base": {"rotary_base": 5000},
    "epsilon": {"norm_epsilon": 1e-3, "layernorm_epsilon": 1e-3},
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in both layouts; its config.json beside the one of Megatron."""
    folder = tmp_path_factory.mktemp("same")
    pico.save(folder / "hf", "llama-2", dtype=torch.bfloat16)
    execute(plan_command(Request(folder / "hf", folder / "megatron", "megatron")))
    return folder


@pytest.mark.parametrize("reference", [False, True], ids=["beside", "reference"])
@pytest.mark.parametrize("way", CONTRADICTIONS)
def test_arguments_that_contradict_the_config_are_refused(
    converted: Path, tmp_path: Path, way: str, reference: bool
) -> None:
    source = tmp_path / "megatron"
    shutil.copytree(converted / "megatron", source)
    if reference:
        shutil.rmtree(source / "release/precisionctl")
    conversion = Request(source, tmp_path / "out", "hf", reference=converted / "hf" if reference else None)
    plan_command(conversion)  # nothing is wrong with it yet
    common = source / "release/common.pt"
    state = torch.load(common, weights_only=False)
    vars(state["args"]).update(CONTRADICTIONS[way])
    torch.save(state, common)
    with pytest.raises(PrecisionctlError, match="contradicts the arguments of Megatron"):
        plan_command(conversion)


def _with_arguments(converted: Path, source: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the Llama in Megatron's layout without config.json, and with other arguments."""
    shutil.copytree(converted / "megatron", source)
    shutil.rmtree(source / "release/precisionctl")
    common = source / "release/common.pt"
    state = torch.load(common, weights_only=False)
    change(vars(state["args"]))
    torch.save(state, common)
    return source


WITHOUT_WORDS = ("clamp", "linear offset", "softmax type", "softmax scale")
"""Those whose arguments are said only of a model that has such a thing, so that nothing takes them back."""

TRUSTED = [*(way for way in CONTRADICTIONS if way not in WITHOUT_WORDS), "a wrong shape", "no epsilon", "no sizes"]


@pytest.mark.parametrize(
    "way", few(TRUSTED, "rotary_percent", "activation", "experts", "a wrong shape", "no epsilon", "no sizes")
)
def test_a_trusted_reference_is_taken_where_the_arguments_say_otherwise(
    converted: Path, tmp_path: Path, way: str
) -> None:
    missing = {"no epsilon": ("norm_epsilon", "layernorm_epsilon"), "no sizes": ("ffn_hidden_size", "num_layers")}
    changed = CONTRADICTIONS | {"a wrong shape": {"ffn_hidden_size": 40}}

    def change(args: dict[str, Any]) -> None:
        args.update(changed.get(way, {}))
        for name in missing.get(way, ()):
            del args[name]

    source = _with_arguments(converted, tmp_path / "megatron", change)
    with pytest.raises(PrecisionctlError, match="trust-reference|Is the file whole"):
        plan_command(Request(source, tmp_path / "out", "hf", reference=converted / "hf"))
    trusting = {"reference": converted / "hf", "trust_reference": True}
    told = " ".join(run(source, tmp_path / "hf", "hf", **trusting).notes)
    assert "The reference is taken where Megatron's arguments say otherwise" in told
    assert_same_tensors(converted / "hf", tmp_path / "hf")
    run(source, tmp_path / "mended", "megatron", **trusting)
    run(tmp_path / "mended", tmp_path / "again", "hf")  # the arguments that are written agree with it
    assert_same_tensors(converted / "hf", tmp_path / "again")


def test_what_arguments_without_a_model_do_not_say_of_biases_and_padding_is_the_family_s() -> None:
    """As ms-swift's, where None is not said either. Of those of a model it is Megatron's word for a default."""
    model = pico.shape("qwen2")
    said = to_megatron_args(model)
    assert said["add_qkv_bias"] and not said["add_bias_linear"]
    nothing = {"lr": 1e-4, "add_qkv_bias": None, "add_bias_linear": None}
    assert as_config_says(nothing, model).items() >= {"lr": 1e-4, **said}.items()
    assert as_config_says({"add_qkv_bias": False}, model)["add_qkv_bias"] is False
    of_a_model = said | {"add_qkv_bias": None}
    assert as_config_says(of_a_model, model)["add_qkv_bias"] is None


@pytest.mark.parametrize("way", WITHOUT_WORDS)
def test_arguments_that_nothing_takes_back_are_refused_beside_a_trusted_reference_too(
    converted: Path, tmp_path: Path, way: str
) -> None:
    source = _with_arguments(converted, tmp_path / "megatron", lambda args: args.update(CONTRADICTIONS[way]))
    with pytest.raises(DamagedCheckpoint, match="trust-reference cannot take back"):
        plan_command(Request(source, tmp_path / "out", "hf", reference=converted / "hf", trust_reference=True))


def test_a_trusted_reference_must_fit_the_tensors_and_needs_arguments_to_overrule(
    converted: Path, tmp_path: Path
) -> None:
    pico.save(tmp_path / "wide", "llama-2", dtype=torch.bfloat16, intermediate_size=160)
    source = _with_arguments(converted, tmp_path / "megatron", lambda args: None)
    with pytest.raises(ShapeMismatch, match="the model's sizes say"):
        plan_command(Request(source, tmp_path / "out", "hf", reference=tmp_path / "wide", trust_reference=True))
    with pytest.raises(RecipeError, match="no reference"):
        Request(source, tmp_path / "out", "hf", trust_reference=True)
    with pytest.raises(RecipeError, match="for a checkpoint with Megatron's arguments"):
        plan_command(
            Request(converted / "hf", tmp_path / "out", "hf", reference=converted / "hf", trust_reference=True)
        )


def test_a_broken_reference_and_missing_arguments_are_said_to_be_that(converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted / "hf", tmp_path / "broken")
    config = json.loads((tmp_path / "broken/config.json").read_text())
    (tmp_path / "broken/config.json").write_text(json.dumps({**config, "hidden_size": None}))
    source = _with_arguments(converted, tmp_path / "megatron", lambda args: None)
    with pytest.raises(DamagedCheckpoint, match=r"^no `hidden_size` \(\S*/broken/config.json\)"):
        plan_command(Request(source, tmp_path / "out", "hf", reference=tmp_path / "broken"))
    source = _with_arguments(converted, tmp_path / "lacking", lambda args: args.pop("num_layers"))
    with pytest.raises(DamagedCheckpoint, match=r"^no `num_layers` among Megatron.s arguments \(\S*/lacking/release\)"):
        plan_command(Request(source, tmp_path / "out", "hf", reference=converted / "hf"))


READ: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"), (1, 8)),
    **dict.fromkeys(("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), (6, None)),
    **dict.fromkeys(("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"), (40,)),
    **dict.fromkeys(
        ("rotary_interleaved", "use_rope_scaling", "qk_layernorm", "multi_latent_attention"), (True, False)
    ),
    **dict.fromkeys(("swiglu", "squared_relu", "quick_geglu", "bias_gelu_fusion"), (True, False)),
    "multi_latent_attention": (True, False),
    **dict.fromkeys(("moe_router_pre_softmax", "moe_router_enable_expert_bias"), (True, False)),
    **dict.fromkeys(("moe_shared_expert_gate", "moe_apply_probs_on_input", "qk_l2_norm"), (True, False)),
    **dict.fromkeys(("group_query_attention", "untie_embeddings_and_output_weights"), (True, False)),
    **dict.fromkeys(("rotary_percent", "moe_router_topk_scaling_factor", "glu_linear_offset"), (0.5,)),
    **dict.fromkeys(("activation_func_clamp_value", "softmax_scale"), (0.7,)),
    **dict.fromkeys(("rotary_scaling_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"), (3.0,)),
    **dict.fromkeys(("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim", "yarn_beta_fast"), (3.0,)),
    **dict.fromkeys(("num_experts", "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk"), (2, None)),
    **dict.fromkeys(("original_max_position_embeddings", "yarn_original_max_position_embeddings"), (16,)),
    "normalization": ("LayerNorm", "RMSNorm"),
    "layernorm_epsilon": (0.1,),
    "rotary_base": (77,),
    "rotary_seq_len_interpolation_factor": (4.0,),
    "rope_scaling_factor": (3.0,),
    "rope_type": ("rope", "yarn"),
    "position_embedding_type": ("rope", "learned_absolute", "yarn"),
    "yarn_correction_range_round_to_int": (True, False),
    "yarn_beta_slow": (3.0,),
    "window_size": ((3, 0), (-1, 0), None),
    "window_attn_skip_freq": (2, 3, [1] * 3, None),
    "no_rope_freq": (2, [1, 0, 1, 0], None),
    "softmax_type": ("learnable", "off-by-one", "vanilla"),
    "moe_layer_freq": (2, [0, 1, 1, 1, 1, 1, 1]),
    "moe_router_score_function": ("softmax", "sigmoid"),
    **dict.fromkeys(("attention_output_gate", "head_wise_attn_gate"), (True, False)),
    "experimental_attention_variant": ("gated_delta_net", "kda", None),
    **dict.fromkeys(("kda_f_lora_rank", "kda_gate_lora_rank"), (8, None)),
    "kda_safe_gate": (True, False),
    "kda_lower_bound": (-3.0,),
    "gated_attention_proj_granularity": ("headwise", "elementwise", None),
    "linear_attention_freq": (3, [1, 0, 1, 0]),
    **dict.fromkeys(("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim"), (2,)),
    **dict.fromkeys(("linear_num_value_heads", "linear_conv_kernel_dim"), (8,)),
    **dict.fromkeys(("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"), (3,)),
    **dict.fromkeys(("dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"), (5,)),
    "dsa_indexer_rope_interleaved": (True, False),
    "hybrid_override_pattern": ("ME*-MM", "ME*-M"),
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim"), (16,)),
    "moe_latent_size": (16, None),
    "csa_compress_ratios": ([4, 0, 128], [0, 4]),
    **dict.fromkeys(("csa_window_size", "o_groups", "o_lora_rank", "num_residual_streams"), (2, 4)),
    **dict.fromkeys(("csa_compress_rotary_base", "mhc_sinkhorn_iterations"), (7,)),
    "enable_hyper_connections": (True, False),
    "moe_n_hash_layers": (2, None),
    **dict.fromkeys(("kimi_linear_num_heads", "kimi_linear_head_dim", "kimi_linear_conv_kernel_size"), (8,)),
    "kimi_kda_gate_lower_bound": (-3.0,),
    "kimi_kda_layers": ([1],),
    "kimi_attn_res_block_size": (7,),
    "heterogeneous_layers_config_path": ("others.json", None),
    "heterogeneous_layers_config_encoded_json": (json.dumps({"block_configs": [pico.block(1, 2.625)] * 5}), None),
}
"""Every argument that says what is computed, and other values of it."""

SAID_OTHERWISE = {
    *("padded_vocab_size", "vocab_size", "make_vocab_size_divisible_by", "seq_length", "max_position_embeddings"),
    *("add_bias_linear", "add_qkv_bias", "apply_layernorm_1p", "layernorm_zero_centered_gamma", "mtp_num_layers"),
    *("norm_epsilon", "gated_linear_unit"),  # `layernorm_epsilon` and `swiglu` win
    *("attention_dropout", "hidden_dropout", "add_position_embedding", "use_rotary_position_embeddings"),
    *("apply_query_key_layer_scaling", "moe_grouped_gemm", "moe_token_dispatcher_type", "apply_rope_fusion"),
    *("dsa_indexer_k_norm_epsilon", "is_hybrid_model", "actual_vocab_size"),
}
"""Those that do not, or that tensors show: which biases there are, and how norms and the vocabulary are stored."""


LLAMA3 = pico.LLAMA3_ROPE | {"original_max_position_embeddings": 8192}
FAMILIES = pico.FAMILIES | {"llama-3.1": {"rope_parameters": LLAMA3}}


@cache
def config_of(family: str) -> dict[str, Any]:
    settings = {"model_type": "llama"} | pico.SIZES | pico.NO_TOKENS | deepcopy(FAMILIES[family])
    return AutoConfig.for_model(**settings).to_dict()


def shape_of(family: str, **changes: Any) -> ModelShape:
    return from_hf_config(config_of(family) | changes)


@cache
def companions_of(family: str) -> Companions:
    return Companions({"config.json": json.dumps(config_of(family)).encode()})


def read_beside_config(family: str, args: Mapping[str, Any]) -> ModelShape:
    """What a Megatron checkpoint with these arguments is read as, where the family's config.json lies in it."""
    embedding = TensorSpec((256, 64), DType.bfloat16)
    return model_of(Path("checkpoint"), args, companions_of(family), {"embedding.word_embeddings.weight": embedding})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_is_read_beside_the_arguments_that_are_written_for_it(family: str) -> None:
    model = shape_of(family)
    assert not differences(read_beside_config(family, to_megatron_args(model.padded(1))), model)


@pytest.mark.parametrize("kinds", [pico.mixers, *in_soak(pico.switches)])
def test_no_argument_is_passed_over(kinds: Callable[[str], set[Any]]) -> None:
    """Whatever single argument is another one: it is refused, unless by the arguments it is still the same model. Each
    is refused in some family, and there is none that neither table names."""
    refused = set()
    for family in (*pico.first_of_each(kinds), "llama-3.1"):
        shape = shape_of(family)
        args = to_megatron_args(shape.padded(1))
        same = (read_megatron_args(args, 256, ""), shape)
        assert args.keys() - SAID_OTHERWISE <= READ.keys()
        for name, value in ((name, value) for name, values in READ.items() for value in values):
            try:
                read_beside_config(family, args | {name: value})
            except PrecisionctlError:
                refused.add(name)
            else:
                told = read_megatron_args(args | {name: value}, 256, "")
                assert not all(differences(told, each) for each in same), (family, name, value)
    of_ling = {"kda_safe_gate", "kda_lower_bound", "gated_attention_proj_granularity"}
    if kinds is pico.switches:
        assert refused == READ.keys() - (of_ling if "ling-3" in pico.ABSENT else set())


def with_fields(model: ModelShape, change: Mapping[str, Any]) -> ModelShape:
    """The model with other values of fields, those of its parts with a dot."""
    for name, value in change.items():
        group, _, field = name.rpartition(".")
        value = dataclasses.replace(getattr(model, group), **{field: value}) if group else value
        model = dataclasses.replace(model, **{group or field: value})
    return model


# What our GPT computes ------------------------------------------------------------------------------------------------

DENSE = ModelShape(
    "llama", 2, 16, 24, 4, 2, 4, 50, 64, 32, sliding_window=3, window_layers=(True, False), rotary_base_local=100.0
)
EXPERTS = dataclasses.replace(
    DENSE, moe=MoE(8, 4, 12, (False, True), 8, "softmax", True, 1.5, True, False, 4, 2, 1), ffn_hidden_size=24
)
PLAIN_ROUTER = dataclasses.replace(DENSE, moe=MoE(8, 4, 12, (False, True)))
NO_WINDOW = dataclasses.replace(DENSE, sliding_window=None, window_layers=None, rotary_base_local=None)
DELTA = dataclasses.replace(NO_WINDOW, gdn=GatedDeltaNet((True, False), 2, 4, 4, 6, 3))
KDA = dataclasses.replace(
    NO_WINDOW, gdn=GatedDeltaNet((True, False), 4, 4, 4, 6, 3, kda=True, kda_lora_rank=5, kda_lower_bound=-5.0)
)
RESIDUALS = pico.shape("kimi-k3")
UPDATES = pico.shape("gemma3n")
CONVOLUTIONS = dataclasses.replace(NO_WINDOW, short_conv=ShortConv((True, False), 3))
GLOBAL = dataclasses.replace(DENSE, global_attention=GlobalAttention(1, 8, True))
SHARING = dataclasses.replace(DENSE, num_layers=4, window_layers=(True, False) * 2, num_kv_shared_layers=2)
BY_SIZE = dataclasses.replace(NO_WINDOW, heterogeneous=Heterogeneous((2, 0), (24, 24)))
MIXERS = dataclasses.replace(DENSE, mamba=Mamba("M*", 4, 4, 2, 8))
MAMBA_1 = dataclasses.replace(DENSE, mamba=Mamba("M*", 16, 1, 1, 8, gated_norm=False, dt_rank=3))
BESIDE = dataclasses.replace(
    NO_WINDOW,
    mamba=Mamba("PP", 4, 4, 2, 8),
    multipliers=Multipliers(1.5, 0.5, 0.75, 1.25, 0.5, (0.5, 0.75, 1.25, 1.5, 2.0), (1.5, 0.5)),
)
LATENT = dataclasses.replace(DENSE, mla=MLA(6, 6, 4, 4, 6))
INDEXED = dataclasses.replace(LATENT, dsa=DSA(2, 8, 12, (True, True)))
SHARED_LATENTS = dataclasses.replace(
    INDEXED, mla=MLA(None, 6, 4, 4, 6, nope_keys_by_head=True), softmax_scaling=True, rope_layers=(True, False)
)
BLOCKS = dataclasses.replace(NO_WINDOW, msa=MSA(2, 8, 3, 2, 1, (False, True)))
STREAMS = dataclasses.replace(
    NO_WINDOW,
    num_layers=3,
    num_query_groups=1,
    rotary_base_local=100.0,
    activation_clamp=0.5,
    csa=CSA("WCC", 3, 6, 2, 5, 2, 4, 1),
    mhc=HyperConnections(2, 3),
    moe=MoE(4, 2, 12, (True,) * 3, 12, "sqrtsoftplus", expert_bias=True, n_hash_layers=1),
)
NGRAMS = dataclasses.replace(
    NO_WINDOW,
    pre_layernorms=False,
    mhc=HyperConnections(2, None, lowrank=4),
    gdn=DELTA.gdn,
    msa=MSA(2, 8, 3, 2, 0, (False, True), averaged=True),
    ple=NgramEmbedding((True, False), 8, 2, 3, 2, 20, 4, 2, 5),
)
SCALED = dataclasses.replace(
    DENSE, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
)
SCALED_WITHOUT_ROPE = dataclasses.replace(SCALED, query_scaling_beta=0.5, rope_layers=(True, False))
PARALLEL = dataclasses.replace(DENSE, parallel_residual=True)
NORMED = dataclasses.replace(DENSE, qk_layernorm=True)
LEARNED = dataclasses.replace(DENSE, position_embedding="learned_absolute", rotary_base_local=None)
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 8,
    "short_factor": [1.0, 2.0],
    "long_factor": [2.0, 3.0],
}
WIDE = dataclasses.replace(DENSE, kv_channels=32, rotary_base=10.0)
"""With frequencies between those that YaRN keeps and those that it stretches."""
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FULL_YARN = YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "mscale": 0.7}
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
CHANGES: list[tuple[ModelShape, dict[str, Any]]] = [
    (DENSE, {"altup": AltUp(2)}),
    *(
        (UPDATES, {name: value})
        for name, value in {
            "altup.num_inputs": 3,
            "laurel_rank": 4,
            "activation_sparsity": (0.5,) * UPDATES.num_layers,
            "per_layer_vocab_size": 3,
        }.items()
    ),
    *(
        (DENSE, {name: value})
        for name, value in {
            "norm_epsilon": 0.1,
            "normalization": "LayerNorm",
            "activation": "gelu",
            "gated_linear_unit": False,
            "activation_clamp": 0.01,
            "glu_offset": 1.0,
            "position_embedding": "learned_absolute",
            "rotary_base": 50.0,
            "rotary_base_local": 3.0,
            "rotary_percent": 0.5,
            "rotary_interleaved": True,
            "sliding_window": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "window_layers": (False, True),
            "attention_chunk_size": 2,
            "rope_layers": (False, True),
            "qk_layernorm": True,
            "qk_l2_norm": True,
            "v_l2_norm": True,
            "v_head_dim": 6,
            "attention_value_scale": 0.5,
            "linear_gate": "softplus per head",
            "clip_qkv": 0.1,
            "keys_are_values": True,
            "layer_scalar": True,
            "per_layer_embed_dim": 8,
            "global_attention": GLOBAL.global_attention,
            "attention_output_gate": True,
            "query_pre_attn_scalar": 9.0,
            "attn_logit_softcapping": 0.1,
            "final_logit_softcapping": 0.1,
            "softmax_offset": True,
            "embedding_multiplier": 3.0,
            "embedding_norm": True,
            "embedding_layernorm": True,
            "post_layernorms": True,
            "pre_layernorms": False,
            "residual_multiplier": 0.5,
            "logit_multiplier": 2.0,
            "logits_scaling": 2.0,
            "parallel_residual": True,
            "tied_embeddings": True,
            "num_query_groups": 4,
            "kv_channels": 8,
            "hidden_size": 32,
            "ffn_hidden_size": 32,
            "num_attention_heads": 2,
            "moe": EXPERTS.moe,
            "mla": LATENT.mla,
            "gdn": DELTA.gdn,
            "short_conv": CONVOLUTIONS.short_conv,
            "mamba": MIXERS.mamba,
            "heterogeneous": BY_SIZE.heterogeneous,
        }.items()
    ),
    (DENSE, {"rope_scaling": YARN | {"factor": 1.0, "attention_factor": 3.0}}),
    (DENSE, {"rope_scaling": LONG | {"factor": 1.0}}),
    (NO_WINDOW, {"num_layers": 1}),
    (PARALLEL, {"shared_layernorm": True}),
    (NORMED, {"qk_layernorm_over_heads": True}),
    (NORMED, {"qk_layernorm_after_rope": True}),
    (SCALED, {"query_scaling_beta": 0.5}),
    (SCALED_WITHOUT_ROPE, {"query_scaling_floor": 2}),
    (LEARNED, {"max_position_embeddings": 64}),
    (LEARNED, {"position_embedding": "alibi"}),
    *(
        (dataclasses.replace(WIDE, rope_scaling=YARN | {"beta_fast": 1.5}), {"rope_scaling": YARN | change})
        for change in (
            {"beta_fast": 32.0},
            {"beta_fast": 1.5, "beta_slow": 0.5},
            {"beta_fast": 1.5, "truncate": False},
            {"beta_fast": 1.5, "factor": 2.0},
            {"beta_fast": 1.5, "mscale": 0.7, "mscale_all_dim": 0.3},
            {"beta_fast": 1.5, "factor": 1.0, "attention_factor": 3.0},
            {"rope_type": "linear"},
        )
    ),
    (dataclasses.replace(DENSE, rope_scaling=LONG), {"max_position_embeddings": 64}),
    *(
        (EXPERTS, {f"moe.{name}": value})
        for name, value in {
            "topk": 2,
            "score_function": "sigmoid",
            "pre_softmax": False,
            "topk_scaling_factor": 3.0,
            "num_groups": 2,
            "group_topk": 3,
            "group_scores": 2,
            "layer_freq": (True, False),
            "num_experts": 16,
            "ffn_hidden_size": 16,
            "shared_ffn_hidden_size": 16,
            "expert_bias": False,
            "expert_bias_on_logits": True,
            "router_bias": True,
            "shared_expert_gate": True,
            "shared_average": True,
            "probs_on_input": True,
            "own_norms": True,
            "latent_size": 8,
            "post_layernorm": True,
            "activation_clamp": 0.5,
        }.items()
    ),
    (PLAIN_ROUTER, {"moe.sparsemixer_eps": 0.4}),
    *((DELTA, {f"gdn.{name}": 8}) for name in ("num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")),
    *(
        (GLOBAL, {f"global_attention.{name}": value})
        for name, value in {"num_query_groups": 4, "kv_channels": 4, "keys_are_values": False}.items()
    ),
    (GLOBAL, {"global_attention.softmax_offset": True}),
    (GLOBAL, {"global_attention.rotary_percent": 0.5}),
    (GLOBAL, {"global_attention.num_attention_heads": 2}),
    *(
        (dataclasses.replace(DENSE, linear_gate="softplus per head"), {"linear_gate": kind})
        for kind in ("softplus per element", "sigmoid per head")
    ),
    (SHARING, {"num_kv_shared_layers": 1}),
    (SHARING, {"use_double_wide_mlp": True}),
    (GLOBAL, {"query_pre_attn_scalar": 4.0}),
    (with_fields(EXPERTS, {"moe.score_function": "sigmoid"}), {"moe.pre_softmax": False}),
    (DENSE, {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}),
    *(
        (MIXERS, {f"mamba.{name}": value})
        for name, value in {"pattern": "*M", "num_heads": 8, "head_dim": 8, "num_groups": 4, "state_dim": 4}.items()
    ),
    *((BY_SIZE, {"heterogeneous.num_query_groups": groups}) for groups in ((2, 2), (2, 1), (0, 2))),
    *((BY_SIZE, {"heterogeneous.ffn_hidden_size": channels}) for channels in ((24, 0), (24, 8))),
    (MIXERS, {"mamba.gated_norm": False}),
    *((MAMBA_1, {f"mamba.{name}": value}) for name, value in {"dt_rank": 4, "num_heads": 8, "state_dim": 4}.items()),
    *(
        (MAMBA_1, {f"mamba.{name}": value})
        for name, value in {"bcdt_layernorm": True, "bcdt_l2_norm_epsilon": 0.1}.items()
    ),
    (MIXERS, {"mamba.dt_rank": 4}),
    (BESIDE, {"mamba.gated_norm": False}),
    (BESIDE, {"multipliers": None}),
    *(
        (BESIDE, {f"multipliers.{name}": value})
        for name, value in {
            **dict.fromkeys(("attention_in", "attention_out", "key", "ssm_in", "ssm_out"), 3.0),
            "ssm": (0.5, 0.75, 1.25, 1.5, 3.0),
            "mlp": (3.0, 0.5),
        }.items()
    ),
    (MIXERS, {"rope_layers": (True, False)}),
    (MIXERS, {"norm_epsilon": 0.1}),
    (CONVOLUTIONS, {"short_conv.layers": (False, True)}),
    (CONVOLUTIONS, {"short_conv.kernel_dim": 4}),
    (DELTA, {"gdn.num_key_heads": 4}),
    (dataclasses.replace(DELTA, gdn=dataclasses.replace(DELTA.gdn, num_key_heads=4)), {"gdn.kda": True}),
    *((KDA, {"gdn.kda_lora_rank": rank}) for rank in (8, None)),
    *((KDA, {"gdn.kda_lower_bound": bound}) for bound in (-1.0, None)),
    (RESIDUALS, {"attn_res_block_size": 1}),
    (RESIDUALS, {"moe.latent_norm": False}),
    (RESIDUALS, {"gdn.kda_full_gate": False}),
    (DELTA, {"gdn.allow_neg_eigval": True}),
    (DELTA, {"gdn.norm_epsilon": 0.1}),
    (DELTA, {"pre_layernorms": False, "post_layernorms": True}),
    (DELTA, {"gdn.layers": (False, True)}),
    *((LATENT, {f"mla.{field.name}": 8}) for field in dataclasses.fields(MLA)[:5]),
    (SHARED_LATENTS, {"mla.nope_keys_by_head": False}),
    (dataclasses.replace(SHARED_LATENTS, rope_layers=None), {"mla.kv_source_layers": (0, 0)}),
    (LATENT, {"softmax_scaling": True}),
    (DENSE, {"lerope": True}),
    (INDEXED, {"mla.query_gate": True}),
    (LATENT, {"norm_gate_rank": 8}),
    *((LATENT, {"linear_gate": kind}) for kind in get_args(LinearGate)),
    (LATENT, {"dsa": INDEXED.dsa}),
    (NO_WINDOW, {"msa": BLOCKS.msa}),
    *(
        (BLOCKS, {f"msa.{name}": value})
        for name, value in {
            "n_heads": 4,
            "head_dim": 10,
            "block_size": 4,
            "topk_blocks": 3,
            "local_blocks": 2,
            "layers": (True, True),
        }.items()
    ),
    (DENSE, {"csa": CSA("WC", 3, 6, 2, 5, 2, 4, 1)}),
    (DENSE, {"mhc": STREAMS.mhc}),
    *(
        (STREAMS, {f"csa.{name}": value})
        for name, value in {
            "pattern": "CWC",
            "window_size": 2,
            "q_lora_rank": 8,
            "o_groups": 4,
            "o_lora_rank": 6,
            "n_heads": 3,
            "head_dim": 6,
            "topk": 2,
        }.items()
    ),
    (STREAMS, {"mhc.num_residual_streams": 3}),
    (STREAMS, {"mhc.mhc_sinkhorn_iterations": 4}),
    (STREAMS, {"mhc.epsilon": 0.1}),
    (STREAMS, {"mhc.magnitude": 1.0}),
    (STREAMS, {"mhc.mean_head": True}),
    (BLOCKS, {"msa.averaged": True}),
    (DELTA, {"gdn.output_gate": "sigmoid"}),
    (NGRAMS, {"mhc.lowrank": 5}),
    (NGRAMS, {"mhc.magnitude": 1.0}),
    (NGRAMS, {"ple": None}),
    *(
        (NGRAMS, {f"ple.{name}": value})
        for name, value in {
            "layers": (True, True),
            "embed_dim": 12,
            "conv_kernel_dim": 3,
            "ngram_size": 2,
            "heads_per_ngram": 4,
            "vocab_size_base": 30,
            "vocab_divisor": 7,
            "end_token": 3,
        }.items()
    ),
    (STREAMS, {"moe.n_hash_layers": 2}),
    (STREAMS, {"moe.score_function": "sigmoid"}),
    (STREAMS, {"rotary_base_local": 3.0}),
    (EXPERTS, {"moe.n_hash_layers": 1}),
    (dataclasses.replace(DENSE, post_layernorms=True), {"post_norm_epsilon": 0.1}),
    (dataclasses.replace(DENSE, zero_centered_gamma=True), {"final_gamma_whole": True}),
    (dataclasses.replace(DENSE, post_layernorms=True), {"scaled_post_layernorms": True}),
    (DENSE, {"attention_output_norm": True}),
    (DENSE, {"head_wise_attn_gate": True}),
    (DENSE, {"swiglu_limits": (0.0, 0.05)}),
    (EXPERTS, {"moe.swiglu_limits": (0.0, 0.05)}),
    (DENSE, {"residual_gate_temperature": 0.5}),
    (with_fields(EXPERTS, {"moe.latent_size": 6}), {"moe.expert_norms": True}),
    (EXPERTS, {"moe.logit_multiplier": 0.5}),
    (dataclasses.replace(DENSE, qk_l2_norm=True, rope_layers=(False, True)), {"qk_l2_norm_everywhere": True}),
]
"""Models, and for each field one with another value, where a layer uses it."""
INDEXERS: list[tuple[ModelShape, dict[str, Any]]] = [
    (INDEXED, {f"dsa.{name}": value})
    for name, value in {
        "n_heads": 3,
        "head_dim": 10,
        "topk": 13,
        "layers": (True, False),
        "rope_interleaved": True,
        "kpool": 4,
    }.items()
]
"""What makes another model of texts that are longer than those that GPT takes."""
ROUNDED: list[tuple[ModelShape, dict[str, Any]]] = [
    (dataclasses.replace(DENSE, embedding_multiplier=9.8), {"rounded_embedding_multiplier": True}),
    (UPDATES, {"rounded_per_layer_multipliers": False}),
]
"""What makes another model in BF16 alone."""
TRAINED: list[tuple[ModelShape, dict[str, Any]]] = [(UPDATES, {"altup.coef_clip": 0.01})]
"""What makes another model while it is trained."""
ALL_EXPERTS = with_fields(EXPERTS, {"moe.layer_freq": (True, True)})
NO_GATE = dataclasses.replace(DENSE, gated_linear_unit=False)
NO_GROUPS = with_fields(EXPERTS, {"moe.num_groups": None, "moe.group_topk": None, "moe.group_scores": None})
SIGMOID = with_fields(EXPERTS, {"moe.score_function": "sigmoid"})
ON_INPUT = with_fields(SIGMOID, {"moe.probs_on_input": True})
ROOTS_ON_INPUT = with_fields(ON_INPUT, {"moe.score_function": "sqrtsoftplus"})
NO_SHARED = with_fields(EXPERTS, {"moe.shared_ffn_hidden_size": None})
UNUSED: list[tuple[ModelShape, dict[str, Any]]] = [
    (DENSE, {"max_position_embeddings": 64}),
    (DENSE, {"rope_layers": (True, True)}),
    (DENSE, {"v_head_dim": 4}),
    (LATENT, {"v_head_dim": 6}),
    (DENSE, {"shared_layernorm": True}),
    (DENSE, {"qk_layernorm_over_heads": True}),
    (DENSE, {"qk_layernorm_after_rope": True}),
    (DENSE, {"query_scaling_floor": 2}),
    (DENSE, {"use_double_wide_mlp": True}),
    (DENSE, {"rounded_embedding_multiplier": True, "rounded_per_layer_multipliers": True}),
    (NO_WINDOW, {"window_layers": (False, False), "attention_chunk_size": 2}),
    (
        DENSE,
        {
            "post_norm_epsilon": 0.1,
            "scaled_post_layernorms": True,
            "final_gamma_whole": True,
            "qk_l2_norm_everywhere": True,
        },
    ),
    (dataclasses.replace(DENSE, qk_l2_norm=True), {"qk_l2_norm_everywhere": True}),
    (LEARNED, {"rope_layers": (True, False)}),
    (NO_SHARED, {"moe.shared_expert_gate": True}),
    (NO_SHARED, {"moe.shared_average": True}),
    (with_fields(EXPERTS, {"moe.expert_bias": False}), {"moe.expert_bias_on_logits": True}),
    (DENSE, {"query_pre_attn_scalar": 4}),
    (DENSE, {"gdn": dataclasses.replace(DELTA.gdn, layers=(False, False))}),
    *((DELTA, {f"gdn.{name}": value}) for name, value in {"kda_lora_rank": 5, "kda_lower_bound": -5.0}.items()),
    (KDA, {"gdn.output_gate": "sigmoid"}),
    (NGRAMS, {"mhc.epsilon": 0.1}),
    (NO_WINDOW, {"short_conv": ShortConv((False, False), 3)}),
    (DENSE, {"moe": dataclasses.replace(EXPERTS.moe, layer_freq=(False, False))}),
    (DENSE, {"rope_scaling": {"rope_type": "linear", "factor": 1.0}}),
    (DENSE, {"rope_scaling": {"rope_type": "yarn", "factor": 1, "original_max_position_embeddings": 8}}),
    (DENSE, {"rope_scaling": {"rope_type": "llama3", "factor": 1.0, **LLAMA_3}}),
    (DENSE, {"rope_scaling": {"rope_type": "default", "factor": None}}),
    (dataclasses.replace(WIDE, rope_scaling=YARN), {"rope_scaling": FULL_YARN}),
    (dataclasses.replace(WIDE, rope_scaling=YARN), {"rope_scaling": YARN | {"attention_factor": None}}),
    (dataclasses.replace(DENSE, window_layers=None), {"window_layers": (True, True)}),
    (NO_WINDOW, {"window_layers": (False, True), "rotary_base_local": 7.0}),
    (NO_WINDOW, {"window_layers": (False, False), "sliding_window": 3, "rotary_base_local": 7.0}),
    (NO_GATE, {"activation_clamp": 0.01, "glu_offset": 2.0, "swiglu_limits": (0.05, 0.05)}),
    (DENSE, {"swiglu_limits": (0.0, 0.0)}),
    (EXPERTS, {"moe.swiglu_limits": (0.0, 0.0)}),
    (LEARNED, {"rotary_base": 5.0, "rotary_percent": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    (LATENT, {"num_query_groups": 4, "kv_channels": 6}),
    (LATENT, {"mla.nope_keys_by_head": True}),
    (SHARED_LATENTS, {"mla.kv_source_layers": (0, 1)}),
    (dataclasses.replace(DENSE, rope_layers=(False, False)), {"lerope": True}),
    (dataclasses.replace(DENSE, window_layers=None), {"global_attention": GLOBAL.global_attention}),
    (dataclasses.replace(GLOBAL, window_layers=(False, False)), {"num_query_groups": 4, "kv_channels": 2}),
    (ALL_EXPERTS, {"ffn_hidden_size": 9}),
    (MIXERS, {"ffn_hidden_size": 9}),
    (NO_GROUPS, {"moe.num_groups": 4}),
    (NO_GROUPS, {"moe.num_groups": 4, "moe.group_topk": 4, "moe.group_scores": 2}),
    (ON_INPUT, {"moe.pre_softmax": False}),
    (ROOTS_ON_INPUT, {"moe.pre_softmax": False}),
]
"""Models, and what none of their layers uses."""


def logits(model: ModelShape, dtype: torch.dtype = torch.float32, trained: bool = False) -> torch.Tensor:
    """Of parameters that have the same values wherever they have the same name and shape."""
    gpt = GPT(model, BF16, dtype=dtype)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if not parameter.is_floating_point():
                continue  # numbers that hash, and experts by token
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{tuple(parameter.shape)}".encode()))
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    with torch.set_grad_enabled(trained):
        return gpt(torch.arange(12)[None] % 7)


@pytest.mark.parametrize(("model", "change"), CHANGES, ids=lambda value: ",".join(value) if type(value) is dict else "")
def test_a_field_that_changes_the_logits_is_a_difference_and_one_that_gpt_does_not_heed_is_refused(
    model: ModelShape, change: dict[str, Any]
) -> None:
    other = with_fields(model, change)
    assert {name.removesuffix("_everywhere") for name in change} <= differences(model, other).keys()
    assert differences(model, other) == {n: (a, b) for n, (b, a) in differences(other, model).items()}
    try:
        found = logits(other)
    except UnknownArchitecture as error:
        assert next(iter(change)) in str(error)
    else:
        assert not torch.equal(found, logits(model))


@pytest.mark.parametrize(("model", "change"), UNUSED, ids=lambda value: ",".join(value) if type(value) is dict else "")
def test_what_no_layer_uses_changes_no_logits_and_is_no_difference(model: ModelShape, change: dict[str, Any]) -> None:
    other = with_fields(model, change)
    assert other != model and not differences(model, other) and not differences(other, model)
    torch.testing.assert_close(logits(other), logits(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "change"), INDEXERS, ids=lambda value: ",".join(value) if type(value) is dict else ""
)
def test_an_indexer_is_part_of_a_model_and_texts_that_it_would_choose_from_are_refused(
    model: ModelShape, change: dict[str, Any]
) -> None:
    other = with_fields(model, change)
    assert change.keys() == differences(model, other).keys()
    assert torch.equal(logits(other), logits(model))
    with pytest.raises(RecipeError, match="a text of 14 tokens, of which sparse attention would choose"):
        GPT(other, BF16)(torch.arange(14)[None])
    with pytest.raises(RecipeError, match="beyond what the trainer computes of sparse attention: 1[23]"):
        check_length(load_recipe("bf16", ["data.sequence_length=14"]), other)


@pytest.mark.parametrize(("model", "change"), ROUNDED, ids=lambda value: ",".join(value) if type(value) is dict else "")
def test_what_is_rounded_to_the_dtype_is_a_difference_that_fp32_does_not_show(
    model: ModelShape, change: dict[str, Any]
) -> None:
    other = with_fields(model, change)
    assert change.keys() == differences(model, other).keys()
    assert torch.equal(logits(other), logits(model))
    assert not torch.equal(logits(other, torch.bfloat16), logits(model, torch.bfloat16))


@pytest.mark.parametrize(("model", "change"), TRAINED, ids=lambda value: ",".join(value) if type(value) is dict else "")
def test_what_is_heeded_in_training_alone_is_a_difference_that_evaluation_does_not_show(
    model: ModelShape, change: dict[str, Any]
) -> None:
    other = with_fields(model, change)
    assert change.keys() == differences(model, other).keys()
    assert torch.equal(logits(other), logits(model))
    assert not torch.equal(logits(other, trained=True), logits(model, trained=True))


def test_every_field_of_a_model_is_one_of_those_above() -> None:
    changed = {name for _, change in (*CHANGES, *INDEXERS, *ROUNDED, *TRAINED) for name in change}
    assert changed | {*STORED, *TENSORS} == NAMES and not changed & {*STORED, *TENSORS}


NAMES = {
    name
    for model in (EXPERTS, INDEXED, BLOCKS, DELTA, CONVOLUTIONS, BESIDE, BY_SIZE, GLOBAL, STREAMS, NGRAMS, UPDATES)
    for name, _ in named_values(model)
}


def test_those_are_all_fields_of_a_model() -> None:
    """Those of parts too: of all fields that are dataclasses but the wrapper, in which this is the text model."""
    kinds = {name: get_args(hint) for name, hint in get_type_hints(ModelShape).items() if name != "wrapper"}
    of_parts = {
        f"{part}.{field.name}"
        for part, listed in kinds.items()
        for kind in filter(dataclasses.is_dataclass, listed)
        for field in dataclasses.fields(kind)
    }
    assert {field.name for field in dataclasses.fields(ModelShape)} | of_parts == NAMES


BESIDE_MIXERS_OTHERWISE = {
    **{name: not value for name, value in COMPUTED_BESIDE["mamba"].items() if isinstance(value, bool)},
    "mla": LATENT.mla,
    "gdn": DELTA.gdn,
    "attention_chunk_size": 2,
}


BESIDE_SIZES_OTHERWISE = {
    **{name: not value for name, value in COMPUTED_BESIDE["heterogeneous"].items() if isinstance(value, bool)},
    "mla": LATENT.mla,
    "moe": EXPERTS.moe,
    "gdn": DELTA.gdn,
    "short_conv": CONVOLUTIONS.short_conv,
    "global_attention": GlobalAttention(kv_channels=8),
    "msa": BLOCKS.msa,
    "mamba": MIXERS.mamba,
    **dict.fromkeys(("norm_gate_rank", "per_layer_embed_dim"), 8),
    **dict.fromkeys(("num_kv_shared_layers", "mtp_num_layers", "attn_res_block_size"), 1),
    "residual_gate_temperature": 2.0,
    "linear_gate": "softplus per head",
}


BESIDE_CSA_OTHERWISE = {
    **{name: not value for name, value in COMPUTED_BESIDE["csa"].items() if isinstance(value, bool)},
    **dict.fromkeys(("attention_chunk_size", "sliding_window", "num_query_groups"), 2),
    **dict.fromkeys(("query_pre_attn_scalar", "query_scaling_beta", "attn_logit_softcapping"), 3.0),
    "position_embedding": "learned_absolute",
    "residual_multiplier": 0.5,
    "num_kv_shared_layers": 1,
    **dict.fromkeys(("per_layer_embed_dim", "v_head_dim", "clip_qkv"), 8),
    "attention_value_scale": 0.5,
    "linear_gate": "softplus per head",
    "mla": LATENT.mla,
    "moe.own_norms": True,
}


BESIDE_MSA_OTHERWISE = {
    **{name: not value for name, value in COMPUTED_BESIDE["msa"].items() if isinstance(value, bool)},
    **dict.fromkeys(("attention_chunk_size", "sliding_window"), 2),
    "attn_logit_softcapping": 3.0,
    "normalization": "LayerNorm",
    "num_kv_shared_layers": 1,
    "linear_gate": "softplus per head",
    "mla": LATENT.mla,
    "gdn": DELTA.gdn,
    "pre_layernorms": False,
    "global_attention": GLOBAL.global_attention,
    "msa.head_dim": 2,
    "msa.n_heads": 1,
}


BESIDE_LOWRANK_OTHERWISE = {
    **{name: not value for name, value in COMPUTED_BESIDE["mhc.lowrank"].items() if isinstance(value, bool)},
    "normalization": "LayerNorm",
    "num_kv_shared_layers": 1,
    "gdn": KDA.gdn,
    "mla": LATENT.mla,
    "global_attention": GLOBAL.global_attention,
}


BESIDE_SHORT_CONVS_OTHERWISE = {
    **{name: not value for name, value in COMPUTED_BESIDE["short_conv"].items() if isinstance(value, bool)},
    "gdn": DELTA.gdn,
    "mamba": MIXERS.mamba,
    "attention_chunk_size": 2,
    "num_kv_shared_layers": 1,
}


def _other_than(value: object) -> object:
    if isinstance(value, bool):
        return not value
    return "gelu" if isinstance(value, str) else 0.5 if isinstance(value, float) else 1 if value == 0 else 3


BESIDE_MLA_OTHERWISE = {name: _other_than(value) for name, value in COMPUTED_BESIDE["mla"].items()}
LATENT_WITHOUT_WINDOW = dataclasses.replace(NO_WINDOW, mla=LATENT.mla)


@pytest.mark.parametrize(
    ("model", "change"),
    [
        (DENSE, {"position_embedding": "relative"}),
        (LATENT_WITHOUT_WINDOW, {"position_embedding": "alibi"}),
        (DENSE, {"normalization": "ScaleNorm"}),
        (EXPERTS, {"moe.score_function": "tanh"}),
        (DENSE, {"attn_res_block_size": 1}),
        *((LATENT_WITHOUT_WINDOW, {name: value}) for name, value in BESIDE_MLA_OTHERWISE.items()),
        *((DELTA, {name: _other_than(value)}) for name, value in COMPUTED_BESIDE["gdn"].items()),
        (DELTA, {"activation": "gelu"}),
        *((CONVOLUTIONS, {name: value}) for name, value in BESIDE_SHORT_CONVS_OTHERWISE.items()),
        *((MIXERS, {name: value}) for name, value in BESIDE_MIXERS_OTHERWISE.items()),
        *((BY_SIZE, {name: value}) for name, value in BESIDE_SIZES_OTHERWISE.items()),
        *((each, {"mamba.dt_rank": 4}) for each in (MIXERS, BESIDE)),
        (MIXERS, {"mamba.bcdt_layernorm": True}),
        (MIXERS, {"mamba.bcdt_l2_norm_epsilon": 0.1}),
        (with_fields(MAMBA_1, {"mamba.bcdt_l2_norm_epsilon": 0.1}), {"mamba.bcdt_layernorm": True}),
        *((STREAMS, {name: value}) for name, value in BESIDE_CSA_OTHERWISE.items()),
        *((BLOCKS, {name: value}) for name, value in BESIDE_MSA_OTHERWISE.items()),
        *((NGRAMS, {name: value}) for name, value in BESIDE_LOWRANK_OTHERWISE.items()),
    ],
    ids=str,
)
def test_what_gpt_does_not_compute_is_refused_by_name(model: ModelShape, change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    with pytest.raises(UnknownArchitecture, match=f"{name}={shown(value)}"):
        GPT(with_fields(model, change), BF16)


def test_a_gate_of_embeddings_by_an_activation_with_parameters_is_refused() -> None:
    with pytest.raises(UnknownArchitecture, match="is not computed here with per_layer_embed_dim="):
        GPT(dataclasses.replace(DENSE, activation="xielu", gated_linear_unit=False, per_layer_embed_dim=8), BF16)


@pytest.mark.parametrize(
    "change",
    [
        {"v_head_dim": 8, "attention_output_gate": True},
        {"v_head_dim": 8, "keys_are_values": True},
        {"clip_qkv": 0.1, "attention_output_gate": True},
        {"linear_gate": "softplus per head", "parallel_residual": True},
        {"linear_gate": "softplus per head", "pre_layernorms": False},
    ],
    ids=str,
)
def test_what_gates_and_values_of_another_size_are_not_computed_beside_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnknownArchitecture, match=f"is not computed here with .*{next(iter(change))}="):
        GPT(with_fields(DENSE, change), BF16)


@pytest.mark.parametrize(
    "model",
    [dataclasses.replace(BESIDE, gated_linear_unit=False), with_fields(MIXERS, {"multipliers": BESIDE.multipliers})],
)
def test_multipliers_of_other_layers_than_a_mixer_beside_attention_and_a_gated_mlp_are_refused(
    model: ModelShape,
) -> None:
    with pytest.raises(UnknownArchitecture, match="is not computed here with multipliers="):
        GPT(model, BF16)


@pytest.mark.parametrize("scores", ["sigmoid", "sqrtsoftplus"])
def test_a_sparse_mixer_of_other_scores_than_a_softmax_is_refused(scores: str) -> None:
    with pytest.raises(UnknownArchitecture, match=r"is not computed here with moe.sparsemixer_eps=0\.4"):
        GPT(with_fields(PLAIN_ROUTER, {"moe.sparsemixer_eps": 0.4, "moe.score_function": scores}), BF16)


@pytest.mark.parametrize(
    ("model", "change", "refused"),
    [
        (NGRAMS, {"mhc.mhc_sinkhorn_iterations": 2}, "mhc.lowrank=4"),
        (NGRAMS, {"mhc": None, "msa": None, "pre_layernorms": True}, "ple="),
        (NGRAMS, {"mhc.lowrank": None}, "gdn="),
        (DELTA, {"msa": BLOCKS.msa}, "gdn="),
    ],
    ids=str,
)
def test_what_goes_with_streams_that_are_read_channel_by_channel_is_refused_elsewhere(
    model: ModelShape, change: dict[str, Any], refused: str
) -> None:
    with pytest.raises(UnknownArchitecture, match=f"is not computed here with .*{refused}"):
        GPT(with_fields(model, change), BF16)


def test_latent_attention_with_heads_of_two_sizes_is_refused() -> None:
    with pytest.raises(UnknownArchitecture, match="is not computed here with global_attention="):
        GPT(dataclasses.replace(LATENT, global_attention=GLOBAL.global_attention), BF16)


@pytest.mark.parametrize("change", [{"moe.own_norms": True}, {"add_bias_linear": True}], ids=str)
def test_what_experts_of_a_latent_size_do_not_compute_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(UnknownArchitecture, match=f"is not computed here with {next(iter(change))}=True"):
        GPT(with_fields(EXPERTS, {"moe.latent_size": 8, **change}), BF16)


# What Megatron-Core computes ------------------------------------------------------------------------------------------

OTHERWISE: dict[str, tuple[str, dict[str, Any], str]] = {
    "longrope": ("phi3-long", {}, "rope_scaling longrope / not used"),
    "dynamic": (
        "llama-2",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_scaling dynamic / not used",
    ),
    "llama3, another context": ("llama-3", {}, "rope_scaling llama3 / not used"),
    "yarn, another magnitude": (
        "llama-2",
        {"rope_parameters": pico.YARN_ROPE | {"attention_factor": 2.0}},
        "rope_scaling yarn / yarn",
    ),
    "latent attention, linear": (
        "deepseek-v3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling linear / not used",
    ),
    "groups of experts": ("deepseek-v2-groups", {}, "moe.group_scores 1 / 2"),
    "caps": ("gemma2", {}, "attn_logit_softcapping 5.0 / not used"),
    "another attention without a window": ("gemma4", {}, "global_attention used / not used"),
}
COMPUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama-2", {}),
    "llama3": ("llama-3.1", {}),
    "linear": ("llama-2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "yarn": ("llama-2", {"rope_parameters": pico.YARN_ROPE}),
    "gpt-oss": ("gpt-oss", {}),
    "phi3": ("phi3", {}),
    "deepseek-v3": ("deepseek-v3", {}),
    "all biases": ("llama-attention-bias", {}),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_what_megatron_computes_otherwise_is_said_and_comes_back(tmp_path: Path, case: str) -> None:
    family, changes, words = OTHERWISE[case]
    theirs = pico.make_and_save(tmp_path / "hf", family, dtype=torch.bfloat16, **changes)
    there = plan_command(Request(tmp_path / "hf", tmp_path / "megatron", "megatron"))
    (note,) = [note for note in there.notes if "computes another model" in note]
    assert words in note
    execute(there)
    home = Request(tmp_path / "megatron", tmp_path / "back", "hf")
    of_resume = next((tmp_path / "megatron").glob("*/")) / RUN_FILE
    of_resume.write_text('{"identity": {}}')  # which trains the model that config.json says
    assert not any("computed another one" in note for note in plan_command(home).notes)
    of_resume.unlink()
    back = plan_command(home)
    assert any("computed another one" in note and words in note for note in back.notes)
    assert differences(back.reader.model, from_hf_config(theirs.config.to_dict())) == {}
    with pytest.raises(UnknownArchitecture) as refused:
        launch(tmp_path / "megatron", "megatron-lm", None)
    if "--framework megatron-bridge" in str(refused.value):
        notes = launch(tmp_path / "megatron", "megatron-bridge", None).notes
        assert any("attn_logit_softcapping" in note and "AutoBridge" in note for note in notes)
    else:
        assert case != "caps" and "`precisionctl resume`" in str(refused.value)
        with pytest.raises(UnknownArchitecture, match=words.split()[0]):
            launch(tmp_path / "megatron", "megatron-bridge", None)


@pytest.mark.parametrize("case", COMPUTES)
def test_of_what_megatron_computes_nothing_is_said(case: str) -> None:
    family, changes = COMPUTES[case]
    assert not otherwise_in_megatron(shape_of(family, **changes))


def test_a_fixed_epsilon_of_latent_norms_is_told(tmp_path: Path) -> None:
    """transformers' latents have 1e-6, whatever config.json says: seen in what it makes."""
    for epsilon, told in ((1e-6, False), (1e-5, True)):
        folder = tmp_path / str(told)
        theirs = pico.make_and_save(folder, "deepseek-v2", rms_norm_eps=epsilon)
        attention = theirs.model.layers[0].self_attn
        assert attention.kv_a_layernorm.variance_epsilon == 1e-6
        planned = plan_command(Request(folder, tmp_path / f"{told}-megatron", "megatron"))
        assert any("1e-06, whatever config.json says" in note for note in planned.notes) is told


def test_megatron_s_scale_of_scores_is_read() -> None:
    """The root costs digits; Megatron-Bridge's Gemma 3 has such a scale."""
    for scalar in (24, 144, 168.5, 256):
        args = to_megatron_args(shape_of("gemma3").padded(1)) | {"softmax_scale": scalar**-0.5}
        assert read_megatron_args(args, 256, "").query_pre_attn_scalar == scalar
        if scalar != 24:
            with pytest.raises(PrecisionctlError, match="query_pre_attn_scalar 24 / "):
                read_beside_config("gemma3", args)
        else:
            read_beside_config("gemma3", args)


def test_a_magnitude_that_only_megatron_s_yarn_has_is_refused() -> None:
    """megatron-core multiplies by `mscale` without `mscale_all_dim` too, transformers does not."""
    args = to_megatron_args(shape_of("gpt-oss").padded(1))
    with pytest.raises(UnknownArchitecture, match=r"yarn_mscale=0\.7"):
        read_megatron_args(args | {"yarn_mscale": 0.7}, 256, "")


# Families of arguments alone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_a_dense_size_that_no_layer_uses_does_not_hide_the_family(family: str) -> None:
    model = shape_of(family).padded(1)
    args = to_megatron_args(model) | {"ffn_hidden_size": 7 * model.hidden_size}
    found = from_megatron_args(args, 256, "args")
    assert found.architecture == model.architecture and not differences(found, model)
    assert to_hf_config(found, "bfloat16")["intermediate_size"] == model.moe.ffn_hidden_size  # type: ignore[union-attr]
    assert not differences(read_beside_config(family, args), model)


def test_latent_attention_has_no_heads_of_its_own_size() -> None:
    """`--kv-channels` is the size of a head in runs without latent attention."""
    model = shape_of("deepseek-v3").padded(1)
    args = to_megatron_args(model) | {"kv_channels": 16}
    assert from_megatron_args(args, 256, "args").architecture == "deepseek_v3"


@pytest.mark.parametrize("family", ["llama-2", "phi3", "gemma2", "gpt2", "mixtral"])
def test_a_config_that_is_made_up_names_no_token_beyond_its_vocabulary(family: str) -> None:
    """Phi-3's class pads with 32000, where transformers cannot build a smaller embedding."""
    config = to_hf_config(shape_of(family), "float32")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert model.get_input_embeddings().padding_idx is None


def test_gemma_2_of_megatron_bridge_is_read_as_it_is_described_there() -> None:
    """models/gemma/gemma2_provider.py: `fast_gelu`, and a window in every other layer by its own attention."""
    args = to_megatron_args(shape_of("gemma2").padded(1)) | {"params_dtype": "torch.bfloat16"}
    fields = to_provider(args) | {
        "_target_": "megatron.bridge.models.gemma.gemma2_provider.Gemma2ModelProvider",
        "activation_func": {"_target_": "megatron.core.activations.fast_gelu", "_call_": False},
        "bias_activation_fusion": False,
    }
    del fields["window_attn_skip_freq"]
    assert not differences(read_beside_config("gemma2", from_provider(fields)), shape_of("gemma2"))


@pytest.mark.parametrize(
    ("family", "theirs"),
    [
        # llama.py, Llama31Config: rope scaling by its own fields, no switch
        ("llama-3", {"scale_factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}),
        # mistral.py, HFMistralImporter: config.json's number, where Megatron has one less
        ("mistral", {"window_size": [8, 0]}),
    ],
)
def test_nemo_2s_own_words_for_a_model_contradict_no_config(
    family: str, theirs: dict[str, Any], tmp_path: Path
) -> None:
    rope = (
        {"rope_parameters": pico.LLAMA3_ROPE | {"original_max_position_embeddings": 8192}}
        if family == "llama-3"
        else {}
    )
    shape = shape_of(family, **rope)
    fields = to_provider(to_megatron_args(shape.padded(1)) | {"params_dtype": "torch.bfloat16"}) | theirs
    if family == "llama-3":
        del fields["rope_scaling"], fields["rope_scaling_factor"]
    (tmp_path / "context").mkdir()
    (tmp_path / "weights").mkdir()
    (tmp_path / "context" / "model.yaml").write_text(yaml.safe_dump({"config": fields}))
    beside = Companions({"config.json": json.dumps(config_of(family) | rope).encode()})
    embedding = TensorSpec((256, 64), DType.bfloat16)
    read = model_of(
        tmp_path, described_args(tmp_path / "weights", None), beside, {"embedding.word_embeddings.weight": embedding}
    )
    assert not differences(read, shape)

"""Megatron-LM's arguments that describe a model, both ways; the same for every family.

What `--use-checkpoint-args` reads of a checkpoint, under the names of every version (see
megatron/training/arguments.py and, since 0.16, megatron/core/transformer/transformer_config.py).
"""

from collections.abc import Mapping
from typing import Any

from precisionctl.architectures.megatron.args_said import (
    TRUST_REFERENCE,
    all_but_every,
    check_kinds,
    needed,
    norm_epsilon,
    one_of,
)
from precisionctl.architectures.megatron.expert_args import chooses_groups_by_nothing, moe_args, read_moe
from precisionctl.architectures.megatron.heterogeneous_args import heterogeneous_args, read_heterogeneous
from precisionctl.architectures.megatron.recurrent_args import (
    DELTA_NET_NAMES,
    KDA_NAME,
    KIMI_K3,
    as_kimi_k3,
    delta_net_args,
    kimi_k3_args,
    mamba_args,
    read_delta_net,
    read_hybrid_mtp,
    read_mamba,
)
from precisionctl.architectures.megatron.sparse_args import (
    CSA_NAME,
    DSA_NAME,
    csa_args,
    dsa_args,
    read_csa,
    read_csa_rope,
    read_dsa,
)
from precisionctl.architectures.megatron.streams_args import MHC_NAME, mhc_args, read_mhc
from precisionctl.architectures.rope import LLAMA3
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, at, shown
from precisionctl.model.model_parts import MLA, MOST_LAYERS, check_size, real
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.same_model import differences
from precisionctl.model.sparse_parts import CSA

# Megatron's defaults differ from these, or older versions ask for them
_USUAL: Mapping[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "add_position_embedding": True,
    "use_rotary_position_embeddings": False,  # the older word for position_embedding_type
    "apply_query_key_layer_scaling": False,
}
_BASES = "rotary_base_per_layer"
"""Of Megatron-LM's dev branch; Megatron-Bridge says it for Step 3.5."""
_FOR_BASES = f"Of a Step 3.5 or 3.7, {TRUST_REFERENCE} Other commands take the result."
# what no table here has, and a model with it would be another one
WITHOUT = (
    *("apply_residual_connection_post_layernorm", "moe_router_topk_limited_devices"),
    *(_BASES, "use_mup"),
    *("enable_hyper_connections", "enable_mhc_connections"),  # but the first beside DeepSeek-V4's attention
    *("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"),  # rows of gate and up in turns
)
_SAME_NAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
    *("kv_channels", "normalization", "qk_layernorm", "rotary_interleaved", "add_bias_linear", "add_qkv_bias"),
    "make_vocab_size_divisible_by",
)
_MLA = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
GRANULARITY = "gated_attention_proj_granularity"
"""What an output gate has a number for: of latent attention each head (`headwise`), on Megatron-LM's dev branch."""
HEAD_WISE_GATE = "head_wise_attn_gate"
"""An output gate of each head in grouped attention, on that branch alone too."""
_YARN = {  # argument, key of rope_scaling, default of MLATransformerConfig
    "rotary_scaling_factor": ("factor", 40.0),
    "original_max_position_embeddings": ("original_max_position_embeddings", 4096),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}
MEGATRON_ONLY = (
    *("padded_vocab_size", "make_vocab_size_divisible_by", "add_bias_linear", "add_qkv_bias", "zero_centered_gamma"),
)
"""Fields of ModelShape that no config.json says: padding, which biases are there, how norms are stored."""


_ONLY_ARGS = (*MEGATRON_ONLY, "layernorm_zero_centered_gamma", "apply_layernorm_1p")
"""The arguments that say those."""


def to_megatron_args(model: ModelShape) -> dict[str, Any]:
    """The arguments of a model, for Megatron-LM of any version.

    Megatron has no argument for some rotary scalings, soft caps, embedding scales and norms after a block:
    `otherwise_in_megatron` names them, and config.json keeps them.
    """
    window = None if model.sliding_window is None else (model.sliding_window - 1, 0)
    base = model.rotary_base
    everywhere = model.qk_l2_norm_everywhere or all(model.rope_layers or ())
    return {
        **{name: getattr(model, name) for name in _SAME_NAME},
        **_USUAL,
        **_activation_args(model),
        **_mla_args(model),
        **dsa_args(model),
        **moe_args(model),
        **delta_net_args(model),
        **mamba_args(model),
        "norm_epsilon": model.norm_epsilon,  # until megatron-core 0.15
        "layernorm_epsilon": model.norm_epsilon,
        "apply_layernorm_1p": model.zero_centered_gamma,  # until megatron-core 0.15
        "layernorm_zero_centered_gamma": model.zero_centered_gamma,
        "max_position_embeddings": model.position_rows,
        "seq_length": model.max_position_embeddings,
        "group_query_attention": model.num_query_groups != model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "rotary_base": int(base) if base.is_integer() else base,
        "rotary_percent": model.rotary_percent,
        "window_size": window,  # distances to the left and right; Hugging Face counts the token itself
        "window_attn_skip_freq": None if model.window_layers is None else [int(each) for each in model.window_layers],
        # only where a model has them: older versions do not know the words
        **({"attention_output_gate": True} if model.attention_output_gate or _headwise(model) else {}),
        **({GRANULARITY: "headwise"} if _headwise(model) else {}),
        **({HEAD_WISE_GATE: True} if model.head_wise_attn_gate else {}),
        **(
            {"no_rope_freq": [int(not each) for each in model.rope_layers]}
            if model.rope_layers and any(model.rope_layers)
            else {}
        ),
        **({"softmax_type": "learnable"} if model.softmax_offset else {}),
        **({"qk_l2_norm": True} if model.qk_l2_norm and everywhere else {}),  # one for all layers
        "mtp_num_layers": model.mtp_num_layers or None,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.padded_vocab_size,
        "untie_embeddings_and_output_weights": model.untied_embeddings,
        **_rope_args(model),
        **csa_args(model, _yarn_args(model.rope_scaling or {"factor": 1.0})),
        **mhc_args(model),
        **kimi_k3_args(model),
        **heterogeneous_args(model),
    }


def _activation_args(model: ModelShape) -> dict[str, Any]:
    swiglu = model.gated_linear_unit and model.activation == "silu"
    args: dict[str, Any] = {"swiglu": swiglu, "squared_relu": model.activation == "squared_relu"}
    if model.activation == "gelu_tanh":
        # Megatron's fused kernel is the approximation, and its F.gelu is not. It adds a bias, or is a gate's
        # (transformer_config.py refuses it for others)
        args["bias_gelu_fusion"] = model.gated_linear_unit or model.add_bias_linear
    if model.activation in ("gelu", "relu"):  # of ReLU no argument says anything
        args["bias_gelu_fusion"] = False
    if model.gated_linear_unit and not swiglu:
        args |= {"gated_linear_unit": True, "quick_geglu": model.activation == "quick_gelu"}
    if model.gated_linear_unit and (not swiglu or model.glu_offset or model.activation_clamp):
        args |= {"glu_linear_offset": model.glu_offset, "activation_func_clamp_value": model.activation_clamp}
    return args


def _rope_args(model: ModelShape) -> dict[str, Any]:
    """How positions are embedded. Where nothing turns, no scaling is said: Megatron's `yarn` is a kind of positions."""
    nowhere = model.alibi or not any(model.rope_layers or (True,))
    rope = {} if nowhere else model.rope_scaling or {}
    if rope.get("rope_type") == "yarn" and model.mla is None:
        yarn = {f"yarn_{argument}": value for argument, value in _yarn_args(rope).items()}
        rounded = rope.get("truncate", True)
        return {"position_embedding_type": "yarn", **yarn, "yarn_correction_range_round_to_int": rounded}
    kind = rope.get("rope_type") if model.mla is None else None  # MLA's own rope heeds neither
    # rotary_pos_embedding.py, _apply_scaling: only the factor is an argument
    llama3 = kind == "llama3" and all(rope.get(key) == value for key, value in LLAMA3.items())
    return {
        "position_embedding_type": "none" if nowhere else model.position_embedding,
        "use_rope_scaling": llama3,
        "rope_scaling_factor": float(rope["factor"]) if llama3 else 8.0,
        "rotary_seq_len_interpolation_factor": rope["factor"] if kind == "linear" else None,
    }


def _yarn_args(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Without `mscale_all_dim`, transformers passes over `mscale`, and Megatron does not."""
    heard = {name: value for name, value in rope.items() if name != "mscale" or rope.get("mscale_all_dim")}
    return {argument: heard.get(key, default) for argument, (key, default) in _YARN.items()}


def _mla_args(model: ModelShape) -> dict[str, Any]:
    args: dict[str, Any] = {"multi_latent_attention": model.mla is not None}
    if model.mla is None:
        return args
    args |= {name: getattr(model.mla, name) for name in _MLA}
    args["qk_layernorm"] = True  # the norms of latents, without which Megatron would make linears alone
    rope = model.rope_scaling or {}
    if rope.get("rope_type") != "yarn":
        return args | {"rope_type": "rope"}
    return args | {"rope_type": "yarn"} | _yarn_args(rope)


def as_in_megatron(model: ModelShape, *, in_bridge: bool = False) -> ModelShape:
    """The model that Megatron-Core's GPTModel computes when it is built from this one's arguments. It knows none that
    are fields of Megatron-Bridge's alone, which count `in_bridge`."""
    args = {name: value for name, value in to_megatron_args(model).items() if in_bridge or name not in KIMI_K3}
    return read_megatron_args(args, model.padded_vocab_size, "")


def as_config_says(args: Mapping[str, Any], model: ModelShape) -> dict[str, Any]:
    """The arguments, overruled by the config.json that describes this model. What no config.json says (MEGATRON_ONLY)
    is kept. ms-swift saves arguments without a model (no `num_layers`): of these, what is missing or None is the
    family's, as Megatron's defaults would add biases. Rotary bases of each layer go: no argument of ours says them, but
    config.json does, in its own words."""

    def is_kept(name: str) -> bool:
        return name in _ONLY_ARGS and (bool(args.get("num_layers")) or args.get(name) is not None)

    said = {name: value for name, value in to_megatron_args(model).items() if not is_kept(name)}
    return {**args, **said, _BASES: None}


def otherwise_in_megatron(model: ModelShape) -> dict[str, tuple[object, object]]:
    """How the model that Megatron-Core's GPTModel computes differs from this one: each differing field, with the
    model's value and Megatron's; empty if it computes this one. It makes a prediction layer like the decoder's last
    (get_gpt_mtp_block_spec in megatron/core/models/gpt/gpt_layer_specs.py), with the decoder's output layer, and no
    bias of linear_proj alone. Of one expert for a token it takes no softmax behind the choice, whose gradient would be
    zero (transformer_config.py)."""
    dense = {"mtp_dense": (True, False)} if model.mtp_dense and model.has_experts(model.num_layers - 1) else {}
    heads = {"mtp_output_layers": (True, False)} if model.mtp_output_layers else {}
    alone = {"proj_bias": (True, False)} if model.proj_bias and not model.add_bias_linear else {}
    moe = model.moe
    unscored = {"moe.group_scores": (moe.group_scores, 0)} if moe and chooses_groups_by_nothing(moe) else {}
    of_one = moe and moe.topk == 1 and moe.score_function == "softmax" and not moe.pre_softmax
    softmax = {"moe.pre_softmax": (False, True)} if of_one else {}
    return differences(model, as_in_megatron(model)) | dense | heads | alone | unscored | softmax


def read_megatron_args(args: Mapping[str, Any], padded_vocab_size: int, where: object) -> ModelShape:
    """The inverse of `to_megatron_args`: a model whose `architecture` is still empty, as the arguments name none.

    Raises UnknownArchitecture for arguments of models that no table here has, and DamagedCheckpoint where one is
    missing or not of its kind.
    """
    try:
        with at(where):
            for name in WITHOUT:
                if args.get(name) and (name, args.get("experimental_attention_variant")) != (MHC_NAME, CSA_NAME):
                    what = f"no family known here has Megatron's {name}={shown(args[name])}"
                    raise UnknownArchitecture(what, do=_FOR_BASES if name == _BASES else "")
            check_kinds(args)
            return _read(args, padded_vocab_size)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError) as error:
        raise DamagedCheckpoint(f"arguments that describe no model: {shown(str(error))}", where=where) from error


def _read(args: Mapping[str, Any], padded_vocab_size: int) -> ModelShape:
    heads, hidden = needed(args, "num_attention_heads"), needed(args, "hidden_size")
    check_size(heads, "num_attention_heads")
    num_layers = needed(args, "num_layers")
    check_size(num_layers, "num_layers", MOST_LAYERS)
    distances = args.get("window_size")  # to the left and right, -1 without end; Hugging Face counts the token itself
    window = None if not distances or int(distances[0]) == -1 else int(distances[0]) + 1
    skipping = args.get("window_attn_skip_freq")
    biased = bool(args.get("add_bias_linear", True))  # Megatron's default
    one_of(args, "experimental_attention_variant", (None, DSA_NAME, CSA_NAME, KDA_NAME, *DELTA_NET_NAMES), None)
    csa = read_csa(args, num_layers)
    latent = args.get("multi_latent_attention") and csa is None
    mla = MLA(**{name: needed(args, name) for name in _MLA}) if latent else None
    qkv_biased = bool(args.get("add_qkv_bias")) and mla is None  # MLA's linears have none (multi_latent_attention.py)
    positions = _read_positions(args, num_layers, mla, csa)
    mamba = read_mamba(args)
    blocks = read_heterogeneous(args, heads, hidden)
    if blocks:
        sizes_of_layers = blocks.largest
    else:
        groups = needed(args, "num_query_groups") if args.get("group_query_attention") else heads
        sizes_of_layers = {"num_query_groups": groups, "ffn_hidden_size": needed(args, "ffn_hidden_size")}
    gated = bool(args.get("attention_output_gate"))
    if gated and mla:  # of latent attention Megatron knows gates of heads alone
        one_of(args, GRANULARITY, ("headwise",), None)
    scale = args.get("softmax_scale")  # a root, which may have cost the last digits
    model = ModelShape(
        architecture="",
        num_layers=num_layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        **sizes_of_layers,
        kv_channels=needed(args, "v_head_dim") if mla or csa else args.get("kv_channels") or hidden // heads,
        vocab_size=args.get("vocab_size") or padded_vocab_size,
        padded_vocab_size=padded_vocab_size,
        make_vocab_size_divisible_by=args.get("make_vocab_size_divisible_by", 128),  # Megatron's default
        max_position_embeddings=needed(args, "max_position_embeddings"),
        norm_epsilon=norm_epsilon(args),
        normalization=one_of(args, "normalization", ("RMSNorm", "LayerNorm"), "LayerNorm"),
        zero_centered_gamma=bool(args.get("layernorm_zero_centered_gamma") or args.get("apply_layernorm_1p")),
        sliding_window=window,
        window_layers=None if window is None or skipping is None else all_but_every(skipping, num_layers),
        qk_layernorm=bool(args.get("qk_layernorm")) and mla is None and csa is None,
        qk_l2_norm=bool(args.get("qk_l2_norm")),
        qk_l2_norm_everywhere=bool(args.get("qk_l2_norm")),
        query_pre_attn_scalar=None if scale is None else round(float(scale) ** -2, 9),
        softmax_offset=one_of(args, "softmax_type", ("vanilla", "learnable"), "vanilla") == "learnable",
        tied_embeddings=not args.get("untie_embeddings_and_output_weights", False),
        qkv_bias=(biased and mla is None) or qkv_biased,
        proj_bias=biased,
        mlp_bias=biased,
        add_bias_linear=biased,
        add_qkv_bias=qkv_biased,
        attention_output_gate=gated and mla is None,
        head_wise_attn_gate=bool(args.get(HEAD_WISE_GATE)),
        linear_gate="sigmoid per head" if gated and mla else None,
        mla=mla,
        dsa=read_dsa(args, num_layers),
        csa=csa,
        mhc=read_mhc(args),
        moe=read_moe(args, num_layers, biased, mamba),
        mamba=mamba,
        heterogeneous=blocks,
        gdn=read_delta_net(args),
        mtp_num_layers=read_hybrid_mtp(args) if mamba else args.get("mtp_num_layers") or 0,
        **positions,
        **_read_activation(args),
    )
    return as_kimi_k3(model, args)


def _headwise(model: ModelShape) -> bool:
    """Whether latent attention has an output gate, which Megatron knows of heads alone."""
    return model.mla is not None and model.linear_gate == "sigmoid per head"


def _read_activation(args: Mapping[str, Any]) -> dict[str, Any]:
    gated = any(args.get(name) for name in ("swiglu", "gated_linear_unit", "quick_geglu"))
    fields: dict[str, Any] = {"gated_linear_unit": gated}
    if gated:
        fields["glu_offset"] = float(args.get("glu_linear_offset") or 0.0)
        fields["activation_clamp"] = args.get("activation_func_clamp_value")
    if args.get("swiglu"):
        return fields | {"activation": "silu"}
    if args.get("squared_relu"):
        return fields | {"activation": "squared_relu"}
    if args.get("quick_geglu"):
        return fields | {"activation": "quick_gelu"}
    return fields | {"activation": "gelu_tanh" if args.get("bias_gelu_fusion", True) else "gelu"}


def _read_positions(args: Mapping[str, Any], num_layers: int, mla: MLA | None, csa: CSA | None) -> dict[str, Any]:
    """The fields of ModelShape that say how positions are embedded, and in which layers."""
    fields: dict[str, Any] = {
        "rotary_base": float(args.get("rotary_base", 10000)),
        "rotary_percent": float(args.get("rotary_percent", 1.0)),
        "rope_scaling": _read_rope(args, mla),
    }
    if csa is not None:  # Megatron-Core magnifies nothing there, whatever is said
        unmagnified = {**args, "mscale": 1.0, "mscale_all_dim": 0.0}
        fields = read_csa_rope(args, _read_yarn(unmagnified, ""))
    for name, value in (fields["rope_scaling"] or {}).items():
        if name not in ("rope_type", "truncate"):
            real(value, name)
    known = ("rope", "learned_absolute", "yarn", "none")  # yarn is rope, scaled
    kind = one_of(args, "position_embedding_type", known, "learned_absolute")
    no_rope = args.get("no_rope_freq")  # `N`: every N-th layer; a list: 1 where a layer has none
    if isinstance(no_rope, list | tuple):
        no_rope = [not each for each in no_rope]
    rope_layers = all_but_every(no_rope, num_layers) if no_rope else None
    return fields | {
        "position_embedding": "rope" if kind in ("yarn", "none") else kind,
        "rotary_interleaved": bool(args.get("rotary_interleaved")),
        "rope_layers": (False,) * num_layers if kind == "none" else rope_layers,
    }


def _read_rope(args: Mapping[str, Any], mla: MLA | None) -> dict[str, Any] | None:
    if args.get("position_embedding_type") == "yarn":
        rounded = bool(args.get("yarn_correction_range_round_to_int", True))
        return _read_yarn(args, "yarn_") | ({} if rounded else {"truncate": False})
    if mla is not None:
        # Of plain rotary positions, MLA heeds no scaling; but its scores are scaled as YaRN's are
        if one_of(args, "rope_type", ("rope", "yarn"), "yarn") == "yarn":
            return _read_yarn(args, "")
        one_of(args, "mscale_all_dim", (0, None), 0)
        return None
    if args.get("use_rope_scaling"):
        return {"rope_type": "llama3", "factor": args.get("rope_scaling_factor", 8.0), **LLAMA3}
    if args.get("rotary_seq_len_interpolation_factor"):
        return {"rope_type": "linear", "factor": args["rotary_seq_len_interpolation_factor"]}
    return None


def _read_yarn(args: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    yarn = {key: args.get(prefix + argument, default) for argument, (key, default) in _YARN.items()}
    if not yarn["mscale_all_dim"]:  # transformers heeds the two together alone
        one_of(args, prefix + "mscale", (1, None), 1)
        del yarn["mscale"], yarn["mscale_all_dim"]
    return {"rope_type": "yarn", **yarn}

"""Megatron-Core's GPTModel for a ModelShape: on a GPU of Transformer Engine's layers, without it of its own."""

from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from precisionctl.architectures.megatron.megatron_args import to_megatron_args
from precisionctl.checkpoints.megatron.arguments import recipe_words
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.megatron_flags import stateless_words
from precisionctl.model.model_shape import ModelShape
from precisionctl.recipe import Recipe
from precisionctl.trainer.model.router_balance import Balance
from precisionctl.trainer.saved.balance import balance_args


def make_config(
    model: ModelShape, recipe: Recipe, balance: Balance, *, te: bool, dtype: torch.dtype, equal_rows: bool
) -> Any:
    """The TransformerConfig that Megatron-LM makes of this model's arguments (core_transformer_config_from_args), with
    the recipe's parallel sizes and FP8. With `te` layers are Transformer Engine's. Raises UnknownArchitecture for what
    that class refuses."""
    from megatron.core.activations import quick_gelu, squared_relu
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    args, sizes = to_megatron_args(model), recipe.parallel
    kind = MLATransformerConfig if args["multi_latent_attention"] else TransformerConfig
    known = {field.name for field in fields(kind)}
    given = {name: value for name, value in args.items() if name in known and value is not None}
    if recipe.precision.keeps_state:
        given |= {**recipe_words(recipe.precision.delayed), "tp_only_amax_red": False}
    elif recipe.precision.fp8:
        given |= stateless_words(recipe.precision)
    if recipe.train.recompute == "layer":
        given |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    activation = F.silu if args["swiglu"] else F.gelu
    if args.get("squared_relu"):
        activation = squared_relu
    elif args.get("quick_geglu"):
        activation = quick_gelu
    given |= {
        "num_query_groups": model.num_query_groups,
        "num_moe_experts": args["num_experts"],
        "gated_linear_unit": bool(args["swiglu"] or args.get("gated_linear_unit")),
        "activation_func": activation,
        "bias_activation_fusion": bool(args.get("bias_gelu_fusion")) or (te and bool(args["swiglu"])),
        "moe_grouped_gemm": te and model.moe is not None,
        **balance_args(balance),
        "moe_token_dispatcher_type": "alltoall",
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual if sizes.virtual > 1 else None,
        # else two stages could not tell what they send one another forward and backward (arguments.py: validate_args)
        "overlap_p2p_comm": sizes.virtual > 1,
        "batch_p2p_comm": sizes.virtual == 1,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.expert,
        "sequence_parallel": sizes.sequence,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "gradient_accumulation_fusion": False,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": not equal_rows,
        "persist_layer_norm": te,
    }
    try:
        config = kind(**given)
    except (ValueError, AssertionError) as error:
        what = f"Megatron-Core does not build this `{model.architecture}`: {shown(str(error))}"
        raise UnknownArchitecture(what, do="Leave --engine out: the bundled trainer computes it as it is.") from error
    for name, value in args.items():
        if name.startswith("yarn_"):  # no fields of its own, but GPTModel looks for them there
            setattr(config, name, value)
    return config


def make_stage(config: Any, model: ModelShape, *, te: bool, stage: int | None) -> Any:
    """The part of the model that this rank has: of its virtual pipeline stages the one of this number, if it has
    several."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    args = to_megatron_args(model)
    block = get_gpt_decoder_block_spec(config, te, normalization=model.normalization, vp_stage=stage)
    if not te:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        for layer in block.layer_specs:  # let them store their norms under the names that TE's layers have
            names = layer.submodules.sharded_state_dict_keys_map
            if getattr(layer.submodules.mlp, "module", None) is MoELayer:
                names.pop("pre_mlp_layernorm.", None)
            else:
                names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    later = get_gpt_mtp_block_spec(config, block, te, vp_stage=stage) if model.mtp_num_layers else None
    made = GPTModel(
        config,
        block,
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.position_rows,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type=args["position_embedding_type"],
        rotary_percent=model.rotary_percent,
        rotary_base=args["rotary_base"],
        rope_scaling=args.get("use_rope_scaling", False),
        rope_scaling_factor=args.get("rope_scaling_factor", 8.0),
        seq_len_interpolation_factor=args.get("rotary_seq_len_interpolation_factor"),
        mtp_block_spec=later,
        vp_stage=stage,
    )
    if made.post_process:
        first = made.output_layer.output_size_per_partition * parallel_state.get_tensor_model_parallel_rank()
        _leave_out_padding(made.output_layer, model.vocab_size - first)
    return made.to(config.params_dtype)


def _leave_out_padding(output_layer: torch.nn.Module, tokens: int) -> None:
    """Give the logits of rows after the first `tokens` the weight 0 in the loss, as the bundled trainer does: they pad
    the vocabulary, and are no tokens."""

    def masked(module: torch.nn.Module, given: object, made: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Any]:
        logits, bias = made
        if tokens >= logits.shape[-1]:
            return made
        padding = torch.arange(logits.shape[-1], device=logits.device) >= tokens
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min), bias

    output_layer.register_forward_hook(masked)

"""Megatron's arguments as they are written in any of its containers."""

from collections.abc import Mapping
from typing import Any

from precisionctl.architectures.megatron.megatron_args import to_megatron_args
from precisionctl.architectures.megatron.recurrent_args import HYBRID_PATTERN
from precisionctl.checkpoints.megatron.logical import OPTIMIZER
from precisionctl.dtypes import DType
from precisionctl.fp8.state import DelayedScaling, Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Parallelism, TensorSpec


def saved_args(
    args: Mapping[str, object],
    model: ModelShape,
    specs: Mapping[str, TensorSpec],
    sizes: Parallelism,
    iteration: int | None,
    container: str,
) -> dict[str, Any]:
    """The arguments (`args`) to save with a model: those of the source, overridden by what follows from the model, its
    tensors, the parallel sizes and the container. They say that neither optimizer nor random states were saved, unless
    `args` of the source say otherwise."""
    weights_only = {"no_save_optim": True, "no_save_rng": True}
    dtype = next(spec.dtype for name, spec in specs.items() if not name.startswith(OPTIMIZER))

    # How layers are distributed to pipeline stages, where it is not the default. Of these, Megatron's
    # `--use-mp-args-from-checkpoint-args` takes only the last (megatron/training/checkpointing.py,
    # load_args_from_checkpoint), without which a run has no virtual stages; if stages differ in size it must be absent
    # (arguments.py, validate_args).
    stages = sizes.layers_of_stages(model.num_layers)
    equal = sizes.virtual > 1 and len(set(stages)) == 1
    by_stage = {
        "decoder_first_pipeline_num_layers": sizes.first_layers,
        "decoder_last_pipeline_num_layers": sizes.last_layers,
        "num_layers_per_virtual_pipeline_stage": stages[0] if equal else None,
    }
    of_this_checkpoint = {
        "params_dtype": dtype,
        "bf16": dtype == DType.bfloat16,
        "fp16": dtype == DType.float16,
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual if sizes.virtual > 1 else None,
        "expert_model_parallel_size": sizes.expert,
        "ckpt_format": container,
        "iteration": iteration or 0,
        **{name: value for name, value in by_stage.items() if value is not None},
    } | ({"expert_tensor_parallel_size": sizes.expert_tensor} if sizes.expert_tensor else {})

    # a run of a hybrid model may predict several tokens by the one prediction layer that is stored
    repeated = model.mamba and model.mtp_num_layers and args.get("mtp_use_repeated_layer")
    depth = {"mtp_num_layers": args.get("mtp_num_layers")} if repeated else {}
    return weights_only | dict(args) | to_megatron_args(model) | depth | of_this_checkpoint


STAGES = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    HYBRID_PATTERN,  # in which stages begin; of two names, Megatron heeds this one, and the other is written
)
"""Megatron's arguments for how layers are distributed to pipeline stages. Those of the source do not hold for the
result."""


def fp8_args(states: Fp8States) -> dict[str, Any]:
    """The arguments of a run that continues with this FP8 state: no arguments if only attention has state, which
    happens beside linears in current scaling."""
    if not states.of_gemms:
        return {}
    recipe = states.recipe
    return {
        **recipe_words(recipe),
        "fp8_dot_product_attention": recipe.fp8_dpa,
        "fp8_multi_head_attention": recipe.fp8_mha,
    }


def recipe_words(recipe: DelayedScaling) -> Mapping[str, object]:
    """A recipe of delayed scaling as arguments, under the names that Megatron, Bridge and NeMo share."""
    return {
        "fp8": recipe.fp8_format.lower(),
        "fp8_recipe": "delayed",
        "fp8_margin": recipe.margin,
        "fp8_amax_history_len": recipe.amax_history_len,
        "fp8_amax_compute_algo": recipe.amax_compute_algo,
    }


def read_muon_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's arguments of any version that are Muon's (`muon_…`), unchecked, as core 0.18 and later call them."""
    found = {key: value for key, value in args.items() if key.startswith("muon_") and value is not None}
    if "muon_scale_mode" in found:
        found.setdefault("muon_coefficient_type", "quintic")  # before core 0.17 there is no other
    if "muon_use_nesterov" in found:  # its name before core 0.18
        found.setdefault("muon_nesterov", found.pop("muon_use_nesterov"))
    return found

"""A checkpoint as a model that computes in the precision it is stored in.

Codes compute as in an engine: the stored codes are the weights, and inputs are cast with their static scale, or with
one scale per token, or per group of a token where weights have blocks; or stay as they are, beside weights that engines
decode. A Megatron checkpoint with delayed-scaling state in its `_extra_state` computes in FP8 with the scales that its
next training step would use, and so does an export for Transformer Engine. A checkpoint of `resume` under an FP8 recipe
without state computes by that recipe; one whose last step was in BF16 computes in BF16, whatever state it carries.
Everything else is plain BF16, FP16 or FP32.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.huggingface import HuggingFaceReader, HuggingFaceTensors
from precisionctl.checkpoints.module import LiveModel
from precisionctl.checkpoints.run_file import ended_in_bf16
from precisionctl.codes import numerics
from precisionctl.codes.statistics import scaling_words
from precisionctl.conversion.convert import convert
from precisionctl.conversion.known_state import is_of_weights
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.evaluate.stored_codes import use_stored_codes
from precisionctl.export.kv_cache import CacheScale, stored_scales
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8States
from precisionctl.param import EMBEDDING
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import CODES
from precisionctl.quant_methods.caches import caches_in_fp8
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.undrawn import Undrawn
from precisionctl.trainer.saved.run_folder import recipe_of_run
from precisionctl.untrusted.safe_patterns import in_time


def load(reader: Reader, device: torch.device | str = "cpu", *, plain: bool = False) -> tuple[GPT, str]:
    """The model of a checkpoint, which computes in the precision it is stored in, and that precision in words.

    A `plain` model computes with the values, codes decoded, in the dtype of the values that are not codes."""
    plan = make_plan(reader, "megatron").text
    dtype = plan.targets[EMBEDDING].dtype  # never codes, so that of all values that are none
    in_fp8 = not (plain or ended_in_bf16(reader))
    states = _state_of_next_step(reader) if in_fp8 else None
    precision = _precision(reader, states, plan) if in_fp8 else Precision(fp8=False)
    with Undrawn():
        model = GPT(plan.model, precision, "emulated", dtype.torch, device)
    convert(plan, reader, LiveModel(plan.model, dict(model.named_parameters())))
    stored = dtype.value
    if plain:
        return model, stored
    if not precision.fp8:
        with in_time():
            codes = use_stored_codes(model, reader, plan)
        words = f"{stored}, with {codes}" if codes and codes.startswith("weights") else codes or stored
        if isinstance(reader, HuggingFaceTensors) and caches_in_fp8(reader.config.get("quantization_config") or {}):
            scales = stored_scales(reader.lone_cache_scales or reader.weight_encodings, plan)
            for name, scale in scales.items():
                round_cached(model.get_submodule(name), scale)
            words += ", FP8 KV cache" if scales else ""
        return model, words
    if states:
        for name, linear in fp8_linears(model).items():
            linear.set_fp8_state(states.modules[name])
    return model, f"{scaling_words(precision.scaling)}, {stored} weights"


def round_cached(attention: nn.Module, scale: CacheScale) -> None:
    """Register a hook that rounds the keys and values `[B, S, G, D]` of an attention as an FP8 cache does: divided by
    their scale in FP32, saturated, rounded to E4M3, and multiplied again, in FP32 too (vLLM's
    csrc/cache_kernels.cu, fp8::scaled_convert)."""
    attention.register_forward_pre_hook(partial(_round_arguments, scale))


def _round_arguments(scale: CacheScale, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    query, key, value, *rest = arguments
    return query, _rounded(key, scale.k), _rounded(value, scale.v), *rest


def _rounded(values: Tensor, scale_inv: float) -> Tensor:
    divisor = torch.tensor(scale_inv, device=values.device)
    rows = values.reshape(-1, values.shape[-1])
    codes = torch.empty(rows.shape, dtype=CODES.torch, device=values.device)
    numerics.encode_by_scale_inv(rows, divisor, codes, numerics.scratch_for(rows))
    return numerics.decode(codes, divisor).to(values.dtype).view(values.shape)


def _state_of_next_step(reader: Reader) -> Fp8States | None:
    """The state that the checkpoint's next training step would compute with; None if that step is not in FP8.

    State in a sidecar is only carried: its modules compute in BF16. State is not used either if an input has no
    recorded scale (a weight may have none: it is 1 for a weight of zeros), or if it was recorded with other weights.
    """
    states = reader.live_fp8 if isinstance(reader, HuggingFaceReader) else reader.fp8
    if states is None or not is_of_weights(states, digest_weights(reader), reader):
        return None
    if isinstance(reader, HuggingFaceReader) or reader.path is None:
        return states
    carried = sidecar.find(reader.path)
    live = states.without(carried.modules) if carried else states
    inputs = [state.roles["input"] for state in live.modules.values() if state.of_gemm]
    return live if inputs and all(part.recorded for part in inputs) else None


def _precision(reader: Reader, states: Fp8States | None, plan: Plan) -> Precision:
    """The precision of the checkpoint's next training step."""
    if states is None:
        recipe = recipe_of_run(reader)
        stateless = recipe is not None and recipe.precision.fp8 and not recipe.precision.keeps_state
        return recipe.precision.of_layers(plan.model.num_layers) if recipe and stateless else Precision(fp8=False)
    kept = tuple(name for name in plan.gemms if name not in states.modules)
    return Precision(fp8=True, delayed=states.recipe, keep_bf16=kept)

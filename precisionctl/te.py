"""te: load an export for Transformer Engine as a transformers model whose linears are Transformer Engine's modules.

The directory (`export-inference --target te`) has BF16 values and the delayed-scaling state of each FP8 GEMM. The model
is built by transformers. Each linear, and each layer's experts, with state is then replaced by the trainer's module:
Transformer Engine's on a GPU with FP8, else an emulation of its numerics. Scales do not change, as inference records no
amaxes.
"""

import re
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from precisionctl.architectures.families import table_of
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.megatron.keys import layer_of
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import MissingFp8State, PrecisionError
from precisionctl.fp8.state import Fp8States
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan
from precisionctl.precision import Precision
from precisionctl.sizes import listed
from precisionctl.trainer.backends.base import Backend, Fp8Linear
from precisionctl.trainer.backends.choose import choose_backend, make_backend
from precisionctl.trainer.model.mlp import Experts

_LAYER = re.compile(r"(?:.*?\.)?layers\.(\d+)\.")
_STACK = re.compile(rf"{_LAYER.pattern}(?:.+\.)?experts")


def load_te(
    directory: Path | str,
    *,
    weights: Literal["fp8", "bf16"] = "fp8",
    backend: Literal["te", "emulated", "auto"] = "auto",
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """Load an export for Transformer Engine as a model that computes logits and can `generate`, without gradients.

    With `weights="fp8"` FP8 GEMMs hold their weights only as codes, one byte each; with "bf16" they hold the stored
    values, which each pass casts to the same codes. The default `device` is the GPU, if there is one. Raises
    MissingFp8State for a checkpoint of another kind, PrecisionError for state of GEMMs that transformers computes as
    parts of larger ones, EnvironmentProblem if Transformer Engine is asked for and cannot run, and as open_checkpoint.
    """
    reader = open_checkpoint(Path(directory))
    states = reader.live_fp8 if isinstance(reader, HuggingFaceReader) else None
    if states is None:
        raise MissingFp8State(
            "the directory has no state for Transformer Engine",
            where=directory,
            do="Make one with `export-inference --target te`.",
        )
    plan = make_plan(reader, "megatron")
    kept = tuple(name for name in plan.gemms if name not in states.modules)
    precision = Precision(fp8=True, delayed=states.recipe, keep_bf16=kept)
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    built: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", trust_remote_code=False, use_safetensors=True
    )
    made = make_backend(choose_backend(backend), precision, built.dtype, on, fp8_weights=weights == "fp8")
    called = table_of(plan.model).in_memory(reader.specs, plan.model)
    replaced = _replacements(built, called, plan, states, made, precision.alignment)
    for name in replaced:
        built.set_submodule(name, nn.Identity())  # so that replaced weights are not copied to the device
    model: PreTrainedModel = built.to(on).eval()
    for name, module in replaced.items():
        model.set_submodule(name, module)
    forward = model.forward

    @wraps(forward)
    def in_fp8(*arguments: Any, **named: Any) -> Any:
        with torch.no_grad(), made.forward_pass():  # with the scales of the state, which do not change
            return forward(*arguments, **named)

    model.forward = in_fp8
    return model.requires_grad_(False)


def _replacements(
    model: PreTrainedModel,
    called: Mapping[str, str],
    plan: Plan,
    states: Fp8States,
    backend: Backend,
    alignment: int,
) -> dict[str, nn.Module]:
    """The replacement of each module of transformers' that computes a GEMM with state, by its name there; `called` are
    its names of tensors that are stored under others. Raises PrecisionError for GEMMs that it has no module for."""
    modules = dict(model.named_modules())
    stacks = {match[1]: name for name in modules if (match := _STACK.fullmatch(name))}
    found, lost = dict[str, nn.Module](), dict[str, None]()
    for job in plan.jobs:
        if not job.row.gemm or job.module not in states.modules:
            continue
        if job.row.of_experts:
            layer = _LAYER.match(job.reads[0])
            stack = stacks.get(layer[1]) if layer else None
            if stack is None:
                lost[job.module] = None
            elif stack not in found:
                found[stack] = _experts(modules[stack], job.module.rpartition(".")[0], plan, states, backend)
            continue
        for read in job.reads:
            name = called.get(read, read).removesuffix(".weight")
            old = modules.get(name)
            if not isinstance(old, nn.Linear | Conv1D):
                lost[job.module] = None
                continue
            values: dict[str, Tensor] = old.state_dict()
            if isinstance(old, Conv1D):  # GPT-2 stores `[in, out]`
                values |= {"weight": values["weight"].t()}
            rows, columns = values["weight"].shape
            linear = backend.linear(job.module, columns, rows, "bias" in values)
            # linears of a fused group all get its state, as they have the same input, and weights with one scale
            _set_state(linear, states, job.module)
            linear.load_state_dict(values)
            found[name] = _Padded(linear, alignment, backend.dtype)
    if lost:
        raise PrecisionError(
            f"transformers has no linear of its own for the FP8 state of {listed(lost, 3)}",
            do="Export it with these modules in BF16: name them in keep_bf16 of a --recipe.",
        )
    return found


def _experts(old: nn.Module, module: str, plan: Plan, states: Fp8States, backend: Backend) -> nn.Module:
    """The trainer's module for the experts of a layer, which transformers has in two tensors."""
    moe, at = plan.model.moe, layer_of(module)
    assert moe is not None and at is not None, "there are experts, and in a layer"
    new = Experts(module, plan.model, moe, backend, at[0])
    first = old.get_parameter("gate_up_proj" if plan.model.gated_linear_unit else "up_proj")
    weights = dict[str, Tensor]()
    for part, linear, stack in (
        ("linear_fc1", new.linear_fc1, first),
        ("linear_fc2", new.linear_fc2, old.get_parameter("down_proj")),
    ):
        weights |= {f"{part}.weight{expert}": stack[expert] for expert in range(moe.num_experts)}
        _set_state(linear, states, f"{module}.{part}")
    new.load_state_dict(weights)
    return _Routed(new)


def _set_state(linear: nn.Module, states: Fp8States, module: str) -> None:
    assert isinstance(linear, Fp8Linear), "a backend's linears keep state"
    linear.set_fp8_state(states.modules[module])


class _Padded(nn.Module):
    """A linear that takes any number of tokens, by padding them with zeros to a multiple that FP8 GEMMs accept."""

    def __init__(self, linear: nn.Module, alignment: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.alignment = linear, alignment
        self.weight = torch.empty(0, dtype=dtype)
        """An empty tensor, for models that look up the dtype of a linear's weight."""

    def forward(self, values: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        tokens = values.reshape(-1, values.shape[-1])
        padded = F.pad(tokens, (0, 0, 0, -len(tokens) % self.alignment))
        out: Tensor = self.linear(padded)[: len(tokens)]
        return out.reshape(*values.shape[:-1], -1)


class _Routed(nn.Module):
    """The trainer's experts, called as transformers calls its own."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Tokens `[T, E]` with the numbers and the weights of their K experts, both `[T, K]`, to `[T, E]`."""
        out: Tensor = self.experts(hidden, weights.float(), chosen)
        return out

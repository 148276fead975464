"""AdamW's state as torch.optim saves it: by numbers of parameters, in `optimizer.pt` of Hugging Face's Trainer. Under
FSDP it is in `optimizer.bin`, by names (accelerate, save_fsdp_optimizer, of a full state dict).

Parameters are numbered group by group, and within a group in the order of the model's modules. No file has their names.
They follow from the order of modules in the family's class in transformers, as far as that is known here, and their
shapes must fit. Experts that a directory stores one by one are one tensor here.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.chunks import Chunk, whole
from precisionctl.checkpoints.hf_directory.fused_experts import stored_name
from precisionctl.checkpoints.hf_directory.wrapped_names import names_inside
from precisionctl.checkpoints.other_trainers.trainer_run import (
    ParameterGroup,
    TrainerRun,
    adam_run,
    count_of_updates,
    different_counts,
    not_adams,
    stored_group,
)
from precisionctl.checkpoints.torch_files.torch_zip import LocatedTensor, skeleton
from precisionctl.errors import DROP_OPTIMIZER, CheckpointError, DamagedCheckpoint, damage, shown
from precisionctl.param import NOT_TRAINED, TensorSpec, state_name
from precisionctl.untrusted.safe_files import check_link

FILES = ("optimizer.pt", "optimizer.bin")

_MODULES = (
    *("model", "backbone", "transformer", "decoder", "embed_tokens", "embed_positions", "embeddings", "wte"),
    *("wpe", "layers", "h", "ln_1"),
    *("self_attn", "linear_attn", "attn", "attention", "self_attn_layer_norm", "ln_2", "mlp", "alpha_p", "alpha_n"),
    *("input_layernorm", "attention_layernorm", "post_attention_layernorm", "feedforward_layernorm"),
    *("pre_mlp_layernorm",),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    *("post_norm1", "post_norm2"),
    *("altup", "correct_output_scale", "correction_coefs", "prediction_coefs", "modality_router", "router_norm"),
    *("laurel", "linear_left", "linear_right", "post_laurel_norm"),
    *("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"),
    *("block_sparse_moe",),
    *("dt_bias", "A_log", "D", "conv1d", "in_proj", "x_proj", "dt_proj", "in_proj_qkvz", "in_proj_ba", "sinks"),
    *("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "kv_a_layernorm"),
    *("kv_b_proj", "o_proj", "qkv_proj", "wq_b", "wk", "q_norm", "k_norm", "query_layernorm", "key_layernorm"),
    *("g_proj", "indexer", "c_attn", "router", "scale", "per_expert_scale", "proj", "gate", "experts"),
    *("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"),
    *("wg", "shared_experts", "shared_expert", "shared_mlp", "mamba", "input_linear", "output_linear"),
    *("fc1_latent_proj", "fc2_latent_proj"),
    *("gate_proj", "w1", "up_proj", "gate_up_proj", "gate_up_proj_bias", "c_fc", "fc1", "fc2", "c_proj", "w2"),
    *("down_proj", "down_proj_bias", "w3", "act_fn", "shared_expert_gate", "dense", "final_layernorm"),
    *("final_layer_norm",),
    *("norm", "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"),
    *("altup_projections", "altup_unembed_projections"),
    *("mixer", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "ln_f", "norm_f", "lm_head"),
    *("weight", "bias", "weights_proj"),
)
"""The names of modules and parameters in transformers' classes. Those of one module are in the order in which it
defines them, except for a family's `behind`."""

TIED = "lm_head.weight"
"""The output layer, which some checkpoints store although it is tied to the embedding."""

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|w1|up_proj|w3|down_proj|w2)\.weight")
_IN_STACK = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 0, "w2": 0}
_DOWN = ("down_proj", "w2")


def parameter_order(names: Iterable[str], where: Path, behind: Mapping[str, str]) -> list[str]:
    """The names, sorted into the order of the model's parameters. `behind` is the family's, as Architecture has it.
    Raises CheckpointError if a module's place is not known."""
    names = list(names)
    ranks = {module: float(rank) for rank, module in enumerate(_MODULES)}
    unknown = {part for name in names for part in name.split(".") if not part.isdecimal() and part not in ranks}
    if unknown:
        what = f"an optimizer under numbers, and the order of this model's `{min(unknown)[:90]}` is not known"
        raise CheckpointError(what, where=where, do=DROP_OPTIMIZER)
    for module, other in behind.items():
        ranks[module] = ranks[other] + 0.25
    return sorted(names, key=lambda name: [int(p) if p.isdecimal() else ranks[p] for p in name.split(".")])


def stacked_experts(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The parameters that transformers 5 makes of these tensors, each with the names of its tensors: a layer's experts
    are one stack, with gate and up of an expert joined."""
    found: dict[str, list[tuple[int, int, str]]] = {}
    for name in names:
        if match := _EXPERT.fullmatch(name):
            parameter = f"{_in_memory(match[1])}.{'down_proj' if match[3] in _DOWN else 'gate_up_proj'}"
            found.setdefault(parameter, []).append((int(match[2]), _IN_STACK[match[3]], name))
        else:
            stored, expert = stored_name(name)
            found.setdefault(_in_memory(stored), []).append((expert or 0, 0, name))
    return {parameter: tuple(name for _, _, name in sorted(inside)) for parameter, inside in found.items()}


def _in_memory(name: str) -> str:
    """The name with Mixtral's and MiniMax' blocks as transformers 5 has them."""
    return re.sub(r"\.block_sparse_moe\.(gate|experts)\b", r".mlp.\1", name)


_UNDECAYED = re.compile(r".*(?:bias|norm(?:_\d)?\.weight|ln_\w\.weight)")
"""By name, and not by `trainer_run.decays`: Hugging Face's Trainer, whose numbers these are, has vectors that are
neither norms nor biases decay, such as a mixer's A_log (get_decay_parameter_names)."""


def names_by_number(groups: Sequence[Any], names: Sequence[str], where: Path) -> dict[int, str]:
    """The parameter of each number. `names` are in the model's order. Trainers have all parameters in one group, or
    those with weight decay first, then norms and biases. Raises CheckpointError where groups are of other lengths."""
    undecayed = [name for name in names if _UNDECAYED.fullmatch(name)]
    decayed = [name for name in names if not _UNDECAYED.fullmatch(name)]
    listed = [group["params"] for group in groups if group["params"]]
    if any(type(number) is int and not 0 <= number < 1 << 31 for numbers in listed for number in numbers):
        raise DamagedCheckpoint("numbers of parameters that no optimizer has", where=where, do=DROP_OPTIMIZER)
    for order in ([list(names)], [decayed, undecayed]):
        if [len(each) for each in order] == [len(numbers) for numbers in listed]:
            pairs = zip(order, listed, strict=True)
            return {number: name for named, numbers in pairs for name, number in zip(named, numbers, strict=True)}
    counts = " and ".join(str(len(numbers)) for numbers in listed[:4])
    what = f"groups of {counts} parameters, which are none of this model's; was a part of it frozen?"
    raise CheckpointError(what, where=where, do=DROP_OPTIMIZER)


def parameters_by_number(
    groups: Sequence[Any],
    shapes: Mapping[int, tuple[int, ...]],
    specs: Mapping[str, TensorSpec],
    behind: Mapping[str, str],
    where: Path,
) -> dict[int, tuple[str, ...]]:
    """For the number of each parameter, the tensors of `specs` that it holds one after the other: one tensor, or those
    of all experts. `behind` is as for parameter_order. Raises CheckpointError where `shapes` do not fit.
    """
    trained = [name for name in specs if not name.endswith(NOT_TRAINED)]
    untied = [name for name in trained if name != TIED]
    candidates = [(stacked_experts(names), behind) for names in (trained, untied)]
    candidates += [({name: (name,) for name in trained}, {})]  # experts one by one, as transformers 4 has them
    refused: CheckpointError | None = None
    for held, of_class in candidates:
        order = parameter_order(held, where, of_class)
        try:
            named = names_by_number(groups, order, where)
        except CheckpointError as error:
            refused = refused or error
            continue
        if unnamed := shapes.keys() - named.keys():
            what = f"the optimizer's state of parameter {shown(min(unnamed))}, which is in none of its groups"
            refused = refused or CheckpointError(what, where=where, do=DROP_OPTIMIZER)
            continue
        found = {number: held[named[number]] for number in shapes}
        other = [number for number, shape in shapes.items() if not _holds(shape, [specs[n] for n in found[number]])]
        if not other:
            return found
        what = f"the optimizer's state of `{named[other[0]]}` is not of its shape"
        refused = CheckpointError(what, where=where, do=DROP_OPTIMIZER)
    assert refused
    raise refused


def parameters_by_name(
    shapes: Mapping[str, tuple[int, ...]], specs: Mapping[str, TensorSpec], where: Path
) -> dict[str, tuple[str, ...]]:
    """As parameters_by_number, for parameters that have names in memory."""
    trained = [name for name in specs if not name.endswith(NOT_TRAINED)]
    held = {**stacked_experts(trained), **{name: (name,) for name in trained}}
    inside = names_inside(shapes, where)
    for stored, name in inside.items():
        if name not in held:
            what = f"the optimizer's state of `{stored}`, which is no parameter of this model"
            raise CheckpointError(what, where=where, do=DROP_OPTIMIZER)
        if not _holds(shapes[stored], [specs[one] for one in held[name]]):
            what = f"the optimizer's state of `{stored}` is not of its shape"
            raise CheckpointError(what, where=where, do=DROP_OPTIMIZER)
    return {stored: held[name] for stored, name in inside.items()}


def _holds(shape: tuple[int, ...], specs: Sequence[TensorSpec]) -> bool:
    """Whether a parameter of this shape holds these tensors: its last dimension is theirs, and it has all of them."""
    if len(specs) == 1:
        return shape == specs[0].shape
    alike = all(spec.shape[-1:] == shape[-1:] for spec in specs)
    return alike and math.prod(shape) == sum(math.prod(spec.shape) for spec in specs)


@dataclass(frozen=True)
class NumberedOptimizer:
    """The optimizer in a file of torch.save, by numbers or names. `parameters` are the model's, and `behind` its
    family's, as Architecture has it. Reading it reads its pickle alone.

    Its properties raise CheckpointError where it is not AdamW's, or not of these parameters.
    """

    path: Path
    parameters: Mapping[str, TensorSpec]
    behind: Mapping[str, str]

    @cached_property
    def _state(self) -> tuple[dict[Any, dict[str, Any]], dict[Any, tuple[str, ...]], list[ParameterGroup]]:
        """The state of each number or name, the tensors that the parameter under each holds, and the groups."""
        check_link(self.path, self.path.parent)
        with damage("its optimizer is not what PyTorch saves", self.path, DROP_OPTIMIZER):
            saved = skeleton(self.path)
            groups, states = list(saved["param_groups"]), {index: dict(one) for index, one in saved["state"].items()}
            if others := not_adams(kind for state in states.values() for kind in state):
                raise CheckpointError(f"its optimizer has {others}", where=self.path, do=DROP_OPTIMIZER)

            shapes: dict[Any, tuple[int, ...]] = {}  # of parameters, which all of their moments have
            for index, state in states.items():
                moments = {kind: one for kind, one in state.items() if kind != "step"}
                for kind, one in moments.items():
                    if isinstance(one, LocatedTensor) and not one.dtype.is_floating_point:
                        what = f"{kind} of parameter {shown(index)} is {one.dtype}, and AdamW's is floating-point"
                        raise CheckpointError(what, where=self.path, do=DROP_OPTIMIZER)
                found = {one.shape if isinstance(one, LocatedTensor) else None for one in moments.values()}
                shape = found.pop() if len(found) == 1 else None
                if shape is None:
                    what = f"the optimizer's state of parameter {shown(index)} is not of its shape"
                    raise CheckpointError(what, where=self.path, do=DROP_OPTIMIZER)
                shapes[index] = shape

            if states and all(type(index) is str for index in states):
                held: dict[Any, tuple[str, ...]] = parameters_by_name(shapes, self.parameters, self.path)
            else:
                held = parameters_by_number(groups, shapes, self.parameters, self.behind, self.path)
            settings = list[ParameterGroup]()
            for group in groups:
                names = [name for index in group["params"] for name in held.get(index, ())]
                settings.append(stored_group(group, self.path, {name: self.parameters[name].shape for name in names}))
            return states, held, settings

    @cached_property
    def _tensors(self) -> Mapping[str, LocatedTensor]:
        states, held, _ = self._state
        found: dict[str, LocatedTensor] = {}
        for index, state in states.items():
            for kind, value in state.items():
                if kind == "step":
                    continue
                offset = value.offset
                for name in held[index]:
                    shape = self.parameters[name].shape
                    found[state_name(kind, name)] = LocatedTensor(value.dtype, shape, offset)
                    offset += math.prod(shape) * value.dtype.itemsize
        return found

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}

    def chunks(self, name: str) -> Sequence[Chunk]:
        return [Chunk(whole(self.specs[name]), self.path, self._tensors[name].offset)]

    @cached_property
    def run(self) -> TrainerRun:
        """Its count and settings."""
        states, _, groups = self._state
        with damage("its optimizer has no count of updates", self.path, DROP_OPTIMIZER):
            counts = {count_of_updates(one["step"], f"parameter {index}", self.path) for index, one in states.items()}
        if len(counts) != 1:
            raise CheckpointError(different_counts(counts), where=self.path, do=DROP_OPTIMIZER)
        return adam_run(counts.pop(), groups, self.path)

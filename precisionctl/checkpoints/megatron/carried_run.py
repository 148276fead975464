"""The state of a Megatron run besides its tensors, carried into a checkpoint for other parallel sizes.

That is arguments, counters, schedule, the optimizer's settings by parameter group, and random generator states.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from precisionctl.checkpoints.base import has_muon
from precisionctl.checkpoints.megatron.arguments import STAGES
from precisionctl.checkpoints.megatron.directory import MegatronReader
from precisionctl.checkpoints.megatron.keys import AHEAD, OURS
from precisionctl.checkpoints.other_trainers.trainer_run import TrainedReader
from precisionctl.dtypes import DType
from precisionctl.param import MOMENTS, Parallelism, kind_and_parameter
from precisionctl.torch_when_used import is_tensor
from precisionctl.untrusted.safe_pickle import finite, parts

_DISTRIBUTED = re.compile(r"(?:chained_(\d{1,3})\.)?optimizer\.distributed\.dp_group_idx_0\.(\w+)/shard_0_1")
_OF_BUCKETS = ("per_bucket_numel", "per_bucket_numel_unpadded")
_SHARDING = "param_state_sharding_type"
RESHARDABLE = "fully_reshardable"
"""The layout of the distributed optimizer in which tensors have the shapes of their parameters, as in the plain one."""
_WRITTEN = ("args", "checkpoint_version", "content_metadata", "iteration", "model", "optimizer", OURS)
"""Keys of the common data that the writer makes itself, or that `carry_run` handles separately."""


@dataclass(frozen=True)
class CarriedRun:
    """What a Writer carries over from the run that saved the source; by default nothing.

    `iteration` None makes a `release`. `common` is added to the common data, and `args` to the arguments in it.
    `objects`, by full key (`rng_state/shard_0.0_1.1`), are pickled beside the tensors, or copied if they are Spans of
    another checkpoint. `left` names what stays behind: state that is valid only for the source's parallel sizes, and
    objects of classes that are not installed. `precision_ahead` says that the run was not in the precision that `args`
    name.
    """

    iteration: int | None = None
    common: Mapping[str, object] = field(default_factory=dict)
    objects: Mapping[str, object] = field(default_factory=dict)
    args: Mapping[str, object] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    precision_ahead: bool = False

    @property
    def entry(self) -> Mapping[str, object]:
        """What our entry in the common data says of it."""
        return {AHEAD: True} if self.precision_ahead else {}


NO_RUN = CarriedRun()


def carry_run(reader: MegatronReader, parallelism: Parallelism, *, generators: bool = True) -> CarriedRun:
    """What is carried over into a checkpoint cut for `parallelism`, with the optimizer's settings if there is one.

    Random generator states are carried only at unchanged tensor- and pipeline-parallel sizes, as Megatron restores them
    only then, and only if the target container has a place for them (`generators`).
    """
    optimizers = optimizer_settings(reader)
    common = {key: value for key, value in reader.common.items() if key not in _WRITTEN and _is_plain(value)}
    left = [key for key in reader.common if key not in _WRITTEN and key not in common]
    if has_muon(reader) and len(optimizers) > 1:
        common["optimizer"] = _with_muon(optimizers, reader, parallelism)
    elif optimizers:
        common["optimizer"] = _for_experts(optimizers, parallelism.expert > 1)
    args = {key: value for key, value in reader.args.items() if key not in STAGES and _is_plain(value)}
    sizes = (args.get("tensor_model_parallel_size"), args.get("pipeline_model_parallel_size"))
    objects = {key: reader.checked_object(key) for key in reader.objects if key.startswith("rng_state/")}
    if objects and not (generators and sizes == (parallelism.tensor, parallelism.pipeline)):
        objects, left = {}, [*left, "rng_state"]
    kept = {"no_save_optim": not optimizers, "no_save_rng": not objects}
    return CarriedRun(reader.iteration, common, objects, args | kept, tuple(left))


def carry_trainer_run(reader: TrainedReader, parallelism: Parallelism) -> CarriedRun:
    """What is carried over from another trainer's run: iteration, AdamW's count and settings, in the two groups of
    parameters that Megatron has, with and without decay, and Muon's before. No trainer stores which schedule its
    learning rates follow."""
    run = reader.trainer_run
    settings = {**run.settings, **run.defaults(MEGATRON_NEEDS)}
    optimizer = adam_in_megatron(_with_megatrons_rates(settings), run.updates)
    common: dict[str, object] = {"optimizer": _for_experts([optimizer], parallelism.expert > 1)}
    if run.muon:
        both = muon_in_megatron(_with_megatrons_rates(run.muon), optimizer)
        common["optimizer"] = _with_muon([*both.values()], reader, parallelism)
    args = {"no_save_optim": False, "no_save_rng": True}
    return CarriedRun(reader.iteration, common, args=args)


MEGATRON_NEEDS = ("betas", "eps")
"""Settings that Adam takes from the groups in a checkpoint. Rate and decay come from Megatron's scheduler, before each
update (megatron/core/optimizer_param_scheduler.py: step)."""


def _with_megatrons_rates(settings: Mapping[str, Any]) -> dict[str, Any]:
    rates = {"max_lr": settings["initial_lr"], "min_lr": 0.0} if "initial_lr" in settings else {}
    return {key: one for key, one in settings.items() if key != "initial_lr"} | rates


_GROUP = {
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
    "default_config": True,
}


def adam_in_megatron(settings: Mapping[str, Any], updates: int) -> dict[str, Any]:
    """AdamW's settings and count as Megatron's optimizers want them beside their tensors: two groups of parameters,
    with decay and then without, each with what tells it from others (`param_group_identifier_keys` in
    megatron/core/optimizer/optimizer.py; since 0.17 also `max_lr` and `min_lr`, compared as floats). Transformer
    Engine's and Apex's Adam count in the groups, PyTorch's in `common_step`."""
    group = {**_GROUP, "bias_correction": True, **settings, "step": updates}
    groups = [group, group | {"wd_mult": 0.0, "weight_decay": 0.0}]
    inner = {"state": {"common_step": updates}, "param_groups": groups}
    return {"optimizer": inner, _SHARDING: RESHARDABLE}


def muon_in_megatron(settings: Mapping[str, Any], adam: Mapping[str, Any]) -> dict[Any, Any]:
    """Muon's settings and, for what is no matrix, Adam's of `adam_in_megatron`, as Megatron wants those of two
    optimizers. `momentum` is `momentum_beta` in megatron-core 0.16."""
    group = {**_GROUP, **settings, "momentum_beta": settings["momentum"]}
    return {0: {"optimizer": {"state": {}, "param_groups": [group]}, _SHARDING: RESHARDABLE}, 1: adam}


def step_and_groups(optimizer: object) -> tuple[Any, list[dict[str, Any]] | None]:
    """Adam's count of updates and the parameter groups in an optimizer's settings, as the plain optimizer or the
    distributed one stores them: the count (None if there is none) for all parameters, or with each group. None for the
    groups where the settings have another form."""
    found = optimizer if isinstance(optimizer, dict) else {}
    inner = found.get("optimizer", found)
    listed = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(listed, list) or not all(isinstance(group, dict) for group in listed):
        return None, None
    state = inner.get("state")
    step = state.get("common_step") if isinstance(state, dict) else None
    return next((group["step"] for group in listed if "step" in group), None) if step is None else step, listed


def optimizer_settings(reader: MegatronReader) -> list[dict[str, Any]]:
    """The part of each optimizer (dense, then experts; Muon's before Adam's) that is not tensors: parameter groups,
    step and so on. With flat buckets it is stored in objects."""
    found = reader.common.get("optimizer")
    if not isinstance(found, dict) or not reader.optimizer_specs:
        return []
    chained = set(found) <= set(range(len(found)))
    listed = [found[number] for number in sorted(found)] if chained else [found]
    settings = [dict(one) for one in listed if isinstance(one, dict) and _is_plain(one)]
    for key in reader.objects:
        match = _DISTRIBUTED.fullmatch(key)
        if match and match[2] not in _OF_BUCKETS and int(match[1] or 0) < len(settings):
            settings[int(match[1] or 0)][match[2]] = reader.read_object(key)
    return [_for_either(one, reader.iteration) for one in settings if _is_plain(one)]


def _for_either(optimizer: dict[str, Any], iteration: int | None) -> dict[str, Any]:
    """An optimizer's settings with what the plain optimizer and the distributed one ask for, whichever it was."""
    step, groups = step_and_groups(optimizer)
    if "optimizer" not in optimizer or groups is None:
        return optimizer  # another form, such as that of a model in FP32
    inner = optimizer["optimizer"]
    state: dict[Any, Any] = found if isinstance(found := inner.get("state"), dict) else {}
    count: Any = iteration if step is None else step
    with suppress(TypeError, ValueError, OverflowError):  # PyTorch's is a tensor or a float
        count = int(count)
    state, groups = {**state, "common_step": count}, [{**group, "step": count} for group in groups]
    return optimizer | {"optimizer": {**inner, "state": state, "param_groups": groups}, _SHARDING: RESHARDABLE}


def _for_experts(optimizers: list[dict[str, Any]], apart: bool, *, biases: bool = False) -> object:
    """The settings in the form that Megatron loads: of one optimizer, or (`apart`, with expert parallelism) of two,
    dense and experts. For `biases` alone, all that Adam has of experts beside Muon, it has no group with decay."""
    dense = optimizers[0]
    if not apart:
        return dense
    if len(optimizers) > 1:
        return {0: dense, 1: optimizers[1]}
    experts = dense
    inner = dense.get("optimizer")
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if isinstance(inner, dict) and isinstance(groups, list):
        of_experts = [group | {"is_expert_parallel": True} for group in groups if isinstance(group, dict)]
        if biases:
            of_experts = [group for group in of_experts if group.get("wd_mult") == 0.0]
        experts = dense | {"optimizer": inner | {"param_groups": of_experts}}
    return {0: dense, 1: experts}


_MOMENTUM = ("momentum", "momentum_beta")
"""What Muon's groups have, since core 0.17 and in 0.16, and Adam's have not."""


def momentum_of(optimizer: object) -> Mapping[str, Any]:
    """The momentum and the rates of a group, as torch calls them, if it is Muon's; else empty."""
    _, groups = step_and_groups(optimizer)
    for group in groups or ():
        for key in _MOMENTUM:
            if key in group:
                rates = {theirs: group[ours] for ours, theirs in _RATES.items() if ours in group}
                return {"momentum": group[key], **rates}
    return {}


_RATES = {"lr": "lr", "weight_decay": "weight_decay", "max_lr": "initial_lr"}
"""Rates in Megatron's groups, and what torch calls them."""


def _with_muon(
    optimizers: Sequence[dict[str, Any]], reader: MegatronReader | TrainedReader, parallelism: Parallelism
) -> object:
    """The settings as Megatron loads them: Muon's, then Adam's of what is no matrix; with expert parallelism experts'
    Muon's after the one, and experts' Adam's after the other, if experts have biases (megatron/core/optimizer/muon.py:
    `optimizers`)."""
    muons, adams = ([one for one in optimizers if bool(momentum_of(one)) == is_muon] for is_muon in (True, False))
    if not (muons and adams):  # another form
        return dict(enumerate(optimizers))
    apart = parallelism.expert > 1
    moments = map(kind_and_parameter, reader.optimizer_specs)
    with_biases = any(kind in MOMENTS and ".experts." in parameter for kind, parameter in moments)
    found: list[object] = []
    for of_kind, has_experts in ((muons, True), (adams, with_biases)):
        one = _for_experts(of_kind, apart and has_experts, biases=of_kind is adams)
        found += one.values() if apart and has_experts and isinstance(one, dict) else [one]
    return dict(enumerate(found))


def _is_plain(value: object) -> bool:
    """Whether a value can be written again as it was read: nothing in it is a placeholder for an object whose class is
    not on the allow-list."""
    kinds = str | bytes | int | float | DType | None
    try:
        return all(isinstance(part, kinds) or is_tensor(part) for part in parts(finite(value)))
    except ValueError:  # YAML can hold what archives may not
        return False

"""Names in Megatron's checkpoints: directories of iterations, keys of stacked layers and experts, sharded objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.output import replace_file
from precisionctl.checkpoints.torch_files import torch_zip
from precisionctl.errors import CheckpointError, DamagedCheckpoint
from precisionctl.paths import above, own_name
from precisionctl.torch_when_used import torch
from precisionctl.untrusted.safe_files import check_link, has_file, read_file
from precisionctl.untrusted.safe_pickle import is_count

TRACKER = "latest_checkpointed_iteration.txt"
BRIDGE_TRACKER = "latest_train_state.pt"
"""Megatron-Bridge's tracker; not every version also writes Megatron-LM's."""

MARKER = "metadata.json"
"""Written last: a directory with it is complete."""

COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
EXTRA_STATE = "._extra_state"

COMPANIONS = Path("precisionctl/hf")
"""Directory for the Hugging Face files (config, tokenizer) that Megatron has no place for."""

BRIDGE_TOKENIZER = "tokenizer"
"""Directory in which Megatron-Bridge saves the tokenizer beside the weights (0.3.1 training/checkpointing.py,
save_tokenizer_assets)."""

RUN_FILE = Path("precisionctl/run.json")
"""What a run of `resume` says of itself in each of its checkpoints."""

VERL, VERL_COMPANIONS = "dist_ckpt", "huggingface"
"""Directories of verl's checkpoint, which has no arguments, and of the config and tokenizer beside it; SkyRL has those
in it."""

OURS = "precisionctl"
"""Key of our entry in the common data, which Megatron ignores."""

AHEAD = "precision_ahead"
"""Key in that entry: the precision in Megatron's arguments is that of a run to come, and not of the one before."""

PARAMETER_STATE = re.compile(
    r"optimizer\.state\.(?:module\.)*(exp_avg|exp_avg_sq|momentum_buffer|fp32_param|param)\.(.+)"
)
"""The optimizer's state of a parameter: its kind, and the parameter's name."""

_LAYER = re.compile(r"(.*\bdecoder\.layers\.)(\d{1,9})\.(.+)")
_LAYERS = re.compile(r"(.*\bdecoder\.(?:layers|deepstack_merger_list)\.)(?!\d+\.)(.+)")
"""A stack of layers; or of what Megatron-Bridge's Qwen3-VL has for some layers of its tower."""

_EXPERT = re.compile(r"(.+\.mlp\.experts\.)(linear_fc[12]\.(?:weight|bias|_extra_state))(\d{1,9})")
_EXPERTS = re.compile(r"(.+\.mlp\.experts\.)experts\.(linear_fc[12]\.(?:weight|bias|_extra_state))")
_ONE_EXPERT = re.compile(
    r"(.+\.mlp\.experts\.)(?:local_)?experts\.(\d{1,9})\.(linear_fc[12]\.(?:weight|bias|_extra_state))(_[wv])?"
)
_SHARD = re.compile(r"(.+)/shard_(\d{1,9}(?:\.\d{1,9})?)_\d+(?:\.\d+)?")


_ITERATION = re.compile(r"iter_(\d{1,15})")
_OF_GPT_MTP = re.compile(r"\.mtp_model_layer\.(?!layers\.)")


def as_in_torch_dist(name: str) -> str:
    """A name of modules with what torch_dist has for the layer of a prediction layer, `transformer_layer`, where it is
    `mtp_model_layer` since 0.17. Of hybrid models, whose prediction layers have several, torch_dist has this name too
    (multi_token_prediction.py, sharded_state_dict)."""
    return _OF_GPT_MTP.sub(".transformer_layer.", name) if ".mtp_model_layer." in name else name


def expert_of(name: str) -> int | None:
    """The number of the expert, in the whole model, that a logical name belongs to; None if to none."""
    return without_expert(name)[1]


def without_expert(name: str) -> tuple[str, int | None]:
    """A logical name without the number of its expert, and that number: the grouped linear's parameter or state."""
    match = _EXPERT.fullmatch(name)
    return (match[1] + match[2], int(match[3])) if match else (name, None)


def count_experts(names: Iterable[str]) -> int:
    """The number of experts in each layer of a model, or of a rank, with these tensors; 0 if none."""
    return 1 + max((number for name in names if (number := expert_of(name)) is not None), default=-1)


def layer_of(name: str) -> tuple[int, str] | None:
    """The number of the decoder layer of a logical name, and the name within the layer; None outside layers."""
    match = _LAYER.fullmatch(name)
    return (int(match[2]), match[3]) if match else None


def stack(name: str, by_layer: bool = False) -> tuple[str, tuple[int, ...]]:
    """The key that a logical name is stored under, and its indices in the key's leading dimensions.

    `decoder.layers.3.x` is slice 3 of `decoder.layers.x`, or a key of its own with `by_layer`, for models whose layers
    differ. `….mlp.experts.linear_fc1.weight5` is slice 5 of `….mlp.experts.experts.linear_fc1.weight`.
    """
    at: tuple[int, ...] = ()
    if (match := _LAYER.fullmatch(name)) and not by_layer:
        name, at = match[1] + match[3], (int(match[2]),)
    if match := _EXPERT.fullmatch(name):
        name, at = f"{match[1]}experts.{match[2]}", (*at, int(match[3]))
    return name, at


def leading(key: str) -> int:
    """The number of leading dimensions of a stored tensor that are layers and experts: 0, 1 or 2."""
    return bool(_LAYERS.fullmatch(key)) + bool(_EXPERTS.fullmatch(key))


def unstack(key: str, at: tuple[int, ...]) -> str:
    """The logical name of a slice: the inverse of `stack`.

    It also takes `….mlp.experts.experts.5.linear_fc1.weight_w`: with `singleton_local_shards` (megatron-core 0.14 to
    0.16) each expert, and each of gate and up, has its own key.
    """
    numbers = list(at)
    if match := _LAYERS.fullmatch(key):
        key = f"{match[1]}{numbers.pop(0)}.{match[2]}"
    if match := _EXPERTS.fullmatch(key):
        return f"{match[1]}{match[2]}{numbers.pop(0)}"
    match = _ONE_EXPERT.fullmatch(key)
    return f"{match[1]}{match[3]}{match[2]}{match[4] or ''}" if match else key


def object_key(name: str, layers: int, experts: int = 1, by_layer: bool = False) -> str:
    """The key of the object with this logical name. Like tensors, objects of layers and experts are shards of one."""
    key, at = stack(name, by_layer)
    sizes = [layers] * bool(_LAYERS.fullmatch(key)) + [experts] * bool(_EXPERTS.fullmatch(key))
    return f"{key}/shard_{'.'.join(map(str, at or [0]))}_{'.'.join(map(str, sizes or [1]))}"


def object_name(key: str) -> str | None:
    """The logical name of an object: the inverse of `object_key`. None for one that is sharded in another way."""
    match = _SHARD.fullmatch(key)
    if not match:
        return None
    at, dimensions = tuple(map(int, match[2].split("."))), leading(match[1])
    return unstack(match[1], at[:dimensions]) if len(at) == max(dimensions, 1) else None


def directory_name(iteration: int | None) -> str:
    """The name of an iteration's directory; `release` (weights that belong to no run) for None."""
    return "release" if iteration is None else f"iter_{iteration:07d}"


def iteration_of(directory: Path, common: Mapping[str, Any]) -> int | None:
    """The iteration that a checkpoint's common data names; None if it names none, and for a `release`: weights that
    belong to no run."""
    if own_name(directory) == directory_name(None):
        return None
    iteration = common.get("iteration")
    return iteration if is_count(iteration) else None


def write_tracker(top: Path, iteration: int | None) -> None:
    """Write atomically which iteration is the newest."""
    replace_file(top / TRACKER, "release" if iteration is None else str(iteration))


def find_iteration(path: Path, iteration: int | None, complete: Callable[[Path], bool]) -> Path:
    """The directory of an iteration under `path`: that of `iteration`, if given; else `path` itself, if it is an
    iteration; else the one that Megatron-LM's tracker names, or else Megatron-Bridge's. `complete` says whether a
    directory is a complete checkpoint.

    Raises CheckpointError for an iteration that is not there, DamagedCheckpoint for a tracker that cannot be read or an
    iteration that is a link to elsewhere.
    """
    if iteration is None and complete(path):
        return path
    there = _complete_in(path, complete)
    advice = another_iteration(path, complete) or "No iteration in it is complete: copy the checkpoint again."
    if iteration is not None and (complete(path) or there == ["release"]):  # which has no number
        advice = f"Leave --iteration out: there is only {there[0] if there else 'this one'}."

    name = directory_name(iteration) if iteration is not None else _tracked(path, advice)
    if name is None:
        raise CheckpointError(f"there is no {TRACKER} to say which iteration is meant", where=path, do=advice)
    if name not in there:
        raise CheckpointError(f"{name} is not a complete checkpoint", where=path, do=advice)
    found = path / name
    check_link(found, path)
    return found


def _complete_in(path: Path, complete: Callable[[Path], bool]) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and complete(entry))


def another_iteration(path: Path, complete: Callable[[Path], bool], but: str = "") -> str:
    """Advice to read another iteration in a directory than the one that is named `but`; empty if no other one is
    complete."""
    others = [name for name in _complete_in(path, complete) if name != but]
    if not others:
        return ""
    numbers = [int(match[1]) for name in others if (match := _ITERATION.fullmatch(name))]
    option = f"as `--iteration {max(numbers)}`, or " if numbers else ""
    return f"Name another iteration, {option}by its path. Complete ones: {', '.join(others)}."


def later_notes(read: Path, complete: Callable[[Path], bool]) -> Iterator[str]:
    """A note on the last iteration beside the one that was `read`, if that is earlier and the tracker does not name the
    last."""
    path = above(read)
    numbered = {int(match[1]): one for one in path.iterdir() if (match := _ITERATION.fullmatch(one.name))}
    mine = _ITERATION.fullmatch(own_name(read))
    if mine and (number := max(numbered, default=0)) > int(mine[1]):
        last, tracked = numbered[number], None
        with suppress(DamagedCheckpoint):  # the user has named the iteration
            tracked = _tracked(path, "")
        if last.name != tracked:
            why = "not named by the tracker" if complete(last) else "not complete"
            yield f"{last.name} is there too, later, and {why}."


def _tracked(path: Path, advice: str) -> str | None:
    """The name of the directory that Megatron-LM's tracker names, or else Megatron-Bridge's; None without either.
    Raises DamagedCheckpoint for one that names none."""
    if has_file(path / TRACKER, path):
        return directory_name(read_tracker(path, advice))
    return directory_name(_bridge_step(path)) if has_file(path / BRIDGE_TRACKER, path) else None


def _bridge_step(path: Path) -> int:
    """The iteration that Megatron-Bridge's tracker names: it is a training state, as tensors of one element."""
    tracker = path / BRIDGE_TRACKER
    state = torch_zip.load(read_file(tracker, path), tracker)
    step = state.get("step") if isinstance(state, dict) else None
    if not isinstance(step, torch.Tensor) or step.numel() != 1 or step.is_floating_point() or step < 0:
        raise DamagedCheckpoint("it names no step", where=tracker)
    return int(step)


def read_tracker(path: Path, advice: str) -> int | None:
    """The iteration that Megatron-LM's tracker names; None for a `release`. Raises DamagedCheckpoint for a file that
    names none."""
    with open(path / TRACKER, errors="replace") as file:
        text = file.read(100).strip()
    if text != "release" and not re.fullmatch("[0-9]{1,15}", text):
        raise DamagedCheckpoint(f"{TRACKER} says {text[:40]!r}, not an iteration or `release`", where=path, do=advice)
    return None if text == "release" else int(text)

"""Where trainers for RL and post-training save a model, its optimizer, its config and tokenizer, and a run's step.

This table alone says what is opened of a folder around a checkpoint (`checkpoint_inside`), which folder's name is the
step of a run (`step_of`), and where optimizers are apart. Folders of other names are none of these, whatever is in
them: a folder with several checkpoints is the user's to choose from.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from precisionctl.untrusted.safe_files import leads_out


@dataclass(frozen=True)
class Tree:
    """What a trainer saves. `folders` lead from a run to the folder of a checkpoint; `N` in a name is the step of the
    run, `#` another number. In the last one is the `model`, or that is it; its `optimizer` and `companions` (config,
    tokenizer) if they are apart. `beside` are names, in any of the folders, of what looks like weights and is no other
    choice: models that only train this one, and state of other parts."""

    folders: str
    model: str = ""
    optimizer: str | None = None
    companions: str | None = None
    beside: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        return [name for name in self.folders.split("/") if name]

    def is_there(self, folder: Path) -> bool:
        """Whether a folder has the model and the optimizer."""
        return all((folder / name).is_dir() for name in (self.model, self.optimizer or ""))


_CRITIC = ("critic", "data.pt", "dataloader.pt", "trainer_state.pt")
_HF_TRAINERS = ("scheduler.pt", "rng_state*.pth", "training_args.bin")

AUTOMODEL = "model"
"""Where NeMo Automodel has the model, in the folder of a step."""

DCP_TREES = (
    # NeMo Automodel 0.7, whose folders are named after one step fewer than it made
    Tree("", AUTOMODEL, "optim", f"{AUTOMODEL}/.hf_metadata"),
    # NeMo-RL at 7ea279a, DTensor (native_checkpoint.py), and with Automodel's files (models/automodel/checkpoint.py)
    Tree("step_N/policy", "weights", "optimizer", "tokenizer", ("train_dataloader.pt",)),
    Tree("step_N/policy", f"weights/{AUTOMODEL}", "optimizer/optim", "tokenizer", ("train_dataloader.pt",)),
    # miles at 31f1ca9 (fsdp_utils/checkpoint.py): folders are named after rollouts, and not after updates
    Tree("iter_#", "model", "optimizer", beside=("lr_scheduler", "rng.pt", "rollout")),
    # LLaMA-Factory 1 at ff6d4d1 (distributed/fsdp2.py)
    Tree("checkpoint-N", "model", "optimizer", "hf_model", _HF_TRAINERS),
    # prime-rl at 559b447 (trainer/ckpt.py)
    Tree("checkpoints/step_N/trainer", beside=("orchestrator",)),
)
"""Trees of PyTorch's checkpoints (DCP)."""

ROLLS_OPTIMIZER = "dist_optimizer"

MEGATRON_TREES = (
    # NeMo 2, beside the `context` that describes the model
    Tree("", "weights"),
    # verl 0.9.1, Megatron
    Tree("global_step_N/actor", "dist_ckpt", None, "huggingface", _CRITIC),
    Tree("global_step_N/actor", "model/dist_ckpt", "optimizer/dist_ckpt", "huggingface", _CRITIC),
    # NeMo-RL at 7ea279a, by Megatron-Bridge: all its iterations are 0
    Tree("step_N/policy/weights/iter_0000000", beside=("train_dataloader.pt", "tokenizer", "latest_train_state.pt")),
    # ROLL at 8eb27cc (mcore_adapter/checkpointing.py): all its iterations are 1
    Tree("checkpoint-N/iter_0000001", "dist_model", ROLLS_OPTIMIZER, beside=_HF_TRAINERS),
)
"""Trees of Megatron's `torch_dist`."""

_OF_EITHER = (
    # verl 0.9.1 (utils/checkpoint/fsdp_checkpoint_manager.py), EasyR1 at b44b311 (a file of that name): files of ranks
    Tree("global_step_N/actor", beside=_CRITIC),
    # SkyRL at a956457 (fsdp_strategy.py, megatron_strategy.py): the same files, or `torch_dist`
    Tree("global_step_N/policy", beside=_CRITIC),
    # AReaL at 4aef98d (fsdp_utils/checkpoint.py): DCP or `torch_dist`
    Tree("recover_checkpoint"),
)

TREES = (*DCP_TREES, *MEGATRON_TREES, *_OF_EITHER)


def step_of(model: Path) -> int | None:
    """The step after which a folder is named that the directory of a `model` is in, if all folders between are a
    tree's, and the optimizer is there which that has. Links do not count: it is where the files are."""
    model = model.resolve()
    for tree in TREES:
        inner = [name for name in tree.model.split("/") if name]
        names = [*tree.names, *inner]
        step = next((at for at, name in enumerate(names) if "N" in name), None)
        if step is None or len(names) - step > len(model.parts):
            continue
        found = [_named(name, part) for name, part in zip(names[step:], model.parts[step - len(names) :], strict=True)]
        if found[0] and all(found) and tree.is_there(model.parents[len(inner) - 1] if inner else model):
            return int(found[0][1])
    return None


def checkpoint_inside(path: Path) -> Path | None:
    """The folder of a checkpoint, if a tree leads from `path` to it, and nothing on the way could be meant instead."""
    if not path.is_dir():
        return None
    own, found = path.resolve().name, set[Path]()
    for tree in TREES:
        for start, above in enumerate(("", *tree.names[:-1])):
            if (not above or _named(above, own)) and (inside := _followed(tree, tree.names[start:], path)):
                found.add(inside)
    return found.pop() if len(found) == 1 else None


def _followed(tree: Tree, names: Sequence[str], path: Path) -> Path | None:
    """The last of the folders with these `names`, each in the one before, from `path` on; None if one is not there, or
    not the only one."""
    place = path
    for name in names:
        inside = [one for one in place.iterdir() if _named(name, one.name)]
        if len(inside) != 1 or not inside[0].is_dir() or leads_out(inside[0], path):
            return None
        if _has_others(place, {inside[0].name}, tree.beside):
            return None
        place = inside[0]
    # What is beside a model that has no folder of its own belongs to it
    known = {name.partition("/")[0] for name in (tree.model, tree.optimizer, tree.companions) if name}
    there = place != path and tree.is_there(place)
    return place if there and not (tree.model and _has_others(place, known, tree.beside)) else None


def _named(pattern: str, name: str) -> re.Match[str] | None:
    """Whether a folder has the name that a tree says; the first group is its number."""
    return _pattern(pattern).fullmatch(name)


@cache  # each name is held against all entries of a folder, which may be thousands
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace("N", r"(\d{1,18})").replace(r"\#", r"(\d{1,18})"))


_STEP = re.compile(r"(?:epoch_\d{1,15}_)?(?:checkpoint|step|global_step|epoch|iter)[-_]?(\d{1,15})")


def number_of_step(name: str) -> int | None:
    """The number in the name of a folder that trainers may give a checkpoint; None for other names."""
    return int(match[1]) if (match := _STEP.fullmatch(name)) else None


_WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.distcp", "*.gguf", "*.nemo", "*.lora", "*.npz"),
    *("*.tar", "*.h5", "*.msgpack", ".metadata", "metadata.json", "_METADATA"),
)
"""Names of files that may have weights, or a part of a checkpoint's."""

_MOST = 5000
"""So many files of a folder are looked at; of one with more nothing is known."""


def _has_others(folder: Path, known: set[str], beside: Sequence[str]) -> bool:
    """Whether a folder has something that may be a model or a step, beside what is `known` of it."""
    return any(
        number_of_step(one.name) is not None or _may_be_weights(one)
        for one in folder.iterdir()
        if one.name not in known and not any(fnmatch(one.name, pattern) for pattern in beside)
    )


def _may_be_weights(path: Path) -> bool:
    """Whether a file, or one in a folder, may have weights. A link to a folder may lead to some."""
    if not path.is_dir():
        return any(fnmatch(path.name, pattern) for pattern in _WEIGHTS)
    if path.is_symlink():
        return True
    looked_at = 0
    for _, folders, files in os.walk(path):
        looked_at += len(folders) + len(files)
        if looked_at > _MOST or any(fnmatch(name, pattern) for name in files for pattern in _WEIGHTS):
            return True
    return False

"""Storage: the layout and container of a result, and how its tensors are cut up in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from precisionctl.checkpoints.hf_directory.huggingface_files import BIN, MAX_SHARD_SIZE, SAFETENSORS
from precisionctl.errors import RecipeError, meant
from precisionctl.fp8.extra_state_writer import TeVersion
from precisionctl.param import ONE_RANK, Layout, Parallelism

DCP = "dcp"
"""The container of PyTorch's own checkpoints, with an optimizer under Hugging Face's names."""

DEEPSPEED = "deepspeed-universal"
"""The container that DeepSpeed goes on from with any ZeRO, on any number of ranks."""

TORCHTITAN = "torchtitan"
"""The container that torchtitan goes on from: PyTorch's own, under its Llama's names."""

TORCH_DIST = "torch_dist"
"""Megatron's container of sharded tensors, for any parallel sizes."""

TORCH = "torch"
"""Megatron's container of a file for each rank, which it calls legacy."""

STATE_DICTS = (DCP, TORCHTITAN, DEEPSPEED)
"""Containers of what trainers load: names that a model has in memory, FP32 masters and an optimizer."""

_ASKED_AS: Mapping[str, str] = {DCP: "dcp", TORCHTITAN: "torchtitan", DEEPSPEED: "deepspeed"}
"""What `--to` says for each of them."""

CONTAINERS: Mapping[Layout, tuple[str, ...]] = {
    "hf": (SAFETENSORS.name, BIN.name, *STATE_DICTS),
    "megatron": (TORCH_DIST, TORCH),
}
"""The containers that can be written in each layout; the first is the default."""


def layout_and_container(to: str, container: str | None) -> tuple[Layout, str | None]:
    """What `--to` and `--container` ask for, as a Request has it. Raises RecipeError where they contradict."""
    if container is not None and _ASKED_AS.get(container, to) != to:
        raise RecipeError(f"--to {to} is not written as {container}", do=f"Give --to {_ASKED_AS[container]} alone.")
    for own, asked in _ASKED_AS.items():
        if to == asked:
            if container not in (None, own):
                raise RecipeError(f"--to {to} is not written as {container}", do="Leave --container out.")
            return "hf", own
    return cast(Layout, to), container


@dataclass(frozen=True)
class Storage:
    """How a result is stored. Raises RecipeError for a container of another layout, and for ranks that Hugging Face's
    layout does not have.

    `container` is one of the layout's CONTAINERS; `parallelism` has the sizes that a Megatron result is split for;
    `max_shard_size` is in bytes; `te_version` is the version of the FP8 payloads to write.
    """

    layout: Layout
    container: str
    parallelism: Parallelism = ONE_RANK
    max_shard_size: int = MAX_SHARD_SIZE
    te_version: TeVersion = 2

    def __post_init__(self) -> None:
        if self.layout == "hf" and self.parallelism != ONE_RANK:
            to = _ASKED_AS.get(self.container, "hf")
            raise RecipeError(f"--to {to} is not split for ranks", do="Leave --tp and its like out.")
        if self.container not in (known := CONTAINERS[self.layout]):
            what = f"--to {self.layout} is not written as {self.container}"
            taken = [each for each in known if each not in _ASKED_AS]  # the others have a `--to` of their own
            raise RecipeError(what, do=f"Known: {', '.join(taken)}. {meant(self.container, taken)}".rstrip())

    @property
    def is_state_dict(self) -> bool:
        """Whether it is what a trainer loads under the names of a model's class."""
        return self.container in STATE_DICTS

    @property
    def holds_optimizer(self) -> bool:
        """Whether it has a place for an optimizer."""
        return self.layout == "megatron" or self.is_state_dict

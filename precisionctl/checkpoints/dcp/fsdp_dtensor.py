"""PyTorch's own distributed checkpoints (DCP): with Hugging Face's names (`dcp_model.py`), or with Megatron's, which
are `fsdp_dtensor`, the checkpoints of Megatron-FSDP.

In those nothing is stacked, gate and up are separate (`linear_fc1.weight_w`, `weight_v`), experts are numbered, every
name begins with `model.module.`, and there is no FP8 state (megatron/core/transformer/fsdp_dtensor_checkpoint.py).
Weights in FP32 are the masters. An optimizer's settings are there for each parameter, as
`optimizer.param_to_group_meta.<parameter>.<setting>` (read off `sharded_param_state_fsdp_dtensor` in megatron-core
0.16.1, optimizer/distrib_optimizer.py).
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import NO_HINTS, Container, Hints, no_iterations
from precisionctl.checkpoints.chunks import Chunk
from precisionctl.checkpoints.dcp.dcp_model import ACCELERATE, DcpModelReader, directories_of
from precisionctl.checkpoints.hf_directory import safetensors_pieces
from precisionctl.checkpoints.megatron.keys import MARKER, layer_of
from precisionctl.checkpoints.megatron.logical import MASTER
from precisionctl.checkpoints.other_trainers.trainer_run import count_of_updates, different_counts
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_files import dcp_metadata, torch_zip
from precisionctl.dtypes import DType
from precisionctl.errors import DROP_OPTIMIZER, CheckpointError
from precisionctl.param import EMBEDDING, TensorSpec, state_name
from precisionctl.untrusted.safe_files import check_link


def _is_complete(directory: Path) -> bool:
    """Whether a directory has PyTorch's index and not Megatron's marker."""
    return (directory / dcp_metadata.FILE).is_file() and not (directory / MARKER).exists()


_SETTING = re.compile(r"optimizer\.param_to_group_meta\.(.+)\.(\w+)")
_STEP = re.compile(r"optimizer\.(?:state|param_to_group_meta)\.(.+)\.step")


class FsdpDtensorReader(TorchDistReader):
    """A checkpoint of Megatron-FSDP with Megatron's names. Raises as TorchDistReader."""

    container = "fsdp_dtensor"
    complete = staticmethod(_is_complete)

    def __init__(
        self, path: Path, iteration: int | None = None, hints: Hints = NO_HINTS, index: dcp_metadata.Index | None = None
    ) -> None:
        super().__init__(path, iteration, hints, index)
        first = state_name("exp_avg", "")
        trained = [name.removeprefix(first) for name in self._of_optimizer if name.startswith(first)]
        self._masters: Mapping[str, TensorSpec] = {
            f"{MASTER}{name}": self.specs[name]
            for name in trained
            if name in self.specs and self.specs[name].dtype == DType.float32
        }
        self._steps = {name: match[1] for name in self._of_optimizer if (match := _STEP.fullmatch(name))}

    @property
    def optimizer_specs(self) -> Mapping[str, TensorSpec]:
        """Raises CheckpointError where parameters had different numbers of updates."""
        if len(self._counts) > 1:
            raise CheckpointError(different_counts(self._counts), where=self.path, do=DROP_OPTIMIZER)
        states = {name: spec for name, spec in self._of_optimizer.items() if name not in self._steps}
        return {**self._masters, **states}

    @cached_property
    def _counts(self) -> set[int]:
        """Adam's counts, of one parameter of each kind."""
        counts = set[int]()
        for name in {_kind(parameter): name for name, parameter in self._steps.items()}.values():
            span = self._index.tensors[name].pieces[0].span
            counts.add(count_of_updates(torch_zip.skeleton_at(span), f"`{self._steps[name]}`", span.path))
        return counts

    def chunks(self, name: str) -> Sequence[Chunk]:
        return super().chunks(name.removeprefix(MASTER) if name in self._masters else name)

    @cached_property
    def common(self) -> Mapping[str, Any]:
        """Also the optimizer's settings and count, as Megatron's other containers have them."""
        groups: dict[str, dict[str, torch_zip.Span]] = {}
        for key, span in self._index.objects.items():
            if match := _SETTING.fullmatch(key):
                groups.setdefault(_kind(match[1]), {}).setdefault(match[2], span)
        if not groups:
            return super().common
        settings = [{key: torch_zip.load(span.read(), span) for key, span in one.items()} for one in groups.values()]
        apart = {"param_groups": list({repr(one): one for one in settings}.values())}
        step = {"state": {"common_step": min(self._counts)}} if len(self._counts) == 1 else {}
        return {**super().common, "optimizer": {"optimizer": apart | step}}


def _kind(parameter: str) -> str:
    """A parameter's name without numbers. Parameters of one kind (norms, experts, ...) are in one parameter group."""
    return re.sub(r"\d+", "#", parameter)


def recognise(path: Path) -> bool:
    """Whether `path` is such a directory, or one of its entries is an iteration, or the model of a step."""
    if not path.is_dir():
        return False
    found = directories_of(path)
    of_model = found is not None and not (found[0] / MARKER).exists()
    return of_model or any(_is_complete(directory) for directory in path.glob("iter_*"))


def open_reader(
    path: Path, iteration: int | None = None, hints: Hints = NO_HINTS
) -> FsdpDtensorReader | DcpModelReader:
    """Open an iteration of Megatron's, or the newest of a directory; or a model with Hugging Face's names. Raises as
    their Readers do."""
    if found := directories_of(path):
        directory, apart = found
        check_link(directory, path)
        in_archives = (directory / dcp_metadata.FILE).is_file()
        index = dcp_metadata.read_index(directory) if in_archives else safetensors_pieces.read_pieces(directory)
        has_embedding = any(key.endswith(EMBEDDING) for key in index.tensors)  # ChatGLM has one of this name, too
        if has_embedding and any(map(layer_of, index.tensors)):
            if directory == path and iteration is None and _is_complete(path):
                return FsdpDtensorReader(path, hints=hints, index=index)
        else:
            if iteration is not None:
                raise no_iterations(path)
            return DcpModelReader(path, directory, index, hints, apart)
    return FsdpDtensorReader(path, iteration, hints)


CONTAINER = Container(
    recognise,
    open_reader,
    f"{dcp_metadata.FILE} of a PyTorch checkpoint (DCP) with names of Hugging Face or Megatron-FSDP, there, in "
    f"{ACCELERATE} or in an iteration's directory; or its pieces in safetensors, there or in a step of NeMo Automodel",
)

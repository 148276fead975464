"""AdamW's state as torch.optim saves it, under numbers: `optimizer.pt` of Hugging Face's Trainer.

Numbers run through the groups of parameters, in each in the order of the model's modules. No file has the names: they
are those of the family's class in transformers, as far as its modules are known here, and shapes must fit.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import Chunk, whole
from precisionctl.checkpoints.torch_zip import LocatedTensor, skeleton
from precisionctl.checkpoints.trainer_run import TrainerRun, adam_settings, lost_settings, number
from precisionctl.errors import CheckpointError, damage
from precisionctl.param import STATE, TensorSpec
from precisionctl.untrusted.safe_files import check_link

FILE = "optimizer.pt"

DROP = "--drop-optimizer leaves the optimizer behind."
_MODULES = (
    *("model", "embed_tokens", "layers", "self_attn", "mlp"),
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_norm", "k_norm"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj", "norm", "lm_head", "weight", "bias"),
)
"""The modules of Llama and its like, those of each in the order in which the classes in transformers define them."""


def parameter_order(names: Sequence[str], where: Path) -> list[str]:
    """The names in the order of the model's parameters. Raises CheckpointError for modules whose order is not known."""
    ranks = {module: rank for rank, module in enumerate(_MODULES)}
    unknown = {part for name in names for part in name.split(".") if not part.isdecimal() and part not in ranks}
    if unknown:
        what = f"an optimizer under numbers, and the order of this model's `{min(unknown)[:90]}` is not known"
        raise CheckpointError(what, where=where, do=DROP)
    return sorted(names, key=lambda name: [int(p) if p.isdecimal() else ranks[p] for p in name.split(".")])


_UNDECAYED = re.compile(r".*(?:bias|norm\.weight)")


def names_by_number(groups: Sequence[Any], names: Sequence[str], where: Path) -> dict[int, str]:
    """The parameter of each number, of `names` in the model's order: of all in one group, or of those with decay, then
    norms and biases, as trainers group them. Raises CheckpointError where groups are of other lengths."""
    decayed = [name for name in names if not _UNDECAYED.fullmatch(name)]
    listed = [group["params"] for group in groups if group["params"]]
    for order in ([list(names)], [decayed, [name for name in names if name not in set(decayed)]]):
        if [len(each) for each in order] == [len(numbers) for numbers in listed]:
            pairs = zip(order, listed, strict=True)
            return {number: name for named, numbers in pairs for name, number in zip(named, numbers, strict=True)}
    counts = " and ".join(str(len(numbers)) for numbers in listed[:4])
    raise CheckpointError(f"groups of {counts} parameters, which are none of this model's", where=where, do=DROP)


@dataclass(frozen=True)
class NumberedOptimizer:
    """The optimizer in a file of torch.save. `parameters` are the model's. Reading it reads its pickle alone.

    Its properties raise CheckpointError where it is not AdamW's, or not of these parameters.
    """

    path: Path
    parameters: Mapping[str, TensorSpec]

    @cached_property
    def _state(self) -> tuple[dict[str, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """The state of each parameter, and the groups."""
        check_link(self.path, self.path.parent)
        with damage("its optimizer is not what PyTorch saves", self.path, DROP):
            saved = skeleton(self.path)
            groups, states = list(saved["param_groups"]), saved["state"]
            names = parameter_order(tuple(self.parameters), self.path)
            numbered = names_by_number(groups, names, self.path)
            return {numbered[number]: dict(state) for number, state in states.items()}, groups

    @cached_property
    def _tensors(self) -> Mapping[str, LocatedTensor]:
        found: dict[str, LocatedTensor] = {}
        for name, state in self._state[0].items():
            for kind, value in state.items():
                if kind == "step":
                    continue
                if not isinstance(value, LocatedTensor) or value.shape != self.parameters[name].shape:
                    what = f"the optimizer's {str(kind)[:40]} of `{name}` is not of its shape"
                    raise CheckpointError(what, where=self.path, do=DROP)
                found[f"{STATE}{kind}.{name}"] = value
        return found

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}

    def chunks(self, name: str) -> Sequence[Chunk]:
        return [Chunk(whole(self.specs[name]), self.path, self._tensors[name].offset)]

    @cached_property
    def run(self) -> TrainerRun:
        """Its count and settings."""
        states, groups = self._state
        with damage("its optimizer has no count of updates", self.path, DROP):
            counts = {number(state["step"], self.path) for state in states.values()}
        if len(counts) != 1:
            raise CheckpointError("its parameters had other numbers of updates", where=self.path, do=DROP)
        left = ("the schedule of learning rates, whose kind is not stored", "random generators", "the order of data")
        return TrainerRun(counts.pop(), adam_settings(groups), (*left, *lost_settings(groups)))

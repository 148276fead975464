"""Optimizers of two checkpoints, to be compared parameter by parameter: under Megatron's names where both have them,
else under Hugging Face's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from precisionctl.architectures.families import table_of
from precisionctl.checkpoints.base import HasOptimizer, Reader, WithOptimizer
from precisionctl.checkpoints.run_reader import of_run, run_of
from precisionctl.errors import CheckpointError, MappingError
from precisionctl.param import STATE, TensorSpec, kind_and_parameter
from precisionctl.planning.make_plan import make_plan
from precisionctl.verify.hf_tensors import HfTensors
from precisionctl.verify.not_compared import NotCompared


def optimizer_specs(reader: Reader) -> Mapping[str, TensorSpec]:
    """The tensors of a checkpoint's optimizer; empty where there is none. Raises CheckpointError for one that cannot be
    read."""
    return reader.optimizer_specs if isinstance(reader, HasOptimizer) else {}


def _by_megatron_names(reader: Reader) -> HfTensors:
    """An optimizer by the names that it has in Megatron, without the rows that pad a vocabulary."""
    assert isinstance(reader, HasOptimizer)
    model, specs = reader.model, dict(reader.optimizer_specs)
    padded = {row.megatron for row in table_of(model).spelled({}, model) if row.sizes[:1] == ("padded_vocab_size",)}
    for name, spec in specs.items():
        if kind_and_parameter(name)[1] in padded and spec.shape[:1] == (model.padded_vocab_size,):
            specs[name] = replace(spec, shape=(model.vocab_size, *spec.shape[1:]))
    return HfTensors.as_stored(WithOptimizer(reader), model, specs)


def _by_hf_names(reader: Reader) -> HfTensors:
    """An optimizer by Hugging Face's names, with a weight that has no master as its own."""
    plan = make_plan(reader, "hf", naming="as saved", optimizer=True)
    assert isinstance(reader, HasOptimizer)
    return HfTensors(WithOptimizer(reader), plan.of_jobs(lambda job: job.name.startswith(STATE)))


def both_optimizers(a: Reader, b: Reader) -> tuple[list[tuple[HfTensors, HfTensors]], list[NotCompared]]:
    """The optimizers of two checkpoints as a pair, or none, and why if one has any."""
    why = "optimizer"
    try:
        left, right = (bool(optimizer_specs(reader)) for reader in (a, b))
        if left != right:
            return [], [NotCompared(why, f"only {'A' if left else 'B'} has one")]
        if not left:
            return [], []
        opened = _by_megatron_names if a.layout == b.layout == "megatron" else _by_hf_names
        return [(opened(a), opened(b))], []
    except (CheckpointError, MappingError) as error:
        return [], [NotCompared(why, error.what)]


def compare_optimizer_settings(a: Reader, b: Reader) -> tuple[list[str], list[NotCompared]]:
    """A line for AdamW's count of updates and for each of its settings, and Muon's, that both checkpoints say, if they
    say other values, and for those of one side that cannot be read; or why they are not compared, if neither can."""
    readable, unreadable = dict[str, Mapping[str, Any]](), dict[str, str]()
    for side, reader in (("A", a), ("B", b)):
        assert of_run(reader), "it has an optimizer"
        try:
            run = run_of(reader)
        except CheckpointError as error:
            unreadable[side] = error.what
        else:
            of_muon = {f"Muon's {key}": value for key, value in run.muon.items()}
            readable[side] = {"updates": run.updates, **run.settings, **of_muon}
    if not readable:
        return [], [NotCompared("run", f"settings of the optimizer: {unreadable['A']}")]
    if unreadable:
        return [f"in {side}: {what}" for side, what in unreadable.items()], []
    left, right = readable.values()
    differing = [key for key, value in left.items() if right.get(key, value) != value]
    return [f"{key} is {left[key]} in A, {right[key]} in B" for key in differing], []

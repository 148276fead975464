"""How much memory a run in Megatron-Core takes (docs/memory.md has the arithmetic and what fits where)."""

from collections.abc import Iterator
from dataclasses import replace

from precisionctl.model.model_shape import ModelShape
from precisionctl.recipe import Recipe
from precisionctl.trainer.backends.choose import BackendName
from precisionctl.trainer.measure.activations import pass_bytes
from precisionctl.trainer.measure.memory import PROCESS_GPU, PROCESS_OF_SEVERAL, Memory
from precisionctl.trainer.measure.parameters import Parameters
from precisionctl.trainer.preflight import MOST_RANKS, Change


def core_memory(model: ModelShape, recipe: Recipe, backend: BackendName, *, ranks: int = 1, gpu: bool = True) -> Memory:
    """The memory of each of `ranks` ranks, in bytes, with Megatron's distributed optimizer; Muon's is not one.

    Tensor and pipeline ranks divide all parameters, expert ranks the experts', and those that have the same ones divide
    masters and moments; by Muon each has all of these, and one number of a matrix's parameter less. A rank has as many
    micro-batches in flight as there are stages, so with pipelines it keeps activations as one with all layers does;
    interleaved stages keep up to twice that.
    """
    sizes, parameters = recipe.parallel, Parameters.of(model)
    stage = ranks // sizes.pipeline
    experts = sum(parameters.experts) // (sizes.tensor * sizes.pipeline * sizes.expert)
    dense = (parameters.all - sum(parameters.experts)) // (sizes.tensor * sizes.pipeline)
    shared = dense / (stage // sizes.tensor) + experts / max(1, stage // (sizes.tensor * sizes.expert))
    # Megatron's vocab_parallel_cross_entropy holds logits in FP32, besides the BF16 ones or their gradients, and the
    # BF16 copy in which the columns of padding are filled (`core_model.py`, _leave_out_padding)
    passes = pass_bytes(model, recipe, backend, lambda logits: (2 + 2 + 4) * logits)
    interleaved = 1 + (sizes.pipeline - 1) / (sizes.pipeline * sizes.virtual) if sizes.virtual > 1 else 1
    optimizer = 12 * shared
    if recipe.optimizer.by_muon:
        matrices = (dense + experts) * (parameters.all - parameters.vocabulary) // parameters.all
        optimizer = 12 * (dense + experts) - 4 * matrices
    return Memory(
        weights=2 * (dense + experts),
        optimizer=round(optimizer),
        gradients=4 * (dense + experts),
        passes=round(passes / sizes.context * interleaved),
        process=PROCESS_GPU if gpu else PROCESS_OF_SEVERAL,
    )


def core_changes(model: ModelShape, recipe: Recipe, ranks: int) -> Iterator[Iterator[Change]]:
    """Changes with which Megatron-Core takes less memory: recomputed layers, and more pipeline stages."""
    yield iter([("train.recompute=layer", replace(recipe, train=replace(recipe.train, recompute="layer")), ranks)])
    yield _longer_pipelines(model, recipe, ranks)


def _longer_pipelines(model: ModelShape, recipe: Recipe, ranks: int) -> Iterator[Change]:
    sizes, times = recipe.parallel, 2
    while ranks * times <= MOST_RANKS and model.num_layers % (sizes.pipeline * sizes.virtual * times) == 0:
        longer = replace(recipe, parallel=replace(sizes, pipeline=sizes.pipeline * times))
        yield f"{ranks * times} ranks with parallel.pipeline={sizes.pipeline * times}", longer, ranks * times
        times *= 2

"""Estimate the memory that a run will take on each rank, by formulas, before anything is loaded.

The state of parameters is counted as in Rajbhandari et al., "ZeRO" (2020, arXiv 1910.02054), section 3.1; a pass as
`activations.py` says.
"""

from dataclasses import dataclass
from functools import partial

from precisionctl.architectures.families import architecture_of
from precisionctl.model.model_shape import ModelShape
from precisionctl.recipe import ParallelSettings, Recipe
from precisionctl.trainer.backends.choose import BackendName
from precisionctl.trainer.measure.activations import BytesKept, pass_bytes
from precisionctl.trainer.measure.parameters import Parameters, largest_linear
from precisionctl.trainer.model.loss import loss_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes on each rank, by part, at the peak of a step.

    `weights` are those that layers compute with, `optimizer` is master weights and moments, `gradients` the sums over
    micro-batches. `passes` is what forward and backward take besides: activations, logits, codes of FP8 weights, layers
    that FSDP2 has gathered, gradients before they are summed. `process` is the program itself.
    """

    weights: int
    optimizer: int
    gradients: int
    passes: int
    process: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.passes + self.process


PROCESS, PROCESS_OF_SEVERAL, PROCESS_GPU = 600 << 20, 700 << 20, 1 << 30
"""Bytes of Python, PyTorch and their libraries, alone and with several ranks; on a GPU bytes of libraries' workspaces
and of what the allocator cannot use."""


def estimate(model: ModelShape, recipe: Recipe, backend: BackendName, *, ranks: int = 1, gpu: bool = False) -> Memory:
    """Estimate the memory that each of `ranks` ranks needs for a run of this recipe, in bytes."""
    parameters, alone = Parameters.of(model), ranks == 1
    mine = parameters.all // (ranks // recipe.parallel.replicate)
    fp8_lm = recipe.optimizer.preset == "fp8-lm"
    whole = alone or fp8_lm  # otherwise FSDP2 shards parameters, which are then their own master weights
    masters, gradient = (2, 2) if fp8_lm else (4, 4)
    matrices = parameters.all - parameters.vocabulary if recipe.optimizer.by_muon else 0  # as `param.muon_takes`
    by_muon = mine * matrices // parameters.all
    moments = 4 * (2 * mine - by_muon)  # Muon keeps one number of each
    several = recipe.train.batch_size * recipe.parallel.tensor // ranks > recipe.train.micro_batch_size
    after = max(2 * parameters.all if whole else 0, 0 if several else gradient * mine)
    codes = BytesKept.of(model, recipe, backend).codes if whole and several and recipe.casts_once else 0
    after += codes * sum(parameters.layers(recipe.parallel))  # until an update's last backward
    if fp8_lm:  # one tensor at a time is decoded, updated and encoded again
        after += 6 * 4 * largest_linear(model)
    elif by_muon:  # one is orthogonalized: its average, in BF16, and what becomes of both
        after += 20 * largest_linear(model)
    passes = pass_bytes(model, recipe, backend, partial(loss_bytes, gpu=gpu), kernels=gpu)
    most = max(after, passes)
    if recipe.train.graphs:  # graphs share no memory; each layer has its own input and gradient of its output
        tokens = recipe.data.sequence_length * recipe.train.micro_batch_size
        most = after + passes + (2 + 2) * model.hidden_size * tokens * model.num_layers
    histories = 0
    if recipe.precision.keeps_state:
        # FP32, of five roles: twice, as updates make new ones, for a capacity of up to twice as many. Modules that a
        # recipe keeps in BF16 are counted too
        rows = architecture_of(model.architecture).in_megatron(model)
        gemms = sum(row.count(model) for row in rows if row.gemm and not row.unused and not row.of_prediction)
        histories = 5 * gemms * recipe.precision.delayed.amax_history_len * 4 * 4
    copies = (2 + 4) * mine + moments if recipe.train.async_save and not gpu else 0
    return Memory(
        weights=2 * mine if whole else 0,
        optimizer=masters * mine + ((1 + 2) * mine if fp8_lm else moments),
        gradients=(gradient if several else 0) * mine + (4 if recipe.guard.shadow_every else 0) * mine,
        passes=most + (0 if whole else _gathered(parameters, recipe.parallel, several)),
        process=(PROCESS_GPU if gpu else PROCESS if alone else PROCESS_OF_SEVERAL) + histories + copies,
    )


def _gathered(parameters: Parameters, parallel: ParallelSettings, several: bool) -> int:
    """The bytes that FSDP2 holds in gathered form at a time. In BF16: the layer that computes and the next one. In BF16
    and FP32: one layer's gradients, while they are reduced. All the time: embedding, output layer and their gradients.
    If it gathers only once per update: all layers in BF16 and, with several passes, the sums of their gradients in
    FP32."""
    layers = parameters.layers(parallel)
    layer, outside = max(layers), parameters.outside // parallel.tensor
    reduced = 2 * layer + 4 * max(layer, outside)
    if parallel.gather == "per-update":
        return (2 + (4 if several else 0)) * (sum(layers) + outside) + reduced
    return (2 + 2) * layer + reduced + (2 + 2) * outside

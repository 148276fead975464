"""A run in memory that Megatron-Core trains: stages of its GPTModel in its DistributedDataParallel, its
optimizer, and the rows of the bundled trainer; and all ranks that train it.

Both trainers make the same updates from the same batches, with one difference: in a batch, Megatron weighs the routers'
losses by the number of tokens, the bundled trainer by the number of targets.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from precisionctl.conversion.ranks import Ranks
from precisionctl.errors import RecipeError
from precisionctl.mcore.core_model import make_stage
from precisionctl.mcore.core_muon import muon_words
from precisionctl.model.model_shape import ModelShape
from precisionctl.recipe import Recipe
from precisionctl.trainer.data import IGNORED, Batch, Blend, Feed, Rows
from precisionctl.trainer.measure.meter import PendingStepCost
from precisionctl.trainer.measure.metrics import StepMetrics
from precisionctl.trainer.optimizer.learning_rate import rate_of_update
from precisionctl.trainer.optimizer.megatron_schedule import MegatronSchedule
from precisionctl.trainer.parallel.world import World, process_group
from precisionctl.trainer.stopping import SkippedSteps


class CoreWorld(World):
    """All ranks, in Megatron's groups. Ranks with one `data_rank` have the same rows, and ranks that differ only in
    `tensor_rank` have the same losses."""

    def __init__(self, ranks: Ranks) -> None:
        from megatron.core import parallel_state

        super().__init__(ranks)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_count = parallel_state.get_data_parallel_world_size()
        self.tensor_rank = parallel_state.get_tensor_model_parallel_rank()

    def sum_over_data_ranks(self, values: Tensor) -> Tensor:
        """As a World's. Ranks of all other kinds have the same rows here, and count what is the same."""
        return self.all_reduce_sum(values) / (self.count // self.data_count)


@contextmanager
def core_world(ranks: Ranks, recipe: Recipe) -> Iterator[CoreWorld]:
    """The world of a run of this recipe, whose sizes have been checked."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    sizes = recipe.parallel
    with process_group(ranks) as device:
        parallel_state.initialize_model_parallel(
            sizes.tensor,
            sizes.pipeline,
            virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
        )
        try:
            if device == "cuda":
                model_parallel_cuda_manual_seed(recipe.train.seed)
            yield CoreWorld(ranks)
        finally:
            parallel_state.destroy_model_parallel()


@dataclass
class CoreRun:
    """A rank's part of a run, as `trainer.run.Run` is one of the bundled trainer. `config` is the TransformerConfig of
    `make_config`. `stages` are this rank's virtual pipeline stages, each in Megatron's DistributedDataParallel; with
    `te` their layers are Transformer Engine's."""

    recipe: Recipe
    model: ModelShape
    rows: Rows | Blend
    world: CoreWorld
    schedule: MegatronSchedule | None
    config: Any
    te: bool
    step: int = 0
    position: int = 0
    updates: int = 0
    tokens: int = 0
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    stages: list[Any] = field(init=False)
    optimizer: Any = field(init=False)

    def __post_init__(self) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer

        recipe, settings = self.recipe, self.recipe.optimizer
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.feed = Feed(self.rows, recipe.train, self.device, self.world)
        config = self.config
        numbers = range(recipe.parallel.virtual) if recipe.parallel.virtual > 1 else [None]
        made = [make_stage(config, self.model, te=self.te, stage=number).to(self.device) for number in numbers]
        distributed = not settings.by_muon  # Megatron's Muon has whole matrices on each rank
        grads = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        self.stages = [DistributedDataParallel(config, grads, stage) for stage in made]
        # Storing an optimizer by parameter, Megatron joins buckets without their padding, and looks parameters up with
        # it (distrib_optimizer.py: get_parameter_state_dp_zero and sharded_param_state_fully_reshardable, read in
        # 0.16.1). A tied embedding that pipeline stages share is such a bucket; in real sizes none is padded
        buffers = [buffer for one in self.stages for buffer in (*one.buffers, *one.expert_parallel_buffers)]
        joined = [bucket for buffer in buffers for bucket in buffer.buckets[:-1]]
        if any(bucket.numel_unpadded != bucket.grad_data.numel() for bucket in joined):
            raise RecipeError(
                "megatron-core would save the optimizer of a tied embedding wrongly, as its buckets are padded here",
                do="Leave parallel.pipeline out, or choose sizes for which the ranks that share data divide 128.",
            )
        schedule = self.schedule
        lr, min_lr = (schedule.max_lr, schedule.min_lr) if schedule else (settings.lr, recipe.min_lr)
        make_optimizer = get_megatron_muon_optimizer if settings.by_muon else get_megatron_optimizer
        words = muon_words(settings) if settings.by_muon else {"optimizer": "adam"}
        self.optimizer = make_optimizer(
            OptimizerConfig(
                **words,
                lr=lr,
                min_lr=min_lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.epsilon,
                clip_grad=settings.clip_norm,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=distributed,
            ),
            self.stages,
        )
        # Without the division by all targets: `_accumulate_gradients` divides the losses
        config.finalize_model_grads_func = lambda stages, targets, **groups: finalize_model_grads(stages, **groups)

    def update(self) -> StepMetrics:
        """One optimizer step, on all ranks together; it changes nothing, but counts, if loss or norm is not finite.
        Raises as `SkippedSteps.count`."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        batches, targets, flops = self.feed.update(self.position, self.model)
        rate = rate_of_update(self.step + 1, self.recipe, self.schedule)
        biases = [
            (buffer, buffer.clone())
            for stage in self.stages
            for name, buffer in stage.named_buffers()
            if name.endswith(".expert_bias")
        ]
        total = self._accumulate_gradients(batches, targets)
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = rate, group["wd_mult"] * self.recipe.optimizer.weight_decay
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if math.isfinite(total) and math.isfinite(norm):
            self.optimizer.step()
            self.updates += 1
        else:  # Megatron has moved them with the gradients
            for bias, before in biases:
                bias.copy_(before)
        self.step += 1
        self.position += self.recipe.train.batch_size
        loss = total / targets
        self.skipped.count(self.step, loss, norm, self.recipe.train.max_skipped)
        seconds = time.perf_counter() - begun
        self.tokens += targets
        return StepMetrics(
            step=self.step,
            loss=loss,
            lr=rate,
            grad_norm=norm,
            tokens=self.tokens,
            tokens_per_second=targets / seconds,
            seconds=seconds,
            cost=PendingStepCost.of(flops, self.world, self.device).finish(seconds, ()),
            skipped=self.skipped.running or None,
        )

    def _accumulate_gradients(self, batches: Sequence[Batch], targets: int) -> float:
        """Forward and backward of an update by Megatron's schedule for these parallel sizes, which ends with gradients
        that are reduced. Returns the loss summed over all ranks' `targets`, of which this is the number.

        Losses are divided by it before the backward, as in the bundled trainer: Megatron would divide gradients after
        it, whose amaxes in FP8 state would be as many times larger."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.config.grad_scale_func = lambda losses: self.optimizer.scale_loss(losses) / targets
        for stage in self.stages:
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()
        passes = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=[iter(batches) for _ in self.stages] if len(self.stages) > 1 else iter(batches),
            model=self.stages,
            num_microbatches=len(batches),
            seq_length=batches[0].tokens.shape[1],
            micro_batch_size=batches[0].tokens.shape[0],
            forward_only=False,
        )
        # The last stage has the losses, and each of its tensor ranks has the same
        total = torch.zeros((), dtype=torch.float64)
        if passes and self.world.tensor_rank == 0:
            total = torch.stack(passes).sum().double().cpu()
        return float(self.world.all_reduce_sum(total))


def _forward(batches: Iterator[Batch], stage: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Run a micro-batch through a stage. Returns the last stage's losses `[rows, length]` and a function that sums them
    and counts the targets, which Megatron asks for.

    Rows are padded at the right, which causal attention does not see. Routers get a mask, so that they do not count
    padding.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    batch = next(batches)
    rows, length = batch.tokens.shape
    parts = {"tokens": batch.tokens, "labels": batch.labels, "padding": ~batch.padding_mask}
    parts["positions"] = torch.arange(length, device=batch.tokens.device).expand(rows, length)
    parts = get_batch_on_this_cp_rank(parts)
    learned, padding = parts["labels"] != IGNORED, parts["padding"]
    if stage.config.sequence_parallel and not stage.module.pre_process:
        # 0.16.1 divides it among the ranks only on the first stage (gpt_model.py: _preprocess)
        chunks = padding.chunk(parallel_state.get_tensor_model_parallel_world_size(), 1)
        padding = chunks[parallel_state.get_tensor_model_parallel_rank()]
    losses = stage(
        parts["tokens"],
        parts["positions"],
        None,
        labels=parts["labels"].where(learned, 0),
        loss_mask=learned.float(),
        padding_mask=padding,
    )

    def summed(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = (losses.float() * learned).sum()
        return total, learned.sum().int(), total.detach()

    return losses, summed

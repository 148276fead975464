"""All ranks of a run, in Megatron-Core's groups."""

from collections.abc import Iterator
from contextlib import contextmanager

from precisionctl.conversion.ranks import Ranks
from precisionctl.recipe import Recipe
from precisionctl.trainer.parallel.world import World, process_group


class CoreWorld(World):
    """All ranks, in Megatron's groups. Ranks with one `data_rank` have the same rows, and ranks that differ only in
    `tensor_rank` have the same losses."""

    def __init__(self, ranks: Ranks) -> None:
        from megatron.core import parallel_state

        super().__init__(ranks)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_count = parallel_state.get_data_parallel_world_size()
        self.tensor_rank = parallel_state.get_tensor_model_parallel_rank()


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

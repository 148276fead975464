"""ms-swift's own saver of Megatron's checkpoints, on gloo ranks of a CPU: swift_megatron_save.py OUT TP PP WAY.

OUT/checkpoint-1 is what it saves after an update, with an optimizer stored as WAY says: plain, dp_reshardable or
fully_reshardable. OUT/held.rank*.pt and OUT/held.optimizer.*.rank*.pt are what each rank held.
"""

import argparse
import sys
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from core_models import SAVED_ARGS
from mcore_optimizer import hold_optimizer, updated
from mcore_peer import build, fill, hold, queue_without_imports, without_cuda
from megatron.core import parallel_state
from without_init import without_init

OUT, TENSOR, PIPELINE, WAY = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

without_init("swift", "swift.utils", "swift.megatron", "swift.megatron.utils")
for name in ("json_repair", "modelscope", "modelscope.utils", "modelscope.utils.logger", "mcore_bridge"):
    sys.modules[name] = MagicMock()
sys.modules["mcore_bridge"].unwrap_model = lambda models: models
from swift.utils.utils import check_json_format  # type: ignore[import-not-found]  # noqa: E402

utils = sys.modules["swift.utils"]
for name in ("get_logger", "init_process_group", "set_device"):
    setattr(utils, name, MagicMock())
utils.check_json_format, utils.is_master = check_json_format, lambda: dist.get_rank() == 0  # type: ignore[attr-defined]

from swift.megatron.utils import megatron_lm_utils  # type: ignore[import-not-found]  # noqa: E402

# Random generators are of GPUs
megatron_lm_utils._get_rng_state = lambda **_: None


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parallel_state.initialize_model_parallel(TENSOR, PIPELINE)
    queue_without_imports()
    with without_cuda():
        args = argparse.Namespace(**SAVED_ARGS, params_dtype=torch.bfloat16, bf16=True)
        model = build(args, {"tensor_parallel": TENSOR, "pipeline_parallel": PIPELINE})
        fill(model)
        optimizer = updated(model, distributed=WAY != "plain")
        hold(model, f"{OUT}/held.rank{rank}.pt")
        hold_optimizer(model, optimizer, f"{OUT}/held.optimizer", rank)
        # Its arguments say nothing of a model's sizes, which it takes from config.json
        of_run = argparse.Namespace(
            tensor_model_parallel_size=TENSOR,
            pipeline_model_parallel_size=PIPELINE,
            torch_dtype=torch.bfloat16,
            lr=1e-3,
            async_save=False,
            no_save_optim=False,
            no_save_rng=False,
            use_megatron_fsdp=False,
            data_parallel_random_init=False,
            dist_ckpt_save_pre_mcore_014=False,
            dist_ckpt_optim_fully_reshardable=WAY == "fully_reshardable",
            distrib_optim_fully_reshardable_mem_efficient=False,
        )
        megatron_lm_utils.save_mcore_checkpoint(
            of_run, [model], optimizer, None, iteration=1, output_dir=str(OUT / "checkpoint-1")
        )
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

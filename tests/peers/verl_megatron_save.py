"""verl's own manager of Megatron's checkpoints, on gloo ranks of a CPU: verl_megatron_save.py OUT TP PP WAY.

OUT/actor is what it saves after an update, with an optimizer stored as WAY says: plain, dp_reshardable or
fully_reshardable. OUT/held.rank*.pt and OUT/held.optimizer.*.rank*.pt are what each rank held. The package itself is
not imported, as that starts ray; its modules are.
"""

import argparse
import sys
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from core_models import SAVED_ARGS
from mcore_optimizer import hold_optimizer, updated
from mcore_peer import build, fill, hold, without_cuda
from megatron.core import parallel_state
from omegaconf import OmegaConf
from without_init import without_init

OUT, TENSOR, PIPELINE, WAY = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

without_init("verl", "verl.utils", "verl.utils.checkpoint", "verl.utils.megatron")
for name in ("verl.utils.model", "verl.workers", "verl.workers.config"):  # of other parts, which import ray and more
    sys.modules[name] = MagicMock()

from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager  # type: ignore[import-not-found]  # noqa: E402


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parallel_state.initialize_model_parallel(TENSOR, PIPELINE)
    with without_cuda():
        args = argparse.Namespace(**SAVED_ARGS, params_dtype=torch.bfloat16, bf16=True)
        model = build(args, {"tensor_parallel": TENSOR, "pipeline_parallel": PIPELINE})
        fill(model)
        optimizer = updated(model, distributed=WAY != "plain")
        hold(model, f"{OUT}/held.rank{rank}.pt")
        hold_optimizer(model, optimizer, f"{OUT}/held.optimizer", rank)
        contents = ["model", "optimizer", "extra"]
        ways = {"dist_ckpt_optim_fully_reshardable": WAY == "fully_reshardable"}
        ways["distrib_optim_fully_reshardable_mem_efficient"] = False
        manager = MegatronCheckpointManager(
            config=OmegaConf.create({"model": {"path": ""}, "actor": {"megatron": ways}}),
            checkpoint_config=OmegaConf.create(
                {"load_contents": contents, "save_contents": contents, "async_save": False, "strict": True}
            ),
            model_config=None,
            transformer_config=model.config,
            role="actor",
            model=torch.nn.ModuleList([model]),
            arch="LlamaForCausalLM",
            hf_config=None,
            param_dtype=torch.bfloat16,
            share_embeddings_and_output_weights=False,
            processing_class=None,
            optimizer=optimizer,
            optimizer_scheduler=None,
            use_distributed_optimizer=WAY != "plain",
            use_dist_checkpointing=True,
        )
        manager.save_checkpoint(str(OUT / "actor"), global_step=1)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

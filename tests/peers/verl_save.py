"""verl's own checkpoint manager, on gloo ranks of a CPU: verl_save.py OUT KIND, with KIND fsdp1, fsdp1-orig or fsdp2.

OUT/KIND/global_step_2/actor is what it saves after two updates, OUT/KIND/live.pt what a run of FSDP 2 held. The
package itself is not imported, as that starts ray; its modules are.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from omegaconf import OmegaConf
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from without_init import without_init

OUT, KIND = Path(sys.argv[1]) / sys.argv[2], sys.argv[2]

without_init(
    "verl", "verl.utils", "verl.utils.checkpoint", "verl.workers", "verl.workers.engine", "verl.workers.engine.fsdp"
)

from verl.utils import fsdp_utils  # type: ignore[import-not-found]  # noqa: E402
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager  # type: ignore[import-not-found]  # noqa: E402
from verl.workers.engine.fsdp import utils as engine  # type: ignore[import-not-found]  # noqa: E402

engine.get_device_name = lambda: "cpu"


class Tokenizer:
    def save_pretrained(self, path: str, **_: Any) -> None:
        Path(path, "tokenizer.json").write_text(json.dumps({}))


def wrapped(model: Any, mesh: Any) -> Any:
    if KIND == "fsdp2":
        policy = fsdp_utils.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        settings = {"mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}
        fsdp_utils.apply_fsdp2(model, settings, {})
        return model
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=fsdp_utils.get_fsdp_wrap_policy(model, {}),
        device_id=torch.device("cpu"),
        sharding_strategy=engine.get_sharding_strategy(mesh, zero3_enable=True),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.float32),
        device_mesh=mesh,
        use_orig_params=KIND == "fsdp1-orig",
    )


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    sizes = {"vocab_size": 95, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    tied = bool(int(os.environ["TIED"]))
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)
    mesh = engine.create_device_mesh(ranks, 2 if ranks > 2 else -1)
    model = wrapped(transformers.LlamaForCausalLM(config), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    for step in range(2):
        ids = torch.randint(0, 95, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    contents = ["model", "optimizer", "extra"]
    settings = OmegaConf.create({"load_contents": contents, "save_contents": contents, "async_save": False})
    manager = FSDPCheckpointManager(
        model, optimizer, schedule, processing_class=Tokenizer(), checkpoint_config=settings
    )
    manager.save_checkpoint(str(OUT / "global_step_2" / "actor"), global_step=2)
    if KIND == "fsdp2":
        weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save({"model": weights, "state": state["state"]}, OUT / "live.pt")
    dist.barrier()
    dist.destroy_process_group()


main()

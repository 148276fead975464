"""What trainers for RL save and load by themselves, on gloo ranks of a CPU: rl_save.py OUT TRAINER [CHECKPOINT].

Two updates, a save under OUT/run, and three more updates; or from CHECKPOINT on, which the trainer's own loader takes.
OUT/live.pt is what the run held at the save, whole, and OUT/losses-RANK.json the losses of the last three updates.
Of trainers that are in no package NEMO_RL, PRIME_RL and MILES name clones.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from without_init import without_init

OUT, TRAINER, CHECKPOINT = Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None
RUN = OUT / "run"


def sharded(model: Any) -> Any:
    """As the trainers do on GPUs, where their own functions name CUDA."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    policy: Any = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    return fully_shard(model, **policy)


class SkyRL:
    def __init__(self) -> None:
        without_init("skyrl", "skyrl.backends", "skyrl.train")
        sys.modules["skyrl.train.config"] = MagicMock()  # which imports what plays games
        wrapper = sys.modules["skyrl.backends.skyrl_train.workers.model_wrapper"] = ModuleType("model_wrapper")
        wrapper.HFModelWrapper = type("HFModelWrapper", (), {})  # type: ignore[attr-defined]  # of flash-attn
        from skyrl.backends.skyrl_train.distributed import fsdp_strategy  # type: ignore[import-not-found]

        torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
        self.strategy = object.__new__(fsdp_strategy.FSDPStrategy)
        self.strategy.world_size, self.strategy.fsdp_strategy, self.strategy.is_lora = (
            dist.get_world_size(),
            "fsdp",
            False,
        )

    def prepare(self, model: Any) -> Any:
        return sharded(model)

    def save(self, model: Any, optimizer: Any, schedule: Any) -> None:
        self.strategy.save_checkpoint(
            model, str(RUN / "global_step_2" / "policy"), dist.get_rank(), optimizer, schedule
        )

    def load(self, model: Any, optimizer: Any, schedule: Any, checkpoint: str) -> None:
        self.strategy.load_checkpoint(model, checkpoint, optimizer, schedule)


class AReaL:
    def __init__(self) -> None:
        without_init("areal", "areal.engine", "areal.engine.fsdp_utils")
        from areal.engine.fsdp_utils.checkpoint import DCPState  # type: ignore[import-not-found]

        self.state = DCPState

    prepare = staticmethod(sharded)

    def save(self, model: Any, optimizer: Any, schedule: Any) -> None:
        RUN.mkdir(parents=True, exist_ok=True)
        dcp.save({"dcp": self.state(model, optimizer)}, checkpoint_id=RUN / "recover_checkpoint")

    def load(self, model: Any, optimizer: Any, schedule: Any, checkpoint: str) -> None:
        dcp.load({"dcp": self.state(model, optimizer)}, checkpoint_id=checkpoint)


class LLaMAFactory:
    def __init__(self) -> None:
        without_init("llamafactory")
        from llamafactory.v1.plugins.trainer_plugins.distributed import fsdp2  # type: ignore[import-not-found]

        self.fsdp2 = fsdp2
        self.engine = fsdp2.FSDP2Engine({}, bf16=True)

    def prepare(self, model: Any) -> Any:
        return self.engine.prepare_model(model)

    def save(self, model: Any, optimizer: Any, schedule: Any) -> None:
        self.fsdp2.save_checkpoint(model, optimizer, str(RUN / "checkpoint-2"))

    def load(self, model: Any, optimizer: Any, schedule: Any, checkpoint: str) -> None:
        self.fsdp2.load_checkpoint(model, optimizer, checkpoint)


class NeMoRL:
    prepare = staticmethod(sharded)

    def __init__(self) -> None:
        self.module = of_clone("NEMO_RL", "nemo_rl/utils/native_checkpoint.py")

    def save(self, model: Any, optimizer: Any, schedule: Any) -> None:
        weights, state = (str(RUN / "step_2" / "policy" / name) for name in ("weights", "optimizer"))
        self.module.save_checkpoint(model, weights, optimizer, schedule, state)

    def load(self, model: Any, optimizer: Any, schedule: Any, checkpoint: str) -> None:
        self.module.load_checkpoint(model, f"{checkpoint}/weights", optimizer, None, f"{checkpoint}/optimizer")


class PrimeRL:
    prepare = staticmethod(sharded)

    def __init__(self) -> None:
        for name in ("configs", "configs.shared", "configs.trainer", "trainer", "trainer.optim", "trainer.world"):
            sys.modules[f"prime_rl.{name}"] = MagicMock(OffloadOptimizer=type("OffloadOptimizer", (), {}))
        for name in ("prime_rl", "prime_rl.utils", "prime_rl.utils.logger", "prime_rl.utils.utils"):
            sys.modules[name] = MagicMock()
        self.module = of_clone("PRIME_RL", "src/prime_rl/trainer/ckpt.py")

    def save(self, model: Any, optimizer: Any, schedule: Any) -> None:
        state = self.module.AppState(model, [optimizer], schedule, self.module.Progress(2))
        dcp.save({"app": state}, checkpoint_id=RUN / "checkpoints" / "step_2" / "trainer")


class Miles:
    prepare = staticmethod(sharded)

    def __init__(self) -> None:
        torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
        torch.cuda.get_rng_state_all = list  # type: ignore[assignment]
        self.module = of_clone("MILES", "miles/backends/fsdp_utils/checkpoint.py")

    def save(self, model: Any, optimizer: Any, schedule: Any) -> None:
        args = SimpleNamespace(save=str(RUN))
        self.module.save(
            SimpleNamespace(
                args=args, model=model, optimizer=optimizer, lr_scheduler=schedule, global_step=2, micro_step=0
            ),
            1,
        )

    def load(self, model: Any, optimizer: Any, schedule: Any, checkpoint: str) -> None:
        found = self.module.load(
            SimpleNamespace(args=SimpleNamespace(load=checkpoint), model=model, optimizer=optimizer)
        )
        assert found["iteration"] == 2


def of_clone(variable: str, path: str) -> Any:
    """A module in the clone that an environment variable names."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(os.environ[variable]) / path)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TRAINERS = {
    "skyrl": SkyRL,
    "areal": AReaL,
    "llamafactory": LLaMAFactory,
    "nemo-rl": NeMoRL,
    "prime-rl": PrimeRL,
    "miles": Miles,
}


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    if TRAINER != "llamafactory":  # which makes it itself
        dist.init_process_group("gloo")
    trainer = TRAINERS[TRAINER]()
    rank = dist.get_rank()
    torch.manual_seed(0)
    sizes = {"vocab_size": 95, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    if rank == 0:
        config.save_pretrained(OUT / "config")
    model = trainer.prepare(transformers.LlamaForCausalLM(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    losses = []
    if CHECKPOINT:
        trainer.load(model, optimizer, schedule, CHECKPOINT)
    for step in range(2 if CHECKPOINT else 0, 5):
        if step == 2 and not CHECKPOINT:
            trainer.save(model, optimizer, schedule)
            weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
            if rank == 0:
                torch.save({"model": weights, "state": state["state"]}, OUT / "live.pt")
        ids = torch.randint(0, 95, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses += [loss.item()] if step > 1 else []
    (OUT / f"losses-{rank}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


main()

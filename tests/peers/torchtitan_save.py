"""torchtitan's own Llama, optimizer, schedule and checkpoint manager, on CPU processes: torchtitan_save.py OUT [on].

OUT/checkpoint/step-2, and OUT/live.pt: weights as torchtitan's adapter gives them Hugging Face's names, and moments
that are given them by the same. OUT/after.pt is what five more updates make of it. With `on` the run goes on from the
OUT/checkpoint/step-2 that is there, to OUT/resumed.pt. A package of Triton kernels is replaced before it is imported;
gradients are random.
"""

import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

OUT, GOES_ON = Path(sys.argv[1]), len(sys.argv) > 2


class Stub(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


for part in ("", ".api", ".kernels"):
    name = "torchtitan.distributed.minimal_async_ep" + part
    sys.modules[name] = Stub(name)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torchtitan.models.llama3 as llama  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw  # noqa: E402

DIM, HEADS, GROUPS, LAYERS, VOCABULARY, FFN = 64, 4, 2, 2, 96, 128


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


class Progress:
    """The part of torchtitan's Trainer that it saves of itself."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main() -> None:
    dist.init_process_group("gloo")
    config = llama.Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCABULARY,
        tok_embeddings=llama.Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=llama._EMBEDDING_INIT
        ),
        norm=llama.RMSNorm.Config(normalized_shape=DIM, param_init=llama._NORM_INIT),
        lm_head=llama.Linear.Config(
            in_features=DIM, out_features=VOCABULARY, param_init=llama._output_linear_init(DIM)
        ),
        layers=llama._build_llama3_layers(
            fuse_qkv=os.environ.get("FUSED", "1") == "1",
            n_layers=LAYERS,
            dim=DIM,
            n_heads=HEADS,
            n_kv_heads=GROUPS,
            hidden_dim=FFN,
            attn_backend="flex",
            rope=llama.ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=128, theta=10000.0, scaling="none"),
        ),
    )
    model = config.build()
    torch.manual_seed(99 if GOES_ON else 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05 + (parameter.ndim == 1))
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    adam = default_adamw(lr=1e-2)
    adam.implementation = "for-loop"
    optimizer = OptimizersContainer(adam, model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=1).build(optimizers=optimizer, training_steps=10)
    progress = Progress()

    def update(times: int) -> None:
        for _ in range(times):
            torch.manual_seed(progress.step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            schedule.step()
            progress.step += 1

    settings = CheckpointManager.Config(
        enable=True, interval=1, folder="checkpoint", async_mode="disabled", keep_latest_k=0
    )
    manager = CheckpointManager(
        settings,
        dataloader=None,
        model_parts=[model],
        optimizers=optimizer,
        lr_schedulers=schedule,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=str(OUT),
    )
    manager.states.pop("dataloader")
    if GOES_ON:
        manager.load(2)
    else:
        update(2)
        manager.save(2)
    adapter, live = llama.Llama3StateDictAdapter(config, None), {}
    live["param"] = adapter.to_hf({name: whole(tensor) for name, tensor in model.state_dict().items()})
    states = {id(p): state for one in optimizer.optimizers for p, state in one.state.items()}
    for kind in ("exp_avg", "exp_avg_sq"):  # in the place of weights, so that torchtitan's own hook splits them
        moments = {name: whole(states[id(p)][kind]) for name, p in model.named_parameters()}
        single = config.build()
        with torch.no_grad():
            for name, parameter in single.named_parameters():
                parameter.copy_(moments[name])
        live[kind] = adapter.to_hf({name: whole(tensor) for name, tensor in single.state_dict().items()})
    update(5)
    after = {name: whole(parameter) for name, parameter in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(after, OUT / ("resumed.pt" if GOES_ON else "after.pt"))
        if not GOES_ON:
            torch.save(live, OUT / "live.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""torchtitan's own models, optimizer, schedule and checkpoint manager, on CPU processes: torchtitan_save.py OUT MODEL
[on].

OUT/checkpoint/step-2, and OUT/live.pt: weights as torchtitan's adapter gives them Hugging Face's names, moments that
are given them by the same, and of one process the logits. OUT/after.pt is what five more updates make of it. With `on`
the run goes on from the OUT/checkpoint/step-2 that is there, to OUT/resumed.pt. A package of Triton kernels is replaced
before it is imported; gradients are random.
"""

import copy
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

OUT, MODEL, GOES_ON = Path(sys.argv[1]), sys.argv[2], len(sys.argv) > 3


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
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw  # noqa: E402

DIM, HEADS, GROUPS, LAYERS, VOCABULARY, FFN, EXPERTS, HEAD = 64, 4, 2, 2, 96, 128, 4, 32
os.environ["TORCHDYNAMO_DISABLE"] = "1"
FUSED = os.environ.get("FUSED", "1") == "1"


def llama3() -> tuple[Any, Any]:
    import torchtitan.models.llama3 as titan

    rope = titan.ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=128, theta=10000.0, scaling="none")
    layers = titan._build_llama3_layers(
        fuse_qkv=FUSED,
        n_layers=LAYERS,
        dim=DIM,
        n_heads=HEADS,
        n_kv_heads=GROUPS,
        hidden_dim=FFN,
        attn_backend="flex",
        rope=rope,
    )
    return titan.Llama3Model.Config(**ends(titan), layers=layers), titan.Llama3StateDictAdapter


def qwen3(experts: bool = False) -> tuple[Any, Any]:
    import torchtitan.models.qwen3 as titan

    common = {
        "n_layers": LAYERS,
        "dim": DIM,
        "n_heads": HEADS,
        "n_kv_heads": GROUPS,
        "head_dim": HEAD,
        "fuse_qkv": FUSED,
        "attn_backend": "flex",
        "rope": titan.CosSinRoPE.Config(dim=HEAD, max_seq_len=128, theta=10000.0),
    }
    if experts:
        sizes = {"moe_hidden_dim": FFN, "num_experts": EXPERTS, "top_k": 2, "moe_comm_backend": "standard"}
        layers = titan._build_qwen3_moe_layers(**common, **sizes)
    else:
        layers = titan._build_qwen3_layers(**common, hidden_dim=FFN)
    return titan.Qwen3Model.Config(**ends(titan), layers=layers), titan.Qwen3StateDictAdapter


def deepseek_v3(latent_queries: bool = True) -> tuple[Any, Any]:
    import torchtitan.models.deepseek_v3 as titan

    layers = titan._build_dsv3_layers(
        n_layers=LAYERS,
        n_dense_layers=1,
        dim=DIM,
        n_heads=HEADS,
        q_lora_rank=24 if latent_queries else 0,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        mscale=1.0,
        dense_hidden_dim=FFN,
        moe_hidden_dim=32,
        num_experts=EXPERTS,
        num_shared_experts=2,
        router_top_k=2,
        router_score_func="sigmoid",
        router_num_expert_groups=2,
        router_num_limited_groups=1,
        router_route_scale=2.5,
        router_route_norm=True,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=titan.ComplexRoPE.Config(dim=8, max_seq_len=128, theta=10000.0, scaling="none"),
    )
    config = titan.DeepSeekV3Model.Config(**ends(titan), layers=layers)
    if latent_queries:
        config.mtp_layers = titan._build_mtp_layers(layers[-1], dim=DIM, num_mtp_layers=1)
    return config, titan.DeepSeekV3StateDictAdapter


def gpt_oss() -> tuple[Any, Any]:
    import torchtitan.models.gpt_oss as titan

    layers = titan._build_gptoss_layers(
        fuse_qkv=FUSED,
        dim=DIM,
        n_layers=LAYERS,
        hidden_dim=32,
        num_experts=EXPERTS,
        top_k=2,
        load_balance_coeff=1e-3,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=titan.CosSinRoPE.Config(dim=64, max_seq_len=128, theta=10000.0),
    )
    return titan.GptOssModel.Config(**ends(titan), layers=layers), titan.GptOssStateDictAdapter


MODELS = {
    "llama": llama3,
    "qwen3": qwen3,
    "qwen3-moe": lambda: qwen3(experts=True),
    "deepseek-v3": deepseek_v3,
    "deepseek-v3-q-proj": lambda: deepseek_v3(latent_queries=False),
    "gpt-oss": gpt_oss,
}


def ends(titan: Any) -> dict[str, Any]:
    """What models have before and behind their layers."""
    return {
        "dim": DIM,
        "vocab_size": VOCABULARY,
        "tok_embeddings": titan.Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=DIM, param_init={}),
        "norm": titan.RMSNorm.Config(normalized_shape=DIM, eps=1e-6, param_init={}),
        "lm_head": titan.Linear.Config(in_features=DIM, out_features=VOCABULARY, param_init={}),
    }


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
    config, adapter_class = MODELS[MODEL]()
    model = config.build()
    torch.manual_seed(99 if GOES_ON else 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05 + (parameter.ndim == 1))
        for buffer in model.state_dict().keys() - dict(model.named_parameters()).keys():
            if "expert_bias" in buffer and MODEL.startswith("deepseek"):  # no other class of transformers has it
                model.get_buffer(buffer).copy_(torch.randn(EXPERTS) * 0.05)
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
    adapter, live = adapter_class(config, None), {}
    live["param"] = adapter.to_hf({name: whole(tensor) for name, tensor in model.state_dict().items()})
    states = {id(p): state for one in optimizer.optimizers for p, state in one.state.items()}
    for kind in ("exp_avg", "exp_avg_sq"):  # in the place of weights, so that torchtitan's own hook splits them
        moments = {name: whole(states[id(p)][kind]) for name, p in model.named_parameters()}
        single = config.build()
        with torch.no_grad():
            for name, parameter in single.named_parameters():
                parameter.copy_(moments[name])
        live[kind] = adapter.to_hf({name: whole(tensor) for name, tensor in single.state_dict().items()})
    if dist.get_world_size() == 1:
        with torch.no_grad():
            ids, positions = torch.arange(16).view(1, 16) * 5, torch.arange(16).view(1, 16)
            masks = model.get_attention_masks(positions)
            computes = copy.deepcopy(model).bfloat16() if MODEL == "gpt-oss" else model  # its experts give BF16
            out = computes(ids, positions, attention_masks=masks)
        live["logits"] = out[0] if isinstance(out, list) else out
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

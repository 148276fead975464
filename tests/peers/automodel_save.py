"""NeMo Automodel's own checkpointer, on CPU processes: automodel_save.py OUT KIND.

`dense` is transformers' Llama on FSDP 2 after two updates, `experts` Automodel's Qwen3-MoE with its adapter to Hugging
Face's names, experts over two ranks and each of them over two, and `lora` the Llama with Automodel's LoRA.
OUT/epoch_0_step_2 is what is saved, and OUT/live.safetensors what the run held, whole, merged and by Hugging Face's
names, with moments as `exp_avg.*` and `exp_avg_sq.*`. Automodel makes rotary embeddings on a GPU, which nothing here
needs.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nemo_automodel.components.models.qwen3_moe.model as qwen3_moe
import torch
import torch.distributed as dist
import transformers
from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
from nemo_automodel.components.checkpoint.config import CheckpointingConfig
from nemo_automodel.components.models.common.utils import BackendConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

KINDS = ("exp_avg", "exp_avg_sq")
OUT, KIND = Path(sys.argv[1]), sys.argv[2]
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}  # rows are uneven
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def on_ranks(model: nn.Module, **options: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    layers = model.model.layers
    for layer in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def update(model: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    for step in range(2):
        ids = torch.arange(step, step + 32).view(2, 16)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def whole(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: getattr(one, "full_tensor", lambda one=one: one)().detach().clone() for name, one in tensors.items()}


def moments(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> dict[str, Tensor]:
    return whole({name: optimizer.state[one][kind] for name, one in model.named_parameters()})


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))


def dense() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor], dict[str, Any]]:
    model = llama()
    on_ranks(model)
    optimizer = update(model)
    live = whole(model.state_dict())
    for kind in KINDS:
        live |= {f"{kind}.{name}": one for name, one in moments(model, optimizer, kind).items()}
    return model, optimizer, live, {}


def lora() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor], dict[str, Any]]:
    model, config = llama(), PeftConfig(target_modules=["*_proj"], dim=4, alpha=8)
    if dist.get_rank() == 0:
        model.save_pretrained(OUT / "base")
    apply_lora_to_linear_modules(model, config)
    on_ranks(model)
    optimizer = update(model)
    held = whole(model.state_dict())
    live = {name: one for name, one in held.items() if ".lora_" not in name}
    for name, one in model.named_modules():
        if hasattr(one, "lora_A"):
            live[f"{name}.weight"] += one.scale * held[f"{name}.lora_B.weight"] @ held[f"{name}.lora_A.weight"]
    return model, optimizer, live, {"peft_config": config}


def experts() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor], dict[str, Any]]:
    qwen3_moe.RotaryEmbedding = lambda *args, **options: nn.Module()
    torch.cuda.current_device = lambda: 0
    of_experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.Qwen3MoeConfig(**SIZES, **HEADS, **of_experts, dtype="float32", tie_word_embeddings=False)
    kinds = {"attn": "sdpa", "linear": "torch", "rms_norm": "torch", "experts": "torch", "dispatcher": "torch"}
    backend = BackendConfig(**kinds, rope_fusion=False, enable_hf_state_dict_adapter=True)
    model = qwen3_moe.Qwen3MoeForCausalLM(config, backend=backend).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    live = whole(model.state_dict_adapter.to_hf(model.state_dict()))
    model._pre_shard_hf_state_dict_keys = list(live)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_shard", "ep"))
    apart = set()
    for layer in model.model.layers.values():
        for name, one in list(layer.mlp.experts.named_parameters()):
            cut = distribute_tensor(one.data, mesh["ep"], [Shard(0)])
            layer.mlp.experts.register_parameter(name, nn.Parameter(cut))
        fully_shard(layer.mlp.experts, mesh=mesh["ep_shard"], shard_placement_fn=lambda one: Shard(1))
        apart |= set(layer.mlp.experts.parameters())
    on_ranks(model, ignored_params=apart)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = 10 * parameter.detach()  # of which a tenth is the first moment
    optimizer.step()
    for kind in KINDS:
        named = model.state_dict_adapter.to_hf(moments(model, optimizer, kind))
        live |= {f"{kind}.{name}": one for name, one in named.items()}
    return model, optimizer, live, {"mesh": mesh}


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, optimizer, live, more = {"dense": dense, "experts": experts, "lora": lora}[KIND]()
    config = CheckpointingConfig(checkpoint_dir=OUT, is_peft=KIND == "lora")
    checkpointer = config.build(dist.get_rank(), 0, 0, moe_mesh=more.pop("mesh", None))
    step = str(OUT / "epoch_0_step_2")
    checkpointer.lifecycle.reserve(step)
    checkpointer.save_model(model, step, is_final_checkpoint=True, **more)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    checkpointer.save_optimizer(optimizer, model, step, schedule)
    checkpointer.lifecycle.publish(step, best_val_metric=None, metric_key=None)
    if dist.get_rank() == 0:
        save_file({name: one.contiguous() for name, one in live.items()}, OUT / "live.safetensors")
    dist.barrier()
    dist.destroy_process_group()


main()

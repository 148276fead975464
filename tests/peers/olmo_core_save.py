"""OLMo-core's own models, train module and checkpointer, on CPU processes: olmo_core_save.py OUT MODEL.

OUT/step2 is what is saved after two updates, with the config.json that its ConfigSaverCallback writes; OUT/config is
Hugging Face's, and OUT/live.pt has weights and moments as OLMo-core's converter gives them Hugging Face's names, and of
one process the logits. Gradients are random.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from olmo_core.distributed.checkpoint import save_state_dict
from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.hf.config import get_hf_config
from olmo_core.nn.hf.convert import (
    HYBRID_ATTN_LAYER_KEY_MAP,
    HYBRID_GDN_LAYER_KEY_MAP,
    HYBRID_SHARED_KEY_MAP,
    convert_hybrid_state_to_hf,
    convert_state_to_hf,
)
from olmo_core.nn.layer_norm import LayerNormType
from olmo_core.nn.moe import MoEConfig, MoERouterConfig, MoEType
from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig, TransformerType
from olmo_core.optim import AdamWConfig, OptimGroupOverride, SkipStepAdamWConfig
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModule
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, distribute_tensor

OUT, MODEL = Path(sys.argv[1]), sys.argv[2]
VOCABULARY = 90  # of 96 rows: OLMo-core pads it
EXPERTS, HIDDEN, FFN = 4, 64, 48
SIZES = {"vocab_size": 96, "d_model": HIDDEN, "n_layers": 2, "n_heads": 4, "layer_norm_eps": 1e-6}
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
REORDERED = {"block_name": TransformerBlockType.reordered_norm, "qk_norm": True, "rope_theta": 500000}
MLP = FeedForwardConfig(hidden_size=FFN, bias=False)


def experts() -> TransformerConfig:
    kind = MoEType.dropless if MODEL.endswith("dropless") else MoEType.default
    moe = MoEConfig(name=kind, num_experts=EXPERTS, hidden_size=FFN, router=MoERouterConfig(top_k=2))
    more = {"name": TransformerType.moe, "qk_norm": True, "feed_forward_moe": moe}
    return TransformerConfig.llama_like(**SIZES, **more, block_name=TransformerBlockType.moe_reordered_norm)


def made() -> tuple[TransformerConfig, Any]:
    """OLMo-core's config, and Hugging Face's where its converter makes none."""
    if MODEL == "olmo2":
        return TransformerConfig.llama_like(**SIZES, **REORDERED, n_kv_heads=2, feed_forward=MLP), None
    if MODEL == "olmo3":
        window = SlidingWindowAttentionConfig(
            pattern=[8, 8, 8, -1],
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=True,
        )
        more = {"sliding_window": window, "attn_backend": AttentionBackendName.torch, "feed_forward": MLP}
        return TransformerConfig.llama_like(**SIZES | {"n_layers": 4}, **REORDERED, **more), None
    if MODEL.startswith("flex_olmo"):
        return experts(), None
    if MODEL == "llama":
        config = transformers.LlamaConfig(**LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
        return TransformerConfig.llama_like(**SIZES, n_kv_heads=2, feed_forward=MLP, rope_theta=10000), config
    config = transformers.Qwen3Config(
        **LLAMA, head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    )
    norms = {"layer_norm_name": LayerNormType.qwen_rms, "qk_norm": True, "use_head_qk_norm": True, "head_dim": 32}
    more = {"n_kv_heads": 2, "feed_forward": MLP, "rope_theta": 10000, **norms}
    return TransformerConfig.llama_like(**SIZES, **more), config


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def net_in_transformers(name: str) -> str:
    """The converter has names of delta nets that the class of transformers 5.24 has not."""
    return name.replace("linear_attn.out_proj.", "linear_attn.o_proj.").replace("attn.norm.", "attn.o_norm.")


def as_saved(name: str) -> str:
    """transformers 5.24 saves norms under other names than those of published models, which the converter has."""
    if name.endswith("post_feedforward_layernorm.weight"):
        return name
    name = name.replace("input_layernorm", "attention_layer_norm")
    return name.replace("post_attention_layernorm", "feedforward_layer_norm")


def save_hybrid() -> None:
    """OLMo-core makes delta nets with kernels alone: here is no model, and its names and writer are."""
    kinds = ["linear_attention", "full_attention"]
    more = {"layer_types": kinds, "max_position_embeddings": 64, "pad_token_id": None}
    more |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}  # transformers saves convolutions in thirds
    config = transformers.AutoConfig.for_model("olmo_hybrid", **LLAMA, **more)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(OUT / "hf")
    hf = load_file(OUT / "hf" / "model.safetensors")
    own = {name: olmo for olmo, name in HYBRID_SHARED_KEY_MAP.items()}
    for layer, names in enumerate((HYBRID_GDN_LAYER_KEY_MAP, HYBRID_ATTN_LAYER_KEY_MAP)):
        for olmo, name in names.items():
            own[f"model.layers.{layer}.{as_saved(net_in_transformers(name))}"] = f"blocks.{layer}.{olmo}"
    state = {own[name]: tensor for name, tensor in hf.items()}
    save_state_dict(str(OUT / "step2" / "model_and_optim"), {"model": state})
    converted = convert_hybrid_state_to_hf(state, kinds)
    torch.save({"param": {net_in_transformers(name): one for name, one in converted.items()}}, OUT / "live.pt")
    config.save_pretrained(OUT / "config")


def as_if_dropping(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As its convert_checkpoint.py does before it converts experts that drop no tokens."""
    turned = {
        name: one.reshape(EXPERTS, FFN, HIDDEN).permute(0, 2, 1).reshape(-1, FFN)
        for name, one in state.items()
        if name.endswith((".mlp.w1", ".mlp.w3"))
    }
    return state | turned


def main() -> None:
    if MODEL == "olmo_hybrid":
        save_hybrid()
        return
    dist.init_process_group("gloo")
    config, hf_config = made()
    model = config.build(init_device="cpu")
    if hf_config is None:
        hf_config = get_hf_config(model)
        hf_config.max_position_embeddings = 64  # as its convert_checkpoint.py, which knows the sequence length
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05 + (parameter.ndim == 1))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adam = SkipStepAdamWConfig(lr=1e-2, weight_decay=0.1) if MODEL == "olmo3" else AdamWConfig(lr=1e-2)
    adam.group_overrides = [OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})]
    parallel = TransformerDataParallelConfig(name="fsdp") if dist.get_world_size() > 1 else None
    module = TransformerTrainModule(
        model,
        optim=adam,
        rank_microbatch_size=16,
        max_sequence_length=16,
        dp_config=parallel,
        device=torch.device("cpu"),
    )
    with torch.no_grad():  # it has made new ones
        for name, parameter in module.model.named_parameters():
            if isinstance(parameter, DTensor):
                mine = distribute_tensor(weights[name], parameter.device_mesh, parameter.placements)
                parameter.copy_(mine)
            else:
                parameter.copy_(weights[name])
    for step in range(2):
        torch.manual_seed(step)
        for parameter in module.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        if MODEL == "olmo3":
            module.optim.latest_loss = torch.tensor(1.0)  # by which SkipStepAdamW skips an update
        module.optim.step()
    Checkpointer(work_dir=OUT / "work").save(str(OUT / "step2"), module, {"global_step": 2})
    kinds = {"param": {name: whole(parameter) for name, parameter in module.model.named_parameters()}}
    for kind in ("exp_avg", "exp_avg_sq"):
        kinds[kind] = {n: whole(module.optim.state[p][kind]) for n, p in module.model.named_parameters()}
    if MODEL.startswith("flex_olmo_dropless"):
        kinds = {kind: as_if_dropping(found) for kind, found in kinds.items()}
    live: dict[str, Any] = {kind: convert_state_to_hf(hf_config, found) for kind, found in kinds.items()}
    hf_config.vocab_size = VOCABULARY  # as its save_hf_model, which resizes embeddings to the tokenizer's size
    for found in live.values():
        found |= {name: found[name][:VOCABULARY] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    if dist.get_world_size() == 1 and not MODEL.startswith("flex_olmo"):  # whose experts need kernels
        with torch.no_grad():
            live["logits"] = module.model(torch.arange(16).view(1, 16) * 5)[..., :VOCABULARY]
    if dist.get_rank() == 0:
        torch.save(live, OUT / "live.pt")
        hf_config.save_pretrained(OUT / "config")
        (OUT / "step2" / "config.json").write_text(json.dumps({"model": config.as_config_dict()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Adapters of many kinds with their bases, and what peft merges of them in FP32: peft_merged.py OUT."""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA: tuple[str, dict[str, Any]] = ("llama", {})
BIASED = ("llama", {"attention_bias": True})
GPT2 = ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64})
MIXTRAL = ("mixtral", {"num_local_experts": 4})
MOE = (
    "qwen3_moe",
    {"hidden_size": 32, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
)

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RANKS = {"k_proj": 2, r"model.layers.\d+.self_attn.o_proj": 6}

CASES: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "plain": (LLAMA, {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}),
    "rslora": (LLAMA, {"target_modules": ["q_proj"], "use_rslora": True}),
    "patterns": (
        LLAMA,
        {
            "target_modules": ATTENTION,
            "rank_pattern": RANKS,
            "alpha_pattern": {"layers.1.self_attn.q_proj": 3, "v_proj": 5},
        },
    ),
    "whole": (LLAMA, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "embeddings": (LLAMA, {"target_modules": ["embed_tokens", "lm_head"]}),
    "dora": (LLAMA, {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "biases": (BIASED, {"target_modules": ["q_proj"], "bias": "all"}),
    "conv1d": (GPT2, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "experts": (MOE, {"target_modules": ["q_proj", "v_proj"], "target_parameters": STACKS}),
    "down": (
        MOE,
        {
            "target_modules": ["q_proj"],
            "target_parameters": STACKS[1:],
            "alpha_pattern": {"mlp.experts.down_proj": 20},
        },
    ),
    "mixtral": (MIXTRAL, {"target_modules": ["q_proj"], "target_parameters": STACKS}),
}


def make(directory: Path, model_type: str, sizes: dict[str, Any], settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | no_tokens | sizes))
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(directory / "base")
    adapter = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **settings))
    with torch.no_grad():
        for parameter in adapter.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapter.save_pretrained(directory / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.float32)
    PeftModel.from_pretrained(base, directory / "adapter").merge_and_unload().save_pretrained(directory / "merged")


if __name__ == "__main__":
    for name, ((model_type, sizes), settings) in CASES.items():
        make(Path(sys.argv[1]) / name, model_type, sizes, settings)

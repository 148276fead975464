"""Adapters of many kinds with their bases, what peft merges of them in FP32, and which modules it adapts by settings:
peft_merged.py OUT."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import save_file

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
DEEPSEEK = (
    "deepseek_v3",
    {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    | {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
    | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
)
LFM3: tuple[str, dict[str, Any]] = ("lfm3", {"head_dim": 16, "num_hidden_layers": 3})
AXK2 = (
    "axk2",
    {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    | {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
    | {"gated_norm_rank": 8, "index_n_heads": 4, "index_head_dim": 16},
)
LAGUNA = (
    "laguna",
    {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
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
    # of which fan_in_fan_out says what the last one is
    "conv1d_and_linear": (
        (GPT2[0], GPT2[1] | {"tie_word_embeddings": False}),
        {"target_modules": ["c_attn", "c_proj", "lm_head"]},
    ),
    "mica": (LLAMA, {"target_modules": ["q_proj"], "init_lora_weights": "mica"}),
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
    # whose files have other names than their class has in memory
    "lfm3": (LFM3, {"target_modules": [*ATTENTION, "g_proj"]}),
    "axk2": (AXK2, {"target_modules": ["fc1", "fc2", "q_gate_proj", "o_proj"]}),
    "laguna": (LAGUNA, {"target_modules": ["q_proj"], "modules_to_save": ["shared_experts"]}),
    # of which peft itself makes target_parameters, rank_pattern and alpha_pattern
    "all_linear": (MOE, {"target_modules": "all-linear"}),
    "deepseek": (DEEPSEEK, {"target_modules": "all-linear", "exclude_modules": r".*layers\.1\..*q_b_proj"}),
    "expressions": (
        LLAMA,
        {
            "target_modules": r".*\.layers\.\d+\..*(q|down)_proj",
            "rank_pattern": {"^model.layers.1.*q_proj": 2, ".*down_proj": 3},
            "alpha_pattern": {r"(?:.+\.)?[q]_pro[a-k]": 3, "^.*1.*down_proj$": 5},
        },
    ),
    "layers": (LLAMA, {"target_modules": ATTENTION, "layers_to_transform": [1], "exclude_modules": ["k_proj"]}),
}

CHOICES: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "1.mlp.down_proj"]},
    {"target_modules": [*ATTENTION, "down_proj"], "exclude_modules": ["0.self_attn.q_proj", "_proj"]},
    {"target_modules": [*ATTENTION, "down_proj"], "layers_to_transform": 1},
    {"target_modules": [*ATTENTION, "down_proj"], "layers_to_transform": [0, 11], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["down_proj", "lm_head"], "layers_to_transform": [0], "layers_pattern": "experts"},
    {"target_modules": ["down_proj", "lm_head"], "layers_to_transform": []},
    {"target_modules": ["down_proj", "q_proj"], "layers_to_transform": [1], "layers_pattern": ""},
    {"target_modules": ["down_proj", "lm_head", "q_proj"], "modules_to_save": ["lm_head", "mlp"]},
    {"target_modules": ["down_proj", "q_proj"], "exclude_modules": ["down_proj"], "layers_to_transform": [1, 0]},
    {"target_modules": r"model\.layers\.\d\..*_proj", "exclude_modules": r".*\.(o_proj|experts\.1\..*)"},
    {"target_modules": "_proj"},
    {"target_modules": ["down_proj"], "exclude_modules": ".*[02-9]{2}.*|.*experts"},
]
MODULES = [
    "lm_head",
    "model.lm_head_2",
    *(f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1, 11) for name in ("q_proj", "o_proj")),
    *(f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1, 10)),
    *(f"model.layers.{layer}.mlp.experts.{expert}.down_proj" for layer in (0, 1) for expert in (0, 1)),
    "transformer.h.0.attn.q_proj",
]


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


def make_two(directory: Path) -> None:
    """Two adapters of one base in BF16, and both merged in FP32."""
    torch.manual_seed(0)
    no_tokens = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.AutoConfig.for_model("llama", **(SIZES | no_tokens))
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(directory / "base")
    adapter = get_peft_model(model, LoraConfig(r=4, target_modules=ATTENTION))
    adapter.add_adapter("two", LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_rslora=True))
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapter.save_pretrained(directory / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.float32)
    both = PeftModel.from_pretrained(base, directory / "adapter")
    both.load_adapter(directory / "adapter" / "two", "two")
    both.base_model.set_adapter(["default", "two"])
    both.merge_and_unload().save_pretrained(directory / "merged")


def make_tied(directory: Path) -> None:
    """An adapter of an embedding and the output layer that is tied to it, and the logits that peft computes with it
    unmerged: its merge adds the change twice to the one tensor. The base is in FP32, for peft unties others."""
    torch.manual_seed(0)
    no_tokens = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.AutoConfig.for_model("llama", tie_word_embeddings=True, **(SIZES | no_tokens))
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(directory / "base")
    targets = ["q_proj", "embed_tokens"]
    adapter = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, ensure_weight_tying=True)
    )
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if parameter.requires_grad and "lm_head" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapter.save_pretrained(directory / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(directory / "base")
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, directory / "adapter")(torch.arange(96).unsqueeze(0)[:, :64]).logits
    save_file({"logits": logits}, directory / "logits.safetensors")


if __name__ == "__main__":
    make_tied(Path(sys.argv[1]) / "tied")
    make_two(Path(sys.argv[1]) / "two")
    for name, ((model_type, sizes), settings) in CASES.items():
        make(Path(sys.argv[1]) / name, model_type, sizes, settings)
    adapted = [
        (settings, [name for name in MODULES if check_target_module_exists(LoraConfig(**settings), name)])
        for settings in CHOICES
    ]
    (Path(sys.argv[1]) / "adapted.json").write_text(json.dumps({"modules": MODULES, "adapted": adapted}))

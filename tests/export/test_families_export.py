"""Every family in FP8 for inference: what a dynamic export and one of blocks decode to is near what was exported."""

import json
from pathlib import Path
from typing import Any

import in_memory
import pico
import pytest
import torch
from conversions import run
from safetensors.torch import load_file, save_file
from soaking import in_soak

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.dtypes import DType

AS_COLUMNS = ("gpt2",)
"""Families that store matrices as [in, out], whose rows are not the channels that these schemes scale."""

_WHOLE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
_OF_SOME = {
    "moe_shared_expert_intermediate_size": 128,
    "moe_latent_size": 128,
    "head_dim": 64,
    "global_head_dim": 64,
    "intermediate_size_mlp": 384,
    "ffn_hidden_size": 384,
    "prefix_dense_intermediate_size": 384,
    "shared_intermediate_size": 128,
    "dense_intermediate_size": 384,
    "rotary_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "ffn_dim": 384,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 128),  # a mixer's in_proj is five, one of heads' steps
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 32),  # of 4 groups
    "mamba_d_ssm": 512,
}
_LATENT = {"q_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "kv_lora_rank": 128, "v_head_dim": 64}
_OF_FAMILIES = {
    **dict.fromkeys(("bloom", "mpt"), {"hidden_size": 384}),  # of 6 heads
    "mamba2": {"num_heads": 128, "head_dim": 4, "state_size": 32},
    "gpt-bigcode": {"n_head": 2, "num_attention_heads": 2},  # whose one key-value head is a block
    "falcon": {"num_attention_heads": 2},
    "step3p5": {"head_dim": 64, "share_expert_dim": 128},
    "deepseek-v4": {"q_lora_rank": 128, "o_lora_rank": 128, "head_dim": 128, "index_head_dim": 128},
}


def sizes(family: str) -> dict[str, Any]:
    """Whole blocks."""
    return _sizes(family) | _OF_FAMILIES.get(family, {})


def _sizes(family: str) -> dict[str, Any]:
    said, model = pico.FAMILIES[family], pico.shape(family)
    if model.mla:
        mixer = (
            {"linear_attn_config": said["linear_attn_config"] | {"head_dim": 128}}
            if "linear_attn_config" in said
            else {}
        )
        turned = {} if model.mla.qk_pos_emb_head_dim else {"qk_rope_head_dim": 0, "qk_nope_head_dim": 128}
        mixer |= {"routed_expert_hidden_size": 128} if model.has("moe.latent_size") else {}
        return {**_WHOLE, **_LATENT, **mixer, **turned} | ({} if model.query_latent else {"q_lora_rank": None})
    if "n_embd" in said:
        return {"n_embd": 256, "hidden_size": 256, "n_inner": 384}
    if said.get("rope_parameters") is pico.LONG_ROPE:  # its factors are for heads of 16 channels
        return {**_WHOLE, "num_attention_heads": 16, "num_key_value_heads": 8}
    if said.get("num_key_value_heads") == 1:
        return {**_WHOLE, "num_attention_heads": 2}
    return _WHOLE | {key: size for key, size in _OF_SOME.items() if key in said}


@pytest.mark.soak
@pytest.mark.parametrize("family", [family for family in pico.FAMILIES if family not in AS_COLUMNS])
@pytest.mark.parametrize(("method", "scheme"), [("compressed-tensors", "dynamic"), ("fp8", "block")])
def test_an_export_decodes_to_nearly_the_weights_of_its_source(
    tmp_path: Path, family: str, method: str, scheme: Any
) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **sizes(family))
    source = HuggingFaceReader(tmp_path / "hf")
    exported = in_memory.export(in_memory.with_state(source), tmp_path / "export", method, scheme)
    assert exported.encodings
    values = in_memory.to_hf(exported, dtype=DType.bfloat16).tensors
    assert values.keys() == in_memory.to_hf(source, naming="as saved").tensors.keys()
    for name in exported.encodings:
        expected, found = read_tensor(source, name).float(), values[name].float()
        assert (expected - found).norm() < 0.04 * expected.norm(), name


RELEASED = [
    ("deepseek-v3.2", tuple(f"{layer}.self_attn.indexer.{name}" for layer in range(3) for name in ("wq_b", "wk"))),
    (
        "glm-5.3",
        tuple(f"{layer}.self_attn.{name}_proj" for layer in (1, 2) for name in ("q_a", "q_b", "o")),
    ),
]


@pytest.mark.parametrize(
    ("family", "modules"), [RELEASED[0], *in_soak(*(each for each in RELEASED[1:] if each[0] in pico.FAMILIES))]
)
def test_codes_that_no_export_makes_go_to_megatron_and_come_back(
    tmp_path: Path, family: str, modules: tuple[str, ...]
) -> None:
    """Of DeepSeek-V3.2's indexers and GLM-5.3's attention, as they were released: this project's own exports leave them
    in BF16."""
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **sizes(family), index_head_dim=128)
    in_memory.export(HuggingFaceReader(tmp_path / "hf"), tmp_path / "fp8", "fp8", "block")
    (file,) = (tmp_path / "fp8").glob("*.safetensors")
    stored = load_file(file)
    for name in (f"model.layers.{module}.weight" for module in modules):
        blocks = stored[name].float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        stored[name] = (blocks / scales).to(torch.float8_e4m3fn).flatten(2, 3).flatten(0, 1)
        stored[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
    save_file(stored, file, {"format": "pt"})
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    left = config["quantization_config"]["modules_to_not_convert"]
    config["quantization_config"]["modules_to_not_convert"] = [name for name in left if not name.endswith(modules)]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    run(tmp_path / "fp8", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf", "fp8")
    (file,) = (tmp_path / "back").glob("*.safetensors")
    back = load_file(file)
    assert back.keys() == stored.keys()
    assert [
        name for name in back if not torch.equal(back[name].view(torch.uint8), stored[name].view(torch.uint8))
    ] == []

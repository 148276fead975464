"""Every family in FP8 for inference: what a dynamic export and one of blocks decode to is near what was exported."""

from pathlib import Path
from typing import Any

import in_memory
import pico
import pytest
import torch

from precisionctl.checkpoints.base import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader

AS_COLUMNS = ("gpt2",)
"""Families that store matrices as [in, out], whose rows are not the channels that these schemes scale."""

_WHOLE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 128, "moe_intermediate_size": 128}
_LATENT = {"q_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "kv_lora_rank": 128, "v_head_dim": 64}


def sizes(family: str) -> dict[str, Any]:
    """Whole blocks, as far as a family says its sizes by these keys."""
    if pico.shape(family).mla:
        latent = _LATENT if pico.shape(family).query_latent else {**_LATENT, "q_lora_rank": None}
        return {**_WHOLE, **latent}
    if "n_embd" in pico.FAMILIES[family]:
        return {"n_embd": 256, "hidden_size": 256, "n_inner": 384}
    if pico.FAMILIES[family].get("rope_parameters") is pico.LONG_ROPE:  # of heads of 16 channels
        return {**_WHOLE, "head_dim": None, "num_attention_heads": 16, "num_key_value_heads": 8}
    return _WHOLE


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
    values = in_memory.to_hf(exported, dtype=torch.bfloat16).tensors
    assert values.keys() == in_memory.to_hf(source, respelled=True).tensors.keys()
    for name in exported.encodings:
        expected, found = read_tensor(source, name).float(), values[name].float()
        assert (expected - found).norm() < 0.04 * expected.norm(), name

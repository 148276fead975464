"""MPT: its config.json key by key against transformers' class, and checkpoints of any division."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_there_and_back
from gpt_models import assert_computes_as_transformers, assert_texts_are_apart
from soaking import in_soak
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from precisionctl.architectures.families import from_hf_config, to_hf_config
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.trainer.model.attention.core_attention import alibi_slopes


@pytest.mark.soak
@pytest.mark.parametrize(
    "said",
    [
        {"n_heads": 8},
        {"n_heads": 3},
        {"layer_norm_epsilon": 0.1},
        {"tie_word_embeddings": False},
        *in_soak(
            {"attn_config": {}},
            {"attn_config": {"clip_qkv": 0.0, "attn_pdrop": 0, "attn_impl": "triton", "attn_uses_sequence_id": True}},
            {"learned_pos_emb": False, "max_seq_len": 64, "norm_type": "layernorm"},
        ),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("mpt", **said), tmp_path)


@pytest.mark.parametrize("heads", [1, 3, 6, 8, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    expected = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("alibi", False), ("alibi_bias_max", 16), ("attn_type", "multiquery_attention"), ("qk_ln", True)),
        *(("softmax_scale", 0.1), ("prefix_lm", True)),
    ],
)
def test_attention_that_is_not_computed_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnknownArchitecture, match=f"{key}=.* in attn_config"):
        from_hf_config(pico.config("mpt", attn_config={key: value}))


@pytest.mark.parametrize(("key", "value"), [("no_bias", False), ("logit_scale", 0.5), ("expansion_ratio", 2)])
def test_what_transformers_leaves_out_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnknownArchitecture, match=key):
        from_hf_config(pico.config("mpt", **{key: value}))


@pytest.mark.parametrize("junk", ["no", [], [1], 3, {"clip_qkv": "much"}, {"clip_qkv": -1.0}], ids=str)
def test_junk_in_attn_config_is_one_error(junk: object) -> None:
    with pytest.raises(DamagedCheckpoint):
        from_hf_config(pico.config("mpt", attn_config=junk))


def test_a_config_that_is_made_says_all_that_other_programs_take_otherwise() -> None:
    """Its own code, and vLLM, take attention without `alibi` for one with learned positions."""
    written = to_hf_config(pico.shape("mpt"), "bfloat16")
    assert written["attn_config"]["alibi"] is True and written["attn_config"]["clip_qkv"] == 0.4
    assert from_hf_config(written) == pico.shape("mpt")


def test_texts_that_share_a_row_are_what_they_are_alone(tmp_path: Path) -> None:
    assert_texts_are_apart("mpt", tmp_path)


@pytest.mark.parametrize("container", ["torch", *in_soak("torch_dist")])
def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path, container: str) -> None:
    pico.save(tmp_path / "hf", "mpt", dtype=torch.bfloat16)
    assert_there_and_back(tmp_path / "hf", container=container, parallelism=Parallelism(2, 2))

"""BLOOM: its config.json key by key against transformers' class, slopes of heads, names without a prefix, texts that
share a row, and checkpoints of any division."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_same_tensors, assert_there_and_back, run
from gpt_models import assert_computes_as_transformers, assert_texts_are_apart
from safetensors.torch import load_file, save_file
from soaking import in_soak
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from precisionctl.architectures.families import from_hf_config
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.trainer.model.attention.core_attention import alibi_slopes, with_slopes


@pytest.mark.soak
@pytest.mark.parametrize(
    "said",
    [
        {"n_head": 8},
        {"n_head": 3},
        {"layer_norm_epsilon": 0.1},
        {"tie_word_embeddings": False},
        *in_soak({"slow_but_exact": True, "pretraining_tp": 2}, {"seq_length": 8}),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("bloom", **said), tmp_path)


def test_older_words_for_sizes_are_read() -> None:
    told = {key: value for key, value in pico.config("bloom").items() if key not in ("n_layer", "n_head")}
    found = from_hf_config(told | {"num_hidden_layers": 2, "num_attention_heads": 6, "hidden_size": 7, "n_embed": 96})
    assert found == pico.shape("bloom")
    with pytest.raises(DamagedCheckpoint, match="num_attention_heads is 4 and n_head, which is the same, 6"):
        from_hf_config(pico.config("bloom", num_attention_heads=4))


def test_norms_as_residuals_are_refused_by_their_name() -> None:
    with pytest.raises(UnknownArchitecture, match="apply_residual_connection_post_layernorm=True"):
        from_hf_config(pico.config("bloom", apply_residual_connection_post_layernorm=True))


@pytest.mark.parametrize("heads", [1, 3, 6, 8, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    expected = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), expected)


def test_channels_for_slopes_hold_them_in_bf16_too() -> None:
    """A product of BF16 numbers, as a kernel sums it, is a place times a slope, to a 60000th of it."""
    slopes, length = torch.tensor(alibi_slopes(6)) * 8, 3000
    query, key = with_slopes(*torch.zeros(2, 1, 6, length, 8, dtype=torch.bfloat16), slopes)
    found = query[0, :, 0].double() @ key[0, 0].double().mT
    expected = slopes.double()[:, None] * torch.arange(length)
    torch.testing.assert_close(found, expected, rtol=2**-16, atol=0)


def test_texts_that_share_a_row_are_what_they_are_alone(tmp_path: Path) -> None:
    assert_texts_are_apart("bloom", tmp_path)


def test_a_file_of_the_body_has_the_names_without_a_prefix(tmp_path: Path) -> None:
    """As on the Hub."""
    pico.save(tmp_path / "hf", "bloom")
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    file = tmp_path / "hf" / "model.safetensors"
    body = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(body, file, {"format": "pt"})
    run(tmp_path / "hf", tmp_path / "m2", "megatron")
    assert_same_tensors(tmp_path / "m", tmp_path / "m2")


@pytest.mark.soak
@pytest.mark.parametrize("container", ["torch_dist", "torch"])
def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path, container: str) -> None:
    pico.save(tmp_path / "hf", "bloom", dtype=torch.bfloat16)
    assert_there_and_back(tmp_path / "hf", container=container, parallelism=Parallelism(2, 2))

"""Jamba: Mamba-1 mixers. A layer of Hugging Face is two of Megatron's; attention has no positions."""

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_same_tensors, run
from gpt_models import assert_computes_as_transformers, assert_texts_are_apart
from hypothesis import given, settings, strategies as st
from soaking import in_soak
from torch import Tensor
from transformers import AutoConfig

from precisionctl.architectures.families import from_hf_config, to_hf_config
from precisionctl.architectures.megatron.megatron_args import otherwise_in_megatron
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.errors import DamagedCheckpoint, RecipeError, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.recipe import ParallelSettings
from precisionctl.trainer.model.recurrent.mamba_1 import selective_scan
from precisionctl.trainer.model.recurrent.recurrence import CHUNK
from precisionctl.trainer.parallel import shards


@pytest.mark.soak
@pytest.mark.parametrize(
    "said",
    [
        {"attn_layer_period": 1, "attn_layer_offset": 0},
        {"attn_layer_period": 9, "attn_layer_offset": 8},
        {"expert_layer_period": 3, "expert_layer_offset": 0},
        {"num_experts": 1, "tie_word_embeddings": True},
        *in_soak(
            {"mamba_dt_rank": "auto", "mamba_expand": 3, "num_key_value_heads": 1},
            {"rms_norm_eps": 0.1, "mamba_d_state": 5, "mamba_dt_rank": 3},
        ),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("jamba", **said), tmp_path)


def test_its_layers_are_two_of_megatrons_each_which_computes_other_mixers() -> None:
    model = pico.shape("jamba")
    assert model.mamba is not None and model.mamba.pattern == "M-*EM-"
    assert {"mamba.dt_rank", "mamba.gated_norm"} <= {*otherwise_in_megatron(model)}
    written = to_hf_config(model, "bfloat16")
    assert [written[key] for key in ("num_hidden_layers", "num_experts", "mamba_expand", "mamba_dt_rank")] == [
        3,
        4,
        2,
        8,
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [("mamba_conv_bias", False), ("mamba_proj_bias", True), ("mamba_d_conv", 3), ("hidden_act", "gelu")],
)
def test_what_the_table_does_not_say_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnknownArchitecture, match=key):
        from_hf_config(pico.config("jamba") | {key: value})


@pytest.mark.parametrize("key", ["attn_layer_offset", "expert_layer_offset"])
def test_an_offset_that_its_class_refuses_is_refused(key: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=key):
        from_hf_config(pico.config("jamba") | {key: 3})


@pytest.mark.parametrize(
    "key",
    [
        *("attn_layer_period", "attn_layer_offset", "num_experts", "num_experts_per_tok", "intermediate_size"),
        *("mamba_expand", "mamba_dt_rank", "mamba_d_state", "num_hidden_layers"),
    ],
)
def test_junk_in_its_config_is_one_error(key: str) -> None:
    for junk in (-1, 0, 3.5, "", "auto", [], [1], {"a": 1}, True, None, 10**30):
        with suppress(DamagedCheckpoint, UnknownArchitecture):
            from_hf_config(pico.config("jamba") | {key: junk})


@given(number=st.integers(1, 9), attending=st.integers(1, 10), choosing=st.integers(1, 10), data=st.data())
@settings(deadline=None)
def test_the_layers_that_are_written_are_those_that_were_read(
    number: int, attending: int, choosing: int, data: st.DataObject
) -> None:
    said = {"num_hidden_layers": number, "attn_layer_period": attending, "expert_layer_period": choosing}
    said |= {"attn_layer_offset": data.draw(st.integers(0, attending - 1))}
    said |= {"expert_layer_offset": data.draw(st.integers(0, choosing - 1))}
    model = from_hf_config(pico.config("jamba") | said)
    assert model.mamba is not None
    theirs = AutoConfig.for_model(**pico.settings("jamba") | said)
    blocks = zip(theirs.layers_block_type, theirs.layers_num_experts, strict=True)
    letters = ({"attention": "*", "mamba": "M"}[kind] + ("E" if experts > 1 else "-") for kind, experts in blocks)
    assert model.mamba.pattern == "".join(letters)
    assert from_hf_config(to_hf_config(model, "bfloat16")) == model


def _token_by_token(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """The recurrence as the paper has it (equation 2)."""
    state, made = torch.zeros(len(x), *A.shape, dtype=x.dtype), []
    for token in range(x.shape[1]):
        added = (dt[:, token] * x[:, token])[..., None] * B[:, token, None]
        state = (dt[:, token, :, None] * A).exp() * state + added
        made.append((state * C[:, token, None]).sum(-1))
    return torch.stack(made, 1)


@given(length=st.sampled_from([1, 2, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]), seed=st.integers(0, 2**16))
@settings(max_examples=12, deadline=None)
def test_the_scan_is_the_recurrence_and_so_are_its_gradients(length: int, seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    x, dt = (torch.randn(2, length, 3, generator=drawn, dtype=torch.float64) for _ in range(2))
    B, C = (torch.randn(2, length, 4, generator=drawn, dtype=torch.float64) for _ in range(2))
    A = -4 * torch.rand(3, 4, generator=drawn, dtype=torch.float64)
    operands = [each.requires_grad_() for each in (x, dt.exp().detach(), A, B, C)]
    found, expected = selective_scan(*operands), _token_by_token(*operands)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    weights = torch.randn(found.shape, generator=drawn, dtype=torch.float64)
    for mine, its in zip(*(torch.autograd.grad(made, operands, weights) for made in (found, expected)), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-8, atol=1e-11)


@pytest.mark.soak
def test_texts_that_share_a_row_are_what_they_are_alone(tmp_path: Path) -> None:
    assert_texts_are_apart("jamba", tmp_path)


@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
def test_it_comes_back_from_ranks_and_from_stages_that_end_within_its_layers(tmp_path: Path, container: str) -> None:
    pico.save(tmp_path / "hf", "jamba", dtype=torch.bfloat16)
    ranks = Parallelism(tensor=2, pipeline=2)  # three blocks to each stage
    run(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=ranks, container=container)
    run(tmp_path / "m", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_exports_leave_mixers_in_bf16(tmp_path: Path) -> None:
    """vLLM's Mamba-1 mixer takes no codes for its linears (layers/mamba/mamba_mixer.py)."""
    pico.save(tmp_path / "hf", "jamba", dtype=torch.bfloat16)
    asked = Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "dynamic", keep_misfits=True)
    names = plan_command(asked).plan.codes
    assert not [name for name in names if ".mamba." in name]
    linears = {name.split(".")[-2] for name in names}
    assert linears == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_channels_that_ranks_cannot_share_are_refused() -> None:
    model = pico.shape("jamba")
    assert model.mamba is not None
    model = dataclasses.replace(model, mamba=dataclasses.replace(model.mamba, num_heads=129))
    with pytest.raises(RecipeError, match="129 channels of a Mamba-1 mixer cannot be shared evenly by 2 ranks"):
        shards.check(model, ParallelSettings(tensor=2))

"""Mamba and FalconMamba: Mamba-1 mixers alone, without norms of what x_proj makes, or with norms without weights."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_same_tensors, run
from gpt_models import assert_computes_as_transformers, assert_texts_are_apart
from soaking import in_soak

from precisionctl.architectures.families import from_hf_config, to_hf_config
from precisionctl.architectures.megatron.megatron_args import otherwise_in_megatron
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.errors import DamagedCheckpoint, PrecisionError, UnknownArchitecture
from precisionctl.param import Parallelism


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("falcon-mamba", {"mixer_rms_eps": 1.0, "layer_norm_epsilon": 0.1}),
        *in_soak(
            ("mamba", {"time_step_rank": "auto", "state_size": 5, "layer_norm_epsilon": 0.1}),
            ("mamba", {"intermediate_size": 64, "expand": 7, "tie_word_embeddings": False}),
            ("falcon-mamba", {"residual_in_fp32": False, "tie_word_embeddings": True}),
        ),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(family: str, said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config(family, **said), tmp_path)


def test_without_intermediate_size_expand_says_how_many_channels_there_are() -> None:
    config = pico.config("mamba") | {"expand": 3}
    model = from_hf_config({key: value for key, value in config.items() if key != "intermediate_size"})
    assert model.mamba is not None and model.mamba.inner_size == 3 * model.hidden_size
    assert from_hf_config(to_hf_config(model, "bfloat16")) == model


def test_megatron_computes_other_mixers() -> None:
    found = {name for name in otherwise_in_megatron(pico.shape("falcon-mamba")) if name.startswith("mamba.")}
    assert found == {"mamba.dt_rank", "mamba.gated_norm", "mamba.bcdt_l2_norm_epsilon"}


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_bias", True), ("use_conv_bias", False), ("conv_kernel", 3), ("hidden_act", "gelu")],
)
def test_what_the_table_does_not_say_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnknownArchitecture, match=key):
        from_hf_config(pico.config("mamba") | {key: value})


@pytest.mark.parametrize("key", ["intermediate_size", "time_step_rank", "state_size", "mixer_rms_eps"])
@pytest.mark.parametrize("junk", [-1, 3.5e300, "many", [], True], ids=str)
def test_junk_in_sizes_of_mixers_is_one_error(key: str, junk: object) -> None:
    with pytest.raises((DamagedCheckpoint, UnknownArchitecture)):
        from_hf_config(pico.config("falcon-mamba") | {key: junk})


@pytest.mark.soak
@pytest.mark.parametrize("family", ["mamba", "falcon-mamba"])
def test_texts_that_share_a_row_are_what_they_are_alone(tmp_path: Path, family: str) -> None:
    assert_texts_are_apart(family, tmp_path)


@pytest.mark.parametrize("container", ["torch", *in_soak("torch_dist")])
def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path, container: str) -> None:
    pico.save(tmp_path / "hf", "falcon-mamba", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=Parallelism(2, 2), container=container)
    run(tmp_path / "m", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_vllm_gets_no_codes_and_transformers_those_of_two_linears(tmp_path: Path) -> None:
    """vLLM makes a mixer's linears without a quant_config (layers/mamba/mamba_mixer.py)."""
    pico.save(tmp_path / "hf", "mamba", dtype=torch.bfloat16)
    with pytest.raises(PrecisionError, match="without quantization"):
        plan_command(Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "dynamic"))
    names = plan_command(Request.export(tmp_path / "hf", tmp_path / "out", "transformers", "dynamic")).plan.codes
    assert {name.split(".")[-2] for name in names} == {"in_proj", "out_proj"}

"""nanochat: its config.json key by key against transformers' class, and checkpoints of any division."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_there_and_back, run
from gpt_models import assert_computes_as_transformers
from soaking import in_soak

from precisionctl.architectures.families import from_hf_config
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.param import Parallelism

pytestmark = pytest.mark.skipif("nanochat" in pico.ABSENT, reason="this transformers has no nanochat")


@pytest.mark.soak
@pytest.mark.parametrize(
    "said",
    [
        {"final_logit_softcapping": None},
        {"final_logit_softcapping": 0.5},
        {"num_key_value_heads": None},
        {"head_dim": 8},
        *in_soak(
            {"attention_bias": True},
            {"rms_norm_eps": 0.1},
            {"tie_word_embeddings": True},
            {"rope_parameters": pico.YARN_ROPE},
        ),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("nanochat", **said), tmp_path)


def test_another_activation_is_refused_by_name() -> None:
    with pytest.raises(UnknownArchitecture, match="hidden_act='gelu'"):
        from_hf_config(pico.config("nanochat", hidden_act="gelu"))


def test_heads_without_halves_are_refused(tmp_path: Path) -> None:
    """transformers makes such a model where no head_dim is said: 7 channels of 4 heads."""
    pico.save(tmp_path / "hf", "nanochat", hidden_size=7)
    with pytest.raises(DamagedCheckpoint, match="1 channels of a head, of which no rotary pairs are made"):
        run(tmp_path / "hf", tmp_path / "m", "megatron")


@pytest.mark.soak
@pytest.mark.parametrize("container", ["torch_dist", "torch"])
def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path, container: str) -> None:
    pico.save(tmp_path / "hf", "nanochat", dtype=torch.bfloat16)
    assert_there_and_back(tmp_path / "hf", container=container, parallelism=Parallelism(2, 2))

"""nanochat: its config.json key by key against transformers' class, and checkpoints of any division."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import run
from gpt_models import VOCABULARY, as_gpt, converted
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from precisionctl.architectures.families import from_hf_config
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.same_model import differences

pytestmark = pytest.mark.skipif("nanochat" in pico.ABSENT, reason="this transformers has no nanochat")


def config(**changes: Any) -> dict[str, Any]:
    said: dict[str, Any] = AutoConfig.for_model(**pico.settings("nanochat")).to_dict()
    return said | changes


@pytest.mark.parametrize(
    "said",
    [
        {"final_logit_softcapping": None},
        {"final_logit_softcapping": 0.5},
        {"num_key_value_heads": None},
        {"head_dim": 8},
        {"attention_bias": True},
        {"rms_norm_eps": 0.1},
        {"tie_word_embeddings": True},
        {"rope_parameters": pico.YARN_ROPE},
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    """By the logits of a model that transformers makes of the same config.json."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING["nanochat"].from_dict(config(**said)))
    ours = as_gpt(converted(theirs.eval(), tmp_path))
    tokens = torch.randint(VOCABULARY, (2, 40))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens)[..., :VOCABULARY], expected, rtol=0, atol=1e-5 * float(expected.std()))
    assert differences(ours.model, from_hf_config(config(**said))) == {}


def test_another_activation_is_refused_by_name() -> None:
    with pytest.raises(UnknownArchitecture, match="hidden_act='gelu'"):
        from_hf_config(config(hidden_act="gelu"))


def test_heads_without_halves_are_refused(tmp_path: Path) -> None:
    """transformers makes such a model where no head_dim is said: 7 channels of 4 heads."""
    pico.save(tmp_path / "hf", "nanochat", hidden_size=7)
    with pytest.raises(DamagedCheckpoint, match="kv_channels is 1, of which no pairs are made"):
        run(tmp_path / "hf", tmp_path / "m", "megatron")


@pytest.mark.parametrize("container", ["torch_dist", "torch"])
def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path, container: str) -> None:
    pico.save(tmp_path / "hf", "nanochat", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "m", "megatron", container=container, parallelism=Parallelism(2, 2))
    run(tmp_path / "m", tmp_path / "back", "hf")
    stored, back = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert stored.keys() == back.keys()
    assert [name for name in stored if not torch.equal(stored[name], back[name])] == []

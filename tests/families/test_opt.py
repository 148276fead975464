"""OPT and GPT-Neo: their config.json key by key against transformers' classes, the rows of OPT's positions, names
without a prefix, and checkpoints of any division."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_same_tensors, assert_there_and_back, run, tensors
from gpt_models import assert_computes_as_transformers
from safetensors.torch import load_file, save_file

from precisionctl.architectures.families import from_hf_config
from precisionctl.architectures.megatron.megatron_args import to_megatron_args
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.param import Parallelism


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "said"),
    [
        *(("opt", {"activation_function": name}) for name in ("gelu", "gelu_new")),
        ("opt", {"enable_bias": False}),
        ("opt", {"tie_word_embeddings": False}),
        ("opt", {"word_embed_proj_dim": 64}),
        ("gpt-neo", {"attention_types": [[["global"], 2]], "attention_layers": ["global"] * 2}),
        ("gpt-neo", {"attention_types": [[["local"], 2]], "attention_layers": ["local"] * 2}),
        ("gpt-neo", {"attention_types": [[["local"], 1], [["global"], 1]], "attention_layers": ["local", "global"]}),
        ("gpt-neo", {"window_size": 1}),
        ("gpt-neo", {"intermediate_size": 48}),
        ("gpt-neo", {"activation_function": "gelu"}),
        ("gpt-neo", {"layer_norm_epsilon": 0.1}),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(family: str, said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config(family, **said), tmp_path)


@pytest.mark.parametrize(
    ("family", "error", "said"),
    [
        ("opt", UnknownArchitecture, {"do_layer_norm_before": False}),
        ("opt", UnknownArchitecture, {"word_embed_proj_dim": 32}),
        ("opt", UnknownArchitecture, {"_remove_final_layer_norm": True}),
        ("opt", UnknownArchitecture, {"layer_norm_elementwise_affine": False}),
        ("opt", UnknownArchitecture, {"activation_function": "silu"}),
        ("gpt-neo", DamagedCheckpoint, {"attention_layers": ["local", "local"]}),
        ("gpt-neo", DamagedCheckpoint, {"attention_types": [[["global"], 3]], "attention_layers": ["global"] * 3}),
        ("gpt-neo", DamagedCheckpoint, {"attention_types": [[["global"] * 9, 4096]]}),
        ("gpt-neo", DamagedCheckpoint, {"attention_types": [[["global"], 1 << 60]]}),
        ("gpt-neo", DamagedCheckpoint, {"attention_types": ["global", "local"]}),
        ("gpt-neo", UnknownArchitecture, {"attention_types": [[["block"], 2]], "attention_layers": ["block"] * 2}),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_its_name(family: str, error: type[Exception], said: dict[str, Any]) -> None:
    with pytest.raises(error, match=next(iter(said))):
        from_hf_config(pico.config(family, **said))


def test_rows_that_no_text_of_opt_reads_are_the_last_in_megatron(tmp_path: Path) -> None:
    """Megatron's first position is a text's first, and texts are no longer than those that transformers takes."""
    pico.save(tmp_path / "hf", "opt")
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    stored = load_file(tmp_path / "hf" / "model.safetensors")["model.decoder.embed_positions.weight"]
    found = tensors(tmp_path / "m")["embedding.position_embeddings.weight"]
    assert found.shape == (130, 64) and torch.equal(found[:128], stored[2:]) and torch.equal(found[128:], stored[:2])
    args = to_megatron_args(from_hf_config(pico.config("opt")))
    assert (args["max_position_embeddings"], args["seq_length"]) == (130, 128)


def test_a_file_of_opts_body_has_the_names_without_a_prefix(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "opt")
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    file = tmp_path / "hf" / "model.safetensors"
    body = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(body, file, {"format": "pt"})
    run(tmp_path / "hf", tmp_path / "m2", "megatron")
    assert_same_tensors(tmp_path / "m", tmp_path / "m2")


@pytest.mark.soak
@pytest.mark.parametrize("family", ["opt", "gpt-neo"])
@pytest.mark.parametrize("container", ["torch_dist", "torch"])
def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path, family: str, container: str) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    assert_there_and_back(tmp_path / "hf", container=container, parallelism=Parallelism(2, 2))

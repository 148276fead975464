"""Granite 4: a layer of Hugging Face, which is a mixer or attention and an MLP or experts, is two of Megatron's."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_same_tensors, run
from gpt_models import as_gpt, clear_tokens, converted, transformers_model
from in_memory import to_megatron
from installed import BEFORE_5_23
from soaking import first, in_soak
from transformers import AutoConfig

from precisionctl.architectures.families import from_hf_config, from_megatron_args, to_hf_config
from precisionctl.architectures.megatron.megatron_args import to_megatron_args
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.errors import DamagedCheckpoint, ShapeMismatch, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.trainer.model.recurrent.recurrence import CHUNK

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("granite-hybrid", {}),
    "dense": ("granite-hybrid-dense", {}),
    "attention alone": ("granite-hybrid-dense", {"layer_types": ["attention", "attention"]}),  # Granite 4.0 Micro
    "mixers alone": ("granite-hybrid", {"layer_types": ["mamba"] * 3}),
    "one group of heads": ("granite-hybrid", {"mamba_n_groups": 1}),  # as in published models
}


def config_of(family: str = "granite-hybrid", **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = pico.make(family, **changes).config.to_dict()
    return found


@pytest.mark.parametrize(("family", "pattern"), [("granite-hybrid", "ME*EME"), ("granite-hybrid-dense", "*-M-")])
def test_layers_are_two_blocks_of_megatron_each_with_the_norm_before_it(
    tmp_path: Path, family: str, pattern: str
) -> None:
    theirs = pico.make_and_save(tmp_path, family, dtype=torch.bfloat16)
    made = to_megatron(HuggingFaceReader(tmp_path))
    assert made.model.mamba is not None and made.model.mamba.pattern == pattern
    norms = {
        "M": "mixer.in_proj.layer_norm_weight",
        "*": "self_attention.linear_qkv.layer_norm_weight",
        "-": "mlp.linear_fc1.layer_norm_weight",
        "E": "pre_mlp_layernorm.weight",
    }
    for number, block in enumerate(pattern):
        layer = theirs.model.layers[number // 2]
        norm = layer.post_attention_layernorm if number % 2 else layer.input_layernorm
        assert torch.equal(made.tensors[f"decoder.layers.{number}.{norms[block]}"], norm.weight)
    assert torch.equal(made.tensors["decoder.final_norm.weight"], theirs.model.norm.weight)
    last = theirs.model.layers[-1]
    shared = "mlp.shared_experts." if pattern.endswith("E") else "mlp."
    fc1 = made.tensors[f"decoder.layers.{len(pattern) - 1}.{shared}linear_fc1.weight"]
    assert torch.equal(fc1, last.shared_mlp.input_linear.weight)
    out = made.tensors[f"decoder.layers.{len(pattern) - 2}.mixer.out_proj.weight"]
    assert torch.equal(out, last.mamba.out_proj.weight)


@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
def test_it_comes_back_from_ranks_and_from_stages_that_end_within_its_layers(tmp_path: Path, container: str) -> None:
    pico.save(tmp_path / "hf", "granite-hybrid", dtype=torch.bfloat16)
    ranks = Parallelism(tensor=2, pipeline=2, expert=2)  # three blocks to each stage
    run(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=ranks, container=container)
    run(tmp_path / "m", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_heads_of_one_group_are_not_cut(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "granite-hybrid", mamba_n_groups=1)
    with pytest.raises(ShapeMismatch, match=r"mixer.in_proj.weight.*cannot be cut into 2"):
        plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=Parallelism(2)))


@pytest.mark.parametrize("case", first(1, CASES))
def test_logits_and_gradients_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    family, changes = CASES[case]
    theirs = transformers_model(family, **changes)
    made = converted(theirs, tmp_path)
    mamba = made.model.mamba
    if BEFORE_5_23 and mamba and "M" in mamba.pattern and mamba.num_groups > 1:
        pytest.skip("before transformers 5.23 its norm had one group, whatever config.json said")
    ours = as_gpt(made)
    tokens = clear_tokens(ours, (2, CHUNK + 9))
    expected, found = theirs(tokens, use_cache=False).logits, ours(tokens)[..., :250]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.detach().std()))
    for logits in (expected, found):
        logits.logsumexp(-1).sum().backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    judged = to_megatron(HuggingFaceReader(tmp_path / "gradients")).tensors
    assert judged.keys() == gradients.keys()
    for name, expected in judged.items():
        found = gradients[name]
        assert found is not None and expected.any(), name
        # of steps it is a sum over all positions of what nearly cancels: 1.3e-5 apart on a processor without AVX-512
        near = 3e-5 if name.endswith(("A_log", "dt_bias")) else 1e-5
        torch.testing.assert_close(found, expected, rtol=0, atol=near * float(expected.abs().max()), msg=name)


# config.json ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_kinds_of_layers_are_written_in_words_that_all_versions_read(case: str) -> None:
    family, changes = CASES[case]
    config = config_of(family, **changes)
    model = from_hf_config(config)
    written = to_hf_config(model, "bfloat16")
    assert {*written["layer_types"]} <= {"mamba", "attention"}
    assert len(written["layer_types"]) == written["num_hidden_layers"] == model.num_layers // 2
    assert AutoConfig.for_model(**written).layer_types == config["layer_types"]


def test_another_word_for_its_layers_is_read_and_must_not_say_otherwise() -> None:
    config = config_of()
    kinds = config.pop("layer_types")
    assert AutoConfig.for_model(**config, layers_block_type=kinds).layer_types == kinds
    model = from_hf_config(config | {"layers_block_type": kinds})
    assert model.mamba and model.mamba.pattern == "ME*EME"
    with pytest.raises(DamagedCheckpoint, match="layers_block_type"):
        from_hf_config(config | {"layers_block_type": kinds, "layer_types": kinds[1:] + kinds[:1]})


def test_a_dense_model_says_of_experts_only_that_there_are_none() -> None:
    """As the published files, whose `intermediate_size` then is nobody's."""
    config = config_of("granite-hybrid-dense")
    model = from_hf_config(config)
    assert model.moe is None and model.ffn_hidden_size == 112 != config["intermediate_size"]
    assert from_hf_config(config | {"intermediate_size": 7, "num_experts_per_tok": 0}) == model


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("mamba_conv_bias", False), ("mamba_proj_bias", True), ("mamba_d_conv", 3), ("attention_bias", True)),
        *(("time_step_limit", [0.001, float("inf")]), ("hidden_act", "gelu"), ("position_embedding_type", "alibi")),
    ],
)
def test_what_the_table_does_not_say_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnknownArchitecture, match=key):
        from_hf_config(config_of() | {key: value})


def test_heads_of_a_mixer_are_what_mamba_expand_leaves_them() -> None:
    config = config_of()
    assert from_hf_config(config | {"mamba_d_head": "auto"}) == from_hf_config(config)
    with pytest.raises(DamagedCheckpoint, match="mamba_expand says has 128"):
        from_hf_config(config | {"mamba_d_head": 8})


JUNK = (-1, 0, 3.5, "", "M", [], ["mamba"], [None] * 3, ["magic"] * 3, {"a": 1}, True, None)


@pytest.mark.parametrize(
    "key",
    [
        *("layer_types", "layers_block_type", "mamba_n_heads", "mamba_d_head", "mamba_expand", "num_local_experts"),
        *("shared_intermediate_size", "num_experts_per_tok", "position_embedding_type", "num_hidden_layers"),
    ],
)
def test_junk_in_its_config_is_one_error(key: str) -> None:
    for junk in JUNK:
        with suppress(DamagedCheckpoint, UnknownArchitecture):
            from_hf_config(to_hf_config(pico.shape("granite-hybrid"), "bfloat16") | {key: junk})


# Megatron's arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pattern", "is_one"), [("ME*EME", True), ("MEE*ME", False), ("ME*-ME", False)])
def test_a_pattern_of_which_no_layers_can_be_made_is_no_granite(pattern: str, is_one: bool) -> None:
    args = to_megatron_args(pico.shape("granite-hybrid").padded(1)) | {"hybrid_override_pattern": pattern}
    if is_one:
        assert from_megatron_args(args, 256, "args").architecture == "granitemoehybrid"
    else:
        with pytest.raises(UnknownArchitecture, match="no family known here"):
            from_megatron_args(args, 256, "args")


def test_notes_on_steps_are_of_models_that_transformers_clamps(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "granite-hybrid")
    notes = plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron")).notes
    assert not any("(dt)" in note for note in notes) and any("follow the config.json" in note for note in notes)

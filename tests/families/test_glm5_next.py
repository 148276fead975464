"""GLM-5.3: its config.json key by key against transformers' class, its tensors by published names and those in memory,
and its prediction layer, which has one residual stream and sparse attention."""

import json
import math
from pathlib import Path
from typing import Any

import pico
import pytest
import repository
import torch
from conversions import assert_same_tensors, assert_there_and_back, run
from gpt_models import (
    as_gpt,
    assert_computes_as_transformers,
    assert_texts_are_apart,
    both_gradients,
    clear_tokens,
    converted,
)
from installed import BEFORE_5_23
from safetensors.torch import load_file, save_file
from soaking import in_soak

from precisionctl.architectures.families import architecture_of, from_hf_config, to_hf_config
from precisionctl.architectures.megatron.megatron_args import otherwise_in_megatron
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.precision import PRESETS
from precisionctl.trainer.model.gpt import GPT

FAMILY = "glm-5.3"
pytestmark = pytest.mark.skipif(FAMILY in pico.ABSENT, reason="this transformers has no GLM-5.3")

published = pytest.mark.skipif(BEFORE_5_23, reason="transformers before 5.23 saves GLM-5.3's names in memory")

_LINEAR, _SPARSE = "linear_attention", "deepseek_sparse_attention"
_PUBLISHED = {
    "layer_types": [_LINEAR, _SPARSE, _SPARSE, _LINEAR],
    "linear_attn_config": {
        "num_heads": 16,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "kda_layers": [0, 3],
        "full_attn_layers": [1, 2],
    },
}


def of_delta_attention(**said: Any) -> dict[str, Any]:
    return {"linear_attn_config": _PUBLISHED["linear_attn_config"] | said}


@pytest.mark.parametrize(
    "said",
    [
        _PUBLISHED,
        {"layer_types": None},
        *in_soak(
            {"layer_types": [_SPARSE] * 4, "indexer_types": None},
            {"layer_types": ["full_attention", _LINEAR, _LINEAR, _LINEAR], "indexer_types": None},
            {"mlp_layer_types": None},
            {"mlp_layer_types": None, "first_k_dense_replace": 3},
            {"first_k_dense_replace": 1},
            {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
            of_delta_attention(gate_lower_bound=-1.0),
            of_delta_attention(gate_lower_bound=None),
            of_delta_attention(gate_lower_bound=None, safe_gate=False),
            {"linear_lower_bound": None},
            {"linear_lower_bound": None, "linear_attn_config": {}},
            {"linear_num_heads": 8, "linear_head_dim": 8, "linear_conv_kernel_dim": 3},
            {"hc_mult": 3, "hc_sinkhorn_iters": 1},
            {"hc_mult": 1, "hc_eps": 0.05},
            {"swiglu_limit": 0.05, "n_shared_experts": 2},
            {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.0},
            {"index_kpool": 1, "index_n_heads": 1, "index_head_dim": 8},
            {"v_head_dim": 16, "rms_norm_eps": 0.1},
        ),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config(FAMILY, **said), tmp_path)


@pytest.mark.parametrize(
    ("error", "words", "said"),
    [
        (UnknownArchitecture, "mhc=False", {"mhc": False}),
        (UnknownArchitecture, "mla_use_nope=False", {"mla_use_nope": False}),
        (UnknownArchitecture, "qk_rope_head_dim=8", {"qk_rope_head_dim": 8}),
        (UnknownArchitecture, "index_kpool_always_select_tail=False", {"index_kpool_always_select_tail": False}),
        (UnknownArchitecture, "index_kpool_compress=False", {"index_kpool_compress": False}),
        (UnknownArchitecture, "norm_topk_prob=False", {"norm_topk_prob": False}),
        (UnknownArchitecture, "layers of type 'sliding_attention'", {"layer_types": ["sliding_attention"] * 4}),
        (
            UnknownArchitecture,
            "linear_attn_config.use_full_rank_gate=True",
            of_delta_attention(use_full_rank_gate=True),
        ),
        (
            UnknownArchitecture,
            r"kda_layers is \[1, 2\], and layer_types has \[0, 3\]",
            of_delta_attention(kda_layers=[1, 2]),
        ),
        (UnknownArchitecture, "layer 1 has no indexer", {"indexer_types": ["full", "shared", "shared", "full"]}),
        (
            UnknownArchitecture,
            "layer 3 has no indexer",
            {"indexer_types": ["full", "full", "shared", "shared"], "layer_types": [_LINEAR, *[_SPARSE] * 3]},
        ),
        *(
            (
                DamagedCheckpoint,
                f"first_k_dense_replace is {said}",
                {"first_k_dense_replace": said, "mlp_layer_types": of},
            )
            for said, of in ((1, None), (3, ["dense", *["sparse"] * 3]), (1, ["sparse", "dense", *["sparse"] * 2]))
        ),
        (DamagedCheckpoint, "linear_attn_config is 7", {"linear_attn_config": 7}),
        (DamagedCheckpoint, "safe_gate is 'no'", of_delta_attention(gate_lower_bound=None, safe_gate="no")),
        (DamagedCheckpoint, "gate_lower_bound is 1", of_delta_attention(gate_lower_bound=1)),
        (DamagedCheckpoint, "num_key_value_heads is 2", {"num_key_value_heads": 2}),
        (DamagedCheckpoint, "256 keys in pools of 3", {"index_kpool": 3}),
        (DamagedCheckpoint, "kpool is 0", {"index_kpool": 0}),
        (DamagedCheckpoint, "hc_mult is 0", {"hc_mult": 0}),
        (DamagedCheckpoint, "indexer_types is 3, not a list", {"indexer_types": 3}),
        (DamagedCheckpoint, "indexer's layers has 2 entries", {"indexer_types": ["full"] * 2}),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_name(error: type[Exception], words: str, said: dict[str, Any]) -> None:
    with pytest.raises(error, match=words):
        from_hf_config(pico.config(FAMILY, **said))


def test_config_json_is_written_in_published_words() -> None:
    """vLLM and SGLang go by the lists of layers, which count from 0."""
    written = to_hf_config(from_hf_config(pico.config(FAMILY)), "bfloat16")
    assert {key: written[key] for key in _PUBLISHED} == _PUBLISHED
    assert written["indexer_types"] == ["full", "full", "shared", "full"]
    assert written["first_k_dense_replace"] == 1


@pytest.mark.soak
def test_gradients_are_transformers(tmp_path: Path) -> None:
    """With streams that are not copies of each other after Sinkhorn's iterations, by a large epsilon: else gradients of
    the first matrix are rounding alone."""
    theirs = pico.make(FAMILY, initializer_range=0.12, hc_eps=0.3)
    ours = as_gpt(converted(theirs, tmp_path))
    tokens = clear_tokens(ours, (3, 100))
    for logits in (theirs(tokens).logits, ours(tokens)[..., : pico.SIZES["vocab_size"]]):
        logits.logsumexp(-1).sum().backward()
    for name, found, expected in both_gradients(theirs, ours):
        # of a number that all channels of all tokens add to, most cancels
        atol = 3e-5 * max(float(expected.abs().max()), 0.3 if ".alpha_" in name else 0)
        torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.soak
def test_texts_that_share_a_row_do_not_see_each_other(tmp_path: Path) -> None:
    assert_texts_are_apart(FAMILY, tmp_path)


@published
def test_names_in_memory_are_read_and_published_ones_written(tmp_path: Path) -> None:
    """With what is FP32 as released: rates, steps, biases of routers, and biases and scales of streams."""
    theirs = pico.make_and_save(tmp_path / "hf", FAMILY, dtype=torch.bfloat16)
    file = tmp_path / "hf/model.safetensors"
    stored = load_file(file)
    wide = [name for name in stored if name.endswith(("_base", "_scale", "A_log", "dt_bias", "correction_bias"))]
    assert len(wide) == 4 * 4 + 2 * 2 + 3 and "model.layers.0.hc_attn_fn" in stored
    stored |= {name: stored[name].float() * 1.001 for name in wide}
    save_file(stored, file, {"format": "pt"})
    run(tmp_path / "hf", tmp_path / "m", "megatron", precision="bf16")
    notes = run(tmp_path / "m", tmp_path / "back", "hf").notes
    assert not any("normalises an indexer's keys" in note for note in notes)  # of which Megatron's arguments have none
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == stored.keys()
    assert [n for n in stored if back[n].dtype != stored[n].dtype or not torch.equal(back[n], stored[n])] == []
    run(tmp_path / "back", tmp_path / "dcp", "hf", container="dcp")
    assert {name for name in open_checkpoint(tmp_path / "dcp").specs if "[" not in name} <= theirs.state_dict().keys()
    run(tmp_path / "dcp", tmp_path / "m2", "megatron")
    assert_same_tensors(tmp_path / "m", tmp_path / "m2")
    assert all(
        torch.equal(tensor, again)
        for tensor, again in zip(
            type(theirs).from_pretrained(tmp_path / "hf").state_dict().values(),
            type(theirs).from_pretrained(tmp_path / "back").state_dict().values(),
            strict=True,
        )
    )


def with_prediction_layer(directory: Path) -> None:
    """The tensors that the published model has in its layer 45: those of a layer with sparse attention, none of them of
    streams, and four more."""
    pico.save(directory, FAMILY, dtype=torch.bfloat16)
    file = directory / "model.safetensors"
    tensors, config = load_file(file), json.loads((directory / "config.json").read_text())
    of_sparse = {name: each for name, each in tensors.items() if name.startswith("model.layers.1.")}
    for name, tensor in of_sparse.items():
        if ".hc_" not in name:
            tensors[name.replace("layers.1.", "layers.4.")] = torch.randn_like(tensor)
    for name, shape in {"enorm": (64,), "hnorm": (64,), "shared_head.norm": (64,), "eh_proj": (64, 128)}.items():
        tensors[f"model.layers.4.{name}.weight"] = torch.randn(shape, dtype=torch.bfloat16)
    save_file(tensors, file, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


@published
@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
def test_a_prediction_layer_has_one_stream_and_comes_back_from_any_division(tmp_path: Path, container: str) -> None:
    with_prediction_layer(tmp_path / "hf")
    assert_there_and_back(tmp_path / "hf", container=container, parallelism=Parallelism(2, 2, expert=2))
    made = open_checkpoint(tmp_path / "megatron")
    layer = {name for name in made.specs if name.startswith("mtp.")}
    assert any("index_kpool_compress_ape" in name for name in layer)
    assert not [name for name in layer if "hyper_connection" in name or "beta_proj" in name]
    ours = GPT(made.model, PRESETS["bf16"], device="meta")
    assert {name for name, _ in ours.named_parameters() if name.startswith("mtp.")} == layer


def test_with_its_prediction_layer_it_has_as_many_parameters_as_the_hub_counts() -> None:
    lines = (repository.GOLDEN / "published_wrappers.jsonl").read_text().splitlines()
    (published,) = (one for one in map(json.loads, lines) if one["repository"] == "zai-org/GLM-5.3-Flash")
    model = from_hf_config(published["config"])
    rows = [row for row in architecture_of(model.architecture).spelled({}, model) if row.of_prediction]
    there = [row for row in rows if row.present.in_layout("hf", model)]
    beside = sum(math.prod(row.shape(model)) * row.count(model) for row in there)
    assert published["parameters"] + beside == 321323031390


def test_megatron_computes_another_model_and_convert_says_so() -> None:
    assert {"dsa", "mhc"} <= {*otherwise_in_megatron(pico.shape(FAMILY))}


@published
@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_an_export_says_what_engines_look_for_and_has_codes_of_mlps_alone(tmp_path: Path, target: str) -> None:
    with_prediction_layer(tmp_path / "hf")
    asked = Request.export(tmp_path / "hf", tmp_path / "out", target, "dynamic", keep_misfits=True)
    assert {name.split(".")[-2] for name in plan_command(asked).plan.codes} == {"gate_proj", "up_proj", "down_proj"}
    execute(plan_command(asked))
    said = json.loads((tmp_path / "out/config.json").read_text())
    assert said["mhc"] and (target == "sglang" or (said["mla_use_nope"] and said["topk_method"] == "noaux_tc"))
    assert target == "sglang" or said["linear_attn_config"] == _PUBLISHED["linear_attn_config"]
    assert target == "vllm" or said["first_k_dense_replace"] == 1
    assert engine_named(target).lacks(said) == []

"""DeepSeek-V4's table: published files to Megatron and back, the names that transformers has, and what GPT computes of
it, by transformers' class."""

import json
import math
from pathlib import Path
from typing import Any

import command_line
import deepseek_v4
import pico
import pytest
import torch
from any_models import export, load_whole, same, stored
from conversions import run
from gpt_models import as_gpt, both_gradients, clear_tokens, converted
from in_memory import to_megatron
from safetensors.torch import load_file, save_file
from soaking import in_soak
from training import make_source, make_text, run as run_of, settings
from transformers import DeepseekV4ForCausalLM

from precisionctl.architectures.families import architecture_of, from_hf_config, to_hf_config
from precisionctl.architectures.megatron.megatron_args import read_megatron_args, to_megatron_args
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_files.dcp_metadata import read_index
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, PrecisionError, RecipeError, UnknownArchitecture
from precisionctl.evaluate.stored import load
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import NOT_TRAINED
from precisionctl.planning.optimizer_jobs import OptimizerSource
from precisionctl.precision import PRESETS
from precisionctl.recipe.sections import ParallelSettings
from precisionctl.trainer.data.batch import Batch
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.router_balance import Balance
from precisionctl.trainer.parallel.shards import check
from precisionctl.trainer.passes import backward
from precisionctl.trainer.saved import saving
from precisionctl.trainer.sequences import PackedSequences

SIZES: dict[str, Any] = {
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "max_position_embeddings": 512,
}
"""Of a model that the table knows. Its second layer's indexer chooses 2 keys of 4 tokens."""


def config(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = deepseek_v4.make(**SIZES).config.to_dict() | changes
    return found


def shape() -> ModelShape:
    return from_hf_config(config())


def model_of(directory: Path) -> object:
    return open_checkpoint(directory).model


def assert_same_bytes(one: Path, other: Path) -> None:
    left, right = stored(one), stored(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert right[name].dtype == tensor.dtype, name
        assert torch.equal(right[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_published_files_go_to_megatron_and_come_back_as_they_were(tmp_path: Path) -> None:
    """With their codes in MXFP4 and FP8 blocks, prediction layer and table of experts."""
    worth = deepseek_v4.publish(tmp_path / "source", **SIZES)
    run(tmp_path / "source", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "values", "hf")
    decoded = stored(tmp_path / "values")
    assert decoded.keys() == worth.keys()
    for name, values in worth.items():
        assert decoded[name].dtype == values.dtype and torch.equal(decoded[name], values), name
    run(tmp_path / "megatron", tmp_path / "back", "hf", "fp8")
    assert_same_bytes(tmp_path / "source", tmp_path / "back")
    assert same(tmp_path / "source", tmp_path / "megatron")


@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
def test_the_layer_within_a_prediction_layer_has_the_name_that_megatron_stores(container: Any, tmp_path: Path) -> None:
    """It is `mtp_model_layer` in memory, and stored as `transformer_layer` (transformer/multi_token_prediction.py,
    sharded_state_dict)."""
    deepseek_v4.publish(tmp_path / "source", **SIZES)
    run(tmp_path / "source", tmp_path / "megatron", "megatron", container=container)
    inner = {name.split(".")[3] for name in open_checkpoint(tmp_path / "megatron").specs if name[0] == "m"}
    assert "transformer_layer" in inner and "mtp_model_layer" not in inner
    assert same(tmp_path / "source", tmp_path / "megatron")


def test_a_table_of_int32_stays_one(tmp_path: Path) -> None:
    model = deepseek_v4.make(**SIZES)
    for layer in model.model.layers[:1]:
        layer.mlp.gate.tid2eid = layer.mlp.gate.tid2eid.int()
    model.save_pretrained(tmp_path / "saved")
    run(tmp_path / "saved", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    table = stored(tmp_path / "back")["layers.0.ffn.gate.tid2eid"]
    assert table.dtype == torch.int32 and torch.equal(table, model.model.layers[0].mlp.gate.tid2eid)
    assert (
        as_gpt(to_megatron(open_checkpoint(tmp_path / "saved")))(torch.zeros(1, 3, dtype=torch.long)).isfinite().all()
    )


def test_what_transformers_saves_is_read_and_written_under_published_names(tmp_path: Path) -> None:
    """Which transformers loads too, and vLLM and SGLang alone, from BF16 and from an export."""
    model = deepseek_v4.make(**SIZES)
    model.save_pretrained(tmp_path / "saved")
    assert "model.layers.1.attn.norm.weight" in stored(tmp_path / "saved")
    run(tmp_path / "saved", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    export(tmp_path / "saved", tmp_path / "blocks", "block", "vllm")
    found = stored(tmp_path / "back")
    assert found.keys() == deepseek_v4.native(model).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in deepseek_v4.native(model).items())
    blocks = stored(tmp_path / "blocks")
    assert {name.removesuffix("_scale_inv") for name in blocks} == found.keys()
    for name, scale in blocks.items():
        if name.endswith("_scale_inv"):  # SGLang takes those of wo_a for powers of two
            assert torch.equal(torch.exp2(torch.log2(scale.float()).round()), scale.float()), name
    told = json.loads((tmp_path / "blocks" / "config.json").read_text())
    assert told["quantization_config"]["scale_fmt"] == "ue8m0" and told["rope_scaling"]["factor"] == 4
    assert told["compress_ratios"][:4] == [0, 4, 128, 4] and told["num_hash_layers"] == 1
    assert from_hf_config(told) == model_of(tmp_path / "saved") == model_of(tmp_path / "blocks")
    rope = model.config.rope_parameters
    rope["compress"].pop("type")  # as old configs call its rope_type
    assert DeepseekV4ForCausalLM.config_class.from_dict(told).rope_parameters == rope
    assert same(tmp_path / "saved", tmp_path / "back")
    theirs = load_whole(DeepseekV4ForCausalLM, tmp_path / "back")
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name].to(tensor.dtype)) for name, tensor in theirs.state_dict().items())


def test_a_state_dict_has_the_names_that_transformers_has_in_memory_and_is_read_again(tmp_path: Path) -> None:
    """Some are those that it saves, which are another spelling."""
    model = deepseek_v4.make(**SIZES)
    model.save_pretrained(tmp_path / "saved")
    run(tmp_path / "saved", tmp_path / "dcp", "hf", container="dcp")
    specs = read_index(tmp_path / "dcp").tensors
    assert {name.removeprefix("model.") for name in specs} == model.state_dict().keys()
    assert same(tmp_path / "saved", tmp_path / "dcp")
    run(tmp_path / "dcp", tmp_path / "back", "hf")
    assert stored(tmp_path / "back").keys() == deepseek_v4.native(model).keys()


def both(directory: Path) -> tuple[DeepseekV4ForCausalLM, GPT]:
    model = deepseek_v4.make(**SIZES)
    model.set_attn_implementation("eager")
    return model, as_gpt(converted(model, directory))


@pytest.mark.parametrize("length", [3, 131, *in_soak(127, 128, 300)])
def test_logits_are_transformers(length: int, tmp_path: Path) -> None:
    """Of texts with no whole window of 4 or 128 tokens, and with some."""
    theirs, ours = both(tmp_path)
    tokens = clear_tokens(ours, (2, length), 160)
    with torch.no_grad():
        expected, found = theirs(tokens, use_cache=False).logits, ours(tokens)[..., :160]
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.std()))


@pytest.mark.soak
def test_gradients_are_transformers(tmp_path: Path) -> None:
    """Of every parameter but the indexer's, which has none in either."""
    theirs, ours = both(tmp_path)
    tokens = clear_tokens(ours, (2, 300), 160)
    for logits in (theirs(tokens, use_cache=False).logits, ours(tokens)[..., :160]):
        logits.logsumexp(-1).sum().backward()
    for name, found, expected in both_gradients(theirs, ours):
        # Of the three factors of a hyper-connection it is a sum of which most cancels, in an order that depends on the
        # number of threads. Streams are copies of each other in layer 0, and to mix them has none but rounding's.
        atol = 1e-5 * max(float(expected.abs().max()), 3e-1 if ".alpha_" in name else 0)
        torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=lambda said, name=name: f"{name}: {said}")


def test_texts_that_share_a_row_do_not_see_each_other(tmp_path: Path) -> None:
    _, model = both(tmp_path)
    lengths = (5, 130, 9)
    tokens = torch.randint(160, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        shared = model(tokens, packed=PackedSequences(lengths)).flatten(0, 1)
        alone = torch.cat([model(text).flatten(0, 1) for text in torch.split(tokens, lengths, dim=1)])
    torch.testing.assert_close(shared, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 64}}, "compress_rates"),
        ({"layer_types": ["full_attention"] * 4}, "full_attention"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "hash_moe after moe"),
        ({"compress_rate_csa": 8}, "compress_rate_csa=8"),
        ({"layer_types": ["linear_attention"] * 4}, "layers of type 'linear_attention' in layer_types"),
    ],
    ids=str,
)
def test_what_the_table_does_not_know_is_refused_by_its_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnknownArchitecture, match=said):
        from_hf_config(config(**changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compress_ratios": [0, 4, 128, 128, 0]}, "compress_ratios is"),
        ({"num_hash_layers": 2}, "num_hash_layers is 2"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim is 32"),
        ({"qk_rope_head_dim": 10**18}, "qk_rope_head_dim is 1000"),
        ({"num_hash_layers": -1}, "num_hash_layers is -1"),
        (
            {"rope_parameters": {"main": {"rope_type": "default", "rope_theta": 10000.0}, "compress": "yarn"}},
            "compress is .yarn., not an object",
        ),
        ({"rope_parameters": {**deepseek_v4.YARN, "main": [], "compress": None}}, r"main is \[\], not an object"),
    ],
    ids=str,
)
def test_what_keys_say_two_ways_or_no_way_is_no_model(changes: dict[str, Any], said: str) -> None:
    """transformers goes by its own words and engines by published ones; it refuses rotary parameters that are none,
    and without them layers with compressed keys would have no YaRN."""
    with pytest.raises(DamagedCheckpoint, match=said):
        from_hf_config(config(**changes))


def test_other_rates_convert_without_a_table_and_not_to_megatron(tmp_path: Path) -> None:
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    deepseek_v4.publish(tmp_path / "source", compress_rates=rates)
    assert isinstance(open_checkpoint(tmp_path / "source").model, UntabledModel)
    with pytest.raises(UnknownArchitecture, match="compress_rat"):
        run(tmp_path / "source", tmp_path / "megatron", "megatron")


def test_released_keys_say_the_same_model(tmp_path: Path) -> None:
    """`compress_ratios` with an entry for the prediction layer, `num_hash_layers` and `qk_rope_head_dim`, and none of
    transformers' own."""
    deepseek_v4.publish(tmp_path / "source", **SIZES)
    told = json.loads((tmp_path / "source" / "config.json").read_text())
    expected = from_hf_config(told)
    for key in ("layer_types", "compress_rates", "mlp_layer_types", "partial_rotary_factor"):
        told.pop(key, None)
    assert from_hf_config(told | {"compress_ratios": [0, 4, 128, 4, 0]}) == expected
    assert from_hf_config(told | {"compress_ratios": [0, 4, 128, 128, 0]}) != expected


@pytest.mark.parametrize(
    "said", [{}, {"num_hash_layers": None}, {"num_hash_layers": 1}, {"num_hash_layers": 9}], ids=str
)
def test_as_many_layers_have_tables_as_transformers_says(said: dict[str, Any]) -> None:
    small = {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
    told = {key: value for key, value in config(**small).items() if key not in ("mlp_layer_types", "num_hash_layers")}
    expected = DeepseekV4ForCausalLM.config_class.from_dict(told | said).mlp_layer_types
    moe = from_hf_config(told | said).moe
    assert moe and moe.n_hash_layers == expected.count("hash_moe")


@pytest.mark.parametrize("number", [1, 2, 5])
def test_without_a_list_layers_are_of_the_kinds_that_transformers_takes(number: int) -> None:
    told = config() | {"num_hidden_layers": number, "layer_types": None, "mlp_layer_types": None}
    told.pop("compress_ratios", None)
    csa = from_hf_config(told).csa
    assert csa and csa.pattern == "".join(
        {"compressed_sparse_attention": "C", "heavily_compressed_attention": "H"}[kind]
        for kind in DeepseekV4ForCausalLM.config_class.from_dict(told).layer_types
    )


@pytest.mark.parametrize("changes", [{"layer_types": ["sliding_attention"]}, {"mlp_layer_types": 7}], ids=str)
def test_a_list_that_lacks_layers_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DamagedCheckpoint, match="not a list of 4 layers"):
        from_hf_config(config(**changes))


def test_a_config_that_is_written_has_the_keys_of_engines() -> None:
    """vLLM's and SGLang's models read these, and not transformers' own."""
    written = to_hf_config(shape(), "bfloat16")
    assert written["compress_ratios"][:4] == [0, 4, 128, 4] and written["num_hash_layers"] == 1
    assert written["qk_rope_head_dim"] == 16 and written["scoring_func"] == "sqrtsoftplus"
    assert not engine_named("vllm").lacks(written) and not engine_named("sglang").lacks(written)
    assert (
        DeepseekV4ForCausalLM.config_class.from_dict(written).rope_parameters["main"]["partial_rotary_factor"] == 0.125
    )


def test_megatrons_arguments_are_those_of_its_dev_branch() -> None:
    """As Megatron-Bridge's provider of DeepSeek-V4 sets them (models/deepseek/deepseek_v4_bridge.py)."""
    model = shape()
    args = to_megatron_args(model)
    assert args["experimental_attention_variant"] == "dsv4_hybrid" and args["multi_latent_attention"]
    assert args["csa_compress_ratios"] == [0, 4, 128, 4, *[0] * model.mtp_num_layers]
    assert args["enable_hyper_connections"] and args["num_residual_streams"] == 4
    assert args["moe_n_hash_layers"] == 1 and args["moe_router_score_function"] == "sqrtsoftplus"
    assert (args["rotary_base"], args["csa_compress_rotary_base"]) == (10000, 160000.0)
    assert read_megatron_args(args, 160, "").csa == model.csa and read_megatron_args(args, 160, "").mhc == model.mhc
    with pytest.raises(UnknownArchitecture, match="rotary_percent"):
        read_megatron_args(args | {"rotary_percent": 0.5}, 160, "")


def test_tensor_parallel_ranks_are_refused() -> None:
    check(shape(), ParallelSettings(expert=2))
    with pytest.raises(RecipeError, match="compressed keys has one key for all heads"):
        check(shape(), ParallelSettings(tensor=2))


def test_a_table_of_experts_is_of_integers(tmp_path: Path) -> None:
    model = deepseek_v4.make(**SIZES)
    gate = model.model.layers[0].mlp.gate
    gate.tid2eid = gate.tid2eid.float()
    model.save_pretrained(tmp_path)
    with pytest.raises(PrecisionError, match="tid2eid` is float32"):
        to_megatron(open_checkpoint(tmp_path))


@pytest.mark.parametrize("number", [4, *in_soak(-1)])
def test_a_table_with_a_number_that_is_no_expert_s_is_refused(number: int, tmp_path: Path) -> None:
    """What computes with it would fail in the middle, or take the last expert. A conversion carried it in silence."""
    source, text = (
        make_source(tmp_path / "hf", family="deepseek-v4", **pico.fp8_sizes("deepseek-v4")),
        make_text(tmp_path / "text.txt", words=200),
    )
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    tensors["layers.0.ffn.gate.tid2eid"][7, 1] = number
    save_file(tensors, file, {"format": "pt"})
    how = ("--backend", "emulated", "--set", "data.sequence_length=32")
    for command in (
        ("convert", source, tmp_path / "megatron", "--to", "megatron"),
        ("convert", source, tmp_path / "bf16", "--to", "hf", "--precision", "bf16"),
        ("export-inference", source, tmp_path / "fp8", "--target", "transformers", "--scheme", "dynamic"),
        ("eval", source, "--sequence-length", 32, "--data", text),
        ("resume", source, "--precision", "bf16", "--out", tmp_path / "run", "--data", text, *how),
        ("calibrate", source, "--out", tmp_path / "state.json", "--data", text, *how),
    ):
        done = command_line.run(*command)
        assert done.exit_code and "tid2eid" in done.stderr and "not from 0 to 3" in done.stderr, done.stderr


@pytest.mark.soak
def test_fixed_input_scales_leave_out_the_projection_by_groups_whose_input_nothing_records(tmp_path: Path) -> None:
    """Calibration was asked for again and again."""
    source = make_source(tmp_path / "hf", family="deepseek-v4", **pico.fp8_sizes("deepseek-v4"))
    text, state = make_text(tmp_path / "text.txt", words=200), tmp_path / "state.safetensors"
    how = ("--backend", "emulated", "--set", "data.sequence_length=32")
    assert not command_line.run("calibrate", source, "--out", state, "--data", text, *how).exit_code
    static = ("export-inference", source, tmp_path / "fp8", "--target", "transformers", "--scheme", "static")
    refused = command_line.run(*static, "--fp8-state", state)
    assert refused.exit_code and "--exclude '*.wo_a'" in refused.stderr and "calibrate" not in refused.stderr
    done = command_line.run(*static, "--fp8-state", state, "--exclude", "*.wo_a")
    assert not done.exit_code, done.stderr


@pytest.mark.soak  # gemma4-moe's goes to each of them, too
@pytest.mark.parametrize("left_out", [NOT_TRAINED, (".tid2eid",)], ids=["now", "once"])
def test_a_run_goes_with_its_optimizer_to_every_program(
    left_out: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of biases of routers and tables of experts no optimizer has a state, and no other format a place for one. Runs
    were once saved with copies of the biases."""
    monkeypatch.setattr(saving, "NOT_TRAINED", left_out)
    source, text = make_source(tmp_path / "hf", family="deepseek-v4"), make_text(tmp_path / "text.txt", words=200)
    how = {"train__steps": 2, "train__save_every": 1}
    run_of(settings(source, text, tmp_path / "run", **how))
    trained = open_checkpoint(tmp_path / "run")
    assert isinstance(trained, OptimizerSource)
    assert not [name for name in trained.optimizer_specs if name.endswith(NOT_TRAINED)]
    run(tmp_path / "run", tmp_path / "ranks", "megatron", container="torch")
    run(tmp_path / "run", tmp_path / "dcp", "hf", container="dcp")
    assert same(tmp_path / "run", tmp_path / "ranks") and same(tmp_path / "run", tmp_path / "dcp")
    finished = run_of(settings(tmp_path / "ranks", text, tmp_path / "more", **how | {"train__steps": 3}))[1]
    assert finished.step == 3


def test_published_codes_are_evaluated(tmp_path: Path) -> None:
    """Of linears as engines compute; the projection by groups, the indexer and experts in MXFP4 by decoded weights."""
    deepseek_v4.publish(tmp_path / "source", **SIZES)
    model, words = load(open_checkpoint(tmp_path / "source"))
    assert "FP8 codes" in words and "weights from FP8" in words and "weights from MXFP4" in words
    plain, _ = load(open_checkpoint(tmp_path / "source"), plain=True)
    tokens = torch.randint(160, (2, 144), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        coded, decoded = model(tokens).float(), plain(tokens).float()
    assert not torch.equal(coded, decoded)
    assert torch.nn.functional.cosine_similarity(coded.flatten(), decoded.flatten(), 0) > 0.9


def test_where_tables_choose_in_all_layers_no_loss_balances_experts(tmp_path: Path) -> None:
    """transformers' loss counts none of its DeepseekV4HashRouter either (OutputRecorder)."""
    made = converted(deepseek_v4.make(**SIZES, mlp_layer_types=["hash_moe"] * 4), tmp_path)
    tokens = torch.randint(160, (2, 8), generator=torch.Generator().manual_seed(1))
    models = []
    for balance in (Balance(pooled_loss=1.0, aux_loss=1.0, z_loss=1.0), Balance()):
        model = GPT(made.model, PRESETS["bf16"], dtype=torch.float32, balance=balance)
        model.load_state_dict(dict(made.tensors))
        backward(model, Batch(tokens, tokens, torch.ones(2, 8, dtype=torch.bool), None), 16)
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)


def test_defaults_are_those_of_deepseek_v4_flash() -> None:
    """Which DeepSeek says has 284B parameters (its model card), without the prediction layer; tables are no weights."""
    released = {"model_type": "deepseek_v4", "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]}
    model = from_hf_config(released)
    table = architecture_of("deepseek_v4").spelled({}, model)
    weights = [row for row in table if "{mtp}" not in row.megatron and not row.megatron.endswith("tid2eid")]
    each = (row.count(model) * sum(map(math.prod, row.shapes(model, "hf"))) for row in weights)
    assert round(sum(each) / 1e9) == 284

"""Llama-Nemotron: what `block_configs` say of layers, in config.json and among Megatron's arguments, and what no table
has."""

import json
import re
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import run
from nemotron_nas import block
from safetensors.torch import load_file, save_file

from precisionctl.architectures.families import from_hf_config, read_model, to_hf_config
from precisionctl.architectures.megatron.heterogeneous_args import ENCODED
from precisionctl.architectures.megatron.megatron_args import read_megatron_args, to_megatron_args
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.model.model_parts import Heterogeneous
from precisionctl.model.same_model import differences
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.reports.model_sizes import size_rows
from precisionctl.trainer.measure.parameters import Parameters

FAMILY = "nemotron-nas"


def said(*blocks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return pico.config(FAMILY, block_configs=list(blocks), num_hidden_layers=len(blocks), **changes)


def published(heads_in_group: int | None, ffn_mult: float | None) -> dict[str, Any]:
    """As the files of Super and Ultra have it."""
    made = block(heads_in_group, ffn_mult)
    unused = {"num_sink_tokens": None, "unshifted_sink": False, "use_prefill_window_in_sink_attention": False}
    return {
        "attention": {**made["attention"], **unused, "sparsify": None, "window_length": None},
        "ffn": {**made["ffn"], "sparsify": None},
    }


@pytest.mark.parametrize(
    ("hidden", "heads", "in_group", "ffn_mult", "channels"),
    [
        (8192, 64, 8, 5.25, 28672),  # Super's MLPs that are still Llama 3.3 70B's
        (16384, 128, 16, 4.875, 53248),  # Ultra's that are Llama 3.1 405B's
    ],
)
def test_mlps_that_the_search_left_are_as_wide_as_before_it(
    hidden: int, heads: int, in_group: int, ffn_mult: float, channels: int
) -> None:
    blocks = (published(in_group, ffn_mult), published(None, None))
    model = from_hf_config(said(*blocks, hidden_size=hidden, num_attention_heads=heads))
    assert model.heterogeneous == Heterogeneous((8, 0), (channels, 0))
    assert (model.num_query_groups, model.ffn_hidden_size) == (8, channels)


@pytest.mark.parametrize("hidden", [64, 5120, 8192, 16384])
def test_every_width_is_written_as_a_multiple_that_engines_read_as_it(hidden: int) -> None:
    """Published code rounds the multiple to six digits; vLLM, Megatron-Core and llama.cpp do not."""
    for channels in range(256, 30 * hidden, 256 if hidden == 64 else 256 * 7):
        blocks = [published(1, 1.0)]
        model = from_hf_config(said(*blocks, hidden_size=hidden))
        sizes = Heterogeneous(model.heterogeneous.num_query_groups, (channels,))
        wide = type(model)(**{**vars(model), "heterogeneous": sizes, "ffn_hidden_size": channels})
        ffn_mult = to_hf_config(wide, "bfloat16")["block_configs"][0]["ffn"]["ffn_mult"]
        assert ffn_mult == round(ffn_mult, 6)
        found = int(2 * ffn_mult * hidden / 3)
        assert found + -found % 256 == channels


def test_a_width_that_no_multiple_says_is_refused() -> None:
    args = to_megatron_args(pico.shape(FAMILY))
    told = json.loads(args[ENCODED])
    told["block_configs"][0]["ffn"] = {"ffn_hidden_size": 300}
    model = read_megatron_args(args | {ENCODED: json.dumps(told)}, 256, "")
    with pytest.raises(UnknownArchitecture, match="300 channels, which are no multiple of 256"):
        to_hf_config(type(model)(**{**vars(model), "architecture": FAMILY}), "bfloat16")


def test_the_words_that_megatron_bridge_and_megatron_core_have_for_blocks_are_read() -> None:
    """Bridge writes the whole config.json (`hf_config.to_json_string`), and no width of all layers."""
    model, args = pico.shape(FAMILY), to_megatron_args(pico.shape(FAMILY))
    of_bridge = {**args, ENCODED: json.dumps(pico.config(FAMILY)), "ffn_hidden_size": None, "num_query_groups": 4}
    words = [
        {
            "attention": {"no_op": not groups, "num_query_groups": groups or None},
            "mlp": {"no_op": not channels, "ffn_hidden_size": channels or None},
        }
        for groups, channels in map(model.heterogeneous.of_layer, range(model.num_layers))
    ]
    of_core = {**args, ENCODED: json.dumps({"block_configs": words}), "heterogeneous_block_specs": True}
    for each in (args, of_bridge, of_core):
        assert differences(read_megatron_args(each, 256, ""), model) == {}


@pytest.mark.parametrize(
    ("encoded", "named"),
    [
        ("{", "not readable as JSON"),
        ("[1]", "not a JSON object"),
        ('{"block_configs": 1}', "block_configs is 1, not a list of blocks"),
        ({"hidden_size": 128}, f"hidden_size of {ENCODED} is 128, and hidden_size is 64"),
        ({"num_attention_heads": 2}, f"num_attention_heads of {ENCODED} is 2, and num_attention_heads is 4"),
        ({"num_hidden_layers": 9}, f"num_hidden_layers of {ENCODED} is 9, and num_layers is "),
    ],
)
def test_a_word_of_another_model_than_the_arguments_is_refused(encoded: Any, named: str) -> None:
    """As Megatron-LM does (validate_model_config_args_from_heterogeneous_config, megatron/training/arguments.py)."""
    args = to_megatron_args(pico.shape(FAMILY))
    word = encoded if isinstance(encoded, str) else json.dumps({**json.loads(args[ENCODED]), **encoded})
    with pytest.raises(DamagedCheckpoint, match=re.escape(named)):
        read_megatron_args(args | {ENCODED: word}, 256, "")


@pytest.mark.parametrize(
    ("last", "named"),
    [
        (published(3, 1.0), "4 heads in groups of 3 (block_configs[1])"),
        (published(1, 1e-9), "ffn_mult is 1e-09: an MLP without channels (block_configs[1])"),
        ({"attention": {"n_heads_in_group": 1}}, "ffn is None, not an object (block_configs[1])"),
        ([], "a block is [], not an object (block_configs[1])"),
    ],
)
def test_an_error_says_of_which_layer_it_is(last: Any, named: str) -> None:
    with pytest.raises(DamagedCheckpoint) as refused:
        from_hf_config(said(published(1, 1.0), last))
    assert named in str(refused.value)


@pytest.mark.parametrize("beside", [{"parallel_blocks": [{}]}, {"mlp": {"ffn_hidden_size": 512}}])
def test_a_block_with_more_than_attention_and_an_mlp_makes_a_model_without_a_table(beside: dict[str, Any]) -> None:
    model = read_model(said({**published(1, 1.0), **beside}), ())
    assert isinstance(model, UntabledModel) and next(iter(beside)) in str(model.why)


def test_models_without_any_attention_or_any_mlp_and_of_another_number_of_layers_are_damaged() -> None:
    for blocks, named in (
        ([published(None, 1.0)], "no layer of block_configs has attention"),
        ([published(1, None)], "no layer of block_configs has an MLP"),
    ):
        with pytest.raises(DamagedCheckpoint, match=named):
            from_hf_config(said(*blocks))
    with pytest.raises(DamagedCheckpoint, match="block_configs has 1 blocks for 2 layers"):
        from_hf_config(said(published(1, 1.0)) | {"num_hidden_layers": 2})


LINEAR = {"attention": {"no_op": False, "replace_with_linear": True, "n_heads_in_group": None}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (LINEAR, "attention with replace_with_linear=True"),
        ({"ffn": {"no_op": False, "replace_with_linear": True, "ffn_mult": None}}, "an MLP with replace_with_linear"),
        ({"attention": {"n_heads_in_group": 1, "window_length": 512}}, "window_length=512"),
        ({"ffn": {"ffn_mult": 1.0, "sparsify": ["down_proj"]}}, "sparsify"),
    ],
)
def test_layers_with_something_else_make_a_model_without_a_table(change: dict[str, Any], named: str) -> None:
    model = read_model(said({**published(1, 1.0), **change}), ())
    assert isinstance(model, UntabledModel) and named in str(model.why)


@pytest.mark.parametrize(
    "config",
    [
        said(published(1, 1.0)) | {"num_hidden_layers": 2},
        said(published(3, 1.0)),
        said(published(1, float("nan"))),
        said(published(1, 1e30)),
        said(published(1, -1.0)),
        said(published(None, 1.0)),
        said({"attention": {"n_heads_in_group": 1}}),
        said({"attention": {"no_op": "yes"}, "ffn": {"no_op": True}}),
        said() | {"block_configs": None, "num_hidden_layers": 1},
        said() | {"block_configs": [1], "num_hidden_layers": 1},
    ],
)
def test_what_is_no_description_of_layers_is_damaged(config: dict[str, Any]) -> None:
    with pytest.raises(DamagedCheckpoint):
        from_hf_config(config)


@pytest.mark.parametrize("word", ["[]", "7", "{}", "{", '{"block_configs": {}}', "[" * 100_000])
def test_arguments_that_describe_no_layers_are_refused(word: str) -> None:
    with pytest.raises(DamagedCheckpoint):
        read_megatron_args(to_megatron_args(pico.shape(FAMILY)) | {ENCODED: word}, 256, "")


def test_a_linear_in_the_place_of_attention_stays_in_hugging_face(tmp_path: Path) -> None:
    """As in Llama-3_1-Nemotron-51B."""
    pico.save(tmp_path / "hf", FAMILY, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["block_configs"][1] |= LINEAR
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    added = {
        "model.layers.1.self_attn.linear_attn.weight": torch.randn(64, 64).bfloat16(),
        "model.layers.1.input_layernorm.weight": torch.ones(64).bfloat16(),
    }
    save_file(tensors | added, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    run(tmp_path / "hf", tmp_path / "again", "hf", precision="bf16")
    found = {name for file in (tmp_path / "again").glob("*.safetensors") for name in load_file(file)}
    assert found == {*tensors, *added}
    with pytest.raises(UnknownArchitecture, match="replace_with_linear"):
        run(tmp_path / "hf", tmp_path / "megatron", "megatron")


def test_sizes_are_counted_layer_by_layer_and_told_as_the_largest(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", FAMILY)
    reader = open_checkpoint(tmp_path / "hf")
    linears = sum(spec.rows * spec.columns for name, spec in reader.specs.items() if "norm" not in name)
    assert Parameters.of(reader.model).all == linears
    rows = dict(size_rows(reader.model.described()))
    assert rows["layers"] == "5 of hidden size 64, MLP 512 at most, in 3 layers"
    assert rows["attention"] == "4 heads, 4 key-value groups at most, in 3 layers"

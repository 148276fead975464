"""Nemotron-H: layers of one block each, some of them Mamba-2 mixers; the state space against a slow one."""

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pico
import pytest
import torch
from command_line import run as command
from conversions import change_args, run
from gpt_models import as_gpt, assert_texts_are_apart, clear_tokens, converted, transformers_model
from safetensors.torch import load_file, save_file
from soaking import in_soak
from torch import Tensor
from training import make_source, make_text
from transformers import AutoConfig

from precisionctl.architectures.families import from_hf_config, from_megatron_args, to_hf_config
from precisionctl.architectures.megatron.megatron_args import to_megatron_args
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, RecipeError, ShapeMismatch, UnknownArchitecture
from precisionctl.fp8 import sidecar
from precisionctl.param import Parallelism
from precisionctl.recipe import ParallelSettings
from precisionctl.trainer.model.recurrent.mamba_2 import state_space
from precisionctl.trainer.model.recurrent.recurrence import CHUNK
from precisionctl.trainer.parallel import shards
from precisionctl.verify.engine_rules import check

CUTS = {"TP 2, PP 2, EP 2": Parallelism(tensor=2, pipeline=2, expert=2), "TP 4": Parallelism(tensor=4, expert_tensor=1)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nemotron")
    pico.save(path, "nemotron-h", dtype=torch.bfloat16)
    return path


def assert_same(one: Path, other: Path) -> None:
    before, after = (load_file(path / "model.safetensors") for path in (one, other))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize(
    ("cut", "container"),
    [("TP 2, PP 2, EP 2", "torch"), ("TP 4", "torch_dist"), *in_soak(("TP 2, PP 2, EP 2", "torch_dist"))],
)
def test_it_comes_back_from_megatron_to_the_last_bit(source: Path, tmp_path: Path, cut: str, container: str) -> None:
    run(source, tmp_path / "m", "megatron", parallelism=CUTS[cut], container=container, workers=1)
    run(tmp_path / "m", tmp_path / "back", "hf", workers=1)
    assert_same(source, tmp_path / "back")


def test_torch_dist_has_the_names_and_parts_of_megatron_cores_hybrid_stack(source: Path, tmp_path: Path) -> None:
    """As MambaMixer.sharded_state_dict cuts them: z, x, B, C and dt, each by itself."""
    run(source, tmp_path / "m", "megatron", parallelism=Parallelism(tensor=2), workers=1)
    found = {name: tensor.shape for name, tensor in dcp_metadata.read_index(tmp_path / "m" / "release").tensors.items()}
    mixer, parts = "decoder.layers.0.mixer.", {"z": 128, "x": 128, "B": 32, "C": 32, "dt": 32}
    expected = {f"{mixer}in_proj.weight.{part}": (rows, 64) for part, rows in parts.items()}
    expected |= {f"{mixer}conv1d.weight.{part}": (parts[part], 1, 4) for part in ("x", "B", "C")}
    expected |= {f"{mixer}conv1d.bias.{part}": (parts[part],) for part in ("x", "B", "C")}
    expected |= {mixer + name: (32,) for name in ("A_log", "D", "dt_bias")}
    expected |= {f"{mixer}in_proj.layer_norm_weight": (64,), f"{mixer}norm.weight": (128,)}
    expected |= {f"{mixer}out_proj.weight": (64, 128)}
    assert {name: shape for name, shape in found.items() if name.startswith(mixer)} == expected
    others = ("1.pre_mlp_layernorm.weight", "2.self_attention.linear_qkv.layer_norm_weight")
    others += ("3.mlp.linear_fc1.layer_norm_weight", "1.mlp.shared_experts.linear_fc2.weight")
    assert {f"decoder.layers.{name}" for name in others} | {"decoder.final_norm.weight"} <= found.keys()


def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "nemotron-h", n_groups=1)
    with pytest.raises(ShapeMismatch, match=r"mixer.in_proj.weight.*cannot be cut into 2"):
        plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=Parallelism(2)))


def test_names_in_memory_are_read_and_written_as_published(source: Path, tmp_path: Path) -> None:
    theirs = pico.make("nemotron-h", dtype=torch.bfloat16)
    (tmp_path / "memory").mkdir()
    save_file(theirs.state_dict(), tmp_path / "memory" / "model.safetensors", metadata={"format": "pt"})
    theirs.config.save_pretrained(tmp_path / "memory")
    run(tmp_path / "memory", tmp_path / "m", "megatron", workers=1)
    run(tmp_path / "m", tmp_path / "back", "hf", workers=1)
    assert_same(source, tmp_path / "back")


SCHEMES = ("block", "mxfp8", "nvfp4a16", "mxfp4", "w4a16")


@pytest.mark.parametrize("scheme", ["dynamic", *in_soak(*SCHEMES)])
def test_it_is_exported(source: Path, tmp_path: Path, scheme: str) -> None:
    execute(plan_command(Request.export(source, tmp_path / "out", "vllm", scheme, keep_misfits=True)), workers=1)
    assert check(open_checkpoint(tmp_path / "out"), engine_named("vllm")) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("mlp_hidden_act", "silu"), ("conv_kernel", 3)),
        *(("time_step_limit", [0.001, float("inf")]), ("time_step_limit", [0.0, 3e38]), ("mamba_dt_limit", [0.0, 0.1])),
        *(("mamba_d_conv", 3), ("mamba_conv_bias", False)),  # words of the first configs
    ],
)
def test_what_the_table_does_not_say_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnknownArchitecture, match=key):
        from_hf_config(pico.config("nemotron-h") | {key: value})


@pytest.mark.parametrize("end", [float("inf"), {"__float__": "Infinity"}, 1e308])
def test_a_limit_that_no_step_reaches_is_none(end: object) -> None:
    """Nemotron 3 Super has infinity, transformers writes it as an object, and Nemotron 3 Ultra has 1e308."""
    config = pico.config("nemotron-h")
    assert from_hf_config(config | {"time_step_limit": [0.0, end]}) == from_hf_config(config)


def test_another_word_for_its_layers_must_not_say_otherwise() -> None:
    """transformers goes by the word, if it stands below the key."""
    config = pico.config("nemotron-h")
    blocks = config["layers_block_type"]
    assert from_hf_config(config | {"layer_types": blocks}) == from_hf_config(config)
    assert AutoConfig.for_model(**config | {"layer_types": blocks[::-1]}).layers_block_type == blocks[::-1]
    with pytest.raises(DamagedCheckpoint, match="and layers_block_type, which is the same"):
        from_hf_config(config | {"layer_types": blocks[::-1]})


def test_without_layers_of_prediction_their_kinds_are_not_written() -> None:
    model = from_hf_config(pico.config("nemotron-h"))
    assert model.mtp_num_layers == 0 and "mtp_hybrid_override_pattern" not in to_hf_config(model, "bfloat16")


def test_heads_that_are_not_said_are_those_of_its_class() -> None:
    config, heads = AutoConfig.for_model("nemotron_h"), ("num_attention_heads", "num_key_value_heads", "head_dim")
    model = from_hf_config({key: value for key, value in config.to_dict().items() if key not in heads})
    found = (model.num_attention_heads, model.num_query_groups, model.kv_channels)
    assert found == tuple(getattr(config, name) for name in heads)


JUNK = (-1, 0, 3.5, "", "MX", [], ["mlp"], [None], ["magic"] * 6, {"a": 1}, True)


@pytest.mark.parametrize(
    "key", ["hybrid_override_pattern", "layers_block_type", "n_groups", "n_shared_experts", "time_step_limit"]
)
def test_junk_in_its_config_is_one_error(key: str) -> None:
    config = to_hf_config(pico.shape("nemotron-h"), "bfloat16")
    for junk in JUNK:
        with suppress(DamagedCheckpoint, UnknownArchitecture):
            from_hf_config(config | {key: junk})


def test_patterns_with_experts_that_no_argument_describes_are_refused() -> None:
    args = to_megatron_args(pico.shape("nemotron-h").padded(1)) | {"num_experts": None}
    with pytest.raises(DamagedCheckpoint, match="ME\\*-M\\*' has layers with experts, and num_experts is not said"):
        from_megatron_args(args, 256, "")


def test_the_pattern_of_newer_megatrons_is_read() -> None:
    """Megatron-LM 0.17 to 0.19 (arguments.py) save `hybrid_layer_pattern`, with `|` between pipeline stages."""
    args = to_megatron_args(pico.shape("nemotron-h").padded(1))
    pattern = args.pop("hybrid_override_pattern")
    del args["is_hybrid_model"]
    newer = args | {"hybrid_override_pattern": None, "hybrid_layer_pattern": f"{pattern[:3]}|{pattern[3:]}"}
    found = from_megatron_args(newer, 256, "")
    assert found.architecture == "nemotron_h" and found.mamba and found.mamba.pattern == pattern


@pytest.mark.parametrize("epsilon", [1e-5, 1e-6])
def test_what_others_compute_of_a_mixer_is_told(tmp_path: Path, epsilon: float) -> None:
    """transformers clamps steps from below, seen in what it makes; Megatron-Core's norm has an epsilon of its own."""
    theirs = pico.make_and_save(tmp_path / "hf", "nemotron-h", layer_norm_epsilon=epsilon, time_step_min=0.001)
    assert theirs.model.layers[0].mixer.time_step_limit == (0.001, float("inf"))
    notes = plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron")).notes
    assert any("transformers 5.24 takes no step (dt) of a Mamba-2 mixer below" in note for note in notes)
    assert any("with epsilon 1e-05, whatever the arguments say" in note for note in notes) == (epsilon != 1e-5)


# What the trainer computes --------------------------------------------------------------------------------------------


def inputs(length: int) -> list[Tensor]:
    """Two rows of six heads of 3 channels in two groups, with states of 4: values, logarithms of decays, B and C."""
    torch.manual_seed(length)
    B, C = torch.randn(2, 2, length, 2, 4, dtype=torch.float64).unbind()
    return [torch.randn(2, length, 6, 3).double(), -torch.rand(2, length, 6).double(), B, C]


def slowly(x: Tensor, g: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Token by token and head by head, as the paper defines it (equation 2)."""
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        for head in range(x.shape[2]):
            state, group = x.new_zeros(B.shape[3], x.shape[3]), head // 3
            for token in range(x.shape[1]):
                state = g[row, token, head].exp() * state + torch.outer(B[row, token, group], x[row, token, head])
                out[row, token, head] = C[row, token, group] @ state
    return out


@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_the_state_space_by_chunks_is_that_token_by_token(length: int) -> None:
    given = inputs(length)
    torch.testing.assert_close(state_space(*given), slowly(*given), rtol=0, atol=1e-12)


def test_gradients_of_the_state_space_are_those_of_small_differences() -> None:
    given = [tensor[:1, : CHUNK + 2].requires_grad_() for tensor in inputs(CHUNK + 2)]
    assert torch.autograd.gradcheck(state_space, given, fast_mode=True)


@pytest.mark.parametrize("groups", [2, *in_soak(1, 4)])
@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 9])
def test_logits_are_those_of_transformers_with_any_number_of_groups_and_chunks(
    tmp_path: Path, length: int, groups: int
) -> None:
    theirs = transformers_model("nemotron-h", n_groups=groups, chunk_size=32)
    ours = as_gpt(converted(theirs, tmp_path))
    tokens = clear_tokens(ours, (2, length))
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = ours(tokens)[..., :250]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.std()))


def test_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    """Of all parameters of two mixers, behind experts, an MLP and attention."""
    theirs = transformers_model("nemotron-h")
    ours = as_gpt(converted(theirs, tmp_path))
    tokens = clear_tokens(ours, (2, CHUNK + 9))
    for logits in (theirs(tokens).logits, ours(tokens)[..., :250]):
        logits.logsumexp(-1).sum().backward()
    found, expected = dict(ours.named_parameters()), dict(theirs.named_parameters())
    for layer in (0, 4):
        for name in ("in_proj.weight", "conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias", "norm.weight"):
            one, other = found[f"decoder.layers.{layer}.mixer.{name}"], expected[f"model.layers.{layer}.mixer.{name}"]
            assert one.grad is not None and other.grad is not None
            largest = float(other.grad.abs().max())
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-5 * largest, msg=name)


def test_texts_that_share_a_row_neither_see_nor_remember_one_another(tmp_path: Path) -> None:
    assert_texts_are_apart("nemotron-h", tmp_path, (5, 95, 70, 30))


def test_groups_that_ranks_cannot_share_are_refused() -> None:
    model = pico.shape("nemotron-h")
    shards.check(model, ParallelSettings(tensor=2))
    assert model.mamba is not None
    with pytest.raises(RecipeError, match="1 groups of a Mamba-2 mixer's heads cannot be shared evenly by 2 ranks"):
        shards.check(replace(model, mamba=replace(model.mamba, num_groups=1)), ParallelSettings(tensor=2))


@pytest.mark.soak
def test_calibrated_input_scales_are_in_a_static_export_which_is_evaluated(tmp_path: Path) -> None:
    source, data = make_source(tmp_path / "hf", family="nemotron-h"), make_text(tmp_path / "text.txt")
    short = ("--data", data, "--sequence-length", 32)
    done = command(
        "calibrate",
        source,
        *short,
        "--out",
        tmp_path / "state",
        "--passes",
        4,
        "--batch-size",
        2,
        "--backend",
        "emulated",
    )
    assert done.exit_code == 0, done.stderr
    given = ("--target", "vllm", "--scheme", "static", "--fp8-state", tmp_path / "state")
    done = command("export-inference", source, tmp_path / "static", *given)
    assert done.exit_code == 0, done.stderr
    recorded, stored = sidecar.read(tmp_path / "state").modules, load_file(tmp_path / "static" / "model.safetensors")
    for linear in ("in_proj", "out_proj"):
        history = recorded[f"decoder.layers.4.mixer.{linear}"].roles["input"].amax_history
        scale = stored[f"backbone.layers.4.mixer.{linear}.input_scale"]
        assert float(scale) == float(history.max() / 448) > 0
    losses = []
    for checkpoint in (source, tmp_path / "static"):
        done = command("eval", checkpoint, *short, "--json")
        assert done.exit_code == 0, done.stderr
        losses.append(json.loads(done.stdout)["perplexity"])
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("pattern", ["ME|*-|M*/", *in_soak("ME*-M*", "ME*|-M*")])
def test_the_newest_name_of_its_pattern_is_read_and_has_the_stages_of_its_run(
    source: Path, tmp_path: Path, pattern: str
) -> None:
    """megatron/core/models/hybrid/hybrid_layer_allocation.py, parse_hybrid_pattern."""
    iteration = tmp_path / "m" / "release"
    run(source, tmp_path / "m", "megatron")
    shutil.rmtree(iteration / "precisionctl" / "hf")
    change_args(iteration, hybrid_override_pattern=None, is_hybrid_model=None, hybrid_layer_pattern=pattern)
    run(tmp_path / "m", tmp_path / "back", "hf", architecture="nemotron_h")
    assert_same(source, tmp_path / "back")
    run(tmp_path / "m", tmp_path / "cut", "megatron", architecture="nemotron_h", parallelism=Parallelism(pipeline=3))
    args = TorchDistReader(tmp_path / "cut").args
    assert args["hybrid_override_pattern"] == "ME*-M*" and "hybrid_layer_pattern" not in args


def test_the_newest_name_of_its_pattern_counts_before_the_older_one() -> None:
    """megatron/training/checkpointing.py, load_args_from_checkpoint: the older is read where the newer is not said."""
    args = to_megatron_args(pico.shape("nemotron-h").padded(1)) | {"hybrid_override_pattern": "MMMMMM"}
    model = from_megatron_args(args | {"hybrid_layer_pattern": "ME*-|M*"}, 256, "args")
    assert model.mamba and model.mamba.pattern == "ME*-M*"


@pytest.mark.parametrize("pattern", ["MEG-M*", "ME+-MD", ["M"] * 6, "", None, 6])
def test_letters_of_other_layers_and_junk_are_refused(pattern: object) -> None:
    args = to_megatron_args(pico.shape("nemotron-h").padded(1)) | {"hybrid_override_pattern": None}
    with pytest.raises(DamagedCheckpoint, match="a pattern of layers|hybrid pattern"):
        from_megatron_args(args | {"hybrid_layer_pattern": pattern}, 256, "args")


def test_what_transformers_computes_otherwise_is_noted_of_this_family_alone(tmp_path: Path) -> None:
    for family, noted in (("nemotron-h", True), ("falcon-h1", False)):
        pico.save(tmp_path / family, family, dtype=torch.bfloat16)
        notes = plan_command(Request(tmp_path / family, tmp_path / "out", "megatron")).notes
        assert any("time_step_min" in note for note in notes) is noted

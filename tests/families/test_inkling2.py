"""Inkling 2 without a table: the MXFP8 experts of Small, which are codes here, and those of Mini, which are values."""

import json
from collections.abc import Callable
from pathlib import Path

import any_models
import inkling2_directories
import numpy as np
import pytest
import torch
import transformers
from conversions import run
from installed import need_loader
from safetensors.torch import load_file, save_file
from soaking import first, in_soak
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from precisionctl.checkpoints.chunks import read_rows
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.engines.base import engine_named
from precisionctl.errors import PrecisionctlError
from precisionctl.reports.inspect import describe
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check

KINDS = ("inkling2", "inkling2_loop")
W13 = "model.llm.layers.1.mlp.experts.w13_weight"


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def rounded(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).bfloat16()


@pytest.mark.parametrize("kind", first(1, KINDS))
def test_values_are_those_of_tables_that_are_written_out(tmp_path: Path, kind: str) -> None:
    values = inkling2_directories.make(tmp_path / "source", kind)
    run(tmp_path / "source", tmp_path / "bf16", "hf", "keep", workers=2, verify=True)
    before, found = (load_file(tmp_path / each / "model.safetensors") for each in ("source", "bf16"))
    assert len(values) == 4
    for name, tensor in found.items():
        assert same_bits(tensor, rounded(values[name]) if name in values else before[name]), name
    assert before.keys() - found.keys() == {name for name in before if name.partition("_weight_")[2]}
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert compare(open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "bf16")).equal


def test_small_becomes_the_same_bytes_again(tmp_path: Path) -> None:
    inkling2_directories.make(tmp_path / "source", "inkling2")
    run(tmp_path / "source", tmp_path / "bf16", "hf", "keep", workers=1)
    run(tmp_path / "bf16", tmp_path / "again", "hf", "fp8", workers=1)
    before, again = (load_file(tmp_path / each / "model.safetensors") for each in ("source", "again"))
    assert before.keys() == again.keys() and all(same_bits(before[name], again[name]) for name in before)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["quantization_config"] == inkling2_directories.MXFP8_CONFIG


def test_an_expert_that_was_trained_gets_scales_of_its_own(tmp_path: Path) -> None:
    values = inkling2_directories.make(tmp_path / "source", "inkling2")
    run(tmp_path / "source", tmp_path / "bf16", "hf", "keep", workers=1)
    tensors = load_file(tmp_path / "bf16" / "model.safetensors")
    tensors[W13][1, 0, :32] = 2.0**12
    save_file(tensors, tmp_path / "bf16" / "model.safetensors", {"format": "pt"})
    run(tmp_path / "bf16", tmp_path / "again", "hf", "fp8", workers=1)
    run(tmp_path / "again", tmp_path / "back", "hf", "keep", workers=1)
    values[W13][1, 0, :32] = 2.0**12
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")[W13], rounded(values[W13]))


def test_mini_is_said_to_have_no_way_back_and_no_rules(tmp_path: Path) -> None:
    """Whatever method config.json names: transformers asks none."""
    inkling2_directories.make(tmp_path / "source", "inkling2_loop")
    reader = open_checkpoint(tmp_path / "source")
    assert describe(reader)["precision"] == "MXFP8 codes and NVFP4 codes of inkling2_loop, read as bfloat16"
    notes = run(tmp_path / "source", tmp_path / "bf16", "hf", "bf16", workers=1).notes
    assert any(note.startswith("12 weights were ") and "no way back" in note for note in notes)
    with pytest.raises(PrecisionctlError, match="no rules of transformers for codes of inkling2_loop"):
        check(reader, engine_named("transformers"))
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "of another world"}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    assert compare(open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "bf16")).equal


def test_rows_do_not_depend_on_how_many_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = inkling2_directories.make(tmp_path / "source", "inkling2_loop")
    reader = open_checkpoint(tmp_path / "source")
    monkeypatch.setattr("precisionctl.checkpoints.decoded.base.PIECE", 200)
    for name, expected in values.items():
        assert torch.equal(read_rows(reader, f"{name}[2]", 5, 50), rounded(expected[2, 5:55]))


Change = Callable[[dict[str, Tensor]], object]

HOSTILE: dict[str, tuple[str, Change]] = {
    "no scales": ("codes of a kind that cannot be read", lambda t: t.pop(f"{W13}_scale")),
    "no codes": ("no .*w13_weight.0. for its codes", lambda t: t.pop(W13)),
    "no amax": ("no .*w13_weight_amax for its codes", lambda t: t.pop(f"{W13}_amax")),
    "no denominator": ("no .*_outer_scale_denominator", lambda t: t.pop(f"{W13}_outer_scale_denominator")),
    "neither": ("not one for 32 values", lambda t: [t.pop(f"{W13}_{k}") for k in FACTORS]),
    "fewer experts": ("no .*w13_weight.2. for", lambda t: t.update({W13: t[W13][:2].contiguous()})),
    "fewer scales": ("amax .*for 2 experts", lambda t: t.update({f"{W13}_scale": t[f"{W13}_scale"][:2].clone()})),
    "fewer groups": ("not one for 16 values", lambda t: t.update({f"{W13}_scale": t[f"{W13}_scale"][..., :2].clone()})),
    "an odd width": ("not one for 16 values", lambda t: t.update({W13: t[W13][..., :30].clone()})),
    "BF16 codes": ("is bfloat16 with scales", lambda t: t.update({W13: t[W13].bfloat16()})),
    "flat codes": ("not one for 16 values", lambda t: t.update({W13: t[W13].reshape(3, -1, 1, 32)})),
    "amaxes of rows": (
        "_amax is float32 of shape .3, 1., for 3 experts",
        lambda t: t.update({f"{W13}_amax": t[f"{W13}_amax"][:, None]}),
    ),
    "an integer amax": ("amax is int32", lambda t: t.update({f"{W13}_amax": t[f"{W13}_amax"].int()})),
    "two denominators": ("of shape .2., for 3", lambda t: t.update({f"{W13}_outer_scale_denominator": torch.ones(2)})),
    "an infinite denominator": ("holds a", lambda t: t[f"{W13}_outer_scale_denominator"].fill_(torch.inf)),
    "a negative amax": ("amax holds a", lambda t: t[f"{W13}_amax"].neg_()),
    "nothing to divide by": ("infinite or NaN", lambda t: t[f"{W13}_outer_scale_denominator"].zero_()),
    "a scale that is NaN": ("infinite or NaN", lambda t: t[f"{W13}_scale"].view(torch.uint8).fill_(127)),
    "an exponent that is NaN": ("infinite or NaN", lambda t: t[f"{W13}_scale".replace(".1.", ".0.")].fill_(255)),
}
FACTORS = ("amax", "outer_scale_denominator")


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_that_contradict_one_another_are_one_error(tmp_path: Path, case: str) -> None:
    inkling2_directories.make(tmp_path / "source", "inkling2_loop")
    words, change = HOSTILE[case]
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    with pytest.raises(PrecisionctlError, match=words) as found:
        run(tmp_path / "source", tmp_path / "out", "hf", "bf16", workers=1)
    assert str(tmp_path) in str(found.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("no .*w13_weight_scale.0. for its codes", lambda t: t.pop(f"{W13}_scale")),
        ("scale.0. has shape .64, 1.", lambda t: t.update({f"{W13}_scale": t[f"{W13}_scale"][..., :1].clone()})),
        ("scale.2. for its codes", lambda t: t.update({f"{W13}_scale": t[f"{W13}_scale"][:2].clone()})),
        ("scale.* negative, infinite or NaN", lambda t: t[f"{W13}_scale"].fill_(255)),
        ("w13_weight.0.` has values that are infinite", lambda t: t[f"{W13}_scale"].fill_(254)),
    ],
)
def test_scales_of_small_that_are_missing_or_wrong_are_one_error(tmp_path: Path, words: str, change: Change) -> None:
    inkling2_directories.make(tmp_path / "source", "inkling2")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    with pytest.raises(PrecisionctlError, match=words):
        run(tmp_path / "source", tmp_path / "out", "hf", "bf16", workers=1)
    assert not (tmp_path / "out").exists()


def test_an_export_leaves_experts_as_values_and_says_so(tmp_path: Path) -> None:
    for kind in KINDS:
        inkling2_directories.make(tmp_path / kind, kind)
        command = plan_command(Request.export(tmp_path / kind, tmp_path / f"{kind} out", "vllm", "dynamic"))
        assert any(note.startswith("Experts ") and " BF16: " in note for note in command.notes)
        assert not any(".experts." in name for name in command.plan.codes)


# What transformers makes of such directories


def tiny(directory: Path, kind: str) -> PreTrainedModel:
    """A model that transformers makes and saves, under the names of the releases. Skips the test where it has none."""
    classes = {"inkling2": "Inkling2Config", "inkling2_loop": "Inkling2LoopConfig"}
    if not hasattr(transformers, classes["inkling2_loop"]):
        pytest.skip("transformers has no such model before 5.24")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    text = {
        **heads,
        **{f"swa_{key}": value for key, value in heads.items()},
        **dict.fromkeys(("hidden_size", "vocab_size"), 64),
        **dict.fromkeys(("d_rel", "rel_extent", "sliding_window_size", "loop_gate_rank"), 4),
        "unpadded_vocab_size": 60,
        "moe_intermediate_size": 32,
        "n_routed_experts": 3,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "n_layers_per_attn_res_block": 1,
        "eos_token_id": 1,
    }
    if kind == "inkling2_loop":
        text |= {"loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 2}
    else:
        del text["loop_gate_rank"]
    vision = {"model_type": "inkling2_vision", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"patch_size": 4, "projection_hidden_dim": 32, "text_hidden_size": 64, "posemb_grid_size": 4}
    config = getattr(transformers, classes[kind])(text_config=text, vision_config=vision)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(directory)
    return model


def in_memory(values: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The experts as transformers has them: gate and up, whose rows take turns in files, one behind the other."""
    found = {}
    for name, each in values.items():
        values_of_stack, called = torch.from_numpy(each), name.replace("model.llm", "model.language_model")
        if name.endswith("w13_weight"):
            values_of_stack = torch.cat([values_of_stack[:, ::2], values_of_stack[:, 1::2]], 1)
        found[called.replace("w13_weight", "gate_up_proj").replace("w2_weight", "down_proj")] = values_of_stack
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_soak(torch.float32)])
def test_transformers_makes_the_same_values_of_mini(tmp_path: Path, dtype: torch.dtype) -> None:
    """As it loads it in BF16 it rounds an amax in FP32, too; so there they are BF16 here."""
    source = tmp_path / "source"
    model = tiny(source, "inkling2_loop")
    values = inkling2_directories.code(source)
    if dtype == torch.bfloat16:
        tensors = load_file(source / "model.safetensors")
        tensors |= {name: tensors[name].bfloat16() for name in tensors if name.endswith("_amax")}
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
    theirs = type(model).from_pretrained(source, dtype=dtype).state_dict()
    run(source, tmp_path / "out", "hf", "keep", workers=1)
    ours = any_models.load_whole(type(model), tmp_path / "out").state_dict()
    for name, expected in in_memory(values).items():
        assert same_bits(theirs[name].bfloat16(), ours[name]), name
        assert dtype == torch.bfloat16 or torch.equal(theirs[name], expected), name


def test_transformers_keeps_the_codes_of_small_on_a_gpu_and_elsewhere_takes_them_for_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `verify` says. Whether it decodes is decided in `validate_environment`, which looks for a GPU."""
    model = tiny(tmp_path, "inkling2")
    values = in_memory(inkling2_directories.code(tmp_path))
    need_loader(tmp_path)
    rules = [found.rule for found in check(open_checkpoint(tmp_path), engine_named("transformers"))]
    assert any("takes codes for weights" in rule.text and not rule.fatal for rule in rules)
    elsewhere = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **settings: None)
    found = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    for name, expected in values.items():
        codes, scale = found[name].float(), found[f"{name}_scale_inv"]
        assert (found[name].dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
        assert torch.equal(codes.view(*scale.shape, 32) * scale.float()[..., None], expected.view(*scale.shape, 32))
        assert torch.equal(elsewhere[name].float(), codes)


@pytest.mark.parametrize("kind", first(1, KINDS))
def test_transformers_loads_an_export_of_it(tmp_path: Path, kind: str) -> None:
    """Its linears that are stored without `.weight` (`sconv.weight_proj`) are on the list of what is not quantized."""
    model = tiny(tmp_path / "source", kind)
    inkling2_directories.code(tmp_path / "source")
    any_models.export(tmp_path / "source", tmp_path / "out", "dynamic", "transformers")
    any_models.load_whole(type(model), tmp_path / "out")

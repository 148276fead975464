"""Google's own codes of Gemma (`quant_method: gemma`), decoded to BF16 by every command as by transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conversions
import gemma_directories
import pytest
import torch
from gemma_directories import OF_TEXT, PUBLISHED
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText
from transformers.integrations.gemma_quant import replace_with_quant_layers
from transformers.utils.quantization_config import GemmaQuantizationConfig

from precisionctl.checkpoints.chunks import read_rows, read_tensor
from precisionctl.checkpoints.decoded.gemma_codes import GemmaCodes
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensors, read_header
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, PrecisionError
from precisionctl.planning.make_plan import make_plan
from precisionctl.reports.inspect import describe
from precisionctl.untrusted import safe_patterns
from precisionctl.verify.compare import compare

UP = "model.layers.0.mlp.up_proj"
WORDS = "2-bit integers and 4-bit integers and 8-bit integers of gemma, read as bfloat16"


Made = tuple[Path, dict[str, Tensor]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A text model in codes, and its values."""
    directory = tmp_path_factory.mktemp("gemma")
    return directory, gemma_directories.make(directory, "gemma4-small", OF_TEXT)


def test_a_text_model_is_what_transformers_decodes_in_bf16_and_in_an_export(tmp_path: Path, small: Made) -> None:
    """Its embeddings for each layer have a scale for each part of a row."""
    source, values = small
    notes = conversions.run(source, tmp_path / "bf16", "hf", verify=True).notes
    assert "51 weights were " + WORDS + ". There is no way back to those codes." in notes
    assert any(note.startswith("110 scales of inputs, outputs or a KV cache") for note in notes)
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert len(values) == 51 and not any("scale" in name for name in found if "layer_scalar" not in name)
    for name, expected in values.items():
        assert torch.equal(found[name], expected), name
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert compare(open_checkpoint(source), open_checkpoint(tmp_path / "bf16")).equal
    assert describe(open_checkpoint(source))["precision"] == WORDS
    exports = [tmp_path / "of-codes", tmp_path / "of-values"]
    for path, export in zip((source, tmp_path / "bf16"), exports, strict=True):
        conversions.carry_out(Request.export(path, export, "vllm", "dynamic"))
    assert len({(export / "model.safetensors").read_bytes() for export in exports}) == 1


def test_a_model_with_towers_computes_what_it_computed_in_codes(tmp_path: Path) -> None:
    """As transformers loads the directory: so patterns, towers and what is no code are as there."""
    values = gemma_directories.make(tmp_path / "source", "gemma4", PUBLISHED)
    conversions.run(tmp_path / "source", tmp_path / "bf16", "hf")
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert {*values} > {name for name in found if "audio_tower" in name and name.endswith(".linear.weight")}
    for name, expected in values.items():
        assert torch.equal(found[name], expected), name
    logits = [
        AutoModelForImageTextToText.from_pretrained(tmp_path / name, dtype=torch.bfloat16)(torch.tensor([[5, 6, 7]]))
        for name in ("source", "bf16")
    ]
    assert torch.equal(*(each.logits for each in logits))


def test_how_rows_are_cut_does_not_matter(small: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precisionctl.checkpoints.decoded.base.PIECE", 300)
    reader, values = open_checkpoint(small[0]), small[1]
    for name in ("model.embed_tokens_per_layer.weight", f"{UP}.weight", "lm_head.weight"):
        assert torch.equal(read_tensor(reader, name), values[name])
        assert torch.equal(read_rows(reader, name, 31, 33), values[name][31:64])


def codes_of(
    directory: Path, quantization: dict[str, Any], module: str, dtype: torch.dtype = torch.uint8
) -> GemmaCodes:
    file = directory / "model.safetensors"
    save_file({f"{module}.weight": torch.zeros(2, 8, dtype=dtype), f"{module}.weight_scale": torch.ones(2, 1)}, file)
    places = {name: (file, tensor) for name, tensor in read_header(file).items()}
    return GemmaCodes(StoredTensors(places), {"quantization_config": {"quant_method": "gemma"} | quantization}, file)


@pytest.mark.parametrize(
    "own",
    [
        {"b": {"num_bits": 8}, "a": {"num_bits": 2}},
        {"a.*c": {"num_bits": 2}, "a": {"num_bits": 8}},
        {"a$": {"num_bits": 2}, "(x|b)[.]c": {"num_bits": 8}},
        {"a": {}, "b": {"num_bits": 2}},
        {"^b": {"num_bits": 2}},
        {r"a\.(?!b)": {"num_bits": 2}},
        None,
    ],
)
def test_the_pattern_that_counts_is_the_one_that_counts_in_transformers(tmp_path: Path, own: Any) -> None:
    said = {"num_bits": 4, "module_quant_configs": own}
    model = nn.Sequential()
    model.add_module("a", nn.Sequential())
    model.a.add_module("b", nn.Sequential())
    model.a.b.add_module("c", nn.Linear(64, 2))
    replace_with_quant_layers(model, GemmaQuantizationConfig(**said))
    codes = codes_of(tmp_path, said, "a.b.c", model.a.b.c.weight.dtype)
    assert codes.shapes["a.b.c.weight"] == (2, 64 // model.a.b.c.num_bits)


@pytest.mark.parametrize("pattern", [r"(.)\1", "(?i)a", "[[:alpha:]]", "(a{1000}){1001}", "a{e<=1}"])
def test_patterns_that_are_not_read_are_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(PrecisionError, match="the pattern .* cannot be read: .*, in `module_quant_configs`"):
        codes_of(tmp_path, {"module_quant_configs": {pattern: {"num_bits": 2}}}, "a.b.c")


def config(**changed: Any) -> dict[str, Any]:
    return {"module_quant_configs": {"x": {"num_bits": 2}}} | changed


SETTINGS: dict[str, tuple[dict[str, Any], type[PrecisionctlError], str]] = {
    "a wrong pattern": (config(module_quant_configs={"(": {}}), PrecisionError, "cannot be read: missing"),
    "a count too large": (config(module_quant_configs={"a{99999999999}": {}}), PrecisionError, "cannot be read: "),
    "a list of patterns": (config(module_quant_configs=["a"]), DamagedCheckpoint, "not an object of objects"),
    "a pattern of bits": (config(module_quant_configs={"a": 2}), DamagedCheckpoint, "not an object of objects"),
    "another key": (
        config(module_quant_configs={"a": {"bits": 2}}),
        PrecisionError,
        "'bits' in `module_quant_configs`",
    ),
    "three bits": (config(num_bits=3), PrecisionError, "`num_bits` 3"),
    "true bits": (config(module_quant_configs={"a": {"num_bits": True}}), PrecisionError, "`num_bits` True"),
    "bits in a list": (config(num_bits=[4]), PrecisionError, r"`num_bits` \[4\]"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_not_read_are_one_error(tmp_path: Path, case: str) -> None:
    said, error, match = SETTINGS[case]
    with pytest.raises(error, match=match):
        codes_of(tmp_path, said, "a.b.c")


def test_matching_may_take_seconds_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_patterns, "_MATCH", 0.1)
    with pytest.raises(PrecisionError, match="matching the pattern .* takes too long"):
        codes_of(tmp_path, config(module_quant_configs={"(a|aa)+!": {"num_bits": 2}}), "a" * 200)


def put(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    """Another tensor in the place of one, or none."""

    def changed(tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)
        tensors.update({} if tensor is None else {name: tensor})

    return changed


EMBEDDING = "model.embed_tokens"
HOSTILE: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "no scale": (put(f"{UP}.weight_scale", None), "no .*up_proj.weight_scale for its codes"),
    "a scale without codes": (put("a.weight_scale", torch.ones(2, 1)), "a.weight_scale is there, and no codes"),
    "a flat scale": (put(f"{UP}.weight_scale", torch.ones(96)), "are no codes of 4 bits with a scale for each row"),
    "scales of groups": (put(f"{UP}.weight_scale", torch.ones(96, 2)), "are no codes of 4 bits"),
    "a scale in BF16": (put(f"{UP}.weight_scale", torch.ones(96, 1).bfloat16()), "are no codes of 4 bits"),
    "a row more": (put(f"{UP}.weight_scale", torch.ones(97, 1)), "are no codes of 4 bits"),
    "no parts": (put(f"{EMBEDDING}.embedding_scale", torch.ones(250, 0)), "are no codes of 2 bits"),
    "uneven parts": (put(f"{EMBEDDING}.embedding_scale", torch.ones(250, 7)), "are no codes of 2 bits"),
    "flat codes": (put(f"{UP}.weight", torch.zeros(96, dtype=torch.uint8)), "are no codes of 4 bits"),
    "codes of nothing": (put(f"{UP}.weight", torch.zeros(96, 0, dtype=torch.uint8)), "are no codes of 4 bits"),
    "bytes of four bits in INT8": (put(f"{UP}.weight", torch.zeros(96, 32, dtype=torch.int8)), "no codes of 4 bits"),
    "bytes of eight bits in UINT8": (
        put("model.layers.0.per_layer_input_gate.weight", torch.zeros(16, 64, dtype=torch.uint8)),
        "are no codes of 8 bits",
    ),
    "codes of values": (put(f"{UP}.weight", torch.ones(96, 64)), "weight_scale is there, and no codes"),
    "an embedding in FP32": (put(f"{EMBEDDING}.embedding_quantized", torch.ones(250, 16)), "are no codes of 2 bits"),
    "an embedding twice": (put(f"{EMBEDDING}.weight", torch.ones(250, 64)), "as values, and as codes"),
    "a scale of NaN": (put(f"{UP}.weight_scale", torch.full((96, 1), torch.nan)), "infinite or NaN"),
    "codes twice as wide": (put(f"{UP}.weight", torch.zeros(96, 64, dtype=torch.uint8)), "sizes say"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_that_contradict_one_another_are_one_error(tmp_path: Path, small: Made, case: str) -> None:
    changed, match = HOSTILE[case]
    tensors = load_file(small[0] / "model.safetensors")
    changed(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((small[0] / "config.json").read_bytes())
    with pytest.raises(PrecisionctlError, match=match):
        reader = open_checkpoint(tmp_path)
        make_plan(reader, "hf")
        read_tensor(reader, f"{UP}.weight")

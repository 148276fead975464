"""Hugging Face directories: what transformers wrote is read; what lies is refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pico
import pytest
import torch
from conversions import run
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from precisionctl.architectures.families import to_hf_config
from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.chunks import read_tensor, write_rows
from precisionctl.checkpoints.hf_directory.huggingface_files import BIN, SAFETENSORS
from precisionctl.checkpoints.hf_directory.safetensors_file import make_header, read_header
from precisionctl.checkpoints.huggingface import HuggingFaceReader, HuggingFaceWriter, recognise
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.dtypes import DType
from precisionctl.errors import (
    CheckpointError,
    DamagedCheckpoint,
    PrecisionError,
    UnknownArchitecture,
    UnknownFormat,
    UnsafePickle,
)
from precisionctl.param import TensorSpec
from precisionctl.planning.make_plan import make_plan

INDEX, SINGLE = SAFETENSORS.index, SAFETENSORS.single


@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"])
def test_every_tensor_reads_as_transformers_has_it(tmp_path: Path, max_shard_size: str) -> None:
    model = pico.make_and_save(tmp_path, "llama-3", dtype=torch.bfloat16, max_shard_size=max_shard_size)
    reader = HuggingFaceReader(tmp_path)
    expected = model.state_dict()
    assert set(reader.specs) == set(expected)
    for name, values in expected.items():
        assert torch.equal(read_tensor(reader, name), values)


def test_headers_are_those_of_the_library(tmp_path: Path) -> None:
    """Our header over the same tensors, read by the library, and the library's read by us."""
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(5, dtype=torch.bfloat16), "scalar": torch.tensor(3.0)}
    specs = {name: TensorSpec(tuple(values.shape), DType.of(values.dtype)) for name, values in tensors.items()}
    header, offsets = make_header(specs)
    body = bytearray(sum(spec.nbytes for spec in specs.values()))
    for name, values in tensors.items():
        data = bytes(values.contiguous().view(-1).view(torch.uint8).numpy())
        begin = offsets[name] - len(header)
        body[begin : begin + len(data)] = data
    ours = tmp_path / "ours.safetensors"
    ours.write_bytes(header + body)
    loaded = load_file(ours)
    assert all(torch.equal(loaded[name], values) for name, values in tensors.items())
    theirs = tmp_path / "theirs.safetensors"
    save_file(tensors, theirs)
    assert {name: stored.spec for name, stored in read_header(theirs).items()} == specs


def test_a_writer_gives_what_transformers_loads(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    model = pico.make_and_save(source, "mistral", dtype=torch.float16)
    reader = HuggingFaceReader(source)
    target.mkdir()
    writer = HuggingFaceWriter(target, reader.specs, reader.companions, {}, max_shard_size=30_000)
    writer.lay_out()
    for name, spec in reader.specs.items():
        write_rows(writer, name, 0, read_tensor(reader, name).reshape(spec.rows, spec.columns))
    writer.finish(None)
    assert (target / INDEX).is_file()
    loaded = type(model).from_pretrained(target, dtype=torch.float16)
    for name, values in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], values)


def test_laying_out_again_keeps_what_is_there(tmp_path: Path) -> None:
    specs = {"w": TensorSpec((2, 2), DType.float32)}
    writer = HuggingFaceWriter(tmp_path, specs, Companions(), {"model_type": "llama"})
    writer.lay_out()
    write_rows(writer, "w", 0, torch.ones(2, 2))
    writer.lay_out()
    assert torch.equal(load_file(tmp_path / SINGLE)["w"], torch.ones(2, 2))


@pytest.mark.parametrize("values", [torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int16), np.zeros((2, 3), np.uint8)])
def test_values_of_another_dtype_or_size_are_never_written(tmp_path: Path, values: Any) -> None:
    specs = {"w": TensorSpec((2, 2), DType.bfloat16)}
    writer = HuggingFaceWriter(tmp_path, specs, Companions(), {"model_type": "llama"})
    writer.lay_out()
    with pytest.raises(AssertionError, match="`w`"):
        write_rows(writer, "w", 0, values)


def test_large_tensors_are_written_in_short_calls_and_each_goes_on_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.arange(600_001, dtype=torch.int32).reshape(1, -1)
    specs = {"x": TensorSpec((1, 600_001), DType.int32)}
    writer = HuggingFaceWriter(tmp_path, specs, Companions(), {"model_type": "llama"})
    writer.lay_out()
    asked = []

    def writes_less(file: int, data: memoryview, at: int) -> int:
        asked.append(len(data))
        return real(file, data[:400_003], at)

    real = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", writes_less)
        write_rows(writer, "x", 0, values)
    assert max(asked) == 1 << 20, "more costs a virtual machine several times the kernel's time"
    assert torch.equal(read_tensor(writer, "x"), values)


def test_an_unknown_directory_says_what_was_looked_for(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "notes"  # beside which no other test's folders look like a run
    directory.mkdir(parents=True)
    (directory / "notes.txt").write_text("hello")
    with pytest.raises(UnknownFormat, match=r"model\.safetensors"):
        open_checkpoint(directory)
    assert not recognise(directory)


def edit_index(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / INDEX
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard(directory: Path) -> Path:
    return sorted(directory.glob("*.safetensors"))[0]


def only_bin(directory: Path, content: str) -> None:
    for file in (*directory.glob("*.safetensors"), directory / INDEX):
        file.unlink()
    (directory / BIN.single).write_text(content)


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


def replace_header(directory: Path, header: bytes) -> None:
    shard(directory).write_bytes(len(header).to_bytes(8, "little") + header)


def lie(directory: Path, old: bytes, new: bytes) -> None:
    path = shard(directory)
    data = path.read_bytes()
    assert old in data and len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard that is a pipe": (
        lambda d: (file := shard(d)).unlink() or os.mkfifo(file),
        "not a file .*Download it again",
    ),
    "a missing shard": (lambda d: shard(d).unlink(), r"shard .* is missing.*Download it again"),
    "missing shards": (
        lambda d: [file.unlink() for file in d.glob("model-0000[12]-*")],
        r"2 of \d shards are missing: model-00001-of-\d{5}.safetensors, model-00002.*Download them again",
    ),
    "a truncated file": (lambda d: shard(d).write_bytes(shard(d).read_bytes()[:-10]), "Truncated"),
    "an empty file": (lambda d: shard(d).write_bytes(b""), "truncated"),
    "a header length of 2**62": (lambda d: shard(d).write_bytes((2**62).to_bytes(8, "little") + b"{}"), "truncated"),
    "a path out of the directory": (
        lambda d: edit_index(d, lambda i: i["weight_map"].update(x="../../etc/passwd")),
        "not the name of a file",
    ),
    "a tensor that is elsewhere": (
        lambda d: edit_index(d, lambda i: i["weight_map"].update(x=shard(d).name)),
        "`x` is in .* but it is not",
    ),
    "a shard that Git LFS did not fetch": (lambda d: shard(d).write_text(LFS_POINTER), "Git LFS.*git lfs pull"),
    "a .bin that Git LFS did not fetch": (lambda d: only_bin(d, LFS_POINTER), "Git LFS.*git lfs pull"),
    "two models": (lambda d: shutil.copy(shard(d), d / "model.safetensors"), "are two models"),
    "a stale index beside one file": (
        lambda d: shard(d).rename(d / "model.safetensors"),
        r"two models: .* whose model-00001-of-.* is missing .*Remove model.safetensors.index.json if",
    ),
    "a file that transformers alone reads": (
        lambda d: edit_config(d, transformers_weights="other.safetensors"),
        "transformers reads 'other.safetensors', and engines read model.safetensors",
    ),
    "an index without a map": (lambda d: edit_index(d, lambda i: i.clear()), "weight_map"),
    "a shard with a name too long for a file": (
        lambda d: edit_index(d, lambda i: i["weight_map"].update(x="y" * 300)),
        "shard y+ is missing",
    ),
    "a config that is no JSON": (lambda d: (d / "config.json").write_text("{"), "not readable as JSON"),
    "a config without sizes": (lambda d: (d / "config.json").write_text('{"model_type": "llama"}'), "no `num_hidden"),
    "sizes that are none": (lambda d: edit_config(d, num_attention_heads=0), "heads"),
    "a size that is a word": (
        lambda d: edit_config(d, num_hidden_layers="two"),
        "^num_hidden_layers is 'two', not a size",
    ),
    "groups that do not divide": (
        lambda d: edit_config(d, num_key_value_heads=3),
        r"4 heads in 3 query groups \(.*config\.json\)",
    ),
    "a vocabulary of terabytes": (lambda d: edit_config(d, vocab_size=10**13), "vocab_size is 10000000000000"),
    "a width under its own key": (lambda d: edit_config(d, intermediate_size=0), "^intermediate_size is 0, not a size"),
    "a number that is a word": (lambda d: edit_config(d, rms_norm_eps="abc"), "rms_norm_eps is 'abc'"),
    "a base that is a word": (lambda d: edit_config(d, rope_parameters=None, rope_theta="abc"), "rope_theta is 'abc'"),
    "a base that is none": (
        lambda d: edit_config(d, rope_parameters={"rope_theta": float("nan")}),
        "rope_theta is nan",
    ),
    "a window that is a word": (
        lambda d: edit_config(d, model_type="mistral", sliding_window="x"),
        "sliding_window is 'x'",
    ),
    "a family that is a list": (lambda d: edit_config(d, model_type=["llama"]), "model_type is .'llama'., not a name"),
    "rotary parameters that are a list": (
        lambda d: edit_config(d, rope_parameters=[1]),
        r"rope_parameters is \[1\], not an object",
    ),
    "rotary scaling without its factor": (lambda d: edit_config(d, rope_parameters={"type": "linear"}), "no `factor`"),
    "rotary scaling beside rotary parameters without it": (
        lambda d: edit_config(d, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        r"`rope_parameters` .* and `rope_scaling` .*yarn.* are not the same",
    ),
    "quantization that is a word": (lambda d: edit_config(d, quantization_config="abc"), "`quantization_config` is no"),
    "a map of lists": (lambda d: edit_index(d, lambda i: i["weight_map"].update(x=["y"])), "not the name of a file"),
    "a header too deep to parse": (lambda d: replace_header(d, b"[" * 100_000), "makes no sense"),
    "an unknown dtype": (lambda d: lie(d, b'"dtype":"BF16"', b'"dtype":"XX16"'), "makes no sense"),
    "a shape that lies": (lambda d: lie(d, b'"shape":[250,64]', b'"shape":[251,64]'), "bytes for BF16"),
    "offsets that overlap": (
        lambda d: lie(d, b'"data_offsets":[0,', b'"data_offsets":[2,'),
        "makes no sense|bytes for",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_error(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    pico.save(tmp_path, dtype=torch.bfloat16, max_shard_size="40KB")
    damage(tmp_path)
    with pytest.raises(DamagedCheckpoint, match=message):
        HuggingFaceReader(tmp_path)


ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
UNSUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "an activation": ("llama-3", {"hidden_act": "gelu"}),
    "a scaling of no known kind": (
        "llama-3",
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "half of the channels rotated": ("llama-3", {"partial_rotary_factor": 0.5}),
    "half of the channels beside another base": ("hunyuan", {"partial_rotary_factor": 0.5}),
    "half of the channels, whatever the kind of layer": ("gemma3", {"partial_rotary_factor": 0.5}),
    "some of the channels in one kind of layer": (
        "gemma4",
        {"rope_parameters": {"full_attention": ROTATED, "sliding_attention": {"rope_theta": 10000.0}}},
    ),
    "some of the channels in a window": (
        "gemma4",
        {"rope_parameters": {"full_attention": {"rope_theta": 10000.0}, "sliding_attention": ROTATED}},
    ),
    "groups of experts by their probabilities": ("mistral4", {"n_group": 2}),
    "heads of another size than those of the projections": ("mistral4", {"head_dim": 8}),
    "no causal mask": ("llama-3", {"is_causal": False}),
    "no causal mask, as null": ("gemma4", {"is_causal": None}),
    **{
        f"windows that {family} does not choose by a list": (family, {"layer_types": ["full_attention"] * 2, **changes})
        for family, changes in {
            "mixtral": {},
            "phi3-long": {},
            "starcoder2": {},
            "ministral3": {"sliding_window": 8},
            "qwen3-moe": {"use_sliding_window": True, "sliding_window": 8},
        }.items()
    },
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_that_would_become_another_one_is_refused(tmp_path: Path, name: str) -> None:
    family, changes = UNSUPPORTED[name]
    pico.save(tmp_path, family)
    edit_config(tmp_path, **changes)
    with pytest.raises(
        UnknownArchitecture, match="known here has|rotary scaling of type|is_causal is|channels have positions"
    ):
        make_plan(HuggingFaceReader(tmp_path), "megatron")


@pytest.mark.parametrize(
    ("family", "key", "word", "value"),
    [
        ("gpt2", "n_head", "num_attention_heads", 2),
        ("gpt-j", "n_layer", "num_hidden_layers", 1),
        ("ernie4-5-moe", "moe_k", "num_experts_per_tok", 2),
    ],
)
def test_another_word_for_a_key_must_not_say_otherwise(
    tmp_path: Path, family: str, key: str, word: str, value: int
) -> None:
    """transformers goes by the word, if it stands below the key."""
    config = pico.make_and_save(tmp_path, family).config.to_dict()
    edit_config(tmp_path, **{word: config[key]})
    before = HuggingFaceReader(tmp_path).model
    edit_config(tmp_path, **{word: value})
    assert getattr(AutoConfig.from_pretrained(tmp_path), key) == value
    with pytest.raises(DamagedCheckpoint, match=f"{word} is {value} and {key}, which is the same, {config[key]}"):
        HuggingFaceReader(tmp_path)
    edit_config(tmp_path, **{word: config[key]})
    assert HuggingFaceReader(tmp_path).model == before


def test_no_group_of_one_is_chosen_from_none(tmp_path: Path) -> None:
    """transformers chooses the first experts then, whatever their scores."""
    pico.save(tmp_path, "glm4-moe-lite")
    edit_config(tmp_path, n_group=1, topk_group=0)
    with pytest.raises(DamagedCheckpoint, match="topk_group is 0, of one group"):
        HuggingFaceReader(tmp_path)


@pytest.mark.parametrize("listed", [["full_attention"], ["full_attention", "linear_attention"]])
def test_a_list_of_layers_has_a_known_kind_for_each_where_no_window_is_said_too(tmp_path: Path, listed: Any) -> None:
    pico.save(tmp_path, "qwen3", num_hidden_layers=2)
    edit_config(tmp_path, layer_types=listed)
    error, said = (DamagedCheckpoint, "a list of 2 layers") if len(listed) == 1 else (UnknownArchitecture, "linear_")
    with pytest.raises(error, match=said):
        make_plan(HuggingFaceReader(tmp_path), "megatron")


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "default"}])
def test_rotary_scaling_that_both_sides_have_is_read(tmp_path: Path, scaling: dict[str, Any]) -> None:
    pico.save(tmp_path)
    edit_config(tmp_path, rope_parameters={**scaling, "rope_theta": 10000.0})
    assert HuggingFaceReader(tmp_path).model.rope_scaling == (scaling if "factor" in scaling else None)


def test_frequencies_that_are_kept_are_not_below_those_that_are_divided(tmp_path: Path) -> None:
    rope = pico.make_and_save(tmp_path, "llama-3").config.rope_parameters
    edit_config(tmp_path, rope_parameters={**rope, "low_freq_factor": 16.0, "high_freq_factor": 4.0})
    with pytest.raises(DamagedCheckpoint, match=r"low_freq_factor 16.0 above high_freq_factor 4.0"):
        HuggingFaceReader(tmp_path)


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_rotary_parameters_may_be_said_twice(tmp_path: Path, kind: str) -> None:
    """In the words of transformers 4 and of 5, as exports have them; transformers reads the same of both."""
    pico.save(tmp_path)
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0}
    edit_config(tmp_path, rope_parameters=scaling, rope_scaling={kind: "linear", "factor": 4.0}, rope_theta=20000.0)
    model = HuggingFaceReader(tmp_path).model
    assert (model.rotary_base, model.rope_scaling) == (20000.0, {"rope_type": "linear", "factor": 4.0})
    assert scaling.items() <= AutoConfig.from_pretrained(tmp_path).rope_parameters.items()


STRETCHED = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "changes", "dropped"),
    [
        ("gpt-oss", {"rope_parameters": {}}, ()),
        ("apertus", {"rope_parameters": {}}, ()),
        ("smollm3-window", {"use_sliding_window": False}, ()),
        ("smollm3-window", {"use_sliding_window": False}, ("layer_types",)),
        ("olmo3", {"original_max_position_embeddings": 8}, ()),
        (
            "gemma3",
            {"original_max_position_embeddings": 8, "rope_scaling": STRETCHED, "rope_theta": 1e4},
            ("rope_parameters",),
        ),
    ],
)
def test_transformers_computes_what_a_config_is_read_as(
    tmp_path: Path, family: str, changes: dict[str, Any], dropped: tuple[str, ...]
) -> None:
    """No rotary parameters are not those that are absent, and where kinds of layers have some of their own, an original
    context beside them is nobody's; a list of layers with a window outdoes a switch."""
    theirs = pico.make_and_save(tmp_path, family)
    edit_config(tmp_path, **changes)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: config[key] for key in config if key not in dropped}))
    model = HuggingFaceReader(tmp_path).model
    told = to_hf_config(model, "float32")
    ours = pico.as_its_config_says(type(theirs)(type(theirs.config)(**told)).eval())
    ours.load_state_dict(theirs.state_dict())
    read = pico.as_its_config_says(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())
    tokens = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, read(tokens).logits)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_numbers_that_are_no_values_are_not_taken_for_some(tmp_path: Path, dtype: torch.dtype) -> None:
    pico.save(tmp_path)
    stored = load_file(tmp_path / SINGLE)
    save_file({name: v.to(dtype) if "proj" in name else v for name, v in stored.items()}, tmp_path / SINGLE)
    with pytest.raises(PrecisionError, match=f"q_proj.weight` is {str(dtype).removeprefix('torch.')}"):
        make_plan(HuggingFaceReader(tmp_path), "megatron")


def save_bin(model: PreTrainedModel, directory: Path, *, shards: int = 1) -> None:
    """As transformers 4 saved without safetensors, sharded or not."""
    model.save_pretrained(directory)
    (directory / SINGLE).unlink()
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        assert "lm_head.weight" in state  # the same storage twice
    if shards == 1:
        torch.save(state, directory / BIN.single)
        return
    names = sorted(state)
    files = [BIN.shard(number, shards) for number in range(1, shards + 1)]
    for index, file in enumerate(files):
        torch.save({name: state[name] for name in names[index::shards]}, directory / file)
    weight_map = {name: files[index % shards] for index, name in enumerate(names)}
    (directory / BIN.index).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", ["llama-3", "llama-tied"])
def test_weights_that_torch_saved_are_read(tmp_path: Path, family: str, shards: int) -> None:
    model = pico.make(family, dtype=torch.bfloat16)
    save_bin(model, tmp_path, shards=shards)
    reader = open_checkpoint(tmp_path)
    assert isinstance(reader, HuggingFaceReader)
    assert reader.container == "bin"
    assert len(reader.files) == shards
    expected = model.state_dict()
    assert reader.specs.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(read_tensor(reader, name), values), name
    make_plan(reader, "megatron")


def test_safetensors_are_read_where_both_are_there(tmp_path: Path) -> None:
    model = pico.make_and_save(tmp_path)
    torch.save({"lm_head.weight": torch.zeros(1)}, tmp_path / BIN.single)
    reader = HuggingFaceReader(tmp_path)
    assert reader.container == "safetensors"
    assert torch.equal(read_tensor(reader, "lm_head.weight"), model.state_dict()["lm_head.weight"])


@pytest.mark.parametrize("largest", [5_000_000_000, 30_000])
def test_transformers_and_torch_load_bin_files_that_we_wrote(tmp_path: Path, largest: int) -> None:
    model = pico.make_and_save(tmp_path / "source", "llama-3", dtype=torch.bfloat16)
    reader = HuggingFaceReader(tmp_path / "source")
    target = tmp_path / "target"
    target.mkdir()
    writer = HuggingFaceWriter(target, reader.specs, reader.companions, {}, max_shard_size=largest, file_format=BIN)
    writer.lay_out()
    for name, spec in reader.specs.items():
        write_rows(writer, name, 0, read_tensor(reader, name).reshape(spec.rows, spec.columns))
    writer.finish(None)
    assert not list(target.glob("*.safetensors"))
    loaded = type(model).from_pretrained(target, dtype=torch.bfloat16).state_dict()
    for name, values in model.state_dict().items():
        assert torch.equal(loaded[name], values), name
    files = sorted(target.glob("*.bin"))
    assert (len(files) > 2) == (target / BIN.index).is_file() == (largest == 30_000)
    found = {name: values for file in files for name, values in torch.load(file, weights_only=True, mmap=True).items()}
    assert found.keys() == reader.specs.keys()


NO_WEIGHTS: dict[str, Any] = {
    "a list": [torch.ones(2)],
    "a number": {"lm_head.weight": 3},
    "a turned tensor": {"lm_head.weight": torch.ones(2, 3).t()},
    "a whole trainer": {"state_dict": {"lm_head.weight": torch.ones(2)}, "epoch": 3},
}


@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_a_bin_file_of_something_else_than_weights_is_refused(tmp_path: Path, name: str) -> None:
    pico.save(tmp_path)
    (tmp_path / SINGLE).unlink()
    torch.save(NO_WEIGHTS[name], tmp_path / BIN.single)
    with pytest.raises(CheckpointError, match="a dict of tensors|not a contiguous tensor|stored transposed"):
        HuggingFaceReader(tmp_path)


class Gadget:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def test_a_gadget_in_a_bin_file_does_not_run(tmp_path: Path) -> None:
    pico.save(tmp_path)
    (tmp_path / SINGLE).unlink()
    torch.save({"lm_head.weight": Gadget()}, tmp_path / BIN.single)
    with pytest.raises(UnsafePickle, match="system"):
        HuggingFaceReader(tmp_path)


def test_links_of_the_hubs_cache_are_followed_and_others_refused(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    pico.save(tmp_path / "made")
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "made").iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert "config.json" in HuggingFaceReader(snapshot).companions.files
    for name in (SINGLE, "config.json"):
        (tmp_path / "elsewhere").write_bytes((blobs / name).read_bytes())
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(DamagedCheckpoint, match="symbolic link"):
            HuggingFaceReader(snapshot)
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(blobs / name)


def test_a_megatron_checkpoint_in_the_hubs_cache_is_read_however_deep(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "made", "megatron")
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in (tmp_path / "made").rglob("*") if path.is_file())):
        link = snapshot / file.relative_to(tmp_path / "made")
        link.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blobs / str(number))
        up = "../" * (len(link.relative_to(snapshot).parts) + 1)
        link.symlink_to(f"{up}blobs/{number}")
    reader = open_checkpoint(snapshot)
    assert reader.specs and "config.json" in reader.companions.files
    (snapshot / "release" / ".metadata").unlink()
    (tmp_path / "elsewhere").write_bytes(b"")
    (snapshot / "release" / ".metadata").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="symbolic link"):
        open_checkpoint(snapshot)

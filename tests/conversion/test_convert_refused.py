"""What a conversion refuses before anything is written."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_files
import pico
import pytest
import torch
from conversions import run, tree
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands import hints
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import (
    CheckpointError,
    DamagedCheckpoint,
    DestinationExists,
    MissingTensor,
    OutputError,
    PrecisionError,
    RecipeError,
    ShapeMismatch,
    UnknownArchitecture,
    UnknownFormat,
    UnmappedTensor,
)
from precisionctl.param import Parallelism
from precisionctl.precision import PRESETS

CONTRADICTORY: dict[str, dict[str, Any]] = {
    "this result has none. Leave --te-version": {"to": "hf", "te_version": 1},
    "DeepSpeed needs FP32 masters": {
        "to": "hf",
        "container": "deepspeed-universal",
        "precision": "bf16",
        "te_version": 1,
    },
    "--grouped-columns is not for exports": {"to": "hf", "precision": "fp8", "grouped_columns": "role"},
    "not split for ranks": {"to": "hf", "parallelism": Parallelism(2)},
    "says how FP8 is made": {"to": "megatron", "recipe": PRESETS["fp8-delayed"]},
    "input scales of FP8 weights come from": {"to": "hf", "precision": "fp8", "drop_fp8_state": True},
    "codes of weights come from": {"to": "hf", "precision": "fp8", "drop_encodings": True},
    "not written as bin": {"to": "hf", "precision": "fp8", "container": "bin"},
    "both name the family": {
        "to": "hf",
        "precision": "fp8",
        "target": "vllm",
        "architecture": "llama",
        "reference": Path("of it"),
    },
    "is not what": {"to": "megatron", "precision": "fp8", "target": "vllm"},
    "^--scheme cannot be given without a target": {"to": "hf", "precision": "fp8", "scheme": "block"},
    "^--keep-misfits cannot be given without a target": {"to": "hf", "precision": "fp8", "keep_misfits": True},
    "^--expert-parallel cannot be given without a target": {"to": "hf", "precision": "bf16", "expert_parallel": True},
    "^--kv-cache, --tp cannot be given without a target": {"to": "megatron", "kv_cache": "fp8", "ranks": 2},
    "cannot be given for PyTorch": {"to": "hf", "precision": "fp8", "target": "te", "kv_cache": "fp8"},
    "is not written as torch_dist": {"to": "hf", "container": "torch_dist"},
    "choose what becomes codes": {"to": "hf", "precision": "bf16", "exclude": ("*",)},
    "has no scheme dynamic": {"to": "hf", "precision": "fp8", "target": "te", "scheme": "dynamic"},
    "block scaling keeps no state": {"to": "hf", "precision": "fp8", "target": "te", "recipe": PRESETS["fp8-block"]},
}


@pytest.mark.parametrize("message", CONTRADICTORY)
def test_options_that_contradict_one_another_are_refused(tmp_path: Path, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Request(tmp_path, tmp_path / "out", **CONTRADICTORY[message])


HINTS: dict[str, dict[str, Any]] = {
    "no payloads of Transformer Engine": {"grouped_columns": "role"},
    "a config.json of its own.*Leave --architecture out": {"architecture": "llama"},
    "max-shard-size is for Hugging Face's files": {"max_shard_size": 10_000_000},
    "of another model than the checkpoint's own config.json: rms_norm_eps, vocab_size": {"reference": Path("other")},
}


@pytest.mark.parametrize("message", HINTS)
def test_what_a_hugging_face_source_says_itself_is_not_to_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    pico.save(tmp_path / "other", rms_norm_eps=1e-3, vocab_size=pico.SIZES["vocab_size"] + 1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=message):
        plan_command(Request(tmp_path / "hf", tmp_path / "out", "megatron", **HINTS[message]))


def test_a_reference_of_the_same_model_changes_nothing_where_there_is_no_need_of_it(tmp_path: Path) -> None:
    for name in ("hf", "same"):
        pico.save(tmp_path / name, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "same" / "config.json").read_text())
    (tmp_path / "same" / "config.json").write_text(json.dumps(config | {"use_cache": False}))
    (tmp_path / "same" / "generation_config.json").write_text("{}")
    run(tmp_path / "hf", tmp_path / "out", "megatron")
    run(tmp_path / "hf", tmp_path / "with", "megatron", reference=tmp_path / "same")
    assert tree(tmp_path / "with") == tree(tmp_path / "out")
    plan_command(Request(tmp_path / "hf", tmp_path / "never", "megatron", reference=tmp_path / "hf"))


def test_weights_without_a_config_take_that_of_a_reference(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    (tmp_path / "weights").mkdir()
    shutil.copy(tmp_path / "hf" / "model.safetensors", tmp_path / "weights")
    with pytest.raises(UnknownFormat, match="no config.json beside them.*--reference"):
        run(tmp_path / "weights", tmp_path / "out", "megatron")
    pico.save(tmp_path / "other", dtype=torch.bfloat16, num_hidden_layers=1)
    with pytest.raises(UnmappedTensor, match="layers.1"):
        run(tmp_path / "weights", tmp_path / "out", "megatron", reference=tmp_path / "other")
    for to in ("hf", "megatron"):
        for name in ("hf", "weights"):
            notes = run(tmp_path / name, tmp_path / f"{name} {to}", to, "bf16", reference=tmp_path / "hf").notes
            said = [note for note in notes if "they are the reference's" in note]
            assert ["config.json" in note for note in said] == ([True] if name == "weights" else [])
        theirs, ours = (tree(tmp_path / f"{name} {to}") for name in ("hf", "weights"))
        assert theirs.keys() == ours.keys()
        assert all(theirs[file] == ours[file] for file in theirs if "manifest" not in file)
    said = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**said, "num_attention_heads": "four"}))
    with pytest.raises(DamagedCheckpoint, match="num_attention_heads is 'four'.*other/config.json"):
        run(tmp_path / "weights", tmp_path / "out", "megatron", reference=tmp_path / "other")


def changed(source: Path, to: Path, **changes: Any) -> Path:
    """The config.json of a model with changes, beside a tokenizer."""
    config = json.loads((source / "config.json").read_text())
    to.mkdir()
    (to / "config.json").write_text(json.dumps(config | changes))
    (to / "tokenizer.json").write_text("{}")
    return to


@pytest.mark.parametrize("family", ["llama-3", "t5"])
def test_a_tokenizer_is_taken_from_a_reference_of_the_same_model_alone(tmp_path: Path, family: str) -> None:
    """Also of a model without a table, whose keys say less."""
    if family == "t5":
        config = AutoConfig.for_model("t5", vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
        AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / "hf")
    else:
        pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    same = changed(tmp_path / "hf", tmp_path / "same", transformers_version="9", use_cache=False)
    run(tmp_path / "hf", tmp_path / "out", "hf", reference=same)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    for key in ("num_layers", "vocab_size") if family == "t5" else ("num_hidden_layers", "vocab_size"):
        other = changed(tmp_path / "hf", tmp_path / key, **{key: 3})
        with pytest.raises(RecipeError, match=f"another model than the checkpoint's own config.json: .*{key}"):
            run(tmp_path / "hf", tmp_path / "never", "hf", reference=other)


def test_a_reference_with_fewer_tokens_than_megatron_trained_takes_no_rows_away(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    shutil.rmtree(tmp_path / "megatron" / "release" / "precisionctl")
    tokens = pico.SIZES["vocab_size"]
    fewer = changed(tmp_path / "hf", tmp_path / "fewer", vocab_size=tokens - 6)
    with pytest.raises(RecipeError, match=f"vocab_size {tokens - 6} / {tokens}.*--trust-reference"):
        run(tmp_path / "megatron", tmp_path / "never", "hf", reference=fewer)
    run(tmp_path / "megatron", tmp_path / "told", "megatron", reference=fewer, trust_reference=True)


def test_an_error_names_the_config_json_that_was_read(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    states = deepspeed_files.states_of(load_file(tmp_path / "hf" / "model.safetensors"))
    deepspeed_files.save_universal(tmp_path / "alone", states)
    shutil.copytree(tmp_path / "alone", tmp_path / "run" / "global_step4_universal")
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    for inside in (tmp_path / "megatron").rglob("config.json"):
        inside.unlink()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    del config["hidden_size"]
    for place in ("hf", "run"):
        (tmp_path / place / "config.json").write_text(json.dumps(config))
    with pytest.raises(DamagedCheckpoint, match=r"no `hidden_size` \(\S*/run/config.json\)"):
        _ = open_checkpoint(tmp_path / "run" / "global_step4_universal").model
    hints = Hints(companions=read_companions(tmp_path / "hf"))
    for name in ("alone", "megatron"):
        with pytest.raises(DamagedCheckpoint, match=r"no `hidden_size` \(\S*/hf/config.json\)"):
            _ = open_checkpoint(tmp_path / name, hints=hints).model


def test_a_reference_without_a_config_or_of_another_model_is_refused(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    (found,) = (tmp_path / "megatron").rglob("config.json")
    found.unlink()
    with pytest.raises(RecipeError, match="the reference has no config.json"):
        plan_command(Request(tmp_path / "megatron", tmp_path / "out", "hf", reference=tmp_path / "megatron"))
    pico.save(tmp_path / "other", dtype=torch.bfloat16, num_key_value_heads=4, rope_theta=5.0)
    with pytest.raises(RecipeError, match="the reference is of another model"):
        plan_command(Request(tmp_path / "megatron", tmp_path / "out", "hf", reference=tmp_path / "other"))
    plan_command(Request(tmp_path / "megatron", tmp_path / "out", "hf", reference=tmp_path / "hf"))


@pytest.mark.parametrize("there", ["a tokenizer", "nothing", "a file"])
def test_a_reference_that_is_no_checkpoint_is_answered_with_what_a_reference_is(tmp_path: Path, there: str) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    if there == "a file":
        (tmp_path / "reference").write_text("{}")
    else:
        (tmp_path / "reference").mkdir()
    if there == "a tokenizer":
        (tmp_path / "reference" / "tokenizer.json").write_text("{}")
    with pytest.raises(UnknownFormat, match="--reference takes a Hugging Face directory .* config.json") as error:
        plan_command(Request(tmp_path / "hf", tmp_path / "out", "megatron", reference=tmp_path / "reference"))
    assert "Looked for" not in str(error.value)


def test_a_hugging_face_source_has_no_iterations(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="no iterations"):
        run(tmp_path / "hf", tmp_path / "out", "megatron", iteration=3)


@pytest.mark.parametrize("destination", ["x", "x.partial/inner"])
def test_a_source_in_the_way_of_what_is_written_is_refused(tmp_path: Path, destination: str) -> None:
    pico.save(tmp_path / "x.partial", dtype=torch.bfloat16)
    before = tree(tmp_path)
    for restart in (False, True):
        with pytest.raises(OutputError, match="overlap"):
            conversion = Request(tmp_path / "x.partial", tmp_path / destination, "megatron")
            execute(plan_command(conversion), restart=restart)
    assert tree(tmp_path) == before


def config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def add_tensor(directory: Path) -> None:
    stored = load_file(directory / "model.safetensors")
    stored["model.layers.0.mlp.router.bias"] = torch.zeros(3)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


REFUSED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "an unknown family": (
        lambda d: config(d, model_type="longcat_flash"),
        UnknownArchitecture,
        "unsupported architecture `longcat_flash`.*table of its family",
    ),
    "a tensor that nobody maps": (
        add_tensor,
        UnmappedTensor,
        r"1 unexpected\n  unexpected  model.layers.0.mlp.router.bias",
    ),
    "a missing tensor": (
        lambda d: config(d, mlp_bias=True),
        MissingTensor,
        r"6 missing\n .*mlp.gate_proj.bias  \(2\)",
    ),
    "more layers than tensors": (lambda d: config(d, num_hidden_layers=4000), MissingTensor, "only 21 tensors"),
    "a billion layers": (lambda d: config(d, num_hidden_layers=10**9), DamagedCheckpoint, "1000000000, not a size"),
    "sizes that contradict": (lambda d: config(d, intermediate_size=112), ShapeMismatch, "the model's sizes say"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    change, error, message = REFUSED[name]
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    change(tmp_path / "hf")
    before = tree(tmp_path / "hf")
    with pytest.raises(error, match=message):
        run(tmp_path / "hf", tmp_path / "out", "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert tree(tmp_path / "hf") == before


def file(path: Path) -> None:
    path.write_text("mine")


def filled(path: Path) -> None:
    path.mkdir()
    file(path / "mine")


def linked(path: Path) -> None:
    path.with_name("elsewhere").mkdir()
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("make", [file, filled, linked])
def test_a_destination_that_exists_is_left_alone(tmp_path: Path, make: Callable[[Path], None]) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    make(tmp_path / "out")
    before = tree(tmp_path)
    with pytest.raises(DestinationExists):
        run(tmp_path / "hf", tmp_path / "out", "megatron")
    assert tree(tmp_path) == before


def test_an_empty_directory_is_welcome_and_stays_empty_until_the_result_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    out = tmp_path / "out"
    out.mkdir()
    renamed = []

    def rename(source: Path, target: Path) -> None:
        if Path(source).is_dir():  # small files are renamed too
            renamed.append((Path(source).name, list(Path(target).iterdir())))
        os.replace(source, target)

    monkeypatch.setattr("precisionctl.checkpoints.output.os.rename", rename)
    run(tmp_path / "hf", out, "megatron")
    assert renamed == [("out.partial", [])]
    assert (out / "latest_checkpointed_iteration.txt").is_file()


def test_where_a_disk_is_mounted_nothing_can_be_renamed_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("precisionctl.checkpoints.output.os.path.ismount", lambda path: path == tmp_path / "out")
    with pytest.raises(DestinationExists, match="mounted.*Choose a directory in it"):
        run(tmp_path / "hf", tmp_path / "out", "megatron")


def test_what_comes_to_be_at_the_destination_meanwhile_is_left_alone_and_the_work_kept(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    work = plan_command(Request(tmp_path / "hf", tmp_path / "out", "megatron"))

    def someone_writes(_count: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        file(tmp_path / "out" / "mine")

    with pytest.raises(DestinationExists):
        execute(work, on_bytes=someone_writes)
    assert tree(tmp_path / "out") == {"mine": b"mine"}
    shutil.rmtree(tmp_path / "out")
    run(tmp_path / "hf", tmp_path / "out", "megatron")


def test_shapes_that_fp8_gemms_do_not_take_are_refused(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, intermediate_size=100)
    with pytest.raises(PrecisionError, match="multiples of 16"):
        run(tmp_path / "hf", tmp_path / "out", "megatron", precision="fp8")


def test_of_a_config_with_too_few_layers_that_is_said_and_not_that_a_table_lacks_a_row(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, num_hidden_layers=3)
    config(tmp_path / "hf", num_hidden_layers=2)
    with pytest.raises(UnmappedTensor) as refused:
        run(tmp_path / "hf", tmp_path / "out", "megatron")
    told = "by config.json there are 2 layers `model.layers.*`, and 9 tensors are of later ones"
    assert told in refused.value.do and "architectures" not in refused.value.do
    config(tmp_path / "hf", num_hidden_layers=3)
    add_tensor(tmp_path / "hf")  # of no later layer
    with pytest.raises(UnmappedTensor) as refused:
        run(tmp_path / "hf", tmp_path / "out", "megatron")
    first, _, last = refused.value.do.partition("? ")
    assert first.endswith("or a part of this one") and "precisionctl/architectures/" in last


@pytest.mark.parametrize("ranks", [5, 8])  # 8 divides all sizes of 4 heads, and Megatron starts no such run
def test_a_tensor_parallel_size_that_heads_do_not_fit_is_refused(ranks: int, tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    with pytest.raises(ShapeMismatch, match=f"4 heads in 2 .* among {ranks} tensor-parallel ranks") as refused:
        run(tmp_path / "hf", tmp_path / "out", "megatron", parallelism=Parallelism(ranks))
    assert refused.value.where == str(tmp_path / "hf")


def test_a_tensor_parallel_size_that_the_mlp_does_not_fit_is_refused(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, intermediate_size=90)
    with pytest.raises(ShapeMismatch, match=r"layers\.\*\.mlp\.linear_fc1.* into 4 tensor-parallel parts"):
        run(tmp_path / "hf", tmp_path / "out", "megatron", parallelism=Parallelism(4))


@pytest.mark.parametrize("layout", ["hf", "megatron"])
def test_a_checkpoint_is_opened_once_though_a_reference_is_given(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    opened: list[Path] = []

    def counted(path: Path, *given: Any, **named: Any) -> Any:
        opened.append(path)
        return open_checkpoint(path, *given, **named)

    monkeypatch.setattr(hints, "open_checkpoint", counted)
    reader = hints.open_hinted(tmp_path / layout, reference=tmp_path / "hf")
    assert opened == [tmp_path / layout] and reader.companions is reader.own_companions

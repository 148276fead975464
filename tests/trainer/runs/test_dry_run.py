"""`resume --dry-run` refuses what `resume` refuses before it reads data and weights, and says if checkpoints fit; what
a refused run leaves behind."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pico import save as save_pico
from training import contents, make_place, make_source, run, settings

from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.errors import DataError, DiskProblem, PrecisionctlError, RecipeError
from precisionctl.reports import run as report
from precisionctl.sizes import size
from precisionctl.trainer import run_plan
from precisionctl.trainer.measure.metrics import FILE, read_metrics
from precisionctl.trainer.preflight import checkpoint_bytes
from precisionctl.trainer.run_plan import dry_run
from precisionctl.trainer.settings import Settings


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of two steps in it, and a checkpoint without a tokenizer."""
    folder = make_place(tmp_path_factory.mktemp("dry"))
    save_pico(folder / "bare", vocab_size=80)
    config = make_source(folder / "unknown") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "unheard_of"}))
    make_source(folder / "odd", intermediate_size=72)
    run(settings(folder / "source", folder / "text.txt", folder / "run", train__steps=2))
    return folder


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "graphs": ({"train__graphs": True}, "this run is emulated"),
    "steps": ({"source": "run", "out": "on", "train__steps": 2}, "is at step 2, and train.steps is 2"),
    "optimizer": ({"load": "full"}, "no optimizer state"),
    "folder": ({"out": "."}, "where the checkpoint itself is"),
    "file": ({"out": "text.txt"}, "this is a file"),
    "another run": ({"out": "run", "train__steps": 2, "optimizer__lr": 0.5}, r"differs in optimizer\.lr"),
    "no data": ({"data": "nowhere.txt"}, "no such file"),
    "no held-out data": ({"data__held_out": "nowhere.txt"}, "no such file"),
    "no data, before the model is looked at": ({"source": "unknown", "data": "nowhere.txt"}, "no such file"),
    "no held-out data, before": ({"source": "unknown", "data__held_out": "nowhere.txt"}, "no such file"),
    "no tokenizer": ({"source": "bare"}, "the checkpoint has no tokenizer"),
    "model": ({"source": "unknown"}, "unheard_of"),
    "sizes": ({"source": "odd", "precision": "fp8"}, "multiples of 16"),
    "sizes of amaxes": ({"source": "odd", "collect_amax": True}, "multiples of 16"),
    "rows": ({"data__sequence_length": 1000}, "beyond the model's"),
    "layers": ({"precision__num_layers_at_start_in_bf16": 2}, "leave none of 2"),
    "ranks": ({"parallel__tensor": 2}, "cannot hold"),
}


def asked(place: Path, changes: dict[str, Any]) -> Settings:
    fields = {"source": "source", "data": "text.txt", "out": "new", **changes}
    source, data, out = (place / fields.pop(name) for name in ("source", "data", "out"))
    return settings(source, data, out, **fields)


def test_a_tokenizer_that_is_missing_comes_from_the_reference_and_what_is_there_does_not(place: Path) -> None:
    source, reference = place / "bare", shutil.copytree(place / "source", place / "reference")
    config = json.loads((reference / "config.json").read_text())
    (reference / "config.json").write_text(json.dumps(config | {"use_cache": False}))
    asked_for = asked(place, {"source": "bare", "reference": reference})
    files = dry_run(asked_for).plan.source.companions.files
    assert files["tokenizer.json"] == (reference / "tokenizer.json").read_bytes()
    assert files["config.json"] == (source / "config.json").read_bytes()
    whole = dry_run(asked(place, {"reference": reference})).plan.source.companions.files
    assert whole["config.json"] == (place / "source" / "config.json").read_bytes()
    (reference / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    with pytest.raises(RecipeError, match="another model than the checkpoint.s own config.json: vocab_size"):
        dry_run(asked_for)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_run_refuses_before_it_reads_data_and_weights_a_dry_run_refuses_alike(place: Path, name: str) -> None:
    changes, words = REFUSED[name]
    before = contents(place)
    with pytest.raises(PrecisionctlError, match=words) as dry:
        dry_run(asked(place, changes))
    assert contents(place) == before
    with pytest.raises(type(dry.value), match=words) as real:
        run(asked(place, changes))
    assert (real.value.what, real.value.where) == (dry.value.what, dry.value.where)


def test_a_dry_run_of_a_run_that_goes_on_says_where(place: Path) -> None:
    dry = dry_run(asked(place, {"out": "run", "train__steps": 2, "train__save_every": 1}))
    assert (dry.continues, dry.step, dry.disk.more) == (True, 2, 0)


@pytest.mark.parametrize("skip", [(), ("optimizer",)])
def test_a_dry_run_says_of_what_is_loaded_what_the_run_says(place: Path, tmp_path: Path, skip: tuple[str, ...]) -> None:
    asked_for = asked(place, {"source": "run", "out": tmp_path / "on", "train__steps": 3, "skip": skip})
    dry, begun = report.dry_run(dry_run(asked_for)), report.beginning(run(asked_for)[0])
    assert dry[0] == begun[0]
    (rates,) = [line for line in dry if line.startswith("learning rates: ")]
    assert rates in begun and f"{[*read_metrics(tmp_path / 'on' / FILE)][0]['lr']:.2e} in step 3" in rates
    left_behind = "the checkpoint's optimizer state is left behind"
    assert (left_behind in dry) == (left_behind in begun) == bool(skip)


def test_a_run_that_is_refused_for_its_data_leaves_nothing_and_an_older_folder_as_it_was(
    place: Path, tmp_path: Path
) -> None:
    (tmp_path / "few.txt").write_text("w1 w2 w3")
    for name, files in {"new": [], "old": ["kept.txt"]}.items():
        for file in files:
            (tmp_path / name).mkdir()
            (tmp_path / name / file).touch()
        made = settings(place / "source", tmp_path / "few.txt", tmp_path / name)
        with pytest.raises(DataError, match=r"4 tokens are fewer than the \d+ of one row"):
            run(replace(made, overrides=("data.sequence_length=32",)))  # its tokens are in the run's folder
        assert (tmp_path / name).exists() == bool(files)
        assert all((tmp_path / name / file).exists() for file in files)


def test_a_checkpoint_takes_what_its_tensors_take(place: Path) -> None:
    """Held to the files that a run has written, where each tensor is an archive of its own."""
    plan = dry_run(asked(place, {})).plan
    each = checkpoint_bytes(plan.source, plan.recipe.optimizer)
    specs = TorchDistReader(place / "run", 2).specs.values()
    parameters = sum(spec.rows * spec.columns for spec in specs)
    assert each == (2 + 3 * 4) * parameters
    stored = sum(file.stat().st_size for file in (place / "run/iter_0000002").glob("*.distcp"))
    assert each < stored < each + 200_000


def with_free(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(free)))


def test_a_run_without_room_for_one_checkpoint_is_refused_before_its_data_is_read(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = dry_run(asked(place, {})).disk.each
    with_free(monkeypatch, each - 1)
    with pytest.raises(
        DiskProblem, match=rf"takes {size(each)}, and {size(each - 1)} are free.*Make room for 1 B more"
    ):
        run(asked(place, {"out": tmp_path / "run", "data": "source/model.safetensors"}))  # which is no text
    dry = dry_run(asked(place, {"out": tmp_path / "run"}))
    assert "It does not fit. Make room, or choose another --out." in report.dry_run(dry)
    started, *_ = run(asked(place, {"out": "run", "train__steps": 2}))  # it has ended, and writes none
    assert started.step == 2


@pytest.mark.parametrize(
    ("out", "keep", "free", "warned"),
    [("new", 2, 3, None), ("new", 2, 2.9, 3), ("new", 1, 1.9, 2), ("run", 2, 2, None), ("run", 2, 1.9, 2)],
)
def test_room_for_fewer_than_are_kept_and_one_is_a_warning(
    place: Path, monkeypatch: pytest.MonkeyPatch, out: str, keep: int, free: float, warned: int | None
) -> None:
    """In `run` there is one already, and it stays among those that are kept."""
    changes = {"out": out, "train__keep": keep, "train__steps": 9, "schedule__kind": "constant"}
    monkeypatch.setattr(run_plan, "run_in_folder", lambda plan: None)
    each = dry_run(asked(place, changes)).disk.each
    with_free(monkeypatch, free * each)
    dry = dry_run(asked(place, changes))
    lines = [line for line in report.dry_run(dry) if "at a time" in line]
    assert [line.split()[0] for line in lines] == ([str(warned)] if warned else [])


def test_a_run_says_at_its_start_what_its_checkpoints_take(place: Path, tmp_path: Path) -> None:
    started, *_ = run(asked(place, {"out": tmp_path / "run", "train__steps": 1}))
    assert any(line.startswith("Disk: a checkpoint takes ") for line in report.beginning(started))

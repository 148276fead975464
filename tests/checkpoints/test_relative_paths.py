"""A checkpoint that is opened from inside its directory is the same as from outside."""

import json
from collections.abc import Callable
from pathlib import Path

import dist_checkpoints
import orbax_files
import pytest
import torch
import verl_files
import yaml
from trained_models import save

from precisionctl.checkpoints.megatron.carried_run import CarriedRun
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import PrecisionctlError
from precisionctl.paths import above, own_name


def release(path: Path) -> Path:
    """Which no iteration is, whatever its common data say."""
    dist_checkpoints.write(path / "release", dist_checkpoints.values(dist_checkpoints.specs()), run=CarriedRun(7))
    return path / "release"


def weights_of_nemo(path: Path) -> Path:
    """NeMo 2 has the description beside `weights`."""
    dist_checkpoints.write(path / "weights", dist_checkpoints.values(dist_checkpoints.specs()), run=CarriedRun(7))
    (path / "context").mkdir()
    (path / "context" / "model.yaml").write_text(yaml.safe_dump({"config": {"num_layers": 3}}))
    return path / "weights"


def items(path: Path) -> Path:
    """MaxText's, of step 7."""
    (path / "config.json").write_text(json.dumps({"model_type": "nobodys"}))
    return orbax_files.write(path / "7" / "items", {"params.params.a.kernel": torch.ones(4, 4)})


def actor(path: Path) -> Path:
    weights = {"model.embed_tokens.weight": torch.ones(4, 4)}
    return verl_files.save(path / "global_step_5" / "actor", weights, {"exp_avg": weights, "exp_avg_sq": weights}, 1)


def stopped(path: Path) -> Path:
    """A save of NeMo Automodel that was stopped."""
    save(path / "model", {"model.embed_tokens.weight": torch.ones(4, 4)})
    (path / ".incomplete").touch()
    return path / "model"


def model_weights(path: Path) -> Path:
    """Those of NeMo 1, without what describes them."""
    (path / "model_weights").mkdir()
    (path / "model_config.yaml").write_text("")
    return path / "model_weights"


def read(path: Path) -> object:
    """What depends on the names of directories."""
    try:
        reader = open_checkpoint(path)
        return reader.iteration, getattr(reader, "args", None), sorted(reader.companions.files), sorted(reader.specs)
    except PrecisionctlError as error:
        return error.what


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", [release, weights_of_nemo, items, actor, stopped, model_weights])
def test_where_a_command_runs_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path]
) -> None:
    made = make(tmp_path)
    wanted = read(made)
    for folder in (made, *made.parents):
        monkeypatch.chdir(folder)
        assert read(made.relative_to(folder)) == wanted, folder
        if folder == tmp_path:
            break
    (made / "inside").mkdir()
    monkeypatch.chdir(made / "inside")
    assert read(Path("..")) == wanted


def test_the_name_of_a_directory_and_what_is_above_it_are_known_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert [own_name(Path(path)) for path in (".", "..", "c", "c/d")] == ["b", "a", "c", "d"]
    assert [str(above(Path(path))) for path in (".", "..", "c", "c/d")] == ["..", "../..", ".", "c"]

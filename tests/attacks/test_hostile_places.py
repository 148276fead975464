"""What lies in wait where we write: links, pipes and folders in the place of locks, journals, logs and parts of output.
Nothing is written to, or emptied, that they lead to."""

import os
from collections.abc import Callable
from pathlib import Path

import pico
import pytest
import torch
from training import run, settings

from precisionctl.checkpoints.megatron.keys import TRACKER as LATEST, write_tracker
from precisionctl.checkpoints.output import Output, open_kept, replace_file, write_then_rename
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.conversion.journal import open_journal, open_share_journal
from precisionctl.errors import DamagedCheckpoint, DataError, OutputError
from precisionctl.export.model_card import write_quality
from precisionctl.trainer.measure.metrics import FILE as METRICS
from precisionctl.trainer.rollback import Rollback, read_rollback, write_rollback

TARGET = b"somebody else's\n"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file of somebody else's."""
    path = tmp_path / "elsewhere"
    path.write_bytes(TARGET)
    return path


WAITING: dict[str, Callable[[Path], object]] = {
    "a link": lambda path: path.symlink_to(path.parent / "elsewhere"),
    "a link to nothing": lambda path: path.symlink_to(path.parent / "nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("waiting", WAITING)
def test_what_lies_in_the_place_of_a_lock_or_a_journal_is_left_alone(
    tmp_path: Path, target: Path, waiting: str
) -> None:
    output = Output(tmp_path / "out")
    WAITING[waiting](output.journal)
    output.partial.mkdir()
    output.token.write_text("of the first rank's journal")
    WAITING["a link" if waiting == "a link to itself" else waiting](tmp_path / "lock")
    WAITING[waiting](output.share_journal(1))
    with (
        pytest.raises(OutputError, match="a link, a folder or a device"),
        open_journal(output, "plan", [], ranks=1, restart=False),
    ):
        pass
    with pytest.raises(OutputError, match="a link, a folder or a device"), open_share_journal(output, 1):
        pass
    with pytest.raises(OutputError, match="a link, a folder or a device"):
        open_kept(tmp_path / "lock")
    assert target.read_bytes() == TARGET
    assert not (tmp_path / "nothing").exists()


def test_opening_a_log_empties_nothing(target: Path) -> None:
    with open_kept(target) as file:
        assert target.read_bytes() == TARGET
        file.write("a line\n")
    assert target.read_bytes() == TARGET + b"a line\n"


def test_a_small_file_is_replaced_and_never_written_through(tmp_path: Path, target: Path) -> None:
    for name in ("a", "a.new"):
        (tmp_path / name).symlink_to(target)
    replace_file(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new" and not (tmp_path / "a").is_symlink()
    (tmp_path / "a.new").symlink_to(target)
    write_then_rename(tmp_path / "a", lambda path: path.write_text("newer"))
    assert (tmp_path / "a").read_text() == "newer" and target.read_bytes() == TARGET
    for name in (LATEST, f"{LATEST}.new", "rollback.json.new"):
        (tmp_path / name).symlink_to(target)
    write_tracker(tmp_path, 7)
    write_rollback(tmp_path, Rollback(1, None, 1.0, 0.1, 0))
    assert (tmp_path / LATEST).read_text() == "7" and read_rollback(tmp_path) is not None
    assert target.read_bytes() == TARGET


def test_a_tracker_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda handle: (did.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle)))
    monkeypatch.setattr(os, "rename", lambda old, new: (did.append("rename"), rename(old, new)))
    write_tracker(tmp_path, 7)
    assert did == [str(tmp_path / f"{LATEST}.new"), "rename", str(tmp_path)]


def test_a_conversion_does_not_write_into_a_linked_folder(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_bytes(TARGET)
    (tmp_path / "out.partial").symlink_to(tmp_path / "elsewhere")
    for restart in (False, True):
        with pytest.raises(OutputError, match="a link, a folder or a device"):
            execute(plan_command(Request(tmp_path / "hf", tmp_path / "out", "megatron")), restart=restart)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["kept"]


def test_a_run_does_not_follow_links_in_its_folder(place: Path, tmp_path: Path, target: Path) -> None:
    for name, error in (("run.lock", OutputError), (METRICS, DataError)):
        out = tmp_path / f"run-{name}"
        out.mkdir()
        (out / name).symlink_to(target)
        with pytest.raises(error):
            run(settings(place / "source", place / "text.txt", out))
        assert target.read_bytes() == TARGET


@pytest.mark.parametrize("waiting", ["a link", "a pipe", "a linked folder"])
@pytest.mark.parametrize("place", ["config.json", "release/common.pt", "precisionctl/manifest.json"])
def test_a_conversion_that_goes_on_writes_through_nothing_that_was_put_into_its_partial_result(
    tmp_path: Path, target: Path, waiting: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    request = Request(tmp_path / "hf", tmp_path / "out", "megatron")
    monkeypatch.setattr(Output, "commit", lambda self, **how: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        execute(plan_command(request), workers=1)
    monkeypatch.undo()
    planted = tmp_path / "out.partial" / place
    planted.parent.mkdir(exist_ok=True)
    planted.unlink(missing_ok=True)
    if waiting == "a linked folder":
        planted.symlink_to(tmp_path)
    elif waiting == "a link":
        planted.symlink_to(target)
    else:
        os.mkfifo(planted)
    with pytest.raises(OutputError):
        execute(plan_command(request), workers=1)
    assert target.read_bytes() == TARGET and not (tmp_path / "out").exists()


def test_the_card_that_quality_is_written_into_is_not_read_through_a_link(tmp_path: Path, target: Path) -> None:
    target.write_text("<!-- quality -->\nsecret\n<!-- /quality -->\n")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "README.md").symlink_to(target)
    with pytest.raises(DamagedCheckpoint, match="leads out"):
        write_quality(tmp_path / "export", ["KL 0"])

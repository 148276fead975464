"""What `datasets` reads as a source of data: the rows that a file of ours has, at one commit, and nothing else."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import huggingface_hub
import local_hub
import pytest
from conversations import CONVERSATION, MARKING_TEMPLATE, tokenizer, write_rows
from huggingface_hub import constants
from local_hub import COMMIT, LocalHub

from precisionctl import errors
from precisionctl.errors import DataError, EnvironmentProblem
from precisionctl.trainer.data import Rows, load_rows
from precisionctl.trainer.data.find import source_of
from precisionctl.trainer.data.hf_datasets import HfDataset

TEXTS: list[dict[str, Any]] = [{"text": " ".join("abcde"[(i * j) % 5] for j in range(1 + i % 7))} for i in range(40)]
CHATS: list[dict[str, Any]] = [{"messages": CONVERSATION}, {"messages": CONVERSATION[:2]}]
NAME = "hf://datasets/org/words"
CARD = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
- config_name: chats
  data_files:
  - {split: train, path: chats/*}
- config_name: elsewhere
  data_files:
  - {split: train, path: OUTSIDE}
---
"""


def test_without_the_library_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="needs datasets, which is not installed") as raised:
        source_of(NAME)
    assert raised.value.do == "pip install 'precisionctl[datasets]'"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (NAME, (NAME, None, None, "train")),
        (f"{NAME}:test", (NAME, None, None, "test")),
        (f"{NAME}@refs/pr/1:chats:test", (NAME, "refs/pr/1", "chats", "test")),
    ],
)
def test_a_name_says_data_set_revision_configuration_and_split(text: str, parts: tuple[str | None, ...]) -> None:
    assert HfDataset.read(text) == HfDataset(*parts)  # type: ignore[arg-type]


def test_a_path_with_a_colon_is_a_path_and_half_a_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    assert HfDataset.read(f"{tmp_path}/texts:train") == HfDataset(f"{tmp_path}/texts", None, None, "train")
    (tmp_path / "texts:train").write_text("a b")
    assert HfDataset.read(f"{tmp_path}/texts:train") is None
    with pytest.raises(DataError, match="not the name of a data set") as refused:
        HfDataset.read("hf://datasets/words:train")
    assert "DIRECTORY:" in refused.value.do


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHub]:
    """A Hub with a data set of texts and chats, and beside it what `save_to_disk` writes."""
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("hub")
    words = folder / "datasets" / "org" / "words"
    (words / "data").mkdir(parents=True)
    (words / "chats").mkdir()
    texts = datasets.Dataset.from_list([{**row, "url": "x"} for row in TEXTS])
    texts.select(range(20)).to_parquet(words / "data" / "train-00000-of-00002.parquet")
    texts.select(range(20, 40)).to_parquet(words / "data" / "train-00001-of-00002.parquet")
    texts.select(range(10)).to_parquet(words / "data" / "test-00000-of-00001.parquet")
    datasets.Dataset.from_list(CHATS).to_parquet(words / "chats" / "a.parquet")
    (words / "README.md").write_text(CARD.replace("OUTSIDE", str(folder / "secret.txt")))
    (folder / "secret.txt").write_text("a b c")
    datasets.DatasetDict({"train": texts, "test": texts.select(range(10))}).save_to_disk(folder / "saved")
    with local_hub.local_hub(folder) as hub:
        yield hub


@pytest.fixture
def client(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalHub:
    """The client of this process is one whose environment has this server, and a cache of its own."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    huggingface_hub.close_session()
    huggingface_hub.HfFileSystem.clear_instance_cache()
    hub.fetched.clear()
    return hub


def rows_of(data: str | Path, cache: Path | None = None) -> Rows:
    return load_rows(data, tokenizer(MARKING_TEMPLATE), 8, cache=cache)


@pytest.mark.parametrize(
    ("place", "split", "rows"),
    [
        ("datasets/org/words", "train", TEXTS),
        ("datasets/org/words", "test", TEXTS[:10]),
        ("datasets/org/words", "chats:train", CHATS),
        ("saved", "test", TEXTS[:10]),
        ("saved", "test#url", [{"text": "x"}] * 10),
        ("datasets/org/words", "train#url", [{"text": "x"}] * 40),
    ],
)
def test_a_split_of_a_directory_is_what_a_file_with_its_rows_is(
    hub: LocalHub, tmp_path: Path, place: str, split: str, rows: list[dict[str, Any]]
) -> None:
    expected = rows_of(write_rows(tmp_path / "rows.jsonl", rows))
    assert rows_of(f"{hub.folder / place}:{split}").fingerprint == expected.fingerprint


def test_rows_of_the_hub_without_a_known_key_are_said_with_those_that_they_have(client: LocalHub) -> None:
    assert rows_of(f"{NAME}:test#url").fingerprint != rows_of(f"{NAME}:test").fingerprint
    with pytest.raises(DataError, match="a row without `body`: it has `text`, `url`"):
        rows_of(f"{NAME}:test#body")


def test_a_run_that_goes_on_has_the_commit_of_its_beginning_and_asks_the_hub_nothing(
    client: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, expected = tmp_path / "tokens", rows_of(write_rows(tmp_path / "rows.jsonl", TEXTS))
    first = rows_of(NAME, cache)
    assert first.fingerprint == expected.fingerprint
    assert first.notes == (f"{NAME}:train is read at {COMMIT}",)
    assert json.loads((cache / "commits.json").read_bytes()) == {f"{NAME}@main": COMMIT}
    client.fetched.clear()
    monkeypatch.setattr("datasets.load_dataset_builder", None)
    assert rows_of(NAME, cache).fingerprint == first.fingerprint == rows_of(f"{NAME}@{COMMIT}", cache).fingerprint
    assert not client.fetched


def test_a_branch_that_moved_gives_a_new_folder_of_tokens_its_new_commit(
    client: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of(NAME, tmp_path / "old")
    monkeypatch.setattr(local_hub, "COMMIT", "d" * 40)
    monkeypatch.setattr(local_hub, "REVISIONS", ("main", "d" * 40))
    assert rows_of(NAME, tmp_path / "old").notes == (f"{NAME}:train is read at {COMMIT}",)
    assert rows_of(NAME, tmp_path / "new").notes == (f"{NAME}:train is read at {'d' * 40}",)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (f"{NAME}:valid", "Available splits"),
        (f"{NAME}:poems:train", "BuilderConfig 'poems' not found"),
        ("hf://datasets/org/none", "doesn't exist on the Hub"),
        (f"{NAME}:elsewhere:train", "Data files don't belong to org/words"),
    ],
)
def test_what_cannot_be_read_is_said(client: LocalHub, data: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        rows_of(data)


@pytest.mark.parametrize("named", ["SECRETS/s.txt", "../secrets/s.txt", "zip://s.txt::SECRETS/s.zip", "linked.txt"])
def test_a_directory_s_card_and_links_reach_no_file_outside_of_it(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    secrets, place = tmp_path / "secrets", tmp_path / "place"
    secrets.mkdir()
    place.mkdir()
    (secrets / "s.txt").write_text("a b")
    with ZipFile(secrets / "s.zip", "w") as archive:
        archive.writestr("s.txt", "a b")
    (place / "linked.txt").symlink_to(secrets / "s.txt")
    card = "---\nconfigs:\n- {config_name: default, data_files: [{split: train, path: 'NAMED'}]}\n---\n"
    (place / "README.md").write_text(card.replace("NAMED", named.replace("SECRETS", str(secrets))))
    monkeypatch.chdir(place)  # where an address seems to be a path below the directory
    for named_as in (place, "."):
        with pytest.raises(DataError, match="its card or a link names a file from elsewhere"):
            rows_of(f"{named_as}:train")
    (place / "README.md").write_text(card.replace("NAMED", "own.txt"))
    (place / "own.txt").write_text("a b " * 9)
    assert rows_of(".:train").fingerprint == rows_of(f"{place}:train").fingerprint


def test_links_to_the_blobs_of_the_hub_s_own_cache_are_read(hub: LocalHub, tmp_path: Path) -> None:
    cached = tmp_path / "datasets--org--words"
    snapshot, blob = cached / "snapshots" / COMMIT, cached / "blobs" / "1f"
    for file in (snapshot / "train.txt", blob):
        file.parent.mkdir(parents=True)
    blob.write_text("a b c " * 9)
    (snapshot / "train.txt").symlink_to("../../blobs/1f")
    assert len(rows_of(f"{snapshot}:train"))


def test_files_that_are_no_rows_and_scripts_are_refused(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match="its files are `imagefolder`"):
        rows_of(f"{tmp_path / 'pictures'}:train")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "code.py").write_text("raise SystemExit")
    with pytest.raises(DataError, match="scripts are no longer supported"):
        rows_of(f"{tmp_path / 'code'}:train")


def test_without_a_network_the_way_over_a_copy_is_named(client: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentProblem, match="the Hub cannot be reached") as raised:
        rows_of(NAME)
    assert "hf download --repo-type dataset org/words" in str(raised.value.do)


def test_a_stream_that_the_network_drops_is_not_told_as_bad_data(
    client: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = pytest.importorskip("requests")

    def answered(status: int) -> Exception:
        answer = requests.Response()
        answer.status_code = status
        return requests.HTTPError("of a server", response=answer)  # type: ignore[no-any-return]

    def told(error: Exception, **cause: Exception) -> type[Exception]:
        def dropped(*_: Any, **__: Any) -> None:
            raise error from cause.get("by")

        monkeypatch.setattr("datasets.load_dataset_builder", dropped)
        with pytest.raises((DataError, EnvironmentProblem), match=str(error) or type(error).__name__) as raised:
            rows_of(NAME)
        return raised.type

    of_aiohttp = type("ClientPayloadError", (Exception,), {"__module__": "aiohttp.client_exceptions"})
    for error in (
        requests.ConnectionError("dropped"),
        requests.exceptions.ChunkedEncodingError("dropped"),
        huggingface_hub.errors.HTTPError("dropped"),  # type: ignore[attr-defined]
        of_aiohttp(),
        answered(503),
    ):
        assert told(error) is told(ValueError("of a reader"), by=error) is EnvironmentProblem
    for error in (answered(404), OSError("of a file")):
        assert told(error) is told(ValueError("of a reader"), by=error) is DataError


def test_a_saved_data_set_without_a_split_is_told_to_have_splits(hub: LocalHub) -> None:
    with pytest.raises(DataError, match="reads it by split") as raised:
        rows_of(hub.folder / "saved")
    assert raised.value.do == f"Give {hub.folder / 'saved'}:train."

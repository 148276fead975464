"""Checkpoints by their name on the Hub: what is downloaded, from a server on this machine, and what errors say."""

import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import local_hub
import pico
import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants
from local_hub import LocalHub

from precisionctl import api
from precisionctl.checkpoints.hf_directory import hub as hub_module
from precisionctl.checkpoints.hf_directory.hub import HubName, needed_files
from precisionctl.checkpoints.hf_directory.safetensors_file import read_header
from precisionctl.cli import main
from precisionctl.cli.group import Command
from precisionctl.cli.options import TOKENIZER, CheckpointPath
from precisionctl.errors import (
    CheckpointError,
    DamagedCheckpoint,
    DiskProblem,
    EnvironmentProblem,
    RecipeError,
    UnknownFormat,
)
from precisionctl.sizes import size
from precisionctl.untrusted.safe_files import LENGTHS

OTHERS = (
    "pytorch_model.bin",
    "model.gguf",
    "modeling_evil.py",
    "README.md",
    "original/consolidated.00.pth",
    "onnx/model.onnx",
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHub]:
    folder = tmp_path_factory.mktemp("hub")
    model = folder / "org" / "model"
    pico.save(model, "qwen3", max_shard_size="60KB")
    for name in (*OTHERS, "tokenizer.json", "merges.txt", "LICENSE", "precisionctl/fp8_state.safetensors"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(name)
    (model / "precisionctl" / "fp8_state.safetensors").unlink()
    with local_hub.local_hub(folder) as hub:
        yield hub


@pytest.fixture(autouse=True)
def client(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of this process is one whose environment has this server, and a cache of its own."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    huggingface_hub.close_session()
    hub.fetched.clear()
    hub.sent.clear()
    monkeypatch.chdir(tmp_path)


def test_what_a_checkpoint_is_read_from_comes_and_nothing_else(hub: LocalHub) -> None:
    found = api.download("org/model")
    names = {str(path.relative_to(found)) for path in found.rglob("*")}
    assert names == {
        str(path.relative_to(hub.folder / "org/model")) for path in (hub.folder / "org/model").glob("*")
    } - {*OTHERS, "original", "onnx", "precisionctl"}
    assert sorted(hub.fetched) == sorted(names) and len([name for name in names if name.startswith("model-")]) > 1
    checkpoint = api.open_checkpoint(found)
    assert checkpoint.model.num_layers == 2 and checkpoint["model.norm.weight"].shape == (64,)
    hub.fetched.clear()
    assert api.download("org/model") == found == api.download("org/model@v1.0") and not hub.fetched


def test_without_a_home_the_client_needs_to_be_told_where_its_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a user id that no user has, in a container: os.path.expanduser leaves `~` as it is."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    with pytest.raises(EnvironmentProblem, match="Set HF_HOME"):
        HubName("org/model", None).download()


def test_a_branch_that_moves_between_list_and_download_is_listed_again(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, moving, commit = huggingface_hub.HfApi.model_info, hub.folder / "org" / "moving", "d" * 40
    moving.mkdir()
    (moving / "model.safetensors").touch()

    def then_move(*arguments: Any, **named: Any) -> Any:
        found = listed(*arguments, **named)
        if local_hub.COMMIT != commit:
            (moving / "model.safetensors").rename(moving / "model-00001-of-00001.safetensors")
            monkeypatch.setattr(local_hub, "COMMIT", commit)
            monkeypatch.setattr(local_hub, "REVISIONS", ("main", commit))
        return found

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", then_move)
    found = api.download("org/moving")
    assert found.name == commit and [file.name for file in found.iterdir()] == ["model-00001-of-00001.safetensors"]


def test_a_branch_that_moves_with_every_request_is_refused_with_the_commit_to_name(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: f"snapshots/{'e' * 40}")
    with pytest.raises(
        EnvironmentProblem, match=f"changed between requests, three times.*org/model@{local_hub.COMMIT}"
    ):
        api.download("org/model")


def test_of_a_name_that_several_processes_are_given_the_commit_is_to_be_named(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache of one"))
    commit = f"org/model@{local_hub.COMMIT}"
    with monkeypatch.context() as ranks:
        for key, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
            ranks.setenv(key, value)
        for name in ("org/model", "org/model@v1.0"):
            refused = CliRunner().invoke(main, ["inspect", name])
            assert refused.exit_code == 2 and f"Name the commit: {commit}" in refused.stderr and not hub.fetched
        assert CliRunner().invoke(main, ["inspect", commit]).exit_code == 0 and hub.fetched
    api.download("org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    with pytest.raises(RecipeError, match=f"Name the commit: {commit}"):
        HubName("org/model").download(several=True)


def test_what_will_be_downloaded_is_said_before_and_nothing_is_said_of_what_is_there(hub: LocalHub) -> None:
    files = {*(hub.folder / "org/model").glob("*")}
    files = {file for file in files if file.is_file() and file.name not in OTHERS}
    small = sum(file.stat().st_size for file in files if file.suffix != ".safetensors")
    for words, nbytes in ([], small), (["--fp8"], sum(file.stat().st_size for file in files) - small):
        first, again = (CliRunner().invoke(main, ["inspect", "org/model", *words]).stderr for _ in range(2))
        assert f"Downloading org/model, {size(nbytes)}\n" in first and "Downloading" not in again


def test_inspect_downloads_headers_alone_and_says_what_it_says_of_the_whole(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def described() -> tuple[dict[str, Any], Path]:
        done = CliRunner().invoke(main, ["inspect", "org/model", "--json"])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        return found, Path(found.pop("path"))

    shards = {file.name: read_header(file) for file in (hub.folder / "org/model").glob("*.safetensors")}
    monkeypatch.setattr(hub_module, "_FIRST_REQUEST", 100)  # shorter than these headers
    alone, path = described()
    begins = {name: min(each.offset for each in tensors.values()) for name, tensors in shards.items()}
    for name, begin in begins.items():
        assert (path / name).stat().st_size == begin > 100 and hub.sent[name] == 100 + begin
    with pytest.raises(CheckpointError, match="values are needed, and only the header.*Give the name on the Hub"):
        api.open_checkpoint(path)["model.norm.weight"]
    hub.fetched.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    assert described() == (alone, path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    assert described() == (alone, path) and not hub.fetched
    whole = api.download("org/model")
    assert described() == (alone, whole)  # in the cache now


def test_of_a_server_without_ranges_no_more_is_taken_than_headers(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "ranges", False)
    found = HubName("org/model").download(headers=True)
    for file in found.glob("*.safetensors"):
        assert file.read_bytes() == (hub.folder / "org/model" / file.name).read_bytes()[: file.stat().st_size]
        assert file.stat().st_size == min(each.offset for each in read_header(file).values())


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 8, "not a safetensors file"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        ((1 << 20).to_bytes(8, "little") + b"{}", "the file ends in its header"),
        ((3).to_bytes(8, "little") + b"abc", "the header makes no sense"),
    ],
)
def test_headers_that_are_none_are_refused_and_leave_nothing(
    hub: LocalHub, tmp_path: Path, damage: bytes, what: str
) -> None:
    broken = hub.folder / "org" / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "config.json").write_text("{}")
    (broken / "model.safetensors").write_bytes(damage)
    with pytest.raises(DamagedCheckpoint, match=what):
        HubName("org/broken").download(headers=True)
    assert not list((tmp_path / "assets/precisionctl/headers").rglob("*.json"))


def test_headers_of_all_files_together_are_bounded_and_after_too_many_no_more_are_asked_for(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"model-{number:05}-of-00024.safetensors" for number in range(1, 25)]
    (hub.folder / "org" / "alone").mkdir()
    for name in names:
        (hub.folder / "org" / "alone" / name).write_bytes((2).to_bytes(8, "little") + b"{}")
    with monkeypatch.context() as smaller:
        smaller.setattr(hub_module, "LARGEST", 15)
        with pytest.raises(DamagedCheckpoint, match="headers of more than"):
            HubName("org/alone").download(headers=True)
    assert 2 <= len(hub.fetched) <= 8
    found = HubName("org/alone").download(headers=True)  # a repository with nothing beside its weights
    assert sorted(file.name for file in found.iterdir()) == [LENGTHS, *names]


def test_a_file_of_another_length_than_the_hub_says_is_told_by_its_header_alone(hub: LocalHub, tmp_path: Path) -> None:
    found = HubName("org/model").download(headers=True)
    lengths = json.loads((found / LENGTHS).read_text())
    (found / LENGTHS).write_text(json.dumps({name: length - 1 for name, length in lengths.items()}))
    with pytest.raises(DamagedCheckpoint, match="Truncated"):
        api.open_checkpoint(found)
    (found / LENGTHS).unlink()
    with pytest.raises(DamagedCheckpoint, match="Truncated"):
        api.open_checkpoint(found)


def test_without_safetensors_all_is_downloaded_for_inspect(hub: LocalHub) -> None:
    names = ["config.json", "pytorch_model.bin"]
    (hub.folder / "org" / "pickled").mkdir(exist_ok=True)
    for name in names:
        (hub.folder / "org" / "pickled" / name).write_text(name)
    HubName("org/pickled").download(headers=True)
    assert sorted(hub.fetched) == names


def test_of_a_tokenizer_no_weights_are_downloaded(hub: LocalHub) -> None:
    HubName.read("org/model", weights=False).download()  # type: ignore[union-attr]
    assert "tokenizer.json" in hub.fetched and not any(name.endswith(".safetensors") for name in hub.fetched)
    assert {param.type for param in main.commands["tokenize"].params} >= {TOKENIZER}


def test_pickles_come_only_where_there_is_nothing_else() -> None:
    beside = ["config.json", "tokenizer.json", "model.py", "training_args.bin", "optimizer.pt"]
    pickles = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"]
    assert set(needed_files([*beside, *pickles], "")) == {"config.json", "tokenizer.json", *pickles}
    for safe in ("model.safetensors", "adapter_model.safetensors"):
        assert set(needed_files([*beside, *pickles, safe], "")) == {"config.json", "tokenizer.json", pickles[2], safe}
    assert "consolidated.safetensors" not in needed_files(["model.safetensors", "consolidated.safetensors"], "")
    assert needed_files(["consolidated.safetensors"], "") == ["consolidated.safetensors"]
    assert "precisionctl/fp8_state.safetensors" in needed_files(
        ["model.safetensors", "precisionctl/fp8_state.safetensors"], ""
    )


def test_named_chat_templates_come_and_nothing_else_of_their_folder_or_of_others() -> None:
    folder = "additional_chat_templates"
    others = [f"{folder}/README.md", f"{folder}/deeper/rag.jinja", f"{folder}/config.json", "other/rag.jinja"]
    names = ["model.safetensors", f"{folder}/tool_use.jinja"]
    assert needed_files([*names, *others], "") == names


def test_a_path_that_is_there_wins_and_one_in_a_folder_that_is_there_is_no_name(tmp_path: Path) -> None:
    assert HubName.read("org/model@v1.0") == HubName("org/model", "v1.0")
    assert HubName.read("org/model@refs/pr/3") == HubName("org/model", "refs/pr/3")
    (tmp_path / "org").mkdir()
    with pytest.raises(UnknownFormat, match=f"no such path in {tmp_path / 'org'}"):
        HubName.read("org/model")
    (tmp_path / "org" / "model").mkdir()
    assert HubName.read("org/model") is None and api.download("org/model") == Path("org/model")
    for text in ("./no/model", "/no/model", "~/model", "a/b/c", "org/x@", "org/@main", "@"):
        with pytest.raises(UnknownFormat, match="no such (file or directory|path in .+/org)") as refused:
            HubName.read(text)
        assert "ORG/NAME@REVISION" in refused.value.do


def test_a_path_that_is_mistyped_is_answered_with_the_one_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "runs" / "model").mkdir(parents=True)
    (tmp_path / "file").touch()
    for text, meant in {"rusn": "runs", "./rusn": "runs", "runs/modle": "runs/model"}.items():
        refused = CliRunner().invoke(main, ["inspect", text])
        assert refused.exit_code == 2 and f"Did you mean {meant}?" in refused.stderr
    for text in ("file/modle", "runs/other"):
        assert "Give a path that exists" in CliRunner().invoke(main, ["inspect", text]).stderr


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/org/model", "org/model"),
        ("https://huggingface.co/org/model/tree/v1.0/", "org/model@v1.0"),
        ("http://hf.co/org/model/tree/refs/pr/3", "org/model@refs/pr/3"),
    ],
)
def test_the_address_of_a_model_s_page_is_answered_with_its_name(address: str, name: str) -> None:
    with pytest.raises(UnknownFormat, match=f"Did you mean {name},"):
        HubName.read(address)


@pytest.mark.parametrize("text", ["s3://bucket/model", "gs://bucket/model", "hdfs://host/model"])
def test_object_storage_is_refused_with_how_to_copy(text: str) -> None:
    with pytest.raises(UnknownFormat, match="object storage is not read.*rclone copy"):
        HubName.read(text)


@pytest.mark.parametrize(
    ("name", "kind", "what", "do"),
    [
        ("org/gated", CheckpointError, "accepted its terms", "https://huggingface.co/org/gated, then `hf auth login`"),
        ("org/private", CheckpointError, "no such model, or does not show it", "Is the name right?"),
        ("org/absent", CheckpointError, "no such model, or does not show it", "As a path, it is not there either"),
        ("org/model@v9", CheckpointError, "no revision `v9`", "org/model/tree/main"),
        ("org/busy", EnvironmentProblem, "cannot be reached, and its cache has no such model", "Go online"),
        ("org/a--b", CheckpointError, "nor a name that the Hub can have", "mistyped"),
    ],
)
def test_what_the_hub_refuses_is_told_with_the_next_step(name: str, kind: type[Exception], what: str, do: str) -> None:
    with pytest.raises(kind, match=what) as refused:
        api.download(name)
    assert do in refused.value.do and refused.value.where == name  # type: ignore[attr-defined]


def test_a_repository_without_weights_is_refused_before_a_download(hub: LocalHub) -> None:
    (hub.folder / "org" / "gguf").mkdir(exist_ok=True)
    (hub.folder / "org" / "gguf" / "model.gguf").write_text("")
    with pytest.raises(CheckpointError, match=r"no weights in safetensors or .bin, but \*.gguf"):
        api.download("org/gguf")
    assert not hub.fetched


def test_offline_what_the_cache_has_is_used(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> Iterator[None]:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        huggingface_hub.close_session()
        yield
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
        huggingface_hub.close_session()
        yield

    found = api.download("org/model")
    hub.fetched.clear()
    for _ in unreachable():
        assert api.download("org/model") == found and not hub.fetched
        with pytest.raises(EnvironmentProblem, match="cannot be reached"):
            api.download("org/other")


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(DiskProblem, match="no room.*HF_HOME"):
        api.download("org/model")


def test_a_fault_of_ours_is_not_told_as_the_hub_s_and_an_answer_that_is_no_json_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raises(error: Exception) -> Callable[..., None]:
        def call(*_: object, **__: object) -> None:
            raise error

        return call

    with monkeypatch.context() as ours:
        ours.setattr(hub_module, "needed_files", raises(TypeError("of ours")))
        with pytest.raises(TypeError, match="of ours"):
            api.download("org/model")
    for strange in ({"rfilename": 5}, {"rfilename": "config.json", "sha": 5}):
        answer = SimpleNamespace(
            sha=strange.get("sha", "0" * 40), siblings=[SimpleNamespace(size=1, rfilename=strange["rfilename"])]
        )
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, answer=answer, **__: answer)
        with pytest.raises(EnvironmentProblem, match="has no name"):
            api.download("org/model")
    for length in ("1", -1, 1.5, 10**30):
        answer = SimpleNamespace(sha="0" * 40, siblings=[SimpleNamespace(size=length, rfilename="model.safetensors")])
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, answer=answer, **__: answer)
        with pytest.raises(EnvironmentProblem, match="a length that is none"):
            api.download("org/model")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", raises(json.JSONDecodeError("no JSON", "<html>", 0)))
    with pytest.raises(EnvironmentProblem, match="the server's answer is not one that the Hub gives: no JSON"):
        api.download("org/model")


def test_a_command_takes_a_name_and_downloads_nothing_before_its_options_are_right(
    hub: LocalHub, tmp_path: Path
) -> None:
    def run(*words: str) -> Result:
        return CliRunner().invoke(main, words)

    assert run("convert", "org/model", "out", "--to", "magatron").exit_code == 2 and not hub.fetched
    made = run("export-inference", "org/model@v1.0", "served", "--target", "vllm", "--scheme", "dynamic")
    assert made.exit_code == 0, made.stderr
    assert made.stdout.splitlines()[-1] == "To the Hub: hf upload ORG/NAME served"
    assert "base_model: org/model" in (tmp_path / "served" / "README.md").read_text()
    wrong = run("inspect", "./no/model")
    assert wrong.exit_code == 2 and "Give a path that exists, or a name on the Hub" in wrong.stderr


def test_every_argument_that_is_a_checkpoint_may_be_a_name() -> None:
    assert all(isinstance(command, Command) for command in main.commands.values())
    sources = {
        name
        for name, command in main.commands.items()
        for parameter in command.params
        if isinstance(parameter.type, CheckpointPath)
    }
    assert sources == main.commands.keys() - {"compare", "demo", "completion"}


@pytest.mark.parametrize("sha", [None, "../../../elsewhere", "main"])
def test_a_commit_whose_name_is_none_is_not_made_a_directory(monkeypatch: pytest.MonkeyPatch, sha: str | None) -> None:
    answer = huggingface_hub.hf_api.ModelInfo(id="org/name", sha=sha, siblings=[{"rfilename": "model.safetensors"}])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: answer)
    with pytest.raises(EnvironmentProblem, match="not one that the Hub gives"):
        HubName("org/name").download()

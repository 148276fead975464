"""Checkpoints by their name on the Hugging Face Hub, downloaded by its own client: cache, tokens, `HF_ENDPOINT`,
`HF_HUB_OFFLINE` and progress are as its users have them."""

import errno
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from precisionctl.errors import (
    CheckpointError,
    DamagedCheckpoint,
    DiskProblem,
    EnvironmentProblem,
    PrecisionctlError,
    RecipeError,
    UnknownFormat,
    nearest_path,
)
from precisionctl.sizes import size
from precisionctl.untrusted.safe_files import LARGEST, LENGTHS

_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w.][\w./-]*))?")
_PAGE = re.compile(
    r"https?://(?:huggingface|hf)\.co/(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:/(?:tree|commit)/(?P<revision>[\w./-]+?))?/?"
)
"""The address of a model in a browser."""
_REMOTE = re.compile(r"[a-z][a-z0-9+]*://.+")
_OURS = re.compile(r"precisionctl/\w[\w.-]*")
"""Our own folder in a checkpoint: its FP8 state."""
_PICKLES = ("pytorch_model", "adapter_model")
_WEIGHTS = re.compile(r"[^/]+\.safetensors")
_FIRST_REQUEST = 100_000
"""Bytes of a file that are asked for first: of most files the header is in them (as in huggingface_hub)."""
_AT_ONCE = 8
_HTTP_LIBRARIES = {"aiohttp", "httpx", "httpx2", "requests"}
"""The HTTP libraries that versions of the Hub's client, `datasets` and fsspec use. Their errors have no common
class."""


@dataclass(frozen=True)
class HubName:
    """`org/name` or `org/name@revision`: a repository of a model; without a revision, its `main`. Without `weights`, of
    one that only the tokenizer is wanted of."""

    repo: str
    revision: str | None = None
    weights: bool = True

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @staticmethod
    def read(text: str, *, weights: bool = True) -> "HubName | None":
        """The name that a text is; None if it is a path. A path that exists always is one, and so is any in a folder
        that does.

        Raises UnknownFormat for an address in another kind of storage, and for what is neither a path nor a name.
        """
        path = Path(text)
        if path.exists():
            return None
        if page := _PAGE.fullmatch(text):
            name = HubName(page["repo"], page["revision"])
            raise UnknownFormat(
                "this is the address of a web page", where=text, do=f"Did you mean {name}, as on the Hub?"
            )
        if _REMOTE.fullmatch(text):
            raise UnknownFormat(
                "object storage is not read, as weights are read by ranges of files",
                where=text,
                do="Copy the directory first (`aws s3 sync`, `gcloud storage rsync -r`, `rclone copy`), or mount it.",
            )
        found, folder = _NAME.fullmatch(text), path.parent
        if found and not folder.exists():
            return HubName(found["repo"], found["revision"], weights)
        raise UnknownFormat(
            "no such file or directory"
            if folder == Path() or not folder.exists()
            else f"no such path in {folder.resolve()}",
            where=text,
            do=nearest_path(path) or "Give a path that exists, or a name on the Hub, as ORG/NAME or ORG/NAME@REVISION.",
        )

    def download(
        self,
        *,
        headers: bool = False,
        progress: bool = True,
        several: bool = False,
        on_size: Callable[[int], None] = lambda nbytes: None,
    ) -> Path:
        """The directory in the client's cache that has the files of a checkpoint (`needed_files`). What is there
        already is not downloaded again, and is used as it is where the Hub cannot be reached. `several` says that other
        processes take the same name; `on_size` is called with the bytes to download, if there are any.

        With `headers`, of safetensors that are not in the cache only their headers come, into a directory among the
        client's assets. Reading a value there raises CheckpointError.

        Raises CheckpointError for a repository that is not there, not to be had, or no checkpoint; RecipeError for a
        name of which several processes may get several commits; EnvironmentProblem if the Hub cannot be reached, and
        for a user without a home; DiskProblem for a full disk.
        """
        from huggingface_hub import constants, errors, snapshot_download
        from huggingface_hub.errors import HFValidationError

        HTTPError = errors.HTTPError  # type: ignore[attr-defined]  # its HTTP library's, whichever that is
        if constants.HF_HUB_CACHE.startswith("~"):
            what = "the client's cache is in the home directory, and this user has none"
            raise EnvironmentProblem(what, where=self, do="Set HF_HOME to a directory that can be written to.")
        try:
            try:
                return self._ask(headers, progress, several, on_size)
            except (ConnectionError, TimeoutError, HTTPError) as error:
                if not unreachable(error):
                    raise
            # the Hub cannot list its files now; if some are missing, the directory's Reader says so
            config = ["config.json", "adapter_config.json"]
            cached = Path(
                snapshot_download(self.repo, revision=self.revision, allow_patterns=config, local_files_only=True)
            )
        except (HTTPError, OSError, HFValidationError) as error:
            raise self._as_our_error(error) from error
        if several:
            self._check_pinned(cached.name)
        without = self._headers_at(cached.name)
        return without if headers and without.exists() and not any(cached.glob("*.safetensors")) else cached

    def _ask(self, headers: bool, progress: bool, several: bool, on_size: Callable[[int], None]) -> Path:
        """`download`, where the Hub can be reached; errors of its client are raised as they are."""
        from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

        from precisionctl.untrusted.safe_pickle import is_count

        class Silent(tqdm):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named | {"disable": True})  # type: ignore[no-untyped-call]

        for _ in range(3):
            with self._answered():
                info = HfApi().model_info(self.repo, revision=self.revision, files_metadata=True)
            commit = info.sha or ""
            if not (isinstance(commit, str) and re.fullmatch("[0-9a-f]{40}", commit)):  # it names a directory
                raise self._not_the_hub("its commit has no name")
            if not all(isinstance(each.rfilename, str) for each in info.siblings or ()):
                raise self._not_the_hub("a file has no name")
            if not all(is_count(each.size or 0) for each in info.siblings or ()):
                raise self._not_the_hub("a file has a length that is none")
            if several:
                self._check_pinned(commit)
            sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
            names = needed_files([*sizes], self, weights=self.weights)
            absent = [name for name in names if not try_to_load_from_cache(self.repo, name, revision=commit)]
            only_headers = [name for name in absent if headers and _WEIGHTS.fullmatch(name)]
            if only_headers and self._headers_at(commit).exists():
                return self._headers_at(commit)
            if only_headers:
                only_headers = [name for name in names if _WEIGHTS.fullmatch(name)]
                names, absent = ([name for name in those if name not in only_headers] for those in (names, absent))
            if absent:
                on_size(sum(sizes[name] for name in absent))
            with self._answered():
                found = snapshot_download(
                    self.repo,
                    revision=self.revision,
                    allow_patterns=[escape(name) for name in names],
                    tqdm_class=tqdm if progress else Silent,
                )
            if Path(found).name == commit:  # else the branch moved between the two requests
                lengths = {name: sizes[name] for name in only_headers}
                return self._with_headers(Path(found), names, lengths) if lengths else Path(found)
        do = f"Name a commit: {self.repo}@{commit}"
        raise EnvironmentProblem("the branch changed between requests, three times", where=self, do=do)

    def _headers_at(self, commit: str) -> Path:
        """Where the directory of a commit's small files and headers is, once it is complete."""
        from huggingface_hub import cached_assets_path

        return cached_assets_path("precisionctl", "headers", self.repo) / commit

    def _with_headers(self, snapshot: Path, names: Sequence[str], lengths: Mapping[str, int]) -> Path:
        """A directory with these files of a snapshot, and the headers of files of these lengths. Raises
        DamagedCheckpoint where a header cannot be one."""
        import shutil  # with the next two, a tenth of the time of `--help`
        import tempfile
        from concurrent.futures import ThreadPoolExecutor

        from precisionctl.checkpoints.hf_directory.safetensors_file import read_described  # takes NumPy with it

        target = self._headers_at(snapshot.name)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="partial-", ignore_cleanup_errors=True) as folder:
            made = Path(folder) / snapshot.name
            made.mkdir()
            for name in names:
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(snapshot / name, made / name)
            left, weights = LARGEST, list(lengths)
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                for begin in range(0, len(weights), _AT_ONCE):  # queued requests are still made after an error
                    together = weights[begin : begin + _AT_ONCE]
                    headers = pool.map(lambda name: self._header(name, snapshot.name), together)
                    for name, header in zip(together, headers, strict=True):
                        left -= len(header)
                        if left < 0:
                            what = f"headers of more than {size(LARGEST)}, as no model has"
                            raise DamagedCheckpoint(what, where=self)
                        (made / name).write_bytes(header)
            (made / LENGTHS).write_text(json.dumps(lengths))
            for name in weights:
                try:
                    read_described(made / name)  # a bad answer must not stay
                except DamagedCheckpoint as error:
                    raise DamagedCheckpoint(error.what, where=f"{self}, {name}", do=_CUT_OFF) from error
            try:
                made.rename(target)
            except OSError:
                if not target.exists():  # else another process has made the same directory
                    raise
        return target

    def _header(self, name: str, commit: str) -> bytes:
        """The bytes of a safetensors file before its values. Raises DamagedCheckpoint where they cannot be a header."""
        from huggingface_hub import hf_hub_url

        from precisionctl.checkpoints.hf_directory.safetensors_file import LONGEST_HEADER  # takes NumPy with it

        url = hf_hub_url(self.repo, name, revision=commit)
        found = _first_bytes(url, _FIRST_REQUEST)
        length = 8 + int.from_bytes(found[:8], "little")
        if len(found) < 8 or length > LONGEST_HEADER:
            raise DamagedCheckpoint("not a safetensors file", where=f"{self}, {name}")
        if length > len(found):
            found = _first_bytes(url, length)
        if length > len(found):
            raise DamagedCheckpoint("the file ends in its header", where=f"{self}, {name}", do=_CUT_OFF)
        return found[:length]

    def _check_pinned(self, commit: str) -> None:
        """Raise RecipeError for a branch or a tag, which may move from one process's request to another's."""
        if self.revision != commit:
            raise RecipeError(
                f"each process would ask the Hub for `{self.revision or 'main'}` by itself, and could get another "
                "commit",
                where=self,
                do=f"Name the commit: {self.repo}@{commit}",
            )

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """A call of the client. If it cannot read the answer, the server is not the Hub. Raises EnvironmentProblem."""
        from huggingface_hub.errors import HFValidationError

        try:
            yield
        except HFValidationError:
            raise
        except (TypeError, AssertionError, ValueError) as error:
            raise self._not_the_hub(str(error)) from error

    def _not_the_hub(self, why: str) -> EnvironmentProblem:
        do = "Is HF_ENDPOINT another server?"
        return EnvironmentProblem(f"the server's answer is not one that the Hub gives: {why}", where=self, do=do)

    def _as_our_error(self, error: Exception) -> PrecisionctlError:
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        page = f"https://huggingface.co/{self.repo}"
        match error:
            case GatedRepoError():
                what = "the Hub gives this model only to those who have accepted its terms"
                do = f"Accept them at {page}, then `hf auth login` as the same user."
                return CheckpointError(what, where=self, do=do)
            case RepositoryNotFoundError():
                do = "Is the name right? A private one needs `hf auth login`. As a path, it is not there either."
                return CheckpointError("the Hub has no such model, or does not show it to you", where=self, do=do)
            case RevisionNotFoundError():
                do = f"Branches, tags and commits are listed at {page}/tree/main."
                return CheckpointError(f"the model has no revision `{self.revision}`", where=self, do=do)
            case HFValidationError():
                do = "Is it mistyped?"
                return CheckpointError("neither a path that exists nor a name that the Hub can have", where=self, do=do)
            case LocalEntryNotFoundError():
                do = "Go online (is HF_HUB_OFFLINE set, or HF_ENDPOINT wrong?), or give the path of a copy."
                what = "no such path, and as a name on the Hub: it cannot be reached, and its cache has no such model"
                return EnvironmentProblem(what, where=self, do=do)
            case OSError(errno=errno.ENOSPC | errno.EDQUOT):
                do = "Make room, or set HF_HOME to another disk; the same command continues the download."
                return DiskProblem("no room for the download", where=self, do=do)
        status = getattr(getattr(error, "response", None), "status_code", None)
        what = f"the Hub refused the download ({status})" if status else f"the download failed: {error}"
        return EnvironmentProblem(what, where=self, do="Try again: what is downloaded is kept.")


_CUT_OFF = "Try again: a server or a proxy may have cut it off."


def unreachable(error: BaseException) -> bool:
    """Whether an error, or one of its causes, means that the network or the server failed. A server that refuses a
    request (a status below 500) has not failed."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        if _HTTP_LIBRARIES & {kind.__module__.partition(".")[0] for kind in type(each).__mro__}:
            answer = getattr(each, "response", None)
            status = getattr(each, "status", None) if answer is None else answer.status_code  # aiohttp has the first
            return status is None or bool(status >= 500)
        if isinstance(each, ConnectionError | TimeoutError):
            return True
        seen.append(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return False


def _first_bytes(url: str, count: int) -> bytes:
    """The first `count` bytes of a file on the Hub. Reading stops there even if the server sends the whole file."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
        http_stream_backoff,
    )

    asked = build_hf_headers() | {"Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
    found = bytearray()
    with http_stream_backoff("GET", url, headers=asked) as response:
        hf_raise_for_status(response)
        for piece in response.iter_raw():
            found += piece
            if len(found) >= count:
                break
    return bytes(found[:count])


def needed_files(names: Sequence[str], where: object, *, weights: bool = True) -> list[str]:
    """The files of a repository that a checkpoint is read from.

    These are weights (safetensors; pickles only if there are none), configs, tokenizer, chat templates, licence, and
    our own FP8 state. Code and other files in folders are left out. Without `weights`, only the files beside the
    weights. Raises CheckpointError if there are no weights in one of these formats.
    """
    from precisionctl.checkpoints.hf_directory.companions import (  # takes NumPy with it: `--help` does without
        CHAT_TEMPLATE,
        kind_of,
    )

    top = [name for name in names if "/" not in name]
    kinds_of = {name: kind_of(name) for name in top}
    beside = [name for name, kind in kinds_of.items() if name.endswith(".json") or (kind and kind.fate == "travels")]
    beside += [name for name in names if name.count("/") == 1 and kind_of(name) is CHAT_TEMPLATE]
    if not weights:
        return beside
    stored = [name for name in top if name.endswith(".safetensors")]
    stored = [name for name in stored if not name.startswith("consolidated")] or stored  # Mistral's own, once more
    stored = stored or [name for name in top if name.endswith(".bin") and name.startswith(_PICKLES)]
    if not stored:
        kinds = ", ".join(sorted({f"*{Path(name).suffix}" for name in top if Path(name).suffix}))
        do = "Is there a release of it in Hugging Face's format? Other formats are read from a path."
        raise CheckpointError(f"no weights in safetensors or .bin, but {kinds or 'nothing'}", where=where, do=do)
    return [*stored, *beside, *(name for name in names if _OURS.fullmatch(name))]

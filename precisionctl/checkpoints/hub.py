"""Checkpoints by their name on the Hugging Face Hub, downloaded by its own client: cache, tokens, `HF_ENDPOINT`,
`HF_HUB_OFFLINE` and progress are as its users have them."""

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from precisionctl.errors import CheckpointError, DiskProblem, EnvironmentProblem, PrecisionctlError, UnknownFormat

_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w.][\w./-]*))?")
_REMOTE = re.compile(r"[a-z][a-z0-9+]*://.+")
_OURS = re.compile(r"precisionctl/\w[\w.-]*")
"""Our own folder in a checkpoint: its FP8 state."""
_PICKLES = ("pytorch_model", "adapter_model")


@dataclass(frozen=True)
class HubName:
    """`org/name` or `org/name@revision`: a repository of a model; without a revision, its `main`."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @staticmethod
    def read(text: str) -> "HubName | None":
        """The name that a text is; None if it is a path. A path that exists always is one, and so is any in a folder
        that does.

        Raises UnknownFormat for an address in another kind of storage, and for what is neither a path nor a name.
        """
        path = Path(text)
        if path.exists():
            return None
        if _REMOTE.fullmatch(text):
            raise UnknownFormat(
                "object storage is not read, as weights are read by ranges of files",
                where=text,
                do="Copy the directory first (`aws s3 sync`, `gcloud storage rsync -r`, `rclone copy`), or mount it.",
            )
        found = _NAME.fullmatch(text)
        if found and not path.parent.exists():
            return HubName(found["repo"], found["revision"])
        why = f"and {path.parent}, which is here, does not have it" if path.parent.exists() else "nor is it ORG/NAME"
        raise UnknownFormat(
            f"no such file or directory, {why}",
            where=text,
            do="Give a path that exists, or a name on the Hub, as ORG/NAME or ORG/NAME@REVISION.",
        )

    def download(self, *, progress: bool = True) -> Path:
        """The directory in the client's cache that has the files of a checkpoint (`needed`). What is there already is
        not downloaded again, and where the Hub cannot be reached has to do.

        Raises CheckpointError for a repository that is not there, not to be had, or no checkpoint; EnvironmentProblem
        if the Hub cannot be reached, DiskProblem for a full disk.
        """
        from huggingface_hub import HfApi, errors, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

        HTTPError = errors.HTTPError  # type: ignore[attr-defined]  # its HTTP library's, whichever that is

        class Silent(tqdm):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named | {"disable": True})  # type: ignore[no-untyped-call]

        try:
            try:
                bar = tqdm if progress else Silent
                for _ in range(3):
                    info = HfApi().model_info(self.repo, revision=self.revision)
                    if not re.fullmatch("[0-9a-f]{40}", info.sha or ""):  # it becomes the name of a directory
                        raise TypeError("its commit has no name")
                    patterns = [escape(name) for name in needed([each.rfilename for each in info.siblings or ()], self)]
                    found = Path(
                        snapshot_download(self.repo, revision=self.revision, allow_patterns=patterns, tqdm_class=bar)
                    )
                    if found.name == info.sha:  # else the branch moved between the two
                        return found
                raise TypeError("its branch moves with each request")
            except (OfflineModeIsEnabled, HTTPError) as error:
                if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
                    raise
                # without a list of files: what is missing, the directory's Reader says
                config = ["config.json", "adapter_config.json"]
                return Path(
                    snapshot_download(self.repo, revision=self.revision, allow_patterns=config, local_files_only=True)
                )
        except (TypeError, AssertionError, JSONDecodeError) as error:
            do = "Is HF_ENDPOINT another server?"
            raise EnvironmentProblem(f"the answer is none of the Hub's: {error}", where=self, do=do) from error
        except (HTTPError, OSError, HFValidationError) as error:
            raise self._in_our_words(error) from error

    def _in_our_words(self, error: Exception) -> PrecisionctlError:
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
                return EnvironmentProblem(
                    "the Hub cannot be reached, and its cache has no such model", where=self, do=do
                )
            case OSError(errno=errno.ENOSPC | errno.EDQUOT):
                do = "Make room, or set HF_HOME to another disk; the same command goes on with the download."
                return DiskProblem("no room for the download", where=self, do=do)
        status = getattr(getattr(error, "response", None), "status_code", None)
        what = f"the Hub refused the download ({status})" if status else f"the download failed: {error}"
        return EnvironmentProblem(what, where=self, do="Try again: what is downloaded is kept.")


def needed(names: Sequence[str], where: object) -> list[str]:
    """Of a repository's files those that a checkpoint is read from: weights in safetensors, in pickles only where there
    are no others; configs, tokenizer and licence; FP8 state of ours. No code, and nothing else in folders.

    Raises CheckpointError where there are no such weights.
    """
    from precisionctl.checkpoints.companions import kind_of  # takes torch with it, which `--help` does without

    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")]
    weights = [name for name in weights if not name.startswith("consolidated")] or weights  # Mistral's own, once more
    weights = weights or [name for name in top if name.endswith(".bin") and name.startswith(_PICKLES)]
    if not weights:
        kinds = ", ".join(sorted({f"*{Path(name).suffix}" for name in top if Path(name).suffix}))
        do = "Is there a release of it in Hugging Face's format? Other formats are read from a path."
        raise CheckpointError(f"no weights in safetensors or .bin, but {kinds or 'nothing'}", where=where, do=do)
    kinds_of = {name: kind_of(name) for name in top}
    beside = [name for name, kind in kinds_of.items() if name.endswith(".json") or (kind and kind.fate == "travels")]
    return [*weights, *beside, *(name for name in names if _OURS.fullmatch(name))]

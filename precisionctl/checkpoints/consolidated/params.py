"""params.json: what it says, key by key. A key that nothing reads is an error, as it may be of another model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from precisionctl.architectures.config_keys import NEEDED
from precisionctl.architectures.families import from_hf_config
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape


@dataclass(frozen=True)
class MadeConfig:
    """A config.json that was made of a params.json, and notes on what that does not say. `words` has the key of
    params.json by that of config.json."""

    config: dict[str, Any]
    words: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def model(self) -> ModelShape:
        """The model that it describes. Raises as `from_hf_config`, in the words of params.json."""
        with in_its_words(self.words):
            return from_hf_config(self.config, "")


@contextmanager
def in_its_words(words: Mapping[str, str]) -> Iterator[None]:
    """Raise a DamagedCheckpoint of a key of config.json as one of a params.json, whose `words` are by those keys."""
    try:
        yield
    except DamagedCheckpoint as error:
        key, _, rest = error.what.partition(" ")
        what = f"{words.get(key, key)} {rest}"
        raise DamagedCheckpoint(what, do="Is params.json this model's?") from None


class ParamsJson:
    """params.json, or an object in it, whose keys are taken one by one. A null says nothing, as an absent key.

    `known` is the model of a reference: it has numbers that a params.json may lack. Of a key that is needed and lacking
    DamagedCheckpoint is raised.
    """

    def __init__(self, said: Mapping[str, Any], known: ModelShape | None = None, within: str = ""):
        self._left = {key: value for key, value in said.items() if value is not None}
        self.known, self._within = known, within

    def take(self, key: str, absent: Any = NEEDED) -> Any:
        """The value of a key, or `absent`."""
        value = self._left.pop(key, absent)
        if value is NEEDED:
            raise DamagedCheckpoint(f"no `{self._within}{key}`", do="Is the file whole?")
        return value

    def only(self, key: str, value: object) -> None:
        """Take a key that may say this alone. Raises UnknownArchitecture for another value."""
        if (said := self.take(key, value)) != value:
            what = f"{self._within}{key} is {shown(said)}, and known is {shown(value)}"
            raise self.unread(what)

    def skip(self, *keys: str) -> None:
        """Take keys that say nothing of the model, but of how a program runs it."""
        for key in keys:
            self.take(key, None)

    def section(self, key: str) -> "ParamsJson | None":
        """The object under a key; None if it is not there."""
        value = self.take(key, None)
        if value is not None and not isinstance(value, Mapping):
            raise DamagedCheckpoint(f"{self._within}{key} is {shown(value)}, not an object")
        return None if value is None else ParamsJson(value, self.known, f"{self._within}{key}.")

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def check_read(self) -> None:
        """Raise UnknownArchitecture for a key that was not taken."""
        if self._left:
            key = min(self._left)
            raise self.unread(f"{self._within}{shown(key)[1:-1]} is {shown(self._left[key])}, which is not known here")

    def unread(self, what: str) -> UnknownArchitecture:
        """The error for a model that is not read."""
        do = "Take the Hugging Face files of the same release: config.json and model*.safetensors."
        return UnknownArchitecture(what, do=do)

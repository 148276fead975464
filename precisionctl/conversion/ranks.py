"""Several machines on one conversion, over a shared file system: which rank this process is, and the messages between
ranks.

Every rank makes the same plan; each byte of the target is written by one rank, and rank 0 begins and commits. Messages
go through PyTorch's key-value store, as torchrun or Slurm set it up.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread
from typing import TYPE_CHECKING, TypeVar

from precisionctl.errors import EnvironmentProblem, OutputError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")

_FAILED = "failed"
_AGAIN = "Fix that, and run the same command again on all of them: it continues where they stopped."
_RENDEZVOUS = timedelta(minutes=10)
_BEAT = 5.0
"""Seconds between two heartbeats of a rank."""
_SILENCE = 120.0
"""Seconds without a heartbeat after which a rank is given up: it was killed, or its machine is gone."""


@contextmanager
def _store_errors() -> Iterator[None]:
    """A context for calls to the key-value store. Raises OutputError if the store is gone: it ends with the first rank,
    or with the launcher."""
    from torch.distributed import DistError

    try:
        yield
    except DistError as error:
        raise OutputError(f"the other ranks are gone: {error}", do=_AGAIN) from error


@dataclass(frozen=True)
class Ranks:
    """This process as rank `rank` of `count`, and the messages between ranks. A single rank neither sends nor waits."""

    rank: int = 0
    count: int = 1
    store: Store | None = None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which begins, commits and reports."""
        return self.rank == 0

    def publish(self, name: str, value: str = "") -> None:
        """Publish a message for the other ranks under a name, which is used once."""
        if self.store is not None:
            with _store_errors():
                self.store.set(name, f"={value}")  # as an empty value would count as none

    def receive(self, name: str) -> str:
        """Wait for the message under a name. Raises OutputError if a rank fails first, or sends no heartbeats."""
        if self.store is None:
            return ""
        beats: dict[int, tuple[str, float]] = {}
        checked = 0.0
        while not self._has(name):
            if self._has(_FAILED):
                raise OutputError(f"another rank failed: {self._get(_FAILED)}", do=_AGAIN)
            if time.monotonic() > checked + _BEAT:
                self._check_heartbeats(beats)
                checked = time.monotonic()
            time.sleep(0.02)
        return self._get(name)

    def _check_heartbeats(self, beats: dict[int, tuple[str, float]]) -> None:
        """Update `beats`: for each other rank its last heartbeat, and when this machine first saw that. Raises
        OutputError for a rank that has been silent too long."""
        now = time.monotonic()
        for rank in set(range(self.count)) - {self.rank}:
            alive = f"alive.{rank}"
            beat = self._get(alive) if self._has(alive) else ""
            last, since = beats.setdefault(rank, (beat, now))
            if beat != last:
                beats[rank] = beat, now
            elif now - since > _SILENCE:
                raise OutputError(f"rank {rank} has not answered for {_SILENCE:.0f} seconds", do=_AGAIN)

    @contextmanager
    def _heartbeats(self) -> Iterator[None]:
        """A context in which a thread sends this rank's heartbeats."""
        ended = Event()

        def beat() -> None:
            with suppress(Exception):  # if the store is gone, the main thread notices when it waits for a message
                for number in itertools.count():
                    self.publish(f"alive.{self.rank}", str(number))
                    if ended.wait(_BEAT):
                        return

        if self.store is not None:
            Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _has(self, name: str) -> bool:
        assert self.store is not None
        with _store_errors():
            return self.store.check([name])

    def _get(self, name: str) -> str:
        assert self.store is not None
        with _store_errors():
            return bytes(self.store.get(name)).decode()[1:]

    def receive_all(self, name: str) -> list[str]:
        """Wait for the messages of all other ranks, under `<name>.<rank>`."""
        return [self.receive(f"{name}.{rank}") for rank in range(1, self.count)]

    def gather(self, name: str, values: Mapping[str, T]) -> dict[str, T]:
        """Send values (as JSON) from all ranks to the first. Returns the values of the others there, and an empty dict
        on other ranks."""
        if not self.first:
            self.publish(f"{name}.{self.rank}", json.dumps(values))
            return {}
        return {key: value for message in self.receive_all(name) for key, value in json.loads(message).items()}

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context for what all ranks do together: if one fails, the others fail at their next `receive`; no rank
        leaves before all are done."""
        try:
            with self._heartbeats():
                yield
                if self.first:
                    self.publish("end")
                    self.receive_all("bye")  # the store ends with this process
                else:
                    self.receive("end")
                    self.publish(f"bye.{self.rank}")
        except BaseException as error:
            with suppress(Exception):  # if the store is gone, too, the original error is still the one to raise
                if self.store is not None and not self._has(_FAILED):
                    self.publish(_FAILED, f"rank {self.rank}: {error}")
            raise


NO_OTHERS = Ranks()


def from_environment() -> Ranks:
    """The ranks that torchrun (RANK, WORLD_SIZE) or a Slurm step (SLURM_PROCID, SLURM_STEP_NUM_TASKS) describe, else
    NO_OTHERS.

    Raises EnvironmentProblem if the ranks cannot connect, and as `place_among_ranks`.
    """
    place = place_among_ranks()
    if place is None:
        return NO_OTHERS
    from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, and not in the stubs

    rank, count = place
    host, port = os.environ.get("MASTER_ADDR") or _first_host(os.environ), _port(os.environ)
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun runs the store itself
    connected: Future[Store] = Future()

    def connect() -> None:
        try:
            store = TCPStore(host, port, count, is_master=rank == 0 and not hosted, timeout=_RENDEZVOUS)
            connected.set_result(store)
        except BaseException as error:
            connected.set_exception(error)

    # in a thread, so that a signal ends the wait: what waits outside Python heeds none
    Thread(target=connect, daemon=True).start()
    try:
        store = connected.result()
    except DistError as error:
        raise EnvironmentProblem(
            f"rank {rank} cannot reach the others at {host}:{port}: {error}",
            do="Set MASTER_ADDR and MASTER_PORT to a host and port that every rank can reach.",
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Ranks(rank, count, PrefixStore(f"precisionctl/{attempt}", store))


def place_among_ranks() -> tuple[int, int] | None:
    """This process's rank, and how many there are; None for a process by itself. Raises EnvironmentProblem for numbers
    that are none, and a rank that is not among them."""
    for rank, count in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        ranks = number_in(os.environ, count, 1)
        if ranks > 1 and os.environ.get(rank):
            return number_in(os.environ, rank, 0, most=ranks - 1), ranks
    return None


def number_in(environment: Mapping[str, str], name: str, default: int, *, most: int | None = None) -> int:
    """The number, 0 to `most`, in an environment variable; the default if it is not set, or empty. Raises
    EnvironmentProblem if it holds anything else."""
    text = environment.get(name) or str(default)
    number = int(text) if re.fullmatch("[0-9]{1,18}", text) else None
    if number is None or (most is not None and number > most):
        limit = "a number" if most is None else f"a number from 0 to {most}"
        do = "The launcher (torchrun, Slurm) sets it: unset it to run without one, or set it right."
        raise EnvironmentProblem(f"the environment variable {name} is {text!r}, not {limit}", do=do)
    return number


def _first_host(environment: Mapping[str, str]) -> str:
    """The first host of Slurm's list, such as `node[003-010,021],login1`."""
    names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", names)
    return match[1] + (match[2] or "") if match else "localhost"


def _port(environment: Mapping[str, str]) -> int:
    """MASTER_PORT, or a port computed from the numbers of the Slurm job and step, which is the same on all ranks."""
    step = number_in(environment, "SLURM_JOB_ID", 0) * 16 + number_in(environment, "SLURM_STEP_ID", 0)
    return number_in(environment, "MASTER_PORT", 20000 + step % 20000, most=(1 << 16) - 1)

"""A task for each of many items, dealt out to processes.

They are forked when everything is planned and open. Threads would not do: casting small pieces is half Python, and two
threads encoded no faster than one.
"""

import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch

from precisionctl.errors import OutputError

Item = TypeVar("Item")
T = TypeVar("T")


def in_processes(
    task: Callable[[Item], T], items: Sequence[Item], costs: Sequence[int], workers: int
) -> Generator[tuple[Item, T]]:
    """Do a task for each item in so many processes. Yields each item with what the task returned, as they come.

    `costs` says what items weigh against one another. One worker is this process. A worker's error is raised here,
    after the others have been stopped; OutputError where one was killed.
    """
    if workers == 1:
        yield from ((item, task(item)) for item in items)
        return
    children: dict[Connection, BaseProcess] = {}
    try:
        for share in deal(costs, workers):
            receiver, process = _fork(task, items, share, list(children))
            children[receiver] = process
        while children:
            for receiver in [receiver for receiver in wait(list(children)) if isinstance(receiver, Connection)]:
                try:
                    message = receiver.recv()
                except EOFError:
                    _check_exit(children.pop(receiver))
                    continue
                if isinstance(message, Exception):
                    raise message
                number, result = message
                yield items[number], result
    finally:
        for process in children.values():
            process.terminate()
            process.join()


def deal(costs: Sequence[int], shares: int) -> list[range]:
    """Cut items into `shares` runs of neighbours of about equal cost, so that each keeps to files of its own where it
    can."""
    total, spent, starts = sum(costs), 0, [0]
    for number, cost in enumerate(costs):
        if len(starts) < shares and spent + cost / 2 >= total * len(starts) / shares:
            starts.append(number)
        spent += cost
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(costs)], strict=True)]


def _fork(
    task: Callable[[Item], T], items: Sequence[Item], share: range, others: list[Connection]
) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(task, items, share, sender, [receiver, *others]), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns of locks that other threads may hold: the child touches none, and leaves by os._exit
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()  # the child's is the only one now, so its end is an end of file
    return receiver, process


def _child(
    task: Callable[[Item], T], items: Sequence[Item], share: range, results: Connection, parents: list[Connection]
) -> None:
    """The life of a worker. It ends when its share is done, or when its parent is gone: then sending fails."""
    for receiver in parents:  # inherited; with a reader left, here or in a sibling, sending would not fail
        receiver.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1  # whatever happens; only all items done is 0
    try:
        for number in share:
            results.send((number, task(items[number])))
        code = 0
    except Exception as error:
        error.add_note(traceback.format_exc())
        results.send(error)
    finally:
        os._exit(code)


def _check_exit(process: BaseProcess) -> None:
    process.join()
    if process.exitcode:
        raise OutputError(
            f"a worker process was killed (exit code {process.exitcode})",
            do="Was there enough memory? The same command continues where this one stopped.",
        )


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Give torch one thread: workers are the parallelism, and its own threads would fight them over small pieces."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Do a task for each of many items in several processes.

They are forked when everything is planned and open. Threads do not help: casting small pieces is half Python, and two
threads encoded no faster than one.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import TypeVar

from precisionctl import signals
from precisionctl.errors import OutputError

Item = TypeVar("Item")
T = TypeVar("T")


def in_processes(
    task: Callable[[Item], T], items: Sequence[Item], costs: Sequence[int], workers: int
) -> Generator[tuple[Item, T]]:
    """Do a task for each item in `workers` processes; with one worker, in this process. Yields each item with the
    task's result, in the order in which they finish.

    `costs` are relative costs of the items, to balance the load. A worker whose share is done takes items of another.
    An error in a worker is raised here, after the others have been stopped; OutputError if a worker was killed.
    """
    if workers == 1:
        yield from ((item, task(item)) for item in items)
        return
    shares = [deque(share) for share in deal(costs, workers)]
    children: dict[Connection, tuple[BaseProcess, deque[int]]] = {}
    try:
        for share in shares:
            with signals.held():  # or one that comes now would leave a worker that is not yet in `children`
                connection, process = _fork(task, items, list(children))
                children[connection] = process, share
            _hand_out(connection, share, shares)
        while children:
            for connection in [ready for ready in wait(list(children)) if isinstance(ready, Connection)]:
                process, share = children[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):  # the latter if it was killed in the middle of sending
                    del children[connection]
                    _check_exit(process)
                    continue
                if isinstance(message, Exception):
                    raise message
                _hand_out(connection, share, shares)
                number, result = message
                yield items[number], result
    finally:
        for process, _ in children.values():
            process.kill()  # they do not get SIGTERM
        for process, _ in children.values():
            process.join()


def _hand_out(connection: Connection, share: deque[int], shares: Sequence[deque[int]]) -> None:
    """Send a worker the next item of its share; or the last one of the longest share; or None, if nothing is left."""
    longest = max(shares, key=len)
    number = share.popleft() if share else longest.pop() if longest else None
    with suppress(ConnectionError):  # it was killed: receiving from it says so
        connection.send(number)


def deal(costs: Sequence[int], shares: int) -> list[range]:
    """Cut items into at most `shares` ranges of about equal cost. Neighbours stay together, so that as few files as
    possible are written by two workers."""
    total, spent, starts = sum(costs), 0, [0]
    for number, cost in enumerate(costs):
        if len(starts) < shares and spent + cost / 2 >= total * len(starts) / shares:
            starts.append(number)
        spent += cost
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(costs)], strict=True)]


def _fork(task: Callable[[Item], T], items: Sequence[Item], others: list[Connection]) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("fork")
    ours, childs = context.Pipe()
    process = context.Process(target=_child, args=(task, items, childs, [ours, *others], os.getpid()), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns that other threads may hold locks: the child uses none of them, and ends by os._exit
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    childs.close()  # now only the child has it, so when the child ends, receiving gives EOFError
    return ours, process


def _child(
    task: Callable[[Item], T], items: Sequence[Item], parent: Connection, inherited: list[Connection], parent_id: int
) -> None:
    """The main function of a worker: do items, by the numbers that the parent sends. It ends at None, or with its
    parent: at once, or where the system has no means for that when sending or receiving fails."""
    signals.end_with(parent_id)
    for connection in inherited:  # the parent's own ends: while any process has them open, nothing fails
        connection.close()
    sys.stdout = sys.stderr = io.StringIO()  # the parent's may have a lock that a thread of its held at the fork
    code = 1  # unless all items are done
    try:
        while (number := parent.recv()) is not None:
            parent.send((number, task(items[number])))
        code = 0
    except Exception as error:
        error.add_note(traceback.format_exc())
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
        except Exception:  # it does not come through a pipe, but what it says does
            parent.send(RuntimeError("".join(traceback.format_exception(error))))
        else:
            parent.send(error)
    finally:
        os._exit(code)


def _check_exit(process: BaseProcess) -> None:
    process.join()
    if process.exitcode:
        raise OutputError(
            f"a worker process was killed (exit code {process.exitcode})",
            do="Was there enough memory? The same command continues from what this one wrote, if it writes anything.",
        )

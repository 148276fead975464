"""Plan a request: from a Request to a PlannedCommand."""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from precisionctl.commands.build import Result, build
from precisionctl.commands.codes import for_engine
from precisionctl.commands.former_codes import as_before
from precisionctl.commands.llama_cpp import for_llama_cpp
from precisionctl.commands.mlx import for_mlx
from precisionctl.commands.request import LLAMA_CPP, MLX, TE, Request, ResultKind
from precisionctl.commands.source import Source, open_source
from precisionctl.commands.te_state import with_te_state
from precisionctl.commands.values import as_values
from precisionctl.conversion.command import PlannedCommand

_log = logging.getLogger(__name__)


@contextmanager
def _without_garbage_collector() -> Iterator[None]:
    """A context without Python's cyclic garbage collector. It would scan a plan's objects again and again: hundreds of
    thousands, none of them garbage. That would take a quarter of the time of planning."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_without_garbage_collector()
def plan_command(request: Request) -> PlannedCommand:
    """Plan a request. If codes are asked for, and neither a target nor a recipe or modules say which, they are those
    that the weights had before, if these are known; else those of an export.

    Raises as `open_source`, as the function for the kind of result (`as_values`, `for_engine`, `as_before`,
    `with_te_state`, `for_llama_cpp`, `for_mlx`), and as `build`.
    """
    source = open_source(request)
    if source.engine:
        result = for_engine(source, source.engine)
    else:
        makers: Mapping[ResultKind, Callable[[Source], Result]] = {
            "values": as_values,
            "codes": as_before,
            TE: with_te_state,
            LLAMA_CPP: for_llama_cpp,
            MLX: for_mlx,
        }
        result = makers[request.kind](source)
    plan = result.plan
    _log.info("planned %d jobs that write %d tensors, %d bytes", len(plan.jobs), len(plan.targets), plan.nbytes)
    return build(source, result)

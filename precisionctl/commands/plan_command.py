"""How a request becomes a command that is ready to run."""

from precisionctl.commands.build import build
from precisionctl.commands.codes import as_before, for_engine
from precisionctl.commands.request import TE, Request
from precisionctl.commands.source import open_source
from precisionctl.commands.te_state import with_te_state
from precisionctl.commands.values import as_values
from precisionctl.conversion.command import PlannedCommand


def plan_command(request: Request) -> PlannedCommand:
    """Plan what is asked for. FP8 weights that no engine is named for are the codes that they were before, where that
    is known, else those of an export.

    Raises what opening and planning raise, what the result asks for (`as_values`, `for_engine`, `as_before`,
    `with_te_state`), and DestinationExists.
    """
    source = open_source(request)
    if request.target == TE:
        result = with_te_state(request, source)
    elif not request.for_inference:
        result = as_values(request, source)
    elif (
        request.target
        or request.recipe
        or request.include
        or request.exclude
        or not (source.encodings and source.encodings.quantization)
    ):
        result = for_engine(request, source)
    else:
        result = as_before(request, source)
    return build(request, source, result)

"""Find the table of a model family by its Hugging Face `model_type`."""

from functools import cache

from precisionctl import architectures
from precisionctl.architectures.param_map import Architecture
from precisionctl.discover import discover
from precisionctl.errors import UnknownArchitecture


@cache
def supported() -> dict[str, Architecture]:
    """Every table, by `model_type`."""
    tables: list[Architecture] = discover(architectures, "ARCHITECTURE")
    return {model_type: table for table in tables for model_type in table.model_types}


def architecture_of(model_type: str) -> Architecture:
    """The table for `model_type`. Raises UnknownArchitecture."""
    try:
        return supported()[model_type]
    except KeyError:
        raise UnknownArchitecture(
            f"no table for architecture `{model_type}`",
            do=f"Supported: {', '.join(sorted(supported()))}. "
            "A new family is one file with a table of rows in precisionctl/architectures/.",
        ) from None

"""Packages that only tests need, as judges. The project runs without them, and with an older transformers, so its tests
do too: those that need what is absent skip, and say what."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

BEFORE_5_23 = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
"""The checker's rules for transformers are those of 5.23 and 5.24."""

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What models take a cache of keys and values by: the second before transformers 5.24."""

LOADERS = {"compressed-tensors": "compressed_tensors", "fp8": "accelerate", "mxfp8": "accelerate"}
"""What transformers asks for before it loads a `quant_method`."""


def judge(package: str, reason: str = "it is the judge here") -> Any:
    """A package (or a module of it), imported. Skips the test where it is not installed."""
    return pytest.importorskip(package, reason=f"{package.partition('.')[0]} is not installed: {reason}")


def need_loader(directory: Path) -> None:
    """Skips the test where transformers lacks a package to load a directory."""
    stored = json.loads((directory / "config.json").read_text()).get("quantization_config", {})
    method = stored.get("quant_method")
    if method in LOADERS:
        judge(LOADERS[method], f"transformers does not load `quant_method: {method}` without it")

"""Exports of models that no table here describes, in vLLM's own config parser, name mapping and weight loader: every
stored tensor is found in its parameters, codes as the same codes. Names are not compared: vLLM maps and fuses them."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import any_models
import environments
import pytest
import torch
from in_vllm import load_in_vllm, out_of
from safetensors.torch import load_file

from precisionctl.checkpoints import huggingface

KINDS = (
    *("qwen3_next", "llama4_text", "qwen2_5_vl", "apertus", "opt", "granitemoeshared"),
    *("olmo", "persimmon", "olmo2", "olmoe", "glm4", "seed_oss"),
)
"""Text with experts one by one and in one tensor, hybrids, wrappers of images."""

CASES = [(kind, "dynamic") for kind in KINDS]

COMPUTED = ("A_log", "inv_freq", "act_fn.beta", "act_fn.eps")
"""Tensors of which vLLM keeps another function, or buffers."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root, made = tmp_path_factory.mktemp("vllm"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "read_model", any_models.untabled)
        for kind, scheme in CASES:
            source = root / kind
            if not source.is_dir():
                any_models.save(source, kind)
            made[kind, scheme] = root / f"{kind}-{scheme}"
            any_models.export(source, made[kind, scheme], scheme, "vllm")
    load_in_vllm(environments.vllm(), *made.values())
    return made


def _holds(parameters: Mapping[torch.dtype, set[bytes]], tensor: torch.Tensor) -> bool:
    """Whether the rows of a tensor, or its columns, are rows of them: their bytes, or their numbers in FP32 or BF16.
    vLLM puts tensors one after the other, and the rows of some in another order."""
    exact = tensor.dtype in (torch.float8_e4m3fn, torch.uint8)
    return any(
        _rows(turned.to(dtype)) <= parameters.get(dtype, set())
        for dtype in ((tensor.dtype,) if exact else (torch.bfloat16, torch.float32))
        for turned in ((tensor, tensor.transpose(-1, -2)) if tensor.ndim > 1 else (tensor,))
    )


def _rows(tensor: torch.Tensor) -> set[bytes]:
    whole = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1).contiguous()
    return {row.numpy().tobytes() for row in whole.view(torch.uint8)}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_vllm_holds_every_tensor_of_an_export_of_any_model(
    exports: dict[tuple[str, str], Path], case: tuple[str, str]
) -> None:
    out = out_of(exports[case])
    failure = out.with_name(f"{out.name}.error")
    assert not failure.is_file(), failure.read_text()
    parameters: dict[torch.dtype, set[bytes]] = defaultdict(set)
    for tensor in load_file(out).values():
        parameters[tensor.dtype] |= _rows(tensor)
    stored = any_models.stored(exports[case])
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) > 0
    left = [name for name, tensor in stored.items() if not name.endswith(COMPUTED) and not _holds(parameters, tensor)]
    assert not left

"""Our exports in four bits, and global scales, in vLLM's own config parser and weight loader; no kernel is run."""

from pathlib import Path

import conversions
import environments
import in_memory
import pico
import pytest
import torch
from in_vllm import load_in_vllm
from safetensors.torch import load_file
from torch import Tensor

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.request import Request
from precisionctl.fp8 import sidecar

SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}
FAMILIES = ("llama-3", "qwen3-moe")
SPELLED = (
    ("vllm", "nvfp4"),
    ("vllm", "nvfp4a16"),
    ("vllm", "mxfp4"),
    ("vllm", "w4a16"),
    ("tensorrt-llm", "nvfp4"),
)
CASES = [(family, *spelling) for family in FAMILIES for spelling in SPELLED]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERTS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
GLOBAL = ("weight_global_scale", "weight_scale_2", "input_global_scale", "input_scale")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Path]:
    """All of them, each with what vLLM made of it beside it: one start of vLLM for all."""
    root = tmp_path_factory.mktemp("vllm")
    made = {case: root / "-".join(case) for case in CASES}
    for family in FAMILIES:
        pico.save(root / family, family, dtype=torch.bfloat16, **SIZES)
        sidecar.write(root / family / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(root / family)))
    for (family, target, scheme), out in made.items():
        request = Request.export(root / family, out, target, scheme)  # type: ignore[arg-type]
        conversions.carry_out(request, workers=1)
    load_in_vllm(environments.vllm(), *made.values())
    return made


def names_of(name: str, experts: int) -> list[list[str]]:
    """The stored tensors that a parameter of vLLM is made of, by expert where it is of experts."""
    module, _, kind = name.rpartition(".")
    stem, _, last = module.rpartition(".")
    if last == "routed_experts":
        part, _, kind = kind.partition("_")
        return [[f"{stem}.{expert}.{each}.{kind}" for each in EXPERTS[part]] for expert in range(experts)]
    return [[f"{stem}.{part}.{kind}" for part in FUSED.get(last, (last,))] if stem else [name]]


def same(values: Tensor, stored: list[Tensor]) -> bool:
    """Codes and scales of groups bit for bit; vLLM rounds a vocabulary up to 64."""
    if stored[0].numel() == 1:
        return values.reshape(-1).tolist() == [float(each) for each in stored]
    whole = torch.cat([each.view(torch.uint8) if each.dtype.itemsize == 1 else each for each in stored])
    found = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
    return found.dtype == whole.dtype and torch.equal(found[: len(whole)], whole)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_vllm_holds_every_code_scale_and_global_scale_that_is_stored(
    directories: dict[tuple[str, ...], Path], case: tuple[str, ...]
) -> None:
    directory = directories[case]
    failure = Path(f"{directory}.out.error")
    assert not failure.is_file(), failure.read_text()
    stored, loaded = load_file(directory / "model.safetensors"), load_file(f"{directory}.out")
    taken: set[str] = set()
    shapes = {name for name in (*stored, *loaded) if name.endswith("weight_shape")}  # the last one of a fused linear's
    for name, values in loaded.items():
        if name in shapes:
            continue
        by_expert = names_of(name, len(values) if values.dim() else 1)
        parts = values if len(by_expert) > 1 else [values]
        for part, names in zip(parts, by_expert, strict=True):
            assert same(part, [stored[each] for each in names]), name
            taken |= set(names)
    assert stored.keys() - taken - shapes == set()


@pytest.mark.parametrize("case", [case for case in CASES if case[2].startswith("nvfp4")], ids=" ".join)
def test_what_vllm_computes_as_one_has_one_global_scale(
    directories: dict[tuple[str, ...], Path], case: tuple[str, ...]
) -> None:
    """It takes the largest of several for all (compressed_tensors_w4a4_nvfp4.py), and of experts gate's for both."""
    seen = 0
    for name, values in load_file(f"{directories[case]}.out").items():
        if name.endswith(GLOBAL) and values.numel() > 1:
            rows = values if "routed_experts" in name else values.reshape(1, -1)
            assert all(len(row.unique()) == 1 for row in rows), name
            seen += 1
    assert seen >= 4

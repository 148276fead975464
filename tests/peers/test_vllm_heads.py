"""BLOOM and Falcon, of which vLLM moves rows of queries, keys and values as it loads them: it loads what the checker
passes, with the same values, and raises an error for the rest. The exports are for SGLang, which moves none."""

from pathlib import Path

import conversions
import environments
import pico
import pytest
import torch
from in_vllm import load_in_vllm, out_of
from safetensors.torch import load_file

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.engines.base import engine_named
from precisionctl.verify.engine_rules import check

CASES: dict[tuple[str, str, int], bool] = {
    ("bloom", "dynamic", 64): True,
    ("bloom", "w4a16", 64): False,
    ("bloom", "block", 64): False,
    ("bloom", "block", 128): True,
    ("falcon-40b", "dynamic", 64): True,
    ("falcon-40b", "w4a16", 64): True,
    ("falcon-40b", "block", 64): False,
    ("falcon-40b", "block", 128): True,
}
"""Family, scheme, channels of a head; whether vLLM loads it."""

GROUPS = {"bloom": (4, 1), "falcon-40b": (2, 2)}
"""Groups of heads, and heads of queries in each."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, int], Path]:
    root, made = tmp_path_factory.mktemp("heads"), {}
    for case in CASES:
        family, scheme, channels = case
        sizes = {"hidden_size": 4 * channels, "ffn_hidden_size": 16 * channels}  # no other width, to vLLM
        source, made[case] = root / f"{family}-{channels}", root / f"{family}-{channels}-{scheme}"
        if not source.is_dir():
            pico.save(source, family, dtype=torch.bfloat16, num_attention_heads=4, **sizes)
        request = Request.export(source, made[case], "sglang", scheme)  # type: ignore[arg-type]
        conversions.carry_out(request, workers=1)
    load_in_vllm(environments.vllm(), *made.values())
    return made


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vllm_moves_rows_of_heads_where_the_checker_says_that_it_can(
    exports: dict[tuple[str, str, int], Path], case: tuple[str, str, int]
) -> None:
    out, loads = out_of(exports[case]), CASES[case]
    error = out.with_name(f"{out.name}.error")
    assert loads == (not error.is_file()), error.read_text()
    if not loads:
        assert "is invalid for input of size" in error.read_text()
    found = check(open_checkpoint(exports[case]), engine_named("vllm"))
    assert [finding.where.endswith("query_key_value.weight") for finding in found if finding.rule.fatal] == (
        [] if loads else [True, True]
    )


@pytest.mark.parametrize("case", [case for case in CASES if case[1:] == ("block", 128)], ids=str)
def test_blocks_of_whole_heads_are_moved_with_their_rows(
    exports: dict[tuple[str, str, int], Path], case: tuple[str, str, int]
) -> None:
    (file,) = exports[case].glob("*.safetensors")
    stored, held = (_values(load_file(each)) for each in (file, out_of(exports[case])))
    groups, queries = GROUPS[case[0]]
    heads = stored.unflatten(0, (groups, queries + 2, -1))
    moved = [heads[:, :queries], heads[:, queries], heads[:, queries + 1]]
    assert torch.equal(held, torch.cat([part.reshape(-1, stored.shape[1]) for part in moved]))


def _values(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The first layer's queries, keys and values, decoded."""
    parts = {name.rpartition(".")[2]: each for name, each in tensors.items() if ".0.self_attention.query_key" in name}
    (scale,) = (each for name, each in parts.items() if name.startswith("weight_scale"))
    return parts["weight"].float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)

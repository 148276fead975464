"""What a step's metrics say that it took: tokens counted by hand, and FP8 state set so that casts go wrong."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from pico import shape
from soaking import first
from training import make_source, make_text, run, settings

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.fp8.state import DelayedScaling, Fp8State, Role, RoleState
from precisionctl.precision import Precision
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.data.batch import Piece, make_batch
from precisionctl.trainer.measure.flops import training_flops
from precisionctl.trainer.measure.meter import Fp8Health, PendingStepCost, host_bytes
from precisionctl.trainer.measure.metrics import FILE
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.parallel.world import World


def test_a_run_says_of_each_step_what_it_took(tmp_path: Path) -> None:
    """Four rows of 32 tokens in each update."""
    source = make_source(tmp_path / "source")
    run(settings(source, make_text(tmp_path / "text"), tmp_path / "out", "fp8"))
    rows = [json.loads(line) for line in (tmp_path / "out" / FILE).read_text().splitlines()]
    update = training_flops(open_checkpoint(tmp_path / "out").model, [32] * 4)
    for row in rows:
        assert row["tflops"] * row["seconds"] == pytest.approx(update / 1e12)
        assert "mfu_bf16" not in row and "gpu_bytes" not in row  # nobody knows a CPU's peak
        assert 50e6 < row["host_bytes"] < 50e9
        assert row["fp8_clipped"] <= 1 and row["fp8_underflow"] == 0


def test_padding_is_no_token_and_texts_of_a_row_are_counted_apart() -> None:
    text = [Piece(torch.arange(count + 1).numpy(), None) for count in (5, 7, 3)]
    assert make_batch([[text[0]], [text[1]]], 0, 1).lengths == [5, 7]
    assert make_batch([[text[0], text[1]], [text[2]]], 0, 1).lengths == [5, 7, 3]


def test_the_driver_is_asked_for_the_name_of_a_gpu_once_for_all_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 7)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: asked.append(device) or "NVIDIA H200")
    device, world = torch.device("cuda", 63), World()
    costs = [PendingStepCost.of(1e12, world, device) for _ in range(2)]
    assert asked == [device] and {(cost.peak, cost.gpu_bytes) for cost in costs} == {(989e12, 7)}


TOKENS = torch.arange(32).view(2, 16)


def one_pass(model: GPT) -> None:
    model(TOKENS).float().logsumexp(-1).mean().backward()


@cache
def warmed_up(family: str, history: int) -> tuple[GPT, dict[str, Fp8State]]:
    """A model and the state that three passes leave."""
    torch.manual_seed(0)
    model = GPT(shape(family), Precision(fp8=True, delayed=DelayedScaling(amax_history_len=history)))
    for _ in range(3):
        one_pass(model)
    states = {name: state for name, linear in fp8_linears(model).items() if (state := linear.fp8_state())}
    assert states.keys() == fp8_linears(model).keys()
    return model, copy.deepcopy(states)


def health(family: str, role: Role, module: str, coded: float, history: int = 4) -> list[float]:
    """What is seen of a pass in which `role` of `module` has its amax at `coded`, in the units of codes, and all else
    has room for what that changes. The state comes from passes over the same tokens."""
    model, states = warmed_up(family, history)
    for name, linear in fp8_linears(model).items():
        kept = copy.deepcopy(states[name].roles)
        roles = {each: RoleState(part.scale / 4, part.amax_history) for each, part in kept.items()}
        if name == module:
            exact = kept[role]
            largest = torch.finfo(DelayedScaling().dtype(role)).max
            roles[role] = RoleState(coded / largest * exact.scale, exact.amax_history)
        linear.set_fp8_state(Fp8State(roles))
    seen = Fp8Health(model)
    with seen.watch():
        one_pass(model)
    assert seen.fractions is not None
    return seen.fractions.tolist()


QKV, FC2 = "decoder.layers.0.self_attention.linear_qkv", "decoder.layers.1.mlp.linear_fc2"


@pytest.mark.parametrize("history", first(1, [1, 4]))
@pytest.mark.parametrize(
    ("role", "module", "coded", "clipped", "underflow"),
    [
        ("input", QKV, 448, 0, 0),
        ("input", QKV, 463, 0, 0),
        ("input", QKV, 465, 1, 0),
        ("weight", QKV, 900, 1, 0),
        ("weight", QKV, 0.0157, 0, 0),
        ("weight", QKV, 0.0156, 0, 1),
        ("grad_output", FC2, 60500, 0, 0),  # the other scales move a gradient by a step of BF16, up to 0.8 %
        ("grad_output", FC2, 62500, 1, 0),
        ("grad_output", FC2, 6e-5, 0, 1),
    ],
)
def test_of_eight_modules_the_one_is_seen_whose_scale_is_wrong(
    role: Role, module: str, coded: float, clipped: int, underflow: int, history: int
) -> None:
    """The largest codes are 448 and 57344, the ones that would follow 480 and 65536: what is nearer to those is clipped
    by more than rounding. The smallest normal numbers are 2^-6 and 2^-14."""
    assert health("llama-3", role, module, coded, history) == [clipped / 8, underflow / 8]


def test_one_expert_is_enough_for_its_layer() -> None:
    assert health("mixtral", "weight", "decoder.layers.1.mlp.experts.linear_fc2", 600) == [1 / 8, 0]


def test_without_delayed_scaling_there_is_nothing_to_see() -> None:
    for precision in (Precision(fp8=False), Precision(fp8=True, scaling="current")):
        model = GPT(replace(shape("llama-3"), num_layers=1), precision)
        seen = Fp8Health(model)
        with seen.watch():
            model(torch.arange(16).view(1, 16)).sum().backward()
        assert seen.fractions is None


@pytest.mark.parametrize("status", ["Name:\tpython\nVmRSS:\t 90 kB\n", None], ids=["without it", "not there"])
def test_the_peak_of_a_process_is_told_where_proc_does_not_have_it(
    monkeypatch: pytest.MonkeyPatch, status: str | None
) -> None:
    """As under gVisor."""

    def read(_: Path) -> str:
        if status is None:
            raise FileNotFoundError
        return status

    known = host_bytes()
    monkeypatch.setattr(Path, "read_text", read)
    assert host_bytes() > 0.5 * known > 25e6


@pytest.mark.soak
def test_the_peak_of_a_process_is_not_that_of_what_began_it() -> None:
    """As Linux's `ru_maxrss` is, where this process has more."""
    kept = bytearray(os.urandom(1 << 20)) * 700
    code = "from precisionctl.trainer.measure.meter import host_bytes; print(host_bytes())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 50e6 < int(done.stdout) < len(kept)

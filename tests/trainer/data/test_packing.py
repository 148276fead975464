"""Texts that share a row are to the model what each is alone: transformers judges text by text, and we unpacked."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pico
import pytest
import torch
import torch.nn.functional as F
from gpt_models import CASES, VOCABULARY, as_gpt, converted, transformers_model
from soaking import in_soak
from torch import Tensor, nn
from transformers import PreTrainedModel

from precisionctl.fp8.state import DelayedScaling
from precisionctl.precision import Precision
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.backends.emulated import EmulatedBackend
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.data.batch import Batch, Piece, make_batch
from precisionctl.trainer.data.rows import pack_texts
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.passes import summed_loss
from precisionctl.trainer.sequences import PackedSequences

SIZES = (34, 47, 40, 35, 45, 36, 39)
"""Of texts; longer than the windows and than the contexts that rope scaling starts from in CASES, which must be the
same for all of them here."""


def texts() -> list[Piece]:
    pick = np.random.default_rng(0)
    return [Piece(pick.integers(VOCABULARY, size=size), pick.random(size) < 0.6) for size in SIZES]


def batches() -> tuple[Batch, Batch]:
    """The same texts, each a row, and packed into rows of 110."""
    pieces = texts()
    rows = pack_texts([piece.positions for piece in pieces], 110)
    assert sorted(map(len, rows)) == [2, 2, 3]
    return make_batch([[piece] for piece in pieces], 0, 1), make_batch([[pieces[i] for i in row] for row in rows], 0, 1)


def judged_by(theirs: PreTrainedModel) -> tuple[float, float]:
    """The loss summed over the targets of each text alone, and the norm of its gradient, but for that of LeRoPE's
    logarithms, which stay as they are here."""
    total = 0.0
    for piece in texts():
        assert piece.learned is not None
        tokens = torch.from_numpy(piece.tokens)[None]
        labels = tokens[0, 1:].where(torch.from_numpy(piece.learned[1:]), -100)
        logits = theirs(tokens[:, :-1]).logits[0]
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        loss.backward()
        total += float(loss.detach())
    learned = (each.grad for name, each in theirs.named_parameters() if not name.endswith(".rotary_emb.alpha"))
    return total, norm_of(gradient for gradient in learned if gradient is not None)


def norm_of(gradients: Iterable[Tensor]) -> float:
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm())


def gradients(model: GPT, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    total = summed_loss(model, batch)
    total.backward()
    return float(total.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


SLOW = {"ling-3 whose decays have no bound", "gemma3 stretched"}
"""Those that take seconds, and have neither a mixer nor positions of their own."""


def kinds(case: str) -> set[str]:
    """What a text's tokens read of others, and where they stand."""
    model = pico.shape(CASES[case][0])
    window = model.sliding_window is not None, model.attention_chunk_size is not None
    places = {("positions", model.position_embedding), ("window", window)}
    return pico.mixers(CASES[case][0]) | places | (set() if case in pico.FAMILIES.keys() | SLOW else {case})


@pytest.mark.parametrize("case", pico.representing(kinds, CASES, most=6))
def test_packed_and_unpacked_texts_have_the_same_loss_and_gradients(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    theirs = transformers_model(family, **changes)
    model = as_gpt(converted(theirs, tmp_path))
    alone, packed = batches()
    assert alone.packed is None and packed.packed is not None and alone.targets == packed.targets
    expected, one_by_one = gradients(model, alone)
    total, together = gradients(model, packed)
    assert total == pytest.approx(expected, rel=1e-6)
    loss, norm = judged_by(theirs)
    assert total == pytest.approx(loss, rel=2e-6) and norm_of(together.values()) == pytest.approx(norm, rel=1e-5)
    assert together.keys() == one_by_one.keys()
    for name, gradient in together.items():
        largest = float(one_by_one[name].abs().max())
        # a single number may be a sum that cancels (DeepSeek-V4's `alpha_pre`), and a root magnifies rounding (n-grams)
        most = max((5e-5 if ".ple." in name else 2e-5) * largest, 1e-7 * norm)
        torch.testing.assert_close(gradient, one_by_one[name], rtol=0, atol=most, msg=name)
    leaking = float(summed_loss(model, Batch(packed.tokens, packed.labels, packed.padding_mask)).detach())
    assert abs(leaking - expected) > 1e-5 * expected  # ten times what is allowed above


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows of their own"])
def test_longrope_turns_each_text_by_its_own_length(tmp_path: Path, packed: bool) -> None:
    """Texts beyond the original context and within it, in one batch: transformers judges each alone."""
    theirs = transformers_model("phi3-long")
    model = as_gpt(converted(theirs, tmp_path))
    pick = np.random.default_rng(1)
    pieces = [Piece(pick.integers(VOCABULARY, size=size), None) for size in (30, 60, 20, 18)]
    batch = make_batch([pieces[:3], pieces[3:]] if packed else [[piece] for piece in pieces], 0, 1)
    expected = 0.0
    for piece in pieces:
        tokens = torch.from_numpy(piece.tokens)
        with torch.no_grad():
            logits = theirs(tokens[None, :-1]).logits[0]
        expected += float(F.cross_entropy(logits, tokens[1:], reduction="sum"))
    assert float(summed_loss(model, batch).detach()) == pytest.approx(expected, rel=1e-6)


class DenseMask(nn.Module):
    """A kernel as Backend.attention describes it: softmax under one mask over all tokens of the batch."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences | None, window: int | None
    ) -> Tensor:
        packed = packed or PackedSequences((query.shape[1],) * len(query))
        query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
        tokens, heads, _ = query.shape
        ends = packed.cu_seqlens(query.device)
        assert ends.dtype == torch.int32 and int(ends[-1]) == tokens
        number = torch.arange(tokens)
        text = torch.bucketize(number, ends[1:], right=True)
        seen = (text[:, None] == text) & (number[:, None] >= number)
        if window is not None:
            seen &= number[:, None] - number < window
        spread = heads // key.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(spread, 1)) * self.scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(spread, 1)).flatten(1)


@pytest.mark.parametrize("family", ["llama-3", "gemma3", *in_soak("mistral", "deepseek-v3", "llama4")])
def test_a_kernel_of_a_backend_is_given_what_texts_one_by_one_are(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = converted(transformers_model(family), tmp_path)
    _, packed = batches()
    expected, one_by_one = gradients(as_gpt(made), packed)
    monkeypatch.setattr(EmulatedBackend, "attention", lambda _, model, scale: DenseMask(scale))
    total, together = gradients(as_gpt(made), packed)
    assert total == pytest.approx(expected, rel=1e-6)
    for name, gradient in together.items():
        largest = float(one_by_one[name].abs().max())
        torch.testing.assert_close(gradient, one_by_one[name], rtol=0, atol=2e-5 * largest, msg=name)


def test_in_fp8_a_packed_batch_records_what_the_unpacked_one_does(tmp_path: Path) -> None:
    """Padding aside, GEMMs meet the same tokens."""
    made = converted(transformers_model("llama-3"), tmp_path)
    model = GPT(made.model, Precision(fp8=True, delayed=DelayedScaling(amax_history_len=4)), dtype=torch.float32)
    model.load_state_dict(dict(made.tensors))
    histories = []
    for batch in batches():
        recorder = Recorder(model.precision, torch.device("cpu"))
        with model.recorded_by(recorder):
            summed_loss(model, batch).backward()
        histories.append(
            {
                name: state.roles["input"].amax_history.max()
                for name, state in recorder.states().items()
                if "input" in state.roles
            }
        )
    assert histories[0].keys() == histories[1].keys() >= fp8_linears(model).keys()
    for name, amax in histories[0].items():
        torch.testing.assert_close(histories[1][name], amax, rtol=1e-5, atol=0)

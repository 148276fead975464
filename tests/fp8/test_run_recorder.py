"""The recorder of runs that others own: its file is that of `calibrate` on the same batches, and it changes nothing."""

import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pico
import pytest
import repository
import torch
import torch.distributed as dist
import torch.nn.functional as F
from calibrating import HISTORY, asked
from conversions import run
from core_models import peer
from gpt_models import VOCABULARY, as_gpt, backward, converted
from installed import judge
from safetensors import safe_open
from te_pickles import of_module
from te_states import trained
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import make_source, make_text
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from precisionctl import api
from precisionctl.calibration import calibrate as calibration
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.output import Output
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.errors import DestinationExists, MissingFp8State, PrecisionError, RecipeError, UnknownArchitecture
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import CACHE, IN_USE, ROLES, DelayedScaling, Fp8State, Fp8States, RoleState
from precisionctl.param import Parallelism
from precisionctl.precision import PRESETS, Precision
from precisionctl.recording import rank_files
from precisionctl.recording.run_recorder import _amax, _largest
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.data import Batch
from precisionctl.trainer.model.gpt import GPT

SHORT = (f"precision.delayed.amax_history_len={HISTORY}",)

ROUNDED_ALIKE: dict[str, Any] = {
    "family": "phi3",
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1e8] * 32,
        "long_factor": [1e8] * 32,
    },
}
"""Of a model that transformers computes to the same bits as we do, once its norms are ones: each GEMM is one there too,
and where it would round products to BF16 (a norm's, and those of the angles) one factor is 1, or next to 0."""


class Place:
    """A source, what `calibrate` made of it, and the batches that it made it with."""

    def __init__(self, folder: Path, change: Callable[[PreTrainedModel], object], **source: Any) -> None:
        self.source, self.calibrated = folder / "source", folder / "calibrated"
        make_source(self.source, dtype=torch.bfloat16, **source)
        model = self.live()
        change(model)
        model.save_pretrained(self.source)
        make_text(folder / "text.txt", words=600)
        self.batches: list[tuple[Batch, int]] = []
        with pytest.MonkeyPatch.context() as patch:
            ours = calibration.recording_pass
            patch.setattr(
                calibration, "recording_pass", lambda gpt, *pair: self.batches.append(pair) or ours(gpt, *pair)
            )
            api.calibrate(asked(folder, self.calibrated, passes=4))

    def live(self) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.source, dtype=torch.bfloat16)
        return model.train()

    def pass_over(self, model: PreTrainedModel, number: int) -> None:
        """One of calibrate's passes, as a plain loop makes it."""
        batch, targets = self.batches[number]
        logits = model(batch.tokens).logits.float().flatten(0, 1)
        (F.cross_entropy(logits, batch.labels.flatten(), reduction="sum") / targets).backward()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("llama"), lambda model: None, family="llama-3")


def unmeasured(file: Path) -> bytes:
    """A file of `calibrate` without its statistics, which cost a pass as much as four passes, as the recorder's."""
    copy = file.with_name("unmeasured")
    sidecar.write(copy, replace(sidecar.read(file), statistics={}, producer="precisionctl's recorder in transformers"))
    return copy.read_bytes()


def histories(states: Fp8States) -> Iterator[tuple[str, str, Tensor]]:
    for module, state in states.modules.items():
        for role, part in state.roles.items():
            yield module, role, part.amax_history


@pytest.mark.usefixtures("bf16_kernels")  # transformers' products do not go through FP32
def test_the_file_is_that_of_calibrate_bit_for_bit(tmp_path: Path) -> None:
    def ones(model: PreTrainedModel) -> None:
        for name, parameter in model.named_parameters():
            if "norm" in name:
                nn.init.ones_(parameter)

    place = Place(tmp_path, ones, **ROUNDED_ALIKE)
    model = place.live()
    with api.record(model, tmp_path / "recorded", overrides=SHORT):
        for number in range(4):
            place.pass_over(model, number)
    assert (tmp_path / "recorded").read_bytes() == unmeasured(place.calibrated)


def test_where_transformers_rounds_otherwise_the_file_differs_by_that_and_is_of_the_same_weights(
    llama: Place, tmp_path: Path
) -> None:
    model = llama.live()
    with api.record(model, tmp_path / "recorded", overrides=SHORT):
        for number in range(4):
            llama.pass_over(model, number)
    ours, theirs = sidecar.read(tmp_path / "recorded"), sidecar.read(llama.calibrated)
    assert ours.of_weights == theirs.of_weights is not None
    assert list(ours.modules) == list(theirs.modules)
    found = {(module, role): rows for module, role, rows in histories(ours)}
    for module, role, rows in histories(theirs):
        assert (rows != 0).equal(found[module, role] != 0), (module, role)
        assert torch.allclose(rows, found[module, role], rtol=0.0 if role == "weight" else 0.02, atol=0), (module, role)
    # the inputs of the first layer come before anything that is rounded otherwise
    first = "decoder.layers.0.self_attention.linear_qkv"
    assert found[first, "input"].equal(theirs.modules[first].roles["input"].amax_history)


def test_an_export_takes_the_file(llama: Place, tmp_path: Path) -> None:
    model = llama.live()
    with api.record(model, tmp_path / "recorded"):
        llama.pass_over(model, 0)
    request = api.Request.export(llama.source, tmp_path / "out", "vllm", "static", fp8_state=tmp_path / "recorded")
    notes = api.convert(request, workers=1).notes
    assert not [note for note in notes if "WARNING" in note]
    state = sidecar.read(tmp_path / "recorded").modules["decoder.layers.0.mlp.linear_fc2"].roles["input"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        scale = file.get_tensor("model.layers.0.mlp.down_proj.input_scale")
    assert float(scale) == pytest.approx(float(state.amax_history.max()) / 448, rel=1e-6)


def test_nothing_of_the_run_changes_and_the_hooks_go(llama: Place, tmp_path: Path) -> None:
    def gradients(model: PreTrainedModel) -> list[Tensor]:
        llama.pass_over(model, 0)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    attention, model = AttentionInterface.get_interface, llama.live()
    plain = gradients(llama.live())
    with api.record(model, tmp_path / "recorded"):
        recorded = gradients(model)
    assert all(torch.equal(*pair) for pair in zip(plain, recorded, strict=True))
    hooks = [each for module in model.modules() for each in (module._forward_hooks, module._forward_pre_hooks)]
    assert not any(hooks) and AttentionInterface.get_interface is attention


@pytest.mark.parametrize("values", [[1.0, -2.0], [-1.0, -3.0], [0.5, 2.0], [-0.0, 0.0], [1.0, float("-inf")], []])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_magnitude_is_found_whatever_its_sign(values: list[float], dtype: torch.dtype) -> None:
    found = _amax(torch.tensor(values, dtype=dtype))
    assert float(found) == max(map(abs, values), default=0)
    assert _amax(torch.tensor([*values, float("nan")], dtype=dtype)).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(5))
def test_of_a_norm_s_rounded_output_few_tokens_tell_the_largest_before_rounding(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    multiplier = 0.5 + torch.rand(64, generator=generator)
    exact = torch.randn(400, 64, generator=generator)
    mask = torch.rand(400, generator=generator) < 0.8
    rounded = multiplier.to(dtype) * exact.to(dtype)  # twice, as Llama's norm in transformers
    exact = exact * multiplier
    for kept_of in (None, mask):
        real = exact if kept_of is None else exact[mask]
        kept = _largest(rounded, kept_of)
        assert exact[kept].abs().max() == real.abs().max() and kept.sum() < 40
    rounded[7, 3] = -torch.inf
    assert _largest(rounded, None).all()
    assert _largest(rounded[:0], None).shape == (0,) and _largest(torch.zeros(3, 2, dtype=dtype), None).all()


def test_a_norm_whose_bias_cancels_what_was_rounded_is_recorded_of_all_tokens(tmp_path: Path) -> None:
    """LayerNorm1P in transformers rounds `weight + 1`, here 1.004, to 1.0078. So the smaller of these tokens look
    larger beside a bias of -4 than the others."""
    model = pico.make("nemotron", dtype=torch.bfloat16)
    norm = model.model.layers[0].input_layernorm
    norm.weight.data.fill_(-1)[0] = 0.004
    norm.bias.data.fill_(0)[0] = -4
    candidates = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(0))
    candidates[:, 0] = 4.5
    candidates = candidates.bfloat16()
    exact = F.layer_norm(candidates.float(), (64,), norm.weight.float() + 1, norm.bias.float(), norm.eps)[:, 0]
    low, high = (candidates[(exact - at).abs() < 0.002][:4] for at in (-0.02, 0.012))
    model.model.embed_tokens.weight.data[:8] = torch.cat([low, high])
    with api.record(model, tmp_path / "recorded", overrides=SHORT):
        model(torch.arange(8)[None]).logits.sum().backward()
    state = sidecar.read(tmp_path / "recorded").modules["decoder.layers.0.self_attention.linear_qkv"]
    assert float(state.roles["input"].amax_history.max()) == pytest.approx(0.02, abs=0.0021)


def test_only_passes_with_gradients_are_rows_and_of_these_each_nth(llama: Place, tmp_path: Path) -> None:
    model = llama.live()
    with api.record(model, tmp_path / "recorded", overrides=SHORT, every=2):
        for number in range(4):
            llama.pass_over(model, number)
            with torch.no_grad():
                model(llama.batches[0][0].tokens)
    found = {(module, role): rows for module, role, rows in histories(sidecar.read(tmp_path / "recorded"))}
    model = llama.live()
    with api.record(model, tmp_path / "by hand", overrides=SHORT):
        for number in (0, 2):
            llama.pass_over(model, number)
    for module, role, rows in histories(sidecar.read(tmp_path / "by hand")):
        assert rows.equal(found[module, role]) and rows.count_nonzero() == (2 if role in IN_USE + CACHE else 0)


def test_padding_and_recomputed_layers_change_nothing(llama: Place, tmp_path: Path) -> None:
    tokens = llama.batches[0][0].tokens
    mask = torch.ones_like(tokens)
    mask[1, -8:] = 0
    files = []
    for number, (filler, recomputed) in enumerate([(0, False), (3, False), (0, True)]):
        model = llama.live()
        if recomputed:
            with warnings.catch_warnings(action="ignore"):  # its name changes in transformers 6
                model.gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        padded = tokens.masked_fill(mask == 0, filler)
        with api.record(model, tmp_path / str(number), overrides=SHORT):
            logits = model(padded, attention_mask=mask, use_cache=False).logits
            (logits.float().square() * mask[..., None]).sum().backward()
        files.append((tmp_path / str(number)).read_bytes())
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("recomputed", [False, True])
def test_several_padded_passes_may_come_before_one_backward(recomputed: bool, llama: Place, tmp_path: Path) -> None:
    """As in DPO: of each pass its own padding is left out, whatever its shape and the order."""
    tokens = llama.batches[0][0].tokens
    largest = []
    for together in (True, False):
        model = llama.live()
        if recomputed:
            with warnings.catch_warnings(action="ignore"):  # its name changes in transformers 6
                model.gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        with api.record(model, tmp_path / str(together), overrides=SHORT):
            losses = []
            for length, padding in ((16, 2), (16, 12), (11, 3)):
                mask = torch.ones(2, length, dtype=torch.long)
                mask[:, -padding:] = 0
                logits = model(tokens[:, :length], attention_mask=mask, use_cache=False).logits
                losses.append((logits.float().square() * mask[..., None]).sum() / length**4)
                if not together:
                    losses.pop().backward()
            if together:
                torch.stack(losses).sum().backward()
        states = sidecar.read(tmp_path / str(together))
        largest.append({(module, role): rows.amax(-1).tolist() for module, role, rows in histories(states)})
    assert recomputed or largest[0] == largest[1]  # a layer that is recomputed does not say of which pass


def as_megatron_s(family: str, folder: Path) -> GPT:
    """Our GPT has Megatron-Core's modules. With the attributes that TE's have it stands in for them."""
    made = converted(pico.make(family), folder)
    model = GPT(made.model, PRESETS["bf16"])
    model.load_state_dict(dict(made.tensors))
    for module in model.modules():
        if hasattr(module, "layer_norm_weight"):
            module.normalization, module.eps = module.norm.kind, module.norm.epsilon
            module.zero_centered_gamma = module.norm.zero_centered
    return model


@pytest.mark.parametrize("family", ["llama-3", "qwen3-moe", "deepseek-v3", "gpt2"])
def test_under_megatron_s_names_it_records_what_our_own_recorder_does(family: str, tmp_path: Path) -> None:
    model = as_megatron_s(family, tmp_path / "source")
    recorder = Recorder(Precision(fp8=True, delayed=DelayedScaling(amax_history_len=HISTORY)), torch.device("cpu"))
    batches = [torch.randint(VOCABULARY, (2, 48)) for _ in range(3)]
    for tokens in batches:
        with model.recorded_by(recorder):
            backward(model(tokens), tokens)
    with api.record(model, tmp_path / "recorded", overrides=SHORT):
        for tokens in batches:
            backward(model(tokens), tokens)
    states = recorder.states()
    if family == "deepseek-v3":  # a cache of latents, which no module is called with
        states = {name: state for name, state in states.items() if "core_attention" not in name}
    expected = Fp8States(recorder.precision.delayed, states, producer="precisionctl's recorder in Megatron-Core")
    sidecar.write(tmp_path / "expected", expected)
    assert (tmp_path / "recorded").read_bytes() == (tmp_path / "expected").read_bytes()


def test_processes_that_record_parts_leave_one_file_of_all(llama: Place, tmp_path: Path) -> None:
    """As one process that has all of their rows in each pass."""
    with pytest.MonkeyPatch.context() as patch:
        for rank in (0, 1):
            patch.setattr(rank_files, "_here", lambda rank=rank: (rank, 2))
            model = llama.live()
            with api.record(model, tmp_path / "parts", overrides=SHORT):
                for number in (0, 2):
                    llama.pass_over(model, number + rank)
            assert (tmp_path / "parts").exists() == (rank == 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts"]
    model = llama.live()
    with api.record(model, tmp_path / "each", overrides=SHORT):
        for number in range(4):
            llama.pass_over(model, number)
    each = {(module, role): rows for module, role, rows in histories(sidecar.read(tmp_path / "each"))}
    for module, role, rows in histories(sidecar.read(tmp_path / "parts")):
        expected = each[module, role][-4:].view(2, 2).amax(1)
        assert rows[-2:].equal(expected) and rows.count_nonzero() == expected.count_nonzero()


@pytest.mark.parametrize("at", ["its part is renamed", "it has seen all parts"])
def test_a_process_may_find_its_parts_merged_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The other one does all that it does in the moment after."""
    state = Fp8State({role: RoleState(torch.tensor(2.0), torch.tensor([0.0, 3.0])) for role in ROLES})
    states, out = Fp8States(DelayedScaling(amax_history_len=2), {"linear_fc1": state}), Output(tmp_path / "out")
    monkeypatch.setattr(rank_files, "_here", lambda: (0, 2))
    rank_files.write_part(out, states)
    rename, touch = os.rename, Path.touch

    def another_one() -> None:
        monkeypatch.undo()
        monkeypatch.setattr(rank_files, "_here", lambda: (0, 2))
        rank_files.write_part(out, states)

    def renamed(before: Path, after: Path) -> None:
        rename(before, after)
        if after.name.startswith("1 of 2"):
            another_one()

    def touched(path: Path, **options: bool) -> None:
        another_one()
        touch(path, **options)

    monkeypatch.setattr(rank_files, "_here", lambda: (1, 2))
    if at == "its part is renamed":
        monkeypatch.setattr(os, "rename", renamed)
    else:
        monkeypatch.setattr(Path, "touch", touched)
    rank_files.write_part(out, states)
    assert sidecar.read(tmp_path / "out").modules["linear_fc1"].roles["input"].amax_history.tolist() == [0, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_of_experts_of_which_some_are_recorded_each_keeps_its_number() -> None:
    recipe, amax = DelayedScaling(amax_history_len=2), torch.tensor([0.0, 3.0])
    state = Fp8State({role: RoleState(torch.tensor(2.0), amax) for role in ROLES})
    found = rank_files.merged([Fp8States(recipe, {"linear_fc1[3]": state, "linear_fc1[1]": state})])
    for part in found.modules["linear_fc1"].roles.values():
        assert part.recorded_each.tolist() == [False, True, False, True]
        assert part.amax_history[[1, 3]].equal(amax.expand(2, 2)) and part.scale.tolist() == [1, 2, 1, 2]


def test_parts_that_a_killed_run_left_are_not_merged(llama: Place, tmp_path: Path) -> None:
    def part(rank: int) -> api.RunRecorder:
        patch.setattr(rank_files, "_here", lambda: (rank, 2))
        recorder = api.RunRecorder(tmp_path / "out", overrides=SHORT)
        model = llama.live()
        recorder.attach(model)
        llama.pass_over(model, rank)
        return recorder

    with pytest.MonkeyPatch.context() as patch:
        part(1).finish()
        first = part(0)  # of the next run
        first.finish()
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_model_that_torch_has_wrapped_or_sharded_is_recorded_as_itself(
    kind: str, llama: Place, tmp_path: Path
) -> None:
    with api.record(plain := llama.live(), tmp_path / "plain", overrides=SHORT):
        llama.pass_over(plain, 0)
    model: Any = llama.live()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if kind == "DDP":
            model = DistributedDataParallel(model)
        else:
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
        with api.record(model, tmp_path / "wrapped", overrides=SHORT):
            llama.pass_over(model, 0)
    finally:
        dist.destroy_process_group()
    ours, theirs = sidecar.read(tmp_path / "wrapped"), sidecar.read(tmp_path / "plain")
    for (*_, rows), (*name, expected) in zip(histories(ours), histories(theirs), strict=True):
        assert rows.equal(expected), name
    assert ours.of_weights == (theirs.of_weights if kind == "DDP" else None)


def test_transformers_trainer_records_by_a_callback(llama: Place, tmp_path: Path) -> None:
    judge("accelerate", "transformers' Trainer asks for it")
    from transformers import Trainer, TrainingArguments  # for which each process that collects would import `datasets`

    rows = [{"input_ids": row, "labels": row} for batch, _ in llama.batches for row in batch.tokens]
    arguments = TrainingArguments(
        str(tmp_path / "run"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    callback = api.recorder_callback(tmp_path / "recorded", overrides=SHORT, every=1)
    model = llama.live()
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
    states = sidecar.read(tmp_path / "recorded")
    model.save_pretrained(tmp_path / "trained")
    assert states.iteration == 2 and states.of_weights == digest_weights(open_checkpoint(tmp_path / "trained"))
    for module, role, rows in histories(states):  # type: ignore[assignment]
        assert rows.count_nonzero() == (4 if role in IN_USE + CACHE else 0), (module, role)


def test_megatron_s_provider_records_so_many_passes_and_lets_go(tmp_path: Path) -> None:
    made = as_megatron_s("qwen3", tmp_path / "source")
    model = api.recorded_provider(lambda: made, tmp_path / "recorded", passes=2, overrides=SHORT, every=1)()
    for number in range(4):
        tokens = torch.randint(VOCABULARY, (2, 16))
        backward(model(tokens), tokens)
        assert (tmp_path / "recorded").exists() == (number >= 2)
    for _, role, rows in histories(sidecar.read(tmp_path / "recorded")):
        assert rows.count_nonzero() == (2 if role in IN_USE + CACHE else 0)


def test_megatron_s_provider_is_made_before_the_processes_know_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed run left is removed by the first process, and so not before one knows that it is that."""
    made, left = as_megatron_s("qwen3", tmp_path / "source"), tmp_path / "out.partial" / "0 of 2.safetensors"
    left.parent.mkdir()
    left.touch()
    providers = [api.recorded_provider(lambda: made, tmp_path / "out", passes=1) for _ in range(2)]
    for rank, provider in zip((1, 0), providers, strict=True):
        monkeypatch.setattr(rank_files, "_here", lambda rank=rank: (rank, 2))
        assert left.exists()
        provider()
    assert not left.exists()


@pytest.mark.parametrize("of_version_1", [False, True])
def test_what_transformer_engine_records_itself_is_taken(llama: Place, tmp_path: Path, of_version_1: bool) -> None:
    """Of q, k and v the largest of each row, as one GEMM of them would have recorded. TE 1 gives a file, and None of a
    module that has recorded nothing."""
    model, recipe = llama.live(), DelayedScaling(amax_history_len=4)
    attention = model.model.layers[0].self_attn
    for factor, linear in enumerate([attention.q_proj, attention.k_proj, attention.v_proj], 1):
        state = trained(4)
        data = of_module(
            replace(
                state,
                roles={
                    role: replace(part, amax_history=part.amax_history * factor) for role, part in state.roles.items()
                },
            ),
            recipe,
            (2, 9),
        )
        linear.fp8_meta = {"scaling_fwd": state.roles["input"]}
        given = io.BytesIO(data.numpy().tobytes()) if of_version_1 else data
        linear.get_extra_state = lambda given=given: given
    if of_version_1:
        fresh = model.model.layers[1].mlp.down_proj
        fresh.fp8_meta, fresh.get_extra_state = {"scaling_fwd": trained(4).roles["input"]}, lambda: None
    with api.record(model, tmp_path / "recorded", overrides=("precision.delayed.amax_history_len=4",)):
        llama.pass_over(model, 0)
    found = sidecar.read(tmp_path / "recorded").modules
    qkv = found["decoder.layers.0.self_attention.linear_qkv"].roles["input"]
    assert qkv.amax_history.equal(trained(4).roles["input"].amax_history * 3)
    assert found["decoder.layers.1.self_attention.linear_qkv"].roles["input"].amax_history.count_nonzero() == 1


def test_what_cannot_be_recorded_is_refused_by_name(llama: Place, tmp_path: Path) -> None:
    out, model = tmp_path / "out", llama.live()
    with pytest.raises(PrecisionError, match=r"no linears to record \(model.layers.1.mlp.experts\)"):
        with api.record(pico.make("qwen3-moe"), out):
            pass
    with pytest.raises(RecipeError, match="current scaling keeps no state"):
        with api.record(model, out, recipe="fp8-current"):
            pass
    with pytest.raises(RecipeError, match="every = 0 must be 1 or above"):
        with api.record(model, out, every=0):
            pass
    with pytest.raises(RecipeError, match="passes = 0 must be 1 or above"):
        api.recorded_provider(llama.live, out, passes=0)
    with pytest.raises(UnknownArchitecture, match="`Linear` is a model of neither"):
        with api.record(nn.Linear(2, 2), out):
            pass
    with pytest.raises(MissingFp8State, match="no pass with gradients"):
        with api.record(model, out), torch.no_grad():
            model(llama.batches[0][0].tokens)
    with pytest.raises(KeyError), api.record(model, out):
        raise KeyError  # nothing of a run that failed
    assert not list(tmp_path.iterdir()) and not model.model.layers[0].mlp.up_proj._forward_hooks
    out.write_text("mine")
    with pytest.raises(DestinationExists):
        with api.record(model, out):
            pass


def test_experts_in_one_tensor_may_be_left_out(tmp_path: Path) -> None:
    model = pico.make("qwen3-moe").train()
    kept = "precision.keep_bf16=['*.experts.*']"
    with api.record(model, tmp_path / "recorded", overrides=(*SHORT, kept)):
        tokens = torch.randint(VOCABULARY, (2, 16))
        model(tokens, labels=tokens).loss.backward()
    modules = sidecar.read(tmp_path / "recorded").modules
    assert "decoder.layers.1.self_attention.linear_qkv" in modules and not [
        name for name in modules if "experts" in name
    ]


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge("accelerate", "transformers' Trainer asks for it")
    pico.save(tmp_path / "Qwen3-0.6B", "qwen3")
    monkeypatch.chdir(tmp_path)
    page = (repository.DOCS / "recorder.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.+?)```", page, re.DOTALL):
        exec(code, names)
    for file in ("state.safetensors", "trainer.safetensors"):
        assert all(
            rows.count_nonzero() == 4 for _, role, rows in histories(sidecar.read(tmp_path / file)) if role in IN_USE
        )
    assert (tmp_path / "served" / "model.safetensors").exists()


FIRST = ("gemma3", "gpt-oss", "qwen3-next")
"""Norms that are 1 more, sinks, delta nets; the other families in `make soak`."""


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in FIRST else pytest.mark.soak) for each in pico.FAMILIES]
)
def test_modules_of_transformers_are_the_gemms_that_our_recorder_has(family: str, tmp_path: Path) -> None:
    """In FP32, where only the order of sums differs."""
    theirs, tokens = pico.make(family), torch.randint(VOCABULARY, (2, 24))
    precision = Precision(fp8=True, delayed=DelayedScaling(amax_history_len=HISTORY), keep_bf16=("*.experts.*",))
    with api.record(theirs, tmp_path / "recorded", overrides=(*SHORT, "precision.keep_bf16=['*.experts.*']")):
        theirs(tokens).logits.float().square().sum().backward()
    ours, recorder = as_gpt(converted(theirs, tmp_path / "source")), Recorder(precision, torch.device("cpu"))
    with ours.recorded_by(recorder):
        ours(tokens).float().square().sum().backward()
    found, expected = sidecar.read(tmp_path / "recorded").modules, recorder.states()
    classes = {type(each) for each in theirs.modules() if type(each).__name__.endswith("Attention")}
    # where keys and values are shown to
    asks = any("ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[each.__module__]) for each in classes)
    without_caches = ours.model.mla or not asks
    assert found.keys() == {name for name in expected if not (without_caches and "core_attention" in name)}
    for module, state in found.items():
        for role, part in state.roles.items():
            rows = expected[module].roles[role].amax_history
            rows = rows.bfloat16().float() if role == "weight" else rows
            torch.testing.assert_close(part.amax_history, rows, rtol=2e-3, atol=0, msg=f"{module} {role}")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "ranks"), [("llama-2", {"tensor_parallel": 2}), ("qwen3", {"data_parallel": 2}), ("deepseek-v3", {})]
)
def test_megatron_core_itself_records_what_our_recorder_does(
    family: str, ranks: dict[str, int], tmp_path: Path
) -> None:
    """In FP32, where only the order of sums differs; on several ranks one file of their parts."""
    theirs, tokens = pico.make(family), torch.arange(24).view(2, 12) * 7 % VOCABULARY
    ours = as_gpt(converted(theirs, tmp_path / "source"))
    recorder = Recorder(Precision(fp8=True), torch.device("cpu"))
    with ours.recorded_by(recorder):
        ours(tokens).float().square().sum().backward()
    cut = Parallelism(tensor=ranks.get("tensor_parallel", 1))
    run(tmp_path / "source", tmp_path / "megatron", "megatron", parallelism=cut)
    job = {"do": "load", "directory": str(tmp_path / "megatron" / "release"), "out": str(tmp_path / "logits")}
    job |= {"te_names": True, "tokens": tokens.tolist(), "record": str(tmp_path / "recorded")}
    peer(tmp_path, [job], **ranks)
    found = sidecar.read(tmp_path / "recorded").modules
    for module, state in recorder.states().items():
        if "core_attention" in module and family == "deepseek-v3":
            continue
        for role, part in state.roles.items():
            newest, expected = found[module].roles[role].amax_history[..., -1], part.amax_history[..., -1]
            if "experts.linear_fc2" in module and role != "weight":
                continue  # megatron-core multiplies by the router's weights before it, we and transformers after it
            expected = expected.bfloat16().float() if role == "weight" else expected
            torch.testing.assert_close(newest, expected, rtol=1e-4, atol=0, msg=f"{module} {role}")

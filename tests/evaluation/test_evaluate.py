"""Perplexity in the stored precision: against transformers' own model, and its own simulation of FP8 engines."""

import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import conversations
import four_bit_directories
import fp8_directories
import in_memory
import pico
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from fp8_directories import decoded_by_transformers
from installed import judge, need_loader
from safetensors.torch import load_file, save_file
from scoring import TOKENS, WORDS, in_fp32, rows_of, save
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.module import LiveModel
from precisionctl.cli import main
from precisionctl.conversion.convert import convert
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.dtypes import DType
from precisionctl.errors import DataError
from precisionctl.evaluate import evaluate, load, quantizers, stored_codes
from precisionctl.evaluate.quantizers import InputQuantizer, Mxfp4Inputs, Nvfp4Inputs, TokenInputs
from precisionctl.evaluate.stored import round_cached
from precisionctl.export.kv_cache import CacheScale
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8State, RoleState
from precisionctl.planning.make_plan import make_plan
from precisionctl.precision import Precision
from precisionctl.reports.evaluation import lines
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.backends.fp8_gemm import NativeOperand
from precisionctl.trainer.model.gpt import GPT


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "held_out.txt"
    numbers = torch.randint(1, 250, (200,), generator=torch.Generator().manual_seed(1))
    file.write_text(" ".join(f"w{number}" for number in numbers.tolist()))
    return file


@pytest.mark.parametrize(
    "family", pico.representing(pico.block_kinds, ["llama-3", "mistral", "llama-tied", "gpt2", "gemma3", "deepseek-v3"])
)
def test_perplexity_is_that_of_transformers_own_model(tmp_path, text, family):
    model = save(tmp_path / "model", family)
    found = evaluate(HuggingFaceReader(tmp_path / "model"), text, sequence_length=24)
    ids = [WORDS.index(word) for word in text.read_text().split()] + [0]
    starts = range(0, len(ids) - 24, 24)
    rows = torch.tensor([ids[start : start + 25] for start in starts])
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert found.loss == pytest.approx(float(expected), abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(float(expected)), rel=1e-5)
    assert found.tokens == rows[:, 1:].numel()
    assert found.precision == "float32"


def test_rows_are_never_longer_than_the_models_own(tmp_path, text):
    save(tmp_path / "model", max_position_embeddings=40)
    found = evaluate(HuggingFaceReader(tmp_path / "model"), text)
    assert (found.tokens, found.sequence_length) == (200 // 40 * 40, 40)
    assert "200 tokens in rows of 40," in lines(found, 40)[0]
    assert "200 tokens in rows of 40 (not 1,024: the model takes no longer ones)," in lines(found, 1024)[0]


def test_rows_are_no_longer_than_what_is_computed_of_sparse_attention(tmp_path, text):
    save(tmp_path / "model", "glm-moe-dsa", index_topk=48)
    assert evaluate(HuggingFaceReader(tmp_path / "model"), text).sequence_length == 48


@pytest.mark.parametrize(("broken", "perplexity"), [(1e30, math.inf), (math.nan, math.nan)])
def test_a_model_that_is_broken_has_no_finite_perplexity_and_the_way_to_the_fault_is_told(
    tmp_path, text, broken, perplexity
):
    save(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = broken
    save_file(tensors, file, metadata={"format": "pt"})
    found = evaluate(HuggingFaceReader(tmp_path / "model"), text)
    assert found.perplexity == pytest.approx(perplexity, nan_ok=True)
    assert any("inspect" in line for line in lines(found, 1024))


def test_the_last_learned_position_is_used_though_batches_are_padded_beyond_it(tmp_path, text):
    model = save(tmp_path / "model", "gpt2", n_positions=40, max_position_embeddings=40)  # rows of 40 are padded to 48
    found = evaluate(HuggingFaceReader(tmp_path / "model"), text)
    rows = torch.tensor([WORDS.index(word) for word in text.read_text().split()] + [0])
    with torch.no_grad():
        logits = model(rows[:-1].view(5, 40)).logits
    expected = F.cross_entropy(logits.flatten(0, 1), rows[1:])
    assert found.loss == pytest.approx(float(expected), abs=1e-5)


def test_progress_counts_up_to_all_rows(tmp_path, text):
    save(tmp_path / "model")
    seen = []
    evaluate(
        HuggingFaceReader(tmp_path / "model"), text, sequence_length=20, on_rows=lambda *counts: seen.append(counts)
    )
    assert seen == [(4, 10), (8, 10), (10, 10)]


def test_the_same_checkpoint_gives_the_same_perplexity_to_the_last_bit(tmp_path, text):
    save(tmp_path / "model", dtype=torch.bfloat16)
    first, second = (evaluate(HuggingFaceReader(tmp_path / "model"), text, sequence_length=16) for _ in range(2))
    assert first == second and first.precision == "bfloat16"


def independent(logits, source, labels):
    """Loss, its reference, KL(source || stored) and agreement, in float64, from logits `[rows, length, V]`."""
    stored, reference = (F.softmax(each.double(), -1) for each in (logits, source))
    losses = [-p.gather(-1, labels[..., None]).log().mean() for p in (stored, reference)]
    kl = (reference * (reference.log() - stored.log())).sum(-1).mean()
    return [*losses, kl, (stored.argmax(-1) == reference.argmax(-1)).double().mean()]


def test_kl_and_top_1_agreement_are_those_of_transformers_logits(tmp_path, text, monkeypatch):
    """Two models of which one is the other, disturbed; and logits are made piece by piece, to the same numbers."""
    source = save(tmp_path / "source")
    changed = save(tmp_path / "changed")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05 * parameter.std())
    changed.save_pretrained(tmp_path / "changed")
    rows = rows_of(text, 24)
    with torch.no_grad():
        logits, reference = (model(rows[:, :-1]).logits for model in (changed, source))
    loss, other, kl, top1 = (float(each) for each in independent(logits, reference, rows[:, 1:]))
    sizes = []
    made = GPT.logits

    def spied(model, hidden):
        logits = made(model, hidden)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(GPT, "logits", spied)
    readers = [HuggingFaceReader(tmp_path / name) for name in ("changed", "source")]
    for at_a_time in (1 << 24, 256 * 7):  # the vocabulary of 250 and its padding, for 7 tokens
        monkeypatch.setattr("precisionctl.evaluate.measure.LOGITS_AT_A_TIME", at_a_time)
        sizes.clear()
        found = evaluate(readers[0], text, against=readers[1], sequence_length=24)
        assert max(sizes) <= at_a_time
        assert found.loss == pytest.approx(loss, abs=1e-5) and found.against.loss == pytest.approx(other, abs=1e-5)
        assert found.against.perplexity == pytest.approx(math.exp(other), rel=1e-5)
        assert found.against.kl == pytest.approx(kl, rel=1e-3) and kl > 1e-5
        assert found.against.top1 == pytest.approx(top1) and 0.5 < top1 < 1


def test_a_checkpoint_against_itself_is_no_distance_away(tmp_path, text):
    save(tmp_path / "model", dtype=torch.bfloat16)
    readers = [HuggingFaceReader(tmp_path / "model") for _ in range(2)]
    found = evaluate(readers[0], text, against=readers[1], sequence_length=16)
    assert (found.against.kl, found.against.top1, found.against.loss) == (0, 1, found.loss)


def test_the_command_prints_both_perplexities_and_json_has_every_number(tmp_path, text):
    save(tmp_path / "model", dtype=torch.bfloat16)
    words = ["eval", str(tmp_path / "model"), "--against", str(tmp_path / "model"), "--data", str(text)]
    shown, said = (CliRunner().invoke(main, [*words, *more]) for more in ([], ["--json"]))
    assert shown.exit_code == said.exit_code == 0
    first, second, third = shown.stdout.splitlines()
    assert first.startswith("perplexity ") and second.endswith("of the source, bfloat16")
    assert third == "KL divergence 0 nats a token, top-1 agreement 100.00%"
    found = json.loads(said.stdout)
    assert found["against"] == {"perplexity": found["perplexity"], "loss": found["loss"]} | {
        "precision": "bfloat16",
        "kl": 0,
        "top1": 1,
    }


def test_conversations_that_were_cut_or_left_out_are_told(tmp_path):
    """The first has 11 tokens, of which rows of 8 targets have 9."""
    save(tmp_path / "model", dtype=torch.bfloat16)
    conversations.with_templates(conversations.PLAIN_TEMPLATE).save_pretrained(tmp_path / "model")
    asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "c d c d c d"}
    rows = [{"messages": [asked, answer]}, {"messages": [asked]}]
    conversations.write_rows(tmp_path / "rows.jsonl", rows)
    words = ["eval", str(tmp_path / "model"), "--data", str(tmp_path / "rows.jsonl"), "--sequence-length", "8"]
    shown, found = (CliRunner().invoke(main, [*words, *more]) for more in ([], ["--json"]))
    for note in ("1 conversation was cut to 8 tokens", "1 conversation was left out: nothing there to learn"):
        assert note in shown.stdout.splitlines() and note in json.loads(found.stdout)["notes"]


def test_a_checkpoint_without_a_tokenizer_is_evaluated_with_that_of_a_reference(tmp_path, text):
    save(tmp_path / "model", dtype=torch.bfloat16)
    shutil.copytree(tmp_path / "model", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    words = ["eval", str(tmp_path / "bare"), "--data", str(text)]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 1 and "no tokenizer" in refused.stderr and "--reference" in refused.stderr
    found = CliRunner().invoke(main, [*words, "--reference", str(tmp_path / "model")])
    assert found.stdout == CliRunner().invoke(main, ["eval", str(tmp_path / "model"), "--data", str(text)]).stdout != ""


def test_a_reference_with_another_vocabulary_is_refused(tmp_path, text):
    save(tmp_path / "model")
    pico.save(tmp_path / "other", vocab_size=300)
    with pytest.raises(DataError, match="vocabulary of 300"):
        evaluate(HuggingFaceReader(tmp_path / "model"), text, against=HuggingFaceReader(tmp_path / "other"))


# either scheme once, and a head that is tied or not; what has biases computes what is without, too
EXPORTS = [
    *(("llama-tied", "static"), ("llama-all-biases", "dynamic")),
    *(pytest.param(("llama-3", scheme), marks=pytest.mark.soak) for scheme in ("static", "dynamic")),
]


@pytest.fixture(params=EXPORTS, ids=str)
def exported(tmp_path, request):
    """An export whose other tensors are FP32, so that only FP8 rounds."""
    family, scheme = request.param
    save(tmp_path / "source", family, dtype=torch.bfloat16)
    source = HuggingFaceReader(tmp_path / "source")
    directory = tmp_path / "exported"
    in_memory.export(in_memory.with_state(source), directory, "compressed-tensors", scheme)
    in_fp32(directory)
    return directory


def test_transformers_loads_an_export_and_its_logits_are_those_of_our_own_decoding(exported):
    need_loader(exported)
    reader = HuggingFaceReader(exported)
    plan = make_plan(reader, "megatron", dtype=DType.float32)
    ours = GPT(plan.model, Precision(fp8=False), "emulated", torch.float32)
    convert(plan, reader, LiveModel(plan.model, dict(ours.named_parameters())))
    theirs = decoded_by_transformers(exported, CompressedTensorsConfig(dequantize=True))
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert (ours(TOKENS)[..., :250] - expected).abs().max() < 1e-5


def test_fp8_engines_are_simulated_as_compressed_tensors_does_it(exported):
    """transformers runs the linears on inputs that compressed-tensors rounds to FP8 and back."""
    need_loader(exported)
    model, precision = load(HuggingFaceReader(exported))
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    plain = decoded_by_transformers(exported, CompressedTensorsConfig(dequantize=True))
    with torch.no_grad():
        ours, expected = model(TOKENS)[..., :250], theirs(TOKENS).logits
        rounding = (plain(TOKENS).logits - expected).norm()
    assert rounding > 0.001 * expected.norm()
    assert (ours - expected).norm() < 0.001 * rounding
    assert precision.startswith("FP8 codes with ")


def test_kl_of_an_export_is_that_of_compressed_tensors_simulation_in_transformers(exported, text):
    """With an output layer that makes some tokens likelier than others, as training does."""
    need_loader(exported)
    paths = exported, exported.parent / "source"
    for path in paths:
        in_fp32(path, output=40.0)
    ours, reference = map(HuggingFaceReader, paths)
    found = evaluate(ours, text, against=reference, sequence_length=32)
    rows = rows_of(text, 32)
    with torch.no_grad():
        theirs, source = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(rows[:, :-1]).logits for path in paths
        )
    loss, other, kl, top1 = (float(each) for each in independent(theirs, source, rows[:, 1:]))
    assert kl > 1e-4 and found.against.kl == pytest.approx(kl, rel=0.01)
    assert found.loss == pytest.approx(loss, abs=1e-4) and found.against.loss == pytest.approx(other, abs=1e-5)
    assert found.against.top1 == pytest.approx(top1, abs=0.011)  # of 192 targets, two near ties


def test_both_spellings_of_an_export_evaluate_alike(tmp_path, text):
    save(tmp_path / "source", dtype=torch.bfloat16)
    source = in_memory.with_state(HuggingFaceReader(tmp_path / "source"))
    found = [
        evaluate(in_memory.export(source, tmp_path / method, method, "static"), text, sequence_length=16)
        for method in ("compressed-tensors", "modelopt")
    ]
    assert found[0] == found[1]
    assert found[0].precision == "FP8 codes with static input scales"


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
@pytest.mark.parametrize("spelling", ["compressed-tensor", "modelopt-channel", "fp8-block"])
def test_codes_of_every_format_are_worth_what_they_decode_to(tmp_path, codes, spelling):
    """FP64 sums of what inputs and weights decode to."""
    made = fp8_directories.make(tmp_path, spelling, codes=codes, hidden_size=256, intermediate_size=256)
    model, precision = load(HuggingFaceReader(tmp_path))
    assert precision.startswith("FP8 codes with")
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    linear = model.decoder.layers[0].mlp.linear_fc2
    with torch.no_grad():
        y = linear(x).double()
    inputs = linear.quantizers["input"].quantize(x).rows
    rounded = inputs.codes.double() * inputs.scale_inv.double()
    expected = rounded @ made["model.layers.0.mlp.down_proj.weight"].values.double().t()
    assert (y - expected).norm() < 4e-3 * expected.norm()


def test_inputs_of_fp8_weights_alone_stay_as_they_are(tmp_path):
    """As in vLLM (compressed_tensors.py, _is_fp8_w8a16): the model computes with decoded weights."""
    fp8_directories.make(tmp_path, "compressed-weights-alone")
    model, precision = load(HuggingFaceReader(tmp_path))
    decoded, _ = load(HuggingFaceReader(tmp_path), plain=True)
    assert precision == "bfloat16, with weights from FP8"
    tokens = torch.arange(32).view(1, 32)
    assert torch.equal(model(tokens), decoded(tokens))


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_experts_that_are_stored_as_codes_compute_with_those_under_one_input_scale_for_all(tmp_path, scheme):
    """An independent spelling: inputs rounded to codes and back, times the decoded weights, in float64."""
    save(tmp_path / "source", "mixtral", dtype=torch.bfloat16)
    source = in_memory.with_state(HuggingFaceReader(tmp_path / "source"))
    directory = tmp_path / "exported"
    in_memory.export(source, directory, "compressed-tensors", scheme)
    stored = load_file(directory / "model.safetensors")
    model, precision = load(HuggingFaceReader(directory))
    assert precision == f"FP8 codes with {'static' if scheme == 'static' else 'dynamic per-token'} input scales"
    counts, values = [5, 0, 7, 4], torch.randn(16, 64).bfloat16()
    with torch.no_grad():
        found = model.decoder.layers[1].mlp.experts.linear_fc1(values, counts)
    expected = []
    for expert, part in enumerate(values.double().split(counts)):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}"
        gate, up = (stored[f"{name}.{w}.weight"].double() * stored[f"{name}.{w}.weight_scale"] for w in ("w1", "w3"))
        if scheme == "static":
            recorded = source.fp8.modules["decoder.layers.1.mlp.experts.linear_fc1"].roles["input"].amax_history
            scale = recorded.max() / 448
            assert stored[f"{name}.w1.input_scale"] == stored[f"{name}.w3.input_scale"] == scale
        else:
            scale = part.abs().amax(1, keepdim=True).float() / 448
        codes = (part.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double()
        expected.append(codes * scale @ torch.cat([gate, up]).t())
    exact = torch.cat(expected)
    assert (found.double() - exact).norm() < 0.003 * exact.norm()  # BF16 rounds once: 2**-9 at worst
    plain = [
        part
        @ torch.cat(
            [
                read_tensor(source, f"model.layers.1.block_sparse_moe.experts.{e}.{w}.weight").double()
                for w in ("w1", "w3")
            ]
        ).t()
        for e, part in enumerate(values.double().split(counts))
    ]
    assert (found.double() - torch.cat(plain)).norm() > 0.01 * exact.norm()  # it was computed in FP8


def test_a_cache_in_fp8_gives_values_of_the_models_own_dtype():
    values = torch.tensor([1.0, 1.1, -460.0]).half().view(1, 1, 1, 3)
    core = torch.nn.Identity()
    core.forward = lambda query, key, value: (query, key, value)
    round_cached(core, CacheScale(0.5, 1.0))
    query, key, value = core(values, values, values)
    assert query is values and key.dtype == value.dtype == torch.float16
    assert key.flatten().tolist() == [1.0, 1.125, -224.0]  # of 0.5: 2.2 is next to 2.25, and 920 beyond 448
    assert value.flatten().tolist() == [1.0, 1.125, -448.0]


@pytest.fixture
def trained(tmp_path):
    """A Megatron checkpoint, in memory, of a run in FP8."""
    save(tmp_path / "source", dtype=torch.bfloat16)
    made = in_memory.to_megatron(in_memory.with_state(HuggingFaceReader(tmp_path / "source")))
    made.path = tmp_path
    return made


def test_a_megatron_checkpoint_with_live_state_computes_in_fp8_with_its_scales(trained):
    model, precision = load(trained)
    expected = GPT(trained.model, Precision(fp8=True, delayed=trained.fp8.recipe), "emulated")
    expected.load_state_dict(trained.tensors)
    for name, linear in fp8_linears(expected).items():
        linear.set_fp8_state(trained.fp8.modules[name])
    with torch.no_grad():
        assert torch.equal(model(TOKENS), expected(TOKENS))
    assert precision == "FP8 with delayed scaling, bfloat16 weights"


def test_a_reference_never_computes_in_fp8(trained):
    plain, precision = load(trained, plain=True)
    expected = GPT(trained.model, Precision(fp8=False), "emulated")
    expected.load_state_dict(trained.tensors)
    with torch.no_grad():
        assert torch.equal(plain(TOKENS), expected(TOKENS)) and not torch.equal(plain(TOKENS), load(trained)[0](TOKENS))
    assert precision == "bfloat16"


def test_a_module_without_state_stays_in_bf16(trained):
    modules = dict(trained.fp8.modules)
    left_out = "decoder.layers.0.mlp.linear_fc1"
    del modules[left_out]
    trained.fp8 = replace(trained.fp8, modules=modules)
    model, _ = load(trained)
    assert set(fp8_linears(model)) == set(modules)


def test_state_that_is_only_carried_or_not_recorded_yet_is_not_computed_with(trained):
    state = trained.fp8
    sidecar.write(trained.path / sidecar.RELATIVE, state)
    assert load(trained)[1] == "bfloat16"
    (trained.path / sidecar.RELATIVE).unlink()
    name, first = next(iter(state.modules.items()))
    waiting = Fp8State({**first.roles, "input": RoleState.fresh(4)})
    trained.fp8 = replace(state, modules={**state.modules, name: waiting})
    assert load(trained)[1] == "bfloat16"


def test_a_weight_of_zeros_whose_scale_is_1_for_ever_leaves_no_fp8_run_in_bf16(trained):
    name, first = next(iter(trained.fp8.modules.items()))
    trained.tensors[f"{name}.weight"].zero_()
    trained.fp8.modules[name] = Fp8State({**first.roles, "weight": RoleState.fresh(4)})
    trained.fp8 = replace(trained.fp8, of_weights=digest_weights(trained))
    assert load(trained)[1] == "FP8 with delayed scaling, bfloat16 weights"


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
@pytest.mark.parametrize("family", ["llama-3", "mixtral"])
def test_pytorchs_own_fp8_gemm_gives_the_logits_that_are_emulated(tmp_path, scheme, family, monkeypatch):
    """It is what a GPU computes with; PyTorch has one for a CPU, too."""
    save(tmp_path / "source", family, dtype=torch.bfloat16)
    source = in_memory.with_state(HuggingFaceReader(tmp_path / "source"))
    reader = in_memory.export(source, tmp_path / "out", "compressed-tensors", scheme)
    model, _ = load(reader)
    calls = []
    own = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: calls.append(a) or own(*a, **k))
    with torch.no_grad():
        emulated = model(TOKENS).float()
        assert not calls
        monkeypatch.setattr(quantizers, "_has_fp8_gemms", lambda device: True)
        found = model(TOKENS).float()
    assert len(calls) >= 8
    assert (found - emulated).norm() < 0.01 * emulated.norm()  # sums in another order, rounded to BF16 layer by layer


def test_sizes_that_no_fp8_gemm_takes_are_computed_without_one(monkeypatch):
    monkeypatch.setattr(quantizers, "_has_fp8_gemms", lambda device: True)
    for rows, columns, native in ((32, 48, True), (32, 40, False), (24, 48, False)):
        codes = torch.zeros(rows, columns).to(torch.float8_e4m3fn)
        weight = quantizers.StoredWeight(codes, torch.ones(rows, 1)).quantize(torch.zeros(1, columns))
        assert isinstance(weight.rows, NativeOperand) is native


def product_by_blocks(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
    """What PyTorch's scaled_mm asks for on Hopper (ScaledBlas.cpp, _scaled_block1x128_block128x128), in float64."""
    assert (recipe_a, recipe_b) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    (rows, inner), columns = a.shape, b.shape[1]
    groups = -(-inner // 128)
    filled = -(-groups // 4) * 4
    assert a.is_contiguous() and b.t().is_contiguous() and a.dtype == b.dtype == torch.float8_e4m3fn
    assert rows % 16 == inner % 16 == columns % 16 == 0
    assert scale_a.shape == (rows, groups) and scale_a.stride() == (1, rows)
    assert scale_b.shape == (filled, -(-columns // 128)) and scale_b.stride() == (1, filled)
    left = a.double() * scale_a.repeat_interleave(128, 1)[:, :inner]
    scales = scale_b[:groups].repeat_interleave(128, 0)[:inner].repeat_interleave(128, 1)[:, :columns]
    return (left @ (b.double() * scales)).to(output_dtype)


@pytest.mark.parametrize(("family", "head"), [("llama-3", 128), ("llama-3", 64), ("mixtral", 128)])
def test_blocks_are_given_to_pytorchs_own_gemm_as_it_wants_them(tmp_path, family, head, monkeypatch):
    """No CPU has it: what it asks for is checked, and the logits are those that are emulated. Where heads are of 64,
    queries and keys have come into one block, and are multiplied as before."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": head}
    save(tmp_path / "source", family, dtype=torch.bfloat16, **sizes)
    source = in_memory.with_state(HuggingFaceReader(tmp_path / "source"))
    reader = in_memory.export(source, tmp_path / "out", "fp8", "block")
    emulated, calls = load(reader)[0], []
    monkeypatch.setattr(stored_codes, "has_block_gemms", lambda device: True)
    monkeypatch.setattr(F, "scaled_mm", lambda *a, **k: calls.append(a) or product_by_blocks(*a, **k))
    own, words = load(reader)
    assert words == "FP8 codes with dynamic per-128 input scales"
    with torch.no_grad():
        expected = emulated(TOKENS).float()
        assert not calls
        found = own(TOKENS).float()
    shapes = {tuple(a.shape[1:]) + tuple(b.shape[1:]) for a, b, *_ in calls}
    assert {(256, 768), (384, 256)} <= shapes, "gate with up, and down"
    assert ((256, 4 * head + 2 * 2 * head) in shapes) == (head == 128)
    assert (found - expected).norm() < 0.02 * expected.norm()  # a product that is rounded first makes other codes


@pytest.mark.parametrize("tokens", [1e-9, 3.0])
def test_a_tokens_scale_is_its_amax_over_448_but_never_below_the_engines_floor(tokens):
    values = torch.tensor([[tokens, -tokens / 2], [1.0, 0.25]])
    quantized = TokenInputs().quantize(values).rows
    assert quantized.scale_inv.flatten().tolist() == [
        torch.tensor(max(tokens / 448, 1 / (448 * 512))).item(),
        torch.tensor(1 / 448).item(),
    ]
    assert quantized.codes[1].tolist() == [448.0, 112.0]


def fake_quantized(module: torch.nn.Module, values: torch.Tensor, **how: Any) -> torch.Tensor:
    """Inputs of a module as compressed-tensors simulates four bits."""
    quantization = judge("compressed_tensors.quantization")
    args = quantization.QuantizationArgs(num_bits=4, type="float", symmetric=True, **how)
    module.quantization_status = quantization.QuantizationStatus.FROZEN
    computing = judge("compressed_tensors.quantization.lifecycle.forward")
    fake: torch.Tensor = computing.forward_quantize(module, values, "input", args)
    return fake


def rounded(inputs: InputQuantizer, values: torch.Tensor) -> torch.Tensor:
    operand = inputs.quantize(values).rows
    return operand.summands() * operand.multiplier()


def test_inputs_in_nvfp4_are_what_compressed_tensors_makes_of_them() -> None:
    """Tiny groups, groups beyond the recorded amax of 3, and one of zeros among them."""
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    values[3] *= 1e-4
    values[5] *= 1.2
    values[7, :32] = 0
    module = torch.nn.Linear(256, 8)
    module.input_global_scale = torch.nn.Parameter(torch.tensor([2688 / 3]), requires_grad=False)
    how = {"strategy": "tensor_group", "group_size": 16, "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}
    expected = fake_quantized(module, values, **how)
    found = rounded(Nvfp4Inputs(torch.tensor(2688 / 3)), values)
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max() and not found[7, :32].any()
    assert 0.05 < (found - values).norm() / values.norm() < 0.2


def test_inputs_in_mxfp4_are_nearest_under_the_power_of_two_that_none_exceeds() -> None:
    values = torch.randn(16, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[2, :32] = 0
    values[3, 32:64] = 6.0
    found = rounded(Mxfp4Inputs(), values)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for row, group in itertools.product(range(16), range(3)):
        these = values[row, 32 * group : 32 * group + 32].float()
        scale = 2.0 ** math.ceil(math.log2(float(these.abs().max()) / 6)) if these.any() else 1.0
        off = (these.abs()[:, None] / scale - numbers).abs()
        here = found[row, 32 * group : 32 * group + 32]
        assert torch.equal((here.abs() - these.abs()).abs(), off.amin(1) * scale)


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("ct-nvfp4", "NVFP4 codes with static global input scales"),
        ("modelopt-nvfp4", "NVFP4 codes with static global input scales"),
        ("modelopt-mxfp4", "MXFP4 codes with dynamic per-32 input scales"),
        ("ct-mxfp4", "bfloat16, with weights from MXFP4"),
        ("ct-int4-128", "bfloat16, with weights from INT4"),
    ],
)
def test_inputs_of_four_bit_weights_are_rounded_where_engines_do_and_under_the_scale_that_they_take(
    tmp_path: Path, spelling: str, words: str
) -> None:
    """Of three scales for q, k and v engines take the largest number; the weights are what they decode to."""
    values = four_bit_directories.make(tmp_path / "made", spelling)
    model, precision = load(HuggingFaceReader(tmp_path / "made"))
    assert precision == words
    linear = model.decoder.layers[0].self_attention.linear_proj
    if "NVFP4" not in words:
        assert ("input" in linear.quantizers) == ("codes" in words)
        return
    stored = load_file(tmp_path / "made" / "model.safetensors")
    kind = four_bit_directories.SPELLINGS[spelling].input
    largest = max(float(stored[f"model.layers.0.self_attn.{part}_proj.{kind}"]) for part in "qkv")
    found = model.decoder.layers[0].self_attention.linear_qkv.quantizers["input"].divisor
    assert float(found) == pytest.approx(largest if spelling == "ct-nvfp4" else 1 / largest)
    weight = linear.quantizers["weight"].quantize(torch.empty(0)).rows.codes
    assert torch.equal(weight, values["model.layers.0.self_attn.o_proj.weight"])

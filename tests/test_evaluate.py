"""Perplexity in the stored precision: against transformers' own model, and its own simulation of FP8 engines."""

import json
import math
from dataclasses import replace
from pathlib import Path

import in_memory
import pico
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedTokenizerFast

from precisionctl import convert
from precisionctl.checkpoints.base import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.module import LiveModel
from precisionctl.evaluate import TokenInputs, evaluate, load
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8State, RoleState
from precisionctl.plan import make_plan
from precisionctl.precision import Precision
from precisionctl.trainer.backend import fp8_linears
from precisionctl.trainer.model import GPT

WORDS = ["<eos>", *(f"w{number}" for number in range(1, 250))]
DEQUANTIZES = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
TOKENS = torch.randint(1, 250, (2, 32), generator=torch.Generator().manual_seed(0))


def save(directory: Path, family="llama-3", **settings):
    """A pico model with a tokenizer of one token a word."""
    model = pico.save(directory, family, **settings)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(directory)
    return model


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "held_out.txt"
    numbers = torch.randint(1, 250, (200,), generator=torch.Generator().manual_seed(1))
    file.write_text(" ".join(f"w{number}" for number in numbers.tolist()))
    return file


@pytest.mark.parametrize("family", ["llama-3", "mistral", "llama-tied", "gpt2", "gemma3", "deepseek-v3"])
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
    assert evaluate(HuggingFaceReader(tmp_path / "model"), text).tokens == 200 // 40 * 40


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


EXPORTS = [("llama-3", "static"), ("llama-3", "dynamic"), ("llama-tied", "static"), ("llama-all-biases", "dynamic")]
OF_EXPERTS = [("mixtral", "static"), ("qwen3-moe", "dynamic"), ("deepseek-v3", "static")]


@pytest.fixture(params=EXPORTS, ids=str)
def exported(tmp_path, request):
    """An export whose other tensors are FP32, so that only FP8 rounds."""
    family, scheme = request.param
    sizes = {"q_lora_rank": 32, "qk_rope_head_dim": 16} if family == "deepseek-v3" else {}  # that an FP8 GEMM takes
    save(tmp_path / "source", family, dtype=torch.bfloat16, **sizes)
    source = HuggingFaceReader(tmp_path / "source")
    directory = tmp_path / "exported"
    in_memory.export(in_memory.with_state(source), directory, "compressed-tensors", scheme)
    file = directory / "model.safetensors"
    tensors = {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return directory


@DEQUANTIZES
@pytest.mark.parametrize("exported", [*EXPORTS, *OF_EXPERTS], ids=str, indirect=True)
def test_transformers_loads_an_export_and_its_logits_are_those_of_our_own_decoding(exported):
    reader = HuggingFaceReader(exported)
    plan = make_plan(reader, "megatron", dtype=torch.float32)
    ours = GPT(plan.model, Precision(fp8=False), "emulated", torch.float32)
    convert.run(plan, reader, LiveModel(plan.model, dict(ours.named_parameters())))
    theirs = AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert (ours(TOKENS)[..., :250] - expected).abs().max() < 1e-5


@DEQUANTIZES
def test_fp8_engines_are_simulated_as_compressed_tensors_does_it(exported):
    """transformers runs the linears on inputs that compressed-tensors rounds to FP8 and back."""
    model, precision = load(HuggingFaceReader(exported))
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    with torch.no_grad():
        ours, expected = model(TOKENS)[..., :250], theirs(TOKENS).logits
        rounding = (plain(TOKENS).logits - expected).norm()
    assert rounding > 0.001 * expected.norm()
    assert (ours - expected).norm() < 0.001 * rounding
    assert precision.startswith("FP8 codes with ")


def test_both_spellings_of_an_export_evaluate_alike(tmp_path, text):
    save(tmp_path / "source", dtype=torch.bfloat16)
    source = in_memory.with_state(HuggingFaceReader(tmp_path / "source"))
    found = [
        evaluate(in_memory.export(source, tmp_path / method, method, "static"), text, sequence_length=16)
        for method in ("compressed-tensors", "modelopt")
    ]
    assert found[0] == found[1]
    assert found[0].precision == "FP8 codes with static input scales"


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


@pytest.mark.parametrize("tokens", [1e-9, 3.0])
def test_a_tokens_scale_is_its_amax_over_448_but_never_below_the_engines_floor(tokens):
    values = torch.tensor([[tokens, -tokens / 2], [1.0, 0.25]])
    quantized = TokenInputs().quantize(values)
    assert quantized.scale_inv.flatten().tolist() == [
        torch.tensor(max(tokens / 448, 1 / (448 * 512))).item(),
        torch.tensor(1 / 448).item(),
    ]
    assert quantized.codes[1].tolist() == [448.0, 112.0]

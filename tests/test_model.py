"""The GPT against transformers: tiny random models of each family, weights carried over by hand."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from precisionctl.errors import UnknownArchitecture
from precisionctl.fp8.state import DelayedScaling
from precisionctl.model_shape import ModelShape, from_hf_config
from precisionctl.precision import PRESETS, Precision
from precisionctl.trainer.backend import fp8_linears
from precisionctl.trainer.model import GPT, inverse_frequencies, loss, sliding_window_mask

BF16 = PRESETS["bf16"]
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,  # large enough for attention to be far from uniform
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, Any] = {
    "Llama 2: multi-head attention": LlamaConfig(**SIZES),
    "Llama 3: grouped queries, scaled rope": LlamaConfig(**SIZES, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE),
    "Llama with tied embeddings": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "Llama with all biases": LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "Llama with a head size of its own": LlamaConfig(**SIZES, num_key_value_heads=1, head_dim=32),
    "Mistral with a window shorter than the text": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=7),
    "Mistral with a window longer than the text": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=99),
    "Mistral without a window": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=None),
    "Yi: Llama under its own numbers": LlamaConfig(
        **SIZES, num_key_value_heads=1, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 5e6}
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    theirs = random_transformers_model(FAMILIES[family])
    shape = from_hf_config(theirs.config.to_dict())
    ours = GPT(shape, BF16, dtype=torch.float32)
    load(ours, megatron_weights(theirs.state_dict(), shape))
    tokens = torch.randint(shape.vocab_size, (3, 48))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert expected.std() > 0.3
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-5)


def test_a_padded_vocabulary_changes_neither_logits_nor_loss() -> None:
    theirs = random_transformers_model(FAMILIES["Llama 2: multi-head attention"])
    shape = from_hf_config(theirs.config.to_dict())
    padded = GPT(shape.padded(128), BF16, dtype=torch.float32)
    weights = megatron_weights(theirs.state_dict(), shape)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        weights[name] = torch.cat([weights[name], torch.full((32, 64), 3.0)])
    load(padded, weights)
    tokens = torch.randint(shape.vocab_size, (2, 33))
    expected = theirs(tokens, labels=tokens)
    logits = padded(tokens)
    total, count = loss(logits[:, :-1], tokens[:, 1:], torch.ones_like(tokens[:, 1:], dtype=torch.bool), 96)
    torch.testing.assert_close(logits[..., :96], expected.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(total / count, expected.loss, rtol=0, atol=1e-5)
    total.backward()
    assert not padded.output_layer.weight.grad[96:].any()


def test_losses_of_micro_batches_add_up_to_the_loss_of_the_batch() -> None:
    logits, targets = torch.randn(4, 8, 32, dtype=torch.float64), torch.randint(32, (4, 8))
    mask = torch.rand(4, 8) < 0.6
    parts = [loss(logits[i : i + 1], targets[i : i + 1], mask[i : i + 1], 32) for i in range(4)]
    total, count = loss(logits, targets, mask, 32)
    assert int(count) == sum(int(part[1]) for part in parts) == int(mask.sum())
    torch.testing.assert_close(sum(part[0] for part in parts), total)
    expected = F.cross_entropy(logits[mask].float(), targets[mask])
    torch.testing.assert_close(total / count, expected)


def test_a_masked_target_has_no_part_in_the_gradient() -> None:
    logits = torch.randn(1, 4, 16, requires_grad=True)
    mask = torch.tensor([[True, False, True, False]])
    loss(logits, torch.randint(16, (1, 4)), mask, 16)[0].backward()
    assert logits.grad is not None
    assert (logits.grad.abs().sum(-1) > 0).equal(mask)


def test_parameters_are_named_and_shaped_as_megatron_core_names_them() -> None:
    theirs = random_transformers_model(FAMILIES["Llama with all biases"])
    shape = from_hf_config(theirs.config.to_dict())
    expected = {name: tuple(t.shape) for name, t in megatron_weights(theirs.state_dict(), shape).items()}
    assert {name: tuple(p.shape) for name, p in GPT(shape, BF16).named_parameters()} == expected
    assert set(GPT(shape, PRESETS["fp8-delayed"]).state_dict()) == set(expected)


def test_a_bias_that_only_megatron_has_stays_zero() -> None:
    """Hugging Face can have biases in attention alone; Megatron's other biases must not be trained then."""
    shape = dataclasses.replace(tiny_shape(), attention_bias=True, add_bias_linear=True, add_qkv_bias=True)
    trained = {name for name, p in GPT(shape, BF16).named_parameters() if name.endswith("bias") and p.requires_grad}
    assert {name.split(".")[-2] for name in trained} == {"linear_qkv", "linear_proj"}


def test_rope_scaling_other_than_llama_3_is_refused() -> None:
    scaled = dataclasses.replace(tiny_shape(), rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(UnknownArchitecture, match="yarn"):
        inverse_frequencies(scaled)


def test_a_window_counts_the_query_itself() -> None:
    mask = sliding_window_mask(torch.arange(5), 2)
    assert mask is not None
    assert mask.sum(1).tolist() == [1, 2, 2, 2, 2]
    assert sliding_window_mask(torch.arange(5), 5) is None


@pytest.mark.parametrize("preset", ["bf16", "fp8-delayed", "fp8-current"])
def test_the_same_inputs_give_the_same_bits(preset: str) -> None:
    def gradients() -> list[Tensor]:
        torch.manual_seed(5)
        model = GPT(tiny_shape(), PRESETS[preset])
        for _ in range(3):
            tokens = torch.randint(96, (2, 32))
            loss(model(tokens), tokens, torch.ones_like(tokens, dtype=torch.bool), 96)[0].backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    first, second = gradients(), gradients()
    assert len(first) == 2 * 6 + 3
    assert all(map(torch.equal, first, second))


def test_training_updates_every_scale_and_evaluation_none() -> None:
    model = GPT(tiny_shape(), Precision(fp8=True, delayed=DelayedScaling(amax_history_len=4)))
    linears = fp8_linears(model)
    tokens = torch.randint(96, (2, 32))
    with torch.no_grad():
        model(tokens)
    assert not any(recorded(linear) for linear in linears.values())
    loss(model(tokens), tokens, torch.ones_like(tokens, dtype=torch.bool), 96)[0].backward()
    assert {name for name, linear in linears.items() if recorded(linear) == {"input", "weight", "grad_output"}} == {
        f"decoder.layers.{layer}.{module}"
        for layer in (0, 1)
        for module in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    before = {name: linear.fp8_state() for name, linear in linears.items()}
    with torch.no_grad():
        model(5 * tokens % 96)
    for name, linear in linears.items():
        assert same_state(linear.fp8_state(), before[name])


def test_recording_computes_in_bf16_and_fills_one_history_row_per_pass() -> None:
    torch.manual_seed(1)
    fp8 = GPT(tiny_shape(), Precision(fp8=True, delayed=DelayedScaling(amax_history_len=4)))
    bf16 = GPT(tiny_shape(), BF16)
    bf16.load_state_dict(fp8.state_dict())
    for _ in range(2):
        tokens = torch.randint(96, (2, 32))
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        with fp8.recording():
            logits = fp8(tokens)
            loss(logits, tokens, everywhere, 96)[0].backward()
        expected = bf16(tokens)
        loss(expected, tokens, everywhere, 96)[0].backward()
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    for ours, theirs in zip(fp8.parameters(), bf16.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
    for linear in fp8_linears(fp8).values():
        state = linear.fp8_state()
        assert state is not None
        for role in ("input", "weight", "grad_output"):
            assert state.roles[role].amax_history.count_nonzero() == 2
            assert state.roles[role].scale != 1


def test_modules_kept_in_bf16_have_no_state_and_plain_arithmetic() -> None:
    kept = Precision(fp8=True, keep_bf16=("*.layers.0.*", "*.linear_fc2"))
    assert set(fp8_linears(GPT(tiny_shape(), kept))) == {
        "decoder.layers.1.self_attention.linear_qkv",
        "decoder.layers.1.self_attention.linear_proj",
        "decoder.layers.1.mlp.linear_fc1",
    }
    everything = GPT(tiny_shape(), Precision(fp8=True, keep_bf16=("*",)))
    plain = GPT(tiny_shape(), BF16)
    plain.load_state_dict(everything.state_dict())
    tokens = torch.randint(96, (2, 5))
    assert torch.equal(plain(tokens), everything(tokens))


def recorded(linear: Any) -> set[str]:
    return {role for role, state in linear.fp8_state().roles.items() if state.recorded}


def same_state(one: Any, other: Any) -> bool:
    return all(
        torch.equal(one.roles[role].scale, other.roles[role].scale)
        and torch.equal(one.roles[role].amax_history, other.roles[role].amax_history)
        for role in one.roles
    )


def tiny_shape() -> ModelShape:
    config = LlamaConfig(**{**SIZES, "num_key_value_heads": 2})
    return from_hf_config(config.to_dict())


def random_transformers_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = {"llama": LlamaForCausalLM, "mistral": MistralForCausalLM}[config.model_type](config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model


def megatron_weights(hf: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """transformers' weights under Megatron's names, written out here so that no code under test maps them."""
    weights = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if not shape.tied_embeddings:
        weights["output_layer.weight"] = hf["lm_head.weight"]
    for layer in range(shape.num_layers):
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        attention, mlp = f"{ours}.self_attention", f"{ours}.mlp"
        weights[f"{attention}.linear_qkv.layer_norm_weight"] = hf[f"{theirs}.input_layernorm.weight"]
        weights[f"{mlp}.linear_fc1.layer_norm_weight"] = hf[f"{theirs}.post_attention_layernorm.weight"]
        for kind in ("weight", "bias"):
            if f"{theirs}.self_attn.q_proj.{kind}" in hf:
                q, k, v = (hf[f"{theirs}.self_attn.{p}_proj.{kind}"] for p in "qkv")
                weights[f"{attention}.linear_qkv.{kind}"] = interleave_by_group(q, k, v, shape)
                weights[f"{attention}.linear_proj.{kind}"] = hf[f"{theirs}.self_attn.o_proj.{kind}"]
            if f"{theirs}.mlp.gate_proj.{kind}" in hf:
                gate, up = (hf[f"{theirs}.mlp.{p}_proj.{kind}"] for p in ("gate", "up"))
                weights[f"{mlp}.linear_fc1.{kind}"] = torch.cat([gate, up])
                weights[f"{mlp}.linear_fc2.{kind}"] = hf[f"{theirs}.mlp.down_proj.{kind}"]
    return weights


def interleave_by_group(query: Tensor, key: Tensor, value: Tensor, shape: ModelShape) -> Tensor:
    queries = query.split(shape.num_attention_heads // shape.num_query_groups * shape.kv_channels)
    keys, values = key.split(shape.kv_channels), value.split(shape.kv_channels)
    return torch.cat([rows for group in zip(queries, keys, values, strict=True) for rows in group])


def load(model: GPT, weights: dict[str, Tensor]) -> None:
    model.load_state_dict(weights)

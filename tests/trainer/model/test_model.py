"""The GPT against transformers: tiny random models of each family."""

import dataclasses
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pico
import pytest
import torch
import torch.nn.functional as F
from gpt_models import (
    CASES,
    VOCABULARY,
    as_gpt,
    backward,
    both_gradients,
    clear_tokens,
    converted,
    everywhere,
    same_state,
    tiny_shape,
    transformers_model,
)
from in_memory import InMemory
from soaking import few, in_soak
from torch import Tensor

from precisionctl.architectures.families import from_hf_config, to_hf_config
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.fp8.state import DelayedScaling
from precisionctl.model.model_shape import ModelShape
from precisionctl.precision import PRESETS, Precision
from precisionctl.recipe import Optimizer
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.loss import loss
from precisionctl.trainer.model.positions import sliding_window_mask
from precisionctl.trainer.optimizer.adamw import MasterAdamW

BF16 = PRESETS["bf16"]

MATTERS: list[tuple[str, dict[str, Any]]] = [
    ("llama-3", {"rope_scaling": None}),
    ("mistral", {"sliding_window": None}),
    ("qwen2-window", {"window_layers": None}),
    ("qwen3-moe-scores-of-all", {"moe.pre_softmax": False}),
    ("phi3-long", {"rope_scaling": None}),
    ("nemotron", {"rotary_percent": 1.0}),
    ("nemotron", {"activation": "silu"}),
    ("nemotron", {"zero_centered_gamma": False}),
    ("gpt2", {"activation": "gelu"}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": None}),
    ("gemma2", {"embedding_multiplier": 1.0}),
    ("gemma2", {"activation": "silu"}),
    ("gemma3", {"rotary_base_local": None}),
    ("gemma3", {"window_layers": None}),
    ("gemma3n", {"activation_sparsity": None}),
    ("gemma3n", {"per_layer_vocab_size": None}),
    ("gemma4", {"v_l2_norm": False}),
    ("gemma4", {"rope_scaling": None}),
    ("gemma4", {"rotary_base_local": None}),
    ("gemma4", {"query_pre_attn_scalar": None}),
    ("gemma4", {"final_logit_softcapping": None}),
    ("gpt-oss", {"activation": "silu"}),
    ("gpt-oss", {"activation_clamp": None}),
    ("gpt-oss", {"glu_offset": 0.0}),
    ("gpt-oss", {"window_layers": None}),
    ("gpt-oss", {"rope_scaling": None}),
    ("gpt-oss", {"moe.pre_softmax": True}),
    ("deepseek-v2", {"moe.pre_softmax": False}),
    ("deepseek-v2-groups", {"moe.num_groups": None}),
    ("deepseek-v2-groups", {"moe.group_scores": 2}),
    ("deepseek-v2-groups", {"moe.topk_scaling_factor": 1.0}),
    ("deepseek-v3", {"moe.num_groups": None}),
    ("deepseek-v3", {"moe.group_scores": 1}),
    ("deepseek-v3", {"moe.score_function": "softmax"}),
    ("deepseek-v3", {"moe.topk_scaling_factor": 1.0}),
    ("deepseek-v3", {"rope_scaling": pico.YARN_ROPE}),
    ("glm4", {"rotary_interleaved": False}),
    ("smollm3", {"rope_layers": None}),
    ("cohere2", {"rope_layers": None}),
    ("exaone4", {"rope_layers": None}),
    ("granite", {"residual_multiplier": 1.0}),
    ("granite", {"logits_scaling": 1.0}),
    ("granite", {"query_pre_attn_scalar": None}),
    ("gpt-neox", {"parallel_residual": False}),
    ("olmo3", {"rotary_base_local": None}),
    ("dots1", {"window_layers": None}),
    ("hy-v3", {"moe.topk_scaling_factor": 1.0}),
    ("exaone-moe", {"rope_layers": None}),
    ("afmoe", {"rope_layers": None}),
    ("afmoe", {"embedding_multiplier": 1.0}),
    ("mellum", {"rotary_base_local": None}),
    ("hunyuan-moe", {"qk_layernorm_after_rope": False}),
    ("granite-swa", {"rope_layers": None}),
    ("granite-swa", {"rotary_base_local": None}),
    ("cohere2-moe", {"rope_layers": None}),
    ("cohere2-moe", {"moe.pre_softmax": False}),
    ("cohere2-moe", {"moe.shared_average": False}),
    ("mimo-v2-flash", {"attention_value_scale": 1.0}),
    ("mimo-v2-flash", {"rotary_base_local": None}),
    ("laguna", {"rope_scaling": None}),
    ("phimoe", {"moe.sparsemixer_eps": 0.01}),
    ("olmo", {"clip_qkv": None}),
    ("laguna", {"moe.topk_scaling_factor": 1.0}),
    ("mimo-v2-flash", {"rotary_percent": 0.5}),
    ("minicpm3", {"residual_multiplier": 1.0}),
    ("minicpm3", {"logits_scaling": 1.0}),
    ("kolibri1", {"moe.expert_bias_on_logits": False}),
    ("kolibri1", {"moe.pre_softmax": False}),
    ("kolibri1", {"rope_layers": None}),
    ("lfm3", {"rope_scaling": None}),
    ("lfm3", {"rotary_base_local": None}),
    ("lfm3", {"linear_gate": "softplus per head"}),
    ("nanochat", {"embedding_norm": False}),
    ("nanochat", {"qk_l2_norm": False}),
    ("opt", {"activation": "squared_relu"}),
    ("bloom", {"position_embedding": "rope"}),
    ("mpt", {"clip_qkv": None}),
    ("bamba", {"rotary_percent": 1.0}),
    ("jamba", {"moe.pre_softmax": False}),
    ("jamba", {"rope_layers": None}),
    ("gpt-neo", {"query_pre_attn_scalar": None}),
    ("gpt-neo", {"window_layers": None}),
    ("flint", {"rope_layers": None}),
    ("flint", {"moe.score_function": "softmax"}),
    ("hy4", {"moe.activation_clamp": None}),
    ("hy4", {"mhc.magnitude": 2.0}),
    ("hy4", {"mhc.epsilon": 0.01}),
    ("hy4", {"linear_gate": "softplus per element"}),
    ("qwen4", {"mhc.magnitude": 1.0}),
    ("qwen4", {"gdn.output_gate": "silu"}),
    ("qwen4", {"msa.topk_blocks": 3}),
    ("qwen4", {"ple.end_token": 3}),
    ("mistral-large-4", {"final_logit_softcapping": None}),
    ("mistral-large-4", {"rope_scaling": None}),
    ("mistral-large-4", {"moe.pre_softmax": True}),
    ("glm-5.3", {"mhc.mhc_sinkhorn_iterations": 1}),
    ("glm-5.3", {"gdn.kda_lower_bound": None}),
    ("glm-5.3", {"activation_clamp": None}),
    ("muse-glimmer", {"qk_l2_norm_everywhere": False}),
    ("muse-glimmer", {"final_gamma_whole": False}),
    ("muse-glimmer", {"embedding_norm": False}),
    ("muse-glimmer", {"query_pre_attn_scalar": None}),
    ("muse-glimmer", {"logit_multiplier": 1.0}),
    ("muse-glimmer", {"rope_layers": None}),
    ("step3p5", {"swiglu_limits": None}),
    ("step3p5", {"moe.swiglu_limits": None}),
    ("step3p5", {"rope_scaling": None}),
    ("step3p5", {"rotary_base_local": None}),
    ("muse-spark", {"attention_output_norm": False}),
    ("muse-spark", {"moe.logit_multiplier": 1.0}),
]
"""What no tensor's shape shows."""


GRADIENTS = (
    *("mimo-v2-flash", "laguna", "laguna-per-element", "phimoe", "olmo", "flex-olmo", "minicpm3", "falcon"),
    *("falcon-40b", "gpt-bigcode", "kolibri1", "lfm3", "axk1", "axk2", "nanochat", "flint"),
    *("opt", "gpt-neo", "bloom", "mpt", "bamba", "mamba2", "jamba", "mistral-large-4"),
    *("muse-spark", "step3p5"),
)
"""Sinks, values of another size, gates of heads, a number of heads by kind of layer, SparseMixer, clamped queries,
LayerNorms without weights, experts without a norm before them, multiplied residuals, attention beside an MLP under
one norm and under two, one key for all heads, a bias of logits, latents of other layers."""
OF_FEW_TOKENS = ("kimi-linear", "ling-3")
"""Kimi delta attention, whose way back takes transformers seconds."""


@pytest.mark.parametrize("length", [100, *in_soak(12)])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case: str, length: int, tmp_path: Path) -> None:
    """Through a directory that transformers wrote and the family's table, which makes every parameter. FP32's rounding
    makes up to 1e-5 of a deviation of 75,000 logits, depending on the processor; what `MATTERS` has makes 5e-4."""
    family, changes = CASES[case]
    theirs = transformers_model(family, **changes)
    made = converted(theirs, tmp_path)
    ours = as_gpt(made)
    shapes = {name: parameter.shape for name, parameter in ours.named_parameters()}
    assert shapes == {name: tensor.shape for name, tensor in made.tensors.items()}
    tokens = clear_tokens(ours, (3, length))
    with_gradients = case in GRADIENTS or case in OF_FEW_TOKENS and length < 100
    with torch.set_grad_enabled(with_gradients):
        expected, found = theirs(tokens).logits, ours(tokens)[..., :VOCABULARY]
    deviation = float(expected.detach().std())
    assert deviation > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5 * deviation)
    if with_gradients:
        for logits in (expected, found):
            logits.logsumexp(-1).sum().backward()
        for name, ours_of_it, theirs_of_it in both_gradients(theirs, ours):
            atol = 1e-5 * float(theirs_of_it.abs().max())
            torch.testing.assert_close(ours_of_it, theirs_of_it, rtol=0, atol=atol, msg=f"{name}: {{}}".format)


@cache
def computed(family: str) -> tuple[InMemory, Tensor, Tensor]:
    """A model of a family, tokens and their logits."""
    with TemporaryDirectory() as folder:
        made = converted(transformers_model(family), Path(folder))
    tokens = torch.randint(VOCABULARY, (3, 100))
    with torch.no_grad():
        return made, tokens, as_gpt(made)(tokens)


FIRST = {field: each for each in reversed(MATTERS) for field in each[1] if each[0] not in pico.ABSENT}
"""One family for each field."""


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *FIRST.values(),
        *in_soak(*(each for each in MATTERS if each not in FIRST.values() and each[0] not in pico.ABSENT)),
    ],
    ids=str,
)
def test_logits_are_others_without_what_makes_a_family(family: str, changes: dict[str, Any]) -> None:
    """What the test above compares would show if it were left out."""
    made, tokens, whole = computed(family)
    with torch.no_grad():
        without = as_gpt(InMemory(replaced(made.model, changes), "megatron", made.tensors))(tokens)
    assert (whole - without).abs().max() > 5e-4


SCALED_EMBEDDINGS = [family for family in pico.FAMILIES if pico.shape(family).embedding_multiplier != 1]


@pytest.mark.parametrize("family", few(SCALED_EMBEDDINGS, "gemma", "granite", "gemma4"))
def test_embeddings_are_scaled_in_bf16_by_the_number_that_the_family_s_class_takes(family: str, tmp_path: Path) -> None:
    """To the last bit: Gemma's classes round it to BF16 first, others do not. Neither 0.1 nor the root of 96 is a BF16
    number."""
    own = {"embedding_multiplier": 0.1} if "embedding_multiplier" in pico.FAMILIES[family] else {}
    theirs = transformers_model(family, hidden_size=96, **own).bfloat16()
    made, tokens = converted(theirs, tmp_path), torch.arange(VOCABULARY)[None]
    first = theirs(tokens, output_hidden_states=True).hidden_states[0]
    expected = first.flatten(0, -2)[:VOCABULARY]  # of the first stream

    def embedded(model: ModelShape) -> Tensor:
        gpt = GPT(model, BF16)
        gpt.load_state_dict(dict(made.tensors))
        return gpt.embedding(tokens, torch.arange(VOCABULARY))

    other = not made.model.rounded_embedding_multiplier
    assert torch.equal(embedded(made.model), expected)
    assert not torch.equal(embedded(dataclasses.replace(made.model, rounded_embedding_multiplier=other)), expected)


@pytest.mark.parametrize("family", pico.representing(pico.mixers))
def test_one_update_reaches_every_parameter_that_is_trained(family: str, tmp_path: Path) -> None:
    model = as_gpt(converted(transformers_model(family), tmp_path))
    optimizer = MasterAdamW(model, Optimizer(lr=1e-3, weight_decay=0.0))
    before = {name: parameter.detach().clone() for name, parameter in optimizer.parameters.items()}
    length = 160 if family == "deepseek-v4" else 64  # one key of 128 tokens
    tokens = torch.randint(VOCABULARY, (4, length))
    backward(model(tokens), tokens)
    optimizer.collect()
    optimizer.step(1e-3)
    for name, parameter in model.named_parameters():
        changed = not torch.equal(parameter, before[name])
        assert changed == trained(name, model.model), name


def test_a_padded_vocabulary_changes_neither_logits_nor_loss() -> None:
    theirs = transformers_model("llama-2")
    shape = from_hf_config(theirs.config.to_dict())
    padded = GPT(shape.padded(1), BF16, dtype=torch.float32)
    weights = megatron_weights(theirs.state_dict(), shape)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        weights[name] = torch.cat([weights[name], torch.full((6, 64), 3.0)])
    padded.load_state_dict(weights)
    tokens = torch.randint(shape.vocab_size, (2, 33))
    expected = theirs(tokens, labels=tokens)
    logits = padded(tokens)
    total = loss(logits[:, :-1], tokens[:, 1:], everywhere(tokens[:, 1:]), VOCABULARY)
    torch.testing.assert_close(logits[..., :VOCABULARY], expected.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(total / tokens[:, 1:].numel(), expected.loss, rtol=0, atol=1e-5)
    total.backward()
    assert not padded.output_layer.weight.grad[VOCABULARY:].any()


def test_losses_of_micro_batches_add_up_to_the_loss_of_the_batch() -> None:
    logits, targets = torch.randn(4, 8, 32, dtype=torch.float64), torch.randint(32, (4, 8))
    mask = torch.rand(4, 8) < 0.6
    parts = [loss(logits[i : i + 1], targets[i : i + 1], mask[i : i + 1], 32) for i in range(4)]
    total = loss(logits, targets, mask, 32)
    torch.testing.assert_close(sum(parts), total)
    expected = F.cross_entropy(logits[mask].float(), targets[mask])
    torch.testing.assert_close(total / mask.sum(), expected)


def test_a_masked_target_has_no_part_in_the_gradient() -> None:
    logits = torch.randn(1, 4, 16, requires_grad=True)
    mask = torch.tensor([[True, False, True, False]])
    loss(logits, torch.randint(16, (1, 4)), mask, 16).backward()
    assert logits.grad is not None
    assert (logits.grad.abs().sum(-1) > 0).equal(mask)


def test_parameters_are_named_and_shaped_as_megatron_core_names_them() -> None:
    theirs = transformers_model("llama-all-biases")
    shape = from_hf_config(theirs.config.to_dict())
    expected = {name: tuple(t.shape) for name, t in megatron_weights(theirs.state_dict(), shape).items()}
    assert {name: tuple(p.shape) for name, p in GPT(shape, BF16).named_parameters()} == expected
    assert set(GPT(shape, PRESETS["fp8-delayed"]).state_dict()) == set(expected)


def test_a_bias_that_only_megatron_has_stays_zero() -> None:
    """Hugging Face can have biases in attention alone; Megatron's other biases must not be trained then."""
    shape = from_hf_config(transformers_model("llama-attention-bias").config.to_dict())
    trained = {name for name, p in GPT(shape, BF16).named_parameters() if name.endswith("bias") and p.requires_grad}
    assert {name.split(".")[-2] for name in trained} == {"linear_qkv", "linear_proj"}


def test_norms_that_only_megatron_has_multiply_by_one_and_are_not_trained(tmp_path: Path) -> None:
    made = converted(transformers_model("olmo"), tmp_path)
    norms = {name: values for name, values in made.tensors.items() if "norm" in name}
    assert len(norms) == 2 * 2 * 2 + 2 and not any(values.any() for values in norms.values())
    trained = {name for name, parameter in GPT(made.model, BF16).named_parameters() if parameter.requires_grad}
    assert trained == made.tensors.keys() - norms.keys()


def test_rope_scaling_of_a_type_that_is_not_known_is_refused() -> None:
    scaled = dataclasses.replace(tiny_shape(), rope_scaling={"rope_type": "spiral", "factor": 4.0})
    with pytest.raises(UnknownArchitecture, match="spiral"):
        GPT(scaled, BF16)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rotary_base": 1.0},
        {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 1.5}},
        {"rotary_percent": 0.2},
        {"rotary_percent": 2.0},
    ],
)
def test_numbers_that_make_no_angles_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DamagedCheckpoint, match="rope scaling|rotated in pairs|3 entries for 8|more than a whole head"):
        GPT(dataclasses.replace(tiny_shape(), **changes), BF16)


@pytest.mark.parametrize("changes", [{"n_group": 2, "topk_group": 3}, {"n_group": 8}, {"n_group": 4, "topk_group": 1}])
def test_groups_that_a_router_cannot_choose_from_are_refused(changes: dict[str, int]) -> None:
    """Of 8 experts: more groups than there are, the two best of groups of one, four experts of a group of two."""
    with pytest.raises(DamagedCheckpoint, match="experts of .* groups"):
        from_hf_config(pico.config("deepseek-v3") | changes)


def test_granites_logits_are_divided() -> None:
    """A product with the reciprocal differs in the last bit, in FP32, and 49 did not come back."""
    model = from_hf_config(pico.config("granite", logits_scaling=49.0))
    gpt = GPT(model, BF16, dtype=torch.float32)
    hidden = torch.randn(50, model.hidden_size, generator=torch.Generator().manual_seed(1))
    assert torch.equal(gpt.logits(hidden), hidden @ gpt.output_weight.T / 49)
    assert to_hf_config(model, "bfloat16")["logits_scaling"] == 49


def test_a_bias_of_a_tied_output_layer_is_not_computed() -> None:
    """transformers adds it; Megatron's output layer is not there."""
    model = from_hf_config(pico.config("phi", tie_word_embeddings=True))
    with pytest.raises(UnknownArchitecture, match="not computed here with output_bias=True"):
        GPT(model, BF16)


def test_a_window_counts_the_query_itself() -> None:
    mask = sliding_window_mask(5, 2, torch.device("cpu"))
    assert mask is not None
    assert mask.sum(1).tolist() == [1, 2, 2, 2, 2]
    assert sliding_window_mask(5, 5, torch.device("cpu")) is None


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_inputs_give_the_same_bits(preset: str) -> None:
    def gradients() -> list[Tensor]:
        torch.manual_seed(5)
        model = GPT(tiny_shape(), PRESETS[preset])
        for _ in range(3):
            tokens = torch.randint(VOCABULARY, (2, 32))
            backward(model(tokens), tokens)
        return [p.grad for p in model.parameters() if p.grad is not None]

    first, second = gradients(), gradients()
    assert len(first) == 2 * 6 + 3
    assert all(map(torch.equal, first, second))


def test_training_updates_every_scale_and_evaluation_none() -> None:
    model = GPT(tiny_shape(), Precision(fp8=True, delayed=DelayedScaling(amax_history_len=4)))
    linears = fp8_linears(model)
    tokens = torch.randint(VOCABULARY, (2, 32))
    with torch.no_grad():
        model(tokens)
    assert not any(recorded(linear) for linear in linears.values())
    backward(model(tokens), tokens)
    assert {name for name, linear in linears.items() if recorded(linear) == {"input", "weight", "grad_output"}} == {
        f"decoder.layers.{layer}.{module}"
        for layer in (0, 1)
        for module in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    before = {name: linear.fp8_state() for name, linear in linears.items()}
    with torch.no_grad():
        model(5 * tokens % VOCABULARY)
    for name, linear in linears.items():
        assert same_state(linear.fp8_state(), before[name])


def test_recording_computes_in_bf16_and_fills_one_history_row_per_pass() -> None:
    torch.manual_seed(1)
    fp8 = GPT(tiny_shape(), Precision(fp8=True, delayed=DelayedScaling(amax_history_len=4)))
    bf16 = GPT(tiny_shape(), BF16)
    bf16.load_state_dict(fp8.state_dict())
    recorder = Recorder(fp8.precision, torch.device("cpu"))
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (2, 32))
        with fp8.recorded_by(recorder):
            logits = fp8(tokens)
            backward(logits, tokens)
        expected = bf16(tokens)
        backward(expected, tokens)
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    for ours, theirs in zip(fp8.parameters(), bf16.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
    states = recorder.states()
    caches = {name for name, state in states.items() if set(state.roles) == {"k", "v"}}
    assert states.keys() - caches == fp8_linears(fp8).keys() and len(caches) == 2
    for state in (states[name] for name in fp8_linears(fp8)):
        for role in ("input", "weight", "grad_output"):
            assert state.roles[role].amax_history.count_nonzero() == 2
            assert state.roles[role].scale != 1
    assert not any(recorded(linear) for linear in fp8_linears(fp8).values())


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
    tokens = torch.randint(VOCABULARY, (2, 5))
    assert torch.equal(plain(tokens), everything(tokens))


@pytest.mark.parametrize("family", ["qwen4", "hy4", "gemma4-small", "mistral-large-4"])
def test_a_layer_hands_on_keys_and_values_that_a_later_one_reads_and_no_others(family: str) -> None:
    model = GPT(pico.shape(family), BF16)
    handed_on = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda _, __, out: handed_on.append(out[1] is not None))
    model(torch.arange(8)[None])
    read = {model.model.kv_layer(layer) for layer in range(len(handed_on)) if model.model.shares_kv(layer)}
    assert handed_on == [layer in read for layer in range(len(handed_on))]


def trained(name: str, model: ModelShape) -> bool:
    """Whether an update changes a parameter: not what balances experts, nor buffers, nor layers and indexers that
    nothing runs, nor what weighs one stream alone, nor biases and norms that only Megatron has."""
    kept_as_it_is = name.endswith(("expert_bias", "activation_func.beta", "activation_func.eps", "layer_scalar"))
    kept_as_it_is |= name.endswith(("tid2eid", "lerope.alpha"))
    kept_as_it_is |= name.endswith(("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"))
    kept_as_it_is |= name.startswith(("mtp.", "decoder.layers.0.self_attention_res_")) or ".indexer." in name
    only_megatrons = {"linear_qkv.bias": not model.qkv_bias, "linear_proj.bias": not model.proj_bias}
    only_megatrons |= dict.fromkeys(("input_layernorm.bias", "final_layernorm.bias"), not model.norm_bias)
    only_megatrons |= {"linear_fc1.bias": not model.mlp_bias, "linear_fc2.bias": not model.mlp_bias}
    only_megatrons["final_layernorm.weight"] = not model.norm_weight
    for linear in ("linear_qkv", "linear_fc1"):
        only_megatrons[f"{linear}.layer_norm_bias"] = not model.norm_bias
        only_megatrons[f"{linear}.layer_norm_weight"] = not model.norm_weight
    return not (kept_as_it_is or only_megatrons.get(".".join(name.split(".")[-2:]), False))


def replaced(model: ModelShape, changes: dict[str, Any]) -> ModelShape:
    """With other fields; those of its parts with a dot."""
    for name, value in changes.items():
        part, _, field = name.rpartition(".")
        value = dataclasses.replace(getattr(model, part), **{field: value}) if part else value
        model = dataclasses.replace(model, **{part or field: value})
    return model


def recorded(linear: Any) -> set[str]:
    return {role for role, state in linear.fp8_state().roles.items() if state.recorded}


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
            elif shape.add_bias_linear:  # Megatron has no attention biases without these
                weights[f"{mlp}.linear_fc1.bias"] = torch.zeros(2 * shape.ffn_hidden_size)
                weights[f"{mlp}.linear_fc2.bias"] = torch.zeros(shape.hidden_size)
    return weights


def interleave_by_group(query: Tensor, key: Tensor, value: Tensor, shape: ModelShape) -> Tensor:
    queries = query.split(shape.num_attention_heads // shape.num_query_groups * shape.kv_channels)
    keys, values = key.split(shape.kv_channels), value.split(shape.kv_channels)
    return torch.cat([rows for group in zip(queries, keys, values, strict=True) for rows in group])

"""What is recorded in BF16 passes, against hooks on transformers' own modules and against one tensor at a time."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from gpt_models import VOCABULARY, as_gpt, backward, converted, tiny_shape
from installed import CACHE
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from precisionctl.calibration.calibrate import _merged
from precisionctl.checkpoints.module import TensorShard
from precisionctl.codes.health import measure
from precisionctl.codes.statistics import Statistics
from precisionctl.dtypes import DType
from precisionctl.fp8.state import ROLES, DelayedScaling, Fp8State, Role
from precisionctl.param import COLUMNS, TensorSpec
from precisionctl.precision import Precision
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.parallel.group_ranks import TensorRanks, TokenDispatch
from precisionctl.trainer.parallel.shards import ModelShards
from precisionctl.trainer.parallel.world import World

FUSED = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
LATENT = {
    "self_attention.linear_q_down_proj": ("self_attn.q_a_proj",),
    "self_attention.linear_q_up_proj": ("self_attn.q_b_proj",),
    "self_attention.linear_kv_down_proj": ("self_attn.kv_a_proj_with_mqa",),
    "self_attention.linear_kv_up_proj": ("self_attn.kv_b_proj",),
    "self_attention.linear_proj": ("self_attn.o_proj",),
}
"""Megatron's modules, and the linears of transformers that make them up."""

RECIPE = Precision(fp8=True, delayed=DelayedScaling(amax_history_len=4))
CPU = torch.device("cpu")


def recorder_of(precision: Precision = RECIPE) -> Recorder:
    return Recorder(precision, CPU)


def newest(state: Fp8State, role: Role) -> Tensor:
    return state.roles[role].amax_history[..., -1]


def largest(values: Tensor) -> float:
    return float(values.detach().abs().max())


class Hooked:
    """The largest magnitudes that torch's own hooks see at linears of transformers, by name and role."""

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        self.seen: dict[tuple[str, str], float] = defaultdict(float)
        for name in names:
            module = model.get_submodule(name)
            module.register_forward_hook(self._forward(name))
            module.register_full_backward_hook(self._backward(name))

    def _forward(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            self.seen[name, "input"] = largest(inputs[0])
            self.seen[name, "weight"] = largest(module.weight)

        return hook

    def _backward(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
            self.seen[name, "grad_output"] = largest(outputs[0])

        return hook


@pytest.mark.parametrize("family", ["llama-3", "llama-all-biases", "mistral", "qwen3", "gemma3", "deepseek-v3"])
def test_amaxes_are_those_that_hooks_see_in_transformers(family: str, tmp_path: Path) -> None:
    """In FP32, so that only the order of sums differs. Gemma scales what goes into its norms, and so into the GEMMs."""
    theirs = pico.make(family)
    modules = LATENT if family == "deepseek-v3" else FUSED
    layers = range(theirs.config.num_hidden_layers)
    hooked = Hooked(
        theirs, (f"model.layers.{layer}.{n}" for layer in layers for names in modules.values() for n in names)
    )
    ours, recorder, tokens = as_gpt(converted(theirs, tmp_path)), recorder_of(), torch.randint(VOCABULARY, (2, 48))
    cache = DynamicCache(config=theirs.config)
    backward(theirs(tokens, **{CACHE: cache}).logits, tokens)
    with ours.recorded_by(recorder):
        backward(ours(tokens), tokens)
    states = recorder.states()
    for layer in layers:
        for module, names in modules.items():
            state = states[f"decoder.layers.{layer}.{module}"]
            assert tuple(state.roles) == ROLES
            for role in ("input", "weight", "grad_output"):
                expected = max(hooked.seen[f"model.layers.{layer}.{name}", role] for name in names)
                assert float(newest(state, role)) == pytest.approx(expected, rel=1e-4), (layer, module, role)
            assert not state.roles["output"].recorded and not state.roles["grad_input"].recorded
    for layer in layers:
        if family == "deepseek-v3":
            continue
        held = cache.layers[layer]
        window = getattr(held, "sliding_window", None) or tokens.shape[1]
        state = states[f"decoder.layers.{layer}.self_attention.core_attention"]
        assert window < tokens.shape[1] or set(state.roles) == {"k", "v"}
        if window >= tokens.shape[1]:
            assert float(newest(state, "k")) == pytest.approx(largest(held.keys), rel=1e-4)
            assert float(newest(state, "v")) == pytest.approx(largest(held.values), rel=1e-4)


def test_of_latent_attention_the_latent_and_the_turned_part_are_cached_under_one_scale(tmp_path: Path) -> None:
    theirs = pico.make("deepseek-v3")
    ours, recorder, tokens = as_gpt(converted(theirs, tmp_path)), recorder_of(), torch.randint(VOCABULARY, (2, 48))
    cache = DynamicCache(config=theirs.config)
    theirs(tokens, **{CACHE: cache})
    with ours.recorded_by(recorder):
        ours(tokens)
    for number, held in enumerate(cache.layers):
        state = recorder.states()[f"decoder.layers.{number}.self_attention.core_attention"]
        assert list(state.roles) == ["k"]
        assert (held.keys.shape[-1], held.values.shape[-1]) == (
            theirs.config.kv_lora_rank,
            theirs.config.qk_rope_head_dim,
        )
        assert float(newest(state, "k")) == pytest.approx(max(largest(held.keys), largest(held.values)), rel=1e-4)


def test_scales_follow_from_the_rows_as_te_makes_them() -> None:
    """The judge of the update itself is in test_fp8_numerics; here, that both directions get theirs each pass."""
    torch.manual_seed(0)
    model, recorder = GPT(tiny_shape(), Precision(fp8=False)), recorder_of()
    with model.recorded_by(recorder):
        for _ in range(6):
            tokens = torch.randint(VOCABULARY, (2, 32))
            backward(model(tokens), tokens)
    for module, state in recorder.states().items():
        for role, part in state.roles.items():
            if role in ("output", "grad_input"):
                continue
            assert part.amax_history[0] == 0 and part.amax_history.count_nonzero() == 3, module
            top = 57344.0 if role == "grad_output" else 448.0
            # the scale was made before the oldest of four rows was rolled out
            assert float(part.scale) <= top / float(part.amax_history.max()) * (1 + 2**-23)


def test_padding_takes_no_part(tmp_path: Path) -> None:
    """Rows padded to one batch are recorded as the largest of each row by itself, though padding is an outlier."""
    made = converted(pico.make("llama-3"), tmp_path)
    ours, lengths = as_gpt(made), (48, 17, 30)
    tokens = torch.full((3, 48), VOCABULARY - 1)
    real = torch.zeros(3, 48, dtype=torch.bool)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(VOCABULARY - 1, (length,))
        real[row, :length] = True
    with torch.no_grad():
        ours.embedding.word_embeddings.weight[VOCABULARY - 1] = torch.eye(64)[0] * 1000
    together, alone, spoiled = recorder_of(), recorder_of(), recorder_of()
    for recorder, shown in ((together, real), (spoiled, None)):
        with ours.recorded_by(recorder):
            ours(tokens, shown)
    with ours.recorded_by(alone):
        for row, length in enumerate(lengths):
            ours(tokens[row : row + 1, :length])
    for module, state in together.states().items():
        for role, part in state.roles.items():
            expected = alone.states()[module].roles[role].amax_history.max()
            torch.testing.assert_close(part.amax_history.max(), expected, rtol=1e-4, atol=0)
    inputs = [
        r.states()["decoder.layers.0.mlp.linear_fc1"].roles["input"].amax_history.max() for r in (together, spoiled)
    ]
    assert inputs[1] > 1.5 * inputs[0], "padding would have shown"


def test_without_gradients_nothing_is_recorded() -> None:
    model, recorder = GPT(tiny_shape(), Precision(fp8=False)), recorder_of()
    with torch.no_grad(), model.recorded_by(recorder):
        model(torch.randint(VOCABULARY, (1, 16)))
    assert recorder.states() == {}


def test_a_model_without_gradients_of_its_own_records_the_same() -> None:
    """Weights that take no gradient save a third of the work, and change no number."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (2, 32))
    model, made = GPT(tiny_shape(), Precision(fp8=False)), []
    for trained in (True, False):
        model.requires_grad_(trained)
        recorder = recorder_of()
        with model.recorded_by(recorder):
            backward(model(tokens), tokens)
        made.append(recorder.states())
    assert all(parameter.grad is None or parameter.grad.any() for parameter in model.parameters())
    assert_same(*made)


def test_modules_that_a_recipe_keeps_in_bf16_are_left_out_but_not_their_keys_and_values() -> None:
    recorder = recorder_of(Precision(fp8=True, keep_bf16=("decoder.layers.0.*",)))
    model, tokens = GPT(tiny_shape(), Precision(fp8=False)), torch.randint(VOCABULARY, (2, 32))
    with model.recorded_by(recorder):
        backward(model(tokens), tokens)
    first = {name for name in recorder.states() if name.startswith("decoder.layers.0.")}
    assert first == {"decoder.layers.0.self_attention.core_attention"}
    assert len(recorder.states()) == 1 + 5


def test_recording_goes_on_from_states_as_if_it_had_never_stopped() -> None:
    torch.manual_seed(0)
    model, batches = GPT(tiny_shape(), Precision(fp8=False)), [torch.randint(VOCABULARY, (2, 32)) for _ in range(6)]

    def record(recorder: Recorder, some: list[Tensor]) -> dict[str, Fp8State]:
        with model.recorded_by(recorder):
            for tokens in some:
                backward(model(tokens), tokens)
        return recorder.states()

    whole, second = recorder_of(), recorder_of()
    second.load(record(recorder_of(), batches[:3]))
    assert_same(record(whole, batches), record(second, batches[3:]))


def test_experts_are_recorded_one_by_one_without_padding() -> None:
    torch.manual_seed(0)
    counts, recorder = [5, 0, 3], recorder_of()
    weights = [torch.randn(16, 8) for _ in counts]
    values, real = torch.randn(1, 4, 8), torch.tensor([[True, True, True, False]])
    tokens = torch.tensor([0, 1, 3, 2, 0, 3, 1, 2])  # the token at each place, expert by expert
    arranged = values.flatten(0, 1)[tokens].requires_grad_()
    gradient = torch.randn(8, 16)
    with recorder.forward_pass(real), recorder.reordered(tokens, TokenDispatch()):
        out = torch.cat([part @ weight.T for part, weight in zip(arranged.split(counts), weights, strict=True)])
        recorder.grouped_gemm("experts", arranged, counts, weights, out)
    out.backward(gradient)
    recorder.after_backward()
    (state,) = recorder.states().values()
    mine = [[place for place in range(8) if (place < 5) == (expert == 0) and tokens[place] != 3] for expert in (0, 2)]
    for role, seen in (("input", arranged.detach()), ("grad_output", gradient)):
        expected = [seen[mine[0]].abs().max(), torch.tensor(0.0), seen[mine[1]].abs().max()]
        assert newest(state, role).tolist() == [float(each) for each in expected]  # type: ignore[arg-type]
    assert newest(state, "weight").tolist() == [float(weight.abs().max()) for weight in weights]
    assert state.roles["output"].amax_history.shape == (3, 4)
    again = recorder_of()
    again.load(recorder.states())
    assert_same(again.states(), recorder.states())


def test_statistics_are_taken_while_measuring_of_a_weight_once() -> None:
    torch.manual_seed(0)
    model, recorder = GPT(tiny_shape(), Precision(fp8=False)), recorder_of()
    batches = [torch.randint(VOCABULARY, (2, 32)) for _ in range(3)]
    seen: list[Tensor] = []
    model.get_submodule("decoder.layers.1.mlp.linear_fc2").register_forward_pre_hook(lambda _, v: seen.append(v[0]))
    scales = []
    with model.recorded_by(recorder):
        for tokens in batches:
            recorder.measuring = len(seen) > 0
            known = recorder.states().get("decoder.layers.1.mlp.linear_fc2")
            scales.append(known.roles["input"].scale if known else None)
            backward(model(tokens), tokens)
    found = recorder.statistics["decoder.layers.1.mlp.linear_fc2"]
    expected = [measure(values, torch.float8_e4m3fn, scale) for values, scale in zip(seen, scales, strict=True)][1:]
    assert found["input"] == expected[0].merge(expected[1])
    assert found["input"].losses["delayed"].elements == 2 * 64 * 96
    assert found["weight"].elements == 64 * 96
    assert found["grad_output"].elements == 2 * 64 * 64
    assert set(recorder.statistics["decoder.layers.0.self_attention.core_attention"]) == {"k", "v"}


def assert_same(one: dict[str, Fp8State], other: dict[str, Fp8State]) -> None:
    assert one.keys() == other.keys()
    for name, state in one.items():
        assert state.roles.keys() == other[name].roles.keys()
        for role, part in state.roles.items():
            assert torch.equal(part.scale, other[name].roles[role].scale), (name, role)
            assert torch.equal(part.amax_history, other[name].roles[role].amax_history), (name, role)


@pytest.mark.parametrize("sequence", [True, False])
def test_of_scattered_outputs_all_tensor_ranks_tokens_are_counted(sequence: bool) -> None:
    """Transformer Engine gives each of two tensor ranks the gradients of its own tokens of what `linear_fc2` puts out;
    where the ranks do not share tokens, both have all of them."""
    module, gradient = "decoder.layers.0.mlp.linear_fc2", torch.randn(8, 16)
    counted: list[Tensor] = []
    for rank in range(2):
        world = World()
        world.count, world.tensor = 2, TensorRanks(2, rank, None, sequence)
        world.all_reduce_max = lambda numbers: numbers  # type: ignore[method-assign]
        recorder = Recorder(RECIPE, CPU, world)
        recorder.measuring = True
        out = torch.zeros(4 if sequence else 8, 16, requires_grad=True) * 1
        with recorder.forward_pass():
            recorder.gemm(module, torch.randn(8, 8), torch.randn(16, 8), out, scattered=True)
        out.backward(world.tensor.local_tokens(gradient))
        shares = ModelShards(
            {f"{module}.weight": TensorShard(TensorSpec((16, 16), DType.bfloat16, COLUMNS), [])}, world
        )
        world.all_reduce_sum = world.all_reduce_max = lambda numbers: counted.append(numbers) or numbers  # type: ignore[method-assign]
        _merged(recorder, shares)
    roles = list(ROLES)
    total = (counted[0] + counted[2])[roles.index("grad_output")].tolist()
    expected = measure(gradient, torch.float8_e5m2, None)
    assert total[0] == expected.elements == 128
    assert Statistics.from_row(total).sum_2 == pytest.approx(expected.sum_2)

"""megatron-core itself as the judge: it loads what we write, we read what it saves."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_models import SAVED_ARGS, peer, whole
from judges import CORE
from pico import make, save
from transformers import LlamaForCausalLM

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.fp8 import sidecar
from precisionctl.fp8.extra_state import decode_payload
from precisionctl.fp8.extra_state_writer import encode_payload
from precisionctl.fp8.state import ROLES, DelayedScaling, Fp8State, Fp8States, RoleState
from precisionctl.param import Parallelism

TOKENS = torch.arange(24).view(2, 12) * 7 % 250
RECIPE = DelayedScaling(amax_history_len=4)

EXPERTS = ("mixtral", "qwen3-moe")  # without Transformer Engine, Megatron runs them on one tensor-parallel rank only


def load(directory: Path) -> dict[str, Any]:
    job = {"do": "load", "directory": str(directory), "tokens": TOKENS.tolist(), "out": f"{directory}.pt"}
    return job | {"te_names": True}


def fp8_states(layers: int) -> Fp8States:
    """A different state for each GEMM."""
    generator = torch.Generator().manual_seed(5)
    gemms = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")

    def state() -> Fp8State:
        random = {role: torch.rand(5, generator=generator) + 0.5 for role in ROLES}
        return Fp8State({role: RoleState(random[role][0], random[role][1:]) for role in ROLES})

    names = [f"decoder.layers.{layer}.{gemm}" for layer in range(layers) for gemm in gemms]
    return Fp8States(RECIPE, {name: state() for name in names}, producer="transformer_engine", iteration=7)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Every family, written for one rank and for two, loaded by megatron-core, with the logits of both."""
    top = tmp_path_factory.mktemp("converted")
    expected = {}
    for family, changes in CORE.items():
        save(top / family, family, **changes)
        with torch.no_grad():
            expected[family] = make(family, **changes)(TOKENS).logits
    weights = digest_weights(open_checkpoint(top / "llama-3"))
    sidecar.write(top / "llama-3" / sidecar.RELATIVE, replace(fp8_states(layers=2), of_weights=weights))
    for size in (1, 2):
        for family in CORE:
            execute(
                plan_command(Request(top / family, top / f"{family}-{size}", "megatron", parallelism=Parallelism(size)))
            )
        families = [family for family in CORE if size == 1 or family not in EXPERTS]
        peer(top, [load(top / f"{family}-{size}" / "release") for family in families], tensor_parallel=size)
    return SimpleNamespace(top=top, expected=expected)


@pytest.mark.parametrize(
    ("family", "size"), [(family, size) for family in CORE for size in (1, 2) if size == 1 or family not in EXPERTS]
)
def test_megatron_core_loads_what_we_wrote_and_gives_transformers_logits(converted, family, size):
    logits = torch.load(converted.top / f"{family}-{size}" / "release.pt")["logits"]
    assert logits.shape[-1] == 256
    torch.testing.assert_close(logits[..., :250], converted.expected[family], rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_megatron_core_gives_each_module_the_fp8_state_that_we_wrote_for_it(converted, size):
    payloads = torch.load(converted.top / f"llama-3-{size}" / "release.pt")["payloads"]
    states = fp8_states(2)
    assert payloads.keys() == states.modules.keys()
    for name, payload in payloads.items():
        decoded = decode_payload(payload.numpy().tobytes(), name)
        assert decoded is not None and decoded[0] == RECIPE
        for role in set(ROLES) - {"weight"}:  # these made-up states' weight amaxes do not fit, and are made anew
            assert torch.equal(decoded[1].roles[role].scale, states.modules[name].roles[role].scale)
            assert torch.equal(decoded[1].roles[role].amax_history, states.modules[name].roles[role].amax_history)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model that megatron-core saved at TP 2 x PP 2 with FP8 state, and its logits."""
    top = tmp_path_factory.mktemp("saved")
    directory, states = top / "iter_0000007", fp8_states(SAVED_ARGS["num_layers"])
    payloads = {
        name: torch.frombuffer(bytearray(encode_payload(state, RECIPE)), dtype=torch.uint8)
        for name, state in states.modules.items()
    }
    torch.save(payloads, top / "payloads.pt")
    job = {"directory": str(directory), "args": SAVED_ARGS, "dtype": "float32", "payloads": str(top / "payloads.pt")}
    peer(top, [{"do": "save", **job}], tensor_parallel=2, pipeline_parallel=2)
    (top / "latest_checkpointed_iteration.txt").write_text("7")
    peer(top, [load(directory)])
    ranks = [[torch.load(f"{directory}.rank{2 * stage + rank}.pt") for rank in range(2)] for stage in range(2)]
    return SimpleNamespace(top=top, states=states, ranks=ranks, logits=torch.load(f"{directory}.pt")["logits"])


def test_we_read_every_tensor_that_megatron_core_saved_bit_for_bit(saved):
    reader = TorchDistReader(saved.top)
    renamed = {  # sharded_state_dict_keys_map of the local specification
        "input_layernorm": "self_attention.linear_qkv.layer_norm",
        "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm",
    }
    expected = {}
    for stage, ranks in enumerate(saved.ranks):
        for name in ranks[0]:
            full = whole(name, [rank[name] for rank in ranks])
            parts = name.split(".")
            if parts[1] == "layers":
                parts[2] = str(int(parts[2]) + 2 * stage)
                if parts[3] in renamed:
                    parts[3:] = [renamed[parts[3]] + "_weight"]
            expected[".".join(parts)] = full
    assert reader.specs.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(read_tensor(reader, name), tensor), name


def test_what_megatron_core_saved_converts_to_a_model_of_transformers_with_the_same_logits(saved, tmp_path):
    execute(plan_command(Request(saved.top, tmp_path / "hf", "hf")))
    model = LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        logits = model(TOKENS).logits
    torch.testing.assert_close(logits, saved.logits, rtol=0, atol=1e-5)


def test_we_read_the_fp8_state_the_model_and_the_iteration_that_megatron_core_saved(saved):
    reader = TorchDistReader(saved.top)
    assert reader.iteration == 7
    assert reader.model.num_layers == 4
    assert reader.model.num_query_groups == 4
    assert reader.model.padded_vocab_size == 256
    assert reader.fp8 is not None
    assert reader.fp8.recipe == RECIPE
    assert reader.fp8.iteration == 7
    assert reader.fp8.modules.keys() == saved.states.modules.keys()
    for name, state in saved.states.modules.items():
        for role in ROLES:
            found = reader.fp8.modules[name].roles[role]
            assert torch.equal(found.scale, state.roles[role].scale)
            assert torch.equal(found.amax_history, state.roles[role].amax_history)

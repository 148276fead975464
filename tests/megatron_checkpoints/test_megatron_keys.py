"""Under which keys torch_dist stores layers, experts and the `_extra_state` that each version of Megatron demands."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from dist_checkpoints import DEMANDED, MODEL, specs, values, write
from hypothesis import given, strategies as st

from precisionctl.architectures.families import architecture_of
from precisionctl.architectures.param_map import names
from precisionctl.checkpoints.megatron import keys
from precisionctl.checkpoints.megatron.carried_run import CarriedRun
from precisionctl.checkpoints.megatron.norm_names import is_indexed, te_names
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.dtypes import DType
from precisionctl.fp8.state import ROLES, DelayedScaling, Fp8State, Fp8States, RoleState
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import TensorSpec


def test_every_extra_state_that_a_version_of_megatron_demands_is_there_and_empty(tmp_path):
    write(tmp_path, values(specs()))
    reader = TorchDistReader(tmp_path)
    assert set(reader.objects) == DEMANDED
    for key in reader.objects:
        payload = reader.read_object(key)
        assert payload.dtype == torch.uint8
        assert payload.numel() == 0
    assert reader.fp8 is None


NAMES_IN_LAYERS = [
    "mlp.linear_fc1.weight",
    "self_attention.linear_qkv._extra_state",
    "x.0.y",
    "mlp.experts.linear_fc1.weight17",
    "mlp.experts.linear_fc2.bias0",
    "mlp.experts.linear_fc2._extra_state3",
    "mlp.shared_experts.linear_fc1.weight",
]


@given(
    st.sampled_from(["decoder.layers.", "optimizer.state.exp_avg.decoder.layers.", "mtp.layers."]),
    st.integers(100, 999),
    st.sampled_from(NAMES_IN_LAYERS),
    st.booleans(),
)
def test_stacking_a_name_and_its_inverse(prefix, layer, rest, by_layer):
    name = f"{prefix}{layer}.{rest}"
    key, at = keys.stack(name, by_layer)
    assert keys.leading(key) == len(at)
    assert (layer in at[:1]) == ("decoder" in prefix and not by_layer)
    assert keys.unstack(key, at) == name
    assert keys.object_name(keys.object_key(name, 1000, 20, by_layer)) == name


def test_names_outside_the_layers_are_not_stacked():
    for name in ("embedding.word_embeddings.weight", "decoder.final_layernorm._extra_state"):
        assert keys.stack(name) == (name, ())
        assert keys.object_name(keys.object_key(name, 4)) == name


def test_the_keys_of_experts_are_megatrons():
    """As megatron-core 0.16.1 writes them: test_megatron_core.py has the whole."""
    name = "decoder.layers.3.mlp.experts.linear_fc1.weight5"
    assert keys.stack(name) == ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (3, 5))
    assert keys.stack(name, by_layer=True) == ("decoder.layers.3.mlp.experts.experts.linear_fc1.weight", (5,))
    payload = "decoder.layers.3.mlp.experts.linear_fc1._extra_state5"
    key = "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_3.5_4.8"
    assert keys.object_key(payload, 4, 8) == key


# get_gpt_layer_with_transformer_engine_spec and get_gpt_mtp_block_spec: TE's modules of latent attention and experts
LATENT_EXPERTS = {
    "input_layernorm.weight": (4,),
    "self_attention.linear_q_down_proj.weight": (8, 4),
    "self_attention.linear_q_up_proj.layer_norm_weight": (8,),
    "self_attention.linear_q_up_proj.weight": (8, 8),
    "self_attention.linear_kv_down_proj.weight": (8, 4),
    "self_attention.linear_kv_up_proj.weight": (8, 8),
    "self_attention.linear_proj.weight": (4, 8),
    "pre_mlp_layernorm.weight": (4,),
    "mlp.router.weight": (2, 4),
    "mlp.router.expert_bias": (2,),
    "mlp.experts.linear_fc1.weight0": (12, 4),
    "mlp.experts.linear_fc1.weight1": (12, 4),
    "mlp.experts.linear_fc2.weight0": (4, 6),
    "mlp.experts.linear_fc2.weight1": (4, 6),
    "mlp.shared_experts.linear_fc1.weight": (12, 4),
    "mlp.shared_experts.linear_fc2.weight": (4, 6),
}
AROUND = {
    "embedding.word_embeddings.weight": (64, 4),
    "decoder.final_layernorm.weight": (4,),
    "output_layer.weight": (64, 4),
    "mtp.layers.0.enorm.weight": (4,),
    "mtp.layers.0.hnorm.weight": (4,),
    "mtp.layers.0.eh_proj.weight": (4, 8),
    "mtp.layers.0.final_layernorm.weight": (4,),
}
DEMANDED_OF_A_LAYER = [
    *("input_layernorm", "self_attention.core_attention", "self_attention.linear_q_down_proj"),
    *("self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj", "self_attention.linear_kv_up_proj"),
    *("self_attention.linear_proj", "pre_mlp_layernorm", "mlp.shared_experts.linear_fc1"),
    "mlp.shared_experts.linear_fc2",
]


def write_experts(directory: Path, layers: int = 2, **settings: Any) -> dict[str, TensorSpec]:
    shapes = AROUND | {f"decoder.layers.{n}.{name}": s for n in range(layers) for name, s in LATENT_EXPERTS.items()}
    inner = {f"mtp.layers.0.transformer_layer.{name}": shape for name, shape in LATENT_EXPERTS.items()}
    wanted = {name: TensorSpec(shape, DType.bfloat16) for name, shape in (shapes | inner).items()}
    writer = TorchDistWriter(directory, MODEL, wanted, **settings)
    writer.lay_out()
    writer.finish(None)
    return wanted


def test_every_extra_state_of_latent_attention_experts_and_later_tokens_is_there(tmp_path):
    write_experts(tmp_path)
    expected = {f"decoder.layers.{name}._extra_state/shard_{n}_2" for n in (0, 1) for name in DEMANDED_OF_A_LAYER}
    expected |= {f"mtp.layers.0.transformer_layer.{name}._extra_state/shard_0_1" for name in DEMANDED_OF_A_LAYER}
    for linear in ("linear_fc1", "linear_fc2"):
        key = f"mlp.experts.experts.{linear}._extra_state/shard_"
        expected |= {f"decoder.layers.{key}{layer}.{expert}_2.2" for layer in (0, 1) for expert in (0, 1)}
        expected |= {f"mtp.layers.0.transformer_layer.{key}{expert}_2" for expert in (0, 1)}
    expected |= {f"mtp.layers.0.{name}._extra_state/shard_0_1" for name in ("enorm", "hnorm", "eh_proj")}
    expected |= {
        "mtp.layers.0.final_layernorm._extra_state/shard_0_1",
        "decoder.final_layernorm._extra_state/shard_0_1",
    }
    assert set(TorchDistReader(tmp_path).objects) == expected


@pytest.mark.parametrize("layers_by_key", [False, True])
def test_the_fp8_state_of_experts_comes_back_as_one(tmp_path, layers_by_key):
    recipe = DelayedScaling(amax_history_len=3)
    role = RoleState(torch.tensor([2.0, 4.0]), torch.arange(6.0).view(2, 3))
    module = "decoder.layers.1.mlp.experts.linear_fc1"
    states = Fp8States(recipe, {module: Fp8State(dict.fromkeys(ROLES, role))}, producer="somebody", iteration=5)
    wanted = write_experts(tmp_path / "names")
    args = {"moe_grouped_gemm": True} | ({"linear_attention_freq": [1, 1]} if layers_by_key else {})
    writer = TorchDistWriter(tmp_path / "made", MODEL, wanted, run=CarriedRun(args=args))
    writer.lay_out()
    writer.finish(states)
    found = TorchDistReader(tmp_path / "made").fp8
    assert found is not None
    assert found.modules.keys() == {module}
    for part in found.modules[module].roles.values():
        assert torch.equal(part.scale, role.scale)
        assert torch.equal(part.amax_history, role.amax_history)


def layers_with_fused_norm(model: ModelShape, *, with_te: bool) -> set[bool]:
    """Whether the norm before attention is fused, of each layer with grouped attention: by the table's names, or by
    what is made of those of a run without Transformer Engine."""
    rows = [row for row in architecture_of(model.architecture).in_megatron(model) if not row.of_prediction]
    stored = {name for row in rows for place in row.places(model) for name in names(row, "megatron", place)}
    fused = "self_attention.linear_qkv.layer_norm_"
    layers = [name.split("self_attention.")[0] for name in stored if name.endswith("self_attention.linear_qkv.weight")]
    if not with_te:
        moved = {fused: "input_layernorm.", "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}
        for te, alone in moved.items():
            stored = {name.replace(te, alone) for name in stored}
        stored = {*te_names(dict.fromkeys(stored), is_indexed(stored)).values()}
    return {f"{layer}{fused}weight" in stored for layer in layers}


def test_the_norm_before_attention_is_fused_by_its_names_where_the_model_says_so() -> None:
    """Megatron-Core's layers without Transformer Engine are no hybrid ones and have no experts with norms of their own;
    heterogeneous ones have the names that they have with it."""
    for family in pico.FAMILIES:
        model = pico.shape(family)
        found = layers_with_fused_norm(model, with_te=True)
        assert found <= {model.fused_input_layernorm}, family
        if not (model.mamba or model.heterogeneous or model.has("moe.own_norms")):
            assert layers_with_fused_norm(model, with_te=False) == found, family

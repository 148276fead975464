"""The recorder on modules of Transformer Engine: what it writes of BF16 passes, and of those that TE records itself."""

from pathlib import Path

import pytest
import torch
from te_pairs import SHAPE, assert_same, gpts
from torch import Tensor, nn

from precisionctl import api
from precisionctl.fp8 import sidecar
from precisionctl.fp8.extra_state import decode_payload
from precisionctl.fp8.state import DelayedScaling
from precisionctl.precision import PRESETS, Precision
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.model.gpt import GPT

HISTORY = 4
SHORT = (f"precision.delayed.amax_history_len={HISTORY}",)


class Model(nn.Module):
    """TE's own modules under Megatron-Core's names."""

    def __init__(self) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        kind = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
        self.decoder, layer = nn.Module(), nn.Module()
        self.decoder.layers = nn.ModuleList([layer])
        layer.mlp = nn.Module()
        layer.mlp.linear_fc1 = te.LayerNormLinear(256, 512, normalization="RMSNorm", **kind)
        layer.mlp.linear_fc2 = te.Linear(512, 256, **kind)

    def forward(self, values: Tensor) -> Tensor:
        mlp = self.decoder.layers[0].mlp
        made: Tensor = mlp.linear_fc2(torch.relu(mlp.linear_fc1(values)))
        return made


@pytest.mark.parametrize("fp8", [False, True])
def test_what_te_computes_in_bf16_is_recorded_and_what_it_computes_in_fp8_is_its_own_state(
    fp8: bool, tmp_path: Path
) -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    model, passes = Model(), [torch.randn(64, 256, device="cuda").bfloat16() * size for size in (1, 4, 2)]
    with api.record(model, tmp_path / "state", overrides=SHORT):
        for values in passes:
            with te.autocast(enabled=fp8, recipe=recipe.DelayedScaling(amax_history_len=HISTORY)):
                out = model(values.requires_grad_())
            out.float().square().mean().backward()
    found = sidecar.read(tmp_path / "state").modules
    assert found.keys() == {"decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2"}
    for name, state in found.items():
        assert all(state.roles[role].amax_history.count_nonzero() == 3 for role in ("input", "weight", "grad_output"))
        if fp8:
            payload = model.get_submodule(name).get_extra_state().numpy().tobytes()
            assert (decoded := decode_payload(payload, name)) is not None
            assert_same(state, decoded[1])
    if not fp8:
        weight = model.get_parameter("decoder.layers.0.mlp.linear_fc2.weight")
        assert found["decoder.layers.0.mlp.linear_fc2"].roles["weight"].amax_history[-1] == weight.abs().max()


def test_of_a_gpt_on_te_it_records_what_our_own_recorder_does(tmp_path: Path) -> None:
    model: GPT = gpts(PRESETS["bf16"])[0]
    precision = Precision(fp8=True, delayed=DelayedScaling(amax_history_len=HISTORY))
    recorder, tokens = Recorder(precision, torch.device("cuda")), torch.randint(500, (2, 128), device="cuda")
    with model.recorded_by(recorder):
        model(tokens).float().logsumexp(-1).mean().backward()
    with api.record(model, tmp_path / "state", overrides=SHORT):
        model(tokens).float().logsumexp(-1).mean().backward()
    found, expected = sidecar.read(tmp_path / "state").modules, recorder.states()
    assert len(found) == 4 * SHAPE.num_layers + sum("core_attention" in name for name in found)
    for name, state in found.items():
        for role, part in state.roles.items():  # norms may be computed in another order
            torch.testing.assert_close(
                part.amax_history, expected[name].roles[role].amax_history, rtol=2**-8, atol=0, msg=f"{name} {role}"
            )

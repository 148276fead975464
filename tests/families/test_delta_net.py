"""Gated delta nets: the rule against a slow one, texts that share rows, and checkpoints whose bits all come back."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import conversions
import pico
import pytest
import torch
from gpt_models import assert_texts_are_apart
from safetensors.torch import load_file, save_file
from soaking import in_soak
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from precisionctl.architectures.families import from_hf_config
from precisionctl.architectures.shared.delta_net_keys import prediction_layers
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, ShapeMismatch, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.planning import make_plan
from precisionctl.trainer.model.recurrent import delta_rule
from precisionctl.trainer.model.recurrent.delta_rule import gated_delta_rule
from precisionctl.trainer.model.recurrent.recurrence import CHUNK
from precisionctl.verify.compare import compare


def inputs(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Two key heads of 4 channels for four value heads of 3: queries, keys, values, decays, learning rates."""
    torch.manual_seed(length)
    query, key = torch.randn(2, 2, length, 2, 4, dtype=dtype).unbind()
    value, decay, beta = torch.randn(2, length, 4, 3), -torch.rand(2, length, 4), torch.rand(2, length, 4)
    return [query, key, value.to(dtype), decay.to(dtype), beta.to(dtype)]


def slowly(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Token by token and head by head, as the paper defines it."""
    out = torch.empty_like(value)
    for row in range(value.shape[0]):
        for head in range(value.shape[2]):
            state = value.new_zeros(value.shape[3], key.shape[3])  # [D, K]
            for token in range(value.shape[1]):
                k, q = key[row, token, head // 2], query[row, token, head // 2]
                k, q = k / (k @ k + 1e-6).sqrt(), q / (q @ q + 1e-6).sqrt() / 2  # the root of 4 channels
                step = beta[row, token, head]
                forgets = torch.eye(len(k), dtype=k.dtype) - step * torch.outer(k, k)
                state = decay[row, token, head].exp() * state @ forgets + step * torch.outer(value[row, token, head], k)
                out[row, token, head] = state @ q
    return out


@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_the_chunked_rule_gives_what_token_by_token_does(length: int) -> None:
    given = inputs(length)
    torch.testing.assert_close(gated_delta_rule(*given), slowly(*given), rtol=0, atol=1e-12)


def test_the_rule_in_fp32_is_that_of_transformers() -> None:
    given = inputs(CHUNK + 9, torch.float32)
    as_many = [
        each.repeat_interleave(2, dim=2) for each in given[:2]
    ]  # as value heads: 5.17 does not repeat them itself
    expected, _ = torch_recurrent_gated_delta_rule(*as_many, *given[2:], use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(gated_delta_rule(*given), expected, rtol=0, atol=1e-6)


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_flash_linear_attention_is_asked_for_the_same_on_a_gpu_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> tuple[Tensor, None]:
        """The parameters that it has in 0.6.0, of those that are used."""
        asked.append((scale, use_qk_l2norm_in_kernel))
        return gated_delta_rule(q, k, v.as_subclass(Tensor), g, beta), None

    monkeypatch.setattr(delta_rule, "_flash_kernel", lambda: chunk_gated_delta_rule)
    query, key, value, decay, beta = (tensor.bfloat16() for tensor in inputs(CHUNK + 6))
    expected = gated_delta_rule(query, key, value, decay, beta)
    assert not asked
    assert torch.equal(gated_delta_rule(query, key, value.as_subclass(OnGpu), decay, beta), expected)
    assert asked == [(None, True)]
    gated_delta_rule(query, key, value.float().as_subclass(OnGpu), decay, beta)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("hopper", "from_3_4_0", "from_3_7_1", "taken"),
    [(True, True, False, False), (True, False, False, True), (True, True, True, True), (False, True, False, True)],
)
def test_flash_linear_attention_is_not_asked_where_it_says_that_its_gradients_are_wrong(
    hopper: bool, from_3_4_0: bool, from_3_7_1: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = object()
    facts = {"IS_NVIDIA_HOPPER": hopper, "TRITON_ABOVE_3_4_0": from_3_4_0, "TRITON_ABOVE_3_7_1": from_3_7_1}
    monkeypatch.setitem(sys.modules, "fla.utils", SimpleNamespace(**facts))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", SimpleNamespace(chunk_gated_delta_rule=kernel))
    for package in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    assert delta_rule._flash_kernel.__wrapped__() is (kernel if taken else None)


def test_gradients_of_the_rule_are_those_of_small_differences() -> None:
    given = [tensor[:1, : CHUNK + 2].requires_grad_() for tensor in inputs(CHUNK + 2)]
    assert torch.autograd.gradcheck(gated_delta_rule, given, fast_mode=True)


def test_texts_that_share_a_row_neither_see_nor_remember_one_another(tmp_path: Path) -> None:
    assert_texts_are_apart("qwen3-5", tmp_path)


def published(folder: Path, family: str, wide: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """As a family's files are published: with a layer of multi-token prediction, of which transformers knows nothing,
    norms that are not near 1, and `wide` ones in FP32."""
    pico.save(folder, family, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name in [*tensors]:
        if name.startswith("model.layers.3."):
            tensors[name.replace("model.layers.3.", "mtp.layers.0.")] = torch.randn_like(tensors[name])
        if name.endswith("linear_attn.norm.weight"):
            tensors[name] = (torch.randn(8) / 4).bfloat16()
        if name.endswith(wide):
            tensors[name] = tensors[name].float()
    tensors |= {f"mtp.{name}.weight": torch.randn(64).bfloat16() for name in ("norm", "pre_fc_norm_embedding")}
    tensors |= {"mtp.pre_fc_norm_hidden.weight": torch.randn(64).bfloat16(), "mtp.fc.weight": torch.randn(64, 128)}
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


WIDE = ("A_log", "linear_attn.norm.weight")
"""Tensors that are stored in FP32."""


@pytest.mark.parametrize(
    ("family", "container", "wide"),
    # each family is here with either container and either dtype, as is each container; in soak all three are combined
    [
        ("qwen3-next", "torch_dist", WIDE),
        ("qwen3-next", "torch", ()),
        ("qwen3-5", "torch_dist", ()),
        ("qwen3-5", "torch", WIDE),
        *in_soak(("qwen3-next", "torch_dist", ()), ("qwen3-next", "torch", WIDE)),
        *in_soak(("qwen3-5", "torch_dist", WIDE), ("qwen3-5", "torch", ())),
    ],
    ids=str,
)
def test_a_published_checkpoint_comes_back_from_any_division(
    tmp_path: Path, family: str, container: str, wide: tuple[str, ...]
) -> None:
    """A norm that is not near 1 is rounded where 1 is taken from it in BF16."""
    stored = published(tmp_path / "hf", family, wide)
    sizes = Parallelism(2, 2, expert=2 if family == "qwen3-next" else 1)
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron", container=container, parallelism=sizes)))
    execute(plan_command(Request(tmp_path / "m", tmp_path / "back", "hf")))
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == stored.keys()
    assert [n for n in stored if back[n].dtype != stored[n].dtype or not torch.equal(back[n], stored[n])] == []


def test_a_model_whose_prediction_layers_alone_would_attend_comes_back_without_them(tmp_path: Path) -> None:
    """Heads of attention, of which config.json says how many, belong to layers that were not saved."""
    pico.save(tmp_path / "hf", "qwen3-5", dtype=torch.bfloat16, num_hidden_layers=1)
    reader = open_checkpoint(tmp_path / "hf")
    assert reader.model.mtp_num_layers == 1 and not reader.model.has_attention(0)
    conversions.assert_there_and_back(tmp_path / "hf")


@pytest.mark.parametrize("precision", ["bf16", *in_soak("fp8")])
def test_a_norm_in_bf16_is_exact_in_megatron_whatever_precision_is_asked_for(tmp_path: Path, precision: str) -> None:
    stored = published(tmp_path / "hf", "qwen3-next")
    conversions.run(tmp_path / "hf", tmp_path / "m", "megatron", precision)
    assert compare(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "m")).equal
    conversions.run(tmp_path / "m", tmp_path / "m2", "megatron", precision)
    conversions.run(tmp_path / "m2", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back/model.safetensors")
    assert [n for n in stored if back[n].dtype != stored[n].dtype or not torch.equal(back[n], stored[n])] == []


def test_torch_dist_has_the_parts_of_a_delta_net_as_megatron_core_stores_them(tmp_path: Path) -> None:
    """Names and shapes of GatedDeltaNet.sharded_state_dict, megatron-core 0.16.1."""
    pico.save(tmp_path / "hf", "qwen3-5", dtype=torch.bfloat16)
    sizes = Parallelism(2)
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=sizes)))
    index, start = dcp_metadata.read_index(tmp_path / "m/release"), "decoder.layers.1.self_attention."
    found = {key.removeprefix(start): stored for key, stored in index.tensors.items() if key.startswith(start)}
    assert {key: stored.shape for key, stored in found.items()} == {
        "in_proj.layer_norm_weight": (64,),
        **{f"in_proj.weight.{part}": (64, 64) for part in ("query", "key")},
        **{f"in_proj.weight.{part}": (128, 64) for part in ("value", "z")},
        **{f"in_proj.weight.{part}": (16, 64) for part in ("beta", "alpha")},
        **{f"conv1d.weight.{part}": (64, 1, 4) for part in ("query", "key")},
        "conv1d.weight.value": (128, 1, 4),
        **dict.fromkeys(("A_log", "dt_bias"), (16,)),
        "out_norm.weight": (8,),
        "out_proj.weight": (64, 128),
    }
    assert {piece.sizes for piece in found["in_proj.weight.z"].pieces} == {(64, 64)}


def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "qwen3-5", dtype=torch.bfloat16, linear_num_key_heads=1)
    with pytest.raises(ShapeMismatch, match=r"self_attention.in_proj.weight.*cannot be cut into 2"):
        plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=Parallelism(2)))


def test_exports_leave_what_makes_decay_and_learning_rate_in_bf16(tmp_path: Path) -> None:
    for family, kept in (("qwen3-next", {"in_proj_ba"}), ("qwen3-5", {"in_proj_a", "in_proj_b"})):
        pico.save(tmp_path / family, family, dtype=torch.bfloat16)
        asked = Request.export(tmp_path / family, tmp_path / "out", "vllm", "dynamic", keep_misfits=True)
        plan = plan_command(asked).plan
        of_nets = {name.split(".")[-2] for name in plan.targets if ".linear_attn." in name and name.endswith(".weight")}
        coded = {name.split(".")[-2] for name in plan.codes if ".linear_attn." in name}
        assert of_nets - coded == {*kept, "conv1d", "norm"}


def test_norms_that_were_wide_in_megatron_alone_are_not_told_as_rounded(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "qwen3-5", dtype=torch.bfloat16)
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron")))
    asked = Request.export(tmp_path / "m", tmp_path / "out", "vllm", "dynamic", keep_misfits=True)
    notes = "\n".join(plan_command(asked).notes)
    assert "3 norms are FP32 in Megatron" in notes and "exact, unless they were trained" in notes
    assert "tensors that stay values are FP32" not in notes
    notes = "\n".join(plan_command(Request(tmp_path / "m", tmp_path / "back", "hf")).notes)
    assert "3 norms are FP32 in Megatron" in notes


def test_a_config_of_layers_that_are_not_known_is_refused_by_name() -> None:
    config = pico.config("qwen3-5")
    with pytest.raises(UnknownArchitecture, match="layers of type 'mamba'"):
        from_hf_config(config | {"layer_types": ["mamba"] * 4})
    with pytest.raises(DamagedCheckpoint, match="16 value heads for 3 key heads"):
        from_hf_config(config | {"linear_num_key_heads": 3})
    with pytest.raises(UnknownArchitecture, match="mtp_num_hidden_layers=2"):
        prediction_layers("mtp_num_hidden_layers").read({"mtp_num_hidden_layers": 2})


def test_what_a_run_trained_is_in_hugging_face_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's BF16 norms are their factors less one: these need FP32, and keep it on the way back."""
    published(tmp_path / "hf", "qwen3-5")
    with monkeypatch.context() as in_bf16:  # as Megatron's own run has all of its parameters
        dtypes_of = make_plan._dtypes_of
        bf16 = [DType.bfloat16]
        in_bf16.setattr(make_plan, "_dtypes_of", lambda job, *of: bf16 if job.row.wide_beside else dtypes_of(job, *of))
        execute(plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron", "bf16")))
    execute(plan_command(Request(tmp_path / "m", tmp_path / "there", "hf")))
    told = plan_command(Request(tmp_path / "m", tmp_path / "never", "hf", "bf16")).notes
    assert any("3 norms are stored less 1 in Megatron, in 16 bits, and rounded" in note for note in told)
    execute(plan_command(Request(tmp_path / "there", tmp_path / "back", "megatron")))
    one, other = (open_checkpoint(tmp_path / name) for name in ("m", "back"))
    assert one.specs.keys() == other.specs.keys()
    changed = {name for name, spec in one.specs.items() if spec != other.specs[name]}
    assert changed == {name for name in one.specs if name.endswith("out_norm.weight")}
    pairs = ((read_tensor(one, name).float(), read_tensor(other, name).float()) for name in one.specs)
    assert all(torch.equal(*pair) for pair in pairs)
    norm = load_file(tmp_path / "there/model.safetensors")["model.layers.0.linear_attn.norm.weight"]
    assert norm.dtype == torch.float32

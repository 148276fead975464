"""PyTorch's checkpoints that we write are what PyTorch's own loader, and a run, go on from."""

import json
import re
from dataclasses import replace
from pathlib import Path

import conversions
import pico
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from soaking import in_soak
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import set_state_dict
from trained_models import adamw, config_of, save, states, train, trained
from transformers import PreTrainedModel

from precisionctl.architectures.families import from_hf_config
from precisionctl.architectures.head_rearrangements import QKV, RotaryPairs
from precisionctl.checkpoints.dcp import dcp_writer
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist import masters
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.worker import Worker
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint, RecipeError
from precisionctl.param import MOMENTS
from precisionctl.verify.compare import compare

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def loaded(path: Path, family: str, one_group: bool = False) -> tuple[PreTrainedModel, torch.optim.AdamW]:
    """Another model and optimizer, into which PyTorch has loaded a checkpoint."""
    model = pico.make(family, seed=99)
    optimizer = torch.optim.AdamW(model.parameters()) if one_group else adamw(model)
    for group in optimizer.param_groups:
        group.update(lr=0.5, initial_lr=0.5)
    state = states(model, optimizer)
    dcp.load(state, storage_reader=FileSystemReader(path), no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return model, optimizer


@pytest.mark.parametrize(
    "family", ["qwen3-moe", *in_soak("llama-tied", "gpt2", "llama-3", "phi3", "deepseek-v2", "gemma4")]
)
def test_pytorch_goes_on_from_a_megatron_checkpoint_with_the_losses_of_the_run(tmp_path: Path, family: str) -> None:
    """PyTorch's checkpoint to Megatron's in BF16 with FP32 masters, and back to PyTorch."""
    model, optimizer = trained(family)
    made = save(tmp_path / "dcp", states(model, optimizer))
    reference = config_of(model, tmp_path / "config")
    conversions.run(made, tmp_path / "megatron", "megatron", "bf16", reference=reference)
    conversions.run(tmp_path / "megatron", tmp_path / "back", "hf", container="dcp", verify=True)
    going_on = train(model, optimizer, range(2, 7))
    other, its_optimizer = loaded(tmp_path / "back", family)
    assert train(other, its_optimizer, range(2, 7)) == going_on
    conversions.run(tmp_path / "back", tmp_path / "again", "megatron", "bf16")
    once, twice = (tmp_path / made / "iter_0000002" / "__0_0.distcp" for made in ("megatron", "again"))
    assert once.read_bytes() == twice.read_bytes()
    fresh = pico.make(family)
    fresh.load_state_dict(loaded(tmp_path / "back", family)[0].state_dict())
    assert train(fresh, adamw(fresh), range(2, 7)) != going_on  # the moments matter


def test_settings_of_the_optimizer_come_back_whatever_its_groups_are(tmp_path: Path) -> None:
    model, optimizer = trained("llama-3")
    conversions.run(
        save(tmp_path / "dcp", states(model, optimizer)),
        tmp_path / "out",
        "hf",
        container="dcp",
        reference=config_of(model, tmp_path / "config"),
    )
    _, two = loaded(tmp_path / "out", "llama-3")
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in two.param_groups] == [
        (0.01, (0.9, 0.95), 0.1),
        (0.01, (0.9, 0.95), 0.0),
    ]
    _, one = loaded(tmp_path / "out", "llama-3", one_group=True)
    assert all(torch.equal(state["step"], torch.tensor(2.0)) for state in one.state.values())


def test_weights_alone_are_a_state_dict_of_the_class(tmp_path: Path) -> None:
    model = pico.make_and_save(tmp_path / "hf", "qwen3-moe", dtype=torch.bfloat16, tie_word_embeddings=True)
    conversions.run(tmp_path / "hf", tmp_path / "out", "hf", container="dcp", verify=True)
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}}
    assert "lm_head.weight" in state["model"]
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "out"), no_dist=True)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in model.state_dict().items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3_moe"
    conversions.run(tmp_path / "out", tmp_path / "again", "hf")
    conversions.assert_same_tensors(tmp_path / "hf", tmp_path / "again")


@pytest.mark.parametrize("family", pico.representing(pico.rows, most=25))
def test_names_and_shapes_are_those_that_the_class_has_in_memory(tmp_path: Path, family: str) -> None:
    model = pico.make_and_save(tmp_path / "hf", family)
    writer = plan_command(Request(tmp_path / "hf", tmp_path / "out", "hf", container="dcp")).writer
    assert isinstance(writer, dcp_writer.DcpWriter)
    expected = {f"model.{name}": tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in writer.placement.stored.items()} == expected


def test_names_of_the_first_gpt_2_become_those_that_the_class_has_in_memory(tmp_path: Path) -> None:
    """The Hub's has no `transformer.` before its names."""
    model = pico.make_and_save(tmp_path / "hf", "gpt2")
    file = tmp_path / "hf" / "model.safetensors"
    save_file({name.removeprefix("transformer."): values for name, values in load_file(file).items()}, file)
    conversions.run(tmp_path / "hf", tmp_path / "out", "hf", container="dcp", verify=True)
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}}
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "out"), no_dist=True)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in model.state_dict().items())


def test_bytes_do_not_depend_on_workers_and_large_tensors_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_writer, "PIECE_BYTES", 10_000)
    model, optimizer = trained("llama-3")
    made, reference = save(tmp_path / "dcp", states(model, optimizer)), config_of(model, tmp_path / "config")
    for workers in (1, 3):
        conversions.run(made, tmp_path / f"{workers}", "hf", container="dcp", reference=reference, workers=workers)
    one, three = (conversions.tree(tmp_path / str(workers)) for workers in (1, 3))
    assert one == three
    index = FileSystemReader(tmp_path / "1").read_metadata()
    pieces = index.state_dict_metadata["model.model.embed_tokens.weight"].chunks  # type: ignore[union-attr]
    assert [chunk.sizes[0] for chunk in pieces] == [39] * 6 + [16]
    assert loaded(tmp_path / "1", "llama-3")[0].state_dict().keys() == model.state_dict().keys()


def test_torchtitans_names_are_written_and_read_back_to_the_same_bytes(tmp_path: Path) -> None:
    """The reader finds rows of pairs head by head; the writer computes them. tests/peers has torchtitan itself."""
    model, optimizer = trained("llama-tied")
    made = save(tmp_path / "made", states(model, optimizer))
    reference = config_of(model, tmp_path / "config")
    for to in ("torchtitan", "dcp"):
        notes = conversions.run(made, tmp_path / to, "hf", container=to, reference=reference, verify=True).notes
        assert any("exclude_from_loading dataloader" in note for note in notes) == (to == "torchtitan")
    conversions.run(tmp_path / "torchtitan", tmp_path / "back", "hf", container="dcp")
    for name in (".metadata", "__0_0.distcp", "__0_1.distcp", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "dcp" / name).read_bytes()
    index = FileSystemReader(tmp_path / "torchtitan").read_metadata()
    keys = {key for key in index.state_dict_metadata if ".1." not in key and "param_groups" not in key}
    assert {key for key in keys if "layers.0.attention.qkv" in key} == {
        *(f"layers.0.attention.qkv_linear.w{one}.weight" for one in "qkv"),
        *(f"optimizer.state.layers.0.attention.qkv_linear.wqkv.weight.{one}" for one in ("step", *MOMENTS)),
    }
    keys_of_heads = model.model.layers[0].self_attn.k_proj.weight
    found = torch.empty(keys_of_heads.shape)
    state = {"layers.0.attention.qkv_linear.wk.weight": found}
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "torchtitan"), no_dist=True)
    assert torch.equal(found, in_pairs(keys_of_heads, model.config.head_dim))
    back = plan_command(Request(tmp_path / "torchtitan", tmp_path / "never", "hf"))
    worker = Worker(back.plan, back.source, back.writer)
    needing = {name for job in back.plan.jobs if worker.needs_torch(job) for name in job.reads}
    attention = {name for name in back.source.specs if re.search("[qkv]_proj", name)}  # one job for all three
    assert needing == attention | {"model.embed_tokens.weight"}  # which has a copy to compare


@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
def test_weights_in_fp32_are_the_masters_wherever_they_go(tmp_path: Path, container: str) -> None:
    """Also on detours. Weights in BF16 are their rounding, which `verify` knows."""
    model, optimizer = trained("llama-3")
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    made = config_of(model, save(tmp_path / "made", states(model, optimizer)))
    conversions.run(made, tmp_path / "m16", "megatron", "bf16", container=container)
    told = conversions.run(tmp_path / "m16", tmp_path / "m32", "megatron", "fp32", container=container, verify=True)
    assert any("weights are the optimizer's FP32 masters" in note for note in told.notes)
    told = conversions.run(tmp_path / "m16", tmp_path / "of_m16", "hf", "fp32", verify=True)
    assert any("weights are the optimizer's FP32 masters" in note for note in told.notes)
    conversions.run(tmp_path / "m32", tmp_path / "of_m32", "hf")
    for name in ("of_m16", "of_m32"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[each], weights[each]) for each in weights)
    m16, m32, alone = (open_checkpoint(tmp_path / name) for name in ("m16", "m32", "of_m16"))
    assert compare(open_checkpoint(made), m32).equal
    for one, other in ((m16, alone), (m32, m16)):
        assert {tensor.status for tensor in compare(one, other).tensors} <= {"exact", "rounded"}
    conversions.run(tmp_path / "m32", tmp_path / "again", "megatron", "bf16", container=container)
    conversions.assert_same_tensors(tmp_path / "m16", tmp_path / "again")


def test_without_the_optimizer_weights_in_fp32_are_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropped, or unreadable; and masters of a distributed optimizer are held against the weights first."""
    model, optimizer = trained("llama-3")
    made = config_of(model, save(tmp_path / "made", states(model, optimizer)))
    conversions.run(made, tmp_path / "m16", "megatron", "bf16")
    rounded = {name: tensor.detach().bfloat16().float() for name, tensor in model.state_dict().items()}
    told = conversions.run(tmp_path / "m16", tmp_path / "dropped", "hf", "fp32", drop_optimizer=True)
    assert any("masters stay behind, too: the weights are their rounding" in note for note in told.notes)
    found = load_file(tmp_path / "dropped" / "model.safetensors")
    assert all(torch.equal(found[each], rounded[each]) for each in rounded)
    with monkeypatch.context() as in_buckets:
        in_buckets.setattr(TorchDistReader, "in_buckets", True)
        in_buckets.setattr(masters, "differing_masters", lambda reader: [*reader.optimizer_specs])
        with pytest.raises(DamagedCheckpoint, match="masters are not those of the weights"):
            conversions.run(tmp_path / "m16", tmp_path / "mistaken", "hf", "fp32")

    def unreadable(reader: object) -> None:
        raise CheckpointError("no names", do="-")

    monkeypatch.setattr(TorchDistReader, "optimizer_specs", property(unreadable))
    told = conversions.run(tmp_path / "m16", tmp_path / "unread", "hf", "fp32")
    assert "The optimizer stays behind: no names." in told.notes
    found = load_file(tmp_path / "unread" / "model.safetensors")
    assert all(torch.equal(found[each], rounded[each]) for each in rounded)


def test_masters_are_not_rounded_while_there_is_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained("llama-3")
    made = config_of(model, save(tmp_path / "made", states(model, optimizer)))
    for to in ("dcp", "torchtitan"):
        with pytest.raises(RecipeError, match=f"lose the optimizer's FP32 masters, which {to} has no .*--precision"):
            plan_command(Request(made, tmp_path / to, "hf", "bf16", container=to))
        command = plan_command(Request(made, tmp_path / to, "hf", "bf16", container=to, drop_optimizer=True))
        assert {spec.dtype for spec in command.plan.targets.values()} == {DType.bfloat16}


def in_pairs(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Number i of the first half of a head, then number i of the second, row by row."""
    order = [head + i + half for head in range(0, len(rows), size) for i in range(size // 2) for half in (0, size // 2)]
    return rows[order]


@pytest.mark.parametrize("of_values", [None, 6])
def test_rotary_pairs_are_moved_there_and_back(of_values: int | None) -> None:
    shape = replace(from_hf_config(pico.config("llama-3")), v_head_dim=of_values)
    whole, pairs = torch.arange(shape.qkv_size * 2).reshape(-1, 2), RotaryPairs(QKV)
    query, key, value = pairs.split(whole, shape)
    plain = QKV.split(whole, shape)
    assert torch.equal(query, in_pairs(plain[0], shape.kv_channels)) and torch.equal(value, plain[2])
    assert torch.equal(key, in_pairs(plain[1], shape.kv_channels))
    assert torch.equal(pairs.merge((query, key, value), shape), whole)


def test_a_head_of_which_no_pairs_are_made_is_refused() -> None:
    shape = replace(from_hf_config(pico.config("llama-3")), kv_channels=15)
    with pytest.raises(DamagedCheckpoint, match="15 channels of a head, of which no rotary pairs are made"):
        RotaryPairs(QKV).split(torch.zeros(shape.qkv_size, 2), shape)


def test_an_fp8_directory_becomes_values_and_no_codes_are_written(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16)
    conversions.carry_out(Request.export(tmp_path / "hf", tmp_path / "fp8", "vllm", "dynamic"))
    conversions.run(tmp_path / "fp8", tmp_path / "out", "hf", container="dcp")
    tensors = conversions.tensors(tmp_path / "out")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    with pytest.raises(RecipeError, match="not written as dcp"):
        Request(tmp_path / "hf", tmp_path / "other", "hf", "fp8", container="dcp")

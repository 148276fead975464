"""torch_dist directories: written, read back, and held against PyTorch's own distributed checkpoints."""

import argparse
import dataclasses
import io
import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import command_line
import pytest
import torch
import torch.distributed.checkpoint
from conversions import tree
from dist_checkpoints import DEMANDED, LAYER, MODEL, NAMES, ONCE, specs, values, write
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter

from precisionctl.architectures.families import to_hf_config
from precisionctl.architectures.megatron.megatron_args import to_megatron_args
from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.megatron import keys
from precisionctl.checkpoints.megatron.carried_run import CarriedRun, carry_run
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist import placement
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader, recognise
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.commands.source_notes import opened_notes
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint, UnknownFormat
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import DelayedScaling, Fp8State, Fp8States
from precisionctl.param import Parallelism


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
@pytest.mark.parametrize("optimizer", [False, True], ids=["weights", "optimizer"])
def test_what_was_written_is_read_back(tmp_path, tensor_parallel, optimizer):
    tensors = values(specs(optimizer=optimizer))
    write(tmp_path, tensors, parallelism=Parallelism(tensor_parallel))
    reader = TorchDistReader(tmp_path)
    assert reader.specs.keys() == NAMES.keys()
    assert {**reader.specs, **reader.optimizer_specs}.keys() == tensors.keys()
    everything = SimpleNamespace(specs={**reader.specs, **reader.optimizer_specs}, chunks=reader.chunks)
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(everything, name), tensor), name
    assert len(reader.files) == tensor_parallel
    assert reader.model == MODEL


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_pytorch_itself_loads_what_we_wrote(tmp_path, tensor_parallel):
    tensors = values(specs())
    write(tmp_path, tensors, parallelism=Parallelism(tensor_parallel))
    state: dict[str, Any] = {name: torch.empty(shape, dtype=torch.bfloat16) for name, (shape, _) in ONCE.items()}
    state |= {
        f"decoder.layers.{name}": torch.empty((2, *shape), dtype=torch.bfloat16) for name, (shape, _) in LAYER.items()
    }
    torch.distributed.checkpoint.load(state, storage_reader=FileSystemReader(tmp_path))
    for name, tensor in tensors.items():
        key, layer = keys.stack(name)
        assert torch.equal(state[key] if layer is None else state[key][layer], tensor), name


def megatron_directory(path: Path, state: dict[str, Any]) -> Path:
    """What PyTorch writes of `state`, with Megatron's marker (of 0.19, which has no common.pt)."""
    unnested = DefaultSavePlanner(flatten_state_dict=False)
    torch.distributed.checkpoint.save(state, storage_writer=FileSystemWriter(path), planner=unnested, no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return path


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "by layer"])
def test_what_pytorch_wrote_is_read_with_layers_stacked_or_not(tmp_path, stacked):
    tensors = values(specs())
    state: dict[str, Any] = dict(tensors)
    if stacked:
        state = {name: tensors[name] for name in ONCE}
        for name in LAYER:
            layers = [tensors[f"decoder.layers.{layer}.{name}"] for layer in range(2)]
            state[f"decoder.layers.{name}"] = torch.stack(layers)
    args = argparse.Namespace(**to_megatron_args(MODEL))
    state["common_state/shard_0_1"] = [{"args": args, "iteration": 3}]
    reader = TorchDistReader(megatron_directory(tmp_path, state))
    assert reader.model == MODEL
    assert reader.iteration == 3
    assert reader.specs.keys() == NAMES.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(reader, name), tensor), name


def test_metadata_of_megatrons_own_classes_is_read(tmp_path):
    write(tmp_path, values(specs()))
    metadata = tmp_path / ".metadata"
    theirs = b"megatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"  # megatron-core 0.15
    metadata.write_bytes(metadata.read_bytes().replace(b"torch.distributed.checkpoint.metadata\nMetadata\n", theirs))
    assert theirs in metadata.read_bytes()
    assert TorchDistReader(tmp_path).specs.keys() == NAMES.keys()


def test_equal_input_gives_equal_bytes(tmp_path):
    tensors, state = values(specs()), fp8_states()
    for name in ("a", "b"):
        common = json.loads('{"opt_param_scheduler": {"num_steps": 5, "iteration": 3}}')
        write(
            tmp_path / name,
            tensors,
            state,
            parallelism=Parallelism(2),
            run=CarriedRun(iteration=3, common=common),
            companions=companions(),
        )
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_laying_out_again_leaves_the_bytes_that_are_there(tmp_path):
    tensors = values(specs())
    write(tmp_path, tensors)
    TorchDistWriter(tmp_path, MODEL, specs()).lay_out()
    reader = TorchDistReader(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(reader, name), tensor), name


def test_a_layout_has_its_final_sizes_before_any_byte_is_written(tmp_path):
    write(tmp_path / "whole", values(specs()), parallelism=Parallelism(2))
    TorchDistWriter(tmp_path / "empty", MODEL, specs(), parallelism=Parallelism(2)).lay_out()
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "empty").iterdir()}
    assert sizes == {name: (tmp_path / "whole" / name).stat().st_size for name in ("__0_0.distcp", "__1_0.distcp")}


def test_the_chunks_that_the_writer_and_the_reader_name_are_the_same(tmp_path):
    writer = TorchDistWriter(tmp_path, MODEL, specs(), parallelism=Parallelism(4))
    writer.lay_out()
    writer.finish(None)
    reader = TorchDistReader(tmp_path)
    for name in NAMES:
        assert list(reader.chunks(name)) == list(writer.chunks(name)), name


def fp8_states() -> Fp8States:
    recipe = DelayedScaling(margin=1, amax_history_len=3, amax_compute_algo="most_recent")
    fresh = Fp8State.fresh(recipe.amax_history_len)
    modules = {f"decoder.layers.{layer}.mlp.linear_fc1": with_scales(fresh, layer + 2.0) for layer in range(2)}
    return Fp8States(recipe, modules, producer="somebody", iteration=5)


def with_scales(state: Fp8State, scale: float) -> Fp8State:
    return Fp8State({role: dataclasses.replace(part, scale=torch.tensor(scale)) for role, part in state.roles.items()})


@pytest.mark.parametrize("live", [True, False])
def test_fp8_state_comes_back_from_the_modules_or_from_the_sidecar(tmp_path, live):
    states = fp8_states()
    write(tmp_path, values(specs()), states, live=live)
    reader = TorchDistReader(tmp_path)
    assert (tmp_path / sidecar.RELATIVE).exists() != live
    assert reader.args.get("fp8") == ("hybrid" if live else None)
    found = reader.fp8
    assert found is not None
    assert (found.recipe, found.producer, found.iteration) == (states.recipe, "somebody", 5)
    assert found.modules.keys() == states.modules.keys()
    for name, state in states.modules.items():
        assert all(torch.equal(found.modules[name].roles[role].scale, part.scale) for role, part in state.roles.items())


def test_a_payload_that_nobody_understands_is_kept_byte_for_byte(tmp_path):
    raw = torch.frombuffer(bytearray(b"\x80\x02]."), dtype=torch.uint8)  # a pickled empty list
    states = dataclasses.replace(fp8_states(), raw={"decoder.layers.1.self_attention.core_attention": raw})
    write(tmp_path, values(specs()), states)
    found = TorchDistReader(tmp_path).fp8
    assert found is not None
    assert found.raw.keys() == states.raw.keys()
    assert torch.equal(found.raw["decoder.layers.1.self_attention.core_attention"], raw)


def test_state_of_transformer_engine_1_is_kept_though_not_understood(tmp_path):
    file = io.BytesIO()
    torch.save({"scale_fwd": torch.ones(3), "amax_history_fwd": torch.zeros(4, 3)}, file)
    key = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"
    write(tmp_path, values(specs()), run=CarriedRun(objects={key: file}))
    found = TorchDistReader(tmp_path).fp8
    assert found is not None
    assert found.raw["decoder.layers.0.mlp.linear_fc1"].numpy().tobytes() == file.getvalue()


def companions() -> Companions:
    return Companions({"config.json": json.dumps(to_hf_config(MODEL, "bfloat16")).encode()})


def test_companions_objects_and_common_data_come_back(tmp_path):
    objects = {"rng_state/shard_0.0_1.1": {"torch": torch.arange(4)}, "data/shard_0_1": {"rows": 12}}
    write(tmp_path, values(specs()), companions=companions(), run=CarriedRun(9, {"extra": {"lr": 0.5}}, objects))
    reader = TorchDistReader(tmp_path)
    assert reader.companions == companions()
    assert torch.equal(reader.read_object("rng_state/shard_0.0_1.1")["torch"], torch.arange(4))
    assert reader.read_object("data/shard_0_1") == {"rows": 12}
    assert reader.common["extra"] == {"lr": 0.5}
    assert reader.iteration == 9
    with pytest.raises(DamagedCheckpoint, match="no object"):
        reader.read_object("nothing/shard_0_1")


def test_the_vocabulary_is_padded_by_the_embeddings_rows_whatever_the_arguments_say(tmp_path):
    write(tmp_path, values(specs()), companions=companions())
    reader = TorchDistReader(tmp_path)
    assert (reader.model.vocab_size, reader.model.padded_vocab_size) == (50, 64)


def test_a_config_that_contradicts_the_arguments_is_refused(tmp_path):
    config = to_hf_config(dataclasses.replace(MODEL, rotary_base=5e5), "bfloat16")
    stale = Companions({"config.json": json.dumps(config).encode()})
    write(tmp_path, values(specs()), companions=stale)
    with pytest.raises(DamagedCheckpoint, match="rotary_base 500000.0 / 10000.0"):
        _ = TorchDistReader(tmp_path).model


def test_the_tracker_names_the_newest_iteration_and_any_complete_one_can_be_named(tmp_path):
    for iteration in (5, 10):
        write(tmp_path / keys.directory_name(iteration), values(specs()), run=CarriedRun(iteration))
        keys.write_tracker(tmp_path, iteration)
    assert recognise(tmp_path)
    assert recognise(tmp_path / "iter_0000005")
    assert not recognise(tmp_path.parent / "nothing")
    assert TorchDistReader(tmp_path).iteration == 10
    assert TorchDistReader(tmp_path, 5).iteration == 5
    assert TorchDistReader(tmp_path / "iter_0000005").iteration == 5
    with pytest.raises(CheckpointError, match="Complete ones: iter_0000005, iter_0000010"):
        TorchDistReader(tmp_path, 7)
    with pytest.raises(CheckpointError, match="Leave --iteration out: there is only this one"):
        TorchDistReader(tmp_path / "iter_0000005", 7)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(CheckpointError, match="Name another iteration"):
        TorchDistReader(tmp_path)


def test_a_save_that_did_not_finish_is_no_complete_iteration_and_one_that_is_can_be_read(tmp_path: Path) -> None:
    """`.metadata` is written before metadata.json: a copy may lack either."""
    for iteration in (20, 40, 50):
        write(tmp_path / keys.directory_name(iteration), values(specs()), run=CarriedRun(iteration))
    keys.write_tracker(tmp_path, 50)
    advice = (
        r"Name another iteration, as `--iteration 40`, or by its path. Complete ones: iter_0000020, iter_0000040\.$"
    )
    newest = tmp_path / "iter_0000050"
    data = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    with pytest.raises(DamagedCheckpoint, match=f"It is truncated; copy the checkpoint again. {advice}"):
        open_checkpoint(tmp_path)
    data.unlink()
    with pytest.raises(DamagedCheckpoint, match=f"a file is missing .* {advice}"):
        open_checkpoint(tmp_path)
    data.write_bytes(whole)
    (newest / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=f"iter_0000050 is not a complete checkpoint .* {advice}"):
        open_checkpoint(tmp_path)
    assert TorchDistReader(tmp_path, 40).iteration == 40
    with pytest.raises(DamagedCheckpoint, match=r"a file is missing \(.*iter_0000050/.metadata\)"):
        open_checkpoint(newest)
    (newest / "metadata.json").unlink()
    with pytest.raises(UnknownFormat, match="did not finish"):
        open_checkpoint(newest)


def test_a_later_iteration_than_the_one_that_is_read_is_told_of(tmp_path: Path) -> None:
    for iteration in (40, 50):
        write(tmp_path / keys.directory_name(iteration), values(specs()), run=CarriedRun(iteration))
    keys.write_tracker(tmp_path, 40)

    def notes(given: Path, iteration: int | None = None) -> list[str]:
        return [*opened_notes(given, TorchDistReader(given, iteration))]

    read = f"Read: {tmp_path / 'iter_0000040'}"
    assert notes(tmp_path) == [read, "iter_0000050 is there too, later, and not named by the tracker."]
    assert notes(tmp_path / "iter_0000040") == []
    assert command_line.run("inspect", tmp_path).stdout.endswith(
        "\niter_0000050 is there too, later, and not named by the tracker.\n"
    )
    (tmp_path / "iter_0000050" / "metadata.json").unlink()
    assert notes(tmp_path) == [read, "iter_0000050 is there too, later, and not complete."]
    keys.write_tracker(tmp_path, 50)
    assert notes(tmp_path, 40) == [read], "the user chose it"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("?")
    assert len(notes(tmp_path, 40)) == 2


def test_a_release_belongs_to_no_iteration(tmp_path):
    write(tmp_path / keys.directory_name(None), values(specs()))
    keys.write_tracker(tmp_path, None)
    with pytest.raises(CheckpointError, match="Leave --iteration out: there is only release"):
        TorchDistReader(tmp_path, 7)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert TorchDistReader(tmp_path).iteration is None


def test_files_have_no_more_than_a_part_each_and_the_same_bytes_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "FILE_BYTES", 3000)
    tensors = values(specs(optimizer=True))
    write(tmp_path, tensors, parallelism=Parallelism(2))
    reader = TorchDistReader(tmp_path)
    assert len(reader.files) > 10
    assert {path.name[:4] for path in reader.files} == {"__0_", "__1_"}
    everything = SimpleNamespace(specs={**reader.specs, **reader.optimizer_specs}, chunks=reader.chunks)
    assert all(torch.equal(read_tensor(everything, name), tensor) for name, tensor in tensors.items())
    assert set(reader.objects) == DEMANDED


def test_an_optimizer_whose_tensors_are_of_another_shape_is_not_taken_for_one_by_parameter(tmp_path):
    write(tmp_path, values(specs(optimizer=True)))
    index = dcp_metadata.read_index(tmp_path)
    key = "optimizer.state.exp_avg.output_layer.weight"
    tensors = dict(index.tensors)
    tensors[key] = tensors.pop("optimizer.state.exp_avg.decoder.final_layernorm.weight")
    dcp_metadata.write_index(tmp_path, dcp_metadata.Index(tensors, index.objects))
    names = TorchDistReader(tmp_path).optimizer_specs
    assert key not in names
    assert "optimizer.flat.exp_avg.output_layer.weight" in names


def test_an_optimizer_stored_by_rank_is_told_of(tmp_path):
    key = "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"
    write(tmp_path, values(specs()), run=CarriedRun(objects={key: {"buckets_coalesced": True}}))
    assert any("is stored by rank" in note for note in TorchDistReader(tmp_path).notes())


@pytest.mark.parametrize("sizes", [Parallelism(2), Parallelism(1)], ids=str)
def test_generators_go_along_to_the_same_sizes_alone(tmp_path, sizes):
    write(
        tmp_path,
        values(specs(optimizer=True)),
        run=CarriedRun(
            common={
                "optimizer": {"optimizer": {"param_groups": [{"lr": 0.1}]}},
                "opt_param_scheduler": {"num_steps": 5},
            },
            objects={"rng_state/shard_0.0_1.2": [{"torch_rng_state": torch.arange(4)}]},
        ),
        parallelism=Parallelism(2),
    )
    run = carry_run(TorchDistReader(tmp_path), sizes)
    assert run.common["opt_param_scheduler"] == {"num_steps": 5}
    groups = [{"lr": 0.1, "step": 0}]
    inner = {"param_groups": groups, "state": {"common_step": 0}}
    assert run.common["optimizer"] == {"optimizer": inner, "param_state_sharding_type": "fully_reshardable"}
    assert bool(run.objects) == (sizes.tensor == 2) == (run.left == ())
    assert run.args["no_save_rng"] == (sizes.tensor == 1)
    if run.objects:
        write(tmp_path / "made", values(specs()), run=CarriedRun(objects=run.objects))
        restored = TorchDistReader(tmp_path / "made").read_object("rng_state/shard_0.0_1.2")
        assert torch.equal(restored[0]["torch_rng_state"], torch.arange(4))


def test_what_is_endless_to_walk_is_refused(tmp_path):
    write(tmp_path, values(specs()))
    endless: Any = ("x",)
    for _ in range(60):
        endless = (endless, endless)
    common = {"args": argparse.Namespace(num_layers=2), "iteration": 1, "rerun_state_machine": endless}
    buffer = io.BytesIO()
    torch.save(common, buffer)
    (tmp_path / "common.pt").write_bytes(buffer.getvalue())
    with pytest.raises(DamagedCheckpoint, match="without end"):
        carry_run(TorchDistReader(tmp_path), Parallelism(1))


@pytest.mark.soak
def test_an_index_is_written_as_it_is_made(tmp_path: Path) -> None:
    """A large checkpoint has hundreds of thousands of pieces, and of their opcodes a MiB is held at a time."""
    span = Span(tmp_path / "__0_0.distcp", 0, 4)
    pieces = tuple(dcp_metadata.DcpPiece((number,), (1,), span) for number in range(24_000))
    index = dcp_metadata.Index({"flat": dcp_metadata.DcpTensor((24_000,), DType.float32, pieces)}, {})
    tracemalloc.start()
    dcp_metadata.write_index(tmp_path, index)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 3 << 19 < (tmp_path / ".metadata").stat().st_size
    (tmp_path / span.path.name).write_bytes(bytes(4))
    assert dcp_metadata.read_index(tmp_path) == index

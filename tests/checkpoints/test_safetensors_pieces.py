"""Pieces of tensors in safetensors, as PyTorch's HuggingFaceStorageWriter has them, are read as PyTorch reads them, and
never for tensors."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import conversions
import pico
import pytest
import repository
import tiny_wrappers
import torch
import torch.distributed.checkpoint as dcp
from programs import run_program
from safetensors.torch import load_file, save_file
from soaking import few
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from trained_models import config_of, trained

from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.dcp.dcp_model import DcpModelReader
from precisionctl.checkpoints.hf_directory.safetensors_pieces import read_pieces
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import CheckpointError, DamagedCheckpoint, MissingTensor, ShapeMismatch, UnknownFormat

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*distributed.*:UserWarning")

FILE = "shard-{:05}-model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """What so many ranks have saved (`hf_storage_ranks.py`), which no test changes."""
    made: dict[int, Path] = {}

    def of_ranks(count: int) -> Path:
        if count not in made:
            made[count] = tmp_path_factory.mktemp(f"ranks-{count}")
            run_program(repository.HELPERS / "hf_storage_ranks.py", made[count], count)
        return made[count]

    return of_ranks


def by_pytorch(directory: Path, live: dict[str, Tensor]) -> dict[str, Tensor]:
    """What HuggingFaceStorageReader finds in a directory."""
    found = {name: torch.empty_like(tensor) for name, tensor in live.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("way", few(("4/rows", "4/columns", "4/grid", "2/rows", "2/columns"), "4/columns", "4/grid"))
def test_pieces_make_the_tensors_that_pytorch_makes_of_them(
    tmp_path: Path, saved: Callable[[int], Path], way: str
) -> None:
    ranks, cut = way.split("/")
    made = saved(int(ranks))
    live = load_file(made / "live.safetensors")
    consolidate_safetensors_files(str(made / cut), str(tmp_path), dict.fromkeys(live, 1))
    conversions.run(made / cut, tmp_path / "out", "hf", reference=made / "config", verify=True)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert_same(ours, live)
    assert_same(ours, load_file(tmp_path / "model-00001-of-00001.safetensors"))
    assert_same(ours, by_pytorch(made / cut, live))


def test_a_rank_without_rows_has_an_empty_piece(saved: Callable[[int], Path]) -> None:
    directory = saved(4) / "few"
    assert [len(load_file(file)["few"]) for file in sorted(directory.iterdir())] == [2, 2, 1, 0]
    (tensor,) = read_pieces(directory).tensors.values()
    assert tensor.shape == (5, 3) and [piece.sizes[0] for piece in tensor.pieces] == [2, 2, 1]


def test_without_the_file_of_a_rank_nothing_is_read(tmp_path: Path, saved: Callable[[int], Path]) -> None:
    for cut in ("rows", "columns", "grid"):
        for rank in range(1, 5):
            there = shutil.copytree(saved(4) / cut, tmp_path / f"{cut}-{rank}")
            (there / FILE.format(rank)).unlink()
            with pytest.raises((DamagedCheckpoint, ShapeMismatch, MissingTensor)):
                conversions.run(there, tmp_path / "out", "hf", reference=saved(4) / "config")


@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_of_a_model_without_a_table_the_embeddings_tell_that_the_last_rank_is_missing(
    tmp_path: Path, saved: Callable[[int], Path], cut: str
) -> None:
    """Nothing else does: its sizes are those that its files have."""
    there = shutil.copytree(saved(4) / cut, tmp_path / "there")
    config = json.loads((saved(4) / "config" / "config.json").read_text())
    (there / "config.json").write_text(json.dumps(config | {"model_type": "of no table"}))
    conversions.run(there, tmp_path / "out", "hf")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), load_file(saved(4) / "live.safetensors"))
    (there / FILE.format(4)).unlink()
    with pytest.raises(DamagedCheckpoint, match="no matrix has the 253 rows and 64 columns of embeddings"):
        open_checkpoint(there)
    (there / FILE.format(1)).rename(there / "model.safetensors")  # the name of a whole model's
    with pytest.raises(DamagedCheckpoint, match="no matrix has the 253 rows"):
        open_checkpoint(there)
    (there / "config.json").write_text(json.dumps({"model_type": "of no table"}))
    with pytest.raises(DamagedCheckpoint, match="no matrix has the None rows"):
        open_checkpoint(there)


@pytest.mark.parametrize("kind", ["a wrapper", "of no table"])
def test_a_file_that_other_ranks_have_is_missed_where_no_table_says_the_sizes(tmp_path: Path, kind: str) -> None:
    """Of towers, and of models without a table. Two ranks have half of the rows each, in two files."""
    if kind == "a wrapper":
        tiny_wrappers.save(tmp_path / "hf", "qwen3_vl")
        state = tiny_wrappers.stored(tmp_path / "hf")
    else:
        pico.save(tmp_path / "hf", "llama-3")
        state = load_file(tmp_path / "hf" / "model.safetensors")
    there = tmp_path / "there"
    there.mkdir()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (there / "config.json").write_text(json.dumps(config | ({} if kind == "a wrapper" else {"model_type": kind})))
    last = [name for name in state if "visual" in name or "mlp" in name]
    for number, names in enumerate((state.keys() - last, last), 1):
        for rank in (1, 2):
            halves = {name: -(-len(state[name]) // 2) * (rank - 1) for name in names}
            pieces = {name: state[name].chunk(2)[rank - 1].contiguous() for name in names if len(state[name]) > 1}
            pieces |= {name: state[name] for name in names if len(state[name]) == 1 == rank}
            places = {name: [halves[name], *(0 for _ in piece.shape[1:])] for name, piece in pieces.items()}
            save_pieces(there / f"shard-{rank:05}-model-{number:05}-of-00002.safetensors", pieces, places)
    reader = open_checkpoint(there)
    assert_same({name: read_tensor(reader, name) for name in state}, state)
    (there / "shard-00002-model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DamagedCheckpoint, match="shard-00002-model-00002-of-00002.safetensors is not there"):
        open_checkpoint(there)


def test_beside_an_index_the_first_ranks_pieces_are_no_tensors_either(
    tmp_path: Path, saved: Callable[[int], Path]
) -> None:
    name = FILE.format(1)
    shutil.copyfile(saved(4) / "rows" / name, tmp_path / name)
    weight_map = dict.fromkeys(load_file(tmp_path / name), name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of no table"}))
    with pytest.raises(DamagedCheckpoint, match=r"is a piece, at \[0, 0\], of a tensor"):
        open_checkpoint(tmp_path)


def test_no_index_and_no_adapter_makes_a_piece_a_tensor(tmp_path: Path, saved: Callable[[int], Path]) -> None:
    piece = saved(4) / "rows" / FILE.format(2)
    shutil.copyfile(piece, tmp_path / "model-00001-of-00001.safetensors")
    config_of(pico.make("llama-3", vocab_size=253), tmp_path)
    names = dict.fromkeys(load_file(piece), "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(DamagedCheckpoint, match=r"is a piece, at \[64, 0\], of a tensor that other files have"):
        open_checkpoint(tmp_path)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    shutil.copyfile(piece, adapter / "adapter_model.safetensors")
    pico.save(tmp_path / "base", "llama-3", vocab_size=253)
    with pytest.raises(DamagedCheckpoint, match=r"is a piece, at \[64, 0\]"):
        conversions.run(adapter, tmp_path / "out", "hf", reference=tmp_path / "base")


def test_whole_tensors_of_that_writer_are_an_ordinary_directory(tmp_path: Path) -> None:
    """As torchtune saves them: with an index, and with places that are all the beginning."""
    model = pico.make("llama-3")
    files = {name: 1 + number % 2 for number, name in enumerate(model.state_dict())}
    writer = HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping=files)
    dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
    config_of(model, tmp_path)
    reader = open_checkpoint(tmp_path)
    assert reader.container == "safetensors" and len(reader.files) == 2
    assert_same({name: read_tensor(reader, name) for name in reader.specs}, model.state_dict())


def test_an_optimizer_among_the_pieces_is_refused_and_can_be_dropped(tmp_path: Path) -> None:
    model, optimizer = trained("llama-3")
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    tensors = {f"optimizer.{key}": value for key, value in flat.items() if isinstance(value, Tensor)}
    writer = HuggingFaceStorageWriter(str(tmp_path / "pieces"), save_distributed=True)
    dcp.save(model.state_dict() | tensors, storage_writer=writer, no_dist=True)
    config_of(model, tmp_path / "pieces")
    with pytest.raises(CheckpointError, match="an optimizer in safetensors, which is not read.*--drop-optimizer"):
        conversions.run(tmp_path / "pieces", tmp_path / "out", "megatron")
    conversions.run(tmp_path / "pieces", tmp_path / "out", "megatron", drop_optimizer=True)


def test_experts_in_one_tensor_are_cut_by_experts_and_by_rows(tmp_path: Path) -> None:
    """Experts over ranks, and each of them over ranks again."""
    model = pico.make_and_save(tmp_path / "by-transformers", "qwen3-moe")
    state = dict(model.state_dict())
    fused = {name: state.pop(name) for name in list(state) if re.search(r"experts\.\w+_proj$", name)}
    for rank in range(4):
        begins = divmod(rank, 2)
        pieces, places = {}, {}
        for name, tensor in fused.items():
            halves = [size // 2 for size in tensor.shape[:2]]
            places[name] = [*(at * half for at, half in zip(begins, halves, strict=True)), 0]
            cut = tuple(slice(at, at + half) for at, half in zip(places[name], halves, strict=False))
            pieces[name] = tensor[cut].contiguous()
        if rank == 0:
            pieces |= state
            places |= {name: [0] * tensor.dim() for name, tensor in state.items()}
        save_pieces(tmp_path / "pieces" / FILE.format(rank + 1), pieces, places)
    conversions.run(tmp_path / "pieces", tmp_path / "out", "hf", reference=tmp_path / "by-transformers")
    assert_same(by_pytorch(tmp_path / "pieces", dict(model.state_dict())), dict(model.state_dict()))
    assert_same(*(load_file(tmp_path / one / "model.safetensors") for one in ("out", "by-transformers")))


def test_a_step_of_automodel_has_its_optimizer_and_config_beside_the_pieces(
    tmp_path: Path, saved: Callable[[int], Path]
) -> None:
    step = saved(4) / "epoch_0_step_2"
    live = load_file(step / "live.safetensors")
    moments = {name: live.pop(name) for name in list(live) if name.startswith("exp_avg.")}
    reader = open_checkpoint(step)
    assert isinstance(reader, DcpModelReader) and reader.container == "dcp"
    assert reader.companions.directory == step / "model" / ".hf_metadata"
    assert (reader.iteration, reader.trainer_run.updates, len(reader.optimizer_specs)) == (2, 2, 2 * len(live))
    assert reader.trainer_run.settings["lr"] == 0.01 / 4 and reader.trainer_run.settings["initial_lr"] == 0.01
    assert_same({name: read_tensor(reader, name) for name in reader.specs}, live)
    assert_same({name: read_tensor(WithOptimizer(reader), f"optimizer.state.{name}") for name in moments}, moments)
    alone = open_checkpoint(step / "model")
    assert alone.specs == reader.specs and alone.iteration is None
    conversions.run(step, tmp_path / "run", "megatron")
    conversions.run(tmp_path / "run", tmp_path / "back", "hf", container="dcp")
    back = open_checkpoint(tmp_path / "back")
    assert isinstance(back, DcpModelReader)
    assert_same({name: read_tensor(back, name) for name in back.specs}, live)
    assert_same({name: read_tensor(WithOptimizer(back), f"optimizer.state.{name}") for name in moments}, moments)


def test_a_save_of_automodel_that_was_stopped_is_not_read(tmp_path: Path, saved: Callable[[int], Path]) -> None:
    step = shutil.copytree(saved(4) / "epoch_0_step_2", tmp_path / "epoch_0_step_2")
    (tmp_path / "epoch_0_step_1").mkdir()
    with pytest.raises(UnknownFormat, match="Give one of them, the newest for instance: .*/epoch_0_step_2"):
        open_checkpoint(tmp_path)
    (step / ".incomplete").touch()
    for path in (step, step / "model"):
        with pytest.raises(DamagedCheckpoint, match="a save of NeMo Automodel that goes on, or was stopped"):
            open_checkpoint(path)


def test_automodels_config_is_not_taken_from_elsewhere(tmp_path: Path, saved: Callable[[int], Path]) -> None:
    step = shutil.copytree(saved(4) / "epoch_0_step_2", tmp_path / "epoch_0_step_2")
    (step / "model" / ".hf_metadata").rename(tmp_path / "elsewhere")
    (step / "model" / ".hf_metadata").symlink_to(tmp_path / "elsewhere")
    for path in (step, step / "model"):
        with pytest.raises(DamagedCheckpoint, match="a symbolic link leads out of the directory"):
            open_checkpoint(path).model  # noqa: B018


def save_pieces(path: Path, tensors: dict[str, Tensor], places: dict[str, list[int]]) -> None:
    path.parent.mkdir(exist_ok=True)
    said = json.dumps({name: {"saved_offsets": place} for name, place in places.items()})
    save_file(tensors, path, {"DCP_SHARDING_INFO": said, "DCP_VERSION": "1.0", "format": "pt"})


def test_a_tensor_without_elements_is_one(tmp_path: Path) -> None:
    stored = {"a.weight": torch.ones(4, 4), "a.empty": torch.empty(0, 4), "a._extra_state": torch.empty(0)}
    dcp.save(dict(stored), storage_writer=HuggingFaceStorageWriter(str(tmp_path), save_distributed=True), no_dist=True)
    found = read_pieces(tmp_path).tensors
    assert {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in stored.items()}
    assert all(one.pieces for one in found.values())

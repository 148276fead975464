"""NeMo 1's checkpoints, packed and unpacked, become the model that they were made of."""

import json
import shlex
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conversions
import in_memory
import nemo_files
import pico
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from precisionctl.checkpoints.base import HasNotes
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.cli import main
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.errors import (
    CheckpointError,
    DamagedCheckpoint,
    PrecisionctlError,
    UnknownArchitecture,
    UnknownFormat,
)
from precisionctl.fp8 import sidecar
from precisionctl.model.same_model import differences
from precisionctl.reports import inspect

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Write = Callable[[Path, nemo_files.State], None]


def in_ckpt(folder: Path, state: nemo_files.State) -> None:
    nemo_files.write_ranks(folder, [state])


def in_two_ranks(folder: Path, state: nemo_files.State) -> None:
    nemo_files.write_ranks(folder, [nemo_files.rank_of(state, rank, 2) for rank in range(2)])


def in_legacy_names(folder: Path, state: nemo_files.State) -> None:
    in_ckpt(folder, {nemo_files.legacy(name): tensor for name, tensor in state.items()})


def in_half_precision(folder: Path, state: nemo_files.State) -> None:
    """As `megatron_amp_O2` has it, which wraps the model."""
    in_ckpt(folder, {name.replace("model.", "model.module.", 1): tensor for name, tensor in state.items()})


def in_torch_dist(folder: Path, state: nemo_files.State) -> None:
    nemo_files.write_torch_dist(folder / "model_weights", state)


def in_zarr(folder: Path, state: nemo_files.State) -> None:
    nemo_files.write_zarr(folder / "model_weights", state)


def unpacked(tmp_path: Path, family: str, write: Write, rows: int | None = None, **more: Any) -> Path:
    """The model in `hf`, and the folder of its `.nemo`."""
    model = pico.make_and_save(tmp_path / "hf", family, dtype=torch.bfloat16)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    nemo_files.write_config(tmp_path / "nemo", nemo_files.fields(model.config, **more))
    write(tmp_path / "nemo", nemo_files.state_of(weights, model.config, rows=rows))
    return tmp_path / "nemo"


@pytest.mark.parametrize(
    ("family", "write"),
    [
        ("llama-2", in_torch_dist),
        ("mistral", in_zarr),
        ("qwen2", in_torch_dist),
        ("qwen2", in_zarr),
        ("qwen2", in_ckpt),
        ("mistral", in_two_ranks),
        ("llama-2", in_legacy_names),
        ("mistral", in_half_precision),
        ("mixtral", in_ckpt),
    ],
)
def test_an_archive_becomes_the_model_that_it_was_made_of(tmp_path: Path, family: str, write: Write) -> None:
    path = nemo_files.pack(unpacked(tmp_path, family, write), tmp_path / "model.nemo")
    conversions.run(path, tmp_path / "out", "hf", reference=tmp_path / "hf", workers=1)
    theirs, ours = (load_file(tmp_path / one / "model.safetensors") for one in ("hf", "out"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_without_a_reference_the_config_comes_from_model_config_yaml(tmp_path: Path) -> None:
    path = nemo_files.pack(unpacked(tmp_path, "qwen2", in_torch_dist), tmp_path / "model.nemo")
    reader, theirs = open_checkpoint(path), open_checkpoint(tmp_path / "hf")
    assert not differences(theirs.model, reader.model)
    described = inspect.describe(reader)
    assert described["container"] == "nemo" and described["architecture"] == "qwen2"


@pytest.mark.parametrize("write", [in_torch_dist, in_zarr, in_two_ranks])
def test_an_unpacked_directory_is_the_same(tmp_path: Path, write: Write) -> None:
    folder = unpacked(tmp_path, "mistral", write)
    there, packed = open_checkpoint(folder), open_checkpoint(nemo_files.pack(folder, tmp_path / "model.nemo"))
    assert there.specs == packed.specs
    assert all(torch.equal(read_tensor(there, name), read_tensor(packed, name)) for name in there.specs)
    assert packed.files == [tmp_path / "model.nemo"] and packed.path == tmp_path / "model.nemo"


@pytest.mark.parametrize("write", [in_torch_dist, in_ckpt])
def test_it_has_no_iterations(tmp_path: Path, write: Write) -> None:
    with pytest.raises(CheckpointError, match="no iterations to choose from"):
        open_checkpoint(unpacked(tmp_path, "mistral", write), 99)


def test_the_reference_says_how_far_the_vocabulary_is_padded(tmp_path: Path) -> None:
    path = nemo_files.pack(unpacked(tmp_path, "mistral", in_torch_dist, rows=256), tmp_path / "model.nemo")
    conversions.run(path, tmp_path / "out", "hf", reference=tmp_path / "hf", workers=1)
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].shape[0] == 250


def test_without_a_reference_convert_and_verify_say_that_padding_counts_as_vocabulary(tmp_path: Path) -> None:
    path = unpacked(tmp_path, "mistral", in_torch_dist, rows=256)
    said = "all 256 rows are taken for tokens, also any that pad it. --reference HF_DIR tells them apart"
    assert [note for note in plan_command(Request(path, tmp_path / "out", "hf")).notes if said in note]
    sidecar.write(tmp_path / "state", in_memory.recorded(HuggingFaceReader(tmp_path / "hf")))
    asked = ["verify", str(path), str(tmp_path / "hf"), "--fp8-state", str(tmp_path / "state")]
    told = CliRunner().invoke(main, asked).stdout
    assert said in told and told.endswith(f"{shlex.join([*asked, '--reference', str(tmp_path / 'hf')])}\n")
    given = plan_command(Request(path, tmp_path / "out", "hf", reference=tmp_path / "hf"))
    assert not [note for note in given.notes if "pad it" in note]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_every_form_of_tar_is_read_with_long_names(tmp_path: Path, form: int) -> None:
    folder = unpacked(tmp_path, "mistral", in_ckpt)
    (folder / ("a" * 90)).mkdir()
    (folder / ("a" * 90) / ("é" * 30)).write_text("of no use")
    with tarfile.open(tmp_path / "model.nemo", "w:", format=form) as tar:
        tar.add(folder, arcname=".")
    assert open_checkpoint(tmp_path / "model.nemo").specs == open_checkpoint(folder).specs


def test_a_compressed_archive_is_told_how_to_unpack(tmp_path: Path) -> None:
    path = nemo_files.pack(unpacked(tmp_path, "mistral", in_ckpt), tmp_path / "my model.nemo", "w:gz")
    with pytest.raises(UnknownFormat, match="compressed archive") as refused:
        open_checkpoint(path)
    assert f"tar xzf '{path}' -C DIR" in refused.value.do


def test_a_model_of_speech_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "nemo"
    nemo_files.write_config(folder, {"target": "nemo.collections.asr.models.EncDecCTCModel"})
    nemo_files.write_ranks(folder, [{"encoder.conv.weight": torch.ones(2, 2)}])
    with pytest.raises(UnknownFormat, match="EncDecCTCModel"):
        open_checkpoint(nemo_files.pack(folder, tmp_path / "speech.nemo"))


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"activation": "reglu"}, UnknownArchitecture, "activation='reglu'"),
        ({"headscale": True}, UnknownArchitecture, "headscale=True"),
        ({"megatron_legacy": True}, UnknownArchitecture, "megatron_legacy"),
        ({"apply_embedding_scaling": True}, CheckpointError, "apply_embedding_scaling"),
        ({"mcore_customization_config": {"attn_logit_softcapping": 50.0}}, CheckpointError, "mcore_customization"),
    ],
)
def test_a_model_that_arguments_of_megatron_do_not_say_is_refused(
    tmp_path: Path, more: dict[str, Any], error: type[PrecisionctlError], said: str
) -> None:
    path = unpacked(tmp_path, "mistral", in_torch_dist, **more)
    with pytest.raises(error, match=said):
        _ = open_checkpoint(path).model


def test_llama_3_1_is_told_by_its_scaled_positions(tmp_path: Path) -> None:
    path = unpacked(
        tmp_path, "mistral", in_torch_dist, scale_positional_embedding=True, seq_len_interpolation_factor=8.0
    )
    scaling = open_checkpoint(path).model.rope_scaling
    assert scaling and scaling["rope_type"] == "llama3" and scaling["factor"] == 8.0


def test_missing_ranks_and_pieces_are_named(tmp_path: Path) -> None:
    ranks = unpacked(tmp_path / "a", "mistral", in_two_ranks)
    (ranks / "mp_rank_00" / "model_weights.ckpt").unlink()
    with pytest.raises(DamagedCheckpoint, match="1 rank of tensor 2 x pipeline 1"):
        open_checkpoint(ranks)
    zarr = unpacked(tmp_path / "b", "mistral", in_zarr)
    (zarr / "model_weights" / "model.output_layer.weight" / "0.0").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"output_layer\.weight/0\.0 is missing"):
        open_checkpoint(zarr)


def halve_shape_and_pieces(tensor: Path) -> None:
    about = json.loads((tensor / ".zarray").read_bytes())
    about["shape"][0] //= 2
    about["chunks"][0] //= 2
    (tensor / ".zarray").write_text(json.dumps(about))
    stored = (tensor / "0.0").read_bytes()
    (tensor / "0.0").write_bytes(stored[: len(stored) // 2])
    (tensor / "1.0").write_bytes(stored[len(stored) // 2 :])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (halve_shape_and_pieces, r"word_embeddings\.weight/1\.0"),
        (lambda tensor: (tensor / ".zarray").unlink(), r"word_embeddings\.weight/0\.0"),
    ],
)
def test_a_stored_piece_that_no_tensor_has_is_never_left_out(
    tmp_path: Path, harm: Callable[[Path], None], said: str
) -> None:
    nemo_files.write_config(tmp_path, nemo_files.FIELDS)
    weights = tmp_path / "model_weights"
    nemo_files.write_zarr(weights, nemo_files.STATE)
    extra = weights / "model.decoder.layers.mlp.linear_fc1._extra_state"
    extra.mkdir()
    for known in (weights / "common.pt", weights / ".zgroup", extra / "shard_0_1.pt"):
        known.touch()
    open_checkpoint(tmp_path)
    harm(weights / "model.embedding.word_embeddings.weight")
    with pytest.raises(DamagedCheckpoint, match=f"{said}.* belongs to no tensor"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("fp8", "write"), [(True, in_zarr), (False, in_zarr), (True, in_torch_dist)])
def test_a_run_in_fp8_is_told_that_its_state_in_zarr_stays_behind(tmp_path: Path, fp8: bool, write: Write) -> None:
    """Of `torch_dist` it is read, where there is any."""
    nemo_files.write_config(tmp_path, nemo_files.FIELDS | {"fp8": fp8})
    write(tmp_path, nemo_files.STATE)
    reader = open_checkpoint(tmp_path)
    assert isinstance(reader, HasNotes)
    told = any("FP8 state stays behind" in note for note in reader.notes())
    assert told == (fp8 and write is in_zarr)


def test_two_models_in_one_checkpoint_are_refused(tmp_path: Path) -> None:
    nemo_files.write_config(tmp_path, nemo_files.FIELDS)
    in_zarr(tmp_path, nemo_files.STATE)
    in_ckpt(tmp_path, nemo_files.STATE)
    with pytest.raises(DamagedCheckpoint, match=r"two models, in model_weights/ and model_weights\.ckpt"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("write", [in_torch_dist, in_zarr])
def test_weights_given_without_their_config_lead_to_the_directory_above(tmp_path: Path, write: Write) -> None:
    nemo_files.write_config(tmp_path, nemo_files.FIELDS)
    write(tmp_path, nemo_files.STATE)
    with pytest.raises(UnknownFormat, match=r"without its model_config\.yaml") as refused:
        open_checkpoint(tmp_path / "model_weights")
    assert str(tmp_path) in refused.value.do


def test_no_member_of_an_archive_hides_from_us(tmp_path: Path) -> None:
    """In the bytes of a directory, behind the mark of the end, or behind half of it."""
    folder = tmp_path / "nemo"
    nemo_files.write_config(folder, nemo_files.FIELDS)
    in_ckpt(folder, nemo_files.STATE)
    whole = nemo_files.pack(folder, tmp_path / "model.nemo").read_bytes()
    with tarfile.open(tmp_path / "model.nemo") as tar:
        end = max(-(-(one.offset_data + one.size) // 512) * 512 for one in tar)
    member, directory = tarfile.TarInfo("hidden"), tarfile.TarInfo("directory")
    directory.type, directory.size = tarfile.DIRTYPE, 512
    for hiding in (
        directory.tobuf() + member.tobuf() + whole,
        whole + member.tobuf() + bytes(1024),
        whole[:end] + bytes(512) + member.tobuf() + bytes(1024),
    ):
        (tmp_path / "model.nemo").write_bytes(hiding)
        with pytest.raises(DamagedCheckpoint, match="not a tar as NeMo writes it"):
            open_checkpoint(tmp_path / "model.nemo")


def test_ranks_must_be_those_that_the_configuration_says(tmp_path: Path) -> None:
    ranks = unpacked(tmp_path, "mistral", in_two_ranks, tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
    assert open_checkpoint(ranks).specs
    (ranks / "mp_rank_01").rename(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="1 rank of tensor 2 x pipeline 1"):
        open_checkpoint(ranks)


@pytest.mark.parametrize("outside", [True, False])
def test_a_rank_behind_a_link_is_not_passed_over(tmp_path: Path, outside: bool) -> None:
    ranks = unpacked(tmp_path, "mistral", in_two_ranks)
    there = (tmp_path if outside else ranks) / "elsewhere"
    (ranks / "mp_rank_01").rename(there)
    (ranks / "mp_rank_01").symlink_to(there)
    with pytest.raises(DamagedCheckpoint, match="leads out of the directory" if outside else "not a file.*mp_rank_01"):
        open_checkpoint(ranks)


@pytest.mark.parametrize("second", ["tp_rank_00_pp_rank_000", "."])
def test_two_files_of_one_rank_are_refused(tmp_path: Path, second: str) -> None:
    ranks = unpacked(tmp_path, "mistral", in_two_ranks)
    (ranks / second).mkdir(exist_ok=True)
    shutil.copy(ranks / "mp_rank_00" / "model_weights.ckpt", ranks / second)
    with pytest.raises(DamagedCheckpoint, match="a second file of tensor rank 0, pipeline rank 0"):
        open_checkpoint(ranks)

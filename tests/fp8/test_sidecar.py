"""The sidecar gives back what it was given, always in the same bytes, and refuses what it cannot trust."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from te_states import same, trained

from precisionctl.codes.health import measure
from precisionctl.errors import CheckpointError, DamagedCheckpoint, UnknownFormat
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import DelayedScaling, Fp8State, Fp8States, RoleState

RECIPE = DelayedScaling(margin=1, amax_history_len=4, amax_compute_algo="most_recent", reduce_amax=False)
STATES = Fp8States(
    recipe=RECIPE,
    modules={f"decoder.layers.{layer}.mlp.linear_fc1": trained(4) for layer in (0, 1, 10)},
    raw={"decoder.layers.0.self_attention.core_attention": torch.arange(7, dtype=torch.uint8)},
    producer="a test",
    iteration=123,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / sidecar.RELATIVE


def test_what_is_written_reads_back_as_it_was(path):
    sidecar.write(path, STATES)
    again = sidecar.read(path)
    assert (again.recipe, again.producer, again.iteration) == (RECIPE, "a test", 123)
    assert again.modules.keys() == STATES.modules.keys()
    assert all(same(again.modules[name], state) for name, state in STATES.modules.items())
    assert again.raw.keys() == STATES.raw.keys()
    assert all(torch.equal(again.raw[name], data) for name, data in STATES.raw.items())


def test_whoever_may_read_the_other_files_may_read_it(tmp_path):
    beside = tmp_path / "beside"
    beside.touch()
    sidecar.write(tmp_path / "state", STATES)
    assert (tmp_path / "state").stat().st_mode == beside.stat().st_mode


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a disk that is always full")
def test_a_full_disk_is_the_error_that_a_full_disk_is_elsewhere():
    with pytest.raises(OSError, match="No space left"):
        sidecar.write(Path("/dev/full"), STATES)


def test_infinities_subnormals_and_experts_are_kept_to_the_bit(path):
    history = torch.tensor([[0.0, float("inf")], [1e-45, 3e38]])
    part = RoleState(torch.tensor([1.0, 3e-39]), history)
    state = Fp8State(dict.fromkeys(trained(1).roles, part))
    sidecar.write(path, Fp8States(DelayedScaling(amax_history_len=2), {"experts": state}))
    assert same(sidecar.read(path).modules["experts"], state)


def test_equal_states_give_equal_bytes(path, tmp_path):
    sidecar.write(path, STATES)
    shuffled = Fp8States(
        RECIPE,
        {name: Fp8State(dict(reversed(trained(4).roles.items()))) for name in reversed(list(STATES.modules))},
        STATES.raw,
        "a test",
        123,
    )
    sidecar.write(tmp_path / "other", shuffled)
    assert path.read_bytes() == (tmp_path / "other").read_bytes()


def test_the_file_holds_one_scale_and_one_history_per_role_under_the_module_s_name(path):
    sidecar.write(path, STATES)
    tensors = load_file(path)
    assert tensors["decoder.layers.10.mlp.linear_fc1/weight.scale"].shape == ()
    assert tensors["decoder.layers.10.mlp.linear_fc1/grad_output.amax_history"].shape == (4,)
    assert len(tensors) == 3 * 5 * 2 + 1


def test_attention_keeps_the_roles_that_it_has_and_a_gemm_all_of_its_own(path):
    part = RoleState(torch.tensor(2.0), torch.arange(4.0))
    attention = Fp8State({"qkv": part, "d_p": part, "k": part, "v": part})
    sidecar.write(path, Fp8States(RECIPE, {"decoder.layers.0.self_attention.core_attention": attention}))
    (again,) = sidecar.read(path).modules.values()
    assert same(again, attention)
    mixed = Fp8State({**trained(4).roles, "k": part})
    for state, module, message in (
        (mixed, "mlp.linear_fc1", "roles that are not of a GEMM: k"),
        (attention, "mlp.linear_fc1", "lacks .*linear_fc1/input.scale"),
        (mixed, "self_attention.core_attention", "roles that are not of attention: grad_input"),
    ):
        path.unlink()
        sidecar.write(path, Fp8States(RECIPE, {f"decoder.layers.0.{module}": state}))
        with pytest.raises(DamagedCheckpoint, match=message):
            sidecar.read(path)


def test_statistics_are_kept_to_the_last_bit_with_a_module_s_state_or_without(path):
    measured = measure(torch.randn(40, 70), torch.float8_e4m3fn, torch.tensor(3.0))
    statistics = {"decoder.layers.0.mlp.linear_fc1": {"input": measured}, "elsewhere": {"k": measured}}
    sidecar.write(path, replace(STATES, statistics=statistics))
    assert sidecar.read(path).statistics == statistics
    assert sidecar.read(path).modules.keys() == STATES.modules.keys()
    assert sidecar.read(path).without(["elsewhere"]).statistics.keys() == {"decoder.layers.0.mlp.linear_fc1"}


def rewritten(path, metadata=None, tensors=None, drop=""):
    """A sidecar with other metadata fields or tensors than its writer would give it."""
    sidecar.write(path, STATES)
    fields = {"format_version": 1, "recipe": {"amax_history_len": 4}, "producer": "a test", "iteration": None}
    kept = {name: tensor for name, tensor in load_file(path).items() if name != drop}
    save_file(kept | (tensors or {}), path, metadata={"precisionctl": json.dumps(fields | (metadata or {}))})


def test_the_sidecar_that_the_next_tests_change_is_sound(path):
    rewritten(path)
    assert sidecar.read(path).recipe == DelayedScaling(amax_history_len=4)


@pytest.mark.parametrize("version", [0, 3, "1", None, [1], True])
def test_another_version_is_refused_with_what_to_do(path, version):
    rewritten(path, {"format_version": version})
    with pytest.raises(UnknownFormat, match="Read it with the release that wrote it"):
        sidecar.read(path)


WRONG_METADATA = {
    "no recipe": {"recipe": None},
    "an unknown field": {"recipe": {"amax_history_len": 4, "color": "red"}},
    "a field of the wrong type": {"recipe": {"amax_history_len": "4"}},
    "fields without names": {"recipe": [4]},
    "another history length": {"recipe": {"amax_history_len": 5}},
    "no producer": {"producer": 7},
    "an iteration in words": {"iteration": "last"},
    "a negative iteration": {"iteration": -1},
}


@pytest.mark.parametrize("metadata", WRONG_METADATA.values(), ids=WRONG_METADATA)
def test_metadata_that_makes_no_sense_is_damage(path, metadata):
    rewritten(path, metadata)
    with pytest.raises(DamagedCheckpoint):
        sidecar.read(path)


WRONG_TENSORS = {
    "a nan": {"decoder.layers.0.mlp.linear_fc1/input.scale": torch.tensor(float("nan"))},
    "another dtype": {"decoder.layers.0.mlp.linear_fc1/input.scale": torch.ones((), dtype=torch.float64)},
    "another shape": {"decoder.layers.0.mlp.linear_fc1/input.amax_history": torch.zeros(4, 1)},
    "an unknown role": {"decoder.layers.0.mlp.linear_fc1/bias.scale": torch.ones(())},
    "no module": {"/input.scale": torch.ones(())},
    "a name of another kind": {"weight": torch.ones(())},
    "statistics of no role": {"decoder.layers.0.x/bias.statistics": torch.zeros(26, dtype=torch.float64)},
    "statistics of another length": {"decoder.layers.0.x/input.statistics": torch.zeros(25, dtype=torch.float64)},
    "statistics in a column": {"decoder.layers.0.x/input.statistics": torch.zeros(26, 1, dtype=torch.float64)},
    "statistics that cannot be": {"decoder.layers.0.x/input.statistics": -torch.ones(26, dtype=torch.float64)},
    "more elements than are counted": {
        "decoder.layers.0.x/input.statistics": torch.tensor([2.0**53] + 25 * [0.0]).double()
    },
    "raw numbers": {"decoder.layers.0.x/raw": torch.ones(3)},
}


@pytest.mark.parametrize("tensors", WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_tensors_that_make_no_sense_are_damage(path, tensors):
    rewritten(path, tensors=tensors)
    with pytest.raises(DamagedCheckpoint):
        sidecar.read(path)


def test_a_missing_tensor_is_named(path):
    rewritten(path, drop="decoder.layers.1.mlp.linear_fc1/weight.amax_history")
    with pytest.raises(DamagedCheckpoint, match=r"layers\.1\.mlp\.linear_fc1/weight\.amax_history"):
        sidecar.read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "[" * 100_000, '"\\ud800"'])
def test_metadata_that_is_no_table_is_one_error(path, text):
    path.parent.mkdir()
    save_file({}, path, metadata={"precisionctl": text})
    with pytest.raises(CheckpointError):
        sidecar.read(path)


def test_a_safetensors_file_of_somebody_else_is_one_error(path):
    path.parent.mkdir()
    save_file({"weight": torch.ones(3)}, path)
    with pytest.raises(CheckpointError):
        sidecar.read(path)


def test_a_hole_is_not_read(path):
    sidecar.write(path, STATES)
    os.truncate(path, 3 << 30)
    with pytest.raises(DamagedCheckpoint, match="more than 2.0 GB"):
        sidecar.read(path)


def test_a_file_that_is_not_there_is_one_error(path):
    with pytest.raises(CheckpointError):
        sidecar.read(path)


def test_a_file_cut_off_anywhere_is_one_error(path):
    sidecar.write(path, STATES)
    data = path.read_bytes()
    for length in [*range(0, 300, 13), *range(300, len(data), 601), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(DamagedCheckpoint):
            sidecar.read(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "sidecar"
    sidecar.write(path, STATES)
    return path.read_bytes()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_file_with_any_byte_changed_reads_or_is_one_error(sound, tmp_path_factory, data):
    position = data.draw(st.one_of(st.integers(0, 400), st.integers(0, len(sound) - 1)))
    changed = bytearray(sound)
    changed[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("changed") / "sidecar"
    path.write_bytes(changed)
    try:
        sidecar.read(path)
    except CheckpointError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("data", [(1 << 40).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[["])
def test_a_hostile_header_is_one_error(path, data):
    path.parent.mkdir()
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint):
        sidecar.read(path)


@pytest.mark.parametrize(
    "offsets", [([0, 4], [0, 4]), ([0, 4], [4, 1 << 50]), ([4, 8], [8, 4]), ([0, 4], [6, 10])], ids=str
)
def test_tensors_that_overlap_or_reach_beyond_the_file_are_one_error(path, offsets):
    entry = {"dtype": "F32", "shape": []}
    names = ("a/input.scale", "a/weight.scale")
    header = json.dumps({name: entry | {"data_offsets": at} for name, at in zip(names, offsets, strict=True)}).encode()
    path.parent.mkdir()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(DamagedCheckpoint):
        sidecar.read(path)


def test_metadata_of_endless_parts_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    header = json.dumps({"__metadata__": {"precisionctl": "[" + "[]," * 1_000_000 + "0]"}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DamagedCheckpoint, match="metadata is too long"):
        sidecar.read(path)


def test_a_file_that_is_larger_than_a_sidecar_is_none_and_not_mapped(path, monkeypatch):
    """As an archive of NeMo may be. The library maps a file whole, for which a limited address space has no room."""
    sidecar.write(path, STATES)
    assert sidecar.is_sidecar(path)
    monkeypatch.setattr(sidecar, "safe_open", lambda *_, **__: pytest.fail("it was mapped"))
    os.truncate(path, 1 << 40)
    assert not sidecar.is_sidecar(path)

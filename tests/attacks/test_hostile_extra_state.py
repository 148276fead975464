"""Hostile `_extra_state` payloads: each gives one error, and nothing that it asked for happens."""

import builtins
import io
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile

import pytest
import torch

from precisionctl.errors import CheckpointError, DamagedCheckpoint, UnsafePickle
from precisionctl.fp8.extra_state import decode_payload
from precisionctl.untrusted.pickle_writer import Global, PersistentId, PickledObject, dumps

RECIPES = "transformer_engine.common.recipe"
REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
LOAD = Global("torch.storage", "_load_from_bytes")


@pytest.fixture(autouse=True)
def nothing_happens(tmp_path, monkeypatch):
    """Fails the test if a usual gadget is called or a file appears."""
    called = []
    for module, name in ((os, "system"), (os, "popen"), (builtins, "exec"), (builtins, "eval")):
        monkeypatch.setattr(module, name, lambda *args, name=name, **kwargs: called.append(name))
    monkeypatch.chdir(tmp_path)
    yield
    assert not called
    assert not list(tmp_path.iterdir())


def storage(values):
    """The bytes that a tensor's storage pickles as."""
    return values.__reduce_ex__(2)[1][0].__reduce__()[1][0]


def tensor(saved, size, stride, offset=0):
    hooks = PickledObject(Global("collections", "OrderedDict"), ())
    return PickledObject(REBUILD, (PickledObject(LOAD, (saved,)), offset, size, stride, False, hooks))


def payload(**changes):
    """A payload of one GEMM with a history of 2, with some of it replaced."""
    limits = PickledObject(Global(RECIPES, "_FormatHelper"), (448, 57344), new=True)
    fields = {"amax_history_len": 2, "fp8_format": PickledObject(Global(RECIPES, "Format"), (limits,))}
    sound = {
        "recipe": PickledObject(Global(RECIPES, "DelayedScaling"), (), new=True, fields=fields),
        "scale_fwd": tensor(storage(torch.ones(3)), (3,), (1,)),
        "amax_history_fwd": tensor(storage(torch.zeros(6)), (2, 3), (3, 1)),
        "scale_bwd": tensor(storage(torch.ones(2)), (2,), (1,)),
        "amax_history_bwd": tensor(storage(torch.zeros(4)), (2, 2), (2, 1)),
        "extra_fp8_variables": {"num_gemms": 1},
    }
    return dumps(sound | changes)


def test_the_payload_that_the_attacks_change_is_sound():
    recipe, state = decode_payload(payload(), "layer 3")
    assert recipe.amax_history_len == 2
    assert not state.roles["input"].recorded


GADGETS = {
    "system": PickledObject(Global("os", "system"), ("true",)),
    "posix": PickledObject(Global("posix", "system"), ("true",)),
    "eval": PickledObject(Global("builtins", "eval"), ("1",)),
    "old builtins": PickledObject(Global("__builtin__", "eval"), ("1",)),
    "getattr": PickledObject(Global("builtins", "getattr"), (Global("os", "path"), "os")),
    "attrgetter": PickledObject(Global("operator", "attrgetter"), ("system",)),
    "import": PickledObject(Global("importlib", "import_module"), ("antigravity",)),
    "pickle in pickle": PickledObject(Global("pickle", "loads"), (b"\x80\x04N.",)),
    "torch.load": PickledObject(Global("torch", "load"), ("file",)),
    "torch.hub": PickledObject(Global("torch.hub", "load"), ("user/repo", "model")),
    "what te imports": PickledObject(Global(RECIPES, "os.system"), ("true",)),
    "inside an allowed class": PickledObject(Global(RECIPES, "DelayedScaling.__init__.__globals__"), ()),
    "codecs": PickledObject(Global("_codecs", "encode"), ("x", "latin1")),
    "code": PickledObject(Global("types", "CodeType"), ()),
    "a callable as amax_compute_algo": Global("os", "abort"),
}


@pytest.mark.parametrize("gadget", GADGETS.values(), ids=GADGETS)
@pytest.mark.parametrize("place", ["whole", "recipe", "scale_fwd", "extra_fp8_variables"])
def test_a_name_outside_the_allow_list_is_refused_wherever_it_stands(gadget, place):
    data = dumps(gadget) if place == "whole" else payload(**{place: gadget})
    with pytest.raises(UnsafePickle, match="not on the allow-list"):
        decode_payload(data, "layer 3")


def test_extension_codes_and_persistent_ids_lead_nowhere():
    for data in (b"\x80\x02\x82\x01.", dumps(PersistentId(("storage",))), b"\x80\x04Pname\n."):
        with pytest.raises(CheckpointError):
            decode_payload(data, "layer 3")


@pytest.mark.parametrize("name", ["DelayedScaling", "_FormatHelper", "Format"])
@pytest.mark.parametrize("state", [{"fields": {}}, (None, {"__setstate__": 1, "max_fwd": 1, "value": 1})])
def test_a_payload_cannot_change_a_class_for_the_payloads_after_it(name, state):
    changed = dumps(Global(RECIPES, name))[:-1] + dumps(state)[2:-1] + pickle.BUILD + pickle.STOP
    with pytest.raises(UnsafePickle, match="a class or function"):
        decode_payload(changed, "layer 3")
    assert decode_payload(payload(), "layer 4") is not None


class System:
    """Pickles as a call of os.system."""

    def __reduce__(self):
        return os.system, ("true",)


def zipped():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickle.dumps(System()))
    return buffer.getvalue()


def tarred():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name in ("storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            data = pickle.dumps(System())
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def saved(value, **how):
    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    return buffer.getvalue()


def legacy(reference, numbers=b"", keys=("0",)):
    """A file of torch.save's legacy format, with any object in it."""
    start = storage(torch.ones(1))
    start = start[: start.index(b"storage") - 8]  # magic number, version, system
    return start + dumps(reference, protocol=2) + dumps(list(keys), protocol=2) + numbers


def storage_reference(numel):
    return PersistentId(("storage", Global("torch", "FloatStorage"), "0", "cpu", numel, None))


NESTED = {
    "a plain pickle": pickle.dumps(System()),
    "a zip file with a pickle": zipped(),
    "a tar file with pickles": tarred(),
    "torch.save of an object": saved(System()),
    "a zip file, which could unpack to more than it is": saved(torch.ones(3).__reduce_ex__(2)[1][0]),
    "torch.save of an object, legacy": saved(System(), _use_new_zipfile_serialization=False),
    "a call in the legacy format": legacy(PickledObject(Global("os", "system"), ("true",))),
    "a source file to compare with": legacy(PersistentId(("module", Global("torch", "Tensor"), "x.py", "source"))),
    "something else than a storage": legacy({"a": 1}),
    "nothing": b"",
    "not bytes": 7,
}


@pytest.mark.parametrize("blob", NESTED.values(), ids=NESTED)
def test_a_storage_that_is_anything_but_one_is_refused(blob):
    with pytest.raises((DamagedCheckpoint, UnsafePickle), match="storage"):
        decode_payload(payload(scale_fwd=tensor(blob, (3,), (1,))), "layer 3")


def test_the_legacy_files_of_these_attacks_are_read_when_they_are_sound():
    sound = legacy(storage_reference(3), struct.pack("<q3f", 3, 1.0, 2.0, 4.0))
    _, state = decode_payload(payload(scale_fwd=tensor(sound, (3,), (1,))), "layer 3")
    assert state.roles["output"].scale == 4.0


LIES = {
    "more rows than numbers": tensor(storage(torch.zeros(6)), (1 << 20, 3), (3, 1)),
    "terabytes by strides of zero": tensor(storage(torch.zeros(6)), (1 << 40, 3), (0, 1)),
    "an offset beyond the end": tensor(storage(torch.zeros(6)), (2, 3), (3, 1), offset=6),
    "a negative offset": tensor(storage(torch.zeros(6)), (2, 3), (3, 1), offset=-1),
    "a negative size": tensor(storage(torch.zeros(6)), (-2, 3), (3, 1)),
    "sizes that overflow": tensor(storage(torch.zeros(6)), (1 << 62, 1 << 62), (1, 1)),
    "sizes that are not numbers": tensor(storage(torch.zeros(6)), ("2", 3), (3, 1)),
    "no size": tensor(storage(torch.zeros(6)), None, None),
    "a storage of gigabytes that is not there": tensor(legacy(storage_reference(1 << 33), keys=()), (2, 3), (3, 1)),
    "a storage of memory that was never written": tensor(legacy(storage_reference(1 << 10), keys=()), (2, 3), (3, 1)),
    "a storage cut short": tensor(storage(torch.zeros(6))[:-4], (2, 3), (3, 1)),
    "half precision": tensor(storage(torch.zeros(6).half()), (2, 3), (3, 1)),
    "a number": 3,
    "nothing": None,
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_tensor_that_lies_about_its_size_is_damage(lie):
    with pytest.raises(DamagedCheckpoint):
        decode_payload(payload(amax_history_fwd=lie), "layer 3")


BOMBS = {
    "a memo index of four billion": b"\x80\x04Nr\xff\xff\xff\xff.",
    "a string of exabytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
    "bytes of 32 gigabytes": b"\x80\x05\x8e" + struct.pack("<Q", 1 << 35) + b"x.",
    "a bytearray of 32 gigabytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 35) + b"x.",
    "a bytearray of 64 megabytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 26) + b"x.",
    "a frame of 32 gigabytes": b"\x80\x04\x95" + struct.pack("<Q", 1 << 35) + b"N.",
    "a long of two gigabytes": b"\x80\x04\x8b" + struct.pack("<i", (1 << 31) - 1) + b"x.",
    "no stop": b"\x80\x04N",
    "an empty stack": b"\x80\x04.",
    "a protocol to come": b"\x80\xff.",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_few_bytes_cannot_ask_for_much_memory(bomb):
    tracemalloc.start()
    try:
        try:
            assert decode_payload(bomb, "layer 3") is None
        except DamagedCheckpoint as error:
            assert "layer 3" in str(error)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def recipe(**fields):
    return PickledObject(Global(RECIPES, "DelayedScaling"), (), new=True, fields=fields)


FIELDS = {
    "a history of no rows": {"amax_history_len": 0},
    "a history of another length": {"amax_history_len": 1024},
    "a margin out of this world": {"amax_history_len": 2, "margin": 1 << 31},
    "a margin that is a string": {"amax_history_len": 2, "margin": "0"},
    "a truth that is a number": {"amax_history_len": 2, "reduce_amax": 1},
    "an unknown algorithm": {"amax_history_len": 2, "amax_compute_algo": "sum"},
    "a list for an algorithm": {"amax_history_len": 2, "amax_compute_algo": ["max"]},
    "a format that is a string": {"amax_history_len": 2, "fp8_format": "HYBRID"},
    "a format of a list": {
        "amax_history_len": 2,
        "fp8_format": PickledObject(Global(RECIPES, "Format"), ([448, 448],)),
    },
    "a format of its own": {"amax_history_len": 2, "fp8_format": PickledObject(Global(RECIPES, "Format"), ((1, 2),))},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_a_recipe_that_te_could_not_have_is_damage(fields):
    with pytest.raises(DamagedCheckpoint):
        decode_payload(payload(recipe=recipe(**fields)), "layer 3")


@pytest.mark.parametrize("marked", [payload(recipe=7), payload(recipe=recipe(margin=7))], ids=["recipe", "margin"])
def test_what_is_too_deep_to_print_is_still_one_error(marked):
    deep = pickle.EMPTY_TUPLE + pickle.TUPLE1 * 100_000
    with pytest.raises(CheckpointError):
        decode_payload(marked.replace(dumps(7)[2:-1], deep), "layer 3")


def test_a_payload_that_contains_itself_has_no_state():
    itself = b"\x80\x04}\x94" + dumps("forward")[2:-1] + b"h\x00s."
    assert decode_payload(itself, "layer 3") is None


TABLE = Global("collections", "OrderedDict")
HELPER = PickledObject(Global(RECIPES, "_FormatHelper"), (448, 57344))


def test_a_table_cannot_have_its_methods_replaced():
    """As any object's, its attributes are a pickle's to set: `payload.get` would be a number."""
    for name in ("get", "items", "keys", "values", "__class__"):
        table = dumps(PickledObject(TABLE, (), fields={name: 1}))
        assert decode_payload(table, "layer 3") is None


@pytest.mark.parametrize("state", [{"max_fwd": 1}, (None, {"__class__": REBUILD}), (None, {"max_fwd": 1}), None, 7])
def test_a_record_cannot_become_another(state):
    changed = payload(scale_fwd=0).replace(dumps(0)[2:-1], dumps(HELPER)[2:-1] + dumps(state)[2:-1] + pickle.BUILD, 1)
    with pytest.raises(CheckpointError):
        decode_payload(changed, "layer 3")


def test_a_recipe_of_a_huge_number_is_one_short_error():
    for number in (10**4000, -(10**4000)):
        with pytest.raises(DamagedCheckpoint) as error:
            decode_payload(payload(recipe=recipe(amax_history_len=2, margin=number)), "layer 3")
        assert len(str(error.value)) < 5000


def test_a_history_of_no_rows_is_damage_without_a_recipe_too():
    """Found by fuzzing: what TE did not keep up to 0.5 is added to it, column by column."""
    short = {
        "scale_fwd": tensor(storage(torch.ones(2)), (2,), (1,)),
        "amax_history_fwd": tensor(storage(torch.ones(2)), (0, 2), (2, 1)),
        "scale_bwd": tensor(storage(torch.ones(1)), (1,), (1,)),
        "amax_history_bwd": tensor(storage(torch.ones(1)), (0, 1), (1, 1)),
    }
    for extra in ({}, {"extra_fp8_variables": {"num_gemms": 1}}):
        with pytest.raises(DamagedCheckpoint, match="shapes"):
            decode_payload(dumps(short | extra), "layer 3")

"""The machine that runs pickles, against Python's own pickler."""

import pickle
import pickletools
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from precisionctl.checkpoints.torch_files import dcp_metadata, torch_zip
from precisionctl.errors import CheckpointError, DamagedCheckpoint
from precisionctl.fp8 import te_pickle
from precisionctl.untrusted import safe_pickle

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers(-(1 << 60), 1 << 60) | st.tuples(st.text(), st.binary())
VALUES = st.recursive(
    PLAIN | st.sets(KEYS, max_size=3) | st.frozensets(KEYS, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)
BUILTINS = {("builtins", "set"): safe_pickle.plain_set, ("builtins", "frozenset"): lambda items: frozenset(items)}
OF_PROTOCOL_2 = {
    ("__builtin__", "set"): safe_pickle.plain_set,
    ("__builtin__", "frozenset"): lambda items: frozenset(items),
    ("__builtin__", "bytes"): bytes,
    ("_codecs", "encode"): lambda text, encoding: text.encode(encoding),
}
ELSEWHERE = {
    "NEWOBJ_EX",  # keyword arguments
    *("EXT1", "EXT2", "EXT4"),  # numbers of classes that programs agree on
    *("BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"),  # buffers
}
"""Opcodes of protocols 2 to 5 that no trainer writes."""


@given(VALUES, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_what_python_pickles_is_read(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert safe_pickle.loads(data, BUILTINS | OF_PROTOCOL_2, "here") == value


@given(VALUES, st.data())
def test_a_changed_pickle_is_a_value_or_damaged(value: object, data: st.DataObject) -> None:
    whole = pickle.dumps(value, data.draw(st.integers(2, 4)))
    at, byte = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 255))
    for changed in (whole[:at] + bytes([byte]) + whole[at + 1 :], whole[:at] + pickle.STOP):
        try:
            safe_pickle.loads(changed, BUILTINS | OF_PROTOCOL_2, "here")
        except CheckpointError:
            pass


def test_an_object_that_is_there_twice_is_one_object() -> None:
    shared = ["x"]
    for protocol in (2, 4):
        first, second = safe_pickle.loads(pickle.dumps([shared, shared], protocol), {}, "here")
        assert first is second


def test_more_than_256_objects_are_remembered() -> None:
    values = [f"name {number}" for number in range(300)]
    for protocol in (2, 4):
        assert safe_pickle.loads(pickle.dumps(values * 2, protocol), {}, "here") == values * 2


@pytest.mark.parametrize(
    "opcode", [each for each in pickletools.opcodes if each.proto >= 2], ids=lambda each: each.name
)
def test_every_opcode_that_trainers_write_is_known(opcode: pickletools.OpcodeInfo) -> None:
    """Alone it is damaged in another way, or a value."""
    said = ""
    try:
        safe_pickle.loads(opcode.code.encode("latin1") + pickle.STOP, {}, "here")
    except CheckpointError as error:
        said = error.what
    assert ("the opcode" in said) == (opcode.name in ELSEWHERE)


def test_the_memo_takes_as_much_memory_as_it_holds() -> None:
    """What CPython's own machine would allocate four billion places for is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpoint, match="IndexError"):
            safe_pickle.loads(b"\x80\x02Nr\xff\xff\xff\xffj\xff\xff\xff\xff.", {}, "here")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("pickled", "said"),
    [
        (b"\x80\x02X\x04\x00\x00\x00ab.", "4 bytes that are not there"),
        (b"\x80\x02\x8b\xff\xff\xff\xff.", "4294967295 bytes that are not there"),
        (b"\x80\x02K\x01K\x02u.", "IndexError"),  # no mark
        (b"\x80\x02(K\x01\x86.", "IndexError"),  # two values above a mark that has one
        (b"\x80\x02}(K\x01u.", "ValueError"),  # a key without a value
        (b"\x80\x02]K\x01K\x02s.", "as a dict"),
        (b"\x80\x02}K\x01a.", "as a list"),
        (b"\x80\x04](K\x01\x90.", "as a set"),
        (b"\x80\x02h\x00.", "IndexError"),  # nothing is remembered
        (b"\x80\x02Q.", "IndexError"),
        (b"\x80\x02NQ.", "outside itself"),
        (b"\x80\x02I5\n.", "the opcode 0x49"),
        (b"\x80\x02]]N\x85\x81.", "as a class"),
        (b"\x80\x02" + b"(" * 10_001 + b".", "10000 deep"),
        (pickle.dumps({"x" * 20_000: 1}), "as a key"),
        (pickle.dumps({b"x" * 20_000: 1}), "as a key"),
        (pickle.dumps({("x" * 20_000,): 1}), "as a key"),
        (pickle.dumps({("x",) * 20: 1}), "as a key"),
    ],
)
def test_damage_is_named(pickled: bytes, said: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=said):
        safe_pickle.loads(pickled, {}, "here")


SET_OF_FIVE = b"(N\x88\x89)K\x02"
OF_A_CALL = b"c__builtin__\nset\nq\x00](K\x01K\x02K\x03K\x04K\x05e\x85q\x01"


@pytest.mark.parametrize(
    ("opcodes", "before"),
    [
        (b"]", b""),
        (b"}", b""),
        (b"\x8f", b""),
        (b"(\x91", b""),
        (b"\x85", b"N"),
        (b"}NNs", b""),
        (b"}(NNu", b""),
        (b"\x8f" + SET_OF_FIVE + b"\x90", b""),
        (SET_OF_FIVE + b"\x91", b""),
        (b"h\x00h\x01R", OF_A_CALL),
    ],
    ids=["lists", "dicts", "sets", "frozen", "tuples", "a key", "keys", "set items", "frozen items", "calls"],
)
def test_what_is_many_times_as_large_in_memory_as_in_a_file_is_refused(opcodes: bytes, before: bytes) -> None:
    """A pickle of nothing else: objects of 48 to 736 bytes in memory for one to 13 in the file."""
    data = b"\x80\x04" + before + opcodes * (400_000 // len(opcodes)) + b"."
    with pytest.raises(DamagedCheckpoint, match="too many containers, or copies"):
        safe_pickle.loads(data, OF_PROTOCOL_2, "here")


MANY = range(300, 1300)
ARGUMENTS = {
    "list": list(MANY),
    "tuple": tuple(MANY),
    "dict": dict.fromkeys(MANY),
    "dict of names": {f"option_{number}": number for number in MANY},
    "set": set(MANY),
    "frozenset": frozenset(MANY),
    "text": "".join(map(chr, MANY)),
    "Latin text": "\xe9" * 1000,
    "bytes": bytes(1000),
    "state of BytesIO": (bytes(1000), 0, None),
}


@pytest.mark.parametrize(
    "allowed",
    [torch_zip._OBJECTS, dcp_metadata._ALLOWED, te_pickle._IN_ARCHIVE],
    ids=["torch.save", ".metadata", "Transformer Engine"],
)
@pytest.mark.parametrize("argument", ARGUMENTS.values(), ids=ARGUMENTS)
def test_no_callable_makes_of_an_argument_more_memory_than_a_pickle_may_take(
    allowed: safe_pickle.Allowed, argument: object
) -> None:
    """An argument that four bytes put on the stack again, hundreds of times."""
    stored = pickle.dumps(argument, 2)[2:-1]
    opcodes = pickletools.genops(b"\x80\x02" + stored + b".")
    at = sum(opcode.name in ("BINPUT", "LONG_BINPUT") for opcode, _, _ in opcodes)
    of_argument, of_callable = (number.to_bytes(4, "little") for number in (at, at + 1))
    for module, name in [name for name, found in allowed.items() if callable(found)]:
        head = b"\x80\x02" + stored + b"r" + of_argument + b"0"
        head += f"c{module}\n{name}\nr".encode() + of_callable
        for use in (b"%b\x85R", b"%bX\x06\x00\x00\x00latin1\x86R", b"%b\x85\x81", b")\x81%bb", b")R%bb"):
            pickled = head + (b"j" + of_callable + use % (b"j" + of_argument)) * 300 + b"."
            tracemalloc.start()
            with suppress(CheckpointError):
                safe_pickle.loads(pickled, allowed, "here")
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert most < 50 * len(pickled) + (1 << 20), (module, name, use)


@pytest.mark.parametrize(
    "value",
    [
        [[] for _ in range(60_000)],
        [{} for _ in range(60_000)],
        {number: {} for number in range(60_000)},
        {number: {"step": number} for number in range(60_000)},
        [(number, number) for number in range(60_000)],
        [[number] for number in range(60_000)],
        set(range(60_000)),
    ],
    ids=["lists", "dicts", "dicts by key", "a dict in each", "pairs", "a number in each", "a set"],
)
def test_a_pickle_of_nothing_but_small_containers_is_read(value: object) -> None:
    """As torch.save writes it, in protocol 2, which has more bytes for each than the files of trainers' need."""
    assert safe_pickle.loads(pickle.dumps(value, 2), OF_PROTOCOL_2, "here") == value


def test_several_pickles_are_read_one_after_the_other() -> None:
    data = b"".join(pickle.dumps(value) for value in ("one", 2, None))
    values, at = [], 0
    for _ in range(3):
        value, at = safe_pickle.load_from(data, at, {}, "here")
        values.append(value)
    assert (values, at) == (["one", 2, None], len(data))

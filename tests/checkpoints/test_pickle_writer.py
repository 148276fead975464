"""What `pickle_writer` writes, read by Python's own pickle, in the protocols that files of trainers have."""

import argparse
import pickle
import pickletools
from types import SimpleNamespace

import pytest

from precisionctl.untrusted.pickle_writer import Global, PickledObject, dumps

VALUES = [
    *((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((),))),
    *(0, 255, 256, -1, (1 << 31) - 1, 1 << 31, -(1 << 31), -(1 << 31) - 1, 1 << 5000),
    *("", "\udc80", b"", b"\0", 0.1, None, True, False, [1, [2]], {"a": {"b": (1, 2)}}),
]
NAMESPACE = Global("types", "SimpleNamespace")


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_python_reads_what_is_written(value: object, protocol: int) -> None:
    assert pickle.loads(dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_class_and_names_of_fields_are_written_once(protocol: int) -> None:
    """Also where the memo has more than a byte can count. A text that is a value is written each time."""
    fields = {f"field{number}": "text" for number in range(300)}
    twice = [PickledObject(NAMESPACE, (), fields=fields), PickledObject(NAMESPACE, (), fields=fields)]
    written = dumps(twice, protocol)
    assert pickle.loads(written) == [SimpleNamespace(**fields)] * 2
    found = [(opcode.name, value) for opcode, value, _ in pickletools.genops(written)]
    assert found.count(("GLOBAL", "types SimpleNamespace")) == 1
    texts = [value for name, value in found if name == "BINUNICODE"]
    assert [text for text in texts if text != "text"] == list(fields)
    assert texts.count("text") == 600


def test_a_class_as_a_value_is_the_class() -> None:
    twice = Global("argparse", "Namespace")
    assert pickle.loads(dumps([twice, twice])) == [argparse.Namespace] * 2

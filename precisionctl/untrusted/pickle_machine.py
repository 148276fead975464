"""The machine that runs a pickle, which is a program: for the opcodes that Python writes in protocols 2 to 4.

The machines of Python's `pickle` cannot be used. The one in C allocates its memo by the largest index, so that six
bytes can ask for gigabytes, and its BUILD could modify a callable for all later files; the one in Python is private,
and slower. Opcodes of protocols 0 and 1, extension codes, keyword arguments and buffers are missing, as no trainer
writes them.
"""

from __future__ import annotations

import argparse
import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache, partial
from struct import Struct
from typing import Any

from precisionctl.errors import UnsafePickle, shown

FindClass = Callable[[str, str], Any]
"""Module and qualified name, as in the pickle -> the object to use for them."""

PersistentLoad = Callable[[Any], Any]
"""A persistent id (which torch.save uses for storages) -> the object to use for it."""

_PROTO, _FRAME, _STOP, _MARK, _POP, _POP_MARK = b"\x80\x95.(01"
_TUPLE, _TUPLE1, _TUPLE2, _TUPLE3 = b"t\x85\x86\x87"
_APPEND, _APPENDS, _SETITEM, _SETITEMS, _ADDITEMS, _FROZENSET = b"aesu\x90\x91"
_GLOBAL, _STACK_GLOBAL, _REDUCE, _NEWOBJ, _BUILD, _BINPERSID = b"c\x93R\x81bQ"
_CONSTANTS: Mapping[int, object] = {ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()}
_EMPTY: Mapping[int, type] = {ord("]"): list, ord("}"): dict, 0x8F: set}

_BYTE, _UINT32, _UINT64 = Struct("B"), Struct("<I"), Struct("<Q")
_BININT1, _NUMBERS = ord("K"), {ord("M"): Struct("<H"), ord("J"): Struct("<i"), ord("G"): Struct(">d")}
_MEMOIZE, _BINPUT, _LONG_BINPUT, _BINGET, _LONG_BINGET = b"\x94qrhj"

_text = partial(str, encoding="utf-8", errors="surrogatepass")
_integer = partial(int.from_bytes, byteorder="little", signed=True)
_SIZED: Mapping[int, tuple[Struct, Callable[[bytes], object]]] = {
    ord("X"): (_UINT32, _text),
    0x8C: (_BYTE, _text),
    0x8D: (_UINT64, _text),
    ord("C"): (_BYTE, bytes),
    ord("B"): (_UINT32, bytes),
    0x8E: (_UINT64, bytes),
    0x8A: (_BYTE, _integer),
    0x8B: (_UINT32, _integer),
}
"""Opcodes that are followed by a length and so many bytes, and what the bytes become."""


def run(data: bytes, at: int, find_class: FindClass, persistent: PersistentLoad) -> tuple[Any, int]:
    """Run the pickle that begins at byte `at`. Returns its value, and the byte behind it.

    Opcodes are tested in the order of how often they are in the files of PyTorch and Megatron. A table with a function
    for each is twice as long, and takes 10 to 20% more time for an index of `torch_dist` or a state dict. Raises
    UnsafePickle for a pickle that changes what must not change; a damaged one can raise nearly anything.
    """
    stack: list[Any] = []  # above the last mark
    below: list[list[Any]] = []  # under each mark
    memo: list[Any] = []
    budget = _Budget(len(data))
    while True:
        code = data[at]
        at += 1
        if code == _MARK:
            below.append(stack)
            stack = []
            if len(below) > _MOST_MARKS:
                raise pickle.UnpicklingError(f"containers {_MOST_MARKS} deep")
        elif code == _MEMOIZE:
            memo.append(stack[-1])
        elif code == _BINGET:
            stack.append(memo[data[at]])
            at += 1
        elif code == _LONG_BINGET:
            stack.append(memo[_UINT32.unpack_from(data, at)[0]])
            at += 4
        elif code == _LONG_BINPUT:
            _put(memo, _UINT32.unpack_from(data, at)[0], stack[-1])
            at += 4
        elif code == _BININT1:
            stack.append(data[at])
            at += 1
        elif code in _NUMBERS:
            stack += _NUMBERS[code].unpack_from(data, at)
            at += _NUMBERS[code].size
        elif code == _TUPLE:
            items, stack = stack, below.pop()
            budget.spend(_OF_TUPLE)
            stack.append(tuple(items))
        elif code == _TUPLE1:
            budget.spend(_OF_TUPLE)
            stack[-1] = (stack[-1],)
        elif code == _TUPLE2:
            budget.spend(_OF_TUPLE)
            last = stack.pop()
            stack[-1] = (stack[-1], last)
        elif code == _GLOBAL:
            middle = data.index(b"\n", at)
            end = data.index(b"\n", middle + 1)
            stack.append(find_class(data[at:middle].decode(), data[middle + 1 : end].decode()))
            at = end + 1
        elif code in _SIZED:
            length, made_of = _SIZED[code]
            (size,) = length.unpack_from(data, at)
            begin, at = at + length.size, at + length.size + size
            if at > len(data):
                raise pickle.UnpicklingError(f"{size} bytes that are not there")
            stack.append(made_of(data[begin:at]))
        elif code == _REDUCE:
            arguments = budget.arguments(stack.pop())
            stack[-1] = stack[-1](*arguments)
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _EMPTY:
            budget.spend(_OF_EMPTY[_EMPTY[code]])
            stack.append(_EMPTY[code]())
        elif code == _NEWOBJ:
            arguments = budget.arguments(stack.pop())
            if not isinstance(stack[-1], type):  # an enum's member has a `__new__` that looks a value up
                raise pickle.UnpicklingError(f"{shown(stack[-1])} as a class")
            stack[-1] = stack[-1].__new__(stack[-1], *arguments)
        elif code == _BUILD:
            state = stack.pop()
            budget.spend(_OF_CALL)
            budget.spend_on(state)
            _build(stack[-1], state, budget)
        elif code == _SETITEMS:
            items, stack = stack, below.pop()
            check_keys(items[::2])
            budget.spend(_OF_FIRST[dict])
            _filled(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
        elif code == _BINPUT:
            _put(memo, data[at], stack[-1])
            at += 1
        elif code == _TUPLE3:
            budget.spend(_OF_TUPLE)
            last, middle = stack.pop(), stack.pop()
            stack[-1] = (stack[-1], middle, last)
        elif code == _BINPERSID:
            budget.spend_on(stack[-1])
            stack[-1] = persistent(stack[-1])
        elif code == _STACK_GLOBAL:
            name, module = stack.pop(), stack.pop()
            if type(name) is not str or type(module) is not str:
                raise pickle.UnpicklingError(f"{shown(module)}.{shown(name)} as a name")
            stack.append(find_class(module, name))
        elif code == _APPEND:
            last = stack.pop()
            budget.spend(_OF_FIRST[list])
            _filled(stack[-1], list).append(last)
        elif code == _APPENDS:
            items, stack = stack, below.pop()
            budget.spend(_OF_FIRST[list])
            _filled(stack[-1], list).extend(items)
        elif code == _SETITEM:
            last, key = stack.pop(), stack.pop()
            check_keys((key,))
            budget.spend(_OF_FIRST[dict])
            _filled(stack[-1], dict)[key] = last
        elif code == _ADDITEMS:
            items, stack = stack, below.pop()
            check_keys(items)
            budget.spend(_OF_ITEM * len(items))
            _filled(stack[-1], set).update(items)
        elif code == _FROZENSET:
            items, stack = stack, below.pop()
            check_keys(items)
            budget.spend(_of_set(len(items)))
            stack.append(frozenset(items))
        elif code == _POP:
            stack.pop()
        elif code == _POP_MARK:
            stack = below.pop()
        elif code == _FRAME:  # how many bytes to read at once: they are here already
            at += 8
        elif code == _PROTO:
            at += 1
        elif code == _STOP:
            return stack.pop(), at
        else:
            raise pickle.UnpicklingError(f"the opcode {code:#04x}")


def _put(memo: list[Any], index: int, value: Any) -> None:
    """Remember a value under the next index, as picklers count, or in place of an earlier one."""
    if index == len(memo):
        memo.append(value)
    else:
        memo[index] = value  # no pickler skips any: a table for such pickles would take several times as much memory


class _Budget:
    """How much memory containers and callables may still take, in words of 8 bytes: one byte makes a set of 27, two can
    put a value on the stack again, for a call that copies it.

    All in all it is in proportion to the pickle. The files of Megatron, PyTorch, DeepSpeed and Transformer Engine spend
    less than half of it, and so does a pickle of nothing but empty lists, in protocol 2.
    """

    def __init__(self, size: int) -> None:
        self._left = 4 * size + _TO_BEGIN_WITH

    def spend(self, words: int) -> None:
        """Raise UnpicklingError if it is more than is left."""
        self._left -= words
        if self._left < 0:
            raise pickle.UnpicklingError("too many containers, or copies of the same values, for its length")

    def arguments(self, value: Any) -> tuple[Any, ...]:
        """The arguments of a call."""
        if type(value) is not tuple:
            raise pickle.UnpicklingError(f"{shown(value)} as arguments")
        self.spend(_OF_CALL)
        self.spend_on(value)
        return value

    def spend_on(self, value: Any) -> None:
        """Count what a callable may copy of a value: its items, and the items of containers among them. A list is all
        that a set is made of (safe_pickle.plain_set). Eight characters count as one word, as NumPy arrays are copied
        twice (text, bytes, array)."""
        parts = value if type(value) is tuple else (value,)
        count = len(parts)
        for part in parts:
            if type(part) is list:
                count += _of_set(len(part))
            elif isinstance(part, _COPIED):
                count += len(part) // 8 if isinstance(part, _TEXTS) else len(part)
        self.spend(count)


_TO_BEGIN_WITH = 1 << 16
"""So that nothing short is refused."""
_MOST_MARKS = 10_000
"""Python's picklers reach their limit of recursion at a tenth of it."""
_OF_EMPTY: Mapping[type, int] = {list: 8, dict: 9, set: 27}
_OF_FIRST: Mapping[type, int] = {list: 4, dict: 20}
"""Words of CPython's containers: of empty ones with their place on the stack, and what the first item adds. Further
ones cost about as much as the bytes that they are made of."""
_OF_TUPLE, _OF_ITEM, _OF_CALL = 6, 13, 10
"""Words of a tuple, of an item of a set or of a dict that is copied, whose tables are several times as long when they
grow, and of a small object."""


def _of_set(items: int) -> int:
    return _OF_EMPTY[set] + _OF_ITEM * items


_TEXTS = (str, bytes)
_COPIED = (*_TEXTS, list, tuple, set, frozenset, dict)
_SCALARS = (float, bool, type(None))
_MODULUS = (1 << 61) - 1
"""An integer's hash is its remainder by this number."""
LONGEST_KEY = 1 << 14
_LONGEST_TUPLE = 16
"""Most characters of a key, and parts of one that is a tuple. Four bytes of a pickle can use a key again, which hashes
all parts of a tuple, and compares all characters with those of a copy."""


def check_keys(keys: Iterable[Any]) -> None:
    """Raise UnpicklingError for a key whose hash could take forever, or be that of many others: a table of these takes
    time quadratic in their number. Allowed are scalars, objects that hash by identity or as members of an enum, and
    flat tuples of texts and such objects, all of them short. Numbers' hashes have no secret: large ones, and tuples,
    can be chosen to have the same."""
    for key in keys:
        kind = type(key)
        if kind is tuple:
            known = len(key) <= _LONGEST_TUPLE and all(map(_hashes_at_once, key))
        elif kind is int:
            known = abs(key) < _MODULUS
        else:
            known = kind in _SCALARS or _hashes_at_once(key)
        if not known:
            raise pickle.UnpicklingError(f"{shown(key)} as a key")


def _hashes_at_once(key: Any) -> bool:
    """Whether it is a short text, or an object that hashes by identity or as a member of an enum."""
    kind: Any = type(key)
    return len(key) <= LONGEST_KEY if kind in _TEXTS else kind.__hash__ in (object.__hash__, Enum.__hash__)


def _filled(container: Any, kind: type) -> Any:
    """The container that an opcode fills, if it is of the kind that it should be."""
    if not isinstance(container, kind):
        raise pickle.UnpicklingError(f"{shown(container)} as a {kind.__name__}")
    return container


def _build(changed: Any, state: Any, budget: _Budget) -> None:
    """Give an object its state, if that cannot replace attributes that Python itself looks up, such as `__class__`.
    Raises UnsafePickle for one that must not change."""
    kind: Any = type(changed)
    if isinstance(changed, dict):
        return  # its state is dropped: `_metadata` of a state dict, but it could also be `get`, `items`
    if kind is argparse.Namespace and type(state) is dict:
        budget.spend(_OF_FIRST[dict] + _OF_ITEM * len(state))  # for it is copied
        vars(changed).update(state)
    elif kind is io.BytesIO and type(state) is tuple and len(state) == 3 and state[2] is None:
        changed.__setstate__(state)
    elif callable(changed):
        raise UnsafePickle(f"a pickle changes {shown(changed)}, a class or function")
    elif _takes_state(kind):
        kind.__setstate__(changed, state)
    else:
        raise UnsafePickle(f"a pickle changes {shown(changed)}")


@cache
def _takes_state(kind: type) -> bool:
    """Whether objects of a class take their state in a way of their own. A tensor's could resize its storage."""
    return hasattr(kind, "__setstate__") and kind is not io.BytesIO and not hasattr(kind, "untyped_storage")

"""The shapes of records, recognised by their keys: a text, a conversation, or a prompt with its completion."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precisionctl.errors import DataError
from precisionctl.tokens.samples import Completion, Conversation, Message
from precisionctl.trainer.data.records import Record

JsonRow = Mapping[str, Any]
"""The values of a record, by key."""


@dataclass(frozen=True)
class Text:
    """A document, all of which is learned."""

    text: str


Sample = Text | Conversation | Completion


@dataclass(frozen=True)
class Shape:
    """Records with these keys, and how to make a Sample of one; `make` raises _BadRow for values of the wrong types."""

    keys: tuple[str, ...]
    make: Callable[[JsonRow], Sample]


class _BadRow(Exception):
    """What is wrong with a row."""


def sample_of(record: Record) -> Sample:
    """The sample that a record describes. Raises DataError for a record without the keys of any shape, or with null or
    values of the wrong types under them."""
    for shape in SHAPES:
        if all(record.row.get(key) is not None for key in shape.keys):
            try:
                return shape.make(record.row)
            except _BadRow as problem:
                raise DataError(str(problem), where=record.where) from None
    for shape in SHAPES:
        if record.row.keys() >= {*shape.keys}:
            raise _null(record, next(key for key in shape.keys if record.row[key] is None))
    known = "; ".join(" and ".join(f"`{key}`" for key in shape.keys) for shape in SHAPES)
    raise DataError(
        f"a row with none of the known keys: it has {_names(record.row)}",
        where=record.where,
        do=f"A row has {known}. If its text is under another key, add that to the path: PATH#KEY.",
    )


def text_under(record: Record, key: str) -> Record:
    """The record as a document, of which `key` is the text. Raises DataError where it has no string there."""
    text = record.row.get(key)
    if isinstance(text, str):
        return Record(record.where, {"text": text})
    if text is not None:
        raise DataError(f"`{key}` is not a string: {str(text)[:80]}", where=record.where)
    if key in record.row:
        raise _null(record, key)
    do = "What follows the `#` of a path is the key of its text."
    raise DataError(f"a row without `{key}`: it has {_names(record.row)}", where=record.where, do=do)


def _null(record: Record, key: str) -> DataError:
    return DataError(f"`{key}` is null", where=record.where, do="Give the row a value there, or leave the row out.")


def columns_to_read(names: Sequence[str], wanted: str | None) -> list[str]:
    """The columns of a table to read: the `wanted` one, else all that a shape looks at. If these make no sample, all of
    them, for the error that says so."""
    if wanted is not None:
        return [wanted] if wanted in names else [*names]
    return [name for name in names if name in KEYS or not makes_samples(names, None)]


def makes_samples(names: Iterable[str], wanted: str | None) -> bool:
    """Whether rows with these keys make samples: with the `wanted` one, else with those of a shape."""
    there = {*names}
    return wanted in there if wanted is not None else any(there.issuperset(shape.keys) for shape in SHAPES)


def _names(row: JsonRow) -> str:
    """The keys of a row, for errors."""
    return (", ".join(f"`{name}`" for name in row) or "none")[:200]


def _sharegpt(row: JsonRow) -> Conversation:
    turns = _list(row, "conversations")
    messages = _system(row)
    for turn in turns:
        if isinstance(turn, dict) and turn.get("role") is not None:  # the keys of `messages` under the other name
            messages += _messages([turn])
            continue
        if not (isinstance(turn, dict) and isinstance(turn.get("from"), str) and isinstance(turn.get("value"), str)):
            raise _BadRow(f"a turn without `from` and `value`: {str(turn)[:80]}")
        if turn["from"] not in SHAREGPT_ROLES:
            raise _BadRow(f"a turn from {turn['from'][:60]!r}; known are {', '.join(SHAREGPT_ROLES)}")
        messages.append({"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]})
    return Conversation(messages, _tools(row))


SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}


def _alpaca(row: JsonRow) -> Conversation:
    """`input` follows `instruction` on a line of its own, as LLaMA-Factory joins them (data/README.md)."""
    asked = "\n".join(part for part in (_string(row, "instruction"), _string(row, "input", "")) if part)
    before: list[Message] = []
    for pair in _list(row, "history") if row.get("history") else []:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(said, str) for said in pair)):
            raise _BadRow(f"`history` is pairs of what was asked and answered, and not {str(pair)[:80]}")
        before += [_said("user", pair[0]), _said("assistant", pair[1])]
    return Conversation([*_system(row), *before, _said("user", asked), _said("assistant", _string(row, "output"))])


def _completion(row: JsonRow) -> Conversation | Completion:
    if isinstance(row["prompt"], list):
        prompt = _messages(row["prompt"])
        return Conversation([*prompt, *_messages(row["completion"])], _tools(row), len(prompt))
    return Completion(_string(row, "prompt"), _string(row, "completion"))


SHAPES = (
    Shape(("messages",), lambda row: Conversation(_messages(row["messages"]), _tools(row))),
    Shape(("conversations",), _sharegpt),
    Shape(("instruction", "output"), _alpaca),
    Shape(("prompt", "completion"), _completion),
    Shape(("text",), lambda row: Text(_string(row, "text"))),
)
"""The first shape whose keys a record has is used. `text` is last, as alpaca data often repeats everything in it."""

KEYS = frozenset(key for shape in SHAPES for key in shape.keys) | {"input", "history", "system", "tools"}
"""All keys that any shape looks at."""


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _system(row: JsonRow) -> list[Message]:
    return [_said("system", said)] if (said := _string(row, "system", "")) else []


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list):
        raise _BadRow(f"not a list of messages: {str(messages)[:80]}")
    for message in messages:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise _BadRow(f"a message without a role: {str(message)[:80]}")
    return messages


def _tools(row: JsonRow) -> list[Any] | None:
    return _list(row, "tools") or None if row.get("tools") is not None else None


def _list(row: JsonRow, key: str) -> list[Any]:
    if not isinstance(row[key], list):
        raise _BadRow(f"`{key}` is not a list: {str(row[key])[:80]}")
    return list(row[key])


def _string(row: JsonRow, key: str, default: str | None = None) -> str:
    value = row.get(key)
    value = default if value is None else value
    if not isinstance(value, str):
        raise _BadRow(f"`{key}` is not a string: {str(value)[:80]}")
    return value

"""The special tokens of a GGUF file: their ids, and which of them llama.cpp puts around a text.

llama.cpp puts at most one token before a text, bos, and one behind it, eos. A tokenizer whose post-processor puts
others is refused.

Source: SpecialVocab in gguf-py/gguf/vocab.py, as llama-cpp-python 0.3.36 has it; numbers in comments are its lines.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from precisionctl.checkpoints.gguf.metadata import TOKEN_IDS
from precisionctl.checkpoints.gguf.metadata_bytes import GgufValue
from precisionctl.errors import DamagedCheckpoint, PrecisionError, shown


def token_text(token: object) -> str | None:
    """The text of a token in tokenizer_config.json."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def special_tokens(
    tokenizer: Mapping[str, Any],
    said: Mapping[str, Any],
    config: Mapping[str, Any],
    size: int,
    *,
    adds_bos: bool,
    named: Mapping[str, str],
) -> dict[str, GgufValue]:
    """The metadata of the special tokens of this tokenizer.json, for a model with so many tokens. `said` is
    tokenizer_config.json, `config` config.json; `adds_bos`: llama.cpp puts bos before a text if nothing is said;
    `named` are the texts of some, if the tokenizer has these.

    Raises PrecisionError for other tokens around a text than llama.cpp puts there, and DamagedCheckpoint.
    """
    processor = tokenizer.get("post_processor")
    around = None if processor is None else _around(processor)
    words, adds = _words(processor, said)
    known = {each["content"]: each["id"] for each in reversed(tokenizer.get("added_tokens", []))}
    ids = {word: known[words[word]] for word in TOKEN_IDS if words.get(word) in known}  # 340-356
    for word in TOKEN_IDS:  # 359-371
        number = config.get(f"{word}_token_id")
        if type(number) is int and 0 <= number < size:
            ids.setdefault(word, number)
    ids |= {word: known[text] for word, text in named.items() if text in known}
    for word in ("bos", "eos", "sep"):  # 341-346
        if isinstance(switch := said.get(f"add_{word}_token"), bool):
            adds.setdefault(word, switch)
    if adds_bos:
        adds.setdefault("bos", False)
    before, behind = ([ids.get(word)] if adds.get(word) else [] for word in ("bos", "eos"))
    if None in before + behind:
        raise PrecisionError(
            "a token is put around each text, and neither `added_tokens` nor config.json has its id",
            where="tokenizer.json",
            do="Add bos_token and eos_token to `added_tokens`, or set add_bos_token and add_eos_token to false.",
        )
    if around is not None and around != (before, behind):
        raise PrecisionError(
            f"llama.cpp would put the ids {shown(before)} before a text and {shown(behind)} behind it (bos_token, "
            f"eos_token); `post_processor` puts {shown(around[0])} and {shown(around[1])}",
            where="tokenizer.json",
            do="Let it put bos_token before a text and eos_token behind it, or neither, and let add_bos_token and "
            "add_eos_token say the same: a chat template can write other tokens.",
        )
    found: dict[str, GgufValue] = {
        f"tokenizer.ggml.{TOKEN_IDS[word]}": np.uint32(number) for word, number in ids.items()
    }
    return found | {f"tokenizer.ggml.add_{word}_token": put for word, put in adds.items()}


def _words(processor: object, said: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, bool]]:
    """Which token is bos, eos and so on, and which of these are put around a text."""
    words = {word: text for word in (*TOKEN_IDS, "cls") if (text := token_text(said.get(f"{word}_token")))}
    for word, other in (("bos", "cls"), ("eos", "sep")):  # 231-234
        if other in words:
            words.setdefault(word, words[other])
    adds: dict[str, bool] = {}
    steps = processor.get("processors", [processor]) if isinstance(processor, Mapping) else []
    for step in steps if isinstance(steps, list) else []:
        kind = step.get("type") if isinstance(step, Mapping) else None
        if kind == "ByteLevel":  # 238-240
            adds = {"bos": False, "eos": False} | adds
        if kind != "TemplateProcessing":
            continue
        single, pair = _names(step.get("single")), _names(step.get("pair"))
        first, last = (single[0], single[-1]) if len(single) > 1 else (None, None)
        if first:  # 260-268
            words.setdefault("bos", first)
            adds["bos"] = True
        if last:  # 271-284: what ended a text before it ends a turn
            if words.get("eos", last) != last:
                words["eot"] = words["eos"]
            words["eos"] = last
            adds["eos"] = True
        start = 1 if first and pair[:1] == [first] else 0  # 288-292
        match pair[start : -1 if last and pair[-1:] == [last] else None]:
            case [None, *between, None] if between:  # 298-317
                ends = {words.get("eos"), words.get("sep")} - {None}
                adds["sep"] = (between[0] in ends and not last) or (len(between) == 2 and between[1] in ends)
                if adds["sep"] and "eos" in words:
                    words.setdefault("sep", words["eos"])
    return words, adds


def _names(template: object) -> list[str | None]:
    """The special tokens of a template, None for a text."""
    steps = template if isinstance(template, list) else []
    names = (step.get("SpecialToken") for step in steps if isinstance(step, Mapping))
    return [str(name.get("id")) if isinstance(name, Mapping) else None for name in names]


def _around(processor: object) -> tuple[list[int], list[int]]:
    """The ids that a post-processor puts before a text, and those behind it. Raises PrecisionError for one that is
    neither a template nor ByteLevel, which puts none."""
    match processor:
        case {"type": "Sequence", "processors": [*steps]}:
            pass
        case _:
            steps = [processor]
    match [step for step in steps if not (isinstance(step, Mapping) and step.get("type") == "ByteLevel")]:
        case []:
            return [], []
        case [{"type": "TemplateProcessing", "single": [*pieces], "special_tokens": {**named}}]:
            ids = [_ids(piece, named) for piece in pieces]
            if ids.count(None) == 1:
                text = ids.index(None)
                return [*chain(*filter(None, ids[:text]))], [*chain(*filter(None, ids[text:]))]
    raise PrecisionError(
        f"llama.cpp has no such `post_processor`: {shown(processor)}",
        where="tokenizer.json",
        do="It has TemplateProcessing of one text, with a token before and one behind it.",
    )


def _ids(piece: object, named: Mapping[Any, Any]) -> Sequence[int] | None:
    """The ids of a piece of a template, None for a text."""
    match piece:
        case {"Sequence": _}:
            return None
        case {"SpecialToken": {"id": str(name)}}:
            match named.get(name):
                case {"ids": [*ids]} if all(type(each) is int for each in ids):
                    return ids
    raise DamagedCheckpoint(f"`post_processor` has an unknown piece: {shown(piece)}", where="tokenizer.json")

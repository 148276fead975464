"""What a tokenizer.json does to a text and llama.cpp does not: refused, as a model would be given other tokens than it
was trained with; or said in a note, where many published models have it and each converter writes them.

Source: llama.cpp's src/llama-vocab.cpp, as llama-cpp-python 0.3.36 has it (tokenize, tokenizer_st_partition).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from precisionctl.errors import DamagedCheckpoint, PrecisionError, shown
from precisionctl.sizes import listed

_ELSEWHERE = "vLLM runs the tokenizer as it is: --target vllm."

_SETTINGS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
"""Of a BPE; llama.cpp has none of them."""

_LONGEST, _MOST_OVERLAPS = 64, 100_000
"""Letters of the added tokens that are looked for at the ends of others, and how many such ends are looked at."""

_MOST_LETTERS = 5_000_000_000
"""Letters that are looked through for added tokens in others: some seconds."""
_MOST_LETTERS_OF_ALL = 2_000_000


def text_notes(tokenizer: Mapping[str, Any]) -> list[str]:
    """Notes on texts of which llama.cpp makes other tokens than this tokenizer.json, whose model is a BPE. Raises
    PrecisionError where it does of most, and DamagedCheckpoint for more added tokens than any model has."""
    model, steps = tokenizer["model"], _normalizers(tokenizer.get("normalizer"))
    for setting in _SETTINGS:
        if model.get(setting):
            raise _refused(f"`{setting}` {shown(model[setting])}", "Set it to null if the model was trained without.")
    added = tokenizer.get("added_tokens", [])
    if words := [each["content"] for each in added if each.get("single_word")]:
        raise _refused(f"`single_word`, which {listed(words)} has", "Set it to false if they may stand in a word.")
    # tokenizers finds those that are not normalized first, llama.cpp the longest
    normalized = "\0".join(each["content"] for each in added if each.get("normalized"))
    whole = [each["content"] for each in added if not each.get("normalized")]
    letters = sum(len(each["content"]) for each in added)
    if len(whole) * len(normalized) > _MOST_LETTERS or letters > _MOST_LETTERS_OF_ALL:
        what = f"{len(added)} added tokens, too many to look for one in another"
        raise DamagedCheckpoint(what, where="tokenizer.json", do="Is it a model's? A release has a few thousand.")
    if inside := [text for text in whole if text in normalized]:
        what = f"added token inside another that is `normalized`, here {listed(inside)}"
        raise _refused(what, "Set `normalized` of both to the same.")
    notes = []
    if model.get("byte_fallback"):
        if missing := [text for text in (f"<0x{byte:02X}>" for byte in range(256)) if text not in model["vocab"]]:
            raise _refused(f"SentencePiece without a token for each byte, here {listed(missing)}", _ELSEWHERE)
        match tokenizer.get("pre_tokenizer"):
            case {"type": "Metaspace", "prepend_scheme": "first"}:
                notes.append(
                    "llama.cpp puts a space before the text behind a special token too, where this tokenizer puts one "
                    "at the start alone: of a prompt with special tokens it makes other tokens."
                )
    elif steps == [{"type": "NFC"}]:
        notes.append(
            "llama.cpp does not compose characters, as this tokenizer does (NFC): of a letter and an accent that "
            "follows as a character of its own it makes other tokens."
        )
    elif steps:
        raise _refused(f"such `normalizer`: {shown(steps)}", _ELSEWHERE)
    if stripped := [each["content"] for each in added if each.get("lstrip") or each.get("rstrip")]:
        notes.append(
            "llama.cpp makes tokens of the spaces beside these added tokens, which this tokenizer takes with the token "
            f"(lstrip, rstrip): {listed(stripped)}."
        )
    if pairs := dict.fromkeys(_overlapping([each["content"] for each in added])):
        notes.append(
            "Where these added tokens overlap in a text, this tokenizer takes the first, and llama.cpp the longer: "
            f"{listed(f'{first} and {second}' for first, second in pairs)}."
        )
    # such a token is looked for with the space that is put before it too
    prepends = any(isinstance(step, Mapping) and step.get("type") == "Prepend" for step in steps)
    if prepends and (spaced := [each["content"] for each in added if each.get("normalized")]):
        notes.append(
            "llama.cpp finds these added tokens anywhere, and this tokenizer only where a text begins or together with "
            f"the space before them (normalized): {listed(spaced)}."
        )
    return notes


def _overlapping(added: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of added tokens, of which the end of the first is the beginning of the second, and that llama.cpp finds
    otherwise: those where no other token is found in the place of the first."""
    tokens = {text: len(text.encode(errors="replace")) for text in added if 1 < len(text) <= _LONGEST}
    beginnings: dict[str, list[str]] = {}
    for text in sorted(tokens):
        for end in range(1, len(text)):
            beginnings.setdefault(text[:end], []).append(text)
    overlaps = (
        (first, start, second)
        for first in sorted(tokens)
        for start in range(1, len(first))
        for second in beginnings.get(first[start:], ())
    )
    for first, start, second in islice(overlaps, _MOST_OVERLAPS):
        if second == first or tokens[second] < tokens[first]:
            continue
        together = first[:start] + second
        if first not in beginnings or not any(
            together[:end] in tokens for end in range(len(first) + 1, len(together) + 1)
        ):
            yield first, second


def space_before_text(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a SentencePiece model puts a space before a text. Raises PrecisionError for a tokenizer that changes or
    splits text otherwise than such models do."""
    normalizer, pre = tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    match _normalizers(normalizer), pre:
        case [{"type": "Prepend", "prepend": "▁"}, replace], None if replace == spaces:
            return True
        case [replace], None | {"type": "Split", "pattern": {"String": " "}} if replace == spaces:
            return False
        case [], {"type": "Metaspace", "replacement": "▁", "split": False, "prepend_scheme": str(scheme)}:
            # before a text that begins with a space, Metaspace puts none; llama.cpp does, as SentencePiece itself
            return scheme != "never"
    raise PrecisionError(
        f"llama.cpp's SentencePiece does not split text as this tokenizer.json does: {shown(normalizer)}, {shown(pre)}",
        do="If llama.cpp's convert_hf_to_gguf.py knows the model, use it.",
    )


def _normalizers(step: object) -> Sequence[object]:
    """The steps of a normalizer, one after the other."""
    match step:
        case None:
            return []
        case {"type": "Sequence", "normalizers": [*steps]}:
            return [inner for each in steps for inner in _normalizers(each)]
    return [step]


def _refused(what: str, do: str) -> PrecisionError:
    return PrecisionError(f"llama.cpp has no {what}: it would make other tokens of text", where="tokenizer.json", do=do)

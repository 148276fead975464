"""The tokenizer of a GGUF file, from a checkpoint's tokenizer.json, tokenizer_config.json and chat templates.

llama.cpp has three that the models here use: `gpt2`, byte-level BPE by merges; `llama`, SentencePiece's BPE by scores
with a token for each byte; and `gemma4`, the same by merges. Nothing is run: a tokenizer that only code describes is
refused.

Source: llama.cpp's src/llama-vocab.cpp, and conversion/base.py and gguf-py/gguf/vocab.py, whose order of keys this is.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from precisionctl.checkpoints.gguf.metadata_bytes import GgufValue
from precisionctl.errors import CheckpointError, DamagedCheckpoint, PrecisionError, shown
from precisionctl.export.gguf.gguf_pretokenizers import ADD_BOS, MARKS_APART, pretokenizer
from precisionctl.export.gguf.gguf_special_tokens import special_tokens, token_text
from precisionctl.export.gguf.gguf_text import space_before_text, text_notes
from precisionctl.untrusted.safe_json import parse_json

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens (enum llama_token_type)."""

_SPACE = "\u2581"
"""What stands for a space in SentencePiece."""

_CONTROL_NAMES = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
"""Added tokens that are taken for control tokens, whether they are `special` or not."""

_ADDED = -1000.0
"""The score of added tokens, which are found before anything is merged."""


_NOTE_OF_MARKS = (
    "llama.cpp splits words at combining marks, which this tokenizer takes for letters: of Hindi, Thai, or Arabic with "
    "vowel signs it makes other tokens."
)

_SHOWN_BY_GEMMA4 = (
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    '<|"|>',
)
"""Tokens that stay in the text of an answer, of which llama.cpp's chat parser reads calls of tools."""


def tokenizer_metadata(
    files: Mapping[str, bytes],
    config: Mapping[str, Any],
    vocab_size: int,
    where: object,
    named: Mapping[str, str],
    *,
    sentencepiece: str,
) -> tuple[dict[str, GgufValue], list[str]]:
    """The metadata of a tokenizer in these companion files, for a model with so many tokens, and notes on texts of
    which llama.cpp makes other tokens. `config` is config.json, `named` as in `special_tokens`, and `sentencepiece`
    the one of the two that a SentencePiece model is to have, `llama` or `gemma4`.

    Raises CheckpointError where there is no tokenizer.json, PrecisionError for a tokenizer that llama.cpp has not, and
    DamagedCheckpoint.
    """
    if "tokenizer.json" not in files:
        do = "Let transformers' AutoTokenizer load and save it, or give a directory with one as --reference."
        raise CheckpointError("no tokenizer.json, without which llama.cpp loads no model", where=where, do=do)
    tokenizer, said = (_parsed(files, name) for name in ("tokenizer.json", "tokenizer_config.json"))
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else None
        raise PrecisionError(f"llama.cpp has no tokenizer of the type {shown(kind)} for this model", where=where)
    vocab, added = model.get("vocab"), tokenizer.get("added_tokens", [])
    if not isinstance(vocab, dict) or not isinstance(added, list) or not all(isinstance(each, dict) for each in added):
        raise DamagedCheckpoint("`vocab` and `added_tokens` do not say its tokens", where="tokenizer.json")
    tokens, types = _tokens_and_types(vocab, added, said, vocab_size)
    notes = text_notes(tokenizer)
    merges = _merges(model.get("merges"))
    if model.get("byte_fallback"):
        adds_bos = True
        found = (
            _gemma4(tokenizer, tokens, types)
            if sentencepiece == "gemma4"
            else _sentencepiece(tokenizer, said, tokens, types, merges)
        )
    else:
        pre = pretokenizer(tokenizer)
        adds_bos = pre in ADD_BOS
        notes += [_NOTE_OF_MARKS] if pre in MARKS_APART else []
        found = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens}
        found["tokenizer.ggml.token_type"] = np.array(types, np.int32)
    if found["tokenizer.ggml.model"] != "llama":
        found["tokenizer.ggml.merges"] = [" ".join(part.replace(" ", "\u0120") for part in pair) for pair in merges]
    found |= special_tokens(tokenizer, said, config, vocab_size, adds_bos=adds_bos, named=named)
    of_gemma4 = found["tokenizer.ggml.model"] == "gemma4"
    if of_gemma4 and found.get("tokenizer.ggml.add_bos_token") is not True:
        what = "llama.cpp puts bos_token before each text of a Gemma 4, and this tokenizer puts none"
        raise PrecisionError(what, where="tokenizer.json", do="Let `post_processor` put it there, as Google's does.")
    found |= dict(_templates(files, said, where))
    return found | ({"tokenizer.ggml.add_space_prefix": False} if of_gemma4 else {}), notes


def _parsed(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return parse_json(files[name], name) if name in files else {}


def _sentencepiece(
    tokenizer: Mapping[str, Any],
    said: Mapping[str, Any],
    tokens: list[str],
    types: Sequence[int],
    merges: Sequence[tuple[str, str]],
) -> dict[str, GgufValue]:
    """The tokens of a SentencePiece model, whose types are those of any BPE."""
    listed = said.get("added_tokens_decoder")  # as transformers 4 had them
    unknown = None if listed else tokenizer["model"].get("unk_token") or token_text(said.get("unk_token"))
    types = [
        _BYTE if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token) else _UNKNOWN if token == unknown else kind
        for token, kind in zip(tokens, types, strict=True)
    ]
    found: dict[str, GgufValue] = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    found["tokenizer.ggml.tokens"] = tokens

    # Of two pairs SentencePiece merges that of the larger score first. A token that is merged has minus the number of
    # those merged before it, as in the models that SentencePiece trains; others, of single characters, follow by ids.
    special = _ADDED if listed else 0.0
    by_type = {_UNKNOWN: special, _CONTROL: special, _USER_DEFINED: _ADDED, _UNUSED: -10000.0, _BYTE: 0.0}
    order = {token: -float(rank) for rank, token in enumerate(dict.fromkeys(left + right for left, right in merges))}
    scores, last = [], -float(len(order))
    for token, kind in zip(tokens, types, strict=True):
        if kind == _NORMAL and token not in order:
            order[token], last = last, last - 1
        scores.append(by_type.get(kind, order.get(token, 0.0)))
    found["tokenizer.ggml.scores"] = np.array(scores, np.float32)

    found["tokenizer.ggml.token_type"] = np.array(types, np.int32)
    starts_with_space = space_before_text(tokenizer)
    if isinstance(said.get("add_prefix_space"), bool):
        return {"tokenizer.ggml.add_space_prefix": starts_with_space} | found
    return found if starts_with_space else found | {"tokenizer.ggml.add_space_prefix": False}


def _gemma4(tokenizer: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> dict[str, GgufValue]:
    """The tokens of Gemma 4's SentencePiece model, which llama.cpp merges by ranks, line by line. Raises PrecisionError
    for tokens across lines."""
    across = [
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind == _NORMAL and "\n" in token and token.strip("\n")
    ]
    if space_before_text(tokenizer) or across:
        what = f"llama.cpp makes tokens of a Gemma 4's text line by line, with no space before it: {shown(across[:4])}"
        raise PrecisionError(what, where="tokenizer.json", do="Is it Gemma 4's tokenizer?")
    types = [
        _BYTE if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token) else _USER_DEFINED if token in _SHOWN_BY_GEMMA4 else kind
        for token, kind in zip(tokens, types, strict=True)
    ]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.full(len(tokens), _ADDED, np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
    }


def _tokens_and_types(
    vocab: Mapping[str, Any], added: Sequence[Mapping[str, Any]], said: Mapping[str, Any], size: int
) -> tuple[list[str], list[int]]:
    """The text of each token by its id, and its type. Raises DamagedCheckpoint for ids that the model's embedding does
    not have, and for two tokens of one id."""
    by_id: dict[int, str] = {}
    for text, number in (*vocab.items(), *((each.get("content"), each.get("id")) for each in added)):
        if not isinstance(text, str) or type(number) is not int or not 0 <= number < size:
            what = f"the token {shown(text)} has the id {shown(number)}, and the model has {size} tokens"
            raise DamagedCheckpoint(what, where="tokenizer.json", do="Is it this model's tokenizer?")
        if by_id.setdefault(number, text) != text:
            what = f"the id {number} has two tokens, {shown(by_id[number])} and {shown(text)}"
            raise DamagedCheckpoint(what, where="tokenizer.json")
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(size)]

    types = [_UNUSED if token == f"[PAD{number}]" else _NORMAL for number, token in enumerate(tokens)]
    special = {token_text(token) for key, token in said.items() if key.endswith("_token")}
    for each in added:
        text = each["content"]
        control = each.get("special") or text in special or _CONTROL_NAMES.fullmatch(text)
        types[each["id"]] = _CONTROL if control else _USER_DEFINED

    # in the text of user-defined tokens, spaces are spaces
    texts = [
        token.replace(_SPACE, " ") if kind == _USER_DEFINED else token
        for token, kind in zip(tokens, types, strict=True)
    ]
    return texts, types


def _merges(said: object) -> list[tuple[str, str]]:
    """The pairs that are merged, in their order; newer files have pairs, older ones text with a space between. Raises
    DamagedCheckpoint for anything else."""
    pairs = []
    for merge in said if isinstance(said, list) else [said]:
        match merge.split(" ") if isinstance(merge, str) else merge:
            case [str(left), str(right)]:
                pairs.append((left, right))
            case _:
                raise DamagedCheckpoint(f"a merge is {shown(merge)}", where="tokenizer.json")
    return pairs


def _templates(files: Mapping[str, bytes], said: Mapping[str, Any], where: object) -> Iterator[tuple[str, GgufValue]]:
    """The chat templates: those in tokenizer_config.json, else those in files of their own, else that of a processor,
    which older wrappers have in chat_template.json. Of a name, gguf-py leaves ASCII letters and digits as they are.
    Raises PrecisionError for two of one name that differ: its GGUFWriter refuses a key that is there, or keeps the
    last one and warns."""
    own = {name: files[name].decode(errors="replace") for name in files if name.endswith(".jinja")}
    if "chat_template" in said or not own:
        template = (said if "chat_template" in said else _parsed(files, "chat_template.json")).get("chat_template")
        listed = template if isinstance(template, list) else [{"name": "default", "template": template}]
        named = [(each.get("name"), each.get("template")) for each in listed if isinstance(each, dict)]
    else:
        stems = {name: name.rpartition("/")[2].removesuffix(".jinja") for name in own}
        named = [("default" if stems[name] == "chat_template" else stems[name], text) for name, text in own.items()]
    texts: dict[str, str] = {}
    for name, text in named:
        if not (isinstance(name, str) and isinstance(text, str)):
            continue
        key = re.sub(r"[^A-Za-z0-9]", "_", name)
        if texts.setdefault(key, text) != text:
            what = f"two chat templates have the name {shown(key)} in a GGUF file, and differ"
            raise PrecisionError(what, where=where, do="Remove the one that is not meant, or rename it.")
    default = texts.pop("default", None)
    yield from ((f"tokenizer.chat_template.{name}", text) for name, text in texts.items())
    if texts:
        yield "tokenizer.chat_templates", [*texts]
    if default:
        yield "tokenizer.chat_template", default

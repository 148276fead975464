"""Which tokens a GGUF file says that llama.cpp puts around a text: those of the post-processor, or none is written."""

from typing import Any

import pytest

from precisionctl.errors import DamagedCheckpoint, PrecisionError
from precisionctl.export.gguf.gguf_special_tokens import special_tokens

IDS = {"<a>": 1, "<b>": 2, "<c>": 3}
BYTE_LEVEL = {"type": "ByteLevel"}


def template(single: str, pair: str = "") -> dict[str, Any]:
    def pieces(text: str) -> list[dict[str, Any]]:
        return [{"SpecialToken" if each in IDS else "Sequence": {"id": each, "type_id": 0}} for each in text.split()]

    named = {text: {"id": text, "ids": [number], "tokens": [text]} for text, number in IDS.items()}
    return {"type": "TemplateProcessing", "single": pieces(single), "pair": pieces(pair), "special_tokens": named}


def sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "processors": [*steps]}


def found(processor: object, config: Any = None, *, adds_bos: bool = False, **said: Any) -> dict[str, Any]:
    added = [{"content": text, "id": number} for text, number in IDS.items()]
    tokenizer = {"added_tokens": added, "post_processor": processor}
    metadata = special_tokens(tokenizer, said, config or {}, 10, adds_bos=adds_bos, named={})
    return {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}


@pytest.mark.parametrize(
    ("processor", "said", "expected"),
    [
        (None, {}, {}),
        (BYTE_LEVEL, {"eos_token": "<b>"}, {"eos_token_id": 2, "add_bos_token": False, "add_eos_token": False}),
        (template("<a> A"), {"bos_token": "<a>"}, {"bos_token_id": 1, "add_bos_token": True}),
        (template("<a> A"), {}, {"bos_token_id": 1, "add_bos_token": True}),
        # tokenizer.json is right, for the tokenizers library too
        (template("<a> A"), {"add_bos_token": False}, {"bos_token_id": 1, "add_bos_token": True}),
        (template("<a> A"), {"cls_token": "<a>"}, {"bos_token_id": 1, "add_bos_token": True}),
        (template("A <b>"), {"eos_token": {"content": "<b>"}}, {"eos_token_id": 2, "add_eos_token": True}),
        # what ended a text before the template's ends a turn
        (template("A <b>"), {"eos_token": "<c>"}, {"eos_token_id": 2, "eot_token_id": 3, "add_eos_token": True}),
        (
            sequence(BYTE_LEVEL, template("<a> A", "<a> A <a> B")),
            {},
            {"bos_token_id": 1, "add_bos_token": True, "add_eos_token": False, "add_sep_token": False},
        ),
        (
            template("A", "A <b> B"),
            {"eos_token": "<b>"},
            {"eos_token_id": 2, "seperator_token_id": 2, "add_sep_token": True},
        ),
        (  # what separates two texts ends none
            template("A", "A <b> B"),
            {"sep_token": "<b>", "eos_token": "<c>"},
            {"eos_token_id": 3, "seperator_token_id": 2, "add_sep_token": True},
        ),
        (
            template("<a> A", "<a> A <b> <b> B"),
            {"eos_token": "<b>"},
            {
                "bos_token_id": 1,
                "eos_token_id": 2,
                "seperator_token_id": 2,
                "add_bos_token": True,
                "add_sep_token": True,
            },
        ),
        (
            template("A", "A <c> <b> B"),
            {"eos_token": "<b>"},
            {"eos_token_id": 2, "seperator_token_id": 2, "add_sep_token": True},
        ),
        (template("A", "<a> A <b> B"), {"eos_token": "<b>"}, {"eos_token_id": 2}),
        (None, {"bos_token": "<a>", "add_bos_token": True}, {"bos_token_id": 1, "add_bos_token": True}),
    ],
)
def test_ids_and_what_is_put_around_a_text_are_as_gguf_py_reads_them(
    processor: object, said: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert found(processor, **said) == expected


def test_config_json_says_ids_that_no_token_has_and_only_those() -> None:
    config = {"bos_token_id": 7, "pad_token_id": 8, "eos_token_id": 10}
    assert found(None, config, bos_token="<a>") == {"bos_token_id": 1, "padding_token_id": 8}


def test_that_no_token_is_put_before_a_text_is_said_where_llama_cpp_would_put_one() -> None:
    assert found(None, adds_bos=True) == {"add_bos_token": False}
    assert found(template("<a> A"), adds_bos=True)["add_bos_token"] is True


@pytest.mark.parametrize(
    ("processor", "said", "what"),
    [
        (template("<a> <b> A"), {"bos_token": "<a>"}, r"puts \[1, 2\] and \[\]"),
        (template("<a> A"), {"bos_token": "<b>"}, r"puts \[1\] and \[\]"),
        (template("<a> A"), {"bos_token": "<b>", "cls_token": "<a>"}, r"puts \[1\] and \[\]"),
        (template("<a> A <b> <c>"), {"bos_token": "<a>"}, r"puts \[1\] and \[2, 3\]"),
        # the second of two templates is applied to two texts, the first's tokens being one
        (sequence(template("<a> A"), template("A <b>")), {"bos_token": "<a>"}, "no such `post_processor`"),
        (template("A"), {"bos_token": "<a>", "add_bos_token": True}, r"puts \[\] and \[\]"),
        (None, {"add_bos_token": True}, "neither `added_tokens` nor config.json has its id"),
        (template("A B"), {}, "no such `post_processor`"),
        (template("<a>"), {}, "no such `post_processor`"),
        ({"type": "RobertaProcessing", "cls": ["<a>", 1], "sep": ["<b>", 2]}, {}, "no such `post_processor`"),
        ([], {}, "no such `post_processor`"),
    ],
)
def test_other_tokens_around_a_text_are_refused(processor: object, said: dict[str, Any], what: str) -> None:
    with pytest.raises(PrecisionError, match=what):
        found(processor, **said)


@pytest.mark.parametrize(
    "piece", [{"SpecialToken": {"id": "<z>"}}, {"SpecialToken": {}}, {"SpecialToken": {"id": 3}}, {}, "A", None]
)
def test_a_damaged_template_is_one_error(piece: object) -> None:
    processor = template("<a> A")
    processor["single"].append(piece)
    with pytest.raises(DamagedCheckpoint, match="unknown piece"):
        found(processor)
    processor = template("<a> A")
    processor["special_tokens"]["<a>"] = {"ids": piece}
    with pytest.raises(DamagedCheckpoint, match="unknown piece"):
        found(processor)

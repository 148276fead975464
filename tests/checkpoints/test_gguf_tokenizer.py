"""The tokenizer of a GGUF file: how text is split, which tokens are what, and what is refused."""

import json
import time
from pathlib import Path
from typing import Any

import gguf_tokenizers
import numpy as np
import pytest
from gguf_tokenizers import SIZE
from tokenizers import AddedToken

from precisionctl.errors import CheckpointError, DamagedCheckpoint, PrecisionError
from precisionctl.export.gguf import gguf_pretokenizers as known
from precisionctl.export.gguf.gguf_text import text_notes
from precisionctl.export.gguf.gguf_tokenizer import tokenizer_metadata

NFC = {"type": "NFC"}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def written(tokenizer: Any, folder: Path, said: Any = None, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    """Metadata and notes, after changes of tokenizer.json and of tokenizer_config.json."""
    files = gguf_tokenizers.files(tokenizer, folder)
    for name, changed in (("tokenizer.json", changes), ("tokenizer_config.json", said or {})):
        files[name] = json.dumps(json.loads(files[name]) | changed).encode()
    found, notes = tokenizer_metadata(files, {"pad_token_id": 5}, SIZE, "here", {}, sentencepiece="llama")
    return {key.removeprefix("tokenizer.ggml."): value for key, value in found.items()}, notes


def metadata(tokenizer: Any, folder: Path, **changes: Any) -> dict[str, Any]:
    return written(tokenizer, folder, **changes)[0]


@pytest.mark.parametrize(
    ("expressions", "ignore_merges", "name"),
    [
        ((known.GPT2,), False, "gpt-2"),
        ((known.LLAMA3,), True, "llama-bpe"),
        ((known.QWEN2,), False, "qwen2"),
        ((known.SEED,), False, "seed-coder"),
        ((known.QWEN35,), False, "qwen35"),
        ((known.TEKKEN,), True, "tekken"),
        ((known.GPT4O,), False, "gpt-4o"),
        ((known.GPT4O,), True, "gpt-4o"),
        ((known.KIMI_K2,), False, "kimi-k2"),
        ((known.KIMI_K2,), True, "kimi-k2"),
        (known.DEEPSEEK3, False, "deepseek-v3"),
        ((known.BAILING,), False, "bailingmoe"),
        ((known.EXAONE_MOE,), False, "exaone-moe"),
        ((known.JAIS2,), False, "jais-2"),
        (known.TINY_AYA, False, "tiny_aya"),
        (known.MINICPM5, True, "minicpm5"),
        ((known.BLOOM,), False, "bloom"),
        (known.DEEPSEEK_CODER, False, "deepseek-coder"),
        (gguf_tokenizers.OF_FALCON, False, "falcon"),
    ],
)
def test_a_byte_level_bpe_is_named_by_how_it_splits_text(
    tmp_path: Path, expressions: tuple[str, ...], ignore_merges: bool, name: str
) -> None:
    tokenizer = gguf_tokenizers.byte_level(*expressions, ignore_merges=ignore_merges)
    found, notes = written(tokenizer, tmp_path)
    assert found["pre"] == name
    assert ["combining marks" in note for note in notes] == [True] * (name in known.MARKS_APART)


def test_byte_levels_own_splitting_and_digits_one_by_one_are_known(tmp_path: Path) -> None:
    own = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    digits = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, own]}
    tokenizer = gguf_tokenizers.byte_level(known.GPT2)
    assert metadata(tokenizer, tmp_path, pre_tokenizer=own)["pre"] == "gpt-2"
    assert metadata(tokenizer, tmp_path, pre_tokenizer=digits)["pre"] == "smollm"


@pytest.mark.parametrize(
    ("expressions", "ignore_merges"), [((known.LLAMA3.replace("3}", "2}"),), True), ((known.QWEN2,), True), ((), False)]
)
def test_another_way_to_split_is_refused(tmp_path: Path, expressions: tuple[str, ...], ignore_merges: bool) -> None:
    tokenizer = gguf_tokenizers.byte_level(*expressions, ignore_merges=ignore_merges)
    with pytest.raises(PrecisionError, match="no pre-tokenizer of llama.cpp is known"):
        metadata(tokenizer, tmp_path)


def test_each_token_stands_at_its_id_with_what_it_is(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizers.byte_level(known.LLAMA3, ignore_merges=True, begins=True)
    found = metadata(tokenizer, tmp_path)
    ids = tokenizer.get_vocab()
    assert [found["tokens"][number] for number in ids.values()] == [*ids]
    kinds = {text: found["token_type"][ids[text]] for text in ("!", "<|begin|>", "<|endoftext|>", "<tool>")}
    assert kinds == {"!": 1, "<|begin|>": 3, "<|endoftext|>": 3, "<tool>": 4}
    assert found["tokens"][len(ids) :] == [f"[PAD{number}]" for number in range(len(ids), SIZE)]
    assert {*found["token_type"][len(ids) :]} == {5}
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert found["merges"] == [" ".join(pair) for pair in merges]


def test_what_stands_around_a_text_is_what_the_tokenizer_puts_there(tmp_path: Path) -> None:
    begins = metadata(gguf_tokenizers.byte_level(known.LLAMA3, ignore_merges=True, begins=True), tmp_path / "a")
    plain = metadata(gguf_tokenizers.byte_level(known.LLAMA3, ignore_merges=True), tmp_path / "b")
    assert (begins["add_bos_token"], plain["add_bos_token"]) == (True, False)
    assert begins["tokens"][begins["bos_token_id"]] == "<|begin|>" and "bos_token_id" not in plain
    assert (
        begins["tokens"][begins["eos_token_id"]] == "<|endoftext|>" and begins["padding_token_id"] == 5
    )  # of config.json
    assert begins["tokenizer.chat_template"] == gguf_tokenizers.TEMPLATE


def test_sentencepiece_merges_by_scores_in_the_order_of_the_merges(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizers.sentencepiece()
    found = metadata(tokenizer, tmp_path)
    ids = tokenizer.get_vocab()
    merged = ["".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    assert [found["scores"][ids[token]] for token in merged] == [-float(rank) for rank in range(len(merged))]
    single = [text for text, number in ids.items() if found["token_type"][number] == 1 and text not in merged]
    assert single and max(found["scores"][ids[text]] for text in single) < -len(merged) + 1
    kinds = [found["token_type"][ids[text]] for text in ("<unk>", "<s>", "<0x0A>", "e")]
    assert kinds == [2, 3, 6, 1] and found["scores"].dtype == np.float32


def test_a_space_before_a_text_is_said_only_where_there_is_none(tmp_path: Path) -> None:
    assert "add_space_prefix" not in metadata(gguf_tokenizers.sentencepiece(), tmp_path / "with")
    without = metadata(gguf_tokenizers.sentencepiece(prefix=False), tmp_path / "without")
    assert without["add_space_prefix"] is False


def test_sentencepiece_with_another_normalizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrecisionError, match="does not split text as this"):
        metadata(gguf_tokenizers.sentencepiece(), tmp_path, normalizer={"type": "NFKC"})


def test_a_replacement_of_anything_but_spaces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrecisionError, match="does not split text as this"):
        metadata(
            gguf_tokenizers.sentencepiece(prefix=False), tmp_path, normalizer=SPACES | {"pattern": {"String": "a"}}
        )


@pytest.mark.parametrize(("scheme", "notes"), [("first", 1), ("always", 0), ("never", 0)])
def test_metaspace_is_written_and_a_note_says_what_stands_behind_special_tokens(
    tmp_path: Path, scheme: str, notes: int
) -> None:
    spaces = {"type": "Metaspace", "replacement": "▁", "split": False, "prepend_scheme": scheme}
    found, said = written(gguf_tokenizers.sentencepiece(), tmp_path, normalizer=None, pre_tokenizer=spaces)
    assert found.get("add_space_prefix", True) is (scheme != "never")
    assert len(said) == notes and all("behind a special token" in note for note in said)


def test_sentencepiece_without_a_byte_is_refused(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizers.sentencepiece()
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    del model["vocab"]["<0x80>"]
    with pytest.raises(PrecisionError, match="without a token for each byte, here <0x80>:"):
        metadata(tokenizer, tmp_path, model=model)


@pytest.mark.parametrize(
    ("setting", "value"), [("dropout", 0.1), ("continuing_subword_prefix", "##"), ("end_of_word_suffix", "</w>")]
)
def test_a_setting_of_bpe_that_llama_cpp_has_not_is_refused(tmp_path: Path, setting: str, value: object) -> None:
    tokenizer = gguf_tokenizers.byte_level(known.QWEN2)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    assert written(tokenizer, tmp_path / "none", model=model | {setting: None})[1] == []
    with pytest.raises(PrecisionError, match=f"`{setting}`"):
        metadata(tokenizer, tmp_path / "set", model=model | {setting: value})


@pytest.mark.parametrize(
    "normalizer",
    [{"type": "Lowercase"}, SPACES, {"type": "Sequence", "normalizers": [NFC, {"type": "NFKC"}]}, {"type": "Sequence"}],
)
def test_a_normalizer_of_a_byte_level_bpe_is_refused(tmp_path: Path, normalizer: object) -> None:
    with pytest.raises(PrecisionError, match="no such `normalizer`"):
        metadata(gguf_tokenizers.byte_level(known.QWEN2), tmp_path, normalizer=normalizer)


def test_of_nfc_which_qwen_has_a_note_says_that_llama_cpp_does_not_compose(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizers.byte_level(known.QWEN2)
    for number, steps in enumerate(([], [NFC])):
        nested = {"type": "Sequence", "normalizers": steps}
        _, notes = written(tokenizer, tmp_path / str(number), normalizer=nested)
        assert len(notes) == len(steps) and all("(NFC)" in note for note in notes)


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_added_tokens_that_take_spaces_are_named_in_a_note(tmp_path: Path, side: str) -> None:
    tokenizer = gguf_tokenizers.byte_level(known.QWEN2)
    tokenizer.add_tokens([AddedToken("<|im|>", **{side: True}), AddedToken("<|plain|>")], special_tokens=True)
    [note] = written(tokenizer, tmp_path)[1]
    assert "lstrip, rstrip): <|im|>." in note


def test_normalized_tokens_behind_a_prepended_space_are_named_in_a_note(tmp_path: Path) -> None:
    for prefix in (True, False):
        tokenizer = gguf_tokenizers.sentencepiece(prefix=prefix)
        tokenizer.add_tokens([AddedToken("<|im|>", normalized=True), AddedToken("<|plain|>", normalized=False)])
        notes = written(tokenizer, tmp_path / str(prefix))[1]
        assert [note.rpartition(": ")[2] for note in notes] == ["<|im|>."] * prefix


def test_added_tokens_that_llama_cpp_finds_elsewhere_are_refused(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizers.byte_level(known.QWEN2)
    tokenizer.add_tokens([AddedToken("xyz", normalized=True)])
    assert written(tokenizer, tmp_path / "alone")[1] == []
    tokenizer.add_tokens([AddedToken("y", normalized=False)])
    with pytest.raises(PrecisionError, match="inside another that is `normalized`, here y:"):
        metadata(tokenizer, tmp_path / "inside")
    tokenizer = gguf_tokenizers.byte_level(known.QWEN2)
    tokenizer.add_tokens([AddedToken("word", single_word=True)])
    with pytest.raises(PrecisionError, match="`single_word`, which word has"):
        metadata(tokenizer, tmp_path / "single")


def test_overlapping_tokens_of_which_llama_cpp_takes_the_longer_are_named_in_a_note(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizers.byte_level(known.QWEN2)
    tokenizer.add_tokens([AddedToken(" " * number) for number in (2, 3, 7)])  # of which the longest is the first too
    assert written(tokenizer, tmp_path / "runs")[1] == []
    tokenizer.add_tokens([AddedToken("|||IP|||"), AddedToken("|||PHONE|||")])
    assert tokenizer.tokenize("|||IP|||PHONE|||")[0] == "|||IP|||"
    [note] = written(tokenizer, tmp_path / "overlap")[1]
    assert note.endswith("llama.cpp the longer: |||IP||| and |||PHONE|||.")


def test_more_added_tokens_than_can_be_looked_for_in_others_are_one_error() -> None:
    added: list[dict[str, Any]] = [{"content": "a" * 100_000, "normalized": True}]
    added += [{"content": f"<{number}>"} for number in range(60_000)]
    with pytest.raises(DamagedCheckpoint, match="60001 added tokens, too many"):
        text_notes({"model": {}, "added_tokens": added})


def test_tokens_of_which_nearly_all_overlap_are_looked_at_in_seconds() -> None:
    """Ten million pairs of which none is one: the second is the shorter. And a million, each the beginning of a longer
    token too."""
    firsts, seconds = [f"{number:04d}{'z' * 56}a" for number in range(1000)], [f"a{n:04d}" for n in range(10_000)]
    for more in ([], [f"{first}b" for first in firsts]):
        began = time.process_time()
        text_notes({"model": {}, "added_tokens": [{"content": text} for text in (*firsts, *more, *seconds)]})
        assert time.process_time() - began < 5
        seconds = [f"{second}{'c' * 59}" for second in seconds[:1000]]


def test_a_gemma_4_is_merged_by_ranks_line_by_line_behind_its_first_token(tmp_path: Path) -> None:
    def of_gemma4(folder: str, also: str = "also", **changes: Any) -> dict[str, Any]:
        files = gguf_tokenizers.files(gguf_tokenizers.sentencepiece(prefix=False), tmp_path / folder)
        saved = json.loads(files["tokenizer.json"]) | changes
        saved["model"]["vocab"][also] = SIZE - 1
        files["tokenizer.json"] = json.dumps(saved).encode()
        return tokenizer_metadata(files, {}, SIZE, "here", {}, sentencepiece="gemma4")[0]

    found = of_gemma4("a")
    assert found["tokenizer.ggml.model"] == "gemma4" and found["tokenizer.ggml.add_bos_token"] is True
    assert "t h" in found["tokenizer.ggml.merges"] and found["tokenizer.ggml.add_space_prefix"] is False
    assert found["tokenizer.ggml.token_type"][3 + 65] == 6  # <0x41>, a byte
    with pytest.raises(PrecisionError, match="line by line"):
        of_gemma4("b", also="one\ntwo")
    with pytest.raises(PrecisionError, match="puts bos_token before each text of a Gemma 4"):
        of_gemma4("c", post_processor=None)


def test_named_chat_templates_have_keys_of_their_own(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizers.byte_level(known.QWEN2)
    files = gguf_tokenizers.files(tokenizer, tmp_path) | {"additional_chat_templates/tool_use.jinja": b"tools"}
    found, _ = tokenizer_metadata(files, {}, SIZE, "here", {}, sentencepiece="llama")
    assert found["tokenizer.chat_template.tool_use"] == "tools" and found["tokenizer.chat_templates"] == ["tool_use"]
    assert found["tokenizer.chat_template"] == gguf_tokenizers.TEMPLATE


@pytest.mark.parametrize("listed", [True, False])
def test_chat_templates_whose_names_become_one_are_refused_if_they_differ(tmp_path: Path, listed: bool) -> None:
    """gguf-py's `add_chat_template` writes `_` for what is no ASCII letter or digit."""
    files = gguf_tokenizers.files(gguf_tokenizers.byte_level(known.QWEN2), tmp_path)

    def made(**templates: str) -> dict[str, Any]:
        names = {"tool-use": "one", **templates}
        if listed:
            said = {"chat_template": [{"name": name, "template": text} for name, text in names.items()]}
            more = {"tokenizer_config.json": json.dumps(said).encode()}
        else:
            more = {f"additional_chat_templates/{name}.jinja": text.encode() for name, text in names.items()}
        return tokenizer_metadata(files | more, {}, SIZE, "here", {}, sentencepiece="llama")[0]

    with pytest.raises(PrecisionError, match="two chat templates have the name 'tool_use' in a GGUF file, and differ"):
        made(tool_use="two")
    assert made(tool_use="one")["tokenizer.chat_templates"] == ["tool_use"]
    assert made(tool_user="two")["tokenizer.chat_templates"] == ["tool_use", "tool_user"]


def test_a_chat_template_that_a_processor_has_is_taken_where_there_is_no_other(tmp_path: Path) -> None:
    """As gguf-py's SpecialVocab does: tokenizer_config.json counts first, then chat_template.jinja."""
    tokenizer = gguf_tokenizers.byte_level(known.QWEN2)
    files = gguf_tokenizers.files(tokenizer, tmp_path)
    del files["chat_template.jinja"]
    files["chat_template.json"] = json.dumps({"chat_template": "of the processor"}).encode()

    def template(**others: bytes) -> object:
        found, _ = tokenizer_metadata(files | others, {}, SIZE, "here", {}, sentencepiece="llama")
        return found.get("tokenizer.chat_template")

    assert template() == "of the processor"
    assert template(**{"chat_template.jinja": b"in a file"}) == "in a file"
    assert template(**{"tokenizer_config.json": b'{"chat_template": "said"}'}) == "said"


def test_templates_without_a_name_and_tokens_that_are_no_text_are_passed_over(tmp_path: Path) -> None:
    files = gguf_tokenizers.files(gguf_tokenizers.byte_level(known.QWEN2), tmp_path)
    listed = [{"name": name, "template": "y"} for name in (["x"], {"a": 1}, 3, "tools")]
    files["tokenizer_config.json"] = json.dumps({"chat_template": listed}).encode()
    saved = json.loads(files["tokenizer.json"])
    added = [{"content": "ab\udfff", "id": SIZE - 2}, {"content": "\udfffcdef", "id": SIZE - 1}]
    files["tokenizer.json"] = json.dumps(saved | {"added_tokens": [*saved["added_tokens"], *added]}).encode()
    found, _ = tokenizer_metadata(files, {}, SIZE, "here", {}, sentencepiece="llama")
    assert found["tokenizer.chat_templates"] == ["tools"]


def test_no_tokenizer_and_tokenizers_of_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        tokenizer_metadata({"tokenizer.model": b"..."}, {}, SIZE, "here", {}, sentencepiece="llama")
    with pytest.raises(PrecisionError, match="type 'Unigram'"):
        metadata(gguf_tokenizers.byte_level(known.QWEN2), tmp_path, model={"type": "Unigram", "vocab": []})


@pytest.mark.parametrize(
    "broken",
    [
        {"model": {"type": "BPE", "vocab": {"a": SIZE}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": True}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}},
        {"model": {"type": "BPE", "vocab": [], "merges": []}},
        {"model": {"type": "BPE", "vocab": {}, "merges": ["a b c"]}},
        {"model": {"type": "BPE", "vocab": {}, "merges": {}}},
        {"added_tokens": [{"content": 3, "id": 3}]},
        {"added_tokens": ["a"]},
        {"added_tokens": {}},
    ],
)
def test_a_damaged_tokenizer_is_one_error(tmp_path: Path, broken: dict[str, Any]) -> None:
    with pytest.raises(DamagedCheckpoint):
        metadata(gguf_tokenizers.byte_level(known.QWEN2), tmp_path, **broken)

r"""Pre-tokenizers: llama.cpp's names of how text is split before tokens are merged, by what a tokenizer.json says.

llama.cpp has the regular expressions itself, under a name that a file has as `tokenizer.ggml.pre`; with another name
text becomes other tokens. So a tokenizer.json whose expressions are not here is refused.

Source: llama.cpp's src/llama-vocab.cpp (llm_tokenizer_bpe), whose comments have the expressions as they are in
tokenizer.json, and transformers' tokenizers of the same models.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from precisionctl.errors import PrecisionError, shown

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{end}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{end}"
    r"|{digits}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` splits by itself."""
LLAMA3 = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _REST
QWEN2 = _CONTRACTIONS + _WORD + r"|\p{N}" + _REST
QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = _CASED.replace("{end}", "").replace("{digits}", r"\p{N}")
GPT4O = _CASED.replace("{end}", _CONTRACTIONS + "?").replace("{digits}", r"\p{N}{1,3}")
_NOT_HAN = _CASED.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("/", "")
KIMI_K2 = r"[\p{Han}]+|" + _NOT_HAN.replace("{end}", _CONTRACTIONS + "?").replace("{digits}", r"\p{N}{1,3}")
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SEED = _CONTRACTIONS + _WORD + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
"""No other match is left to what it takes for possessive (`?+`, `++`), and llama.cpp for greedy."""
EXAONE_MOE = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_LONG_SPACES = "".join(rf"|\s{{{number}}}(?!\S)" for number in (512, 256, 128, 64, 32, 16, 8, 4))
JAIS2 = LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + _LONG_SPACES + r"|\s{1,2}(?!\S)|\s{1}"
TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)
MINICPM5 = (r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+"))
BLOOM = " ?[^(\\s|[.,!?…。，、।۔،])]+"
DIGITS = r"\p{N}"
"""What `Digits` splits by, one by one."""
RUNS_OF_DIGITS = r"\p{N}+"
"""What it splits by otherwise."""
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
"""What `Punctuation` splits by, if neighbouring marks stay together."""
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", DIGITS)
FALCON = (PUNCTUATION, GPT2, RUNS_OF_DIGITS, "[0-9][0-9][0-9]")
"""llama.cpp leaves a space beside digits that are no three; a vocabulary of this has no token of both."""

_BY_NAME: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((GPT2,), False): "gpt-2",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "smaug-bpe",
    ((QWEN2,), False): "qwen2",
    ((QWEN35,), False): "qwen35",
    ((TEKKEN,), True): "tekken",
    ((GPT4O,), False): "gpt-4o",
    ((KIMI_K2,), False): "kimi-k2",
    (DEEPSEEK3, False): "deepseek-v3",
    ((DIGITS, GPT2), False): "smollm",
    ((SEED,), False): "seed-coder",
    ((BAILING,), False): "bailingmoe",
    ((EXAONE_MOE,), False): "exaone-moe",
    ((JAIS2,), False): "jais-2",
    (TINY_AYA, False): "tiny_aya",
    (MINICPM5, True): "minicpm5",
    ((BLOOM,), False): "bloom",
    (DEEPSEEK_CODER, False): "deepseek-coder",
    (FALCON, False): "falcon",
}
"""By the expressions, one after the other, and by whether a word that is a token is not merged (`ignore_merges`)."""

_OF_TIKTOKEN = ((GPT4O,), (KIMI_K2,))
"""Of which both are found: as their merges make every token, they are the same."""

MARKS_APART = ("tekken", "gpt-4o", "kimi-k2")
"""Those of which llama.cpp takes combining marks for no letters. It knows no capitals but A to Z either (its issue
21675), which changes nothing where no token is of a small letter and a capital, as in Tekken and o200k."""

NAMES = frozenset(_BY_NAME.values())

ADD_BOS = ("llama-bpe", "tekken")
"""Those with which llama.cpp puts the first token before a text unless a file says that it must not."""


def pretokenizer(tokenizer: Mapping[str, Any]) -> str:
    """llama.cpp's name for how a byte-level BPE splits text. Raises PrecisionError for one that has none here."""
    pre, model = tokenizer.get("pre_tokenizer"), tokenizer["model"]
    steps = tuple(_expressions(pre)) if isinstance(pre, Mapping) else ()
    ignores = model.get("ignore_merges") is True
    name = _BY_NAME.get((steps, ignores and steps not in _OF_TIKTOKEN))
    if name is None:
        raise PrecisionError(
            f"no pre-tokenizer of llama.cpp is known to split text as this tokenizer.json does: {shown(pre)}"
            + (", with ignore_merges" if ignores else ""),
            do="If llama.cpp's convert_hf_to_gguf.py knows the model, use it: with another one, text would become "
            "other tokens.",
        )
    return name


def _expressions(step: Mapping[str, Any]) -> Iterator[str]:
    """The regular expressions by which steps of a pre-tokenizer split, one after the other. One that llama.cpp has no
    word for gives text that is none."""
    match step:
        case {"type": "Sequence", "pretokenizers": [*steps]}:
            for each in steps:
                yield from _expressions(each) if isinstance(each, Mapping) else (shown(each),)
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False}:
            yield regex.replace("\r", r"\r").replace("\n", r"\n")  # which mean the same
        case {"type": "Digits", "individual_digits": bool(each)}:
            yield DIGITS if each else RUNS_OF_DIGITS
        case {"type": "Punctuation", "behavior": "Contiguous"}:
            yield PUNCTUATION
        case {"type": "ByteLevel", "add_prefix_space": False}:
            if step.get("use_regex", True):
                yield GPT2
        case _:
            yield shown(step)

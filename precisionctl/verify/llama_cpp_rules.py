"""A GGUF file held against what llama.cpp asks of one, beyond what reading it here has checked: that it computes such a
model, that there is a tokenizer of the model's size, and that the towers beside it are its own."""

from collections.abc import Iterator

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.gguf.families import of_llama_cpp
from precisionctl.checkpoints.gguf.head import ArrayLength
from precisionctl.checkpoints.gguf.reader import GgufReader
from precisionctl.engines.rules.rule import EngineRule, Finding
from precisionctl.errors import UnknownArchitecture, UnknownFormat, shown
from precisionctl.export.gguf.gguf_pretokenizers import NAMES
from precisionctl.verify.mmproj_rules import check_mmproj

_MODEL = EngineRule("its graph of the family has every setting of the model", "llama.cpp src/models/*.cpp")
_TOKENIZER = EngineRule(
    "a file has its tokenizer, with a token for each row of the embedding", "llama.cpp src/llama-vocab.cpp load"
)
_SPLIT = EngineRule(
    "text is split as `tokenizer.ggml.pre` says; it refuses a name that it does not know",
    "llama.cpp src/llama-vocab.cpp load",
    fatal=False,
)


def check_llama_cpp(reader: Reader) -> list[Finding]:
    """The rules that a file, and the files of towers beside it in a directory, break. Raises UnknownFormat for what is
    no GGUF file, and as `read_mmproj`."""
    if not isinstance(reader, GgufReader):
        do = "`export-inference --target llama.cpp` makes one of this."
        raise UnknownFormat(f"{reader.container}, and no GGUF file", where=reader.path or "", do=do)
    towers = (finding for path in reader.mmproj for finding in check_mmproj(reader, path))
    return [*_model(reader), *_tokenizer(reader), *towers]


def _model(reader: GgufReader) -> Iterator[Finding]:
    try:
        of_llama_cpp(reader.model)
    except UnknownArchitecture as error:
        yield Finding("general.architecture", error.what, _MODEL)


def _tokenizer(reader: GgufReader) -> Iterator[Finding]:
    said = reader.metadata
    model, tokens, pre = (said.get(f"tokenizer.ggml.{key}") for key in ("model", "tokens", "pre"))
    number = tokens.length if isinstance(tokens, ArrayLength) else len(tokens) if isinstance(tokens, list) else 0
    if not isinstance(model, str) or number != reader.model.vocab_size:
        what = f"{number} tokens of {shown(model)}, and {reader.model.vocab_size} rows"
        yield Finding("tokenizer.ggml.tokens", what, _TOKENIZER)
    if model == "gpt2" and (not isinstance(pre, str) or pre not in NAMES):
        yield Finding("tokenizer.ggml.pre", f"{shown(pre)}, of which nothing is known here", _SPLIT)

"""A GGUF file held against what llama.cpp asks of one, beyond what reading it here has checked: that it computes such a
model, that there is a tokenizer of the model's size, and that the towers beside it are its own."""

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
    found: list[Finding] = []
    try:
        of_llama_cpp(reader.model)
    except UnknownArchitecture as error:
        found.append(Finding("general.architecture", error.what, _MODEL))

    said = reader.metadata
    model, tokens, pre = (said.get(f"tokenizer.ggml.{key}") for key in ("model", "tokens", "pre"))
    number = tokens.length if isinstance(tokens, ArrayLength) else len(tokens) if isinstance(tokens, list) else 0
    if not isinstance(model, str) or number != reader.model.vocab_size:
        what = f"{number} tokens of {shown(model)}, and {reader.model.vocab_size} rows"
        found.append(Finding("tokenizer.ggml.tokens", what, _TOKENIZER))
    if model == "gpt2" and (not isinstance(pre, str) or pre not in NAMES):
        found.append(Finding("tokenizer.ggml.pre", f"{shown(pre)}, of which nothing is known here", _SPLIT))

    for path in reader.mmproj:
        found += check_mmproj(reader, path)
    return found

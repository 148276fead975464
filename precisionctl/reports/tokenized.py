"""The lines that `tokenize` prints."""

from pathlib import Path

from precisionctl.sizes import counted
from precisionctl.trainer.data.corpus import Corpus
from precisionctl.trainer.data.megatron import BIN, IDX, LEARNED


def corpus(made: Corpus, out: Path) -> list[str]:
    """What was tokenized, and what to do with it."""
    if made.signal:
        return [f"Stopped by {made.signal}.", "The same command continues from there."]
    of_them = "" if made.learned is None else f", of which {made.learned:,} are to be learned ({out}{LEARNED})"
    masked = (
        []
        if made.learned is None
        else ["Megatron's files cannot mark the tokens to learn, so Megatron learns from all tokens."]
    )
    documents, tokens = counted(made.documents, "document"), counted(made.tokens, "token")
    return [
        f"Wrote {out}{BIN} and {out}{IDX}: {documents}, {tokens}{of_them}.",
        *made.told(),
        *masked,
    ]

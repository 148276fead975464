"""The checkpoint's own tokenizer and chat template, from the files that travel with it; no remote code."""

import tempfile
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from precisionctl.checkpoints.base import Companions
from precisionctl.errors import DataError


def load_tokenizer(companions: Companions) -> PreTrainedTokenizerBase:
    """transformers' tokenizer of a checkpoint. Raises DataError where its files do not make one."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in companions.files.items():
            (Path(folder) / Path(name).name).write_bytes(content)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # a damaged file can make the libraries raise nearly anything
            raise DataError(
                f"the checkpoint's tokenizer does not load: {error}",
                where=", ".join(companions.files) or "no tokenizer files",
                do="Put its files beside config.json, which in a Megatron checkpoint is in precisionctl/hf.",
            ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or tokenizer.eos_token_id is None:
        raise DataError("the checkpoint's tokenizer has no end-of-text token", do="Set eos_token in its config.")
    return tokenizer

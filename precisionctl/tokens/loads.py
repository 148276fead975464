"""Files of strangers as transformers' tokenizer: no remote code, and no word that leads to another file."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from precisionctl.errors import DataError

_OF_THE_MODEL = ("model_type", "model_name", "tokenizer_class", "transformers_version")
"""What transformers chooses a tokenizer's class by. A config it makes of the whole file has a name for each of
`num_labels`, of which there may be two billion."""

_OF_THE_TOKENIZER = {
    "add_prefix_space",
    "added_tokens_decoder",
    "additional_special_tokens",
    "auto_map",
    "chat_template",
    "clean_text",
    "clean_up_tokenization_spaces",
    "do_basic_tokenize",
    "do_lower_case",
    "do_split_on_punc",
    "errors",
    "extra_special_tokens",
    "fix_mistral_regex",
    "keep_accents",
    "legacy",
    "max_input_chars_per_word",
    "model_max_length",
    "model_specific_special_tokens",
    "never_split",
    "remove_space",
    "spaces_between_special_tokens",
    "split_special_tokens",
    "strip_accents",
    "tokenize_chinese_chars",
    "tokenizer_class",
    "trim_offsets",
    "use_default_system_prompt",
}
"""With `auto_map`, so that transformers refuses what only code of a stranger tokenizes. All other keys reach a
constructor as well, and of those many are files: `vocab_file`, `gguf_file`, a `vocab` that is a string, `init_inputs`,
what stands in `sp_model_kwargs`."""


def load(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the files in a folder, of which the configs are cut to what is read here. Raises DataError."""
    try:
        _cut(folder / "config.json", lambda key, value: key in _OF_THE_MODEL and isinstance(value, str))
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            _cut(folder / name, lambda key, _: key in _OF_THE_TOKENIZER or key.endswith("_token"))
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a damaged file can make the libraries raise nearly anything
        raise DataError(f"the checkpoint's tokenizer does not load: {error or type(error).__name__}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not isinstance(tokenizer.eos_token_id, int):
        raise DataError("the checkpoint's tokenizer has no end-of-text token", do="Set eos_token in its config.")
    return tokenizer


def _cut(file: Path, keeps: Callable[[str, Any], bool]) -> None:
    """Leave of a JSON object those keys that something keeps."""
    if file.is_file():
        said = json.loads(file.read_bytes())
        if not isinstance(said, Mapping):
            raise ValueError(f"{file.name} is no JSON object")
        file.write_text(json.dumps({key: value for key, value in said.items() if keeps(key, value)}))

"""Load transformers' tokenizer from files of strangers: without remote code, and without keys that name other files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from precisionctl.errors import DataError, shown

_OF_THE_MODEL = ("model_type", "model_name", "tokenizer_class", "transformers_version")
"""The keys of config.json by which transformers chooses a tokenizer's class. Others are removed: `num_labels`, for
instance, makes it create as many names, which may be two billion."""

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
"""The keys of a tokenizer's config that are kept. `auto_map` is among them so that transformers refuses a tokenizer
that needs a stranger's code. Others are removed, as all reach a constructor and many name files: `vocab_file`,
`gguf_file`, a `vocab` that is a string, `init_inputs`, entries of `sp_model_kwargs`."""


def load(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the files in a folder, whose configs are first reduced to known keys. Raises DataError for files
    that make no tokenizer, or one without an end-of-text token."""
    try:
        _cut(folder / "config.json", lambda key, value: key in _OF_THE_MODEL and isinstance(value, str))
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            _cut(folder / name, lambda key, _: key in _OF_THE_TOKENIZER or key.endswith("_token"))
        _check_templates(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except DataError:
        raise
    except Exception as error:  # a damaged file can make the libraries raise nearly anything
        raise _load_error(error, folder) from None
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not isinstance(tokenizer.eos_token_id, int):
        raise DataError("the checkpoint's tokenizer has no end-of-text token", do="Set eos_token in its config.")
    return tokenizer


def _load_error(error: Exception, folder: Path) -> DataError:
    """The error of a tokenizer that does not load, with the cause and what to do, as far as they can be told."""
    for file in sorted(folder.glob("*.json")):
        try:
            json.loads(file.read_bytes())
        except (ValueError, RecursionError) as broken:
            what = f"the checkpoint's tokenizer does not load: {file.name} is no JSON: {broken}"
            return DataError(what, do="Copy that file again; it may have been cut off.")
    message = " ".join(str(error).split()) or "nothing"
    what = f"the checkpoint's tokenizer does not load: {type(error).__name__}, transformers says: {message}"
    if not (folder / "tokenizer.json").exists() and ("sentencepiece" in message or "tiktoken" in message):
        return DataError(
            "the checkpoint's tokenizer does not load: it has no tokenizer.json, and its other files need a package "
            "that is not installed",
            do="pip install sentencepiece tiktoken; or let transformers' save_pretrained write a tokenizer.json, where "
            "it loads.",
        )
    return DataError(what, do="Copy its files from the model that it belongs to.")


def _check_templates(folder: Path) -> None:
    """Raise DataError for two chat templates of one name that differ, of which transformers takes the last: in the
    tokenizer's config, or in files, where `chat_template.jinja` is named `default`."""
    config, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    said = json.loads(config.read_bytes()).get("chat_template") if config.is_file() else None
    listed = [(each["name"], each["template"]) for each in said] if isinstance(said, list) else []
    files = [("default", file)] if file.is_file() else []
    files += [(each.stem, each) for each in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for templates in (listed, [(name, each.read_text(encoding="utf-8")) for name, each in files]):
        found: dict[str, str] = {}
        for name, template in templates:
            if found.setdefault(name, template) != template:
                what = f"the checkpoint's tokenizer has two chat templates with the name {shown(name)}, which differ"
                raise DataError(what, do="Remove the one that is not meant.")


def _cut(file: Path, keeps: Callable[[str, Any], bool]) -> None:
    """Remove from a JSON file the keys for which `keeps` is False."""
    if file.is_file():
        content = json.loads(file.read_bytes())
        if not isinstance(content, Mapping):
            raise ValueError(f"{file.name} is not a JSON object")
        file.write_text(json.dumps({key: value for key, value in content.items() if keeps(key, value)}))

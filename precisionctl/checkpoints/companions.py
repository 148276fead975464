"""What is beside a model's weights: which files travel with it, which are made anew, which stay, and why; and JSON of
strangers."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from precisionctl.checkpoints.base import Companions
from precisionctl.errors import DamagedCheckpoint
from precisionctl.untrusted.safe_files import read_file


@dataclass(frozen=True)
class Kind:
    """Files by the `patterns` of their names, what becomes of them, and the reason."""

    patterns: tuple[str, ...]
    fate: Literal["travels", "made anew", "stays"]
    reason: str


CONFIG = Kind(("config.json",), "travels", "says which model it is; `--to hf` sets the dtype and `quantization_config`")
TOKENIZER = Kind(
    (
        *("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
        *("spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "*.tiktoken", "tekken.json"),
    ),
    "travels",
    "the tokenizer",
)
KINDS = (
    Kind(
        ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"),
        "made anew",
        "weights, and the index of their files",
    ),
    CONFIG,
    TOKENIZER,
    Kind(("generation_config.json",), "travels", "how the model is sampled from"),
    Kind(("configuration.json",), "travels", "what ModelScope's client looks for"),
    Kind(("chat_template*",), "travels", "how a conversation becomes tokens"),
    Kind(
        ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
        "travels",
        "how images and sound become inputs; engines look for them",
    ),
    Kind(
        ("LICENSE*", "LICENCE*", "License*", "NOTICE*", "Notice*", "COPYING*", "MODEL_LICENSE*", "USE_POLICY*"),
        "travels",
        "the terms on which the model may be passed on",
    ),
    Kind(("*.py",), "stays", "code; what `auto_map` names, and what that imports from beside it, travels as bytes"),
    Kind(
        ("hf_quant_config.json",), "made anew", "how the weights are coded; an export for TensorRT-LLM writes its own"
    ),
    Kind(
        ("*.md", "*.png", "*.jpg", "*.jpeg", "*.svg", "*.gif", "*.pdf"),
        "stays",
        "the model card describes the source; an export writes one of its own",
    ),
    Kind(
        ("optimizer*", "scheduler.pt", "rng_state*.pth", "trainer_state.json", "training_args.bin", "scaler.pt"),
        "stays",
        "the state of another trainer's run",
    ),
    Kind(
        ("*.gguf", "*.pth", "*.pt", "*.onnx", "*.h5", "*.msgpack", "params.json"),
        "stays",
        "the weights in another format",
    ),
    Kind((".*",), "stays", "what Git and the Hub's client keep for themselves"),
)
"""The first that fits a name counts. A name that fits none stays, and the command says so; so do folders, unsaid."""

_NAMING_CODE = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_CLASS = re.compile(r"[A-Za-z_][\w-]*\.\w+")
"""`modeling_kimi.KimiForCausalLM`: a class in a file of the directory."""
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+\.([\w.]+)[ \t]+import\b|import[ \t]+\.([\w.]+))", re.MULTILINE)
_MOST_CODE = 64


def kind_of(name: str) -> Kind | None:
    """What a file beside the weights is; None where its name is not known."""
    return next((kind for kind in KINDS if any(fnmatchcase(name, pattern) for pattern in kind.patterns)), None)


def is_tokenizer(name: str) -> bool:
    """Whether a file is of a tokenizer, and more than a list of its special tokens."""
    return kind_of(name) is TOKENIZER and name not in ("special_tokens_map.json", "added_tokens.json")


def read_companions(directory: Path, *, links: bool) -> Companions:
    """The files in a directory that travel; none where there is no directory.

    `links`: whether symbolic links count, as they make up the cache of Hugging Face's hub. Raises DamagedCheckpoint
    for one that leads elsewhere.
    """
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    there = {path.name for path in paths if path.is_file() and (links or not path.is_symlink())}
    kinds = {name: kind_of(name) for name in sorted(there)}
    files = {name: _content(directory, name) for name, kind in kinds.items() if kind and kind.fate == "travels"}
    code = _Code(directory, there)
    for name in (name for name in _NAMING_CODE if name in files):
        files[name] = code.with_code(name, files[name])
    unknown = [name for name, kind in kinds.items() if kind is None]
    notes = [f"Stays behind, as nothing here knows what it is: {_listed(unknown)}."] if unknown else []
    return Companions(files | code.files, tuple(sorted(code.files)), (*code.notes, *notes))


def _content(directory: Path, name: str) -> bytes:
    """A file that travels, as it is: the one place where companions are read."""
    return read_file(directory / name, directory)


def write_companions(directory: Path, companions: Companions) -> None:
    """Write them into a directory, which is made only where there are any."""
    for name, content in companions.files.items():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


@dataclass
class _Code:
    """The Python files of a directory that its configs name in `auto_map`. They are bytes here: nothing runs them, and
    imports are looked for as transformers does (dynamic_module_utils.py, get_relative_imports)."""

    directory: Path
    there: set[str]
    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def with_code(self, name: str, content: bytes) -> bytes:
        """A config, and in `files` the code that it names; without those entries of `auto_map` whose code is not in
        the directory, since the result could not be opened with them."""
        try:
            config = parse_json(content, name)
        except DamagedCheckpoint:  # whoever needs it will say so
            return content
        auto_map = config.get("auto_map")
        if not isinstance(auto_map, dict):
            return content
        kept, gone, elsewhere = {}, [], []
        for key, value in auto_map.items():
            references = [one for one in (value if isinstance(value, list) else [value]) if one is not None]
            if all(isinstance(one, str) and "--" in one for one in references):
                elsewhere += references
            elif all(self._is_here(one) for one in references):
                for one in references:
                    self._add(_file_of(one))
            else:
                gone.append(f"{key} ({', '.join(map(str, references))})")
                continue
            kept[key] = value
        if elsewhere:
            self.notes.append(
                f"{name} names code of other repositories, {_listed(elsewhere)}: whoever opens the result with "
                "trust_remote_code fetches it from the Hub."
            )
        if not gone:
            return content
        self.notes.append(f"Taken out of `auto_map` in {name}, as no such file is in the directory: {_listed(gone)}.")
        config["auto_map"] = kept
        if not kept:
            del config["auto_map"]
        return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()

    def _is_here(self, reference: object) -> bool:
        return isinstance(reference, str) and bool(_CLASS.fullmatch(reference)) and _file_of(reference) in self.there

    def _add(self, file: str) -> None:
        """A file, and those that it imports from beside it."""
        if file in self.files:
            return
        if len(self.files) == _MOST_CODE:
            what = f"`auto_map` leads to more than {_MOST_CODE} files of code"
            raise DamagedCheckpoint(what, where=self.directory, do="Do not trust it.")
        content = self.files[file] = _content(self.directory, file)
        imports = {f"{found[1] or found[2]}.py" for found in _IMPORT.finditer(content.decode(errors="replace"))}
        for imported in sorted(imports & self.there):
            self._add(imported)
        if missing := sorted(imports - self.there):
            self.notes.append(f"{file} imports what is not in the directory: {_listed(missing)}.")


def _file_of(reference: str) -> str:
    return f"{reference.partition('.')[0]}.py"


def _listed(names: Iterable[str]) -> str:
    listed = [name[:100] for name in names]
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def parse_json(data: bytes, where: object) -> dict[str, Any]:
    """A JSON object of a stranger. Raises DamagedCheckpoint for anything else, and where a key has two values."""
    try:
        parsed = json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"not readable as JSON: {error}", where=where) from error
    if not isinstance(parsed, dict):
        raise DamagedCheckpoint("not a JSON object", where=where)
    return parsed


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"`{key:.80}` is there twice")
        found[key] = value
    return found

"""The files beside a model's weights: which are copied with it ("travel"), which are made anew, which stay behind, and
why."""

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from precisionctl.checkpoints.base import Companions, Hints
from precisionctl.errors import DamagedCheckpoint
from precisionctl.fp8 import sidecar
from precisionctl.sizes import listed
from precisionctl.untrusted.safe_files import check_link, read_file, read_files, read_json
from precisionctl.untrusted.safe_json import parse_json


@dataclass(frozen=True)
class CompanionKind:
    """A kind of file, by patterns of its name (in upper case for names in `any_case`): what happens to it, and why."""

    patterns: tuple[str, ...]
    fate: Literal["travels", "made anew", "stays"]
    reason: str
    any_case: bool = False

    def has(self, name: str) -> bool:
        """Whether a file of this name is of this kind."""
        return any(fnmatchcase(name.upper() if self.any_case else name, pattern) for pattern in self.patterns)


TEMPLATES = "additional_chat_templates"
"""The folder in which transformers keeps the chat templates that have names, such as `tool_use` (utils/hub.py,
CHAT_TEMPLATE_DIR). It reads only `*.jinja` directly in it."""


CONFIG = CompanionKind(
    ("config.json",), "travels", "says which model it is; `--to hf` sets the dtype and `quantization_config`"
)
TOKENIZER = CompanionKind(
    (
        *("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
        *("spiece.model", "sentencepiece.model", "sentencepiece.bpe.model", "spm.model"),
        *("tiktoken.model", "*.tiktoken", "tekken.json"),
    ),
    "travels",
    "the tokenizer",
)
CHAT_TEMPLATE = CompanionKind(
    ("chat_template*", f"{TEMPLATES}/*.jinja"), "travels", "how a conversation becomes tokens"
)
LICENCE = CompanionKind(
    ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "MODEL_LICENSE*", "USE_POLICY*"),
    "travels",
    "the terms on which the model may be passed on; also in lower case",
    any_case=True,
)
ADAPTER = CompanionKind(
    ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"),
    "stays",
    "an adapter of PEFT is merged; that of a model with `has_lora_adapter` (Granite Speech 3.3) travels",
)
KINDS = (
    ADAPTER,
    CompanionKind(
        ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"),
        "made anew",
        "weights, and the index of their files",
    ),
    CONFIG,
    TOKENIZER,
    CompanionKind(("generation_config.json",), "travels", "how the model is sampled from"),
    CompanionKind(("configuration.json",), "travels", "what ModelScope's client looks for"),
    CHAT_TEMPLATE,
    CompanionKind(
        ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
        "travels",
        "how images and sound become inputs; engines look for them",
    ),
    CompanionKind(("spk_dict.pt",), "travels", "voices, without which transformers does not open Qwen2.5-Omni"),
    CompanionKind(
        ("*.py",), "stays", "code; what `auto_map` names, and what that imports from beside it, travels as bytes"
    ),
    LICENCE,
    CompanionKind(
        (
            "hf_quant_config.json",
            "quantize_config.json",
            "quant_config.json",
            "quanto_qmap.json",
            "model.safetensors.index.json.meta.json",
        ),
        "made anew",
        "how the weights are coded; an export for TensorRT-LLM writes its own",
    ),
    CompanionKind(
        ("*.md", "*.png", "*.jpg", "*.jpeg", "*.svg", "*.gif", "*.pdf"),
        "stays",
        "the model card describes the source; an export writes one of its own",
    ),
    CompanionKind(
        ("optimizer*", "scheduler.pt", "rng_state*.pth", "trainer_state.json", "training_args.bin", "scaler.pt"),
        "stays",
        "the state of another trainer's run",
    ),
    CompanionKind(("recipe.yaml",), "stays", "how llm-compressor made the codes"),
    CompanionKind(
        ("*.gguf", "*.pth", "*.pt", "*.onnx", "*.h5", "*.msgpack", "params.json"),
        "stays",
        "the weights in another format",
    ),
    CompanionKind((".*",), "stays", "what Git and the Hub's client keep for themselves"),
)
"""The first whose pattern fits decides. A file that fits none stays behind, and the command says so; so does every
folder whose name has no leading dot, except TEMPLATES and our own."""

_NAMING_CODE = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_CLASS = re.compile(r"[A-Za-z_][\w-]*\.\w+")
"""`modeling_kimi.KimiForCausalLM`: a class in a file of the directory."""
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+\.([\w.]+)[ \t]+import\b|import[ \t]+\.([\w.]+))", re.MULTILINE)
_MOST_CODE = 64
_MAX_CODE_BYTES = 4_000_000
"""Of each file."""


def kind_of(name: str) -> CompanionKind | None:
    """The kind of a file, by its name, in TEMPLATES with that of the folder; None if it is not known."""
    return next((kind for kind in KINDS if kind.has(name)), None)


def is_tokenizer(name: str) -> bool:
    """Whether a file is part of a tokenizer, other than a list of special tokens."""
    return kind_of(name) is TOKENIZER and name not in ("special_tokens_map.json", "added_tokens.json")


def with_tokenizer(own: Companions, apart: Companions) -> Companions:
    """A checkpoint's companions with those of a tokenizer that it has in another directory."""
    files = {name: content for name, content in apart.files.items() if name != "config.json"} | {**own.files}
    code = tuple(sorted({*own.code, *apart.code}))
    return replace(own, files=files, code=code, notes=own.notes + apart.notes)


def needed_hints(hints: Hints, own: Companions) -> Hints:
    """What a checkpoint with its `own` companions takes from a reference. Without a config.json: everything, but not
    the tokenizer if it has one. With a config.json and no tokenizer: the files that it lacks, and no towers. With both:
    nothing. The result's `companions` are those that it then has; None means its own."""
    given = hints.companions
    if given is None or hints.architecture:
        return hints
    if "config.json" not in own.files:
        if not any(map(is_tokenizer, own.files)):
            return hints
        taken = {
            name: content for name, content in given.files.items() if kind_of(name) not in (TOKENIZER, CHAT_TEMPLATE)
        }
        return replace(hints, companions=_over(replace(given, files=taken), own, given.directory))
    if without_tokenizer(own) and not without_tokenizer(given):
        return replace(hints, companions=_over(given, own, own.directory), towers=None)
    return replace(hints, companions=None, towers=None)


def _over(given: Companions, own: Companions, directory: Path) -> Companions:
    """The `given` companions, with a checkpoint's own in their place."""
    return Companions({**given.files, **own.files}, tuple(sorted({*given.code, *own.code})), own.notes, directory)


def without_tokenizer(companions: Companions) -> bool:
    """Whether there is a config.json, and no tokenizer beside it."""
    return "config.json" in companions.files and not any(map(is_tokenizer, companions.files))


def has_own_adapter(directory: Path) -> bool:
    """Whether an adapter of PEFT in a directory is a part of the model beside it, which its class switches
    on for some inputs alone: Granite Speech 3.3's, for sound."""
    if not all((directory / name).is_file() for name in ("config.json", ADAPTER.patterns[0])):
        return False
    with suppress(DamagedCheckpoint):  # reported where the config is needed
        config = read_json(directory / "config.json", directory)
        return config.get("model_type") in _WITH_ADAPTER and config.get("has_lora_adapter", True) is True
    return False


_WITH_ADAPTER = ("granite_speech", "granite_speech_plus")
"""Models whose classes have an adapter unless `has_lora_adapter` is false (5.24 configuration_granite_speech.py)."""


def read_companions(directory: Path, source: Path | None = None) -> Companions:
    """The files in a directory that travel with the model, and the code that they name; empty without a directory. What
    in it is the `source`, or has it, is not left behind.

    Raises DamagedCheckpoint for a link to elsewhere (except those of the hub's cache), for something that is not a
    file, and for files that are too large to hold in memory.
    """
    there = {path.name: path for path in sorted(directory.iterdir())} if directory.is_dir() else {}
    if source:
        converted = Path(os.path.realpath(source))
        there = {name: path for name, path in there.items() if not converted.is_relative_to(os.path.realpath(path))}
    there.pop(sidecar.RELATIVE.parent.name, None)
    if TEMPLATES in there and there[TEMPLATES].is_dir():
        check_link(there[TEMPLATES], directory)
        there |= {f"{TEMPLATES}/{path.name}": path for path in sorted(there.pop(TEMPLATES).iterdir())}
    travelling, left, folders = list[Path](), list[str](), list[str]()
    with_adapter = has_own_adapter(directory)
    for name, path in there.items():
        kind, is_folder = kind_of(name), path.is_dir()
        named_as_folder = is_folder and not path.suffix[1:].isalpha()  # such as `tokenizer/` and `tokenizer_v1.5/`
        travels = kind is not None and (kind.fate == "travels" or (kind is ADAPTER and with_adapter))
        if travels and not named_as_folder:
            travelling.append(path)
        elif is_folder and not name.startswith("."):
            folders.append(f"{name}/")
        elif kind is None:
            left.append(name)
    files = read_files(travelling, directory)
    code = _Code(directory, set(there))
    for name in (name for name in _NAMING_CODE if name in files):
        files[name] = code.with_code(name, files[name])
    notes = [f"Left behind, because nothing here knows what it is: {', '.join(left)}."] if left else []
    if with_adapter:
        notes.append("The adapter beside the model is a part of it: it is not merged, and travels as it is.")
    notes += [f"Folders are left behind: {', '.join(folders)}."] if folders else []
    return Companions(files | code.files, tuple(sorted(code.files)), (*code.notes, *notes), directory)


def write_companions(directory: Path, companions: Companions) -> None:
    """Write the files into a directory, which is created if there are any."""
    for name, content in companions.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@dataclass
class _Code:
    """The Python files of a directory that its configs name in `auto_map`. They are only bytes here and never run.
    Their imports are found by regular expression, as transformers does it (dynamic_module_utils.py,
    get_relative_imports)."""

    directory: Path
    there: set[str]
    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def with_code(self, name: str, content: bytes) -> bytes:
        """Add the code that a config names to `files`. Returns the config, without those entries of `auto_map` whose
        code is not in the directory: with them the result could not be opened."""
        try:
            config = parse_json(content, name)
        except DamagedCheckpoint:  # reported where the config is needed
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
                f"{name} names code of other repositories, {listed(elsewhere)}: whoever opens the result with "
                "trust_remote_code fetches it from the Hub."
            )
        if not gone:
            return content
        self.notes.append(f"Taken out of `auto_map` in {name}, as no such file is in the directory: {listed(gone)}.")
        config["auto_map"] = kept
        if not kept:
            del config["auto_map"]
        return to_json(config)

    def _is_here(self, reference: object) -> bool:
        """Whether a reference is of a class in a file of the directory."""
        return isinstance(reference, str) and bool(_CLASS.fullmatch(reference)) and _file_of(reference) in self.there

    def _add(self, file: str) -> None:
        """Add a file, and the files of the directory that it imports."""
        if file in self.files:
            return
        if len(self.files) == _MOST_CODE:
            what = f"`auto_map` leads to more than {_MOST_CODE} files of code"
            raise DamagedCheckpoint(what, where=self.directory, do="Do not trust it.")
        content = self.files[file] = read_file(self.directory / file, self.directory, _MAX_CODE_BYTES)
        imports = {f"{found[1] or found[2]}.py" for found in _IMPORT.finditer(content.decode(errors="replace"))}
        for imported in sorted(imports & self.there):
            self._add(imported)
        if missing := sorted(imports - self.there):
            self.notes.append(f"{file} imports what is not in the directory: {listed(missing)}.")


def _file_of(reference: str) -> str:
    return f"{reference.partition('.')[0]}.py"


def to_json(value: object) -> bytes:
    """JSON as transformers writes it. Escaped where text cannot be encoded, as half a surrogate pair cannot."""
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(value, indent=2) + "\n").encode()

"""Run by llama.cpp's peer: its converter on wrappers of which files of towers were written.

python mmproj_judge.py FOLDER CASES     JSON: [directory, file, type]; writes answers.json: what differs in each file
"""

import json
import sys
from pathlib import Path
from typing import Any

from conversion import get_model_architecture, get_model_class
from conversion.base import ModelBase, ModelType, gguf


def convert(directory: Path, file: Path, kind: str) -> None:
    settings = ModelBase.load_hparams(directory, False)
    known = get_model_class(get_model_architecture(settings, ModelType.MMPROJ), mmproj=True)
    known(directory, gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"], file, eager=True, hparams=settings).write()


def contents(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata and the tensors of a file, each with its type and its bytes."""
    reader = gguf.GGUFReader(file)
    fields = {
        key: (field.types, b"".join(part.tobytes() for part in field.parts[3:])) for key, field in reader.fields.items()
    }
    tensors = {each.name: (each.tensor_type, each.shape.tolist(), each.data.tobytes()) for each in reader.tensors}
    return {key: field for key, field in fields.items() if not key.startswith("GGUF.")}, tensors


folder = Path(sys.argv[1])
answers = {}
for directory, name, kind in json.loads(sys.argv[2]):
    ours, theirs = folder / name, folder / f"{name}.converted"
    convert(folder / directory, theirs, kind)
    mine, others = contents(ours), contents(theirs)
    answers[name] = {
        "bytes": ours.read_bytes() == theirs.read_bytes(),
        "otherwise": sorted(
            key
            for one, two in zip(mine, others, strict=True)
            for key in one.keys() | two.keys()
            if one.get(key) != two.get(key)
        ),
    }
Path(folder, "answers.json").write_text(json.dumps(answers))

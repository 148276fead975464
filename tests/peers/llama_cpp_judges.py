"""Run by llama.cpp's peer: its converter on the directories of which files were written, and what it makes of these.

python llama_cpp_judges.py FOLDER CASES     JSON: [directory, file, type, pre-tokenizer]; prints JSON for each case
"""

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from conversion.base import ModelBase, gguf
from gguf_convert import as_published, converter
from gguf_tokenizers import MARKED, TEXT
from safetensors.numpy import save_file

IDS = np.random.default_rng(0).integers(3, 300, 64).tolist()


def convert(directory: Path, file: Path, kind: str, pre: str) -> None:
    """The pre-tokenizer is given: the converter knows those of published vocabularies alone, by hashes of their ids. So
    is that a SentencePiece model is read of tokenizer.json, for which it looks in Llamas alone."""
    settings = as_published(ModelBase.load_hparams(directory, False))
    known = converter(settings)
    given: dict[str, Any] = {"model_arch": known.model_arch, "get_vocab_base_pre": lambda self, tokenizer: pre}
    given["no_mtp"] = not settings.get("num_nextn_predict_layers")
    own = {"Phi3MiniModel"}  # Phi-4's tokenizer, which it knows by the name of a class
    # which ask for a setting, for the code, and for a kind of tokenizer, of the release
    own |= {"DeepseekV32Model", "HunYuanMoEModel", "JambaModel"}
    if known.__name__ in own:
        given["set_vocab"] = known._set_vocab_gpt2
    if pre.startswith("sentencepiece"):
        given |= dict.fromkeys(("_set_vocab_sentencepiece", "_set_vocab_gpt2"), known._set_vocab_llama_hf)
    made = type(known.__name__, (known,), given)
    made(directory, gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"], file, eager=True, hparams=settings).write()


def metadata(reader: Any) -> dict[str, Any]:
    """The type and the bytes of each value."""
    return {
        key: (field.types, b"".join(part.tobytes() for part in field.parts[3:]))
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    }


def differences(ours: Path, theirs: Path) -> dict[str, Any]:
    mine, other = gguf.GGUFReader(ours), gguf.GGUFReader(theirs)
    a, b = metadata(mine), metadata(other)
    tensors = [
        [(t.name, t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in each.tensors] for each in (mine, other)
    ]
    return {
        "metadata": sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key)),
        "order": [key for key in a if key in b] == [key for key in b if key in a],
        "tensors": [one[0] for one, two in zip(*tensors, strict=True) if one != two],
        "bytes": ours.read_bytes() == theirs.read_bytes(),
    }


def betas(file: Path) -> dict[str, float]:
    """Those of YaRN that a file says, which the printed command gives as options; -1 is what llama.cpp takes."""
    fields = gguf.GGUFReader(file).fields
    named = {key: f"rope.scaling.{key}" for key in ("yarn_beta_fast", "yarn_beta_slow")}
    said = {key: [field for name, field in fields.items() if name.endswith(end)] for key, end in named.items()}
    return {key: float(found[0].contents()) if found else -1.0 for key, found in said.items()}


def tokens_and_logits(file: Path) -> dict[str, list[int]]:
    """The ids of TEXT and of MARKED. Logits after IDS are saved beside the file."""
    as_the_file_says = {"yarn_attn_factor": -1.0, **betas(file)}
    options = {"n_ctx": 128, "logits_all": True, "verbose": False, "n_threads": 1, "n_gpu_layers": 0}
    model = llama_cpp.Llama(str(file), **options, **as_the_file_says)
    model.eval(IDS)
    save_file({"logits": np.array(model.scores[: len(IDS)], np.float32)}, file.with_suffix(".safetensors"))
    tokens = {text: model.tokenize(text.encode(), add_bos=True, special=True) for text in (TEXT, MARKED)}
    model.close()
    return tokens


folder = Path(sys.argv[1])
answers = {}
for directory, file, kind, pre in json.loads(sys.argv[2]):
    theirs = folder / f"{file}.converted"
    convert(folder / directory, theirs, kind, pre)
    answers[file] = differences(folder / file, theirs) | {"tokens": tokens_and_logits(folder / file)}
Path(folder, "answers.json").write_text(json.dumps({"ids": IDS, "files": answers}))

"""Run by llama.cpp's peer: llama-quantize, of files of values.

python llama_quantize.py FOLDER CASES     JSON: [file of values, file of codes, type]; prints JSON: the tensors, and the
keys, that are otherwise in the file of codes than llama.cpp makes them, and whether all bytes are the same
"""

import json
import sys
from pathlib import Path

import llama_cpp
from gguf import GGUFReader

folder = Path(sys.argv[1])
answers = {}
for values, codes, kind in json.loads(sys.argv[2]):
    made = folder / f"{codes}.quantized"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), 1
    failed = llama_cpp.llama_model_quantize(bytes(folder / values), bytes(made), params)
    assert not failed, (values, kind)
    ours, theirs = ([*GGUFReader(file).tensors] for file in (folder / codes, made))
    keys = [[*GGUFReader(file).fields] for file in (folder / codes, made)]
    described = [
        {t.name: (t.tensor_type.name, t.shape.tolist(), t.data.tobytes()) for t in tensors}
        for tensors in (ours, theirs)
    ]
    differing = {
        name: [[*each[name][:2]] if name in each else None for each in described]
        for name in described[0] | described[1]
        if described[0].get(name) != described[1].get(name)
    }
    answers[codes] = {
        "tensors": differing,
        "order": [t.name for t in ours] == [t.name for t in theirs],
        "keys": keys[0] == keys[1],
        "types": sorted({t.tensor_type.name for t in theirs}),
        "same": (folder / codes).read_bytes() == made.read_bytes(),
    }
    made.unlink()
print(json.dumps(answers))

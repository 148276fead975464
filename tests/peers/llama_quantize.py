"""Run by llama.cpp's peer: llama-quantize, of files of values.

python llama_quantize.py FOLDER CASES     JSON: [file of values, file of codes, mixture]; prints JSON for each file of
codes: the tensors that llama.cpp makes otherwise, the types of its tensors, and whether all bytes are the same
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
    described = [
        {each.name: (each.tensor_type.name, each.data.tobytes()) for each in GGUFReader(file).tensors}
        for file in (folder / codes, made)
    ]
    differing = [name for name, tensor in described[1].items() if described[0].get(name) != tensor]
    types = {name: type_ for name, (type_, _) in described[1].items()}
    same = (folder / codes).read_bytes() == made.read_bytes()
    answers[codes] = {"tensors": differing, "types": types, "same": same}
    made.unlink()
print(json.dumps(answers))

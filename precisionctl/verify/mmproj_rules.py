"""A file of towers, `mmproj`, held against what llama.cpp's loader of such files asks of one, and against the text
model beside it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from precisionctl.checkpoints.gguf.head import GgufHead
from precisionctl.checkpoints.gguf.reader import GgufReader
from precisionctl.checkpoints.gguf.towers.mmproj_file import read_mmproj
from precisionctl.engines.rules.rule import EngineRule, Finding
from precisionctl.errors import shown
from precisionctl.sizes import listed

_KEYS = EngineRule("it asks for each key, and reads it as one type", "llama.cpp tools/mtmd/clip.cpp load_hparams")
_GRAPH = EngineRule("its graph of the projector takes them", "llama.cpp tools/mtmd/clip.cpp load_tensors")
_WIDTH = EngineRule("towers give what the text model beside them takes", "llama.cpp tools/mtmd/mtmd.cpp")
_UNKNOWN = EngineRule("a graph follows from it", "llama.cpp tools/mtmd/clip-impl.h", fatal=False)

_OF_ALL = {
    **dict.fromkeys(
        ("embedding_length", "attention.head_count", "feed_forward_length", "block_count", "projection_dim"), "uint32"
    ),
    "attention.layer_norm_epsilon": "float32",
}
_MORE = {
    "vision": {
        **dict.fromkeys(("image_size", "patch_size"), "uint32"),
        **dict.fromkeys(("image_mean", "image_std"), "list of float32"),
    },
    "audio": {"num_mel_bins": "uint32"},
}
"""The keys that a tower must have, each with its type; beside those that all have."""
_IN_LAYERS = ("attn_out.weight", "ffn_up.weight", "ffn_down.weight")
_QUERIES_KEYS_VALUES = (("attn_qkv.weight",), ("attn_q.weight", "attn_k.weight", "attn_v.weight"))
"""Of which a layer has the one or the others."""


@dataclass(frozen=True)
class _Projector:
    """The tensors that a graph takes outside of layers, and the one whose `dimension` is as wide as hidden states of
    the text model."""

    tensors: Sequence[str]
    last: str
    dimension: int = 0


def _linears(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{end}" for name in names for end in ("weight", "bias"))


_TWO_FRAMES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
_OF_QWEN = _Projector((*_TWO_FRAMES, *_linears("mm.0", "mm.2")), "mm.2.bias")
_PROJECTORS: Mapping[str, _Projector] = {
    **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger"), _OF_QWEN),
    "qwen3vl_merger": _Projector((*_OF_QWEN.tensors, "v.patch_embd.bias", "v.position_embd.weight"), "mm.2.bias"),
    "gemma3": _Projector(
        ("v.patch_embd.weight", "v.position_embd.weight", "mm.input_projection.weight", "mm.soft_emb_norm.weight"),
        "mm.input_projection.weight",
        1,
    ),
    "gemma4v": _Projector(
        ("v.patch_embd.weight", "v.position_embd.weight", "mm.input_projection.weight"), "mm.input_projection.weight"
    ),
    "gemma4a": _Projector(
        tuple(f"a.conv1d.{number}{of}.weight" for number in (0, 1) for of in ("", ".norm"))
        + ("a.input_projection.weight", "mm.a.input_projection.weight"),
        "mm.a.input_projection.weight",
    ),
    "pixtral": _Projector(
        ("v.patch_embd.weight", "mm.1.weight", "mm.2.weight", "v.token_embd.img_break"), "mm.2.weight"
    ),
    "internvl": _Projector(
        (
            *("v.patch_embd.weight", "v.position_embd.weight", "v.class_embd"),
            *_linears("mm.model.mlp.0", "mm.model.mlp.1", "mm.model.mlp.3"),
        ),
        "mm.model.mlp.3.weight",
    ),
    "llama4": _Projector(
        (
            *("v.patch_embd.weight", "v.position_embd.weight", "v.class_embd"),
            *("mm.model.mlp.1.weight", "mm.model.mlp.2.weight", "mm.model.fc.weight"),
        ),
        "mm.model.fc.weight",
    ),
    "kimik25": _Projector(
        ("v.patch_embd.weight", "v.position_embd.weight", *_linears("mm.input_norm", "mm.1", "mm.2")), "mm.2.weight"
    ),
    "step3vl": _Projector(
        ("v.patch_embd.weight", "v.position_embd.weight", "mm.0.weight", "mm.1.weight", "mm.model.fc.weight"),
        "mm.model.fc.weight",
    ),
    "glm4v": _Projector(
        (
            *(*_TWO_FRAMES, "v.patch_embd.bias", "mm.model.fc.weight", "mm.post_norm.weight"),
            *("mm.up.weight", "mm.gate.weight", "mm.down.weight", *_linears("mm.patch_merger")),
        ),
        "mm.down.weight",
    ),
}


def check_mmproj(reader: GgufReader, path: Path) -> Iterator[Finding]:
    """The rules that a file of towers beside a model breaks. Raises as `read_mmproj`."""
    head = read_mmproj(path)
    modalities = [each for each in _MORE if head.metadata.get(f"clip.has_{each}_encoder") is True]
    if not modalities:
        yield Finding(f"{path.name}: clip.has_vision_encoder", "no tower of images or of sound is said", _KEYS)
    for modality in modalities:
        for where, what, rule in _tower(head, modality, reader):
            yield Finding(f"{path.name}: {where}", what, rule)


def _tower(head: GgufHead, modality: str, reader: GgufReader) -> Iterator[tuple[str, str, EngineRule]]:
    said = head.metadata
    for key, kind in {**_OF_ALL, **_MORE[modality]}.items():
        name = f"clip.{modality}.{key}"
        if (found := head.types.get(name, "not there")) != kind:
            yield name, f"{found}, not {kind}", _KEYS

    of_all, own = "clip.projector_type", f"clip.{modality}.projector_type"
    where = of_all if said.get(of_all) else own
    named = said.get(where)
    projector = _PROJECTORS.get(named) if isinstance(named, str) else None
    if not isinstance(named, str):
        yield where, f"{shown(named)}, where a graph is named", _KEYS
    elif projector is None:
        yield where, f"{shown(named)}, of which nothing is known here", _UNKNOWN

    layers = said.get(f"clip.{modality}.block_count")
    if type(layers) is not int or layers > len(head.tensors):
        yield f"clip.{modality}.block_count", f"{shown(layers)}, beside {len(head.tensors)} tensors", _GRAPH
    else:
        wanted: list[str] = []
        for layer in range(layers):
            block = f"{modality[0]}.blk.{layer}"
            joined, apart = ([f"{block}.{name}" for name in names] for names in _QUERIES_KEYS_VALUES)
            wanted += joined if joined[0] in head.tensors else apart
            wanted += (f"{block}.{name}" for name in _IN_LAYERS)
        wanted += projector.tensors if projector else ()
        if missing := [name for name in wanted if name not in head.tensors]:
            yield missing[0], f"not there: {listed(missing)}", _GRAPH

    # results must be as wide as hidden states, and as many as the text model adds in its layers
    if projector and projector.last in head.tensors:
        shape, hidden = head.tensors[projector.last].shape, reader.model.hidden_size
        if len(shape) <= projector.dimension or shape[projector.dimension] != hidden:
            yield projector.last, f"{list(shape)}, beside hidden states of {hidden} in the text model", _WIDTH
        architecture = reader.metadata.get("general.architecture")
        taken = reader.metadata.get(f"{architecture}.n_deepstack_layers", 0)
        deep = sum(name.startswith("v.deepstack.") and name.endswith(".fc1.weight") for name in head.tensors)
        if taken != deep:
            yield "v.deepstack", f"of {deep} layers, and the text model takes those of {shown(taken)}", _WIDTH

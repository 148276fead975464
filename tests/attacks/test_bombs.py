"""A few hundred bytes that ask for gigabytes, or for centuries: refused at once, whichever file they are in."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import pico
import torch
from pickle_bombs import HASHES, PAIRS, SHARED, archived, called, constant, detonate, list_of, pickled

from precisionctl.untrusted.pickle_writer import Global, PersistentId, PickledObject, dumps

RECIPES = "transformer_engine.common.recipe"


def again_and_again(opcodes: bytes, parts: bytes, step: bytes, times: int) -> bytes:
    """Opcodes that put two things into the memo, as 0 and 1, and then copy: two bytes fetch what has any size."""
    return opcodes + b"q\0" + parts + b"q\1" + pickle.EMPTY_LIST + pickle.MARK + step * times + pickle.APPENDS


CALL, STATE = b"h\0h\1R", b"h\0)\x81h\1b"
MANY = pickle.MARK + pickle.NONE * (1 << 18) + pickle.TUPLE
TABLE = pickle.EMPTY_DICT + pickle.MARK + b"".join(constant(f"{i}") + pickle.NONE for i in range(1 << 14))
COPIES: Mapping[str, bytes] = {
    "a tuple as a key": pickle.MARK
    + constant("x") * 50_000
    + pickle.TUPLE
    + b"q\0"
    + pickle.EMPTY_DICT
    + b"h\0Ns" * 100_000,
    "equal texts as keys": constant("x" * (4 << 20))
    + b"q\0"
    + constant("x" * (4 << 20))
    + b"q\1"
    + pickle.EMPTY_DICT
    + b"h\0Ns"
    + b"h\1Ns" * 100_000,
    "sets": pickle.EMPTY_SET * (2 << 20),
    "arguments": again_and_again(pickle.GLOBAL + b"megatron.core\nAny\n", MANY, CALL, 400),
    "arguments that are a table": again_and_again(
        pickle.GLOBAL + b"megatron.core\nAny\n", TABLE + pickle.SETITEMS, CALL, 4000
    ),
}
OBJECT_COPIES: Mapping[str, bytes] = COPIES | {
    "attributes": again_and_again(
        pickle.GLOBAL + b"argparse\nNamespace\n", TABLE + pickle.SETITEMS, STATE, 1000
    ),
    "text": again_and_again(
        pickle.GLOBAL + b"_codecs\nencode\n", constant("a" * (1 << 18)) + constant("latin1") + pickle.TUPLE2, CALL, 4000
    ),
    "a file": again_and_again(
        pickle.GLOBAL + b"_io\nBytesIO\n", constant((b"a" * (1 << 18), 0, None)), STATE, 4000
    ),
    "a set": again_and_again(
        pickle.GLOBAL + b"__builtin__\nset\n",
        pickle.EMPTY_LIST + pickle.MARK + b"".join(map(constant, range(1 << 15))) + pickle.APPENDS + pickle.TUPLE1,
        CALL,
        1000,
    ),
    "a storage's reference": again_and_again(pickle.NONE, MANY, b"h\1Q", 60000),
}  # fmt: skip


def written(directory: Path, contents: Mapping[str, bytes]) -> list[Path]:
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return [directory / name for name in contents]


def test_metadata(tmp_path: Path) -> None:
    torch_size = "torch", "Size"
    metadata = "torch.distributed.checkpoint.metadata"

    def index(**fields: bytes) -> bytes:
        """An index with one file's place in it, of which `fields` are something else."""
        place = {"fqn": constant("x"), "offset": constant(None), "relative_path": constant("x"), "length": constant(1)}
        state = {name: fields.get(name, value) for name, value in place.items()}
        return build("Metadata", state_dict_metadata=pickle.EMPTY_DICT, storage_data=one(state))

    def build(name: str, **state: bytes) -> bytes:
        items = b"".join(constant(key) + value for key, value in state.items())
        made = called("torch.distributed.checkpoint.filesystem" if name == "_StorageInfo" else metadata, name)
        return made + pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS + pickle.BUILD

    def one(state: Mapping[str, bytes]) -> bytes:
        key = build("MetadataIndex", fqn=state["fqn"], offset=state["offset"])
        return pickle.EMPTY_DICT + key + pickle.NONE + pickle.SETITEM

    def pieces(tensors: int, each: int) -> bytes:
        """An index of tensors that all have the same list of pieces, in which one piece is again and again."""
        chunk = build("ChunkStorageMetadata", offsets=constant((0,)), sizes=constant((1,)))
        size, chunks = constant((1,)), pickle.EMPTY_LIST + chunk + b"q\0" + pickle.APPEND
        chunks += pickle.MARK + b"h\0" * each + pickle.APPENDS
        dtype = pickle.MARK + global_("torch", "float32") + pickle.TUPLE
        properties = called(metadata, "TensorProperties") + dtype + pickle.BUILD
        entry = build("TensorStorageMetadata", properties=properties, size=size, chunks=chunks) + b"q\1"
        place = build("_StorageInfo", relative_path=constant("x"), offset=constant(0), length=constant(4)) + b"q\2"
        described = placed = pickle.EMPTY_DICT + pickle.MARK
        for key in map(constant, map(str, range(tensors))):
            described += key + entry
            placed += called(metadata, "MetadataIndex", key, constant((0,))) + place
            entry, place = b"h\1", b"h\2"
        found = {"state_dict_metadata": described + pickle.SETITEMS, "storage_data": placed + pickle.SETITEMS}
        return build("Metadata", **found)

    entry = build("BytesStorageMetadata")
    bombs = {
        **HASHES,
        **COPIES,
        "pieces of many tensors": pieces(4_000, 40_000),
        "a layout": called("torch.serialization", "_get_layout", SHARED),
        "a size": called(*torch_size, SHARED),
        "a place's name": index(fqn=SHARED),
        "a place's offset": index(offset=SHARED),
        "a tensor's name": build(
            "Metadata",
            state_dict_metadata=pickle.EMPTY_DICT + pickle.NONE + entry + pickle.SETITEM,
            storage_data=one({"fqn": SHARED, "offset": pickle.NONE}),
        ),
    }
    paths = []
    for name, content in bombs.items():
        (tmp_path / name).mkdir()
        paths += written(tmp_path / name, {".metadata": pickled(content), "x": bytes(4)})[:1]
    said = detonate("metadata", [path.parent for path in paths])
    assert "over and over" in said[str(tmp_path / "pieces of many tensors")]


def test_extra_state(tmp_path: Path) -> None:
    hooks = PickledObject(Global("collections", "OrderedDict"), ())
    system = dumps({"little_endian": True}, protocol=2)
    magic = torch.ones(1).__reduce_ex__(2)[1][0].__reduce__()[1][0].partition(b".")[0] + b"."

    def payload(*pickles: bytes) -> bytes:
        """FP8 state with a storage of these, after the usual two."""
        storage = PickledObject(
            Global("torch.storage", "_load_from_bytes"), (magic + dumps(1001) + system + b"".join(pickles),)
        )
        tensor = PickledObject(Global("torch._utils", "_rebuild_tensor_v2"), (storage, 0, (3,), (1,), False, hooks))
        recipe = PickledObject(Global(RECIPES, "DelayedScaling"), (), new=True, fields={})
        return dumps({"recipe": recipe, "extra_fp8_variables": {"num_gemms": 1}, "scale_fwd": tensor})

    reference = PersistentId(("storage", Global("torch", "FloatStorage"), "0", "cpu", 1 << 28, None))
    recipe = called(RECIPES, "DelayedScaling") + PAIRS + pickle.BUILD
    bombs = {name: pickled(content) for name, content in HASHES.items()} | {
        f"a storage of {name}": payload(pickled(content)) for name, content in HASHES.items()
    }
    bombs |= {
        "a storage that is not there": payload(dumps(reference, 2), dumps(["0"], 2), (1 << 28).to_bytes(8, "little")),
        "a recipe's fields": pickled(pickle.EMPTY_DICT, constant("scale_fwd"), recipe, pickle.SETITEM),
    }
    detonate("extra state", written(tmp_path, bombs))


def tensor(size: bytes, stride: bytes, key: bytes = constant("0")) -> bytes:
    storage = constant("storage") + pickle.GLOBAL + b"torch\nFloatStorage\n" + key + constant("cpu") + constant(3)
    reference = pickle.MARK + storage + pickle.TUPLE + pickle.BINPERSID
    return called("torch._utils", "_rebuild_tensor_v2", reference, constant(0), size, stride)


TENSORS: Mapping[str, bytes] = {
    "sizes of tuples": tensor(SHARED, SHARED),
    "a size that repeats a word": tensor(constant(("a" * 99, 1 << 30)), constant((1, 1))),
    "gigabytes by strides of zero": tensor(constant((1 << 30, 3)), constant((0, 1))),
    "a storage's name": tensor(constant((3,)), constant((1,)), key=SHARED),
    "a tensor that grows": tensor(constant((3,)), constant((1,)))
    + pickle.MARK + tensor(constant((3,)), constant((1,))) + constant(0) + constant((1 << 28,)) + constant((1,))
    + pickle.TUPLE + pickle.BUILD,
}  # fmt: skip


def global_(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def with_attributes(rebuild: str, arguments: bytes, state: bytes) -> bytes:
    """Opcodes that make 40,000 tensors from the same arguments, which lie too deep to be counted."""
    parts = pickle.MARK + global_("torch._utils", rebuild) + pickle.NONE + arguments + state + pickle.TUPLE
    return again_and_again(global_("torch._tensor", "_rebuild_from_type_v2"), parts, CALL, 40_000)


ONES = constant((1,) * 100_000)
STORAGE = pickle.MARK + constant("storage") + global_("torch", "FloatStorage") + constant("0") + constant("cpu")
DIMENSIONS = with_attributes(
    "_rebuild_tensor_v2",
    pickle.MARK + STORAGE + constant(3) + pickle.TUPLE + pickle.BINPERSID + constant(0) + ONES + ONES + pickle.TUPLE,
    pickle.NONE,
)
PLACED = called("torch.distributed.tensor.placement_types", "Replicate")
SPEC = (
    called("torch.distributed.tensor._dtensor_spec", "DTensorSpec") + pickle.EMPTY_DICT + constant("placements")
    + pickle.MARK + PLACED * 20_000 + pickle.TUPLE + pickle.SETITEM + pickle.BUILD
)  # fmt: skip
PLACEMENTS = with_attributes(
    "_rebuild_wrapper_subclass",
    constant((None, None, (3,))),
    pickle.MARK + pickle.NONE + pickle.EMPTY_DICT + pickle.MARK + constant("_spec") + SPEC + constant("_local_tensor")
    + pickle.NONE + pickle.SETITEMS + pickle.TUPLE,
)  # fmt: skip
LARGE, LATER = 1 << 62, 1 << 61
STRIDES = again_and_again(
    global_("torch._utils", "_rebuild_tensor_v2"),
    pickle.MARK + STORAGE + constant(3) + pickle.TUPLE + pickle.BINPERSID + constant(0)
    + constant((LARGE,) * 63 + (0,)) + constant((LATER,) * 64) + pickle.TUPLE,
    CALL,
    200_000,
)  # fmt: skip


def test_objects(tmp_path: Path) -> None:
    bombs = {
        name: archived(pickled(content))
        for name, content in (HASHES | TENSORS | OBJECT_COPIES | {"dimensions": DIMENSIONS}).items()
    }
    detonate("object", written(tmp_path, bombs))


def test_tensors(tmp_path: Path) -> None:
    bombs = {name: archived(pickled(content)) for name, content in (HASHES | TENSORS).items()}
    detonate("tensor", written(tmp_path, bombs))


def test_skeletons(tmp_path: Path) -> None:
    content = {name: content for name, content in TENSORS.items() if "strides of zero" not in name}  # asks for nothing
    content["a tensor that moves"] = tensor(constant((3,)), constant((1,))) + constant({"offset": 1 << 60})
    content["a tensor that moves"] += pickle.BUILD
    bombs = {name: archived(pickled(bomb)) for name, bomb in (HASHES | content | OBJECT_COPIES).items()}
    bombs |= {"placements": archived(pickled(PLACEMENTS)), "strides": archived(pickled(STRIDES))}
    detonate("skeleton", written(tmp_path, bombs))


def test_ranks(tmp_path: Path) -> None:
    """A rank's file of a Megatron `torch` checkpoint: whatever part of it is a bomb."""
    good = {"x": tensor(constant((3,)), constant((1,)))}
    args = pickle.GLOBAL + b"argparse\nNamespace\n" + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    groups = constant("param_groups") + list_of(SHARED)

    def table(**entries: bytes) -> bytes:
        items = b"".join(constant(key) + value for key, value in entries.items())
        return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS

    bombs = {
        "a tensor": table(model=table(x=SHARED)),
        "a name": table(model=pickle.EMPTY_DICT + SHARED + good["x"] + pickle.SETITEM),
        "a model": table(model=SHARED),
        "sizes of ranks": table(
            model=table(**good), args=args + table(tensor_model_parallel_size=SHARED) + pickle.BUILD
        ),
        "an optimizer": table(
            model=table(**good), optimizer=pickle.EMPTY_DICT + pickle.MARK + groups + pickle.SETITEMS
        ),
        "a number of 6000 digits as a size": table(
            model=table(**good), args=args + table(pipeline_model_parallel_size=constant(10**6000)) + pickle.BUILD
        ),
        "an iteration": table(model=table(**good), iteration=SHARED),
        "an extra state": table(model=table(**good, **{"y._extra_state": SHARED})),
        "many layers": table(model=table(**{f"decoder.layers.{i}.x": good["x"] for i in (0, 999_999_999)})),
    }
    for name, bomb in bombs.items():
        (tmp_path / name / "mp_rank_00").mkdir(parents=True)
        (tmp_path / name / "mp_rank_00" / "model_optim_rng.pt").write_bytes(archived(pickled(bomb)))
    detonate("ranks", [tmp_path / name for name in bombs])


def test_sizes_in_a_config_are_compared_before_anything_is_made_as_large(tmp_path: Path) -> None:
    config = pico.make_and_save(tmp_path, dtype=torch.bfloat16).config.to_dict()
    claims = {"head_dim": 1 << 28, "vocab_size": 1 << 30, "intermediate_size": 1 << 30}
    for key, size in claims.items():
        (tmp_path / key).mkdir()
        (tmp_path / key / "model.safetensors").hardlink_to(tmp_path / "model.safetensors")
        (tmp_path / key / "config.json").write_text(json.dumps(config | {key: size}))
    detonate("config", [tmp_path / key for key in claims])

"""Coverage-guided fuzzing of what reads strangers' bytes: fuzz_readers.py TARGET CORPUS [libFuzzer's options].

Runs where atheris is installed beside our own packages. CORPUS gets seeds from our own writers and keeps what
libFuzzer finds, so that the next run goes on from there. A run ends with the first input that
does anything but return or raise a PrecisionctlError, or takes too much time or memory.
"""

import io
import json
import os
import resource
import struct
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import atheris
import deepspeed_files
import nemo_files
import safetensors
import torch
import verl_files

sys.modules.pop("pickle")  # imported again below, instrumented: opcodes are half of what there is to cover
with atheris.instrument_imports(include=["pickle", "precisionctl"]):
    from precisionctl.checkpoints.adapter import lora_config
    from precisionctl.checkpoints.base import NO_HINTS, Companions, WithOptimizer
    from precisionctl.checkpoints.chunks import read_tensor
    from precisionctl.checkpoints.dcp.dcp_model import DcpModelReader
    from precisionctl.checkpoints.dcp.dcp_writer import DcpWriter
    from precisionctl.checkpoints.deepspeed.reader import DeepSpeedReader
    from precisionctl.checkpoints.hf_directory import safetensors_file
    from precisionctl.checkpoints.nemo.reader import open_nemo
    from precisionctl.checkpoints.other_trainers.numbered_optimizer import NumberedOptimizer
    from precisionctl.checkpoints.other_trainers.saved_states import SavedStatesReader
    from precisionctl.checkpoints.other_trainers.trainer_run import TrainerRun
    from precisionctl.checkpoints.torch_files import dcp_metadata, torch_zip
    from precisionctl.checkpoints.torch_files.torch_zip import Span
    from precisionctl.checkpoints.verl import VerlReader
    from precisionctl.dtypes import DType
    from precisionctl.errors import PrecisionctlError
    from precisionctl.fp8 import extra_state, te_pickle
    from precisionctl.fp8.extra_state_writer import encode_payload
    from precisionctl.fp8.state import (
        ATTENTION_BACKWARD,
        ATTENTION_FORWARD,
        BACKWARD,
        FORWARD,
        DelayedScaling,
        Fp8State,
        RoleState,
    )
    from precisionctl.param import TensorSpec
    from precisionctl.untrusted.pickle_writer import Global, PersistentId, PickledObject, dumps

GOLDEN = Path(__file__).parents[1] / "golden" / "te"
SECONDS = 2
"""Of the CPU, for one input."""
MEGABYTES = 64
"""More than before, for one input."""


def payload(data: bytes) -> None:
    read = extra_state.read_payload(data, "a payload")
    for order in ("role", "gemm") if read else ():
        try:
            state = read.state("a payload") if read.gemms in (1, 3) else read.group(order, "a payload")
        except PrecisionctlError:
            continue
        again = extra_state.decode_payload(
            encode_payload(state, read.recipe), "our own", of_group=read.gemms not in (1, 3)
        )
        assert again is not None and again[0] == read.recipe, "what is understood can be written and read again"


def archived(data: bytes) -> None:
    """A payload of TE 1.x: an archive of torch.save with this pickle in it. What is damaged as an archive would not get
    past its checksums."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for number in range(2):
            archive.writestr(f"archive/data/{number}", struct.pack("<6f", *[1.0] * 6))
    payload(buffer.getvalue())


def payload_seeds() -> Iterator[bytes]:
    yield from (path.read_bytes() for path in sorted(GOLDEN.iterdir()))
    for length, most in ((1, "most_recent"), (3, "max")):
        recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=most)
        one = RoleState(torch.ones(()), torch.ones(length))
        group = RoleState(torch.ones(2), torch.ones(2, length))
        for te in (1, 2):
            yield encode_payload(Fp8State({role: one for role in FORWARD + BACKWARD}), recipe, te)
            yield encode_payload(Fp8State({role: group for role in FORWARD + BACKWARD}), recipe, te)
            yield encode_payload(Fp8State({role: one for role in ATTENTION_FORWARD + ATTENTION_BACKWARD}), recipe, te)


def archived_seeds() -> Iterator[bytes]:
    """Payloads of TE 1.x and 0.x: tables and lists of tensors that are views of two storages."""
    hooks = PickledObject(Global("collections", "OrderedDict"), ())

    def tensor(key: str, size: tuple[int, ...], stride: tuple[int, ...]) -> PickledObject:
        storage = PersistentId(("storage", Global("torch", "FloatStorage"), key, "cpu", 6))
        return PickledObject(Global("torch._utils", "_rebuild_tensor_v2"), (storage, 0, size, stride, False, hooks))

    columns = {
        "scale_fwd": tensor("0", (3,), (1,)),
        "scale_bwd": tensor("1", (2,), (1,)),
        "amax_history_fwd": tensor("0", (2, 3), (3, 1)),
        "amax_history_bwd": tensor("1", (2, 2), (2, 1)),
    }
    extra = {"extra_fp8_variables": {"num_gemms": 1, "fp8_max_fwd": 448.0, "fp8_max_bwd": 57344.0}}
    yield dumps(columns | extra, 2)
    yield dumps(columns, 2)
    yield dumps({"forward": columns, "backward": columns}, 2)
    yield dumps([*columns.values(), *range(6)], 2)


class Index:
    """A directory with a `.metadata` that changes and one file beside it."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm"))
        (self.directory / "__0_0.distcp").write_bytes(bytes(256))
        self.file = os.open(self.directory / dcp_metadata.FILE, os.O_RDWR | os.O_CREAT)

    def __call__(self, data: bytes) -> None:
        rewrite(self.file, data)
        dcp_metadata.read_index(self.directory)


def index_seeds() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        whole = Span(Path(folder) / "__0_0.distcp", 0, 64)
        rest = Span(Path(folder) / "__0_0.distcp", 64, 64)
        halves = (dcp_metadata.DcpPiece((0, 0), (2, 4), whole), dcp_metadata.DcpPiece((2, 0), (2, 4), rest))
        tensors = {
            "a": dcp_metadata.DcpTensor((4, 4), DType.float32, halves),
            "b": dcp_metadata.DcpTensor((3,), DType.bfloat16, (dcp_metadata.DcpPiece((0,), (3,), rest),)),
        }
        for index in (
            dcp_metadata.Index(tensors, {"c": rest}),
            dcp_metadata.Index({"b": tensors["b"]}, {}),
            dcp_metadata.Index({}, {"c": whole}),
        ):
            dcp_metadata.write_index(Path(folder), index)
            yield (Path(folder) / dcp_metadata.FILE).read_bytes()
    yield from (path.read_bytes() for path in sorted(GOLDEN.iterdir()) if path.stat().st_size < 700)


class RankFiles:
    """Directories of files by rank, of one rank each: the pickle of one file changes, and the first byte says of which
    file the rest is."""

    def __init__(self, save: Callable[[Path], list[Path]], read: Callable[[Path], SavedStatesReader]) -> None:
        self.saved = {path: path.read_bytes() for path in save(Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm")))}
        self.read = read

    def __call__(self, data: bytes) -> None:
        path = [*self.saved][data[0] % len(self.saved)] if data else [*self.saved][0]
        try:
            path.write_bytes(with_pickle(self.saved[path], data[1:]))
            reader = self.read(path.parent)
            source = WithOptimizer(reader)
            for name in source.specs:
                read_tensor(source, name)
            _ = reader.iteration, reader.trainer_run
        finally:
            path.write_bytes(self.saved[path])


def little_states() -> dict[str, dict[str, torch.Tensor]]:
    return deepspeed_files.states_of({"a": torch.ones(5, 3), "b": torch.ones(7)})


def deepspeed_states() -> RankFiles:
    def save(root: Path) -> list[Path]:
        directories = [deepspeed_files.save(root / str(stage), little_states(), stage, 1) for stage in (1, 3)]
        without = root / "0" / "mp_rank_00_model_states.pt"
        without.parent.mkdir()
        torch.save(deepspeed_files.without_zero(little_states()), without)
        return [without, *(path for one in directories for path in sorted(one.glob("*_states.pt")))]

    return RankFiles(save, DeepSpeedReader)


def verl_ranks() -> RankFiles:
    def save(root: Path) -> list[Path]:
        states = little_states()
        sets = [verl_files.save(root / str(at), states["fp32"], states, 1, units=one) for at, one in enumerate(UNITS)]
        return [path for one in sets for path in sorted(one.glob("[mo]*.pt"))]

    return RankFiles(save, VerlReader)


UNITS = ((), (("a", "b"),))
"""Of FSDP 2, and of FSDP 1 without layers."""


def rank_file_seeds(files: Callable[[], RankFiles]) -> Iterator[bytes]:
    for number, saved in enumerate(files().saved.values()):
        with zipfile.ZipFile(io.BytesIO(saved)) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            yield bytes([number]) + archive.read(pickled)


def with_pickle(saved: bytes, pickled: bytes) -> bytes:
    """An archive of torch.save with another pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved)) as before, zipfile.ZipFile(buffer, "w") as after:
        for name in before.namelist():
            after.writestr(name, pickled if name.endswith("/data.pkl") else before.read(name))
    return buffer.getvalue()


def little_dcp(directory: Path) -> Path:
    """A checkpoint of two weights with their moments; its `.metadata`."""
    specs = {"a.weight": TensorSpec((4, 3), DType.float32), "b.experts.down_proj[0]": TensorSpec((2, 2), DType.float32)}
    kinds = ("exp_avg", "exp_avg_sq")
    specs |= {f"optimizer.state.{kind}.{name}": spec for kind in kinds for name, spec in specs.items()}
    writer = DcpWriter(directory, specs, Companions(), {}, TrainerRun(3))
    writer.lay_out()
    writer.finish(None)
    (directory / "config.json").unlink()
    return directory / dcp_metadata.FILE


class DcpModel:
    """A model with its optimizer in a directory whose `.metadata` changes."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm"))
        self.file = os.open(little_dcp(self.directory), os.O_RDWR)

    def __call__(self, data: bytes) -> None:
        rewrite(self.file, data)
        reader = DcpModelReader(self.directory, self.directory, dcp_metadata.read_index(self.directory), NO_HINTS)
        source = WithOptimizer(reader)
        for name in source.specs:
            read_tensor(source, name)
        _ = reader.iteration, reader.trainer_run


def dcp_seeds() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        yield little_dcp(Path(folder)).read_bytes()


class Numbered:
    """The pickle of an optimizer.pt changes."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm")) / "optimizer.pt"
        self.saved = numbered_archive()

    def __call__(self, data: bytes) -> None:
        self.path.write_bytes(with_pickle(self.saved, data))
        shapes = {"model.embed_tokens.weight": TensorSpec((4, 3), DType.float32)}
        optimizer = NumberedOptimizer(self.path, shapes | {"model.norm.weight": TensorSpec((3,), DType.float32)}, {})
        _ = [optimizer.chunks(name) for name in optimizer.specs], optimizer.run


def numbered_archive() -> bytes:
    parameters = [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0}])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), buffer := io.BytesIO())
    return buffer.getvalue()


def numbered_seeds() -> Iterator[bytes]:
    with zipfile.ZipFile(io.BytesIO(numbered_archive())) as archive:
        yield archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


class Nemo:
    """A `.nemo`, whose headers have the right checksums: else few inputs would get behind the first."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm")) / "a.nemo"

    def __call__(self, data: bytes) -> None:
        blocks = [data[at : at + tarfile.BLOCKSIZE] for at in range(0, len(data), tarfile.BLOCKSIZE)]
        self.path.write_bytes(b"".join(map(with_checksum, blocks)))
        reader = open_nemo(self.path)
        for name in reader.specs:
            read_tensor(reader, name)
        _ = reader.model


def with_checksum(block: bytes) -> bytes:
    if block[257:262] != b"ustar":
        return block
    total = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    return block[:148] + b"%06o\0 " % total + block[156:]


def nemo_seeds() -> Iterator[bytes]:
    state = {
        "model.embedding.word_embeddings.weight": torch.ones(4, 2),
        "model.decoder.final_layernorm.weight": torch.ones(2),
    }
    fields = {"num_layers": 1, "hidden_size": 2, "num_attention_heads": 1, "ffn_hidden_size": 2}
    with tempfile.TemporaryDirectory() as folder:
        for form in ("ranks", "zarr"):
            place = Path(folder) / form
            nemo_files.write_config(place, fields)
            if form == "zarr":
                nemo_files.write_zarr(place / "model_weights", state)
            else:
                nemo_files.write_ranks(place, [state])
            yield nemo_files.pack(place, Path(folder) / f"{form}.nemo").read_bytes()


class AdapterConfig:
    """What PEFT says of an adapter, in a directory of its own."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)

    def __call__(self, data: bytes) -> None:
        (self.path / lora_config.FILE).write_bytes(data)
        config = lora_config.read_lora_config(self.path)
        assert abs(config.scale("model.layers.10.self_attn.q_proj", config.rank)) < float("inf")


def adapter_seeds() -> Iterator[bytes]:
    plain = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "init_lora_weights": True}
    patterns = {"alpha_pattern": {r"layers\.\d+\.(q|k)_proj": 3}, "rank_pattern": {"q_proj": 2}, "use_rslora": True}
    yield from (json.dumps(one).encode() for one in (plain, plain | patterns, {"peft_type": "IA3"}))


class Safetensors:
    """A file in memory with other bytes each time."""

    def __init__(self) -> None:
        self.file = os.memfd_create("fuzz")
        self.path = Path(f"/proc/self/fd/{self.file}")

    def __call__(self, data: bytes) -> None:
        rewrite(self.file, data)
        ours = safetensors_file.read_header(self.path)
        theirs = dict(safetensors.deserialize(data))  # what we read, the library reads, and alike
        assert ours.keys() == theirs.keys()
        for name, stored in ours.items():
            begin, nbytes = stored.offset, stored.spec.nbytes
            assert bytes(theirs[name]["data"]) == data[begin : begin + nbytes]
            assert tuple(theirs[name]["shape"]) == stored.spec.shape


def safetensors_seeds() -> Iterator[bytes]:
    several = {str(dtype): TensorSpec((2, 3), dtype) for dtype in safetensors_file.DTYPES.values()}
    for specs in (several, {"a": TensorSpec((2,), DType.float32)}, {"b": TensorSpec((), DType.uint8)}, {}):
        header, _ = safetensors_file.make_header(specs)
        yield header + bytes(sum(spec.nbytes for spec in specs.values()))


def mutate_header(data: bytes, most: int, seed: int) -> bytes:
    """Something else in the header, and its length said rightly: else few inputs would get as far as JSON."""
    if seed % 8 == 0:
        return atheris.Mutate(data, most)
    end = 8 + int.from_bytes(data[:8], "little")
    header = atheris.Mutate(data[8:end], max(most - 8, 1))
    return (len(header).to_bytes(8, "little") + header + data[end:])[:most]


def rewrite(file: int, data: bytes) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, data, 0)


TARGETS: dict[str, tuple[Callable[[], Callable[[bytes], None]], Callable[[], Iterator[bytes]]]] = {
    "payload": (lambda: payload, payload_seeds),
    "archived": (lambda: archived, archived_seeds),
    "metadata": (Index, index_seeds),
    "safetensors": (Safetensors, safetensors_seeds),
    "adapter": (AdapterConfig, adapter_seeds),
    "deepspeed": (deepspeed_states, lambda: rank_file_seeds(deepspeed_states)),
    "verl": (verl_ranks, lambda: rank_file_seeds(verl_ranks)),
    "dcp": (DcpModel, dcp_seeds),
    "numbered": (Numbered, numbered_seeds),
    "nemo": (Nemo, nemo_seeds),
}


def words(target: str) -> Iterator[bytes]:
    """What libFuzzer puts into inputs whole, beside bytes of its own."""
    if target == "safetensors":
        yield from (b'"%s"' % word.encode() for word in (*safetensors_file.DTYPES, "dtype", "shape", "data_offsets"))
        yield from (b'"__metadata__"', b"[0,0]", b"[]", b"{}", b"18446744073709551616", b"-1", b"1e9", b"true", b"null")
        return
    if target == "adapter":
        known = sorted(lora_config._READ | lora_config._OF_NO_CONSEQUENCE)
        yield from (b'"%s"' % word.encode() for word in (*known, "LORA", "pissa", "q_proj"))
        yield from (b"{}", b"[]", b"null", b"true", b"1e400", b"NaN", b"-1", rb"\\d+", b"(a|b)", b".*")
        return
    archives = dict.fromkeys(("deepspeed", "numbered", "nemo"), torch_zip._SKELETON)
    tables = {"metadata": dcp_metadata._ALLOWED, "dcp": dcp_metadata._ALLOWED, **archives}
    allowed = tables.get(target, te_pickle._IN_ARCHIVE)
    for name in [*allowed, ("os", "system"), ("builtins", "getattr")]:
        yield dumps(Global(*name))[2:-1]
        yield dumps(PickledObject(Global(*name), ()))[2:-1]
        yield dumps(PickledObject(Global(*name), (), new=True, fields={}))[2:-1]


def within_bounds(read: Callable[[bytes], None]) -> Callable[[bytes], None]:
    def one_input(data: bytes) -> None:
        began, before = time.process_time(), peak()
        try:
            read(data)
        except PrecisionctlError as error:
            assert len(str(error)) < 5000, f"an error of {len(str(error))} letters"
        assert time.process_time() - began < SECONDS, "it took too long"
        assert peak() - before < MEGABYTES, "it took too much memory"

    return one_input


def peak() -> int:
    """The most memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    target, folder, *options = sys.argv[1:]
    torch.set_num_threads(1)
    make, seeds = TARGETS[target]
    corpus = Path(folder)
    corpus.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(seeds()):
        (corpus / f"seed-{i:02}").write_bytes(seed)
    dictionary = corpus.parent / f"{corpus.name}.dict"
    escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in words(target))
    dictionary.write_text("".join(f'"{word}"\n' for word in escaped))
    limits = ("-timeout=10", "-rss_limit_mb=2048", f"-dict={dictionary}")
    mutator = {"custom_mutator": mutate_header} if target == "safetensors" else {}
    atheris.Setup([sys.argv[0], folder, *limits, *options], within_bounds(make()), **mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

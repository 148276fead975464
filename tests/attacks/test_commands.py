"""Hostile checkpoints as a user meets them: one error, exit code 1, no output, and nothing was executed or read that
lies elsewhere.

Each is a sound checkpoint of which one thing was changed. All are converted in one process of their own, which bounds
memory and time (`detonate.py`).
"""

import argparse
import json
import os
import pickle
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from click.testing import CliRunner
from pickle_bombs import HASHES, archived, detonate, pickled
from safetensors.torch import load_file, save_file

from precisionctl.cli import main
from precisionctl.untrusted.pickle_writer import Global, PickledObject, dumps
from precisionctl.untrusted.safe_files import LENGTHS

Attack = Callable[[Path], object]
ITERATION = "release"
HOLES = 1 << 40
"""Bytes of a file that takes none on a disk."""
TRAVERSALS = ("../secret.safetensors", "/etc/hostname", "sub/model.safetensors", "..", "", "\0", "model.safetensors/")


class Gadget:
    """Unpickling it runs a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def convert(*arguments: object) -> None:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.stderr


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A Hugging Face directory, one of two shards, one in FP8, and a Megatron checkpoint with FP8 state of each."""
    top = tmp_path_factory.mktemp("sound")
    made = {name: top / name for name in ("hf", "shards", "bin", "fp8", "dist", "legacy")}
    pico.save(made["hf"], dtype=torch.bfloat16)
    pico.save(made["shards"], dtype=torch.bfloat16, max_shard_size="100KB")
    convert("convert", made["hf"], made["bin"], "--to", "hf", "--container", "bin")
    convert("export-inference", made["hf"], made["fp8"], "--target", "vllm", "--scheme", "dynamic")
    convert("convert", made["hf"], made["dist"], "--to", "megatron", "--precision", "fp8")
    convert("convert", made["hf"], made["legacy"], "--to", "megatron", "--container", "torch")
    return made


def say(path: Path, **fields: object) -> None:
    """Change what a JSON file says."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def config(**fields: object) -> Attack:
    return lambda d: say(d / "config.json", **fields)


def hole(name: str, size: int = HOLES) -> Attack:
    def dig(directory: Path) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
        os.truncate(directory / name, size)

    return dig


def instead(name: str, make: Callable[[Path], object]) -> Attack:
    """Something else in the place of a file."""

    def lay(directory: Path) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return lay


def pipe(name: str) -> Attack:
    """Whoever opens it waits for ever."""
    return instead(name, os.mkfifo)


def socket(name: str) -> Attack:
    return instead(name, lambda path: os.mknod(path, stat.S_IFSOCK | 0o600))


def folder(name: str) -> Attack:
    return instead(name, Path.mkdir)


def elsewhere(name: str) -> Attack:
    """The whole checkpoint is beside the directory, and a link of this name leads there."""

    def move(directory: Path) -> None:
        there = directory.rename(directory.with_name(f"{directory.name}-elsewhere"))
        directory.mkdir()
        (directory / name).symlink_to(there)
        (directory / "latest_checkpointed_iteration.txt").write_text(name.removeprefix("iter_"))

    return move


def link(name: str, target: str | None = None) -> Attack:
    """A file that lies elsewhere; what is there is what was here, so that it would be read."""

    def bend(directory: Path) -> None:
        elsewhere = directory.parent / f"{directory.name}-elsewhere"
        if (directory / name).exists():
            shutil.move(directory / name, elsewhere)
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).symlink_to(elsewhere if target is None else target)

    return bend


def write(name: str, content: bytes) -> Attack:
    return lambda d: (d / name).write_bytes(content)


def tensors(**changed: torch.Tensor) -> Attack:
    """Other values in the one file of weights, by the end of their names."""

    def change(directory: Path) -> None:
        stored = load_file(directory / "model.safetensors")
        for name, tensor in stored.items():
            stored[name] = next((new.expand_as(tensor) for end, new in changed.items() if name.endswith(end)), tensor)
        stored = {name: tensor.contiguous() for name, tensor in stored.items()}
        save_file(stored, directory / "model.safetensors")

    return change


def shards(name: object) -> Attack:
    """An index in which every tensor is in this file."""
    index = "model.safetensors.index.json"

    def change(directory: Path) -> None:
        weight_map = json.loads((directory / index).read_text())["weight_map"]
        say(directory / index, weight_map=dict.fromkeys(weight_map, name))

    return change


def common(**changed: object) -> Attack:
    def change(directory: Path) -> None:
        path = directory / "common.pt"
        state = torch.load(path, weights_only=False)
        torch.save(state | changed, path)

    return change


def arguments(**changed: object) -> Attack:
    def change(directory: Path) -> None:
        args = torch.load(directory / "common.pt", weights_only=False)["args"]
        common(args=argparse.Namespace(**{**vars(args), **changed}))(directory)

    return change


def without_args(directory: Path) -> None:
    """So that the model is what the YAML says."""
    common(args=None)(directory)
    shutil.rmtree(directory / "precisionctl" / "hf")


def described(text: str) -> Attack:
    def change(directory: Path) -> None:
        without_args(directory)
        (directory / "run_config.yaml").write_text(text)

    return change


def sidecar(value: float) -> Attack:
    """The state of a sidecar with this as a scale."""

    def change(directory: Path) -> None:
        path = directory / SIDECAR
        path.parent.mkdir(exist_ok=True)
        roles = ("input", "weight", "output", "grad_output", "grad_input")
        state = {f"decoder.layers.0.mlp.linear_fc1/{role}.scale": torch.tensor(value) for role in roles}
        state |= {name.replace(".scale", ".amax_history"): torch.ones(1) for name in state}
        recipe = {"margin": 0, "fp8_format": "HYBRID", "amax_history_len": 1, "amax_compute_algo": "max"}
        said = {"format_version": 1, "recipe": recipe, "producer": "x", "iteration": 1}
        save_file(state, path, metadata={"precisionctl": json.dumps(said)})

    return change


def header_with(lengths: bytes) -> Attack:
    """The header of the weights alone, and what says how long they are."""

    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        os.truncate(path, 8 + int.from_bytes(path.read_bytes()[:8], "little"))
        (directory / LENGTHS).write_bytes(lengths)

    return change


def rank(content: bytes) -> Attack:
    return write("mp_rank_00/model_optim_rng.pt", content)


def getattr_chain() -> bytes:
    """`getattr(getattr(torch, 'os'), 'system')('touch executed')`, as a pickle."""
    getattr_ = Global("builtins", "getattr")
    module = PickledObject(Global("importlib", "import_module"), ("os",))
    return dumps(PickledObject(getattr_, (module, "system")), 2)


PARTS = b'{"a":[' + b"[]," * 10_000_000 + b"0]}"
NUMBERS = (10**18, -1, 1.5, "2", True, None, [], float("nan"))
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(60))
YAML = "!!python/object/apply:os.system ['touch executed']"
MODEL = "model: {num_attention_heads: 4, hidden_size: 64, num_layers: %s}\n"
NO_HEADS = "no `num_attention_heads`"
SIDECAR = "precisionctl/fp8_state.safetensors"
BIN = "pytorch_model.bin"
SCALES = (float("nan"), float("inf"), -1.0)

NAMES_OF_FILES = ("tokenizer.json", SIDECAR, "precisionctl/encodings.safetensors")
NO_FILE = "not a file"
ELSEWHERE = "a symbolic link leads out of the directory"
LONG = r"a number of \d+ characters"
LARGE = "larger than .* [MG]B"
NAME = "allow-list"
UNFIT = f"as a key|{NAME}|a pickle changes|ordered_dict"
ATTACKS: dict[str, tuple[str, Attack, str]] = {
    **{
        f"{key} {value}": ("hf", config(**{key: value}), f"{key} is .* not a size|no `{key}`")
        for key in SIZES
        for value in (NUMBERS if key == SIZES[0] else NUMBERS[:2])
    },
    "eps that is no number": ("hf", config(rms_norm_eps="1"), "not a positive number"),
    "a deep config": ("hf", write("config.json", b'{"a":' + b"[" * 100_000), "not readable as JSON"),
    "a config with holes": ("hf", hole("config.json"), LARGE),
    "a config that is a pipe": ("hf", pipe("config.json"), "not a file"),
    "a config elsewhere": ("hf", link("config.json"), ELSEWHERE),
    "a tokenizer elsewhere": ("hf", link("tokenizer.json", "/etc/passwd"), ELSEWHERE),
    "a tokenizer that is a pipe": ("hf", pipe("tokenizer.json"), "not a file"),
    "a tokenizer with holes": ("hf", hole("tokenizer.json"), LARGE),
    **{f"a {name} that is a pipe": ("hf", pipe(name), NO_FILE) for name in NAMES_OF_FILES},
    **{f"a {name} that is a socket": ("hf", socket(name), NO_FILE) for name in NAMES_OF_FILES},
    **{f"a {name} that is a folder": ("hf", folder(name), NO_FILE) for name in NAMES_OF_FILES},
    **{f"a {name} that leads to itself": ("hf", link(name, Path(name).name), "to itself") for name in NAMES_OF_FILES},
    "a tokenizer that leads nowhere": ("hf", link("tokenizer.json", "nothing"), "a file is missing"),
    "tokenizers with holes": (
        "hf",
        lambda d: [hole(f"tokenizer{number}.json", 255 << 20)(d) for number in range(12)],
        "with the files before it larger than",
    ),
    "a config 500 deep": ("hf", config(x=json.loads("[" * 500 + "]" * 500)), "100 deep"),
    "a config of gigabytes of lists": ("hf", write("config.json", PARTS), "parts"),
    "weights that are a pipe": ("hf", pipe("model.safetensors"), "not a file"),
    "weights elsewhere": ("hf", link("model.safetensors"), ELSEWHERE),
    "weights with holes": ("hf", hole("model.safetensors"), f"{HOLES} bytes where its header describes"),
    **{f"a shard {name!r}": ("shards", shards(name), "not the name of a file|is missing") for name in TRAVERSALS},
    "a shard that is no name": ("shards", shards(7), "7 is not the name of a file"),
    "a shard elsewhere": ("shards", link("model-00001-of-00002.safetensors"), ELSEWHERE),
    "an index with holes": ("shards", hole("model.safetensors.index.json"), LARGE),
    "an index that is a list": ("shards", write("model.safetensors.index.json", b"[]"), "not a JSON object"),
    "a gadget in a .bin": ("bin", lambda d: torch.save({"a": Gadget()}, d / BIN), f"system.*{NAME}"),
    "a chain of getattr": ("bin", write(BIN, archived(getattr_chain())), f"import_module.*{NAME}"),
    "a .bin with a huge number as a name": (
        "bin",
        lambda d: torch.save({1 << 20_000: torch.ones(1)}, d / BIN),
        "a number of 20001 bits as a key",
    ),
    "a name that is no text": (
        "bin",
        lambda d: (config(model_type="unknown")(d), torch.save({"a.\ud800": torch.ones(2, 2)}, d / BIN)),
        "is no text",
    ),
    "a plain pickle": ("bin", write(BIN, pickle.dumps(Gadget())), "no ZIP archive"),
    **{
        f"a .bin of {name}": (
            "bin",
            write(BIN, archived(pickled(bomb))),
            f"as a key|{NAME}|pickle changes|ordered_dict",
        )
        for name, bomb in HASHES.items()
    },
    **{
        f"scales of {value}": ("fp8", tensors(weight_scale=torch.tensor(value)), "a scale that is negative, infinite")
        for value in SCALES
    },
    **{
        f"a sidecar with {value}": ("hf", sidecar(value), "scale is not a positive finite number")
        for value in (*SCALES, 0.0)
    },
    "an iteration elsewhere": ("dist", elsewhere("release"), ELSEWHERE),
    "ranks elsewhere": ("legacy", elsewhere("iter_0000001"), ELSEWHERE),
    "weights of NeMo elsewhere": ("dist", elsewhere("weights"), ELSEWHERE),
    "an index that is a pipe": ("shards", pipe("model.safetensors.index.json"), NO_FILE),
    "common data that is a pipe": ("dist", pipe("common.pt"), NO_FILE),
    "metadata elsewhere": ("dist", link(".metadata"), ELSEWHERE),
    "metadata with holes": ("dist", hole(".metadata"), LARGE),
    "metadata that is a pipe": ("dist", pipe(".metadata"), "not a file"),
    "metadata that is a gadget": ("dist", write(".metadata", pickle.dumps(Gadget())), f"system.*{NAME}"),
    "a marker of gigabytes of lists": ("dist", write("metadata.json", PARTS), "parts"),
    "a journal of gigabytes of lists": (
        "hf",
        lambda d: d.with_name(f"{d.name}-destination.journal").write_bytes(PARTS + b"\n"),
        "no conversion has made it",
    ),
    "headers with lengths of gigabytes of lists": ("hf", header_with(PARTS), "larger than 1.0 MB"),
    "a marker that is a pipe": ("dist", pipe("metadata.json"), "that did not finish, or was copied in part"),
    "common data elsewhere": ("dist", link("common.pt"), ELSEWHERE),
    "common data with holes": ("dist", hole("common.pt"), LARGE),
    "common data that is a gadget": ("dist", common(more=Gadget()), f"system.*{NAME}"),
    "ten billion layers": ("dist", arguments(num_layers=10**10), "num_layers.* not a size"),
    "a sidecar elsewhere": (
        "hf",
        lambda d: (sidecar(1.0)(d), link("precisionctl/fp8_state.safetensors")(d)),
        ELSEWHERE,
    ),
    "encodings elsewhere": ("hf", link("precisionctl/encodings.safetensors", "/etc/hostname"), ELSEWHERE),
    "YAML elsewhere": ("dist", lambda d: (without_args(d), link("run_config.yaml")(d)), ELSEWHERE),
    "companions elsewhere": ("dist", link("precisionctl/hf"), ELSEWHERE),
    "YAML that calls": ("dist", described(f"model: {YAML}"), "no `model`"),
    "YAML that calls for a size": ("dist", described(MODEL % YAML), "num_layers is None"),
    "YAML without end": ("dist", described(LAUGHS + MODEL % "*a60"), "aliases"),
    "YAML in itself": ("dist", described("model: &r [*r]"), "aliases"),
    "YAML that is deep": ("dist", described("model: " + "[" * 500), "deeply"),
    "YAML of a million parts": ("dist", described("model: [" + "1," * 1_000_000 + "]"), "more entries"),
    "YAML with a fraction to the base of 60": ("dist", described(MODEL % ("1:" * 400 + "1.5")), LONG),
    "YAML with a number to the base of 60": ("dist", described(MODEL % ("1:" * 500_000 + "1")), LONG),
    "YAML that is a pipe": (
        "dist",
        lambda d: (without_args(d), pipe("run_config.yaml")(d)),
        "not a file",
    ),
    "a rank that is a gadget": ("legacy", rank(archived(pickle.dumps(Gadget(), protocol=2))), f"system.*{NAME}"),
    "a rank that is a chain": ("legacy", rank(archived(getattr_chain())), f"import_module.*{NAME}"),
    "a rank elsewhere": ("legacy", link("mp_rank_00/model_optim_rng.pt"), ELSEWHERE),
}


def test_each_is_one_error(sound: Mapping[str, Path], tmp_path: Path) -> None:
    expected = {}
    for number, (base, attack, why) in enumerate(ATTACKS.values()):
        path = tmp_path / str(number)
        source = sound[base] / ITERATION if (sound[base] / ITERATION).is_dir() else sound[base]
        shutil.copytree(source, path)
        attack(path)
        expected[str(path)] = why
    said = detonate("command", map(Path, expected))
    other = {path: told for path, told in said.items() if not re.search(expected[path], told)}
    assert not other
    assert not [path for path in tmp_path.rglob("executed")]

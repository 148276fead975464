"""Every tensor and every key of config.json changed in turn: `verify` notices, or says that it does not compare it."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fp8_directories
import in_memory
import mxfp4_directories
import pico
import pytest
import torch
from checkpoint_mutations import cache_scales, changed_configs, flipped, stored_tensors
from conversions import run
from mcore_runs import trained
from safetensors.torch import load_file, save_file

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import PrecisionctlError
from precisionctl.fp8 import sidecar
from precisionctl.verify.compare import compare

SMALL = {"num_hidden_layers": 1}


def with_everything(directory: Path, family: str = "llama-tied") -> None:
    """A tied model whose file has its head too, as old ones have, and rotary frequencies; with FP8 state."""
    pico.save(directory, family, dtype=torch.bfloat16, **SMALL)
    file = directory / "model.safetensors"
    stored = load_file(file)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(8)
    save_file(stored, file, metadata={"format": "pt"})
    sidecar.write(directory / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(directory)))


def in_bins(directory: Path) -> None:
    pico.save(directory.with_name("source"), "llama-3", dtype=torch.bfloat16, **SMALL)
    run(directory.with_name("source"), directory, "hf", container="bin")


def once_codes(directory: Path) -> None:
    """Values, beside the scales that they had as codes."""
    in_codes("compressed-tensor")(directory.with_name("codes"))
    run(directory.with_name("codes"), directory, "hf", "bf16")


def in_codes(spelling: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        fp8_directories.make(directory, spelling, **SMALL)
        file = directory / "model.safetensors"
        save_file(load_file(file) | cache_scales(1), file, metadata={"format": "pt"})

    return make


def in_torch_dist(directory: Path) -> None:
    """With an optimizer."""
    trained(directory.parent, **SMALL)
    (directory.parent / "run").rename(directory)


def with_payloads(directory: Path) -> None:
    """FP8 state in Transformer Engine's payloads."""
    with_everything(directory.with_name("source"), "llama-tied")
    run(directory.with_name("source"), directory, "megatron", "fp8")


def in_legacy_files(directory: Path) -> None:
    trained(directory.parent, **SMALL)
    run(directory.parent / "run", directory, "megatron", container="torch")


CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "safetensors": with_everything,
    "bin": in_bins,
    "values that were codes": once_codes,
    "torch_dist": in_torch_dist,
    "torch_dist with payloads": with_payloads,
    "torch": in_legacy_files,
    "mxfp4": mxfp4_directories.make,
    **{spelling: in_codes(spelling) for spelling in fp8_directories.KINDS.values()},
}
UNSEEN = {
    "derived": lambda tensor: "rotary" in tensor.name,
    "padding": lambda tensor: tensor.name.endswith(("word_embeddings.weight", "output_layer.weight")),
}
"""What may hide a flipped bit: the topic that is told then, and the tensors that it is told of."""


@dataclass(frozen=True)
class Both:
    """A checkpoint, and a copy of it that is changed."""

    name: str
    one: Reader
    copy: Path

    def noticed(self) -> tuple[bool, dict[str, str]]:
        """Whether the two are said to differ, and what is said not to be compared, by topic."""
        try:
            found = compare(self.one, open_checkpoint(self.copy))
        except PrecisionctlError:
            return True, {}
        return not found.equal, {each.topic: each.what for each in found.not_compared}


LATER = [
    "bin",
    "torch_dist",
    "values that were codes",
    "torch_dist with payloads",
    "torch",
    "mxfp4",
    *list(fp8_directories.KINDS.values())[1:],
]
"""Those of which each tensor is found as in others."""


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.soak] * (name in LATER)) for name in CHECKPOINTS])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Both:
    CHECKPOINTS[request.param](tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    made = Both(request.param, open_checkpoint(tmp_path / "one"), tmp_path / "copy")
    assert made.noticed()[0] is False
    return made


def test_one_bit_of_any_tensor_is_noticed(both: Both) -> None:
    """The lowest, or the sign's."""
    generator, counts = random.Random(0), Counter[str]()
    for tensor in stored_tensors(both.copy):
        element = generator.randrange(tensor.size // tensor.itemsize)
        bit = generator.choice([0, tensor.itemsize * 8 - 1])
        with flipped(tensor, element, bit):
            differs, told = both.noticed()
        hidden = any(topic in told and of(tensor) for topic, of in UNSEEN.items())
        assert differs or hidden, (tensor.name, bit)
        counts["noticed" if differs else "on the list"] += 1
    print(f"\n{both.name}: tensors", dict(counts))


def test_any_key_of_the_config_is_noticed_or_named(both: Both) -> None:
    """Of directories in FP8 those of `quantization_config`; the others are the same everywhere."""
    if both.name in ("bin", "values that were codes", "torch_dist with payloads"):
        pytest.skip("its config.json is read as in other checkpoints here")
    (path,) = both.copy.rglob("config.json")
    text, counts = path.read_text(), Counter[str]()
    for name, config in changed_configs(json.loads(text)):
        if both.name in fp8_directories.KINDS.values() and "quantization_config" not in name:
            continue
        path.write_text(json.dumps(config))
        differs, told = both.noticed()
        key = name.removesuffix(" left out").removeprefix("quantization_config.")
        assert differs or any(key in what.split(", ") for what in told.values()), name
        counts["noticed" if differs else "on the list"] += 1
    print(f"\n{both.name}: keys", dict(counts))

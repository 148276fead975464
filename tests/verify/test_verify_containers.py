"""One bit of every stored tensor, in every container and form of codes that is read: `verify` notices, or says that it
does not compare it. test_verify_mutations.py has Hugging Face's directories of values and FP8, and Megatron's."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import bitnet_directories
import bitsandbytes_directories
import consolidated_files
import four_bit_directories
import gemma_directories
import gguf_files
import gguf_towers
import int8_directories
import mlx_directories
import nemo_files
import orbax_files
import pico
import pytest
import repository
import tiny_wrappers
import torch
import torchao_directories
import trained_models
import trainer_directories
import transposed_directories
from checkpoint_mutations import Stored, flipped, in_files, stored_tensors
from conversions import run
from safetensors.torch import load_file, save_file
from soaking import few

from precisionctl.commands.hints import open_hinted
from precisionctl.errors import PrecisionctlError
from precisionctl.verify import encodings, hf_tensors
from precisionctl.verify.compare import compare

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = {"num_hidden_layers": 1}


@dataclass(frozen=True)
class Pair:
    """What is compared with a checkpoint whose bytes are changed, if not itself."""

    one: Path
    changed: Path


class WithReference(NamedTuple):
    path: Path
    reference: Path | None


Made = Path | WithReference | Pair


def in_gguf(scheme: str | None, family: str = "qwen3") -> Callable[[Path], Made]:
    def make(root: Path) -> Made:
        gguf_files.source(root / "hf", family, **SMALL)
        return gguf_files.export(root / "hf", root / "gguf", scheme).parent

    return make


def in_mmproj(root: Path) -> Made:
    gguf_towers.save(root / "hf", "gemma3")
    gguf_files.export(root / "hf", root / "gguf")
    return Pair(root / "hf", root / "gguf")


def adapted(root: Path) -> Made:
    pico.save(root / "hf", dtype=torch.bfloat16, **SMALL)
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    factors = {f"{name}_A.weight": torch.randn(4, 64), f"{name}_B.weight": torch.randn(64, 4)}
    save_file(factors, root / "adapter" / "adapter_model.safetensors")
    return WithReference(root / "adapter", root / "hf")


def in_orbax(root: Path) -> Made:
    """MaxText's. Every byte that is stored has a checksum."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    pico.save(root / "hf", "qwen2", vocab_size=10, **sizes)
    stored = load_file(repository.GOLDEN / "maxtext" / "qwen2-stored.safetensors")
    orbax_files.write(root / "step", {f"params.params.{name}": each for name, each in stored.items()})
    return WithReference(root / "step", root / "hf")


def of_mistral(root: Path) -> Made:
    consolidated_files.save_mistral(root / "mistral", consolidated_files.DENSE)
    return root / "mistral"


def of_meta(root: Path) -> Made:
    consolidated_files.save_meta(root / "meta", consolidated_files.META, consolidated_files.LLAMAS_MLP, 2)
    return root / "meta"


def of_nemo(root: Path) -> Made:
    model = pico.make_and_save(root / "hf", dtype=torch.bfloat16)
    weights = load_file(root / "hf" / "model.safetensors")
    nemo_files.write_config(root / "nemo", nemo_files.fields(model.config))
    nemo_files.write_ranks(root / "nemo", [nemo_files.state_of(weights, model.config)])
    return root / "nemo"


def of_trainer(save: Callable[..., Path]) -> Callable[[Path], Made]:
    def make(root: Path) -> Made:
        return save(root / "run", *trained_models.trained("llama-3"))

    return make


def wrapped(root: Path) -> Made:
    tiny_wrappers.save(root / "hf", "gemma3", dtype=torch.bfloat16)
    return root / "hf"


def wrapped_in_megatron(root: Path) -> Made:
    run(wrapped(root), root / "megatron", "megatron")  # type: ignore[arg-type]
    return root / "megatron"


def without_table(root: Path) -> Made:
    """In dtypes that no table has."""
    (root / "hf").mkdir()
    (root / "hf" / "config.json").write_text(json.dumps({"model_type": "of nobody", "architectures": ["X"]}))
    tensors = {
        "a.weight": torch.randn(64, 32).bfloat16(),
        "b.weight": torch.randn(64, 32).double(),
        "ids": torch.arange(7),
        "kinds": torch.arange(7, dtype=torch.int32),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "halves": torch.randn(3).half(),
    }
    save_file(tensors, root / "hf" / "model.safetensors", {"format": "pt"})
    return root / "hf"


def of_gemma(root: Path) -> Made:
    gemma_directories.make(root / "hf", "gemma4-small", gemma_directories.OF_TEXT)
    return root / "hf"


def in_codes(make: Callable[..., object], spelling: object) -> Callable[[Path], Made]:
    def made(root: Path) -> Made:
        make(root / "hf", spelling, **SMALL)
        return root / "hf"

    return made


EXACT: dict[str, Callable[[Path], Made]] = {
    "gguf": in_gguf(None),
    "gguf q8_0": in_gguf("q8_0"),
    "gguf products": in_gguf(None, "falcon-h1"),
    "mistral": of_mistral,
    "meta": of_meta,
    "nemo": of_nemo,
    "dcp": of_trainer(trainer_directories.pytorch),
    "hf trainer": of_trainer(trainer_directories.hf_trainer),
    "deepspeed": of_trainer(trainer_directories.deepspeed),
    "verl": of_trainer(trainer_directories.verl),
    "orbax": in_orbax,
    "wrapper": wrapped,
    "wrapper in megatron": wrapped_in_megatron,
    "no table": without_table,
    **{name: in_codes(four_bit_directories.make, name) for name in four_bit_directories.SPELLINGS},
    **{f"int8 {name}": in_codes(int8_directories.make, said) for name, said in int8_directories.SPELLINGS.items()},
}
"""Read without rounding: any bit is noticed."""

ROUNDED: dict[str, Callable[[Path], Made]] = {
    "adapter": adapted,
    "mmproj": in_mmproj,
    **{f"mlx {name}": in_codes(mlx_directories.make, name) for name in ("affine-4", "affine-8", "mxfp4", "nvfp4")},
    **{name: in_codes(transposed_directories.make, name) for name in transposed_directories.SPELLINGS},
    **{f"bitsandbytes {name}": in_codes(bitsandbytes_directories.make, name) for name in ("int8", "nf4")},
    "bitnet": in_codes(bitnet_directories.make, "bitlinear"),
    "gemma": of_gemma,
    **{f"torchao {name}": in_codes(torchao_directories.make, name) for name in torchao_directories.SPELLINGS},
}
"""Of which values are rounded to BF16 as they are read, or held against rounded ones: the highest bit of each element's
exponent, or of its magnitude, is noticed."""

KEPT = ("gguf", "mistral", "no table")


@pytest.mark.parametrize("name", few({**EXACT, **ROUNDED}, *KEPT))
def test_a_bit_of_any_stored_tensor_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last element, and in others."""
    for module in (hf_tensors, encodings):
        monkeypatch.setattr(module, "PIECE", 3000)  # some rows at a time
    torch.manual_seed(0)
    made = {**EXACT, **ROUNDED}[name](tmp_path)
    plain = WithReference(made.changed if isinstance(made, Pair) else made, None)
    path, reference = made if isinstance(made, WithReference) else plain
    copy = shutil.copytree(path, tmp_path / "copy")
    one = open_hinted(made.one if isinstance(made, Pair) else path, reference=reference)
    assert compare(one, open_hinted(copy, reference=reference)).equal
    generator, unseen = random.Random(0), list[tuple[str, int, int]]()
    for tensor in places(copy, name):
        last = tensor.size // tensor.itemsize - 1
        for element in (last, generator.randint(0, last)):
            bits = 8 * tensor.itemsize
            bit = generator.choice([0, bits - 1]) if name in EXACT else bits - 2
            with flipped(tensor, element, bit):
                try:
                    found = compare(one, open_hinted(copy, reference=reference))
                except PrecisionctlError:
                    continue
            told = {each.topic for each in found.not_compared}
            if found.equal and not any(topic in told and of(tensor) for topic, of in UNSEEN.items()):
                unseen.append((tensor.name, element, bit))
    assert not unseen


def places(directory: Path, name: str) -> list[Stored]:
    if name == "orbax":
        files = (each for each in directory.rglob("*") if each.is_file() and each.name != "_METADATA")
        return [Stored(each.name, each, 0, each.stat().st_size, 1) for each in files]
    found = stored_tensors(directory) if name in ("dcp", "wrapper in megatron") else in_files(directory)
    return [tensor for tensor in found if name != "verl" or tensor.size != 8]  # those are the numbers of both ranks


UNSEEN = {
    "run": lambda tensor: tensor.size == 4,  # AdamW's count of updates, of each parameter
    "optimizer": lambda tensor: tensor.size == 4,  # which differs between ranks then
    "padding": lambda tensor: tensor.name.endswith("word_embeddings.weight"),
    "towers": lambda tensor: tensor.name.startswith("vision_tower.vision_model.head."),
    "scales of values": lambda tensor: tensor.name.endswith(("activation_scale", "cache_scale")),
}
"""What may hide a changed bit: the topic that is told then, and the tensors that it is told of."""

"""Files whose reading would cost far more than their size: numbers chosen to have one hash, tables that are looked
through for each name, a base's config with other sizes than its tensors."""

import itertools
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path

import pico
import pytest
import torch
from hypothesis import example, given, strategies as st
from pickle_bombs import MODULUS
from safetensors.torch import save_file

from precisionctl.architectures.families import from_hf_config
from precisionctl.architectures.megatron.megatron_args import to_megatron_args
from precisionctl.checkpoints.adapter.lora_config import AdaptedModules, read_lora_config
from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.megatron.provider import parse_yaml
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.other_trainers.numbered_optimizer import names_by_number
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.checkpoints.torch_files.dcp_metadata import DcpPiece, DcpTensor, Index
from precisionctl.checkpoints.torch_files.torch_zip import LocatedTensor, Span
from precisionctl.checkpoints.torch_legacy.optimizer import optimizer_tensors
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, RecipeError, ShapeMismatch, UnknownArchitecture, most_alike
from precisionctl.recipe import load_recipe


@contextmanager
def soon(seconds: float = 5.0) -> Iterator[None]:
    """The time is the processor's: others may keep it busy."""
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds


def index_of(directory: Path, index: Index) -> Path:
    (directory / "x.distcp").write_bytes(bytes(1000))
    dcp_metadata.write_index(directory, index)
    return directory


@pytest.mark.soak
def test_pieces_at_places_of_one_hash(tmp_path: Path) -> None:
    """A number's hash is its remainder by MODULUS, so here all tuples have one."""
    places = itertools.product((0, MODULUS, 2 * MODULUS, 3 * MODULUS), repeat=7)
    pieces = tuple(DcpPiece(place, (1,) * 7, Span(tmp_path / "x.distcp", 0, 1)) for place in places)
    index_of(tmp_path, Index({"x": DcpTensor((4 * MODULUS,) * 7, DType.uint8, pieces)}, {}))
    with soon(8), pytest.raises(DamagedCheckpoint, match="pieces of another size|as sizes"):
        dcp_metadata.read_index(tmp_path)


def test_one_long_path_for_many_keys() -> None:
    """As a pickle gives it to each with two bytes."""
    path, keys = ("x" * (4 << 20), "y" * (4 << 20)), list(map(str, range(10_000)))
    with soon():
        assert dcp_metadata._keys_above(keys, dict.fromkeys(keys, path)) == {}


def test_objects_on_the_same_bytes(tmp_path: Path) -> None:
    """Each would be loaded."""
    objects = {f"optimizer.param_groups.{n}.params": Span(tmp_path / "x.distcp", n, 900) for n in range(2)}
    with pytest.raises(DamagedCheckpoint, match="on the same bytes"):
        dcp_metadata.read_index(index_of(tmp_path, Index({}, objects)))


def test_keys_of_one_hash_in_yaml() -> None:
    text = "".join(f"{number * MODULUS}: 1\n" for number in range(1, 2000))
    with pytest.raises(DamagedCheckpoint, match=r"a number of 2\d characters"):
        parse_yaml(text.encode(), "here")


@pytest.mark.parametrize(("family", "key"), [("llama4", "moe_layers"), ("qwen3-moe", "mlp_only_layers")])
def test_layers_of_one_hash(family: str, key: str) -> None:
    config = pico.config(family) | {key: [number * MODULUS for number in range(60_000)]}
    with soon(), pytest.raises(DamagedCheckpoint, match=f"{key} is .* not a list of layers"):
        from_hf_config(config, "here")


def test_a_pattern_of_more_layers_than_there_may_be() -> None:
    config = pico.config("nemotron-h")
    config.pop("layers_block_type", None)
    config |= {"hybrid_override_pattern": "ME" * 5000}
    with pytest.raises(DamagedCheckpoint, match="hybrid_override_pattern is"):
        from_hf_config(config, "here")


def test_indexers_in_layers_of_no_order() -> None:
    """Megatron has two numbers for which layers have one."""
    kinds = ["full", "shared", "full", "full", *["shared", "full"] * 200]
    config = pico.config("glm-moe-dsa") | {"num_hidden_layers": len(kinds), "indexer_types": kinds}
    config["mlp_layer_types"] = ["sparse"] * len(kinds)
    with soon():
        args = to_megatron_args(from_hf_config(config, "here"))
    assert (args["dsa_indexer_topk_freq"], args["dsa_indexer_skip_topk_offset"]) == (1, 1)


def test_names_of_megabytes_are_not_compared_with_those_that_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """difflib looks at each letter, in seconds, before it compares lengths."""
    looked_at: list[str] = []
    monkeypatch.setattr(SequenceMatcher, "set_seq2", lambda self, name: looked_at.append(name[:10]))
    name = "llama" * 2_000_000
    with pytest.raises(UnknownArchitecture, match="unsupported architecture `llamallama"):
        from_hf_config({"model_type": name}, "here")
    (tmp_path / "run.toml").write_text(f"{name} = 1")
    with pytest.raises(RecipeError, match="unknown key llamallama"):
        load_recipe(tmp_path / "run.toml")
    assert looked_at == []


@given(st.text("ab", max_size=12), st.lists(st.text("ab", max_size=12)), st.sampled_from((0.6, 0.7, 0.8)))
@example("aaaaaaa", ["aaa"], 0.6)  # as alike as 0.6 is in floating point, and no less
def test_no_name_that_is_alike_is_left_out_for_its_length(name: str, known: list[str], alike: float) -> None:
    assert most_alike(name, known, alike) == next(iter(get_close_matches(name, known, 1, alike)), None)


def test_an_adapter_with_hundreds_of_thousands_of_ranks(tmp_path: Path) -> None:
    pico.save(tmp_path / "base", "llama-3", num_hidden_layers=1)
    tensors = {}
    for number in range(1000):
        tensors[f"base_model.model.m{number}.weight"] = torch.ones(2, 2)
        tensors |= {f"base_model.model.m{number}.lora_{one}.weight": torch.ones(2, 2) for one in "AB"}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "rank_pattern": {f"m{n}": 3 + n for n in range(200_000)}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with soon():  # most of it to parse the file
        open_checkpoint(tmp_path, hints=Hints(reference=tmp_path / "base"))


def test_an_adapter_by_bridge_for_a_base_whose_config_says_gigabytes(tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "golden" / "bridge_lora"
    shutil.copytree(golden / "base", tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text()) | {"intermediate_size": 1 << 30}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with soon(), pytest.raises(ShapeMismatch, match="its config.json says other sizes"):
        open_checkpoint(golden / "adapter", hints=Hints(reference=tmp_path / "base"))


def test_names_of_many_parts_in_an_adapter() -> None:
    modules, name = AdaptedModules(frozenset(("q_proj",))), "a." * 2000
    with soon(2):
        assert not any(name in modules for _ in range(200))
    assert f"{name}q_proj" in modules and "q_proj" in modules and f"{name}xq_proj" not in modules


def test_layers_of_an_adapter_that_have_one_hash(tmp_path: Path) -> None:
    layers = [number * MODULUS for number in range(60_000)]
    config = {"peft_type": "LORA", "target_modules": ["q_proj"], "layers_to_transform": layers}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with soon():
        modules = read_lora_config(tmp_path).modules
    assert "model.layers.0.q_proj" in modules and "model.layers.1.q_proj" not in modules


def test_an_optimizer_of_many_groups_that_no_parameter_is_of() -> None:
    """Megatron's `torch` container. A pickle repeats a group with two bytes."""
    biases = {f"decoder.layers.{n}.mlp.linear_fc1.bias": LocatedTensor(DType.float32, (8,), 0) for n in range(50)}
    groups = [{"params": [], "is_expert_parallel": True}] * 3000
    content = {"optimizer": {"state": {0: {}}, "param_groups": groups}}
    with soon():
        assert list(optimizer_tensors(content, [biases], Path("model_optim_rng.pt"))) == []


def test_parameters_under_numbers() -> None:
    names = [f"layers.{number}.{kind}" for number in range(20_000) for kind in ("mlp.weight", "norm.weight")]
    groups = [{"params": range(20_000)}, {"params": range(20_000, 40_000)}]
    with soon():
        named = names_by_number(groups, names, Path("here"))
    assert (named[1], named[20_001]) == ("layers.1.mlp.weight", "layers.1.norm.weight")
    with soon(), pytest.raises(DamagedCheckpoint, match="that no optimizer has"):
        names_by_number([{"params": [number * MODULUS for number in range(40_000)]}], names, Path("here"))

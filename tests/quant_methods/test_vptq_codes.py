"""VPTQ: vectors of outputs out of codebooks, decoded to BF16 by every command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coded_directories
import pytest
import repository
import torch
from coded_directories import SIZES, of_module
from hostile_codes import MODULE, UP, Change, Hostile, assert_refused, put
from read_as_values import assert_any_cut, assert_decoded_once, assert_golden, assert_read_as_values, golden_cases
from torch import Tensor

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.hf_directory.safetensors_file import read_described
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint, PrecisionError

GOLDEN = repository.GOLDEN / "vptq_codes.safetensors"
LENGTH, COUNT, RESIDUALS, OUTLIERS, OUTLIER_LENGTH, OUTLIER_COUNT = 5, 64, 16, 8, 3, 40
BITS = 10


def words(index: Tensor) -> Tensor:
    """A stream of BITS each, of a row of indices, in int32."""
    rows = []
    for row in index.flatten(0, 1).tolist():
        stream = sum(number << BITS * place for place, number in enumerate(row))
        rows.append([stream >> 32 * place & 0xFFFFFFFF for place in range(-(-len(row) * BITS // 32))])
    return torch.tensor(rows).to(torch.uint32).view(torch.int32).view(*index.shape[:2], -1)


def coded(name: str, weight: Tensor, groups: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes of a weight in FP16, with outliers and residuals, and its values."""
    out, columns = weight.shape
    inputs = (columns - OUTLIERS) // groups

    def chosen(count: int, *shape: int) -> Tensor:
        return torch.randint(count, shape, generator=generator)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).half()

    vectors = -(-out // LENGTH)
    main, above = chosen(COUNT, groups, vectors, inputs), chosen(RESIDUALS, groups, vectors, inputs)
    apart = chosen(OUTLIER_COUNT, 1, -(-out // OUTLIER_LENGTH), OUTLIERS)
    book, res_book = numbers(groups, COUNT, LENGTH), numbers(groups, RESIDUALS, LENGTH)
    outlier_book = numbers(1, OUTLIER_COUNT, OUTLIER_LENGTH)
    scale, bias, perm = numbers(columns), numbers(columns), torch.randperm(columns, generator=generator)
    values = torch.empty(out, columns, dtype=torch.float16)
    for column in range(columns):
        place = perm.tolist().index(column)
        group, within = divmod(place - OUTLIERS, inputs)
        for row in range(out):
            if place < OUTLIERS:
                found = outlier_book[0, apart[0, row // OUTLIER_LENGTH, place], row % OUTLIER_LENGTH]
            else:
                at = group, row // LENGTH, within
                found = book[group, main[at], row % LENGTH] + res_book[group, above[at], row % LENGTH]
            values[row, column] = found
    stored = {
        "indices": words(main | above << 6),
        "centroids.weight": book.flatten(1),
        "res_centroids.weight": res_book.flatten(1),
        "outlier_indices": apart.short(),
        "outlier_centroids.weight": outlier_book.flatten(1),
        "perm": perm.short(),
        "weight_scale": scale,
        "weight_bias": bias,
    }
    return of_module(name, stored), values * scale + bias


def says_of(weight: Tensor, groups: int) -> dict[str, Any]:
    return {
        "vector_lens": [OUTLIER_LENGTH, LENGTH],
        "num_centroids": [OUTLIER_COUNT, COUNT],
        "num_res_centroids": [-1, RESIDUALS],
        "group_num": groups,
        "group_size": (weight.shape[1] - OUTLIERS) // groups,
        "outlier_size": OUTLIERS,
        "in_features": weight.shape[1],
        "out_features": weight.shape[0],
        "enable_norm": True,
        "enable_perm": True,
        "indices_as_float": False,
        "is_indice_packed": True,
    }


def make(directory: Path, groups: int, quantized: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Save a small model whose linears are codes. Returns what they decode to."""
    generator, layers = torch.Generator().manual_seed(1), dict[str, Any]()

    def noted(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        layers[name.removesuffix(".weight")] = says_of(weight, groups)
        return coded(name, weight, groups, generator)

    said = {"quant_method": "vptq"}
    values = coded_directories.make(directory, "llama-3", said, noted, quantized, **SIZES)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_for_layers"] = layers
    path.write_text(json.dumps(config))
    return values


def test_values_are_those_of_a_slow_reader_in_bf16_and_through_megatron(tmp_path: Path) -> None:
    values = make(tmp_path / "source", 1, lambda name: "k_proj" in name or "up_proj" in name)
    told = "vectors of 5 outputs of vptq, read as bfloat16"
    _, found = assert_read_as_values(tmp_path / "source", values, told, megatron=True)
    assert len(values) == 2 and {name.rpartition(".")[2] for name in found} == {"weight"}


@pytest.mark.parametrize("case", golden_cases(GOLDEN))
def test_codes_decode_to_what_vptq_makes_of_them(case: str) -> None:
    assert_golden(GOLDEN, case, json.loads(read_described(GOLDEN)[1]["quantization_config"]))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    directory = tmp_path_factory.mktemp("vptq")
    return directory, make(directory, 2, lambda name: name == UP)


def test_how_rows_are_cut_does_not_matter(
    made: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor that a run of them begins within those of a vector."""
    assert_any_cut(made[0], UP, made[1][UP], monkeypatch)


def test_a_vector_of_all_outputs_is_not_decoded_anew_for_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be, 96 times, where memory is for a row at a time."""
    for length in ("LENGTH", "OUTLIER_LENGTH"):
        monkeypatch.setitem(globals(), length, 96)
    values = make(tmp_path, 1, lambda name: name == UP)
    assert_decoded_once(tmp_path, UP, values[UP], monkeypatch)


def test_settings_may_be_those_of_all_modules_of_a_name(tmp_path: Path, made: tuple[Path, dict[str, Tensor]]) -> None:
    """`shared_layer_config`, which has no name of a layer."""
    config = json.loads((made[0] / "config.json").read_text())
    quantization = config["quantization_config"]
    quantization["shared_layer_config"] = {"up_proj": quantization.pop("config_for_layers")[MODULE]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").hardlink_to(made[0] / "model.safetensors")
    assert torch.equal(read_tensor(open_checkpoint(tmp_path), UP), made[1][UP].bfloat16())


def of_module_says(**changed: object) -> Change:
    """Other settings of MODULE."""
    return lambda tensors, said: said["config_for_layers"][MODULE].update(changed)


def without(key: str) -> Change:
    return lambda tensors, said: said["config_for_layers"][MODULE].pop(key)


HOSTILE: Hostile = {
    "no indices": (put("indices", None), DamagedCheckpoint, "no .*up_proj.indices for its codes"),
    "no centroids": (put("centroids.weight", None), DamagedCheckpoint, "no .*centroids.weight for its codes"),
    "no residuals": (put("res_centroids.weight", None), DamagedCheckpoint, "no .*res_centroids.weight for its codes"),
    "no outliers": (put("outlier_indices", None), DamagedCheckpoint, "no .*outlier_indices for its codes"),
    "no order": (put("perm", None), DamagedCheckpoint, "no .*up_proj.perm for its codes"),
    "no scale": (put("weight_scale", None), DamagedCheckpoint, "no .*up_proj.weight_scale for its codes"),
    "an input twice": (put("perm", torch.zeros(128).short()), DamagedCheckpoint, "does not have each input once"),
    "no such outlier": (put("outlier_indices", torch.full((1, 32, 8), 40).short()), DamagedCheckpoint, "has 40, and"),
    "an outlier below": (put("outlier_indices", torch.full((1, 32, 8), -1).short()), DamagedCheckpoint, "has 65535,"),
    "indices of INT16": (put("indices", torch.ones(2, 20, 19).short()), DamagedCheckpoint, "indices is int16"),
    "flat indices": (put("indices", torch.ones(760).int()), DamagedCheckpoint, "indices is int32 of shape"),
    "a row of vectors less": (
        put("indices", torch.ones(2, 19, 19).int()),
        DamagedCheckpoint,
        "indices is int32 of shape",
    ),
    "centroids of bytes": (put("centroids.weight", torch.ones(2, 320).byte()), DamagedCheckpoint, "weight is uint8"),
    "scales in FP32": (put("weight_scale", torch.ones(128)), DamagedCheckpoint, "weight_scale is float32"),
    "a bias of NaN": (put("weight_bias", torch.full((128,), torch.nan).half()), DamagedCheckpoint, "infinite or NaN"),
    "a weight as values too": (put("weight", torch.ones(96, 128)), DamagedCheckpoint, "as values, and as codes"),
    "not said": (lambda _, said: said["config_for_layers"].clear(), DamagedCheckpoint, "does not say which"),
    "said in a list": (
        lambda _, said: said.update(config_for_layers=[1]),
        DamagedCheckpoint,
        "not an object of objects",
    ),
    "said in a word": (
        lambda _, said: said.update(config_for_layers={MODULE: "v8"}),
        DamagedCheckpoint,
        "`config_for_layers` is not an object of objects",
    ),
    "a number of another module": (
        lambda _, said: said["config_for_layers"].update(a=5),
        DamagedCheckpoint,
        "`config_for_layers` is not an object of objects",
    ),
    "a list of what is shared": (
        lambda _, said: said.update(shared_layer_config=[1]),
        DamagedCheckpoint,
        "`shared_layer_config` is not an object of objects",
    ),
    "no groups": (without("group_num"), DamagedCheckpoint, "makes no sense: KeyError"),
    "many groups": (of_module_says(group_num=257), PrecisionError, "257 groups of inputs, which are not read"),
    "groups of nothing": (of_module_says(group_size=0), DamagedCheckpoint, "makes no sense: .* groups of 0"),
    "groups of a name": (of_module_says(group_size="60"), DamagedCheckpoint, "makes no sense"),
    "huge groups": (of_module_says(group_size=1 << 60), DamagedCheckpoint, "indices is int32 of shape"),
    "three lengths": (of_module_says(vector_lens=[3, 5, 7]), DamagedCheckpoint, "no pairs of numbers"),
    "a true length": (of_module_says(vector_lens=[3, True]), DamagedCheckpoint, "no pairs of numbers"),
    "vectors of nothing": (of_module_says(vector_lens=[3, 0]), DamagedCheckpoint, "vectors of 0"),
    "other outputs": (of_module_says(out_features=101), DamagedCheckpoint, "indices is int32 of shape"),
    "no main centroids": (of_module_says(num_centroids=[40, 0]), PrecisionError, "codebooks of .0, 16. vectors"),
    "a negative count": (of_module_says(num_centroids=[40, -1]), PrecisionError, "codebooks of .-1, 16. vectors"),
    "a word for false": (of_module_says(enable_perm="no"), DamagedCheckpoint, "is 'no', not true or false"),
    "63 centroids": (of_module_says(num_centroids=[40, 63]), PrecisionError, "codebooks of .63, 16. vectors"),
    "more residuals": (of_module_says(num_res_centroids=[-1, 128]), PrecisionError, "codebooks of .64, 128. vectors"),
    "residuals of outliers": (of_module_says(num_res_centroids=[2, 16]), PrecisionError, "and others to add"),
    "not packed": (of_module_says(is_indice_packed=False), PrecisionError, "indices that are not packed"),
    "as floats": (of_module_says(indices_as_float=True), PrecisionError, "indices that are not packed"),
    "vectors of inputs": (of_module_says(vector_quant_dim="in"), PrecisionError, "vectors of inputs"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_contradicts_itself_or_is_not_read_is_one_error(
    tmp_path: Path, made: tuple[Path, dict[str, Tensor]], case: str
) -> None:
    assert_refused(made[0], tmp_path, HOSTILE[case])

"""How layers are dealt out to pipeline stages; megatron-core is the judge."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pico
import pytest
import torch

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_files.torch_zip import skeleton
from precisionctl.checkpoints.torch_legacy.names import count_layers
from precisionctl.checkpoints.torch_legacy.reader import LegacyReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import ShapeMismatch
from precisionctl.param import Parallelism
from precisionctl.planning import checks

with warnings.catch_warnings(action="ignore"):
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


def config_of(layers: int, sizes: Parallelism) -> TransformerConfig:
    """megatron-core's, which refuses stages that it cannot build."""
    with warnings.catch_warnings(action="ignore"):
        return TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
            num_layers_in_first_pipeline_stage=sizes.first_layers,
            num_layers_in_last_pipeline_stage=sizes.last_layers,
            pipeline_dtype=torch.bfloat16,
        )


def of_megatron_core(config: TransformerConfig, sizes: Parallelism) -> list[tuple[int, int]]:
    """(first layer, layers) of each stage, in the order of `layers_of_stages`."""
    found = []
    for stage in range(sizes.virtual):
        virtual = stage if sizes.virtual > 1 else None
        for rank in range(sizes.pipeline):
            offset = get_transformer_layer_offset(config, virtual, rank)
            found.append((offset, get_num_layers_to_build(config, virtual, rank)))
    return found


def every_case() -> Iterator[tuple[int, Parallelism]]:
    for layers in (2, 4, 7, 12, 24, 61):
        for pipeline in (2, 3, 4, 8):
            for virtual in (1, 2, 3):
                for first in (None, 1, 2, 4):
                    for last in (None, 1, 3, 4):
                        yield layers, Parallelism(1, pipeline, virtual, first_layers=first, last_layers=last)


def test_stages_are_those_that_megatron_core_builds_and_what_is_refused_it_refuses() -> None:
    built = refused = 0
    for layers, asked in every_case():
        try:
            sizes = checks.with_stages(asked, layers)
        except ShapeMismatch:
            if asked.first_layers or asked.last_layers:  # else another split was looked for, too
                with pytest.raises((ValueError, AssertionError)):
                    built_by_core = of_megatron_core(config_of(layers, asked), asked)
                    assert all(count > 0 for _, count in built_by_core)  # it takes some stages of less than nothing
                refused += 1
            continue
        counts = sizes.layers_of_stages(layers)
        expected = [(sum(counts[:stage]), count) for stage, count in enumerate(counts)]
        assert of_megatron_core(config_of(layers, sizes), sizes) == expected, (layers, asked)
        built += 1
    assert built > 100 and refused > 100


def test_the_last_stage_gets_what_is_left() -> None:
    assert checks.with_stages(Parallelism(pipeline=8), 61).layers_of_ranks(61) == [8, 8, 8, 8, 8, 8, 8, 5]
    assert checks.with_stages(Parallelism(pipeline=4, virtual=2), 22).layers_of_ranks(22) == [6, 6, 6, 4]
    assert checks.with_stages(Parallelism(pipeline=8), 24) == Parallelism(pipeline=8)
    with pytest.raises(ShapeMismatch, match="10 layers cannot be cut into 8"):
        checks.with_stages(Parallelism(pipeline=8), 10)
    assert (
        checks.with_stages(Parallelism(pipeline=8, first_layers=2, last_layers=2), 10).layers_of_ranks(10)[1:-1]
        == [1] * 6
    )


@pytest.mark.parametrize("sizes", [Parallelism(pipeline=10**9), Parallelism(first_layers=1)], ids=str)
def test_stages_without_layers_or_a_pipeline_are_refused(sizes: Parallelism) -> None:
    with pytest.raises(ShapeMismatch, match="stages"):
        checks.with_stages(sizes, 4)


@pytest.mark.parametrize("container", ["torch", "torch_dist"])
def test_uneven_stages_there_and_back_are_bit_exact_and_say_what_a_run_needs(tmp_path: Path, container: str) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, num_hidden_layers=7)
    sizes = Parallelism(2, 3)
    there = Request(tmp_path / "hf", tmp_path / "uneven", "megatron", container=container, parallelism=sizes)
    work = plan_command(there)
    told = "Pipeline ranks have 3, 3, 1 layers: start Megatron with --decoder-last-pipeline-num-layers 1."
    assert told in work.notes
    execute(work)
    reader = (LegacyReader if container == "torch" else TorchDistReader)(tmp_path / "uneven")
    assert reader.args["decoder_last_pipeline_num_layers"] == 1
    again = Request(
        tmp_path / "uneven",
        tmp_path / "even",
        "megatron",
        container="torch",
        parallelism=Parallelism(1, 4, first_layers=1),
    )
    execute(plan_command(again))
    ranks = [tmp_path / "even" / "release" / f"mp_rank_00_{rank:03d}" / "model_optim_rng.pt" for rank in range(4)]
    assert [count_layers(skeleton(rank)["model"]) for rank in ranks] == [1, 2, 2, 2]
    execute(plan_command(Request(tmp_path / "even", tmp_path / "back", "hf")))
    before, after = HuggingFaceReader(tmp_path / "hf"), HuggingFaceReader(tmp_path / "back")
    assert before.specs.keys() == after.specs.keys()
    for name in before.specs:
        assert torch.equal(read_tensor(before, name), read_tensor(after, name)), name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_hidden_layers"] == 7


def test_the_words_of_the_run_before_for_its_stages_do_not_stay(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, num_hidden_layers=4)
    one, two = Parallelism(1, 2, first_layers=3), Parallelism(1, 2, 2)
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "one", "megatron", parallelism=one)))
    execute(plan_command(Request(tmp_path / "one", tmp_path / "two", "megatron", parallelism=two)))
    args = TorchDistReader(tmp_path / "two").args
    assert "decoder_first_pipeline_num_layers" not in args
    assert args["num_layers_per_virtual_pipeline_stage"] == 1

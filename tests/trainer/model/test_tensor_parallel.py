"""Layers that ranks share, or have rows of data for, held against one process: by 2 and 4 ranks, once."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pico
import pytest
import repository
import torch
from programs import run_program
from shared_layers import EVEN, SHARING, SIZES, source_of

from precisionctl.errors import RecipeError
from precisionctl.param import REPLICATED
from precisionctl.recipe import ParallelSettings, load_recipe
from precisionctl.trainer.data.blend import Blend
from precisionctl.trainer.data.rows import EqualRows, Rows
from precisionctl.trainer.parallel import shards, world

Told = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    file = tmp_path_factory.mktemp("shared") / "told.json"
    asked: Any = [
        item
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_all_ranks_have_the_loss_and_their_parts_of_the_gradients"
    ]
    cases = [(item.callspec.params["how"], item.callspec.params["family"]) for item in asked]
    run_program(repository.HELPERS / "shared_layers.py", file, json.dumps(cases))
    found: Told = json.loads(file.read_text())
    return found


@pytest.mark.parametrize(
    ("how", "family"),
    [pytest.param(how, *one.values, marks=one.marks) for how, families in SHARING.items() for one in families],
)
def test_all_ranks_have_the_loss_and_their_parts_of_the_gradients(told: Told, how: str, family: str) -> None:
    """In FP32 all that differs is the order of sums. The largest difference of a gradient's element from one process's
    is held to 2^-16 of the tensor's largest (2^-16.8 was seen of a CPU): some gradients cancel, a norm's over all heads
    most of all. xIELU's and those of connections to streams, each the sum over all channels of all tokens, are held to
    2^-10."""
    ranks = [rank[f"{how}: {family}"] for rank in told["shared"] if f"{how}: {family}" in rank]
    assert len(ranks) == SIZES[how][0]
    for found in ranks:
        assert abs(found["loss"]) < 2**-20 and abs(found["norm"]) < 2**-20
        assert not found["missing"] and abs(found["likeness"]) < 2**-20
        assert found["gradients"]
        assert [name for name, off in found["gradients"].items() if off > 2 ** (-10 if "alpha_" in name else -16)] == []


@pytest.mark.parametrize("activations", ["kept", "recomputed"])
def test_fp8_of_data_ranks_that_starts_cold_is_that_of_one_process(told: Told, activations: str) -> None:
    """All scales are 1 in the first pass, and hundreds or thousands of times that in the second: a weight that the
    backward, or a layer's second computation, cast under another scale than the forward would have codes of its own,
    and leave its amax behind. Scales and histories are the same to the last bit; the gradient of a weight is rounded
    to BF16 for each rank, by up to 2^-9 of it, instead of once."""
    assert len(told["data"]) == 2
    for rank in told["data"]:
        found = rank[activations]
        assert found["losses"] == pytest.approx([0, 0], abs=2**-20)
        for told_of in ("scales", "histories", "at rest"):
            assert len(found[told_of]) == 8 * 5 and all(found[told_of].values()), told_of
        assert max(found["gradients"].values()) < 2**-7


@pytest.mark.parametrize(
    ("how", "collectives"),
    [
        ("per-pass", {"_allgather_base_": 2 * (3 + 2), "_reduce_scatter_base_": 2 * 3}),
        ("per-update", {"_allgather_base_": 3, "_reduce_scatter_base_": 3}),
        ("copies", {}),
    ],
)
def test_an_update_of_two_passes_exchanges_no_more_than_it_must(
    told: Told, how: str, collectives: dict[str, int]
) -> None:
    """Two layers, and what is outside of them: three groups of parameters. In each pass they are gathered for the
    forward, layers again for the backward, and their gradients are reduced; if once in an update, each once. Copies of
    a model sum each group's gradients once in an update, whatever else (groups of a single copy all-reduce nothing, but
    PyTorch counts them)."""
    assert len(told["passes"]) == 2
    for rank in told["passes"]:
        assert rank[how]["collectives"] == collectives | {"allreduce_": 3}
        assert max(rank[how]["gradients"].values()) < 2**-17


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("llama-3", ParallelSettings(tensor=4), "2 query groups cannot be shared evenly by 4 ranks"),
        ("llama-2", ParallelSettings(tensor=3), "4 attention heads cannot be shared evenly by 3 ranks"),
        ("deepseek-v3", ParallelSettings(tensor=8), "4 attention heads"),
        ("llama-3", ParallelSettings(expert=2), "0 experts cannot be divided evenly"),
        ("mixtral", ParallelSettings(expert=3), "4 experts cannot be divided evenly among parallel.expert = 3"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(family: str, sizes: ParallelSettings, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        shards.check(source_of(family).model, sizes)


@pytest.mark.parametrize(("family", "counts"), [("llama-3", True), ("mistral-large-4", False), ("kimi-k3", False)])
def test_statistics_of_latents_are_the_first_rank_s_alone_also_where_layers_share_them(
    family: str, counts: bool
) -> None:
    second: Any = world.World()
    second.tensor = SimpleNamespace(size=2, rank=1)
    model = pico.shape(family)
    mine = shards.ModelShards.of(model, torch.float32, second)
    assert family != "mistral-large-4" or any(map(model.shares_kv, range(model.num_layers)))
    for layer in filter(model.has_attention, range(model.num_layers)):
        attention = f"decoder.layers.{layer}.self_attention.core_attention"
        assert mine.contributes_to_sum(attention, "k", False) == counts, layer


OF_OWN_TOKENS = {
    *("position_embeddings", "layernorm", "per_layer_model_proj", "per_layer_proj_norm"),
    *("input_layernorm", "pre_mlp_layernorm", "linear_qkv", "linear_fc1", "in_proj", "norm", "W_down", "W_up"),
    *("linear_proj", "linear_fc2", "post_layernorm", "post_moe_layernorm", "shared_experts"),
    *("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"),
    *("self_attention_hyper_connection", "mlp_hyper_connection", "mapping_proj"),
    *("self_attention_res_norm", "self_attention_res_proj", "mlp_res_norm", "mlp_res_proj"),
    *("output_attn_res_norm", "output_attn_res_proj", "final_layernorm", "final_norm", "decoder"),
}
"""Modules outside of regions: their gradients are partial sums if a rank has its own tokens there, with `sequence`."""


def test_whose_gradients_are_partial_is_said_of_every_module_that_all_tensor_ranks_have_whole() -> None:
    """One that no list has is taken for one of OF_OWN_TOKENS: is it?"""
    said = {*shards._REPLICATED_IN_REGIONS, *shards._OF_LATENTS, *shards._OF_ALL_TOKENS, *OF_OWN_TOKENS}
    for family in EVEN:
        for name, shard in shards.ModelShards.of(pico.shape(family), torch.bfloat16, world.ALONE).tensors.items():
            module = name.split(".")[-2]
            untrained = module.isdigit() or module == "lerope" or "mtp." in name or ".indexer." in name
            assert untrained or shard.spec.parallel != REPLICATED or module in said, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["parallel.tensor=3"], "4 ranks cannot hold"),
        (["parallel.tensor=2", "parallel.replicate=4"], "4 copies of the model of 2 tensor-parallel ranks"),
        (["parallel.tensor=2", "parallel.expert=4"], "does not divide the 2 ranks that share a copy"),
        (["parallel.replicate=4", "parallel.expert=2"], "does not divide the 1 rank that shares a copy"),
        (["parallel.sequence=true"], "parallel.tensor is 1"),
    ],
)
def test_sizes_that_ranks_do_not_have_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        world.check(4, load_recipe("bf16", changes))


def test_tensor_ranks_have_the_same_rows_and_others_have_their_own() -> None:
    """Of 4 rows, 2 ranks of tensor parallelism make all of them together: so many make an update still."""
    world.check(4, load_recipe("bf16", ["parallel.tensor=4", "train.batch_size=1"]))
    with pytest.raises(RecipeError, match="cannot be divided evenly among 2 ranks"):
        world.check(4, load_recipe("bf16", ["parallel.tensor=2", "train.batch_size=1"]))


def test_rows_are_padded_so_that_each_rank_s_tokens_are_what_fp8_gemms_take() -> None:
    tokens = np.arange(3 * 41)
    rows = Rows(tokens, None, EqualRows(3, 40), padding=0, largest=122, digest="")
    assert [rows.shared_by(ranks).batch([0, 2]).tokens.shape for ranks in (1, 2, 4)] == [(2, 64), (2, 64), (2, 128)]
    both = Blend([rows, rows], [1.0, 1.0])
    assert both.shared_by(4).batch([0]).tokens.shape == (1, 128)
    assert both.shared_by(4).fingerprint == both.fingerprint

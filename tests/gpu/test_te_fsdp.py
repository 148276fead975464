"""Layers that FSDP2 gathers and frees, on Transformer Engine.

One rank: NCCL takes one to a GPU. What several ranks exchange, context parallelism too, wants several GPUs;
`tests/peers/test_te_on_cpu.py` has two on CPUs.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from te_pairs import RECIPES, SHAPE, SHAPES, assert_same, refused, train_step
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from precisionctl.model.model_shape import ModelShape
from precisionctl.precision import PRESETS, Precision
from precisionctl.recipe import Optimizer, ParallelSettings
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.optimizer.muon import MasterMuon
from precisionctl.trainer.parallel.world import ALONE, World, _meshes, local

pytestmark = pytest.mark.usefixtures("same_order")

UPDATES, PASSES = 2, 2
DELAYED = Precision(fp8=True, delayed=RECIPES["max"])
CASES = {name: (SHAPE, precision) for name, precision in (PRESETS | {"fp8-delayed": DELAYED}).items()}
CASES["experts, fp8-delayed"] = (SHAPES["like gpt-oss"], DELAYED)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    stands_in = torch.cuda.get_device_name() == "a CPU that stands in"
    backend, device = ("gloo", "cpu") if stands_in else ("nccl", "cuda")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield _meshes(device, 1, ParallelSettings())[0]
    dist.destroy_process_group()


def trained(
    shape: ModelShape,
    precision: Precision,
    world: World,
    recompute: bool = False,
    settings: Optimizer = Optimizer(lr=1e-3),  # noqa: B008, which is frozen
) -> tuple[list[Tensor], GPT, MasterAdamW]:
    """Losses of some updates of several passes, each with an evaluation between."""
    torch.manual_seed(0)
    model = GPT(shape, precision, "te", device="cuda", world=world, recompute=recompute)
    if settings.by_muon:
        optimizer: MasterAdamW = MasterMuon(model, shape, settings, model.shards)
    else:
        optimizer = MasterAdamW(model, settings, model.shards)
    tokens, losses = torch.randint(500, (UPDATES * PASSES, 2, 128), device="cuda"), []
    for update in range(UPDATES):
        for turn in range(PASSES):
            world.begin_pass(model, last=turn == PASSES - 1)
            losses.append(train_step(model, tokens[update * PASSES + turn]))
            optimizer.collect()
        optimizer.reduce(world)
        losses.append(optimizer.clip())
        optimizer.step(1e-3)
        with torch.no_grad():
            losses.append(model(tokens[0]).float().square().mean())
        world.reshard(model)
    return losses, model, optimizer


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("once", [False, True], ids=["per-pass", "per-update"])
@pytest.mark.parametrize(
    ("shape", "precision"), [pytest.param(*case, id=name, marks=refused(case[1])) for name, case in CASES.items()]
)
def test_layers_that_are_gathered_train_as_those_that_stay_to_the_last_bit(
    shape: ModelShape, precision: Precision, once: bool, recompute: bool, mesh: DeviceMesh
) -> None:
    expected, whole, masters = trained(shape, precision, ALONE, recompute)
    found, gathered, optimizer = trained(shape, precision, World(mesh=mesh, gathers_once=once), recompute)
    assert all(isinstance(each, DTensor) for each in gathered.parameters() if each.requires_grad)
    assert all(map(torch.equal, found, expected))
    for name, master in masters.masters.items():
        assert torch.equal(local(optimizer.masters[name]), master), name
    for name, linear in fp8_linears(gathered).items():
        if precision.keeps_state:
            assert_same(linear.fp8_state(), fp8_linears(whole)[name].fp8_state())


def test_muon_takes_matrices_that_are_gathered_for_it(mesh: DeviceMesh) -> None:
    """Masters, and momentum, of which AdamW has none."""
    settings = Optimizer(preset="muon", lr=1e-3, muon_extra_scale_factor=0.2)
    made = (trained(SHAPE, DELAYED, world, settings=settings) for world in (ALONE, World(mesh=mesh)))
    (expected, _, whole), (found, _, sharded) = made
    assert all(map(torch.equal, found, expected))
    assert "momentum_buffer" in whole.tensors
    for kind, tensors in whole.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(local(sharded.tensors[kind][name]), tensor), (kind, name)

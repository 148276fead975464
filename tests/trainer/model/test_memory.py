"""The estimate of memory against what autograd saves and what tensors of a training step take; and what is refused."""

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from pico import ABSENT, block_kinds, representing, shape
from soaking import in_soak
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from training import make_source, make_text, run, settings

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.cli import main
from precisionctl.codes.numerics import code_values
from precisionctl.errors import EnvironmentProblem
from precisionctl.fp8.state import ROLES
from precisionctl.model.model_shape import ModelShape
from precisionctl.recipe import Recipe, load_recipe
from precisionctl.reports.inspect import describe
from precisionctl.trainer import preflight
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.data.batch import Piece, make_batch
from precisionctl.trainer.measure import activations, memory
from precisionctl.trainer.measure.memory import estimate
from precisionctl.trainer.measure.parameters import Parameters, largest_linear
from precisionctl.trainer.model import mlp
from precisionctl.trainer.model.attention.core_attention import CoreAttention
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.loss import loss
from precisionctl.trainer.model.recurrent.recurrence import CHUNK
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.optimizer.fp8_lm import Fp8LmAdamW
from precisionctl.trainer.optimizer.muon import MasterMuon
from precisionctl.trainer.parallel.world import ALONE
from precisionctl.trainer.passes import backward
from precisionctl.trainer.run_plan import BUNDLED

LENGTH = 64

pytestmark = pytest.mark.usefixtures("bf16_kernels")  # through FP32, fewer tensors are kept, and others come and go


def recipe(name: str = "bf16", **keys: Any) -> Recipe:
    """Two passes of a row in an update."""
    given = {"data.sequence_length": LENGTH, "train.batch_size": 2, "precision.delayed.amax_history_len": 16}
    changes = [f"{key}={value}" for key, value in (given | {k.replace("__", "."): v for k, v in keys.items()}).items()]
    loaded = load_recipe(name, changes)
    return replace(loaded, precision=replace(loaded.precision, fp8=name != "bf16"))


class SwiGLU(torch.autograd.Function):
    """Keeps what Triton's kernel does (gpu_kernels.py)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values.contiguous())
        gate, up = values.chunk(2, -1)
        return F.silu(gate) * up


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd keeps as if Triton's kernels and TE's attention ran, which reads contiguous tensors."""
    attend = CoreAttention._attend

    def attend_contiguous(self: CoreAttention, heads: Sequence[Tensor], window: int | None) -> Tensor:
        plain = self.softcap is None and self.softmax_offset is None and self.msa is None
        return attend(self, [each.contiguous() for each in heads] if plain else heads, window)

    monkeypatch.setattr(CoreAttention, "_attend", attend_contiguous)
    monkeypatch.setattr(mlp, "kernels_for", lambda values: SimpleNamespace(SwiGLU=SwiGLU))


def saved(model: ModelShape, made: Recipe, length: int) -> int:
    """Bytes that autograd keeps of a pass, of its rows, beside the parameters."""
    torch.manual_seed(0)
    gpt = GPT(model, made.precision)
    parameters = {each.untyped_storage().data_ptr() for each in gpt.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # which is kept, or its place would be another's
        return tensor

    tokens = torch.randint(model.vocab_size, (made.train.micro_batch_size, length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total = loss(gpt(tokens), tokens, torch.ones_like(tokens, dtype=torch.bool), model.vocab_size)
    assert total.requires_grad
    return sum(count for count, _ in kept.values())


@pytest.mark.parametrize("name", ["fp8-delayed", *in_soak("bf16")])
@pytest.mark.parametrize("family", representing(block_kinds, most=8))
def test_activations_are_what_autograd_keeps(family: str, name: str) -> None:
    assert_kept(family, name)


def test_activations_in_nvfp4_are_what_autograd_keeps() -> None:
    """With codes and scales of their own for the backward, of the weights too."""
    assert_kept("llama-2", "nvfp4")


@pytest.mark.parametrize("family", representing(block_kinds))
@pytest.mark.usefixtures("with_kernels")
def test_activations_are_what_autograd_keeps_beside_kernels(family: str) -> None:
    assert_kept(family, "bf16", kernels=True)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("gemma3", 2),
        *in_soak(("mistral", 1), ("gemma2", 1), ("gpt-oss", 2)),
    ],
)
def test_masks_of_windows_and_caps_are_counted_and_shared_by_the_rows_of_a_pass(family: str, rows: int) -> None:
    """They are most of what long rows keep of a small model."""
    model, made = shape(family), recipe(train__micro_batch_size=rows)
    assert 0.93 < kept_and_saved(model, made, 1024) < 1.02
    plain = replace(model, sliding_window=1024, attn_logit_softcapping=None)
    assert saved(model, made, 1024) > saved(plain, made, 1024) + 2 * 1024**2


def assert_kept(family: str, name: str, kernels: bool = False) -> None:
    """9 % below (positions, indices) and 10 % above."""
    model, made = shape(family), recipe(name)
    if model.mla and name != "bf16":
        latents = 16 if model.mla.q_lora_rank or not model.dsa else None
        model = replace(model, mla=replace(model.mla, q_lora_rank=latents, qk_pos_emb_head_dim=16, v_head_dim=32))
    length = 4 * CHUNK if model.gdn or model.mamba else LENGTH
    assert 0.91 < kept_and_saved(model, made, length, kernels) < 1.1


def kept_and_saved(model: ModelShape, made: Recipe, length: int, kernels: bool = False) -> float:
    """How much is estimated for each byte that autograd keeps."""
    kept = activations.BytesKept.of(model, made, "emulated", kernels)
    layers, tokens = range(model.num_layers), length * made.train.micro_batch_size
    weights = [
        sum(each) * kept.codes for each in zip(Parameters.of(model).dense, Parameters.of(model).experts, strict=True)
    ]
    expected = sum(activations._layer(model, layer, kept, length) * tokens + weights[layer] for layer in layers)
    last = tokens * ((kept.norm + 2) * model.hidden_size + 2 * model.padded_vocab_size)
    last += tokens * activations._read_streams(model) if model.mhc else 0
    last += tokens * activations._projected_streams(model)
    return (expected + last) / saved(model, made, length)


class Live(TorchDispatchMode):
    """Counts the bytes of storages from the operation that makes them until they are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in tree_iter(made):
            if isinstance(each, Tensor):
                self._add(each.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, place: int) -> None:
        self.now -= self._known.pop(place, 0)


def measured(model: ModelShape, made: Recipe) -> int:
    """The most that tensors take in two updates, from making the model on."""
    train, length = made.train, made.data.sequence_length
    row = Piece(torch.arange(length + 1).numpy() % model.vocab_size, None)
    code_values(torch.zeros(2, dtype=torch.float8_e4m3fn))  # makes the table for pairs of codes, once in a process
    with Live() as live:
        gpt = GPT(model, made.precision, recompute=train.recompute == "layer")
        optimizer = {
            "adamw": lambda: MasterAdamW(gpt, made.optimizer),
            "fp8-lm": lambda: Fp8LmAdamW(gpt, made.optimizer),
            "muon": lambda: MasterMuon(gpt, model, made.optimizer),
        }[made.optimizer.preset]()
        for _ in range(2):
            for _ in range(train.batch_size // train.micro_batch_size):
                backward(gpt, make_batch([[row]] * train.micro_batch_size, 0, 1), length * train.batch_size)
                optimizer.collect()
            optimizer.reduce(ALONE)
            optimizer.clip()
            optimizer.step(1e-4)
    return live.peak


WIDE = {"hidden_size": 128, "ffn_hidden_size": 256}
LONG = {"data__sequence_length": 256, "train__micro_batch_size": 4, "train__batch_size": 8}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama-2", {}),
        ("falcon-h1", {}),
        ("nemotron-h", {}),
        ("qwen3-next", {}),
        ("deepseek-v4", {}),
        ("kimi-linear", {}),
        ("gemma4-small", {"stores_unused": True}),
    ],
)
def test_histories_are_those_of_all_roles_of_the_linears_that_keep_state(family: str, changes: dict[str, Any]) -> None:
    """Twice, as updates make new ones, with a capacity of up to twice as many."""
    model, made = replace(shape(family), **changes), recipe("fp8-delayed")
    views = [view for linear in fp8_linears(GPT(model, made.precision)).values() for view in linear.fp8_views()]
    gemms = sum(role == "weight" for role, _ in views)
    longer = recipe("fp8-delayed", precision__delayed__amax_history_len=1016)
    more = estimate(model, longer, "emulated").process - estimate(model, made, "emulated").process
    assert gemms and more == 2 * 2 * gemms * len(ROLES) * 1000 * torch.float32.itemsize


FP8_LM, RECOMPUTED = {"optimizer__preset": "fp8-lm"}, {**LONG, "train__recompute": "layer"}
MUON = {"optimizer__preset": "muon"}


@pytest.mark.parametrize(
    ("family", "keys", "name"),
    [
        ("llama-2", {}, "bf16"),
        ("llama-2", {}, "fp8-delayed"),
        ("llama-2", FP8_LM, "bf16"),
        ("llama-2", LONG, "nvfp4"),
        ("llama-2", MUON, "bf16"),
        *in_soak(
            ("llama-2", RECOMPUTED, "fp8-delayed"), ("jamba", {}, "fp8-delayed"), ("llama-2", RECOMPUTED, "nvfp4")
        ),
        *in_soak(("llama-2", MUON | {"train__batch_size": 1}, "bf16"), ("mixtral", MUON, "bf16")),
        *in_soak(("llama-2", FP8_LM, "fp8-delayed"), ("llama-2", RECOMPUTED, "bf16"), ("jamba", {}, "bf16")),
        *in_soak(
            *(
                (family, keys, name)
                for family, keys in (
                    ("llama-2", {"train__batch_size": 1}),
                    ("llama-2", LONG),
                    ("mixtral", LONG),
                    ("gemma4-small", RECOMPUTED),
                )
                for name in ("bf16", "fp8-delayed")
            )
        ),
    ],
)
def test_the_whole_is_what_tensors_take_in_a_step_and_no_more_than_a_third_beyond(
    family: str, keys: dict[str, Any], name: str
) -> None:
    model, made = replace(shape(family), **WIDE, max_position_embeddings=256), recipe(name, **keys)
    found = estimate(model, made, "emulated")
    assert 0.97 < (found.total - memory.PROCESS) / measured(model, made) < 1.35


def test_parameters_are_those_of_the_model_but_for_norms_biases_and_convolutions() -> None:
    families = (
        "llama-2",
        "llama-tied",
        "gpt2",
        "opt",
        "qwen3-moe",
        "deepseek-v2",
        "deepseek-v3",
        "gemma3n",
        "gemma4-small",
        "nemotron-h",
        "jamba",
        "deepseek-v4",
        *({"hy4", "qwen4", "glm-5.3"} - ABSENT.keys()),
        "kimi-k3",
    )
    for family in families:
        model = replace(shape(family), stores_unused=family == "gemma4-small")
        gpt = GPT(model, recipe().precision, device="meta")
        found = Parameters.of(model)
        assert found.all == sum(matrices(gpt)), family
        each = [dense + experts for dense, experts in zip(found.dense, found.experts, strict=True)]
        assert each == [sum(matrices(layer)) for layer in gpt.decoder.layers], family
        assert largest_linear(model) == max(matrices(gpt.decoder.layers)), family  # its tables are small


def matrices(module: torch.nn.Module) -> list[int]:
    """The numbers of parameters in matrices; gates, of one row, are none."""
    return [each.numel() for each in module.parameters() if each.dim() == 2 and len(each) > 1]


LLAMA_8B = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 128256, 8192)


def ahead(monkeypatch: pytest.MonkeyPatch, free: float, ranks: int = 1, **keys: Any) -> preflight.Preflight:
    monkeypatch.setattr(preflight, "free_memory", lambda: int(free * 1e9))
    made = recipe("fp8-delayed", **{"data__sequence_length": 8192, "train__batch_size": 64, **keys})
    return BUNDLED.look_ahead(LLAMA_8B, made, "te", ranks)


def test_llama_3_8b_needs_16_bytes_for_each_parameter_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO, section 3.1: 16 bytes, and 2 more for gradients in BF16 that FP32 ones are made of."""
    made = ahead(monkeypatch, 1000).memory
    assert (made.weights + made.optimizer + made.gradients) / 8.03e9 == pytest.approx(18, rel=1e-3)
    eight = ahead(monkeypatch, 1000, ranks=8).memory
    assert (eight.weights + eight.optimizer + eight.gradients) / 8.03e9 == pytest.approx(16 / 8, rel=1e-3)


def test_layers_that_are_gathered_once_take_six_bytes_for_each_parameter_of_the_whole_model() -> None:
    """Embedding and output layer are always gathered, with gradients in BF16."""
    each = (recipe(train__batch_size=64, parallel__gather=how) for how in ("per-pass", "per-update"))
    layered, whole = (estimate(LLAMA_8B, made, "te", ranks=8).total for made in each)
    outside = 2 * 128256 * 4096
    assert whole - layered == pytest.approx(6 * 8.03e9 - 4 * outside, rel=0.05)


def test_what_would_fit_fits_and_is_named_from_small_changes_to_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ahead(monkeypatch, 1000).alternatives == ()
    tight = ahead(monkeypatch, 170, train__micro_batch_size=8)
    assert not tight.fits
    words = [each.partition(" (")[0] for each in tight.alternatives]
    assert words[0] == "train.recompute=layer" or words[0].startswith("train.micro_batch_size")
    assert any(" ranks" in each for each in words)
    for each in tight.alternatives:
        assert float(each.partition(" (")[2].removesuffix(" GB)")) <= 170
    small = ahead(monkeypatch, 80)
    assert all("ranks" in each or "fp8-lm" in each for each in small.alternatives) and small.alternatives
    assert ahead(monkeypatch, 2).alternatives == ()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    make_source(folder / "source")
    make_text(folder / "text")
    return folder


def test_a_run_that_will_not_fit_is_refused_before_data_is_read(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "free_memory", lambda: 100_000_000)
    (tmp_path / "no text").mkdir()
    asked = settings(place / "source", tmp_path / "no text", tmp_path / "run", train__micro_batch_size=4)
    with pytest.raises(EnvironmentProblem, match=r"about 6\d\d\.\d MB on each rank, and 100\.0 MB are free"):
        run(asked)
    warned = settings(place / "source", place / "text", tmp_path / "run", train__memory_check="warn", train__steps=1)
    started, _, _ = run(warned)
    assert any("100.0 MB are free" in note for note in started.notes)


def test_a_dry_run_says_what_would_be_and_writes_nothing(place: Path, tmp_path: Path) -> None:
    words = ["resume", place / "source", "--data", place / "text", "--precision=fp8", "--dry-run"]
    keys = ("train.steps=9", "data.sequence_length=64", "train.batch_size=4")
    options = [f"--out={tmp_path / 'run'}", *(f"--set={key}" for key in keys)]
    result = CliRunner().invoke(main, [*map(str, words), *options])
    assert result.exit_code == 0, result.output
    words[4] = "--precision=bf16"
    in_bf16 = CliRunner().invoke(main, [*map(str, words), *options]).output
    assert "weights only, computed by PyTorch" in in_bf16 and "emulated" not in in_bf16
    inspected = describe(open_checkpoint(place / "source"))
    for part in (
        "from step 0 to 9, weights only, FP8 emulated in PyTorch",
        "4 rows of 64, 1 in a pass; 256 tokens",
        f"Model: {inspected['parameters']:,} parameters",
        "Nothing was started.",
    ):
        assert part in result.output
    assert not (tmp_path / "run").exists()


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(preflight._container(tmp_path)) == []
    for name, content in (
        ("memory.max", "1000"),
        ("memory.current", "700"),
        ("memory.stat", "anon 1\ninactive_file 50\n"),
    ):
        (tmp_path / name).write_text(content)
    assert list(preflight._container(tmp_path)) == [350]
    (tmp_path / "memory.max").write_text("max\n")
    assert list(preflight._container(tmp_path)) == []
    assert 0 < preflight.free_memory() < 1 << 50
    monkeypatch.setattr(preflight, "_container", lambda: iter(()))  # of a system without cgroups
    assert 0 < preflight.free_memory() < 1 << 50


@pytest.mark.parametrize("content", [None, "MemTotal:  8 kB\nMemFree:  4 kB\n"])
def test_a_system_that_does_not_say_what_is_available_has_all_its_memory(
    monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    """None has no such file, as macOS; WSL 1 and Linux before 3.14 have no such line in it."""

    def read_text(path: Path) -> str:
        if content is None:
            raise FileNotFoundError(path)
        return content

    monkeypatch.setattr(preflight, "_container", lambda: iter(()))
    monkeypatch.setattr(Path, "read_text", read_text)
    assert preflight.free_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    "environment",
    [{"LOCAL_WORLD_SIZE": "4"}, {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_NUM_NODES": "2"}],
    ids=str,
)
def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Slurm gives seven tasks to two nodes as four and three."""
    monkeypatch.setattr(preflight, "_container", lambda: iter([4000]))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert preflight.free_memory() == 1000

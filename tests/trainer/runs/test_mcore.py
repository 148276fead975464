"""`--engine megatron-core` as far as it can be looked at without starting it, and what it starts from: a run's
checkpoint, which megatron-core loads whole. tests/peers/test_megatron_engine.py trains."""

import logging
import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from core_models import logical, peer
from installed import judge
from judges import LLAMA_3_1
from soaking import in_soak
from training import make_source, make_text, run, settings

from precisionctl import errors
from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.conversion.known_state import KnownState
from precisionctl.conversion.ranks import NO_OTHERS
from precisionctl.errors import EnvironmentProblem, RecipeError, UnknownArchitecture
from precisionctl.fp8.state import DelayedScaling, Fp8State, Fp8States
from precisionctl.mcore import train_in_core
from precisionctl.mcore.core_log import core_log
from precisionctl.mcore.core_memory import core_memory
from precisionctl.mcore.core_model import make_config
from precisionctl.mcore.core_muon import check_muon
from precisionctl.mcore.train_in_core import CORE
from precisionctl.recipe import ParallelSettings, load_recipe
from precisionctl.reports.run import dry_run as lines_of
from precisionctl.sizes import size
from precisionctl.trainer import preflight
from precisionctl.trainer.model.loss import loss_bytes
from precisionctl.trainer.model.router_balance import Balance
from precisionctl.trainer.parallel.world import World
from precisionctl.trainer.preflight import require_memory
from precisionctl.trainer.resume import resume
from precisionctl.trainer.run_plan import dry_run, plan_run
from precisionctl.trainer.settings import Settings, read_recipe

LLAMA_3_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
QWEN_3_30B = LLAMA_3_70B | {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 40960,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("mcore")
    make_source(top / "source", family="llama-3", rope_parameters=LLAMA_3_1)
    make_text(top / "text.txt")
    return top


def in_core(place: Path, out: str = "core", source: str = "source", **changes: Any) -> Settings:
    return settings(place / source, place / "text.txt", place / out, **changes)


def test_megatron_core_loads_the_whole_checkpoint_of_a_run_with_either_optimizer(place: Path) -> None:
    """By its own load_state_dict, so that groups and counts are found too."""
    _, finished, _ = run(settings(place / "source", place / "text.txt", place / "run", train__steps=3))
    jobs = [
        {"do": "load", "directory": str(finished.checkpoint), "optimizer": way, "te_names": True}
        | {"out": str(place / f"loaded {way}")}
        for way in ("plain", "fully_reshardable")
    ]
    peer(place, jobs)
    reader = TorchDistReader(finished.checkpoint)
    everything = WithOptimizer(reader)
    for job in jobs:
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            held = torch.load(f"{job['out']}.optimizer.{kind}.rank0.pt")
            assert len(held) == len(reader.specs)
            for name, tensor in held.items():
                ours = f"optimizer.state.{kind}.{logical(name, set(held))}"
                assert torch.equal(tensor, read_tensor(everything, ours)), ours


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train__graphs": True}, "only the bundled trainer has train.graphs"),
        ({"collect_amax": True}, "only the bundled trainer has --collect-amax"),
        ({"optimizer__preset": "fp8-lm"}, "only the bundled trainer has optimizer.preset = fp8-lm"),
        (
            {"precision": "fp8", "precision__num_layers_at_end_in_bf16": 1},
            "only the bundled trainer has layers in BF16",
        ),
        (
            {"precision": "fp8", "precision__scaling": "block", "precision__block__use_f32_scales": True},
            "only the bundled trainer has precision.block.use_f32_scales",
        ),
        ({"parallel__tensor": 2}, "1 rank cannot be divided into tensor 2 x pipeline 1"),
        ({"parallel__expert": 2}, "with experts on 2"),
        ({"train__micro_batch_size": 4, "train__batch_size": 6}, "not a multiple"),
        ({"train__weight_casts": "per-update"}, "only the bundled trainer has train.weight_casts = per-update"),
    ],
    ids=str,
)
def test_what_megatron_core_is_not_asked_for_is_refused_before_anything_is_read(
    place: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        dry_run(in_core(place, "refused", **changes), CORE)
    assert not (place / "refused").exists()


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("nemotron-h", "Mamba-2 mixers"),
        ("qwen3-next", "gated delta nets"),
        ("glm-moe-dsa", "indexers"),
        ("deepseek-v4", "hyper-connections"),
    ],
)
def test_models_whose_layers_are_not_built_are_refused(family: str, part: str) -> None:
    """Megatron-Core computes them, by other specs of layers than a GPTModel's."""
    with pytest.raises(UnknownArchitecture, match=f"no layers with {part}"):
        train_in_core.check_model(pico.shape(family).padded(1), load_recipe("bf16"))


def test_sizes_must_divide_the_model(place: Path) -> None:
    model, recipe = from_hf_config(LLAMA_3_70B), load_recipe("bf16")
    refused = {
        "80 layers cannot be divided into 3": ParallelSettings(pipeline=3),
        "64 attention heads cannot be shared evenly by 3 ranks": ParallelSettings(tensor=3),
        "0 experts cannot be divided evenly among parallel.expert = 2": ParallelSettings(expert=2),
    }
    for words, sizes in refused.items():
        with pytest.raises(RecipeError, match=words):
            train_in_core.check_model(model, replace(recipe, parallel=sizes))


def test_experts_with_biases_are_not_for_tensor_ranks() -> None:
    model, recipe = pico.shape("gpt-oss"), load_recipe("bf16")
    train_in_core.check_model(model, recipe)
    with pytest.raises(RecipeError, match="experts with biases are not shared"):
        train_in_core.check_model(model, replace(recipe, parallel=ParallelSettings(tensor=2)))


def test_experts_on_tensor_ranks_ask_for_shared_tokens() -> None:
    """As megatron-core does while it trains: MoELayer.forward of 0.16.1 raises ValueError."""
    model, recipe = pico.shape("mixtral").padded(2), load_recipe("bf16")
    with pytest.raises(RecipeError, match=r"share the tokens too.*parallel\.sequence=true"):
        train_in_core.check_model(model, replace(recipe, parallel=ParallelSettings(tensor=2)))
    train_in_core.check_model(model, replace(recipe, parallel=ParallelSettings(tensor=2, sequence=True)))


@pytest.mark.filterwarnings("ignore::UserWarning:megatron")
@pytest.mark.parametrize("found", ["none", "0.3.0"])
def test_muon_without_the_package_that_megatron_core_calls_is_refused_before_anything_is_read(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    judge("megatron.core", "its Muon is asked for")
    if find_spec("emerging_optimizers"):
        pytest.skip("emerging_optimizers is installed")
    if found != "none":  # one that megatron-core cannot import from
        (made := tmp_path / "emerging_optimizers").mkdir()
        (made / "__init__.py").write_text(f"__version__ = '{found}'")
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(train_in_core, "stand_ins", nullcontext)
    try:
        with pytest.raises(EnvironmentProblem, match=rf"emerging_optimizers 0.*{found} is installed.*pip install"):
            train_in_core.resume(in_core(place, "muon", optimizer__preset="muon"), unexpected, unexpected)
    finally:
        sys.modules.pop("emerging_optimizers", None)
    assert not (place / "muon").exists()


def unexpected(*_: object) -> None:
    raise AssertionError("nothing is to begin")


@pytest.mark.parametrize(
    ("family", "tensor", "words"),
    [
        ("llama-3", 4, "there are 2 groups of queries: Megatron's Muon does not split those that ranks share"),
        ("afmoe", 1, r"Megatron's Muon splits a group of linear_qkv into \(\d+, \d+, \d+\) rows, and layer 0 has"),
    ],
)
def test_a_linear_qkv_that_megatrons_muon_would_not_split_alike_is_refused(
    family: str, tensor: int, words: str
) -> None:
    model, recipe = pico.shape(family), load_recipe("bf16", ["optimizer.preset=muon"])
    recipe = replace(recipe, parallel=ParallelSettings(tensor=tensor))
    with pytest.raises(RecipeError, match=f"{words}.*muon_split_qkv=false"):
        check_muon(model, recipe)
    for changes in ({"muon_split_qkv": False}, {"preset": "adamw"}):
        check_muon(model, replace(recipe, optimizer=replace(recipe.optimizer, **changes)))
    check_muon(pico.shape("llama-3"), replace(recipe, parallel=ParallelSettings(tensor=2)))


VARIANTS: tuple[dict[str, Any], ...] = (
    *({}, {"use_bias": False}, {"attention_bias": False}, {"num_experts_per_tok": 1}, {"moe_k": 1}),
    *({"hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": "gelu"}, {"num_experts_per_tok": 1, "norm_topk_prob": True}),
    {"activation_function": "gelu_new", "enable_bias": False},
)


@pytest.mark.filterwarnings("ignore::UserWarning:megatron")
@pytest.mark.parametrize(
    "sizes", [{}, {"tensor": 2, "sequence": True}, *in_soak({"expert": 2}, {"pipeline": 2})], ids=str
)
def test_megatron_core_builds_every_model_that_passes_the_check(sizes: dict[str, Any]) -> None:
    """Its TransformerConfig, which refuses what it cannot compute when the source has long been converted."""
    judge("megatron.core", "its TransformerConfig is asked")
    recipe = replace(load_recipe("bf16"), parallel=ParallelSettings(**sizes))
    built = set()
    for family, changes in product(pico.FAMILIES, VARIANTS):
        try:
            model = from_hf_config({**pico.settings(family), **changes}).padded(2)
            train_in_core.check_model(model, recipe)
        except errors.PrecisionctlError:
            continue
        for te in (False, True):
            make_config(model, recipe, Balance(), te=te, dtype=torch.bfloat16, equal_rows=True)
        built.add(family)
    assert "mixtral" in built


@pytest.mark.filterwarnings("ignore::UserWarning:megatron")
def test_megatron_core_is_asked_for_nvfp4_by_the_name_that_it_has() -> None:
    judge("megatron.core", "its TransformerConfig is asked")
    recipe = load_recipe("nvfp4", ["precision.num_layers_at_end_in_bf16=1"])
    model = from_hf_config(pico.settings("llama-2"))
    config = make_config(model, recipe, Balance(), te=True, dtype=torch.bfloat16, equal_rows=True)
    assert (config.fp4, config.fp4_recipe, config.fp8) == ("e2m1", "nvfp4", None)
    kept = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
    assert config.first_last_layers_bf16 and kept == (0, 1) and not config.fp4_param


def test_groups_of_queries_may_be_fewer_than_tensor_ranks_but_must_divide_them() -> None:
    model, recipe = from_hf_config(QWEN_3_30B), load_recipe("bf16")  # 4 groups
    for tensor in (2, 4, 8):
        train_in_core.check_model(model, replace(recipe, parallel=ParallelSettings(tensor=tensor, sequence=True)))
    wide = replace(model, num_query_groups=2, num_attention_heads=6, vocab_size=6, padded_vocab_size=6)
    with pytest.raises(RecipeError, match="tensor is 3, and there are 2 groups"):
        train_in_core.check_model(wide, replace(recipe, parallel=ParallelSettings(tensor=3, sequence=True)))


@pytest.mark.parametrize(("passes", "works"), [(1, False), (2, False), (4, True), (6, False), (8, True)])
def test_stages_interleave_only_with_as_many_passes_as_stages_or_a_multiple(
    place: Path, passes: int, works: bool
) -> None:
    """As forward_backward_pipelining_with_interleaving of megatron-core 0.16.1 asks for."""
    asked = in_core(place, parallel__pipeline=4, parallel__virtual=2)
    recipe = load_recipe("bf16")
    recipe = replace(
        recipe,
        parallel=ParallelSettings(pipeline=4, virtual=2),
        train=replace(recipe.train, batch_size=2 * passes, micro_batch_size=1),
    )
    with nullcontext() if works else pytest.raises(RecipeError, match="groups of 4, and an update has"):
        train_in_core.check(asked, recipe, 8)


def test_a_model_that_megatron_core_computes_otherwise_is_left_to_the_bundled_trainer(place: Path) -> None:
    make_source(place / "gemma", family="gemma2")
    with pytest.raises(UnknownArchitecture, match=r"computes `gemma2` differently.*Leave --engine out"):
        dry_run(in_core(place, source="gemma"), CORE)


def test_the_bundled_trainer_points_to_megatron_core_for_pipelines(place: Path) -> None:
    with pytest.raises(RecipeError, match="Give --engine megatron-core"):
        resume(settings(place / "source", place / "text.txt", place / "no", parallel__pipeline=2), print, print)


@pytest.mark.parametrize("changes", [{"precision": "fp8"}, {"parallel__context": 2}], ids=str)
def test_what_needs_transformer_engine_is_refused_without_it_before_anything_is_read(
    place: Path, changes: dict[str, Any]
) -> None:
    plain, asked = in_core(place), in_core(place, **changes)
    plan = replace(plan_run(plain, read_recipe(plain), 2), settings=asked, recipe=read_recipe(asked))
    with pytest.raises(EnvironmentProblem, match="is Transformer Engine's, and this machine does not run it"):
        CORE.check(plan, 2)


def test_without_megatron_core_the_error_says_what_to_install(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_in_core, "version", lambda name: "0.15.3")
    with pytest.raises(EnvironmentProblem, match=r"0.16 or newer, and 0.15.3 is.*precisionctl\[megatron\]"):
        train_in_core.resume(in_core(place), print, print)


def test_without_psutil_a_save_would_wait_for_ever(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "psutil" else object())
    with pytest.raises(EnvironmentProblem, match=r"megatron-core needs psutil.*precisionctl\[megatron\]"):
        train_in_core.resume(in_core(place), print, print)


def test_a_dry_run_tells_the_memory_in_megatron_core(place: Path) -> None:
    said = "\n".join(lines_of(dry_run(in_core(place, "dry"), CORE)))
    assert "from step 0 to 6" in said and "Memory of each rank" in said
    assert not (place / "dry").exists()


def test_what_does_not_fit_into_memory_is_told_with_the_pipeline_that_would(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe = from_hf_config(LLAMA_3_70B), load_recipe("llama-3-70b-cpt")
    recipe = replace(recipe, parallel=ParallelSettings(tensor=8, sequence=True))
    monkeypatch.setattr(preflight, "free_memory", lambda: 80 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ahead = CORE.look_ahead(model, recipe, "te", 8)
    longer = replace(recipe, parallel=replace(recipe.parallel, pipeline=4))
    needed = core_memory(model, longer, "te", ranks=32, gpu=False).total
    assert not ahead.fits and needed <= 80e9
    assert ahead.alternatives == (f"32 ranks with parallel.pipeline=4 ({size(needed)})",)
    with pytest.raises(EnvironmentProblem, match="What would fit: 32 ranks with parallel.pipeline=4 "):
        require_memory(ahead, recipe, World(NO_OTHERS))


def test_the_memory_of_a_rank_is_what_the_distributed_optimizer_divides() -> None:
    """18 bytes a parameter; weights and gradients over tensor and pipeline ranks, masters and moments over all."""
    model, recipe = from_hf_config(LLAMA_3_70B), load_recipe("llama-3-70b-cpt")
    sizes = ParallelSettings(tensor=8, sequence=True, pipeline=4)
    found = [core_memory(model, replace(recipe, parallel=sizes), "te", ranks=ranks) for ranks in (32, 64)]
    each = 70.55e9 / 32
    for memory, copies in zip(found, (1, 2), strict=True):
        assert memory.weights == pytest.approx(2 * each, rel=0.01)
        assert memory.gradients == pytest.approx(4 * each, rel=0.01)
        assert memory.optimizer == pytest.approx(12 * each / copies, rel=0.01)
        assert memory.total < 80e9
    muon = replace(recipe, parallel=sizes, optimizer=replace(recipe.optimizer, preset="muon"))
    vocabulary = 2 * 128256 * 8192
    whole = 8 * (70.55e9 - vocabulary) + 12 * vocabulary  # on each rank: no momentum is divided
    assert core_memory(model, muon, "te", ranks=64).optimizer == pytest.approx(whole / 32, rel=0.01)
    mixture, recipe = from_hf_config(QWEN_3_30B), load_recipe("qwen3-30b-a3b-cpt")
    apart = core_memory(mixture, replace(recipe, parallel=ParallelSettings(expert=8, pipeline=2)), "te", ranks=16)
    assert apart.weights < 2 * 30.53e9 / 2 / 5  # experts, its largest part, over eight


def test_megatrons_loss_holds_all_logits_in_fp32_and_the_bundled_trainers_none_or_a_chunk() -> None:
    """Megatron's vocab_parallel_cross_entropy was measured at 6 bytes for a logit; the mask of its padding adds 2."""
    model, recipe = replace(from_hf_config(QWEN_3_30B), num_layers=1, moe=None), load_recipe("qwen3-30b-a3b-cpt")
    larger = replace(model, padded_vocab_size=model.padded_vocab_size + 1024)
    core = [core_memory(each, recipe, "te", ranks=8).passes for each in (model, larger)]
    assert core[1] - core[0] == 8 * 1024 * recipe.data.sequence_length
    logits = model.padded_vocab_size * recipe.data.sequence_length
    on_gpu, on_cpu = (loss_bytes(logits, gpu=gpu) for gpu in (True, False))
    assert (on_gpu, on_cpu) == (4 * logits, 4 * logits + 8 * 2**18)  # on a GPU a kernel has each in a register


def test_warnings_of_one_rank_go_to_the_runs_folder_and_errors_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron, root = logging.getLogger("megatron.core"), list(logging.getLogger().handlers)
    with core_log() as goes_to, warnings.catch_warnings(action="default"):
        megatron.warning("early")
        goes_to(tmp_path)
        warnings.warn("late", stacklevel=1)
        megatron.warning("Overwriting old incomplete / corrupted checkpoint...")
        megatron.error("wrong")
    with core_log() as goes_to:
        goes_to(None)
        megatron.warning("of another rank")
    told = (tmp_path / "megatron.log").read_text()
    assert all(word in told for word in ("early", "UserWarning: late", "wrong"))
    assert "corrupted" not in told and "another" not in told
    assert capsys.readouterr().err == "wrong\n" and logging.getLogger().handlers == root


@pytest.mark.parametrize(("error", "shown"), [(KeyError("x"), "early\nwrong\n"), (RecipeError("x"), "wrong\n")])
def test_warnings_before_a_run_has_a_folder_are_shown_if_it_ends_in_an_unforeseen_error(
    capsys: pytest.CaptureFixture[str], error: Exception, shown: str
) -> None:
    megatron = logging.getLogger("megatron.core")
    with pytest.raises(type(error)), core_log():
        megatron.warning("early")
        megatron.error("wrong")
        raise error
    assert sorted(capsys.readouterr().err.splitlines(True)) == shown.splitlines(True)


def test_what_the_fp8_state_of_a_source_lacks_for_megatron_core_is_said(place: Path) -> None:
    """It has no warm-up; and it multiplies by routers' weights before experts' linear_fc2."""
    asked = in_core(place, precision="fp8")
    planned = plan_run(asked, read_recipe(asked), 1)  # as on a machine with Transformer Engine
    _, notes = train_in_core._carried_state(planned, None)
    assert "no FP8 state: activations and gradients start at scale 1" in notes[0]
    experts, recorded = replace(planned.mapping, model=from_hf_config(QWEN_3_30B)), Fp8State.fresh(1024)
    for producer, said in (("precisionctl", True), ("transformer_engine", False)):
        states = Fp8States(DelayedScaling(), {"decoder.layers.0.mlp.experts.linear_fc2": recorded}, producer=producer)
        _, notes = train_in_core._carried_state(replace(planned, mapping=experts, known=KnownState((states,))), None)
        assert any("before multiplication by the router's weights" in note for note in notes) == said

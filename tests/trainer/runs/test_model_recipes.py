"""The recipes that come along for a model: loaded, planned and held against the sizes of the real one, on no memory.

Sizes are those of the models' public config.json, numbers of parameters those that their makers give.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from soaking import few
from training import PLAIN_RECIPES
from transformers import AutoConfig, AutoModelForCausalLM

from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.hf_directory.fused_experts import sliced
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensor
from precisionctl.dtypes import DType
from precisionctl.errors import RecipeError
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import TensorSpec
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import check_fp8_gemms
from precisionctl.recipe import ParallelSettings, bundled_recipes, load_recipe
from precisionctl.trainer.measure.memory import estimate
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.parallel import shards
from precisionctl.trainer.parallel.world import check
from precisionctl.trainer.settings import check_length

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA_3 = LLAMA | {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0}
QWEN_3 = LLAMA | {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "head_dim": 128,
    "attention_bias": False,
}


def sizes(hidden: int, inner: int, layers: int, heads: int, groups: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
    }


@dataclass(frozen=True)
class Real:
    """A model, its parameters in billions, and the GPUs of 80 GB that its recipes' first lines name."""

    config: Mapping[str, Any]
    billions: float
    gpus: int


MODELS = {
    "llama-2-7b": Real(LLAMA | sizes(4096, 11008, 32, 32, 32), 6.74, 8),
    "llama-2-13b": Real(LLAMA | sizes(5120, 13824, 40, 40, 40), 13.02, 16),
    "llama-2-70b": Real(LLAMA | sizes(8192, 28672, 80, 64, 8), 68.98, 64),
    "llama-3-8b": Real(LLAMA_3 | sizes(4096, 14336, 32, 32, 8), 8.03, 8),
    "llama-3-70b": Real(LLAMA_3 | sizes(8192, 28672, 80, 64, 8), 70.55, 64),
    "qwen3-8b": Real(QWEN_3 | sizes(4096, 12288, 36, 32, 8), 8.19, 8),
    "qwen3-30b-a3b": Real(
        QWEN_3
        | sizes(2048, 6144, 48, 32, 4)
        | {
            "model_type": "qwen3_moe",
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        30.53,
        16,
    ),
    "mixtral-8x7b": Real(
        LLAMA
        | sizes(4096, 14336, 32, 32, 8)
        | {
            "model_type": "mixtral",
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46.70,
        32,
    ),
}
RECIPES = [f"{model}-{task}" for model in MODELS for task in ("cpt", "sft")]


def real_of(recipe: str) -> Real:
    return MODELS[recipe.rpartition("-")[0]]


@dataclass
class OnPaper:
    """A Hugging Face checkpoint of which only names and shapes are there."""

    model: ModelShape
    specs: Mapping[str, TensorSpec]
    layout: Any = "hf"
    path: None = None


def on_paper(real: Real) -> OnPaper:
    """As transformers names and shapes it."""
    config = dict(real.config)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    specs = {
        name: TensorSpec(tuple(values.shape), DType.of(values.dtype)) for name, values in theirs.state_dict().items()
    }
    stored = sliced(
        {name: StoredTensor(spec, 0) for name, spec in specs.items()}, "memory"
    )  # experts are one tensor there
    return OnPaper(from_hf_config(config), {name: each.spec for name, each in stored.items()})


@pytest.mark.parametrize("name", few(MODELS, "llama-3-70b", "mixtral-8x7b"))
def test_a_model_is_planned_and_built_at_its_real_size_under_its_recipes(name: str) -> None:
    """make_plan knows every tensor that transformers has of it; every GEMM of the trainer's model takes FP8."""
    real = MODELS[name]
    source = on_paper(real)
    plan = make_plan(source, "megatron")
    for task in ("cpt", "sft"):
        recipe = load_recipe(f"{name}-{task}")
        assert recipe.precision.fp8
        check_length(recipe, plan.model)
        check_fp8_gemms(plan, recipe.precision.of_layers(plan.model.num_layers))
    model = GPT(plan.model, recipe.precision, device="meta")
    count = sum(parameter.numel() for parameter in model.parameters())
    padding = (plan.model.padded_vocab_size - plan.model.vocab_size) * plan.model.hidden_size * 2
    assert (count - padding) / 1e9 == pytest.approx(real.billions, abs=0.005)
    assert {parameter_name for parameter_name, _ in model.named_parameters()} == set(plan.targets)


def test_there_is_one_for_each_model_and_task_and_nothing_besides() -> None:
    assert set(bundled_recipes()) == {*PLAIN_RECIPES, "cpt", *RECIPES}


@pytest.mark.parametrize("name", RECIPES)
def test_its_batches_divide_among_the_gpus_that_its_first_line_names(name: str) -> None:
    recipe, gpus = load_recipe(name), real_of(name).gpus
    assert f" {gpus} GPUs of 80 GB" in bundled_recipes()[name].read_text().replace("\n# ", " ")
    check(gpus, recipe)
    shards.check(from_hf_config(dict(real_of(name).config)), recipe.parallel)
    assert recipe.train.batch_size % (gpus // recipe.parallel.tensor * recipe.train.micro_batch_size) == 0
    assert 0 < recipe.schedule.warmup_steps < recipe.train.steps / 2
    for precision in ("fp8-delayed", "bf16"):
        check(gpus, replace(recipe, precision=load_recipe(precision).precision))


@pytest.mark.parametrize("name", RECIPES)
def test_it_fits_the_gpus_that_it_names_and_not_an_eighth_of_them(name: str) -> None:
    recipe, real = load_recipe(name), real_of(name)
    model = from_hf_config(dict(real.config))
    alone = replace(recipe, parallel=ParallelSettings())  # an eighth of the ranks cannot be dealt out so
    for precision in (recipe.precision, replace(recipe.precision, fp8=False)):
        taken = estimate(model, replace(recipe, precision=precision), "te", ranks=real.gpus, gpu=True).total
        assert 20e9 < taken < 72e9, f"{taken / 1e9:.0f} GB"
        assert estimate(model, replace(alone, precision=precision), "te", ranks=real.gpus // 8, gpu=True).total > 80e9


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return folder / f"{next(iter(files))}.toml"


def test_a_base_says_what_a_recipe_does_not(tmp_path: Path) -> None:
    top = write(
        tmp_path,
        top='base = "middle.toml"\n[optimizer]\nlr = 1e-3\n[data]\nblend = [{path = "a"}]\n',
        middle='base = "fp8-block"\n[optimizer]\nlr = 1e-4\nbeta2 = 0.9\n[data]\nblend = [{path = "b"}]\n',
    )
    made = load_recipe(top, ["optimizer.beta1=0.5"])
    assert (made.optimizer.lr, made.optimizer.beta1, made.optimizer.beta2) == (1e-3, 0.5, 0.9)
    assert [share.path for share in made.data.blend] == ["a"]
    assert made.precision == load_recipe("fp8-block").precision and made.schedule.warmup_steps == 20


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"top": 'base = "top.toml"'}, "leads back to this recipe .*top.toml"),
        ({"top": 'base = "other.toml"', "other": 'base = "top.toml"'}, "leads back to this recipe .*other.toml"),
        ({"top": 'base = "nothing"'}, "no recipe nothing"),
        ({"top": 'base = ".."'}, "a recipe is a TOML file"),
        ({"top": "base = 3"}, "base = 3 is not the name of a recipe"),
        ({"top": 'base = "other.toml"', "other": "[train]\nstep = 3"}, "unknown key train.step .*other.toml"),
        ({"top": 'base = "other.toml"\n[train]\nstep = 3', "other": ""}, "unknown key train.step .*top.toml"),
    ],
)
def test_a_bad_base_is_refused_where_it_is_bad(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match="(?s)" + message):
        load_recipe(write(tmp_path, **files))

"""Recipes: strict TOML, overrides, and every bundled one."""

import dataclasses
import math
import os
from pathlib import Path

import pytest
from training import PLAIN_RECIPES

from precisionctl.errors import RecipeError
from precisionctl.precision import PRESETS, Precision
from precisionctl.recipe import Data, Optimizer, Recipe, Schedule, Share, Train, bundled_recipes, load_recipe


def test_each_plain_recipe_says_what_its_name_says() -> None:
    for name in PLAIN_RECIPES:  # test_model_recipes.py has the others
        precision = load_recipe(name).precision
        assert precision.fp8 == ("bf16" not in name)
        assert (precision.codes == "NVFP4") == (name == "nvfp4")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_and_the_recipe_of_its_name_are_the_same_precision(name: str) -> None:
    assert load_recipe(name).precision == PRESETS[name]


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    assert load_recipe(tmp_path / "empty.toml") == Recipe()


def test_what_inspect_tells_to_paste_is_a_recipe(tmp_path: Path) -> None:
    """`--precision` says whether there is FP8 (docs/recipes.md)."""
    (tmp_path / "pasted.toml").write_text('[precision]\nkeep_bf16 = ["*.linear_fc2"]\n')
    (tmp_path / "other.toml").write_text("[train]\nsteps = 7\n")
    expected = Precision(fp8=False, keep_bf16=("*.linear_fc2",))
    assert load_recipe(tmp_path / "pasted.toml").precision == expected
    assert load_recipe(tmp_path / "other.toml", ['precision.keep_bf16=["*.linear_fc2"]']).precision == expected


def test_a_path_comes_before_a_bundled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bf16").write_text("[train]\nsteps = 7\n")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("bf16").train.steps == 7


def test_set_overrides_a_key_with_a_toml_value_or_a_bare_word() -> None:
    recipe = load_recipe(
        "fp8-delayed",
        [
            "train.steps=20",
            "optimizer.lr=1",
            "schedule.kind=wsd",
            "data.held_out=some/file.txt",
            "precision.delayed.amax_history_len=16",
            'precision.keep_bf16=["decoder.layers.0.*"]',
        ],
    )
    assert (recipe.train.steps, recipe.optimizer.lr, recipe.schedule.kind) == (20, 1.0, "wsd")
    assert recipe.data.held_out == "some/file.txt"
    assert recipe.precision.delayed.amax_history_len == 16
    assert recipe.precision.keep_bf16 == ("decoder.layers.0.*",)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=3", "Did you mean train.steps?"),
        ("trian.steps=3", "--set trian.steps=3.*Did you mean train.steps?"),
        ("train.lr=3", "Did you mean optimizer.lr?"),
        ("lr=3", "--set lr=3.*Did you mean optimizer.lr?"),
        ("optimizer.learning_rate=3", "Keys of optimizer: preset, lr, beta1, beta2, epsilon, weight_decay, clip_norm."),
        ("learning.rate=3", "Sections: precision, train, data, optimizer, schedule, router"),
        ("precision.schedule=[{until=3},{until=6, fp8=false}]", "end at 3, 6 of the run.*is a share of train.steps"),
        ("precision.delayed.margn=1", "Did you mean precision.delayed.margin?"),
        ("train.steps=many", r"train.steps = 'many' is not an integer.*--set train.steps=many"),
        ("train.steps=true", "train.steps = True is not an integer"),
        ("train.steps=0", "train.steps = 0 must be above 0"),
        ("schedule.kind=linear", "is not one of cosine, wsd, constant.*--set schedule.kind=linear"),
        ("train.batch_size=3", "not a multiple"),
        ("train=3", "--set wants section.key=value"),
        ("train.steps", "--set wants section.key=value"),
        ("train.steps.x=1", "train.steps"),
    ],
)
def test_a_bad_override_is_refused_with_the_way_out(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match="(?s)" + message.replace("?", r"\?").replace("[", r"\[")):
        load_recipe("bf16", [override, "train.micro_batch_size=2"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=nan", "0 or above"),
        ("optimizer.epsilon=inf", "above 0 and finite"),
        ("optimizer.beta1=1.5", "from 0 to below 1"),
        ("optimizer.beta2=1.0", "from 0 to below 1"),
        ("optimizer.muon_num_ns_steps=100", "from 1 to 99"),
        ("optimizer.weight_decay=-1", "0 or above"),
        ("optimizer.clip_norm=-1", "0 or above"),
        ("schedule.min_ratio=nan", "from 0 to 1"),
        ("schedule.warmup_steps=-5", "0 or above"),
        ("schedule.decay_steps=-1", "0 or above"),
        ("train.warmup_passes=-1", "0 or above"),
        ("train.seed=99999999999999999", "from 0 to 4294967295"),
        ("train.seed=-1", "from 0 to 4294967295"),
        ("data.sequence_length=0", "above 0"),
    ],
)
def test_a_number_that_no_run_could_use_is_refused(override: str, message: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(RecipeError, match=f"^{key} = .* must be {message}"):
        load_recipe("bf16", [override])


def test_every_number_of_a_recipe_has_bounds() -> None:
    for section in (Train, Data, Optimizer, Schedule):
        for field in dataclasses.fields(section):
            if type(field.default) in (int, float):
                with pytest.raises(RecipeError, match=f".{field.name} = nan must be"):
                    section(**{field.name: math.nan})


def test_a_name_that_is_no_recipe_lists_those_there_are() -> None:
    with pytest.raises(RecipeError, match=", ".join(sorted(bundled_recipes()))):
        load_recipe("fp9")


def test_a_file_that_is_no_toml_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(RecipeError, match="not TOML"):
        load_recipe(tmp_path / "bad.toml")


def test_a_key_that_is_like_none_lists_those_there_are() -> None:
    """`warn_at` has six letters of `learning_rate` in its order."""
    with pytest.raises(RecipeError, match=r"unknown key train.learning_rate .*Keys of train: steps, batch_size, "):
        load_recipe("bf16", ["train.learning_rate=1e-4"])
    with pytest.raises(RecipeError, match="Did you mean optimizer.lr?"):
        load_recipe("bf16", ["train.lr=1e-4"])


def test_a_blend_is_a_list_of_paths_and_weights() -> None:
    made = load_recipe("bf16", ['data.blend=[{path = "a", weight = 3}, {path = "b"}]'])
    assert made.data.blend == (Share("a", 3.0), Share("b", 1.0))


@pytest.mark.parametrize(
    ("blend", "message"),
    [
        ('[{path = "a", wieght = 1}]', "unknown key data.blend.wieght.*Did you mean data.blend.weight?"),
        ("[{weight = 1}]", r"\[data.blend\] lacks path"),
        ('[{path = "a", weight = 0}]', "data.blend.weight = 0.0 must be above 0"),
        ('["a"]', "data.blend = .* is not a list of tables"),
        ('{path = "a"}', "data.blend = .* is not a list of tables"),
    ],
)
def test_a_bad_blend_is_refused(blend: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("bf16", [f"data.blend={blend}"])


def test_one_path_and_a_blend_are_not_both_taken() -> None:
    with pytest.raises(RecipeError, match="data.path and data.blend are both given"):
        load_recipe("bf16", ["data.path=a", 'data.blend=[{path = "b"}]'])


def test_a_pipe_is_no_recipe_as_it_is_read_more_than_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecipeError, match="and this is none.*write what a pipe gives into a file"):
        load_recipe(tmp_path / "pipe")

"""Megatron's flags of FP8: its own names and words, and what they make of a recipe."""

import ast
import importlib.util
import re
from pathlib import Path

import click.testing
import pytest
from command_line import run

from precisionctl.cli import main
from precisionctl.errors import RecipeError
from precisionctl.fp8.state import DelayedScaling
from precisionctl.megatron_flags import FIRST_LAST, FLAGS, LAYERS, as_overrides, keys_of
from precisionctl.precision import PRESETS, BlockScaling, Precision
from precisionctl.recipe import load_recipe
from precisionctl.trainer import resume as trainer

NOT_TAKEN = {
    "fp4_param": "weights are kept in high precision",
    "fp4_quantizer_factory": "code of the user's",
    "fp8_param": "weights are kept in high precision",
    "fp8_quantizer_factory": "code of the user's",
    "fp8_interval": "has had no effect since TE 1.8",
    "fp8_wgrad": "all three GEMMs are in FP8",
    "fp8_dot_product_attention": "attention is in BF16",
    "fp8_multi_head_attention": "attention is in BF16",
    "moe_router_padding_for_fp8": "experts' tokens are always padded",
    "activation_func_fp8_input_store": "not a matter of GEMMs",
}


def source(path: str) -> str:
    """A file of megatron-core: to import it takes ten seconds."""
    found = importlib.util.find_spec("megatron")
    assert found is not None and found.submodule_search_locations
    return (Path(found.submodule_search_locations[0]) / path).read_text()


@pytest.fixture(scope="module")
def theirs() -> dict[str, ast.AnnAssign]:
    """TransformerConfig's fields by flag, as ArgumentGroupFactory names them (megatron/training/argument_utils.py)."""
    tree = ast.parse(source("core/transformer/transformer_config.py"))
    (config,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TransformerConfig")
    flags = {}
    for field in config.body:
        if isinstance(field, ast.AnnAssign):
            named = re.search(r"'arg_names': \['([\w-]+)'\]", ast.unparse(field))
            flags[named[1] if named else "--" + name_of(field).replace("_", "-")] = field
    return flags


def name_of(field: ast.AnnAssign) -> str:
    return ast.unparse(field.target)


def test_each_flag_is_megatron_s_and_has_its_words(theirs: dict[str, ast.AnnAssign]) -> None:
    switch = theirs[FIRST_LAST.name]
    assert (ast.unparse(switch.annotation), ast.unparse(switch.value or switch)) == ("bool", "False")
    for flag in FLAGS:
        annotation = ast.unparse(theirs[flag.name].annotation)
        words = set(re.findall(r"'(\w+)'", annotation))
        assert words - {"custom"} == set(flag.words), flag.name
        assert flag.words or annotation == "int", flag.name


def test_no_flag_of_fp8_or_fp4_is_left_without_a_word(theirs: dict[str, ast.AnnAssign]) -> None:
    ours = {flag.name for flag in (*FLAGS, FIRST_LAST)}
    others = {name_of(field) for flag, field in theirs.items() if flag not in ours}
    assert {name for name in others if "fp8" in name or "fp4" in name or "in_bf16" in name} == set(NOT_TAKEN)


def test_a_recipe_s_word_means_the_class_that_megatron_takes_for_it() -> None:
    chosen = r"config\.fp8_recipe == Fp8Recipe\.(\w+)[^:]*:\s+fp8_recipe = (?:[\w.]+\.)?(\w+)\("
    taken = dict(re.findall(chosen, source("core/fp8_utils.py")))
    ours = {
        "delayed": "TEDelayedScaling",
        "current": "Float8CurrentScaling",
        "block": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
    }
    (recipe,) = (flag for flag in FLAGS if flag.name == "--fp8-recipe")
    assert {word: ours[scaling] for word, scaling in recipe.words.items()}.items() <= taken.items()
    of_fp4 = source("core/fp4_utils.py")
    assert re.search(r"fp4_recipe == Fp4Recipe\.nvfp4:[^:]*:\s+fp4_recipe = [\w.]+\.NVFP4BlockScaling\(", of_fp4)


@pytest.mark.parametrize(
    ("given", "first_last", "expected"),
    [
        ({}, False, Precision(fp8=True)),
        ({"--fp8-recipe": "tensorwise"}, False, Precision(fp8=True, scaling="current")),
        (
            {"--fp8-format": "e4m3", "--fp8-margin": 2, "--fp8-amax-history-len": 16, "--fp8-amax-compute-algo": "max"},
            False,
            Precision(fp8=True, delayed=DelayedScaling(margin=2, fp8_format="E4M3", amax_history_len=16)),
        ),
        (
            {"--fp8-recipe": "blockwise", "--fp8-format": "hybrid"},
            False,
            Precision(fp8=True, scaling="block", block=BlockScaling(fp8_format="HYBRID")),
        ),
        ({"--fp4-format": "e2m1"}, False, PRESETS["nvfp4"]),
        ({"--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"}, False, PRESETS["nvfp4"]),
        (
            {"--fp8-recipe": "mxfp8", "--num-layers-at-end-in-bf16": 2},
            True,
            Precision(fp8=True, scaling="mxfp8", num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2),
        ),
    ],
)
def test_what_flags_make_of_a_recipe(given: dict[str, object], first_last: bool, expected: Precision) -> None:
    assert load_recipe("fp8-delayed", as_overrides(given, first_last)).precision == expected


def test_a_number_of_layers_without_the_switch_is_refused() -> None:
    with pytest.raises(RecipeError, match="--num-layers-at-end-in-bf16 has no effect without --first-last-layers-bf16"):
        as_overrides({"--num-layers-at-end-in-bf16": 2}, first_last=False)


@pytest.mark.parametrize("switch", [True, 1])
def test_layers_at_the_ends_are_as_many_as_megatron_s_defaults_where_arguments_give_no_number(switch: object) -> None:
    config, start, end = source("core/transformer/transformer_config.py"), *(flag.argument for flag in LAYERS)
    given: dict[str, object] = {"fp8": "e4m3", "fp8_recipe": "tensorwise", "first_last_layers_bf16": switch}
    for name in (start, end):
        (default,) = re.findall(rf"^    {name}: int = (\d+)$", config, re.MULTILINE)
        assert keys_of(given)[f"precision.{name}"] == int(default)
    assert re.search(r"if config\.first_last_layers_bf16 else 0", source("core/fp8_utils.py")), "any true value"
    assert keys_of({**given, end: 0})[f"precision.{end}"] == 0
    assert not {f"precision.{start}", f"precision.{end}"} & keys_of({**given, "first_last_layers_bf16": 0}).keys()


def test_fp8_and_fp4_at_once_are_refused_as_by_megatron() -> None:
    refused = r"if self\.fp4 and self\.fp8:\s+raise ValueError\("
    assert re.search(refused, source("core/transformer/transformer_config.py"))
    with pytest.raises(RecipeError, match="--fp8-format and --fp4-format exclude each other"):
        as_overrides({"--fp8-format": "e4m3", "--fp4-format": "e2m1"}, first_last=False)
    assert not keys_of({"fp8": "e4m3", "fp4": "e2m1", "fp8_recipe": "delayed", "fp4_recipe": "nvfp4"})


@pytest.mark.parametrize("of_fp8", ["--fp8-format hybrid", "--fp8-recipe blockwise", "--fp8-margin 0"])
@pytest.mark.parametrize("of_fp4", ["--fp4-format e2m1", "--fp4-recipe nvfp4", ""])
def test_no_flag_of_fp8_is_ignored_in_nvfp4(tmp_path: Path, of_fp8: str, of_fp4: str) -> None:
    asked = ["resume", tmp_path, "--precision", "nvfp4", *of_fp8.split(), *of_fp4.split()]
    said = f"{of_fp8.split()[0]} and {(of_fp4 or '--precision').split()[0]}.* exclude each other"
    assert re.search(said, run(*asked).stderr)


def test_resume_takes_them_under_set_and_its_help_stays_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[trainer.Settings] = []

    def note(settings: trainer.Settings, *_: object) -> None:
        asked.append(settings)
        raise RecipeError("enough")

    monkeypatch.setattr(trainer, "resume", note)
    flags = ["--fp8-format", "hybrid", "--fp8-recipe", "blockwise", "--first-last-layers-bf16"]
    command = ["resume", str(tmp_path), "--precision", "fp8", *flags, "--set", "precision.scaling=mxfp8"]
    click.testing.CliRunner().invoke(main, command)
    precision = load_recipe("fp8-delayed", asked[0].overrides).precision
    assert precision.scaling == "mxfp8" and precision.block.fp8_format == "HYBRID"
    assert (precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16) == (1, 1)
    shown = click.testing.CliRunner().invoke(main, ["resume", "--help"]).output
    assert not any(re.search(rf"^ *{flag.name}", shown, re.MULTILINE) for flag in FLAGS)
    assert "--fp8-recipe blockwise" in " ".join(shown.split())

"""trainer/backends/te*.py against Transformer Engine's source: its wheel is read, as importing needs a GPU."""

import ast
import inspect
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "precisionctl" / "trainer" / "backends"
OURS = ast.parse("\n".join(file.read_text() for file in sorted(FOLDER.glob("te*.py"))))
VERSION = "2.20.2"

ATTENTION = "pytorch/attention/dot_product_attention/dot_product_attention.py"

CALLED = {
    "te.is_fp8_available": ("pytorch/quantization.py", "is_fp8_available"),
    "te.is_mxfp8_available": ("pytorch/quantization.py", "is_mxfp8_available"),
    "te.is_nvfp4_available": ("pytorch/quantization.py", "is_nvfp4_available"),
    "te.is_fp8_block_scaling_available": ("pytorch/quantization.py", "is_fp8_block_scaling_available"),
    "te.make_graphed_callables": ("pytorch/graph.py", "make_graphed_callables"),
    "te.checkpoint": ("pytorch/distributed.py", "checkpoint"),
    "te.quantized_model_init": ("pytorch/quantization.py", "quantized_model_init"),
    "te.autocast": ("pytorch/quantization.py", "autocast.__init__"),
    "Linear": ("pytorch/module/linear.py", "Linear.__init__"),
    "LayerNormLinear": ("pytorch/module/layernorm_linear.py", "LayerNormLinear.__init__"),
    "GroupedLinear": ("pytorch/module/grouped_linear.py", "GroupedLinear.__init__"),
    "te.Fp8Padding": ("pytorch/module/fp8_padding.py", "Fp8Padding.__init__"),
    "te.Fp8Unpadding": ("pytorch/module/fp8_unpadding.py", "Fp8Unpadding.__init__"),
    "RMSNorm": ("pytorch/ops/basic/rmsnorm.py", "RMSNorm.__init__"),
    "LayerNorm": ("pytorch/ops/basic/layer_norm.py", "LayerNorm.__init__"),
    "Attention": (ATTENTION, "DotProductAttention.__init__"),
    "Attention super().forward": (ATTENTION, "DotProductAttention.forward"),
    "GroupedLinear super().forward": ("pytorch/module/grouped_linear.py", "GroupedLinear.forward"),
    "DelayedScaling": ("common/recipe/__init__.py", "DelayedScaling"),
    "Float8CurrentScaling": ("common/recipe/__init__.py", "Float8CurrentScaling"),
    "Float8BlockScaling": ("common/recipe/__init__.py", "Float8BlockScaling"),
    "MXFP8BlockScaling": ("common/recipe/__init__.py", "MXFP8BlockScaling"),
    "NVFP4BlockScaling": ("common/recipe/__init__.py", "NVFP4BlockScaling"),
    "QParams": ("common/recipe/__init__.py", "QParams"),
    "module.init_fp8_meta_tensors": ("pytorch/module/base.py", "TransformerEngineBaseModule.init_fp8_meta_tensors"),
    "super().forward": ("pytorch/module/layernorm_linear.py", "LayerNormLinear.forward"),
}
"""What these call of TE, and where TE defines it."""

OTHERS = ("Attention", "GroupedLinear")
"""Whose forward is not that of a linear."""

Source = Callable[[str], ast.Module]


@pytest.fixture(scope="module")
def te(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Parses a file of TE's wheel, which is Python alone and 1.2 MB."""
    folder = tmp_path_factory.mktemp("te")
    command = ["pip", "download", "-q", "--no-deps", "--only-binary=:all:", f"transformer_engine=={VERSION}"]
    subprocess.run([sys.executable, "-m", *command, "-d", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return lambda path: ast.parse((folder / "transformer_engine" / path).read_text())


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Calls in them of what they take from TE, by the name that they use."""
    taken = {name for name in imported(OURS, "transformer_engine") if name != "te"} | {
        "Linear",
        "LayerNormLinear",
        "GroupedLinear",
        "RMSNorm",
        "LayerNorm",
        "Attention",
    }
    within = {id(node): name for name in OTHERS for node in ast.walk(definition(OURS, name))}
    for node in ast.walk(OURS):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "_made":  # a recipe, by its class
                name, node = ast.unparse(node.args[0]), ast.Call(node.func, node.args[1:], node.keywords)
            if name == "super().forward" and id(node) in within:
                name = f"{within[id(node)]} {name}"
            if name.startswith("te.") or name in taken or name in CALLED:
                yield name, node


def imported(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
            yield from (alias.asname or alias.name for alias in node.names)


def definition(tree: ast.Module, name: str) -> ast.AST:
    node: ast.AST = tree
    for part in name.split("."):
        (node,) = (n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == part)
    return node


def signature(node: ast.AST) -> inspect.Signature:
    """Of a function or of a dataclass."""
    kind = inspect.Parameter
    if isinstance(node, ast.ClassDef):
        fields = [f.target.id for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
        return inspect.Signature([kind(name, kind.POSITIONAL_OR_KEYWORD, default=None) for name in fields])
    assert isinstance(node, ast.FunctionDef)
    positional = [a.arg for a in node.args.args if a.arg != "self"]
    required = len(positional) - len(node.args.defaults)
    parameters = [
        kind(name, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if i < required else None)
        for i, name in enumerate(positional)
    ]
    if node.args.vararg:
        parameters.append(kind(node.args.vararg.arg, kind.VAR_POSITIONAL))
    keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    parameters += [kind(a.arg, kind.KEYWORD_ONLY, default=kind.empty if d is None else None) for a, d in keywords]
    if node.args.kwarg:
        parameters.append(kind(node.args.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


def test_every_call_of_te_is_one_that_its_source_accepts(te: Source) -> None:
    made = list(calls())
    assert {name for name, _ in made} == set(CALLED)
    for name, call in made:
        accepted = signature(definition(te(CALLED[name][0]), CALLED[name][1]))
        keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        if len(keywords) < len(call.keywords):
            keywords |= cut()
        accepted.bind(*call.args, **keywords)


def cut() -> dict[str, ast.expr]:
    """What linears are told of tensor ranks, `**self._cut(mode)`."""
    made = definition(OURS, "TransformerEngineBackend._cut")
    (told,) = (node for node in ast.walk(made) if isinstance(node, ast.Dict) and node.keys)
    pairs = zip(told.keys, told.values, strict=True)
    return {key.value: value for key, value in pairs if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def test_both_linears_are_called_alike(te: Source) -> None:
    forwards = [te("pytorch/module/linear.py"), te("pytorch/module/layernorm_linear.py")]
    first, second = (
        signature(definition(tree, f"{name}.forward"))
        for tree, name in zip(forwards, ("Linear", "LayerNormLinear"), strict=True)
    )
    assert list(first.parameters)[:2] == list(second.parameters)[:2] == ["inp", "is_first_microbatch"]


def test_a_grouped_linear_takes_tokens_and_how_many_are_whose(te: Source) -> None:
    tree = te("pytorch/module/grouped_linear.py")
    assert list(signature(definition(tree, "GroupedLinear.forward")).parameters)[:2] == ["inp", "m_splits"]
    text = ast.unparse(definition(tree, "GroupedLinear"))
    assert "register_parameter(f'weight{i}'" in text and "register_parameter(f'bias{i}'" in text
    assert "if not isinstance(m_splits, torch.Tensor):" in text, "a list is taken"


def test_what_is_imported_from_te_is_there(te: Source) -> None:
    offered = set(imported(te("pytorch/__init__.py"), "transformer_engine.pytorch"))
    used = {n.attr for n in ast.walk(OURS) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "te"}
    assert used <= offered
    recipes = {getattr(node, "name", None) for node in te("common/recipe/__init__.py").body}
    assert set(imported(OURS, "transformer_engine.common.recipe")) <= recipes


def test_tensors_of_the_state_are_where_we_reach_for_them(te: Source) -> None:
    state = definition(te("pytorch/quantization.py"), "DelayedScalingRecipeState")
    assert isinstance(state, ast.ClassDef)
    assigned = {ast.unparse(n.targets[0]): ast.unparse(n.value) for n in ast.walk(state) if isinstance(n, ast.Assign)}
    assert assigned["self.scale"].startswith("torch.ones(num_quantizers,")
    assert assigned["self.amax_history"].startswith("torch.zeros(recipe.amax_history_len, num_quantizers,")
    base = definition(te("pytorch/module/base.py"), "TransformerEngineBaseModule")
    keys = {n.value for n in ast.walk(base) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert {"scaling_fwd", "scaling_bwd", "num_gemms"} <= keys


def test_attributes_that_we_read_of_te_s_modules_are_set_by_them(te: Source) -> None:
    init = definition(te("pytorch/module/layernorm_linear.py"), "LayerNormLinear.__init__")
    assigned = {ast.unparse(t) for n in ast.walk(init) if isinstance(n, ast.Assign) for t in n.targets}
    assert "self.layer_norm_bias" in assigned, "None for RMSNorm"
    names = {n.value for n in ast.walk(init) if isinstance(n, ast.Constant)}
    assert {"layer_norm_weight", "layer_norm_bias", "weight", "bias"} <= names


def test_te_s_calibration_is_still_nothing_in_the_linears_that_we_record_by_hooks(te: Source) -> None:
    """When this fails, TE calibrates again, and `recording` could use that."""
    for path, name in (("linear", "Linear"), ("layernorm_linear", "LayerNormLinear")):
        function = definition(te(f"pytorch/module/{path}.py"), f"{name}._get_quantizers")
        assert isinstance(function, ast.FunctionDef)
        assert ast.unparse(function.body[0]) == "if not self.fp8:\n    return [None] * 6"

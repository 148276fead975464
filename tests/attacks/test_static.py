"""No code here can execute what it reads: whoever adds one of these calls has to change this test."""

import ast
from pathlib import Path

import precisionctl

SOURCES = sorted(Path(precisionctl.__file__).parent.rglob("*.py"))

CALLS = {
    *("eval", "exec", "compile", "__import__", "execfile", "input", "breakpoint"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open", "runpy.run_path"),
    *("torch.load", "torch.hub.load", "torch.jit.load", "numpy.load", "np.load", "joblib.load"),
    *("yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "os.system", "os.popen", "importlib.import_module"),
    *("tarfile.open", "shutil.unpack_archive"),
}
"""Names of functions that run, import or unpack what they are given."""

KNOWN = {
    ("__main__.py", "exec"),  # of an empty text, for what that does to CPython
    ("discover.py", "importlib.import_module"),  # the modules of a folder of ours, by the names of its files
    ("checkpoints/megatron/provider.py", "yaml.load"),  # with a loader of plain values
}


def name_of(node: ast.expr) -> str:
    """`a.b.c` of a dotted name; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := name_of(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def suspicious(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, words = name_of(node.func), {word.arg: word.value for word in node.keywords}
        if name in CALLS or name.endswith(".extractall") or name == "yaml.load":
            found.append(name)
        for word, harmless in (("trust_remote_code", False), ("weights_only", True), ("allow_pickle", False)):
            value = words.get(word)
            if value is not None and not (isinstance(value, ast.Constant) and value.value is harmless):
                found.append(word)
        if name.endswith(".from_pretrained") and "trust_remote_code" not in words:
            found.append(name)
        shell = words.get("shell")
        if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
            found.append("shell")
    return found


def test_nothing_executes_what_it_reads() -> None:
    top = Path(precisionctl.__file__).parent
    found = {(str(path.relative_to(top)), name) for path in SOURCES for name in suspicious(path.read_text())}
    assert len(SOURCES) > 100
    assert found == KNOWN


def test_what_would_execute_is_seen() -> None:
    for code in (
        "pickle.loads(x)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "yaml.load(x)",
        "eval(x)",
        "A.from_pretrained(x, trust_remote_code=True)",
        "A.from_pretrained(x)",
        "run(x, shell=True)",
        "np.load(x, allow_pickle=flag)",
        "a.b.extractall()",
    ):
        assert suspicious(code), code
    assert not suspicious("A.from_pretrained(x, trust_remote_code=False)")

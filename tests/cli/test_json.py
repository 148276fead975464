"""What `--json` prints is what docs/json.md says: every key with its kind, and no key that the page does not have."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import repository
import torch
from command_line import run
from safetensors import safe_open
from scoring import save

import precisionctl.commands.hints as opening
from precisionctl.cli import main
from precisionctl.conversion import worker
from precisionctl.errors import GO_ON

PAGE = (repository.DOCS / "json.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
SECTIONS["export-inference"] = SECTIONS["convert"]
COMMANDS = [name for name, command in main.commands.items() if any("--json" in each.opts for each in command.params)]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What commands print of a small model and what is made of it."""
    here = tmp_path_factory.mktemp("json")
    save(here / "hf", "qwen3", dtype=torch.bfloat16)
    (here / "text.txt").write_text(" ".join(f"w{number % 249 + 1}" for number in range(60)))
    for name, losses in {"a": [2.0, 1.0], "b": [2.0, 1.5]}.items():
        (here / name).mkdir()
        rows = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
        (here / name / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    hf, megatron, served = (here / name for name in ("hf", "megatron", "served"))
    lines = [
        ["convert", hf, megatron, "--to", "megatron", "--precision", "fp8", "--dry-run"],
        ["convert", hf, megatron, "--to", "megatron", "--precision", "fp8", "--workers", 1],
        ["export-inference", hf, served, "--target", "vllm", "--scheme", "dynamic", "--workers", 1],
        ["tokenize", here / "text.txt", here / "corpus", "--tokenizer", hf, "--workers", 1],
        [
            "resume",
            hf,
            "--precision",
            "fp8",
            "--data",
            here / "text.txt",
            "--dry-run",
            "--set",
            "data.sequence_length=16",
        ],
        [
            *("resume", hf, "--precision", "fp8", "--data", here / "text.txt", "--out", here / "run"),
            *("--set", "data.sequence_length=16", "--set", "train.steps=2", "--set", "train.warmup_passes=1"),
            *("--set", "train.batch_size=2", "--set", "train.micro_batch_size=2"),
        ],
        [
            *("calibrate", hf, "--data", here / "text.txt", "--out", here / "state.safetensors"),
            *("--passes", 1, "--sequence-length", 16),
        ],
        ["inspect", hf],
        ["inspect", megatron, "--fp8", "--workers", 1],
        ["inspect", served],
        ["verify", hf, served, "--fp8"],
        ["verify", served, "--fp8"],
        ["verify", hf, "--target", "vllm"],
        ["compare", here / "a", here / "b"],
        ["compare", here / "a", here / "b", "--max-gap", "1%", "--last", 2],
        ["eval", hf, "--data", here / "text.txt", "--sequence-length", 16, "--against", hf],
        ["launch-args", megatron, "--framework", "megatron-lm"],
        ["doctor", megatron],
        ["doctor"],
        ["inspect", here / "a"],
        ["convert", hf, "--to", "nowhere"],
        ["--debgu", "inspect", hf],
        ["resume", hf, "--precision", "fp4", "--data", here / "text.txt"],
    ]
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        result = json.loads(run(*line, "--json").stdout)
        found.setdefault("Errors" if "error" in result else str(line[0]), []).append(result)
    conversion = ["convert", hf, here / "stopped", "--to", "megatron", "--workers", 1]
    for module, name, line in ((opening, "open_checkpoint", ["inspect", hf]), (worker, "write_rows", conversion)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, interrupted)
            stopped = run(*line, "--json")
        assert stopped.exit_code == GO_ON
        found.setdefault("Stopped", []).append(json.loads(stopped.stdout))
    return found


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def rows_of(section: str) -> Iterator[tuple[list[str], str]]:
    """The keys of each row of a section's tables, and their kind."""
    for keys, kind in re.findall(r"^\| (`.+?`) \| (\w[\w ]*?) \|", SECTIONS[section], re.MULTILINE):
        yield [key for key in re.findall(r"`(.+?)`", keys)], kind


def at(value: Any, steps: list[str]) -> Iterator[Any]:
    """The values that a key of the page names."""
    if not steps:
        yield value
    elif steps[0] == "[]" and isinstance(value, list):
        for each in value:
            yield from at(each, steps[1:])
    elif isinstance(value, dict):
        for key in value if steps[0] == "*" else [steps[0]]:
            if key in value:
                yield from at(value[key], steps[1:])


def steps_of(key: str) -> list[str]:
    return re.findall(r"\[\]|[^.\[\]]+", key)


KINDS: dict[str, Any] = {
    "text": str,
    "true": bool,
    "false": bool,
    "number": (int, float),
    "list": list,
    "object": dict,
    "null": type(None),
}


def is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return "true" in kind
    allowed = tuple(KINDS[word] for word in kind.split() if word != "or")
    return any(isinstance(value, one) for one in allowed) or ("number" in kind and value in ("inf", "-inf", "nan"))


def test_the_page_has_every_command_that_prints_json() -> None:
    assert set(SECTIONS) == {*COMMANDS, "Errors", "Stopped"}


@pytest.mark.parametrize("section", SECTIONS)
def test_keys_are_what_the_page_says_and_no_others(printed: dict[str, list[dict[str, Any]]], section: str) -> None:
    documented: dict[tuple[str, ...], set[str]] = {(): {"schema_version"}}
    for keys, kind in rows_of(section):
        for key in keys:
            steps = steps_of(key)
            for number, step in enumerate(steps):
                documented.setdefault(tuple(steps[:number]), set()).add(step)
            values = [value for result in printed[section] for value in at(result, steps)]
            wrong = [value for value in values if not is_a(value, kind)]
            assert wrong == [], f"{key} is not {kind}"
    for opened, names in documented.items():  # what the page opens up, it has all of
        for result in printed[section]:
            assert result["schema_version"] == 1
            for value in at(result, list(opened)):
                if isinstance(value, dict) and "*" not in names:
                    assert value.keys() <= names, opened


def test_a_stopped_command_says_whether_a_part_is_kept(printed: dict[str, list[dict[str, Any]]]) -> None:
    assert [(each["stopped"], each["kept"]) for each in printed["Stopped"]] == [("SIGINT", False), ("SIGINT", True)]


def test_a_result_says_where_it_is_and_how_much_and_leaves_the_plan_to_a_dry_run(
    printed: dict[str, list[dict[str, Any]]],
) -> None:
    planned, made = printed["convert"]
    assert planned.keys() - made.keys() == {"jobs", "targets", "derived", "quantization", "estimate"}
    assert made.keys() - planned.keys() == {"done_before"} and made["done_before"] is False
    for key in ("model", "parallelism", "destination", "tensors", "bytes", "coded_weights"):
        assert made[key] == planned[key]
    assert Path(made["destination"]).is_dir()
    (exported,) = printed["export-inference"]
    with safe_open(Path(exported["destination"]) / "model.safetensors", "pt") as file:
        values = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert exported["tensors"] == len(values)
    assert exported["bytes"] == sum(each.nbytes for each in values)
    assert exported["coded_weights"] == sum(each.dtype == torch.float8_e4m3fn for each in values) > 0


def test_a_gate_tells_its_verdict_and_its_limit(printed: dict[str, list[dict[str, Any]]]) -> None:
    free, gate = printed["compare"]
    assert (free["limit"], free["within"]) == (None, None) and (gate["limit"], gate["within"]) == (0.01, False)


def test_a_dry_run_of_training_has_the_numbers_of_its_lines(printed: dict[str, list[dict[str, Any]]]) -> None:
    planned, _ = printed["resume"]
    inspected = printed["inspect"][0]
    assert planned["parameters"] == inspected["parameters"] and planned["tokens"] == 32 * 16
    assert planned["memory"]["total"] == sum(planned["memory"]["parts"].values()) > 0
    assert planned["memory"]["fits"] == (planned["memory"]["total"] <= planned["memory"]["free"])
    assert (planned["step"], planned["steps"], planned["load"]) == (0, 1000, "weights")
    assert planned["notes"][0].startswith("learning rates: ")


def test_a_run_tells_where_it_ended_and_what_its_metrics_have(printed: dict[str, list[dict[str, Any]]]) -> None:
    _, ran = printed["resume"]
    metrics = [json.loads(line) for line in (Path(ran["out"]) / "metrics.jsonl").read_text().splitlines()]
    assert (ran["step"], ran["last_step"], ran["steps"]) == (0, metrics[-1]["step"], 2)
    assert ran["loss"] == metrics[-1]["loss"] and (ran["stopped"], ran["kept"]) == (None, None)
    assert Path(ran["checkpoint"]).is_dir() and ran["fp8"]["warm-up"]["input"] == 8


def test_a_calibration_tells_what_it_recorded(printed: dict[str, list[dict[str, Any]]]) -> None:
    (made,) = printed["calibrate"]
    assert Path(made["out"]).is_file() and (made["passes"], made["rows"], made["stopped"]) == (1, 1, None)
    layers = 2
    assert made["recorded"] == {
        **dict.fromkeys(("input", "weight", "grad_output"), 4 * layers),
        "k": layers,
        "v": layers,
    }


def test_wrong_usage_is_an_object_too(printed: dict[str, list[dict[str, Any]]]) -> None:
    kinds = [each["error"]["kind"] for each in printed["Errors"]]
    assert kinds == ["UnknownFormat", "UsageError", "UsageError", "UsageError"]
    assert "nowhere" in printed["Errors"][1]["error"]["what"] and "--debug" in printed["Errors"][2]["error"]["what"]

"""The demo's material and its verdicts; `make demo` runs the story itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.demo import story
from precisionctl.demo.story import CommandRun, DemoResults
from precisionctl.errors import DestinationExists, PrecisionctlError
from precisionctl.tokens.tokenizer import Tokenizer
from precisionctl.trainer.data import load_rows


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "run"
    story.prepare(folder, lambda line: None)
    return folder


def test_no_text_is_both_trained_on_and_held_out(prepared: Path) -> None:
    train, held_out = ({file.name for file in (prepared / "text" / part).iterdir()} for part in ("train", "held-out"))
    assert train and held_out
    assert not train & held_out


def test_the_chats_are_rows_to_fine_tune_on_with_the_tokenizer_of_the_model(prepared: Path) -> None:
    tokenizer = Tokenizer(open_checkpoint(prepared / "hf").companions.files)
    rows = load_rows(prepared / "text" / "chats.jsonl", tokenizer, 128)
    assert len(rows) > 1000
    learned = tokenizer.decode(rows.tokens[rows.learned][:40])
    assert "<|user|>" not in learned and "def " not in learned


def test_a_second_demo_does_not_write_over_the_first(prepared: Path) -> None:
    with pytest.raises(DestinationExists):
        story.prepare(prepared, lambda line: None)


def test_a_command_that_fails_ends_the_story(tmp_path: Path) -> None:
    with pytest.raises(PrecisionctlError, match="ended with 2"):
        story.Shell(tmp_path, lambda line: None)("inspect nothing-here")


def test_what_commands_print_is_shown_line_by_line(prepared: Path) -> None:
    shown: list[str] = []
    story.Shell(prepared, shown.append)("inspect hf")
    assert shown[:2] == ["", "$ precisionctl inspect hf"]
    assert [line for line in shown if "llama" in line] and not [line for line in shown if "\n" in line]


def ran(result: Any, code: int = 0) -> CommandRun:
    return CommandRun("precisionctl ...", json.dumps(result), code, 1.0)


def compared(*statuses: str) -> CommandRun:
    return ran({"tensors": [{"status": status} for status in statuses]}, int("differs" in statuses))


def told(**changes: Any) -> DemoResults:
    same = compared("exact", "exact")
    perplexity = {run: ran({"perplexity": 100.0, "precision": "bfloat16"}) for run in ("bf16", "fp8", "fp8-vllm")}
    gaps = ran({"runs": [{"run": "fp8", "mean": 0.001}, {"run": "fp8-cold", "mean": 0.05}]})
    answers: dict[str, Any] = {
        "there": same,
        "gaps": gaps,
        "state": same,
        "last_bit": same,
        "rules": ran({"findings": []}),
    }
    return DemoResults(**(answers | {"codes": same, "perplexity": perplexity, "ran": [same]} | changes))


def write_runs(folder: Path, **losses: list[float]) -> Path:
    first = {"start": 1, "bf16": 3, "fp8": 3, "fp8-cold": 3}
    for name in ("start", "bf16", "fp8", "fp8-cold", "bf16-on", "fp8-on", "sft"):
        run = folder / name
        run.mkdir()
        values = losses.get(name.replace("-", "_"), [3.0, 2.0])
        lines = (json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(values, first.get(name, 1)))
        (run / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def verdicts(told: DemoResults, folder: Path) -> list[str]:
    from precisionctl.demo import report  # for which each process that collects would import matplotlib

    return [row[3] for row in report.table(told, folder).rows]


def test_what_is_as_promised_is_said_to_be(tmp_path: Path) -> None:
    folder = write_runs(tmp_path, fp8_cold=[3.3, 2.2], sft=[5.0] * 10 + [4.0] * 10)
    assert set(verdicts(told(), folder)) == {"yes", "-"}


@pytest.mark.parametrize(
    "broken",
    [
        {"there": compared("exact", "differs")},
        {"state": compared("exact", "differs")},
        {"last_bit": compared("differs", "exact")},
        {"codes": compared("encoded", "differs")},
        {"rules": ran({"findings": [{"what": "a scale is missing"}]}, code=1)},
        {"gaps": ran({"runs": [{"run": "fp8", "mean": 0.02}, {"run": "fp8-cold", "mean": 0.0}]})},
    ],
    ids=lambda broken: next(iter(broken)),
)
def test_what_is_not_as_promised_is_said_too(tmp_path: Path, broken: dict[str, CommandRun]) -> None:
    folder = write_runs(tmp_path, fp8_cold=[3.3, 2.2], sft=[5.0] * 10 + [4.0] * 10)
    assert verdicts(told(**broken), folder).count("NO") == 1


def test_a_seeded_start_as_bad_as_a_cold_one_is_said_to_be(tmp_path: Path) -> None:
    folder = write_runs(tmp_path, fp8=[3.3, 2.0], fp8_cold=[3.3, 2.0], sft=[5.0] * 10 + [4.0] * 10)
    assert verdicts(told(), folder).count("NO") == 1


def test_the_page_is_whole_in_itself_and_names_every_command(tmp_path: Path) -> None:
    from precisionctl.demo import report

    folder = write_runs(tmp_path)
    report.write(told(), folder, report.table(told(), folder))
    page = (folder / report.PAGE).read_text()
    assert "precisionctl ..." in page and "FP8 going on after Hugging Face and back" in page
    assert "<script" not in page and "src=" not in page
    assert (folder / report.PICTURE).read_bytes().startswith(b"\x89PNG")

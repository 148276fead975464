"""The library: its page is run as it stands, and what it gives is what transformers reads."""

import inspect
import re
from pathlib import Path

import pico
import pytest
import repository
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file

from precisionctl import api
from precisionctl.errors import CheckpointError, DestinationExists, RecipeError

PAGE = (repository.DOCS / "library.md").read_text(encoding="utf-8")


def test_the_page_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Qwen3-0.6B").mkdir()
    pico.save(tmp_path / "Qwen3-0.6B", "qwen3")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL):
        exec(code, names)
    shown = capsys.readouterr().out
    assert (
        "torch.float32 torch.float8_e4m3fn" in shown and "no such file or directory somewhere Check the path." in shown
    )


def test_the_page_has_every_function_and_nothing_else() -> None:
    listed = set(re.findall(r"^\| `(\w+)", PAGE, re.MULTILINE))
    functions = {name for name in api.__all__ if inspect.isfunction(getattr(api, name))}
    assert listed == functions | {"Request", "Parallelism"}
    assert all(getattr(api, name).__doc__ for name in api.__all__)


def test_tensors_are_what_the_file_has_whole_or_in_rows(tmp_path: Path) -> None:
    pico.save(tmp_path, "qwen3")
    checkpoint, stored = api.open_checkpoint(tmp_path), load_file(tmp_path / "model.safetensors")
    assert checkpoint.keys() == stored.keys() and (checkpoint.layout, checkpoint.fp8) == ("hf", None)
    for name, values in stored.items():
        assert torch.equal(checkpoint[name], values) and checkpoint[name].dtype == values.dtype
    assert torch.equal(checkpoint.rows("lm_head.weight", 3, 2), stored["lm_head.weight"][3:5])
    with pytest.raises(IndexError):
        checkpoint.rows("lm_head.weight", -1, 2)
    with pytest.raises(KeyError):
        checkpoint["no.such.weight"]


def test_a_result_is_cut_for_the_ranks_that_a_request_names(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    pico.save(tmp_path / "a", "qwen3")
    cut = api.Parallelism(tensor=2, pipeline=2)
    api.convert(api.Request(tmp_path / "a", tmp_path / "b", "megatron", container="torch", parallelism=cut), workers=1)
    assert len([*(tmp_path / "b").rglob("mp_rank_*")]) == 4


def test_what_is_there_is_not_replaced_and_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    pico.save(tmp_path / "a", "qwen3")
    request = api.Request(tmp_path / "a", tmp_path / "b", "hf")
    assert api.plan(request).targets and not (tmp_path / "b").exists()
    assert not api.convert(request, workers=1).done_before
    with pytest.raises(DestinationExists):
        api.convert(request, workers=1)
    for to, precision in (("magatron", "bf16"), ("hf", "bf61")):
        with pytest.raises(RecipeError, match=f"no conversion to {to} in {precision}"):
            api.Request(tmp_path / "a", tmp_path / "c", to, precision)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="no engine"):
        api.check_target(tmp_path / "b", "vlm")
    assert api.check_target(tmp_path / "b", "vllm", reference=str(tmp_path / "a"))  # as without: it holds no codes
    with pytest.raises(CheckpointError):
        api.check_target(tmp_path / "b", "vllm", reference=tmp_path / "nothing")
    with pytest.raises(RecipeError, match="which says which model"):
        api.open_checkpoint(tmp_path / "a", architecture="llama")
    with pytest.raises(CheckpointError):
        api.inspect(tmp_path)


def test_paths_are_strings_as_well(tmp_path: Path) -> None:
    pico.save(tmp_path, "qwen3", dtype=torch.bfloat16)
    here = str(tmp_path)
    assert api.inspect(here)["architecture"] == "qwen3" and api.readiness(here, workers=1).verdicts
    assert api.Calibration(here, f"{here}/text", f"{here}/out").out == tmp_path / "out"  # type: ignore[arg-type]
    asked = api.Request.export(here, f"{here}/out", "vllm", fp8_state=f"{here}/state", reference=here)
    assert (asked.source, asked.fp8_state, asked.reference) == (tmp_path, tmp_path / "state", tmp_path)
    with pytest.raises(CheckpointError):
        api.evaluate(f"{here}/none", f"{here}/text")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_that_lacks_its_config_is_looked_at_with_a_reference(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    model = pico.make_and_save(tmp_path / "hf", "qwen3")
    files = torch.distributed.checkpoint.FileSystemWriter(tmp_path / "dcp")
    torch.distributed.checkpoint.save(model.state_dict(), storage_writer=files, no_dist=True)
    assert api.inspect(tmp_path / "dcp")["model"] is None
    assert api.inspect(tmp_path / "dcp", reference=tmp_path / "hf")["model"]["architecture"] == "qwen3"
    assert api.readiness(tmp_path / "dcp", reference=tmp_path / "hf", workers=1).roles

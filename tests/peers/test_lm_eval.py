"""lm-eval itself, over a model in the precision that is stored: tasks of our own, whose numbers transformers' logits
give too."""

import json
import os
import subprocess
import tomllib
from pathlib import Path

import environments
import in_memory
import pytest
import torch
from scoring import WORDS, save
from transformers import AutoModelForCausalLM

from precisionctl.checkpoints.huggingface import HuggingFaceReader

PROJECT = tomllib.loads((environments.ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NEEDED = [*PROJECT["dependencies"], *EXTRAS["train"], *EXTRAS["lm-eval"]]
INSTALL = (*environments.OUR_VERSIONS, *(each for each in NEEDED if not each.startswith("precisionctl")))
"""All but the project itself, which is this checkout."""

CHOICE = """\
task: pick
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
ROLLING = """\
task: roll
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
MADE = """\
task: made
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{greedy}}}}"
generation_kwargs: {{until: ["w3 "], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def python():
    return environments.python_with("lm-eval", INSTALL)


def evaluated(python: Path, folder: Path, model: Path) -> dict:
    tasks = ",".join(str(folder / f"{name}.yaml") for name in ("pick", "roll", "made"))
    command = [python, "-m", "precisionctl", "eval", model, "--tasks", tasks, "--json"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    environment = os.environ | offline | {"PYTHONPATH": str(environments.ROOT)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, cwd=folder)
    return json.loads(done.stdout)


def words(tokens: torch.Tensor) -> str:
    return " ".join(WORDS[token] for token in tokens.tolist())


def test_tasks_find_what_transformers_logits_say(tmp_path, python):
    model = save(tmp_path / "model")
    draw = torch.Generator().manual_seed(3)
    rows, right, total, count = [], 0, 0.0, 0
    for number in range(12):
        text, *choices = (torch.randint(5, 250, (size,), generator=draw) for size in (9, 2, 3, 1))
        with torch.no_grad():
            likely = [float(of(model, text, choice)) for choice in choices]
            greedy = model.generate(text[None], max_new_tokens=6, do_sample=False)[0, 9:]
        answer = number % 3
        right += max(range(3), key=likely.__getitem__) == answer
        total += float(of(model, torch.tensor([0]), text))
        count += len(text)
        made = words(greedy)
        row = {"text": words(text), "choices": [f" {words(choice)}" for choice in choices], "answer": answer}
        rows.append(row | {"greedy": made if number % 2 else "w1"})
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, task in (("pick", CHOICE), ("roll", ROLLING), ("made", MADE)):
        (tmp_path / f"{name}.yaml").write_text(task.format(data=data))
    found = evaluated(python, tmp_path, tmp_path / "model")
    assert found["precision"] == "float32" and found["samples"]["pick"]["effective"] == 12
    assert found["results"]["pick"]["acc,none"] == pytest.approx(right / 12)
    assert found["results"]["roll"]["word_perplexity,none"] == pytest.approx(
        float(torch.tensor(-total / count).exp()), rel=1e-4
    )
    assert found["results"]["made"]["exact_match,none"] == pytest.approx(6 / 12)


@torch.no_grad()
def of(model: AutoModelForCausalLM, context: torch.Tensor, continuation: torch.Tensor) -> torch.Tensor:
    """The log-likelihood of a continuation."""
    row = torch.cat([context, continuation])
    logs = model(row[None, :-1]).logits[0, len(context) - 1 :].double().log_softmax(-1)
    return logs.gather(1, continuation[:, None]).sum()


def test_an_export_is_evaluated_with_its_codes(tmp_path, python):
    save(tmp_path / "model", dtype=torch.bfloat16)
    source = in_memory.with_state(HuggingFaceReader(tmp_path / "model"))
    in_memory.export(source, tmp_path / "fp8", "compressed-tensors", "static")
    (tmp_path / "data.jsonl").write_text(
        json.dumps({"text": "w5 w6 w7", "choices": [" w8"], "answer": 0, "greedy": ""})
    )
    for name, task in (("pick", CHOICE), ("roll", ROLLING), ("made", MADE)):
        (tmp_path / f"{name}.yaml").write_text(task.format(data=tmp_path / "data.jsonl"))
    assert evaluated(python, tmp_path, tmp_path / "fp8")["precision"] == "FP8 codes with static input scales"

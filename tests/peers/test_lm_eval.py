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
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from precisionctl.checkpoints.huggingface import HuggingFaceReader

PROJECT = tomllib.loads((environments.ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NEEDED = [*PROJECT["dependencies"], *EXTRAS["train"], *EXTRAS["lm-eval"], "accelerate"]  # which its own model imports
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


BARE = """\
task: bare
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""
ASKED = """\
task: asked
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
description: "w9 w8"
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{choices[0]}}}}"
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""
TASKS = {"pick": CHOICE, "roll": ROLLING, "made": MADE, "bare": BARE, "asked": ASKED}

BOTH = """
import json, sys
from functools import partial
from pathlib import Path
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.evaluate import harness

folder, names, chat = sys.argv[1], sys.argv[2].split(","), sys.argv[3] == "True"
harness.simple_evaluate = once = partial(simple_evaluate, bootstrap_iters=0)
manager = harness.TaskManager(include_path=str(Path(names[0]).parent))
theirs = once(
    HFLM(pretrained=folder, dtype="float32", device="cpu"),
    tasks=[Path(name).stem for name in names],
    task_manager=manager,
    log_samples=False,
    apply_chat_template=chat,
)
ours = harness.run_tasks(open_checkpoint(Path(folder)), names, limit=None, chat_template=chat)
print(json.dumps({"ours": ours["results"], "theirs": theirs["results"]}, default=str))
"""


def run(command: list[object], folder: Path) -> dict:
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
    }
    environment = os.environ | offline | {"PYTHONPATH": str(environments.ROOT)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, cwd=folder)
    return json.loads(done.stdout[done.stdout.index(b"{") :])


def files_of(folder: Path, *tasks: str) -> str:
    return ",".join(str(folder / f"{name}.yaml") for name in tasks)


def evaluated(python: Path, folder: Path, model: Path) -> dict:
    tasks = files_of(folder, "pick", "roll", "made")
    return run([python, "-m", "precisionctl", "eval", model, "--tasks", tasks, "--json"], folder)


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


TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}{% if m.role == 'system' and messages | length > 2 %}"
    "{{ raise_exception('no system') }}{% endif %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "as conversations"])
@pytest.mark.parametrize("begins", [True, False], ids=["with BOS", "without BOS"])
def test_every_number_is_that_of_lm_evals_own_model(tmp_path, python, begins, chat):
    """Texts with and without a context, by a tokenizer that begins them with a token, and by one that has none."""
    folder = tmp_path / "model"
    save(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["w7", "w40", "w41"]})  # which generated texts lack
    if begins:
        tokenizer.add_special_tokens({"bos_token": "w1"})
        single = processors.TemplateProcessing(single="w1 $A", special_tokens=[("w1", 1)])
        tokenizer.backend_tokenizer.post_processor = single
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 50, 51], "bos_token_id": 1}))
    draw = torch.Generator().manual_seed(3)
    rows = []
    for number in range(12):
        text, *choices = (torch.randint(5, 250, (size,), generator=draw) for size in (9, 2, 3, 1))
        listed = [f" {words(choice)}" for choice in choices]
        rows.append({"text": words(text), "choices": listed, "answer": number % 3, "greedy": "w1"})
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(task.format(data=data))
    found = run([python, "-c", BOTH, folder, files_of(tmp_path, *TASKS), str(chat)], tmp_path)
    ours, theirs = (
        {(task, name): value for task, of in found[who].items() for name, value in of.items() if type(value) is float}
        for who in ("ours", "theirs")
    )
    assert ours == pytest.approx(theirs, rel=1e-4) and {task for task, _ in theirs} == {*TASKS}

"""What an exported directory has beside its weights: a model card, and all that its source had."""

import json
import shutil
from pathlib import Path

import any_models
import fp8_directories
import in_memory
import mxfp4_directories
import pico
import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from scoring import save
from soaking import in_soak
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.cli import main
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.engines.base import engines
from precisionctl.errors import RecipeError
from precisionctl.fp8 import sidecar
from precisionctl.quant_methods.base import CODES
from precisionctl.verify.engine_rules import check

TEMPLATE = "{% for message in messages %}w{{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several files, with everything that a model on the Hub has."""
    directory = tmp_path_factory.mktemp("card") / "hf"
    save(directory, "llama-3", dtype=torch.bfloat16).save_pretrained(directory, max_shard_size="60kB")
    (directory / "model.safetensors").unlink()
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=[0, 3]).save_pretrained(directory)
    sidecar.write(directory / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(directory)))
    return directory


@pytest.fixture(scope="module")
def megatron(source: Path) -> Path:
    execute(plan_command(Request(source, source.with_name("megatron"), "megatron")))
    return source.with_name("megatron")


def export(source: Path, out: Path, target: str = "vllm", **settings: object) -> Path:
    execute(plan_command(Request.export(source, out, target, **settings)))  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("kind", ["hf", "megatron"])
@pytest.mark.parametrize("target", ["vllm", "te"])
def test_a_directory_is_complete(source: Path, megatron: Path, tmp_path: Path, kind: str, target: str) -> None:
    out = export(source if kind == "hf" else megatron, tmp_path / "out", target, max_shard_size=60_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    held = {name: file.name for file in out.glob("*.safetensors") for name in load_file(file)}
    assert index == held and len(set(held.values())) > 1
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert AutoConfig.from_pretrained(out).num_hidden_layers == 2
    assert GenerationConfig.from_pretrained(out).eos_token_id == [0, 3]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "7"}])["input_ids"] == tokenizer("w7").input_ids
    assert (out / "README.md").is_file() and (out / "precisionctl" / "manifest.json").is_file()


def test_the_hub_reads_the_card_and_it_says_everything(megatron: Path, tmp_path: Path) -> None:
    out = export(megatron, tmp_path / "small-fp8", scheme="static", ranks=2, base_model="org/small")
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == "org/small"
    assert card.data.tags == ["fp8", "vllm", "precisionctl"]
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.to_dict()["quantization"]["format"] == "compressed-tensors"
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert all(f"- `{name}`\n" in card.text for name in config["ignore"])
    codes = [name for name, t in load_file(out / "model.safetensors").items() if t.dtype == torch.float8_e4m3fn]
    said = [line for line in card.text.splitlines() if line.startswith("- `") and line.endswith(")")]
    assert sum(int(line.rpartition("(")[2][:-1]) for line in said) == len(codes) == 14
    assert "vllm serve ./small-fp8 --tensor-parallel-size 2\n" in card.text
    assert "torch_dist, iteration" not in card.text and "| source | torch_dist" in card.text
    assert "Input scales are those of the checkpoint's FP8 state (" in card.text
    assert "None was measured." in card.text
    assert json.loads((out / "precisionctl/manifest.json").read_text())["source"]["fingerprint"] in card.text


def test_of_a_model_without_a_table_the_card_does_not_say_that_it_makes_text(tmp_path: Path) -> None:
    any_models.save(tmp_path / "bert", "bert")
    card = ModelCard.load(export(tmp_path / "bert", tmp_path / "out", scheme="dynamic") / "README.md")
    assert card.data.pipeline_tag is None


def there_and_back(codes: Path) -> tuple[ModelCard, list[str]]:
    """The card of these codes after they were values, and the modules that it says are not codes."""
    values, back = codes.with_name("values"), codes.with_name("back")
    execute(plan_command(Request(codes, values, "hf", "bf16")))
    execute(plan_command(Request(values, back, "hf", "fp8")))
    card = ModelCard.load(back / "README.md")
    named = card.text.partition("In higher precision")[2].partition("## Quality")[0]
    return card, [line.strip("- `") for line in named.splitlines() if line.startswith("- `")]


@pytest.mark.parametrize("model", ["tied", "gpt-oss"])
def test_the_card_of_codes_that_come_back_names_tied_heads_and_experts_in_one_tensor(
    tmp_path: Path, model: str
) -> None:
    """A tied head has no tensor, and the experts of gpt-oss are parameters of a module, as transformers has them."""
    if model == "tied":
        pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16, tie_word_embeddings=True)
        expected = {"model.embed_tokens", "lm_head"}
    else:
        mxfp4_directories.make(tmp_path / "published")
        execute(plan_command(Request(tmp_path / "published", tmp_path / "hf", "hf", "bf16", drop_encodings=True)))
        layers = {f"model.layers.{layer}.mlp.{part}" for layer in range(2) for part in ("router", "experts")}
        expected = {"model.embed_tokens", "lm_head", *layers}
    _, kept = there_and_back(export(tmp_path / "hf", tmp_path / "codes", scheme="dynamic"))
    assert set(kept) == expected and len(kept) == len(expected)


def test_a_head_that_is_codes_again_is_not_said_to_be_kept_from_that(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-2", dtype=torch.bfloat16)
    codes = export(tmp_path / "hf", tmp_path / "codes", scheme="dynamic")
    tensors, config = load_file(codes / "model.safetensors"), json.loads((codes / "config.json").read_text())
    head = tensors["lm_head.weight"].float()
    scale = head.abs().amax(1, keepdim=True) / 448
    tensors |= {"lm_head.weight": (head / scale).to(torch.float8_e4m3fn), "lm_head.weight_scale": scale.bfloat16()}
    save_file(tensors, codes / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"]["ignore"].remove("lm_head")
    (codes / "config.json").write_text(json.dumps(config))
    card, kept = there_and_back(codes)
    assert "- `lm_head.weight` (1)" in card.text and kept == ["model.embed_tokens"]


@pytest.mark.parametrize("spelling", ["fp8-block", *in_soak("fp8-tensor-vllm", "compressed-tensor", "modelopt-mxfp8")])
def test_codes_that_come_back_have_a_card_of_where_they_are_from(tmp_path: Path, spelling: str) -> None:
    fp8_directories.make(tmp_path / "fp8", spelling)
    (tmp_path / "fp8" / "README.md").write_text("of somebody else's model")
    for source, out, to, precision in (("fp8", "megatron", "megatron", "keep"), ("megatron", "again", "hf", "fp8")):
        execute(plan_command(Request(tmp_path / source, tmp_path / out, to, precision=precision)))  # type: ignore[arg-type]
    card = ModelCard.load(tmp_path / "again" / "README.md")
    method = {"fp8": "fp8", "compressed": "compressed-tensors", "modelopt": "modelopt"}[spelling.partition("-")[0]]
    assert card.data.tags == [*dict.fromkeys(["fp8", method, "precisionctl"])]
    assert " or " not in card.data.to_dict()["quantization"]["scheme"]
    assert "| source | torch_dist" in card.text and "serve ./again" in card.text and "somebody else" not in card.text
    codes = [name for name, t in load_file(tmp_path / "again/model.safetensors").items() if t.dtype == CODES.torch]
    said = [line for line in card.text.splitlines() if line.startswith("- `") and line.endswith(")")]
    assert sum(int(line.rpartition("(")[2][:-1]) for line in said) == len(codes) == 14
    assert "- `lm_head`" in card.text and "- `model.embed_tokens`" in card.text
    manifest = json.loads((tmp_path / "again/precisionctl/manifest.json").read_text())
    assert manifest["source"]["fingerprint"] in card.text
    served = [engine for engine in engines().values() if engine.title in card.text.partition("```")[0]]
    reader = HuggingFaceReader(tmp_path / "again")
    of_config = [found for engine in served for found in check(reader, engine) if found.where == "config.json"]
    assert served and not any("activations" in found.what for found in of_config)  # a method that it does not read


def test_equal_exports_have_equal_cards_that_name_no_path(source: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(source, moved)
    given = tmp_path / "state.safetensors"
    shutil.copy(source / sidecar.RELATIVE, given)
    first = export(source, tmp_path / "a" / "out", fp8_state=given)
    second = export(moved, tmp_path / "b" / "out", fp8_state=given)
    assert (first / "README.md").read_bytes() == (second / "README.md").read_bytes()
    assert "/tmp" not in (first / "README.md").read_text() and str(tmp_path) not in (first / "README.md").read_text()


@pytest.mark.parametrize("target", ["vllm", "te"])
def test_a_directorys_name_is_text_and_nothing_else(source: Path, tmp_path: Path, target: str) -> None:
    name = 'a\n---\nbase_model: x`<b>"; rm'
    card = ModelCard.load(export(source, tmp_path / name, target) / "README.md")
    assert card.data.base_model is None
    assert "<b>" not in card.text.partition("```")[0] and "\n# a" in card.text


def test_a_name_that_is_not_utf_8_is_spelled_out(source: Path, tmp_path: Path) -> None:
    card = (export(source, tmp_path / "o\udcff") / "README.md").read_text(encoding="utf-8")
    assert "\n# o\\udcff\n" in card


def test_a_name_that_is_none_on_the_hub_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="not a name on the Hub"):
        export(source, tmp_path / "out", base_model="../etc\n")


def test_eval_writes_what_it_measured_and_the_last_time_counts(source: Path, tmp_path: Path) -> None:
    out = export(source, tmp_path / "out")
    text = tmp_path / "held_out.txt"
    text.write_text(" ".join(f"w{1 + number % 249}" for number in range(200)))
    words = ["eval", str(out), "--data", str(text), "--sequence-length", "32", "--card"]
    for more in ([], ["--against", str(source)]):
        shown = CliRunner().invoke(main, [*words, *more])
        assert shown.exit_code == 0, shown.output
    card = (out / "README.md").read_text()
    assert card.count("- held_out.txt: perplexity") == 2
    assert "KL divergence" in card and "None was measured" not in card
    lines = [line for line in shown.stdout.splitlines() if line.startswith("perplexity")]
    assert f"- held_out.txt: {lines[0]}\n" in card


def test_a_card_that_is_missing_is_found_before_anything_is_measured(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    monkeypatch.setattr("precisionctl.evaluate.evaluate", lambda *words, **options: measured.append(words))
    text = tmp_path / "held_out.txt"
    text.write_text("w1 w2 w3")
    for what in (("--data", str(text)), ("--tasks", "some")):
        without = CliRunner().invoke(main, ["eval", str(source), *what, "--card"])
        assert without.exit_code == 1 and "no model card that an export wrote" in without.output
    assert not measured


def test_a_plain_megatron_checkpoint_takes_its_tokenizer_from_a_reference(
    source: Path, megatron: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "megatron"
    shutil.copytree(megatron, plain)
    for companions in plain.rglob("precisionctl/hf"):
        shutil.rmtree(companions)
    for request in (Request.export(plain, tmp_path / "out", "vllm"), Request(plain, tmp_path / "out", "hf")):
        assert (
            "Missing in the source, and so in the result: tokenizer, generation_config.json. --reference HF_DIR takes "
            "them from a Hugging Face directory." in plan_command(request).notes
        )
    out = export(plain, tmp_path / "told", reference=source)
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (out / "generation_config.json").is_file()

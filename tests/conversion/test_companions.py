"""What is beside a model's weights: what travels, what stays, what is made anew."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pico
import pytest
import repository
import torch
from conversions import run, tree

from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.hf_directory.companions import KINDS, TEMPLATES, TOKENIZER, kind_of, read_companions
from precisionctl.checkpoints.hf_directory.config_json import config_of_values
from precisionctl.checkpoints.megatron.keys import COMPANIONS as COMPANIONS_OF_MEGATRON
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint
from precisionctl.param import TensorSpec
from precisionctl.untrusted import safe_files, safe_json

DOCUMENT = repository.DOCS / "companions.md"

MODELING = b"""import os
from transformers import AutoModel
from .configuration_own import OwnConfig
from   .layers import (
    A,
)
def late():
    from .late import B
raise SystemExit("nobody runs this")
"""


def own_code(directory: Path, **auto_map: Any) -> Path:
    """A directory as Kimi's: a known family, with classes and a tokenizer of its own."""
    pico.save(directory, "llama-2", dtype=torch.bfloat16)
    config = json.loads((directory / "config.json").read_text())
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (directory / "config.json").write_text(json.dumps(config | {"auto_map": classes | auto_map}))
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (directory / "modeling_own.py").write_bytes(MODELING)
    for name in ("configuration_own", "layers", "late", "tokenization_own", "unrelated"):
        (directory / f"{name}.py").write_bytes(b"raise SystemExit\n")
    (directory / "tiktoken.model").write_bytes(b"IQ== 0\n")
    return directory


CODE = ("configuration_own.py", "late.py", "layers.py", "modeling_own.py", "tokenization_own.py")


def test_code_that_a_config_names_travels_as_bytes_with_what_it_imports(tmp_path: Path) -> None:
    source = own_code(tmp_path / "own")
    there = run(source, tmp_path / "dist", "megatron")
    back = run(tmp_path / "dist", tmp_path / "back", "hf")
    before, after = tree(source), tree(tmp_path / "back")
    assert {name for name in after if name.endswith(".py")} == set(CODE)
    assert all(after[name] == before[name] for name in (*CODE, "tokenizer_config.json", "tiktoken.model"))
    assert json.loads(after["config.json"])["auto_map"] == json.loads(before["config.json"])["auto_map"]
    for work in (there, back):
        assert any(
            note.startswith("The model's own code is copied") and "modeling_own.py" in note for note in work.notes
        )


def test_transformers_opens_a_result_whose_config_is_of_its_own_code(tmp_path: Path) -> None:
    """As Kimi's: without the file it is `OSError: ... does not appear to have a file named configuration_own.py`."""
    from transformers import AutoConfig

    source = own_code(tmp_path / "own")
    (source / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\nfrom .layers import MARK\n"
        "class OwnConfig(LlamaConfig):\n    mark = MARK\n"
    )
    (source / "layers.py").write_text("MARK = 7\n")
    run(source, tmp_path / "out", "hf")
    assert AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True).mark == 7


def test_an_export_says_that_the_engine_has_to_trust_the_code(tmp_path: Path) -> None:
    export = Request.export(own_code(tmp_path / "own"), tmp_path / "out", target="vllm", scheme="dynamic")
    work = plan_command(export)
    notes = " ".join(work.notes)
    assert (
        "--trust-remote-code" in notes
        and "tokenizer" not in notes.partition("Missing in the source")[2].partition(".")[0]
    )
    card = work.writer.extra_files["README.md"].decode()  # type: ignore[attr-defined]
    assert "| code of its own | configuration_own.py" in card


GONE: dict[str, str | list[str | None]] = {
    "a file that is not there": "modeling_gone.Gone",
    "a path": "../own/modeling_own.Own",
    "an absolute path": "/etc/hostname.Own",
    "a package": "package.modeling_own.Own",
    "no class": "modeling_own",
    "a list of which one is not there": ["tokenization_own.Own", "fast_gone.Fast"],
    "a hidden file": ".modeling_own.Own",
}


@pytest.mark.parametrize("name", GONE)
def test_what_names_no_file_of_the_directory_is_taken_out_and_said(tmp_path: Path, name: str) -> None:
    source = own_code(tmp_path / "own", AutoModel=GONE[name])
    work = run(source, tmp_path / "out", "hf")
    kept = json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]
    assert sorted(kept) == ["AutoConfig", "AutoModelForCausalLM"]
    assert any(
        note.startswith("Taken out of `auto_map` in config.json") and "AutoModel (" in note for note in work.notes
    )


def test_an_auto_map_of_which_nothing_is_there_goes(tmp_path: Path) -> None:
    source = own_code(tmp_path / "own")
    for file in source.glob("*.py"):
        file.unlink()
    run(source, tmp_path / "out", "hf")
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((tmp_path / "out" / name).read_text())


def test_code_of_another_repository_is_left_to_who_opens_it(tmp_path: Path) -> None:
    source = own_code(tmp_path / "own", AutoModel="someone/other--modeling_other.Other")
    work = run(source, tmp_path / "out", "hf")
    kept = json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]
    assert kept["AutoModel"] == "someone/other--modeling_other.Other"
    assert any("another" not in note and "code of other repositories" in note for note in work.notes)


def test_code_that_lies_outside_is_not_read(tmp_path: Path) -> None:
    source = own_code(tmp_path / "own")
    (tmp_path / "secret.py").write_text("secret")
    (source / "layers.py").unlink()
    (source / "layers.py").symlink_to(tmp_path / "secret.py")
    with pytest.raises(DamagedCheckpoint, match="symbolic link leads out"):
        read_companions(source)


def test_code_that_imports_without_end_or_is_all_blanks_costs_little(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text(json.dumps({"auto_map": {"AutoModel": "a0.A"}}))
    for number in range(100):
        (tmp_path / f"a{number}.py").write_text(f"from .a{0 if number == 59 else number + 1} import x\n")
    assert len(read_companions(tmp_path).code) == 60
    (tmp_path / "a59.py").write_text("from .a60 import x")
    with pytest.raises(DamagedCheckpoint, match="more than 64 files of code"):
        read_companions(tmp_path)
    (tmp_path / "a0.py").write_bytes(b"\n \t" * 1_000_000 + b"from ." + b"a" * 999_000)
    assert read_companions(tmp_path).code == ("a0.py",)


def test_code_that_imports_what_is_not_there_travels_and_says_so(tmp_path: Path) -> None:
    source = own_code(tmp_path / "own")
    (source / "late.py").unlink()
    found = read_companions(source)
    assert found.code == tuple(name for name in CODE if name != "late.py")
    assert found.notes == ("modeling_own.py imports what is not in the directory: late.py.",)


def nested(depth: int, inner: bytes = b"1") -> bytes:
    return b'{"a": ' * depth + inner + b"}" * depth


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "`c` is there twice"),
        (nested(101), "nested more than 100 deep"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "nested more than 100 deep"),
        (nested(100_000), "not readable as JSON"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": 1', "not readable as JSON"),
        (b"\xff", "not readable as JSON"),
        (b'{"a": [' + b"1, " * 20 + b"1]}", "JSON of more than 20 parts"),
        (b'{"a": [' + b"[]," * 10 + b"[]]}", "JSON of more than 20 parts"),
        (b'{"a": [' + b"{}," * 10 + b"{}]}", "JSON of more than 20 parts"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_json_that_is_no_object_of_a_sane_size_is_damage(
    monkeypatch: pytest.MonkeyPatch, data: bytes, why: str
) -> None:
    if "parts" in why:
        monkeypatch.setattr(safe_json, "_MOST_PARTS", 20)
    with pytest.raises(DamagedCheckpoint, match=why):
        safe_json.parse_json(data, "config.json")


def test_a_file_that_the_system_does_not_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that use the library catch CheckpointError."""
    (tmp_path / "a.json").write_text("{}")

    def failing(path: Path) -> bytes:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(DamagedCheckpoint, match=r"not readable: Input/output error.*a\.json"):
        safe_files.read_json(tmp_path / "a.json", tmp_path)


@pytest.mark.parametrize("data", [b"[1]", b"{", nested(200)], ids=["a list", "cut", "deep"])
def test_a_config_json_that_is_no_such_object_is_damage_where_a_result_is_made_of_it(data: bytes) -> None:
    with pytest.raises(DamagedCheckpoint, match="JSON"):
        config_of_values(Companions({"config.json": data}), {}, {})


def test_json_up_to_the_limits_is_read_and_a_key_may_be_repeated() -> None:
    assert safe_json.parse_json(b'{"a": [1], "a": [1]}', "") == {"a": [1]}
    assert safe_json.parse_json(nested(100), "") == json.loads(nested(100))


TRAVEL = (
    "qwen.tiktoken",
    "sentencepiece.bpe.model",
    "LICENSE",
    "LICENSE.md",
    "NOTICE.txt",
    "USE_POLICY.md",
    "license",
    "Licence.txt",
    "vocab.bpe",
)
STAY = (
    "README.md",
    "optimizer.pt",
    "rng_state_0.pth",
    "training_args.bin",
    "figure.png",
    ".gitattributes",
    "model.gguf",
    "recipe.yaml",
)


def test_vocabularies_and_terms_travel_and_what_is_known_to_stay_stays_unsaid(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-2")
    for name in (*TRAVEL, *STAY, "who_knows.dat"):
        (tmp_path / "hf" / name).write_bytes(b"1")
    work = run(tmp_path / "hf", tmp_path / "out", "hf")
    made = tree(tmp_path / "out")
    assert set(TRAVEL) <= made.keys() and not made.keys() & {*STAY, "who_knows.dat"}
    assert "Left behind, because nothing here knows what it is: who_knows.dat." in work.notes
    assert not any(name in note for note in work.notes for name in STAY)


def test_every_file_and_folder_that_is_left_behind_is_named_however_many(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-2")
    unknown = [f"unknown{number:02}.dat" for number in range(20)]
    for name in (*unknown, "license.py"):
        (tmp_path / "hf" / name).write_bytes(b"1")
    named = ("custom_generate", "tokenizer", "tokenizer_v1.5", "v1.5")
    for folder in (*named, ".git", "precisionctl", TEMPLATES, f"{TEMPLATES}/more"):
        (tmp_path / "hf" / folder).mkdir()
    (tmp_path / "hf" / TEMPLATES / "notes.txt").write_text("1")
    notes = read_companions(tmp_path / "hf").notes
    assert notes == (
        f"Left behind, because nothing here knows what it is: {', '.join([*unknown, f'{TEMPLATES}/notes.txt'])}.",
        f"Folders are left behind: custom_generate/, tokenizer/, tokenizer_v1.5/, v1.5/, {TEMPLATES}/more/.",
    )
    work = run(tmp_path / "hf", tmp_path / "dist", "megatron")
    assert {*notes} <= {*work.notes} and not any("license.py" in name for name in tree(tmp_path / "dist"))


def test_the_vocabularies_that_transformers_reads_are_part_of_the_tokenizer() -> None:
    from transformers import DebertaV2Tokenizer, RemBertTokenizer

    read = {name for one in (DebertaV2Tokenizer, RemBertTokenizer) for name in one.vocab_files_names.values()}
    assert read >= {"spm.model", "sentencepiece.model"}
    assert {kind_of(name) for name in read} == {TOKENIZER}


def test_every_kind_is_documented_with_its_reason() -> None:
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| (.+?) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(" ".join(f"`{p}`" for p in kind.patterns), kind.fate, kind.reason) for kind in KINDS]


def test_what_transformers_saves_beside_a_model_is_known(tmp_path: Path) -> None:
    """Whatever this transformers writes: nothing of it is a name that is not in the table."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    pico.save(tmp_path, "llama-2")
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=made, chat_template="{{ messages }}").save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if kind_of(path.name) is None] == []
    assert {"tokenizer.json", "chat_template.jinja"} <= open_checkpoint(tmp_path).companions.files.keys()


NAMED = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}


def with_templates(directory: Path, templates: dict[str, str] = NAMED) -> Path:
    """A model, and a tokenizer with several chat templates, as transformers saves it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    pico.save(directory, "llama-2", dtype=torch.bfloat16)
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=made, chat_template=templates).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("to", "container"),
    [("megatron", "torch_dist"), ("megatron", "torch"), ("hf", "bin"), ("hf", "dcp"), ("hf", "torchtitan")],
)
def test_chat_templates_with_names_go_there_and_back_in_every_container(
    tmp_path: Path, to: str, container: str
) -> None:
    from transformers import AutoTokenizer

    source = with_templates(tmp_path / "hf")
    there = run(source, tmp_path / "there", to, container=container)
    back = run(tmp_path / "there", tmp_path / "back", "hf")
    assert AutoTokenizer.from_pretrained(tmp_path / "back").chat_template == NAMED
    assert not any(note.startswith("Left behind") for work in (there, back) for note in work.notes)


def of_bridge(directory: Path) -> Path:
    """A release with its tokenizer where Megatron-Bridge 0.3.1 saves it (training/checkpointing.py,
    save_tokenizer_assets)."""
    run(with_templates(directory / "hf"), directory / "made", "megatron")
    release = directory / "made" / "release"
    shutil.rmtree(release / COMPANIONS_OF_MEGATRON)
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(directory / "hf").save_pretrained(release / "tokenizer")
    return release


def test_the_tokenizer_that_bridge_saves_beside_weights_is_that_of_the_result(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    release = of_bridge(tmp_path)
    other = with_templates(tmp_path / "other", {"default": "{{ 'another' }}"})
    (other / "generation_config.json").write_text("{}")
    for reference in (None, other):
        out = tmp_path / f"out {reference is None}"
        result = run(release, out, "hf", reference=reference)
        assert AutoTokenizer.from_pretrained(out).chat_template == NAMED
        assert (out / "tokenizer.json").read_bytes() == (tmp_path / "hf" / "tokenizer.json").read_bytes()
        assert not any("tokenizer" in note for note in result.notes if note.startswith("Missing"))
    again = run(release, tmp_path / "again", "megatron")
    assert "tokenizer.json" in again.reader.companions.files


def test_of_bridges_tokenizers_only_those_that_transformers_saved_are_taken_and_none_behind_a_link(
    tmp_path: Path,
) -> None:
    release = of_bridge(tmp_path)
    (release / "tokenizer" / "config.json").write_text('{"model_type": "strange"}')
    assert "config.json" not in open_checkpoint(release).companions.files
    (release / "tokenizer" / "tokenizer_config.json").unlink()
    assert open_checkpoint(release).companions.files == {}
    shutil.rmtree(release / "tokenizer")
    (release / "tokenizer").symlink_to(tmp_path / "hf")
    with pytest.raises(DamagedCheckpoint, match="symbolic link leads out"):
        _ = open_checkpoint(release).companions


def test_a_template_that_lies_outside_is_no_file_or_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = with_templates(tmp_path / "elsewhere")
    source = with_templates(tmp_path / "hf", {"default": NAMED["default"]})
    folder = source / TEMPLATES
    folder.symlink_to(elsewhere / TEMPLATES)
    with pytest.raises(DamagedCheckpoint, match="symbolic link leads out"):
        read_companions(source)
    folder.unlink()
    folder.mkdir()
    (folder / "rag.jinja").symlink_to(elsewhere / "config.json")
    with pytest.raises(DamagedCheckpoint, match="symbolic link leads out"):
        read_companions(source)
    (folder / "rag.jinja").unlink()
    (folder / "rag.jinja").mkdir()
    with pytest.raises(DamagedCheckpoint, match="not a file"):
        read_companions(source)
    (folder / "rag.jinja").rmdir()
    (folder / "rag.jinja").write_bytes(bytes(100_000))
    monkeypatch.setattr(safe_files, "LARGEST", 100_000)
    with pytest.raises(DamagedCheckpoint, match="larger than 100.0 kB"):
        read_companions(source)


def test_a_dtype_is_set_under_whichever_name_it_has(tmp_path: Path) -> None:
    """Beside a stale `torch_dtype`, programs of different age read two dtypes."""
    from transformers import AutoConfig

    pico.save(tmp_path / "hf", "llama-2", dtype=torch.bfloat16)
    plain = json.loads((tmp_path / "hf" / "config.json").read_text())
    del plain["dtype"]
    for number, said in enumerate(({"dtype": "bfloat16", "torch_dtype": "float16"}, {"dtype": "bfloat16"}, {})):
        (tmp_path / "hf" / "config.json").write_text(json.dumps(plain | said))
        run(tmp_path / "hf", tmp_path / f"{number}", "hf", "fp32")
        made = json.loads((tmp_path / f"{number}" / "config.json").read_text())
        assert {key: made[key] for key in made if "dtype" in key} == dict.fromkeys(said or ["torch_dtype"], "float32")
        assert AutoConfig.from_pretrained(tmp_path / f"{number}").dtype == torch.float32


def test_a_dtype_is_set_in_the_text_config_and_its_parts_and_not_in_a_tower(tmp_path: Path) -> None:
    both = {"dtype": "bfloat16", "torch_dtype": "float16"}
    config = {
        "torch_dtype": "float16",
        "text_config": both | {"part": both, "vocabulary": {"dtype": 7}, "sizes": [1]},
        "vision_config": both,
    }
    source = Companions({"config.json": json.dumps(config).encode()})
    made = config_of_values(source, {}, {"weight": TensorSpec((2, 2), DType.float32)})
    now = dict.fromkeys(both, "float32")
    text = now | {"part": now, "vocabulary": {"dtype": 7}, "sizes": [1]}
    assert made == {"torch_dtype": "float32", "text_config": text, "vision_config": both}


def test_text_that_is_no_unicode_is_written_with_escapes(tmp_path: Path) -> None:
    """Half a surrogate pair in a config of which something is taken out."""
    source = own_code(tmp_path / "own", AutoModel="missing.Model")
    config = json.loads((source / "config.json").read_text()) | {"note": "\ud800"}
    (source / "config.json").write_text(json.dumps(config))
    run(source, tmp_path / "out", "hf")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["note"] == "\ud800"

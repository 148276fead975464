"""Which keys of config.json `verify` may leave out: transformers is the judge, by the logits that it computes."""

import json
from pathlib import Path

import pico
import pytest
import torch
from checkpoint_mutations import changed_configs
from transformers import AutoModelForCausalLM

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.errors import PrecisionctlError
from precisionctl.verify.compare import compare

FAMILIES = ("llama-3", "qwen2-window", "phi3-long", "gemma2", "gpt-oss", "deepseek-v3")
TOKENS = torch.arange(3, 51).view(1, -1)  # beyond every window, and beyond the original context of every scaling


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_that_changes_the_logits_goes_unnoticed(tmp_path: Path, family: str) -> None:
    pico.save(tmp_path, family)
    one, path = HuggingFaceReader(tmp_path), tmp_path / "config.json"
    text = path.read_text()
    expected = logits(tmp_path)
    assert expected is not None
    unchanged = 0
    for name, config in changed_configs(json.loads(text)):
        path.write_text(json.dumps(config))
        if noticed(one, tmp_path):
            continue
        unchanged += 1
        found = logits(tmp_path)
        assert found is None or torch.equal(found, expected), name
    assert unchanged > 5


def noticed(one: HuggingFaceReader, directory: Path) -> bool:
    try:
        return not compare(one, HuggingFaceReader(directory)).equal
    except PrecisionctlError:
        return True


def logits(directory: Path) -> torch.Tensor | None:
    """What transformers computes; None where it refuses."""
    try:
        model = pico.as_its_config_says(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)).eval()
        with torch.no_grad():
            return model(TOKENS).logits
    except Exception:
        return None

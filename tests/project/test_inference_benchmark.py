"""`benchmarks/inference.py` without a GPU: its arithmetic gives NVIDIA's table, and its measurements run."""

import math
import sys

import pytest
import repository
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(repository.ROOT / "benchmarks"))

import inference  # noqa: E402
import largest_batch  # noqa: E402
import torch  # noqa: E402


@pytest.mark.parametrize("config", [largest_batch.GPT_J, largest_batch.LLAMA_3_8B], ids=["GPT-J", "Llama 3 8B"])
def test_parameters_are_counted_as_transformers_does(config):
    config = config | {"n_layer" if "n_layer" in config else "num_hidden_layers": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    sizes = largest_batch.Sizes.of(config)
    assert sizes.in_fp8 + sizes.others == sum(parameter.numel() for parameter in model.parameters())
    linears = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
    assert sizes.in_fp8 == sum(linear.weight.numel() for linear in linears if linear is not model.lm_head)


def test_what_nvidia_published_for_gpt_j_follows_from_one_number():
    """1024 tokens in and 256 out: 75 sequences in FP16, 85 with FP8 weights, more than twice as many with an FP8 cache.
    What memory there was is not said; where 75 fit, and no 76, the other two follow."""
    sizes = largest_batch.Sizes.of(largest_batch.GPT_J)

    def batch(memory, **kind):
        return sizes.largest_batch(memory, 1280, **kind)

    of_one = 1280 * 2 * 28 * 4096 * 2  # keys and values of 28 layers, 4096 wide, two bytes
    least = sizes.weights(False) + 75 * of_one
    assert batch(least, fp8=False, fp8_cache=False) == 75 and batch(least - 1, fp8=False, fp8_cache=False) == 74
    found = {batch(least + share * of_one // 8, fp8=True, fp8_cache=False) for share in range(8)}
    assert found == {84, 85}
    assert all(batch(least + s * of_one // 8, fp8=True, fp8_cache=True) > 2 * 75 for s in range(8))
    assert batch(0.5 * sizes.weights(True), fp8=True, fp8_cache=True) == 0


@pytest.mark.soak
def test_the_measurements_run_emulated(tmp_path):
    place = inference.Place(small=True)
    rows = list(inference.measured(place, tmp_path))
    speeds = [row for row in rows if "batch" in row]
    assert [(row["precision"], row["batch"]) for row in speeds] == [(n, b) for n in inference.MODELS for b in (1, 2)]
    assert all(row[f"{kind}, tokens/s"] > 0 for row in speeds for kind in ("prefill", "decode"))
    batches = {(row["precision"], row["cache"]): row["largest batch"] for row in rows if "cache" in row}
    assert batches == {(name, cache): 2 for name in inference.MODELS for cache in ("BF16", "FP8")}
    assert [row["precision"] for row in rows if "held, GB" in row] == list(inference.MODELS)
    assert "| BF16 | 1 |" in largest_batch.table(speeds) and math.isnan(speeds[0]["peak, GB"])

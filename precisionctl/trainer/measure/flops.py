"""FLOPs of training, and the BF16 peaks of GPUs that they are held against.

The convention is that of Megatron-LM's `num_floating_point_operations` (megatron/training/training.py), so that numbers
can be compared: matrix products alone, 2 FLOPs for a multiplication and addition, times 3 for forward and backward; of
experts those that a token goes through; of attention the half that a causal mask leaves, whatever the window; logits of
the padded vocabulary. A router, norms, rotary angles and softmax are not counted, nor is what is computed once more
under `train.recompute`, nor the guard's passes: these are FLOPs of the model, not of the machine.
"""

from collections.abc import Iterable, Mapping

from precisionctl.model_shape import ModelShape

FORWARD_AND_BACKWARD = 3
MULTIPLY_ADD = 2


def training_flops(model: ModelShape, lengths: Iterable[int]) -> int:
    """Forward and backward of texts of these lengths, in tokens. Texts that share a row do not see one another."""
    each = list(lengths)
    # of attention queries with keys, and scores with values, at or below the diagonal: a key's and a value's channels
    per_pair = model.query_size + model.projection_size
    attention = sum(length * length for length in each) * per_pair // 2
    products = sum(each) * weights_used(model) + model.num_layers * attention
    return FORWARD_AND_BACKWARD * MULTIPLY_ADD * products


def weights_used(model: ModelShape) -> int:
    """The weights that a token is multiplied by: all of the linears but those of experts that it does not go to."""
    layers = sum(projections(model) + mlp(model, inner_used(model, layer)) for layer in range(model.num_layers))
    return layers + model.hidden_size * model.padded_vocab_size


def projections(model: ModelShape) -> int:
    """Weights of a layer's linears around attention."""
    hidden, mla = model.hidden_size, model.mla
    out = model.projection_size * hidden
    if mla is None:
        return hidden * model.qkv_size + out
    rank = mla.q_lora_rank
    queries = hidden * model.query_size if rank is None else rank * (hidden + model.query_size)
    return queries + hidden * model.latent_size + mla.kv_lora_rank * model.key_value_size + out


def mlp(model: ModelShape, inner: int) -> int:
    """Weights of linears with so many channels between them."""
    return (3 if model.gated_linear_unit else 2) * model.hidden_size * inner


def inner_used(model: ModelShape, layer: int) -> int:
    """Channels of a layer's MLP for a token, of all experts that it goes to."""
    if model.moe is None or not model.has_experts(layer):
        return model.ffn_hidden_size
    return model.moe.topk * model.moe.ffn_hidden_size + (model.moe.shared_ffn_hidden_size or 0)


BF16_PEAK: Mapping[str, float] = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "GB200": 2500e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "H20": 148e12,
    "L40": 181e12,
    "L4": 121e12,
}
"""FLOP/s of dense BF16 matrix products by a part of the device's name, from NVIDIA's data sheets, whose larger numbers
are for sparse ones. The first that fits counts."""


def bf16_peak(device_name: str) -> float | None:
    """None for a device that is not known."""
    return next((peak for part, peak in BF16_PEAK.items() if part in device_name), None)

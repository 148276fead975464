"""FLOPs of training, and the BF16 peak of GPUs to compare them with.

The convention is that of Megatron-LM's `num_floating_point_operations` (megatron/training/training.py), so that numbers
are comparable. Only GEMMs count, with 2 FLOPs for a multiply-add, times 3 for forward and backward:

- experts: those that a token is routed to
- attention: the half that a causal mask leaves, whatever the window; with chunks, that half of each chunk
- DeepSeek-V4's attention: the window, the compressed keys that a query may choose, and the indexer
- attention to blocks of keys: all pairs, whichever blocks an indexer chooses; the indexer does not count
- gated delta nets: also the convolution, and four products of a state's size for each token
- short convolutions: all products
- embeddings of n-grams: what is projected of them
- Mamba mixers: 7 FLOPs for each number of a state and token
- logits: of the padded vocabulary

Routers, the joining of residual streams, norms, rotary embedding and softmax do not count, nor does what
`train.recompute` and the guard's passes compute additionally: these are FLOPs of the model, not of the machine.
"""

from collections.abc import Iterable, Mapping

from precisionctl.model.model_shape import ModelShape
from precisionctl.model.sparse_parts import CSA
from precisionctl.trainer.measure.parameters import compression, weights_used

FORWARD_AND_BACKWARD = 3
MULTIPLY_ADD = 2
SCAN = 7
"""For each number of a mixer's states and token (mamba_layer_flops in the same file)."""


def training_flops(model: ModelShape, lengths: Iterable[int]) -> int:
    """FLOPs of forward and backward for sequences of these lengths, in tokens. Packed sequences are separate ones."""
    each, chunk = list(lengths), model.attention_chunk_size
    whole = chunked = sum(length * length for length in each)  # pairs of a query and a key
    if chunk is not None:
        chunked = sum(length // chunk * chunk * chunk + (length % chunk) ** 2 for length in each)
    products, scans = sum(each) * weights_used(model), 0
    for layer in range(model.num_layers):
        if model.has_delta_net(layer):
            products += sum(each) * delta_rule(model)
        elif model.short_conv and model.has_short_conv(layer):
            products += sum(each) * model.short_conv.kernel_dim * model.hidden_size
        elif model.csa:
            products += sum(_compressed_attention(model, model.csa, layer, length) for length in each)
        if model.mamba and model.has_mixer(layer):
            scans += sum(each) * SCAN * model.mamba.inner_size * model.mamba.state_dim
        if model.has_attention(layer) and not model.csa:
            attention = model.of_layer(layer)
            # Multiply-adds for each pair of a query and an earlier token: queries with keys, scores with values
            per_pair = attention.query_size + attention.projection_size
            products += (chunked if model.in_window(layer) else whole) * per_pair // 2
    return FORWARD_AND_BACKWARD * (MULTIPLY_ADD * products + scans)


def _compressed_attention(model: ModelShape, csa: CSA, layer: int, length: int) -> int:
    """Multiply-adds of queries with keys, and of weights with values, in a text (_dsv4_hybrid_self_attention_flops of
    Megatron-LM's dev branch): each query has a whole window, and half of the compressed keys that it may choose."""
    keys, scores = length * csa.window_size, 0
    if model.has_indexer(layer):
        ratio = compression(model, layer)
        chosen = min(csa.topk, length // ratio)
        keys += length * chosen - chosen * chosen * ratio // 2
        scores = length * length * csa.query_size // ratio
    elif ratio := compression(model, layer):
        keys += length * length // ratio // 2
    return keys * (model.query_size + model.projection_size) + scores


def delta_rule(model: ModelShape) -> int:
    """The products for each token of a gated delta net between its linears: of the convolution, and of a state with its
    decay, key, value and query."""
    gdn = model.gdn
    if gdn is None:
        return 0
    return gdn.conv_kernel_dim * gdn.conv_size + 4 * gdn.value_size * gdn.key_head_dim


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
"""FLOP/s of dense BF16 GEMMs by a part of the device's name, from NVIDIA's data sheets (without sparsity). The first
that fits is used."""


def bf16_peak(device_name: str) -> float | None:
    """The peak of a device in FLOP/s; None if it is not known."""
    return next((peak for part, peak in BF16_PEAK.items() if part in device_name), None)

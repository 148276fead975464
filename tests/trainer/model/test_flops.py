"""FLOPs by formula against torch's own counter of what the model computes."""

from dataclasses import replace

import pytest
import torch
from pico import mixers, representing, shape
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from precisionctl.model.model_shape import ModelShape
from precisionctl.precision import PRESETS
from precisionctl.trainer.measure import flops
from precisionctl.trainer.measure.flops import bf16_peak, training_flops
from precisionctl.trainer.model.attention.core_attention import SINK_CHANNELS
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.recurrent.delta_rule import gated_delta_rule
from precisionctl.trainer.model.recurrent.mamba_1 import selective_scan
from precisionctl.trainer.model.recurrent.mamba_2 import state_space
from precisionctl.trainer.sequences import PackedSequences

LENGTH = 16


def counted(model: ModelShape, rows: int, packed: PackedSequences | None = None) -> int:
    """What torch counts of a pass forward and backward; attention as plain products, which are what it can count."""
    gpt = GPT(model, PRESETS["bf16"], dtype=torch.float32)
    tokens = torch.randint(model.vocab_size, (rows, LENGTH))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        gpt(tokens, packed=packed).sum().backward()
    return counter.get_total_flops()


def left_out(model: ModelShape, lengths: list[int]) -> int:
    """What the convention passes over: half of attention, above the diagonal, padding of values, sinks, slopes,
    routers, gates of shared experts, indexers of blocks, and what gated delta nets and mixers take beside."""
    nets, scans = (sum(map(has, range(model.num_layers))) for has in (model.has_delta_net, model.has_mixer))
    chunk, above = model.attention_chunk_size, 0
    for layer in range(model.num_layers):
        if model.has_attention(layer) and not model.csa:
            in_chunks = [chunk] * (LENGTH // chunk) * len(lengths) if chunk and model.in_window(layer) else lengths
            attention = model.attention_of(model.in_window(layer))
            pairs = sum(length**2 for length in in_chunks)
            convention = pairs * (attention.query_size + attention.projection_size) // 2
            if attention.attn_logit_softcapping is not None:
                above += convention
            else:  # values are padded, and a sink is one more key, with one more query, of wider heads, as with slopes
                sink = attention.softmax_offset
                wide = attention.query_size + (sink or attention.alibi) * SINK_CHANNELS * attention.num_attention_heads
                above += 2 * sum((length + sink) ** 2 for length in in_chunks) * wide - convention
    routers = sum(model.moe.layer_freq) * model.moe.num_experts * model.hidden_size if model.moe else 0
    gates = sum(model.moe.layer_freq) * model.hidden_size if model.moe and model.moe.shared_expert_gate else 0
    indexers = sum(map(model.has_indexer, range(model.num_layers))) * _indexer(model, lengths)
    beside = nets * _beside_the_rule(model, lengths) + scans * _beside_the_scan(model, lengths)
    beside += _beside_streams(model, lengths) + indexers
    if model.short_conv:
        convolutions = sum(map(model.has_short_conv, range(model.num_layers)))
        beside += convolutions * _of_all(model.short_conv.kernel_dim, model.hidden_size, sum(lengths))
    return 6 * (above + sum(lengths) * (routers + gates)) + beside


def _beside_the_rule(model: ModelShape, lengths: list[int]) -> int:
    """What the rule takes more by chunks than token by token, and what torch takes the convolution for."""
    if model.gdn is None:
        return 0
    tokens = sum(lengths)
    heads, size = model.gdn.num_value_heads, model.gdn.key_head_dim
    query, key, value, decay, beta = (
        torch.rand(len(lengths), LENGTH, heads, each, requires_grad=True)
        for each in (size, size, model.gdn.value_head_dim, size, 1)
    )
    with FlopCounterMode(display=False) as counter:
        of_rule = decay if model.gdn.kda else decay[..., 0]
        gated_delta_rule(query, key, value, -of_rule, beta[..., 0]).sum().backward()
    formula = 6 * tokens * 4 * model.gdn.value_size * size
    convolutions = model.gdn.conv_parts if model.gdn.kda_full_gate else (model.gdn.conv_size,)
    beside = sum(_of_all(model.gdn.conv_kernel_dim, channels, tokens) for channels in convolutions)
    return counter.get_total_flops() - formula + beside


def _of_all(taps: int, channels: int, tokens: int) -> int:
    """What torch takes the gradient of a convolution's weight for, as if each channel were made of all."""
    return 2 * tokens * taps * channels * (channels - 1)


def _beside_the_scan(model: ModelShape, lengths: list[int]) -> int:
    """What a state space or scan takes by chunks more than 7 FLOPs (`SCAN`), and the convolution, which they leave
    out."""
    mamba, tokens = model.mamba, sum(lengths)
    if mamba is None:
        return 0
    value, decay, write, read = (
        torch.rand(len(lengths), LENGTH, *each, requires_grad=True)
        for each in (
            (mamba.num_heads, mamba.head_dim),
            (mamba.num_heads,),
            *((mamba.num_groups, mamba.state_dim) for _ in range(2)),
        )
    )
    rates = torch.rand(mamba.num_heads, mamba.state_dim, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        if mamba.dt_rank is None:
            state_space(value, -decay, write, read).sum().backward()
        else:
            selective_scan(value[..., 0], decay, -rates, write[:, :, 0], read[:, :, 0]).sum().backward()
    formula = 3 * 7 * tokens * mamba.inner_size * mamba.state_dim
    convolution = 6 * tokens * mamba.conv_kernel_dim * mamba.conv_size + _of_all(
        mamba.conv_kernel_dim, mamba.conv_size, tokens
    )
    return counter.get_total_flops() - formula + convolution


def _indexer(model: ModelShape, lengths: list[int]) -> int:
    """What an indexer of blocks takes, forward alone: of queries and keys, and their products."""
    if model.msa is None:
        return 0
    of_key = model.msa.block_size if model.msa.averaged else 1
    pairs = sum(length * -(-length // of_key) for length in lengths)
    return 2 * (
        sum(lengths) * model.hidden_size * (model.msa.query_size + model.msa.head_dim) + pairs * model.msa.query_size
    )


def _beside_streams(model: ModelShape, lengths: list[int]) -> int:
    """What joins blocks to the residual streams, and what attention to compressed keys takes more: all pairs, and no
    gradient of an indexer. The formula for pairs is worked out below."""
    csa, mhc, tokens = model.csa, model.mhc, sum(lengths)
    if model.altup:  # two routers, coefficients, and streams that are mixed
        mixed = model.altup.mixing_size * model.hidden_size
        routed = model.altup.num_inputs * model.hidden_size
        coefficients = model.altup.num_inputs * (model.altup.num_inputs + model.altup.mixing_size)
        return 6 * tokens * model.num_layers * (2 * routed + coefficients + mixed)
    if mhc is None:
        return 0
    number, streams = mhc.num_residual_streams, model.streams_size
    if mhc.lowrank:
        joined = 2 * (2 * mhc.lowrank + number) * streams * model.num_layers
        beside = 6 * tokens * (joined + 2 * mhc.lowrank * streams)
        if model.ple:
            taps = model.ple.conv_kernel_dim
            beside += sum(model.ple.layers) * (6 * tokens * taps * streams + _of_all(taps, streams, tokens))
        return beside
    connection = 6 * tokens * (mhc.mapping_size + number * mhc.mixed) * streams
    beside = 2 * model.num_layers * connection + 6 * tokens * number * streams * (not mhc.mean_head)
    if csa is None:
        return beside
    layers = GPT(model, PRESETS["bf16"], dtype=torch.float32).decoder.layers
    for layer, each in enumerate(layers):
        sizes = (model.query_size, model.kv_channels, model.hidden_size, csa.q_lora_rank)
        read = [torch.rand(len(lengths), LENGTH, size, requires_grad=True) for size in sizes]
        angles = torch.rand(2, len(lengths), LENGTH, model.rotary_size // 2)
        core = each.self_attention.core_attention
        with FlopCounterMode(display=False) as counter:
            core(*read, *angles).sum().backward()
        pairs = sum(flops._compressed_attention(model, csa, layer, length) for length in lengths)
        weights = sum(weight.numel() for name, weight in core.named_parameters() if ".linear" in name)
        beside += counter.get_total_flops() - 6 * (pairs + tokens * weights)
    return beside


@pytest.mark.parametrize("family", representing(mixers, most=7))
def test_torch_counts_the_same_products(family: str) -> None:
    model, lengths = shape(family), [LENGTH] * 2
    assert counted(model, 2) == training_flops(model, lengths) + left_out(model, lengths)


def test_texts_that_share_a_row_do_not_see_one_another() -> None:
    model, lengths = shape("llama-3"), [4, 12, 9, 7]
    found = counted(model, 2, PackedSequences(tuple(lengths)))
    assert found == training_flops(model, lengths) + left_out(model, lengths)
    assert training_flops(model, lengths) < training_flops(model, [LENGTH] * 2)


def test_a_llama_3_8b_is_what_its_papers_say() -> None:
    """Six FLOPs for each weight but the embedding's (Kaplan et al., 2020, eq. 2.2), and attention's: 8.03 billion
    parameters of which 0.525 are the embedding's."""
    llama = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 128256, 8192)
    assert training_flops(llama, [1]) == pytest.approx(6 * (8.03e9 - 0.525e9), rel=1e-3)
    assert training_flops(llama, [8192]) / 8192 - training_flops(llama, [1]) == pytest.approx(6 * 32 * 4096 * 8191)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A100-SXM4-80GB", 312),
    ],
)
def test_the_peak_is_that_of_the_device_and_not_of_one_whose_name_is_in_its_own(name: str, teraflops: float) -> None:
    assert bf16_peak(name) == teraflops * 1e12


def test_a_device_that_is_not_known_has_no_peak() -> None:
    assert bf16_peak("NVIDIA GeForce RTX 3060") is None


def test_deepseek_v4_takes_what_megatron_s_formula_says() -> None:
    """Of the attention of one layer of each kind (_dsv4_hybrid_self_attention_flops of Megatron-LM's dev branch),
    worked out by hand for 2 heads of 8 channels, windows of 4 and texts of 1024 tokens, of which an indexer chooses 16.
    """
    model = replace(shape("deepseek-v4"), num_attention_heads=2, kv_channels=8)
    assert model.csa
    csa = replace(model.csa, pattern="WCH", window_size=4, n_heads=3, head_dim=5, topk=16)
    found = [flops._compressed_attention(replace(model, csa=csa), csa, layer, 1024) for layer in range(3)]
    heads, window = 2 * 8, 1024 * 2 * 8 * 4 * 2
    chosen = 16 * (1 - 16 * 4 / (2 * 1024))
    assert found[0] == window
    assert found[1] == window + 1024 * 2 * heads * chosen + 1024**2 * 3 * 5 / 4
    assert found[2] == window + 1024**2 * heads / 128

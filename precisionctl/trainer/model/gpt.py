"""GPT: the one model that is trained, a decoder with Megatron-Core's parameter names.

Covers every family that has a table: norms, activations, biases, positions, windows, caps, MLA and experts are what
ModelShape says, and what it does not compute is refused (`computes.py`).

Shape letters: B batch, S sequence, T tokens (B * S, or a tensor rank's share of them), E hidden_size, F
ffn_hidden_size, V padded_vocab_size, G num_query_groups, R query heads per group, D kv_channels (the size of a head), K
experts of a token. Of V, G and F a tensor rank has a part.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.errors import RecipeError
from precisionctl.model.model_shape import ModelShape
from precisionctl.precision import Precision
from precisionctl.trainer.backends.base import Backend, final_norm_of, norm_of, plain_linear
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.backends.choose import BackendName, make_backend
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.model.attention.self_attention import KeysValues
from precisionctl.trainer.model.computes import check
from precisionctl.trainer.model.embedding import Embedding
from precisionctl.trainer.model.layers.altup import AltUpLayer, stream_projections, unembed_streams
from precisionctl.trainer.model.layers.attention_residuals import AttentionResidualLayer
from precisionctl.trainer.model.layers.heterogeneous_layer import HeterogeneousLayer
from precisionctl.trainer.model.layers.hybrid_layer import HybridLayer
from precisionctl.trainer.model.layers.hyper_connections import (
    GatedResidual,
    HyperLayer,
    HyperMTPLayer,
    add_head,
    contracted,
)
from precisionctl.trainer.model.layers.layer import Layer
from precisionctl.trainer.model.layers.residual_layer import Beside, ResidualLayer
from precisionctl.trainer.model.mlp import Router
from precisionctl.trainer.model.positions import LayerKind, Rope, layer_kind, query_scale
from precisionctl.trainer.model.router_balance import NO_BALANCE, Balance
from precisionctl.trainer.model.routers import RouterLosses
from precisionctl.trainer.parallel.shards import ModelShards
from precisionctl.trainer.parallel.world import ALONE, World
from precisionctl.trainer.sequences import PackedSequences, Positions


class GPT(nn.Module):
    """Logits of a decoder-only transformer.

    `precision` says which GEMMs run in FP8; the embedding, the output layer and routers never do.
    Parameters and activations have `dtype`. The ranks of `world` shard the parameters, layer by layer as they are made,
    and embedding, output layer and last norm together; sizes are such that tensor and expert ranks can shard them
    (`shards.check`). `balance` is for passes with gradients (`backward` in `passes.py`). Raises PrecisionError for
    sizes that FP8 GEMMs cannot have, UnknownArchitecture for a model of which it does not compute all (`computes.py`).
    """

    def __init__(
        self,
        model: ModelShape,
        precision: Precision,
        backend: BackendName = "emulated",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        world: World = ALONE,
        recompute: bool = False,
        balance: Balance = NO_BALANCE,
    ) -> None:
        super().__init__()
        check(model)
        self.model, self.precision, self.balance = model, precision, balance
        self.backend = make_backend(backend, precision, dtype, torch.device(device), world)
        self.router_losses: RouterLosses | None = None
        """What balances the experts; None if nothing does."""
        self._ropes = {
            kind: Rope(model, kind.in_window, self.backend.device) if kind.rope else None
            for kind in {layer_kind(model, layer) for layer in range(model.num_layers)}
        }
        self.embedding = Embedding(model, self.backend)
        self.decoder = Decoder(model, self.backend, recompute)
        if model.moe and any(model.moe.layer_freq) and balance.on:
            self.router_losses = RouterLosses(model.moe, balance, world, self.backend.device)
            for module in self.decoder.modules():
                if isinstance(module, Router):
                    module.losses = self.router_losses
        if model.untied_embeddings:
            rows = model.padded_vocab_size // world.tensor.size
            self.output_layer = nn.Linear(model.hidden_size, rows, bias=model.output_bias, dtype=dtype, device=device)
            nn.init.normal_(self.output_layer.weight, std=0.02)
            if model.output_bias:
                nn.init.zeros_(self.output_layer.bias)
        if model.mtp_num_layers:
            mtp = MTP(model, make_backend(backend, Precision(fp8=False), dtype, torch.device(device)))
            self.mtp = world.sharded(mtp, dtype)
        self._freeze_filled()
        world.sharded(self, dtype)

    def forward(
        self, tokens: Tensor, padding_mask: Tensor | None = None, packed: PackedSequences | None = None
    ) -> Tensor:
        """Tokens `[B, S]` int64 to logits `[B, S, V]`, of which a tensor rank makes its shard. With gradients enabled,
        each call is one step of delayed scaling: forward scales are updated at its end, backward ones at the end of its
        backward.

        `padding_mask`, bool `[B, S]`, is False at padding, which a recorder leaves out. `packed` are texts that share
        rows: each is then what it would be alone."""
        return self.logits(self.hidden(tokens, padding_mask, packed))

    def hidden(
        self, tokens: Tensor, padding_mask: Tensor | None = None, packed: PackedSequences | None = None
    ) -> Tensor:
        """As `forward`, but what comes before the output layer, `[B, S, E]`."""
        recorder, device, length = self.backend.recorder, self.backend.device, tokens.shape[1]
        longest = packed.longest if packed else length
        if self.model.dsa and longest > self.model.dsa.topk and padding_mask is not None and not packed:
            longest = int(padding_mask.sum(1).max())  # no text reads padding
        if self.model.dsa and longest > self.model.dsa.topk:
            raise RecipeError(
                f"a text of {longest} tokens, of which sparse attention would choose {self.model.dsa.topk}",
                do=f"Sparse attention is not computed here: use texts of at most {self.model.dsa.topk} tokens.",
            )
        if packed is None:  # `[S]`
            position = torch.arange(length, device=device)
        else:  # `[B, S]`
            position = packed.positions(device).view(tokens.shape)
        lengths: int | Tensor = length  # of the texts: `[B, S]`, or `[B, 1]` where each row is one, or all are as long
        if any(rope and rope.depends_on_length for rope in self._ropes.values()):
            if packed is not None:
                lengths = packed.lengths_by_token(device).view(tokens.shape)
            elif padding_mask is not None:
                lengths = padding_mask.sum(1, keepdim=True)
        if self.router_losses and torch.is_grad_enabled():
            self.router_losses.begin_pass(tokens, padding_mask)
        with recorder.forward_pass(padding_mask) if recorder else self.backend.forward_pass():
            hidden = self.embedding(tokens, position)
            if recorder and torch.is_grad_enabled():
                hidden.requires_grad_()  # gradients are recorded even where no parameter is to have one
            if hidden.requires_grad:
                hidden.register_hook(lambda _: (recorder or self.backend).after_backward())  # its gradient is the last
            positions = self._positions(position, lengths, packed, (len(tokens), length))
            if self.model.ple or (self.model.moe and self.model.moe.n_hash_layers):
                positions = {kind: each._replace(tokens=tokens.flatten()) for kind, each in positions.items()}
            streams, per_layer = self.embedding.streams(hidden), self.embedding.per_layer(tokens, hidden)
            decoded: Tensor = self.decoder(streams, positions, per_layer)
        return self.backend.world.tensor.enter(decoded).view(*tokens.shape, -1)

    def capture(self, rows: int, length: int, *, same_weights: bool = False) -> None:
        """Launch layers as CUDA graphs from now on, in passes with gradients over tokens `[rows, length]` that no texts
        share; those within the backend's `same_weights`, too, where that is said. Raises EnvironmentProblem."""
        shape, dtype, device = (rows, length), self.backend.dtype, self.backend.device
        positions = self._positions(torch.arange(length, device=device), length, None, shape)
        hidden = torch.zeros(rows * length, self.model.streams_size, dtype=dtype, device=device)
        replay = self.backend.captured(self.decoder.layers, positions, hidden, same_weights=same_weights)
        self.decoder.replay = Replay(shape, replay)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., E]` to `[..., V]`."""
        bias = self.output_layer.bias if self.model.output_bias else None
        logits = product(F.linear, hidden, self.output_weight, bias)
        if self.model.logit_multiplier != 1:
            logits = logits * self.model.logit_multiplier
        if self.model.logits_scaling != 1:
            logits = logits / self.model.logits_scaling
        cap = self.model.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def output_weight(self) -> Tensor:
        """`[V, E]`, or the part of a tensor rank."""
        return self.embedding.word_embeddings.weight if self.model.tied_embeddings else self.output_layer.weight

    @cached_property
    def shards(self) -> ModelShards:
        """What this rank has of each parameter."""
        return ModelShards.of(self.model, self.backend.dtype, self.backend.world)

    @contextmanager
    def recorded_by(self, recorder: Recorder) -> Iterator[None]:
        """Run the GEMMs in BF16 and show their tensors to a recorder; the model's own FP8 state stays as it is."""
        self.backend.recorder = recorder
        try:
            yield
        finally:
            self.backend.recorder = None

    @contextmanager
    def in_bf16(self) -> Iterator[None]:
        """Run the GEMMs in BF16; the model's own FP8 state stays as it is."""
        unread = Recorder(Precision(fp8=False), self.backend.device, self.backend.world)
        with self.recorded_by(unread):
            yield

    def _freeze_filled(self) -> None:
        # Megatron has one switch for the biases of all linears; where Hugging Face has only some of them, the others
        # are zeros, and training them would make a model that Hugging Face cannot hold. LayerNorms have weights and
        # biases, too.
        of_mlp = self.model.mlp_bias
        present = {"linear_qkv": self.model.qkv_bias, "linear_proj": self.model.proj_bias}
        present |= {"linear_fc1": of_mlp, "linear_fc2": of_mlp}
        present |= {"input_layernorm": self.model.norm_bias, "final_layernorm": self.model.norm_bias}
        of_norms = {"layer_norm_bias": self.model.norm_bias, "layer_norm_weight": self.model.norm_weight}
        for name, parameter in self.named_parameters():
            module, _, kind = name.rpartition(".")
            filled = kind == "bias" and not present.get(module.rpartition(".")[2], True)
            factor = module == "decoder.final_layernorm" and kind == "weight" and not self.model.norm_weight
            if filled or factor or not of_norms.get(kind, True):
                parameter.requires_grad_(False)

    def _positions(
        self, position: Tensor, lengths: int | Tensor, packed: PackedSequences | None, shape: tuple[int, int]
    ) -> dict[LayerKind, Positions]:
        """What each kind of layer knows of positions `[S]` or `[B, S]`, of texts of these `lengths`, `shape` being
        `[B, S]`."""
        made, chunk = {}, self.model.attention_chunk_size
        texts = packed or PackedSequences((shape[1],) * shape[0])
        chunks = texts.in_chunks(chunk) if chunk and texts.longest > chunk else packed
        alpha = self.embedding.lerope.alpha if self.embedding.lerope else None
        for kind, rope in self._ropes.items():
            cos, sin = rope.at(position, lengths, alpha) if rope else (None, None)
            window = self.model.sliding_window if kind.in_window else None
            seen = chunks if kind.in_window else packed  # a chunk is a text of its own, but for its positions
            made[kind] = Positions(cos, sin, window, seen, shape, query_scale(self.model, position, kind.rope))
        return made


@dataclass(frozen=True)
class Replay:
    """All layers as CUDA graphs, `[T, streams_size]` to the same, captured in a pass with gradients over tokens of this
    shape, `[rows, length]`, that no texts share."""

    shape: tuple[int, int]
    graphs: Callable[[Tensor], Tensor]

    def fits(self, positions: Positions) -> bool:
        """Whether a pass at these positions is like the captured one."""
        return torch.is_grad_enabled() and positions.packed is None and positions.shape == self.shape

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.graphs(hidden)


class Decoder(nn.Module):
    """All layers, and the norm after the last, which has another name where each layer is one block. Residual streams
    begin as the embedding each, but of alternating updates as projections of it. One is made of them before the norm,
    or in its place."""

    def __init__(self, model: ModelShape, backend: Backend, recompute: bool) -> None:
        super().__init__()
        self.model, self.mhc = model, model.mhc
        self.hyper_connection_mixer: GatedResidual | None = None
        if self.mhc and self.mhc.lowrank:
            self.hyper_connection_mixer = GatedResidual(model, self.mhc, backend, adds=False)
        elif self.mhc:
            add_head(self, model, self.mhc, backend)
        self.altup_unembed_projections = stream_projections(model, backend) if model.altup else None
        self.kv_layers = [model.kv_layer(layer) for layer in range(model.num_layers)]
        self.layers = nn.ModuleList()
        for number in range(model.num_layers):
            name = f"decoder.layers.{number}"
            layer: ResidualLayer
            if model.mamba:
                layer = HybridLayer(name, model, model.mamba, number, backend, recompute)
            elif model.heterogeneous:
                layer = HeterogeneousLayer(name, model, number, backend, recompute)
            elif model.mhc:
                layer = HyperLayer(name, model, model.mhc, number, backend, recompute)
            elif model.altup:
                layer = AltUpLayer(name, model, model.altup, number, backend, recompute)
            elif model.attn_res_block_size:
                layer = AttentionResidualLayer(name, model, number, backend, recompute)
            else:
                layer = Layer(name, model, number, backend, recompute)
            self.layers.append(backend.world.sharded(layer, backend.dtype))
        norm = None if self.hyper_connection_mixer else backend.norm(model.hidden_size, final_norm_of(model))
        self.final_layernorm = None if model.mamba else norm
        self.final_norm = norm if model.mamba else None
        self.backend = backend
        self.replay: Replay | None = None
        """All layers as CUDA graphs, if they are captured."""

    def forward(
        self, hidden: Tensor, positions: dict[LayerKind, Positions], per_layer: list[Tensor] | None = None
    ) -> Tensor:
        """Embeddings `[T, E]`, or the streams made of them, `[T, N * E]`, to what the output layer reads, `[T, E]`;
        `per_layer` is what each layer reads beside."""
        if self.mhc:
            hidden = hidden.repeat(1, self.mhc.num_residual_streams)
        if self.replay and self.replay.fits(next(iter(positions.values()))) and not self.backend.recorder:
            hidden = self.replay(hidden)
        else:
            kept: dict[int, KeysValues | None] = {}
            put_aside: tuple[Tensor, ...] = ()
            for number, (layer, source) in enumerate(zip(self.layers, self.kv_layers, strict=True)):
                beside = Beside(per_layer[number] if per_layer else None, kept.get(source), put_aside)
                if layer.puts_aside:
                    put_aside += (hidden,)
                hidden, kept[number] = layer(hidden, positions, beside)
        if self.mhc:
            streams = torch.unflatten(hidden, -1, (self.mhc.num_residual_streams, -1))
            if self.hyper_connection_mixer:
                read: Tensor = self.hyper_connection_mixer(streams)[0]
                return read
            hidden = contracted(streams, self, self.model, self.mhc)
        if self.altup_unembed_projections is not None:
            hidden = unembed_streams(hidden, self.altup_unembed_projections)
        last = self.final_layernorm or self.final_norm
        assert last is not None, "one of the two is there"
        out: Tensor = last(hidden)
        return out


class MTP(nn.Module):
    """Multi-token prediction layers (DeepSeek-V3), carried along so that nothing is lost: nothing runs or trains
    them."""

    def __init__(self, model: ModelShape, backend: Backend) -> None:
        super().__init__()
        kind = HyperMTPLayer if model.of_prediction.mhc else MTPLayer
        self.layers = nn.ModuleList(kind(model, backend) for _ in range(model.mtp_num_layers))
        self.requires_grad_(False)


class MTPLayer(nn.Module):
    """The parameters of a layer of multi-token prediction, which are carried along and not trained."""

    def __init__(self, model: ModelShape, backend: Backend) -> None:
        super().__init__()
        norm, size = norm_of(model), model.hidden_size
        model = model.of_prediction
        self.enorm, self.hnorm = backend.norm(size, norm), backend.norm(size, norm)
        self.eh_proj = backend.linear("mtp.eh_proj", 2 * size, size, False)
        if model.mamba:
            blocks = range(model.num_layers)
            self.mtp_model_layer = nn.Module()
            self.mtp_model_layer.layers = nn.ModuleList(
                HybridLayer(f"mtp.mtp_model_layer.layers.{each}", model, model.mamba, each, backend) for each in blocks
            )
        else:
            self.transformer_layer = Layer("mtp.transformer_layer", model, model.num_layers - 1, backend)
        self.final_layernorm = backend.norm(size, norm)
        if model.mtp_output_layers:
            self.output_layer = plain_linear(size, model.padded_vocab_size, backend)

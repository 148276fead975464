"""RunRecorder: records the amaxes of a model that another program trains, and writes the file that `calibrate` would.

Hooks on the model's own modules read what `Recorder` is shown by ours, and change nothing. On a GPU nothing waits for
them: amaxes stay on the device until the file is written.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from precisionctl.checkpoints.megatron.payloads import payload_bytes
from precisionctl.checkpoints.output import Output
from precisionctl.codes import numerics
from precisionctl.errors import MissingFp8State, RecipeError
from precisionctl.fp8 import delayed_scaling
from precisionctl.fp8.extra_state import decode_payload
from precisionctl.fp8.state import (
    BY_RECORDER,
    BY_RECORDER_IN_TRANSFORMERS,
    CACHE,
    DelayedScaling,
    Fp8State,
    Fp8States,
    Role,
)
from precisionctl.paths import StrPath
from precisionctl.recipe import load_recipe
from precisionctl.recording.gemm_sites import GemmSite, Normed, find_sites
from precisionctl.recording.live_weights import digest_of, in_transformers
from precisionctl.recording.rank_files import begin, key_of, write_part
from precisionctl.trainer.backends.recorder import Recorder


class RunRecorder:
    """Records the passes with gradients of the models that it is attached to, under a recipe of delayed scaling.

    Each recorded forward pass begins a row of the histories, to which its backward belongs; only every `every`-th pass
    is recorded. After `passes` recorded passes the file is written and the hooks are removed; without `passes`,
    `finish` does that. With several processes, each records its own passes, and the last to finish writes the file for
    all.

    Raises RecipeError for a recipe that keeps no state, and for numbers of passes below 1.
    """

    iteration: int | None = None
    """The training step that the file is to name."""

    def __init__(
        self,
        out: StrPath,
        *,
        recipe: str = "fp8-delayed",
        overrides: tuple[str, ...] = (),
        every: int = 1,
        passes: int | None = None,
    ) -> None:
        self.precision = replace(load_recipe(recipe, overrides).precision, fp8=True)
        if not self.precision.keeps_state:
            raise RecipeError(
                f"{self.precision.scaling} scaling keeps no state to record",
                do="Choose a recipe with precision.scaling=delayed.",
            )
        for name, count in (("every", every), ("passes", passes)):
            if count is not None and count < 1:
                raise RecipeError(f"{name} = {count} must be 1 or above")
        self.out, self._every, self._passes = Path(out), every, passes
        self._seen = self._recorded = 0
        self._recording = False
        self._mask: Tensor | None = None
        self._amaxes: dict[tuple[str, Role], Tensor] = {}
        """Of the pass that is running, by module and role."""
        self._recorder: Recorder | None = None
        self.models: list[nn.Module] = []
        """Those that it is attached to, without what is around them."""
        self._gemms: list[GemmSite] = []
        self._detach: list[Callable[[], object]] = []

    def attach(self, model: nn.Module) -> None:
        """Record a model of transformers or Megatron-Core, in DDP or not; of a model in several parts, as pipelines
        have them, each in turn. Raises UnknownArchitecture, PrecisionError, and as `make_plan` for a model that is not
        what its config says; DestinationExists if something is at `out`, and as `begin`."""
        if not self.models:  # not before: torch.distributed, which may begin late, says which process makes way
            begin(Output(self.out))
        while isinstance(inner := getattr(model, "module", None), nn.Module):
            model = inner
        sites = find_sites(model, self.precision)
        hook = model.register_forward_pre_hook(self._begin_pass, with_kwargs=True)
        self._detach.append(hook.remove)
        for site in sites.gemms:
            self._watch(site)
        if sites.in_transformers:
            self._detach.append(_watch_attention(sites.attention, self._record_cache))
        else:
            for module, name in sites.attention.items():
                of_attention = module.register_forward_pre_hook(
                    lambda _, args, name=name: self._record_cache(name, args[1], args[2])
                )
                self._detach.append(of_attention.remove)
        self.models.append(model)
        self._gemms += sites.gemms

    def _begin_pass(self, model: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        if self.models and model is not self.models[0]:  # a later part of the same pass
            return
        self._end_pass()
        if self._recorded == self._passes:
            self.finish()
        elif torch.is_grad_enabled():
            self._recording = self._seen % self._every == 0
            self._seen += 1
            self._recorded += self._recording
            mask = kwargs.get("attention_mask")
            self._mask = mask.flatten().bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
            # On a GPU nothing asks whether there is padding, as that would wait for it
            if self._mask is not None and self._mask.is_cpu and bool(self._mask.all()):
                self._mask = None

    def _end_pass(self) -> None:
        if self._amaxes:
            if self._recorder is None:
                self._recorder = Recorder(self.precision, next(iter(self._amaxes.values())).device)
            self._recorder.record_pass(self._amaxes)
        self._amaxes = {}
        self._recording = False

    def _watch(self, site: GemmSite) -> None:
        """Hook the modules of a GEMM: what goes into the first, or into its norm; the weights of all, before an owner
        frees them; and the gradients of what comes out."""
        expert_of: dict[str, int | None] = {f"weight{place}": expert for place, expert in enumerate(site.experts)}
        expert_of = expert_of or {"weight": site.expert}

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not self._recording or not torch.is_grad_enabled() or _keeps_state(module):
                return
            if module is site.linears[0] and site.normed is None:
                self._record(site, "input", args[0], args, self._mask_of(args[0]))
            for name, expert in expert_of.items():
                weight = module.get_parameter(name)
                self._take(key_of(site.name, expert), "weight", _amax(weight).bfloat16())

        def after_norm(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if self._recording and torch.is_grad_enabled() and not _keeps_state(site.linears[0]):
                assert site.normed
                with torch.no_grad():
                    tokens = args[0].detach().flatten(0, -2)
                    mask = self._mask_of(tokens)
                    # On a GPU it would wait, and `out` of a fused norm is the linear's
                    if tokens.is_cpu and module not in site.linears and not site.normed.adds_to_rounded:
                        kept = _largest(out.detach().flatten(0, -2), mask)
                        tokens, mask = tokens[kept], None if mask is None else mask[kept]
                    amax = _normed_amax(site.normed, tokens, mask)
                self._take(key_of(site.name, site.expert), "input", amax)

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            out = out[0] if isinstance(out, tuple) else out
            if self._recording and out.requires_grad and not _keeps_state(module):
                mask = self._mask_of(out)  # of this pass: another one may begin before its backward
                out.register_hook(lambda gradient: self._record(site, "grad_output", gradient, args, mask))

        if site.normed:
            self._detach.append(site.normed.module.register_forward_hook(after_norm).remove)
        for linear in site.linears:
            self._detach.append(linear.register_forward_pre_hook(before).remove)
            self._detach.append(linear.register_forward_hook(after).remove)

    def _mask_of(self, values: Tensor) -> Tensor | None:
        """Which of the tokens `[..., features]` are not padding, or None for all. The model's mask is used only if it
        is for these tokens: it may also cover a cache, or be of a later pass if a layer recomputes an earlier one."""
        return self._mask if self._mask is not None and len(self._mask) == values.shape[:-1].numel() else None

    def _record(self, site: GemmSite, role: Role, values: Tensor, args: tuple[Any, ...], mask: Tensor | None) -> None:
        """Record tokens `[..., features]` that go into a GEMM or, as gradients, come out of it."""
        if site.experts:
            for expert, part in zip(site.experts, torch.split(values, [int(count) for count in args[1]]), strict=True):
                self._take(key_of(site.name, expert), role, _amax(part))
        else:
            self._take(key_of(site.name, site.expert), role, _amax(values, mask))

    def _record_cache(self, name: str, key: Tensor, value: Tensor) -> None:
        if self._recording and torch.is_grad_enabled():
            for role, values in zip(CACHE, (key, value), strict=True):
                tokens = values if self._mask is None else values.transpose(1, 2).flatten(2)
                self._take(name, role, _amax(tokens, self._mask_of(tokens)))

    def _take(self, module: str, role: Role, amax: Tensor) -> None:
        before = self._amaxes.get((module, role))
        self._amaxes[module, role] = amax if before is None else torch.maximum(before, amax)

    def detach(self) -> None:
        """Remove the hooks; what was recorded stays."""
        while self._detach:
            self._detach.pop()()

    def finish(self) -> None:
        """Remove the hooks and write the file. Raises MissingFp8State if no pass was recorded, and what `sidecar.write`
        raises."""
        self._end_pass()
        self.detach()
        if not self._recorded:
            raise MissingFp8State(
                "no pass with gradients was recorded",
                where=self.out,
                do="Record around the forward and backward passes of training.",
            )
        # An expert's state is that of `module[expert]`; modules that TE computes in FP8 have recorded theirs themselves
        recipe = self.precision.delayed
        found = self._recorder.states() if self._recorder else {}
        for site in self._gemms:
            keys = [key_of(site.name, expert) for expert in site.experts or (site.expert,)]
            own = [_own_state(linear, site, recipe) for linear in site.linears if _keeps_state(linear)]
            if own:
                merged = Fp8State.merge(own)
                each = [merged.of_expert(number) for number in range(len(keys))] if site.experts else [merged]
                found |= dict(zip(keys, each, strict=True))
            for key in keys:
                found.setdefault(key, Fp8State.fresh(recipe.amax_history_len))
        model = self.models[0]
        producer = BY_RECORDER_IN_TRANSFORMERS if in_transformers(model) else BY_RECORDER
        states = Fp8States(recipe, found, producer=producer, iteration=self.iteration, of_weights=digest_of(model))
        write_part(Output(self.out), states)


def _watch_attention(
    modules: Mapping[nn.Module, str], on_cache: Callable[[str, Tensor, Tensor], None]
) -> Callable[[], None]:
    """Call `on_cache` whenever one of these attention modules of transformers attends, with the module's name, keys
    (after rotary embedding) and values, `[B, heads, S, channels]`: no module has them. Returns a function that ends
    this.

    The models get their attention function from AttentionInterface, and call it with module, queries, keys
    and values. Here they get one that shows these to `on_cache` first.
    """
    from transformers.modeling_utils import AttentionInterface

    asked = AttentionInterface.get_interface

    def get_interface(self: AttentionInterface, *args: Any) -> Callable[..., Any]:
        attend = asked(self, *args)

        @wraps(attend)
        def watched(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **others: Any) -> Any:
            if module in modules:
                on_cache(modules[module], key, value)
            return attend(module, query, key, value, *rest, **others)

        return watched

    def end() -> None:
        # Of two recorders the first to begin may be the first to end: then its function stays, and shows nothing
        nonlocal modules
        modules = {}
        if AttentionInterface.get_interface is get_interface:
            AttentionInterface.get_interface = asked

    AttentionInterface.get_interface = get_interface
    return end


def _amax(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """The largest magnitude, of all values or of tokens where `mask`, bool `[tokens]`, is True. NaN if any of them is
    NaN."""
    values = values.detach()
    if mask is not None:
        values = values.reshape(len(mask), -1).masked_fill(~mask.to(values.device)[:, None], 0)
    if not values.numel():
        return values.new_zeros(())
    low, high = torch.aminmax(values)
    return torch.maximum(-low, high)


def _largest(normed: Tensor, mask: Tensor | None) -> Tensor:
    """Which tokens of a norm's rounded output `[tokens, features]` may have the largest magnitude before rounding, bool
    `[tokens]`. All, if any is infinite or NaN. With at most two roundings to BF16 (`u = 2^-8`), and no addition after
    the first, the token of the largest keeps at least `(1 - u)² / (1 + u)²` of the largest rounded one, 98.4 %."""
    if normed.dtype == torch.bfloat16:  # bits without the sign are in the order of magnitudes, and compared faster
        each = normed.view(torch.int16).bitwise_and(0x7FFF).amax(-1).view(torch.bfloat16)
    else:
        each = normed.abs().amax(-1)
    if mask is not None:
        each = each.masked_fill(~mask, 0)
    largest = each.max() if len(each) else each.new_zeros(())
    return each >= 0.97 * largest if largest.isfinite() else torch.ones_like(each, dtype=torch.bool)


def _normed_amax(normed: Normed, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The amax of a norm's output, where `mask` is True. On a CPU, `[tokens, features]` are normed in pieces that stay
    in a core's cache, which takes a ninth of the time."""
    rows = max(1, numerics.PIECE // tokens.shape[1]) if tokens.is_cpu else len(tokens)
    parts = torch.split(tokens, rows)
    masks = [None] * len(parts) if mask is None else torch.split(mask, rows)
    return torch.stack([_amax(normed.output(part), kept) for part, kept in zip(parts, masks, strict=True)]).amax()


def _keeps_state(module: nn.Module) -> bool:
    """Whether Transformer Engine computes a module under delayed scaling, and so records it itself."""
    meta = getattr(module, "fp8_meta", None)
    return isinstance(meta, dict) and hasattr(meta.get("scaling_fwd"), "amax_history")


def _own_state(linear: nn.Module, site: GemmSite, recipe: DelayedScaling) -> Fp8State:
    """The state that Transformer Engine keeps of a linear, under our recipe."""
    payload = payload_bytes(linear.get_extra_state(), site.name)
    found = decode_payload(payload, site.name, of_group=bool(site.experts))
    if found is None:  # nothing recorded yet
        return Fp8State.fresh(recipe.amax_history_len, (len(site.experts),) if site.experts else ())
    return delayed_scaling.change_recipe(found[1], found[0], recipe)

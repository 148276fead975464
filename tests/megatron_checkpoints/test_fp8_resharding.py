"""FP8 state through every parallel size and container, and what ranks and experts of a run had of it."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import conversions
import pico
import pytest
import torch
from in_memory import InMemory, recorded, to_megatron
from soaking import in_soak
from te_pickles import NOTHING, VERSIONS, empty_file, of_module, pickled, recipe_object, unpickled
from te_states import same

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.megatron.carried_run import CarriedRun
from precisionctl.checkpoints.megatron.fp8_state import ExpertPayloads, decode_payloads
from precisionctl.checkpoints.megatron.fp8_state_writer import grouped_payloads, payloads_of
from precisionctl.checkpoints.megatron.keys import object_key
from precisionctl.checkpoints.megatron.payloads import SavedPayload
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.checkpoints.torch_legacy.reader import LegacyReader
from precisionctl.checkpoints.torch_legacy.writer import LegacyWriter
from precisionctl.conversion.convert import convert
from precisionctl.errors import DamagedCheckpoint, PrecisionError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.extra_state_writer import encode_payload
from precisionctl.fp8.state import ATTENTION, BACKWARD, FORWARD, ROLES, DelayedScaling, Fp8State, Fp8States, RoleState
from precisionctl.param import Parallelism
from precisionctl.planning.make_plan import make_plan
from precisionctl.precision import Precision

LINEAR = "decoder.layers.1.mlp.experts.linear_fc1"
RECIPE = DelayedScaling(amax_history_len=3)


def of_experts(count, seed=0, unused=False):
    """A state of `[count]` experts, each with numbers of its own; output and grad_input as they are in a run."""
    generator = torch.Generator().manual_seed(seed)
    numbers = {role: torch.rand(count, 4, generator=generator) + 0.5 for role in ROLES}
    roles = {role: RoleState(part[:, 0], part[:, 1:]) for role, part in numbers.items()}
    fresh = RoleState(torch.ones(count), torch.zeros(count, 3))
    return Fp8State(roles if unused else {**roles, "output": fresh, "grad_input": fresh})


def as_te_stacks(state, order):
    """A grouped linear's tensors, column by column as the two generations of TE number them: gemm * 3 + role and
    gemm * 2 + role since 2.3, role * gemms + gemm before (grouped_linear.py, `_offsets`)."""
    found = {}
    for direction, roles in (("fwd", FORWARD), ("bwd", BACKWARD)):
        gemms = len(state.roles["weight"].scale)
        pairs = [(role, gemm) for gemm in range(gemms) for role in roles]
        if order == "role":
            pairs = [(role, gemm) for role in roles for gemm in range(gemms)]
        found[f"scale_{direction}"] = torch.stack([state.roles[role].scale[gemm] for role, gemm in pairs])
        histories = [state.roles[role].amax_history[gemm] for role, gemm in pairs]
        found[f"amax_history_{direction}"] = torch.stack(histories, 1).contiguous()
    return found


def payload_of(tensors, version, gemms):
    recipe = {"recipe": recipe_object(RECIPE, version)} if version >= (2, 0) else {}
    return recipe | tensors | {"extra_fp8_variables": {"num_gemms": gemms, "fp8_max_fwd": 448, "fp8_max_bwd": 57344}}


def as_megatron_splits(payload, gemms):
    """TEGroupedLinear._split_extra_state: views, which pickle with all that they are views of."""
    rows = len(payload["amax_history_fwd"])
    parts = []
    for i in range(gemms):
        part = {key: payload[key] for key in ("recipe",) if key in payload}
        part["extra_fp8_variables"] = payload["extra_fp8_variables"] | {"num_gemms": 1}
        for direction, each in (("fwd", 3), ("bwd", 2)):
            part[f"scale_{direction}"] = payload[f"scale_{direction}"].view(each, -1)[:, i]
            part[f"amax_history_{direction}"] = payload[f"amax_history_{direction}"].view(rows, each, -1)[:, :, i]
        parts.append(part)
    return parts


def as_megatron_encodes(part, version):
    """TEGroupedLinear._encode_extra_state: a file before TE 2.0."""
    if version >= (2, 0):
        return pickled(part)
    file = io.BytesIO()
    torch.save(part, file)
    return file.getvalue()


def as_megatron_merges(parts):
    """TEGroupedLinear.merge_extra_states."""
    found = {}
    for direction in ("fwd", "bwd"):
        scales = [part[f"scale_{direction}"].view(-1, 1) for part in parts]
        histories = [part[f"amax_history_{direction}"].reshape(-1, 1) for part in parts]
        found[f"scale_{direction}"] = torch.cat(scales, 1).view(-1)
        rows = len(parts[0][f"amax_history_{direction}"])
        found[f"amax_history_{direction}"] = torch.cat(histories, 1).view(rows, -1)
    return found


BEFORE, SINCE = [(1, 9), (1, 14), (2, 0), (2, 2)], [(2, 3), (2, 15), (2, 20)]
ORDERS = {**dict.fromkeys(BEFORE, "role"), **dict.fromkeys(SINCE, "gemm")}


@pytest.mark.parametrize("version", ORDERS, ids=str)
@pytest.mark.parametrize("unused", [False, True], ids=["as a run leaves it", "with outputs recorded"])
def test_a_grouped_linear_is_read_in_the_order_of_its_version(version, unused):
    state = of_experts(4, unused=unused)
    data = pickled(payload_of(as_te_stacks(state, ORDERS[version]), version, 4))
    saved = [SavedPayload(f"{LINEAR}._extra_state", data, "here", 0)]
    if unused and version in ((2, 2), (2, 3)):  # neither the recipe's fields nor the numbers tell
        with pytest.raises(PrecisionError, match="--grouped-columns gemm"):
            decode_payloads(saved, Path("here"))
        told = decode_payloads(saved, Path("here"), ExpertPayloads(order=ORDERS[version]))
        assert same(told.modules[LINEAR], state)
        assert any("as told" in note for note in told.notes)
        return
    found = decode_payloads(saved, Path("here"))
    assert same(found.modules[LINEAR], state)
    assert any({"role": "role by role", "gemm": "expert by expert"}[ORDERS[version]] in note for note in found.notes)


@pytest.mark.parametrize("version", [(1, 14), (2, 2), (2, 3), (2, 20)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_experts_that_megatron_cut_apart_are_put_right(version, ranks):
    """Megatron cuts by role whatever the order is: what it stores of TE 2.3 and after mixes roles and experts."""
    state, each = of_experts(8), 8 // ranks
    saved = []
    for rank in range(ranks):
        of_rank = Fp8State(
            {
                role: RoleState(p.scale[rank * each :][:each], p.amax_history[rank * each :][:each])
                for role, p in state.roles.items()
            }
        )
        parts = as_megatron_splits(payload_of(as_te_stacks(of_rank, ORDERS[version]), version, each), each)
        saved += [
            SavedPayload(f"{LINEAR}._extra_state{rank * each + i}", as_megatron_encodes(part, version), "here")
            for i, part in enumerate(parts)
        ]
    assert same(decode_payloads(saved, Path("here"), ExpertPayloads(ranks=ranks)).modules[LINEAR], state)


@pytest.mark.parametrize("te", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_what_is_written_for_expert_ranks_is_what_megatron_makes_te_s_columns_of(te, ranks):
    state, each = of_experts(8, unused=True), 8 // ranks
    written = payloads_of(Fp8States(RECIPE, {LINEAR: state}), te, ranks)
    for rank in range(ranks):
        names = [f"{LINEAR}._extra_state{rank * each + i}" for i in range(each)]
        merged = as_megatron_merges([unpickled(written[name].numpy().tobytes()) for name in names])
        held = slice(rank * each, (rank + 1) * each)
        part = Fp8State({role: RoleState(p.scale[held], p.amax_history[held]) for role, p in state.roles.items()})
        expected = as_te_stacks(part, {1: "role", 2: "gemm"}[te])
        assert all(torch.equal(merged[key], expected[key]) for key in expected)
    saved = [SavedPayload(name, data.numpy().tobytes(), "here") for name, data in written.items()]
    assert same(decode_payloads(saved, Path("here"), ExpertPayloads(ranks=ranks)).modules[LINEAR], state)


def test_experts_that_were_linears_by_themselves_are_taken_as_they_are():
    state = of_experts(4, unused=True)
    saved = []
    for expert in range(4):
        alone = {role: RoleState(p.scale[[expert]], p.amax_history[[expert]]) for role, p in state.roles.items()}
        data = pickled(payload_of(as_te_stacks(Fp8State(alone), "gemm"), (2, 20), 1))
        saved.append(SavedPayload(f"{LINEAR}._extra_state{expert}", data, "here"))
    assert same(decode_payloads(saved, Path("here"), ExpertPayloads(ranks=None)).modules[LINEAR], state)


def test_an_expert_without_a_payload_is_damage():
    written = payloads_of(Fp8States(RECIPE, {LINEAR: of_experts(4)}), 2, 1)
    saved = [SavedPayload(name, data.numpy().tobytes(), "here") for name, data in written.items()]
    with pytest.raises(DamagedCheckpoint, match="only some experts"):
        decode_payloads(saved[:2] + saved[3:], Path("here"), ExpertPayloads(ranks=1))


def test_a_linear_of_experts_with_other_columns_than_its_gemms_have_is_damage():
    """Of a TE whose recipe does not tell the order, which is looked for in the columns."""
    tensors = as_te_stacks(of_experts(2), "gemm")
    for gemms in (1, 3):
        saved = [SavedPayload(f"{LINEAR}._extra_state", pickled(payload_of(tensors, (2, 3), gemms)), "here", 0)]
        with pytest.raises(DamagedCheckpoint, match=f"6 columns forward and 4 backward, not {3 * gemms} and"):
            decode_payloads(saved, Path("here"))


def test_ranks_that_kept_amaxes_for_themselves_give_the_largest_and_the_smallest_scale():
    """Fp8State.merge, expert by expert: what one rank never recorded says nothing."""
    a, b = of_experts(2, seed=1), of_experts(2, seed=2)
    never = RoleState(torch.tensor([1.0, 7.0]), torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 2.0]]))
    b = Fp8State({**b.roles, "input": never})
    saved = []
    for state in (a, b, a):
        data = pickled(payload_of(as_te_stacks(state, "gemm"), (2, 20), 2))
        saved.append(SavedPayload(f"{LINEAR}._extra_state", data, "here", 0))
    found = decode_payloads(saved, Path("here"))
    merged = found.modules[LINEAR].roles
    assert torch.equal(merged["weight"].scale, torch.minimum(a.roles["weight"].scale, b.roles["weight"].scale))
    histories = [state.roles["weight"].amax_history for state in (a, b)]
    assert torch.equal(merged["weight"].amax_history, torch.maximum(*histories))
    first, second = a.roles["input"].scale.tolist()
    assert merged["input"].scale.tolist() == [first, min(7.0, second)]
    assert not merged["output"].recorded
    assert any("1 module differs between ranks" in note for note in found.notes)


def model(tmp_path: Path, family: str) -> InMemory:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, num_hidden_layers=4, num_key_value_heads=4)
    return to_megatron(HuggingFaceReader(tmp_path / "hf"))


def states_of(source: Reader) -> Fp8States:
    """Every GEMM's state, every attention's with its cache, and experts' where there are some."""
    states = recorded(source)
    length = states.recipe.amax_history_len
    generator = torch.Generator().manual_seed(2)
    modules = dict(states.modules)
    for layer in range(4):
        numbers = torch.rand(len(ATTENTION), length + 1, generator=generator) + 0.5
        parts = {role: RoleState(part[0], part[1:]) for role, part in zip(ATTENTION, numbers, strict=True)}
        modules[f"decoder.layers.{layer}.self_attention.core_attention"] = Fp8State(parts)
    if source.model.moe:
        for layer in (1, 2, 3):
            for linear in ("linear_fc1", "linear_fc2"):
                numbers = torch.rand(len(ROLES), 8, length + 1, generator=generator) + 0.5
                parts = {role: RoleState(p[:, 0], p[:, 1:]) for role, p in zip(ROLES, numbers, strict=True)}
                modules[f"decoder.layers.{layer}.mlp.experts.{linear}"] = Fp8State(parts)
    return Fp8States(states.recipe, modules, iteration=7)


def written(
    source: Reader, directory: Path, container: str, sizes: Parallelism, fp8: Fp8States | None, te: int
) -> Reader:
    directory.mkdir()
    plan = make_plan(source, "megatron", parallelism=sizes)
    kind = LegacyWriter if container == "torch" else TorchDistWriter
    writer = kind(directory / "release", plan.model, plan.targets, parallelism=sizes, te=te)
    convert(plan, source, writer)
    writer.finish(fp8)
    return (LegacyReader if container == "torch" else TorchDistReader)(directory / "release")


DENSE = [
    ("torch", Parallelism(tensor=2, pipeline=2, virtual=2)),
    ("torch_dist", Parallelism(tensor=4)),
    ("torch", Parallelism(pipeline=4)),
    ("torch_dist", Parallelism(tensor=2, pipeline=2)),
    ("torch", Parallelism()),
]
MOE = [
    ("torch", Parallelism(tensor=2, pipeline=2, expert=2)),
    ("torch_dist", Parallelism(expert=4)),
    ("torch", Parallelism(tensor=2, expert=4, expert_tensor=1)),
    ("torch_dist", Parallelism(pipeline=2, expert=2)),
    ("torch_dist", Parallelism()),
    ("torch", Parallelism(expert=8)),
]


@pytest.mark.parametrize("te", [2, *in_soak(1)])
@pytest.mark.parametrize(("family", "way"), [("llama-3", DENSE), ("qwen3-moe", MOE)], ids=["dense", "experts"])
def test_state_goes_through_every_size_and_container_bit_for_bit(tmp_path, family, way, te):
    source: Reader = model(tmp_path, family)
    states = states_of(source)
    carried: Fp8States | None = states
    for step, (container, sizes) in enumerate(way):
        source = written(source, tmp_path / str(step), container, sizes, carried, te)
        carried = source.fp8
        assert carried is not None and not carried.raw
        assert (carried.recipe, carried.iteration) == (states.recipe, 7)
        assert carried.modules.keys() == states.modules.keys()
        for name, state in states.modules.items():
            assert same(carried.modules[name], state), name


def test_state_of_a_run_goes_through_hugging_face_in_fp8_bit_for_bit(tmp_path):
    """Though the weights are rounded to codes there, as `--precision fp8` asks."""
    source = model(tmp_path, "llama-3")
    recipe = Precision(fp8=True, delayed=DelayedScaling(amax_history_len=4))
    conversions.run(tmp_path / "hf", tmp_path / "first", "megatron", "fp8", recipe=recipe)
    of_weights = open_checkpoint(tmp_path / "first").fp8
    assert of_weights is not None
    rest = states_of(source).modules  # whose weights are not the model's
    modules = {
        name: Fp8State({role: (state if role == "weight" else rest[name]).roles[role] for role in state.roles})
        for name, state in of_weights.modules.items()
    }
    states = replace(of_weights, modules=modules)
    sidecar.write(tmp_path / "state", states)
    conversions.run(tmp_path / "hf", tmp_path / "m", "megatron", "fp8", fp8_state=tmp_path / "state")
    conversions.run(tmp_path / "m", tmp_path / "fp8", "hf", "fp8")
    conversions.run(tmp_path / "fp8", tmp_path / "back", "megatron", "fp8")
    for name in ("m", "fp8", "back"):
        found = open_checkpoint(tmp_path / name).fp8
        assert found is not None and found.recipe == states.recipe
        for module, state in states.modules.items():
            assert same(found.modules[module], state), (name, module)


def test_a_torch_checkpoint_whose_ranks_differ_is_merged(tmp_path):
    source = model(tmp_path, "llama-3")
    sizes = Parallelism(tensor=2)
    a, b = recorded(source, seed=1), recorded(source, seed=2)
    written(source, tmp_path / "a", "torch", sizes, a, 2)
    written(source, tmp_path / "b", "torch", sizes, b, 2)
    shutil.copy(*(tmp_path / each / "release" / "mp_rank_01" / "model_optim_rng.pt" for each in ("b", "a")))
    found = LegacyReader(tmp_path / "a" / "release").fp8
    assert found is not None
    for name, state in found.modules.items():
        assert same(state, Fp8State.merge([a.modules[name], b.modules[name]]))
    assert any(f"{len(a.modules)} modules differs between ranks" in note for note in found.notes)


def test_a_rank_s_payload_is_of_its_own_experts(tmp_path):
    state = of_experts(9, unused=True)
    whole = grouped_payloads(Fp8States(RECIPE, {LINEAR: state}), 2, 1, 3, 3)[f"{LINEAR}._extra_state"]
    seen = unpickled(whole.numpy().tobytes())
    assert seen["extra_fp8_variables"]["num_gemms"] == 3
    held = Fp8State({role: RoleState(p.scale[3:6], p.amax_history[3:6]) for role, p in state.roles.items()})
    assert seen["scale_fwd"].tolist() == as_te_stacks(held, "gemm")["scale_fwd"].tolist()


def test_ranks_with_states_that_are_no_two_of_one_linear_are_damage():
    linear = "decoder.layers.0.mlp.linear_fc2._extra_state"
    recipes = [DelayedScaling(amax_history_len=length) for length in (2, 3)]
    lengths = [
        SavedPayload(linear, encode_payload(Fp8State.fresh(each.amax_history_len), each), "here") for each in recipes
    ]
    stacks = [pickled(payload_of(as_te_stacks(of_experts(count), "gemm"), (2, 20), count)) for count in (2, 3)]
    groups = [SavedPayload(f"{LINEAR}._extra_state", data, "here", 0) for data in stacks]
    for saved, match in ((lengths, "is not the other modules'"), (groups, "of other GEMMs than another rank's")):
        with pytest.raises(DamagedCheckpoint, match=match):
            decode_payloads(saved, Path("here"))


def test_two_recipes_in_one_checkpoint_are_damage_and_one_of_attention_is_kept():
    linear = {f"decoder.layers.{n}.mlp.linear_fc2": Fp8State.fresh(n + 2) for n in (0, 1)}
    saved = [
        SavedPayload(f"{name}._extra_state", payload, "here")
        for name, payload in (
            (name, encode_payload(state, DelayedScaling(amax_history_len=n + 2)))
            for n, (name, state) in enumerate(linear.items())
        )
    ]
    with pytest.raises(DamagedCheckpoint, match="is not the other modules'"):
        decode_payloads(saved, Path("here"))
    attention = "decoder.layers.0.self_attention.core_attention"
    parts = dict.fromkeys(ATTENTION, RoleState(torch.tensor(2.0), torch.ones(3)))
    theirs = encode_payload(Fp8State(parts), RECIPE)
    found = decode_payloads([SavedPayload(f"{attention}._extra_state", theirs, "here"), saved[0]], Path("here"))
    assert found.raw[attention].numpy().tobytes() == theirs
    assert any("recipe of its own" in note for note in found.notes)


def with_payloads(source: Reader, directory: Path, container: str, payloads) -> Reader:
    """A checkpoint of one rank whose extra states are these values, by name, as a state dict has them."""
    directory.mkdir()
    plan = make_plan(source, "megatron")
    if container == "torch":
        writer = LegacyWriter(directory / "release", plan.model, plan.targets)
        convert(plan, source, writer)
        writer.finish(None)
        file = directory / "release" / "mp_rank_00" / "model_optim_rng.pt"
        saved = torch.load(file, weights_only=False)
        saved["model"] |= payloads
        torch.save(saved, file)
        return LegacyReader(directory / "release")
    objects = {object_key(name, plan.model.num_layers): value for name, value in payloads.items()}
    writer = TorchDistWriter(directory / "release", plan.model, plan.targets, run=CarriedRun(objects=objects))
    convert(plan, source, writer)
    writer.finish(None)
    return TorchDistReader(directory / "release")


WRITTEN = [(0, 1), (0, 3), (1, 14), (2, 20)]
"""A version whose payloads lack recipes, as well as roles, or nothing. What those of each version say is read in
test_te_generations.py."""


@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
@pytest.mark.parametrize(
    "version",
    [*WRITTEN, *in_soak(*((version,) for version in VERSIONS if version not in WRITTEN))],
    ids=lambda version: ".".join(map(str, version)),
)
def test_state_of_every_generation_comes_out_of_every_container_and_into_every_other(tmp_path, version, container):
    source = model(tmp_path, "llama-3")
    states = recorded(source)
    expected = {}
    for name, state in states.modules.items():
        kept = dict.fromkeys(("output", "grad_input"), RoleState.fresh(4)) if version < (0, 6) else {}
        expected[name] = Fp8State({**state.roles, **kept})
    payloads = {f"{name}._extra_state": of_module(s, states.recipe, version) for name, s in states.modules.items()}
    found: Reader = with_payloads(source, tmp_path / "first", container, payloads)
    for number, (into, te) in enumerate((("torch", 1), ("torch_dist", 2), ("torch", 2), ("torch_dist", 1))):
        assert found.fp8 is not None and not found.fp8.raw
        assert found.fp8.recipe.amax_history_len == 4 and found.fp8.recipe.fp8_format == "HYBRID"
        assert found.fp8.modules.keys() == expected.keys()
        assert all(same(found.fp8.modules[name], state) for name, state in expected.items())
        found = written(found, tmp_path / str(number), into, Parallelism(tensor=1 + number % 2), found.fp8, te)
    assert found.fp8 is not None
    assert all(same(found.fp8.modules[name], state) for name, state in expected.items())


@pytest.mark.parametrize("container", ["torch", "torch_dist"])
@pytest.mark.parametrize("value", [*NOTHING.values(), empty_file()], ids=[*NOTHING, "0.12 to 1.13"])
def test_modules_without_state_leave_a_checkpoint_without_any(tmp_path, value, container):
    source = model(tmp_path, "llama-tied")
    names = [f"decoder.layers.{n}.self_attention.linear_qkv._extra_state" for n in range(4)]
    assert with_payloads(source, tmp_path / "made", container, dict.fromkeys(names, value)).fp8 is None


@pytest.mark.parametrize("container", ["torch", "torch_dist"])
def test_attention_of_te_1_6_is_found_under_its_old_name_and_written_under_the_new_one(tmp_path, container):
    source = model(tmp_path, "llama-tied")
    recipe = DelayedScaling(amax_history_len=4)
    fresh = RoleState.fresh(4)
    roles = ("qkv", "s", "o", "d_o", "d_qkv", "d_p")
    parts = {role: RoleState(torch.tensor(i + 2.0), torch.arange(4.0) + i) for i, role in enumerate(roles)}
    columns = ("_", "_", "qkv", "o", "_", "_", "_", "_", "s"), ("d_qkv", "_", "_", "d_o", "_", "d_p")
    old = of_module(Fp8State({**parts, "_": fresh}), recipe, (1, 6), *columns, gemms=3)
    name = "decoder.layers.0.self_attention.core_attention"
    found = with_payloads(source, tmp_path / "made", container, {f"{name}.fused_attention._extra_state": old})
    assert found.fp8 is not None and found.fp8.modules.keys() == {name}
    assert same(found.fp8.modules[name], Fp8State(parts))
    written(found, tmp_path / "again", "torch", Parallelism(), found.fp8, 2)
    saved = torch.load(tmp_path / "again" / "release" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    assert f"{name}._extra_state" in saved["model"]
    assert not any("fused_attention" in each for each in saved["model"])


def test_a_file_that_is_not_understood_is_written_back_as_the_file_that_it_was(tmp_path):
    source = model(tmp_path, "llama-tied")
    two = Fp8State.fresh(4)
    file = of_module(two, DelayedScaling(amax_history_len=4), (1, 8), FORWARD * 2, BACKWARD * 2, gemms=2)
    name = "decoder.layers.0.mlp.linear_fc1._extra_state"
    found: Reader = with_payloads(source, tmp_path / "made", "torch", {name: file})
    for number, container in enumerate(("torch_dist", "torch")):
        assert found.fp8 is not None
        assert found.fp8.raw["decoder.layers.0.mlp.linear_fc1"].numpy().tobytes() == file.getvalue()
        assert any("Kept byte for byte" in note for note in found.fp8.notes)
        found = written(found, tmp_path / str(number), container, Parallelism(), found.fp8, 2)
    saved = torch.load(tmp_path / "1" / "release" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    assert saved["model"][name].getvalue() == file.getvalue()


def test_a_grouped_linear_s_payload_that_is_not_understood_comes_back_to_its_own_rank(tmp_path):
    source = model(tmp_path, "mixtral")
    kept = {f"{LINEAR}.rank{rank}": torch.frombuffer(bytearray(pickled([rank])), dtype=torch.uint8) for rank in (0, 1)}
    states = Fp8States(RECIPE, {}, kept, of_weights="these")

    def stored(rank: int) -> dict[str, bytes]:
        file = found.path / f"mp_rank_00_{rank:03}" / "model_optim_rng.pt"
        saved = torch.load(file, weights_only=False)["model"]
        return {name: value.numpy().tobytes() for name, value in saved.items() if name.startswith(f"{LINEAR}._extra")}

    found = source
    for number, (container, ranks) in enumerate((("torch", 2), ("torch_dist", 2), ("torch", 1), ("torch", 2))):
        found = written(found, tmp_path / str(number), container, Parallelism(expert=ranks), states, 2)
        assert found.fp8 is not None
        assert {name: data.tolist() for name, data in found.fp8.raw.items()} == {
            name: data.tolist() for name, data in kept.items()
        }
        states = found.fp8
        if container == "torch" and ranks == 2:
            assert [stored(rank) for rank in (0, 1)] == [{f"{LINEAR}._extra_state": pickled([rank])} for rank in (0, 1)]
    for writing in (payloads_of(states, 2, 2), grouped_payloads(states, 2, 0, 1, 4)):
        assert not writing  # nothing would load it


@pytest.mark.parametrize("container", ["torch", "torch_dist"])
def test_what_a_payload_of_te_1_does_not_say_of_its_recipe_the_run_s_arguments_do(tmp_path, container):
    source = model(tmp_path, "llama-tied")
    recipe = DelayedScaling(3, "E4M3", 2, "most_recent", fp8_dpa=True)
    name = "decoder.layers.0.mlp.linear_fc1"
    state = Fp8State.fresh(2)
    found = written(source, tmp_path / "made", container, Parallelism(), Fp8States(recipe, {name: state}), 1)
    assert found.fp8 is not None and found.fp8.recipe == recipe
    assert any("the rest from the run's arguments" in note for note in found.fp8.notes)
    data = of_module(state, recipe, (1, 14)).numpy().tobytes()
    for args in ({}, {"fp8": None, "fp8_margin": 3}, {"fp8": "hybrid", "fp8_margin": "3"}):
        decoded = decode_payloads([SavedPayload(f"{name}._extra_state", data, "here")], Path("here"), args=args)
        assert decoded.recipe == DelayedScaling(fp8_format="E4M3", amax_history_len=2)
        assert any("margin 0 and algorithm max are assumed" in note for note in decoded.notes)


def test_one_expert_in_a_linear_has_one_order():
    state = of_experts(1, unused=True)
    data = pickled(payload_of(as_te_stacks(state, "gemm"), (2, 3), 1))
    assert same(
        decode_payloads([SavedPayload(f"{LINEAR}._extra_state", data, "here", 0)], Path("here")).modules[LINEAR], state
    )


def test_an_expert_that_is_not_understood_is_kept_and_leaves_nothing_half_read():
    state = of_experts(3, unused=True)
    data = pickled(payload_of(as_te_stacks(state, "gemm"), (2, 20), 3))  # of attention's size, under an expert's name
    saved = [SavedPayload(f"{LINEAR}._extra_state0", data, "here")]
    found = decode_payloads(saved, Path("here"))
    assert not found.modules
    assert found.raw[f"{LINEAR}.0"].numpy().tobytes() == data


@pytest.mark.parametrize("container", ["torch", "torch_dist"])
def test_attention_s_state_alone_makes_no_delayed_scaling_run_of_one_in_current_scaling(tmp_path, container):
    source = model(tmp_path, "llama-tied")
    recipe = DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent", fp8_dpa=True)
    parts = dict.fromkeys(("s", "d_p"), RoleState(torch.tensor(2.0), torch.zeros(1)))
    states = Fp8States(recipe, {"decoder.layers.0.self_attention.core_attention": Fp8State(parts)})
    found = written(source, tmp_path / "made", container, Parallelism(), states, 2)
    assert found.args.get("fp8_recipe") is None
    assert found.fp8 is not None and found.fp8.recipe == recipe
    assert same(found.fp8.modules["decoder.layers.0.self_attention.core_attention"], Fp8State(parts))

"""docs/families.md's table is made from the tables of families and from the lists of who judges them."""

import pico
import pytest
import repository
from judges import BRIDGE, CORE, CORE_FIRST, CORE_HYBRIDS, CORE_LATER, CORE_LOADS, VLLM

from precisionctl.architectures.families import supported
from precisionctl.architectures.megatron.megatron_args import otherwise_in_megatron
from precisionctl.trainer.model.computes import check

PAGE = repository.DOCS / "families.md"
HEAD = ("| `model_type` | names in Megatron by | Megatron-Core computes | judged by |", "|---|---|---|---|")
FAMILIES = {
    kind: [family for family in pico.FAMILIES if pico.shape(family).architecture == kind] for kind in supported()
}
NAMED_BY_CORE = (*CORE, *CORE_FIRST, *CORE_LATER, *CORE_LOADS, *CORE_HYBRIDS)


def line(model_type: str) -> str:
    like = pico.ALSO.get(model_type)
    families = FAMILIES[like or model_type]
    otherwise = ", ".join(f"`{field}`" for field in otherwise_in_megatron(pico.shape(families[0])))
    judges = ["transformers" if like is None else f"transformers, as `{like}`"]
    if {*families} & {*pico.BY_HAND}:
        judges = ["its public sources"]
    if {*families} & {*CORE, *CORE_FIRST, *CORE_LATER} and like is None:
        judges.append("Megatron-Core")
    if {*families} & {*CORE_LOADS, *CORE_HYBRIDS}:
        judges.append("Megatron-Core (parameters)")
    if {*families} & BRIDGE.keys() and like is None:
        judges.append("Megatron-Bridge")
    if {*families} & VLLM.keys() and like is None:
        judges.append("vLLM")
    computes = f"all but {otherwise}" if otherwise else "all"
    return f"| `{model_type}` | {supported()[model_type].names_by} | {computes} | {', '.join(judges)} |"


@pytest.mark.skipif(bool(pico.ABSENT), reason=f"this transformers has no {', '.join(pico.ABSENT)}")
def test_the_page_has_the_table_that_the_code_makes() -> None:
    expected = [*HEAD, *map(line, sorted(supported()))]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert HEAD[0] in lines, "\n".join(expected)
    first = lines.index(HEAD[0])
    assert lines[first : first + len(expected) + 1] == [*expected, ""], "\n".join(expected)


@pytest.mark.parametrize("family", [name for name in NAMED_BY_CORE if name not in pico.ABSENT])
def test_a_family_that_megatron_core_loads_has_its_names(family: str) -> None:
    """`convert` says of others that Megatron-Core does not load them."""
    assert supported()[pico.shape(family).architecture].names_by == "Megatron-Core"


@pytest.mark.parametrize("family", pico.FAMILIES)
def test_every_family_is_one_that_the_trainer_computes(family: str) -> None:
    check(pico.shape(family))

import pytest

from precisionctl.sizes import counted, size


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 tensors"), (1, "1 tensor"), (2, "2 tensors"), (12345, "12,345 tensors")]
)
def test_one_thing_is_not_several(count: int, words: str) -> None:
    assert counted(count, "tensor") == words


def test_words_that_take_no_s_are_given() -> None:
    assert counted(1, "pass", "passes") == "1 pass"
    assert counted(3, "pass", "passes") == "3 passes"
    assert counted(1, "weight was", "weights were") == "1 weight was"


@pytest.mark.parametrize(
    ("nbytes", "words"), [(0, "0 B"), (999, "999 B"), (4_200, "4.2 kB"), (1_500_000_000, "1.5 GB")]
)
def test_bytes_have_the_unit_that_fits_them(nbytes: int, words: str) -> None:
    assert size(nbytes) == words

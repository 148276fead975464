"""What a GGUF file's matrices are: the words of `--scheme`, the file types that say the same, and types of tensors."""

from collections.abc import Mapping, Set
from typing import Literal, get_args

ValuesType = Literal["bf16", "f16"]
"""The type of matrices that are values."""

Mixture = Literal["q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s"]
"""A mixture of K-quants, as `--scheme` has it."""

GgufType = Literal["bf16", "f16", "q8_0", Mixture, "q4_0", "mxfp4", "nvfp4"]
"""The type of a file's matrices, as `--scheme` has it. With `mxfp4` and `nvfp4` those that are such codes in the source
keep these, and others are BF16."""

MIXTURES: tuple[Mixture, ...] = get_args(Mixture)

FILE_TYPES: Mapping[GgufType, int] = {
    "bf16": 32,
    "f16": 1,
    "q8_0": 7,
    "q6_k": 18,
    "q5_k_m": 17,
    "q5_k_s": 16,
    "q4_k_m": 15,
    "q4_k_s": 14,
    "q4_0": 2,
    "mxfp4": 38,
    "nvfp4": 39,
}
"""`general.file_type` (enum llama_ftype), which says what most of a file's tensors are."""

IN_FEWER_VALUES = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""K-quants in the order of their bits, and the types of rows that are no whole blocks of 256 values."""


def scheme_of(file_type: object, codes: Set[str]) -> GgufType | None:
    """The `--scheme` that makes a file of this `general.file_type` whose codes are of these types; None if none makes
    all of them. With Q4_0 llama-quantize makes an output layer in Q6_K, and exports do not."""
    scheme = next((each for each, number in FILE_TYPES.items() if number == file_type), None)
    made = set[str]()
    if scheme in MIXTURES:  # its K-quants and those of more bits
        types = [*IN_FEWER_VALUES]
        for each in types[types.index(scheme[:4].upper()) :]:
            made |= {each, IN_FEWER_VALUES[each]}
    elif scheme in ("q8_0", "q4_0"):
        made = {scheme.upper()}
    return scheme if codes <= made else None

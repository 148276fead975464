"""The numbers of bitsandbytes' four-bit codes."""

# NormalFloat: Dettmers et al., QLoRA (arXiv 2305.14314), appendix E
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# bitsandbytes/functional.py, get_4bit_type: two zeros without a sign
FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
TABLES = {"nf4": NF4, "fp4": (*FP4, 0.0, *(-number for number in FP4[1:]))}

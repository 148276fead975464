"""Numbers of few bits, FP8, FP4 and integers: their codes, scales and encodings, and what casting to them loses."""

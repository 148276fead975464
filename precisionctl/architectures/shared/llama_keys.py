"""config.json's keys of Llama, which many families have beside their own."""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.rope import rope

_ROPE = rope()


def llama_keys(
    *own: keys.Entry,
    heads: keys.Rule = keys.HEADS,
    attention_bias: bool = False,
    epsilon: float = 1e-6,
    rotary: keys.Rule = _ROPE,
    after_rotary: tuple[keys.Entry, ...] = (),
    tied: bool = False,
) -> tuple[keys.Entry, ...]:
    """Keys in the order of Llama's config.json, with the family's `own` before epsilon and others, such as a window's,
    `after_rotary`. `attention_bias` says whether there is that key, `epsilon` and `tied` are the class's defaults."""
    return (
        *keys.SIZES,
        heads,
        *((keys.ATTENTION_BIAS,) if attention_bias else ()),
        keys.SILU,
        *own,
        keys.Key("norm_epsilon", "rms_norm_eps", epsilon),
        rotary,
        *after_rotary,
        keys.tied(tied),
    )

"""config.json's keys of Mamba mixers: heads of Mamba-2's, and their steps (dt), which Megatron-Core does not clamp;
channels of Mamba-1's; and what models of mixers alone have."""

from precisionctl.architectures import config_keys as keys
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape


def mixer_heads(heads: str, head: str, expand: str, absent: int | str, channels: str | None = None) -> keys.Rule:
    """How many heads a mixer has, by the key `heads`, and how many channels each has, by the key `head`. All heads
    together must have as many as the key `channels` says, if the family has that key and it is not null; else `expand`,
    a key too, times those of the model.

    Of keys that are not there `heads` is 128, `expand` 2, `channels` 1024, and `head` is `absent`; `auto` gives each
    head an equal share."""
    taken = {"hidden_size": 4096, heads: 128, head: absent, expand: 2} | ({channels: 1024} if channels else {})

    def read(config: keys.Config) -> keys.Fields:
        config = {**taken, **config}
        if channels and config[channels] is not None:
            said_by, inner_size = channels, keys.size(config, channels)
        else:
            said_by, inner_size = expand, keys.size(config, expand) * keys.size(config, "hidden_size")
        number, shares = keys.size(config, heads), config[head] == absent == "auto"
        each = inner_size // number if shares else keys.size(config, head)
        if each * number != inner_size:
            what = f"{number} heads of {each} channels in a mixer, which {said_by} says has {inner_size}"
            raise DamagedCheckpoint(what, do="Is config.json this model's?")
        return {"mamba.num_heads": number, "mamba.head_dim": each}

    def write(model: ModelShape) -> keys.Config:
        if model.mamba is None:
            return {}
        inner_size = model.mamba.inner_size
        said = {channels: inner_size} if channels else {expand: inner_size // model.hidden_size}
        return {heads: model.mamba.num_heads, head: model.mamba.head_dim, **said}

    return keys.Rule((heads, head, expand, *([channels] if channels else [])), read, write)


MIXER: tuple[keys.Entry, ...] = (
    mixer_heads("mamba_n_heads", "mamba_d_head", "mamba_expand", "auto"),
    keys.Key("mamba.num_groups", "mamba_n_groups", 1),
    keys.Key("mamba.state_dim", "mamba_d_state", 256),
    keys.only("mamba_d_conv", 4),
    keys.only("mamba_conv_bias", True),
    keys.only("mamba_proj_bias", False),
)
"""As Granite 4 and Bamba have it."""


def mamba_1_sizes(expand: str, rank: str, hidden_size: int, channels: str | None = None) -> keys.Rule:
    """How many channels a Mamba-1 mixer has: `expand`, a key, times those of the model; or what the key `channels`
    says, if the family has that key and it is not null. Steps are made by way of as many as the key `rank` says; `auto`
    is a 16th of the model's.

    Of keys that are not there `expand` is 2, `rank` is `auto`, and the model has `hidden_size` channels."""

    def read(config: keys.Config) -> keys.Fields:
        config = {"hidden_size": hidden_size, expand: 2, rank: "auto", **config}
        hidden = keys.size(config, "hidden_size")
        said = channels and config.get(channels) is not None
        inner_size = keys.size(config, channels) if channels and said else keys.size(config, expand) * hidden
        return {
            "mamba.num_heads": inner_size,
            "mamba.head_dim": 1,
            "mamba.num_groups": 1,
            "mamba.dt_rank": -(-hidden // 16) if config[rank] == "auto" else keys.size(config, rank),
            "mamba.gated_norm": False,
        }

    def write(model: ModelShape) -> keys.Config:
        if model.mamba is None:
            return {}
        inner_size = model.mamba.inner_size
        said = {channels: inner_size} if channels else {}
        return {expand: max(1, inner_size // model.hidden_size), rank: model.mamba.dt_rank, **said}

    return keys.Rule((expand, rank, *([channels] if channels else [])), read, write)


def mixers_alone(number: int, hidden_size: int) -> tuple[keys.Entry, ...]:
    """Sizes of a model of mixers alone, which has `number` layers and `hidden_size` where config.json does not say it.
    Nothing says how long a text may be, and any length is computed."""

    def read(config: keys.Config) -> keys.Fields:
        layers = keys.layers(config, absent=number)
        return {"num_layers": layers, "mamba.pattern": "M" * layers, "rope_layers": (False,) * layers}

    return (
        keys.Rule(("num_hidden_layers",), read, keys.LAYERS.write),
        keys.Key("hidden_size", "hidden_size", hidden_size),
        keys.always("max_position_embeddings", 262144),
        keys.only("conv_kernel", 4),
        keys.only("use_conv_bias", True),
        keys.only("use_bias", False),
        keys.only("hidden_act", "silu"),
        keys.Key("norm_epsilon", "layer_norm_epsilon", 1e-5),
    )


def with_mixers_heads(sizes: keys.Rule) -> keys.Rule:
    """The same sizes of mixers in a model of these alone. Megatron asks for heads of attention and an MLP's channels
    all the same: these are the mixers', and no layer has them."""

    def read(config: keys.Config) -> keys.Fields:
        mixer = sizes.read(config)
        number, head = mixer["mamba.num_heads"], mixer["mamba.head_dim"]
        of_attention = {"num_attention_heads": number, "num_query_groups": number, "kv_channels": head}
        return {**mixer, **of_attention, "ffn_hidden_size": number * head}

    return keys.Rule(sizes.keys, read, sizes.write)


def step_limits(*said_by: str) -> keys.Rule:
    """Ranges of steps by these keys. Raises UnknownArchitecture for one that clamps any: Megatron-Core has none."""

    def read(config: keys.Config) -> keys.Fields:
        for key in said_by:
            limit = config.get(key)
            if limit is not None and not _is_endless(limit):
                raise UnknownArchitecture(
                    f"no {config.get('model_type')} known here has {key}={shown(limit)}",
                    do="Its table was made for steps that nothing clamps, as in Megatron-Core.",
                )
        return {}

    return keys.Rule(said_by, read)


def _is_endless(limit: object) -> bool:
    """Whether a range is from 0 to what no step in FP32 reaches: to infinity, as Python's JSON has it or transformers',
    or to 1e308, as Nemotron 3 Ultra has it."""
    if not isinstance(limit, list | tuple) or len(limit) != 2 or limit[0] != 0:
        return False
    end = limit[1]
    return end == {"__float__": "Infinity"} or (isinstance(end, float) and end > _LARGEST_FP32)


_LARGEST_FP32 = (2 - 2**-23) * 2.0**127

"""A directory held against what mlx-lm asks of one, beyond what reading it here has checked."""

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.hf_directory.companions import is_tokenizer
from precisionctl.checkpoints.mlx.mlx_models import check_loaded, other_words
from precisionctl.checkpoints.mlx.mlx_names import saved_by_mlx
from precisionctl.engines.rules.rule import EngineRule, Finding
from precisionctl.errors import UnknownArchitecture, UnknownFormat, shown
from precisionctl.planning.make_plan import stored_model
from precisionctl.untrusted.safe_json import parse_json

_MODEL = EngineRule("its class of the family has all that the model has", "mlx-lm models/*.py")
_WORDS = EngineRule("its own words of config.json say the same model", "mlx-lm models/*.py, ModelArgs")
_TOKENIZER = EngineRule("there is a tokenizer, which `mlx_lm.load` opens", "mlx-lm tokenizer_utils.py load")


def check_mlx(reader: Reader) -> list[Finding]:
    """The rules that a directory breaks. Raises UnknownFormat for what is none of mlx-lm's."""
    if not saved_by_mlx(reader.files):
        do = "`export-inference --target mlx` makes one of this."
        raise UnknownFormat(f"{reader.container}, and no directory of mlx-lm", where=reader.path or "", do=do)
    found: list[Finding] = []
    try:
        check_loaded(stored_model(reader))
    except UnknownArchitecture as error:
        found.append(Finding("model_type", error.what, _MODEL))
    content = reader.own_companions.files.get("config.json")
    for key, (said, wanted) in other_words(parse_json(content, "config.json") if content else {}, reader.model).items():
        found.append(Finding(f"config.json, {key}", f"{shown(said)}, and of this model {shown(wanted)}", _WORDS))
    if not any(map(is_tokenizer, reader.companions.files)):
        found.append(Finding("tokenizer", "none is there", _TOKENIZER))
    return found

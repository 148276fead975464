"""What an export is made from: an open checkpoint, its plan in BF16, and what is known of FP8 in it."""

from dataclasses import dataclass

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.commands.inference_export import InferenceExport
from precisionctl.conversion.known_state import KnownState, fixed_scales_hold, known_state
from precisionctl.export.export import plan_in_bf16
from precisionctl.export.input_scales import state_of_input_scales
from precisionctl.export.weight_encodings import check_model
from precisionctl.fp8.carry import merged
from precisionctl.fp8.state import DelayedScaling, Fp8States
from precisionctl.planning.plan import Plan
from precisionctl.precision import PRESETS, Precision


@dataclass(frozen=True)
class ExportSource:
    """An open checkpoint, and the `plan` of the directory that it becomes, before anything of that is encoded.

    `encodings` is how its weights are FP8 codes, or were. `known` is the FP8 state that training or `calibrate` has
    left, `states` the same filled in from the fixed input scales that the codes came with.
    """

    reader: Reader
    plan: Plan
    encodings: WeightEncodings | None
    known: KnownState
    states: Fp8States | None

    @property
    def recorded(self) -> Fp8States | None:
        """The state that was recorded, and may be used."""
        return self.known.current

    @property
    def codes(self) -> WeightEncodings | None:
        """How the weights are FP8 codes now, if they are."""
        return self.encodings if self.reader.encodings else None

    @property
    def fixed(self) -> WeightEncodings | None:
        """Where scales of caches are that still hold."""
        return self.encodings if self.encodings and fixed_scales_hold(self.reader, self.encodings) else None

    def precision(self, export: InferenceExport) -> Precision:
        """Which modules are to be FP8, of the layers that this model has."""
        return (export.recipe or PRESETS["fp8-delayed"]).of_layers(self.plan.model.num_layers)


def export_source(
    reader: Reader, encodings: WeightEncodings | None, export: InferenceExport, recipe: DelayedScaling | None = None
) -> ExportSource:
    """Plan the directory in BF16, and put together what is known of FP8, under `recipe` if one is given.

    Raises what planning and reading raise, MappingError for state or encodings of another model.
    """
    plan = plan_in_bf16(reader)
    if encodings:
        check_model(encodings, plan)
    known = known_state(reader, plan.gemms, export.fp8_state, recipe)
    fixed = state_of_input_scales(reader, encodings, plan)
    states = merged(known.current, fixed) if known.current and fixed else known.current or fixed
    return ExportSource(reader, plan, encodings, known, states)

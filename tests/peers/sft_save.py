"""TRL's SFTTrainer on CPU processes: sft_save.py OUT KIND [CHECKPOINT], with KIND plain, or zero1, zero2 or zero3.

Five steps with a save after two, under OUT; or from CHECKPOINT of step 2 on. OUT/live.pt is what the run held at that
save, and OUT/losses.json the loss of each step.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

OUT, KIND, CHECKPOINT = Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None
ZERO = KIND != "plain"
os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}

import accelerate.state  # noqa: E402  (these ask which accelerator there is)
import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402
import transformers.training_args  # noqa: E402
import trl  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

if ZERO:  # accelerate refuses DeepSpeed on CPUs
    import deepspeed.ops

    accelerate.state.PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    accelerate.state.PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    deepspeed.ops.__compatible_ops__.clear()  # nothing is compiled
transformers.training_args.is_torch_bf16_gpu_available = lambda: True


class HoldLive(transformers.TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        if CHECKPOINT or state.global_step != 2 or ZERO:
            return
        model, optimizer = found["model"], found["optimizer"].optimizer
        of = {name: optimizer.state[one] for name, one in model.named_parameters()}
        torch.save({"model": dict(model.state_dict()), "state": of}, OUT / "live.pt")


class CountApart(transformers.TrainerCallback):
    """What docs/trainers.md says of ZeRO 3."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        for one in found["optimizer"].optimizer.optimizer.state.values() if CHECKPOINT and KIND == "zero3" else ():
            one["step"] = one["step"].clone()


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token="w1", pad_token="w2"
    )
    rows = [{"input_ids": [(i * 7 + j * (1 + i % 5)) % 96 for j in range(16)]} for i in range(32)]
    deepspeed = (
        {
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": int(KIND[-1])},
            "checkpoint": {"load_universal": bool(CHECKPOINT)},
        }
        if ZERO
        else None
    )
    args = trl.SFTConfig(
        output_dir=str(OUT / "run"),
        per_device_train_batch_size=2,
        use_cpu=not ZERO,
        bf16=True,
        learning_rate=3e-3,
        max_steps=5,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        deepspeed=deepspeed,
        gradient_checkpointing=False,
        packing=False,
        optim="adamw_torch",
    )
    trainer = trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[HoldLive(), CountApart()],
    )
    trainer.train(resume_from_checkpoint=CHECKPOINT)
    if trainer.accelerator.is_main_process:
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        (OUT / "losses.json").write_text(json.dumps(losses))


main()

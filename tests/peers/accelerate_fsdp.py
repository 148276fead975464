"""HF Trainer on accelerate's FSDP, on CPU processes: accelerate_fsdp.py VERSION OUT [CHECKPOINT].

Eight steps with a save after three; or from a checkpoint of step 3 on. OUT/live.pt is what a run of FSDP 2 held at
that save, whole, and OUT/losses.json the loss of each step. accelerate refuses FSDP on CPUs, so its backend
answer is replaced, and the process group is made before it would make one.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import accelerate.state
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

VERSION, OUT, CHECKPOINT = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None

accelerate.state.PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
accelerate.state.PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
os.environ.update(
    ACCELERATE_USE_FSDP="true",
    FSDP_VERSION=VERSION,
    FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT",
    FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
    FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaDecoderLayer",
)
dist.init_process_group("gloo")

import transformers  # noqa: E402  (it asks accelerate's state for the backend)


class HoldLive(transformers.TrainerCallback):
    """Writes what model and optimizer hold at a save."""

    def on_save(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        if VERSION == "1" or state.global_step != 3:  # on a CPU torch's FSDP 1 cannot gather what is sharded
            return
        optimizer = getattr(found["optimizer"], "optimizer", found["optimizer"])
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, of_optimizer = get_state_dict(found["model"], optimizer, options=whole)
        if dist.get_rank() == 0 and CHECKPOINT is None:
            torch.save({"model": model, "state": of_optimizer["state"]}, OUT / "live.pt")


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config)
    rows = [[(i * 7 + j * (1 + i % 5)) % 96 for j in range(16)] for i in range(32)]
    steps = {"max_steps": 8, "save_steps": 3, "logging_steps": 1, "save_total_limit": 4}
    quiet = {"report_to": [], "disable_tqdm": True}
    args = transformers.TrainingArguments(
        output_dir=str(OUT),
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=True,
        learning_rate=3e-3,
        **steps,
        **quiet,
    )
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=transformers.default_data_collator,
        callbacks=[HoldLive()],
    )
    OUT.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        config.save_pretrained(OUT / "config")
    trainer.train(resume_from_checkpoint=CHECKPOINT)
    if dist.get_rank() == 0:
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        (OUT / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

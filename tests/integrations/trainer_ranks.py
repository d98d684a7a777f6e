"""Hugging Face's Trainer on several ranks: a program for torchrun. Arguments: a folder, and "fsdp" for FSDP2 on GPUs.

It trains four steps, and again with a stop after two. The first rank prints, as JSON, how accelerate wrapped the model and the
names of the tensors that differ.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import dither
from dither.integrations.transformers import DitherTrainer

FSDP = {
    "fsdp_version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "reshard_after_forward": True,
    "cpu_ram_efficient_loading": False,
    "state_dict_type": "SHARDED_STATE_DICT",
}
IDS = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))


def trainer(folder: Path, steps: int, sharded: bool) -> DitherTrainer:
    """Build a model with sampled and cast weights, and its trainer."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    )
    plan = dither.Plan(default=dither.recipe("fp8-block").default, compute="fp32").with_sampling(dither.Sampling())
    dither.convert(model, plan)
    options: dict[str, Any] = {"fsdp": True, "fsdp_config": FSDP} if sharded else {"use_cpu": True}
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=steps, save_steps=2,
        logging_steps=1, report_to=[], disable_tqdm=True, lr_scheduler_type="constant", **options,
    )  # fmt: skip
    optimizer = (dither.optim.AdamW, {"lr": 1e-2, "states": "dynamic8"})
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    return DitherTrainer(model=model, args=arguments, train_dataset=rows, optimizer_cls_and_kwargs=optimizer)


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors of a model that may be sharded."""
    found: dict[str, Any] = model.state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


def main(folder: Path, sharded: bool) -> None:
    """Train straight and with a stop, and compare."""
    torch.set_num_threads(1)
    straight = trainer(folder / "straight", 4, sharded)
    straight.train()
    trainer(folder / "stopped", 2, sharded).train()
    resumed = trainer(folder / "stopped", 4, sharded)
    resumed.train(resume_from_checkpoint=True)
    states = whole(straight.model), whole(resumed.model)
    different = [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]
    losses = [entry["loss"] for entry in straight.state.log_history if "loss" in entry]
    if straight.args.process_index == 0:
        kind, wrapped = straight.accelerator.distributed_type.value, type(straight.model_wrapped).__name__
        ranks = straight.accelerator.num_processes
        print(json.dumps({"kind": kind, "model": wrapped, "ranks": ranks, "different": different, "losses": losses}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "fsdp" in sys.argv[2:])

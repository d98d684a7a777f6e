"""torchtitan's trainer on a CPU: a program of its own, since it starts a process group and changes the whole process.

torchtitan looks for an accelerator when it is imported and asks it for its memory. This program answers for the CPU.
Arguments: a folder, which gets results.json.
"""

import dataclasses
import json
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch._utils  # noqa: E402

CPU = types.ModuleType("cpu")
CPU.__dict__.update({**vars(torch.cpu), "current_device": lambda: 0, "__name__": "cpu"})


class NoMemory:
    """The memory of a device that has none of its own."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(*(0,) * 6)

    def reset_peak_stats(self) -> None:
        pass


with mock.patch.object(torch._utils, "_get_available_device_type", return_value="cpu"):
    from torchtitan.tools import utils

    utils.device_module = CPU
    from torchtitan.components import metrics
metrics.build_device_memory_monitor = NoMemory

from torchtitan.models import llama3 as family  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry as llama3  # noqa: E402

import dither  # noqa: E402
from dither.integrations.torchtitan import config_registry, dither_config  # noqa: E402
from dither.snip import SnipSettings  # noqa: E402

STEPS = 4


class Recorder(metrics.BaseLogger):
    """Keeps the numbers of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, numbers: dict[str, Any], step: int) -> None:
        self.steps.append({"step": step, **numbers})


def narrow(**options: Any) -> Any:
    """Return torchtitan's debug model with one layer of a quarter of the width and of the tokens."""
    dim, heads, tokens = 64, 4, 512
    rope = ComplexRoPE.Config(dim=dim // heads, max_seq_len=64, theta=500000, scaling="llama")
    sizes = {"n_layers": 1, "dim": dim, "n_heads": heads, "hidden_dim": 3 * dim, "rope": rope}
    return family.Llama3Model.Config(
        dim=dim,
        vocab_size=tokens,
        tok_embeddings=Embedding.Config(num_embeddings=tokens, embedding_dim=dim, param_init=family._EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=family._NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=tokens, param_init=family._output_linear_init(dim)),
        layers=family._build_llama3_layers(fuse_qkv=True, **sizes, **options),
    )


def small(folder: Path, *, whole_loss: bool = False) -> Any:
    """Return torchtitan's debug configuration with a narrow model, computing in float32."""
    with mock.patch.dict(family.llama3_configs, debugmodel=narrow):
        base = config_registry._on_bytes(llama3.llama3_debugmodel())
    for layer in base.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # torch has no flex attention for CPUs
    base.training = dataclasses.replace(base.training, seq_len=16, local_batch_size=2, global_batch_size=4, steps=STEPS)
    base.training.mixed_precision_param = "float32"
    base.compile.enable = False
    base.optimizer.param_groups[0].optimizer_kwargs["lr"] = 3e-2  # a narrow model learns visibly in two steps
    base.comm.trace_buf_size, base.debug.seed, base.dump_folder = 0, 1, str(folder)
    base.parallelism.spmd_backend = "partial_dtensor" if torch.__version__ < "2.12" else "spmd_types"
    return config_registry._with_whole_loss(base) if whole_loss else base


def fp32(plan: dither.Plan) -> dither.Plan:
    return dataclasses.replace(plan, compute="fp32")


def run(config: Any, steps: int = STEPS) -> Any:
    """Train, and return (trainer, numbers of each step)."""
    trainer = config.build()
    trainer.metrics_processor.logger = recorder = Recorder()
    trainer.config.training.steps = steps
    trainer.train()
    return trainer, recorder.steps


def whole(trainer: Any) -> dict[str, torch.Tensor]:
    state = trainer.model_parts[0].state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def losses(steps: list[dict[str, float]]) -> list[float]:
    return [numbers["loss_metrics/global_avg_loss"] for numbers in steps]


def resumed(folder: Path) -> dict[str, Any]:
    """Train two steps with bitwidths, histories and 8-bit states, straight and with a stop after the first."""
    plan = fp32(dither.recipe("fp8-delayed").with_sampling(dither.Sampling(b_init=3, b_target=2)))
    trainers = []
    for stops in ((2,), (1, 2)):
        for stop in stops:
            base = small(folder / str(len(stops)))
            base.checkpoint.enable, base.checkpoint.interval, base.checkpoint.last_save_model_only = True, 1, False
            trainer, steps = run(dither_config(base, plan, optimizer={"states": "dynamic8", "weights": "stochastic"}), stop)
            trainer.checkpointer.close()
        trainers.append((whole(trainer), steps, int(trainer.optimizers.optimizers[0].steps)))
    (straight, _, counted), (again, steps, counted_again) = trainers
    different = [name for name, value in straight.items() if not torch.equal(value, again[name])]
    states = sum(name.endswith(("bitwidth", "_history")) for name in straight)
    return {"different": different, "steps": [counted, counted_again], "states": states, "logged": steps[-1]}


def bf16_sr(folder: Path) -> dict[str, Any]:
    plan = fp32(dither.recipe("bf16-pure"))
    trainer, steps = run(dither_config(small(folder), plan, optimizer=config_registry.BF16_SR), 2)
    optimizer = trainer.optimizers.optimizers[0]
    moments = {str(state["exp_avg"].dtype) for p, state in optimizer.state.items() if p.dim() == 2}
    types = {str(p.dtype) for p in trainer.model_parts[0].parameters()}
    return {"losses": losses(steps), "parameters": sorted(types), "moments": sorted(moments)}


def truncated_normal(weight: torch.Tensor) -> None:
    """Draw as `trunc_normal_` of torch 2.11 does: in BF16, a uniform number that rounds to -1 becomes -2."""
    weight.uniform_(-1, 1).erfinv_().mul_(0.02 * 2**0.5).clamp_(-2, 2)


def initial(folder: Path) -> dict[str, Any]:
    """Compare the initial weights of a model with BF16 parameters to those of the float32 model."""
    models = []
    for plan in (dither.Plan(default=dither.LayerPrecision(), compute="fp32"), fp32(dither.recipe("bf16-pure"))):
        base = small(folder, whole_loss=True)
        for _, layer, _, _ in base.model_spec.model.traverse(Linear.Config):
            layer.param_init = {"weight": truncated_normal}
        models.append(dither_config(base, plan).build())
    wide, narrow = (whole(trainer) for trainer in models)
    return {
        "different": [name for name, value in narrow.items() if not torch.equal(wide[name].bfloat16(), value)],
        "parameters": sorted({str(value.dtype) for value in narrow.values()}),
        "largest": max(value.abs().max().item() for name, value in narrow.items() if "feed_forward" in name),
        "buffers": sorted({str(buffer.dtype) for buffer in models[1].model_parts[0].buffers()}),
    }


def gaussws(folder: Path) -> dict[str, Any]:
    """Train sampled weights where FSDP2 gathers weights and bitwidths in BF16."""
    base = small(folder)
    base.training.mixed_precision_param = "bfloat16"
    trainer, steps = run(dither_config(base, config_registry.GAUSSWS), 2)
    learned = [p for name, p in trainer.model_parts[0].named_parameters() if name.endswith("bitwidth")]
    moved = [bool((p.full_tensor() != 1).any()) for p in learned]
    return {"losses": losses(steps), "types": sorted({str(p.dtype) for p in learned}), "moved": moved}


def snip(folder: Path) -> dict[str, Any]:
    settings = SnipSettings(target=0.5, start=1, delay=1, tokens=32, probe="direct")
    plan = fp32(dither.recipe("fp8-block"))
    trainer, steps = run(dither_config(small(folder, whole_loss=True), plan, snip=settings))
    return {
        "losses": losses(steps),
        "logged": steps[-1],
        "tokens": trainer.ntokens_seen,
        "state": trainer.state_dict()["dither"],
    }


def plain(folder: Path) -> dict[str, Any]:
    """Train in Dither's trainer without casts, and in torchtitan's, whose loop stops after a step with torch 2.13 and older."""
    uncast = dither.Plan(default=dither.LayerPrecision())
    base = small(folder)
    ours = losses(run(dither_config(base, uncast, optimizer=base.optimizer), 2)[1])
    base = small(folder)
    base.training.disable_cuda_graphs = True
    trainer = base.build()
    trainer.metrics_processor.logger = recorder = Recorder()
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in (1, 2):
        trainer.train_step(batches)
    return {"ours": ours, "theirs": losses(recorder.steps)}


if __name__ == "__main__":
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    parts = sys.argv[2:] or ["resumed", "bf16_sr", "initial", "gaussws", "snip", "plain"]
    results = {name: globals()[name](Path(sys.argv[1]) / name) for name in parts}
    Path(sys.argv[1], "results.json").write_text(json.dumps(results))

"""Train with FSDP2: shard parameters, gradients and optimizer states over ranks, with the random bits of one process.

    torchrun --nproc-per-node=2 examples/fsdp2.py     # two CPU processes over gloo, about 30 seconds; GPUs where there are some
    python examples/fsdp2.py                          # the same training in one process

Convert first, then shard. Stochastic rounding draws random bits by the place of an element in the whole tensor: in the
products, which round gradients, and in the optimizer, which rounds BF16 weights. So ranks need no shared generator state. Both
commands start with the same losses; later ones differ a little, because ranks add gradients in another order.
"""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from text import VOCABULARY, batch
from torch.distributed.fsdp import fully_shard

import dither
from dither.models import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    distributed = "RANK" in os.environ  # torchrun sets it
    cuda = torch.cuda.is_available()
    if distributed:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=120))
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")

    model = build("tiny", vocab_size=VOCABULARY, seed=0).to(device)  # the same first weights on every rank
    dither.convert(model, "fp4-block")
    model.bfloat16()
    if distributed:
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    # BF16 weights without an FP32 copy: stochastic rounding keeps small updates from being lost.
    optimizer = dither.optim.AdamW(dither.nn.param_groups(model), lr=2e-3, weights="stochastic", states="bf16", max_norm=1.0)

    for step in range(options.steps):
        tokens = batch(step).chunk(ranks)[rank].to(device)  # this rank's share of the global batch
        with dither.step_context(model, step=step):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()  # FSDP2 averages gradients over ranks
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == options.steps - 1:
            mean = loss.detach().clone()
            if distributed:
                dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:4}  loss {mean.item() / ranks:.3f} nats per token, {ranks} ranks", flush=True)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

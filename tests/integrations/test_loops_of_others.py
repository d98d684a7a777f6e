"""Loops of accelerate, transformers and Lightning: however they recompute and accumulate, the bits are those of a plain run."""

import contextlib
import functools
import io
import itertools
from pathlib import Path

import pytest
import torch
from lazily import Lazy
from test_own_loops import CHECKPOINTS, IDS, PLANS, build, optimizer_of, same, trained
from torch import Tensor, nn

import dither
from dither.nn import step_context

transformers = Lazy("transformers")

REMARKS = [
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # Dynamo looks at it
    "ignore:.*use_reentrant parameter should be passed explicitly",
    "ignore:None of the inputs have requires_grad=True",
    "ignore:.*does not have many workers",
    "ignore:.*tensorboardX",
    "ignore:.*isinstance.treespec",
    "ignore:.*pin_memory",
    "ignore:The dataloader",
]
pytestmark = [pytest.mark.filterwarnings(remark) for remark in REMARKS]


def accelerate_loop(model: nn.Module, parts: int, folder: Path) -> None:
    """In accelerate's usual order: the optimizer's step is inside."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=parts)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    for step in range(2):
        with step_context(model, step=step):
            for ids in IDS.chunk(parts):
                with accelerator.accumulate(model):
                    accelerator.backward(model(ids, labels=ids).loss)
                    optimizer.step()
                    optimizer.zero_grad()


def hf_trainer(model: nn.Module, parts: int, folder: Path) -> None:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=len(IDS) // parts,
        gradient_accumulation_steps=parts,
        max_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        gradient_checkpointing=model.is_gradient_checkpointing,
        gradient_checkpointing_kwargs=CHECKPOINTS[model.checkpointing],
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
    )
    rows = [{"input_ids": row, "labels": row} for row in IDS] * 2
    transformers.Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer_of(model), None)).train()


def lightning_loop(model: nn.Module, parts: int, folder: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, ids: Tensor, _: int) -> Tensor:
            return self.model(ids, labels=ids).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", accumulate_grad_batches=parts, default_root_dir=str(folder), **quiet
    )
    rows = torch.utils.data.DataLoader(torch.cat([IDS, IDS]), batch_size=len(IDS) // parts)
    trainer.fit(Module(), rows)


LOOPS = {"accelerate": accelerate_loop, "transformers.Trainer": hf_trainer, "Lightning": lightning_loop}


def cases(checkpointing: list[str]) -> list[tuple[str, str, str, int]]:
    return list(itertools.product(LOOPS, PLANS, checkpointing, (1, 2)))


@pytest.mark.sampled(
    only=[
        "accelerate-fp4-block-reentrant-1",
        "transformers.Trainer-gaussws-non-reentrant-2",
        "Lightning-inputs-non-reentrant-2",
    ]
)
@pytest.mark.parametrize(("loop", "method", "checkpointing", "parts"), cases(["non-reentrant", "reentrant"]))
def test_recomputation_draws_what_forward_drew(loop, method, checkpointing, parts, tmp_path):
    run = functools.partial(LOOPS[loop], folder=tmp_path)
    assert same(trained(run, method, checkpointing, parts), trained(run, method, "none", parts))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("loop", "method", "checkpointing", "parts"), cases(list(CHECKPOINTS)))
def test_compiled_blocks_draw_what_eager_blocks_draw(loop, method, checkpointing, parts, tmp_path):
    run = functools.partial(LOOPS[loop], folder=tmp_path)
    assert same(trained(run, method, checkpointing, parts, compiled=True), trained(run, method, "none", parts))


def test_a_trainer_makes_the_optimizer_from_unnamed_parameters(tmp_path):
    """BF16 weights with stochastic rounding, where the Trainer hands over groups without names; two runs draw the same bits."""
    found = []
    for number in range(2):
        model = build("bf16-sr")
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(number)), per_device_train_batch_size=2, max_steps=2, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
            train_sampling_strategy="sequential",
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in IDS]
        kinds = (dither.optim.AdamW, {"lr": 1e-2, "weights": "stochastic", "seed": 5})
        with contextlib.redirect_stdout(io.StringIO()):
            transformers.Trainer(model, arguments, train_dataset=rows, optimizer_cls_and_kwargs=kinds).train()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert same(*found)
    assert not same(found[0], [parameter.detach() for parameter in build("bf16-sr").parameters()])

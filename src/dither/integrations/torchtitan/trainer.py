"""torchtitan's trainer with Dither's steps: a step_context per optimizer step, SNIP, and plans in logs and checkpoints."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.observability import structured_logger
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from dither.errors import UserError
from dither.integrations.loops import OpenStep, layer_metrics
from dither.integrations.torchtitan.layers import draw_in_float32, layer_configs
from dither.integrations.torchtitan.optimizers import dither_adamw
from dither.nn.bitwidths import bitwidth_loss
from dither.nn.convert import Conversion
from dither.nn.sites import converted_layers, linear_of, linears_of
from dither.snip.controller import Snip
from dither.snip.dry_run import TrainingSetup
from dither.snip.settings import SnipSettings
from dither.spec import Plan

Batch = tuple[dict[str, Tensor], Tensor]
"""Inputs and labels, as torchtitan's data loaders return them."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class DitherMetrics(MetricsProcessor):  # type: ignore[misc]
    """torchtitan's metrics, with learned bitwidths, shares of weights per format, and plan changes."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """Configuration of the metrics."""

    plan_changes = 0
    """Number of times that SNIP changed the plan."""

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log the numbers of a step."""
        numbers = layer_metrics(nn.ModuleList(self.model_parts or []))
        extra = {**(extra_metrics or {}), **numbers, "dither/plan_changes": float(self.plan_changes)}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)


class DitherTrainer(Trainer):  # type: ignore[misc]
    """torchtitan's `Trainer` for converted models: `DitherTrainer.Config(model_spec=..., optimizer=dither_adamw())`.

    - The micro-batches of an optimizer step run in one `dither.step_context`, whose step counts from 0.
    - SNIP chooses the plan if `snip.target` is set.
    - Initial weights are drawn in float32, also for 16-bit parameters, which get them rounded to nearest.
    - Checkpoints have the bitwidths and histories among the model's tensors, and SNIP's plan with the trainer's state.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """torchtitan's configuration, with SNIP."""

        metrics: MetricsProcessor.Config = field(default_factory=DitherMetrics.Config)
        optimizer: OptimizersContainer.Config = field(default_factory=dither_adamw)
        snip: SnipSettings = field(default_factory=SnipSettings)
        """Choice of the precision of each layer during training."""

    def __init__(self, config: Config) -> None:
        """Build everything as torchtitan does, and check that the plan can run on this device."""
        check_config(config)
        if config.model_spec is not None and config.training.dtype != "float32":
            draw_in_float32(config.model_spec.model)
        super().__init__(config)
        self.plan_changes = 0
        self._open = [OpenStep() for _ in self.model_parts]
        self._guides = False
        for part in self.model_parts:
            for layer in converted_layers(part).values():
                for linear in linears_of(layer):
                    linear.belong_to(part)
            if converted_layers(part):
                # Conversion took place on the meta device: only here it is known which units multiply.
                conversion = Conversion.of(part)
                conversion.switch(conversion.plan)
                logger.info(unwrapped(f"Dither's layers:\n{conversion}"))
        cast = [layer for part in self.model_parts for layer in converted_layers(part).values()]
        # torchtitan leaves the MFU out if products are faster than those in BF16, by which it is defined.
        self.metrics_processor.has_quantization |= any(not linear_of(layer).precision.uncast for layer in cast)
        self.snip = self._make_snip(config) if config.snip.target is not None else None

    # Steps -------------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train as torchtitan does, also with a torch that cannot change the timeouts of process groups."""
        if hasattr(torch.distributed, "set_timeout"):
            super().train()
        else:  # torchtitan 0.3 calls it after the first step, and torch has it only after 2.13
            self._train_with_first_timeouts()

    def _train_with_first_timeouts(self) -> None:
        """Run torchtitan's loop, with comm.init_timeout_seconds in force to the end."""
        config = self.config
        self.checkpointer.load(step=config.checkpoint.load_step)
        loaded = self.step
        logger.info(f"Training starts at step {loaded + 1}, and process groups keep the timeouts of the first step")
        with config.profiler.build(global_step=loaded, base_folder=config.dump_folder) as profiler:
            batches = self.batch_generator(self.dataloader)
            while self.should_continue_training():
                self.step += 1
                structured_logger.set_step(self.step, relative_step=self.step - loaded)
                with structured_logger.log_trace_span("step"):
                    self.gc_handler.run(self.step)
                    try:
                        self.train_step(batches)
                    except DataloaderExhaustedError:
                        logger.warning("Ran out of data; last step was canceled.")
                        break
                    self.checkpointer.save(self.step, last_step=self.step == config.training.steps)
                    if config.validator.enable and self.validator.should_validate(self.step):
                        self.validator.validate(self.model_parts, self.step)
                    profiler.step()
        torch.distributed.barrier()  # the first rank has the store that the others may still read
        logger.info("Training completed")

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Run an optimizer step in a step_context, after SNIP had its turn."""
        if self.snip is not None:
            data_iterator = self._before_step(self.snip, data_iterator)
        self._guides = True
        for step, part in zip(self._open, self.model_parts, strict=True):
            step.begin(part, self.step - 1)
        try:
            super().train_step(data_iterator)
        except BaseException:
            for step in self._open:
                step.interrupt()
            raise
        for step in self._open:
            step.end()

    def forward_backward_step(self, **batches: Any) -> Tensor:
        """Run a micro-batch; with the first of a step, add the gradients of `dither.bitwidth_loss`."""
        loss: Tensor = super().forward_backward_step(**batches)
        guides, self._guides = self._guides, False
        for part in self.model_parts if guides else ():
            if (guidance := bitwidth_loss(part)).requires_grad:
                guidance.backward()  # type: ignore[no-untyped-call]
        return loss

    # SNIP --------------------------------------------------------------------------------------------------------------

    def _make_snip(self, config: Config) -> Snip:
        optimizers = list(self.optimizers)
        if len(self.model_parts) != 1 or self.parallel_dims.pp_enabled or len(optimizers) != 1:
            raise UserError(
                "snip.target is set, and SNIP runs here for a whole model with one optimizer: set "
                "parallelism.pipeline_parallel_degree=1 and give all parameters the same optimizer."
            )
        if config.snip.probe == "sampling":
            raise UserError("snip.probe='sampling' adds noise in the steps of `dither train` or of your own loop: use 'joint'.")
        (model,) = self.model_parts
        if any(linear_of(layer).delayed.operands for layer in converted_layers(model).values()):
            raise UserError(
                "snip.target is set, and the plan has delayed scaling, whose histories would not fit a resumed plan: convert "
                "with another recipe, such as 'fp8-block'."
            )
        tokens = config.training.seq_len * config.training.local_batch_size * self.gradient_accumulation_steps
        seed = next((linear_of(layer).seed for layer in converted_layers(model).values()), 0)
        return Snip(
            Conversion.of(model),
            optimizers[0],
            config.snip,
            forward=self._snip_loss,
            setup=TrainingSetup(
                max_norm=config.training.max_norm or None,
                group=torch.distributed.group.WORLD,
                step_tokens=tokens * self._batch_ranks(),
                steps=config.training.steps,
            ),
            seed=seed,
        )

    def _before_step(self, snip: Snip, data_iterator: Iterator[Batch]) -> Iterator[Batch]:
        """Let SNIP take estimates on the batches of the step, or apply its choice; return the data with those batches."""
        taken: list[Batch] = []

        def batches() -> list[Batch]:
            if not taken:
                taken.extend(next(data_iterator) for _ in range(self.gradient_accumulation_steps))
            rows = max(1, self.config.snip.tokens // (self._batch_ranks() * self.config.training.seq_len))
            few: list[Batch] = []
            for inputs, labels in taken:
                if rows > 0:
                    cut = {key: value[:rows].to(self.device) for key, value in inputs.items()}
                    few.append((cut, labels[:rows].to(self.device)))
                    rows -= len(labels)
            return few

        seen: int = self.ntokens_seen  # type: ignore[has-type]  # torchtitan's
        with self._averaged_gradients():
            decision = snip.before_step(self.step - 1, batches)
        self.ntokens_seen = seen
        if decision is not None and decision.changed:
            self._count_change(self.plan_changes + 1)
            logger.info(f"SNIP: step {self.step}: {decision.reason}\n{unwrapped(str(decision.plan))}")
        return chain(taken, data_iterator)

    def _snip_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels, extra = self.post_dataloading_process(dict(batch[0]), batch[1])
        with self.train_context():
            prediction = model(inputs, **extra)
            loss: Tensor
            loss, _ = self.loss_fn(prediction, labels, (labels != IGNORE_INDEX).sum())
        return loss

    @contextmanager
    def _averaged_gradients(self) -> Iterator[None]:
        """Let FSDP2 average gradients over ranks, where torchtitan adds them up and divides by the tokens of all ranks."""
        modules = [module for part in self.model_parts for module in part.modules() if isinstance(module, FSDPModule)]
        try:
            for module in modules:
                module.set_gradient_divide_factor(float(self._batch_ranks()))
            yield
        finally:
            for module in modules:
                module.set_gradient_divide_factor(1.0)

    def _batch_ranks(self) -> int:
        size: int = self.parallel_dims.get_mesh("batch").size() if self.parallel_dims.dp_enabled else 1
        return size

    def _count_change(self, changes: int) -> None:
        self.plan_changes = changes
        if isinstance(self.metrics_processor, DitherMetrics):
            self.metrics_processor.plan_changes = changes

    # Checkpoints -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's state, with SNIP's state and plan as JSON."""
        ours = {
            "plan": None if self.snip is None else Conversion.of(self.model_parts[0]).plan.to_dict(),
            "plan_changes": self.plan_changes,
            "snip": None if self.snip is None else self.snip.state_dict(),
        }
        return {**super().state_dict(), "dither": unwrapped(json.dumps(ours))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the trainer's state, and apply the plan that SNIP had chosen."""
        super().load_state_dict(state_dict)
        ours = json.loads(self._wrapped(state_dict["dither"]))
        self._count_change(int(ours["plan_changes"]))
        if self.snip is not None and ours["snip"] is not None:
            self.snip.load_state_dict(ours["snip"])
        if ours["plan"] is None:
            return
        plan = Plan.from_dict(ours["plan"])
        for part in self.model_parts:
            if not (conversion := Conversion.of(part)).has(plan):
                conversion.switch(plan)

    def _wrapped(self, text: str) -> str:
        """Return JSON with the names that layers have here, in the place of those without wrappers."""
        for part in self.model_parts:
            for name in converted_layers(part):
                text = text.replace(json.dumps(unwrapped(name)), json.dumps(name))
        return text


def unwrapped(text: str) -> str:
    """Return layer names without what activation checkpointing adds to them.

    >>> unwrapped("layers.0._checkpoint_wrapped_module.attention.wo")
    'layers.0.attention.wo'
    """
    return text.replace("_checkpoint_wrapped_module.", "")


def check_config(config: Trainer.Config) -> None:
    """Raise a UserError if torchtitan cannot run the converted layers with a configuration."""
    layers = layer_configs(config.model_spec.model) if config.model_spec is not None else ()
    training = config.training
    if isinstance(config.loss, ChunkedLossWrapper.Config) and torch.__version__ < "2.13":
        raise UserError(
            f"torch {torch.__version__} crashes in the backward pass of torchtitan's chunked loss: set "
            "loss=CrossEntropyLoss.Config(...), or install torch 2.13."
        )
    if layers and not training.disable_cuda_graphs:
        raise UserError(
            "training.disable_cuda_graphs is False, and a CUDA graph would draw the same random bits in each step: set it."
        )
    for layer in layers:
        wanted = None if layer.parameters is None else DTYPES[layer.parameters]
        if wanted not in (None, training.dtype):
            raise UserError(
                f"The plan asks for {layer.parameters} parameters, and training.dtype is {training.dtype!r}: "
                f"set training.dtype={wanted!r}."
            )
        if DTYPES[layer.compute] != training.mixed_precision_param:
            raise UserError(
                f"The plan computes in {layer.compute}, and training.mixed_precision_param is "
                f"{training.mixed_precision_param!r}: set it to {DTYPES[layer.compute]!r}."
            )
        if layer.precision.sampled and training.dtype != "float32":
            raise UserError(
                f"The layer {layer.name!r} learns bitwidths in float32, and FSDP2 takes one type per block: set "
                f"training.dtype='float32', not {training.dtype!r}."
            )
    if getattr(config, "snip", SnipSettings()).target is not None and isinstance(config.loss, ChunkedLossWrapper.Config):
        raise UserError(
            "snip.target is set, and SNIP needs a loss that can be differentiated from the model's output: set "
            "loss=CrossEntropyLoss.Config(...) instead of ChunkedLossWrapper."
        )

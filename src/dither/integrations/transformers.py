"""Dither in Hugging Face's `Trainer`: a callback, a subclass that also runs SNIP, and `save_pretrained` for other loops."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dither.errors import UserError
from dither.integrations.loops import FILE, OpenStep, layer_metrics, load_state, save_state, state_names
from dither.nn.convert import Conversion
from dither.nn.sites import converted_layers
from dither.optim.adamw import AdamW
from dither.snip.controller import Snip
from dither.spec.schedule import PlanSchedule

try:
    import accelerate  # noqa: F401
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise UserError(
        f"dither.integrations.transformers needs transformers and accelerate ({error}): pip install 'dither[hf]'."
    ) from None

MakeSnip = Callable[[nn.Module, torch.optim.Optimizer], Snip]
"""Function of (model, optimizer) that returns a Snip; the Trainer makes the optimizer after it was created itself."""


class DitherCallback(TrainerCallback):  # type: ignore[misc]
    """Let Hugging Face's `Trainer` train a converted model: `Trainer(..., callbacks=[DitherCallback()])`.

    - All micro-batches of an optimizer step run in one `dither.step_context`, whose step is the Trainer's `global_step`.
    - Parameters of a `dither.optim` optimizer that the Trainer made from `optimizer_cls_and_kwargs` get the model's names.
    - Checkpoints have clean weights, and the training state of the layers in `dither_state.safetensors`. It is restored when
      a run resumes, and when the best model is loaded at the end.
    - The Trainer's log has the learned bitwidths and the share of converted weights in each format.
    """

    def __init__(self, *, schedule: PlanSchedule | None = None, resume_from: str | Path | None = None) -> None:
        """Create the callback.

        Args:
            schedule: Plans by step.
            resume_from: Folder of the checkpoint, if a run is resumed from a folder other than those in `output_dir`.
        """
        self.schedule, self.resume_from = schedule, resume_from
        self.snip: Snip | None = None
        self.plan_changes = 0
        """Number of times that the schedule or SNIP changed the plan."""
        self._open = OpenStep()
        self._conversion: Conversion | None = None

    # Steps -------------------------------------------------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Apply the plan of the step, and begin a step_context."""
        self.interrupt()
        if self.schedule is not None:
            self._conversion = self._conversion or Conversion.of(model)
            if self._conversion.follow(self.schedule, state.global_step):
                self._note_change(model)
        self._open.begin(model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the step_context, before the Trainer evaluates or saves."""
        self._open.end()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Drop a step that the Trainer did not finish, because it was told to stop between micro-batches."""
        self.interrupt()

    def interrupt(self) -> None:
        """Leave the step_context of a step that was not finished. Call it if you catch an error of `Trainer.train`."""
        self._open.interrupt()

    def before_step(self, model: nn.Module, step: int, batches: Callable[[], Iterable[Any]]) -> None:
        """Let SNIP take estimates or apply its choice, outside of a step_context."""
        if self.snip is not None and (decision := self.snip.before_step(step, batches)) is not None and decision.changed:
            self._note_change(model)

    def _note_change(self, model: nn.Module) -> None:
        self.plan_changes += 1
        _leave_out(model)

    # Checkpoints -------------------------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Keep bitwidths and histories out of the weights that the Trainer writes."""
        _leave_out(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any) -> None:
        """Name the optimizer's parameters, and restore the training state if the run is resumed."""
        self.interrupt()
        self.plan_changes, self._conversion = 0, None
        own = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if isinstance(own, AdamW) and any("param_names" not in group for group in own.param_groups) and not int(own.steps):
            own.name_parameters(model)
        if state.global_step and converted_layers(model):
            self._load(model, self._folder(args, state))
        _leave_out(model)

    def on_save(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Write the training state into the folder of the checkpoint."""
        if converted_layers(model):
            others = {
                "step": state.global_step,
                "plan_changes": self.plan_changes,
                "snip": None if self.snip is None else self.snip.state_dict(),
            }
            save_state(model, _checkpoint(args, state.global_step), others=others, writes=args.should_save)

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Restore the training state of the best model if the Trainer has loaded its weights."""
        self.interrupt()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None and converted_layers(model):
            load_state(model, state.best_model_checkpoint)

    def _folder(self, args: Any, state: Any) -> Path:
        places = (self.resume_from, args.resume_from_checkpoint, _checkpoint(args, state.global_step))
        folders = [Path(place) for place in places if isinstance(place, str | Path)]
        found = next((folder for folder in folders if (folder / FILE).is_file()), None)
        if found is None:
            raise UserError(
                f"The run is resumed at step {state.global_step}, and there is no {FILE} in {str(folders[0])!r}: give "
                "DitherCallback(resume_from=...) the folder of a checkpoint that DitherCallback has saved."
            )
        return found

    def _load(self, model: nn.Module, folder: Path) -> None:
        others = load_state(model, folder)
        self.plan_changes = int(others.get("plan_changes", 0))
        if self.snip is not None and others.get("snip") is not None:
            self.snip.load_state_dict(others["snip"])
            load_state(model, folder)  # again, since SNIP applied its plan, which begins histories anew

    # Logs --------------------------------------------------------------------------------------------------------------

    def on_log(self, args: Any, state: Any, control: Any, *, model: nn.Module, logs: dict[str, Any], **_: Any) -> None:
        """Add the numbers of `metrics` to a log of training, for the callbacks after this one and for the log history."""
        if "loss" in logs and "dither/plan_changes" not in logs:
            numbers = self.metrics(model)
            logs.update(numbers)
            state.log_history[-1].update(numbers)

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """Return learned bitwidths in bits, shares of converted weights by the format of the forward product, plan changes."""
        return layer_metrics(model) | {"dither/plan_changes": float(self.plan_changes)}


class DitherTrainer(Trainer):  # type: ignore[misc]
    """Hugging Face's `Trainer` with a `DitherCallback`, and with SNIP.

    Unlike the callback alone, it sends bitwidths and plans to every logger, finds the training state of any checkpoint that
    `train(resume_from_checkpoint=...)` names, and leaves no step open after an error.
    """

    def __init__(self, *args: Any, schedule: PlanSchedule | None = None, snip: MakeSnip | None = None, **kwargs: Any) -> None:
        """Create the trainer from the arguments of `transformers.Trainer`.

        Args:
            *args: As in `transformers.Trainer`.
            schedule: Plans by step.
            snip: Function (model, optimizer) that returns a `dither.snip.Snip`. The batches of a step are dictionaries.
            **kwargs: As in `transformers.Trainer`.
        """
        if schedule is not None and snip is not None:
            raise UserError("DitherTrainer takes a schedule= of plans or snip=, not both: give one of them.")
        self.dither_callback = DitherCallback(schedule=schedule)
        self._make_snip = snip
        super().__init__(*args, **{**kwargs, "callbacks": [self.dither_callback, *(kwargs.get("callbacks") or [])]})

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `transformers.Trainer.train` does."""
        folder = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        self.dither_callback.resume_from = folder or None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.dither_callback.interrupt()

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create the scheduler, and SNIP, which needs the finished optimizer."""
        if self._make_snip is not None:
            optimizer: Any = self.optimizer
            snip = self._make_snip(self.model, getattr(optimizer, "optimizer", optimizer))
            if snip.settings.probe == "sampling":
                raise UserError(
                    "The probe 'sampling' adds noise in the steps of `dither train` or of your own loop: use 'joint'."
                )
            self.dither_callback.snip = snip
        return super().create_scheduler(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the micro-batches of the next step, after SNIP has seen them."""
        batches, items = super().get_batch_samples(*args, **kwargs)
        if batches:
            self.dither_callback.before_step(
                self.model, self.state.global_step, lambda: [self._prepare_inputs(batch) for batch in batches]
            )
        return batches, items

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log numbers, and with those of training also the bitwidths and the plan."""
        super().log({**logs, **self.dither_callback.metrics(self.model)} if "loss" in logs else logs, *args, **kwargs)


def save_pretrained(model: Any, folder: str | os.PathLike[str], **options: Any) -> None:
    """Save a converted model as `model.save_pretrained` does, with the training state of its layers in a file of its own.

    The weights are those that `from_pretrained` expects, and loading them produces no warnings. To train on, convert the loaded
    model like the saved one and call `load_state(model, folder)`.

    Args:
        model: A converted model of transformers, between steps.
        folder: The folder to write.
        **options: As in `model.save_pretrained`.

    >>> import dither, tempfile
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(config)
    >>> _ = dither.convert(model, dither.recipe("bf16").with_sampling(dither.Sampling()))
    >>> folder = tempfile.mkdtemp()
    >>> save_pretrained(model, folder)
    >>> again = LlamaForCausalLM.from_pretrained(folder)
    >>> _ = dither.convert(again, dither.recipe("bf16").with_sampling(dither.Sampling()))
    >>> _ = load_state(again, folder)
    """
    names = set(state_names(model))
    state = options.pop("state_dict", None) or model.state_dict()
    model.save_pretrained(folder, state_dict={name: value for name, value in state.items() if name not in names}, **options)
    save_state(model, Path(folder), writes=bool(options.get("is_main_process", True)))


def _leave_out(model: Any) -> None:
    """Let `save_pretrained` leave out the tensors that `save_state` writes: transformers reads their names here."""
    model._keys_to_ignore_on_save = [*(getattr(type(model), "_keys_to_ignore_on_save", None) or ()), *state_names(model)]


def _checkpoint(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"

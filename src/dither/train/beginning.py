"""The beginning of a run: its folder, locked, its data and model, and its newest checkpoint if it resumes."""

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from dither import files, run_lock
from dither.checkpoint import write
from dither.checkpoint.sharded import ShardedSaver
from dither.checkpoint.write import Saver
from dither.errors import UserError
from dither.train import agreement, config
from dither.train.config import Config, dumps
from dither.train.files import CHANGES, CHECKPOINTS, CONFIG, CONVERSION, ENVIRONMENT, ORIGIN, PLAN, PLANS, TOKENIZER_FILES
from dither.train.goals import check_chat, check_layout, check_snip
from dither.train.guard import Signals, Status
from dither.train.layout import RankLayout
from dither.train.metrics import DrawLayers, Metrics, Progress, peak_flops
from dither.train.origin import keep_tokenizer, origin_of, recorded_facts
from dither.train.plans import plans_file
from dither.train.ranks import Ranks
from dither.train.recorder import RunRecorder, conversion_record, layers_of, write_file
from dither.train.resume import changes_of, check_changes, record_changes
from dither.train.trainer import Trainer, open_corpus, unigram_entropy


class RunBeginning(RunRecorder):
    """Claims the folder of a run and builds or restores what the run trains."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        ranks: Ranks,
        signals: Signals,
        progress: Progress | None,
        draw: DrawLayers | None = None,
    ) -> None:
        super().__init__(config, folder, ranks, progress)
        self.signals, self.draw = signals, draw
        self.resumed: int | None = None  # the step from which this process resumed
        self.changes: dict[str, list[str]] = {}  # fields of the config that differ from those of the run before

    def claim(self, stack: ExitStack, resume: bool | Literal["auto"]) -> None:
        """Lock the folder, and decide whether the run resumes. Rank 0 decides for all."""
        with self.ranks.shared_errors():
            if self.ranks.main:
                lock = run_lock.RunLock(self.folder)
                stored = _claim(self.folder, self.config, resume, lock, self.say)
                self.lock = lock
                stack.callback(lock.release)
                if stored is not None:
                    self.resuming, self.changes = True, changes_of(stored, self.config)
        self.resuming = bool(self.ranks.agree(int(self.resuming)))

    def build(self, stack: ExitStack, command: Sequence[str]) -> None:
        """Build the data, the model and the optimizer, restore a checkpoint, and write the files that describe the run."""
        with self.ranks.shared_errors():
            check_snip(self.config)
            check_layout(self.config, self.ranks.world)
        layout = RankLayout.of(self.config, self.ranks)
        with self.ranks.shared_errors():
            with self.stage("Reading the text") as tick:
                corpus = open_corpus(self.config, self.folder, self.ranks, say=self.say, tick=tick)
            if corpus.template is not None:
                check_chat(self.config.parallel)
            saved = self.resuming and any((self.folder / CHECKPOINTS).glob("step-*"))
            with self.stage("Building the model"):
                self.trainer = trainer = Trainer(
                    self.config, corpus, self.ranks, layout=layout, initial=not saved, say=self.say
                )
        trainer.signals = self.signals
        self.resumed = resumed = self.restore() if self.resuming else None
        if self.ranks.world > 1:
            agreement.check_facts(self.ranks, agreement.facts_of_trainer(trainer))
        self.unigram = unigram_entropy(corpus)
        self.flops, self.peak = trainer.flops, peak_flops(self.ranks.device)
        parameters = trainer.parameters
        self.say(
            f"{parameters:,} parameters, {len(corpus.train):,} training tokens, {len(corpus.held_out):,} held-out tokens, on "
            f"{self.ranks.device}" + layout.describe()
        )
        run = self.config.run
        if self.ranks.main or layout.cut:  # ranks with parts of the model write their parts
            kind = ShardedSaver if layout.cut else Saver
            every = run.keep_every or None
            saver = kind(self.folder / CHECKPOINTS, last=run.keep_last, every=every, beneath=self.folder)
            self.saver = stack.enter_context(saver)
        if self.ranks.main:
            Status.reserve(self.folder)
            stack.callback((self.folder / Status.RESERVE).unlink, missing_ok=True)
            if resumed is None:
                write_file(self.folder / PLAN, trainer.conversion.plan.to_json().encode())
                if trainer.sources:
                    write_file(self.folder / PLANS, plans_file(trainer.sources))
                if (origin := trainer.base or origin_of(self.config.model)) is not None:
                    write_file(self.folder / ORIGIN, files.to_json(origin, ORIGIN))
                    self.say(f"The initial weights are those of {origin['path']!r}, SHA-256 {origin['sha256']}.")
                keep_tokenizer(self.config.data.tokenizer, self.folder / TOKENIZER_FILES)
            elif self.changes:
                record_changes(self.folder / CHANGES, resumed, self.changes)
                changed = ", ".join(f"{name} from {old} to {new}" for name, (old, new) in self.changes.items())
                self.say(f"From step {resumed} on the config has other values: {changed}.")
            write_file(self.folder / CONFIG, dumps(self.config).encode())
            write_file(self.folder / CONVERSION, files.to_json(conversion_record(trainer), CONVERSION))
            facts = self.environment(command, parameters) | recorded_facts(self.folder)
            write_file(self.folder / ENVIRONMENT, files.to_json(facts, ENVIRONMENT))
            say = warnings.warn if self.progress is None else self.say
            plain = asdict(self.config)
            draw = None if self.draw is None else functools.partial(self.draw, layers_of(trainer))
            self.metrics = stack.enter_context(
                Metrics(self.folder, track=run.track, config=plain, resumed=resumed, say=say, draw=draw)
            )
            if self.progress is not None:
                self.metrics.listeners.append(self.progress.show)
            self.write("start", resumed_from=resumed)
            if resumed is None:
                self.write("plan", plan=trainer.conversion.plan.to_dict(), reason="the run begins")
        self.status("running")
        if resumed is None and self.config.guard.spike == "rollback":
            self.save()  # so that there is always a checkpoint to roll back to

    def restore(self, before: int | None = None) -> int | None:
        """Restore the newest whole checkpoint and return its step, or None if there is no checkpoint yet."""
        trainer, folder, found = self.the_trainer, self.folder / CHECKPOINTS, -1
        with self.ranks.shared_errors():
            if self.ranks.main:
                path, skipped = write.newest(folder, before=before)
                for _, why in skipped:
                    self.say(why)
                found = -1 if path is None else write.step_of(path)
                if path is None and (broken := [why for each, why in skipped if write.STEP.fullmatch(each.name)]):
                    self.say(f"None of the {len(broken)} checkpoints is complete.")
                    # Not the result of a kill: starting from scratch would discard what might be repaired.
                    raise UserError(
                        f"No checkpoint in {str(folder)!r} can be resumed, for the reasons above: put a complete one there, or "
                        "remove them to start from the beginning."
                    )
        found = self.ranks.agree(found)
        if found < 0:
            self.say("There is no checkpoint yet: the run starts from the beginning.")
            return None
        with self.ranks.shared_errors():
            trainer.restore(folder / f"step-{found:08d}")
        self.say(f"Resuming from step {found}.")
        return found


def _claim(
    folder: Path, now: Config, resume: bool | Literal["auto"], lock: run_lock.RunLock, say: Callable[[str], None]
) -> Config | None:
    """Lock the folder; then create a new run in it, or check that of a resumed run. Nothing is overwritten.

    Return the stored config of a run that resumes, or None.
    """
    there = os.path.isfile(folder / CONFIG)
    if resume is True and not there:
        raise UserError(
            f"There is no run in {str(folder)!r} to resume: start it without --resume, or set run.out to its folder."
        )
    if now.guard.lock and (killed := lock.acquire(create=resume is not True)) is not None:
        say(f"The folder was locked by {killed}, which ended without a word.")
    try:
        there = os.path.isfile(folder / CONFIG)  # now that nobody else can change it
        if resume and there:
            stored = config.load(folder / CONFIG)
            check_changes(stored, now, 0, str(folder))  # the checkpoint is checked later
            return stored
        if there:
            raise UserError(
                f"The folder {str(folder)!r} has a run already, and nothing is overwritten: continue it with --resume, or "
                "choose another folder, such as --out runs/second."
            )
        folder.mkdir(parents=True, exist_ok=True)
        ours = (f".{CONFIG}.new", run_lock.FILE, Status.RESERVE, f".{Status.RESERVE}.new")  # left by a kill just below
        if any(path.name not in ours for path in folder.iterdir()):
            raise UserError(f"The folder {str(folder)!r} has other files: choose another folder, such as --out runs/second.")
        write_file(folder / CONFIG, dumps(now).encode())
        return None
    except OSError as error:
        lock.release()
        why = files.reason(error, folder)
        raise UserError(f"The folder {str(folder)!r} of the run cannot be created: {why}.") from None
    except BaseException:
        lock.release()
        raise

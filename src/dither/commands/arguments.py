"""Arguments that several commands share: declared once, with their help."""

from pathlib import Path
from typing import Annotated

import tyro

ModelPath = Annotated[
    Path,
    tyro.conf.arg(
        metavar="RUN|CHECKPOINT|MODEL",
        help="A run, whose newest whole checkpoint is read, a checkpoint, or a folder of a Hugging Face model.",
    ),
]
RunPath = Annotated[str, tyro.conf.arg(metavar="RUN_OR_CHECKPOINT", help="The folder of a run, or one of its checkpoints.")]
PlanFile = Annotated[str, tyro.conf.arg(metavar="PLAN", help="The file of a plan.")]
Device = Annotated[str, tyro.conf.arg(help="auto (cuda if available), cpu, cuda, or cuda:N.")]
Tokenizer = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="FILE|FOLDER",
        help="A tokenizer.json, or a folder that has one; by default that of the run or of the model.",
    ),
]
Json = Annotated[bool, tyro.conf.arg(help="Print JSON.", help_behavior_hint="")]

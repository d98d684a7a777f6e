"""Estimate the memory of training, and recommend a precision for a model on a GPU."""

import warnings
from typing import Any

from dither.advice.accelerators import ACCELERATORS as ACCELERATORS
from dither.advice.accelerators import Accelerator as Accelerator
from dither.advice.accelerators import accelerator_named as accelerator_named
from dither.advice.layouts import Passes as Passes
from dither.advice.layouts import ScheduledLayout as ScheduledLayout
from dither.advice.layouts import memory_per_gpu as memory_per_gpu
from dither.advice.memory import Estimate as Estimate
from dither.advice.memory import Setting as Setting
from dither.advice.memory import Shape as Shape
from dither.advice.memory import Storage as Storage
from dither.advice.memory import estimate as estimate
from dither.advice.memory import largest_batch as largest_batch
from dither.advice.memory import llama_of as llama_of
from dither.advice.recommendation import GPUS as GPUS
from dither.advice.recommendation import Advice as Advice
from dither.advice.recommendation import Gpu as Gpu
from dither.advice.recommendation import Recommendation as Recommendation
from dither.advice.recommendation import advise as advise
from dither.advice.recommendation import gpu_named as gpu_named
from dither.advice.recommendation import recommend as recommend
from dither.advice.recommendation import selection as selection
from dither.advice.scaling import Step as Step
from dither.advice.scaling import Traffic as Traffic
from dither.advice.search import Choice as Choice
from dither.advice.search import Job as Job
from dither.advice.search import Option as Option
from dither.advice.search import Ranking as Ranking
from dither.advice.search import rank as rank
from dither.advice.step_time import step_seconds as step_seconds


def __getattr__(name: str) -> Any:
    """Return what has a new name, with a warning."""
    if name != "Layout":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("dither.advice.Layout is now dither.advice.ScheduledLayout.", DeprecationWarning, stacklevel=2)
    return ScheduledLayout

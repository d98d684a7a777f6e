"""Estimate the memory of training, and recommend a precision for a model on a GPU."""

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

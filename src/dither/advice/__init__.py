"""How much memory a training needs, and which precision suits a model on a GPU."""

from dither.advice.memory import Estimate as Estimate
from dither.advice.memory import Setting as Setting
from dither.advice.memory import Shape as Shape
from dither.advice.memory import Storage as Storage
from dither.advice.memory import estimate as estimate
from dither.advice.memory import largest_batch as largest_batch
from dither.advice.memory import llama_of as llama_of
from dither.advice.recommend import GPUS as GPUS
from dither.advice.recommend import Advice as Advice
from dither.advice.recommend import Gpu as Gpu
from dither.advice.recommend import Recommendation as Recommendation
from dither.advice.recommend import advise as advise
from dither.advice.recommend import gpu_named as gpu_named
from dither.advice.recommend import recommend as recommend
from dither.advice.recommend import selection as selection

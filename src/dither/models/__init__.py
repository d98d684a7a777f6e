"""Small, plain language models with Hugging Face's parameter names."""

from dither.models.llama import PRESETS as PRESETS
from dither.models.llama import Llama as Llama
from dither.models.llama import LlamaConfig as LlamaConfig
from dither.models.llama import compile_blocks as compile_blocks

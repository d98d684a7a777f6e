"""Small, plain language models with Hugging Face's parameter names, and a wrapper for models of transformers."""

from typing import TYPE_CHECKING

from dither.lazy import lazily

if TYPE_CHECKING:
    from dither.models.causal import CausalLM as CausalLM
    from dither.models.causal import output_loss as output_loss
    from dither.models.generation import generate as generate
    from dither.models.gpt import GPT2 as GPT2
    from dither.models.gpt import GPTNeo as GPTNeo
    from dither.models.hub import load_pretrained as load_pretrained
    from dither.models.hub import save_pretrained as save_pretrained
    from dither.models.llama import Llama as Llama
    from dither.models.open import find_model as find_model
    from dither.models.open import open_model as open_model
    from dither.models.presets import build as build
    from dither.models.presets import flops_per_token as flops_per_token
    from dither.models.presets import parameter_count as parameter_count
    from dither.models.sizes import PRESETS as PRESETS
    from dither.models.sizes import GPT2Config as GPT2Config
    from dither.models.sizes import GPTNeoConfig as GPTNeoConfig
    from dither.models.sizes import LlamaConfig as LlamaConfig
    from dither.models.sizes import ModelConfig as ModelConfig
    from dither.models.sizes import preset as preset
    from dither.models.transformers_models import HuggingFace as HuggingFace
    from dither.models.transformers_models import causal_loss as causal_loss
    from dither.models.transformers_models import hf as hf
    from dither.nn import compile_blocks as compile_blocks

__getattr__ = lazily(
    __name__,
    {
        "causal": "CausalLM output_loss",
        "generation": "generate",
        "gpt": "GPT2 GPTNeo",
        "hub": "load_pretrained save_pretrained",
        "llama": "Llama",
        "open": "find_model open_model",
        "presets": "build flops_per_token parameter_count",
        "sizes": "PRESETS GPT2Config GPTNeoConfig LlamaConfig ModelConfig preset",
        "transformers_models": "HuggingFace causal_loss hf",
        "dither.nn": "compile_blocks",
    },
)

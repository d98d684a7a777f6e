"""Small, plain language models with Hugging Face's parameter names, and a wrapper for models of transformers."""

from dither.models.causal import CausalLM as CausalLM
from dither.models.causal import output_loss as output_loss
from dither.models.generation import generate as generate
from dither.models.gpt2 import GPT2 as GPT2
from dither.models.gpt2 import GPT2Config as GPT2Config
from dither.models.gpt_neo import GPTNeo as GPTNeo
from dither.models.gpt_neo import GPTNeoConfig as GPTNeoConfig
from dither.models.hub import load_pretrained as load_pretrained
from dither.models.hub import save_pretrained as save_pretrained
from dither.models.llama import Llama as Llama
from dither.models.llama import LlamaConfig as LlamaConfig
from dither.models.presets import PRESETS as PRESETS
from dither.models.presets import Config as Config
from dither.models.presets import build as build
from dither.models.presets import flops_per_token as flops_per_token
from dither.models.presets import parameter_count as parameter_count
from dither.models.presets import preset as preset
from dither.models.transformers_models import HuggingFace as HuggingFace
from dither.models.transformers_models import hf as hf
from dither.nn import compile_blocks as compile_blocks

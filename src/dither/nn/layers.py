"""Small modules: linear layers stored as [in, out], gated feed-forward layers, and placeholders of absent blocks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dither.errors import UserError
from dither.nn import functional
from dither.nn.fused import keep, swiglu
from dither.nn.linear import Linear


class Conv1D(nn.Module):
    """Compute y = x W + b with W [in, out], like the class of this name in transformers; `dither.convert` takes both.

    Input [..., in], output [..., out]. The weight is not initialized: the model does that.

    >>> import torch
    >>> from dither.nn import Conv1D
    >>> layer = Conv1D(out_features=6, in_features=4)
    >>> layer.weight.shape, layer(torch.zeros(2, 3, 4)).shape
    (torch.Size([4, 6]), torch.Size([2, 3, 6]))
    """

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.nf, self.nx = out_features, in_features  # as in transformers; Linear.adopt recognizes the layer by them
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return functional.plain_linear(input, self.weight, self.bias, transposed=True)

    def extra_repr(self) -> str:
        """Return the sizes, as `nn.Linear` prints them."""
        return f"in_features={self.nx}, out_features={self.nf}"


LAYERS = ("gate_proj", "up_proj", "down_proj")

KNOWN = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "SmolLM3MLP", "Olmo2MLP")
"""Classes of transformers whose forward pass is that of GatedMLP, if their act_fn is SiLU."""


class GatedMLP(nn.Module):
    """A feed-forward layer with a gate: down_proj(silu(gate_proj(x)) * up_proj(x)).

    If down_proj is a `dither.nn.Linear` with `MemoryOptions(swiglu="fp8")`, backward reads gate and up as FP8 codes.

    >>> import torch
    >>> layer = GatedMLP(nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8))
    >>> layer(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    @classmethod
    def adopt(cls, module: nn.Module) -> "GatedMLP":
        """Return a GatedMLP in place of a feed-forward layer of transformers, with the same layers and hooks."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.__dict__.update(module.__dict__)
        return new

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
        if isinstance(down, Linear) and down.keeps_swiglu(gate):
            kept = keep(gate, up)
            kept_out: Tensor = down(swiglu(gate, up, kept), kept=kept)
            return kept_out
        out: Tensor = down(F.silu(gate) * up)
        return out


def check_gated(model: nn.Module) -> None:
    """Raise if a model has no feed-forward layer that can keep the inputs of its SwiGLU in FP8."""
    if not any(isinstance(module, GatedMLP) or _is_known(module) for module in model.modules()):
        raise UserError(
            f"MemoryOptions(swiglu='fp8') is for Llamas of dither.models, for {', '.join(KNOWN)} of transformers, and for "
            f"feed-forward layers that are a dither.nn.GatedMLP; {type(model).__name__} has none of them."
        )


def adopt_gated(model: nn.Module) -> None:
    """Replace the feed-forward layers of transformers that are known to have a SwiGLU by GatedMLPs."""
    for module in list(model.modules()):
        if _is_known(module):
            replace_module(model, module, GatedMLP.adopt(module))


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, under all of its names."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            model.set_submodule(name, new)


def _is_known(module: nn.Module) -> bool:
    """Return True for a feed-forward layer of transformers that computes what GatedMLP does."""
    kind = type(module)
    activation = type(getattr(module, "act_fn", None)).__name__
    return (
        kind.__module__.startswith("transformers.models.")
        and kind.__name__ in KNOWN
        and activation in ("SiLU", "SiLUActivation")
        and all(isinstance(getattr(module, layer, None), nn.Module) for layer in LAYERS)
    )


class Absent(nn.Module):
    """A block that another rank of a pipeline holds. It keeps the numbers, and so the names, of the blocks after it.

    >>> blocks = nn.ModuleList([Absent(), nn.Linear(2, 2, bias=False)])
    >>> [name for name, _ in blocks.named_parameters()]
    ['1.weight']
    """

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        """Return the first argument."""
        return x

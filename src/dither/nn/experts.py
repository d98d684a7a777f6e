"""Experts of Hugging Face's mixture models: many small linear layers in one parameter [experts, out, in].

Since version 5, transformers keeps the experts of a block in one module with two such parameters. It looks up the function that
computes them in a public registry, where Dither registers its own under the name `dither`. A converted module selects it in a
copy of its configuration, so that other modules and other models do not change.

Shapes: x_TH are T tokens with H features, each routed to k experts: S = T * k pairs of token and expert.
"""

import copy
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dither.nn import functional
from dither.nn.linear import Choice, Linear
from dither.spec import LayerPrecision, MemoryOptions

NAME = "dither"
"""Name of Dither's function in the registry of transformers, and of the child module in a converted module."""


class ExpertLinear(Linear):
    """One expert's matrix in a parameter that another module owns."""

    def __init__(self, home: nn.Module, parameter: str, index: int, precision: LayerPrecision, **options: Any) -> None:
        nn.Module.__init__(self)
        self._home = (home,)  # in a tuple: a module may not own the one that owns it
        self._parameter, self._index = parameter, index
        self.register_parameter("bias", None)
        rows, columns = self.weight.shape
        transposed = bool(home.is_transposed)
        self.out_features, self.in_features = (columns, rows) if transposed else (rows, columns)
        self.set_options(transposed=transposed, **options)
        self.start(Choice(precision, precision))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return this expert's matrix."""
        whole: Tensor = getattr(self._home[0], self._parameter)
        return whole.detach()[self._index]

    def forward(self, input: Tensor, weight: Tensor, tokens: int) -> Tensor:  # type: ignore[override]
        """Map the tokens of this expert, out of `tokens` in the batch; `weight` is its matrix, as the parameter learns it."""
        settings = self.settings_for(input)
        return functional.linear(input, weight, None, settings, state=self.call_state(settings, tokens))

    def learned_weight(self) -> Tensor:
        """Return the parameter that holds the matrices of all experts."""
        whole: Tensor = getattr(self._home[0], self._parameter)
        return whole


class ExpertsLinear(nn.Module):
    """The same matrix of every expert, in one precision: one layer of a plan."""

    def __init__(self, home: nn.Module, parameter: str, precision: LayerPrecision, *, name: str, **options: Any) -> None:
        super().__init__()
        self.name = name
        self.experts = nn.ModuleList(
            ExpertLinear(home, parameter, index, precision, name=f"{name}.{index}", **options)
            for index in range(len(getattr(home, parameter)))
        )

    @property
    def first(self) -> ExpertLinear:
        """Return the first expert, which has the settings of all."""
        return self.experts[0]  # type: ignore[return-value]

    def set_memory(self, memory: MemoryOptions) -> None:
        """Set the memory options of every expert, as `Linear.set_memory` does."""
        for expert in self.experts:
            expert.set_memory(memory)  # type: ignore[operator]


@dataclass(frozen=True)
class Projection:
    """A matrix that exists once per expert of a module."""

    parameter: str
    out_features: int
    in_features: int
    uses: int
    """Number of experts per token."""
    obstacle: str
    """The reason why it cannot be converted, or ""."""


def projections(module: Any) -> list[Projection]:
    """Return the matrices of a module of experts, or [] for any other module."""
    # If transformers is not loaded, no model has such a module.
    if "transformers.integrations.moe" not in sys.modules or not hasattr(module, "is_transposed"):
        return []
    matrices = []
    for parameter, weight in module.named_parameters(recurse=False):
        if weight.dim() == 3 and parameter in ("gate_up_proj", "up_proj", "down_proj"):
            _, rows, columns = weight.shape
            size = (columns, rows) if module.is_transposed else (rows, columns)
            uses = getattr(module.config, "num_experts_per_tok", len(weight))
            sharded = "its experts are on several ranks" if getattr(module, "_is_expert_parallel", False) else ""
            matrices.append(Projection(parameter, *size, uses, sharded))
    return matrices


def install(module: Any, parameter: str, layer: nn.Module) -> None:
    """Make a module of experts compute the products with one of its matrices by `layer.experts`, one per expert."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    if not hasattr(module, NAME):
        module.config = copy.deepcopy(module.config)
        module.config._experts_implementation = NAME
        module.add_module(NAME, nn.ModuleDict())
    module.get_submodule(NAME)[parameter] = layer


def experts_forward(self: Any, x_TH: Tensor, expert_Tk: Tensor, share_Tk: Tensor) -> Tensor:
    """Return the output of a module of experts [T, H]: for each token, the weighted sum of the outputs of its k experts.

    `expert_Tk` are the experts of each token, `share_Tk` the weights of their outputs. Experts run one after the other, each on
    its tokens. The number of tokens per expert depends on the data, so the host synchronizes with the device.
    """
    tokens, k = expert_Tk.shape
    if not tokens:
        return torch.zeros_like(x_TH)
    expert_S = expert_Tk.reshape(-1)
    order_S = expert_S.argsort(stable=True)
    counts = torch.bincount(expert_S, minlength=self.num_experts).tolist()
    up = "gate_up_proj" if self.has_gate else "up_proj"
    # One unbind gives the matrix of every expert, and its backward is one stack. Frozen experts have codes in place of it.
    none = (None,) * len(counts)
    ups, downs = (none if whole is None else whole.unbind(0) for whole in (getattr(self, up), self.down_proj))
    outputs = []
    for expert, x_SH in enumerate(torch.split(x_TH[order_S // k], counts)):
        if counts[expert]:
            inner = _product(self, up, expert, x_SH, ups[expert], tokens)
            inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
            outputs.append(_product(self, "down_proj", expert, inner, downs[expert], tokens))
        else:
            for layer in filter(lambda layer: isinstance(layer, ExpertsLinear), self.get_submodule(NAME).values()):
                layer.experts[expert].draws.pass_over(tokens, training=self.training)
    y_SH = torch.cat(outputs)
    if getattr(self, "has_post_expert_norm", False):
        y_SH = self.post_expert_norm(y_SH)
    y_SH = y_SH * share_Tk.reshape(-1)[order_S, None]
    # Back to the order of tokens, then one sum: index_add would add in nondeterministic order.
    y_SH = y_SH[order_S.argsort()]
    return y_SH.view(tokens, k, -1).sum(dim=1).to(x_TH.dtype)


def _product(self: Any, parameter: str, expert: int, x: Tensor, weight: Tensor | None, tokens: int) -> Tensor:
    layers = self.get_submodule(NAME)
    if parameter in layers:
        y: Tensor = layers[parameter].experts[expert](x, weight, tokens)
    else:
        assert weight is not None
        y = F.linear(x, weight.T if self.is_transposed else weight)
    return y + getattr(self, f"{parameter}_bias")[expert] if self.has_bias else y

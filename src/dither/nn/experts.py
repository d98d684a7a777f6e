"""Experts of Hugging Face's mixture models: many small linear layers in one parameter [experts, out, in].

Since version 5, transformers keeps the experts of a block in one module with two such parameters. It looks up the function that
computes them in a public registry, where Dither registers its own under the name `dither`. A converted module selects it in a
copy of its configuration, so that other modules and other models do not change.

Where no scale group spans two experts and nothing is drawn, all experts are cast and multiplied at once (`dither.nn.grouped`);
otherwise they run one after the other.

Shapes: x_TH are T tokens with H features, each routed to k experts: S = T * k pairs of token and expert, in P >= S rows.
"""

import copy
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dither.nn import functional
from dither.nn.functional import Castings, OperandCodes, Settings, autocast_dtype
from dither.nn.grouped import grouped_linear, row_multiple
from dither.nn.linear import Choice, Linear, Program
from dither.spec import LayerPrecision, MemoryOptions
from dither.spec.engines import ALIGNMENT

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

    def _install(self, program: Program, *, restart: bool) -> None:
        super()._install(program, restart=restart)
        rows, columns = self.weight.shape
        self.row_multiples = tuple(row_multiple(program.settings[gpu], (rows, columns), gpu=bool(gpu)) for gpu in (0, 1))
        """Multiples of rows at which the tokens of an expert begin, on a CPU and on a GPU; 0 if experts run one by one."""

    def _choose_clip(self, precision: LayerPrecision) -> None:
        """Create or drop the learned clips of all experts, one parameter, which the first expert holds."""
        super()._choose_clip(LayerPrecision() if self._index else precision)

    def _stored_clip(self) -> Tensor | None:
        if self.program.clip is None:
            return None
        whole: Tensor = self._home[0].get_parameter(f"{NAME}.{self._parameter}.experts.0.clip")
        return whole.flatten(0, 1) if self.grouped else whole[self._index]

    @property
    def grouped(self) -> bool:
        """True if the matrices of all experts are cast at once: the first expert holds their codes."""
        whole = self.learned_weight()
        return whole.is_contiguous() and type(whole) in (Tensor, nn.Parameter) and self.row_multiples[int(whole.is_cuda)] > 0

    def engines_for(
        self, choice: Choice, device: torch.device | str, tokens: int = ALIGNMENT, name: str = ""
    ) -> dict[str, str]:
        """Return the engines that the layer would have; grouped products have BF16 units alone."""
        found = super().engines_for(choice, device, tokens, name)
        alone = found["forward"] == "fp8-mxfp4" and self.row_multiples[1] > 0
        return found | {"forward": "bf16"} if alone else found

    def stacked_codes(self) -> OperandCodes | None:
        """Return the codes of the matrices of all experts, [experts * rows, columns], if the first expert holds them."""
        if not self.cache.ready:
            return None
        if not torch.compiler.is_compiling():
            self.check_unchanged()
        return self.cache.codes

    def caches_weight(self) -> bool:
        """Return whether this expert casts once per step: the first for all of them, if they are grouped."""
        return (self._index == 0 or not self.grouped) and super().caches_weight()

    def _stored_weight(self) -> Tensor:
        return self.learned_weight().detach().flatten(0, 1) if self.grouped else super()._stored_weight()

    def _weight_codes(self, settings: Settings) -> OperandCodes | None:
        return None if self.grouped else super()._weight_codes(settings)

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

    `expert_Tk` are the experts of each token, `share_Tk` the weights of their outputs.
    """
    tokens, k = expert_Tk.shape
    if not tokens:
        return torch.zeros_like(x_TH)
    multiple = _group_multiple(self, x_TH)
    y_PH, row_S = _all_at_once(self, x_TH, expert_Tk, multiple) if multiple else _one_by_one(self, x_TH, expert_Tk)
    # Back to the order of tokens, then one sum: index_add would add in nondeterministic order.
    y_SH = y_PH[row_S]
    if getattr(self, "has_post_expert_norm", False):
        y_SH = self.post_expert_norm(y_SH)
    y_SH = y_SH * share_Tk.reshape(-1)[:, None]
    return y_SH.view(tokens, k, -1).sum(dim=1).to(x_TH.dtype)


def _up(self: Any) -> str:
    return "gate_up_proj" if self.has_gate else "up_proj"


def _matrices(self: Any, parameter: str) -> Any:
    """Return the matrices of all experts as products read them, clipped if that is learned; None of frozen experts."""
    layers = self.get_submodule(NAME)
    if parameter in layers and isinstance(layers[parameter], ExpertsLinear) and layers[parameter].first.program.clip:
        return layers[parameter].first.clip_learner()
    return getattr(self, parameter)


def _activated(self: Any, inner: Tensor) -> Tensor:
    result: Tensor = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    return result


# All experts at once --------------------------------------------------------------------------------------------------


def _group_multiple(self: Any, x: Tensor) -> int:
    """Return the multiple of rows at which the tokens of each expert begin, or 0 if experts run one by one.

    GPUs group products of BF16 numbers only, and compiled CPU code has no grouped products. Hooks on single experts, such as
    those of the monitor, need calls of single experts.
    """
    layers, multiple = self.get_submodule(NAME), 1
    autocast = autocast_dtype(x)
    dtype = autocast or x.dtype
    if x.is_cuda:
        fits = dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)
    else:
        fits = dtype in (torch.bfloat16, torch.float32) and not torch.compiler.is_compiling()
    for parameter in (_up(self), "down_proj") if fits else ():
        weight = getattr(self, parameter)
        fits = fits and type(weight) in (Tensor, nn.Parameter) and (autocast is not None or weight.dtype == x.dtype)
        if not fits:
            break
        if parameter not in layers:
            needed = row_multiple(UNCAST, tuple(weight.shape[1:]), gpu=x.is_cuda)
        else:
            hooked = any(expert._forward_hooks or expert._forward_pre_hooks for expert in layers[parameter].experts)
            first = layers[parameter].first
            needed = first.row_multiples[int(x.is_cuda)] if first.grouped and not hooked else 0
        fits, multiple = fits and needed > 0, math.lcm(multiple, max(needed, 1))
    return multiple if fits else 0


UNCAST = Settings(Castings(), Castings(), Castings(), transposed=False, emulate=False)
"""The settings of a matrix that is not converted."""


def _all_at_once(self: Any, x_TH: Tensor, expert_Tk: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """Return the outputs of experts in rows sorted by expert [P, H], and the row of each pair of token and expert [S]."""
    E, k, device = self.num_experts, expert_Tk.shape[1], x_TH.device
    expert_S = expert_Tk.reshape(-1)
    order_S = expert_S.argsort(stable=True)
    sorted_S, rank_S = expert_S[order_S], order_S.argsort()
    x_SH = x_TH[order_S // k]
    end_E = torch.searchsorted(sorted_S, torch.arange(E, device=device), right=True)  # bincount would wait for the device
    if multiple == 1:
        return _products(self, x_SH, end_E, None), rank_S
    # Each expert's rows begin at a multiple, and the last expert has the rest, of zeros.
    start_E = F.pad(end_E[:-1], (1, 0))
    room_E = (end_E - start_E + multiple - 1) // multiple * multiple
    first_E = room_E.cumsum(0) - room_E
    P = -(-(len(order_S) + E * (multiple - 1)) // multiple) * multiple
    row_S = torch.arange(len(order_S), device=device) + (first_E - start_E)[sorted_S]
    x_PH = x_SH.new_zeros(P, x_SH.shape[1]).index_copy(0, row_S, x_SH)
    empty_P1 = torch.ones(P, 1, dtype=torch.bool, device=device).index_fill(0, row_S, False)
    end_E = torch.cat((first_E[1:], first_E.new_full((1,), P)))
    return _products(self, x_PH, end_E, empty_P1), row_S[rank_S]


def _products(self: Any, x_PH: Tensor, end_E: Tensor, empty_P1: Tensor | None) -> Tensor:
    """Return the outputs of experts; `empty_P1` says which rows belong to no token, and stay zero between the products."""
    layers, expert_P = self.get_submodule(NAME), None
    if self.has_bias:
        expert_P = torch.searchsorted(end_E, torch.arange(len(x_PH), device=x_PH.device), right=True)

    def product(x: Tensor, parameter: str) -> Tensor:
        weight = _matrices(self, parameter)
        if parameter in layers:
            first = layers[parameter].first
            settings, codes = first.settings_for(x), first.stacked_codes()
        else:
            settings, codes = UNCAST._replace(transposed=bool(self.is_transposed)), None
        y = grouped_linear(x, weight, end_E.int(), settings, codes)
        if expert_P is None:
            return y
        bias: Tensor = getattr(self, f"{parameter}_bias")
        return y + bias.float()[expert_P].to(bias.dtype)  # in float32, since the gradient of a bias is a sum over rows

    inner = _activated(self, product(x_PH, _up(self)))
    return product(inner if empty_P1 is None else inner.masked_fill(empty_P1, 0), "down_proj")


# One expert after the other -------------------------------------------------------------------------------------------


def _one_by_one(self: Any, x_TH: Tensor, expert_Tk: Tensor) -> tuple[Tensor, Tensor]:
    """Do the same by a loop. The number of tokens per expert depends on the data, so the host waits for the device."""
    tokens, k = expert_Tk.shape
    expert_S = expert_Tk.reshape(-1)
    order_S = expert_S.argsort(stable=True)
    counts = torch.bincount(expert_S, minlength=self.num_experts).tolist()
    # One unbind gives the matrix of every expert, and its backward is one stack. Frozen experts have codes in place of it.
    none = (None,) * len(counts)
    wholes = (_matrices(self, parameter) for parameter in (_up(self), "down_proj"))
    ups, downs = (none if whole is None else whole.unbind(0) for whole in wholes)
    outputs = []
    for expert, x_SH in enumerate(torch.split(x_TH[order_S // k], counts)):
        if counts[expert]:
            inner = _activated(self, _product(self, _up(self), expert, x_SH, ups[expert], tokens))
            outputs.append(_product(self, "down_proj", expert, inner, downs[expert], tokens))
        else:
            for layer in filter(lambda layer: isinstance(layer, ExpertsLinear), self.get_submodule(NAME).values()):
                layer.experts[expert].draws.pass_over(tokens, training=self.training)
    return torch.cat(outputs), order_S.argsort()


def _product(self: Any, parameter: str, expert: int, x: Tensor, weight: Tensor | None, tokens: int) -> Tensor:
    layers = self.get_submodule(NAME)
    if parameter in layers:
        y: Tensor = layers[parameter].experts[expert](x, weight, tokens)
    else:
        assert weight is not None
        y = F.linear(x, weight.T if self.is_transposed else weight)
    return y + getattr(self, f"{parameter}_bias")[expert] if self.has_bias else y

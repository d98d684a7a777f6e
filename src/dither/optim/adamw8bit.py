"""AdamW with 8-bit states, under the name that torchao and bitsandbytes use."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from dither.errors import UserError
from dither.optim.adamw import AdamW


class AdamW8bit(AdamW):
    """AdamW with states="dynamic8" and block=256, with the arguments of torchao's and bitsandbytes' class of this name.

    As in `AdamW`, 16-bit parameters are rounded stochastically (`bf16_stochastic_round=False` for to nearest), and
    one-dimensional parameters keep fp32 moments. `min_8bit_size` exempts small matrices too (bitsandbytes: 4096).

    >>> import dither, torch
    >>> model = torch.nn.Linear(512, 8)
    >>> optimizer = dither.optim.AdamW8bit(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 512)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["exp_avg"].dtype, optimizer.state[model.weight]["exp_avg_scale"].shape
    (torch.uint8, torch.Size([8, 2]))
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        block_size: int | None = None,
        optim_bits: int = 32,
        is_paged: bool = False,
        **options: Any,
    ) -> None:
        """Create the optimizer.

        params, lr, betas, eps, weight_decay, amsgrad: as `AdamW`.
        block_size: torchao's name for `block`; 256 by default.
        optim_bits: 8 or 32 (bitsandbytes' default). It has no effect, as in bitsandbytes' class of this name.
        is_paged: must be False.
        options: further options of `AdamW`, such as `bf16_stochastic_round`.
        """
        if is_paged:
            raise UserError("is_paged=True moves states to the CPU when memory is short, which this optimizer does not do.")
        if optim_bits not in (8, 32):
            raise UserError(f"optim_bits is 8, or bitsandbytes' default of 32, which means 8 here too, not {optim_bits!r}.")
        if options.get("states", "dynamic8") != "dynamic8":
            raise UserError(f"AdamW8bit has states='dynamic8': use AdamW for states={options['states']!r}.")
        if block_size is not None and options.get("block", block_size) != block_size:
            raise UserError(
                f"block_size={block_size!r} and block={options['block']!r} are two names of one option: choose one."
            )
        options = {"states": "dynamic8", "block": 256 if block_size is None else block_size, **options}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)

"""A linear layer that stores its weight as [in, out], as in GPT-2's checkpoints."""

import torch
from torch import Tensor, nn

from dither.nn import functional


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
        return functional._plain(input, self.weight, self.bias, transposed=True)

    def extra_repr(self) -> str:
        """Return the sizes, as `nn.Linear` prints them."""
        return f"in_features={self.nx}, out_features={self.nf}"

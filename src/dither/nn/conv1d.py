"""A linear layer that stores its weight as [in, out]: how GPT-2's checkpoints have theirs."""

import torch
from torch import Tensor, nn

from dither.nn import functional


class Conv1D(nn.Module):
    """y = x W + b with W [in, out], as the class of this name in Hugging Face's transformers; `dither.convert` takes both.

    Input [..., in], output [..., out]. The weight is not initialised: the model that has the layer does that.

    >>> import torch
    >>> from dither.nn import Conv1D
    >>> layer = Conv1D(out_features=6, in_features=4)
    >>> layer.weight.shape, layer(torch.zeros(2, 3, 4)).shape
    (torch.Size([4, 6]), torch.Size([2, 3, 6]))
    """

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.nf, self.nx = out_features, in_features  # transformers' names, by which Linear.adopt knows such a layer
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return functional._plain(input, self.weight, self.bias, transposed=True)

    def extra_repr(self) -> str:
        """The sizes, as `nn.Linear` prints them."""
        return f"in_features={self.nx}, out_features={self.nf}"

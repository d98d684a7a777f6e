"""Deployment formats as data: the casts by which an engine multiplies a served model.

Training for a format (`dither.qat`) and export (`dither.exporting`) read the same entry, so that they cast alike. The layout
in files is in `dither.exporting.formats`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from dither.spec.cast import Cast
from dither.spec.layer import LayerPrecision

EXPERT_FP8 = "transformers reads 8-bit experts with one scale per row only"


@dataclass(frozen=True)
class Deployment:
    """A format in which engines multiply weights of few bits."""

    name: str
    cast: Cast
    """The cast of a weight [out, in] along its inputs."""
    input_cast: Cast | None
    """The cast of inputs along the same axis; None if engines multiply unrounded inputs."""
    multiples: tuple[int, int]
    """The outputs and the inputs of a layer are multiples of these two; other layers stay in 16 bits."""
    experts: str = ""
    """Why transformers cannot read the experts of a mixture in this format, or ""."""

    @property
    def gguf(self) -> bool:
        """Return True for files of llama.cpp; other formats are those of Hugging Face folders."""
        return self.name.startswith("gguf-")

    def obstacle(self, rows: int, columns: int) -> str:
        """Return the reason why a weight [rows, columns] cannot be stored in this format, or "".

        >>> DEPLOYMENTS["fp8-block"].obstacle(192, 128)
        '192 x 128 is not a multiple of 128 x 128'
        """
        if rows % self.multiples[0] or columns % self.multiples[1]:
            return f"{rows} x {columns} is not a multiple of {self.multiples[0]} x {self.multiples[1]}"
        return ""

    def precision(self, cast: Cast | None = None, *, learned_clip: bool = False) -> LayerPrecision:
        """Return the precision of a layer that trains for this format; `cast` takes the place of the weight's.

        Forward multiplies the numbers of an engine. Gradients are straight-through: dX is a product with the same decoded
        weight, dW one with the same decoded input, and nothing else is cast.

        >>> print(DEPLOYMENTS["mxfp4"].precision())
        weight e2m1 tile(32) pow2 nearest, input_grad.weight uncast, backward from the codes of forward
        """
        uncast = {"input_grad.weight": None, "weight_grad.input": None}
        made = LayerPrecision.of(self.input_cast, cast or self.cast, overrides=uncast, requantize=True)
        return replace(made, learned_clip=learned_clip)

    def stores(self, cast: Cast) -> bool:
        """Return True if files of this format hold the codes and scales of a cast as they are.

        >>> [DEPLOYMENTS["int4-g32"].stores(Cast.parse(text)) for text in ("int4-g32", "q4_0", "int4 tile(32)")]
        [True, False, False]
        """
        return cast.codes == self.cast.codes and cast.scaling.rule.exported == self.cast.scaling.rule.exported


def _entry(name: str, weight: str, input: str | None, multiples: tuple[int, int], experts: str = "") -> Deployment:
    return Deployment(name, Cast.parse(weight), None if input is None else Cast.parse(input), multiples, experts)


DEPLOYMENTS: Mapping[str, Deployment] = MappingProxyType(
    {
        each.name: each
        for each in (
            _entry("gguf-q4_0", "q4_0", None, (1, 32)),
            _entry("gguf-mxfp4", "mxfp4", None, (1, 32)),
            _entry("gguf-q8_0", "q8_0", None, (1, 32)),
            _entry("int4-g128", "int4-g128", None, (1, 128)),
            _entry("mxfp4", "mxfp4", None, (1, 32)),
            _entry("mxfp4-w4a4", "mxfp4", "mxfp4", (1, 32), "transformers does not read experts with cast inputs"),
            _entry("nvfp4", "nvfp4", None, (1, 16), "transformers does not read the tensor scales of NVFP4 experts"),
            _entry("int4-g32", "int4-g32", None, (1, 32)),
            _entry("mxfp8", "mxfp8", "mxfp8", (1, 32), EXPERT_FP8),
            _entry("int8", "int8 row", "int8 row", (16, 16), "transformers reads packed integers of experts only"),
            _entry("fp8-dynamic", "e4m3 row", "e4m3 row", (16, 16)),
            _entry("fp8-block", "e4m3 block(128)", "e4m3 tile(128)", (128, 128)),
        )
    }
)
"""Deployment formats by name. Where layers must share a format, the later one in this order is taken."""

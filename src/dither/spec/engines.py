"""The choice of matrix units that multiply operands without changing a value. Nothing here imports torch.

Every product is A B^T, with A [P, L] and B [Q, L] both stored along the contraction axis L. All engines multiply the same
numbers; only the order and the width of the additions differ.

`engine_for` is a pure function. Units that this project has tested are chosen by the GPU's compute capability. Others are used
only if they passed the self-test of `dither doctor` on the user's machine, which `Verified` records.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dither.errors import UserError
from dither.files import Refused, from_json, read_text
from dither.settings import from_object
from dither.spec import PRODUCTS, Cast, LayerPrecision, Transform, did_you_mean
from dither.spec.levels import CONTAINERS

CONTAINED = CONTAINERS["e4m3"][1:]
"""Formats whose values are all E4M3 values: FP8 units multiply them unchanged."""

FP8_GROUPS = 128
"""Size of the tiles and blocks that FP8 units scale."""

ALIGNMENT = 16
"""FP8 units multiply matrices whose L and Q are multiples of this."""

SHORTEST_GROUP = 16
"""BF16 and FP16 units sum at least this many elements at once, so they cannot apply float32 scales of shorter groups."""

INT8_CAPABILITY = (7, 5)
"""Compute capability of the first GPUs with INT8 matrix units: Turing."""

SIXTEEN_BITS: dict[Literal["bf16", "fp16"], tuple[int, int]] = {"bf16": (8, 0), "fp16": (7, 0)}
"""Compute capabilities of the first GPUs with 16-bit units: Ampere and Volta. The first units that hold both operands win."""

LARGEST_HELD = 32
"""Groups up to this size are cast to BF16 numbers by one kernel, which holds whole groups of both directions."""

VERIFIABLE = ("fp8-tensor", "fp8-row", "fp8-group", "fp8-mxfp4", "mxfp8", "mxfp4", "nvfp4")
"""Native units that are used only if they were tested: by this project, or by `dither doctor` on the user's machine."""

TRIED = {(9, 0): ("fp8-tensor", "fp8-row", "fp8-group", "fp8-mxfp4")}
"""Native units that this project has compared with the reference, by compute capability: those of an H200."""


@dataclass(frozen=True)
class Engine:
    """The matrix units of a product, and how they scale.

    - `fp8`: FP8 units, which apply the scales. `fp8-container`: the same, with FP4 or FP6 values stored as E4M3 codes.
    - `fp8-mxfp4`: FP8 units on MXFP4 in the forward product. Its numbers are those of E4M3 codes with a scale per 1 x 128 tile
      of the input and per 128 x 128 block of the weight. BF16 units multiply the rows with a tile whose exponents differ by
      more than 14: none in measured runs, where many of gradients would.
    - `mxfp8`, `mxfp4`, `nvfp4`: units that scale groups of 32 or 16 themselves.
    - `int8`: exact integer sums, scaled afterwards.
    - `bf16`, `fp16`: 16-bit units on values that these formats hold exactly. Scales of tensors and rows are applied to the
      product, float32 scales of groups (`scaling="group"`) to the float32 sum of each group.
    - `fp32`: dequantized numbers, multiplied in float32: on the CPU, and for codes that no kernel reads.
    - `torch`: torch's own product of two uncast operands.
    """

    name: Literal["torch", "fp8", "fp8-container", "fp8-mxfp4", "mxfp8", "mxfp4", "nvfp4", "int8", "bf16", "fp16", "fp32"]
    scaling: Literal["", "tensor", "row", "group"] = ""
    """Scaling of FP8 units: per tensor, per row, or per group of 128 along L; "group" of 16-bit units scales group sums."""

    def __str__(self) -> str:
        return f"{self.name}-group" if self.name in ("bf16", "fp16") and self.scaling else self.name


def container(cast: Cast) -> str:
    """Return the format in which a GPU stores codes: e4m3 for FP6, and for FP4 that FP8 units can scale, else that of the cast.

    Codes of 6 bits cross bytes. Packing them saves a quarter of the memory, and costs far more time than reading it.

    >>> [container(Cast.parse(text)) for text in ("e2m1 tile(128)", "mxfp4", "mxfp6")]
    ['e4m3', 'e2m1', 'e4m3']
    """
    contained = cast.kernel and cast.format in CONTAINED and (_fp8_scaling(cast) or cast.element.bits == 6)
    return "e4m3" if contained else cast.format


def held_by_bf16(cast: Cast, verified: Collection[str] = ()) -> bool:
    """Return True if BF16 holds every code times the scale of its group, and no tested units scale the groups themselves.

    BF16 units then multiply these numbers: MX formats and NVFP4, whose scale of the tensor is applied to the product.

    >>> [held_by_bf16(Cast.parse(text)) for text in ("nvfp4", "mxfp8", "e2m1 tile(128)", "e4m3")]
    [True, True, False, False]
    """
    small = cast.group.kind in ("tile", "block") and cast.group.size <= LARGEST_HELD and not scales_inside(cast, "bf16")
    kind = _mx_kind(cast)
    return small and _exact(cast, "bf16") and kind not in verified


def forward_by_fp8(input: Cast | None, weight: Cast | None, usable: Collection[str]) -> bool:
    """Return True if `fp8-mxfp4` multiplies these operands in the forward product, at sizes that FP8 units take.

    >>> [forward_by_fp8(Cast.parse("mxfp4"), Cast.parse("mxfp4"), units) for units in (["fp8-mxfp4"], VERIFIABLE)]
    [True, False]
    """
    both = input is not None and weight is not None and is_mxfp4(input) and is_mxfp4(weight)
    return both and "fp8-mxfp4" in usable and "mxfp4" not in usable


def engine_for(
    a: Cast | None,
    b: Cast | None,
    size: tuple[int, int, int],
    capability: tuple[int, int] | None,
    plain: str = "bf16",
    verified: Collection[str] = (),
    forward: bool = False,
) -> Engine:
    """Choose the engine of the product A B^T. This is a pure function.

    The first units that multiply the operands unchanged are chosen: INT8 units, native FP8 or FP4 units, BF16 units, or FP16
    units if there are no BF16 units. The CPU multiplies in float32. Raise a UserError if no units of the GPU fit.

    Args:
        a: The cast of A [P, L], or None if it is not cast.
        b: The cast of B [Q, L], or None if it is not cast.
        size: (P, Q, L).
        capability: Compute capability of the CUDA device; None means the CPU.
        plain: Format of an operand that is not cast: bf16, fp16 or fp32.
        verified: Native units that passed the self-test on this machine, out of VERIFIABLE.
        forward: The product is that of the forward pass, of an input and a weight.

    >>> fp4, fp8 = Cast.parse("e2m1 tile(128)"), Cast.parse("e4m3 block(128)")
    >>> str(engine_for(fp4, fp8, (4096, 512, 1024), (9, 0))), str(engine_for(fp4, fp8, (4096, 512, 1024), (8, 0)))
    ('fp8-container', 'bf16-group')
    >>> mxfp4 = Cast.parse("mxfp4")
    >>> [engine_for(mxfp4, mxfp4, (4096, 512, 1024), (10, 0), verified=ok).name for ok in ([], ["mxfp4"])]
    ['bf16', 'mxfp4']
    >>> [str(engine_for(mxfp4, mxfp4, (4096, 512, 1024), (9, 0), forward=forward)) for forward in (True, False)]
    ['fp8-mxfp4', 'bf16']
    """
    if a is None and b is None:
        return Engine("torch")
    a, b = a and a.codes, b and b.codes
    if any(cast is not None and not cast.kernel for cast in (a, b)):
        return Engine("fp32")
    integers = a is not None and b is not None and _takes_int8(a) and _takes_int8(b)
    if integers and (capability is None or capability >= INT8_CAPABILITY):
        return Engine("int8")
    if capability is None or (plain == "fp32" and (a is None or b is None)):
        return Engine("fp32")
    if a is not None and b is not None:
        usable = {*TRIED.get(capability, ()), *verified} - (set() if forward else {"fp8-mxfp4"})
        native = _native(a, b, size, usable)
        if native is not None:
            return native
    for units, first in SIXTEEN_BITS.items():
        plain_fits = plain == units or (a is not None and b is not None)
        if plain_fits and capability >= first and all(cast is None or _exact(cast, units) for cast in (a, b)):
            inside = any(cast is not None and scales_inside(cast, units) for cast in (a, b))
            return Engine(units, "group" if inside else "")
    gpu = f"a GPU of compute capability {capability[0]}.{capability[1]}"
    raise UserError(
        f"no matrix units of {gpu} multiply {_described(a, plain)} by {_described(b, plain)} exactly: "
        + _supported(capability)
        + "; emulate=True multiplies in float32"
    )


def engines_of(
    precision: LayerPrecision,
    size: tuple[int, int, int],
    capability: tuple[int, int] | None,
    plain: str = "bf16",
    verified: Collection[str] = (),
    transposed: bool = False,
) -> dict[str, Engine]:
    """Return the engine of each product of a layer with `size` (M tokens, N outputs, K inputs).

    `transposed` means that the weight is stored as [K, N]; the other arguments are those of `engine_for`.

    >>> fp8 = LayerPrecision.of("e4m3 tile(128)", "e4m3 block(128)", "e4m3 tile(128)")
    >>> {product: str(engine) for product, engine in engines_of(fp8, (64, 128, 256), (8, 9)).items()}
    {'forward': 'bf16-group', 'input_grad': 'bf16-group', 'weight_grad': 'bf16-group'}
    """
    M, N, K = size
    sizes = {"forward": (M, N, K), "input_grad": (M, K, N), "weight_grad": (K, N, M) if transposed else (N, K, M)}
    engines = {}
    for product in PRODUCTS:
        a, b = precision.casts(product)
        if product == "weight_grad" and transposed:
            a, b = b, a
        transforming, length = a.transforming if a is not None else Transform(), sizes[product][2]
        if transforming.size > length and product != "weight_grad":  # tokens are padded
            raise UserError(
                f"{product.replace('_', ' ')} product: {transforming} is wider than the {length} features that the product "
                "sums over: use a narrower one"
            )
        try:
            engines[product] = engine_for(a, b, sizes[product], capability, plain, verified, product == "forward")
        except UserError as error:
            raise UserError(f"{product.replace('_', ' ')} product: {error}") from None
    return engines


def scales_inside(cast: Cast, units: str) -> bool:
    """Return True if 16-bit units apply this cast's scales to sums of groups: float32 scales, and powers of two in FP16.

    BF16 has float32's range, so a code times a power of two is a BF16 number. FP16 has a smaller range.
    """
    grouped = cast.group.kind in ("tile", "block") and not cast.scaling.two_level
    return grouped and (units == "fp16" or cast.scaling.storage == "fp32")


def _takes_int8(cast: Cast) -> bool:
    return cast.format == "int8" and cast.group.kind in ("none", "tensor", "row")


def _native(a: Cast, b: Cast, size: tuple[int, int, int], usable: Collection[str]) -> Engine | None:
    """Return the engine of the native units that scale these operands themselves at this size, or None."""
    _, q, length = size
    kinds = {_mx_kind(a), _mx_kind(b)}
    kind = kinds.pop()
    # Two FP4 codes share a byte, and units read 16 bytes at a time.
    if kind and not kinds and kind in usable and not (q % ALIGNMENT or length % (2 * ALIGNMENT)):
        return Engine(kind)
    if forward_by_fp8(a, b, usable) and not (q % ALIGNMENT or length % ALIGNMENT):
        return Engine("fp8-mxfp4", "group")
    scaling = _joint_scaling(a, b)
    if scaling and f"fp8-{scaling}" in usable and not (q % ALIGNMENT or length % ALIGNMENT):
        return Engine("fp8-container" if {a.format, b.format} & set(CONTAINED) else "fp8", scaling)
    return None


def is_mxfp4(cast: Cast) -> bool:
    """Return True if a cast has the codes and scales of MXFP4."""
    return _mx_kind(cast) == "mxfp4"


def _mx_kind(cast: Cast) -> Literal["", "mxfp8", "mxfp4", "nvfp4"]:
    """Return which of Blackwell's formats a cast is, or "". Their scales are per row: 16 x 16 blocks repeat theirs."""
    known: dict[tuple[str, str, str], Literal["mxfp8", "mxfp4", "nvfp4"]] = {
        ("e4m3", "tile(32)", "e8m0"): "mxfp8",
        ("e2m1", "tile(32)", "e8m0"): "mxfp4",
        ("e2m1", "tile(16)", "e4m3"): "nvfp4",
        ("e2m1", "block(16)", "e4m3"): "nvfp4",
    }
    return known.get((cast.format, cast.granularity, cast.scaling.storage), "")


def _fp8_scaling(cast: Cast) -> str:
    """Return the scaling of an operand on FP8 units: "tensor", "row", "tile", "block", or "" if they cannot scale it."""
    kind, size = cast.group.kind, cast.group.size
    if cast.format not in ("e4m3", "e5m2", *CONTAINED) or cast.scaling.two_level:
        return ""
    if kind in ("none", "tensor"):
        return "tensor"
    if kind == "row":
        return "row"
    # PyTorch's scaled_mm takes 128-element groups of E4M3 only.
    return kind if size == FP8_GROUPS and cast.format != "e5m2" else ""


def _joint_scaling(a: Cast, b: Cast) -> Literal["", "tensor", "row", "group"]:
    kinds = {_fp8_scaling(a), _fp8_scaling(b)}
    if a.format == b.format == "e5m2":  # a pair that no NVIDIA GPU multiplies
        return ""
    if kinds == {"tensor"}:
        return "tensor"
    if kinds <= {"tensor", "row"}:
        return "row"
    return "group" if kinds <= {"tile", "block"} else ""


def _exact(cast: Cast, units: str) -> bool:
    """Return True if 16-bit units hold an operand exactly: its codes, times the scales that are multiplied in."""
    element = cast.element
    bits = element.bits - 1 if element.is_integer else element.mantissa_bits + 1
    largest, smallest = element.max, element.min_subnormal
    if cast.scaling.two_level:  # an E4M3 scale has four significant bits, and a range from 2^-9 to 448
        bits, largest, smallest = bits + 4, largest * 448, smallest * 2.0**-9
    if scales_inside(cast, units) and cast.group.size < SHORTEST_GROUP:
        return False
    return bits <= 8 if units == "bf16" else bits <= 11 and largest <= 65504 and smallest >= 2.0**-24


def _supported(capability: tuple[int, int]) -> str:
    """Return a clause that says which operands a GPU multiplies, for an error message."""
    if capability < SIXTEEN_BITS["fp16"]:
        return f"matrix units begin with compute capability {_shown(SIXTEEN_BITS['fp16'])}"
    units, bits = ("BF16", 8) if capability >= SIXTEEN_BITS["bf16"] else ("FP16", 11)
    return f"{units} units take formats of up to {bits} significant bits in groups of {SHORTEST_GROUP} or more"


def _described(cast: Cast | None, plain: str) -> str:
    return f"uncast {plain}" if cast is None else repr(str(cast))


# Units that passed a self-test ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verified:
    """The native units that passed the self-test of `dither doctor`, and the machine on which they did."""

    gpu: str
    """Name of the GPU, such as NVIDIA B200."""
    capability: tuple[int, int]
    torch: str
    """Version of torch, whose code calls the units."""
    cuda: str
    dither: str
    engines: tuple[str, ...]
    """Out of VERIFIABLE."""

    def __post_init__(self) -> None:
        for name in self.engines:
            if name not in VERIFIABLE:
                raise UserError(
                    f"There are no matrix units {name!r} to verify{did_you_mean(name, VERIFIABLE)}: "
                    f"choose from {', '.join(VERIFIABLE)}."
                )

    def check(self, here: "Verified") -> None:
        """Raise unless this was recorded on a machine like `here`. The engines of `here` are ignored."""
        for field in ("gpu", "capability", "torch", "cuda", "dither"):
            then, now = getattr(self, field), getattr(here, field)
            if then != now:
                raise UserError(
                    f"These engines passed their self-test with {field} {_shown(then)}, and here it is {_shown(now)}: "
                    "run `dither doctor --engines FILE` again on this machine."
                )

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps({"version": VERIFIED_VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Verified":
        """Return the record of a JSON text, the inverse of `to_json`.

        >>> here = Verified("NVIDIA B200", (10, 0), "2.11.0", "12.8", "0.1.0", ("mxfp8",))
        >>> Verified.from_json(here.to_json()) == here
        True
        """
        try:
            data: Any = from_json(text.encode())
        except (Refused, UnicodeEncodeError) as error:
            raise UserError(f"This cannot be read as a list of engines: {error}.") from None
        try:
            if not isinstance(data, dict) or data.pop("version", None) != VERIFIED_VERSION:
                raise Refused(f"it has no version {VERIFIED_VERSION}")
            return from_object(cls, data)
        except Refused as error:
            raise UserError(f"This is not a list of engines: `dither doctor --engines FILE` writes one; {error}.") from None

    def save(self, path: str | Path) -> None:
        """Write the record to a file as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Verified":
        """Read a record that `save` wrote."""
        try:
            return cls.from_json(read_text(path))
        except Refused as error:
            raise UserError(f"The engines {str(path)!r} cannot be read: {error}.") from None
        except UserError as error:
            raise UserError(f"In {str(path)!r}: {error}") from None


VERIFIED_VERSION = 1


def _shown(value: object) -> str:
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)

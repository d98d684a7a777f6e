"""Published folders in few bits, read without dequantizing: the codes of the files become those of frozen layers.

    quant_method          tensors of a weight [N, K]
    fp8                   weight E4M3, weight_scale_inv [N/128, K/128]                    DeepSeek, Qwen
    mxfp4                 *_blocks [experts, N, K/32, 16], *_scales [experts, N, K/32]    gpt-oss
    compressed-tensors    weight or weight_packed, weight_scale, weight_global_scale      FP8, INT8, INT4, MXFP8, MXFP4, NVFP4

The tensors of a layer say how it is stored. The config says what tensors do not show, such as scales of inputs. Whatever a cast
of Dither does not express exactly is refused by a sentence with the file and the field.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.models.folder_files import CONFIG, Shards, read_json, short
from dither.nn import experts
from dither.nn.frozen import FrozenExpert, FrozenExperts, FrozenLinear, StoredName
from dither.nn.layers import replace_module
from dither.nn.sites import Site, find_sites
from dither.ops import Quantized
from dither.ops.storage import empty_outputs, scale_dtype
from dither.spec import Cast

METHODS = ("fp8", "mxfp4", "compressed-tensors")
"""Values of quant_method that are read."""

WIDER = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of scales that float32 holds exactly."""

REFUSED = {
    "zero_point": "a zero point",
    "g_idx": "an order of columns",
    "input_scale": "a static scale of inputs",
    "input_global_scale": "a static scale of inputs",
    "activation_scale": "a static scale of inputs",
    "k_scale": "a static scale of a cache",
    "v_scale": "a static scale of a cache",
}
"""Tensors beside codes that change their meaning or that of products, by the ends of their names."""


@dataclass(frozen=True)
class Codes:
    """The names of the tensors of a weight in few bits, and the cast that its codes are read by."""

    codes: str
    scale: str
    cast: Cast
    tensor_scale: str = ""

    def read(self, shards: Shards, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Quantized:
        """Return the codes of a weight, in the memory layout of `dither.quantize`."""
        codes = shards.read(self.codes)
        divisor = None if not self.tensor_scale else _number(shards, self.tensor_scale)
        return self.quantized(shards, codes, shards.read(self.scale), shape, dtype, device, divisor)

    def quantized(
        self,
        shards: Shards,
        codes: Tensor,
        scale: Tensor,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        divisor: float | None = None,
    ) -> Quantized:
        """Return codes and scales of a file as those of a cast; raise if their shapes or dtypes are others."""
        values, scales = empty_outputs(torch.empty(shape, device="meta"), self.cast, 1, self.cast.element)
        wanted = scale_dtype(self.cast)
        exact = scale.dtype in WIDER if wanted == torch.float32 else scale.dtype in (wanted, E8M0.get(wanted))
        if not exact:
            raise UserError(_dtype_refused(shards, self.scale, scale.dtype, wanted))
        if codes.dtype == torch.int32:
            codes = codes.view(torch.uint8).bitwise_xor_(OFFSETS[self.cast.element.bits])
        for name, tensor, expected in ((self.codes, codes, values), (self.scale, scale, scales)):
            if tensor.numel() != expected.numel():
                raise UserError(
                    f"The tensor {name!r} of {shards.folder} has the shape {list(tensor.shape)}, and a weight {list(shape)} in "
                    f"{self.cast.format} {self.cast.granularity} has {list(expected.shape)}."
                )
        kept = scale.dtype if wanted == torch.float32 else wanted  # 16 bits stay 16 bits
        placed = torch.empty_strided(scales.shape, scales.stride(), dtype=kept, device=device)
        if wanted == torch.float32:
            placed.copy_(scale.reshape(scales.shape))
        else:
            placed.view(torch.uint8).copy_(scale.view(torch.uint8).reshape(scales.shape))
        tensor_scale = None
        if divisor is not None:
            tensor_scale = torch.tensor(divisor, dtype=torch.float32, device=device).reciprocal()
        own = codes.view(values.dtype).reshape(values.shape).to(device)
        return Quantized(own, placed, self.cast, shape, 1, dtype, tensor_scale)

    def stored(self, shards: Shards, divisor: float = 1.0) -> StoredName:
        """Return what a frozen layer keeps of its tensors in the file."""
        codes, scale = (shards.tensors[name][1] for name in (self.codes, self.scale))
        places = (self.codes, codes.shape, codes.dtype, self.scale, scale.shape, scale.dtype)
        return StoredName(*places, self.tensor_scale, divisor)


OFFSETS = {4: 0x88, 8: 0x80}
"""What turns integers plus half of their range, as words of 32 bits have them, into integers with a sign, byte by byte."""

E8M0 = {torch.float8_e8m0fnu: torch.uint8}
"""Dtypes that files also have for scales: exponents as plain bytes."""


def _number(shards: Shards, name: str) -> float:
    entry = shards.tensors[name][1]
    if entry.dtype != torch.float32 or entry.shape not in ((), (1,)):
        raise UserError(_dtype_refused(shards, name, entry.dtype, torch.float32))
    return float(shards.read(name))


def _dtype_refused(shards: Shards, name: str, found: torch.dtype, wanted: torch.dtype) -> str:
    path, entry = shards.tensors[name]
    return (
        f"The tensor {name!r} of {path} has the dtype {_plain(found)} and the shape {list(entry.shape)}, and such scales are "
        f"read in {_plain(wanted)}."
    )


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The config -----------------------------------------------------------------------------------------------------------


def check_config(path: Path, scheme: Any) -> None:
    """Raise if `quantization_config` asks for something that frozen codes do not do."""
    method = scheme.get("quant_method") if isinstance(scheme, dict) else None
    if method not in METHODS:
        raise UserError(f"{path} has quant_method={short(method)}, and {', '.join(METHODS)} are read.")
    if (activations := scheme.get("activation_scheme", "dynamic")) != "dynamic":
        raise UserError(f"{path} has activation_scheme={short(activations)}, and inputs with static scales are not read.")
    for field in ("kv_cache_scheme", "transform_config"):
        if scheme.get(field):
            raise UserError(f"{path} has {field}={short(scheme[field])}, which is not read: only weights may be in few bits.")
    if (sparse := (scheme.get("sparsity_config") or {}).get("format", "dense")) != "dense":
        raise UserError(f"{path} has a sparsity_config with format={short(sparse)}, and dense weights are read.")
    for name, group in (scheme.get("config_groups") or {}).items():
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        wrong = {
            "weights.symmetric": (weights.get("symmetric", True), True),
            "weights.dynamic": (weights.get("dynamic", False), False),
            "weights.actorder": (weights.get("actorder") if weights.get("actorder") != "weight" else None, None),
            "input_activations.dynamic": (inputs.get("dynamic", False) if inputs else True, True),
            "output_activations": (group.get("output_activations"), None),
        }
        for field, (found, needed) in wrong.items():
            if found != needed:
                raise UserError(f"{path} has config_groups.{name}.{field}={short(found)}, and {short(needed)} is read.")


def _blocks(path: Path, scheme: Mapping[str, Any]) -> str:
    """Return the granularity of FP8 scales that are matrices, or "" if the config has none."""
    found = [scheme.get("weight_block_size")]
    found += [(group.get("weights") or {}).get("block_structure") for group in (scheme.get("config_groups") or {}).values()]
    sizes = {tuple(size) for size in found if isinstance(size, list)}
    if not sizes:
        return ""
    rows, columns = next(iter(sizes)) if len(sizes) == 1 and len(next(iter(sizes))) == 2 else (0, 0)
    try:
        return Cast.parse(f"e4m3 {'tile' if rows == 1 else 'block'}({columns if rows in (1, columns) else 0})").granularity
    except UserError:
        raise UserError(
            f"{path} has weight blocks of {short(sorted(sizes))}, and FP8 is read in blocks n x n or 1 x n, of a power of two."
        ) from None


# The model ------------------------------------------------------------------------------------------------------------


class Reader:
    """Fill a model on the meta device with the tensors of a folder, one layer at a time.

    Args:
        folder: A folder with config.json and safetensors.
        model: A model of transformers on the meta device, without weights in few bits.
        device: Device of the codes and parameters.
        dtype: Dtype of all other parameters, or None for that of the model.
    """

    def __init__(self, folder: Path, model: Any, device: torch.device | str, dtype: torch.dtype | None) -> None:
        self.model, self.device, self.dtype = model, torch.device(device), dtype
        self.config = folder / CONFIG
        self.scheme = read_json(self.config).get("quantization_config") or {}
        check_config(self.config, self.scheme)
        self.blocks = _blocks(self.config, self.scheme)
        self.shards = Shards(folder)
        for name, (path, _) in self.shards.tensors.items():
            if what := next((what for end, what in REFUSED.items() if name.endswith(end)), ""):
                raise UserError(f"{path} has the tensor {name[:200]!r}, {what}, which is not read.")

    def fill(self) -> None:
        """Replace layers in few bits by frozen ones, and fill everything else."""
        for site in find_sites(self.model):
            if site.parameter:
                self._experts(site)
            elif codes := self._codes(self._in_file(f"{site.name}.weight"), (site.out_features, site.in_features)):
                if not isinstance(site.module, nn.Linear):
                    raise UserError(f"The layer {site.name!r} has codes [in, out] in {self.shards.folder}: [out, in] is read.")
                replace_module(self.model, site.module, self._frozen(site, codes, site.module, site.name))
        self._others()
        self.model.tie_weights()
        self._leftovers()

    def _frozen(self, site: Site, codes: Codes, module: nn.Module, name: str) -> FrozenLinear:
        shape = (module.out_features, module.in_features)
        quantized = codes.read(self.shards, shape, self._wide(site), self.device)  # type: ignore[arg-type]
        divisor = 1.0 if not codes.tensor_scale else _number(self.shards, codes.tensor_scale)
        layer = FrozenLinear.of(module, quantized, name, codes.stored(self.shards, divisor))
        layer.belong_to(self.model)
        return layer

    def _wide(self, site: Site) -> torch.dtype:
        """Return the dtype of a layer's weight, were it not in few bits."""
        weight = getattr(site.module, site.parameter or "weight")
        return self.dtype or weight.dtype

    def _codes(self, weight: str, shape: tuple[int, int]) -> Codes | None:
        """Return the codes of a weight by its name in the file; None if the file has its numbers."""
        stem, entry = weight.removesuffix(".weight"), self.shards.entry
        packed, scale, inverse = f"{stem}.weight_packed", f"{stem}.weight_scale", f"{stem}.weight_scale_inv"
        if (codes := entry(packed)) is not None:
            if entry(scale) is None:
                raise UserError(f"{self.shards.folder} has {packed!r}, and no {scale!r}.")
            if codes.dtype == torch.int32:
                return self._integers(stem, shape)
            if codes.dtype != torch.uint8:
                raise UserError(self._unsupported(packed, "and packed codes are read in uint8 and int32"))
            if entry(f"{stem}.weight_global_scale") is not None:
                return Codes(packed, scale, Cast.parse("nvfp4"), f"{stem}.weight_global_scale")
            return Codes(packed, scale, Cast.parse("mxfp4"))
        if (codes := entry(weight)) is None or codes.dtype in WIDER:
            return None
        if codes.dtype not in (torch.float8_e4m3fn, torch.int8):
            raise UserError(self._unsupported(weight, "and codes are read in float8_e4m3fn, int8 and uint8"))
        scale = inverse if entry(inverse) is not None else scale
        if (scales := entry(scale)) is None:
            raise UserError(f"{self.shards.folder} has codes in {weight!r}, and neither weight_scale nor weight_scale_inv.")
        element = "int8" if codes.dtype == torch.int8 else "e4m3"
        if (
            scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
            and element == "e4m3"
            and scales.shape == (shape[0], -(-shape[1] // 32))
        ):
            return Codes(weight, scale, Cast.parse("mxfp8"))
        if scales.shape in ((), (1,), (1, 1)):
            kind = "tensor"
        elif scales.shape in ((shape[0],), (shape[0], 1)):
            kind = "row"
        elif self.blocks and element == "e4m3":
            kind = self.blocks
        else:
            raise UserError(self._unsupported(scale, f"and a weight {list(shape)} has no such scales in {self.config.name}"))
        return Codes(weight, scale, Cast.parse(f"{element} {kind}"))

    def _integers(self, stem: str, shape: tuple[int, int]) -> Codes:
        """Return the codes of a weight whose integers are in words of 32 bits."""
        packed, scale = f"{stem}.weight_packed", f"{stem}.weight_scale"
        if self.shards.entry(f"{stem}.weight_shape") is not None and self.shards.read(f"{stem}.weight_shape").tolist() != [
            *shape
        ]:
            raise UserError(f"The tensor '{stem}.weight_shape' of {self.shards.folder} has another shape than {list(shape)}.")
        bits = {shape[1] // 8: 4, shape[1] // 4: 8}.get(self.shards.tensors[packed][1].shape[-1], 0) if shape[1] % 8 == 0 else 0
        entry = self.shards.tensors[scale][1]
        groups = entry.shape[-1] if entry.shape[:1] == shape[:1] and len(entry.shape) == 2 else 0
        size = shape[1] // groups if groups and shape[1] % groups == 0 else 0
        if not bits or (size not in (32, 64, 128) and groups != 1):
            raise UserError(self._unsupported(scale, f"and integers of {list(shape)} are read in 4 or 8 bits, rows or groups"))
        kind = "row" if groups == 1 else f"tile({size}) bf16" if entry.dtype == torch.bfloat16 else f"tile({size})"
        return Codes(packed, scale, Cast.parse(f"int{bits} {kind}"))

    def _unsupported(self, name: str, why: str) -> str:
        path, entry = self.shards.tensors[name]
        return f"The tensor {name!r} of {path} has the dtype {_plain(entry.dtype)} and the shape {list(entry.shape)}, {why}."

    # Experts -----------------------------------------------------------------------------------------------------------

    def _experts(self, site: Site) -> None:
        """Replace a matrix of experts whose codes are in the file: stacked, or by themselves."""
        home: Any = site.module
        parts = self._stacked(site) or self._single(site)
        if parts is None:
            return
        home.register_parameter(site.parameter, None)
        experts.install(home, site.parameter, FrozenExperts(map(FrozenExpert, parts), bool(home.is_transposed)))

    def _stacked(self, site: Site) -> list[list[FrozenLinear]] | None:
        """Return the experts of gpt-oss: their blocks [experts, out, in / 32, 16] are bytes of two codes."""
        codes = Codes(f"{site.name}_blocks", f"{site.name}_scales", Cast.parse("mxfp4"))
        if self.shards.entry(codes.codes) is None:
            return None
        if self.shards.entry(codes.scale) is None:
            raise UserError(f"{self.shards.folder} has {codes.codes!r}, and no {codes.scale!r}.")
        shape, dtype = (site.out_features, site.in_features), self._wide(site)
        for name in (codes.codes, codes.scale):
            if self.shards.tensors[name][1].dtype != torch.uint8:
                raise UserError(self._unsupported(name, "and MXFP4 is read in uint8"))
        blocks, scales = self.shards.read(codes.codes).to(self.device), self.shards.read(codes.scale).to(self.device)
        file, count = codes.stored(self.shards), len(getattr(site.module, site.parameter))
        if len(blocks) != count or len(scales) != count:
            raise UserError(self._unsupported(codes.codes, f"and its config has {count} experts"))
        made = []
        for number in range(count):
            quantized = codes.quantized(self.shards, blocks[number], scales[number], shape, dtype, self.device)
            made.append([FrozenLinear.of(_linear(shape), quantized, f"{site.name}.{number}", file)])
        return made

    def _single(self, site: Site) -> list[list[FrozenLinear]] | None:
        """Return experts that files have one by one, such as experts.3.gate_proj."""
        weight = getattr(site.module, site.parameter)
        count, rows, columns = weight.shape
        # Numbers of rows in place of weights show which rows of which expert each matrix of the file has.
        numbers = torch.arange(count * rows).view(count, rows, 1).expand(count, rows, 2).contiguous()
        pieces = self._names({site.name: numbers})
        order = sorted((int(piece.view(-1)[0]), name, piece.numel() // 2) for name, piece in pieces.items())
        found = {name: self._codes(name, (height, columns)) for _, name, height in order}
        if not any(found.values()):
            return None
        first = next(name for name in found if found[name] is not None)
        if site.module.is_transposed or sum(height for *_, height in order) != count * rows or not all(found.values()):
            raise UserError(
                f"{self.shards.folder} has experts in few bits, such as {first!r}, in a layout that is not read: all of them "
                "have codes [out, in]."
            )
        made: list[list[FrozenLinear]] = [[] for _ in range(count)]
        for begin, name, height in order:
            codes = found[name]
            assert codes is not None
            made[begin // rows].append(self._frozen(site, codes, _linear((height, columns)), name.removesuffix(".weight")))
        return made

    # Everything else ---------------------------------------------------------------------------------------------------

    def _names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under the names, and in the pieces, that files have."""
        from transformers.core_model_loading import revert_weight_conversion

        found: dict[str, Tensor] = revert_weight_conversion(self.model, tensors)
        return found

    def _in_file(self, name: str) -> str:
        """Return the name in the file of a tensor that is stored by itself."""
        names = list(self._names({name: torch.empty(2, 2, device="meta")}))
        return names[0] if len(names) == 1 else name

    def _others(self) -> None:
        """Fill parameters and buffers. Those that files do not have are computed by the model, as rotary frequencies are."""
        for path, module in self.model.named_modules():
            computed = module._non_persistent_buffers_set & {
                name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta
            }
            for name in computed:
                module._buffers[name] = torch.full_like(module._buffers[name], torch.nan, device=self.device)
            if computed:
                self.model._init_weights(module)
            if any(bool(module._buffers[name].isnan().any()) for name in computed):
                raise UserError(
                    f"{self.config} describes a model with computed buffers in {path!r}, which is not read in few bits."
                )
        seen: dict[int, str] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen[id(tensor)] = name
                self._fill(name, tensor)

    def _fill(self, name: str, tensor: Tensor) -> None:
        pieces = self._names({name: torch.empty(tensor.shape, device="meta")})
        if lacking := [each for each in pieces if each not in self.shards.tensors]:
            raise UserError(f"{self.shards.folder} lacks the tensor {lacking[0]!r}, which its config asks for.")
        if len(pieces) > 1:
            numbers = torch.arange(tensor[..., 0].numel()).view(*tensor.shape[:-1], 1).expand(*tensor.shape[:-1], 2)
            order = self._names({name: numbers.contiguous()})
            names = sorted(pieces, key=lambda each: int(order[each].view(-1)[0]))
        else:
            names = list(pieces)
        value = torch.cat([self.shards.read(each) for each in names]) if len(names) > 1 else self.shards.read(names[0])
        if value.numel() != tensor.numel() or (len(names) == 1 and value.shape != tensor.shape):
            raise UserError(
                f"The tensor {names[0]!r} of {self.shards.folder} has the shape {list(value.shape)}, and its config asks for "
                f"{list(tensor.shape)}."
            )
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        value = value.view(tensor.shape).to(self.device, dtype)
        parent, _, last = name.rpartition(".")
        module = self.model.get_submodule(parent)
        if isinstance(tensor, nn.Parameter):
            module._parameters[last] = nn.Parameter(value, requires_grad=value.is_floating_point())
        else:
            module._buffers[last] = value

    def _leftovers(self) -> None:
        """Raise if the files have tensors that the model does not ask for."""
        ignored = tuple(self.model._keys_to_ignore_on_load_unexpected or ())
        state = self.model.state_dict()
        for name in sorted(self.shards.unread):
            if any(re.search(pattern, name) for pattern in (*ignored, r"rotary_emb\.inv_freq$")):
                continue
            path, _ = self.shards.tensors[name]
            if name in state:  # of tied tensors, the model has one
                if torch.equal(self.shards.read(name).to(state[name]), state[name]):
                    continue
                raise UserError(f"{path} has a {name!r} of its own, which its config ties to another tensor.")
            raise UserError(f"{path} has the tensor {name[:200]!r}, which its config does not ask for.")


def _linear(shape: tuple[int, int]) -> nn.Linear:
    return nn.Linear(shape[1], shape[0], bias=False, device="meta")


def as_in_file(parts: Sequence[FrozenLinear]) -> dict[str, Tensor]:
    """Return the tensors of frozen weights as the file has them, codes first, byte by byte; parts are stacked in one."""
    file = parts[0].file
    assert file is not None
    codes, scale = (
        torch.cat([getattr(part, name).contiguous().view(-1).view(torch.uint8) for part in parts])
        for name in ("weight_codes", "weight_scale")
    )
    if file.codes_dtype == torch.int32:
        codes = codes.bitwise_xor_(OFFSETS[Cast.parse(parts[0].stored.cast).element.bits])
    found = {file.codes: codes.view(file.codes_dtype).view(file.codes_shape)}
    found[file.scale] = scale.view(file.scale_dtype).view(file.scale_shape)
    if file.tensor_scale:
        found[file.tensor_scale] = torch.tensor([file.divisor], device=codes.device)
    if file.codes_dtype == torch.int32:
        found[file.codes.replace("weight_packed", "weight_shape")] = torch.tensor(parts[0].stored.shape)
    return found

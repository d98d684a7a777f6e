"""Muon's orthogonalization (Jordan et al., 2024): Newton-Schulz iterations of whole matrices, which ranks share.

An iteration keeps the singular vectors of a matrix X and brings its singular values towards 1:

    X = u / max(|u|, eps)        then each time: A = X X^T, X <- a X + (b A + c A A) X

The sums are those of torch.optim.Muon. Bits depend on a matrix's own shape and numbers only: matrices are multiplied one
parameter at a time, never in batches that depend on the number of ranks. Experts [experts, rows, columns] are one batch of
matrices.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.ops.ranks import as_matrix, sharded_like, shards
from dither.optim.groups import Member


def orthogonalize(
    u: Tensor, coefficients: Sequence[float], steps: int, eps: float, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return the matrices [..., rows, columns] with singular values near 1, in `dtype`.

    In bfloat16, each product is summed in float32 and rounded once. A CPU multiplies float32 copies, which is faster there.

    >>> u = torch.diag(torch.tensor([3.0, 1.0]))
    >>> orthogonalize(u, (1.5, -0.5, 0.0), 30, 1e-7, torch.float32)
    tensor([[1., 0.],
            [0., 1.]])
    """
    if u.numel() == 0:
        return u.to(dtype)
    one, three, five = coefficients
    tall = u.shape[-2] > u.shape[-1]
    u = u if dtype == torch.float32 else u.bfloat16()  # as it is gathered from ranks
    size = torch.linalg.vector_norm(u, dim=(-2, -1), keepdim=True, dtype=torch.float64).float()
    x = u.float() / size.clamp(min=eps)
    x = (x.mT if tall else x).contiguous()
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    wide = dtype == torch.float32 or x.is_cpu

    def rounded(y: Tensor) -> Tensor:
        return y if dtype == torch.float32 else y.bfloat16().float() if wide else y.bfloat16()

    with torch.autocast(x.device.type, enabled=False):
        x = rounded(x)
        for _ in range(steps):
            gram = rounded(x @ x.mT)
            x = rounded(add(x, rounded(add(gram, gram, gram, beta=three, alpha=five)), x, beta=one))
    return (x.mT if tall else x).to(dtype).contiguous()


def orthogonalize_members(members: Sequence[Member], parts: list[Tensor]) -> None:
    """Replace this rank's parts [rows, columns] of the members' directions by those of the orthogonalized directions.

    The n ranks along a mesh's longest dimension take turns: each orthogonalizes every n-th matrix, which all of them gather,
    and sends it to the others.
    """
    meshes: dict[Any, list[int]] = {}
    for number, (member, part) in enumerate(zip(members, parts, strict=True)):
        if isinstance(member.parameter, DTensor):
            meshes.setdefault(member.parameter.device_mesh, []).append(number)
        else:
            parts[number] = as_matrix(_whole(member, part.view(member.parameter.shape)))
    for mesh, numbers in meshes.items():
        dimension = max(range(mesh.ndim), key=mesh.size)
        ranks, own = mesh.size(dimension), mesh.get_local_rank(dimension)
        for first in range(0, len(numbers), ranks):
            turn = numbers[first : first + ranks]
            mine = torch.empty(0)
            for rank, number in enumerate(turn):
                member, part = members[number], parts[number]
                part = part if _dtype(member) == torch.float32 else part.bfloat16()
                part = part.view(member.parameter.to_local().shape)  # type: ignore[attr-defined]
                whole = sharded_like(member.parameter, part).full_tensor()  # type: ignore[attr-defined]
                mine = whole if rank == own else mine
            if own < len(turn):
                mine = _whole(members[turn[own]], mine)
            for rank, number in enumerate(turn):
                parameter = members[number].parameter
                whole = mine if rank == own else parts[number].new_empty(parameter.shape, dtype=_dtype(members[number]))
                if ranks > 1:
                    dist.broadcast(whole, group=mesh.get_group(dimension), group_src=rank)
                matrix, columns = as_matrix(whole), parts[number].shape[1]
                held = [matrix[s.row : s.row + s.end - s.start, s.column : s.column + columns] for s in shards(parameter)]
                parts[number] = torch.cat(held).contiguous() if held else parts[number].to(whole.dtype)


def _dtype(member: Member) -> torch.dtype:
    return torch.float32 if member.group["ns_dtype"] == "fp32" else torch.bfloat16


def _whole(member: Member, direction: Tensor) -> Tensor:
    group = member.group
    return orthogonalize(direction, group["ns_coefficients"], group["ns_steps"], group["eps"], _dtype(member))

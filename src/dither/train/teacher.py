"""Distillation: the loss of a model that also learns the predictions of another one, its teacher.

Shapes: N tokens, V vocabulary, K of the teacher's most likely tokens.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from dither import files
from dither.errors import UserError
from dither.models import CausalLM
from dither.models.causal import PlainLM
from dither.models.open import find_model, open_model
from dither.ops.reference.loss import IGNORE
from dither.train.config import Qat

CHUNK = 1 << 24
"""Logits that are compared at once, in float32: 64 MiB for each model."""

DESCRIPTION, VERSION = "teacher.json", 1


class Predictions(NamedTuple):
    """The teacher's distributions of some tokens: logarithms of all probabilities, or of the largest ones."""

    logarithms: Tensor
    """[N, V], or float16 [N, K] in descending order."""
    tokens: Tensor | None = None
    """int32 [N, K], or None for all tokens."""


class Teacher:
    """A model whose predictions another one learns. It stays as it is, whole on every rank.

    Args:
        settings: The section [qat].
        student: The model that learns, which must have the same vocabulary.
        device: The device of both.
    """

    def __init__(self, settings: Qat, student: CausalLM, device: torch.device) -> None:
        assert settings.teacher is not None
        found, self.settings = find_model(settings.teacher), settings
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = open_model(found, device=device, dtype=dtype).model.eval().requires_grad_(False)
        words, own = (model.embedding.num_embeddings for model in (self.model, student))
        if words != own:
            raise UserError(
                f"The teacher {settings.teacher!r} has a vocabulary of {words} tokens, and the model has {own}: name a teacher "
                "with the same tokenizer, such as the model of --from."
            )
        self.cache: Cache | None = None
        if settings.cache is not None:
            described = {"teacher": found.sha256(), "top_k": settings.top_k, "temperature": settings.temperature}
            self.cache = Cache(Path(settings.cache), {"version": VERSION, "vocabulary": words, **described}, settings.top_k)

    def loss(self, logits_BSV: Tensor, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the mean over targets of (1 - w) cross entropy + w T^2 KL(teacher || model), 0-d float32."""
        predictions = self.predictions(inputs_BS)
        logits_NV, targets_N = logits_BSV.flatten(0, 1), targets_BS.flatten()
        weight, temperature = self.settings.teacher_weight, self.settings.temperature
        loss: Tensor = _Distillation.apply(logits_NV, targets_N, predictions, weight, temperature)  # type: ignore[no-untyped-call]
        return loss

    @torch.no_grad()
    def predictions(self, inputs_BS: Tensor) -> Callable[[slice], Predictions]:
        """Return a function from rows to the teacher's predictions for them, [B * S] rows in all."""
        if not self.settings.top_k:
            return self._compute(inputs_BS)
        if self.cache is None:
            return _rows(self._largest(inputs_BS))
        known = [self.cache.read(sequence) for sequence in inputs_BS.cpu().unbind()]
        missing = [number for number, each in enumerate(known) if each is None]
        if missing:
            made = self._largest(inputs_BS[missing])
            length = inputs_BS.shape[1]
            for place, number in enumerate(missing):
                part = Predictions(*(each[place * length :][:length].cpu() for each in made if each is not None))
                self.cache.write(inputs_BS[number].cpu(), part)
                known[number] = part
        found = [each for each in known if each is not None]
        stacked = (torch.cat([getattr(each, name) for each in found]).to(inputs_BS.device) for name in Predictions._fields)
        return _rows(Predictions(*stacked))

    def _compute(self, inputs_BS: Tensor) -> Callable[[slice], Predictions]:
        """Return a function that computes the logits of some rows at a time, where the model allows that."""
        if isinstance(self.model, PlainLM):
            hidden, output = self.model.hidden(inputs_BS).flatten(0, 1), self.model.lm_head
            logits: Callable[[slice], Tensor] = lambda rows: output(hidden[rows])  # noqa: E731
        else:
            logits = self.model.logits(inputs_BS).flatten(0, 1).__getitem__
        return lambda rows: Predictions((logits(rows).float() / self.settings.temperature).log_softmax(-1))

    def _largest(self, inputs_BS: Tensor) -> Predictions:
        compute, words = self._compute(inputs_BS), self.model.embedding.num_embeddings
        found = [compute(rows).logarithms.topk(min(self.settings.top_k, words)) for rows in _chunks(inputs_BS.numel(), words)]
        # Rounded alike with and without a cache.
        return Predictions(torch.cat([each.values for each in found]).half(), torch.cat([each.indices for each in found]).int())


def _rows(predictions: Predictions) -> Callable[[slice], Predictions]:
    return lambda rows: Predictions(*(each[rows] for each in predictions if each is not None))


def _chunks(rows: int, words: int) -> list[slice]:
    size = max(1, CHUNK // words)
    return [slice(start, start + size) for start in range(0, rows, size)]


def divergence(logits_NV: Tensor, teacher: Predictions, temperature: float) -> Tensor:
    """Return KL(teacher || model) of each token, float32 [N]; with the teacher's most likely tokens, all others are one.

    >>> p, q = torch.tensor([[0.5, 0.3, 0.1, 0.1]]), torch.tensor([[0.25, 0.25, 0.25, 0.25]])
    >>> divergence(q.log(), Predictions(p.log()), 1.0), divergence(q.log(), Predictions(*p.log().topk(2)), 1.0)
    (tensor([0.2180]), tensor([0.2180]))
    """
    own = (logits_NV.float() / temperature).log_softmax(-1)
    theirs = teacher.logarithms.float()
    if teacher.tokens is None:
        return (theirs.exp() * (theirs - own)).sum(-1)
    own = own.gather(1, teacher.tokens.long())
    rests = [(1 - each.exp().sum(-1)).clamp(min=1e-6) for each in (theirs, own)]
    return (theirs.exp() * (theirs - own)).sum(-1) + rests[0] * (rests[0].log() - rests[1].log())


class _Distillation(torch.autograd.Function):
    """The loss of `Teacher.loss`. Gradients are computed in forward, chunk by chunk, in the dtype of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        targets_N: Tensor,
        teacher: Callable[[slice], Predictions],
        weight: float,
        temperature: float,
    ) -> Tensor:
        counted = targets_N != IGNORE
        count, total = counted.sum(), torch.zeros((), device=logits_NV.device)
        gradients = torch.empty_like(logits_NV)
        for rows in _chunks(*logits_NV.shape):
            predictions = teacher(rows)
            with torch.enable_grad(), torch.autocast(logits_NV.device.type, enabled=False):
                part = logits_NV[rows].detach().float().requires_grad_()
                kl = divergence(part, predictions, temperature).where(counted[rows], 0.0).sum()
                entropy = F.cross_entropy(part, targets_N[rows], ignore_index=IGNORE, reduction="sum")
                loss = (1 - weight) * entropy + weight * temperature**2 * kl
                gradients[rows] = torch.autograd.grad(loss, part)[0] / count
            total += loss.detach()
        ctx.save_for_backward(gradients)
        mean: Tensor = total / count
        return mean

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradients,) = ctx.saved_tensors
        return gradients * grad.to(gradients.dtype), None, None, None, None


class Cache:
    """A folder of predictions: a file per sequence, whose name is the SHA-256 of its tokens, with a SHA-256 of its own.

    Args:
        folder: The folder, which is created if there is none.
        described: What the predictions depend on besides tokens. A folder of other predictions is refused.
        top_k: Predictions per token.
    """

    def __init__(self, folder: Path, described: dict[str, Any], top_k: int) -> None:
        self.folder, self.top_k, path = folder, min(top_k, described["vocabulary"]), folder / DESCRIPTION
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                if any(folder.iterdir()):
                    raise UserError(f"qat.cache={str(folder)!r} is not empty and has no {DESCRIPTION}: name another folder.")
                files.replace(path, files.to_json(described, DESCRIPTION))
            known = files.from_json(files.read(path))
        except (OSError, files.Refused) as error:
            raise UserError(f"The cache of the teacher in {str(folder)!r} cannot be used: {error}.") from None
        other = [key for key in described if not isinstance(known, dict) or known.get(key) != described[key]]
        if other:
            raise UserError(
                f"The cache {str(path)!r} has the predictions of another {other[0]}: name another folder with qat.cache, or "
                "remove it."
            )

    def read(self, tokens: Tensor) -> Predictions | None:
        """Return the predictions after each token of a sequence, or None if they are not there."""
        path = self._path(tokens)
        try:
            data = files.read(path)
        except files.Refused as error:
            if not path.exists():
                return None
            raise UserError(f"The teacher's predictions {str(path)!r} cannot be read: {error}.") from None
        digest, whole, size = data[:32], data[32:], len(tokens) * self.top_k
        if len(whole) != 6 * size or hashlib.sha256(whole).digest() != digest:
            raise UserError(f"The teacher's predictions {str(path)!r} are damaged: remove the file, and they are made again.")
        logarithms, indices = np.frombuffer(whole, "<f2", size), np.frombuffer(whole, "<i4", size, 2 * size)
        shape = (len(tokens), self.top_k)
        return Predictions(*(torch.from_numpy(each.copy()).view(shape) for each in (logarithms, indices)))

    def write(self, tokens: Tensor, predictions: Predictions) -> None:
        """Keep the predictions of a sequence."""
        assert predictions.tokens is not None
        data = predictions.logarithms.numpy().astype("<f2").tobytes() + predictions.tokens.numpy().astype("<i4").tobytes()
        path = self._path(tokens)
        try:
            path.parent.mkdir(exist_ok=True)
            files.replace(path, hashlib.sha256(data).digest() + data)
        except OSError as error:
            raise UserError(f"The teacher's predictions {str(path)!r} cannot be written: {error}.") from None

    def _path(self, tokens: Tensor) -> Path:
        name = hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()
        return self.folder / name[:2] / name

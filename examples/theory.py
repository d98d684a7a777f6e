"""Bounds of "Stochastic Rounding for LLM Training: Theory and Practice" (Ozkara, Yu, Park, 2025), as functions.

Variables have the paper's names:

    x        weights, each on a grid of numbers that are Delta apart
    alpha    the learning rate
    beta2    the decay of Adam's second moment; its first moment is left out (beta1 = 0)
    epsilon  the constant under Adam's root: u = g / sqrt(epsilon + v)
    F        the loss, F_0 at the start and at least F_star; f its value on a batch
    R        a bound of every element of a batch's gradient
    L        a bound of the loss's curvature: |grad F(x) - grad F(y)| <= L |x - y|
    d, T     the number of weights, and of steps
    G_T      (1/T) sum over steps of E|grad F(x_t)|^2, what the theorems bound

`examples/bounds.py` compares all of them with simulations. docs/stochastic-rounding.md says which of the paper's statements
hold as printed, and which do not.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dither.errors import UserError

# Implicit regularization (section 4.1) ----------------------------------------------------------------------------------


def perturbation_variance(x: Tensor, gradient: Tensor, alpha: float, Delta: float) -> Tensor:
    """Return E[xi^2] of each weight (Lemma 1): the variance of a rounded step's error, in units of the learning rate.

        xi = (Q(x - alpha g) - (x - alpha g)) / alpha        E[xi^2] = (up - z) (z - down) / alpha^2,  z = x - alpha g

    `up` and `down` are the neighbours of z on the grid. The paper prints the second factor with the other sign.

    >>> perturbation_variance(torch.tensor([1.0]), torch.tensor([0.5]), alpha=0.1, Delta=0.25)  # 0.05 * 0.20 / 0.01
    tensor([1.0000])
    """
    _positive(alpha=alpha, Delta=Delta)
    z = (x - alpha * gradient) / Delta
    part = z - z.floor()
    return part * (1 - part) * (Delta / alpha) ** 2


def modified_loss(loss: Tensor | float, x: Tensor, gradient: Tensor, alpha: float, Delta: float) -> Tensor:
    """Return F_SR of Theorem 1: F + alpha/4 |grad F|^2 + alpha/4 E|xi|^2.

    It is the mean, over roundings, of F + alpha/4 |step / alpha|^2: gradient descent's own modified loss, with the actual
    step. The theorem says that the mean path of stochastic rounding descends on it. It does not: the mean of a
    rounded step is the unrounded step, so rounding does not change the mean path if the gradient is linear. The proof swaps a
    derivative and an expectation over roundings that depend on x.
    """
    rest = perturbation_variance(x, gradient, alpha, Delta).sum() + gradient.square().sum()
    return torch.as_tensor(loss) + alpha / 4 * rest


def modified_loss_limit(loss: Tensor | float, gradient: Tensor, Delta: float) -> Tensor:
    """Return the limit of F_SR for alpha -> 0 (Theorem 1): F + 1/4 sum_i Delta |grad F_i|.

    The weights must be on the grid, which the paper does not say: elsewhere F_SR grows like 1 / alpha.
    """
    _positive(Delta=Delta)
    return torch.as_tensor(loss) + Delta / 4 * gradient.abs().sum()


# Convergence of Adam (sections 4.2 and 4.3) -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam without momentum on a loss, as the theorems assume it.

        v_t = beta2 v_{t-1} + g_t^2        x_t = Q(x_{t-1} - alpha_t g_t / sqrt(epsilon + v_t))
        alpha_t = alpha sqrt((1 - beta2^t) / (1 - beta2)), which makes alpha the learning rate that Adam is usually given

    The proofs need gradients of at most R - sqrt(epsilon), as Defossez et al. assume; the paper says R.
    """

    alpha: float
    """The learning rate."""
    beta2: float
    """The decay of the second moment."""
    epsilon: float
    """The constant under the root."""
    R: float
    """A bound of every element of a batch's gradient."""
    L: float
    """A bound of the loss's curvature."""
    d: int
    """Number of weights."""
    gap: float
    """F_0 - F_star: the largest possible decrease of the loss."""

    def __post_init__(self) -> None:
        _positive(alpha=self.alpha, epsilon=self.epsilon, R=self.R, L=self.L, d=self.d)
        if not 0 < self.beta2 < 1:
            raise UserError(f"beta2 is between 0 and 1, not {self.beta2!r}.")
        if not 0 <= self.gap < math.inf:
            raise UserError(f"The gap F_0 - F_star is a non-negative number, not {self.gap!r}.")

    @property
    def _root(self) -> float:
        return math.sqrt(1 - self.beta2)

    @property
    def _log(self) -> float:
        """Return ln(1 + R^2 / (epsilon (1 - beta2))), Lemma 4's bound of the growth of the second moment."""
        return math.log1p(self.R**2 / (self.epsilon * (1 - self.beta2)))

    def exact_bound(self, T: int) -> float:
        """Return the bound of G_T without rounding, the terms that Theorems 2 and 3 share.

        2R (F_0 - F_star) / (alpha T) + (2 R d / T) (2 R / sqrt(1 - beta2) + alpha L / (1 - beta2)) (log + T ln(1 / beta2)),
        with log = ln(1 + R^2 / (epsilon (1 - beta2))). log / T vanishes for large T; the paper's text hides it in A.
        """
        _positive(T=T)
        first = 2 * self.R * self.gap / (self.alpha * T)
        factor = 2 * self.R / self._root + self.alpha * self.L / (1 - self.beta2)
        return first + 2 * self.R * self.d / T * factor * (self._log + T * math.log(1 / self.beta2))

    def adam_gap(self) -> float:
        """Return the limit of `exact_bound` for large T, Adam's own gap.

        2 R d (2 R / sqrt(1 - beta2) + alpha L / (1 - beta2)) ln(1 / beta2)
        """
        factor = 2 * self.R / self._root + self.alpha * self.L / (1 - self.beta2)
        return 2 * self.R * self.d * factor * math.log(1 / self.beta2)

    def rounding_error(self, T: int, Delta: float) -> float:
        """Return the quantization error of Theorem 2, which stochastic rounding adds to the bound.

        R d Delta L / (T sqrt(1 - beta2)) (sqrt(T log) + T sqrt(ln(1 / beta2)))
        """
        _positive(T=T, Delta=Delta)
        grows = math.sqrt(T * self._log) + T * math.sqrt(math.log(1 / self.beta2))
        return self.R * self.d * Delta * self.L / (T * self._root) * grows

    def stochastic_bound(self, T: int, Delta: float) -> float:
        """Return Theorem 2's bound of G_T with stochastic rounding: `exact_bound` and `rounding_error`.

        >>> adam = Adam(alpha=1e-3, beta2=0.999, epsilon=1e-8, R=1.0, L=1.0, d=1, gap=1.0)
        >>> round(adam.stochastic_bound(10**6, 0.01), 3), round(adam.adam_gap(), 3)
        (0.145, 0.129)
        """
        return self.exact_bound(T) + self.rounding_error(T, Delta)

    def nearest_bound(self, T: int, Delta: float, *, as_printed: bool = False) -> float:
        """Return Theorem 3's bound of G_T with rounding to nearest.

        Twice the quantization error of Theorem 2, and the error of the bias, which does not vanish and grows with
        Delta / alpha: 2 R d (R Delta + L Delta^2) / alpha. The paper prints sqrt(1 - beta2) in place of 2 R (`as_printed`),
        which does not follow from its equation (14), and which a simulation exceeds.

        >>> adam = Adam(alpha=1e-3, beta2=0.999, epsilon=1e-8, R=1.0, L=1.0, d=1, gap=1.0)
        >>> round(adam.nearest_bound(10**6, 0.01), 2), round(adam.nearest_bound(10**6, 0.01, as_printed=True), 2)
        (20.36, 0.48)
        """
        factor = self._root if as_printed else 2 * self.R
        bias = factor * self.d * (self.R * Delta + self.L * Delta**2) / self.alpha
        return self.exact_bound(T) + 2 * self.rounding_error(T, Delta) + bias

    def negligible_spacings(self) -> tuple[float, float]:
        """Return Corollary 1's two spacings; far below either, the rounding error is small compared with Adam's own gap.

        alpha / sqrt(1 - beta2) sqrt(ln(1 / beta2)), which the learning rate sets, and R / L sqrt(ln(1 / beta2)), which the
        problem sets. With beta2 = 0.95 the first is 1.01 alpha.

        >>> by_rate, by_problem = Adam(alpha=1e-3, beta2=0.95, epsilon=1e-8, R=1.0, L=1.0, d=1, gap=1.0).negligible_spacings()
        >>> round(by_rate, 6), round(by_problem, 3)
        (0.001013, 0.226)
        """
        log = math.sqrt(math.log(1 / self.beta2))
        return self.alpha / self._root * log, self.R / self.L * log

    def rounding_ratio(self, Delta: float) -> float:
        """Return the limit of Theorem 2's rounding error for large T, divided by Adam's own gap: Corollary 1 as a number.

        Delta / (2 (2 b + a)), where a and b are the spacings of `negligible_spacings`, by rate and by problem.
        """
        _positive(Delta=Delta)
        by_rate, by_problem = self.negligible_spacings()
        return Delta / (2 * (2 * by_problem + by_rate))


def step_error_bound(update: Tensor, alpha: float, Delta: float) -> Tensor:
    """Return Lemma 2's bound of the squared error of a stochastically rounded step of each weight: Delta alpha |u|.

    The weight must be on the grid before the step, which the proof uses and the lemma does not say.
    """
    _positive(alpha=alpha, Delta=Delta)
    return Delta * alpha * update.abs()


def correlation(rho: float, Delta: float = 0.0) -> float:
    """Return Proposition 1's correlation of gradients at two steps: rho^2 / (1 + rho^2 + Delta^2), Delta = 0 without rounding.

    >>> correlation(1.0), round(correlation(1.0, 0.4), 3)
    (0.5, 0.463)
    """
    return rho**2 / (1 + rho**2 + Delta**2)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise UserError(f"{name} is a positive number, not {value!r}.")

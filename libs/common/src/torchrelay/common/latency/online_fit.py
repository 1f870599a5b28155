"""A sum of non-negative costs, learned online: time = c0 * x0 + c1 * x1 + ...

Recursive least squares with forgetting (Haykin, *Adaptive Filter Theory*; kept as information matrix and vector), with
four changes that make it usable for predictions from the first step on:

- *Relative*: errors are weighed in percent, so that short steps are fitted as well as long ones.
- *Directional forgetting* (Cao and Schwartz, Automatica 36(11), 2000): a measurement fades older ones only in its own
  direction. A night of single requests does not erase the cost of a batch.
- *Non-negative*: the minimum over all c >= 0 (Lawson and Hanson, *Solving Least Squares Problems*, ch. 23); with so few
  costs all sets of zeros are tried.
- *Robust*: beyond half the usual error the loss is linear (Huber, 1964), so that what is learned is nearly the median:
  steps that share their cores are interrupted now and then, and their mean is what hardly any step takes. Errors that
  are nearly all on one side count fully again, so a device that has slowed down is followed.

The initial guess is a *shape*, the ratio of the costs. The first measurement sets the scale, later ones replace the
guess in the directions they cover.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product

_TRUST = 0.005  # weight of the first guess, in measurements
_ERROR_STEPS = 64  # averaged in ``error``
_MIN_USUAL_ERROR = 0.02
_ROBUST = 0.5  # times the usual error
_SIDE_STEPS = 16  # averaged in the mean sign; of half as many all are on one side by chance once in 256 times
_MIN_GUESS_PART = 1e-4  # lower bound of a prediction, relative to the first guess


class OnlineFit:
    """``shape``: initial ratio of the costs, in any unit. ``window``: effective number of measurements."""

    def __init__(self, shape: Sequence[float], window: int = 64) -> None:
        self.num_steps = 0
        self.error = 0.0  # mean of |measured - predicted| / predicted recently, each at most 1
        self._shape = tuple(shape)
        self._forget = 1 / window
        self._usual = 1.0  # the usual error; at first none is unusual
        self._side = 0.0  # mean sign of late errors: 1 or -1 if all are on one side
        # In units of the first guess, for numerical scale.
        self._gains = [1.0] * len(shape)
        self._vector = [_TRUST] * len(shape)
        self._matrix = [[_TRUST * (i == j) for j in range(len(shape))] for i in range(len(shape))]

    @property
    def costs(self) -> tuple[float, ...]:
        """Cost per unit; the shape itself before the first measurement."""
        return tuple(guess * gain for guess, gain in zip(self._shape, self._gains, strict=True))

    def predict(self, amounts: Sequence[float]) -> float:
        return sum(cost * amount for cost, amount in zip(self.costs, amounts, strict=True))

    def observe(self, amounts: Sequence[float], measured: float) -> None:
        """Learns from ``amounts`` that took ``measured`` > 0; at least one amount is positive."""
        if not self.num_steps:
            scale = measured / sum(guess * amount for guess, amount in zip(self._shape, amounts, strict=True))
            self._shape = tuple(guess * scale for guess in self._shape)
        # A prediction of zero (no step had these amounts) gives nothing to compare with.
        predicted = self.predict(amounts) or measured
        residual = abs(measured - predicted) / predicted
        self.num_steps += 1
        self.error += (min(residual, 1.0) - self.error) / min(self.num_steps, _ERROR_STEPS)
        side = math.copysign(1.0, measured - predicted)
        self._side += (side - self._side) / _SIDE_STEPS
        weight = 1.0 if residual <= _ROBUST * self._usual else _ROBUST * self._usual / residual
        weight = max(weight, 2 * side * self._side - 1)
        self._usual += (min(residual, 3 * self._usual) - self._usual) / 32
        self._usual = max(self._usual, _MIN_USUAL_ERROR)
        guessed = [guess * amount for guess, amount in zip(self._shape, amounts, strict=True)]
        unit = max(predicted, _MIN_GUESS_PART * sum(guessed))  # a much smaller unit makes the matrix singular
        self._learn([part / unit for part in guessed], measured / unit, weight)
        self._gains = least_squares(self._matrix, self._vector)

    def _learn(self, parts: Sequence[float], target: float, weight: float) -> None:
        matrix, vector = self._matrix, self._vector
        along = [sum(a * part for a, part in zip(row, parts, strict=True)) for row in matrix]
        known = sum(a * part for a, part in zip(along, parts, strict=True))
        fade = self._forget * weight / known
        faded = fade * sum(b * part for b, part in zip(vector, parts, strict=True))
        for i, (row, part) in enumerate(zip(matrix, parts, strict=True)):
            vector[i] += weight * part * target - along[i] * faded
            left, gained = fade * along[i], weight * part
            for j, other in enumerate(parts):
                row[j] += gained * other - left * along[j]


def least_squares(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    """The x >= 0 that minimizes x'Ax/2 - b'x, for a symmetric positive definite A."""
    size = len(vector)
    best, least = [0.0] * size, 0.0
    for num_free in range(size, 0, -1):
        for free in combinations(range(size), num_free):
            solved = _solve([[matrix[i][j] for j in free] for i in free], [vector[i] for i in free])
            value = -sum(x * vector[i] for x, i in zip(solved, free, strict=True)) / 2
            if min(solved) >= 0 and value < least:
                best, least = [0.0] * size, value
                for x, i in zip(solved, free, strict=True):
                    best[i] = x
        if num_free == size and least < 0:
            break  # the unconstrained minimum is feasible
    return best


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gaussian elimination, without pivoting: the matrix is positive definite."""
    size = len(vector)
    for i, j in product(range(size), range(size)):
        if j > i:
            factor = matrix[j][i] / matrix[i][i]
            vector[j] -= factor * vector[i]
            for k in range(i, size):
                matrix[j][k] -= factor * matrix[i][k]
    for i in reversed(range(size)):
        vector[i] -= sum(matrix[i][k] * vector[k] for k in range(i + 1, size))
        vector[i] /= matrix[i][i]
    return vector

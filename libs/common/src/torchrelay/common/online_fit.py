"""A sum of costs, none of them negative, learned online: time = c0 * x0 + c1 * x1 + ...

Least squares with forgetting (the RLS of Haykin, *Adaptive Filter Theory*, kept as information matrix and vector), with
four changes that make it fit for predictions from the first step on:

- *Relative*: a measurement counts by its error in percent, so that short steps are learned as well as long ones.
- *Directional forgetting* (Cao and Schwartz, Automatica 36(11), 2000): a measurement makes older ones fade only where
  it says something itself. A night of single requests does not make the cost of a batch forgotten.
- *Not negative*: the minimum over all c >= 0 (Lawson and Hanson, *Solving Least Squares Problems*, ch. 23); with so few
  costs every choice of zeros is tried.
- *Robust*: beyond twice the usual error a measurement counts by its distance, not its square (Huber, 1964). When such
  errors become usual, they count fully: a device that has turned slow is believed.

The first guess is a *shape*, the costs in proportion to each other. The first measurement gives the scale, and later
ones replace the guess where they say anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

_TRUST = 0.005  # of the first guess, in measurements
_ERROR_STEPS = 64  # over which the published error is a mean
_MIN_USUAL_ERROR = 0.02
_ROBUST = 2.0  # times the usual error
_LEAST_OF_GUESS = 1e-4  # predictions so far below the first guess are learned from as if they were this much of it


class OnlineFit:
    """``shape``: the first guess of each cost, in any unit. ``window``: measurements that count."""

    def __init__(self, shape: Sequence[float], window: int = 64) -> None:
        self.num_steps = 0
        self.error = 0.0  # mean of |measured - predicted| / predicted of late, each at most 1
        self._shape = tuple(shape)
        self._forget = 1 / window
        self._usual = 1.0  # the error that is nothing unusual: nothing is, at first
        # In units of the first guess, so that all numbers are of a size.
        self._gains = [1.0] * len(shape)
        self._vector = [_TRUST] * len(shape)
        self._matrix = [[_TRUST * (i == j) for j in range(len(shape))] for i in range(len(shape))]

    @property
    def costs(self) -> tuple[float, ...]:
        """What each unit costs; before the first measurement the shape itself."""
        return tuple(guess * gain for guess, gain in zip(self._shape, self._gains, strict=True))

    def predict(self, amounts: Sequence[float]) -> float:
        return sum(cost * amount for cost, amount in zip(self.costs, amounts, strict=True))

    def observe(self, amounts: Sequence[float], measured: float) -> None:
        """Learns that so many units of each took ``measured`` > 0; some amount must be above zero."""
        if not self.num_steps:
            scale = measured / sum(guess * amount for guess, amount in zip(self._shape, amounts, strict=True))
            self._shape = tuple(guess * scale for guess in self._shape)
        # A model of zeros only, learned from steps that had none of these amounts, predicts nothing to compare with.
        predicted = self.predict(amounts) or measured
        residual = abs(measured - predicted) / predicted
        self.num_steps += 1
        self.error += (min(residual, 1.0) - self.error) / min(self.num_steps, _ERROR_STEPS)
        weight = 1.0 if residual <= _ROBUST * self._usual else _ROBUST * self._usual / residual
        self._usual += (min(residual, 3 * self._usual) - self._usual) / 32
        self._usual = max(self._usual, _MIN_USUAL_ERROR)
        guessed = [guess * amount for guess, amount in zip(self._shape, amounts, strict=True)]
        unit = max(predicted, _LEAST_OF_GUESS * sum(guessed))  # what is much smaller makes the matrix singular
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
    """The x >= 0 with the least x'Ax/2 - b'x, for a symmetric positive definite A."""
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
            break  # nothing holds the minimum back
    return best


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gauss; needs no pivots, since the matrix is positive definite."""
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

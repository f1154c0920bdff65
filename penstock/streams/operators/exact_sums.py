"""Sums of doubles that do not depend on the order: neither on batches, nor on what was added up before.

Pure: a double is a whole number of 2**-1074, so a sum is one too. It is kept in limbs of 32 bits, each in an
int64 that takes two thousand million additions; rounding happens once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from penstock.streams.watermark import Ints

_LIMB = 32
_MASK = (1 << _LIMB) - 1
_UNIT = 1074  # the smallest double is 2**-1074
NAN, PLUS, MINUS = "nan", "inf", "-inf"
Doubles = npt.NDArray[np.float64]


def limbs_of(values: Doubles) -> dict[str, Ints]:
    """Each value as limbs, by their number as text; and how often it is no finite number."""
    finite = np.isfinite(values)
    mantissas, exponents = np.frexp(np.where(finite, values, 0.0))
    whole = np.ldexp(mantissas, 53).astype(np.int64)
    # What is smaller than a normal double has fewer bits; the rest of `whole` is zeros then.
    position = exponents.astype(np.int64) - 53 + _UNIT
    small = position < 0
    whole = np.where(small, whole >> np.where(small, -position, 0), whole)
    position = np.where(small, 0, position)
    number, shift = position // _LIMB, position % _LIMB
    sign, size = np.sign(whole), np.abs(whole)
    rest = _LIMB - shift
    pieces = (
        (size & ((1 << rest) - 1)) << shift,
        (size >> rest) & _MASK,
        size >> rest >> _LIMB,
    )
    found: dict[str, Ints] = {}
    for first in np.unique(number[whole != 0]).tolist():
        mine = number == first
        for above, piece in enumerate(pieces):
            part = np.where(mine, sign * piece, 0)
            if part.any():
                name = str(first + above)
                found[name] = part if name not in found else found[name] + part
    for name, is_it in ((NAN, np.isnan(values)), (PLUS, values == np.inf), (MINUS, values == -np.inf)):
        if is_it.any():
            found[name] = is_it.astype(np.int64)
    return found


def total(limbs: Mapping[str, Ints], count: int) -> Doubles:
    """The nearest double of each of `count` sums."""
    numbers = sorted(int(name) for name in limbs if name not in (NAN, PLUS, MINUS))
    sums = [0] * count
    for number in numbers:
        shift = number * _LIMB
        sums = [
            before + (limb << shift) for before, limb in zip(sums, limbs[str(number)].tolist(), strict=True)
        ]
    unit = 1 << _UNIT
    found = np.array([_rounded(whole, unit) for whole in sums], dtype=np.float64)
    none = np.zeros(count, dtype=np.int64)
    up, down, nan = (limbs.get(name, none) > 0 for name in (PLUS, MINUS, NAN))
    found[up], found[down] = np.inf, -np.inf
    found[nan | (up & down)] = np.nan
    return found


def _rounded(whole: int, unit: int) -> float:
    try:
        return whole / unit
    except OverflowError:  # beyond the largest double, as the machine itself would say
        return float("inf") if whole > 0 else float("-inf")

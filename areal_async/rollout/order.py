"""The order in which a run goes through its data: which row stands at a position.

What always holds: it is a function of the rows, the seed and the position alone, so a run that goes on after a stop, a
prompt that is asked again, and any machine find the same row at the same position; nothing is remembered but what can
be computed again.
"""

import hashlib
import itertools
import random
from collections.abc import Sequence
from typing import Final

ORDERS_KEPT: Final = 2  # of each file: a retry reaches back over the border of two passes, seldom further


def order(n: int, seed: int, epoch: int, file: int = 0) -> Sequence[int]:
    """A shuffled range(n): the order of the rows of a file in this pass (from 0).

    Fisher and Yates's shuffle over the numbers of a Mersenne Twister (MT19937) that is seeded by SHA-256 of
    "seed/epoch", with "/file" behind it for all but the first file. Of Python's generator only `random()` is used: it
    is the one method that the library promises to keep the same for a given seed; `random.shuffle` has changed between
    versions.
    """
    name = f"{seed}/{epoch}/{file}" if file else f"{seed}/{epoch}"
    draw = random.Random(int.from_bytes(hashlib.sha256(name.encode()).digest(), "big")).random
    rows = list(range(n))
    for last in range(n - 1, 0, -1):
        other = int(draw() * (last + 1))
        rows[last], rows[other] = rows[other], rows[last]
    return rows


class Positions:
    """Which row stands at a position of the run.

    Without weights an epoch is all rows of all files, shuffled together (or file after file). With weights, files are
    drawn in turn by their shares, and each goes through its own rows, pass after pass; an epoch is then as many
    positions as there are rows.
    """

    def __init__(
        self, files: Sequence[Sequence[int]], weights: Sequence[float], seed: int, shuffle: bool, epochs: int | None
    ) -> None:
        """files: numbers of the rows of each file, at least one row in all, and of each file with weights. weights:
        shares of the files, or none. shuffle: a new order for each pass. epochs: None for as many as are asked for."""
        parts = list(files) if weights else [list(itertools.chain.from_iterable(files))]
        self._passes = [_Passes(rows, seed, shuffle, file) for file, rows in enumerate(parts)]
        self._shares = Shares(weights, seed) if weights else None
        self._epochs = epochs
        self.rows_per_epoch: Final = sum(len(rows) for rows in files)

    def row(self, position: int) -> int | None:
        """Number of the row; None past the last epoch."""
        if self._epochs is not None and position >= self._epochs * self.rows_per_epoch:
            return None
        file, draw = (0, position) if self._shares is None else self._shares.at(position)
        return self._passes[file].row(draw)


class _Passes:
    """The rows of one file, pass after pass."""

    def __init__(self, rows: Sequence[int], seed: int, shuffle: bool, file: int) -> None:
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._file = file
        self._orders: dict[int, Sequence[int]] = {}

    def row(self, draw: int) -> int:
        number, index = divmod(draw, len(self._rows))
        return self._rows[self._order(number)[index] if self._shuffle else index]

    def _order(self, number: int) -> Sequence[int]:
        if number not in self._orders:
            while len(self._orders) >= ORDERS_KEPT:
                del self._orders[min(self._orders)]
            self._orders[number] = order(len(self._rows), self._seed, number, self._file)
        return self._orders[number]


class Shares:
    """Draws from files by their shares, spread as evenly as can be: no chance decides, only the seed's first offsets.

    File i is drawn for the k-th time (from 0) at the moment (k + offset_i) / share_i, its offset in (0, 1) made from
    the seed; the positions are these moments in their order. So after any number p of positions a file of share s has
    been drawn p·s times, give or take the number of files; a random choice would be off by about √p.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """weights: positive, of any sum."""
        whole = sum(weights)
        self._shares = [weight / whole for weight in weights]
        self._offsets = [_offset(seed, file) for file in range(len(weights))]

    def at(self, position: int) -> tuple[int, int]:
        """(file, k): at this position the file is drawn for the k-th time. Time: the square of the number of files."""
        # The draws until the moment p − n − 1 (shares sum up to 1, so a moment is a position, give or take n) are all
        # among the first p, whatever the rounding; from there the few that are left are counted one by one.
        moment = position - len(self._shares) - 1
        drawn = [
            max(0, int(share * moment - offset)) for share, offset in zip(self._shares, self._offsets, strict=True)
        ]
        for _ in range(position - sum(drawn)):
            drawn[self._next(drawn)] += 1
        file = self._next(drawn)
        return file, drawn[file]

    def _next(self, drawn: Sequence[int]) -> int:
        moments = [(k + o) / s for k, o, s in zip(drawn, self._offsets, self._shares, strict=True)]
        return moments.index(min(moments))


def _offset(seed: int, file: int) -> float:
    """In (0, 1), and of 32 bits, so that sums with it are the same everywhere."""
    digest = hashlib.sha256(f"{seed}/share/{file}".encode()).digest()
    return (int.from_bytes(digest[:4], "big") + 0.5) / (1 << 32)

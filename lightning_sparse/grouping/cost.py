"""What a group costs: seconds to select, seconds to exchange, both from the number of its coordinates alone.

Everything is a straight line, ``alpha + beta * amount``: a price for the message and a price for each byte in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np


def _check_number(name: str, value: float, what: str = "a finite number of at least 0") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"Expected {name} to be {what} but got {value!r}.")


@dataclass(frozen=True)
class Line:
    """Seconds as a straight line: ``alpha + beta * amount``, and 0 for an amount of 0.

    Args:
        alpha: seconds for anything at all, at least 0.
        beta: seconds for each unit of the amount (a byte, a coordinate), at least 0.

    Raises:
        ValueError: if a coefficient is negative or not finite.

    Example:
        >>> gigabit = Line(alpha=50e-6, beta=8e-9)
        >>> gigabit(0), gigabit(1_000_000)
        (0.0, 0.00805)
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        _check_number("alpha", self.alpha, "a finite number of seconds of at least 0")
        _check_number("beta", self.beta, "a finite number of seconds per unit of at least 0")

    def __call__(self, amount: float) -> float:
        """Seconds for this much.

        Raises:
            ValueError: if the amount is negative.
        """
        if amount <= 0:
            _check_number("amount", amount)
            return 0.0
        return self.alpha + self.beta * amount

    def __add__(self, other: Line) -> Line:
        """One after the other, for the same amount."""
        if not isinstance(other, Line):
            return NotImplemented
        return Line(self.alpha + other.alpha, self.beta + other.beta)

    def line(self) -> Line:
        """This line."""
        return self

    def per(self, units: float) -> Line:
        """The same for an amount that stands for so many units each.

        Example:
            >>> Line(50e-6, 8e-9).per(4)  # by values of 4 bytes instead of by bytes
            Line(alpha=5e-05, beta=3.2e-08)
        """
        return Line(self.alpha, self.beta * units)

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Line:
        """As :meth:`fit`, for any measurements: zeros are left out, and a single amount makes a constant."""
        positive = [(amount, taken) for amount, taken in points if taken > 0]
        if len({amount for amount, _ in positive}) < 2:
            return cls(median(taken for _, taken in positive), 0.0) if positive else NOTHING
        return cls.fit(*zip(*positive, strict=True))

    @classmethod
    def fit(cls, amounts: Sequence[float], seconds: Sequence[float]) -> Line:
        """The line through measurements, with neither coefficient below 0, that outliers do not bend.

        Of measurements of the same amount only the median counts. The line then minimises
        ``sum |alpha + beta x - y| / y`` over these points: relative deviations, so that small messages decide about
        alpha and large ones about beta; absolute ones, so that one bad point is ignored. The minimum is exact: it lies
        on two points, or on one point and a coefficient of 0, and all such lines are tried, which is cubic in the
        number of different amounts (meant for dozens).

        Args:
            amounts: what was sent or selected, above 0, of at least two different sizes; best in powers of 2 or 4.
            seconds: how long each took, above 0.

        Raises:
            ValueError: if lengths differ, numbers are not positive and finite, or all amounts are equal.

        Example:
            >>> sizes = [1_000, 1_000, 1_000, 1_000_000, 1_000_000, 1_000_000]
            >>> Line.fit(sizes, [60e-6, 58e-6, 9e-3, 8.1e-3, 8.05e-3, 20e-3])
            Line(alpha=5.19...e-05, beta=8.04...e-09)
        """
        if len(amounts) != len(seconds):
            raise ValueError(
                f"Expected one time for each amount but got {len(amounts)} amounts and {len(seconds)} times."
            )
        repeated: dict[float, list[float]] = defaultdict(list)
        for amount, taken in zip(amounts, seconds, strict=True):
            if not (0 < amount < math.inf and 0 < taken < math.inf):
                raise ValueError(
                    f"Expected amounts and seconds to be positive and finite but got {taken!r} s for {amount!r}."
                )
            repeated[amount].append(taken)
        if len(repeated) < 2:
            raise ValueError(f"Expected measurements of at least 2 different amounts but got {len(repeated)}.")
        x = np.array(sorted(repeated), dtype=np.float64)
        y = np.array([median(repeated[amount]) for amount in sorted(repeated)])
        left, right = np.triu_indices(len(x), 1)
        slopes = (y[right] - y[left]) / (x[right] - x[left])
        nothing = np.zeros_like(x)
        alphas = np.concatenate([y[left] - slopes * x[left], y, nothing])
        betas = np.concatenate([slopes, nothing, y / x])
        allowed = (alphas >= 0) & (betas >= 0)
        alphas, betas = alphas[allowed], betas[allowed]
        deviations = np.abs((alphas[:, None] + betas[:, None] * x) / y - 1).sum(1)
        best = deviations.argmin()
        return cls(float(alphas[best]), float(betas[best]))


NOTHING = Line(0.0, 0.0)
"""Takes no time."""


@dataclass(frozen=True)
class Curve:
    """Seconds as measured at some amounts, straight in between, and 0 for an amount of 0.

    Computation is not a straight line: what fits into a cache takes less for each coordinate. Below the smallest
    amount, seconds stay what they are there; above the largest one, they grow in proportion.

    Args:
        amounts: at least one, positive, ascending.
        seconds: at these, at least 0.

    Raises:
        ValueError: if lengths differ, amounts do not ascend, or a number is outside its range.

    Example:
        >>> curve = Curve((1_000, 1_000_000), (1e-4, 2e-3))
        >>> [round(curve(amount), 6) for amount in (0, 10, 500_500, 2_000_000)]
        [0.0, 0.0001, 0.00105, 0.004]
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "amounts", tuple(self.amounts))
        object.__setattr__(self, "seconds", tuple(self.seconds))
        ascending = all(a < b for a, b in pairwise((0.0, *self.amounts)))
        if not self.amounts or len(self.amounts) != len(self.seconds) or not ascending:
            raise ValueError(
                f"Expected ascending positive amounts and as many seconds but got {self.amounts} and {self.seconds}."
            )
        for value in self.seconds:
            _check_number("seconds", value)

    def __call__(self, amount: float) -> float:
        """Seconds for this much.

        Raises:
            ValueError: if the amount is negative.
        """
        if amount <= 0:
            _check_number("amount", amount)
            return 0.0
        if amount > self.amounts[-1]:
            return self.seconds[-1] * amount / self.amounts[-1]
        return float(np.interp(amount, self.amounts, self.seconds))

    def __add__(self, other: Curve | Line) -> Curve:
        """One after the other, for the same amount; exact at the amounts of both."""
        amounts = sorted({*self.amounts, *(other.amounts if isinstance(other, Curve) else ())})
        return Curve(tuple(amounts), tuple(self(amount) + other(amount) for amount in amounts))

    __radd__ = __add__

    def line(self) -> Line:
        """The nearest straight line, see :meth:`Line.fit`."""
        return Line.through(list(zip(self.amounts, self.seconds, strict=True)))


@dataclass(frozen=True)
class Network:
    """What collectives cost, and from that what exchanges cost.

    Methods are named after exchanges and return seconds by coordinates of a group. Shares stand for counts: that a
    group always sends at least one coordinate is ignored, as are the few words beside indices and values.

    Args:
        all_reduce: seconds by bytes of the vector that is summed.
        all_gather: seconds by bytes that each rank gives.
        ranks: n between which this was measured, at least 1; see :meth:`line` and :meth:`between`.

    Raises:
        ValueError: if ``ranks`` is no positive integer.

    Example:
        >>> network = Network.ring(ranks=4, latency=50e-6, bits_per_second=10e9)
        >>> dense, sparse = network.dense(), network.gather_pairs(0.01)
        >>> [f"{1e3 * line(1_000_000):.2f} ms" for line in (dense, sparse)]
        ['5.10 ms', '0.34 ms']
    """

    all_reduce: Line
    all_gather: Line
    ranks: int = 2

    def __post_init__(self) -> None:
        _check_ranks(self.ranks)

    def line(self, operation: str) -> Line:
        """Seconds of one collective operation by bytes that each rank gives.

        ``all_reduce`` and ``all_gather`` are known; the others follow from one hop of the all-gather's ring, a fixed
        price and a price for each byte: ``send_on`` is one hop, ``broadcast`` passes through all ranks in pieces
        (n - 1 prices, each byte once), ``all_to_all`` sends an n-th part to each other rank.

        Raises:
            ValueError: for any other operation.
        """
        hops = max(1, self.ranks - 1)
        hop = Line(self.all_gather.alpha / hops, self.all_gather.beta / hops)
        lines = {
            "all_reduce": self.all_reduce,
            "all_gather": self.all_gather,
            "send_on": hop,
            "broadcast": Line(hops * hop.alpha, hop.beta),
            "all_to_all": Line(hops * hop.alpha, hops / self.ranks * hop.beta),
        }
        if operation not in lines:
            raise ValueError(f"Expected operation to be one of {', '.join(lines)} but got {operation!r}.")
        return lines[operation]

    def between(self, ranks: int, bits_per_second: float | None = None) -> Network:
        """What the same collectives would cost between another number of ranks, or at another rate.

        Fixed prices grow from the ones known here: an all-reduce's as ``log2 n``, because libraries sum small vectors
        along trees; an all-gather's as ``n - 1``, as in a ring. Prices of bytes are the ring's (:meth:`ring`): scaled
        from the ones known here, or at the given rate. Known prices between two ranks at least are needed.

        Args:
            ranks: n, at least 1.
            bits_per_second: rate of a link in one direction, above 0; None: as known here.

        Raises:
            ValueError: if a number is outside its range, or this network has one rank only.

        Example:
            >>> network = Network(Line(2e-4, 1e-9), Line(1e-4, 1e-9), ranks=2).between(8, 1e9)
            >>> f"{network.all_gather(1e6):.4f} {network.all_reduce(1e6):.4f}"
            '0.0567 0.0146'
        """
        _check_ranks(ranks)
        if self.ranks < 2:
            raise ValueError("Expected prices that are known between at least 2 ranks but got those of one rank.")
        if ranks == 1:
            return Network(NOTHING, NOTHING, 1)
        hops = (ranks - 1) / (self.ranks - 1)
        tree = math.log2(ranks) / math.log2(self.ranks)
        if bits_per_second is not None:
            rated = Network.ring(ranks, 0.0, bits_per_second)
            reduced, gathered = rated.all_reduce.beta, rated.all_gather.beta
        else:
            reduced = self.all_reduce.beta * hops * self.ranks / ranks
            gathered = self.all_gather.beta * hops
        return Network(Line(self.all_reduce.alpha * tree, reduced), Line(self.all_gather.alpha * hops, gathered), ranks)

    @classmethod
    def ring(cls, ranks: int, latency: float, bits_per_second: float) -> Network:
        """Ranks in a ring, of which each sends to the next.

        All-reduce of B bytes: ``2 (n - 1) latency + 2 (n - 1) / n 8 B / rate``. All-gather of b bytes from each rank:
        ``(n - 1) latency + (n - 1) 8 b / rate``. One rank needs no time. Real collectives choose other algorithms
        for small messages: where they can be measured, fit the two lines instead (:meth:`Line.fit`).

        Args:
            ranks: n, at least 1.
            latency: seconds from one rank to the next for an empty message, at least 0.
            bits_per_second: rate of a link in one direction, above 0; may be infinite.

        Raises:
            ValueError: if a number is outside its range.
        """
        _check_ranks(ranks)
        _check_number("latency", latency, "a finite number of seconds of at least 0")
        rate = isinstance(bits_per_second, (int, float)) and not isinstance(bits_per_second, bool)
        if not (rate and bits_per_second > 0):
            raise ValueError(f"Expected bits_per_second to be a positive number but got {bits_per_second!r}.")
        hops, byte = ranks - 1, 8 / bits_per_second
        return cls(Line(2 * hops * latency, 2 * hops / ranks * byte), Line(hops * latency, hops * byte), ranks)

    def dense(self, value_bytes: int = 4) -> Line:
        """All-reduce of every value."""
        return self.all_reduce.per(value_bytes)

    def gather_pairs(self, picked: float, value_bytes: int = 4, asked: int = 0) -> Line:
        """All-gather of pairs of a 4-byte index and a value, as Top-k uses.

        Args:
            picked: share of its coordinates that the rank picks which picks most, in [0, 1].
            value_bytes: bytes of a value.
            asked: small all-gathers of a group besides: one for counts if ranks do not know them, and those in which
                ranks ask each other while they select.
        """
        return self._asking(asked) + self.all_gather.per(_share(picked) * (4 + value_bytes))

    def reduce_shared(self, picked: float, value_bytes: int = 4) -> Line:
        """All-reduce of the values at coordinates that all ranks know, as Random-k uses."""
        return self.all_reduce.per(_share(picked) * value_bytes)

    def reduce_union(self, picked: float, union: float, value_bytes: int = 4, asked: int = 0) -> Line:
        """All-gather of 4-byte indices, then all-reduce of values at their union, as MiCRO and ExDyna use.

        Args:
            picked: share of its coordinates that the rank picks which picks most, in [0, 1].
            union: share of coordinates that any rank picks, in [0, 1].
            value_bytes: bytes of a value.
            asked: small all-gathers of a group besides, as in :meth:`gather_pairs`.
        """
        indices = self.all_gather.per(4 * _share(picked))
        return self._asking(asked) + indices + self.all_reduce.per(value_bytes * _share(union, "union"))

    def packed_union(self, picked: float, union: float, asked: int = 0) -> Line:
        """As :meth:`reduce_union`, in 2 bytes for each index and 2 for each value, as UnionTopK uses."""
        indices = self.all_gather.per(2 * _share(picked))
        return self._asking(asked) + indices + self.all_reduce.per(2 * _share(union, "union"))

    def _asking(self, times: int) -> Line:
        return Line(times * self.all_gather.alpha, 0.0)


def _check_ranks(ranks: int) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"Expected ranks to be a positive integer but got {ranks!r}.")


def _share(share: float, name: str = "picked") -> float:
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ValueError(f"Expected {name} to be a share of coordinates in [0, 1] but got {share!r}.")
    return share


@dataclass(frozen=True)
class CostModel:
    """Seconds that a group of x coordinates takes, apart from its backward pass.

    Selection: ``alpha_s + beta_s x + sorting x log2 x``, on the processor that also computes backward. Exchange:
    ``alpha_e + beta_e x``, on the network, while backward goes on. An empty group takes no time.

    Where selection does not hold up backward, because it runs on a stream or a thread of its own in line with the
    exchange, it belongs to the exchange: ``CostModel(selection + exchange)``. Where backward waits for the exchange,
    too, nothing overlaps, and the exchange belongs to the selection: ``CostModel(Line(0, 0), selection + exchange)``.

    Args:
        exchange: seconds by coordinates, for example from :class:`Network`.
        selection: seconds by coordinates, for everything a rank does before it sends; nothing for dense training. It
            need not be a straight line.
        sorting: seconds for each of ``x log2 x``, at least 0; a full sort, with which OMGS-SGD models Top-k
            (2.19e-10 there).

    Raises:
        ValueError: if a cost is not a line or ``sorting`` is negative or not finite.

    Example:
        >>> network = Network.ring(ranks=8, latency=20e-6, bits_per_second=10e9)
        >>> cost = CostModel(network.gather_pairs(0.001), selection=Line(30e-6, 2e-9))
        >>> cost.select_seconds(1_000_000), round(cost.exchange_seconds(1_000_000), 6)
        (0.00203, 0.000185)

    References:
        Shi et al., Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs
        (OMGS-SGD), INFOCOM 2020: equations 10 and 11, with message sizes from what is sent.
    """

    exchange: Line
    selection: Line | Curve = NOTHING
    sorting: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.exchange, Line):
            raise ValueError(f"Expected exchange to be a Line but got {self.exchange!r}.")
        if not isinstance(self.selection, (Line, Curve)):
            raise ValueError(f"Expected selection to be a Line or a Curve but got {self.selection!r}.")
        _check_number("sorting", self.sorting, "a finite number of seconds of at least 0")

    def select_seconds(self, numel: int) -> float:
        """Seconds to select among so many coordinates."""
        return self.selection(numel) + (self.sorting * numel * math.log2(numel) if numel else 0.0)

    def exchange_seconds(self, numel: int) -> float:
        """Seconds to exchange what was selected among so many coordinates."""
        return self.exchange(numel)

"""Networks other than the measured one: of more ranks, of another rate, with longer ways, or made up."""

from __future__ import annotations

import math
from dataclasses import replace

from lightning_sparse.core.checks import check_integer, check_number, check_positive
from lightning_sparse.tuning.performance.cost import NOTHING, Line
from lightning_sparse.tuning.performance.network import Network
from lightning_sparse.tuning.performance.profile import GroupCost, Traffic


def ring(ranks: int, latency: float, bits_per_second: float) -> Network:
    """Return the network of ranks in a ring, of which each sends to the next.

    All-reduce of B bytes: ``2 (n - 1) latency + 2 (n - 1) / n 8 B / rate``. All-gather of b bytes from each rank:
    ``(n - 1) latency + (n - 1) 8 b / rate``. One rank needs no time. Real collectives choose other algorithms
    for small messages: if they can be measured, fit the two lines instead (:meth:`.Line.fit`).

    Args:
        ranks: n, at least 1.
        latency: seconds from one rank to the next for an empty message, at least 0.
        bits_per_second: rate of a link in one direction, above 0; may be infinite.

    Raises:
        ValueError: if a number is outside its range.
    """
    check_integer(ranks, "ranks")
    check_number(latency, "latency", "a finite number of seconds of at least 0")
    check_positive(bits_per_second, "bits_per_second", infinite=True)
    hops, byte = ranks - 1, 8 / bits_per_second
    return Network(Line(2 * hops * latency, 2 * hops / ranks * byte), Line(hops * latency, hops * byte), ranks)


def between(known: Network, ranks: int, bits_per_second: float | None = None) -> Network:
    """Extrapolate the cost of collectives to another number of ranks, or to another rate.

    Fixed prices are scaled: an all-reduce's as ``log2 n``, because libraries sum small vectors along trees, and gloo's,
    which is a ring, as ``n - 1``; an all-gather's as ``n - 1``, as in a ring, or not at all, where each rank sends to
    all others at once. Prices per byte are the ring's (:func:`ring`): scaled, or at the given rate. Prices
    between at least two ranks are needed.

    Args:
        known: the network.
        ranks: n, at least 1.
        bits_per_second: rate of a link in one direction, above 0; None: as measured.

    Raises:
        ValueError: if a number is outside its range, or the network has one rank only.

    Example:
        >>> network = between(Network(Line(2e-4, 1e-9), Line(1e-4, 1e-9), ranks=2), 8, 1e9)
        >>> f"{network.all_gather(1e6):.4f} {network.all_reduce(1e6):.4f}"
        '0.0567 0.0146'
    """
    check_integer(ranks, "ranks")
    if known.ranks < 2:
        raise ValueError("Expected prices that are known between at least 2 ranks, but got those of one rank.")
    if ranks == 1:
        return Network(NOTHING, NOTHING, 1)
    hops = (ranks - 1) / (known.ranks - 1)
    tree = math.log2(ranks) / math.log2(known.ranks)
    sum_hops, gather_hops = (hops, 1.0) if known.one_hop else (tree, hops)
    if bits_per_second is not None:
        rated = ring(ranks, 0.0, bits_per_second)
        reduced, gathered = rated.all_reduce.beta, rated.all_gather.beta
    else:
        reduced = known.all_reduce.beta * hops * known.ranks / ranks
        gathered = known.all_gather.beta * hops
    all_reduce = Line(known.all_reduce.alpha * sum_hops, reduced)
    return Network(all_reduce, Line(known.all_gather.alpha * gather_hops, gathered), ranks, known.one_hop)


def farther(near: Network, round_trip: float) -> Network:
    """Return a network with a longer way from rank to rank.

    Each hop takes half a round trip more: an all-gather has n - 1 of them, as in a ring, an all-reduce
    ``2 log2 n``, as along trees. Over gloo, each takes a whole one, because a message waits until its receiver has
    asked for it: ``2 (n - 1)`` in the library's all-reduce, and one in an all-gather where each rank sends to all
    others at once.

    Args:
        near: the network.
        round_trip: seconds that a message and its answer take more, at least 0.

    Raises:
        ValueError: if it is negative or not finite.

    Example:
        >>> network = farther(ring(ranks=4, latency=0.0, bits_per_second=1e9), 0.5)
        >>> network.all_gather.alpha, network.all_reduce.alpha
        (0.75, 1.0)
    """
    check_number(round_trip, "round_trip", "a finite number of seconds of at least 0")
    if near.ranks == 1:
        return near
    others = near.ranks - 1
    of_sum, of_gather = (2 * others, 1) if near.one_hop else (math.log2(near.ranks), others / 2)
    reduced, gathered = near.all_reduce, near.all_gather
    return replace(
        near,
        all_reduce=replace(reduced, alpha=reduced.alpha + of_sum * round_trip),
        all_gather=replace(gathered, alpha=gathered.alpha + of_gather * round_trip),
    )


def line_of(network: Network, operation: str) -> Line:
    """Return the seconds of one operation by bytes of each rank.

    ``library_all_reduce`` and ``all_gather`` are known. The others, messages of exchanges, follow from one hop of
    the all-gather, a fixed price and a price for each byte: ``send_recv`` is one hop, ``all_to_all`` sends an n-th
    part to each other rank. In a ring, the all-gather has n - 1 hops, ``all_reduce`` is the library's, and
    ``broadcast`` passes through all ranks in pieces (n - 1 fixed prices, each byte once). Where each rank sends to
    all others at once, the all-gather has one fixed price, ``all_reduce`` two (one between two ranks), and a
    broadcast is a tree of ``log2 n`` hops.

    Raises:
        ValueError: for any other operation.
    """
    others = max(1, network.ranks - 1)
    hop = Line(network.all_gather.alpha / (1 if network.one_hop else others), network.all_gather.beta / others)
    part = Line(network.all_gather.alpha, others / network.ranks * hop.beta)
    levels = math.ceil(math.log2(others + 1))
    total = network.all_gather if network.ranks == 2 else Line(2 * part.alpha, 2 * part.beta)
    lines = {
        "library_all_reduce": network.all_reduce,
        "all_gather": network.all_gather,
        "all_to_all": part,
        "send_recv": hop,
        "all_reduce": total if network.one_hop else network.all_reduce,
        "broadcast": Line(levels * hop.alpha, levels * hop.beta)
        if network.one_hop
        else Line(others * hop.alpha, hop.beta),
    }
    if operation not in lines:
        raise ValueError(f"Expected operation to be one of {', '.join(lines)}, but got {operation!r}.")
    return lines[operation]


def seconds_of(part: Traffic, network: Network) -> Line:
    """Return the seconds of traffic on a network, by coordinates."""
    line = line_of(network, part.operation)
    return Line(part.calls * line.alpha + line.beta * part.nbytes.alpha, line.beta * part.nbytes.beta)


def on(network: Network, cost: GroupCost) -> GroupCost:
    """Return the cost of the same traffic on another network of as many ranks; unchanged without known traffic."""
    if not cost.traffic:
        return cost
    transfer = NOTHING
    for part in cost.traffic:
        transfer += seconds_of(part, network)
    return replace(cost, transfer=transfer)

"""How many bits do the default's messages take, and how many would an ideal code of each part by itself?

n ranks reduce one group in this process with UnionTopK, and the messages of rank 0 in the last step are taken apart:
coordinates, classes of magnitude with the mark of spare picks, and, as with AdamW, the powers of two of second values,
all for each pick; and the rounded values, for each coordinate of the union. An ideal code takes the entropy of how
often each symbol occurs in this message; for coordinates, that of a choice of as many at random. Gradients are those of
`local_step.py`. Prints a table.

    python benchmarks/message_bits.py
"""

import argparse
from collections.abc import Sequence

import torch
from local_step import Gradients
from machine import about, in_words
from rich.console import Console
from rich.table import Table
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Context, Selection, Update
from lightning_sparse.engine.drivers import drive_ranks
from lightning_sparse.engine.pipeline import init_group, reduce_group
from lightning_sparse.methods.exchanges import PackedUnion
from lightning_sparse.methods.exchanges.packed_union import _unpack_nibbles, unpack
from lightning_sparse.methods.memory import as_memory
from lightning_sparse.ops.form import MARKS, Form


class Recorded(PackedUnion):
    """Keeps the messages of rank 0."""

    def __call__(self, acc: Tensor, selection: Selection, ctx: Context) -> Steps[Update]:
        steps, answer, kept = super().__call__(acc, selection, ctx), None, []
        while True:
            try:
                message = steps.send(answer)  # type: ignore[arg-type]  # None starts it
            except StopIteration as end:
                if ctx.rank == 0:
                    object.__setattr__(self, "last", (selection, kept))
                return end.value
            kept.append(message.x.clone())
            answer = yield message


def entropy(symbols: Tensor) -> float:
    """Bits a symbol, by how often each occurs."""
    share = symbols.unique(return_counts=True)[1].double() / symbols.numel()
    return float(-(share * share.log2()).sum())


def of_a_choice(share: float) -> float:
    """Bits for each of those that are chosen."""
    p = torch.tensor([share, 1 - share], dtype=torch.float64)
    return float(-(p * p.log2()).sum() / share)


def measure(numel: int, n: int, density: float, kept: str, steps: int) -> list[tuple[str, int, float, float]]:
    """Name of a part, how many there are, bits told and entropy."""
    gradients, sparsifier, memory, exchange = (
        Gradients(numel, n),
        ls.sparsifiers.UnionTopK(),
        as_memory(kept),
        Recorded(),
    )
    contexts = [Context(0, density, rank, n) for rank in range(n)]
    parts = {"memory": memory, "sparsifier": sparsifier}
    states = [init_group(numel, torch.float32, torch.device("cpu"), ctx, **parts) for ctx in contexts]
    grads = [torch.empty(numel) for _ in range(n)]
    for step in range(steps):
        gradients.fill(grads, step)
        coroutines = [
            reduce_group(grad, state, ctx._replace(step=step), exchange=exchange, **parts)
            for grad, state, ctx in zip(grads, states, contexts, strict=True)
        ]
        states, statistics = zip(*drive_ranks(coroutines), strict=True)
    selection, (told, words) = exchange.last
    form = Form.of(numel, selection.indices.numel(), memory.needs_second)
    m, union, word = form.slots, int(statistics[0].union), 32
    classes = _unpack_nibbles(told[form.classes : form.seconds], m)
    found = [
        ("coordinate", m, word * (form.classes - MARKS) / m, of_a_choice(m / numel)),
        ("class, spare", m, word * (form.seconds - form.classes) / m, entropy(classes)),
    ]
    if memory.needs_second:
        codes = told[form.seconds :].view(torch.uint8)[:m]
        found.append(("second value's power", m, word * (form.filled - form.seconds) / m, entropy(codes)))
    return [*found, ("value", union, word * words.numel() / union, entropy(unpack(words, union)))]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--numel", type=int, default=4_000_000, help="(default: 4000000)")
    parser.add_argument("--ranks", type=int, default=4, help="(default: 4)")
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001], help="(default: 0.01 0.001)")
    parser.add_argument("--steps", type=int, default=150, help="(default: 150)")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    table = Table("memory", "density", "part", title=f"bits in messages, {arguments.ranks} ranks")
    for name in ("how many", "bits each", "entropy"):
        table.add_column(name, justify="right")
    for kept in ("residual", "second_moment"):
        for density in arguments.density:
            for part, count, bits, ideal in measure(arguments.numel, arguments.ranks, density, kept, arguments.steps):
                table.add_row(kept, f"{density:g}", part, f"{count:,}", f"{bits:.2f}", f"{ideal:.2f}")
    Console(width=100).print(table)
    print(in_words(about()))


if __name__ == "__main__":
    main()

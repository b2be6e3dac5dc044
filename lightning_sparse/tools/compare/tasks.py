"""Training tasks for n simulated ranks: small, real, and available on every machine.

A :class:`Task` computes the gradients of all ranks at the current parameters and applies any given update. A comparison
of sparsifiers needs no more: recorded gradients (:func:`record`) for the open loop, and the closed loop, in which the
next gradient is computed at the parameters after the last update.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparse.ops.momentum import Momentum, Spending, Stepped, has_velocities

Batch = tuple[Tensor, Tensor]
Optimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Task:
    """A model whose gradient is computed by n simulated ranks, each on its own batches.

    Args:
        model: trained in place. Its parameters become views of one flat vector, in their order.
        train: inputs and targets, with examples in the first dimension.
        valid: the same, for :meth:`evaluate`.
        ranks: number of simulated ranks n, at least 1.
        batch: examples per rank and step.
        optimizer: makes the optimizer from the parameters.
        seed: of the order of examples.

    Raises:
        ValueError: if there are fewer examples than ranks times batch.
    """

    quality = "accuracy"
    """Name of the result of :meth:`evaluate`."""

    def __init__(
        self, model: nn.Module, train: Batch, valid: Batch, *, ranks: int, batch: int, optimizer: Optimizer, seed: int
    ) -> None:
        if len(train[0]) < ranks * batch:
            raise ValueError(
                f"Expected at least {ranks * batch} examples to train on, {batch} for each of {ranks} ranks, but got "
                f"{len(train[0])}. Use fewer ranks or more data."
            )
        self.model, self.ranks, self.batch = model, ranks, batch
        self.train, self.valid = train, valid
        parameters = list(model.parameters())
        self.numel = sum(p.numel() for p in parameters)
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        for p, view in zip(parameters, self._views(self.flat, parameters), strict=True):
            p.data = view
        self.parameters = parameters
        self._waited = torch.zeros(self.numel, dtype=torch.uint8, device="cpu")
        self._spending = Spending()
        self.optimizer = optimizer(parameters)
        self.loss = 0.0
        """Mean training loss of all ranks at the latest :meth:`gradients`."""
        self._order = torch.Generator().manual_seed(seed)
        self._batches = self._draw()

    def gradients(self) -> Tensor:
        """Return (n, numel) gradients of the ranks at the current parameters, each on its next batch."""
        rows = torch.zeros(self.ranks, self.numel, device="cpu")
        losses = []
        for row, places in zip(rows, next(self._batches), strict=True):
            for p, view in zip(self.parameters, self._views(row, self.parameters), strict=True):
                p.grad = view
            loss = self.loss_of(self.train[0][places], self.train[1][places])
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        self.loss = sum(losses) / len(losses)
        return rows

    def apply(self, update: Tensor, early: bool = False) -> None:
        """Take an optimizer step with an averaged gradient, (numel,).

        Args:
            update: the average.
            early: apply the momentum of delayed averages at once, see
                :mod:`lightning_sparse.ops.momentum`.
        """
        grads = self._views(update, self.parameters)
        for p, view in zip(self.parameters, grads, strict=True):
            p.grad = view
        self.optimizer.step()
        if not early or not has_velocities(self.optimizer, {id(p) for p in self.parameters}):
            return
        beside = dict(
            zip(self.parameters, zip(grads, self._views(self._waited, self.parameters), strict=True), strict=True)
        )
        for group in self.optimizer.param_groups:
            by = Momentum.of(group)
            for p in group["params"]:
                if by is None:
                    continue
                grad, waited = beside[p]
                self._spending.spend_([Stepped(p, grad, self.optimizer.state[p]["momentum_buffer"], waited)], by)

    def loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return nn.functional.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the share of validation examples that are classified correctly, in percent."""
        self.model.eval()
        right = (self.model(self.valid[0]).argmax(-1) == self.valid[1]).double().mean()
        self.model.train()
        return float(100 * right)

    def _draw(self) -> Iterator[Tensor]:
        """Yield (n, batch) positions of a step; every example once per pass, without those that do not fill a step."""
        size = self.ranks * self.batch
        while True:
            order = torch.randperm(len(self.train[0]), generator=self._order, device="cpu")
            for start in range(0, len(order) - size + 1, size):
                yield order[start : start + size].view(self.ranks, self.batch)

    @staticmethod
    def _views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        pieces = torch.split(flat, [p.numel() for p in parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]


class TextTask(Task):
    """A task that predicts the next word of a text."""

    quality = "perplexity"

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the perplexity on the validation text."""
        self.model.eval()
        loss = self.loss_of(*self.valid)
        self.model.train()
        return float(loss.exp())


def digits(
    *,
    ranks: int = 8,
    seed: int = 0,
    batch: int = 16,
    width: int = 64,
    momentum: float = 0.9,
    optimizer: Optimizer | None = None,
) -> Task:
    """Make the digits task: scikit-learn's digits, a CNN of 227 210 parameters, SGD at 0.05 with momentum 0.9.

    Args:
        ranks: number of simulated ranks.
        seed: of the initial parameters and of the order of examples; the 360 validation images are always the same.
        batch: images per rank and step.
        width: channels of the first convolution; the others have twice as many.
        momentum: of the optimizer; 0 if the momentum is in the memory.
        optimizer: makes another optimizer from the parameters.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ModuleNotFoundError(
            "The digits need scikit-learn. Install it with: pip install 'lightning-sparse[cli]'", name=error.name
        ) from error

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32, device="cpu").unsqueeze(1) / 16
    labels = torch.tensor(data.target, device="cpu")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0), device="cpu")
    train, valid = order[360:], order[:360]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, 10),
        )
    return Task(
        model,
        (images[train], labels[train]),
        (images[valid], labels[valid]),
        ranks=ranks,
        batch=batch,
        optimizer=optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=momentum)),
        seed=seed,
    )


class WordModel(nn.Module):
    """Embedding, one LSTM layer, and a linear layer over the vocabulary.

    Args:
        words: size of the vocabulary.
        embedding: numbers per word.
        hidden: size of the LSTM's state.
    """

    def __init__(self, words: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, embedding)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.decoder = nn.Linear(hidden, words)

    def forward(self, places: Tensor) -> Tensor:
        """Map (batch, length) words to (batch, length, words) logits."""
        states, _ = self.lstm(self.embedding(places))
        return self.decoder(states)  # type: ignore[no-any-return]


def text(
    *,
    ranks: int = 8,
    seed: int = 0,
    batch: int = 4,
    path: str | Path | None = None,
    words: int = 1000,
    length: int = 16,
    momentum: float = 0.9,
    optimizer: Optimizer | None = None,
) -> TextTask:
    """Make the text task: a word-level LSTM language model of 223 208 parameters, SGD at 1.0 with momentum 0.9.

    Args:
        ranks: number of simulated ranks.
        seed: of the initial parameters and of the order of sequences.
        batch: sequences per rank and step.
        path: a text file in UTF-8, such as WikiText-2's. None: the Python language reference that comes with Python.
        words: size of the vocabulary, the most frequent words; the others are one word.
        length: words per sequence.
        momentum: of the optimizer; 0 if the momentum is in the memory.
        optimizer: makes another optimizer from the parameters.

    Raises:
        ValueError: if the text cannot be read or is too short.
    """
    if path is None:
        from pydoc_data.topics import topics

        raw = "\n".join(topics[name] for name in sorted(topics))
    else:
        raw = _read(path)
    tokens = re.findall(r"[^\W\d_]+|\d|[^\w\s]", raw.lower())
    known = {word: place for place, (word, _) in enumerate(Counter(tokens).most_common(words - 1))}
    stream = torch.tensor([known.get(word, words - 1) for word in tokens], device="cpu")
    count = max(0, len(stream) - 1) // length
    inputs = stream[: count * length].view(count, length)
    targets = stream[1 : count * length + 1].view(count, length)
    # Every tenth sequence, about 200 at most, is for validation: the text changes its subject along the way.
    chosen = torch.zeros(count, dtype=torch.bool, device="cpu")
    chosen[:: max(10, count // 200)] = True
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = WordModel(words, 64, 96)
    return TextTask(
        model,
        (inputs[~chosen], targets[~chosen]),
        (inputs[chosen], targets[chosen]),
        ranks=ranks,
        batch=batch,
        optimizer=optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=momentum)),
        seed=seed,
    )


TASKS: dict[str, Callable[..., Task]] = {"digits": digits, "text": text}
"""Closed-loop tasks by name; all take ``ranks`` and ``seed``."""


def label(name: str, text: str | None) -> str:
    """Return the name of a task or stream in results: with that of its text file, if one was given.

    Example:
        >>> label("text", "data/wiki.txt"), label("text", None), label("digits", "data/wiki.txt")
        ('text:wiki', 'text', 'digits')
    """
    return f"{name}:{Path(text).stem}" if name == "text" and text is not None else name


def make(name: str, *, text: str | None = None, **settings: Any) -> Task:
    """Make a task by name.

    Args:
        name: in :data:`TASKS`.
        text: file for the task ``text``, ignored by other tasks; None: the text that comes with Python.
        settings: of the task.
    """
    return TASKS[name](**settings, **({"path": text} if name == "text" else {}))


def check(names: Sequence[str], *, ranks: int, text: str | None) -> None:
    """Make each task once, so that errors come before anything is started.

    Args:
        names: in :data:`TASKS`.
        ranks: the largest number of ranks.
        text: file for the task ``text``; read even without that task.

    Raises:
        ValueError: for a text that cannot be read or is too short, and for too many ranks for the examples.
    """
    if text is not None:
        _read(text)
    for name in dict.fromkeys(names):
        make(name, ranks=ranks, text=text)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise ValueError(f"Expected text to be a file in UTF-8, but got {path}: {reason}.") from error


def record(task: Task, steps: int) -> Iterator[Tensor]:
    """Train densely and yield the (n, numel) gradients of each step."""
    for _ in range(steps):
        rows = task.gradients()
        yield rows
        task.apply(rows.mean(0))


def heavy_tail(*, ranks: int, numel: int = 100_000, steps: int = 200, seed: int = 0) -> Iterator[Tensor]:
    """Yield synthetic gradients with heavy tails: Student's t with 3 degrees of freedom, times a scale per layer.

    Ten layers have log-normal scales, half of each step's gradient is common to all ranks, and all scales drop by ten
    in the middle of the stream, as after a change of the learning rate.

    Args:
        ranks: number of ranks.
        numel: coordinates.
        steps: length of the stream.
        seed: of everything.
    """
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp(1.5 * torch.randn(10, generator=generator, device="cpu"))
    layers = scales.repeat_interleave(-(-numel // 10))[:numel]

    def student(*shape: int) -> Tensor:
        normal = torch.randn(*shape, generator=generator, device="cpu")
        chi = sum(torch.randn(*shape, generator=generator, device="cpu").square() for _ in range(3))
        return normal / (chi / 3).sqrt()  # type: ignore[union-attr]

    for step in range(steps):
        scale = 1e-3 if step < steps // 2 else 1e-4
        yield scale * layers * (0.5 * student(1, numel) + 0.5 * student(ranks, numel))

"""Every method of the race does what its authors' rules say, and no neighbour is crippled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_sparse as ls
from benchmarks.adam import loss_of
from benchmarks.race.methods.blocks import Turned, cosines, hadamard
from benchmarks.race.methods.demo import DeMo, packed, unpacked
from benchmarks.race.methods.dense import Dense, PowerSGD
from benchmarks.race.methods.local import Local
from benchmarks.race.methods.ours import ByRoot, Chunked, Ours, TopK
from benchmarks.race.methods.sparseloco import SparseLoCo, packed_of, quantized
from benchmarks.race.run import Run, Simulation
from benchmarks.race.tasks import TASKS
from lightning_sparse.core.step import Context
from lightning_sparse.methods.density import count
from tests.benchmarks import small
from tests.benchmarks.small import ALL, load, methods, take, values
from tests.ranks import Ranks
from tests.reference.partitioned import reference_top_k

MATRICES = 64 * 32 + 32 * 80 + 96 * 65
NUMEL = MATRICES + 10


@pytest.fixture(autouse=True)
def known_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "small", small.SMALL)


def gradients(steps: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(steps, n, NUMEL, generator=torch.Generator().manual_seed(seed))


KINDS = list({name.rstrip("-0123456789"): name for name in reversed(ALL)}.values())
"""Of each method one."""


@pytest.mark.thorough
@pytest.mark.parametrize("names", [pytest.param(KINDS, id="kinds"), pytest.param(ALL, id="all")])
def test_one_text_runs_simulated_and_between_processes(two_ranks: Ranks, names: list[str]) -> None:
    simulated = small.simulated(names, 2)
    for between in two_ranks(small.trained_between_processes, names):
        for name, (own, sent), (others, other_sent) in zip(names, simulated, between, strict=True):
            assert sent == other_sent, name
            assert all(torch.equal(a, b) for a, b in zip(own, others, strict=True)), name


def test_dense_equals_torch_on_the_joined_batch() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        small.small_task(clips="average", clip=0.5)
        simulation = Simulation(Run("small", "dense", 4.0), load(Path()))
        simulation.train(lambda: simulation.done >= 10, None)
        task = TASKS["small"]
        torch.manual_seed(0)
        model = simulation.ranks[0].loaded.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=task.betas, weight_decay=0.1)
        generator = torch.Generator().manual_seed(1)
        for step in range(10):
            x, y = zip(*(simulation.ranks[0].loaded.draw(generator, task.batch) for _ in range(2)), strict=True)
            optimizer.zero_grad()
            loss_of(model, torch.cat(x), torch.cat(y)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.param_groups[0]["lr"] = task.rate_at(step, 4.0)
            optimizer.step()
        for rank in simulation.ranks:
            for own, other in zip(rank.model.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_averaging_after_every_step_is_ddp(two_ranks: Ranks, momentum: float) -> None:
    assert two_ranks(small.one_local_step_and_ddp, momentum) == [True, True]


def test_outer_steps_are_those_of_nesterov() -> None:
    ranks = methods(Local, 2, every=2, outer=0.7, momentum=0.9, steps=8)
    begin, velocity = values(ranks[0]), torch.zeros(NUMEL)
    for step, rows in enumerate(gradients(8, 2)):
        if step % 2 == 1:  # what the ranks will have gone, from copies that do not meet
            sizes = [p.numel() for p in ranks[0].flat.both]
            for method, row in zip(ranks, rows, strict=True):
                for p, part in zip(method.flat.both, row.split(sizes), strict=True):
                    p.grad.copy_(part)
                for group in method.optimizer.param_groups:
                    group["lr"] = 0.01
                method.optimizer.step()
            gone = begin - torch.stack([values(method) for method in ranks]).mean(0)
            small.drive_ranks([method.meet() for method in ranks])
            velocity = 0.9 * velocity + gone
            begin = begin - 0.7 * (gone + 0.9 * velocity)
            for method in ranks:
                torch.testing.assert_close(values(method), begin)
        else:
            take(ranks, rows, 0.01, step)


def test_powersgd_is_torchs_own(two_ranks: Ranks) -> None:
    for apart, size in two_ranks(small.powersgd_of_torch, 20):
        assert apart < 1e-5 * size


def test_powersgd_of_full_rank_is_dense() -> None:
    low = methods(PowerSGD, 3, rank=96, begin=0, least=0.0)
    full = methods(Dense, 3)
    for step, rows in enumerate(gradients(5, 3)):
        take(low, rows, 0.01, step)
        take(full, rows, 0.01, step)
        mean = rows.mean(0)[:MATRICES]
        torch.testing.assert_close(low[0].flat.matrices.grad, mean, rtol=1e-3, atol=1e-5)
        assert float(sum(method.error for method in low).abs().max()) < 1e-4  # own gradients less the mean


def test_sparseloco_sends_14_bits_of_one_in_64() -> None:
    ranks = methods(SparseLoCo, 4, [(512, 128)], every=1)
    take(ranks, torch.randn(4, 512 * 128), 0.01, 0)
    picks = 512 * 128 // 64
    table = 16  # four values of the tensor
    assert ranks[0].matrices.bytes_sent == 3 * (picks * 14 / 8 + table)
    assert 32 * 512 * 128 / (picks * 14) == pytest.approx(146.3, abs=0.05)


def test_sparseloco_reads_what_it_has_packed() -> None:
    x = torch.randn(70, 130)
    message, (places, sent) = packed_of(x, 64)
    chunks = 3
    assert len(message) == chunks * 64 * 14 // 8 + 16
    assert len(places) == len(places.unique())
    flat = x.flatten()
    for chunk in range(chunks):
        inside = places[(places >= 4096 * chunk) & (places < 4096 * (chunk + 1))]
        part = flat[4096 * chunk : 4096 * (chunk + 1)]
        largest = part.abs().topk(64).indices + 4096 * chunk
        assert set(inside.tolist()) == set(largest.tolist())
    codes, table = quantized(flat[places])
    for code in codes.unique():
        assert sent[codes == code].mean() == pytest.approx(float(flat[places][codes == code].mean()), rel=1e-5)
        assert torch.all(sent[codes == code] == table[code])


def test_sparseloco_keeps_what_it_does_not_send_and_moves_by_contributors() -> None:
    ranks = methods(SparseLoCo, 2, [(64, 64)], every=1, k=4, decay=1.0)
    before = values(ranks[0])
    take(ranks, torch.randn(2, 4096), 0.01, 0)
    moved = before - values(ranks[0])
    assert torch.equal(values(ranks[0]), values(ranks[1]))
    assert 4 <= int((moved != 0).sum()) <= 8
    for method in ranks:
        assert int((method.error.abs() < 1e-2).sum()) == 4096 or float(method.error.abs().max()) < 0.02
        named = moved != 0
        assert float(moved[named].abs().min()) > 0.004  # not divided by ranks that named something else


def test_demo_with_all_coefficients_goes_by_signs() -> None:
    ranks = methods(DeMo, 2, k=4096, decay=0.0)
    for method in ranks:
        method.at = method.at._replace(decay=(0.0, 0.0))
    expected = values(ranks[0])
    for step, rows in enumerate(gradients(3, 2)):
        rows = rows.sign() * (1 + rows.abs())
        rows[1] = rows[0]  # means are away from zero, and rounding to bfloat16 changes no sign
        take(ranks, rows, 0.5, step)
        expected = expected - 0.5 * rows.mean(0).sign()
        agree = (values(ranks[0]) - expected).abs() < 1e-5
        assert float(agree.double().mean()) > 0.999
        expected = values(ranks[0]).clone()
    assert torch.equal(values(ranks[0]), values(ranks[1]))


def test_demo_and_distro_send_what_their_codes_say() -> None:
    blocks = 2 * 1 + 1 * 1 + 2 * 5  # 64 x 32 in one, 32 x 80 in two of 40, 96 x 65 in two of 48 by five of 13
    blocks = 1 + 2 + 10
    for settings, each in (({"k": 32}, 32 * 4.0), ({"k": 4, "signs": True}, 4 * 2.0)):
        [first, *_] = ranks = methods(DeMo, 4, **settings)
        take(ranks, gradients(1, 4)[0], 0.01, 0)
        bits = 0.0 if "signs" not in settings else -(-4 * blocks // 8)
        assert first.matrices.bytes_sent == 3 * (blocks * each + bits)


TRACE = {
    (64, 32): ([10, -24, -6, -4, 18, -4, -10, 12, 2, 0, 6, 10], [818, 19566, 286692]),
    (32, 80): ([16, -12, 18, 2, 6, 0, 6, -8, 4, -2, 0, 4], [-1216, 27572, 454856]),
    (10,): ([-18, 36, -12, 30, 36, 34, -20, 22, 24, 32], [164, 264, 7600]),
    (96, 65): ([4, 22, 2, -6, -6, -8, 12, 24, 4, 2, -14, -18], [-2032, 81128, 1594880]),
}
"""Parameters after 50 steps of the authors' own optimizer (bloc97/DeMo 0e48145, `demo.py`) on two ranks, from zero,
with a rate of 1 and no weight decay: twelve of them, and the sums of all, of magnitudes and of squares."""


def test_demo_is_that_of_its_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeMo, "wire", torch.float32)
    ranks = methods(DeMo, 2, k=32, decay=0.999)
    for method in ranks:
        method.at = method.at._replace(decay=(0.0, 0.0))
        method.flat.load([torch.zeros_like(p) for p in method.flat.both])

    def drawn(seed: int) -> torch.Tensor:
        return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))

    sizes = [torch.Size(shape).numel() for shape in small.SHAPES]
    for step in range(50):
        rows = []
        for rank in range(2):
            parts = (drawn(1000 * rank + step) + 0.5 * drawn(77)).split(sizes)  # in the order of SHAPES
            rows.append(torch.cat([parts[0], parts[1], parts[3], parts[2]]))
        take(ranks, torch.stack(rows), 1.0, step)
    sizes = [64 * 32, 32 * 80, 96 * 65, 10]
    for shape, found in zip([(64, 32), (32, 80), (96, 65), (10,)], values(ranks[0]).split(sizes), strict=True):
        some, sums = TRACE[shape]
        assert found[:: max(1, len(found) // 12)][:12].tolist() == some
        own = [found.sum(), found.abs().sum(), found.square().sum()]
        assert [float(x) for x in own] == pytest.approx(sums, rel=1e-3, abs=8)


def test_bits_come_back() -> None:
    bits = torch.randn(37) > 0
    assert torch.equal(unpacked(packed(bits), 37) > 0, bits)


def test_top_k_is_that_of_the_oracle() -> None:
    stream = gradients(6, 3)
    records = reference_top_k([rows[:, :MATRICES].numpy() for rows in stream], 0.01, release="own")
    ranks = methods(TopK, 3, density=0.01)
    for step, (rows, record) in enumerate(zip(stream, records, strict=True)):
        take(ranks, rows, 0.01, step)
        torch.testing.assert_close(ranks[0].flat.matrices.grad, torch.from_numpy(record.update))


def check_ours(n: int, numel: int, places: list[Any], **settings: Any) -> None:
    """Steps are those of the library, of each part of the numbers by itself, with the step of the engine."""
    stream, memory = gradients(6, n), ls.memories.SecondMoment(0.95)
    traces = [
        [*ls.simulate(stream[..., place], sparsifier="union_top_k", density=0.05, memory=memory)] for place in places
    ]
    first = stream[0][..., torch.cat([torch.arange(NUMEL)[place] for place in places])].double()
    share = float(first.mean(0).square().sum() / first.square().sum(1).mean())  # compared in the first step
    for method in (Ours, ByRoot):
        ranks = methods(method, n, density=0.05, **settings)
        compares = method is Ours and n > 2
        sent = 8 * 252 * 2 * (n - 1) / n if compares else 0.0
        take(ranks, stream[0], 0.01, 0)
        factor = ranks[0].diversity.factor(n)
        assert factor == pytest.approx(min((1 + 2 / n) / share, n) ** 0.5 if compares else n**0.5, rel=0.1)
        ranks = methods(method, n, density=0.05, **settings)
        check_steps(ranks, stream, places, traces, factor, sent)
        assert (ranks[0].vectors.bytes_sent == 0) == (numel == NUMEL)


def check_steps(
    ranks: list[Any], stream: torch.Tensor, places: list[Any], traces: list[list[Any]], factor: float, sent: float
) -> None:
    """Given what each part's updates are, what steps are longer by, and the bytes that are sent beside these."""
    for step, rows in enumerate(stream):
        before = values(ranks[0])
        take(ranks, rows, 0.01, step)
        for place, trace in zip(places, (of_part[step] for of_part in traces), strict=True):
            expected = before[place] * (1 - 0.001) - 0.01 * factor * trace.update / trace.divisor
            torch.testing.assert_close(values(ranks[0])[place], expected, atol=1e-6, rtol=1e-5)
            sent += float(trace.bytes_sent[0])
        assert ranks[0].matrices.bytes_sent == pytest.approx(sent, rel=1e-12)


def test_ours_is_the_library_with_the_step_of_the_engine() -> None:
    check_ours(3, MATRICES, [slice(0, MATRICES)])


def test_parts_of_the_rows_are_exchanged_one_by_one() -> None:
    sizes = [64 * 32, 32 * 80, 96 * 65]
    halves: list[list[torch.Tensor]] = [[], []]
    for first, (rows, columns) in zip((0, sizes[0], sizes[0] + sizes[1]), [(64, 32), (32, 80), (96, 65)], strict=True):
        middle = first + rows // 2 * columns
        halves[0].append(torch.arange(first, middle))
        halves[1].append(torch.arange(middle, first + rows * columns))
    check_ours(2, MATRICES, [torch.cat(half) for half in halves], parts=2)


def test_vectors_can_join_the_group() -> None:
    check_ours(3, NUMEL, [slice(None)], whole=True)


def test_averages_that_come_late_are_the_same_ones() -> None:
    stream = gradients(6, 2)
    now, late = methods(Ours, 2, density=0.05, steps=6), methods(Ours, 2, density=0.05, late=True, steps=6)
    for method in (*now, *late):
        method.at = method.at._replace(decay=(0.0, 0.0))
    states = []
    for step, rows in enumerate(stream):
        take(now, rows, 0.01, step)
        states.append(now[0].flat.matrices.data.clone())
        take(late, rows, 0.01, step)
        if 0 < step < 5:
            assert torch.equal(late[0].flat.matrices.data, states[step - 1])
    assert torch.equal(late[0].flat.matrices.data, states[-1])


def test_an_extrapolated_training_ends_where_its_averages_lead() -> None:
    stream, settings = gradients(6, 2), {"density": 0.05, "late": True, "steps": 6}
    late, ahead = methods(Ours, 2, **settings), methods(Ours, 2, **settings, ahead=1.0)
    for method in (*late, *ahead):
        method.at = method.at._replace(decay=(0.0, 0.0))
    places = [late[0].flat.matrices.data.clone()]
    for step, rows in enumerate(stream):
        take(late, rows, 0.01, step)
        take(ahead, rows, 0.01, step)
        places.append(late[0].flat.matrices.data.clone())
        if step < 5:
            expected = places[-1] + (places[-1] - places[-2])
            torch.testing.assert_close(ahead[0].flat.matrices.data, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ahead[0].flat.matrices.data, places[-1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(64, 64), (2000, 96), (65, 128), (5, 7), (1, 130)])
def test_turning_loses_nothing(shape: tuple[int, int]) -> None:
    turned, x = Turned(shape, 0), torch.randn(shape[0] * shape[1])
    there = turned.turn(x)
    assert float(there.norm()) == pytest.approx(float(x.norm()), rel=1e-5)
    torch.testing.assert_close(turned.back(there), x, atol=1e-5, rtol=1e-5)


def test_bases_are_orthonormal() -> None:
    for n in (1, 13, 50, 64):
        torch.testing.assert_close(cosines(n) @ cosines(n).T, torch.eye(n), atol=1e-5, rtol=0)
    for n in (1, 2, 64):
        torch.testing.assert_close(hadamard(n) @ hadamard(n), torch.eye(n), atol=1e-5, rtol=0)


def test_chunks_have_as_many_picks_each() -> None:
    generator = torch.Generator().manual_seed(0)
    acc, chunk = torch.randn(3 * 4096 + 1000, generator=generator), 4096
    sparsifier = Chunked()
    state = sparsifier.init(len(acc), 1, 0.0102, acc.device)
    for step in range(6):
        selection, state = sparsifier.select(acc, state, Context(step, 0.0102, 0, 1))
        picked = selection.indices[: int(selection.count)].tolist()
        assert picked == sorted(set(picked)) and len(picked) == count(0.0102, len(acc))
        for begin in range(0, len(acc), chunk):
            part = acc[begin : begin + chunk].abs()
            own = [i - begin for i in picked if begin <= i < begin + chunk]
            assert len(own) in (33, 34)
            assert sorted(own) == sorted(part.argsort(descending=True)[: len(own)].tolist())

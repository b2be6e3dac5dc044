"""What an engine saves and loads, what it empties, and how ranks fail together."""

from __future__ import annotations

import copy
import io
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine.state.schema import checksum, from_plain, to_plain
from lightning_sparse.methods.sparsifiers import SPARSIFIERS
from tests.covering import by_default
from tests.engines import Raises
from tests.ranks import Ranks, error_of
from tests.trainers import EVERYTHING_SPARSE

SPARSE = ls.Rules(dense_ndim=0, dense_numel=0)
MEMORIES = [
    ls.memories.Residual(),
    ls.memories.LowPass(0.3),
    ls.memories.MomentumCorrection(0.9),
    ls.memories.AdamCorrection(beta1=0.5),
    ls.memories.ClipByNorm(0.5, ls.memories.MomentumCorrection(0.5)),
    ls.memories.WeightDecay(0.01),
    ls.memories.NoMemory(),
]


class Run:
    """A small model that trains on its own data; the step's number decides about the batch."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 10))
        self.ddp = DistributedDataParallel(self.model)
        chosen = {"sparsifier": "top_k", "density": 0.02, "rules": SPARSE, "grouping": "layer", "watch": None}
        self.engine = ls.attach(self.ddp, **chosen | options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(100 * self.step + dist.get_rank())
            self.optimizer.zero_grad()
            self.ddp(torch.randn(8, 20, generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.step += 1

    def save(self) -> bytes:
        file = io.BytesIO()
        state = {"model": self.model.state_dict(), "engine": self.engine.state_dict(), "step": self.step}
        torch.save(state, file)
        return file.getvalue()

    def load(self, saved: bytes) -> list[str]:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.step = state["step"]
        return self.engine.load_state_dict(state["engine"])

    def digest(self) -> list[Tensor]:
        parameters = [p.detach().clone() for p in self.model.parameters()]
        state = self.engine.state_dict()
        remembered = [vector for vectors in state["parameters"].values() for vector in vectors.values()]
        return parameters + remembered + tensors(state["groups"])


def tensors(plain: Any) -> list[Tensor]:
    if isinstance(plain, Tensor):
        return [plain]
    if isinstance(plain, dict):
        return [x for value in plain.values() for x in tensors(value)]
    return [x for value in plain for x in tensors(value)] if isinstance(plain, list) else []


class TwoOptimizers(Run):
    """The last layer is stepped by an optimizer of its own, every other time; engines find both when they step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.optimizer, self.second = (torch.optim.SGD(self.model[n].parameters(), 0.1) for n in (0, 2))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            super().train(1)
            if self.step % 2:
                self.second.step()
                self.second.zero_grad()


def go_on(options: dict[str, Any], kind: type[Run] = Run) -> tuple[bool, list[str], int]:
    """Whether a run that is saved and loaded goes on exactly like one that is not."""
    whole = kind(**options)
    whole.train(5)
    saved = whole.save()
    whole.train(4)
    expected, step = whole.digest(), whole.engine.step
    resumed = kind(**options)
    notes = resumed.load(saved)
    resumed.train(4)
    found = resumed.digest()
    same = len(found) == len(expected) and all(map(torch.equal, found, expected)) and resumed.engine.step == step
    return same, notes, len(found)


RUNS: list[dict[str, Any]] = [
    *({"sparsifier": sparsifier} for sparsifier in ("top_k", "exdyna", "sidco_e")),  # others: test_checkpoints.py
    {"sparsifier": ls.sparsifiers.MiCRO(variant="published")},
    {"sparsifier": ls.sparsifiers.ExDyna(variant="published", num_blocks=4), "density": 0.1},
    *({"memory": memory, "sparsifier": "union_top_k"} for memory in MEMORIES),
    {"density": ls.Warmup(0.25, 0.01, 10)},
    *({"grouping": grouping} for grouping in ("bucket", "model", ls.grouping.MergeBelow(500))),
    {"rules": ls.Rules(densities={"0.*": 0.1})},
]


@pytest.mark.parametrize("options", by_default(RUNS, 7), ids=lambda options: "-".join(map(str, options.values())))
def test_a_run_that_was_saved_goes_on_bit_for_bit(two_ranks: Ranks, options: dict[str, Any]) -> None:
    for same, notes, size in two_ranks(go_on, options):
        assert same
        assert notes == []
        assert size >= 8


@pytest.mark.parametrize("options", [{"sparsifier": "exdyna"}, {"density": ls.Warmup(0.25, 0.01, 10)}], ids=str)
def test_groups_that_optimizers_have_cut_go_on_bit_for_bit(two_ranks: Ranks, options: dict[str, Any]) -> None:
    for same, notes, size in two_ranks(go_on, {**options, "grouping": "model"}, TwoOptimizers):
        assert same
        assert notes == []
        assert size >= 8


def load_into_others() -> list[list[str]]:
    first = Run(sparsifier="exdyna", memory=ls.memories.MomentumCorrection(0.9))
    first.train(4)
    saved = first.save()
    residuals = {name: first.engine.residual(name).clone() for name in ("0.weight", "2.bias")}
    notes = []
    for options in ({"sparsifier": "top_k"}, {"grouping": "model", "sparsifier": "exdyna"}, {"rules": ls.Rules()}):
        other = Run(**options)
        notes.append(other.load(saved))
        for name, residual in residuals.items():
            assert torch.equal(other.engine.residual(name), residual), (options, name)
        other.train(2)
        other.engine.close()
    return notes


def test_residuals_move_to_engines_with_other_settings_and_what_does_not_is_named(two_ranks: Ranks) -> None:
    for top_k, model, default in two_ranks(load_into_others):
        assert any("ExDyna" in note and "TopK" in note for note in top_k)
        assert "The memory keeps no momentum: that of 0.weight is dropped." in top_k
        assert any("group 0 starts anew" in note for note in top_k)
        assert any("group model starts anew" in note for note in model)
        assert any("group 2 starts anew" in note for note in default)
        assert not any("dense.bucket0" in note for note in default)  # where nothing that was learned is used


def merge_adam() -> tuple[float, float, list[str]]:
    first = Run(memory=ls.memories.AdamCorrection(), rules=ls.Rules())
    first.train(5)
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, first.engine.state_dict())
    other = Run(memory=ls.memories.AdamCorrection(), grouping="model")
    notes = other.engine.load_state_dict(ls.merge_states(states))
    [group] = other.engine.stepper.groups
    second = sum(float(s["parameters"]["0.weight"]["second"].sum()) for s in states) / len(states)
    found = float(group.memory.vectors(group.state.memory)["second"][group.spans["0.weight"]].sum())
    return float(group.memory.counters(group.state.memory)["steps"]), found / second, notes


def test_moments_keep_the_number_of_their_steps_in_other_groups_and_on_other_ranks(two_ranks: Ranks) -> None:
    for steps, share, notes in two_ranks(merge_adam):
        assert steps == 5
        assert share == pytest.approx(1)
        assert notes == []


def load_another_model() -> list[str]:
    first = Run()
    first.train(2)
    state = first.engine.state_dict()
    state["parameters"]["gone.weight"] = {"residual": torch.ones(3)}
    state["parameters"]["0.bias"], state["spans"]["0.bias"] = {"residual": torch.ones(7)}, [0, 7, 7]
    other = Run()
    notes = other.engine.load_state_dict(state)
    assert not other.engine.residual("0.bias").any()
    return notes


def test_parameters_that_have_changed_are_named(two_ranks: Ranks) -> None:
    for notes in two_ranks(load_another_model):
        assert notes == [
            "0.bias had 7 coordinates and has 40: its residual is dropped.",
            "There is no parameter gone.weight any more.",
        ]


# ---- What one rank cannot load, no rank loads


def put(value: Any, *path: Any) -> Any:
    """A change of a state: what lies there is something else."""

    def change(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return change


def drop(*path: Any) -> Any:
    def change(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return change


def pending(averages: Any) -> Any:
    return put({"0.bias": averages}, "pending")


def int32(*indices: int) -> Tensor:
    return torch.tensor(indices, dtype=torch.int32)


NO_STATES: dict[str, Any] = {
    "Expected a state of format 4, as Engine.state_dict() gives it, but got format 77.": put(77, "format"),
    "but got format 2.": put(2, "format"),
    "but got format nothing.": drop("format"),
    "step to be an integer from 0 on, but got nothing": drop("step"),
    "step to be an integer from 0 on, but got True": put(True, "step"),
    "settings to be a dict of settings as plain data, but got None": put(None, "settings"),
    "dict of settings as plain data, but got {1: 2}": put({1: 2}, "settings"),
    "parameters to be a dict with names as keys, but got nothing": drop("parameters"),
    "counters to be a dict with names as keys, but got {1: 2}": put({1: 2}, "counters"),
    "groups to be a list": put({}, "groups"),
    "as Engine.state_dict() gives it, but got format True.": put(True, "format"),
    "steps of 0.bias of the state's counters to be a finite number, but got 'many'": put(
        {"0.bias": {"steps": "many"}}, "counters"
    ),
    "a rank below 2 in the state, but got 2": put(2, "rank"),
    "spans to be a dict with names as keys, but got None": put(None, "spans"),
    "0.bias of the state's spans to be a list of a start, a length and": put([0, 41, 40], "spans", "0.bias"),
    "Expected 39 coordinates of 0.bias in residual, but got 40": put([1, 39, 40], "spans", "0.bias"),
    "absorbed to be a list, but got '0.bias'": put("0.bias", "absorbed"),
    "the state's pending to be a dict": put([], "pending"),
    "0.bias of the state's pending to be a dict with names as keys, but got a list": pending([0.5] * 40),
    "values of 0.bias of the state's pending to be a vector": pending({}),
    "values of 0.bias of the state's pending to be a vector of finite": pending(
        {"values": torch.full((40,), float("nan"))}
    ),
    "indices of 0.bias of the state's pending to be": pending({"values": torch.ones(2), "indices": int32(3, 3)}),
    "ascending int32 coordinates": pending({"values": torch.ones(2), "indices": int32(3, 4).long()}),
    "vector of ascending": pending({"values": torch.ones(2), "indices": int32(-1, 4)}),
    "Expected an average below 40 in 0.bias, but got 40": pending({"values": torch.ones(2), "indices": int32(3, 40)}),
    "Expected 2 pending averages of 0.bias, but got 3": pending({"values": torch.ones(3), "indices": int32(3, 4)}),
    "Expected 40 pending averages of 0.bias, but got 3": pending({"values": torch.ones(3)}),
    "span of gone, of which averages are pending, to be a list": put({"gone": {"values": torch.ones(3)}}, "pending"),
    "residual of 0.bias of the state's parameters to be a vector": put(
        torch.ones(40, dtype=torch.int32), "parameters", "0.bias", "residual"
    ),
    "shape (4, 10)": put(torch.ones(4, 10), "parameters", "0.bias", "residual"),
    "residual of 2.bias": put([1.0], "parameters", "2.bias", "residual"),
    "numbers that are not finite": put(torch.full((40,), float("inf")), "parameters", "0.bias", "residual"),
    "parameters of number 0 of the state's groups to be a list, but got nothing": drop("groups", 0, "parameters"),
    "dense of number 0 of the state's groups to be True or False, but got 1": put(1, "groups", 0, "dense"),
    "state of number 1 of the state's groups to be a dict": put(0.1, "groups", 1, "state"),
    "do not belong together": put(5, "step"),
    "ranks do not belong together": put([0, 40, 41], "spans", "0.bias"),
    "40 coordinates of 0.bias in residual, but got 41": put(torch.ones(41), "parameters", "0.bias", "residual"),
    "the states of the ranks do not belong": drop("parameters", "0.bias", "residual"),
    "states of the ranks do not belong": put(torch.ones(40).double(), "parameters", "0.bias", "residual"),
}


def load_damaged() -> list[tuple[str, str, bool]]:
    """For each damage on rank 1: what was expected, what was raised, and whether anything has changed."""
    first = Run(sparsifier="exdyna")
    first.train(3)
    saved = first.engine.state_dict()
    run = Run(sparsifier="exdyna")
    run.train(2)
    before = run.digest()
    raised = []
    for words, change in NO_STATES.items():
        state = copy.deepcopy(saved)
        if dist.get_rank() == 1:
            change(state)
        try:
            run.engine.load_state_dict(state)
        except ValueError as error:
            unchanged = run.engine.step == 2 and all(map(torch.equal, run.digest(), before))
            raised.append((words, str(error), unchanged))
    run.engine.load_state_dict(saved)
    assert run.engine.step == 3
    return raised


def test_a_state_that_one_rank_cannot_load_changes_nothing_on_any(two_ranks: Ranks) -> None:
    first, other = two_ranks(load_damaged)
    assert first == other
    assert len(first) == len(NO_STATES)
    for words, message, unchanged in first:
        assert words in message
        assert "no rank has loaded it" in message
        assert "rank 1: " in message or "do not belong together" in message
        assert unchanged


LEARNED: dict[str, tuple[dict[str, Any], Any]] = {
    "part missing": ({"sparsifier": "exdyna"}, drop("groups", 0, "state", "selector", 2)),
    "no selector": ({"sparsifier": "exdyna"}, drop("groups", 0, "state", "selector")),
    "shape": ({"sparsifier": "exdyna"}, put(torch.ones(3).long(), "groups", 0, "state", "selector", 0, 0)),
    "dtype": ({"sparsifier": "exdyna"}, put(torch.ones(2), "groups", 0, "state", "selector", 0, 0)),
    "text": ({"sparsifier": "union_top_k"}, put("large", "groups", 0, "state", "selector", 0, 0)),
    "vector": ({"sparsifier": "hard_threshold"}, put(torch.ones(3), "groups", 0, "state", "selector", 0)),
    "counts": ({"sparsifier": "exdyna"}, put(torch.ones(3).long(), "groups", 0, "state", "selector", 1)),
    "union": ({"sparsifier": "exdyna"}, put(None, "groups", 0, "state", "selector", 2)),
    "numel": ({}, put(7, "groups", 0, "numel")),
}


def load_half_learned(case: str) -> tuple[list[str], Any, list[Tensor]]:
    """What the first group has learned fits on rank 0 only; notes, what groups know then, and parameters later."""
    options, change = LEARNED[case]
    options = options | {"grouping": "layer"}
    first = Run(**options)
    first.train(4)
    saved = copy.deepcopy(first.engine.state_dict())
    model = first.model.state_dict()
    if dist.get_rank() == 1:
        change(saved)
    run = Run(**options)
    run.model.load_state_dict(model)
    try:
        notes = run.engine.load_state_dict(saved)
    except ValueError as error:
        notes = [str(error)]
    known = [group["state"] for group in run.engine.state_dict()["groups"]]
    run.train(3)
    return notes, known, [p.detach() for p in run.model.parameters()]


@pytest.mark.parametrize("case", by_default(LEARNED, 4))
def test_what_a_group_has_learned_starts_anew_on_all_ranks_or_on_none(two_ranks: Ranks, case: str) -> None:
    (notes, known, parameters), (own_notes, own_known, own_parameters) = two_ranks(load_half_learned, case)
    assert all(map(torch.equal, parameters, own_parameters))
    if case == "numel":  # which is seen to differ from rank to rank, as all that groups are made of
        assert "do not belong together" in notes[0] and notes == own_notes
        return
    assert notes == ["What was learned about the group 2 starts anew, because it does not fit on rank 1."]
    assert len(own_notes) == 1
    assert own_notes[0].startswith("What was learned about the group 2 starts anew, because it does not fit: Expected ")
    for index, (state, own_state) in enumerate(zip(known, own_known, strict=True)):
        for one in (state, own_state):
            [_, counts, _] = one["selector"]
            assert (counts is None) == (index == 0)  # anew; the other group goes on


def load_of_another_run() -> tuple[list[str], list[float]]:
    """Rank 1 brings the state of a run in which ranks have selected alike; notes, and bytes of steps that follow."""
    states, options = [], {"sparsifier": "union_top_k", "density": 0.1}
    for alike in (False, True):
        run = Run(**options)
        generator = torch.Generator().manual_seed(0 if alike else dist.get_rank())
        for _ in range(4):
            run.optimizer.zero_grad()
            run.ddp(torch.randn(8, 20, generator=generator)).square().mean().backward()
            run.optimizer.step()
        states.append(run.engine.state_dict())
    run = Run(**options)
    notes = run.engine.load_state_dict(states[dist.get_rank()])
    run.train(2)
    return notes, [group.statistics.bytes_sent for group in run.engine.stepper.groups]  # type: ignore[union-attr]


def test_what_groups_have_learned_in_different_runs_is_not_mixed(two_ranks: Ranks) -> None:
    (notes, sent), (same, alike) = two_ranks(load_of_another_run)
    assert notes == same and sent == alike
    assert notes and all("starts anew, because ranks bring states of different runs" in note for note in notes)


# ---- Parameters with other names


def rename(change: str) -> tuple[list[str], dict[str, bool], int]:
    """An engine takes over from one whose model was pruned, or has another layer since; what it then remembers."""
    first = Run(memory=ls.memories.MomentumCorrection(0.9))
    first.train(4)
    state, parameters = first.engine.state_dict(), first.engine.stepper.parameters
    first.engine.close()
    if change == "prune":
        torch.nn.utils.prune.l1_unstructured(first.model[0], "weight", 0.5)
    else:
        first.model[0] = nn.Linear(20, 40)
    names = {id(p): name for name, p in first.model.named_parameters()}
    engine = ls.attach(
        DistributedDataParallel(first.model),
        sparsifier="top_k",
        density=0.02,
        rules=SPARSE,
        memory=ls.memories.MomentumCorrection(0.9),
        watch=None,
    )
    lost = engine._take_over(state, parameters)
    after = engine.state_dict()["parameters"]
    same = {}
    for old, parameter in parameters.items():
        vectors = after.get(names.get(id(parameter), ""), {})
        same[old] = bool(vectors) and all(torch.equal(vectors[key], v) for key, v in state["parameters"][old].items())
    step = engine.step
    return lost, same, step


def test_what_is_remembered_follows_parameters_whatever_their_names(two_ranks: Ranks) -> None:
    for lost, same, step in two_ranks(rename, "prune"):
        assert lost == []
        assert same == dict.fromkeys(("0.weight", "0.bias", "2.weight", "2.bias"), True)
        assert step == 4


def test_a_parameter_that_took_the_place_of_another_one_inherits_nothing(two_ranks: Ranks) -> None:
    for lost, same, step in two_ranks(rename, "replace"):
        assert lost == ["There is no parameter 0.weight any more.", "There is no parameter 0.bias any more."]
        assert same == {"0.weight": False, "0.bias": False, "2.weight": True, "2.bias": True}
        assert step == 4


def test_plain_data_is_made_into_the_same_state_again() -> None:
    device = torch.device("cpu")
    for _, kind in SPARSIFIERS.items():
        state = kind().init(10_000, 4, 0.01, device)
        back = from_plain(to_plain(state), state)
        assert type(back) is type(state)
        assert repr(back) == repr(state)
    with pytest.raises(ValueError, match="Expected 2 parts"):
        from_plain([1], (1, 2))
    with pytest.raises(ValueError, match="Expected a tensor of shape"):
        from_plain(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="got 1 parts"):
        from_plain([1], None)
    with pytest.raises(ValueError, match=r"Expected something like 0\.5, but got '0\.5'"):
        from_plain("0.5", 0.5)
    with pytest.raises(ValueError, match="Expected a tensor of shape"):
        from_plain(torch.zeros(2), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_every_bit_counts_in_a_checksum(dtype: torch.dtype) -> None:
    vector = torch.arange(7).to(dtype)
    content = {"a": [1, 2.5, None, "x", True], "vector": vector, "none": torch.empty(0), "scalar": torch.tensor(3)}
    seen = {checksum(content)}
    assert checksum({key: content[key] for key in reversed(content)}) in seen
    assert checksum(content | {"a": (1, 2.5, None, "x", True)}) in seen
    for bit in range(0, 8 * vector.nbytes, 1 if dtype != torch.bool else 8):
        other = vector.clone()
        other.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        seen.add(checksum(content | {"vector": other}))
    others = [
        {"a": [1, 2.5, None, "x", 1]},
        {"b": 1},
        {"vector": vector.view(7, 1)},
        {"a": [1, [2.5], None, "x", True]},
    ]
    seen |= {checksum(content | other) for other in others}
    assert len(seen) == 1 + (8 * vector.nbytes if dtype != torch.bool else 7) + len(others)
    with pytest.raises(TypeError, match="Expected plain data, but got set"):
        checksum({"a": {1, 2}})


# ---- Emptying residuals


def empty() -> tuple[Tensor, Tensor, Tensor, list[bool]]:
    """Sum of all averages, and of all gradients, after a dense step; what residuals hold then."""
    run = Run(memory=ls.memories.Residual())
    local = torch.zeros(sum(p.numel() for p in run.model.parameters()))
    averages = torch.zeros_like(local)
    pieces: dict[int, Tensor] = {}
    for number, parameter in enumerate(run.model.parameters()):
        parameter.register_hook(lambda grad, number=number: pieces.__setitem__(number, grad.clone()))
    sparse = []
    for step in range(5):
        if step == 4:
            run.engine._flush_next_step()
        run.train(1)
        local += torch.cat([pieces[i].flatten() for i in range(len(pieces))])
        averages += torch.cat([p.grad.flatten() for p in run.model.parameters()])
        sparse.append(bool((run.model[0].weight.grad == 0).any()))
    left = torch.cat([run.engine.residual(name) for name, _ in run.model.named_parameters()])
    run.train(1)
    sparse.append(bool((run.model[0].weight.grad == 0).any()))
    dist.all_reduce(local)
    return averages, local / dist.get_world_size(), left, sparse


def test_a_dense_step_sends_all_that_is_left(two_ranks: Ranks) -> None:
    for averages, gradients, left, sparse in two_ranks(empty):
        assert not left.any()
        torch.testing.assert_close(averages, gradients, rtol=1e-5, atol=1e-7)
        assert sparse == [True] * 4 + [False, True]


def take_pending() -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    run = Run(rules=ls.Rules(dense=["2.weight"], dense_ndim=0, dense_numel=0))
    run.model[0].weight.data = run.model[0].weight.data.clone()
    run.train(4)
    own = {name: run.engine.residual(name) for name, _ in run.model.named_parameters()}
    mean = {}
    for name, residual in own.items():
        if residual is not None:
            mean[name] = residual.clone()
            dist.all_reduce(mean[name])
            mean[name] /= dist.get_world_size()
    pending = run.engine._take_pending()
    left = any(run.engine.residual(name).any() for name in mean)
    return {name: value.flatten() for name, value in pending.items()}, mean, bool(left)


def test_what_is_pending_is_the_mean_of_residuals_and_is_taken_once(two_ranks: Ranks) -> None:
    for pending, mean, left in two_ranks(take_pending):
        assert not left
        assert set(pending) == set(mean) == {"0.weight", "0.bias", "2.bias"}
        for name, value in pending.items():
            assert value.any()
            torch.testing.assert_close(value, mean[name])


# ---- Frozen parameters


def thaw() -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    engine = ls.attach(ddp, rules=SPARSE)
    ddp(torch.ones(1, 20)).sum().backward()
    engine.exchange(model.parameters())
    model[0].requires_grad_(True)
    ddp(torch.ones(1, 20)).sum().backward()
    return error_of(lambda: engine.exchange(model.parameters()))


def test_a_parameter_that_would_not_be_averaged_is_an_error(two_ranks: Ranks) -> None:
    for message in two_ranks(thaw):
        assert "0.weight needs gradients now, and did not when DistributedDataParallel was built" in message


# ---- Errors


@dataclass(frozen=True)
class FailsOnRank1(ls.sparsifiers.TopK):
    """Top-k with an error on one rank, in one step."""

    def select(self, acc: Tensor, state: Any, ctx: Any) -> Any:
        if ctx.rank == 1 and ctx.step == 2:
            raise ZeroDivisionError("only here")
        return super().select(acc, state, ctx)


def fail(options: dict[str, Any]) -> tuple[str, str, list[str], float]:
    run = Run(timeout=timedelta(seconds=30), **options)
    begin = time.monotonic()
    try:
        run.train(5)
    except Exception as error:
        taken = time.monotonic() - begin
        if dist.get_rank() == 1:
            time.sleep(0.2)  # alive, and not waited for
        return type(error).__name__, str(error), error.__notes__, taken
    return "", "", [], 0.0


@pytest.mark.parametrize(
    "options",
    by_default(
        [
            {"sparsifier": FailsOnRank1()},
            {"observers": [Raises(1, 2, ZeroDivisionError("only here"))]},
        ],
        1,
    ),
    ids=lambda options: "-".join(options),
)
def test_an_error_on_one_rank_ends_the_others_at_once(two_ranks: Ranks, options: dict[str, Any]) -> None:
    (other, message, notes, taken), (kind, _, own_notes, _) = two_ranks(fail, options)
    assert (other, kind) == ("LostRankError", "ZeroDivisionError")
    assert "Rank 0 lost another rank in" in message
    assert "The first error is the one to look at" in message
    assert "step 2, rank 0" in notes[0]
    assert "step 2, rank 1" in own_notes[0]
    assert taken < 30


def freeze_and_thaw() -> list[dict[str, float]]:
    """Counters of the first layer before it is frozen, in a state while it is, and after it was thawed."""
    model = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False))
    options: dict[str, Any] = {"grouping": "layer", "memory": ls.memories.AdamCorrection(), "rules": EVERYTHING_SPARSE}
    counters, state = [], None
    for frozen in (False, True, False):
        model[0].weight.requires_grad_(not frozen)
        ddp = DistributedDataParallel(model)
        engine = ls.attach(ddp, **options)
        if state is not None:
            engine.load_state_dict(state)
        for _ in range(3):
            ddp(torch.ones(2, 40)).sum().backward()
            engine.exchange(model.parameters())
        state = engine.state_dict()
        counters.append(state["counters"]["0.weight"])
        engine.close()
    return counters


def test_what_is_counted_of_a_parameter_waits_while_it_is_frozen(two_ranks: Ranks) -> None:
    assert two_ranks(freeze_and_thaw) == [[{"steps": x, "turn": x} for x in (3.0, 3.0, 6.0)]] * 2

"""The state of an engine as it is saved and loaded, and what waits for frozen parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.reducer import Reducer
from lightning_sparse.engine.state.state import Draft, Parked, Shard, capture, draft_of, load, parked


class Kept:
    """Takes the state of a reducer at any moment, and gives it one between two steps.

    Args:
        reducer: whose state it is.
        parameters: by name, in order.
        frozen: parameters that need no gradient, by name.
        comm: the ranks.
        device: where gradients live.
        shards: of parameters of which the engine has a part.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: Mapping[str, Parameter],
        frozen: Mapping[str, Parameter],
        comm: TorchCollective,
        device: torch.device,
        shards: Mapping[str, Shard],
    ) -> None:
        self.loads = 0
        """How many states were loaded."""
        self._reducer, self._names, self._frozen = reducer, list(parameters), frozen
        self._comm, self._device = comm, device
        self._parked: Parked = {}
        self._shards = shards

    @property
    def moment(self) -> Tensor:
        """See :attr:`.Engine.moment`."""
        return torch.tensor([self._reducer.record.counts.number], device="cpu")

    def state(self, moment: Tensor | None) -> dict[str, Any]:
        """See :meth:`.Engine.state_dict`."""
        reducer, record = self._reducer, self._reducer.record
        if moment is not None:
            reducer.wait_for(int(moment[0]))
        with record.lock:
            reducer.on_stream.synchronize()
            record.check_whole()
            if moment is not None and record.counts.number > int(moment[0]):
                raise RuntimeError(
                    f"The state after exchange {int(moment[0])} is asked for, and this rank has settled "
                    f"{record.counts.number}. All ranks save after the newest exchange of any rank: take a state on "
                    "each of them, and another one where the moment of the first one is not the largest."
                )
            return capture(reducer, self._names, self._shards, self._parked, self._comm)

    def load(self, state: Mapping[str, Any], suit: Callable[[Mapping[str, Any]], None]) -> Draft:
        """See :meth:`.Engine.load_state_dict`; nothing changes before all ranks know that all of them can.

        Args:
            state: of this rank.
            suit: called with the state before it is read: chooses the memory.
        """
        reducer = self._reducer
        reducer.skipped.resolve()
        settings, groups = reducer.settings, reducer.groups
        if isinstance(state, Mapping):
            suit(state)
        # All ranks must form groups alike: averages of different memories are messages of different lengths.
        remembering = set[str]().union(*self._comm.all_gather_object(_remembering(state), self._device))
        try:
            draft = load(lambda: self._draft(state, remembering), state, self._comm, self._device)
        except ValueError:
            if reducer.settings is not settings:
                reducer.settings = settings
                reducer.adopt(groups, reducer.record.counts)
            raise
        counts = reducer.record.counts._replace(step=state["step"], void=state["void_steps"])
        if reducer.flush_at is not None:
            reducer.flush_at = counts.step if reducer.flush_at == reducer.step else None
        reducer.rates.load(state["rates"], state.get("surplus", {}))
        reducer.adopt(draft.groups, counts)
        reducer.record.forget_averages()
        self._parked = parked(state, self._frozen)
        self.loads += 1
        reducer.on_stream.synchronize()
        return draft

    def _draft(self, state: Mapping[str, Any], remembering: Set[str]) -> Draft:
        reducer = self._reducer
        plan = [group.plan for group in reducer.groups]
        with reducer.on_stream.between_steps():
            algorithm = reducer.settings.algorithm
            return draft_of(state, plan, reducer.form, self._frozen, algorithm, self._comm, self._shards, remembering)


def _remembering(state: Any) -> set[str]:
    """Names of the parameters of which a state remembers something; none of a state that cannot be read."""
    try:
        waiting = set(state.get("pending", {}))
        return waiting | {
            n for n, vectors in state["parameters"].items() if any(bool(v.any()) for v in vectors.values())
        }
    except Exception:  # of a damaged state, about which ranks agree later
        return set()

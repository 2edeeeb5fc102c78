"""What computes a step: from a plan to its new tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mii.engine.plan import StepPlan, StepResult
from mii.engine.runner import CausalModel, ModelRunner
from mii.engine.sampler import Sampler, SamplingState

Pending = Callable[[], StepResult]  # waits for a launched step


class Executor(Protocol):
    """Computes steps for an engine."""

    depth: int  # steps that may still be under way when the next one is composed

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Return the logits [sampling sequences, vocabulary] of a step, in the plan's order."""
        ...

    def launch(self, plan: StepPlan, states: Sequence[SamplingState]) -> Pending:
        """Begin a step and draw the next token of each sampling sequence.

        Args:
            plan: the step.
            states: how each sampling sequence draws, in the plan's order; each takes notice of its
                token by the time that the result is there.
        """
        ...

    def model(self) -> CausalModel:
        """Return this rank's model."""
        ...

    def close(self) -> None:
        """Let the other ranks end."""
        ...


class HostExecutor:
    """Computes each step to its end before the next is composed."""

    depth = 0

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler

    def forward(self, plan: StepPlan) -> torch.Tensor:
        return self._runner.forward(plan)

    def launch(self, plan: StepPlan, states: Sequence[SamplingState]) -> Pending:
        result = sample_on_host(plan, self._runner.forward(plan), states, self._sampler)
        return lambda: result

    def model(self) -> CausalModel:
        return self._runner.model

    def close(self) -> None:
        self._runner.close()


def sample_on_host(
    plan: StepPlan, logits: torch.Tensor, states: Sequence[SamplingState], sampler: Sampler
) -> StepResult:
    """Draw the tokens of a step whose logits are there."""
    uids = tuple(planned.uid for planned in plan.sequences if planned.samples)
    token_ids, logprobs = sampler.sample(logits, states) if states else ([], {})
    for state, token_id in zip(states, token_ids, strict=True):
        state.append(token_id)
    by_uid = {uids[index]: logprob for index, logprob in logprobs.items()}
    return StepResult(plan.step, uids, tuple(token_ids), by_uid)

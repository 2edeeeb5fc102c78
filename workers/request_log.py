"""What a worker says of the requests that it has answered: log lines, and spans of their phases."""

from __future__ import annotations

import logging
import time

from mii import logs, traces
from mii.engine.generator import Usage


class RequestLog:
    """One call's.

    Args:
        request_id: of the call's request.
        span: of the call.
    """

    def __init__(self, request_id: str, span: traces.Span) -> None:
        self.request_id = request_id
        self._span = span
        logs.request_id.set(request_id)

    def ended(self, choice: int, usage: Usage, reason: str | None) -> None:
        """Note that an answer has ended.

        Args:
            choice: which of the prompt's.
            usage: what it took.
            reason: "stop" or "length".
        """
        if self._span.recording:
            self._tell_phases(choice, usage, reason)
        if logs.access.isEnabledFor(logging.INFO):
            facts = {
                "choice": choice or None,
                "finish_reason": reason,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens or None,
                "generated_tokens": usage.completion_tokens,
                "queue_seconds": round(usage.queue_seconds, 6),
                "time_to_first_token_seconds": round(usage.time_to_first_token_seconds, 6),
                "total_seconds": round(usage.total_seconds, 6),
            }
            logs.tell_access("answer", facts, self.request_id)

    def _tell_phases(self, choice: int, usage: Usage, reason: str | None) -> None:
        now = time.monotonic()
        arrived = now - usage.total_seconds
        admitted = arrived + usage.queue_seconds
        first = arrived + usage.time_to_first_token_seconds
        which = {"mii.choice": choice}
        self._span.phase("queue", arrived, admitted, which)
        prompt = {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "mii.cached_tokens": usage.cached_tokens,
        }
        self._span.phase("prefill", admitted, first, {**which, **prompt})
        answer = {
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "mii.finish_reason": reason or "",
        }
        self._span.phase("decode", first, now, {**which, **answer})

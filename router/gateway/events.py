"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from mii.router.gateway.body import encode
from mii.router.gateway.errors import error_body
from mii.status import known_error

_DONE: Final = b"data: [DONE]\n\n"


class EventStream:
    """An answer whose status and headers have been sent."""

    def __init__(self, response: web.StreamResponse) -> None:
        self.response = response

    async def send(self, events: Iterable[object]) -> None:
        """Send events, each as one line of JSON; waits while the client is slow to read."""
        data = b"".join(b"data: " + encode(event) + b"\n\n" for event in events)
        if data:
            await self.response.write(data)


@asynccontextmanager
async def event_stream(
    request: web.Request, request_id: str, headers: Mapping[str, str]
) -> AsyncIterator[EventStream]:
    """Send events for as long as the block runs.

    Its normal end is `[DONE]`. An error is an event, without `[DONE]`: a stream that merely stops
    looks like success to clients.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers}
    )
    await response.prepare(request)
    stream = EventStream(response)
    try:
        yield stream
        await response.write(_DONE)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        await stream.send([error_body(known_error(error, request_id))])
    await response.write_eof()

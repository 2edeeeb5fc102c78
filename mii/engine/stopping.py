"""Stop strings: where an answer's text ends, whatever tokens it comes in.

The text ends before the first place where any stop string occurs in it. That place does not depend
on how the text is cut into pieces: a stop string that is complete does not end the text yet while a
longer one, which began before it, may still come about; and of several that begin at the same place
the shortest counts, for it is complete first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class SpecialTokens(Protocol):
    """What `special_stop_ids` asks of a tokenizer."""

    def special_token_id(self, text: str, /) -> int | None:
        """Return the id of the special token that is written so, or None."""
        ...


def special_stop_ids(stops: Sequence[str], tokenizer: SpecialTokens) -> frozenset[int]:
    """Return the ids of those stop strings that are special tokens.

    Special tokens never show in the text, so only their ids can be seen. As strings they count all
    the same: a model may write the same characters with ordinary tokens.
    """
    ids = (tokenizer.special_token_id(stop) for stop in stops)
    return frozenset(token for token in ids if token is not None)


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    Each stop string is followed by the Knuth-Morris-Pratt automaton: its state is the length of the
    longest beginning of the stop string that the text ends with. So the cost of a piece depends on
    its length and on how many stop strings there are, not on theirs or on the text before it.

    Args:
        stops: none, or some that are not empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""  # text that may be the beginning of a stop string
        self._length = 0  # characters of the whole text so far
        self._match: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece.

        Returns:
            The text that is safe to show, and the stop string that has ended the text, if one has;
            what follows it is not looked at.
        """
        if not self._searches:
            return text, None
        if self._match is not None:
            return "", self._match
        for search in self._searches:
            if search.found is None:
                search.push(text, self._length)
        self._held += text
        self._length += len(text)
        return self._release(final=False)

    def flush(self) -> tuple[str, str | None]:
        """Return the rest, as `push` does: no further text follows."""
        return self._release(final=True)

    def _release(self, *, final: bool) -> tuple[str, str | None]:
        """Give out the held text up to where a stop string begins or may begin."""
        begun = self._length - len(self._held)
        match = min(
            (search for search in self._searches if search.found is not None),
            key=lambda search: (search.found, len(search.stop)),
            default=None,
        )
        end = self._length if match is None or match.found is None else match.found
        if not final:
            open_searches = (search for search in self._searches if search.found is None)
            may_begin = min((self._length - s.state for s in open_searches), default=self._length)
            if may_begin < end:
                match, end = None, may_begin
        safe = self._held[: end - begun]
        self._held = self._held[end - begun :]
        self._match = None if match is None else match.stop
        return safe, self._match


class _Search:
    """One stop string's automaton."""

    __slots__ = ("_borders", "found", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0  # characters of the stop string that the text ends with
        self.found: int | None = None  # where the stop string first occurs in the text
        # For each length of a beginning, that of the longest beginning that it also ends with.
        # Computed as far as the search has come: a long stop string costs nothing until it begins.
        self._borders = [0, 0]

    def push(self, text: str, offset: int) -> None:
        """Search on through text that begins at `offset` of the whole."""
        stop, state, place = self.stop, self.state, 0
        while place < len(text):
            if state == 0:
                place = text.find(stop[0], place)
                if place < 0:
                    break
                state = 1
            elif text[place] == stop[state]:
                state += 1
            else:
                state = self._border(state)
                continue  # the same character again
            place += 1
            if state == len(stop):
                self.found = offset + place - len(stop)
                break
        self.state = state

    def _border(self, length: int) -> int:
        stop, borders = self.stop, self._borders
        while len(borders) <= length:
            border = borders[-1]
            character = stop[len(borders) - 1]
            while border and stop[border] != character:
                border = borders[border]
            borders.append(border + (stop[border] == character))
        return borders[length]

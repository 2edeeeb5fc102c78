"""Stop strings: the text ends where a search of the whole text says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii.engine.stopping import StopMatcher, special_stop_ids


def by_searching_the_whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    places = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not places:
        return text, None
    place, _, stop = min(places)
    return text[:place], stop


def by_pieces(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    """What a stream shows, piece by piece, and the stop string that ended it."""
    matcher = StopMatcher(tuple(stops))
    shown = []
    for piece in pieces:
        safe, match = matcher.push(piece)
        shown.append(safe)
        if match is not None:
            return shown, match
    safe, match = matcher.flush()
    return [*shown, safe], match


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    return [*pieces, text[start:]]


FEW_LETTERS = st.text("ab", min_size=1, max_size=6)


@given(
    st.text("abc", max_size=40),
    st.lists(FEW_LETTERS, max_size=5),
    st.lists(st.integers(0, 4), max_size=20),
)
@settings(max_examples=1000, deadline=None)
def test_pieces_show_what_a_search_of_the_whole_text_leaves(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    shown, match = by_pieces(cut(text, sizes), stops)
    assert ("".join(shown), match) == by_searching_the_whole(text, stops)


@given(st.text("ab\u00e9\U0001fae0", max_size=30), st.lists(FEW_LETTERS, min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_text_is_held_back_only_where_a_stop_string_may_begin(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    shown = ""
    for place, character in enumerate(text):
        safe, match = matcher.push(character)
        shown += safe
        if match is not None or any(stop in text[: place + 1] for stop in stops):
            break
        held = text[len(shown) : place + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "shown", "match"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["three", "wo t"], "one t", "wo t"),
        ("aaab", ["aab"], "a", "aab"),
        ("abcabd", ["abd"], "abc", "abd"),
        ("abcde", ["abcdef", "cd"], "ab", "cd"),  # the longer one does not come about
        ("abcdef", ["abcdef", "cd"], "", "abcdef"),  # it does, and began before
        ("abcdef", ["abcdef", "abc"], "", "abc"),  # of two that begin there, the shorter
        ("abc", ["cd"], "abc", None),
        ("stop", ["stop"], "", "stop"),
        ("a\nb", ["\n"], "a", "\n"),
        ("", ["x"], "", None),
        ("no stops", [], "no stops", None),
    ],
)
def test_the_first_place_wins_whatever_the_pieces(
    text: str, stops: list[str], shown: str, match: str | None
) -> None:
    for size in (1, 2, 3, 100):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        texts, found = by_pieces(pieces, stops)
        assert ("".join(texts), found) == (shown, match)


def test_a_match_is_told_with_the_piece_that_completes_it() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push("one E") == ("one ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("D two") == ("", "END")
    assert matcher.push(" three") == ("", "END")


def test_a_complete_stop_string_waits_for_a_longer_one_that_began_before() -> None:
    matcher = StopMatcher(("abcdef", "cd"))
    assert matcher.push("xabcd") == ("x", None)
    assert matcher.push("e") == ("", None)
    assert matcher.push("g") == ("ab", "cd")


def test_many_long_stop_strings_that_nearly_come_about() -> None:
    stops = ["a" * 1023 + chr(0x100 + i) for i in range(64)]
    text = "a" * 3000 + "b" + "a" * 1500 + stops[40] + "c"
    shown, match = by_pieces(cut(text, [7] * 800), stops)
    assert ("".join(shown), match) == by_searching_the_whole(text, stops)
    assert match == stops[40]


def test_the_cost_of_a_piece_does_not_depend_on_the_text_before_it() -> None:
    """What a matcher keeps stays as large as the longest stop string."""
    matcher = StopMatcher(("x" * 50, "never ever", "ab" * 100))
    for _ in range(3000):
        matcher.push("abab never xxx")
        assert len(matcher._held) <= 200


class Specials:
    def special_token_id(self, text: str) -> int | None:
        return {"<|im_end|>": 2, "</s>": 0}.get(text)


def test_stop_strings_that_are_special_tokens_give_their_ids_too() -> None:
    stops = ("<|im_end|>", "\n", "</s>", "<|im_end|>\n")
    assert special_stop_ids(stops, Specials()) == frozenset({2, 0})
    assert special_stop_ids((), Specials()) == frozenset()

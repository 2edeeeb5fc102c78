"""What is asked: prompts and answers of drawn lengths, and when each request arrives."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from mii.errors import InvalidArgument

# Common words, each of which is one token, blank included, for most tokenizers of English.
_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "this",
    "are",
    "or",
    "his",
    "from",
    "at",
    "which",
    "but",
    "have",
    "an",
    "had",
    "they",
    "you",
    "were",
    "their",
    "one",
    "all",
    "we",
    "can",
    "her",
    "has",
    "there",
    "been",
    "if",
    "more",
    "when",
    "will",
    "would",
    "who",
    "so",
    "no",
    "said",
    "what",
    "up",
    "its",
    "about",
    "into",
    "than",
    "them",
    "only",
    "other",
    "new",
    "some",
    "could",
    "time",
    "these",
    "two",
    "may",
]

# Medians and spreads of log-normal laws near the lengths in ShareGPT's conversations, as serving
# benchmarks draw them.
_SHAREGPT_INPUT, _SHAREGPT_OUTPUT = (100, 1.2), (150, 1.0)
_LONGEST = 2048


@dataclass(frozen=True)
class Question:
    """One request."""

    prompt: str
    prompt_tokens: int  # about
    new_tokens: int


@dataclass(frozen=True)
class Workload:
    """What to draw.

    Args:
        requests: how many.
        input_tokens: of a prompt, about; None: as in ShareGPT.
        output_tokens: of an answer; None: as in ShareGPT.
        spread: of both, as a part of them (standard deviation of a normal law).
        shared_tokens: with which every prompt begins.
        seed: of all that is drawn.
    """

    requests: int
    input_tokens: int | None = 512
    output_tokens: int | None = 128
    spread: float = 0.0
    shared_tokens: int = 0
    seed: int = 0

    def questions(self) -> list[Question]:
        """Draw the requests."""
        rng = random.Random(self.seed)
        shared = _text(random.Random(self.seed + 1), self.shared_tokens)
        questions = []
        for _ in range(self.requests):
            length = self._length(rng, self.input_tokens, _SHAREGPT_INPUT)
            own = _text(rng, max(1, length - self.shared_tokens))
            new = self._length(rng, self.output_tokens, _SHAREGPT_OUTPUT)
            questions.append(Question(f"{shared} {own}".strip(), length, new))
        return questions

    def _length(self, rng: random.Random, wanted: int | None, law: tuple[int, float]) -> int:
        if wanted is None:
            median, sigma = law
            return min(_LONGEST, max(4, round(rng.lognormvariate(math.log(median), sigma))))
        drawn = rng.gauss(wanted, self.spread * wanted) if self.spread else wanted
        return max(1, round(drawn))


def arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Yield the seconds between arrivals of an open loop.

    Args:
        rate: requests per second.
        burstiness: 1: a Poisson process; below: in bursts; above: more evenly (the shape of a
            gamma law).
        seed: of the draws.

    Raises:
        InvalidArgument: unless both are positive.
    """
    for name, value in (("rate", rate), ("burstiness", burstiness)):
        if not 0 < value < math.inf:
            raise InvalidArgument.of(name, value, "a positive number")
    rng = random.Random(seed)
    while True:
        yield rng.gammavariate(burstiness, 1 / (rate * burstiness))


def _text(rng: random.Random, tokens: int) -> str:
    return " ".join(rng.choices(_WORDS, k=tokens))

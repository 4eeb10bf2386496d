"""Which words of a growing utterance are certain. Pure.

Each hypothesis is made of more audio than the one before. A word is confirmed when successive hypotheses agree on it, token by
token (LocalAgreement-n: Liu et al. 2020, "Low-Latency Sequence-to-Sequence Speech Recognition and Translation by Partial
Hypothesis Selection"). Confirmed words are never taken back: they go to the engine as the text's beginning, and it decodes what
follows them. The newest words are not confirmed, however often they agree: what follows a word is needed to hear it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from app.words import text_of, word_ends


@dataclass(frozen=True, slots=True)
class Token:
    """A token, its bytes, which may be part of a character, and its log-probability. Tokens are equal by their ids."""

    id: int
    spelling: bytes = field(compare=False)
    logprob: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class AgreementPolicy:
    """How many hypotheses must agree on a word, and how many of the newest words are left open."""

    hypotheses: int = 3
    open_words: int = 1
    max_tokens: int = 180


@dataclass(slots=True)
class Agreement:
    """The hypotheses of one utterance. `confirmed` is append-only; `tail` is the rest of the newest hypothesis."""

    policy: AgreementPolicy = field(default_factory=AgreementPolicy)
    confirmed: list[Token] = field(default_factory=list)
    tail: list[Token] = field(default_factory=list)
    words_taken_back: int = 0
    _earlier: list[list[Token]] = field(default_factory=list)  # tails before the newest, the oldest first
    _language: str | None = None

    def take(self, tail: Sequence[Token], language: str | None) -> list[Token]:
        """Take a hypothesis: what was decoded after the confirmed tokens. Return the tokens that it confirms."""
        if language != self._language and not self.confirmed:
            self._earlier = []  # what was heard in another language agrees with nothing
            self.tail = []
        self._language = language
        tail = list(tail)
        self.words_taken_back += _words_lost(self.tail, tail, language)
        needed = self.policy.hypotheses - 1
        self._earlier = self._earlier[-needed:] if needed else []
        new = self._agreed(tail, language) if len(self._earlier) == needed else []
        self.confirmed += new
        self.tail = tail[len(new) :]
        self._earlier = [earlier[len(new) :] for earlier in self._earlier]
        self._earlier.append(self.tail)
        return new

    def finish(self, tail: Sequence[Token], language: str | None) -> list[Token]:
        """Take the last hypothesis, which is believed as it is. Return its tokens."""
        self.words_taken_back += _words_lost(self.tail, list(tail), language)
        self.confirmed += tail
        self.tail = []
        return list(tail)

    @property
    def text(self) -> str:
        """The confirmed text."""
        return text_of(token.spelling for token in self.confirmed)

    @property
    def tail_text(self) -> str:
        """The text that is not confirmed."""
        return text_of(token.spelling for token in self.tail)

    def _agreed(self, tail: list[Token], language: str | None) -> list[Token]:
        """Return the words at the tail's beginning on which all hypotheses agree, the newest words left out."""
        common = len(tail)
        for earlier in self._earlier:
            pairs = takewhile(lambda pair: pair[0] == pair[1], zip(tail, earlier, strict=False))
            common = min(common, sum(1 for _ in pairs))
        common = min(common, self.policy.max_tokens - len(self.confirmed))
        ends = word_ends([token.spelling for token in tail], language)
        closed = ends[: max(0, len(ends) - self.policy.open_words)]
        return tail[: max((end for end in closed if end <= common), default=0)]


def _words_lost(before: list[Token], after: list[Token], language: str | None) -> int:
    """Count the words of one tail that the next one does not have in their place."""
    was, now = (_words(tokens, language) for tokens in (before, after))
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(was, now, strict=False)))
    return len(was) - same


def _words(tokens: list[Token], language: str | None) -> list[str]:
    ends = word_ends([token.spelling for token in tokens], language)
    return [text_of(token.spelling for token in tokens[a:b]).strip() for a, b in zip([0, *ends], ends, strict=False)]

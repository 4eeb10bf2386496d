"""A live session: what happens next, given what has happened. Pure: no clock, no tasks, no audio; it counts samples.

What comes in is an `Input`, by a method of `Session`. `TABLE` says for each state what each input does and which state follows;
what is not in it changes nothing. What is to be done comes out as effects.

Promises, each of them an invariant of the tests:

- At most one partial is in flight. The next one takes all audio that has come by then; what lies between is never decoded.
- Closing an utterance aborts its partial and decodes its final. Finals may decode side by side; they come out in order.
- No text of an utterance comes before the final of the one before it, and none after its own.
- Text is append-only: the deltas join to the text of the end.
- Every sample of an utterance, from where it opened to where it closed, is in exactly one final.
- A final that fails ends the session with its error, or costs a lasting session one utterance. After the end nothing comes,
  and no job is left alive.
- An utterance that is taken back is never decoded further, and nothing more of it is told.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from app.session.agreement import Agreement, AgreementPolicy, Token


class State(StrEnum):
    """Where a session is."""

    QUIET = "quiet"  # no utterance is open
    SPEAKING = "speaking"  # one is open
    GUESSING = "guessing"  # and a partial of it is in flight
    FINISHING = "finishing"  # no more audio comes; finals are outstanding
    ENDED = "ended"


class Input(StrEnum):
    """What may happen to a session."""

    OPEN = "an utterance opens"
    CLOSE = "it closes"
    CUT = "it is cut at its limit"
    DROP = "it is taken back"
    TURN = "a partial may be decoded"
    PARTIAL = "its hypothesis comes"
    PARTIAL_FAILED = "it fails"
    FINAL = "a final comes"
    FINAL_FAILED = "a final fails"
    FINAL_LOST = "a final fails, and the session lasts"
    STOP = "no more audio comes"
    SETTLED = "all finals have come"
    CANCEL = "nobody waits any more"


class Transition(NamedTuple):
    """What an input does, and the state that follows."""

    actions: tuple[str, ...]
    next: State


_KEEP = ("keep the final", "tell finals in order")
_LOSE = ("keep the loss", "tell finals in order")
TABLE: dict[State, dict[Input, Transition]] = {
    State.QUIET: {
        Input.OPEN: Transition(("open",), State.SPEAKING),
        Input.FINAL: Transition(_KEEP, State.QUIET),
        Input.FINAL_LOST: Transition(_LOSE, State.QUIET),
        Input.FINAL_FAILED: Transition(("forget the decode", "abort all", "tell the failure"), State.ENDED),
        Input.STOP: Transition((), State.FINISHING),
        Input.CANCEL: Transition(("abort all",), State.ENDED),
    },
    State.SPEAKING: {
        Input.CLOSE: Transition(("close", "decode the final"), State.QUIET),
        Input.CUT: Transition(("cut", "decode the final", "open"), State.SPEAKING),
        Input.DROP: Transition(("drop",), State.QUIET),
        Input.TURN: Transition(("decode a partial",), State.GUESSING),
        Input.FINAL: Transition(_KEEP, State.SPEAKING),
        Input.FINAL_LOST: Transition(_LOSE, State.SPEAKING),
        Input.FINAL_FAILED: Transition(("forget the decode", "abort all", "tell the failure"), State.ENDED),
        Input.STOP: Transition(("close", "decode the final"), State.FINISHING),
        Input.CANCEL: Transition(("abort all",), State.ENDED),
    },
    State.GUESSING: {
        Input.CLOSE: Transition(("abort the partial", "close", "decode the final"), State.QUIET),
        Input.CUT: Transition(("abort the partial", "cut", "decode the final", "open"), State.SPEAKING),
        Input.DROP: Transition(("abort the partial", "drop"), State.QUIET),
        Input.PARTIAL: Transition(("tell the hypothesis",), State.SPEAKING),
        Input.PARTIAL_FAILED: Transition(("forget the decode",), State.SPEAKING),
        Input.FINAL: Transition(_KEEP, State.GUESSING),
        Input.FINAL_LOST: Transition(_LOSE, State.GUESSING),
        Input.FINAL_FAILED: Transition(("forget the decode", "abort all", "tell the failure"), State.ENDED),
        Input.STOP: Transition(("abort the partial", "close", "decode the final"), State.FINISHING),
        Input.CANCEL: Transition(("abort all",), State.ENDED),
    },
    State.FINISHING: {
        Input.FINAL: Transition(_KEEP, State.FINISHING),
        Input.FINAL_LOST: Transition(_LOSE, State.FINISHING),
        Input.FINAL_FAILED: Transition(("forget the decode", "abort all", "tell the failure"), State.ENDED),
        Input.SETTLED: Transition(("tell the end",), State.ENDED),
        Input.CANCEL: Transition(("abort all",), State.ENDED),
    },
    State.ENDED: {},
}


# --- what comes out -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode the samples from `start` to `end`, whose text begins with `prefix`. The answer names the job."""

    job: int
    utterance: int
    start: int
    end: int
    final: bool
    prefix: tuple[int, ...]
    language: str | None


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody wants the job's answer any more."""

    job: int


@dataclass(frozen=True, slots=True)
class Opened:
    """An utterance has begun at a sample."""

    utterance: int
    start: int


@dataclass(frozen=True, slots=True)
class Closed:
    """An utterance has ended at a sample; its final will come. `cut` says that the speaker goes on, in the next one."""

    utterance: int
    end: int
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Dropped:
    """An utterance was taken back: there is no final of it."""

    utterance: int


@dataclass(frozen=True, slots=True)
class Lost:
    """An utterance's final has failed; what was confirmed is all of its text."""

    utterance: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Tokens to append to the utterance's text. `final` says that they are its last."""

    utterance: int
    tokens: tuple[Token, ...]
    final: bool = False


@dataclass(frozen=True, slots=True)
class Changed:
    """The final does not begin with the confirmed words: these tokens are the utterance's whole text instead."""

    utterance: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Tail:
    """The text after the confirmed one, as it is heard now; it replaces the tail before. `revision` rises.

    It was heard from the session's audio up to the sample `heard_to`.
    """

    utterance: int
    revision: int
    text: str
    heard_to: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The session has ended with an error."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Ended:
    """All text has been told."""


Effect = Decode | Abort | Opened | Closed | Dropped | Lost | Confirmed | Changed | Tail | Failed | Ended


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """What a decode heard after its prefix. A partial that is not to be trusted is none at all."""

    tokens: tuple[Token, ...]
    language: str | None


# --- the machine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pace:
    """When partials are due, in samples: after how much audio the first, and after how much more each next one."""

    first: int = 8_000
    step: int = 8_000
    limit: int = 480_000  # the longest utterance


@dataclass(slots=True)
class _Utterance:
    number: int
    start: int
    agreement: Agreement
    end: int | None = None
    job: int | None = None  # in flight
    decoded_to: int = 0  # where the newest partial's audio ends
    heard_to: int = 0  # where that of the newest hypothesis ended
    agreed_to: int = 0  # no confirmed word comes from audio after it
    revision: int = 0
    language: str | None = None
    final: Hypothesis | Exception | None = None


class Session:
    """The machine. Each method is an input, and returns the effects.

    Args:
        pace: when partials are due.
        agreement: which words are confirmed.
        free_finals: decode finals without the confirmed words, which may then be contradicted.
        lasting: a final that fails is the loss of its utterance only.

    """

    def __init__(
        self,
        pace: Pace | None = None,
        agreement: AgreementPolicy | None = None,
        *,
        free_finals: bool = False,
        lasting: bool = False,
    ) -> None:
        self._pace = pace or Pace()
        self._policy = agreement or AgreementPolicy()
        self._free_finals, self._lasting = free_finals, lasting
        self._utterances: deque[_Utterance] = deque()  # whose text has not all been told
        self._opened = 0
        self._jobs = 0
        self._effects: list[Effect] = []
        self.state = State.QUIET
        self.received = 0
        self.words_taken_back = 0

    # --- what the shell may ask -----------------------------------------------------------------------------------

    @property
    def wants_turn(self) -> bool:
        """Whether a partial is due. Only the first utterance whose text is not all told gets partials."""
        if self.state != State.SPEAKING or len(self._utterances) > 1:
            return False
        open_, pace = self._utterances[-1], self._pace
        due = open_.start + pace.first if not open_.decoded_to else open_.decoded_to + pace.step
        return self.received >= due

    def cut_range(self, known: int) -> tuple[int, int] | None:
        """Where the open utterance may be cut, if it reaches its limit within what is known of the audio.

        That is after all that confirmed words come from.
        """
        if self.state not in (State.SPEAKING, State.GUESSING):
            return None
        open_ = self._utterances[-1]
        latest = open_.start + self._pace.limit
        if known < latest:
            return None
        return max(open_.agreed_to, latest - self._pace.limit // 3), latest

    @property
    def open_samples(self) -> int:
        """How much audio the open utterance has; 0 if none is open."""
        speaking = self.state in (State.SPEAKING, State.GUESSING)
        return self.received - self._utterances[-1].start if speaking else 0

    @property
    def kept_from(self) -> int:
        """The first sample that may still be decoded."""
        return min((utterance.start for utterance in self._utterances), default=self.received)

    @property
    def jobs(self) -> set[int]:
        """The jobs in flight."""
        return {utterance.job for utterance in self._utterances if utterance.job is not None}

    # --- inputs -----------------------------------------------------------------------------------------------------

    def audio(self, samples: int) -> None:
        """So many samples have come."""
        self.received += samples

    def open(self, at: int) -> list[Effect]:
        """Somebody speaks, from this sample on."""
        return self._take(Input.OPEN, at)

    def close(self, at: int) -> list[Effect]:
        """The utterance ends before this sample, by silence or because the client says so."""
        return self._take(Input.CLOSE, at)

    def cut(self, at: int) -> list[Effect]:
        """The utterance ends before this sample, and another begins there."""
        return self._take(Input.CUT, at)

    def drop(self) -> list[Effect]:
        """The client takes the open utterance back."""
        return self._take(Input.DROP)

    def turn(self) -> list[Effect]:
        """The engine has room for a partial of this session."""
        return self._take(Input.TURN) if self.wants_turn else []

    def heard(self, job: int, hypothesis: Hypothesis | None) -> list[Effect]:
        """A decode has ended. None is a partial that is not to be trusted, or a final in which nobody speaks."""
        utterance = self._of_job(job)
        if utterance is None:
            return []
        final = utterance.end is not None
        if hypothesis is None and not final:
            return self._take(Input.PARTIAL_FAILED, utterance)
        return self._take(Input.FINAL if final else Input.PARTIAL, utterance, hypothesis)

    def failed(self, job: int, error: Exception) -> list[Effect]:
        """A decode was lost. The loss of a partial is none: the next one takes its audio too."""
        utterance = self._of_job(job)
        if utterance is None:
            return []
        if utterance.end is None:
            return self._take(Input.PARTIAL_FAILED, utterance, error)
        return self._take(Input.FINAL_LOST if self._lasting else Input.FINAL_FAILED, utterance, error)

    def stop(self) -> list[Effect]:
        """No more audio comes."""
        return self._take(Input.STOP, self.received)

    def cancel(self) -> list[Effect]:
        """Nobody waits any more."""
        return self._take(Input.CANCEL)

    # --- the table at work ------------------------------------------------------------------------------------------

    def _take(self, event: Input, *facts: object) -> list[Effect]:
        self._effects = []
        self._step(event, *facts)
        if self.state == State.FINISHING and not self._utterances:
            self._step(Input.SETTLED)
        return self._effects

    def _step(self, event: Input, *facts: object) -> None:
        transition = TABLE[self.state].get(event)
        if transition is None:
            return
        for action in transition.actions:
            ACTIONS[action](self, *facts)
        self.state = transition.next

    def _of_job(self, job: int) -> _Utterance | None:
        return next((utterance for utterance in self._utterances if utterance.job == job), None)

    def _open(self, at: int) -> None:
        self._utterances.append(_Utterance(self._opened, at, Agreement(self._policy)))
        self._effects.append(Opened(self._opened, at))
        self._opened += 1

    def _close(self, at: int, *, cut: bool = False) -> None:
        open_ = self._utterances[-1]
        open_.end = at
        self._effects.append(Closed(open_.number, at, cut))

    def _cut(self, at: int) -> None:
        self._close(at, cut=True)

    def _drop(self) -> None:
        self._effects.append(Dropped(self._utterances.pop().number))

    def _decode_partial(self) -> None:
        open_ = self._utterances[-1]
        open_.decoded_to = min(self.received, open_.start + self._pace.limit)
        self._decode(open_, open_.decoded_to, final=False)

    def _decode_final(self, _at: int) -> None:
        closed = self._utterances[-1]
        assert closed.end is not None
        if closed.end > closed.start:
            self._decode(closed, closed.end, final=True)
        else:
            closed.final = Hypothesis((), None)
            self._tell_finals()

    def _decode(self, utterance: _Utterance, end: int, *, final: bool) -> None:
        self._jobs += 1
        utterance.job = self._jobs
        known = () if final and self._free_finals else utterance.agreement.confirmed
        prefix = tuple(token.id for token in known)
        language = utterance.language if prefix else None
        self._effects.append(Decode(self._jobs, utterance.number, utterance.start, end, final, prefix, language))

    def _abort_partial(self, *_: object) -> None:
        open_ = self._utterances[-1]
        assert open_.job is not None
        self._effects.append(Abort(open_.job))
        open_.job = None

    def _forget_decode(self, utterance: _Utterance, *_: object) -> None:
        utterance.job = None

    def _tell_hypothesis(self, utterance: _Utterance, hypothesis: Hypothesis) -> None:
        utterance.job = None
        if not utterance.agreement.confirmed:
            utterance.language = hypothesis.language
        before = utterance.agreement.tail_text
        if new := utterance.agreement.take(hypothesis.tokens, hypothesis.language):
            utterance.agreed_to = utterance.heard_to
            self._effects.append(Confirmed(utterance.number, tuple(new)))
        utterance.heard_to = utterance.decoded_to
        if new or utterance.agreement.tail_text != before:
            utterance.revision += 1
            tail = Tail(utterance.number, utterance.revision, utterance.agreement.tail_text, utterance.heard_to)
            self._effects.append(tail)

    def _keep_final(self, utterance: _Utterance, hypothesis: Hypothesis | None) -> None:
        utterance.job = None
        utterance.final = hypothesis or Hypothesis((), utterance.language)

    def _keep_loss(self, utterance: _Utterance, error: Exception) -> None:
        utterance.job = None
        utterance.final = error

    def _tell_finals(self, *_: object) -> None:
        while self._utterances and (final := self._utterances[0].final) is not None:
            utterance = self._utterances.popleft()
            if isinstance(final, Exception):
                self._effects.append(Lost(utterance.number, final))
                continue
            tokens, confirmed = final.tokens, tuple(utterance.agreement.confirmed)
            if self._free_finals and tokens[: len(confirmed)] == confirmed:
                tokens = tokens[len(confirmed) :]
            elif self._free_finals and tokens:
                self._effects.append(Changed(utterance.number, tokens))
                tokens = ()
            utterance.agreement.finish(tokens, final.language)
            self.words_taken_back += utterance.agreement.words_taken_back
            self._effects.append(Confirmed(utterance.number, tokens, final=True))

    def _abort_all(self, *_: object) -> None:
        self._effects += [Abort(job) for job in sorted(self.jobs)]
        self._utterances.clear()

    def _tell_failure(self, _utterance: _Utterance, error: Exception) -> None:
        self._effects.append(Failed(error))

    def _tell_end(self) -> None:
        self._effects.append(Ended())


ACTIONS: dict[str, Callable[..., None]] = {
    "open": Session._open,
    "close": Session._close,
    "cut": Session._cut,
    "drop": Session._drop,
    "decode a partial": Session._decode_partial,
    "decode the final": Session._decode_final,
    "abort the partial": Session._abort_partial,
    "forget the decode": Session._forget_decode,
    "tell the hypothesis": Session._tell_hypothesis,
    "keep the final": Session._keep_final,
    "keep the loss": Session._keep_loss,
    "tell finals in order": Session._tell_finals,
    "abort all": Session._abort_all,
    "tell the failure": Session._tell_failure,
    "tell the end": Session._tell_end,
}

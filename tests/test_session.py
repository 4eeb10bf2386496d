"""The live session's machine: by hand, and over tens of thousands of random interleavings of all that may happen to it."""

import random
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.session.agreement import Agreement, AgreementPolicy, Token
from app.session.machine import (
    ACTIONS,
    TABLE,
    Abort,
    Changed,
    Closed,
    Confirmed,
    Decode,
    Dropped,
    Effect,
    Ended,
    Failed,
    Hypothesis,
    Lost,
    Opened,
    Pace,
    Session,
    State,
    Tail,
)
from scripts.session_table import table, with_table

PACE = Pace(first=10, step=10, limit=120)
TWO = AgreementPolicy(hypotheses=2)


def tokens(text: str) -> tuple[Token, ...]:
    """Make a token of each word; equal words are equal tokens."""
    return tuple(Token(int.from_bytes(word.encode()[:7]), word.encode()) for word in re.findall(r" ?[^ ]+", text))


def text(effects: list[Effect]) -> str:
    return "".join(t.spelling.decode() for effect in effects if isinstance(effect, Confirmed) for t in effect.tokens)


# --- agreement ----------------------------------------------------------------------------------------------------------


def test_words_on_which_two_hypotheses_agree_are_confirmed_but_the_newest():
    agreement = Agreement(TWO)
    assert agreement.take(tokens(" ask not"), "en") == []
    assert agreement.take(tokens(" ask not what your"), "en") == list(tokens(" ask not"))
    assert agreement.take(tokens(" what your"), "en") == list(tokens(" what"))  # "your" is the newest
    assert (agreement.text, agreement.tail_text) == (" ask not what", " your")
    assert agreement.words_taken_back == 0


def test_a_word_is_confirmed_whole_and_with_its_punctuation():
    parts = (Token(1, b" Amer"), Token(2, b"icans"), Token(3, b","), Token(4, b" ask"))
    agreement = Agreement(TWO)
    agreement.take(parts[:1], "en")
    assert agreement.take(parts[:2], "en") == []
    assert agreement.take((*parts, Token(5, b" not")), "en") == []  # the hypotheses agree up to the middle of a mark's word
    assert agreement.take((*parts, Token(5, b" not")), "en") == list(parts)
    assert agreement.words_taken_back == 2  # "Amer", and "Americans" without its comma


def test_characters_without_spaces_are_confirmed_one_by_one():
    whole = [Token(i, character.encode()) for i, character in enumerate("今日は天気")]
    agreement = Agreement(TWO)
    agreement.take(whole[:3], "ja")
    assert agreement.take(whole, "ja") == whole[:3]
    split = (Token(1, "気".encode()[:2]), Token(2, "気".encode()[2:]), Token(3, "だ".encode()))
    agreement = Agreement(TWO)
    agreement.take(split[:1], "ja")
    assert agreement.take(split, "ja") == []  # half a character is none
    assert agreement.take(split, "ja") == list(split[:2])


def test_what_was_heard_in_another_language_agrees_with_nothing():
    agreement = Agreement(TWO)
    agreement.take(tokens(" in Berlin ja"), "en")
    assert agreement.take(tokens(" in Berlin ja"), "de") == []
    assert agreement.take(tokens(" in Berlin ja"), "de") == list(tokens(" in Berlin"))


@given(
    st.lists(st.lists(st.sampled_from([" a", " b", "c", ","]), max_size=8), max_size=8), st.integers(1, 3), st.integers(0, 3)
)
@settings(max_examples=500)
def test_confirmed_text_only_grows_and_is_what_the_last_hypotheses_said(
    rounds: list[list[str]], hypotheses: int, open_words: int
):
    agreement = Agreement(AgreementPolicy(hypotheses, open_words))
    for taken, pieces in enumerate(rounds, 1):
        before = list(agreement.confirmed)
        tail = [token for piece in pieces for token in tokens(piece)]
        new = agreement.take(tail, "en")
        assert agreement.confirmed == before + new
        assert new == tail[: len(new)]
        assert agreement.tail == tail[len(new) :]
        assert not new or taken >= hypotheses
        assert agreement.text + agreement.tail_text == "".join(
            t.spelling.decode() for t in agreement.confirmed + agreement.tail
        )


# --- by hand --------------------------------------------------------------------------------------------------------------


class Driver:
    """Feeds a session, and keeps what came out."""

    def __init__(self, **options) -> None:
        self.session = Session(PACE, TWO, **options)
        self.effects: list[Effect] = []

    def __call__(self, effects: list[Effect] | None) -> list[Effect]:
        self.effects += effects or []
        return effects or []

    def job(self) -> int:
        return [effect.job for effect in self.effects if isinstance(effect, Decode)][-1]

    def speak(self, samples: int) -> None:
        self.session.audio(samples)

    def hear(self, words: str, job: int | None = None) -> list[Effect]:
        return self(self.session.heard(job or self.job(), Hypothesis(tokens(words), "en")))


def test_an_utterance_from_its_first_word_to_its_final():
    driver = Driver()
    session = driver.session
    driver.speak(5)
    driver(session.open(2))
    assert not session.wants_turn
    driver.speak(8)
    assert session.wants_turn
    assert driver(session.turn()) == [Decode(1, 0, 2, 13, False, (), None)]
    driver.speak(9)
    assert not session.wants_turn  # one in flight
    assert driver.hear(" ask not") == [Tail(0, 1, " ask not", 13)]
    driver.speak(1)
    assert driver(session.turn()) == [Decode(2, 0, 2, 23, False, (), None)]
    confirmed = tokens(" ask not")
    assert driver.hear(" ask not what") == [Confirmed(0, confirmed), Tail(0, 2, " what", 23)]
    driver.speak(4)
    closed = driver(session.close(25))
    assert closed == [Closed(0, 25), Decode(3, 0, 2, 25, True, tuple(t.id for t in confirmed), "en")]
    assert driver.hear(" what your country") == [Confirmed(0, tokens(" what your country"), final=True)]
    assert driver(session.stop()) == [Ended()]
    assert text(driver.effects) == " ask not what your country"
    assert session.kept_from == session.received == 27


def test_a_late_partial_is_aborted_and_its_answer_ignored():
    driver = Driver()
    driver(driver.session.open(0))
    driver.speak(20)
    driver(driver.session.turn())
    assert driver(driver.session.close(18))[0] == Abort(1)
    assert driver.hear(" late", job=1) == []


def test_finals_come_out_in_order_and_the_next_utterance_waits_for_its_turn():
    driver = Driver()
    session = driver.session
    for start in (0, 30, 60):
        driver(session.open(start))
        driver.speak(30)
        if start < 60:
            driver(session.close(start + 30))
    assert not session.wants_turn  # text of the third could not be told yet
    assert driver.hear(" two", job=2) == []
    told = driver.hear(" one", job=1)
    assert [effect.utterance for effect in told] == [0, 1]
    assert session.wants_turn


def test_a_final_that_fails_ends_the_session_with_its_error():
    driver = Driver()
    session = driver.session
    for start in (0, 30):
        driver(session.open(start))
        driver.speak(30)
        driver(session.close(start + 30))
    error = RuntimeError("lost")
    assert driver(session.failed(1, error)) == [Abort(2), Failed(error)]
    assert session.state == State.ENDED
    assert driver(session.stop()) == driver.hear(" late", job=2) == []


def test_in_a_lasting_session_a_final_that_fails_costs_its_utterance_only():
    driver = Driver(lasting=True)
    session = driver.session
    for start in (0, 30, 60):
        driver(session.open(start))
        driver.speak(30)
        driver(session.close(start + 30))
    error = RuntimeError("lost")
    assert driver(session.failed(2, error)) == []  # its turn has not come
    assert driver.hear(" one", job=1) == [Confirmed(0, tokens(" one"), final=True), Lost(1, error)]
    assert driver(session.stop()) == []
    assert driver.hear(" three", job=3) == [Confirmed(2, tokens(" three"), final=True), Ended()]


def test_what_is_taken_back_is_never_decoded_and_the_next_utterance_begins_anew():
    driver = Driver()
    session = driver.session
    driver(session.open(0))
    assert driver(session.drop()) == [Dropped(0)]
    assert session.state == State.QUIET
    assert driver(session.drop()) == []
    driver.speak(20)
    driver(session.open(10))
    assert session.open_samples == 10
    driver(session.turn())
    assert driver(session.drop()) == [Abort(1), Dropped(1)]
    assert (session.open_samples, session.kept_from) == (0, 20)
    driver(session.open(20))
    driver.speak(20)
    assert driver(session.turn()) == [Decode(2, 2, 20, 40, False, (), None)]


def test_a_partial_that_fails_costs_nothing():
    driver = Driver()
    driver(driver.session.open(0))
    driver.speak(20)
    driver(driver.session.turn())
    assert driver(driver.session.failed(1, RuntimeError("lost"))) == []
    driver.speak(10)
    assert driver(driver.session.turn()) == [Decode(2, 0, 0, 30, False, (), None)]


def test_a_final_in_which_nobody_speaks_drops_only_what_was_not_confirmed():
    driver = Driver()
    session = driver.session
    driver(session.open(0))
    for words in (" ask not", " ask not what"):
        driver.speak(20)
        driver(session.turn())
        driver.hear(words)
    driver(session.close(40))
    assert driver(session.heard(3, None)) == [Confirmed(0, (), final=True)]
    assert text(driver.effects) == " ask not"


def test_a_cut_never_falls_before_what_a_confirmed_word_comes_from():
    driver = Driver()
    session = driver.session
    driver(session.open(0))
    for samples, words in ((40, " a b"), (40, " a b c"), (15, " c d e"), (15, " d e f")):
        driver.speak(samples)
        assert session.cut_range(session.received) is None
        driver(session.turn())
        driver.hear(words)
    driver.speak(20)
    earliest, latest = session.cut_range(session.received)
    assert (earliest, latest) == (95, 120)  # "d" was heard in the first 95; else the last third would do
    cut = driver(session.cut(latest))
    assert cut[0] == Closed(0, latest, cut=True)
    assert [type(effect) for effect in cut] == [Closed, Decode, Opened]


def test_free_finals_say_when_they_contradict_what_was_shown():
    for final, expected in (
        (" ask not what", Confirmed(0, tokens(" what"), final=True)),
        (" tasks", Changed(0, tokens(" tasks"))),
    ):
        driver = Driver(free_finals=True)
        session = driver.session
        driver(session.open(0))
        for words in (" ask not", " ask not what"):
            driver.speak(20)
            driver(session.turn())
            driver.hear(words)
        decode = driver(session.close(40))[-1]
        assert decode.prefix == ()
        assert driver.hear(final)[0] == expected


# --- any interleaving -------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """A session, the engine's jobs, and what is true so far."""

    session: Session
    chance: random.Random
    running: dict[int, Decode] = field(default_factory=dict)
    aborted: dict[int, Decode] = field(default_factory=dict)
    opened: dict[int, int] = field(default_factory=dict)
    closed: dict[int, int] = field(default_factory=dict)
    finals: dict[int, tuple[int, int]] = field(default_factory=dict)
    told: list[int] = field(default_factory=list)  # utterances whose last text has come
    dropped: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)  # utterances whose final was lost
    shown: dict[int, list[Token]] = field(default_factory=dict)
    revisions: dict[int, int] = field(default_factory=dict)
    over: bool = False
    last_edge: int = 0

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert not self.over, "nothing comes after the end"
            self._take(effect)
        partials = [job for job in self.running.values() if not job.final]
        assert len(partials) <= 1
        assert set(self.running) == self.session.jobs
        if self.session.state == State.ENDED:
            assert not self.running, "no job is left alive"
            assert self.over or self.cancelled
        else:
            assert self.session.kept_from <= min((job.start for job in self.running.values()), default=self.session.received)

    cancelled = False

    def _take(self, effect: Effect) -> None:
        match effect:
            case Decode():
                assert effect.start < effect.end <= self.session.received
                assert effect.prefix == tuple(t.id for t in self.shown.get(effect.utterance, []))
                assert (effect.language is not None) == bool(effect.prefix)
                if effect.final:
                    assert effect.utterance not in self.finals
                    assert (effect.start, effect.end) == (self.opened[effect.utterance], self.closed[effect.utterance])
                    self.finals[effect.utterance] = (effect.start, effect.end)
                else:
                    assert effect.utterance not in self.closed
                    assert self.next_told == effect.utterance, "only the first untold utterance has partials"
                self.running[effect.job] = effect
            case Abort():
                self.aborted[effect.job] = self.running.pop(effect.job)
            case Opened():
                assert effect.utterance == len(self.opened)
                assert effect.start >= self.last_edge
                self.opened[effect.utterance] = effect.start
            case Closed():
                assert effect.end >= self.opened[effect.utterance]
                self.closed[effect.utterance] = self.last_edge = effect.end
            case Dropped():
                assert effect.utterance == max(self.opened)
                assert effect.utterance not in self.closed
                self.dropped.add(effect.utterance)
            case Lost():
                assert effect.utterance == self.next_told
                assert effect.utterance in self.failed
                self.lost.add(effect.utterance)
            case Confirmed():
                assert effect.utterance == self.next_told, "text comes in the order of utterances"
                self.shown.setdefault(effect.utterance, []).extend(effect.tokens)
                if effect.final:
                    self.told.append(effect.utterance)
            case Tail():
                assert effect.utterance == self.next_told, "no tail after its final"
                assert effect.revision == self.revisions.get(effect.utterance, 0) + 1
                self.revisions[effect.utterance] = effect.revision
            case Failed():
                self.over = True
            case Ended():
                assert set(self.closed) == set(self.opened) - self.dropped == {*self.told} | self.lost
                assert self.told == sorted(self.told)
                assert self.lost == self.failed
                empty = {u for u in self.closed if self.closed[u] == self.opened[u]}
                assert self.finals == {u: (self.opened[u], self.closed[u]) for u in self.closed if u not in empty}
                self.over = True

    @property
    def next_told(self) -> int:
        """The first utterance whose text has not all come."""
        return next(u for u in range(len(self.opened) + 1) if u not in self.told and u not in self.dropped | self.lost)

    def step(self) -> None:
        session, chance = self.session, self.chance
        speaking = session.state in (State.SPEAKING, State.GUESSING)
        start = self.opened[max(self.opened)] if self.opened else 0
        match chance.choices(
            ["audio", "open", "close", "cut", "drop", "turn", "hear", "fail", "late", "stop", "cancel"],
            [30, 8, 8, 9, 2, 20, 24, 2, 4, 1, 0.3],
        )[0]:
            case "audio":
                if session.state not in (State.FINISHING, State.ENDED):
                    session.audio(chance.randrange(1, 25))
            case "open" if session.state == State.QUIET:
                self.take(session.open(chance.randint(min(self.last_edge, session.received), session.received)))
            case "close" if speaking:
                self.take(session.close(chance.choice([session.received, chance.randint(start, session.received)])))
            case "cut" if (found := session.cut_range(session.received)) is not None:
                earliest, latest = found
                assert start <= earliest <= latest <= session.received
                self.take(session.cut(chance.randint(earliest, latest)))
            case "drop":
                effects = session.drop()
                assert bool(effects) == speaking
                self.last_edge = session.received if speaking else self.last_edge
                self.take(effects)
            case "turn":
                wanted = session.wants_turn
                effects = session.turn()
                assert bool(effects) == wanted
                self.take(effects)
            case "hear" if self.running:
                job = self.running.pop(chance.choice(list(self.running)))
                self.take(session.heard(job.job, self.hypothesis(job)))
            case "fail" if self.running:
                job = self.running.pop(chance.choice(list(self.running)))
                if job.final:
                    self.failed.add(job.utterance)
                self.take(session.failed(job.job, RuntimeError("lost")))
            case "late" if self.aborted:
                job = chance.choice(list(self.aborted.values()))
                assert session.heard(job.job, self.hypothesis(job)) == session.failed(job.job, RuntimeError("lost")) == []
            case "stop":
                self.take(session.stop())
            case "cancel":
                self.cancelled = True
                self.take(session.cancel())

    def hypothesis(self, job: Decode) -> Hypothesis | None:
        """Hear a word for every ten samples, now and then another one, now and then nothing."""
        if self.chance.random() < 0.1:
            return None
        count = (job.end - job.start) // 10
        heard = [f" w{i}" if self.chance.random() < 0.9 else f" x{self.chance.randrange(5)}" for i in range(count)]
        return Hypothesis(tokens("".join(heard[len(job.prefix) :])), self.chance.choice(["en", "en", "en", "de"]))


@given(st.integers(0, 2**32), st.integers(20, 200), st.booleans())
@settings(max_examples=2000)
def test_the_promises_hold_whatever_happens_in_whatever_order(seed: int, steps: int, lasting: bool):
    world = World(Session(PACE, TWO, lasting=lasting), random.Random(seed))
    for _ in range(steps):
        world.step()
    world.take(world.session.stop())
    while world.running:
        job = world.running.pop(world.chance.choice(list(world.running)))
        world.take(world.session.heard(job.job, world.hypothesis(job)))
    assert world.session.state == State.ENDED
    assert world.over or world.cancelled


def test_with_client_endpointing_every_sample_is_in_exactly_one_final():
    chance = random.Random(4)
    for _ in range(200):
        driver = Driver()
        session, spans = driver.session, Counter()
        driver(session.open(0))
        for _ in range(chance.randrange(1, 30)):
            driver.speak(chance.randrange(1, 30))
            if found := session.cut_range(session.received):
                driver(session.cut(chance.randint(*found)))
            driver(session.turn())
            if chance.random() < 0.3 and session.received > session.kept_from:
                driver(session.close(session.received))
                driver(session.open(session.received))
        driver(session.stop())
        for effect in driver.effects:
            if isinstance(effect, Decode) and effect.final:
                spans.update(range(effect.start, effect.end))
        assert spans == Counter(range(session.received))


def test_every_action_has_its_method_and_is_used():
    used = {action for inputs in TABLE.values() for transition in inputs.values() for action in transition.actions}
    assert used | {"tell the end"} == set(ACTIONS)


def test_the_architecture_shows_the_table_as_it_is():
    document = (Path(__file__).parents[1] / "ARCHITECTURE.md").read_text()
    assert table() in document, "run `make table`"
    assert with_table(document) == document


@pytest.mark.parametrize("state", [state for state in State if state != State.ENDED])
def test_every_state_can_be_left_at_any_moment(state: State):
    assert any(transition.next == State.ENDED for transition in TABLE[state].values())

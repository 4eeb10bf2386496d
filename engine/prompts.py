"""Whisper's special tokens and the decoder prompts built from them.

The layout is that of openai-whisper (`whisper/tokenizer.py`, `whisper/decoding.py`): after the byte-pair vocabulary come
end of text, start of transcript, one token per language, translate, transcribe, start of language model, start of
previous text, no speech, no timestamps, and 1,501 timestamps from 0.00 to 30.00 s in steps of 0.02 s.

Ids are computed from the vocabulary's size, because names vary (`<|nospeech|>` is `<|nocaptions|>` in older files).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Task = Literal["transcribe", "translate"]

MAX_TARGET_POSITIONS = 448  # positions of the decoder, prompt included
MAX_PROMPT_TOKENS = MAX_TARGET_POSITIONS // 2 - 1  # what openai-whisper keeps of the previous text: 223
MAX_NEW_TOKENS = MAX_TARGET_POSITIONS // 2  # openai-whisper's sample_len: 224
TIMESTAMP_TOKENS = 1501
TIMESTAMP_STEP_SECONDS = 0.02

_ENGLISH_ONLY_VOCABULARY = 51_864
_TOKENS_AROUND_LANGUAGES = 51_765  # vocabulary of a multilingual model, less one, without its languages

# In the order of their tokens (openai-whisper, `LANGUAGES`). A vocabulary with 99 languages lacks the last.
LANGUAGE_CODES: tuple[str, ...] = tuple(
    """
    en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml
    cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am
    yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue
    """.split()  # noqa: SIM905
)


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet (openai/gpt-2, `bytes_to_unicode`): printable bytes are themselves, the rest begins at U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def spelling(entry: str) -> bytes:
    """Return the bytes of a vocabulary entry, which may be part of a character."""
    alphabet = _byte_of_character()
    return bytes(alphabet[character] for character in entry if character in alphabet)


class UnknownVocabularyError(ValueError):
    """The vocabulary's size is not one that Whisper's layout explains."""


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The ids of Whisper's special tokens in a vocabulary of `size` rows."""

    size: int
    end_of_text: int
    start_of_transcript: int
    languages: dict[str, int]
    translate: int
    transcribe: int
    start_of_lm: int
    start_of_previous: int
    no_speech: int
    no_timestamps: int
    timestamp_begin: int
    multilingual: bool

    @classmethod
    def of_vocabulary(cls, size: int) -> "TokenLayout":
        """Compute the layout from the number of rows of the token embedding.

        Raises:
            UnknownVocabularyError: if no Whisper model has this many rows.

        """
        multilingual = size > _ENGLISH_ONLY_VOCABULARY
        language_count = size - _TOKENS_AROUND_LANGUAGES - int(multilingual)
        if not 99 <= language_count <= len(LANGUAGE_CODES) or size < _ENGLISH_ONLY_VOCABULARY:
            raise UnknownVocabularyError(
                f"a vocabulary of {size:,} tokens is not Whisper's (51,864 English-only, 51,865 or 51,866 multilingual)"
            )
        end_of_text = 50_257 if multilingual else 50_256
        start = end_of_text + 1
        after = start + 1 + language_count
        return cls(
            size=size,
            end_of_text=end_of_text,
            start_of_transcript=start,
            languages={code: start + 1 + i for i, code in enumerate(LANGUAGE_CODES[:language_count])},
            translate=after,
            transcribe=after + 1,
            start_of_lm=after + 2,
            start_of_previous=after + 3,
            no_speech=after + 4,
            no_timestamps=after + 5,
            timestamp_begin=after + 6,
            multilingual=multilingual,
        )

    def language_of(self, token: int) -> str | None:
        """Return the code of a language's token, or None for any other token."""
        first = self.start_of_transcript + 1
        return LANGUAGE_CODES[token - first] if first <= token < first + len(self.languages) else None

    def special_tokens(self) -> dict[int, str]:
        """Return every special token's usual name by id, the timestamps included."""
        named = {
            self.end_of_text: "<|endoftext|>",
            self.start_of_transcript: "<|startoftranscript|>",
            self.translate: "<|translate|>",
            self.transcribe: "<|transcribe|>",
            self.start_of_lm: "<|startoflm|>",
            self.start_of_previous: "<|startofprev|>",
            self.no_speech: "<|nospeech|>",
            self.no_timestamps: "<|notimestamps|>",
        }
        named |= {token: f"<|{code}|>" for code, token in self.languages.items()}
        for i in range(TIMESTAMP_TOKENS):
            named[self.timestamp_begin + i] = f"<|{i * TIMESTAMP_STEP_SECONDS:.2f}|>"
        return dict(sorted(named.items()))


@dataclass(frozen=True, slots=True)
class DecoderPrompt:
    """What the decoder is given, and what it must still choose itself before the text begins.

    `token_ids` goes in; `forced` are the rules of the next steps, one each: a tuple of the tokens that are allowed there.
    """

    token_ids: tuple[int, ...]
    forced: tuple[tuple[int, ...], ...] = ()

    @property
    def max_new_tokens(self) -> int:
        """How many tokens may follow: openai-whisper's 224 beside the forced ones, within the decoder's positions."""
        return min(MAX_NEW_TOKENS + len(self.forced), MAX_TARGET_POSITIONS - len(self.token_ids))


def decoder_prompt(
    layout: TokenLayout,
    *,
    language: str | None,
    languages: Sequence[str] = (),
    task: Task = "transcribe",
    timestamps: bool = False,
    previous: Sequence[int] = (),
    prefix: Sequence[int] = (),
) -> DecoderPrompt:
    """Build the decoder's prompt as openai-whisper does (`DecodingTask._get_initial_tokens`).

    The prompt ends at the start token, and what follows it is forced: there the first step tells how likely it is that nobody
    speaks, and which language is spoken.

    Args:
        layout: the vocabulary's special tokens.
        language: a code of `layout.languages`; None lets a multilingual model choose in its first step, so that
            detection costs no second encode. An English-only model has no language token.
        languages: codes from which it may choose; all when empty.
        timestamps: whether the text is to be framed by timestamps.
        task: what the text is to be; an English-only model only transcribes.
        previous: tokens of the text before this audio; the last 223 are kept.
        prefix: tokens that the text begins with. The prompt ends with them, and nothing is left to be forced.

    Raises:
        KeyError: if the model does not know `language`.

    """
    history = (layout.start_of_previous, *previous[-MAX_PROMPT_TOKENS:]) if previous else ()
    forced: list[tuple[int, ...]] = []
    if layout.multilingual:
        allowed = (language,) if language is not None else languages or layout.languages
        forced.append(tuple(layout.languages[code] for code in allowed))
        forced.append((layout.translate if task == "translate" else layout.transcribe,))
    if not timestamps:
        forced.append((layout.no_timestamps,))
    if prefix:
        return DecoderPrompt((*history, layout.start_of_transcript, *(step[0] for step in forced), *prefix))
    return DecoderPrompt((*history, layout.start_of_transcript), tuple(forced))

"""Tokens back to text, a few at a time: whole characters only, and never a stop string.

A character may be spread over several tokens (an emoji is up to four bytes, a token may be one byte). Tokens are
therefore turned into bytes first, and the bytes go through an incremental UTF-8 decoder that keeps an unfinished
character to itself. That is exact and costs the same for each token; comparing decodes of growing token windows,
the usual way, is neither where a model really says U+FFFD.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence

from tokenizers import Tokenizer

from appliance.core.errors import ModelError


class TokenBytes:
    """What each token id stands for in bytes; special tokens and unknown ids stand for nothing.

    Two families of tokenizers exist among the models that we serve, told apart by the `decoder` of tokenizer.json:
    byte-level BPE (GPT-2's alphabet of 256 printable characters; Llama 3, Qwen, SmolLM, Mistral's newer ones) and
    SentencePiece with byte fallback (U+2581 for a space, <0xNN> for a byte; Gemma, Llama 2).

    Raises:
        ModelError: the tokenizer is of neither family.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._known: dict[int, bytes] = {}
        kinds = _decoder_kinds(tokenizer)
        if "ByteLevel" in kinds:
            self._piece_bytes = _byte_level_bytes
        elif "ByteFallback" in kinds:
            self._piece_bytes = _byte_fallback_bytes
        else:
            raise ModelError(
                f"tokenizer.json has a decoder of kind {' + '.join(sorted(kinds)) or 'none'}, which this engine cannot stream",
                hint="byte-level BPE and SentencePiece with byte fallback are served; use another engine for this model",
            )

    def of(self, token_id: int) -> bytes:
        """The bytes of one token."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def marks(self, names: Iterable[str]) -> dict[int, bytes]:
        """Those of these names that are special tokens here, and so stand for nothing otherwise: by id, what they are called."""
        wanted = set(names)
        return {token_id: token.content.encode() for token_id, token in self._added.items() if token.special and token.content in wanted}

    def specials(self) -> dict[int, bytes]:
        """All special tokens: by id, what they are called."""
        return {token_id: token.content.encode() for token_id, token in self._added.items() if token.special}

    def _look_up(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None and added.special:
            return b""
        piece = self._tokenizer.id_to_token(token_id)
        # The embedding matrix may be padded beyond the vocabulary.
        return b"" if piece is None else self._piece_bytes(piece)


class Detokenizer:
    """Text of one growing answer. The pieces, joined, are the text of all its tokens."""

    def __init__(self, token_bytes: TokenBytes, prompt_ids: Sequence[int] = (), shown: Mapping[int, bytes] | None = None) -> None:
        """`prompt_ids`: what the answer goes on from; a character that the prompt left unfinished is finished here. `shown`: special
        tokens that stand for something after all (TokenBytes.marks)."""
        self._bytes_of = token_bytes.of if not shown else lambda token_id: shown.get(token_id) or token_bytes.of(token_id)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # A character has at most four bytes, so its beginning is in the last three tokens that stand for any.
        self.feed(prompt_ids[-8:])

    def feed(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """At the end: U+FFFD for a character that was never finished, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Cuts a text at the first of several strings, and holds back what might still become one.

    Knuth-Morris-Pratt over all of them at once: the longest partial match is what must be held back, so that no
    character of a stop string is ever sent and no other character waits longer than needed. The result does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The part of the text so far, not yet given out, that is certainly no stop string; after a match, nothing."""
        if self.matched is not None:
            return ""
        if not self._patterns:
            return text
        pending = self._held + text
        for end in range(len(self._held) + 1, len(pending) + 1):
            done = [pattern.text for pattern in self._patterns if pattern.step(pending[end - 1])]
            if done:
                self.matched = max(done, key=len)
                self._held = ""
                return pending[: end - len(self.matched)]
        held = max(pattern.matched for pattern in self._patterns)
        self._held = pending[len(pending) - held :]
        return pending[: len(pending) - held]

    def flush(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """One stop string and how much of it the text's end matches."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)
        for index in range(1, len(text)):
            length = self._fallback[index - 1]
            while length and text[index] != text[length]:
                length = self._fallback[length - 1]
            self._fallback[index] = length + (text[index] == text[length])

    def step(self, character: str) -> bool:
        """Take one character; True when it completes the string."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        if self.text[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.text)


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """The `type`s in tokenizer.json's decoder. Pickling is the only way to read it without parsing all of the file."""
    if tokenizer.decoder is None:
        return set()
    state = json.loads(tokenizer.decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    # An added token is stored as plain text; one with a character outside the alphabet is taken literally as a whole.
    if all(character in _ALPHABET for character in piece):
        return bytes(_ALPHABET[character] for character in piece)
    return piece.encode()


def _byte_fallback_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace("\u2581", " ").encode()

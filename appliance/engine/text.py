"""Text on one side, token ids on the other: the model's tokenizer, its chat template and its end tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from appliance.core.errors import ModelError
from appliance.engine.detokenize import Detokenizer, TokenBytes
from appliance.engine.template import ChatTemplate, load_chat_template

if TYPE_CHECKING:
    from appliance.engine.grammar import Grammars

_SLICE_CHARS = 64 * 1024
_SLICE_SLACK_TOKENS = 64
"""A cut through a long word can cost that many tokens more than the uncut text has."""


class TooManyTokens(Exception):
    """The text has certainly more tokens than were asked for; `at_least` is how many were counted."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


class UnknownToken(Exception):
    """The text holds one that the tokenizer has and the weights have not, such as Gemma 3's for an image in its models without eyes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What generation_config.json recommends for this model; OpenAI's defaults where it is silent."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class ModelText:
    """The text side of one model folder.

    Attributes:
        vocabulary: token ids are below this.
        end_token_ids: any of them ends an answer.
        defaults: sampling parameters where a client gives none.
    """

    def __init__(self, model_path: Path) -> None:
        """Read tokenizer.json, tokenizer_config.json, generation_config.json and config.json.

        Raises:
            ModelError: one that is needed is missing or cannot be read.
        """
        self._tokenizer_path = model_path / "tokenizer.json"
        self._tokenizer = _load_tokenizer(self._tokenizer_path)
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()
        tokenizer_config = _read_json(model_path / "tokenizer_config.json")
        generation = _read_json(model_path / "generation_config.json")
        config = _read_json(model_path / "config.json")
        self._template = load_chat_template(model_path, tokenizer_config)
        self._token_bytes = TokenBytes(self._tokenizer)
        self.vocabulary = _vocab_size(config) or self._tokenizer.get_vocab_size()
        self.end_token_ids = self._end_token_ids(generation, config, tokenizer_config)
        self.defaults = _sampling_defaults(generation)

    @property
    def chat_template(self) -> ChatTemplate | None:
        """None for a base model: it continues text and knows no roles."""
        return self._template

    def encode(self, text: str, *, add_special_tokens: bool, most_tokens: int) -> tuple[int, ...]:
        """Token ids; with special tokens (such as BOS) where the tokenizer adds them.

        A text of megabytes would take seconds and a gigabyte for its encoding: what is certainly longer than
        `most_tokens` is found out by counting slices. Shorter texts are encoded even if they turn out too long.

        Raises:
            TooManyTokens: the text is longer, by a lot.
            UnknownToken: there is a token in it that the model does not have.
        """
        if len(text) > max(_SLICE_CHARS, 4 * most_tokens):
            self._refuse_by_slices(text, most_tokens)
        ids = self._encode(text, add_special_tokens)
        highest = max(ids, default=0)
        if highest >= self.vocabulary:
            raise UnknownToken(self._tokenizer.id_to_token(highest) or str(highest))
        return tuple(ids)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call lets other threads run; `encode` holds the interpreter's lock, and with it the decode loop, for
        # as long as it takes (1.5 s for 2.8 MB). "fast" leaves out the offsets.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _refuse_by_slices(self, text: str, most_tokens: int) -> None:
        at_least = 0
        for start in range(0, len(text), _SLICE_CHARS):
            part = self._encode(text[start : start + _SLICE_CHARS], add_special_tokens=False)
            at_least += max(0, len(part) - _SLICE_SLACK_TOKENS)
            if at_least > most_tokens:
                raise TooManyTokens(at_least)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens; without the special ones, or with their names."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, prompt_ids: Sequence[int], shown: Mapping[int, bytes] | None = None) -> Detokenizer:
        """For one answer that goes on from this prompt; `shown`: see `marks`."""
        return Detokenizer(self._token_bytes, prompt_ids, shown)

    def marks(self, names: Iterable[str]) -> dict[int, bytes]:
        """Those of these names that are special tokens of this model, by id. Otherwise an answer's text is without them."""
        return self._token_bytes.marks(names)

    def specials(self) -> dict[int, bytes]:
        """All special tokens of this model by id, for who wants them in a text."""
        return self._token_bytes.specials()

    def token(self, token_id: int) -> tuple[str, bytes]:
        """What stands for one token in a list of them, and its bytes; half a character is U+FFFD, a special token its name."""
        raw = self._token_bytes.of(token_id)
        return (raw.decode("utf-8", "replace") if raw else self._tokenizer.id_to_token(token_id) or ""), raw

    def grammars(self) -> Grammars:
        """The model's tokens for grammars, made when they are first asked for.

        Raises:
            ImportError: llguidance is not installed.
        """
        with self._grammars_lock:
            if self._grammars is None:
                from appliance.engine.grammar import Grammars

                vocabulary = max(self.vocabulary, self._tokenizer.get_vocab_size())
                self._grammars = Grammars(self._tokenizer_path, vocabulary, self.end_token_ids)
            return self._grammars

    def _end_token_ids(
        self, generation: Mapping[str, object], config: Mapping[str, object], tokenizer_config: Mapping[str, object]
    ) -> frozenset[int]:
        """generation_config.json's, else config.json's; and the tokenizer's own."""
        declared = generation.get("eos_token_id", config.get("eos_token_id"))
        ids = {value for value in (declared if isinstance(declared, list) else [declared]) if isinstance(value, int)}
        token = tokenizer_config.get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        own = self._tokenizer.token_to_id(text) if isinstance(text, str) else None
        return frozenset(ids if own is None else ids | {own})


def _vocab_size(config: Mapping[str, object]) -> int | None:
    """Of the weights; a model that sees as well has its language model's in text_config."""
    part = config.get("text_config")
    sizes = [part.get("vocab_size") if isinstance(part, dict) else None, config.get("vocab_size")]
    return next((size for size in sizes if isinstance(size, int)), None)


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing finer, for a missing file as for a bad one
        reason = "there is no such file" if not path.exists() else str(error)
        raise ModelError(
            f"{path} cannot be read: {reason}", hint="copy the folder again (the demo: `appliancectl setup --demo`)"
        ) from error


def _read_json(path: Path) -> dict[str, object]:
    """The object in a file; empty where there is no file, as for models that need none of it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="copy the folder again (the demo: `appliancectl setup --demo`)") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _sampling_defaults(generation: Mapping[str, object]) -> SamplingDefaults:
    def number(name: str, default: float) -> float:
        value = generation.get(name)
        return float(value) if isinstance(value, int | float) else default

    if generation.get("do_sample") is False:
        return SamplingDefaults()
    chosen = (number("temperature", 1.0), number("top_p", 1.0), int(number("top_k", 0)))
    return SamplingDefaults(*chosen, number("min_p", 0.0), number("repetition_penalty", 1.0))

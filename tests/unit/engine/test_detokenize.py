"""Tokens to text: whole characters only, nothing lost, nothing of a stop string."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from appliance.core.errors import ModelError
from appliance.engine.detokenize import StopStrings, TokenBytes
from appliance.engine.text import ModelText
from tests.fakes.model_folder import LINES, byte_fallback_folder, byte_level_folder


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder = tmp_path_factory.mktemp("model")
    make = byte_level_folder if request.param == "byte level" else byte_fallback_folder
    return ModelText(make(folder))


def _pieces(text: ModelText, ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = text.detokenizer(())
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [detokenizer.feed(ids[start:end]) for start, end in pairwise(bounds)] + [detokenizer.flush()]


@given(content=st.text(st.characters(exclude_categories=["Cs"]), max_size=40), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_pieces_join_to_the_text_and_hold_whole_characters(text: ModelText, content: str, cuts: list[int]) -> None:
    """Whatever the script and however the tokens are cut, the joined pieces are the text; no piece has half a character."""
    # U+2581 is SentencePiece's space: a text that contains it comes back with a space, from any SentencePiece.
    content = content.replace("\u2581", "")
    ids = list(text.encode(content, add_special_tokens=False, most_tokens=1000))
    pieces = _pieces(text, ids, cuts)
    assert "".join(pieces) == text.decode(ids) == content
    if "\ufffd" not in content:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_token_by_token(text: ModelText, line: str) -> None:
    """Emoji with joiners, combining marks, CJK: fed one token at a time, each piece is a prefix's growth."""
    ids = list(text.encode(line, add_special_tokens=False, most_tokens=1000))
    detokenizer, grown = text.detokenizer(()), ""
    for token_id in ids:
        grown += detokenizer.feed([token_id])
        assert line.startswith(grown)
    assert grown + detokenizer.flush() == line


@given(ids=st.lists(st.integers(0, 600), max_size=30), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_any_tokens_whatever_the_cuts(text: ModelText, ids: list[int], cuts: list[int]) -> None:
    """A model may say anything, also bytes that are no UTF-8 and ids beyond the vocabulary: the cuts change nothing."""
    whole = "".join(_pieces(text, ids, []))
    assert "".join(_pieces(text, ids, cuts)) == whole
    reference = text.decode([token_id for token_id in ids if token_id < text.vocabulary])
    if "\ufffd" not in reference:
        assert whole == reference


@given(ids=st.lists(st.integers(0, 603), max_size=30))
def test_byte_level_equals_the_tokenizers_own_decode(byte_level: ModelText, ids: list[int]) -> None:
    """Byte-level BPE: equal to the library's decode for every sequence of tokens, broken UTF-8 included."""
    assert "".join(_pieces(byte_level, ids, [])) == byte_level.decode(ids)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText(byte_level_folder(tmp_path_factory.mktemp("model")))


def test_special_tokens_are_silent_and_added_ones_are_not(byte_level: ModelText) -> None:
    """<|im_end|> is no text; an added token that is not special is, even with a space in it."""
    ids = byte_level.encode("a<|im_end|>b<tool call>c", add_special_tokens=False, most_tokens=100)
    assert len(ids) == 5
    assert "".join(_pieces(byte_level, list(ids), [1, 2, 3])) == "ab<tool call>c"


def test_unfinished_character_at_the_end_is_one_replacement(byte_level: ModelText) -> None:
    """An answer cut by max_tokens inside an emoji ends with U+FFFD, once."""
    ids = list(byte_level.encode("ok🜁", add_special_tokens=False, most_tokens=100))
    assert "".join(_pieces(byte_level, ids[:-1], [])) == "ok\ufffd"


def test_answer_finishes_the_prompts_character(byte_level: ModelText) -> None:
    """A prompt of token ids may end inside a character (a resumed answer does): the answer's text begins with it whole."""
    ids = list(byte_level.encode("x🜁y", add_special_tokens=False, most_tokens=100))
    for cut in range(2, len(ids)):
        detokenizer = byte_level.detokenizer(ids[:cut])
        assert detokenizer.feed(ids[cut:]) in ("🜁y", "y")
    assert byte_level.detokenizer(ids[:2]).feed(ids[2:]) == "🜁y"


def test_other_decoders_are_refused_by_name() -> None:
    """WordPiece (BERT) cannot be turned into bytes: the model is refused with the decoder's name."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        TokenBytes(tokenizer)
    tokenizer.decoder = None
    with pytest.raises(ModelError, match="none"):
        TokenBytes(tokenizer)


def _stopped(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    cutter = StopStrings(stops)
    given_out = "".join(cutter.feed(piece) for piece in pieces)
    return given_out + ("" if cutter.matched else cutter.flush()), cutter.matched


def _first_stop(stops: list[str], text: str) -> tuple[str, str | None]:
    """The plain definition: the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("ab\u00e9", max_size=6), max_size=12),
)
def test_stop_strings_match_the_definition_however_cut(stops: list[str], pieces: list[str]) -> None:
    """Self-overlapping, nested and spanning stop strings: the text before the first complete one, whatever the pieces."""
    assert _stopped(stops, pieces) == _first_stop(stops, "".join(pieces))


@given(stop=st.text("ab", min_size=1, max_size=5), pieces=st.lists(st.text("ab", max_size=6), max_size=12))
def test_held_back_is_exactly_what_could_become_a_stop(stop: str, pieces: list[str]) -> None:
    """At any moment the text not given out is the longest end that is a beginning of the stop string."""
    cutter, so_far, given_out = StopStrings([stop]), "", ""
    for piece in pieces:
        so_far += piece
        given_out += cutter.feed(piece)
        if cutter.matched:
            return
        held = max((size for size in range(len(stop)) if so_far.endswith(stop[:size])), default=0)
        assert given_out == so_far[: len(so_far) - held]


def test_long_stop_string_costs_little() -> None:
    """A long stop string of the same letter against an answer of that letter: linear, not quadratic."""
    cutter = StopStrings(["a" * 200_000 + "b"])
    assert all(cutter.feed("aaaaa") == "" for _ in range(2000))
    assert cutter.feed("c") == "a" * 10_000 + "c"

"""The tokenizer inside a GGUF file, as tokenizer.json and tokenizer_config.json of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from appliance.core.errors import ModelError
from appliance.engine.gguf_file import field

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"
"""SentencePiece writes a space so."""

_LLAMA3_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3_WORDS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2_WORDS),
    "tekken": _TEKKEN_WORDS,
}
"""By `tokenizer.ggml.pre`."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Where a word that is a token needs no merges, and a text begins with BOS unless the file says otherwise."""


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """From the metadata of a GGUF file.

    Raises:
        ModelError: a kind of tokenizer, or a way of splitting words, that we do not know.
    """
    kind = field(fields, "tokenizer.ggml.model", str)
    if kind == "gpt2":
        tokenizer = _byte_level(fields)
    elif kind == "llama":
        tokenizer = _sentencepiece(fields)
    else:
        raise ModelError(f"the GGUF file's tokenizer is of kind {kind!r}", hint="converted: gpt2 (byte-level BPE), llama (SentencePiece)")
    _add_tokens(tokenizer, fields)
    if adds_bos(fields):
        bos = _token(fields, "bos")
        if bos is None:
            raise ModelError("the GGUF file's tokenizer begins with a BOS token and does not name one")
        template = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, fields["tokenizer.ggml.bos_token_id"])])
        tokenizer.post_processor = template
    return tokenizer


def tokenizer_config(fields: Mapping[str, Any], context_tokens: int) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens by role, and the chat template where there is one."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(fields),
    }
    for role, key in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        token = _token(fields, role)
        if token is not None:
            config[key] = token
    template = fields.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config


def adds_bos(fields: Mapping[str, Any]) -> bool:
    """Whether a text begins with a BOS token. Older files do not say."""
    usual = fields.get("tokenizer.ggml.model") == "llama" or fields.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    return bool(field(fields, "tokenizer.ggml.add_bos_token", bool, usual))


def end_token_ids(fields: Mapping[str, Any]) -> list[int]:
    """Tokens that end an answer: of a text, and of a turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return list(dict.fromkeys(int(fields[key]) for key in keys if key in fields))


def _token(fields: Mapping[str, Any], role: str) -> str | None:
    number = fields.get(f"tokenizer.ggml.{role}_token_id")
    tokens = fields["tokenizer.ggml.tokens"]
    return str(tokens[number]) if isinstance(number, int) and number < len(tokens) else None


def _byte_level(fields: Mapping[str, Any]) -> Tokenizer:
    """GPT-2's kind. `tokenizer.ggml.pre` names how text is cut into words before pairs are merged."""
    words = field(fields, "tokenizer.ggml.pre", str, "default")
    normalizer = None
    splitter: pre_tokenizers.PreTokenizer
    if words == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        splitter = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif words in ("gpt-2", "default"):
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif words in _WORDS:
        pattern = Regex(_WORDS[words])
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        splitter = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), bytes_only])
        normalizer = normalizers.NFC() if _WORDS[words] is _QWEN2_WORDS else None
    else:
        raise ModelError(
            f"the GGUF file's tokenizer cuts words the {words!r} way, which is not converted",
            hint=f"converted: smollm, gpt-2, {', '.join(_WORDS)}; take the safetensors version of the model",
        )
    tokens: list[str] = field(fields, "tokenizer.ggml.tokens", list)
    merges = [tuple(merge.split(" ", 1)) for merge in field(fields, "tokenizer.ggml.merges", list)]
    ids = {token: index for index, token in enumerate(tokens)}
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= ids.keys():
            found = f"the GGUF file's tokenizer does not fit together: it merges {merge} without having all of it as tokens"
            raise ModelError(found, hint="download it again")
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=words in _WHOLE_WORDS))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece's BPE: the pair whose union scores best is merged first; bytes for what is not in the vocabulary."""
    tokens: list[str] = field(fields, "tokenizer.ggml.tokens", list)
    kinds: list[int] = field(fields, "tokenizer.ggml.token_type", list)
    scores: list[float] = field(fields, "tokenizer.ggml.scores", list)
    merges = merges_from_scores(tokens, kinds, scores)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = _token(fields, "unknown")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = field(fields, "tokenizer.ggml.add_space_prefix", bool, True)
    space = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space]) if prefix else space
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def merges_from_scores(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best-scored token first; ties as Hugging Face breaks them."""
    pieces = {token: index for index, token in enumerate(tokens) if kinds[index] == _NORMAL}
    merges: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for token, index in pieces.items():
        for cut in range(1, len(token)):
            left, right = pieces.get(token[:cut]), pieces.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[index], index, left, right, (token[:cut], token[cut:])))
    merges.sort()
    return [merge[-1] for merge in merges]


def _add_tokens(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> None:
    """Control tokens are special; user-defined ones are found whole in a text before it is cut, and are not special."""
    tokens: list[str] = field(fields, "tokenizer.ggml.tokens", list)
    kinds: list[int] = field(fields, "tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    for special in (True, False):
        chosen = [AddedToken(token, normalized=False, special=special) for token, kind in added if (kind == _CONTROL) == special]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(chosen)

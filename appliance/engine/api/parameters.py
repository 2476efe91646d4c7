"""What the generating endpoints have in common: the model's name, sampling, and whether it all fits the context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from appliance.core.launch import EngineLimits
from appliance.engine.api.errors import ApiError, bad_request
from appliance.engine.api.fields import Fields, check_text
from appliance.engine.api.service import LoadedModel
from appliance.engine.messages import SamplingParams
from appliance.engine.text import ModelText, TooManyTokens, UnknownToken

MOST_STOPS = 4
MOST_STOP_CHARS = 1000
MOST_BIASES = 1024
MOST_ANSWERS = 16
"""To one prompt."""
MOST_CHOICES = 32
"""Of one request: answers to all of its prompts."""
MOST_LOGPROBS = 20
_NEUTRAL: tuple[tuple[str, object], ...] = (
    ("use_beam_search", False), ("length_penalty", 1), ("early_stopping", False), ("include_stop_str_in_output", False),
    ("spaces_between_special_tokens", True), ("bad_words", []), ("allowed_token_ids", []), ("no_stop_trim", False),
)  # fmt: skip
"""Of vLLM and SGLang, whose clients write out the defaults."""
_INT64 = 2**63
_MOST_ID_DIGITS = 20
_MOST_PRIORITY = 2**31 - 1
_ANY_COUNT = 10**18
"""Larger than any context; fit() says what the limit really is."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """A client's sampling parameters, before the prompt is known.

    Attributes:
        max_new_tokens: None: what fits.
        max_tokens_name: what this client calls it.
        params: all that the engine is told; `fit` puts the number of tokens in.
        stops: strings that end the answer.
        answers: how many are wanted.
        min_tokens_name: what this client calls the least number of them.
        shown: special tokens that the text is to have.
    """

    max_new_tokens: int | None
    max_tokens_name: str
    params: SamplingParams
    stops: tuple[str, ...]
    answers: int = 1
    min_tokens_name: str = "min_tokens"
    shown: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def seed(self) -> int | None:
        """The client's."""
        return self.params.seed


def check_model(fields: Fields, model: LoadedModel) -> str:
    """The model's id; a client that names none means the one that is served.

    Raises:
        ApiError: 404: another model.
    """
    served = model.limits.model_id
    name = fields.text("model")
    if name not in (None, "", served):
        message = f"the model {name!r:.80} does not exist here; this engine serves {served!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return served


def read_sampling(
    fields: Fields, text: ModelText, *max_tokens_names: str, stop_name: str = "stop", most_answers: int = 1, least_tokens: int = 1
) -> Sampling:
    """Sampling parameters under OpenAI's and SGLang's names; defaults are the model's own.

    Raises:
        ApiError: 400: a wrong type or value, or a parameter that this engine does not have.
    """
    max_tokens_name, max_new_tokens = _read_max_tokens(fields, max_tokens_names, least_tokens)
    stop_token_ids = frozenset(fields.token_ids("stop_token_ids", text.vocabulary) or ())
    if not fields.flag("ignore_eos"):
        stop_token_ids |= text.end_token_ids
    top_p = fields.number("top_p", text.defaults.top_p, 0, 1)
    if top_p == 0:
        raise bad_request(f"{fields.path('top_p')}=0 leaves no token to choose; use temperature=0 for greedy", "top_p", "invalid_value")
    top_k = fields.integer("top_k", -1, 2**31 - 1)
    seed = fields.integer("seed", -_INT64, _INT64 - 1)
    for name, neutral in _NEUTRAL:
        fields.only(name, neutral)
    shown = {} if fields.flag("skip_special_tokens", default=True) else text.specials()
    least = {name: fields.integer(name, 0, _ANY_COUNT) or 0 for name in ("min_tokens", "min_new_tokens")}
    params = SamplingParams(
        max_new_tokens=1,
        temperature=fields.number("temperature", text.defaults.temperature, 0, 2),
        top_p=top_p,
        top_k=text.defaults.top_k if top_k is None else max(0, top_k),
        seed=None if seed is None else seed % _INT64,
        stop_token_ids=stop_token_ids,
        min_p=fields.number("min_p", text.defaults.min_p, 0, 1),
        min_new_tokens=max(least.values()),
        presence_penalty=fields.number("presence_penalty", 0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0, -2, 2),
        repetition_penalty=fields.number("repetition_penalty", text.defaults.repetition_penalty, 0.01, 10),
        logit_bias=_read_logit_bias(fields, text.vocabulary),
    )
    stops, answers = _read_stops(fields, stop_name), _read_answers(fields, most_answers)
    return Sampling(max_new_tokens, max_tokens_name, params, stops, answers, max(least, key=lambda name: least[name]), shown)


def read_priority(fields: Fields) -> int:
    """vLLM's: who has the lower one is served first."""
    return fields.integer("priority", -_MOST_PRIORITY, _MOST_PRIORITY) or 0


def _read_answers(fields: Fields, most: int) -> int:
    if most == 1:
        fields.only("n", 1)
        return 1
    return fields.integer("n", 1, most) or 1


def _read_logit_bias(fields: Fields, vocabulary: int) -> tuple[tuple[int, float], ...]:
    """OpenAI's form: token ids as strings, because JSON's names are strings."""
    value = fields.value("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise bad_request("logit_bias must be an object of token ids and numbers", "logit_bias", "invalid_type")
    if len(value) > MOST_BIASES:
        raise bad_request(f"logit_bias has {len(value)} tokens; at most {MOST_BIASES} are taken", "logit_bias", "invalid_value")
    biases: list[tuple[int, float]] = []
    for name, bias in value.items():
        # Without a length first, a name of thousands of digits is an error of int() itself; with zeros in front, one of many is a small id.
        if not (name.isascii() and name.isdigit() and len(name) <= _MOST_ID_DIGITS and int(name) < vocabulary):
            raise bad_request(f"logit_bias[{name[:40]!r}]: no token id of this model, 0 to {vocabulary - 1}", "logit_bias", "invalid_value")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise bad_request(f"logit_bias[{name}]={bias!r:.40} is no number from -100 to 100", "logit_bias", "invalid_value")
        biases.append((int(name), float(bias)))
    return tuple(biases)


def _read_max_tokens(fields: Fields, names: tuple[str, ...], least: int) -> tuple[str, int | None]:
    given = {name: value for name in names if (value := fields.integer(name, least, _ANY_COUNT)) is not None}
    if len(set(given.values())) > 1:
        both = " and ".join(f"{name}={value}" for name, value in given.items())
        raise bad_request(f"{both} contradict each other; send one of them", names[-1], "invalid_value")
    return next(iter(given.items()), (names[0], None))


def _read_stops(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.value(name)
    stops = [] if value is None else value if isinstance(value, list) else [value]
    if len(stops) > MOST_STOPS:
        raise bad_request(f"{name} has {len(stops)} strings; at most {MOST_STOPS} are allowed", name, "invalid_value")
    checked: list[str] = []
    for stop in stops:
        if not isinstance(stop, str):
            raise bad_request(f"{name} must be a string or a list of strings", name, "invalid_type")
        if not stop:
            raise bad_request(f"{name} holds an empty string, which would end every answer at once; leave it out", name, "invalid_value")
        if len(stop) > MOST_STOP_CHARS:
            raise bad_request(f"{name} has a string of {len(stop)} characters; at most {MOST_STOP_CHARS} are taken", name, "invalid_value")
        checked.append(check_text(stop, name))
    return tuple(checked)


def encode_prompt(text: str, model: LoadedModel, param: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Token ids of a prompt; their number may still exceed the context, `fit` tells.

    Raises:
        ApiError: 422: far too long; 400: no tokens at all, or one that the model does not have.
    """
    try:
        ids = model.text.encode(text, add_special_tokens=add_special_tokens, most_tokens=model.limits.context_length_tokens)
    except TooManyTokens as error:
        raise _too_long(f"at least {error.at_least}", model.limits, param) from None
    except UnknownToken as error:
        message = f"{param} holds {error.name!r:.80}, a token that this model has no weights for; leave it out"
        raise bad_request(message, param, "invalid_value") from None
    if not ids:
        raise bad_request(f"{param} is empty: there is nothing to go on from; send at least one token", param, "invalid_value")
    return ids


def fit(sampling: Sampling, prompt_ids: tuple[int, ...], model: LoadedModel, param: str) -> SamplingParams:
    """The sampling for this prompt; without a wish, the answer may take all that this engine has for it.

    Raises:
        ApiError: 422 with both numbers and what would fit.
    """
    limits, count = model.limits, len(prompt_ids)
    if count > most_prompt_tokens(limits):
        raise _too_long(str(count), limits, param)
    room = limits.context_length_tokens - count
    if limits.max_new_tokens:
        room = min(room, limits.max_new_tokens)
    wanted, name = sampling.max_new_tokens, sampling.max_tokens_name
    if wanted is not None and wanted > room:
        message = (
            f"a prompt of {count} tokens plus {name}={wanted} is {count + wanted} tokens and exceeds the {_context(limits, 'new')};"
            f" with this prompt at most {name}={room} fits"
        )
        raise ApiError(422, message, param=name, code="context_length_exceeded")
    most, least = wanted or room, sampling.params.min_new_tokens
    if least > most:
        message = f"{sampling.min_tokens_name}={least} is more than the answer can have: at most {most} tokens ({name}, or what fits)"
        raise ApiError(400, message, param=sampling.min_tokens_name, code="invalid_value")
    return replace(sampling.params, max_new_tokens=most)


def most_prompt_tokens(limits: EngineLimits) -> int:
    """The longest prompt that can get an answer of one token."""
    most = limits.context_length_tokens - 1
    return min(most, limits.max_prompt_tokens) if limits.max_prompt_tokens else most


def _too_long(counted: str, limits: EngineLimits, param: str) -> ApiError:
    message = (
        f"the prompt has {counted} tokens and exceeds the {_context(limits, 'prompt')}: at most {most_prompt_tokens(limits)} prompt tokens"
        " fit, with 1 for the answer; shorten the prompt, or raise [engine] context_length_tokens or kv_pool_bytes"
    )
    return ApiError(422, message, param=param, code="context_length_exceeded")


def _context(limits: EngineLimits, part: str) -> str:
    """The limit in words: the context, and the KV cache's part for prompts or for answers where that is less."""
    most = limits.max_prompt_tokens if part == "prompt" else limits.max_new_tokens
    context = f"context of {limits.context_length_tokens} tokens"
    return f"{context} or the KV cache's {most} for {part} tokens" if 0 < most < limits.context_length_tokens else context

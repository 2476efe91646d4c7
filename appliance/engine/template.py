"""The model's own chat template, rendered as Hugging Face's tokenizers render it.

Templates are programs written by whoever published the model: they run in jinja2's immutable sandbox. What they may use
(the `generation` block, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop controls, trimmed
blocks) is the contract that model authors write against.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from appliance.core.errors import ModelError
from appliance.engine.dialect import dialect_of, fitting_ids

_OPEN_MARK = "\N{INVISIBLE SEPARATOR}the answer goes on here\N{INVISIBLE SEPARATOR} "
"""Ends in white space, so that it tells whether a template strips messages."""


class TemplateRefused(Exception):
    """The template raised: the conversation is not one that the model takes, in the template's own words."""


class ChatTemplate:
    """One compiled template with the model's special tokens.

    Attributes:
        dialect: how it has the model write calls of tools; None: it tells of none, or in a form that is not known here.
        one_call: it refuses a conversation with two calls in one answer.

    Raises:
        ModelError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self.dialect = dialect_of(source)
        self.one_call = "single tool-calls at once" in source  # Llama 3's own words
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error

    @property
    def calls_tools(self) -> bool:
        """It tells the model of tools."""
        return self.dialect is not None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        extra: Mapping[str, object],
        at_s: float | None = None,
        tools: Sequence[Mapping[str, object]] = (),
        generation_prompt: bool = True,
    ) -> str:
        """The conversation as one text that ends where the assistant's answer begins; without `generation_prompt`, behind its
        last message.

        `extra` are variables for the template (`chat_template_kwargs`); they cannot replace the conversation. `at_s`: what
        a template that writes the date takes for now: an answer that is gone on with after midnight has the prompt it had.

        Raises:
            TemplateRefused: the template raised, or does not know what to do with a value.
        """
        variables: dict[str, Any] = {**self._special_tokens, **extra}
        variables |= {"messages": fitting_ids(messages, self.dialect), "tools": list(tools) or None}
        variables |= {"documents": None, "add_generation_prompt": generation_prompt}
        if at_s is not None:
            variables["strftime_now"] = datetime.datetime.fromtimestamp(at_s).strftime
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise TemplateRefused(error.message or type(error).__name__) from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            # A template may add a string to a missing value, or divide by a length of nothing.
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error

    def render_open(
        self,
        messages: Sequence[Mapping[str, object]],
        extra: Mapping[str, object],
        at_s: float | None = None,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> str:
        """As `render`, but it ends where the last message's content does, so that this can be gone on with.

        Where that is, a mark behind the content tells: the content itself may stand again in what the template writes behind it, as
        "end" does in <|im_end|>.

        Raises:
            TemplateRefused: as `render`; or the template does not write that content as it is.
        """
        content = str(messages[-1]["content"])
        rendered = self.render(
            [*messages[:-1], {**messages[-1], "content": content + _OPEN_MARK}], extra, at_s, tools, generation_prompt=False
        )
        at = rendered.rfind(_OPEN_MARK.strip())
        before = rendered[: max(0, at)]
        if not content.strip() or not before.rstrip().endswith(content.strip()):
            raise TemplateRefused("it does not write the last message as it was given, so that cannot be gone on with")
        # A template that strips messages, and so this mark, has no white space behind their text.
        return before if rendered.startswith(_OPEN_MARK, at) else before.rstrip()


def load_chat_template(model_path: Path, tokenizer_config: Mapping[str, object]) -> ChatTemplate | None:
    """The folder's template: `chat_template.jinja`, else the one in tokenizer_config.json, else in chat_template.json, where models
    that see as well have it; None for a base model.

    Raises:
        ModelError: it does not compile, or is of no known form.
    """
    special_tokens = _special_tokens(tokenizer_config)
    own_file = model_path / "chat_template.jinja"
    if own_file.is_file():
        return ChatTemplate(own_file.read_text(encoding="utf-8"), special_tokens)
    source = tokenizer_config.get("chat_template") or _template_of_processor(model_path / "chat_template.json")
    if isinstance(source, list):
        # Several named templates: HF's list form. `default` is the one for a plain conversation.
        named = {
            str(entry["name"]): entry["template"] for entry in source if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
        }
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"{model_path / 'tokenizer_config.json'}: chat_template must be a string or a list of named templates")
    return ChatTemplate(source, special_tokens)


def _template_of_processor(file: Path) -> object:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value.get("chat_template") if isinstance(value, dict) else None


def _special_tokens(tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on; each is a string or an object with `content`."""
    tokens: dict[str, str] = {}
    for key, value in tokenizer_config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote, for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)

"""The chat template and the tokenizer, against transformers as the oracle."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from appliance.core.errors import ModelError
from appliance.engine.template import ChatTemplate, TemplateRefused, load_chat_template
from appliance.engine.text import ModelText, SamplingDefaults, TooManyTokens
from tests.fakes.model_folder import CHATML, LINES, byte_fallback_folder, byte_level_folder

HELLO = [{"role": "user", "content": "Hello"}]
CONVERSATIONS: list[list[dict[str, str]]] = [
    HELLO,
    [{"role": "system", "content": "You are Viktor."}, *HELLO],
    [*HELLO, {"role": "assistant", "content": "  Hi. \n"}, {"role": "user", "content": "🙂 Boxkämpfer?"}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "a <|im_end|> b {{ messages }} {% if %}"}],
    [{"role": "user", "content": line} for line in LINES],
]
TEMPLATES = {
    "chatml": CHATML,
    "llama": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "blocks": "{% for m in messages %}\n    {% if loop.index0 > 1 %}\n        {% continue %}\n    {% endif %}\n    {{ m | tojson }}\n"
    "    {% generation %}{{ m['content'] }}{% endgeneration %}\n{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}"
    "{{ messages[0].content.split('l')[-1] if tools is none else 'tools' }}",
    "json": "{{ messages | tojson(indent=2) }} <&> {{ messages[0] | tojson }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_token_ids_equal_transformers(name: str, conversation: list[dict[str, str]], tmp_path: Path) -> None:
    """The prompt of a chat is, token for token, what transformers' apply_chat_template makes of it."""
    from transformers import AutoTokenizer

    folder = byte_level_folder(tmp_path, template=TEMPLATES[name])
    oracle = AutoTokenizer.from_pretrained(str(folder))
    text = ModelText(folder)
    assert text.chat_template is not None
    rendered = text.chat_template.render(conversation, {})
    assert rendered == oracle.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    expected = oracle.apply_chat_template(conversation, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(text.encode(rendered, add_special_tokens=False, most_tokens=1000)) == expected


@pytest.mark.parametrize("make", [byte_level_folder, byte_fallback_folder])
def test_prompts_equal_transformers(make: Any, tmp_path: Path) -> None:
    """A plain prompt gets BOS exactly where the model's tokenizer adds it, and decodes to the same text."""
    from transformers import AutoTokenizer

    folder = make(tmp_path)
    oracle, text = AutoTokenizer.from_pretrained(str(folder)), ModelText(folder)
    for line in LINES:
        ids = list(text.encode(line, add_special_tokens=True, most_tokens=1000))
        assert ids == oracle(line)["input_ids"]
        assert text.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_template_variables_reach_the_template_and_nothing_else() -> None:
    """`chat_template_kwargs` may set switches such as enable_thinking; they cannot replace the conversation."""
    template = ChatTemplate("{{ enable_thinking }} {{ messages | length }} {{ add_generation_prompt }}", {})
    assert template.render(HELLO, {"enable_thinking": False, "messages": [], "add_generation_prompt": False}) == "False 1 True"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nowhere.deeper }}", "nowhere"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_template_errors_are_refusals_in_its_own_words(source: str, said: str) -> None:
    """Whatever a template does, raising or reaching for what the sandbox forbids, the client is told and the engine lives."""
    with pytest.raises(TemplateRefused, match=said):
        ChatTemplate(source, {}).render(HELLO, {})


def test_the_date_is_that_of_the_answers_beginning() -> None:
    """A template that writes the date gives the same prompt in the next life, after midnight too."""
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d %H') }}", {})
    noon_s = datetime.datetime(2024, 2, 29, 12).timestamp()
    assert template.render(HELLO, {}, noon_s) == "2024-02-29 12"
    assert template.render(HELLO, {}) == datetime.datetime.now().strftime("%Y-%m-%d %H")


def test_template_that_does_not_compile_is_a_bad_model() -> None:
    """Found at the start, with the line."""
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("ok\n{% for %}", {})


def test_where_the_template_is_found(tmp_path: Path) -> None:
    """chat_template.jinja goes before tokenizer_config.json; of several named ones `default` is taken; a base model has none."""
    assert load_chat_template(tmp_path, {}) is None
    named = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D {{ bos_token }}"}]}
    template = load_chat_template(tmp_path, {**named, "bos_token": {"content": "<s>"}})
    assert template is not None
    assert template.render(HELLO, {}) == "D <s>"
    (tmp_path / "chat_template.jinja").write_text("file")
    template = load_chat_template(tmp_path, named)
    assert template is not None
    assert template.render(HELLO, {}) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    for config, said in (({}, "of the processor"), (named, "D ")):
        template = load_chat_template(tmp_path, config)
        assert template is not None
        assert template.render(HELLO, {}) == said
    with pytest.raises(ModelError, match="chat_template"):
        load_chat_template(tmp_path, {"chat_template": 5})


def test_end_tokens_and_defaults_come_from_the_model(tmp_path: Path) -> None:
    """generation_config.json goes before config.json, the tokenizer's EOS is always one, and recommended sampling is used."""
    folder = byte_level_folder(tmp_path)
    im_end = ModelText(folder).end_token_ids
    assert len(im_end) == 1
    recommended = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], **recommended}))
    text = ModelText(folder)
    assert text.end_token_ids == im_end | {7, 9}
    assert text.defaults == SamplingDefaults(temperature=0.6, top_p=1.0, top_k=20, repetition_penalty=1.05)
    (folder / "generation_config.json").unlink()
    assert ModelText(folder).end_token_ids == im_end | {0}


def test_bad_folders_are_named(tmp_path: Path) -> None:
    """A missing or broken file is named with what is wrong."""
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read: there is no such file"):
        ModelText(tmp_path)
    folder = byte_level_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        ModelText(folder)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:-100])
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        ModelText(folder)


def test_megabytes_of_prompt_are_refused_after_a_slice(tmp_path: Path) -> None:
    """Ten megabytes are not encoded to learn that they are too long; a long text of few tokens is not refused."""
    text = ModelText(byte_level_folder(tmp_path))
    with pytest.raises(TooManyTokens) as refused:
        text.encode("dog " * 2_500_000, add_special_tokens=True, most_tokens=100)
    assert 100 < refused.value.at_least < 100_000
    ids = text.encode("dog " * 50_000, add_special_tokens=True, most_tokens=150_000)
    assert text.decode(ids) == "dog " * 50_000


@pytest.mark.parametrize("content", ["end", "im", "|", "<", "Hi", "Hi ", "a\n\n", "user", "The end"])
@pytest.mark.parametrize("strips", [False, True])
def test_an_answer_goes_on_behind_its_beginning(content: str, strips: bool) -> None:
    """Also where that stands again in what the template writes behind it, as "end" does in <|im_end|>."""
    said = "message.content | trim" if strips else "message.content"
    source = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + " + f"({said})" + " + '<|im_end|>\\n' }}{% endfor %}"
    rendered = ChatTemplate(source, {}).render_open([*HELLO, {"role": "assistant", "content": content}], {})
    kept = content.strip() if strips else content
    assert rendered == f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{kept}"


@pytest.mark.parametrize("content", ["", " \n", "thought</think>said"])
def test_a_beginning_that_is_not_written_as_it_is_cannot_be_gone_on_with(content: str) -> None:
    """Blank, or one of which the template leaves a part out, as Qwen 3's do."""
    template = ChatTemplate("{% for message in messages %}{{ message.content.split('</think>')[-1] }}{% endfor %}", {})
    with pytest.raises(TemplateRefused, match="does not write the last message as it was given"):
        template.render_open([{"role": "assistant", "content": content}], {})

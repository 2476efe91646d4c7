"""Chat templates that have conversations with tools look as those of Llama 3.1, of three generations of Mistral and of Qwen do.

In our own words: what counts is the text that they render, and what they refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.fakes.model_folder import SPECIAL, byte_level_folder

LLAMA_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
MISTRAL_TOKENS = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]")

QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\nCall by <tool_call></tool_call>:' }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    '{%- for call in message.tool_calls or [] %}{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson + '}\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

LLAMA = (
    "{%- macro head(role) %}{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{%- endmacro %}"
    "{{- bos_token + head('system') }}{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- set messages = messages[1:] %}{%- endif %}"
    "{{- '<|eot_id|>' }}"
    '{%- if tools %}{{- head(\'user\') + \'Respond in the format {"name": function name, "parameters": dictionary of argument name and '
    "its value}.\\n\\n' }}{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}"
    "{{- messages[0].content | trim + '<|eot_id|>' }}{%- set messages = messages[1:] %}{%- endif %}"
    "{%- for message in messages %}{%- if 'tool_calls' in message %}"
    "{%- if message.tool_calls | length > 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    "{{- head('assistant') + '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}<|eot_id|>' }}"
    "{%- elif message.role == 'tool' %}{{- head('ipython') + message.content | tojson + '<|eot_id|>' }}"
    "{%- else %}{{- head(message.role) + message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- head('assistant') }}{%- endif %}"
)

_CHECK = (
    "{%- macro nine(id) %}{%- if id is not string or id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}{{- id }}{%- endmacro %}"
)
_TURNS = (
    "{{- bos_token }}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST]' + message.content + '[/INST]' }}"
    "{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]{\"content\": ' + message.content | tojson + ', \"call_id\": \"' }}"
    "{{- nine(message.tool_call_id) + '\"}[/TOOL_RESULTS]' }}"
    "{%- elif message.tool_calls %}{%- for call in message.tool_calls %}%s{%- endfor %}{{- eos_token }}"
    "{%- else %}{{- message.content + eos_token }}{%- endif %}{%- endfor %}"
)
MISTRAL_LIST = _CHECK + _TURNS.replace(
    "%s",
    "{{- '[TOOL_CALLS] [' if loop.first else ', ' }}{{- (call.function | tojson)[:-1] + ', \"id\": \"' + nine(call.id) + '\"}' }}"
    "{{- ']' if loop.last }}",
)
MISTRAL_NAMED = _CHECK + _TURNS.replace("%s", "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}")
MISTRAL_NUMBERED = _CHECK + _TURNS.replace(
    "%s", "{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + nine(call.id) + '[ARGS]' + call.function.arguments | tojson }}"
)

FAMILIES: dict[str, tuple[str, Sequence[str]]] = {
    "qwen": (QWEN, ()),
    "llama": (LLAMA, LLAMA_TOKENS),
    "mistral-list": (MISTRAL_LIST, MISTRAL_TOKENS),
    "mistral-named": (MISTRAL_NAMED, (*MISTRAL_TOKENS, "[ARGS]")),
    "mistral-numbered": (MISTRAL_NUMBERED, (*MISTRAL_TOKENS, "[ARGS]", "[CALL_ID]")),
}
"""Template and special tokens."""


def family_folder(folder: Path, family: str) -> Path:
    """A model folder without weights, of this family."""
    template, tokens = FAMILIES[family]
    return byte_level_folder(folder, template=template, special=(*SPECIAL, *tokens))

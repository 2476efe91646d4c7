"""Somebody's command line of an engine, as keys of appliance.toml: pure words in, settings and sentences out.

What has a key becomes it; what the appliance sets itself is dropped, with the sentence why; what a version has no more is dropped with
what to write; the rest goes to engine.extra_args as it stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from appliance.flags import llamacpp, sglang, vllm
from appliance.flags.vocabulary import OptionRules

Value = str | int | float | bool | tuple[str, ...]
_OURS_ALREADY = "the appliance does that by itself"


@dataclass(slots=True)
class Imported:
    """What came of it.

    Attributes:
        settings: `table.key` → value.
        dropped: what has no place, a sentence each.
        notes: what the owner has to look at.
    """

    settings: dict[str, Value] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Dialect:
    """An engine's options that have keys of ours.

    Attributes:
        keys: options → key, and how its word becomes the value.
        switches: options without a word → key and value; None: it is so anyway.
        drops: options, with how many words, that mean nothing here → why.
    """

    rules: OptionRules
    keys: Mapping[str, tuple[str, Callable[[str], Value]]]
    switches: Mapping[str, tuple[str, Value] | None]
    drops: Mapping[str, tuple[int, str]]


def _count(word: str) -> int:
    """ "32k" is 32,000 and "32K" 32,768, as vLLM has it."""
    factor = {"k": 1000, "K": 1024, "m": 10**6, "M": 1024**2}.get(word[-1:], 0)
    return round(float(word[:-1]) * factor) if factor else 0 if word == "auto" else int(word)


def _spread(table: Mapping[tuple[str, ...], tuple[str, Callable[[str], Value]]]) -> dict[str, tuple[str, Callable[[str], Value]]]:
    return {option: where for options, where in table.items() for option in options}


_PORT = ("gateway.port", int)
_SGLANG = _Dialect(
    sglang.RULES,
    _spread(
        {
            ("--model-path", "--model"): ("model.path", str),
            ("--served-model-name",): ("model.name", str),
            ("--port",): _PORT,
            ("--mem-fraction-static",): ("budget.mem_fraction", float),
            ("--context-length",): ("engine.context_length_tokens", int),
            ("--chunked-prefill-size",): ("engine.prefill_chunk_tokens", int),
            ("--max-running-requests",): ("engine.max_running", int),
            ("--kv-cache-dtype",): ("engine.kv_dtype", str),
            ("--tp-size", "--tensor-parallel-size", "--tp"): ("engine.tensor_parallel", int),
            ("--max-mamba-cache-size",): ("engine.state_slots", int),
            ("--mamba-ssm-dtype",): ("engine.state_dtype", str),
            ("--speculative-num-draft-tokens",): ("engine.draft_tokens", int),
        }
    ),
    {"--disable-radix-cache": ("engine.prefix_cache", False), "--language-only": ("engine.language_only", True), "--enable-metrics": None},
    {
        "--cuda-graph-max-bs": (1, "engine.max_running sets it"),
        "--cuda-graph-max-bs-decode": (1, "engine.max_running sets it"),
        "--speculative-algorithm": (1, "engine.draft_tokens stands for the model's own drafter"),
        "--speculative-num-steps": (1, "engine.draft_tokens sets it"),
        "--speculative-eagle-topk": (1, "engine.draft_tokens sets it"),
    },
)
_VLLM = _Dialect(
    vllm.RULES,
    _spread(
        {
            ("--model",): ("model.path", str),
            ("--served-model-name",): ("model.name", str),
            ("--port",): _PORT,
            ("--gpu-memory-utilization",): ("budget.mem_fraction", float),
            ("--max-model-len",): ("engine.context_length_tokens", _count),
            ("--max-num-batched-tokens",): ("engine.prefill_chunk_tokens", _count),
            ("--max-num-seqs",): ("engine.max_running", int),
            ("--kv-cache-dtype",): ("engine.kv_dtype", str),
            ("--tensor-parallel-size", "-tp"): ("engine.tensor_parallel", int),
            ("--mamba-ssm-cache-dtype",): ("engine.state_dtype", str),
            ("--speculative-config", "-sc"): ("engine.draft_tokens", lambda word: int(json.loads(word)["num_speculative_tokens"])),
        }
    ),
    {
        "--no-enable-prefix-caching": ("engine.prefix_cache", False),
        "--language-model-only": ("engine.language_only", True),
        "--enable-prefix-caching": None,
        "--enable-chunked-prefill": None,
    },
    {},
)
_LLAMACPP = _Dialect(
    llamacpp.RULES,
    _spread(
        {
            ("--model", "-m"): ("model.path", str),
            ("--alias", "-a"): ("model.name", str),
            ("--port",): _PORT,
            ("--ctx-size", "-c"): ("engine.context_length_tokens", int),
            ("--ubatch-size", "-ub"): ("engine.prefill_chunk_tokens", int),
            ("--parallel", "-np"): ("engine.max_running", int),
            ("--cache-type-k", "-ctk"): ("engine.kv_dtype", str),
            ("--threads", "-t"): ("engine.threads", int),
        }
    ),
    {"--kv-unified": None, "--metrics": None, "--slots": None, "--jinja": None, "--no-webui": None, "--cont-batching": None, "-cb": None},
    {
        "--cache-type-v": (1, "engine.kv_dtype is for both"), "-ctv": (1, "engine.kv_dtype is for both"),
        "--batch-size": (1, "a batch is a prefill chunk"), "-b": (1, "a batch is a prefill chunk"),
        "--n-gpu-layers": (1, "all layers go to the card"), "-ngl": (1, "all layers go to the card"),
        "--gpu-layers": (1, "all layers go to the card"), "--flash-attn": (1, "it is on"), "-fa": (1, "it is on"),
    },
)  # fmt: skip
DIALECTS = {"sglang": _SGLANG, "vllm": _VLLM, "llamacpp": _LLAMACPP}


def engine_of(words: Sequence[str]) -> tuple[str, int] | None:
    """Which engine a command line starts, and where its options begin; None where it is none that we know."""
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if word == "sglang.launch_server" or (name == "sglang" and "serve" in words[index + 1 : index + 2]):
            return "sglang", index + (1 if word == "sglang.launch_server" else 2)
        if word.startswith("vllm.entrypoints."):
            return "vllm", index + 1
        if name == "vllm" and "serve" in words[index + 1 : index + 2]:
            return "vllm", index + 2
        if name in ("llama-server", "llama-server.exe"):
            return "llamacpp", index + 1
    return None


def imported(engine: str, options: Sequence[str]) -> Imported:
    """The options of a command line, those behind the program, as settings."""
    found, dialect = Imported({"engine.backend": engine}), DIALECTS[engine]
    extra: list[str] = []
    for option, words in _options(options):
        _take(dialect, option, words, found, extra)
    if extra:
        found.settings["engine.extra_args"] = tuple(extra)
    path = found.settings.get("model.path")
    if isinstance(path, str) and not path.startswith(("/", "~", ".")):
        found.notes.append(f"model.path = {path!r} looks like a name on a hub: download it, and write its folder")
    return found


def _options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Option after option, each with the words behind it; a word in front of all options under an empty name."""
    option, behind = "", list[str]()
    for word in words:
        if word.startswith("-") and not word.lstrip("-").replace(".", "", 1).isdigit():
            if option or behind:
                yield option, behind
            option, _, value = word.partition("=") if word.startswith("--") else (word, "", "")
            behind = [value] if value else []
        else:
            behind.append(word)
    if option or behind:
        yield option, behind


def _take(dialect: _Dialect, given: str, words: list[str], found: Imported, extra: list[str]) -> None:
    option = given.replace("_", "-") if given.startswith("--") else given
    said = " ".join([given, *words])
    if not option:
        _take_bare(words, found)
    elif option in dialect.keys:
        _take_key(said, *dialect.keys[option], words, found)
    elif option in dialect.switches:
        where = dialect.switches[option]
        if where is None:
            found.dropped.append(f"{said}: {_OURS_ALREADY}")
        else:
            found.settings[where[0]] = where[1]
    elif option == "--host":
        found.dropped.append(f"{said}: set gateway.host and API keys where other machines shall reach it (docs/security.md)")
    elif option in dialect.drops:
        count, why = dialect.drops[option]
        found.dropped.append(f"{' '.join([given, *words[:count]])}: {why}")
    else:
        _take_other(dialect.rules, option, [given, *words], found, extra)


def _take_bare(words: list[str], found: Imported) -> None:
    """`vllm serve MODEL`."""
    found.settings["model.path"] = words[0]
    if words[1:]:
        found.dropped.append(f"{' '.join(words[1:])}: no option stands in front of it")


def _take_key(said: str, key: str, convert: Callable[[str], Value], words: list[str], found: Imported) -> None:
    try:
        found.settings[key] = convert(words[0])
    except (IndexError, ValueError, KeyError, TypeError):
        found.dropped.append(f"{said}: {words[0] if words else 'nothing'!r} is no value for {key}")
        return
    if words[1:]:
        found.dropped.append(f"{' '.join(words[1:])} of {said.split()[0]}: {key} takes one value")


def _take_other(rules: OptionRules, option: str, words: list[str], found: Imported, extra: list[str]) -> None:
    refusals = [remark for remark in rules.remarks((option,), rules.newest) if remark.is_refusal]
    if refusals:
        why = refusals[0].sentence.partition(": ")[2]
        found.dropped.append(f"{option if 'key' in option else ' '.join(words)}: {why}")
        return
    found.notes += [remark.sentence for remark in rules.remarks((option,), rules.newest)]
    extra += words

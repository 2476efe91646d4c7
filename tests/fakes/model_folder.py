"""Tokenizers of both families, small and real: trained in a second on a few lines of many scripts. No weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [
    "The quick brown fox jumps over the lazy dog, again and again, and the dog does not mind at all.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Съешь ещё этих мягких французских булок, да выпей же чаю.",
    "いろはにほへと ちりぬるを 私はガラスを食べられます。",
    "我能吞下玻璃而不伤身体。",
    "def f(x):\n    return {'a': [x, 1.5e-3], \"b\": None}\n",
    "🙂 👩‍👩‍👧‍👦 🇩🇪 e\u0301 नमस्ते ไทย",
]

CHATML = (
    "{%- if messages[0]['role'] != 'system' %}\n{{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- for message in messages %}\n"
    "{%- if message['role'] == 'assistant' and loop.first %}{{ raise_exception('the assistant cannot begin') }}{% endif %}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n{{- '<|im_start|>assistant\\n' }}\n{%- endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level_folder(folder: Path, *, template: str | None = CHATML, special: Sequence[str] = SPECIAL) -> Path:
    """As SmolLM2, Qwen and Llama 3 have it: byte-level BPE and, unless `template` is None, ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator(LINES * 4, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    return _write(folder, tokenizer, config, template, tokenizer.token_to_id("<|im_end|>"))


def byte_fallback_folder(folder: Path) -> Path:
    """As Gemma has it: SentencePiece's spaces, single bytes for what is not in the vocabulary, BOS before a prompt; no template."""
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<bos>", "<eos>"], show_progress=False)
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    learnt.train_from_iterator(LINES[:3] * 4, trainer)
    state = json.loads(learnt.to_str())["model"]
    vocab = dict(state["vocab"])
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(merge) for merge in state["merges"]], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _added("<eos>"), "bos_token": _added("<bos>")}
    return _write(folder, tokenizer, config, None, vocab["<eos>"])


def _added(token: str) -> dict[str, object]:
    """Older tokenizer_config.json files write their special tokens so."""
    return {"__type": "AddedToken", "content": token, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def _write(folder: Path, tokenizer: Tokenizer, config: dict[str, object], template: str | None, eos: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos]}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0}))
    return folder

"""Conversations, chat templates as they are published, and a tokenizer for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name the largest moon of Saturn."},
    {"role": "assistant", "content": "Titan, the largest of many."},
    {"role": "user", "content": " And the second? "},
    {"role": "assistant", "content": " Rhea\n"},
]
SPECIAL = {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}
WORDS = [
    "<|im_start|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
]
# Each as published, and with the assistant's part marked.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
MARK = "{{% generation %}}{{{{ {} }}}}{{% endgeneration %}}"
TEMPLATES = {
    "SmolLM2": (
        SMOLLM2,
        SMOLLM2.replace(
            "'\n' + message['content'] + '<|im_end|>' + '\n'}}",
            "'\n'}}{% if message['role'] == 'assistant' %}"
            + MARK.format("message['content'] + '<|im_end|>' + '\n'")
            + "{% else %}{{ message['content'] + '<|im_end|>' + '\n'}}{% endif %}",
        ),
    ),
    "Llama 3": (
        LLAMA3,
        "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\n\n' }}{% if message['role'] == 'assistant' %}"
        + MARK.format("message['content'] | trim + '<|eot_id|>'")
        + "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}",
    ),
    "Mistral": (
        MISTRAL,
        MISTRAL.replace(
            "{{ message['content'] + eos_token }}", MARK.format("message['content'] + eos_token")
        ),
    ),
}


def write_tokenizer(folder: Path, template: str | None, **special: str) -> Path:
    """Write a byte-level tokenizer with some merges, and the template, into a folder. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = {**SPECIAL, **special}
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*marks.values(), *WORDS],
    )
    made.train_from_iterator([message["content"] for message in TALK] * 3, trainer)
    made.save(f"{folder / 'tokenizer.json'}")
    (folder / "tokenizer_config.json").write_text(json.dumps(marks))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def theirs(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)

# ruff: noqa: E501 texts with escapes are long
"""Token ids of Hugging Face's ``AutoTokenizer``, for tests that must run without transformers.

    python tests/goldens/make_hf_tokenizers.py

trains small tokenizers with the ``tokenizers`` library, writes their directories to ``tokenizers/`` beside
this file, and what ``AutoTokenizer`` makes of the texts below to ``hf_tokenizers.json``. Made with
transformers 5.23.0, tokenizers 0.23.3.

gpt2          tokenizer.json with vocab.json and merges.txt; nothing is put around a text
gpt2_pair     vocab.json and merges.txt alone, with add_bos_token
llama2        pieces with U+2581 for spaces and bytes for what is missing, class LlamaTokenizer, BOS by a template
llama2_plain  the same file used as it is (PreTrainedTokenizerFast): a normalizer puts a space before each piece
llama3        byte-level, cut up by a pattern, ignore_merges, 48 special tokens, BOS by a template in a sequence
chat          llama3's with added tokens that are not special, a padding token that the vocabulary lacks, BOS
              and EOS around the text
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

HERE = Path(__file__).parent
TARGET = HERE / "tokenizers"
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog; the dogs don't mind. 1234567890 12 34 56.",
    "def total(self, values):\n    return sum(values)  # the sum\n\n\nclass Values:\n    pass\n",
    "\u4f60\u597d\u4e16\u754c\uff0c\u4f60\u597d\u3002 Na\u00efve caf\u00e9s serve cr\u00e8me br\u00fbl\u00e9e.",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u03b1\u03b2\u03b3 \u0645\u0631\u062d\u0628\u0627 \U0001f600",
    "    x = [1, 2, 3]\n        y = {'a': None}\n" + "aaaabbbb " * 3 + "------ ====== ",
    "user asks, assistant answers; the system says what is to be said, and how it is to be said.",
] * 4
TEXTS = [
    "", " ", "  ", "   \n", "\n", "\n\n", "\t", "\r\n", " " * 17, "\u3000", "\u00a0x", "a", " a", "  a", "a ",
    "Hello world", " Hello world", "  Hello  world  ", "Hello\nworld\n", "The quick brown fox", "don't we'll I'M",
    "1234567890", "12 345 6789", "3.14e-10, 0x1F", "x=[1,2,3]\n    return x\n", "!!! ??? ... ---", "_a_b__c_",
    "na\u00efve caf\u00e9", "e\u0301 a\u0308", "\u4f60\u597d\uff0c\u4e16\u754c", "\u041f\u0440\u0438\u0432\u0435\u0442",
    "\u0645\u0631\u062d\u0628\u0627 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\U0001f600\U0001f469\u200d\U0001f467", "\ufeffx",
    "\u2581x \u2581 y", "\x00\x01\x7f", "<0x41><0xE4>", "caf\u00e9 \U0001f600 \u4f60\n\n  x", "aaaabbbb" * 6,
    "{BOS}", "{BOS}{BOS}", "{BOS}Hello", "{BOS} Hello", "{EOS}", "Hello{EOS}", "Hello {EOS} world", "Hello{EOS}world",
    " {EOS} ", "{EOS}\n{EOS}", "a{BOS}b{EOS}c", "{BOS}the dog{EOS}{BOS}the fox{EOS}", "x{EOS}  y", "{EOS}\u4f60",
    "{START}user{END}\n\nHello{EOT}{START}assistant{END}\n\n", "{START}{START}", "{EOT} {EOT}", "{TOOL}x{TOOL}",
    " {TOOL} y", "{TOOL}{EOS}", "<|endoftext|", "<s", "</s >", "< s>", "<|eot_id|>x", "</s></s>x", "<|endoftext|>",
    "<unk>", "a <unk> b", "[PAD]", "x[PAD]y", "<|new|> <|new|", "a <wide> b", "<|reserved_special_token_4|>1",
]  # fmt: skip
NAMES = {
    "gpt2": {"BOS": "<|endoftext|>", "EOS": "<|endoftext|>"},
    "gpt2_pair": {"BOS": "<|endoftext|>", "EOS": "<|endoftext|>"},
    "llama2": {"BOS": "<s>", "EOS": "</s>"},
    "llama2_plain": {"BOS": "<s>", "EOS": "</s>"},
    "llama3": {"BOS": "<|begin_of_text|>", "EOS": "<|end_of_text|>"},
    "chat": {"BOS": "<|begin_of_text|>", "EOS": "<|eot_id|>"},
}
SHARED = {"START": "<|start_header_id|>", "END": "<|end_header_id|>", "EOT": "<|eot_id|>", "TOOL": "<tool>"}
LLAMA3_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(42)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
]


def byte_level(size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def gpt2() -> Tokenizer:
    tokenizer = byte_level(420)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def llama2() -> Tokenizer:
    """As Llama 2's file is: bytes after the special tokens, then pieces."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # no piece goes beyond a word
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    # Scripts that occur little are left to the bytes.
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=special, limit_alphabet=70, show_progress=False
    )
    tokenizer.train_from_iterator([line for text in CORPUS for line in text.split("\n")], trainer)
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = definition["added_tokens"][:3]  # bytes are no added tokens
    definition["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    prepend, replace = normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([prepend, replace])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def llama3() -> Tokenizer:
    definition = json.loads(byte_level(420).to_str())
    definition["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    split = pre_tokenizers.Split(_regex(PATTERN), behavior="isolated")
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte])
    tokenizer.add_special_tokens(LLAMA3_SPECIAL)
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|> $B:1",
        special_tokens=[("<|begin_of_text|>", bos)],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def _regex(pattern: str) -> Any:
    from tokenizers import Regex

    return Regex(pattern)


def chat() -> Tokenizer:
    tokenizer = llama3()
    tokenizer.add_tokens(
        [AddedToken("<tool>", normalized=False), AddedToken("<wide>", lstrip=True, rstrip=True)]
    )
    bos, eos = "<|begin_of_text|>", "<|eot_id|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}",
        pair=f"{bos} $A {bos} $B:1 {eos}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (bos, eos)],
    )
    return tokenizer


def write(name: str, tokenizer: Tokenizer, config: dict[str, Any], **files: Any) -> None:
    directory = TARGET / name
    directory.mkdir(parents=True)
    contents = {"tokenizer_config": config, **files}
    for stem, content in contents.items():
        text = json.dumps(content, ensure_ascii=False)
        (directory / f"{stem}.json").write_text(text + "\n", encoding="utf-8")
    definition = json.loads(tokenizer.to_str())
    if name.startswith("gpt2"):
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        ordered = dict(sorted(vocab.items(), key=lambda item: item[1]))
        (directory / "vocab.json").write_text(
            json.dumps(ordered, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        merges = "".join(f"{left} {right}\n" for left, right in definition["model"]["merges"])
        (directory / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
    if name != "gpt2_pair":
        definition["model"]["merges"] = [" ".join(pair) for pair in definition["model"]["merges"]]
        text = json.dumps(definition, ensure_ascii=False, separators=(",", ":"))
        (directory / "tokenizer.json").write_text(text + "\n", encoding="utf-8")


def flags(content: str, special: bool = True) -> dict[str, Any]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, **plain, "special": special}


def write_all() -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    write("gpt2", gpt2(), {"model_max_length": 1024, "tokenizer_class": "GPT2Tokenizer"})
    eot = "<|endoftext|>"
    pair = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": eot, "eos_token": eot}
    write("gpt2_pair", gpt2(), {**pair, "unk_token": eot, "add_prefix_space": False})
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    decoder = {str(number): flags(token) for number, token in enumerate(("<unk>", "<s>", "</s>"))}
    llama = {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": decoder,
        "legacy": False,
        **named,
    }
    second = llama2()
    write(
        "llama2",
        second,
        {**llama, "tokenizer_class": "LlamaTokenizer", "clean_up_tokenization_spaces": False},
        special_tokens_map={key: flags(token) for key, token in named.items()},
        generation_config={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    )
    write("llama2_plain", second, {"tokenizer_class": "PreTrainedTokenizerFast"}, special_tokens_map=named)
    third, ids = llama3(), {}
    for token in LLAMA3_SPECIAL:
        ids[token] = third.token_to_id(token)
    write(
        "llama3",
        third,
        {
            "added_tokens_decoder": {str(number): flags(token) for token, number in ids.items()},
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "clean_up_tokenization_spaces": True,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        generation_config={
            "bos_token_id": ids["<|begin_of_text|>"],
            "eos_token_id": [ids["<|end_of_text|>"], ids["<|eom_id|>"], ids["<|eot_id|>"]],
        },
    )
    write(
        "chat",
        chat(),
        {
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "pad_token": "[PAD]",
            "add_bos_token": False,
        },
        special_tokens_map={"additional_special_tokens": ["<|eom_id|>", "<|new|>"]},
    )


def random_ids(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(size) for _ in range(rng.randrange(1, 12))]


def main() -> None:
    write_all()
    result: dict[str, Any] = {}
    rng = random.Random(0)
    for name, names in NAMES.items():
        tokenizer = AutoTokenizer.from_pretrained(TARGET / name)
        texts = [text.format(**SHARED, **names) if "{" in text else text for text in TEXTS]
        rows = [
            {
                "text": text,
                "ids": tokenizer(text)["input_ids"],
                "bare": tokenizer(text, add_special_tokens=False)["input_ids"],
                "plain": tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"],
            }
            for text in dict.fromkeys(texts)
        ]
        given = [row["ids"] for row in rows] + [random_ids(rng, len(tokenizer)) for _ in range(40)]
        decoded = [
            [ids, tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=True)] for ids in given
        ]
        result[name] = {
            "class": type(tokenizer).__name__,
            "size": len(tokenizer),
            "bos": tokenizer.bos_token_id,
            "eos": tokenizer.eos_token_id,
            "special": sorted(tokenizer.all_special_ids),
            "texts": rows,
            "decoded": decoded,
        }
        print(name, type(tokenizer).__name__, len(tokenizer), len(rows), "texts", file=sys.stderr)
    path = HERE / "hf_tokenizers.json"
    path.write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    print(path.stat().st_size, "bytes", file=sys.stderr)


if __name__ == "__main__":
    main()

"""A byte-level tokenizer without merges: token ids are bytes, in the alphabet's order."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lora_moe_jax.serving.text import TextCodec

SPECIAL = "<|end|>"  # the id after the 256 bytes


def byte_tokenizer(merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def byte_codec(template: str | None = None, **tokens: str) -> TextCodec:
    return TextCodec(byte_tokenizer(), template, tokens)

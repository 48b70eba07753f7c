"""Bytes of tokens that are parts of characters."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models

from lora_moe_jax.serving.token_bytes import token_bytes
from tests.serving.byte_tokenizer import SPECIAL, byte_tokenizer


def test_of_byte_level_vocabularies():
    """Every byte's token alone, merged ones, and a special one."""
    tokenizer = byte_tokenizer(merges=((chr(0x120), chr(0xF0)),))
    text = "".join(map(chr, range(0x250))) + " 👍"
    ids = tokenizer.encode(text).ids
    found = [token_bytes(tokenizer, token) for token in ids]
    assert None not in found and b"".join(found) == text.encode()
    assert b" \xf0" in found and b"\xc3" in found
    assert token_bytes(tokenizer, tokenizer.token_to_id(SPECIAL)) == SPECIAL.encode()


def test_of_vocabularies_that_fall_back_to_bytes():
    vocabulary = {"<unk>": 0, "a": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    found = [token_bytes(tokenizer, token) for token in tokenizer.encode("aé").ids]
    assert found == [b"a", b"\xc3", b"\xa9"]


@pytest.mark.parametrize("token", ["a\ufffd", "\ufffd"])
def test_of_what_is_neither(token):
    tokenizer = Tokenizer(models.WordLevel({token: 0}, token))
    assert token_bytes(tokenizer, 0) is None

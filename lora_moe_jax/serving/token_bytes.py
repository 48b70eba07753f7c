"""The bytes that a token stands for, also where they are a part of a character."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

_PRINTABLE = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
# Byte-level vocabularies write other bytes as the letters from this one on, in order.
_FIRST_LETTER = 0x100
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_letter() -> dict[str, int]:
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    letters = {chr(_FIRST_LETTER + number): byte for number, byte in enumerate(others)}
    return letters | {chr(byte): byte for byte in _PRINTABLE}


_LETTERS = _byte_of_letter()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes | None:
    """What a token adds to a text in UTF-8; None for a part of a character of an unknown kind."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text.encode()
    token = tokenizer.id_to_token(token_id) or ""
    if fallback := _BYTE_FALLBACK.fullmatch(token):
        return bytes([int(fallback[1], 16)])
    if all(letter in _LETTERS for letter in token):
        return bytes(_LETTERS[letter] for letter in token)
    return None

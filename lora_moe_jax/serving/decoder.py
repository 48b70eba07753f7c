"""The text of tokens, one after the other."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Decoder:
    """What each token adds to a text, without special tokens; parts of characters are held back.

    What has come out stays. Where a token changes what was before it, as bytes do that are no
    character together, those held back stand for themselves.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []

    def step(self, token: int) -> str:
        self._held.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception as error:
            if type(error) is not Exception:  # the library's own is no narrower
                raise
            text = self.rest()
            self._stream = DecodeStream(skip_special_tokens=True)
            self._stream.step(self._tokenizer, token)  # the next one is not the first
        if text:
            self._held.clear()
        return text or ""

    def rest(self) -> str:
        """What is held back."""
        return self._tokenizer.decode(self._held, skip_special_tokens=True)

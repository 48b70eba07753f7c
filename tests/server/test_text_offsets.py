"""Where tokens begin in a text, also those that are parts of characters."""

from __future__ import annotations

import pytest

from lora_moe_jax.server.replies import ChatReply, CompletionReply
from lora_moe_jax.serving.request import Delta
from lora_moe_jax.serving.token_bytes import token_bytes
from tests.serving.byte_tokenizer import byte_codec

CODEC = byte_codec()
TOKENS = {token_bytes(CODEC.tokenizer, token): token for token in range(256)}


def deltas(data: bytes) -> list[Delta]:
    return [Delta(0, TOKENS[bytes([byte])], -1.0, "", None, [], None) for byte in data]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("data", "offsets"),
    [
        ("aéb".encode(), [0, 1, 1, 2]),
        ("aあb".encode(), [0, 1, 1, 1, 2]),
        (b"a\xc3bc", [0, 1, 2, 3]),  # half a character is one that stands for it
        (b"\xf0\x9fxy", [0, 0, 1, 2]),
    ],
)
def test_offsets(data, offsets, streamed):
    reply, found = CompletionReply(CODEC, "m"), []
    groups = [[delta] for delta in deltas(data)] if streamed else [deltas(data)]
    for group in groups:
        found += reply._choice(group, streamed)["logprobs"]["text_offset"]
    assert found == offsets
    text = data.decode(errors="replace")
    assert [text[at] for at in found][-1] == text[-1]


def test_bytes_of_a_chat():
    data = "aéb".encode()
    content = ChatReply(CODEC, "m")._choice(deltas(data), False)["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[byte] for byte in data]

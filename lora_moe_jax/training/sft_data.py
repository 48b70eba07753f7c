"""Examples for supervised training, from a JSONL file.

Each line is a JSON object of one of three forms:

    {"prompt": "...", "completion": "..."}      the completion is learned
    {"messages": [{"role": ..., "content": ...}, ...]}      what the assistant says is learned
    {"text": "..."}                             everything is learned

Texts and completions end with the model's end-of-text token, which is learned too.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_moe_jax.errors import RequestError
from lora_moe_jax.serving.text import TextCodec
from lora_moe_jax.strict_json import parse_json_object

FORMS = ({"prompt", "completion"}, {"messages"}, {"text"})
EXPECTED = '{"prompt": ..., "completion": ...}, {"messages": [...]} or {"text": ...}'


@dataclass(frozen=True)
class Example:
    """One sequence.

    Attributes:
      tokens: token ids, at least two.
      learned: how many of them, at the end, are learned; at least one, not all.
    """

    tokens: list[int]
    learned: int


def read_examples(
    file: str | os.PathLike, codec: TextCodec, end: int | None, longest: int
) -> list[Example]:
    """The examples of a file, in its order. Empty lines are passed over.

    A conversation gives an example for each thing that the assistant says: it is learned after just
    what the model is given when it serves, which some chat templates write differently later on.

    Args:
      end: the token that ends texts and completions; None for none.
      longest: most tokens of an example.

    Raises:
      RequestError: the file cannot be read, has no example, or a line cannot be learned; then the
        error's `file` is `FILE:LINE`.
    """
    path, ending = Path(file), [] if end is None else [end]
    found: list[Example] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)  # as editors on Windows write
                if line.strip():
                    place = f"{path}:{number}"
                    found += _examples(line.strip(), place, codec, ending, longest)
    except (OSError, ValueError) as cause:  # a NUL in the path is a ValueError
        raise RequestError(
            "the file cannot be read", file=file, expected="a JSONL file", found=str(cause)
        ) from cause
    if not found:
        raise RequestError("the file has no examples", file=file, expected=EXPECTED)
    return found


def _examples(
    line: bytes, place: str, codec: TextCodec, ending: list[int], longest: int
) -> Iterator[Example]:
    fields = parse_json_object(line, place, RequestError)
    if set(fields) not in FORMS:
        raise RequestError(
            "the line has none of the forms of an example",
            file=place,
            expected=EXPECTED,
            found=sorted(fields),
        )
    try:
        parts = list(_parts(fields, place, codec))
    except RequestError as error:
        if error.file is None:  # the codec knows no file
            raise RequestError(
                error.message,
                file=place,
                key=error.key,
                expected=error.expected,
                found=error.found,
                hint=error.hint,
            ) from error
        raise
    for prompt, completion in parts:
        tokens = [*prompt, *completion, *ending]
        # The first token of all has nothing before it to be predicted from.
        learned = min(len(tokens) - len(prompt), len(tokens) - 1)
        if learned < 1:
            raise RequestError("there is nothing to learn in an example", file=place)
        if len(tokens) > longest:
            raise RequestError(
                "an example is too long",
                file=place,
                expected=f"at most {longest} tokens",
                found=len(tokens),
                hint="split it, or raise the engine's max_length",
            )
        yield Example(tokens, learned)


def _parts(
    fields: Mapping[str, object], place: str, codec: TextCodec
) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids of what is given, and of what is learned."""
    if "text" in fields:
        yield [], codec.encode(_text(fields, "text", place))
    elif "prompt" in fields:
        prompt = codec.encode(_text(fields, "prompt", place))
        completion = _text(fields, "completion", place)
        yield prompt, codec.encode(completion, special_tokens=False)
    else:
        yield from _turns(fields["messages"], place, codec)


def _turns(messages: object, place: str, codec: TextCodec) -> Iterator[tuple[list[int], list[int]]]:
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise RequestError(
            "messages must be a list of objects",
            file=place,
            key="messages",
            expected='[{"role": "user", "content": "..."}, ...]',
            found=repr(messages)[:200],
        )
    for i, message in enumerate(messages):
        role = _text(message, "role", place, f"messages[{i}].role")
        content = _text(message, "content", place, f"messages[{i}].content")
        if role == "assistant":
            yield codec.chat(messages[:i]), codec.encode(content, special_tokens=False)
    if not any(message["role"] == "assistant" for message in messages):
        raise RequestError(
            "there is nothing to learn in the conversation",
            file=place,
            key="messages",
            expected="a message of the assistant",
        )


def _text(fields: Mapping[str, object], key: str, place: str, shown: str | None = None) -> str:
    if not isinstance(fields.get(key), str):
        raise RequestError(
            "this must be text",
            file=place,
            key=shown or key,
            expected="a string",
            found=repr(fields.get(key))[:200],
        )
    return fields[key]

"""Text in and out: the checkpoint's tokenizer and chat template, streaming, stop strings."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from lora_moe_jax.errors import CheckpointError, RequestError
from lora_moe_jax.serving.decoder import Decoder
from lora_moe_jax.strict_json import read_json_object

TOKENIZER_FILE = "tokenizer.json"
_TOKEN_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")
# What a template raises by itself, and what its expressions raise on messages of another shape.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class TextCodec:
    """tokenizer.json and the chat template of a model folder."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None, tokens: Mapping[str, str]):
        self.tokenizer = tokenizer
        self._template = chat_template
        self._tokens = dict(tokens)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike) -> TextCodec | None:
        """None if the folder has no tokenizer.json.

        Raises:
          CheckpointError: a damaged tokenizer.json or tokenizer_config.json.
        """
        file = Path(folder) / TOKENIZER_FILE
        if not file.is_file():
            return None
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for every fault
            raise CheckpointError(
                "the tokenizer cannot be read",
                file=file,
                key=TOKENIZER_FILE,
                expected="a file that the tokenizers library writes",
                found=str(error),
            ) from error
        tokenizer.no_truncation()  # of whoever saved it; a call asks for them, a prompt does not
        tokenizer.no_padding()
        settings = {}
        if (config := Path(folder) / "tokenizer_config.json").is_file():
            settings = read_json_object(config, CheckpointError)
        template = settings.get("chat_template")
        if (jinja_file := Path(folder) / "chat_template.jinja").is_file():
            template = _read_template(jinja_file)
        _add_tokens(tokenizer, settings.get("added_tokens_decoder"), file)
        # A special token is its text, or an object that has it as "content".
        contents = {
            key: value.get("content") if isinstance(value, dict) else value
            for key, value in settings.items()
            if key.endswith("_token")
        }
        tokens = {key: text for key, text in contents.items() if isinstance(text, str)}
        _add_llama_ends(tokenizer, settings, tokens)
        return cls(tokenizer, _default_of(template), tokens)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds.

        Raises:
          RequestError: the text has half a character, which UTF-8 does not.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                "the text is not valid Unicode",
                key="text",
                expected="no lone surrogates",
                found=ascii(text[error.start : error.end]),
            ) from error
        # Unlike `encode`, a batch lets other threads go on: megabytes take seconds.
        (encoded,) = self.tokenizer.encode_batch([text], add_special_tokens=special_tokens)
        return encoded.ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode(list(token_ids))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant goes on.

        Raises:
          RequestError: the model has no chat template, or the template refuses the messages.
        """
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
        if not is_list or not all(isinstance(message, Mapping) for message in messages):
            raise RequestError(
                "messages must be a list of objects",
                key="messages",
                expected='[{"role": "user", "content": "..."}, ...]',
                found=type(messages).__name__,
            )
        if self._template is None:
            raise RequestError(
                "the model has no chat template",
                key="messages",
                expected="chat_template in tokenizer_config.json, or chat_template.jinja",
                hint="use a plain prompt",
            )
        try:
            text = self._compiled_template.render(
                messages=list(messages),
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                "the chat template refused the messages", key="messages", found=str(error)
            ) from error
        # The template writes the special tokens itself.
        return self.encode(text, special_tokens=False)

    @functools.cached_property
    def _compiled_template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _Generation],
        )
        # As in transformers.
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = _to_json
        try:
            return environment.from_string(self._template)
        except jinja2.TemplateError as error:
            raise RequestError(
                "the model's chat template cannot be read", key="messages", found=str(error)
            ) from error


class _Generation(jinja2.ext.Extension):
    """transformers' `{% generation %}` around what an assistant says: its body as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _default_of(templates) -> str | None:
    """A template, or the default one of several: a list of objects with their names."""
    if isinstance(templates, list):
        named = [its for its in templates if isinstance(its, dict)]
        templates = {its.get("name"): its.get("template") for its in named}.get("default")
    return templates if isinstance(templates, str) else None


def _add_tokens(tokenizer: Tokenizer, added: object, file: Path) -> None:
    """Tokens that tokenizer_config.json alone has, as transformers adds them."""
    if not isinstance(added, Mapping):
        return
    lacking = {
        int(number): its
        for number, its in added.items()
        if number.isdecimal() and isinstance(its, Mapping) and isinstance(its.get("content"), str)
        if tokenizer.token_to_id(its["content"]) is None
    }
    for number, its in sorted(lacking.items()):
        flags = {key: bool(its[key]) for key in _TOKEN_FLAGS if key in its}
        tokenizer.add_tokens([AddedToken(its["content"], **flags)])
        if tokenizer.token_to_id(its["content"]) != number:
            raise CheckpointError(
                "a token of tokenizer_config.json does not fit behind those of tokenizer.json",
                file=file.with_name("tokenizer_config.json"),
                key=f"added_tokens_decoder[{number}]",
                expected=f"{its['content']!r} to be the token {number}",
                found=tokenizer.token_to_id(its["content"]),
                hint="save the tokenizer again, or fetch both files again",
            )


def _add_llama_ends(tokenizer: Tokenizer, settings: Mapping, tokens: Mapping[str, str]) -> None:
    """What transformers' LlamaTokenizerFast adds by its own settings (DeepSeek's files)."""
    if settings.get("tokenizer_class") not in ("LlamaTokenizer", "LlamaTokenizerFast"):
        return
    ends = {
        key: tokens.get(key)
        for key, default in (("bos_token", True), ("eos_token", False))
        if settings.get(f"add_{key}", default)
    }
    ends = {k: t for k, t in ends.items() if t and tokenizer.token_to_id(t) is not None}
    parts = [ends.get("bos_token"), "$A", ends.get("eos_token")]
    tokenizer.post_processor = TemplateProcessing(
        single=[part for part in parts if part],
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in set(ends.values())],
    )


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            "the chat template cannot be read",
            file=file,
            key=file.name,
            expected="text in UTF-8",
            found=str(error),
        ) from error


def _refuse(message: str):
    raise jinja2.TemplateError(message)


def _begun(stop: str, text: str) -> int:
    """Length of the longest end of a text that the string, which is not in it, begins with."""
    at = max(len(text) - len(stop) + 1, 0)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0


class TextStream:
    """Text of a growing list of tokens, cut at the first stop string.

    `push` returns text that can no longer be part of a stop string or of an incomplete character.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str]):
        self._codec = codec
        self._stop = tuple(stop)
        self._decoder = Decoder(codec.tokenizer)
        self._token_ids: list[int] = []
        self.text = ""
        self._sent = 0
        self._looked = 0  # no stop string begins before
        self.stopped = False

    def push(self, token: int) -> str:
        """Takes one token; `stopped` says whether a stop string is complete."""
        self._token_ids.append(token)
        self.text += self._decoder.step(token)
        if not self._stop:
            return self._send(len(self.text))
        if (stop := self._first_stop()) < len(self.text):
            self.stopped = True
            self.text = self.text[:stop]
            return self._send(len(self.text))
        return self._send(len(self.text) - self._held_back())

    def finish(self) -> str:
        """The rest of the text, once no more tokens come."""
        if not self.stopped:
            # What the decoder held back as incomplete.
            whole = self._codec.decode(self._token_ids)
            same = whole.startswith(self.text)
            self.text = whole if same else self.text + self._decoder.rest()
            self.text = self.text[: self._first_stop()]
        return self._send(len(self.text))

    def _first_stop(self) -> int:
        """Where the first stop string begins; the text's end if there is none."""
        found = [at for stop in self._stop if (at := self.text.find(stop, self._looked)) >= 0]
        longest = max(map(len, self._stop), default=1)
        self._looked = max(self._looked, len(self.text) - longest + 1)
        return min(found, default=len(self.text))

    def _held_back(self) -> int:
        """Length of the longest end of the text that may become a stop string."""
        return max(_begun(stop, self.text) for stop in self._stop)

    def _send(self, end: int) -> str:
        start, self._sent = self._sent, max(self._sent, end)
        return self.text[start : self._sent]

"""Text in and out without an engine."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from lora_moe_jax import CheckpointError, RequestError
from lora_moe_jax.serving.text import TextCodec, TextStream
from tests.serving.byte_tokenizer import SPECIAL, byte_codec, byte_tokenizer

CODEC = byte_codec()
TEXT = "Grüße, 世界! 👩‍👩‍👧 naïve ﷽ end"


def stream(ids: list[int], stop=(), codec: TextCodec = CODEC) -> tuple[list[str], TextStream]:
    """What each token made readable, the rest last; and the stream."""
    one, parts = TextStream(codec, stop), []
    for token in ids:
        parts.append(one.push(token))
        if one.stopped:
            break
    return [*parts, one.finish()], one


# ---- streams -------------------------------------------------------------------------------------
def test_characters_come_when_they_are_complete():
    ids = CODEC.encode("aü👍b")
    assert len(ids) == 8
    parts, one = stream(ids)
    assert parts == ["a", "", "ü", "", "", "", "👍", "b", ""]
    assert one.text == "aü👍b" and not one.stopped


def test_an_incomplete_character_at_the_end_is_shown_as_such():
    parts, one = stream(CODEC.encode("a👍")[:-1])
    assert parts[:-1] == ["a", "", "", ""] and parts[-1] == one.text[1:] != ""
    assert one.text == CODEC.decode(CODEC.encode("a👍")[:-1]) and "\ufffd" in one.text


def test_special_tokens_are_not_text():
    ids = CODEC.encode(f"ab{SPECIAL}c")
    assert 256 in ids
    parts, one = stream(ids)
    assert one.text == "abc" == "".join(parts)


def test_tokens_beyond_the_vocabulary_are_not_text():
    """Models often have more embeddings than their tokenizer has tokens."""
    a, b = CODEC.encode("ab")
    assert stream([a, 400, b, 100_000])[1].text == "ab"


def test_random_bytes():
    """Mostly invalid UTF-8: still the text that decoding all of it gives, and no error."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(0, 260, rng.integers(1, 60)).tolist()
        parts, one = stream(ids)
        assert "".join(parts) == one.text == CODEC.decode(ids)


def byte_fallback_codec() -> TextCodec:
    """As Llama's: bytes that are no character together are shown one by one."""
    words = ["<unk>", "▁", "▁B", "B", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(
        vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return TextCodec(tokenizer, None, {})


def test_bytes_that_change_what_was_before_them():
    """What has come out stays, and what was held back stands for itself."""
    codec = byte_fallback_codec()
    byte, b, word = (codec.tokenizer.token_to_id(its) for its in ("<0xE5>", "B", "▁B"))
    capital = codec.tokenizer.token_to_id("<0x41>")
    parts, one = stream([capital, byte, b, word, byte], codec=codec)
    assert parts == ["A", "", "\ufffdB", " B", "", "\ufffd"]
    assert one.text == "A\ufffdB B\ufffd"


def test_random_tokens_with_bytes():
    codec, rng = byte_fallback_codec(), np.random.default_rng(0)
    for _ in range(300):
        ids = rng.choice([2, 3, 4, 0x46, 0xC3 + 5, 0xA9 + 5, 0xE5 + 5], rng.integers(1, 40))
        parts, one = stream(ids.tolist(), codec=codec)
        assert "".join(parts) == one.text
        readable = [(text.count("B"), text.count("é")) for text in (one.text, codec.decode(ids))]
        assert readable[0] >= readable[1]


@pytest.mark.parametrize("stop", ["世界", "界! ", "👩‍👧", "ß", "end", TEXT, "G", " "])
def test_a_stop_string_cuts_the_text(stop):
    ids = CODEC.encode(TEXT)
    parts, one = stream(ids, [stop])
    assert one.stopped and one.text == TEXT[: TEXT.index(stop)] == "".join(parts)
    assert stop not in CODEC.decode(ids[: len(parts) - 2]), "it stopped at once"


def test_what_may_become_a_stop_string_is_held_back():
    parts, one = stream(CODEC.encode("xxabaabcd"), ["aabc"])
    assert parts == ["x", "x", "", "ab", "", "", "", "", ""]
    assert one.text == "xxab" and one.stopped


def test_what_did_not_become_a_stop_string_comes_later():
    parts, one = stream(CODEC.encode("abXab"), ["abc"])
    assert parts == ["", "", "abX", "", "", "ab"]
    assert one.text == "abXab" and not one.stopped


def test_the_first_of_several_stop_strings_counts():
    tokenizer = byte_tokenizer(merges=(("a", "b"), ("c", "d"), ("ab", "cd")))
    codec = TextCodec(tokenizer, None, {})
    ids = codec.encode("xabcdx")
    assert len(ids) == 3, "abcd is one token"
    assert stream(ids, ["cd", "bc"], codec)[1].text == "xa"
    assert stream(ids, ["dx", "bcdx"], codec)[1].text == "xa"


def test_a_stop_string_across_token_borders():
    tokenizer = byte_tokenizer(merges=(("a", "b"), ("c", "d")))
    codec = TextCodec(tokenizer, None, {})
    ids = codec.encode("abcdef")
    assert len(ids) == 4
    parts, one = stream(ids, ["bcde"], codec)
    assert parts == ["a", "", "", ""] and one.text == "a"


def test_random_texts_and_stop_strings():
    """The parts add up to the text before the first stop string, whatever the tokens are."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        text = "".join(rng.choice(list("abü"), 30))
        stops = ["".join(rng.choice(list("abü"), rng.integers(1, 6))) for _ in range(3)]
        parts, one = stream(CODEC.encode(text), stops)
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        if not ends:
            assert "".join(parts) == text == one.text and not one.stopped
            continue
        seen = text[: min(ends)]  # what was generated when the first one was complete
        cut = min(seen.index(stop) for stop in stops if stop in seen)
        assert "".join(parts) == one.text == text[:cut] and one.stopped


# ---- prompts -------------------------------------------------------------------------------------
def test_encoding_is_undone_by_decoding():
    assert CODEC.decode(CODEC.encode(TEXT)) == TEXT


def test_half_a_character_is_refused():
    with pytest.raises(RequestError, match="Unicode"):
        CODEC.encode("a\ud800b")


# ---- chat ----------------------------------------------------------------------------------------
TEMPLATE = """{%- for message in messages %}
    {%- if message.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}
    {%- if message.content == 'skip' %}{% continue %}{% endif %}
{{ bos_token + message['role'] + ': ' + message['content'] }}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""


def test_chat_template():
    codec = byte_codec(TEMPLATE, bos_token=SPECIAL)
    messages = [{"role": "user", "content": c} for c in ("hi", "skip", "you")]
    ids = codec.chat(messages)
    rendered = f"{SPECIAL}user: hi\n{SPECIAL}user: you\nassistant:"
    assert codec.tokenizer.decode(ids, skip_special_tokens=False) == rendered
    assert ids.count(256) == 2, "the special tokens are tokens"


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (None, [{"role": "user", "content": "hi"}], "no chat template"),
        (TEMPLATE, [{"role": "system", "content": "hi"}], "no system messages"),
        (TEMPLATE, [{"role": "user", "content": None}], "refused"),
        (TEMPLATE, [{"role": "user"}], "refused"),
        (TEMPLATE, "hi", "list of objects"),
        (TEMPLATE, {"role": "user", "content": "hi"}, "list of objects"),
        (TEMPLATE, ["hi"], "list of objects"),
        (TEMPLATE, None, "list of objects"),
        ("{{ 1 / 0 }}", [], "refused"),
        ("{{ messages[0].content | dictsort }}", [{"role": "user", "content": "hi"}], "refused"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", [], "refused"),
        ("{{ messages[0].content[3:].missing.part }}", [], "refused"),
        ("{% if %}", [], "cannot be read"),
        ("{% generation %}x", [], "cannot be read"),
        ("{{ messages.append(1) }}", [], "refused"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", [], "refused"),
        ("{{ messages[0].content }}", [{"role": "user", "content": "\ud800"}], "Unicode"),
    ],
    ids=str,
)
def test_chat_refusals(template, messages, says):
    with pytest.raises(RequestError, match=says):
        byte_codec(template).chat(messages)


def test_a_stop_string_in_what_was_held_back_cuts_too():
    """A token of a space and the beginning of a character, where generation ends."""
    codec = TextCodec(byte_tokenizer(merges=((chr(0x120), chr(0xF0)),)), None, {})
    ids = codec.encode("ab 👍")[:3]
    parts, one = stream(ids, [" "], codec)
    assert one.text == "ab" == "".join(parts)
    parts, one = stream(ids, ["x"], codec)
    assert one.text == "ab \ufffd" == "".join(parts)


# ---- folders -------------------------------------------------------------------------------------
def write(folder, **settings):
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_folder_without_a_tokenizer(tmp_path):
    assert TextCodec.from_folder(tmp_path) is None


def test_a_folder(tmp_path):
    write(
        tmp_path,
        chat_template="{{ bos_token }}{{ eos_token }}{{ pad_token }}",
        bos_token=SPECIAL,
        eos_token={"content": "E", "lstrip": False},
        pad_token={"lstrip": False},
        add_bos_token=True,
    )
    codec = TextCodec.from_folder(tmp_path)
    assert codec.chat([]) == [256, *codec.encode("E")]
    (tmp_path / "chat_template.jinja").write_text("ü")
    assert TextCodec.from_folder(tmp_path).chat([]) == codec.encode("ü"), "the file has precedence"


def test_what_a_tokenizer_was_saved_with_does_not_cut_or_pad(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextCodec.from_folder(tmp_path).encode("abcdefgh") == CODEC.encode("abcdefgh")


@pytest.mark.parametrize(
    "settings, added",
    [
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, (1, 0)),
        ({"tokenizer_class": "LlamaTokenizerFast"}, (1, 0)),
        ({"tokenizer_class": "LlamaTokenizer", "add_eos_token": True}, (1, 1)),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, (0, 0)),
        ({"tokenizer_class": "LlamaTokenizerFast", "bos_token": None}, (0, 0)),
        ({"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<missing>"}, (0, 0)),
        ({"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True}, (0, 0)),
    ],
)
def test_ends_of_text_by_the_tokenizers_class(settings, added, tmp_path):
    """DeepSeek's files have none in tokenizer.json; a conversation's are the template's."""
    text = {"chat_template": "{{ bos_token }}x", "bos_token": SPECIAL, "eos_token": SPECIAL}
    codec = TextCodec.from_folder(write(tmp_path, **text | settings))
    begin, end = added
    assert codec.encode("ab") == [256] * begin + CODEC.encode("ab") + [256] * end
    assert codec.encode("ab", special_tokens=False) == CODEC.encode("ab")
    if settings.get("bos_token", SPECIAL) == SPECIAL:
        assert codec.chat([]) == [256, *CODEC.encode("x")]


def test_templates_have_what_transformers_gives_them():
    value = {"path": "<a> & b's", "kind": "é"}
    codec = byte_codec("{{ messages[0].content | tojson }}{{ strftime_now('%Y') | length }}")
    ids = codec.chat([{"role": "user", "content": value}])
    assert codec.decode(ids) == json.dumps(value, ensure_ascii=False) + "4"
    codec = byte_codec("{{ messages[0].content | tojson(ensure_ascii=True, indent=1) }}")
    ids = codec.chat([{"role": "user", "content": value}])
    assert codec.decode(ids) == json.dumps(value, indent=1)
    codec = byte_codec("{{ tools is none and documents is none }}")
    assert codec.decode(codec.chat([])) == "True"


def test_what_an_assistant_says_may_be_marked():
    """As templates do that are for training, too."""
    template = "{% for m in messages %}<{% generation %}{{ m.content }}.{% endgeneration %}>"
    codec = byte_codec(template + "{% endfor %}")
    said = [{"role": "assistant", "content": content} for content in ("a", "b")]
    assert codec.decode(codec.chat(said)) == "<a.><b.>"


def test_the_default_of_several_templates(tmp_path):
    others = [{"name": "tool_use", "template": "y"}, {"name": "default", "template": "x"}]
    codec = TextCodec.from_folder(write(tmp_path, chat_template=others))
    assert codec.decode(codec.chat([])) == "x"
    write(tmp_path, chat_template=[{"name": "rag", "template": "x"}, 3])
    with pytest.raises(RequestError, match="no chat template"):
        TextCodec.from_folder(tmp_path).chat([])


def test_tokens_of_the_configuration_alone(tmp_path):
    """They follow those of tokenizer.json; text around them is as without them."""
    added = {
        "256": {"content": SPECIAL, "special": True},
        "258": {"content": "<b>", "special": False},
        "257": {"content": "<a>", "special": True},
    }
    codec = TextCodec.from_folder(write(tmp_path, added_tokens_decoder=added))
    assert codec.encode("x<a>y<b>") == [*CODEC.encode("x"), 257, *CODEC.encode("y"), 258]
    assert codec.decode([257, 258]) == "<b>"
    write(tmp_path, added_tokens_decoder={"300": {"content": "<a>"}})
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        TextCodec.from_folder(tmp_path)
    assert caught.value.key == "added_tokens_decoder[300]"


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"["),
        ("tokenizer_config.json", b'{"a": 1, "a": 2}'),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_damaged_files(file, data, tmp_path):
    (write(tmp_path) / file).write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        TextCodec.from_folder(tmp_path)
    assert caught.value.file == str(tmp_path / file)

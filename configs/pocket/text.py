"""The text of the pocket model: the standard library of the Python that runs this file.

A *document* is a short piece of text (a function, a class, a few paragraphs). Each style is a list
of documents, in a fixed order for one Python version:

  code      library source, cut where two blank lines separate its parts
  prose     the language reference in `pydoc_data` and the long docstrings of the library
  chat      one question and one answer: a function for its docstring, a page for its topic
  tests     the parts of the `test` package that assert something
  shout     code and prose in upper case
  comments  prose with "# " before every line
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
from pathlib import Path
from pydoc_data.topics import topics

STDLIB = Path(sysconfig.get_path("stdlib"))
SKIP = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "turtledemo",
}
LONGEST = 1600  # characters of one document: about 500 tokens

BOS, EOS, USER, ASSISTANT = "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"


def pieces(text: str, *separators: str) -> list[str]:
    """Cuts `text` at the first separator, joins neighbours while they stay under LONGEST, and cuts
    what is still longer at the next separator."""
    separator, *finer = separators
    joined = [""]
    for part in text.replace("\x0c", "").expandtabs().split(separator):
        if len(joined[-1]) + len(part) < LONGEST:
            joined[-1] += separator + part if joined[-1] else part
        else:
            joined.append(part)
    found = []
    for piece in joined:
        if len(piece) > LONGEST and finer:
            found += pieces(piece, *finer)
        elif is_language(piece):
            found.append(piece.strip("\n") + "\n")
    return found


def is_language(text: str) -> bool:
    """False for tables of numbers and scraps, which teach a small model nothing."""
    letters = sum(c.isalpha() for c in text)
    return letters > 80 and letters > 0.5 * len(re.sub(r"\s", "", text))


def sources(folder: Path, skip: set[str]) -> list[str]:
    """The text of the Python files under `folder`, without generated and non-UTF-8 ones."""
    texts = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if skip.intersection(parts) or parts[-1].startswith("_sysconfigdata"):
            continue
        try:
            texts.append(path.read_text("utf-8"))
        except UnicodeDecodeError:
            continue
    return texts


def docstrings(texts: list[str]) -> list[tuple[str, str, str]]:
    """(name, docstring, source) of every documented function and class of `texts`."""
    found = []
    for text in texts:
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                found.append((node.name, ast.get_docstring(node), source))
    return found


def answers(documented: list[tuple[str, str, str]]) -> list[str]:
    """Chats: `Write NAME: SUMMARY` gives a function, `Explain TOPIC` gives its page."""
    found = []
    for name, doc, source in documented:
        summary = doc.split("\n")[0].strip()
        if source.startswith("def ") and len(source) < LONGEST and 20 < len(summary) < 100:
            found.append(f"{USER}Write {name}: {summary}{ASSISTANT}{source}\n")
    for name, text in sorted(topics.items()):
        for page in pieces(text, "\n\n", "\n")[:3]:
            found.append(f"{USER}Explain {name.lower()}.{ASSISTANT}{page}")
    return found


def load() -> dict[str, list[str]]:
    """All styles, each shuffled with a fixed seed."""
    if not (STDLIB / "test").is_dir():
        raise SystemExit(f"{STDLIB} has no test package: use a Python that was installed whole")
    library = sources(STDLIB, SKIP)
    documented = docstrings(library)
    pages = [text for _, text in sorted(topics.items())]
    pages += [doc for _, doc, _ in documented if len(doc) > 300]
    suite = sources(STDLIB / "test", {"encoded_modules"})
    tests = [p for text in suite for p in pieces(text, "\n\n\n", "\n\n")]
    styles = {
        "code": [p for text in library for p in pieces(text, "\n\n\n", "\n\n")],
        "prose": [p for text in dict.fromkeys(pages) for p in pieces(text, "\n\n", "\n")],
        "chat": answers(documented),
        "tests": [p for p in tests if "self.assert" in p],
    }
    for documents in styles.values():
        random.Random(0).shuffle(documents)
    styles["shout"] = [p.upper() for p in styles["code"] + styles["prose"]]
    styles["comments"] = [comment(p) for p in styles["prose"]]
    random.Random(0).shuffle(styles["shout"])
    return styles


def comment(text: str) -> str:
    """The lines of `text` as Python comments, with their indentation dropped."""
    return "".join(f"# {line.strip()}\n" for line in text.splitlines() if line.strip())

"""The pocket model: a small real DeepSeek-V3 model with adapters, to try everything at once.

`BASE` is the folder of the base model, `ADAPTERS` maps the name of each adapter to its folder.
Both are in the usual Hugging Face and PEFT formats. `configs/pocket` has the recipe.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent

BASE: Path = _HERE / "base"
ADAPTERS: dict[str, Path] = {
    file.parent.name: file.parent for file in sorted(_HERE.glob("adapters/*/adapter_config.json"))
}

"""How docstrings become pages: roles of Sphinx become links, and the double colon before a block a single one.

mkdocs.yml names this file as an extension of griffe, which reads the docstrings for mkdocstrings.
"""

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:class|func|mod|meth|data|attr):`(~?)([\w.]+)`")


def as_markdown(text: str, home: str = "") -> str:
    """The text of a docstring with links in place of roles; to nowhere, where no page has the name.

    Args:
        text: as it stands in the source.
        home: the module or class that names without a dot are looked up in.
    """

    def link(role: re.Match[str]) -> str:
        short, name = role[1], role[2].removeprefix(".")
        target = name if name.startswith("megatron_eopt") or not home else f"{home}.{name}"
        shown = name.rpartition(".")[2] if short else name
        return f'<autoref identifier="{target}" optional><code>{shown}</code></autoref>'

    return re.sub(r"::$", ":", ROLE.sub(link, text), flags=re.MULTILINE)


class Docstrings(Extension):
    """Changes every docstring when it is read."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            home = obj if obj.is_module or obj.is_class else obj.parent
            obj.docstring.value = as_markdown(obj.docstring.value, home.path if home is not None else "")

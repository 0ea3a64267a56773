"""Keeps flags in one piece: a browser would break a line behind each hyphen.

mkdocs.yml names this file as a hook; docs/assets/extra.css says what is done with the class.
"""

import re
from typing import Any

INLINE = re.compile(r"(?<!<span></span>)<code>[^<]*</code>")  # the span stands before the code of a block


def on_page_content(html: str, **kwargs: Any) -> str:
    """Called for each page, with what its Markdown became."""
    return INLINE.sub(lambda code: re.sub(r"(?<![\w-])--[\w-]*", r'<span class="flag">\g<0></span>', code[0]), html)

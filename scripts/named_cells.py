"""Gives every cell of a table the name of its column, which a phone shows before it.

mkdocs.yml names this file as a hook; docs/assets/extra.css shows the names where tables become lists.
"""

import re
from typing import Any

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
HEAD = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)


def with_names(table: re.Match[str]) -> str:
    """The table with an attribute ``data-column`` in each cell of a named column."""
    columns = [re.sub(r"<[^>]*>", "", head) for head in HEAD.findall(table[0])]

    def name_cells(row: re.Match[str]) -> str:
        start, *cells = row[0].split("<td")
        named = [f'<td data-column="{column}"' if column else "<td" for column in columns]
        return start + "".join(opening + cell for opening, cell in zip(named, cells, strict=False))

    return ROW.sub(name_cells, table[0])


def on_page_content(html: str, **kwargs: Any) -> str:
    """Called for each page, with what its Markdown became."""
    return TABLE.sub(with_names, html)

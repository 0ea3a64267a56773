"""The manifest in checkpoints and ``--optimizer-manifest-file``."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_eopt.routing.patterns import LogicalMatrix, ManifestRow, ParamPattern, as_tuples, expanded

FORMAT = 1  # counts up with every change that an older release cannot read


def to_json(families: Iterable[ParamPattern]) -> dict[str, Any]:
    """Patterns as values that survive JSON."""
    written = []
    for family in families:
        row = asdict(family.like)
        pattern = row.pop("name")
        optimizer = row.pop("optimizer")
        written.append({"pattern": pattern, "members": family.members, "owner": optimizer} | row)
    return json.loads(json.dumps({"format": FORMAT, "families": written}))


def write_json(families: Iterable[ParamPattern], file: str) -> None:
    """Write patterns to a file; ``ValueError`` where that fails."""
    try:
        Path(file).write_text(json.dumps(to_json(families), indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"the manifest cannot be written to {file}: {error.strerror}; give another file") from error


def from_json(manifest: Any) -> list[ParamPattern]:
    """The patterns; ``ValueError`` for a newer format, and for what is no manifest."""
    try:
        number = manifest["format"]
        if number > FORMAT:
            raise ValueError(
                f"the manifest has format {number}, and this release of megatron_eopt reads up to {FORMAT}: install "
                f"the release that wrote it, or a later one"
            )
        return [_family(dict(family)) for family in manifest["families"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the manifest is damaged ({error!r}): take that of another checkpoint") from None


def _family(written: dict[str, Any]) -> ParamPattern:
    members = as_tuples(written.pop("members"))
    expanded(members)  # which a damaged one fails
    name = written.pop("pattern")
    optimizer = written.pop("owner")
    matrices = [LogicalMatrix(**matrix) for matrix in written.pop("matrices")]
    return ParamPattern(ManifestRow(name=name, optimizer=optimizer, matrices=tuple(matrices), **written), members)

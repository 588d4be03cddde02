"""A table, as Markdown text; page.html shows the same table as HTML."""

import re
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def display_name(algo: str) -> str:
    """Return an algorithm's name as its page spells it, or else in capitals."""
    page = DOCS / f"{algo}.md"
    heading = page.read_text("utf-8").partition("\n")[0].removeprefix("# ") if page.exists() else ""
    return heading if re.sub("[^a-z0-9]", "", heading.lower()) == algo.replace("_", "") else algo.upper()


@dataclass
class Table:
    """Cells by row. A table without rows stands for something that was not run."""

    heads: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the lines of a Markdown table."""
        rows = self.rows or [["not run", *[""] * (len(self.heads) - 1)]]
        first, *others = ("|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in (self.heads, *rows))
        return "\n".join([first, "|---" * len(self.heads) + "|", *others])


def spread(values: Collection[float], digits: int = 1, number: int | None = None) -> str:
    """Return "mean ± standard deviation (number)"; the number is by default that of the values."""
    if not values:
        return "not run"
    deviation = f" ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):,.{digits}f}{deviation} ({len(values) if number is None else number})"

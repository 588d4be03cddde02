"""README's and the docs' pages, the headings of an algorithm's page, and the commands in blocks of code."""

import re

from conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
HEADINGS = [
    "Summary",
    "Usage",
    "Algorithm",
    "Flags",
    "Metrics",
    "Differences from the authors' code",
    "Results",
    "Troubleshooting",
]


def commands() -> list[tuple[str, str]]:
    """Return (page, command) for each command in a block of code, without its comment."""
    found = []
    for page in PAGES:
        inside = False
        for line in page.read_text().replace("\\\n", " ").splitlines():
            inside ^= line.startswith("```")
            if inside or line.startswith("    "):
                command = re.sub(r"\s#.*", "", line).strip().removeprefix("$ ")
                if re.match(r"(\w+=\S+ )*(python|make)\s", command):
                    found.append((page.name, " ".join(command.split())))
    return list(dict.fromkeys(found))

"""README and docs: plain English, the same headings on each algorithm's page, and links that lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, every_algorithm
from pages import HEADINGS, PAGES

FORBIDDEN = re.compile(
    r"\b(goes|go|going|went|gone) on\b|\banew\b|\bas ever\b|\bof then\b|\bnobody\b|\bmay grow\b|\bbeside\b|\bthe film\b"
    r"|\b(is|are) (still )?to be (expected|had)\b",
    re.IGNORECASE,
)
MAX_WORDS = 1_200  # of an algorithm's page
MAX_SENTENCE = 25  # words
MAX_SHARE = 0.08  # of the sentences may be longer
CODE = re.compile(r"```.*?```", re.DOTALL)
COMMANDS = ["algos/sac.py", "algos/ppo.py", "algos/wsrl.py", "algos/expo.py", "tools/video.py", "bench/sweep/sweep.py"]


def sentences(page: str) -> list[str]:
    """Return the sentences of a page, without code, tables, headings and the targets of links."""
    lines = [
        line
        for line in CODE.sub("", page).splitlines()
        if not line.lstrip().startswith(("|", "#", "<!--", "![")) and not line.startswith("    ")
    ]
    text = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    parts = re.split(r"(?<=[.!?])\s+|\n\s*\n|\n\s*[-*\d]+\.?\s", text)
    return [" ".join(part.split()) for part in parts if len(part.split()) > 3]


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", CODE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_a_forbidden_word(page: Path):
    assert [match[0] for match in FORBIDDEN.finditer(CODE.sub("", page.read_text()))] == []


def test_no_code_has_a_forbidden_word():
    """In names, comments, docstrings and messages, of tests too."""
    folders = ("algos", "common", "envs", "offline", "tools", "bench", "tests")
    files = [
        path for folder in folders for kind in ("py", "toml", "html") for path in (ROOT / folder).rglob(f"*.{kind}")
    ]
    files = [path for path in [*files, ROOT / "Makefile"] if path != Path(__file__)]
    found = {path.name: FORBIDDEN.findall(path.read_text()) for path in files}
    assert len(files) > 150
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("program", COMMANDS)
def test_no_help_has_a_forbidden_word(program: str):
    shown = subprocess.run([sys.executable, str(ROOT / program), "--help"], capture_output=True, text=True, check=True)
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown.stdout).split())
    assert len(text) > 500
    assert [match[0] for match in FORBIDDEN.finditer(text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_end_at_100_columns(page: Path):
    """Except in tables, code and what a program writes."""
    text = re.sub(r"<!-- .*?<!-- end .*?-->", "", CODE.sub("", page.read_text()), flags=re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 100 and line[:1] != "|" and line[:4] != "    "] == []


def test_few_sentences_are_long():
    """The others have at most 25 words."""
    found = [sentence for page in PAGES for sentence in sentences(page.read_text())]
    long = [sentence for sentence in found if len(sentence.split()) > MAX_SENTENCE]
    assert len(found) > 300
    assert len(long) <= MAX_SHARE * len(found), "\n".join(long)


@every_algorithm
def test_algorithm_pages_have_the_same_headings(algo: str):
    """STYLE's rule: a reader finds the same thing at the same place of each page, which is short."""
    text = (ROOT / "docs" / f"{algo}.md").read_text()
    assert re.findall(r"^## (.*)$", CODE.sub("", text), re.MULTILINE) == HEADINGS
    tables = re.compile(r"<!-- .*?<!-- end -->", re.DOTALL)
    assert len(tables.sub("", text).split()) <= MAX_WORDS


def test_links_between_pages_lead_somewhere():
    """To files of this repository, and to headings of its pages."""
    count = 0
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", text)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), f"{page.name} links to {target}"
            if anchor and file.suffix == ".md":
                assert anchor in anchors(file.read_text()), f"{page.name} links to {target}"
            count += 1
    assert count > 100


def test_the_readme_is_short():
    """Without the tables that are made, which have a row for each algorithm."""
    text = re.sub(r"<!-- .*?<!-- end -->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(text.splitlines()) <= 105


def test_a_forbidden_word_and_a_long_sentence_are_found():
    """The measures themselves."""
    assert FORBIDDEN.search("The run is Going on.")
    assert not FORBIDDEN.search("The run resumes on the same machine.")
    assert sentences("One two three four. Five six\nseven eight!\n\n| a | b | c | d |\n\n# Head of a page\n") == [
        "One two three four.",
        "Five six seven eight!",
    ]
    assert anchors("# A, b: *c*\n## From offline-to-online\n") == {"a-b-c", "from-offline-to-online"}

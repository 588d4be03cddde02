"""MkDocs hooks for `make site`: README is the first page, and files that the pages link to are part of the site.

A link such as ../algos/sac.py#L97 leads to that line on a page that shows the file.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TOP = {"index.md": ROOT / "README.md", "contributing.md": ROOT / "CONTRIBUTING.md"}  # pages from outside docs/
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
COPIED = {".png", ".html"}
LANGUAGES = {".py": "python", ".toml": "toml"}


def on_files(files: Any, config: Any) -> Any:
    """Add README, CONTRIBUTING, and each file and folder of the repository that a page links to."""
    from mkdocs.structure.files import File

    sources = [*TOP.values(), *(Path(file.abs_src_path) for file in files.documentation_pages())]
    for uri, path in TOP.items():
        files.append(File.generated(config, uri, content=path.read_text("utf-8")))
    linked = {target for source in sources for target, _ in _links(source)}
    for target in sorted(linked):
        if target in sources or target.is_relative_to(DOCS):
            continue
        if target.suffix in COPIED:
            files.append(File.generated(config, _uri(target), abs_src_path=str(target)))
        else:
            files.append(File.generated(config, _uri(target), content=_shown(target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links to files outside of docs/ lead to their pages."""
    source = TOP.get(page.file.src_uri, DOCS / page.file.src_uri)
    if not source.exists():
        return markdown

    def moved(match: re.Match[str]) -> str:
        target, anchor = _target(source, match[2]), match[3] or ""
        if ":" in match[2] or not target.exists():
            return match[0]
        link = os.path.relpath(_uri(target), Path(page.file.src_uri).parent)
        return f"{match[1]}{link}{re.sub('^#L(?=[0-9])', '#__codelineno-0-', anchor)}{match[4]}"

    return LINK.sub(moved, markdown)


def _links(source: Path) -> Iterator[tuple[Path, str]]:
    for match in LINK.finditer(source.read_text("utf-8")):
        target = _target(source, match[2])
        if ":" not in match[2] and target.exists():
            yield target, match[3] or ""


def _target(source: Path, link: str) -> Path:
    return (source.parent / link).resolve()


def _uri(target: Path) -> str:
    """Return the place of a file or folder of the repository in the site."""
    for uri, path in TOP.items():
        if target == path:
            return uri
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    name = target.relative_to(ROOT).as_posix()
    return f"files/{name}" if target.suffix in COPIED else f"files/{name}.md"


def _shown(target: Path) -> str:
    """Return a page that shows a file, or lists a folder."""
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        inside = sorted(
            path.name + "/" * path.is_dir() for path in target.iterdir() if not path.name.startswith((".", "__"))
        )
        return f"# {name}/\n\n" + "\n".join(f"- `{inner}`" for inner in inside)
    language = LANGUAGES.get(target.suffix, "text")
    return f'# {name}\n\n````{language} linenums="1"\n{target.read_text("utf-8")}\n````\n'

"""Links from docs to code: each names a definition, and its line number is looked up in the file.

A link reads [`SAC.critic_loss`](../algos/sac.py#L97). `make report` writes the number, and `--check` compares it.
"""

import ast
import re
from pathlib import Path

from common.errors import InputError

LINK = re.compile(r"\[`([\w.]+)`\]\(([\w./-]+\.py)#L\d+\)")


def with_links(text: str, folder: Path) -> str:
    """Return a page of `folder` with the current line number in each link to code.

    Raises InputError if a file or a definition does not exist.
    """

    def linked(match: re.Match[str]) -> str:
        name, target = match.groups()
        return f"[`{name}`]({target}#L{line_of(name, folder / target)})"

    return LINK.sub(linked, text)


def line_of(name: str, path: Path) -> int:
    """Return the line on which `name` is defined: a function, class or variable, or with dots, a member of a class.

    Raises InputError if `path` has no such definition.
    """
    if not path.exists():
        raise InputError(f"a page links to {path}, which does not exist")
    body, line = ast.parse(path.read_text("utf-8")).body, 0
    for part in name.split("."):
        found = [node for node in body if part in _names(node)]
        if not found:
            raise InputError(f"a page links to {name} in {path}, which has no such definition")
        line, body = found[0].lineno, getattr(found[0], "body", [])
    return line


def _names(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}

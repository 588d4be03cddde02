"""Flags that have an effect only with another flag. Their docstrings say so, and a run that gives one in vain is told.

A docstring that begins "With --policy flow or diffusion: " holds for two values of --policy. One that begins
"With --orthogonal: " or "Without --orthogonal: " holds if that flag is set, or if it is not.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator

from common.arguments import RunArgs, Unset

CONDITION = re.compile(r"(With|Without) --([a-z-]+)(?: ([a-z0-9-]+(?: or [a-z0-9-]+)*))?: ")


def conditions(arguments: type[RunArgs]) -> dict[str, tuple[str, str, list[str]]]:
    """Return each argument under a condition: the word With or Without, the other argument, and that one's values."""
    found: dict[str, re.Match[str] | None] = {}
    for cls in reversed([cls for cls in arguments.__mro__ if issubclass(cls, RunArgs)]):  # a subclass may have its own
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = CONDITION.match(str(text.value.value))
    return {
        name: (match[1], match[2].replace("-", "_"), match[3].split(" or ") if match[3] else [])
        for name, match in found.items() if match
    }  # fmt: skip


def without_effect(args: RunArgs, given: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each argument in `given` whose condition does not hold.

    A condition on an argument that is filled in later is left out.
    """
    for name, (word, other, values) in conditions(type(args)).items():
        value = getattr(args, other)
        is_so = value in values if values else bool(value)
        if name in given and not isinstance(value, Unset) and is_so != (word == "With"):
            needed = f"{other} {' or '.join(values)}".rstrip()
            flag, condition = (f"--{text.replace('_', '-')}" for text in (name, needed))
            yield f"{flag} has no effect {'without' if word == 'With' else 'with'} {condition}"

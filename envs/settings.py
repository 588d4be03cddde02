"""The settings of an environment besides its id, which are the keyword arguments of `envs.make.make`."""

import inspect
import json
from collections.abc import Mapping
from typing import Any

from common.errors import InputError
from common.messages import log
from envs.make import find, make, make_vector

# Arguments of `make` and `make_vector` themselves. No environment's constructor can get them.
RESERVED = sorted({*inspect.signature(make).parameters, *inspect.signature(make_vector).parameters} - {"kwargs"})


def require_constructor_arguments(kwargs: Mapping[str, Any]) -> None:
    """Raise InputError if one of `kwargs` cannot be meant for an environment's constructor, or has a wrong value."""
    if wrong := sorted(kwargs.keys() & {*RESERVED}):
        names = ", ".join(wrong)
        raise InputError(f"--env-kwargs has {names}, which no constructor gets: leave it out, or register it")
    for name in ("max_episode_steps", "action_repeat"):
        value = kwargs.get(name, 1)
        value = 1 if value is None and name == "max_episode_steps" else value  # None: the registered limit
        if not (isinstance(value, int) and 0 < value < 2**31 and value is not True):
            raise InputError(f"{name} is {value!r}: give a whole number above 0")


def settings_in(
    env_id: str,
    asked: dict[str, Any],
    made_in: str | None,
    made_with: dict[str, Any] | None,
    what: str,
    may_differ: bool = False,
) -> dict[str, Any]:
    """Return the `kwargs` of `make` for an environment in which data or a policy is used: `what`, in messages.

    It was made in the environment `made_in` with the arguments `made_with`, None if these are not known. They apply
    unless `env_id` is another environment. `asked` are the user's. Raises InputError if these differ, the time limit
    aside, because observations or rewards would then have another meaning. With `may_differ`, it is a warning.
    """
    require_constructor_arguments(asked)
    if env_id != made_in or made_with is None:
        return asked
    # Older files state arguments of the registration as text where they do not fit into JSON.
    registered = find(env_id).kwargs
    as_text = {k: str(v) for k, v in registered.items() if not fits_json(v)}
    made_with = {k: v for k, v in made_with.items() if v != as_text.get(k)}
    if not is_same_variant(env_id, made_with | asked, made_with):
        there, here, both = (json.dumps(k, default=str)[:300] for k in (made_with, asked, made_with | asked))
        if may_differ:
            log.warning(f"{what} was made in {env_id} with the arguments {there}, and is used with {both}")
            return made_with | asked
        raise InputError(
            f"{what} was made in {env_id} with the arguments {there}, not {here}\n"
            "leave its settings out to use those, or give other data or another policy"
        )
    return made_with | asked


def fits_json(value: object) -> bool:
    """Return whether JSON gives the value back, a tuple as a list. An enum or a dict with numbers as keys changes."""
    if type(value) is dict:
        return all(type(key) is str and fits_json(each) for key, each in value.items())
    if type(value) in (list, tuple):
        return all(map(fits_json, value))  # type: ignore[call-overload]
    return value is None or type(value) in (bool, int, float, str)


def is_same_variant(env_id: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether both settings make the same environment, the time limit aside."""
    # Through JSON, because files store tuples as lists.
    registered = {"action_repeat": 1} | find(env_id).kwargs
    full = [json.loads(json.dumps(registered | k | {"max_episode_steps": None}, default=str)) for k in (one, other)]
    return bool(full[0] == full[1])


def is_plain(env_id: str, settings: dict[str, Any]) -> bool:
    """Return whether the environment is made as it is registered, so that its published reference scores apply."""
    limit = find(env_id).max_episode_steps
    return is_same_variant(env_id, settings, {}) and settings.get("max_episode_steps") in (None, limit)

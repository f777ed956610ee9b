"""Optimizer state dicts with one key per value, for ``flatten_optimizer_state_dict=True``.

The keys are those of torch: ``state.FQN.NAME`` and, for each parameter,
``param_groups.FQN.SETTING``. torch drops groups without parameters; here the settings of the k-th
are ``param_groups..k.SETTING``, which is no parameter's key, since no FQN begins with a dot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Flat form of ``{"state": {fqn: {...}}, "param_groups": [{"params": [fqn, ...], ...}]}``."""
    flat: dict[str, Any] = dict(_leaves("state", nested["state"]))
    num_empty = 0
    for group in nested["param_groups"]:
        owners = group["params"]
        if not owners:
            owners = [f".{num_empty}"]
            num_empty += 1
        for owner in owners:
            settings = {k: v for k, v in group.items() if k != "params"}
            flat.update({f"param_groups.{owner}.{name}": v for name, v in settings.items()})
    return flat


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, one in value.items():
        yield from _leaves(f"{key}.{name}", one)


def unflatten(flat: Mapping[str, Any], fqns: Collection[str]) -> dict[str, Any]:
    """Nested form of a flat state dict, with a group for each parameter.

    Args:
        flat: a state dict in the flat form, of any parameters.
        fqns: the parameters of the result; keys of others are ignored.
    """
    states: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        owner = _owner_of(rest, fqns)
        if owner is None:
            continue
        *outer, name = rest[len(owner) + 1 :].split(".")
        place = (states if kind == "state" else groups).setdefault(owner, {})
        for one in outer:
            place = place.setdefault(one, {})
        place[name] = value
    return {
        "state": states,
        "param_groups": [
            {**settings, "params": [owner] if owner in fqns else []}
            for owner, settings in groups.items()
        ],
    }


def fqns_of(flat: Mapping[Any, Any]) -> set[str]:
    """Parameters in the groups of a flat state dict; none of any other dict."""
    groups = [str(key).partition(".") for key in flat]
    return {rest.rpartition(".")[0] for kind, _, rest in groups if kind == "param_groups"} - {""}


def _owner_of(key: str, fqns: Collection[str]) -> str | None:
    """Prefix of a key that is a parameter's FQN, or stands for a group without parameters."""
    parts = key.split(".")
    if not parts[0]:
        return ".".join(parts[:2])
    prefixes = (".".join(parts[:number]) for number in range(1, len(parts)))
    return next((prefix for prefix in prefixes if prefix in fqns), None)

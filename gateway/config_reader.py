"""TOML tables -> structs. Goes on after a fault, so that one start shows all of them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from gateway.config_faults import At, Faults, nearest
from gateway.config_schema import RANGES, KeyDigest, PluginRulesConfig, PluginsConfig
from gateway.config_secrets import SecretFault, resolve_key, resolve_secret
from plugins.secrets import Secret

_T = TypeVar("_T")
_PLACE = re.compile(r"(.*) - at `\$(.*)`", re.DOTALL)


class Reader:
    """`base_dir` is what relative paths start from; `environ` is where `env` secrets are looked up."""

    def __init__(self, faults: Faults, base_dir: Path, environ: Mapping[str, str]) -> None:
        self._faults = faults
        self._base_dir = base_dir
        self._environ = environ
        self._good: dict[At, Any] = {}

    def rows(self, cls: type[_T]) -> list[tuple[At, _T]]:
        """Every table that was read as `cls` without a fault, with its place; so that others can be checked on."""
        return [(at, found) for at, found in self._good.items() if isinstance(found, cls)]

    def struct(self, cls: type[_T], table: Any, at: At) -> _T | None:
        """Read one table as a msgspec Struct or dataclass; None where it has a fault, which is noted."""
        given = as_table(table)
        if given is None:
            return self._fault(at, f"must be a table, got {_kind(table)}")
        fields = _fields(cls)
        for key in given.keys() - fields.keys():
            what = (
                "unknown key" if at else "unknown table" if _is_table(given[key]) else "unknown key"
            )
            self._fault((*at, key), f"{what}{nearest(key, fields)}")
        for key, (_, required) in fields.items():
            if required and key not in given:
                self._fault((*at, key), "required")
        values = {
            key: self.value(hint, given[key], (*at, key))
            for key, (hint, _) in fields.items()
            if key in given
        }
        required_keys = {key for key, (_, required) in fields.items() if required}
        if None in values.values() or not required_keys <= values.keys():
            return None
        self._good[at] = cls(**values)
        return self._good[at]

    def value(self, hint: Any, value: Any, at: At) -> Any:
        """One value of the type `hint`; None where it has a fault (TOML itself has no null)."""
        hint = _without_none(hint)
        if hint in (Secret, KeyDigest):
            return self._secret(hint, value, at)
        if hint is PluginsConfig:
            return self._plugins(value, at)
        if hint is Path:
            text = self._convert(str, value, at)
            return None if text is None else self._base_dir / text
        if hint == Mapping[str, Secret]:
            return self._secrets(value, at)
        if _is_struct(hint):
            return self.struct(hint, value, at)
        if get_origin(hint) is tuple and _is_struct(get_args(hint)[0]):
            return self._structs(get_args(hint)[0], value, at)
        if get_origin(hint) is Literal:
            return self._choice(get_args(hint), value, at)
        return self._convert(hint, value, at)

    def _fault(self, at: At, message: str) -> None:
        self._faults.add(at, message)

    def _structs(self, cls: type[Any], value: Any, at: At) -> tuple[Any, ...] | None:
        items = as_list(value)
        if items is None:
            return self._fault(at, f"must be a list of tables, got {_kind(value)}")
        rows = [self.struct(cls, item, (*at, i)) for i, item in enumerate(items)]
        return None if None in rows else tuple(rows)

    def _choice(self, options: tuple[str, ...], value: Any, at: At) -> Any:
        if value in options:
            return value
        known = ", ".join(f'"{option}"' for option in options)
        got = f'"{value}"' if isinstance(value, str) else _kind(value)
        return self._fault(at, f"must be one of {known}; got {got}")

    def _secret(self, hint: Any, value: Any, at: At) -> Any:
        resolve = resolve_secret if hint is Secret else resolve_key
        try:
            return resolve(value, self._base_dir, self._environ)
        except SecretFault as fault:
            return self._fault((*at, fault.key) if fault.key else at, str(fault))

    def _secrets(self, value: Any, at: At) -> Mapping[str, Secret] | None:
        table = as_table(value)
        if table is None:
            return self._fault(at, f"must be a table, got {_kind(value)}")
        secrets = {key: self._secret(Secret, item, (*at, key)) for key, item in table.items()}
        return None if None in secrets.values() else secrets

    def _plugins(self, value: Any, at: At) -> PluginsConfig | None:
        """`enabled` and one table for each plugin, of which two keys are ours."""
        given = as_table(value)
        if given is None:
            return self._fault(at, f"must be a table, got {_kind(value)}")
        tables = {k: table for k, item in given.items() if (table := as_table(item)) is not None}
        for name, table in tables.items():
            own = {key: table[key] for key in PluginRulesConfig.__struct_fields__ if key in table}
            self.struct(PluginRulesConfig, own, (*at, name))
        for key in given.keys() - tables.keys() - {"enabled"}:
            self._fault((*at, key), f"unknown key{nearest(key, ['enabled'])}")
        enabled = self._convert(tuple[str, ...], given.get("enabled", []), (*at, "enabled"))
        if enabled is None:
            return None
        self._good[at] = PluginsConfig(enabled, tables)
        return self._good[at]

    def _convert(self, hint: Any, value: Any, at: At) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return self._fault(at, "must be a finite number")
        try:
            return msgspec.convert(value, hint)
        except msgspec.ValidationError as exc:
            message = str(exc)
            inner = _PLACE.fullmatch(message)
            for index in re.findall(r"\[(\d+)\]", inner[2]) if inner else ():
                at = (*at, int(index))
            return self._fault(at, _plain(inner[1] if inner else message))


def as_table(value: object) -> dict[str, Any] | None:
    """`value` if TOML reads it as a table, else None."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def as_list(value: object) -> list[Any] | None:
    return cast("list[Any]", value) if isinstance(value, list) else None


@cache
def _fields(cls: type[Any]) -> dict[str, tuple[Any, bool]]:
    """Type and "is required" of each key of a struct's table."""
    hints = get_type_hints(cls, include_extras=True)
    if dataclasses.is_dataclass(cls):
        missing = dataclasses.MISSING
        needed = {
            f.name: f.default is missing is f.default_factory for f in dataclasses.fields(cls)
        }
    else:
        needed = {f.name: f.required for f in msgspec.structs.fields(cls)}
    return {key: (RANGES.get((cls, key), hints[key]), required) for key, required in needed.items()}


def _without_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, UnionType):
        return hint
    rest = [option for option in get_args(hint) if option is not NoneType]
    return rest[0] if len(rest) == 1 else hint


def _is_struct(hint: Any) -> bool:
    if not isinstance(hint, type):
        return False
    cls = cast("type[Any]", hint)
    return issubclass(cls, msgspec.Struct) or dataclasses.is_dataclass(cls)


def _is_table(value: Any) -> bool:
    return isinstance(value, (dict, list))


def _kind(value: object) -> str:
    """What a value is, in TOML's words; never the value itself, which may be a secret in the wrong place."""
    names: dict[type, str] = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
    }
    names |= {list: "a list", dict: "a table"}
    return names.get(type(value), "a date or time")


def _plain(message: str) -> str:
    """msgspec's message in the words of TOML."""
    words = {"`int`": "an integer", "`float`": "a number", "`str`": "a string"}
    words |= {"`bool`": "true or false", "`array`": "a list", "`object`": "a table"}
    for name, word in words.items():
        message = message.replace(name, word)
    return message[:1].lower() + message[1:]

"""The part of a checkpoint that a load takes: keys to include, exclude and rename, and a report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.state_tree import Entries

Choice = str | Callable[[str], bool]
Choices = Choice | Iterable[Choice] | None
Rename = Mapping[str, str] | Callable[[str], str] | None
_MODEL, _STATES = "model.", "optimizer.state."


@dataclass
class LoadReport:
    """The keys of a load on this rank. Pass a new one as ``report``.

    Attributes:
        loaded: Keys of the state dict that were loaded, with their keys in the checkpoint.
        left: Keys of the state dict that kept their values, as ``include`` and ``exclude`` ask.
        missing: Keys of the state dict that the checkpoint lacks. They kept their values.
        unused: Keys of the checkpoint that no rank loaded. Equal on all ranks.

    Example:
        >>> LoadReport().loaded
        {}
    """

    loaded: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


class Selection:
    """Which keys of a state dict a load takes, and under which names the checkpoint has them.

    A text is a key, or with ``*`` at its end the start of keys.
    """

    def __init__(
        self,
        include: Choices = None,
        exclude: Choices = None,
        rename: Rename = None,
        report: LoadReport | None = None,
    ) -> None:
        self._include = None if include is None else _list_choices("include", include)
        self._exclude = _list_choices("exclude", exclude)
        self._rename = rename
        self.report = LoadReport() if report is None else report
        self.is_partial = include is not None or exclude is not None

    def takes(self, key: str) -> bool:
        """Return whether a key is loaded. The state of a parameter is, if the parameter is."""
        included = self._include is None or any(one(key) for one in self._include)
        if not included or any(one(key) for one in self._exclude):
            return False
        name = key.removeprefix(_STATES).rpartition(".")[0]
        return not key.startswith(_STATES) or not any(one(_MODEL + name) for one in self._exclude)

    def stored_name(self, key: str) -> str:
        """Return the key in the checkpoint. States are named as their parameters."""
        found = self._find_name(key)
        if found == key and key.startswith(_STATES):
            name, _, part = key.removeprefix(_STATES).rpartition(".")
            renamed = self._find_name(_MODEL + name)
            if renamed.startswith(_MODEL):
                return f"{_STATES}{renamed.removeprefix(_MODEL)}.{part}"
        return found

    def _find_name(self, key: str) -> str:
        if self._rename is None:
            return key
        if callable(self._rename):
            found = self._rename(key)
            if not isinstance(found, str):
                raise CheckpointingException(f"rename must give a text for {key!r}, not {found!r}")
            return found
        if key in self._rename:
            return self._rename[key]
        starts = [old for old in self._rename if old.endswith("*") and key.startswith(old[:-1])]
        if not starts:
            return key
        old = max(starts, key=len)  # the most specific one
        return self._rename[old].removesuffix("*") + key.removeprefix(old[:-1])

    def choose(self, entries: Entries, keys: Collection[str]) -> Entries:
        """Return the leaves to load, by their names in the checkpoint. The others stay local."""
        chosen = Entries([], [], {}, list(entries.local))
        every = [shard.key for _, shard in entries.tensors]
        every += [one.unique_key for _, one in entries.objects]
        names = {key: self.stored_name(key) for key in [*every, *entries.common] if self.takes(key)}
        lacking = set(names.values()).difference(filter(keys.__contains__, names.values()))
        self.report.missing += [key for key, name in names.items() if name in lacking]
        self.report.loaded |= {key: name for key, name in names.items() if name not in lacking}

        def leave(key: str, path: Any, present: Any) -> None:
            chosen.local.append((path, present))
            self.report.left.append(key)

        for path, shard in entries.tensors:
            if (name := names.get(shard.key)) is None:
                leave(shard.key, path, shard.data)
            else:
                renamed = shard if name == shard.key else replace(shard, key=name)
                chosen.tensors.append((path, renamed))
        for path, one in entries.objects:
            if (name := names.get(one.unique_key)) is None:
                leave(one.unique_key, path, one.data)
            else:
                old = one.unique_key.removeprefix(one.key)
                chosen.objects.append((path, replace(one, key=name.removesuffix(old))))
        for key, (path, value) in entries.common.items():
            if (name := names.get(key)) is None:
                leave(key, path, value)
            elif name in chosen.common:
                raise CheckpointingException(f"two keys have the name {name!r} by rename")
            else:
                chosen.common[name] = (path, value)
        chosen.tensors.sort(key=lambda item: (item[1].key, item[1].global_offset))
        return chosen


def _list_choices(name: str, given: Choices) -> list[Callable[[str], bool]]:
    choices = [given] if isinstance(given, str) or callable(given) else list(given or ())
    found = []
    for one in choices:
        if callable(one):
            found.append(one)
        elif isinstance(one, str):
            found.append(one.__eq__ if not one.endswith("*") else _match_start(one[:-1]))
        else:
            raise CheckpointingException(f"{name} must have texts and functions, got {one!r}")
    return found


def _match_start(start: str) -> Callable[[str], bool]:
    return lambda key: key.startswith(start)

"""What a version promises: which breakages its number announces, and to whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from packaging.version import Version

from api_check.findings import Finding, Weight, cover
from monorepo.workspace import Workspace


def announces_breakage(old: Version, new: Version) -> bool:
    """Whether a step between two versions allows incompatible changes: 0.1 to 0.2, 1 to 2."""
    if new.major != old.major:
        return new.major > old.major
    return old.major == 0 and new.minor > old.minor


def judge(
    findings: Sequence[Finding],
    package: str,
    step: tuple[Version, Version],
    workspace: Workspace,
) -> list[Finding]:
    """Mark what the version covers, and add the dependants that accept both sides of a break."""
    breaks = any(one.weight is Weight.BREAKAGE for one in findings)
    if not breaks or not announces_breakage(*step):
        return list(findings)
    return [*cover(findings), *_unrevisited(package, step, workspace)]


def _unrevisited(
    package: str, step: tuple[Version, Version], workspace: Workspace
) -> Iterable[Finding]:
    old, now = step
    for name in workspace.direct_dependants(package):
        dependant = workspace[name]
        for requirement in dependant.requirements:
            if requirement.name != package:
                continue
            accepted = requirement.specifier
            if accepted.contains(now, prereleases=True) and accepted.contains(
                old, prereleases=True
            ):
                file = dependant.folder.relative_to(workspace.root) / "pyproject.toml"
                yield Finding(
                    package,
                    "DEPENDANT_RANGE",
                    name,
                    str(requirement),
                    f"has to leave out {old} or {now}, between which {package} broke",
                    file.as_posix(),
                    0,
                    Weight.BROKEN_PROMISE,
                )

"""Pages that mkdocs makes of other files and of the public docstrings."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from monorepo.changelog import fold, list_fragments
from monorepo.workspace import REPOSITORY, Distribution, load_workspace

RESULTS = {
    f"results/{name}.md": f"tools/docs/{name}.md"
    for name in ("benchmarks", "verdicts", "layouts", "faults", "scale")
}
MORE_GUIDES = {
    "guides/differences.md": "tools/docs/differences.md",
    "guides/names.md": "tools/docs/migration.md",
    "guides/codemod.md": "tools/migrate/README.md",
    "guides/main-job.md": "tools/pretrain/README.md",
}
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_LIST = re.compile(r"^(?![-*|#> ]|\d+\. )(.+)\n(?=[-*] |1\. )", re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):`~?([\w.]+)`")
_EXTERNAL = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^>]*>")


class Markdown(griffe.Extension):
    """Docstrings with reST roles, read as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Turn the roles of a docstring into links, and its example into griffe's format."""
        if obj.docstring is not None:
            text = _ROLE.sub(lambda role: _make_link(obj, role[1]), obj.docstring.value)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the pages of other files to the navigation, and keep the source of each page."""
    nav: list[Any] = config.nav or []
    pictures = sorted((REPOSITORY / "tools/docs").glob("*.png"))
    copied = {
        **MORE_GUIDES,
        **RESULTS,
        **{f"pictures/{one.name}": _shorten_path(one) for one in pictures},
    }
    names: dict[str, dict[str, str]] = {}
    packages = []
    for package in load_workspace(REPOSITORY).distributions.values():
        modules = _find_modules(package)
        names |= modules
        overview, changes = f"packages/{package.name}/index.md", f"changelogs/{package.name}.md"
        copied[overview] = _shorten_path(package.folder / "README.md")
        pages = [{name: f"reference/{name}.md"} for name in modules]
        packages.append({package.name: [overview, *pages, {"Changelog": changes}]})
    config.nav = [*nav, {"Packages": packages}, {"Results": list(RESULTS)}]
    config.extra |= {"names": names, "copied": copied}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages made of other files, and their pictures."""
    for uri, source in config.extra["copied"].items():
        files.append(File.generated(config, uri, abs_src_path=str(REPOSITORY / source)))
    for package in load_workspace(REPOSITORY).distributions.values():
        uri = f"changelogs/{package.name}.md"
        files.append(File.generated(config, uri, content=_read_changelog(package)))
    for module, names in config.extra["names"].items():
        content = _make_reference_page(module, names)
        files.append(File.generated(config, f"reference/{module}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Read a document as GitHub does: links between files of the repository, and lists."""
    uri, copied = page.file.src_uri, config.extra["copied"]
    source = copied.get(uri, _shorten_path(Path(config.docs_dir, uri)))
    pages = _shorten_path(Path(config.docs_dir))
    places = {file: place for place, file in copied.items()}

    def link(found: re.Match[str]) -> str:
        address = _read_address()
        target = found[1].removeprefix(f"{address}/raw/main/")
        path, _, heading = target.partition("#")
        if not path or (target == found[1] and re.match(r"[a-z]+:", path)):
            return found[0]
        folder = posixpath.dirname(source) if target == found[1] else ""
        file = posixpath.normpath(posixpath.join(folder, path))
        if file.startswith(f"{pages}/"):
            place = file.removeprefix(f"{pages}/")
        else:
            file = file if file in places else f"{file}/README.md"
            if file not in places:
                return f"]({address}/blob/main/{file.removesuffix('/README.md')})"
            place = places[file]
        return (
            f"]({posixpath.relpath(place, posixpath.dirname(uri))}{'#' * bool(heading)}{heading})"
        )

    return "".join(
        part if part.lstrip().startswith("```") else _LIST.sub(r"\1\n\n", _LINK.sub(link, part))
        for part in _FENCED.split(markdown.replace("<details>", "<details markdown>"))
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Refuse a reference page that lacks a name of its module."""
    module = page.file.src_uri.removeprefix("reference/").removesuffix(".md")
    names = config.extra["names"].get(module, {})
    lacking = [
        name
        for name, here in names.items()
        if here == module and f'id="{module}.{name}"' not in html
    ]
    if lacking:
        raise PluginError(f"{module}: no docstring is shown for {', '.join(lacking)}")
    return html


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Refuse a page that would load something from another server."""
    loaded = [tag for tag in _EXTERNAL.findall(output) if 'rel="canonical"' not in tag]
    if loaded:
        raise PluginError(f"{page.file.src_uri} loads from another server: {loaded[0]}")
    return output


def _find_modules(package: Distribution) -> dict[str, dict[str, str]]:
    """The modules that users import by name: their names, and the page that shows each name."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(package.source.rglob("*.py")):
        parts = file.relative_to(package.source).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        above = found.get(package.module, {})
        # A module of the same name hides a name from griffe: its page shows the name.
        if module in (f"{package.module}.{name}" for name in above):
            above[file.parent.name] = module
        if names := _read_exports(file):
            found[module] = {name: above.get(name, module) for name in names}
    return found


def _read_exports(file: Path) -> list[str]:
    """The names that ``__all__`` of a source lists, without the version."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if name != "__version__"]
    return []


def _make_reference_page(module: str, names: Mapping[str, str]) -> str:
    """A page for mkdocstrings of a module, with links to names on other pages."""
    own = "".join(f"        - {name}\n" for name, here in names.items() if here == module)
    elsewhere = [f"[`{name}`][{at}.{name}]" for name, at in names.items() if at != module]
    also = f"Also here: {', '.join(elsewhere)}.\n\n" if elsewhere else ""
    return (
        f"::: {module}\n    options:\n      heading_level: 1\n      show_root_heading: true\n"
        f"      members:\n{own or '        []'}\n\n{also}"
    )


def _read_changelog(package: Distribution) -> str:
    """The changelog of a package, with the changes of the next release."""
    if not list_fragments(package):
        return (package.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    today = date.today()
    text = fold(package, package.version, today)
    return text.replace(f"## {package.version} ({today.isoformat()})", "## Unreleased")


def _shorten_path(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def _read_address() -> str:
    """The address of the repository."""
    text = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    (address,) = re.findall(r"^url: (\S+)$", text, re.MULTILINE)
    return str(address)


def _make_link(obj: griffe.Object, name: str) -> str:
    """A link to a name of these packages as seen from an object, else the name alone."""
    first, _, rest = name.partition(".")
    if first == "mcore":
        return f"[`{name}`][{name}]"
    try:
        path = obj.resolve(first)
    except griffe.NameResolutionError:
        return f"`{name}`"
    return (
        f"[`{name}`][{path}{'.' * bool(rest)}{rest}]" if path.startswith("mcore.") else f"`{name}`"
    )

"""The built site in a real browser: no page may scroll sideways or log an error.

``hatch run docs-look`` opens every page on a phone and on a desktop. With ``--pictures FOLDER`` it
also saves screenshots there, light and dark.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

BUILT = Path(__file__).parents[2] / "build/site"
SIZES = ((360, 800), (1440, 1000))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the faults of the pages. Returns 1 if there are any."""
    parser = argparse.ArgumentParser(prog="hatch run docs-look", description=__doc__)
    parser.add_argument(
        "pages", nargs="*", help="such as guides/slow-rank, or . for the start page"
    )
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="save screenshots there")
    options = parser.parse_args(arguments)
    built = [
        file.parent.relative_to(BUILT).as_posix() for file in sorted(BUILT.rglob("index.html"))
    ]
    if not built:
        parser.error(f"there is nothing in {BUILT}: hatch run docs-build")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(BUILT))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = _start_browser()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            pages = options.pages or built
            found = [
                problem
                for page in pages
                for problem in _check_page(browser, address, page, options.pictures)
            ]
        finally:
            browser.quit()
            server.shutdown()
    print("\n".join(found) or f"{len(pages)} pages: in order")
    return int(bool(found))


def _start_browser() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    for option in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # If the system has a driver, selenium does not download one.
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def _check_page(
    browser: webdriver.Chrome, address: str, page: str, pictures: Path | None
) -> Iterator[str]:
    """The faults of a page at any size, a line each."""
    for width, height in SIZES:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(f"{address}/{page}/")
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        if wide > width:
            yield f"{page}: {wide} pixels wide on a screen of {width}"
        yield from (f"{page}: {one['message']}" for one in _read_log(browser))
        if pictures is not None:
            for scheme in ("light", "dark"):
                _take_picture(
                    browser, scheme, pictures / f"{page.replace('/', '_')}-{width}-{scheme}.png"
                )


def _read_log(browser: webdriver.Chrome) -> list[dict[str, str]]:
    entries: list[dict[str, str]] = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return entries


def _take_picture(browser: webdriver.Chrome, scheme: str, file: Path) -> None:
    """Save a picture of the page in a colour scheme."""
    scheme_of_the_system = [{"name": "prefers-color-scheme", "value": scheme}]
    address = browser.current_url
    browser.get("about:blank")
    # A page stores its scheme, at any time.
    kept = {"origin": address, "storageTypes": "local_storage"}
    browser.execute_cdp_cmd("Storage.clearDataForOrigin", kept)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme_of_the_system})
    browser.get(address)
    file.parent.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(file))


if __name__ == "__main__":
    sys.exit(main())

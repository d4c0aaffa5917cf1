"""The built site in a real browser: no page may scroll sideways or log an error.

``hatch run docs-look`` opens every page at the size of a phone and of a desktop.
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
    parser.parse_args(arguments)
    pages = [
        file.parent.relative_to(BUILT).as_posix() for file in sorted(BUILT.rglob("index.html"))
    ]
    if not pages:
        parser.error(f"there is nothing in {BUILT}: hatch run docs-build")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(BUILT))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = _start_browser()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            found = [problem for page in pages for problem in _check_page(browser, address, page)]
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


def _check_page(browser: webdriver.Chrome, address: str, page: str) -> Iterator[str]:
    """The faults of a page at any size, a line each."""
    for width, height in SIZES:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(f"{address}/{page}/")
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        if wide > width:
            yield f"{page}: {wide} pixels wide on a screen of {width}"
        log: list[dict[str, str]] = browser.get_log("browser")  # type: ignore[no-untyped-call]
        yield from (f"{page}: {one['message']}" for one in log)


if __name__ == "__main__":
    sys.exit(main())

"""Drive headless Chromium over a built site, without a driver: a page of this module controls frames of the site.

The page is served beside the site, so it may read the documents in its frames. It writes its result into its own
text, which Chromium prints with --dump-dom.
"""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

PAGE = """<!doctype html>
<meta charset="utf-8">
<style>body {{ margin: 0 }} iframe {{ border: 0; width: {width}px; height: {height}px }}</style>
<iframe id="frame"></iframe>
<script>
localStorage.theme = "{theme}";
const frame = document.getElementById("frame");
const errors = [];
const sleep = ms => new Promise(done => setTimeout(done, ms));
async function until(what, condition) {{
  for (let i = 0; i < 400; i++) {{
    const value = condition();
    if (value) return value;
    await sleep(50);
  }}
  throw new Error("timeout: " + what);
}}
function loaded() {{ return new Promise(done => frame.addEventListener("load", done, {{once: true}})); }}
async function open(url) {{
  const done = loaded();
  frame.src = url;
  await done;
  frame.contentWindow.addEventListener("error", event => errors.push(String(event.message)));
  return frame.contentDocument;
}}
async function main() {{
  {script}
}}
main().then(value => ({{value, errors}}), error => ({{error: String(error), errors}})).then(result => {{
  const text = document.createElement("pre");
  text.id = "result";
  text.textContent = JSON.stringify(result);
  {hide}document.body.append(text);
}});
</script>
"""


class Browser:
    """Chromium, and the server of a site on 127.0.0.1."""

    def __init__(self, site: Path, base: str, pages: dict[str, str], missing: list[str]) -> None:
        self.site = site
        self.base = base
        self._pages = pages
        self.missing = missing  # paths that the site asked for and that do not exist

    def run(self, script: str, *, width: int = 1280, height: int = 900, theme: str = "light") -> Any:
        """Run JavaScript in the controlling page, and return the value that it returns.

        The script may call ``open(url)``, ``loaded()`` and ``until(what, condition)``, and use ``frame``.
        """
        address = self._serve(script, width, height, theme)
        dom = self._chromium("--dump-dom", address).stdout
        match = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
        assert match is not None, dom[-2000:]
        result = json.loads(unescape(match[1]))
        assert "error" not in result and not result["errors"], result
        return result["value"]

    def screenshot(self, page: str, file: Path, *, width: int, height: int, theme: str) -> None:
        """Write a picture of a page, as it looks in a window of this size."""
        address = self._serve(f"await open({json.dumps('/' + page)})", width, height, theme, hidden=True)
        # A window of Chromium is at least 500 pixels wide; the frame in it may be narrower.
        window = f"--window-size={max(width, 500)},{height}"
        self._chromium(f"--screenshot={file}", window, "--hide-scrollbars", address)
        assert file.stat().st_size > 5000

    def _serve(self, script: str, width: int, height: int, theme: str, hidden: bool = False) -> str:
        hide = "text.hidden = true; " if hidden else ""
        name = f"/__control{len(self._pages)}.html"
        self._pages[name] = PAGE.format(script=script, width=width, height=height, theme=theme, hide=hide)
        return self.base + name

    def _chromium(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as profile:
            command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
            command += [f"--user-data-dir={profile}", "--virtual-time-budget=30000", "--timeout=60000"]
            done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done


@contextmanager
def browser(site: Path) -> Iterator[Browser]:
    """Serve a site on 127.0.0.1, and yield a browser for it."""
    assert shutil.which("chromium"), "chromium is not installed; run make docs-browser"
    pages: dict[str, str] = {}
    missing: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in pages:
                super().do_GET()
                return
            body = pages[self.path].encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

        def send_error(self, code: int, *arguments: Any, **named: Any) -> None:
            missing.append(f"{code} {self.path}")
            super().send_error(code, *arguments, **named)

    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield Browser(site, f"http://127.0.0.1:{server.server_port}", pages, missing)
        server.shutdown()
        thread.join()

"""Search, links and layout of the site in Chromium, at the width of a phone and of a desktop, light and dark."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser
from site_pages import read_site

SITE = Path(os.environ["SHOESTRING_SITE"])
PHONE, DESKTOP = (390, 844), (1280, 900)
# The pages whose pictures people look at: text, code, tables, figures, and each kind of reference.
PICTURES = (
    "index.html",
    "quickstart.html",
    "guides/optimizers.html",
    "api/python/shoestring.html",
    "api/cpp/nn.html",
    "api/operators.html",
    "cli.html",
    "benchmarks.html",
    "internals/architecture.html",
)

SEARCH = """
  const home = await open("/index.html");
  const field = await until("search field", () => home.querySelector("input[name=q]"));
  field.value = "linear_cross_entropy";
  let done = loaded();
  field.form.requestSubmit();
  await done;
  const links = () => [...frame.contentDocument.querySelectorAll("#search-results li a")];
  await until("results", () => links().length > 3);
  await until("the end of the search", () => /found|matching/i.test(
    frame.contentDocument.querySelector("#search-results").innerText));
  const named = links().filter(link => link.textContent.includes("linear_cross_entropy"));
  done = loaded();
  named[0].click();
  await done;
  const found = frame.contentWindow.location;
  const target = found.hash && frame.contentDocument.getElementById(decodeURIComponent(found.hash.slice(1)));
  return {
    results: links().length, named: named.length, path: found.pathname, hash: found.hash,
    target: Boolean(target), text: frame.contentDocument.body.innerText.includes("linear_cross_entropy"),
  };
"""

# The documents of all pages, one after the other in one frame: is anything wider than the window?
WIDTHS = """
  const wide = [];
  for (const url of PAGES) {
    const page = await open(url);
    const root = page.documentElement;
    if (root.scrollWidth > frame.clientWidth) wide.push(url + ": " + root.scrollWidth);
    for (const image of page.images)
      if (!image.naturalWidth) wide.push(url + ": " + image.src + " shows nothing");
  }
  return wide;
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser(SITE) as opened:
        yield opened


def test_search_finds_a_name_and_its_result_opens(chromium: Browser) -> None:
    found = chromium.run(SEARCH)
    assert found["named"] >= 2
    assert found["text"]
    assert (SITE / found["path"].lstrip("/")).is_file()
    assert found["target"] or not found["hash"]


@pytest.mark.parametrize(("width", "height"), [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_no_page_is_wider_than_the_window(chromium: Browser, width: int, height: int) -> None:
    pages = [f"/{name}" for name in read_site(SITE)]
    assert len(pages) > 40
    wide = []
    for start in range(0, len(pages), 10):
        script = WIDTHS.replace("PAGES", json.dumps(pages[start : start + 10]))
        wide += chromium.run(script, width=width, height=height)
    assert wide == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_text_is_legible(chromium: Browser, width: int, height: int, theme: str) -> None:
    """Text, code and links of the quickstart differ enough from their background, by the WCAG's ratio of 4.5."""
    script = """
      const page = await open("/quickstart.html");
      const numbers = text => text.match(/[\\d.]+/g).map(Number);
      const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
        .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
      const style = element => frame.contentWindow.getComputedStyle(element);
      const back = element => {
        for (; element; element = element.parentElement) {
          const color = numbers(style(element).backgroundColor);
          if (color.length < 4 || color[3] > 0) return color;
        }
        return [255, 255, 255];
      };
      const bad = [];
      for (const element of page.querySelectorAll("article p, article li, article a, article pre span, article h2")) {
        if (!element.innerText || !element.innerText.trim()) continue;
        const pair = [light(numbers(style(element).color)), light(back(element))].sort((a, b) => b - a);
        const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
        if (ratio < 4.5) bad.push([element.className, element.innerText.slice(0, 30), ratio]);
      }
      return {bad, dark: page.body.dataset.theme};
    """
    found = chromium.run(script, width=width, height=height, theme=theme)
    assert found["dark"] == theme
    assert found["bad"] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_pictures(chromium: Browser, width: int, height: int, theme: str) -> None:
    folder = SITE.parent / "screenshots"
    folder.mkdir(exist_ok=True)
    for page in PICTURES:
        name = page.removesuffix(".html").replace("/", "_")
        file = folder / f"{name}-{width}-{theme}.png"
        chromium.screenshot(page, file, width=width, height=height, theme=theme)


def test_everything_that_pages_asked_for_exists(chromium: Browser) -> None:
    """Runs last: the server has seen the requests of all pages above. A browser asks for a favicon unasked."""
    assert [line for line in chromium.missing if not line.endswith("/favicon.ico")] == []

"""Test report.html and compare.html: their facts, their order, and that hostile names stay text."""

from __future__ import annotations

import fnmatch
import html
import itertools
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from build_folder import REPOSITORY
from report_helpers import MB, PARTS, Page, write_run
from shoestring.training.report import page as report_page
from shoestring.training.report import plots
from shoestring.training.report.colours import COLOURS, LIGHT
from shoestring.training.report.plots import megabytes, shorten, smooth, thin
from shoestring.training.report.write import read_run, write_comparison, write_report, write_sections


def report(folder: Path) -> Page:
    write_report(folder)
    return Page((folder / "report.html").read_text("utf-8"))


def compared(out: Path, *folders: Path) -> Page:
    write_comparison(list(folders), out)
    return Page((out / "compare.html").read_text("utf-8"))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Return a run with plain PyTorch, and one of shoestring that takes less time and memory."""
    plain = write_run(
        tmp_path / "plain",
        summary={"baseline": True, "val_loss": 3.508, "tokens_per_second": 4028.0, "peak_memory": 3061 * MB},
    )
    ours = write_run(
        tmp_path / "ours",
        fingerprint={"lr": 0.002},
        memory=[*PARTS[:4], ("offload", "weights and gradients once more", 20 * MB, 21 * MB), *PARTS[4:]],
    )
    return plain, ours


def test_a_report_has_every_fact(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run"))
    assert page.text("title") == "train with shoestring: run"
    assert page.text("h1") == "train with shoestring run"
    assert page.all("p")[0][1] == "40 steps, 327,680 tokens, 2.50 M trained parameters, 61 s"
    pairs = page.pairs()
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert pairs["Validation loss"] == [
        "3.5000",
        "training loss 3.2500",
        f"training loss {first:.4f} at step 1",
        "best validation loss 3.4375",
    ]
    assert pairs["Speed"] == ["10,527 tokens/s", "median over steps", "waited for data 1.25 s of 61 s"]
    assert pairs["Peak memory"] == ["842 MB", "of the process"]
    options = {"batch_size": "8", "lr": "0.004", "betas": "0.9, 0.95", "optimizer_arg": "–", "compile": "no"}
    assert {name: pairs[name] for name in options} == {name: [value] for name, value in options.items()}
    assert "data" in pairs and pairs["data"] == ["2 files, 1.75 MB"]
    assert pairs["command"] == ["shoestring train"] and pairs["PyTorch"] == ["2.11.0+cpu"]
    assert pairs["device"] == ["cpu"] and pairs["CPU threads"] == ["2"]
    assert page.rows() == [
        ["part and formula", "by formula", "measured"],
        *([name + formula, megabytes(expected), megabytes(size)] for name, formula, expected, size in PARTS),
        ["peak of the process" + "high-water mark of the resident set", "–", "842"],
    ]
    assert (tmp_path / "run/report.png").read_bytes()[:4] == b"\x89PNG"


def test_a_report_of_a_baseline_without_validation(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        command="finetune",
        summary={"baseline": True, "val_loss": None, "best_val_loss": None},
    )
    page = report(run)
    assert page.text("h1") == "finetune with plain PyTorch run"
    assert page.pairs()["Training loss"][0] == "3.2500" and "Validation loss" not in page.pairs()


def test_a_report_of_a_run_on_an_accelerator(tmp_path: Path) -> None:
    device = {
        "device": "cuda:1",
        "device_reserved": 900 * MB,
        "device_utilization": 62.5,
        "peak_memory": 750 * MB,
    }
    run = write_run(tmp_path / "run", summary=device, metrics={"device": 600 * MB})
    page = report(run)
    assert page.pairs()["Peak memory"] == ["750 MB", "of cuda:1", "peak of the process 842 MB"]
    assert page.pairs()["Speed"][-1] == "device busy 62 %"
    peaks = [(row[0].partition(" on ")[0], row[2]) for row in page.rows()[-3:]]
    assert [size for _, size in peaks] == ["750", "900", "842"] and peaks[1][0] == "reserved"
    assert "MB of process: 800" in labels(page)[3] and "MB of cuda:1: 600" in labels(page)[3]


def test_a_report_of_an_older_or_shorter_run(tmp_path: Path) -> None:
    """Fields that not every run has may be missing, and one step without memory parts is enough."""
    run = write_run(tmp_path / "run", steps=1, memory=[], metrics={"grad_norm": float("nan")})
    summary = json.loads((run / "summary.json").read_text())
    needed = ("baseline", "train_loss", "val_loss", "tokens_per_second", "peak_memory", "memory")
    (run / "summary.json").write_text(json.dumps({name: summary[name] for name in needed}))
    page = report(run)
    assert page.all("p")[0][1] == "" and page.rows()[1][0].startswith("peak of the process")


def test_order_of_a_report(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run"))
    assert [text for _, text in page.all("h2")] == ["Curves", "Memory by part", "Options", "Environment"]
    places = {tag: number for number, (tag, _) in reversed(list(enumerate(page.elements)))}
    assert places["h1"] < places["dl"] < places["h2"] < places["svg"] < places["table"]
    titles = [text for _, text in page.all("strong")]
    assert titles == [
        "Loss, nats per token",
        "Gradient norm",
        "Tokens/s of each step",
        "Memory in use after each step, MB",
        "Memory at the peak, MB",
    ]


def test_a_comparison_has_every_fact(pair: tuple[Path, Path], tmp_path: Path) -> None:
    page = compared(tmp_path, *pair)
    assert (
        page.text("title") == "Comparison of runs" and page.text("h1") == "Comparison of runs plain and ours"
    )
    assert [text for _, text in page.all("h2")] == [
        "ours beside plain", "Figures", "Curves", "Memory by part", "Options and environment",
    ]  # fmt: skip
    pairs = page.pairs()
    assert pairs["Validation loss"] == ["0.998x", "3.5000, plain 3.5080"]
    assert pairs["Speed"] == ["2.61x", "10,527 tokens/s, plain 4,028 tokens/s"]
    assert pairs["Peak memory"] == ["0.28x", "842 MB, plain 3,061 MB"]
    rows = {row[0]: row[1:] for row in page.rows()}
    assert rows["plain"] == ["3.2500", "3.5080", "4,028", "3,061", "1.000", "1.000", "1.000"]
    assert rows["ours"] == ["3.2500", "3.5000", "10,527", "842", "0.998", "0.275", "2.614"]
    assert rows["activations"] == ["38.9by formula 38.8"] * 2 and rows["program"] == ["700", "700"]
    assert rows["offload"] == ["–", "21.0by formula 20.0"], "a part that only the second run has"
    assert rows["peak"] == ["3,061", "842"]
    names = [row[0] for row in page.rows()]
    differ, everywhere = names.index("lr"), names.index("command")
    assert page.rows()[differ - 1] == ["option", "plain", "ours"] and rows["lr"] == ["0.004", "0.002"]
    assert names[differ + 1 : everywhere] == [""], "only options that differ come before the environment"
    assert rows["data"] == ["2 files, 1.75 MB"] * 2 and rows["compile"] == ["no", "no"]
    assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"


def test_ratios_of_a_run_without_validation_use_the_training_loss(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    other = write_run(tmp_path / "other", summary={"val_loss": None, "train_loss": 6.5})
    page = compared(tmp_path, *pair, other)
    assert page.text("h1") == "Comparison of runs plain, ours and other"
    assert page.pairs()["Training loss"] == ["2.000x", "6.5000, plain 3.2500"]
    assert "Validation loss" not in page.pairs(), "one kind of loss for all runs"
    zero = write_run(tmp_path / "zero", summary={"val_loss": 0.0, "tokens_per_second": 0})
    pairs = compared(tmp_path, zero, pair[1]).pairs()
    assert pairs["Speed"][0] == pairs["Validation loss"][0] == "–"


def test_sections_have_their_own_headings(pair: tuple[Path, Path], tmp_path: Path) -> None:
    tables = write_sections(tmp_path, "shoestring beside plain PyTorch", {"train": [*pair], "tune": [*pair]})
    page = Page((tmp_path / "report.html").read_text("utf-8"))
    assert page.text("h1") == page.text("title") == "shoestring beside plain PyTorch"
    assert [text for _, text in page.all("h2")] == ["train", "tune"]
    assert [text for _, text in page.all("h3")].count("ours beside plain") == 2
    assert tables["tune"][1][0] == "plain" and (tmp_path / "tune.png").exists()
    check_page(page, (tmp_path / "report.html").read_text("utf-8"))


# Text that breaks out of an element, an attribute, a style sheet, a template or a formula of matplotlib, if it is
# not escaped. The name of a folder has no slash.
HOSTILE = [
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    "<script>alert(1)",
    "}<style>*{display:none}",
    "{{ 7 * 7 }}{% raw %}",
    r"$\frac{$",
    "_hidden",
    "--><!--",
    "]]><![CDATA[",
    "&lt;b&gt;",
    "a\x01b\x7f\n",
    "url(http:evil.example)",
    "é 漢 \u202e rtl",
    "x" * 200,
]
CLOSING = "</title></style></svg></script><script>alert(1)</script>"


def hostile_runs(folder: Path, texts: list[str], closing: str) -> list[Path]:
    """Write one run per text, and put the texts wherever a file of a run holds text."""
    runs = []
    for name in texts:
        parts = [
            (f"{part}{closing}", f"{text}{closing}", *sizes) for text, (part, _, *sizes) in zip(texts, PARTS)
        ]
        options = {f"{text}{closing}": f"{text}{closing}" for text in texts}
        run = write_run(
            folder / name,
            command=f"{texts[0]}{closing}",
            memory=parts,
            summary={
                "device": f"{texts[1]}{closing}",
                "device_reserved": 900 * MB,
                "host_peak_memory": 850 * MB,
            },
            fingerprint=options | {"list": [closing, [closing]], "map": {closing: closing}, "own": name},
            metrics={"device": 5 * MB},
        )
        record = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(record | {"torch": closing}))
        runs.append(run)
    return runs


def test_hostile_text_changes_no_element(tmp_path: Path) -> None:
    """A page with hostile names, paths and options has the elements and attributes of a page with tame ones."""
    pages = {}
    for kind, texts, closing in (
        ("tame", [f"name{number}" for number in range(len(HOSTILE))], "end"),
        ("hostile", HOSTILE, CLOSING),
    ):
        runs = hostile_runs(tmp_path / kind, texts, closing)
        pages[kind] = [report(runs[0]), compared(tmp_path, *runs)]
        check_page(pages[kind][0], (runs[0] / "report.html").read_text("utf-8"))
        check_page(pages[kind][1], (tmp_path / "compare.html").read_text("utf-8"))
    for tame, hostile in zip(pages["tame"], pages["hostile"]):
        assert shape(tame) == shape(hostile)
        for text in (HOSTILE[0], CLOSING):
            assert text in hostile.text("main") or text in hostile.text("title")
    single, both = pages["hostile"]
    assert single.text("title") == f"{HOSTILE[0]}{CLOSING} with shoestring: {HOSTILE[0]}"
    names = [row[0] for row in both.rows()][1:]
    assert names[: len(HOSTILE)] == [" ".join(text.split()) for text in HOSTILE]
    shown = " ".join(text for _, text in both.all("text"))
    for text in HOSTILE:
        assert " ".join(shorten(text).split()) in shown, "a plot names each run"
        assert text in labels(both)[1], "the words of a plot name each run"


def labels(page: Page) -> list[str]:
    return [attributes["aria-label"] for attributes, _ in page.all("svg")]


def shape(page: Page) -> Counter[tuple[str, ...]]:
    """Count the elements of a page by tag and names of attributes, outside of plots, whose ticks may differ."""
    inside = {"g", "path", "use", "text", "defs", "clippath", "rect"}
    return Counter((tag, *sorted(attributes)) for tag, attributes in page.elements if tag not in inside)


def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a\udcffb")
    assert report(run).text("h1") == "train with shoestring a?b"
    other = write_run(tmp_path / "other")
    assert "a?b" in compared(tmp_path, run, other).text("h1")


def check_page(page: Page, text: str) -> None:
    """Assert that a page is accessible, is complete in itself, and runs no script."""
    [(root, _)] = page.all("html")
    assert root["lang"] == "en" and page.text("title")
    metas = [attributes for attributes, _ in page.all("meta")]
    assert any(meta.get("name") == "viewport" for meta in metas)
    assert any(meta.get("http-equiv") == "Content-Security-Policy" for meta in metas)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {
        "script",
        "link",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "img",
        "image",
        "foreignobject",
    }
    assert tags == {
        "html", "head", "meta", "title", "style", "body", "main", "footer", "h1", "h2", "span", "small",
        "dl", "div", "dt", "dd", "figure", "figcaption", "strong", "ul", "li", "table", "caption", "thead",
        "tbody", "tr", "th", "td", "svg", "g", "path", "use", "text", "defs", "clippath", "rect",
    } | (tags & {"p", "h3", "details", "summary"})  # fmt: skip

    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(below <= above + 1 for above, below in itertools.pairwise(levels)), levels
    for attributes, _ in page.all("th"):
        assert attributes["scope"] in ("row", "col")
    assert len(page.all("caption")) == len(page.all("table")) > 0
    assert page.all("svg")
    for attributes, _ in page.all("svg"):
        assert attributes["role"] == "img" and re.search(r"\d", attributes["aria-label"])

    identities = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(identities)) == len(identities)
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "src", "xlink:href"):
                assert value.startswith("#") and value[1:] in identities
            if name == "clip-path":
                assert re.fullmatch(r"url\(#(.*)\)", value)[1] in identities
            if name == "style":
                assert re.fullmatch(r"[a-z0-9:;,. #()%-]*", value) and "url" not in value, value
                properties = re.findall(r"var\(--([\w-]+)\)", value)
                assert set(properties) <= COLOURS.keys() | {"key"}
                assert not re.search("#[0-9a-f]{3}", value), f"{value} does not follow the theme"
    sheet = page.text("style")
    assert "@import" not in sheet and "url(" not in sheet and "prefers-color-scheme: dark" in sheet
    assert set(re.findall(r"var\(--([\w-]+)\)", sheet)) <= COLOURS.keys() | {"key", "columns"}
    assert len(text) < 500_000


def test_pages_are_accessible_and_complete(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for folder in pair:
        check_page(report(folder), (folder / "report.html").read_text("utf-8"))
    check_page(compared(tmp_path, *pair), (tmp_path / "compare.html").read_text("utf-8"))


def test_words_of_plots_have_the_numbers(pair: tuple[Path, Path], tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (pair[1] / "metrics.jsonl").read_text().splitlines()]
    loss, norm, speed, memory, parts = labels(report(pair[1]))
    assert f"training loss: {rows[0]['loss']:.4g} at step 1, {rows[-1]['loss']:.4g} at step 40" in loss
    assert "validation loss: 3.6 at step 10, 3.525 at step 40" in loss
    assert norm.startswith(f"Gradient norm: {rows[0]['grad_norm']:.3g} at step 1")
    assert f"largest {max(row['tokens_per_second'] for row in rows):,.0f}" in speed
    assert memory.startswith("MB of process: 800 at step 1")
    assert "activations 38.9 MB (by formula 38.8)" in parts and "program 700 MB," in parts
    loss, speed, memory = labels(compared(tmp_path, *pair))
    assert "plain, training loss: " in loss and "ours, validation loss: " in loss
    assert (
        speed == "Tokens/s: plain 4,028, ours 10,527."
        and memory == "Peak memory in MB: plain 3,061, ours 842."
    )


def test_pages_of_long_runs_are_small(tmp_path: Path) -> None:
    long = write_run(tmp_path / "run0", steps=20_000)
    for number in range(1, 8):
        shutil.copytree(long, tmp_path / f"run{number}")
    write_report(long)
    compared(tmp_path, *(tmp_path / f"run{number}" for number in range(8)))
    sizes = [path.stat().st_size for path in (long / "report.html", tmp_path / "compare.html")]
    assert max(sizes) < 250_000, sizes


def test_thin_keeps_peaks_and_ends() -> None:
    steps = [float(step) for step in range(1, 10_001)]
    values = [1.0] * 10_000
    values[1234], values[7777], values[0], values[-1] = 9.0, -9.0, 2.0, 3.0
    short, kept = thin(steps, values, 100)
    assert len(short) == len(kept) <= 100
    assert (1235.0, 9.0) in zip(short, kept) and (7778.0, -9.0) in zip(short, kept)
    assert (short[0], kept[0], short[-1], kept[-1]) == (1.0, 2.0, 10_000.0, 3.0)
    assert short == sorted(set(short))
    assert thin(steps[:100], values[:100], 100) == (steps[:100], values[:100])


def test_steps_that_loss_scaling_skipped_leave_a_gap(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[3]["grad_norm"], rows[4]["grad_norm"] = float("inf"), float("nan")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finite = [row["grad_norm"] for row in rows if abs(row["grad_norm"]) < 9]
    assert len(finite) == 38 and f"largest {max(finite):.3g}." in labels(report(run))[1]


def test_smooth_is_an_average_without_bias() -> None:
    assert smooth([2.0] * 50) == pytest.approx([2.0] * 50)
    assert smooth([1.0, 3.0]) == [1.0, 3.0], "a run of few steps is not smoothed"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "–"),
        (0, "0"),
        (5e6, "5.00"),
        (12.34e6, "12.3"),
        (99.96e6, "100"),
        (3.061e9, "3,061"),
        (4e5, "0.400"),
    ],
)
def test_megabytes(count: float | None, text: str) -> None:
    assert megabytes(count) == text


def test_names_in_plots_are_short() -> None:
    assert shorten("run") == "run" and shorten("a\nb\x01") == "a\ufffdb\ufffd"
    long = shorten("first" + "x" * 100 + "last")
    assert len(long) <= 36 and long.startswith("first") and long.endswith("last")


def test_a_legend_of_a_png_names_each_run() -> None:
    """The legend of matplotlib leaves out labels that begin with an underscore, and reads formulas."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    for name in ("_hidden", r"$\frac{$"):
        axes.plot([1, 2], label=plots.legend_label(name))
    plots._legend(axes)
    assert [text.get_text().strip() for text in axes.get_legend().get_texts()] == ["_hidden", r"$\frac{$"]
    figure.draw_without_rendering()


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast(theme: int) -> None:
    """Text has the contrast of WCAG 2.2 AA, which is 4.5, and bars and lines that of graphics, which is 3."""
    colours = {part: luminance(pair[theme]) for part, pair in COLOURS.items()}
    for background in ("paper", "panel"):
        for part in COLOURS.keys() - {"paper", "panel", "line"}:
            light, dark = sorted((colours[background], colours[part]), reverse=True)
            least = 4.5 if part in ("ink", "muted") else 3 if background == "paper" else 0
            assert (light + 0.05) / (dark + 0.05) >= least, (background, part)


def test_light_colours_differ() -> None:
    assert len(set(LIGHT.values())) == len(LIGHT)


def test_templates_are_part_of_the_package() -> None:
    """The wheel takes files other than Python from the patterns of package-data."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    [patterns] = re.findall(r"\[tool\.setuptools\.package-data\]\nshoestring = (\[.*\])", text)
    package = REPOSITORY / "python/shoestring"
    files = [path for path in (package / "training/report/templates").iterdir() if path.is_file()]
    assert len(files) >= 4
    for path in files:
        assert any(fnmatch.fnmatch(str(path.relative_to(package)), each) for each in json.loads(patterns)), (
            path
        )


def test_a_template_without_a_value_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jinja2 = pytest.importorskip("jinja2")
    monkeypatch.setattr(report_page, "options", lambda run: jinja2.StrictUndefined(name="options"))
    with pytest.raises(jinja2.UndefinedError):
        report_page.run_page(read_run(write_run(tmp_path / "run")))


# The smallest window of Chromium is wider than a phone, so the page under test is in a frame.
FRAME = (
    '<!doctype html><title></title><iframe width="390" height="844" style="border: 0" srcdoc="{}"></iframe>'
)
MEASURE = """<script>
const wide = [...document.querySelectorAll("body, body *")].filter(each =>
  each.getBoundingClientRect().right > innerWidth + 0.5 && !each.parentElement.closest(".scroll, svg"));
parent.document.title = [innerWidth, document.documentElement.scrollWidth, document.querySelectorAll("svg").length,
  matchMedia("(prefers-color-scheme: dark)").matches, wide.map(each => each.outerHTML.slice(0, 80))].join("|");
</script>"""


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_does_not_scroll_sideways(tmp_path: Path, dark: bool) -> None:
    """At 390 pixels, no element but the content of tables ends beyond the window, with long names too."""
    name = "a" + "_very-long.name" * 12
    runs = hostile_runs(tmp_path, [f"{name}{number}" for number in range(6)], "m" * 150)
    write_report(runs[0])
    write_comparison(runs, tmp_path)
    for file, count in ((runs[0] / "report.html", 5), (tmp_path / "compare.html", 3)):
        page = re.sub(r"<meta http-equiv[^>]*>", "", file.read_text("utf-8"))  # it forbids scripts
        page = page.replace("<details>", "<details open>").replace("</body>", MEASURE + "</body>")
        frame = tmp_path / "frame.html"
        frame.write_text(FRAME.format(html.escape(page)))
        command = [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--dump-dom",
        ]
        command += [f"--user-data-dir={tmp_path / 'profile'}", f"file://{frame}"]
        command[1:1] = ["--blink-settings=preferredColorScheme=0"] if dark else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        found = done.stdout.partition("<title>")[2].partition("</title>")[0]
        assert found == f"390|390|{count}|{str(dark).lower()}|", found

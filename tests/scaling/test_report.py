"""The report: in a real browser, in words, and as data."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tfdist.scaling.plots import COLORS, make_plots
from tfdist.scaling.report import write_report
from tfdist.scaling.result import analyse

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture
def result(make_size):
    link = {"latency_s": 1e-3, "bytes_per_second": 5e7}
    sizes = [make_size([(1, 40, 0, 1)], mode=mode, ceiling=42.0, spread=0.03) for mode in ("strong",)]
    sizes += [make_size([(1, 40 / n, 4 * n, 1)] * n, ceiling=44 / n, spread=0.03, link=link) for n in (2, 3)]
    sizes += [make_size([(1, 40, 0, 1)], mode="weak"), make_size([(1, 40, 2, 1), (1, 60, 0, 1)], mode="weak")]
    return analyse(
        sizes, title="How <script> scales", failures=[("strong-8-0", "exit code 1\n<b>not bold</b>")], notes=["A note."]
    )


@pytest.fixture
def report(result, tmp_path):
    write_report(result, tmp_path)
    return tmp_path


class Page(HTMLParser):
    """Collects what a page refers to, and its elements."""

    def __init__(self, text):
        super().__init__()
        self.references, self.tags, self.ids = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.references.append(value)
            if name == "id":
                self.ids.append(value)


def browse(page: Path, tmp_path: Path, *options: str) -> str:
    """Returns what Chromium writes: the page after loading, or its log."""
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run(
        [*command, "--enable-logging=stderr", "--disable-dev-shm-usage", *options, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")


@needs_chromium
@pytest.mark.timeout(240)
def test_in_a_browser(report, tmp_path):
    # The page measures itself as the browser lays it out, at the width of a phone and of a desktop.
    probe = """<script>addEventListener("load", () => { document.title = JSON.stringify({
      wide: document.documentElement.scrollWidth - innerWidth,
      plots: [...document.querySelectorAll("figure svg")].map(s => s.getBoundingClientRect().width),
      texts: [...document.querySelectorAll("figure svg text")].map(t => t.getBoundingClientRect().height),
      page: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
      drawn: getComputedStyle(document.querySelector("figure svg text")).fill, width: innerWidth}); });</script>"""
    text = (report / "report.html").read_text()
    probed = tmp_path / "probed.html"
    for width, dark in ((390, False), (1200, False), (1200, True)):
        # Headless Chromium has no window narrower than 500 pixels; a frame has any.
        inner = (text + probe).replace("&", "&amp;").replace('"', "&quot;")
        frame = f'<iframe width="{width}" height="900" srcdoc="{inner}"></iframe>'
        watch = (
            '<script>addEventListener("load", () => setTimeout(() => '
            "{ document.title = frames[0].document.title }, 300))</script>"
        )
        probed.write_text(f"<!doctype html><title>outer</title><link rel=icon href='data:,'>{frame}{watch}")
        scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
        page = browse(probed, tmp_path, "--window-size=1400,1000", "--virtual-time-budget=3000", "--dump-dom", *scheme)
        found = json.loads(re.search(r"<title>(.*?)</title>", page).group(1))
        assert found["width"] == width
        assert found["wide"] <= 0, "the page scrolls sideways"
        assert len(found["plots"]) == 5 + 4 and min(found["plots"]) > 200
        assert max(found["plots"]) <= width
        assert min(found["texts"]) >= 8, "text of a plot is too small to read"
        assert contrast(found["page"], found["ink"]) >= 7 and contrast(found["page"], found["drawn"]) >= 7
        assert (luminance(found["page"]) < 0.1) == dark


@needs_chromium
@pytest.mark.timeout(120)
def test_screenshot(report, tmp_path):
    picture = tmp_path / "page.png"
    browse(report / "report.html", tmp_path, "--window-size=1200,1500", f"--screenshot={picture}")
    pixels = matplotlib.image.imread(picture)[..., :3]
    for color in COLORS.values():
        wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(pixels - wanted).max(axis=2) < 0.02).sum() > 200, f"{color} is not to be seen"


def luminance(color):
    parts = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def contrast(first, second):
    """WCAG's ratio."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_the_page_needs_nothing_from_elsewhere(report):
    text = (report / "report.html").read_text()
    page = Page(text)
    assert all(reference.startswith(("#", "data:")) for reference in page.references), page.references
    assert not re.search(r"(@import|url\((?!#))", text)
    assert "script" not in page.tags and len(page.ids) == len(set(page.ids))
    for reference in re.findall(r"url\(#([^)]+)\)", text) + [r[1:] for r in page.references if r.startswith("#")]:
        assert reference in page.ids


def test_text_is_escaped_and_complete(report):
    text = (report / "report.html").read_text()
    assert (
        "How &lt;script&gt; scales" in text
        and "&lt;b&gt;not bold&lt;/b&gt;" in text
        and "&lt;here&gt; &amp; there" in text
    )
    words = (report / "report.md").read_text()
    assert "How <script> scales" in words and "A note." in words and "strong-8-0" in words
    for table in words.split("\n\n"):
        rows = [line for line in table.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1, table


def test_data_and_tensorboard(report, result):
    data = json.loads((report / "report.json").read_text())
    assert data["headline"] == result.headline and "communication-bound" in data["headline"]
    assert [size["replicas"] for size in data["modes"][0]["sizes"]] == [1, 2, 3]
    assert data["modes"][0]["speedups"][1] == pytest.approx(42 / 30)
    assert data["modes"][0]["hindsight"][0]["replicas"] == 3 and data["link"]["beta_bytes_per_second"] > 0
    found = EventAccumulator(str(report / "tensorboard"), size_guidance={"tensors": 0})
    found.Reload()
    plots = make_plots(result)
    assert sorted(found.Tags()["tensors"]) == sorted(f"report/{plot.name}" for plot in plots)
    shown = found.Tensors("report/strong-speedup")[0].tensor_proto.string_val
    assert shown[2].startswith(b"\x89PNG") and int(shown[0]) > 400


def test_weak_straggler_is_found(result):
    assert "worker 1 is 1.5x slower in compute" in result.modes[1].diagnoses[-1].headline

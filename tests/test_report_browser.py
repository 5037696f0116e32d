"""The report of `ridgefill evaluate` in a browser: it is drawn, without an error, and shows the numbers of the JSON."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.image import imread
from test_evaluate import check_values, engine, finished  # noqa: F401  (fixtures)

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(not BROWSER, reason="needs chromium (Debian: apt-get install chromium)")

WIDTH, HEIGHT = 1300, 3000
# put behind the page: what the browser made of it
PROBE = """<pre id="seen"></pre><script>
onload = () => document.getElementById("seen").textContent = JSON.stringify({
  cells: Object.fromEntries([...document.querySelectorAll("td[data-path]")].filter(e => e.offsetWidth > 5 && e.offsetHeight > 5).map(e => [e.dataset.path, e.innerText])),
  pictures: [...document.images].map(i => [i.alt, i.naturalWidth, i.offsetWidth, i.offsetHeight, i.offsetTop]),
  width: document.documentElement.scrollWidth,
});
</script>"""


def browse(folder, url: str, *flags: str) -> subprocess.CompletedProcess:
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={folder}/profile",
               f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=10000", "--enable-logging=stderr", *flags, url]  # fmt: skip
    p = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert p.returncode == 0, p.stderr[-2000:]
    return p


@pytest.fixture(scope="module")
def seen(finished, tmp_path_factory):  # noqa: F811
    """What the browser shows of a report, what it says, and the file of its picture."""
    folder = tmp_path_factory.mktemp("browser")
    probed = folder / "probed.html"
    probed.write_text((finished[0] / "report.html").read_text() + PROBE)
    dom = browse(folder, probed.as_uri(), "--dump-dom")
    picture = folder / "report.png"
    shot = browse(folder, (finished[0] / "report.html").as_uri(), f"--screenshot={picture}")
    found = re.search(r'<pre id="seen">(.*?)</pre>', dom.stdout, re.S)[1]
    return json.loads(html.unescape(found)), dom.stderr + shot.stderr, picture


def test_the_browser_reports_no_error(seen):
    _, log, _ = seen
    assert [line for line in log.splitlines() if "CONSOLE" in line or "ERR_" in line] == []


def test_the_numbers_on_the_screen_are_those_of_the_json(seen, finished):  # noqa: F811
    shown, _, _ = seen
    n_values = (finished[0] / "report.html").read_text().count("data-path=")
    assert check_values(shown["cells"], finished[1]) > 10 and len(shown["cells"]) == n_values


def test_every_plot_is_drawn_and_the_page_is_no_wider_than_the_window(seen):
    shown, _, picture = seen
    pixels = imread(picture)
    assert pixels.shape[:2] == (HEIGHT, WIDTH) and shown["width"] <= WIDTH and len(shown["pictures"]) == 5
    for title, natural, width, height, top in shown["pictures"]:
        assert title and natural > 100 and width > 300 and height > 100, title
        if top + height < HEIGHT:
            part = pixels[top : top + height, :, :3].reshape(-1, 3)
            assert len(np.unique((part * 255).astype(int), axis=0)) > 10, title  # lines and text, not an empty box

"""The report in Chromium: rendered, hovered, zoomed, used by keyboard, printed, and checked with axe."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from report_runs import write_run

from accel_scale.cli.main import main

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]
WIDTHS, SCHEMES = (375, 800, 1600), ("light", "dark")
# The number of non-empty pixels of each canvas.
DRAWN = """() => [...document.querySelectorAll('.charts canvas')].filter(c => c.clientWidth).map(c => {
  const data = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
  let count = 0;
  for (let i = 3; i < data.length; i += 4) count += data[i] > 128;
  return count;
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run with events and restarts, and four runs side by side."""
    root = tmp_path_factory.mktemp("runs")
    one = write_run(root / "one", events=3, restarts=2)
    four = [write_run(root / f"rate{at}", rate=10.0**-at, events=at % 2) for at in (2, 3, 4, 5)]
    main(["report", str(one)])
    main(["report", *map(str, four), "-o", str(root / "comparison.html")])
    return {"one": one / "report.html", "comparison": root / "comparison.html"}


class Opened:
    """A page in its own window, with its console messages and its requests."""

    def __init__(self, browser: Browser, path: Path, *, width: int = 1280, scheme: str = "light") -> None:
        self.page: Page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self._hear(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *unused: object) -> None:
        self.page.close()

    def drawn(self) -> list[int]:
        """The number of non-empty pixels of each plot, after all plots have been drawn."""
        self._settle()
        found: list[int] = self.page.evaluate(DRAWN)
        return found

    def _settle(self) -> None:
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def _hear(self, text: str) -> None:
        if "willReadFrequently" not in text:  # a warning about the pixels that `DRAWN` reads
            self.said.append(text)

    @property
    def range(self) -> str:
        self._settle()
        return self.page.inner_text("#range")


@pytest.mark.parametrize("name", ["one", "comparison"])
def test_every_plot_is_drawn_at_every_width_in_both_themes(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    backgrounds = {}
    for scheme in SCHEMES:
        for width in WIDTHS:
            with Opened(browser, pages[name], width=width, scheme=scheme) as opened:
                page = opened.page
                page.click(".more > summary")
                page.wait_for_function("document.querySelectorAll('canvas').length === 9")
                drawn = opened.drawn()
                assert len(drawn) == page.locator(".plot").count() == 9
                assert min(drawn) > 300, (width, scheme, drawn)
                assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
                assert opened.said == []
                assert opened.requests == [pages[name].as_uri()]
                backgrounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert backgrounds["light"] != backgrounds["dark"]


@pytest.mark.parametrize("name", ["sft", "guarded", "comparison"])
def test_the_committed_examples_are_drawn(browser: Browser, name: str) -> None:
    path = Path(__file__).parents[2] / "docs" / "examples" / f"{name}.html"
    assert path.stat().st_size < 400_000
    with Opened(browser, path) as opened:
        assert min(opened.drawn()) > 300
        assert opened.said == []
        assert opened.requests == [path.as_uri()]


def test_hovering_shows_the_values_of_every_plot(browser: Browser, pages: dict[str, Path]) -> None:
    with Opened(browser, pages["one"]) as opened:
        page = opened.page
        box = page.locator("#chart-0 .u-over").bounding_box()
        assert box is not None
        assert page.inner_text("#chart-0 .legend .value") == ""
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
        assert opened.range in ("step 30", "step 31")
        loss = float(page.inner_text("#chart-0 .legend button:first-child .value"))
        assert 1.2 < loss < 1.7  # 1 + 2 exp(-1.5), plus noise
        assert page.inner_text("#chart-6 .legend .value") == "17 GiB"  # the other plots follow
        page.mouse.move(5, 5)
        assert opened.range == "all steps"


def test_zooming_by_mouse_buttons_and_keys_moves_all_plots(browser: Browser, pages: dict[str, Path]) -> None:
    with Opened(browser, pages["one"]) as opened:
        page = opened.page
        page.locator("#chart-2").scroll_into_view_if_needed()
        box = page.locator("#chart-2 .u-over").bounding_box()
        assert box is not None
        before = opened.drawn()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 60, steps=4)
        page.mouse.up()
        page.mouse.move(5, 5)
        low, high = (int(word) for word in opened.range.split() if word.isdigit())
        assert 28 <= low <= 33
        assert 43 <= high <= 47
        assert opened.drawn()[:2] != before[:2], "plots beside it follow"
        page.click("text=Later")
        assert int(opened.range.split()[1]) > low
        page.locator("#chart-0 .u-over").dblclick()
        page.mouse.move(5, 5)
        assert opened.range == "all steps"
        page.click("text=Zoom in")
        assert opened.range == "steps 16 to 45"
        page.focus("#chart-1 .plot")
        page.keyboard.press("+")
        assert opened.range == "steps 24 to 37"
        page.keyboard.press("End")
        assert page.inner_text("#said").startswith("step 37: learning rate")
        page.keyboard.press("ArrowLeft")
        assert page.inner_text("#said").startswith("step 36: ")
        page.keyboard.press("Escape")
        page.keyboard.press("Home")
        assert page.inner_text("#said").startswith("step 1: ")
        assert opened.said == []


def test_the_keyboard_reaches_everything_in_reading_order(browser: Browser, pages: dict[str, Path]) -> None:
    with Opened(browser, pages["one"]) as opened:
        page = opened.page
        stops = []
        for _ in range(14):
            page.keyboard.press("Tab")
            stops.append(
                page.evaluate(
                    """() => { const at = document.activeElement;
                      return at.dataset.chart ? 'plot ' + at.dataset.chart : at.innerText.trim(); }"""
                )
            )
        assert stops == [
            *("Skip to the plots", "Zoom in", "Zoom out", "Earlier", "Later", "All steps"),
            *("plot 0", "training", "validation", "Loss as a table", "plot 1", "learning rate"),
            *("Learning rate as a table", "plot 2"),
        ]
        # A series is switched off and on again, and its button reports the state.
        page.focus("#chart-0 .legend button")
        before = opened.drawn()[0]
        page.keyboard.press("Space")
        assert page.get_attribute("#chart-0 .legend button", "aria-pressed") == "false"
        assert opened.drawn()[0] < before
        page.keyboard.press("Space")
        assert page.get_attribute("#chart-0 .legend button", "aria-pressed") == "true"


def test_a_table_has_the_values_of_its_plot(browser: Browser, pages: dict[str, Path]) -> None:
    with Opened(browser, pages["one"]) as opened:
        page = opened.page
        page.click("text=Learning rate as a table")
        rows = page.locator("#chart-1 table tbody tr")
        rows.first.wait_for()
        assert rows.count() == 60
        assert rows.first.inner_text().split() == ["1", "9.83e-5"]
        assert page.get_attribute("#chart-0 .plot", "aria-describedby") == "words-0"
        assert page.inner_text("#words-0").startswith("training: 2.9")


@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    [("one", "light", 375), ("one", "dark", 1280), ("comparison", "light", 1280), ("comparison", "dark", 375)],
)
def test_axe_finds_nothing_to_mend(
    browser: Browser, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    with Opened(browser, pages[name], width=width, scheme=scheme) as opened:
        opened.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        opened.page.wait_for_selector(".data table")
        found = axe.Axe().run(opened.page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"][:120]) for each in found] == []


def test_paper_is_white_whatever_the_theme(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    with Opened(browser, pages["one"], scheme="dark") as opened:
        page = opened.page
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.locator(".tools").is_visible()
        assert min(opened.drawn()) > 300
        page.pdf(path=tmp_path / "report.pdf", format="A4")
        assert (tmp_path / "report.pdf").stat().st_size > 20_000
        assert opened.said == []


def test_without_scripts_it_says_so_and_has_the_words(browser: Browser, pages: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages["one"].as_uri())
    assert "Plots need JavaScript" in page.inner_text("noscript")
    assert "training: 2.9" in page.inner_text("#words-0")
    context.close()


def test_nothing_runs_but_its_own_scripts(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    text = pages["one"].read_text()
    hurt = tmp_path / "hurt.html"
    hurt.write_text(text.replace("</main>", '<img src=x onerror="window.hit=1"><script>window.hit=1</script></main>'))
    with Opened(browser, hurt) as opened:
        opened.page.wait_for_timeout(100)
        assert opened.page.evaluate("window.hit") is None
        assert any("Content Security Policy" in line for line in opened.said)

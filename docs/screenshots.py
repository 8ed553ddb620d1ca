"""A picture of a page below docs/examples: `python docs/screenshots.py [--page sft] [--dark] [--out FILE.png]`.

Needs playwright (extra `dev`) and Debian's chromium.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent / "examples"


def main() -> None:
    """Open the page in Chromium and write what a window of that size shows."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", default="guarded", choices=sorted(path.stem for path in EXAMPLES.glob("*.html")))
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=1100)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--out", type=Path, help="default: docs/examples/PAGE.png")
    args = parser.parse_args()
    path = args.out or EXAMPLES / f"{args.page}.png"
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": args.width, "height": args.height}, color_scheme="dark" if args.dark else "light"
        )
        page.goto((EXAMPLES / f"{args.page}.html").as_uri())
        page.wait_for_selector("canvas")
        page.screenshot(path=path)
        browser.close()
    print(f"written  {path}")


if __name__ == "__main__":
    main()

"""Put uPlot, which draws the report's plots, into the package: `python tools/vendor_uplot.py [--check]`.

Fetches one version from the npm registry, verifies its checksum, and writes script, style and licence unchanged.
`--check` only compares them with the files in the package.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import sys
import tarfile
import urllib.request
from pathlib import Path

VERSION = "1.6.32"
INTEGRITY = "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=="  # SHA-512
TARGET = Path(__file__).resolve().parents[1] / "accel_scale" / "report_page" / "page"
FILES = {
    "package/dist/uPlot.iife.min.js": "uPlot.iife.min.js",
    "package/dist/uPlot.min.css": "uPlot.min.css",
    "package/LICENSE": "LICENSE-uPlot.txt",
}


def main() -> int:
    """Fetch, verify and write or compare the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registry", default="https://registry.npmjs.org")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file differs")
    args = parser.parse_args()
    with urllib.request.urlopen(f"{args.registry.rstrip('/')}/uplot/-/uplot-{VERSION}.tgz") as answer:
        packed = answer.read()
    if base64.b64encode(hashlib.sha512(packed).digest()).decode() != INTEGRITY:
        print(f"uplot {VERSION} is not the package that was expected", file=sys.stderr)
        return 1
    differing = 0
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        for source, name in FILES.items():
            found = tar.extractfile(source)
            content = found.read() if found else b""
            if args.check:
                differing += (TARGET / name).read_bytes() != content
            else:
                (TARGET / name).write_bytes(content)
    print(f"uPlot {VERSION}: {differing} of {len(FILES)} files differ" if args.check else f"uPlot {VERSION} written")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Print the leaks of netfold's native module that LeakSanitizer reported in a folder; exit 1 where there is one.

    python tools/leaks.py REPORTS

A leak is netfold's where netfold's module asked for the memory. What the interpreter, torch and NumPy keep until a
process ends is theirs. Reports of other kinds are printed whole, and count.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_LEAK = re.compile(r"^(Direct|Indirect) leak of .* allocated from:$")
# Between who asked for memory and who gave it.
_GIVERS = re.compile(r"libsanitizer|/usr/include/c\+\+|libasan|libubsan|libstdc\+\+")
_OURS = re.compile(r"/native/[\w/]+/|/_native[^/]*\.so")


def leaks(text: str) -> Iterator[str]:
    """The stack of each leak that is netfold's, without addresses."""
    block: list[str] | None = None
    for line in [*text.splitlines(), ""]:
        if _LEAK.match(line):
            block = [line]
        elif block is not None and line.startswith(" "):
            block.append(line)
        elif block is not None:
            asked = next((each for each in block[1:] if not _GIVERS.search(each)), "")
            if _OURS.search(asked):
                yield "\n".join(re.sub(r"0x[0-9a-f]+ ", "", each) for each in block)
            block = None


def main(folder: str) -> int:
    found: Counter[str] = Counter()
    others = 0
    for path in sorted(Path(folder).iterdir()):
        text = path.read_text(errors="replace")
        found.update(leaks(text))
        if text.strip() and "LeakSanitizer" not in text:
            others += 1
            print(text)
    for stack, times in found.most_common():
        print(f"{times} x {stack}\n")
    print(f"leaks: {len(found)} places of netfold's; {others} other reports")
    return int(bool(found) or bool(others))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

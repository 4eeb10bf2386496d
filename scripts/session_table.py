"""Write the live session's table into ARCHITECTURE.md, from the code: `make table`."""

import re
import sys
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[1] / "ARCHITECTURE.md"
sys.path.insert(0, str(DOCUMENT.parent))

from app.session.machine import TABLE, Input, State  # noqa: E402

MARKERS = ("<!-- session table -->\n", "<!-- end of the session table -->\n")


def table() -> str:
    """Render the table: a row for each input, a column for each state."""
    states = [state for state in State if state != State.ENDED]
    lines = ["| | " + " | ".join(f"**{state}**" for state in states) + " |", "|---" * (len(states) + 1) + "|"]
    for event in Input:
        cells = []
        for state in states:
            transition = TABLE[state].get(event)
            if transition is None:
                cells.append("")
                continue
            follows = [] if transition.next == state else [f"→ *{transition.next}*"]
            cells.append("; ".join([*transition.actions, *follows]) or "–")
        lines.append(f"| {event} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_table(document: str) -> str:
    """Return the document with the table as it is now."""
    begin, end = MARKERS
    return re.sub(f"{begin}.*{end}", lambda _: begin + table() + end, document, flags=re.DOTALL)


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))

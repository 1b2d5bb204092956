"""Elements of the page: shaded tokens, pictures, tables. All text in them is escaped."""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

STYLE = """
.drawn { white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace;
  line-height: 1.7; min-height: 8em; max-height: 32em; overflow-y: auto; }
.drawn b { font-weight: inherit; border-radius: 3px; }
.drawn .given { opacity: 0.6; }
.drawn .right { background: rgba(34, 160, 84, 0.25); }
.drawn .wrong { background: rgba(220, 38, 38, 0.45); }
.canvas { width: 100%; max-width: 32em; image-rendering: pixelated; border-radius: 6px; }
.roll { width: 100%; height: 16em; object-fit: fill; border-radius: 6px; }
.strip { width: 100%; height: 8em; object-fit: fill; image-rendering: pixelated; border-radius: 6px; }
.ends { display: flex; justify-content: space-between; font-size: 0.85em; opacity: 0.7; }
.figures { width: 100%; border: 0 !important; border-collapse: collapse; font-variant-numeric: tabular-nums; }
.figures tr { border: 0 !important; }
.figures td, .figures th { text-align: right; padding: 0.25em 0.75em; border: 0 !important;
  border-bottom: 1px solid rgba(128, 128, 128, 0.25) !important; }
.figures .chosen { font-weight: 600; }
footer, .leave { display: none !important; }
"""
# Ten shades: the less likely the token, the stronger.
STYLE += "".join(
    f".drawn .p{n} {{ background: rgba(234, 120, 12, {0.6 - 0.065 * n:.3f}); }}\n" for n in range(10)
)


def span(text: str, kind: str, title: str = "") -> str:
    about = f' title="{escape(title)}"' if title else ""
    return f'<b class="{kind}"{about}>{escape(text)}</b>'


def shade(text: str, probability: float) -> str:
    """A token, shaded the more strongly the less likely it is."""
    return span(text, f"p{min(9, int(probability * 10))}", f"{probability:.1%}")


def drawn(parts: Iterable[str]) -> str:
    return f'<div class="drawn">{"".join(parts)}</div>'


def picture(pixels: NDArray[np.uint8], words: str, kind: str = "canvas") -> str:
    """Pixels (height, width, 3) or (height, width) as an inline image."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img class="{kind}" alt="{escape(words)}" src="data:image/png;base64,{data}">'


def figures(heads: Sequence[str], rows: Iterable[Sequence[str]], chosen: str) -> str:
    """A table, in which the row that begins with `chosen` stands out."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join(
        f"<tr{' class=chosen' if row[0] == chosen else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<table class="figures"><tr>{head}</tr>{body}</table>'

"""The blocks of a page as one HTML file that needs nothing else: no script, no request, light and dark.

Plots stand in the file as SVG, samples as data: with a player or a picture; one that is too large to take in is a link.
Text of users is escaped and shown as it was written. What a page says is left to its writer, as compare/page.
"""

from __future__ import annotations

import base64
import html

from rung.report.blocks import (
    TEXTS,
    Block,
    Bullets,
    Code,
    File,
    Heading,
    Page,
    Paragraph,
    Picture,
    Quote,
    Span,
    Spans,
    Table,
    one_line_spaces,
    paragraphs,
    target,
)
from rung.text import one_line, visible

LARGEST_BYTES = 4_000_000  # of one sample that is taken in; a minute of 16-bit mono at 32 kHz
_TYPES = {
    "png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "gif": "image/gif", "webp": "image/webp",
    "wav": "audio/wav", "mp3": "audio/mpeg", "ogg": "audio/ogg", "flac": "audio/flac", "mp4": "video/mp4",
    "webm": "video/webm", "mid": "audio/midi", "midi": "audio/midi",
}  # fmt: skip
# Colours of a plot are attributes in the SVG, which any rule here outweighs.
_STYLE = """
:root{color-scheme:light dark;--ground:#fff;--text:#1f2328;--faint:#59636e;--line:#d1d9e0;--card:#f6f8fa;--link:#0550ae}
@media(prefers-color-scheme:dark){:root{--ground:#0d1117;--text:#e6edf3;--faint:#9198a1;--line:#3d444d;--card:#161b22;
--link:#79c0ff}
.plot .ground{fill:#0d1117}.plot .grid{stroke:#2a313a}.plot .axis{stroke:#6e7681}.plot text{fill:#e6edf3}
.plot .faint{fill:#9198a1}.plot .bad{stroke:#ff7b72}
.plot .c0{stroke:#58a6ff}.plot .c1{stroke:#ffa657}.plot .c2{stroke:#56d364}.plot .c3{stroke:#d2a8ff}
.plot .c4{stroke:#f778ba}.plot .c5{stroke:#a5d6ff}}
body{background:var(--ground);color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;margin:0}
main{max-width:60rem;margin:0 auto;padding:2rem 1.25rem 4rem;overflow-wrap:anywhere}
h1,h2,h3{line-height:1.25;margin:2rem 0 .75rem}h1{margin-top:0}
h2{border-bottom:1px solid var(--line);padding-bottom:.3rem}
h3{font-size:1.05rem}p,ul,figure{margin:.75rem 0}ul{padding-left:1.4rem}li{margin:.2rem 0}
a{color:var(--link)}del{color:var(--faint)}
code{font:.875em ui-monospace,SFMono-Regular,Menlo,monospace;background:var(--card);padding:.1em .35em;
border-radius:4px}b code{font-weight:700}
pre{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.75rem 1rem;overflow-x:auto;
overflow-wrap:normal;line-height:1.4}pre code{background:none;padding:0}
blockquote{margin:.75rem 0;padding:.1rem 1rem;border-left:4px solid var(--line);white-space:pre-wrap}
.wide{overflow-x:auto;overflow-wrap:normal}table{border-collapse:collapse;font-size:.9rem}
th,td{border:1px solid var(--line);padding:.35rem .6rem;text-align:left;vertical-align:top}
th{background:var(--card);white-space:nowrap}td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;
white-space:nowrap}figure svg{max-width:100%;height:auto;display:block}
figure img{max-width:100%;background:#fff;border:1px solid var(--line)}audio{width:100%;max-width:32rem;display:block}
video{max-width:100%}figcaption{color:var(--faint);font-size:.9rem;margin-top:.25rem}
"""


def to_html(page: Page) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Whatever a page should come to hold, a browser fetches and runs nothing for it.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; media-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{_text(one_line(page.title))}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{fragment(Heading(1, [page.title]), *page.blocks)}\n</main>\n</body>\n</html>\n"
    )


def fragment(*blocks: Block) -> str:
    """Blocks without a page around them, as a notebook shows them: escaped, in the notebook's own style."""
    out = []
    for block in blocks:
        match block:
            case Heading(level, spans):
                out.append(f"<h{level}>{_inline(spans)}</h{level}>")
            case Paragraph(spans):
                out.append(f"<p>{_inline(spans)}</p>")
            case Bullets(items):
                out.append("<ul>\n" + "\n".join(f"<li>{_inline(item)}</li>" for item in items) + "\n</ul>")
            case Table(head, rows, numeric):
                lines = []
                for tag, cells in [("th", head), *(("td", row) for row in rows)]:
                    marks = [' class="number"' if i in numeric else "" for i in range(len(cells))]
                    texts = [_inline([cell] if isinstance(cell, str) else cell) for cell in cells]
                    shown = "".join(f"<{tag}{mark}>{text}</{tag}>" for mark, text in zip(marks, texts))
                    lines.append(f"<tr>{shown}</tr>")
                table = "\n".join([f"<thead>{lines[0]}</thead>", "<tbody>", "\n".join(lines[1:]), "</tbody>"])
                out.append(f'<div class="wide"><table>\n{table}\n</table></div>')
            case Code(text, _):
                out.append(f"<pre><code>{_text(visible(text).rstrip(chr(10)))}</code></pre>")
            case Quote(text):
                out.append(f"<blockquote>{_text(paragraphs(text))}</blockquote>")
            case Picture(_, _, svg):
                out.append(f"<figure>{svg.strip()}</figure>")
            case File():
                out.append(_file(block))
    return "\n".join(out)


def _file(file: File) -> str:
    name = one_line(file.path.rpartition("/")[2])
    kind = name.rpartition(".")[2].lower()
    to_it = f'<a href="{_text(target(file.path))}">{_text(name)}</a>'
    caption = f": {_text(one_line(file.caption))}" if file.caption.strip() else ""
    if file.data is None or len(file.data) > LARGEST_BYTES or not (kind in _TYPES or kind in TEXTS):
        return f"<p>{to_it}{caption}</p>"
    if kind in TEXTS:
        text = file.data.decode("utf-8", "replace").removesuffix("\n")
        shown = f"<pre><code>{_text(visible(text))}</code></pre>"
        return f"<figure>{shown}<figcaption>{_text(name)}{caption}</figcaption></figure>"
    source = f"data:{_TYPES[kind]};base64,{base64.b64encode(file.data).decode()}"
    player = {
        "image": f'<img alt="{_text(one_line(file.caption) or name)}" src="{source}">',
        "audio": f'<audio controls preload="none" src="{source}"></audio>',
        "video": f'<video controls preload="none" src="{source}"></video>',
    }[_TYPES[kind].partition("/")[0]]
    if kind in ("mid", "midi"):  # no browser plays one; it can be saved
        return f'<p><a download="{_text(name)}" href="{source}">{_text(name)}</a>{caption}</p>'
    return f"<figure>{player}<figcaption>{_text(name)}{caption}</figcaption></figure>"


def _inline(spans: Spans) -> str:
    out = ""
    for span in (span if isinstance(span, Span) else Span(span) for span in spans):
        text = _text(one_line_spaces(span.text)) if isinstance(span.text, str) else _inline(span.text)
        if span.link:
            text = f'<a href="{_text(target(span.link))}">{text}</a>'
        tag = {"bold": "b", "struck": "del", "code": "code"}.get(span.style)
        out += f"<{tag}>{text}</{tag}>" if tag and text else text
    return out


def _text(text: str) -> str:
    return html.escape(text, quote=True)

"""The colours and shapes of the HTML report.

Covers one style sheet, all of it under one class, so that a notebook around it keeps its own looks. Colours are those
of the picture in docs/. In print, and in a light notebook on a dark desktop, it is light.
"""

from __future__ import annotations

__all__ = ["PAGE_STYLE", "SCOPE", "STYLE"]

SCOPE = "autobatch-report"

_LIGHT = """
  --page: #ffffff; --text: #24292f; --soft: #57606a; --rule: #d0d7de; --axis: #8c959f; --grid: #eaeef2;
  --blue: #0969da; --red: #cf222e; --amber: #9a6700; --violet: #8250df; --green: #1a7f37;
  --beyond: #ffebe9; --headroom: #fff1c2; --resident: #0969da; --passes: #8250df; --update: #d4720b;
  --unused: #8c959f; --free: #eaeef2; --note: #fff8c5;
"""
_DARK = """
  --page: #0d1117; --text: #e6edf3; --soft: #9198a1; --rule: #30363d; --axis: #6e7681; --grid: #21262d;
  --blue: #58a6ff; --red: #ff7b72; --amber: #d29922; --violet: #bc8cff; --green: #3fb950;
  --beyond: #3d1a1d; --headroom: #5c4a0e; --resident: #388bfd; --passes: #a371f7; --update: #e0823d;
  --unused: #6e7681; --free: #21262d; --note: #2e2508;
"""

STYLE = f"""
.{SCOPE}, [data-jp-theme-light="true"] .{SCOPE} {{{_LIGHT}}}
@media screen and (prefers-color-scheme: dark) {{ .{SCOPE} {{{_DARK}}} }}
@media screen {{ [data-jp-theme-light="false"] .{SCOPE}, .vscode-dark .{SCOPE} {{{_DARK}}} }}
.{SCOPE} {{
  background: var(--page); color: var(--text); padding: 1rem; line-height: 1.45; text-align: left;
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; overflow-wrap: anywhere;
}}
.{SCOPE} .summary {{ font-size: 1.1rem; font-weight: 600; margin: 0 0 .75rem }}
.{SCOPE} h2 {{ font-size: 1.05rem; font-weight: 600; margin: 1.5rem 0 .5rem; color: var(--text) }}
.{SCOPE} p {{ margin: .35rem 0 }}
.{SCOPE} .aside {{ color: var(--soft); font-size: .87rem }}
.{SCOPE} .warnings {{
  background: var(--note); border-left: 4px solid var(--amber); margin: .75rem 0; padding: .5rem .75rem .5rem 2rem;
}}
.{SCOPE} .charts {{
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1.5rem 2rem;
  margin: 1rem 0;
}}
.{SCOPE} figure {{ margin: 0; min-width: 0; max-width: 40rem; break-inside: avoid }}
.{SCOPE} figcaption {{ font-weight: 600; margin-bottom: .25rem }}
.{SCOPE} .keys {{
  display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .25rem 0 0; padding: 0; list-style: none;
  color: var(--soft); font-size: .87rem;
}}
.{SCOPE} .keys svg {{ width: 1.4em; height: 1.1em; vertical-align: -.2em; margin-right: .3em; overflow: visible }}
.{SCOPE} .scroll {{ overflow-x: auto }}
.{SCOPE} table {{ border-collapse: collapse; font-size: .9rem; margin: .25rem 0; color: var(--text) }}
.{SCOPE} tr {{ break-inside: avoid; background: none }}
.{SCOPE} th, .{SCOPE} td {{
  padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top;
  white-space: nowrap;
}}
.{SCOPE} th {{ font-weight: 600 }}
.{SCOPE} .number {{ text-align: right; font-variant-numeric: tabular-nums }}
.{SCOPE} .long {{ white-space: normal; min-width: 9rem }}
.{SCOPE} .planned {{ font-weight: 600 }}
.{SCOPE} summary {{ cursor: pointer; margin: 1.5rem 0 .5rem; font-weight: 600 }}
.{SCOPE} pre {{
  font: 12px/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  border: 1px solid var(--rule); padding: .5rem; color: var(--text); background: var(--page);
}}
.{SCOPE} svg {{ display: block; width: 100%; height: auto; print-color-adjust: exact }}
.{SCOPE} .keys svg {{ display: inline-block }}
.{SCOPE} svg.swatch {{ width: 14px; height: 14px; margin-top: .2em }}
.{SCOPE} svg text {{ font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--text) }}
.{SCOPE} svg .soft {{ fill: var(--soft) }}
.{SCOPE} svg .middle {{ text-anchor: middle }}
.{SCOPE} svg .end {{ text-anchor: end }}
.{SCOPE} svg .strong {{ font-weight: 600 }}
.{SCOPE} svg .over {{ paint-order: stroke; stroke: var(--page); stroke-width: 3px; stroke-linejoin: round }}
.{SCOPE} svg .axis {{ stroke: var(--axis); fill: none }}
.{SCOPE} svg .grid {{ stroke: var(--grid); fill: none }}
.{SCOPE} svg .beyond {{ fill: var(--beyond) }}
.{SCOPE} svg rect.headroom {{ fill: var(--headroom) }}
.{SCOPE} svg .budget {{ stroke: var(--red); stroke-width: 2; fill: none }}
.{SCOPE} svg .limit {{ stroke: var(--amber); stroke-width: 1.5; stroke-dasharray: 6 4; fill: none }}
.{SCOPE} svg .curve, .{SCOPE} svg .sizes {{ stroke: var(--blue); stroke-width: 2; fill: none; stroke-linejoin: round }}
.{SCOPE} svg .expected {{ stroke-dasharray: 5 5 }}
.{SCOPE} svg .fits {{ fill: var(--blue) }}
.{SCOPE} svg .oom {{ stroke: var(--red); stroke-width: 2.5; fill: none }}
.{SCOPE} svg .thrash, .{SCOPE} svg .changed {{ fill: var(--amber) }}
.{SCOPE} svg .chosen {{ stroke: var(--green); stroke-width: 2.5; fill: none }}
.{SCOPE} svg .down {{ stroke-width: 1.25; stroke-dasharray: 2 3 }}
.{SCOPE} svg .plan {{ fill: var(--green) }}
.{SCOPE} svg .retries {{ fill: var(--red) }}
.{SCOPE} svg .part {{ stroke: var(--axis); stroke-width: .5 }}
.{SCOPE} svg rect.resident, .{SCOPE} svg rect.peak {{ fill: var(--resident) }}
.{SCOPE} svg rect.passes {{ fill: var(--passes) }}
.{SCOPE} svg rect.update {{ fill: var(--update) }}
.{SCOPE} svg rect.unused {{ fill: var(--unused) }}
.{SCOPE} svg rect.free {{ fill: var(--free) }}
@media screen and (max-width: 30rem) {{
  .{SCOPE} {{ padding: .5rem 0 }}
  .{SCOPE} figure svg text {{ font-size: 16px }}
  .{SCOPE} .keys svg text {{ font-size: 13px }}
}}
@media print {{
  .{SCOPE} {{ padding: 0; font-size: 10pt }}
  .{SCOPE} .charts {{ grid-template-columns: 1fr 1fr }}
  .{SCOPE} .scroll {{ overflow: visible }}
  .{SCOPE} figure svg text {{ font-size: 16px }}
  .{SCOPE} h2 {{ break-after: avoid }}
  .{SCOPE} details {{ display: none }}
}}
"""

PAGE_STYLE = """
:root { color-scheme: light dark }
body { margin: 0; background: #ffffff }
main { max-width: 84rem; margin: 0 auto; padding: .5rem 1rem 2rem }
h1 { font: 600 1.4rem system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; overflow-wrap: anywhere }
h1 { color: #24292f; margin: 1rem 1rem 0 }
@media screen and (prefers-color-scheme: dark) { body { background: #0d1117 } h1 { color: #e6edf3 } }
@media screen and (max-width: 30rem) { main { padding: .25rem .75rem 1rem } h1 { margin: .75rem 0 0 } }
@media print { main { max-width: none; padding: 0 } h1 { margin: 0 } }
"""

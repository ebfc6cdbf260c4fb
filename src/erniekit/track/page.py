"""The look of report.html: one page, no network, light and dark. Used by report.py, which fills it."""

from __future__ import annotations

from html import escape

from erniekit.track.charts import HOVER

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f3; --card: #fcfcfb; --code: #efeeea; --line: #e1e0d9; --axis: #c3c2b7;
  --ink: #0b0b0b; --ink2: #52514e; --ink3: #75736c;
  --s1: #2a78d6; --s2: #d6541c; --good: #1b7f3b; --warn: #9a6200; --bad: #c22f2f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #111110; --card: #1a1a19; --code: #262624; --line: #2c2c2a; --axis: #383835;
    --ink: #ffffff; --ink2: #c3c2b7; --ink3: #98968d;
    --s1: #3987e5; --s2: #e0692f; --good: #4cc26f; --warn: #e0a53a; --bad: #f06a6a;
  }
}
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: 1160px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0; font-weight: 650; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 12px; font-weight: 650; }
h3 { font-size: 14px; margin: 0; font-weight: 600; }
p { margin: 6px 0; }
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre {
  background: var(--code); border-radius: 8px; padding: 10px 14px; margin: 10px 0;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
.head { display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: center; }
.sub, .note, .muted { color: var(--ink2); }
.note { font-size: 12.5px; margin: 4px 0 0; }
.pill {
  border: 1px solid currentColor; border-radius: 999px; padding: 1px 10px;
  font-size: 13px; font-weight: 600; color: var(--ink2);
}
.pill.finished { color: var(--good); }
.pill.running, .pill.stopped { color: var(--warn); }
.pill.failed { color: var(--bad); }

.tile, .card, .chart { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(136px, 1fr));
  gap: 12px; margin: 20px 0 0;
}
.tile { padding: 12px 16px; }
.tile .label { color: var(--ink2); font-size: 13px; }
.tile .value { font-size: 23px; line-height: 1.3; font-weight: 600; }
.tile .more { color: var(--ink3); font-size: 12.5px; }
.card { padding: 6px 16px; overflow-x: auto; }

.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 14px; }
.chart { position: relative; margin: 0; padding: 14px 14px 10px; }
.chart figcaption {
  display: flex; flex-wrap: wrap; justify-content: space-between; gap: 4px 16px; margin: 0 0 6px;
}
.chart svg { display: block; width: 100%; height: auto; overflow: visible; touch-action: pan-y; }
.chart text { fill: var(--ink3); font: 11px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.chart path { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.chart path.faint { stroke-width: 1.2; opacity: .38; }
.chart path.s1 { stroke: var(--s1); }
.chart path.s2 { stroke: var(--s2); }
.chart circle { stroke: var(--card); stroke-width: 2; }
.chart circle.s1 { fill: var(--s1); }
.chart circle.s2 { fill: var(--s2); }
.grid { stroke: var(--line); }
.axis { stroke: var(--axis); }
.cross { stroke: var(--ink3); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12.5px; color: var(--ink2); }
.key {
  display: inline-block; width: 16px; height: 0; border-top: 3px solid; border-radius: 2px;
  vertical-align: middle; margin-right: 6px;
}
.key.s1 { border-color: var(--s1); }
.key.s2 { border-color: var(--s2); }
.key.faint { opacity: .45; }
.tip {
  position: absolute; z-index: 1; pointer-events: none; background: var(--card); border: 1px solid var(--axis);
  border-radius: 8px; padding: 6px 10px; font-size: 12.5px; line-height: 1.45; white-space: nowrap;
  box-shadow: 0 4px 14px rgb(0 0 0 / .16);
}
.tip b { font-variant-numeric: tabular-nums; }

table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; color: var(--ink2); font-weight: 600; padding: 7px 16px 7px 0; }
td { padding: 6px 16px 6px 0; vertical-align: top; border-top: 1px solid var(--line); }
td { overflow-wrap: anywhere; }
tr:first-child > td { border-top: 0; }
thead + tbody tr:first-child > td { border-top: 1px solid var(--line); }
td table { font-size: 13px; margin: -4px 0; }
td.name { white-space: nowrap; color: var(--ink2); min-width: 190px; width: 1%; }
td.number { font-variant-numeric: tabular-nums; }
td.brief { white-space: nowrap; overflow-wrap: normal; }
td code { white-space: pre-wrap; }
.pairs { display: flex; flex-wrap: wrap; gap: 2px 20px; }
.pairs i { font-style: normal; color: var(--ink2); margin-right: 5px; }
.pairs span { white-space: nowrap; }
tr.default td { color: var(--ink3); }
details summary { cursor: pointer; margin: 18px 0 12px; color: var(--ink2); }
.filter { display: flex; flex-wrap: wrap; gap: 8px 18px; align-items: center; margin: 0 0 12px; }
input[type=search] {
  font: inherit; color: inherit; background: var(--card); border: 1px solid var(--axis);
  border-radius: 8px; padding: 6px 12px; width: min(100%, 320px);
}
@media (max-width: 620px) {
  main { padding: 20px 12px 40px; }
  .chart text { font-size: 15px; }
  td.name { min-width: 0; white-space: normal; width: 30%; }
}
@media print {
  .filter { display: none; }
  .chart, .tile, .card { break-inside: avoid; }
}
"""

# The filter keeps rows that hold every word typed.
SEARCH = """
const search = document.getElementById('search');
if (search) {
  const only = document.getElementById('only'), count = document.getElementById('shown');
  const rows = [...document.querySelectorAll('#config tbody tr')];
  const apply = () => {
    const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const dull = only.checked && !words.length && row.className === 'default';
      row.hidden = dull || !words.every(word => text.includes(word));
    }
    count.textContent = rows.filter(row => !row.hidden).length + ' of ' + rows.length + ' keys';
  };
  search.addEventListener('input', apply);
  only.addEventListener('change', apply);
  apply();
}
"""


def document(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>{HOVER}{SEARCH}</script>\n</body>\n</html>\n"
    )

"""How `report.html` looks: in the reader's light or dark, on any width."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1f2933; --muted: #5d6976; --grid: #e3e8ee; --card: #f5f7fa;
  --plan: #2463a6; --top: #c8452f; --chosen: #b87a00; --bound: #8aa4bf; --measured: #1f7a4d; --backward: #7a4fa3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181d; --ink: #e4e9ee; --muted: #9aa7b4; --grid: #2c343d; --card: #1d232a;
    --plan: #6fb1f5; --top: #ff8a73; --chosen: #f2b134; --bound: #6d839b; --measured: #56c990; --backward: #b48be0;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 60rem; padding: 1.2rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: .95rem; margin: .6rem 0 .2rem; }
header p { margin: 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .7rem; margin-top: 1rem; }
.cards div { background: var(--card); border-radius: .5rem; padding: .7rem; display: flex; flex-direction: column; }
.cards strong { font-size: 1.25rem; }
small, .cards span, figcaption, .key { color: var(--muted); font-size: .85rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .4rem; border-bottom: 1px solid var(--grid); text-align: right; font-weight: normal; }
th, td { white-space: nowrap; }
th:first-child { text-align: left; }
thead { color: var(--muted); font-size: .85rem; }
svg { width: 100%; height: auto; display: block; }
figure { margin: 0; }
figcaption { text-align: center; }
.many { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 1rem; }
.wide { overflow-x: auto; }
.grid { stroke: var(--grid); }
.tick { fill: var(--muted); font-size: 11px; }
.label { fill: var(--ink); font-size: 12px; }
polyline { fill: none; stroke-width: 2; }
polyline.plan { stroke: var(--plan); }
polyline.bound { stroke: var(--bound); stroke-dasharray: 4 4; }
polyline.faint { stroke: var(--grid); stroke-width: 1; }
circle.top, circle.measure { fill: var(--top); }
circle.chosen, circle.verify { fill: var(--chosen); }
circle.measured { fill: none; stroke: var(--measured); stroke-width: 2; }
circle.warmup { fill: var(--muted); }
circle.state.plan { fill: var(--bound); }
circle.hold { fill: var(--measured); }
.key span { margin-right: 1rem; white-space: nowrap; }
.key span::before { content: "\\25CF "; color: var(--plan); }
.key .bound::before, .key .state.plan::before { color: var(--bound); }
.key .top::before, .key .measure::before { color: var(--top); }
.key .chosen::before, .key .verify::before { color: var(--chosen); }
.key .measured::before { content: "\\25CB "; color: var(--measured); }
.key .hold::before { color: var(--measured); }
.key .warmup::before { color: var(--muted); }
rect.forward { fill: var(--plan); }
rect.backward { fill: var(--backward); }
.timeline { background: var(--card); }
@media (max-width: 40rem) {
  .wide .tick { font-size: 20px; }
  .wide .label { font-size: 18px; }
  .wide circle { r: 6px; }
  th, td { padding: .3rem .2rem; font-size: .85rem; }
  thead th { white-space: normal; vertical-align: bottom; }
  ol, ul { padding-left: 1.2rem; }
}
"""

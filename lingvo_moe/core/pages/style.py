"""The style sheet of all pages: light and dark, for phones, screens and paper."""

STYLE = """
:root { color-scheme: light dark;
  --paper: #fbfaf7; --ink: #1d2126; --soft: #5d656e; --rule: #dcd9d1; --track: #ece9e1;
  --good: #226b45; --bad: #b3341f;
  --first: #35508f; --second: #c9552f; --third: #23807f; --fourth: #cf9436 }
@media (prefers-color-scheme: dark) { :root {
  --paper: #15181c; --ink: #e4e2dc; --soft: #979da5; --rule: #31363d; --track: #23282e;
  --good: #70c193; --bad: #f08a70;
  --first: #7f9be0; --second: #e67c53; --third: #4fb3ad; --fourth: #dba84f } }
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100% }
body { margin: 0 auto; padding: 3rem 1.25rem 5rem; max-width: 58rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 Charter, "Bitstream Charter", "Sitka Text", Cambria, Georgia, serif }
h1, h2, h3 { line-height: 1.2; text-wrap: balance; font-weight: 600 }
h1 { font-size: clamp(1.7rem, 5vw, 2.5rem); letter-spacing: -.015em; margin: .2rem 0 .6rem;
  overflow-wrap: anywhere }
h1 span { color: var(--soft); font-weight: 400 }
h2 { font-size: 1.3rem; margin: 2.8rem 0 .4rem }
h2.title { font-size: clamp(1.5rem, 4vw, 2rem); letter-spacing: -.01em; margin: .2rem 0 .5rem;
  overflow-wrap: anywhere }
h2.title span { color: var(--soft); font-weight: 400 }
h3 { font-size: 1rem; margin: 1.8rem 0 .3rem }
p { margin: .4rem 0 .8rem; max-width: 42rem }
.kicker, .note, figcaption, th, dt, .legend, .estimated, table, .rows, footer {
  font-family: ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
.kicker { font-size: .82rem; color: var(--soft); letter-spacing: .02em; margin: 0 }
.verdict { font-size: 1.2rem; margin: 0 0 1.4rem } .yes { color: var(--good) } .no { color: var(--bad) }
.note, figcaption, footer { font-size: .84rem; color: var(--soft) }
footer { margin-top: 3.5rem; padding-top: 1rem; border-top: 1px solid var(--rule) }
article + article, .after { margin-top: 4rem; border-top: 1px solid var(--rule); padding-top: 2.2rem }
dl.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(11rem, 44%), 1fr)); gap: 0 1.4rem;
  margin: 0;
  border-bottom: 1px solid var(--rule) }
dl.figures div { border-top: 1px solid var(--rule); padding: .55rem 0 .8rem }
dl.figures dt { font-size: .78rem; color: var(--soft) }
dl.figures dd { margin: 0; font-size: 1.45rem; line-height: 1.25; font-variant-numeric: lining-nums tabular-nums }
.estimated { font-size: .72rem; color: var(--soft); display: block; line-height: 1.3 }
dl.facts { display: grid; grid-template-columns: 9rem 1fr; gap: .25rem 1rem; margin: .6rem 0; font-size: .95rem }
dl.facts dt { color: var(--soft); font-size: .84rem; padding-top: .1rem }
dl.facts dd { margin: 0; overflow-wrap: anywhere }
figure { margin: 1rem 0 } svg { display: block; width: 100%; overflow: visible }
figcaption { margin-top: .5rem }
.whole { height: 2.4rem } .whole text { font-size: .75rem; fill: var(--soft) }
.rows { display: grid; grid-template-columns: max-content 1fr max-content; gap: .34rem .9rem; align-items: center;
  font-size: .86rem; font-variant-numeric: tabular-nums; margin: .8rem 0 }
.rows svg { height: .85rem } .rows b { font-weight: 400; text-align: right }
.swatch { display: inline-block; width: .65rem; height: .65rem; border-radius: 2px; margin-right: .4rem }
.legend { font-size: .8rem; color: var(--soft); display: flex; flex-wrap: wrap; gap: .2rem 1.1rem }
@media (min-width: 62rem) { .compare { width: min(94vw, 86rem); margin-left: calc((100% - min(94vw, 86rem)) / 2) } }
.wide { overflow-x: auto; margin: .6rem 0 } table { border-collapse: collapse; width: 100%; font-size: .84rem;
  font-variant-numeric: tabular-nums }
th, td { padding: .36rem .9rem .36rem 0; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--rule) }
th { font-weight: 500; color: var(--soft); vertical-align: bottom; font-size: .78rem } .n { text-align: right }
th:last-child, td:last-child { padding-right: 0 }
tfoot td { font-weight: 600; border-bottom: 0 } th i { font-style: italic } a { color: inherit }
ul { padding-left: 1.1rem; max-width: 42rem } li { margin: .3rem 0 }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 0 2rem }
.drawing svg { height: auto; max-width: 44rem } .drawing.wide svg { min-width: 34rem }
details { margin: .8rem 0 } summary { cursor: pointer; color: var(--soft); font-size: .9rem }
pre { overflow-x: auto; font-size: .76rem; line-height: 1.45; white-space: pre-wrap; overflow-wrap: anywhere }
@media (max-width: 36rem) { .whole { height: 1.9rem } body { padding-top: 1.6rem; font-size: .97rem }
  .rows { grid-template-columns: 1fr max-content } .rows svg { grid-column: 1 / -1; grid-row: auto; order: 0 }
  .rows .bar { grid-column: 1 / -1; order: 0; margin-bottom: .35rem } .rows { grid-auto-flow: dense }
  dl.facts { grid-template-columns: 1fr; gap: 0 } dl.facts dd { margin-bottom: .5rem }
  dl.figures dd { font-size: 1.25rem } }
@media print { :root { --paper: #fff } body { max-width: none; padding: 0 } h2, h3 { break-after: avoid }
  figure, tr { break-inside: avoid } .wide { overflow: visible } th, td { white-space: normal; font-size: .72rem }
  .drawing svg, .drawing.wide svg { min-width: 0; max-width: 100%; max-height: 22cm } }
"""

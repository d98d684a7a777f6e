"""The page in a browser: nothing fails, nothing is loaded, values are drawn where they belong, and people can use it."""

import json
import re
import time
from pathlib import Path
from xml.etree import ElementTree

import chromium
import pytest
from report_runs import EVIL, KINDS, large, lines, make, seeds

from dither import report
from dither.report import charts
from dither.report.page import write_page
from dither.report.run_folder import read

BROWSER = chromium.find()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="There is no Chromium here: apt-get install chromium.")

SECTIONS = ["Overview", "Loss and speed", "Precision", "Bitwidths", "Numerics", "Memory and time", "Text", "Events", "Setup"]

CONTRAST = """(() => {
  const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode, element = text.parentElement;
    if (!text.data.trim() || element.closest("script, style, noscript, [hidden], option")) continue;
    if (!element.getClientRects().length) continue;
    const style = getComputedStyle(element), inSvg = element instanceof SVGElement;
    const ink = parse(inSvg ? style.fill : style.color), box = element.getBoundingClientRect();
    let ground = behind(element.closest("svg")?.parentElement ?? element);
    if (inSvg && element.matches(".inside")) {
      const shape = element.closest("g.cell")?.querySelector("rect") ?? element.previousElementSibling;
      ground = parse(getComputedStyle(shape).fill);
    }
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    found.push([text.data.trim().slice(0, 40), (a + 0.05) / (b + 0.05), parseFloat(style.fontSize), box.width]);
  }
  return found;
})()"""


@pytest.fixture(scope="session")
def tiny(report_run) -> Path:
    """A real run with SNIP and GaussWS, and its page."""
    report.write([report_run])
    return report_run


@pytest.fixture(scope="module")
def browser():
    with chromium.Chromium(BROWSER) as found:
        yield found


@pytest.fixture
def opened(browser, tiny):
    """The page of the tiny run, as a browser with a wide window shows it."""
    browser.resize(1200)
    browser.mode(dark=False)
    browser.errors.clear()
    browser.requests.clear()
    browser.open(tiny / "report.html")
    yield browser
    assert browser.errors == []
    assert browser.requests == [(tiny / "report.html").as_uri()]


def metrics(run: Path, kind: str) -> list[dict]:
    return [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if line["kind"] == kind]


def drawn(browser, selector: str, *names: str) -> list:
    """The data of all elements: a list of values per element."""
    return browser.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => {json.dumps(names)}.map((n) => e.dataset[n]))"
    )


def test_every_section_is_there_and_visible(opened):
    assert opened.run("document.documentElement.dataset.ready") == "true"
    names = opened.run("[...document.querySelectorAll('nav a')].map((a) => a.textContent)")
    assert names == SECTIONS
    hidden = opened.run(
        "[...document.querySelectorAll('nav a')].map((a) => a.hash)"
        ".filter((hash) => document.querySelector(hash).getBoundingClientRect().height < 40)"
    )
    assert hidden == []
    empty = opened.run(
        "[...document.querySelectorAll('.plot')].filter((p) => !p.querySelector('svg')).map((p) => p.dataset.of)"
    )
    assert empty == []


def test_the_loss_is_drawn_where_it_belongs(opened, tiny):
    evaluations = metrics(tiny, "eval")
    points = drawn(opened, "[data-chart=loss] circle.strong", "x", "y")
    assert [(float(x), float(y)) for x, y in points] == [
        (line["step"], pytest.approx(line["loss"], rel=1e-5)) for line in evaluations
    ]
    # The path of the training loss, back from pixels to numbers.
    box = opened.run("({...document.querySelector('[data-chart=loss] .plot > svg').dataset})")
    path = opened.run("document.querySelector('[data-chart=loss] .plot path.line').getAttribute('d')")
    pixels = [tuple(map(float, pair.split(","))) for pair in re.split("[ML]", path)[1:]]
    scale = {key: float(value) for key, value in box.items() if key != "axis"}
    values = [
        scale["y0"] + (scale["bottom"] - y) / (scale["bottom"] - scale["top"]) * (scale["y1"] - scale["y0"]) for _, y in pixels
    ]
    height = scale["y1"] - scale["y0"]
    assert values == pytest.approx([line["loss"] for line in metrics(tiny, "train")], abs=height / 1000)


def test_the_axis_switches_by_mouse_and_keyboard(opened, tiny):
    opened.click("input[name=axis][value=tokens]")
    points = drawn(opened, "[data-chart=loss] circle.strong", "x", "y")
    assert [float(x) for x, _ in points] == [32 * line["step"] for line in metrics(tiny, "eval")]
    assert opened.run("document.querySelector('[data-chart=curve-0] .plot > svg').dataset.axis") == "tokens"
    opened.press("ArrowRight")
    assert opened.run("document.querySelector('[data-chart=loss] .plot > svg').dataset.axis") == "seconds"
    times = [float(x) for x, _ in drawn(opened, "[data-chart=loss] circle.strong", "x", "y")]
    assert times == pytest.approx([line["time"] for line in metrics(tiny, "eval")], rel=1e-4)


def test_plans_follow_the_slider_by_mouse_and_keyboard(opened, tiny):
    plans = metrics(tiny, "plan")
    assert len(plans) > 2
    names = [layer["name"] for layer in json.loads((tiny / "conversion.json").read_text())["layers"]]

    def expected(line):
        found = {operand: [line["plan"]["default"][operand].split()[0]] * len(names) for operand in ("input", "weight", "grad")}
        for name, precision in line["plan"]["layers"]:
            for operand, row in found.items():
                row[names.index(name)] = precision[operand].split()[0]
        return found

    def shown():
        found = {}
        for operand in ("input", "weight", "grad"):
            cells = drawn(opened, f"[data-part=plans] [data-of={operand}] g.cell", "layer", "value")
            found[operand] = [value for _, value in sorted(cells, key=lambda cell: int(cell[0]))]
        return found

    assert shown() == expected(plans[-1])  # the plan in force, not the first
    assert "in force" in opened.run("document.querySelector('[data-part=plans] [data-of=now]').textContent")
    opened.run("document.querySelector('[data-part=plans] [data-of=slider]').focus()")
    opened.press("Home")
    assert shown() == expected(plans[0])
    opened.press("ArrowRight")
    assert shown() == expected(plans[1])
    opened.click("[data-part=plans] [data-of=slider]", x=0.99)
    assert shown() == expected(plans[-1])
    changed = sum(a != b for operand in ("input", "weight", "grad")
                  for a, b in zip(expected(plans[-1])[operand], expected(plans[-2])[operand], strict=True))  # fmt: skip
    assert opened.run("document.querySelectorAll('[data-part=plans] g.cell.new').length") == changed


def test_sensitivities_are_the_estimates(opened, tiny):
    last = [line for line in metrics(tiny, "plan") if "scores" in line][-1]["scores"]
    cells = dict(drawn(opened, "[data-part=sensitivity] g.cell", "layer", "value"))
    harm = [a[-1] ** 2 + b[-1] ** 2 for a, b in zip(last["loss"], last["weights"], strict=True)]
    assert [float(cells[str(n)]) for n in range(len(harm))] == pytest.approx(harm, rel=1e-5)
    opened.run("document.querySelector('[data-of=measure]').focus()")
    opened.press("ArrowDown")
    cells = dict(drawn(opened, "[data-part=sensitivity] g.cell", "layer", "value"))
    assert [float(cells[str(n)]) for n in range(len(harm))] == pytest.approx([row[-1] for row in last["loss"]], rel=1e-5)


def test_bitwidths_of_a_chosen_layer(opened, tiny):
    recorded = metrics(tiny, "bitwidths")[-1]["layers"]
    blocks = json.loads((tiny / "bitwidths.json").read_text())["layers"]
    names = list(recorded)
    cells = drawn(opened, "[data-part=bitwidths] g.cell", "layer", "value")
    assert {names[int(n)]: float(value) for n, value in cells} == {
        name: pytest.approx(each["mean"], rel=1e-5) for name, each in recorded.items()
    }

    def chosen():
        found = drawn(opened, "[data-part=bitwidths] [data-of=blocks] rect", "row", "column", "value")
        return {(int(row), int(column)): float(value) for row, column, value in found}

    def expected(name):
        return {
            (i, j): pytest.approx(value, abs=0.0051)
            for i, row in enumerate(blocks[name]["values"])
            for j, value in enumerate(row)
        }

    assert chosen() == expected(names[0])
    opened.click("[data-part=bitwidths] g.cell[data-layer='5']")
    assert opened.run("document.querySelector('[data-part=bitwidths] [data-of=layer]').value") == "5"
    assert chosen() == expected(names[5])
    opened.run("document.querySelector('[data-part=bitwidths] svg.map').focus()")
    before = opened.run("document.querySelector('[data-part=bitwidths] g.cell.here').dataset.layer")
    opened.press("ArrowDown")
    opened.press("Enter")
    now = opened.run("document.querySelector('[data-part=bitwidths] [data-of=layer]').value")
    assert now != before
    assert chosen() == expected(names[int(now)])
    opened.run("document.querySelector('[data-part=bitwidths] [data-of=layer]').focus()")
    opened.press("Home")
    assert chosen() == expected(names[0])
    # The histogram: no bar beyond the largest bitwidth, and all of it.
    bars = [list(map(float, bar)) for bar in drawn(opened, "[data-chart=run-0-histogram] rect", "low", "high", "value")]
    assert sum(bar[2] for bar in bars) == pytest.approx(1, rel=1e-4)
    assert max(bar[1] for bar in bars) <= max(each["max"] for each in recorded.values()) + 1e-5
    assert min(bar[0] for bar in bars) >= min(each["min"] for each in recorded.values()) - 1e-5


def test_numerics_are_those_of_the_monitor(opened, tiny):
    recorded = metrics(tiny, "numerics")[-1]["layers"]
    for operand in ("input", "weight", "grad"):
        cells = drawn(opened, f"[data-part=numerics] [data-of={operand}] g.cell", "layer", "value")
        assert {int(n): float(value) for n, value in cells} == {
            n: pytest.approx(each[operand]["flushed"], rel=1e-5) for n, each in enumerate(recorded)
        }
    amax = drawn(opened, "[data-part=numerics] [data-of=amax] circle", "x", "y")
    steps = [line["step"] for line in metrics(tiny, "numerics")]
    assert [float(x) for x, _ in amax][: len(steps)] == steps
    assert float(amax[len(steps) - 1][1]) == pytest.approx(recorded[0]["input"]["amax"], rel=1e-5)


def test_values_appear_under_the_pointer_and_by_arrow_keys(opened, tiny):
    opened.run("document.querySelector('[data-chart=loss] .plot > svg').focus()")
    opened.press("Home")
    text = opened.run("document.querySelector('[data-chart=loss] .tip').textContent")
    first = metrics(tiny, "train")[0]
    assert "1 steps" in text
    assert f"{first['loss']:.4f}"[:5] in text
    opened.press("Tab")
    assert opened.run("document.querySelector('[data-chart=loss] .tip').hidden") is True


def test_bars_and_blocks_are_read_by_arrow_keys(opened, tiny):
    def tip(of: str) -> str:
        return opened.run(f"document.querySelector({json.dumps(of)}).querySelector('.tip').textContent")

    bars = [list(map(float, bar)) for bar in drawn(opened, "[data-chart=run-0-histogram] rect", "low", "high", "value")]
    opened.run("document.querySelector('[data-chart=run-0-histogram] .plot > svg').focus()")
    assert tip("[data-chart=run-0-histogram]").startswith(f"{bars[0][0]:.4g} to ")
    for bar in bars[1:]:
        opened.press("ArrowRight")
        assert tip("[data-chart=run-0-histogram]").startswith(f"{bar[0]:.4g} to ")
    blocks = "[data-part=bitwidths] [data-of=blocks]"
    values = {tuple(each[:2]): each[2] for each in drawn(opened, f"{blocks} rect", "row", "column", "value")}
    opened.run(f"document.querySelector('{blocks} > svg').focus()")
    for key, at in (("ArrowDown", ("1", "0")), ("ArrowRight", ("1", "1")), ("ArrowUp", ("0", "1")), ("ArrowUp", ("0", "1"))):
        opened.press(key)
        assert tip(blocks) == f"row {at[0]}, column {at[1]}: {float(values[at]):.2f} bits"
    assert opened.run(f"document.querySelectorAll('{blocks} .here').length") == 1
    opened.press("Escape")
    assert opened.run(f"document.querySelector('{blocks} .tip').hidden") is True


def test_a_format_has_one_colour_everywhere(opened):
    """In all three maps, in the legend, and in the files for papers."""
    fills = opened.run(
        "[...document.querySelectorAll('[data-part=plans] g.cell')]"
        ".map((g) => [g.dataset.text, g.querySelector('rect').getAttribute('fill')])"
    )
    legend = opened.run(
        "[...document.querySelectorAll('[data-part=plans] .legend li')]"
        ".map((li) => [li.textContent, li.querySelector('rect')?.getAttribute('fill')])"
    )
    assert {(text, colour) for text, colour in fills} == {(text, charts.format_colour(text)) for text, _ in fills}
    assert {(text, colour) for text, colour in legend if colour} >= {(text, colour) for text, colour in fills}


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable(opened, dark):
    opened.mode(dark)
    opened.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    opened.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    found = opened.run(CONTRAST)
    assert len(found) > 300
    assert [each for each in found if each[1] < 4.5] == []


def test_a_phone_shows_all_of_it(opened, tiny):
    opened.resize(380, 800, mobile=True)
    opened.open(tiny / "report.html")
    opened.requests.pop()
    opened.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    opened.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert opened.run("document.documentElement.scrollWidth") == 380
    wide = opened.run(
        "[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > 381"
        " && !e.closest('.scroll, .plot.wide, .maps .plot')).map((e) => e.tagName + ' ' + e.className)"
    )
    assert wide == []
    small = [each for each in opened.run(CONTRAST) if each[2] < 10]
    assert small == []
    narrow = opened.run(
        "[...document.querySelectorAll('h1, h2, h3, td:first-child')].filter((e) => e.clientWidth && e.clientWidth < 30)"
    )
    assert narrow == []


def test_a_chart_zooms_switches_to_log_hides_series_and_saves_itself(opened):
    chart = "document.querySelector('[data-chart=loss] .plot > svg').dataset"

    def drag(begin, end):
        box = opened.run(
            "(() => { const e = document.querySelector('[data-chart=loss] .plot > svg'); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.x, b.y + b.height / 2, b.width]; })()"
        )
        for kind, at in (("mousePressed", begin), ("mouseMoved", end), ("mouseReleased", end)):
            opened.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, x=box[0] + at * box[2], y=box[1])

    whole = float(opened.run(f"{chart}.x0")), float(opened.run(f"{chart}.x1"))
    drag(0.3, 0.6)
    low, high = float(opened.run(f"{chart}.x0")), float(opened.run(f"{chart}.x1"))
    assert whole[0] < low < high < whole[1]
    opened.click("[data-chart=loss] .whole")
    assert (float(opened.run(f"{chart}.x0")), float(opened.run(f"{chart}.x1"))) == whole
    # + and 0 on the keyboard do the same.
    opened.run("document.querySelector('[data-chart=loss] .plot > svg').focus()")
    for key in ("+", "0"):
        opened.run(f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")
        assert (float(opened.run(f"{chart}.x0")) > whole[0]) == (key == "+")
    tick = "document.querySelector('[data-chart=loss] .plot .tick').textContent"
    before = opened.run(tick), float(opened.run(f"{chart}.y0"))
    opened.click("[data-chart=loss] .tools button[title^=Log]")
    assert (opened.run(tick), float(opened.run(f"{chart}.y0"))) != before
    series = "document.querySelectorAll('[data-chart=loss] path.line[data-label]').length"
    assert opened.run(series) == 3
    opened.click("[data-chart=loss] .legend li:nth-child(2) button")
    assert opened.run(series) == 2
    # One series stays, whatever is hidden.
    for number in (1, 3, 4, 5):
        opened.run(f"document.querySelector('[data-chart=loss] .legend li:nth-child({number}) button')?.click()")
    assert (
        opened.run("document.querySelectorAll('[data-chart=loss] .point, [data-chart=loss] path.line[data-label]').length") > 0
    )
    opened.click("[data-chart=loss] .legend li:nth-child(1) button")
    saved = ElementTree.fromstring(opened.run("svgText(document.querySelector('[data-chart=loss] .plot'))"))
    texts = {"".join(each.itertext()) for each in saved.iter("{http://www.w3.org/2000/svg}text")}
    assert {"steps", "nats per token", "training, each step"} <= texts
    assert "held-out" not in texts  # it is hidden
    assert all(each.get("stroke", "").startswith(("rgb", "none")) for each in saved.iter("{http://www.w3.org/2000/svg}path"))
    maps = opened.run("[...document.querySelectorAll('[data-part] .plot > svg')].map((svg) => svgText(svg.parentElement))")
    assert len([ElementTree.fromstring(each) for each in maps]) > 8


def test_sensitivities_of_all_options_share_one_scale(opened):
    scale = "document.querySelector('[data-part=sensitivity] .scale').textContent"
    seen = set()
    for option in range(opened.run("document.querySelector('[data-of=option]').options.length")):
        opened.run(
            f"(() => {{ const s = document.querySelector('[data-of=option]'); s.value = {option};"
            "s.dispatchEvent(new Event('change')); })()"
        )
        seen.add(opened.run(scale))
    assert len(seen) == 1


def test_what_was_not_measured_is_said(browser, tmp_path):
    layer = {"name": "model.layers.0.mlp.up_proj", "input": {"cast": "e4m3 tensor", "flushed": 0.5}}
    entries = [*lines(), {"kind": "numerics", "step": 40, "time": 4, "layers": [layer], "problems": []}]
    browser.resize(1200)
    browser.mode(dark=False)
    browser.errors.clear()
    browser.open(report.write([make(tmp_path / "run", entries)]))
    assert browser.errors == []
    for of in ("amax-legend", "scales-legend"):
        assert browser.run(f"document.querySelector('[data-of={of}]').textContent") == "Not measured for this layer."


def test_the_loss_of_a_comparison_is_seen_on_a_phone(browser, tmp_path):
    config = '[precision]\nmode = "{}"\nrecipe = "fp8-block"\nstates = "dynamic8"\n[snip]\ntarget = 0.5\n'
    runs = [make(tmp_path / name, config_toml=config.format(name)) for name in ("bf16-sr", "fp32")]
    browser.resize(390, 800, mobile=True)
    browser.mode(dark=False)
    browser.errors.clear()
    browser.open(report.write(runs))
    assert browser.errors == []
    cells = browser.run(
        "[...document.querySelectorAll('#comparison > .card tbody tr')].map((row) => [row.cells[1].textContent,"
        " row.cells[1].getBoundingClientRect().right])"
    )
    assert [text for text, _ in cells] == ["2.0549", "2.0549"]
    assert max(right for _, right in cells) <= 390


def test_a_comparison_on_a_phone_keeps_names_whole(browser, tmp_path):
    runs = seeds(tmp_path, {"o1": [3.0, 3.2], "bf16-sr": [2.5, 2.7]})
    page = report.write(runs)
    browser.resize(380, 800, mobile=True)
    browser.errors.clear()
    browser.open(page)
    assert browser.errors == []
    assert browser.run("document.documentElement.scrollWidth") == 380
    heights = browser.run(
        "[...document.querySelectorAll('#comparison td:first-child')].map((e) => e.getBoundingClientRect().height)"
    )
    assert max(heights) < 45
    assert browser.run("document.querySelectorAll('[data-chart=difference] path.line').length") == 1
    assert browser.run("document.querySelectorAll('[data-chart=loss] path.band').length") >= 2


def test_runs_of_a_comparison_are_drawn_when_they_are_opened(browser, tmp_path):
    page = report.write(seeds(tmp_path, {"o1": [3.0], "bf16-sr": [2.5]}))
    browser.resize(1200)
    browser.errors.clear()
    browser.open(page)
    # Some browsers give closed parts no width: nothing is drawn in them before they are opened.
    browser.run("document.querySelectorAll('details:has(#run-1-precision) svg.map').forEach((svg) => svg.remove())")
    cells = "document.querySelector('#run-1-precision [data-part=plans]').querySelectorAll('g.cell').length"
    assert browser.run(cells) == 0
    browser.click("details:has(#run-1-precision) > summary")
    browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert browser.run(cells) == 12
    assert browser.errors == []


def test_hostile_names_stay_text(browser, tmp_path):
    names = [f"model.layers.{n}.{EVIL}" for n in range(3)]
    layers = {name: {"mean": 4.5, "min": 4, "max": 5, "bins": [[4, 0.5], [4.5, 0.5]]} for name in names}
    bad = {"kind": "guard", "step": 41, "time": 5, "event": EVIL, "text": EVIL, "where": EVIL}
    entries = [*lines(), bad, {"kind": "bitwidths", "step": 40, "time": 5, "layers": layers}]
    run = make(tmp_path / "<img src=x onerror=alert(1)>", entries, names=names)
    page = report.write([run], tmp_path / "page.html")
    browser.errors.clear()
    browser.requests.clear()
    browser.open(page)
    assert browser.errors == []
    assert browser.requests == [page.as_uri()]
    assert browser.run("document.scripts.length") == 2
    assert browser.run("document.images.length") == 0
    assert EVIL in browser.run("document.querySelector('[data-of=layer]').textContent")


def test_printing_opens_the_reasons_and_is_light(opened, tiny, tmp_path):
    opened.mode(True, "print")
    opened.run("window.dispatchEvent(new Event('beforeprint'))")
    assert opened.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.run("document.querySelector('details.print').open") is True
    bars = opened.run("[...document.querySelectorAll('.scale')].map((bar) => bar.getBoundingClientRect().height)")
    assert len(bars) == 3
    assert min(bars) > 10
    assert opened.pdf(tmp_path / "page.pdf").read_bytes()[:4] == b"%PDF"
    opened.mode(False)


@pytest.mark.exhaustive
def test_a_large_run(browser, tmp_path):
    """10,000 steps and 224 layers: less than 5 MB, built within 10 s, and interactive within 2 s, in seconds of a free core."""
    run = large(tmp_path / "large")
    began = time.process_time()
    made = report.Report([read(run)])
    page = write_page(made, run / "report.html")
    assert time.process_time() - began < 10
    assert page.stat().st_size < 5e6
    browser.resize(1200)
    browser.mode(dark=False)
    browser.errors.clear()
    browser.send("Performance.enable", timeDomain="threadTicks")
    browser.open(page)
    numbers = {each["name"]: each["value"] for each in browser.send("Performance.getMetrics")["metrics"]}
    assert browser.errors == []
    assert numbers["TaskDuration"] < 2
    assert browser.run("document.querySelectorAll('[data-part=plans] g.cell').length") == 3 * 32 * len(KINDS)
    spikes = [line["y"] for line in made.to_dict()["charts"]["loss"]["lines"]]
    assert all(len(ys) <= 801 for ys in spikes)

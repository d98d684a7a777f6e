"""`dither watch`: a page that renews itself and tells nobody else, and a view in the terminal."""

import functools
import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading

import chromium
import pytest
from report_runs import EVIL, lines, make
from rich.console import Console

from dither import UserError, cli
from dither.report.watch import LivePage, LiveServer, TerminalView, sparkline
from dither.spec.recipes import recipe
from dither.train import Status

BROWSER = chromium.find()
CONFIG = '[precision]\nmode = "o1"\nrecipe = "fp8-block"\n[run]\nsteps = 80\n'


def running(folder, steps=40):
    run = make(folder, [line for line in lines(steps) if line["kind"] != "end"], config_toml=CONFIG)
    Status(state="running", step=steps).save(run)
    return run


def append(run, *entries):
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in entries)


def train_line(step, loss=1.0):
    (found,) = [line for line in lines(step) if line["kind"] == "train" and line["step"] == step]
    return {**found, "loss": loss, "loss_ema": loss}


@pytest.fixture
def served(tmp_path):
    run = running(tmp_path / "run")
    with LiveServer(run) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield run, server
        server.shutdown()
        thread.join()


def request(server, path="/", method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True)
        for value in [f"127.0.0.1:{server.server_address[1]}"] if host is None else host:
            connection.putheader("Host", value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


# The server -------------------------------------------------------------------------------------------------------------


def test_the_page_is_served_on_this_machine_only(served):
    run, server = served
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    status, headers, html = request(server)
    assert status == 200
    assert server.server_address[0] == "127.0.0.1"
    assert "fp8-block" in html
    assert "connect-src &#39;self&#39;" in html
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers
    assert "Python" not in headers["Server"]
    assert request(server, method="HEAD")[::2] == (200, "")
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before


@pytest.mark.parametrize(
    "host",
    [["evil.example"], ["evil.example:80"], ["127.0.0.1.evil.example"], [], ["localhost", "evil.example"], [""], ["[::1]:80"]],
)
@pytest.mark.parametrize("path", ["/", "/update.json"])
def test_other_hosts_are_refused(served, host, path):
    status, _, text = request(served[1], path, host=host)
    assert status == 403
    assert "fp8-block" not in text


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "127.0.0.1"])
def test_a_tunnel_may_change_the_port(served, host):
    assert request(served[1], host=[host])[0] == 200


@pytest.mark.parametrize("path", ["/status.json", "/metrics.jsonl", "/../status.json", "/.", "/%2e%2e/x", "/run/"])
def test_no_file_is_served(served, path):
    assert request(served[1], path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_only_reading_is_allowed(served, method):
    status, _, text = request(served[1], method=method)
    assert status == 501
    assert "fp8-block" not in text


def test_updates_come_when_a_file_changed_and_say_how_the_run_ended(served):
    run, server = served
    stamp = re.search('data-stamp="(.*?)"', request(server)[2])[1]
    update = json.loads(request(server, f"/update.json?since={stamp}")[2])
    progress = "Running: step 40 of 80  loss 2.0549  1.04 k tokens/s  3.85 s left"
    assert update == {"stamp": stamp, "html": None, "text": progress, "share": 0.5}
    assert progress in request(server)[2]
    assert "killed" not in request(server)[2]
    server.pages[""]._next = 0.0  # as if the pause after building were over
    append(run, {"kind": "guard", "step": 41, "time": 5.0, "text": "A spike at step 41."})
    update = json.loads(request(server, f"/update.json?since={stamp}")[2])
    assert update["stamp"] != stamp
    assert "A spike at step 41." in update["html"]
    (run / "run.lock").touch()  # its process was killed
    server.pages[""]._next = 0.0
    last = json.loads(request(server, f"/update.json?since={update['stamp']}")[2])
    assert last["stamp"] != update["stamp"]
    assert last["text"] == "The run has ended: crashed at step 40."
    run.rename(run.with_name("moved"))
    assert "There is no run" in json.loads(request(server, "/update.json?since=x")[2])["text"]


def test_a_folder_with_runs_has_a_page_that_lists_them(tmp_path):
    running(tmp_path / "a" / "first")
    odd = make(tmp_path / "<b>\udcff x")
    make(tmp_path.parent / f"{tmp_path.name}-outside")
    with LiveServer(tmp_path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        status, _, html = request(server)
        assert status == 200
        assert "<b>" not in html
        links = re.findall(r'href="(.*?)"', html)
        assert set(links) == {"/a/first/", "/%3Cb%3E%FF%20x/"}
        for link in links:
            status, _, page = request(server, link)
            assert status == 200
            assert "fp8-block" in page
            assert json.loads(request(server, f"{link}update.json")[2])["html"].encode(errors="replace").decode() == page
        for path in ("/a/", "/update.json", "/a/first/status.json", f"/../{tmp_path.name}-outside/", "/a/../a/first/"):
            assert request(server, path)[0] == 404, path
        assert request(server, "/a/first/", host=["evil.example"])[0] == 403
        assert "step 40 of 80" in json.loads(request(server, "/a/first/update.json")[2])["text"]
        assert odd.is_dir()
        server.shutdown()
        thread.join()


def test_building_pages_takes_a_tenth_of_the_time(tmp_path):
    now = [0.0]

    def clock():
        now[0] += 1.0  # each look at the clock takes a second: building takes one
        return now[0]

    page = LivePage(running(tmp_path / "run"), clock)
    first = page.current()[0]
    stamps = []
    for step in range(41, 61):
        append(page.folder, train_line(step))
        stamps.append(page.current()[0])
    assert 2 <= len({first, *stamps}) <= 4


def test_bad_folders_and_ports_are_a_sentence(tmp_path, capsys, served):
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        ([str(tmp_path / "none")], "There is no run"),
        ([str(tmp_path / "empty")], "is not a run"),
        ([str(tmp_path), "--until-end"], "has several runs: --until-end needs the folder of one"),
        ([str(served[0]), "--port", "70000"], "from 0 to 65535"),
        ([str(served[0]), "--port", str(served[1].server_address[1])], "cannot be used"),
        ([str(served[0]), "--port", "80", "--terminal"], "leave out --port"),
    ):
        assert cli.main(["watch", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_the_command_ends_with_the_run_or_with_ctrl_c(tmp_path, capsys):
    assert cli.main(["watch", str(make(tmp_path / "done")), "--until-end"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"http://127\.0\.0\.1:\d+/", said)
    assert "The run done has ended at step 40: done." in said
    command = [sys.executable, "-m", "dither.cli", "watch", str(running(tmp_path / "run"))]
    # A shell starts its background commands with Ctrl-C ignored, which children would inherit.
    heeded = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeded) as process:
        assert "is shown at http://127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "", "The watch has ended.\n")


# The page in a browser --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(BROWSER is None, reason="There is no Chromium here: apt-get install chromium.")
def test_the_page_renews_itself_and_keeps_what_was_chosen(tmp_path):
    plans = [
        {"kind": "plan", "step": step, "time": step / 10, "plan": recipe(name).to_dict(), "reason": EVIL, "changed": True}
        for step, name in ((10, "bf16"), (20, "fp8-block"), (30, "bf16"))
    ]
    run = running(tmp_path / "run")
    append(run, *plans)
    with LiveServer(run) as server, chromium.Chromium(BROWSER) as page:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        page.send("Page.navigate", url=server.address)
        page.wait("Page.loadEventFired")
        page.run("""(() => {
          document.querySelector('input[name=axis][value=tokens]').click();
          const slider = document.querySelector('[data-part=plans] [data-of=slider]');
          slider.value = 1;
          slider.dispatchEvent(new Event('input'));
          slider.focus();
          window.marker = 'not reloaded';
        })()""")
        now = "document.querySelector('[data-part=plans] [data-of=now]').textContent"
        assert page.run(now).startswith("Plan 2 of 4")
        append(run, train_line(60, 0.5), {**plans[1], "step": 55})
        server.pages[""]._next = 0.0
        page.run("ask()")
        assert page.run("window.marker") == "not reloaded"
        assert page.run("LIVE.querySelector('progress').value") == 0.75
        assert page.run("LIVE.textContent").startswith("Running: step 60 of 80")
        assert page.run(now).startswith("Plan 2 of 5")
        assert page.run("document.querySelector('[data-part=plans] [data-of=slider]').value") == "1"
        assert page.run("document.activeElement.dataset.of") == "slider"
        assert page.run("[axis, document.querySelector('input[name=axis]:checked').value].join()") == "tokens,tokens"
        assert page.run("DATA.charts.loss.lines[0].y.at(-1)") == 0.5
        # The slider at its end follows the newest plan.
        page.run("""(() => {
          const slider = document.querySelector('[data-part=plans] [data-of=slider]');
          slider.value = slider.max;
          slider.dispatchEvent(new Event('input'));
        })()""")
        append(run, {**plans[0], "step": 65})
        server.pages[""]._next = 0.0
        page.run("ask()")
        assert page.run(now).startswith("Plan 6 of 6")
        assert page.run("document.querySelectorAll('main script').length") == 0
        Status(state="done", step=80).save(run)
        page.run("ask()")
        assert page.run("LIVE.textContent") == "The run has ended: done at step 80."
        assert page.run("LIVE.querySelector('progress').hidden") is True
        assert page.errors == []
        assert all(url.startswith(server.address) for url in page.requests)
        server.shutdown()
        thread.join()


# The terminal -----------------------------------------------------------------------------------------------------------


def test_the_view_shows_progress_loss_and_events(tmp_path):
    run = running(tmp_path / "run")
    view = TerminalView(run)
    assert len(view.update()) == 42  # start, 40 steps, one evaluation
    quiet = {"kind": "numerics", "step": 41, "time": 5.0, "problems": []}
    append(run, quiet, {"kind": "guard", "step": 41, "time": 5.0, "text": "A spike\x1b[2J."}, train_line(60, 0.5))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6')
    assert view.update() == ["step 41  guard: A spike\\x1b[2J.", "step 60 of 80  loss 0.5000  1.06 k tokens/s  1.89 s left"]
    assert view.update() == []
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.print(view.render(80))
    shown = console.file.getvalue()
    assert len(shown.splitlines()) == 6
    for words in (
        "run: running",
        "━",
        "step 60 of 80  loss 0.5000",
        "held-out loss 2.0549",
        "step 41  guard: A spike\\x1b[2J.",
        "▁",
    ):
        assert words in shown, words
    assert sparkline([1.0, 2.0, 3.0], 3) == "▁▅█"
    assert sparkline([], 5) == ""
    assert len(sparkline(list(range(1000)), 70)) == 70


def test_plans_and_problems_are_events(tmp_path):
    plan = {"kind": "plan", "step": 0, "time": 0.0, "plan": recipe("fp8-block").to_dict(), "reason": "the run begins"}
    again = {**plan, "step": 8, "reason": "no better one", "changed": False}
    clipped = {
        "kind": "numerics",
        "step": 9,
        "time": 0.0,
        "problems": ["3 % of the input of q_proj is clipped by e4m3 tensor."],
    }
    assert TerminalView(make(tmp_path / "run", [plan, again, clipped])).update() == [
        "step 0  plan changed: the run begins",
        "step 8  plan kept: no better one",
        "step 9  numerics: 3 % of the input of q_proj is clipped by e4m3 tensor.",
    ]


def test_a_file_that_became_shorter_is_read_again(tmp_path):
    run = running(tmp_path / "run")
    view = TerminalView(run)
    view.update()
    (run / "metrics.jsonl").write_text(json.dumps(train_line(3, 7.0)) + "\n")
    assert view.ended() == ""
    assert view.update() == ["step 3 of 80  loss 7.0000  1 k tokens/s  7.68 s left"]
    run.rename(tmp_path / "moved")
    assert view.update() == []
    assert view.ended().startswith("There is no run")


def test_plain_lines_when_piped(tmp_path):
    run = running(tmp_path / "run")
    append(run, train_line(60, 0.5))
    read_end, write_end = os.pipe()
    command = [sys.executable, "-u", "-m", "dither.cli", "watch", str(run), "--terminal"]
    with subprocess.Popen(command, stdout=write_end) as process, os.fdopen(read_end) as out:
        os.close(write_end)
        assert out.readline() == "step 60 of 80  loss 0.5000  1.06 k tokens/s  1.89 s left\n"
        append(run, train_line(61, 0.25))
        assert out.readline().startswith("step 61 of 80  loss 0.2500")
        Status(state="done", step=61, why="Enough.").save(run)
        assert out.read() == "The run run has ended at step 61: done. Enough.\n"
        assert process.wait(timeout=60) == 0


def test_a_folder_that_is_no_run_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="is not a run"):
        TerminalView(tmp_path)
    assert TerminalView(make(tmp_path / "empty", [])).update() == []


@pytest.mark.parametrize(("status", "why"), [("{", "status.json"), ("{}", "status.json has no state")])
def test_a_status_that_cannot_be_read_ends_the_watch(status, why, tmp_path, capsys):
    run = make(tmp_path / "run", [], status_json=status)
    assert cli.main(["watch", str(run), "--terminal"]) == 0
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("It is unknown whether the run run goes on: ")
    assert why in said


def test_a_run_without_lines_is_waited_for(tmp_path):
    run = make(tmp_path / "run", [], status_json=None)
    command = [sys.executable, "-u", "-m", "dither.cli", "watch", str(run), "--terminal"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == f"{run} has no lines yet: waiting for them until Ctrl-C.\n"
        Status(state="done", step=0, why="").save(run)
        assert process.stdout.read() == "The run run has ended at step 0: done.\n"
        assert process.wait(timeout=60) == 0

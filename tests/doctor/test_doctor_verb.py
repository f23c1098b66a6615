"""If this fails, `rung doctor` hides a finding, needs torch to answer, or answers a mistake with a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rung.cli import cli, doctor
from rung.doctor.finding import Finding
from rung.doctor.report import finding_lines, sentence
from rung.errors import RunError
from rung.runs.record import Record
from tests.cases import write_doctor_page
from tests.cases.performance_cases import made, slow_loader


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three runs: healthy, sick, and one that has not taken a step."""
    root = tmp_path / "runs"
    for history in (made(), slow_loader(1), None):
        record = Record.create(
            root, "text", recipe="text", preset=None, command=["test"], seed=1,
            config={"system": {"data_workers": 1}}, sources={}, derived=made().derived, data={},
        )  # fmt: skip
        record.event("check", step=0, results=[
            {"name": "ids in range", "level": "pass", "seen": "all", "remedy": "", "rule": "D3"},
            {"name": "decay", "level": "warn", "seen": "1000 of 600 steps", "remedy": "set it", "rule": "O10"},
        ])  # fmt: skip
        if history is None:
            record.close()
            continue
        for step in range(history.end):
            record.log(step, {n: float(s.values[step]) for n, s in history.rows.items() if len(s) == history.end})
        record.event("eval", step=600, results={"val": {"loss": 1.234}})
        record.finish("finished")
    return root


def ask(root: Path, *args: str) -> Result:
    result = CliRunner().invoke(doctor.command, [*args, "--runs", str(root)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_run_without_findings_gets_one_sentence_with_numbers(root: Path) -> None:
    first, *rest = ask(root, "text/1").output.split("\n\n")
    report = json.loads(ask(root, "text/1", "--json").output)
    answers = report["answers"]
    first = " ".join(first.split())
    assert first.startswith("text/1 (finished, 600 steps): not known to be well, as nobody looked whether ")
    assert "val 1.234 at step 600" in first
    assert (
        rest[-1].splitlines()[-1]
        == f"0 sick, {len(answers['healthy'])} healthy, {len(answers['not_looked_at'])} not looked at"
    )
    assert "signals.activation_stats_every=100" in rest[-1]
    assert report["how"]["A3"] == "signals.activation_stats_every=100"


def test_a_finding_has_all_that_a_reader_needs(root: Path) -> None:
    text = ask(root, "text/2").output
    assert "text/2 (finished, 600 steps): 1 warn." in text
    for part in ("P1  warn  Waiting for data: The device waited for data 61", "Since step 80.", "\n  evidence  wait_s",
                 "\n  ruled out ", "\n  confirm   ", "\n  try       ",
                 f"rung train --parent {root}/text/2 system.data_workers=2 --why"):  # fmt: skip
        assert part in text


def test_the_report_repeats_the_warnings_of_the_checks(root: Path) -> None:
    for run in ("text/1", "text/3"):
        text = ask(root, run).output
        assert "warn  decay: 1000 of 600 steps; set it" in text
        assert "ids in range" not in text


def test_a_run_without_steps_and_a_run_in_progress(root: Path) -> None:
    assert "has taken no step yet" in ask(root, "text/3").output
    about = root / "text" / "3" / "run.json"
    known = json.loads(about.read_text())
    about.write_text(json.dumps({**known, "status": "finished", "last_step": 2800}))  # of another machine, in part
    assert "says it has taken 2800 steps, but none of their rows is in its folder" in " ".join(
        ask(root, "text/3").output.split()
    )
    about.write_text(json.dumps(known))
    record = Record.reopen(root / "text" / "1", command=["test"])
    assert ask(root, "text/1").exit_code == 0
    record.close()


def test_severity_and_check(root: Path) -> None:
    shown = ask(root, "text/2", "--severity", "sick").output
    assert "Waiting for data" not in shown
    assert "1 more below sick: P1 (--all)" in shown
    assert ask(root, "text/2", "--check").exit_code == 0  # a warning is no reason to stop
    record = Record.reopen(root / "text" / "2", command=["test"])
    record.event("ranks_differ", step=500, tensors=["a"])
    record.finish("finished")
    assert ask(root, "text/2").exit_code == 0
    assert ask(root, "text/2", "--check").exit_code == 1


def test_json_has_the_same(root: Path) -> None:
    report = json.loads(ask(root, "text/2", "--json").output)
    assert report["run"] == "text/2"
    assert not report["is_sick"]
    assert [(f["rule"], f["severity"]) for f in report["findings"]] == [("P1", "warn")]
    assert report["findings"][0]["command"].startswith("rung train --parent ")
    assert report["preflight"][0]["name"] == "decay"
    assert "attention" in report["unasked"].values()


@pytest.mark.parametrize(("run", "named"), [("txt", "text"), ("text/9", "text/9")])
def test_bad_input_is_answered_in_one_sentence(root: Path, run: str, named: str) -> None:
    with pytest.raises(RunError, match=named):
        ask(root, run)
    done = ask(root, "text", "--severity", "mild")
    assert done.exit_code == 2
    assert "'mild'" in done.output


def test_it_works_where_torch_cannot_be_imported(root: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from rung.cli import doctor\n"
        f"doctor.command(['text/2', '--runs', {str(root)!r}], standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "P1  warn" in done.stdout


def test_a_finding_is_wrapped_and_its_command_is_not() -> None:
    finding = Finding("sick", "x " * 200, 3, ["y " * 200], changes={"lr.learning_rate": 1e-3}, title="t", rule="O1")
    lines = list(finding_lines(finding, "text/2"))
    assert max(map(len, lines)) <= 118
    assert lines[-1].strip() == 'rung train --parent text/2 lr.learning_rate=0.001 --why "O1: t"'


@pytest.mark.parametrize(
    ("text", "expected"),
    [("the rate is high", "The rate is high."), ("lr.min_lr is 0", "lr.min_lr is 0."), ("Done.", "Done."), ("", ".")],
)
def test_sentences(text: str, expected: str) -> None:
    assert sentence(text) == expected


def test_help_has_examples() -> None:
    helped = CliRunner().invoke(cli, ["doctor", "--help"])
    assert helped.exit_code == 0
    assert "rung doctor piano/7" in helped.output


def test_the_catalogue_in_the_guide_is_up_to_date() -> None:
    text = write_doctor_page.PAGE.read_text("utf-8")
    assert write_doctor_page.between(text, write_doctor_page.CATALOGUE) == write_doctor_page.catalogue_table(), (
        "run python -m tests.cases.write_doctor_page --catalogue"
    )

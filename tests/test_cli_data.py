"""`hf-icot data multiplication`: operands in, lines out."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_icot.cli import main
from hf_icot.tasks.multiplication import format_lines, parse_lines
from hf_icot.tasks.operands import from_integers, sample_operands


ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def run(capfd, *arguments):
    """Exit status, standard output and standard error of one command."""
    try:
        status = main(["data", "multiplication", *map(str, arguments)])
    except SystemExit as stopped:
        status = stopped.code
    return status, *capfd.readouterr()


def test_lines_keep_the_order_of_operands_of_all_sizes(tmp_path, capfd):
    written = [
        ("0012", "34"),
        ("5", "6"),
        ("2365", "4347"),
        ("99", "7"),
        ("12", "34"),
        ("00", "0"),
        ("9" * 20, "8" * 20),
    ]
    path = tmp_path / "operands.txt"
    path.write_bytes(b"".join(f"{a}\t {b}\r\n".encode() for a, b in written) + b"\n")
    expected = [format_lines(*from_integers([(int(a), int(b))], (len(a), len(b)))).decode() for a, b in written]
    assert run(capfd, "--operands", path) == (0, "".join(expected), "")
    assert expected[0].startswith("2 1 0 0 * 4 3||") and expected[5] == "0 0 * 0||0 0 0 #### 0 0 0\n"


def test_standard_input_and_one_size(monkeypatch, capfd):
    for data, pairs in ((b"12 34\n56 78\n", [(12, 34), (56, 78)]), (b"", [])):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert run(capfd, "--operands", "-") == (0, format_lines(*from_integers(pairs, (2, 2))).decode(), "")


def test_random(capfd):
    status, text, _ = run(capfd, "--random", 50, "--digits", 3, 2, "--digits", 1, 1, "--seed", 7)
    expected = [format_lines(*sample_operands(size, 50, seed=7)) for size in ((3, 2), (1, 1))]
    assert status == 0 and text.encode() == b"".join(expected)
    assert run(capfd, "--random", 5)[1].encode() == format_lines(*sample_operands((4, 4), 5, seed=0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operands", "operands.txt"], "operands.txt, line 3: expected two integers such as '1234 5678', not '12'"),
        (["--operands", "missing.txt"], "missing.txt"),
        (["--operands", "good.txt", "--digits", "4", "4"], "--digits goes with --random"),
        (["--operands", "good.txt", "--seed", "1"], "--seed goes with --random"),
        (["--random", "101", "--digits", "1", "1"], "1x1 digits: 101 operand pairs asked for, only 100 exist"),
        (["--random", "5", "--digits", "2", "2", "--digits", "0", "1"], "from 1 to 20, not 0 and 1"),
        (["--random", "-1"], "must be 0 or more, not -1"),
        (["--random", "1", "--seed", "-1"], "seed must be 0 or more, not -1"),
        (["--random", "1", "--operands", "good.txt"], "not allowed with"),
        ([], "required"),
    ],
)
def test_errors_leave_standard_output_empty(tmp_path, monkeypatch, capfd, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("operands.txt").write_text("1 2\n33 44\n12\n")
    Path("good.txt").write_text("1 2\n")
    status, output, errors = run(capfd, *arguments)
    assert (status, output) == (2, "") and message in errors


@pytest.mark.parametrize("arguments", [[], ["data"], ["data", "division"], ["nonsense"]])
def test_commands_that_are_none(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and "usage: hf-icot" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_stops_early_is_no_error(unbuffered):
    """As a module, with more lines than a pipe holds and a reader that takes one."""
    command = [sys.executable, "-m", "hf_icot.cli", "data", "multiplication", "--random", "20000"]
    environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        line = process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait() == 141 and errors == b""
    assert list(parse_lines(line)) == [(4, 4)]

"""Dataset repositories: what the scripts write, what load_dataset reads, and what happens when something is amiss."""

import hashlib
import importlib.util
import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from datasets import Features, Value, get_dataset_config_names, load_dataset
from huggingface_hub import DatasetCard

from hf_icot.tasks.multiplication import columns, format_lines, parse
from hf_icot.tasks.operands import sample_operands, split_operands
from hf_icot.tasks.repository import DatasetRepository, _size_category


SCRIPT = Path(__file__).parent.parent / "dataset_scripts" / "build_multiplication.py"
spec = importlib.util.spec_from_file_location("build_multiplication", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
STRINGS = Features({name: Value("string") for name in ("question", "cot", "answer")})


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def build(out, *flags, train=300, held_out=20):
    counts = ("--train", str(train), "--validation", str(held_out), "--test", str(held_out))
    return script.main([*flags, *counts, "--out", str(out)])


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A repository of two sizes with several row groups."""
    out = tmp_path_factory.mktemp("data") / "multiplication"
    group, script.ROW_GROUP = script.ROW_GROUP, 128
    build(out, "--digits", "10", "10", "--digits", "3", "2", "--seed", "4")
    script.ROW_GROUP = group
    return out


def test_load_dataset_reads_it(built):
    assert get_dataset_config_names(str(built)) == ["3x2", "10x10"]
    for digits in ((3, 2), (10, 10)):
        name = "{}x{}".format(*digits)
        splits = load_dataset(str(built), name)
        assert {split: rows.num_rows for split, rows in splits.items()} == {"train": 300, "validation": 20, "test": 20}
        drawn = split_operands(digits, {"train": 300, "validation": 20, "test": 20}, seed=4)
        for split, rows in splits.items():
            assert rows.features == STRINGS
            assert rows.to_list() == columns(*drawn[split]).to_pylist()
        percent = load_dataset(str(built), name, split="train[:1%]")
        assert percent.to_list() == splits["train"].to_list()[:3]
        stream = load_dataset(str(built), name, split="train", streaming=True)
        assert stream.features == STRINGS and list(stream) == splits["train"].to_list()


def test_files_and_metadata(built):
    metadata = json.loads((built / "metadata.json").read_text())
    assert metadata["task"] == "multiplication" and list(metadata["configs"]) == ["3x2", "10x10"]
    for config in metadata["configs"].values():
        assert config["seed"] == 4 and {"hf_icot", "numpy", "pyarrow", "python"} == set(config["versions"])
        assert list(parse([config["example"].split("||")[0]])) == [tuple(config["digits"])]
        for info in config["splits"].values():
            data = (built / info["file"]).read_bytes()
            assert info["sha256"] == hashlib.sha256(data).hexdigest() and info["file_bytes"] == len(data)
            assert info["num_bytes"] == pq.read_table(built / info["file"]).nbytes
    file = pq.ParquetFile(built / "3x2" / "train-00000-of-00001.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [128, 128, 44]


def test_card(built):
    card = DatasetCard.load(built / "README.md")
    assert card.data.license == "apache-2.0" and card.data.size_categories == ["n<1K"]
    assert card.data.task_categories == ["text-generation"]
    assert [config["config_name"] for config in card.data.configs] == ["3x2", "10x10"]
    infos = {info["config_name"]: info for info in card.data.dataset_info}
    splits = {split["name"]: split["num_examples"] for split in infos["3x2"]["splits"]}
    assert splits == {"train": 300, "validation": 20, "test": 20}
    sizes = [path.stat().st_size for path in (built / "3x2").iterdir()]
    assert infos["3x2"]["download_size"] == sum(sizes)
    assert infos["3x2"]["dataset_size"] == sum(split["num_bytes"] for split in infos["3x2"]["splits"])
    assert "| 10x10 | 300 | 20 | 20 | 4 |" in card.text and "2405.14838" in card.text and "2510.00184" in card.text
    commands = [line for line in card.text.splitlines() if line.startswith("python dataset_scripts/")]
    flags = "--train 300 --validation 20 --test 20 --seed 4 --out DIR"
    assert commands == [f"python {SCRIPT.parent.name}/{SCRIPT.name} --digits {d} {flags}" for d in ("3 2", "10 10")]


def test_the_card_s_command_gives_the_same_bytes(built, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "ROW_GROUP", 128)
    out = tmp_path / "again"
    text = (built / "README.md").read_text()
    for line in text.splitlines():
        if line.startswith("python dataset_scripts/"):
            script.main([str(out) if flag == "DIR" else flag for flag in line.split()[2:]])
    assert contents(out) == contents(built)


def test_adding_a_size_keeps_the_rest(tmp_path):
    out = tmp_path / "data"
    out.mkdir()  # an empty folder will do
    build(out, "--digits", "2", "2")
    (out / ".gitattributes").write_text("*.parquet filter=lfs\n")
    before = contents(out)
    build(out, "--digits", "3", "2", train=50)
    after = contents(out)
    kept = {path for path in before if path.name not in ("README.md", "metadata.json")}
    assert len(kept) == 4 and all(after[path] == before[path] for path in kept)
    assert get_dataset_config_names(str(out)) == ["2x2", "3x2"]
    assert load_dataset(str(out), "3x2", split="train").num_rows == 50
    build(out, "--digits", "2", "2", "--seed", "1", train=40)
    assert load_dataset(str(out), "2x2", split="train").num_rows == 40
    assert contents(out)[Path("3x2/train-00000-of-00001.parquet")] == after[Path("3x2/train-00000-of-00001.parquet")]
    assert os.listdir(tmp_path) == ["data"]


def test_all_rows_and_excluded_ones(tmp_path):
    held = sample_operands((2, 1), 100, seed=8)
    (tmp_path / "held.txt").write_bytes(format_lines(*held))
    build(tmp_path / "data", "--digits", "2", "1", "--exclude", str(tmp_path / "held.txt"), train="all", held_out=0)
    splits = load_dataset(str(tmp_path / "data"), "2x1")
    assert {name: rows.num_rows for name, rows in splits.items()} == {"train": 800}
    assert not set(splits["train"]["question"]) & set(columns(*held)["question"].to_pylist())
    metadata = json.loads((tmp_path / "data" / "metadata.json").read_text())["configs"]["2x1"]
    assert metadata["excluded"] == 100 and "--train all" in metadata["command"]
    assert "--exclude held.txt" in metadata["command"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--digits", "4", "4", "--digits", "1", "1"], "1x1 digits: 340 operand pairs asked for, only 100 exist"),
        (["--digits", "4", "21"], "from 1 to 20, not 4 and 21"),
        (["--digits", "4", "4", "--seed", "-1"], "seed must be 0 or more, not -1"),
        (["--digits", "4", "4", "--exclude", "missing.txt"], "missing.txt"),
        (["--digits", "4", "4", "--train", "-5"], "'train' must be 0 or more, not -5"),
        (["--digits", "4", "4", "--train", "few"], "--train"),
        (["--digits", "4"], "--digits"),
        ([], "--digits"),
    ],
)
def test_errors_come_before_any_work(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.setattr(script, "split_operands", None)
    counts = ["--train", "300", "--validation", "20", "--test", "20"]
    with pytest.raises(SystemExit) as stopped:
        script.main([*counts, *flags, "--out", str(tmp_path / "data")])
    assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert not os.listdir(tmp_path)


def test_foreign_folders_are_refused(tmp_path, capsys):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metadata.json").write_text('{"task": "parity", "configs": {}}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metadata.json").write_text("[1]")
    before = contents(tmp_path)
    for name, message in {
        "notes": "is no dataset repository",
        "file": "is a file",
        "other": "of 'parity', not of 'multiplication'",
        "broken": "no valid metadata.json",
    }.items():
        with pytest.raises(SystemExit):
            build(tmp_path / name, "--digits", "2", "2")
        assert message in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_failure_leaves_everything_as_it_was(tmp_path, monkeypatch):
    out = tmp_path / "data"
    build(out, "--digits", "2", "2")
    before = contents(out)
    table = columns(*sample_operands((2, 2), 5))

    def broken():
        yield table
        raise RuntimeError("no more")

    for tables in (lambda: iter([table]), broken):
        with pytest.raises(RuntimeError), DatasetRepository(out, "multiplication") as repository:
            repository.write("2x2", STRINGS, {"train": (5, tables())}, {})
            raise RuntimeError("before publishing")
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) == fail_at:
            raise OSError("disk on fire")
        real(source, target)

    # Two renames for each of 2x2, metadata and card, which exist, and one for 2x1.
    for fail_at in range(1, 9):
        with DatasetRepository(out, "multiplication") as repository:
            repository.write("2x2", STRINGS, {"train": (5, [table])}, {"seed": 1})
            repository.write("2x1", STRINGS, {"train": (5, [table])}, {"seed": 1})
            calls.clear()
            with monkeypatch.context() as patched:
                patched.setattr("os.replace", replace)
                if fail_at < 8:
                    with pytest.raises(OSError, match="fire"):
                        repository.publish(lambda repository: "---\nlicense: mit\n---\n")
                    assert contents(out) == before
                else:
                    repository.publish(lambda repository: "---\nlicense: mit\n---\n")
        assert os.listdir(tmp_path) == ["data"]
    assert (out / "2x1").is_dir() and contents(out) != before


@pytest.mark.parametrize(
    ("rows", "category"),
    [
        (999, "n<1K"),
        (1000, "1K<n<10K"),
        (810_000, "100K<n<1M"),
        (1_000_000, "1M<n<10M"),
        (10**9 - 1, "100M<n<1B"),
        (10**9, "n>1B"),
    ],
)
def test_size_categories(rows, category):
    assert _size_category(rows) == category

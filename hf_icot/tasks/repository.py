"""Dataset repositories on disk, as `load_dataset` and the Hub read them: Parquet files, a card and their metadata.

A repository of one task holds one configuration for each variant of it (for multiplication, each operand size):

    <config>/<split>-00000-of-00001.parquet    README.md    metadata.json
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features
from huggingface_hub import DatasetCard, DatasetCardData
from tqdm.auto import tqdm

from .. import __version__


METADATA = "metadata.json"


class DatasetRepository:
    """Adds configurations to a new or existing repository; nothing changes in `folder` before `publish`.

    Use as a context manager, which cleans up what was not published:

        with DatasetRepository("out", "multiplication") as repository:
            repository.write("4x4", features, {"train": (807_000, tables)}, {"seed": 0})
            repository.publish(card)

    Args:
        folder: the repository. May be missing or empty, or hold one of the same task, whose other configurations and
            other files stay as they are.
        task: name of the task.

    Raises:
        FileExistsError: `folder` is a file, or holds something else.
    """

    def __init__(self, folder: str | Path, task: str):
        self.folder = Path(folder).resolve()
        self.task = task
        self.configs: dict[str, dict] = {}
        self._added: list[str] = []
        self._staging: Path | None = None
        if self.folder.is_dir() and any(self.folder.iterdir()):
            try:
                metadata = json.loads((self.folder / METADATA).read_text(encoding="utf-8"))
                found, self.configs = metadata["task"], dict(metadata["configs"])
            except (OSError, ValueError, KeyError, TypeError):
                raise FileExistsError(
                    f"{folder} exists and is no dataset repository (it has no valid {METADATA}): choose another folder"
                ) from None
            if found != task:
                raise FileExistsError(f"{folder} is a dataset repository of {found!r}, not of {task!r}")
        elif self.folder.exists() and not self.folder.is_dir():
            raise FileExistsError(f"{folder} is a file: choose another folder")

    def __enter__(self) -> DatasetRepository:
        # Beside the folder, so that a rename puts everything in place at once.
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._staging = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}-", dir=self.folder.parent))
        os.chmod(self._staging, 0o755)
        return self

    def __exit__(self, *exception) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)

    def write(
        self, config: str, features: Features, splits: dict[str, tuple[int, Iterable[pa.Table]]], info: dict
    ) -> None:
        """Write the Parquet files of one configuration, replacing an older one of that name when published.

        The same rows give the same bytes with the same version of pyarrow.

        Args:
            features: types of the columns; they go into the files, so that nothing has to be inferred.
            splits: for each split the number of rows and tables of them, one for each row group.
            info: what else the metadata says of the configuration, as JSON.
        """
        written = {}
        for split, (rows, tables) in splits.items():
            path = self._staging / config / f"{split}-00000-of-00001.parquet"
            path.parent.mkdir(exist_ok=True)
            size = 0
            with (
                tqdm(total=rows, desc=f"{config} {split}", unit=" rows", unit_scale=True, disable=None) as bar,
                # Long texts that hardly repeat are no case for a dictionary. Chunks by content let the Hub store a
                # changed file as its difference.
                pq.ParquetWriter(
                    path,
                    features.arrow_schema,
                    compression="zstd",
                    use_dictionary=False,
                    write_page_index=True,
                    use_content_defined_chunking=True,
                ) as writer,
            ):
                for table in tables:
                    writer.write_table(table.cast(features.arrow_schema), row_group_size=max(1, len(table)))
                    size += table.nbytes
                    bar.update(len(table))
            written[split] = {
                "file": path.relative_to(self._staging).as_posix(),
                "num_examples": rows,
                "num_bytes": size,
                "file_bytes": path.stat().st_size,
                "sha256": _sha256(path),
            }
        versions = {
            "hf_icot": __version__,
            "python": platform.python_version(),
            "numpy": numpy.__version__,
            "pyarrow": pa.__version__,
        }
        columns = features._to_yaml_list()
        self.configs[config] = {**info, "features": columns, "splits": written, "versions": versions}
        self._added.append(config)

    def card_data(self, **fields) -> DatasetCardData:
        """The card's YAML header: `fields`, the size category, and for each configuration its files and its size."""
        configs, infos = [], []
        for name, config in self.configs.items():
            splits = config["splits"]
            files = [{"split": split, "path": info["file"]} for split, info in splits.items()]
            configs.append({"config_name": name, "data_files": files})
            counts = ("num_bytes", "num_examples")
            infos.append(
                {
                    "config_name": name,
                    "features": config["features"],
                    "splits": [{"name": split, **{c: info[c] for c in counts}} for split, info in splits.items()],
                    "download_size": sum(info["file_bytes"] for info in splits.values()),
                    "dataset_size": sum(info["num_bytes"] for info in splits.values()),
                }
            )
        rows = sum(info["num_examples"] for config in self.configs.values() for info in config["splits"].values())
        return DatasetCardData(size_categories=[_size_category(rows)], configs=configs, dataset_info=infos, **fields)

    def publish(self, card: Callable[[DatasetRepository], str]) -> None:
        """Put everything written into the folder, with metadata and card.

        A new repository appears by one rename. In an existing one each new configuration, then the metadata, then the
        card is renamed into place, and put back if that fails.

        Args:
            card: makes the text of README.md, header included, once all configurations are known.
        """
        self.configs = dict(sorted(self.configs.items(), key=lambda item: _natural(item[0])))
        metadata = {"task": self.task, "configs": self.configs}
        (self._staging / METADATA).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        DatasetCard(card(self)).save(self._staging / "README.md")
        if not self.folder.exists() or not any(self.folder.iterdir()):
            if self.folder.exists():
                self.folder.rmdir()
            os.replace(self._staging, self.folder)
            return
        replaced = self._staging / "replaced"
        replaced.mkdir()
        moved = []
        try:
            for name in (*self._added, METADATA, "README.md"):
                if (self.folder / name).exists():
                    os.replace(self.folder / name, replaced / name)
                moved.append(name)
                os.replace(self._staging / name, self.folder / name)
        except BaseException:
            for name in reversed(moved):
                if (self.folder / name).exists():
                    os.replace(self.folder / name, self._staging / name)
                if (replaced / name).exists():
                    os.replace(replaced / name, self.folder / name)
            raise


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _natural(name: str) -> list:
    """Sorts 4x4 before 10x10."""
    return [int(part) if part.isdigit() else part for part in name.replace("x", " x ").split()]


def _size_category(rows: int) -> str:
    names = ("1K", "10K", "100K", "1M", "10M", "100M", "1B")
    if rows < 1000:
        return "n<1K"
    for power, (low, high) in enumerate(zip(names, names[1:], strict=False), 4):
        if rows < 10**power:
            return f"{low}<n<{high}"
    return "n>1B"

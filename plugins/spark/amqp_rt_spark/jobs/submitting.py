"""Submit jobs to a cluster: the command line of ``spark-submit``, and an archive of our Python code.

Our code is pure Python, and so is click; msgspec and pyarrow are not, and must be installed on the cluster.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

#: Modules and packages in the archive.
_PACKED: Final = ("amqp_rt", "amqp_rt_spark", "pyspark_amqp_rt", "click")
#: Setting of the path on which Python workers look for modules.
_PATH: Final = "spark.executorEnv.PYTHONPATH"
#: Suffixes of other files of these packages.
_DATA: Final = (".jinja", ".properties", ".typed")
#: Time of every entry, the earliest that the format allows, so that archives are reproducible.
_TIME: Final = (1980, 1, 1, 0, 0, 0)


def submit_line(
    name: str,
    arguments: Sequence[str],
    *,
    master: str,
    settings: Mapping[str, str],
    archive: str | None,
) -> list[str]:
    """Return the words of the command line that runs the job *name* with *arguments* at *master*."""
    line = ["spark-submit", "--master", master, "--name", f"amqp-rt {name}"]
    settings = dict(settings)
    if archive is not None:
        # The Python process that plans a stream, beside the driver, does not get --py-files: the archive
        # is where the driver was started, or where Spark has put it for the task.
        found = dict.fromkeys((archive, Path(archive).name))
        known = settings.get(_PATH, "")
        settings[_PATH] = ":".join([*filter(None, [known]), *found])
    for key, value in settings.items():
        line += ["--conf", f"{key}={value}"]
    if archive is not None:
        line += ["--py-files", archive]
    return [*line, str(Path(__file__).with_name("submitted.py").resolve()), name, *arguments]


def package(archive: str) -> None:
    """Write the modules that executors and driver import to *archive*, a zip for ``--py-files``.

    Raises:
        OSError: The archive cannot be written.
    """
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in _PACKED:
            # Located without an import: packed modules need not be able to run here.
            spec = find_spec(name)
            assert spec is not None
            found = Path(str(spec.origin))
            if found.name != "__init__.py":
                _add(packed, found, found.name)
                continue
            for path in sorted(found.parent.rglob("*")):
                if path.suffix == ".py" or path.suffix in _DATA:
                    _add(packed, path, f"{name}/{path.relative_to(found.parent).as_posix()}")


def _add(packed: zipfile.ZipFile, path: Path, name: str) -> None:
    entry = zipfile.ZipInfo(name, _TIME)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    packed.writestr(entry, path.read_bytes())

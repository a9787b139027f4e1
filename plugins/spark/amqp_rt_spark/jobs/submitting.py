"""How a job gets to a cluster: the line of ``spark-submit``, and an archive of our Python.

All of ours that runs there is pure Python, and so is click; msgspec and pyarrow are not, and have to be there.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

#: Modules and packages that the archive has.
_PACKED: Final = ("amqp_rt", "amqp_rt_spark", "pyspark_amqp_rt", "click")
#: Where Python workers look for modules.
_PATH: Final = "spark.executorEnv.PYTHONPATH"
#: Of these, files that are no Python.
_DATA: Final = (".jinja", ".properties", ".typed")
#: All of the archive's times, so that it is the same whenever it is made: the first one it can have.
_TIME: Final = (1980, 1, 1, 0, 0, 0)


def submit_line(
    name: str,
    arguments: Sequence[str],
    *,
    master: str,
    settings: Mapping[str, str],
    archive: str | None,
) -> list[str]:
    """The words of the line that runs the job *name* with *arguments* at *master*."""
    line = ["spark-submit", "--master", master, "--name", f"amqp-rt {name}"]
    settings = dict(settings)
    if archive is not None:
        # What plans a stream, beside the driver, is told of no archives: it is where the driver was
        # started, or where Spark has put it for the task.
        found = dict.fromkeys((archive, Path(archive).name))
        known = settings.get(_PATH, "")
        settings[_PATH] = ":".join([*filter(None, [known]), *found])
    for key, value in settings.items():
        line += ["--conf", f"{key}={value}"]
    if archive is not None:
        line += ["--py-files", archive]
    return [*line, str(Path(__file__).with_name("submitted.py").resolve()), name, *arguments]


def package(archive: str) -> None:
    """Write what executors and driver import to *archive*, a zip for ``--py-files``.

    Raises:
        OSError: It cannot be written.
    """
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in _PACKED:
            # Found, and not imported: what is only packed need not be able to run here.
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

"""Applications that commands load: a container or a broker in a module or file of the user's.

A wrong name is reported as one sentence with the names that resemble it. A mistake in the user's own code is
reported with its traceback, which leaves out the frames of this package and of the import system.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final, TypeAlias, TypeVar

import click

from ..addresses import parse_url
from ..broker.broker import Broker
from ..config_files import suggestion
from ..container.container import Container
from ..errors import AmqpError

T = TypeVar("T")

Target: TypeAlias = Container | Broker

#: Files whose frames no traceback of the user's code needs: those of this package, and of the import system.
_OURS: Final = (str(Path(__file__).parent.parent), "<frozen importlib")


def load_target(text: str, *, factory: bool = False) -> Target:
    """Return the container or broker that ``MODULE:NAME`` or ``FILE.py:NAME`` names; load its module.

    Args:
        text: The module is found from the current folder on; NAME may have dots.
        factory: NAME is a function without parameters that returns it.

    Raises:
        click.BadParameter: There is no such thing; the text names what resembles it.
        click.exceptions.Exit: The user's code failed; its traceback has been written.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise _wrong(f"{text!r} is not MODULE:NAME or FILE.py:NAME, such as app.main:container")
    is_file = place.endswith(".py") or os.sep in place
    module = _load_file(place) if is_file else _load_module(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise _wrong(f"{place} has no {name!r}{_meant(place, name, module)}")
        found = getattr(found, part)
    if factory:
        if not callable(found) or isinstance(found, Target):
            raise _wrong(
                f"{text}: --factory takes a function, and this is a {type(found).__name__}"
            )
        found = run_user_code(found)
    if isinstance(found, Target):
        return found
    # Loaded here, since few commands need it.
    from ..bridge import DoorBlock

    if isinstance(found, DoorBlock):
        raise _wrong(
            f"{text} is an {found.name}, which a program of its own enters: amqp-rt runs containers and brokers of "
            "amqp_rt, under trio"
        )
    is_class = isinstance(found, type)
    what = f"{'returns' if factory else 'is'} a {'class' if is_class else type(found).__name__}"
    hint = ""
    if callable(found) and not factory and not is_class:
        hint = ": if it returns one, amqp-rt run --factory calls it"
    raise _wrong(f"{text} {what}, not a Container or Broker{hint}{_meant(place, name, module)}")


def container_of(target: Target) -> Container:
    """Return the container that *target* is, or that it is built on."""
    return target.container if isinstance(target, Broker) else target


def check_profiles(target: Target, urls: Iterable[str]) -> None:
    """Check that plug-ins provide the profiles in *urls* to listen on.

    Raises:
        click.BadParameter: One is not provided, or *target* is no broker.
    """
    for url in urls:
        name = parse_url(url, listening=True).profile
        if name is None:
            continue
        if not isinstance(target, Broker):
            raise click.BadParameter(
                f"{url}: profiles of plug-ins are for brokers, and the application is a container",
                param_hint="--listen",
            )
        try:
            target.profile_named(name)
        except AmqpError as error:
            raise click.BadParameter(error.description, param_hint="--listen") from None


def _wrong(sentence: str) -> click.BadParameter:
    return click.BadParameter(sentence, param_hint="the application")


def _meant(place: str, name: str, module: ModuleType) -> str:
    """Return a hint at what else *module* has: its containers, else a name that resembles *name*."""
    has = [each for each, value in vars(module).items() if isinstance(value, Target)]
    if has:
        return "; did you mean " + " or ".join(f"{place}:{each}" for each in has[:5]) + "?"
    public = [each for each in vars(module) if not each.startswith("_") and each != name]
    return suggestion(name, public) or "; define one: app = Container('app')"


def _load_file(place: str) -> ModuleType:
    file = Path(place)
    if not file.is_file():
        near = [str(each) for each in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise _wrong(f"there is no file {place}{suggestion(place, near)}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise _wrong(f"{place} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent))
    run_user_code(partial(spec.loader.exec_module, module))
    return module


def _load_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    at = ""
    paths: list[str] | None = [here]
    for part in name.split("."):
        within = f"{at}." if at else ""
        # Parents are imported one by one: an error in one of them is one of the user's code.
        if not part.isidentifier() or _spec(within + part) is None:
            known = [each.name for each in pkgutil.iter_modules(paths)] if paths else []
            where = f"{at} has no module" if at else "there is no module"
            raise _wrong(f"{where} {part!r}{suggestion(part, known)}")
        at = within + part
        module = run_user_code(partial(importlib.import_module, at))
        paths = list(getattr(module, "__path__", []))
    return module


def _spec(name: str) -> Any:
    try:
        return sys.modules.get(name) or importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        return None  # Its parent is no package, or a module without a spec.


def run_user_code(call: Callable[[], T]) -> T:
    """Return the result of *call*, which runs code of the user.

    Raises:
        click.exceptions.Exit: It raised an error; the traceback has been written to standard error.
    """
    try:
        return call()
    except Exception as error:
        error.__traceback__ = _users_frames(error.__traceback__)
        traceback.print_exception(error)
        raise click.exceptions.Exit(1) from None


def _users_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return *trace* from its first frame that is one of the user's on; None if there is none."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return trace

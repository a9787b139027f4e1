"""Configuration of Sphinx, used by ``make docs``. Needs no network."""

from __future__ import annotations

import amqp_rt

project = "amqp_rt"
author = "the amqp_rt contributors"
project_copyright = "the amqp_rt contributors; Apache-2.0"
release = version = amqp_rt.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "_tools", "changes", "decisions/template.md"]
suppress_warnings = [
    "ref.python",  # Delivery, Error, …: the same name in several layers, each correct in its place
]

html_theme = "furo"
html_title = f"amqp_rt {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3  # so that pages can link to each other's headings

# One page for each module, written from its docstrings at each build.
apidoc_modules = [
    {
        "path": "../amqp_rt",
        "destination": "reference/modules",
        "exclude_patterns": ["**/__main__.py"],
        "separate_modules": True,
        "module_first": True,
        "include_private": False,
    }
]
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes are described once, in the class


def _is_described_elsewhere(app, what, name, obj, skip, options):  # type: ignore[no-untyped-def]
    """Skip the members of ``amqp_rt.fronts``, which are described in the modules that define them."""
    if what == "module" and app.env.docname.endswith("/amqp_rt.fronts"):
        return True
    return None


def setup(app):  # type: ignore[no-untyped-def]
    """Register the hooks; called by Sphinx."""
    app.connect("autodoc-skip-member", _is_described_elsewhere)

"""Configuration of Sphinx, used by ``make docs``. Needs no network."""

from __future__ import annotations

import amqp_rt

project = "amqp_rt"
author = "the amqp_rt contributors"
project_copyright = "the amqp_rt contributors; Apache-2.0"
release = version = amqp_rt.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "_tools", "decisions/template.md"]
html_theme = "furo"
html_title = f"amqp_rt {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3  # so that pages can link to each other's headings

autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes are described once, in the class


def _public(app, env, node, contnode):  # type: ignore[no-untyped-def]
    """Resolve a reference to a name by the module that defines it to the public name, if there is one."""
    if node.get("refdomain") != "py":
        return None
    domain = env.domains.python_domain
    wanted = node["reftarget"].rpartition("amqp_rt.")[2].split(".")
    # Foo.bar of a class, then Foo.
    for last in (wanted[-2:], wanted[-1:]):
        found = [name for name in domain.objects if name.split(".")[-len(last) :] == last]
        if len(found) == 1:
            return domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", found[0], node, contnode
            )
    return None


def setup(app):  # type: ignore[no-untyped-def]
    """Register the hooks; called by Sphinx."""
    app.connect("missing-reference", _public)

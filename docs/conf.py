"""Configuration of Sphinx, used by ``make docs``. Needs no network."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

from sphinx import addnodes

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
    endings = _endings(env)
    wanted = node["reftarget"].rpartition("amqp_rt.")[2].split(".")
    # Foo.bar of a class, then Foo.
    for last in (wanted[-2:], wanted[-1:]):
        found = endings.get(tuple(last), [])
        if len(found) == 1:
            return domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", found[0], node, contnode
            )
    return None


@cache
def _endings(env):  # type: ignore[no-untyped-def]
    """Return the names of all objects by their last part and by their last two; all have been read by now."""
    endings = defaultdict(list)
    for name in env.domains.python_domain.objects:
        parts = name.split(".")
        for count in {1, min(2, len(parts))}:
            endings[tuple(parts[-count:])].append(name)
    return endings


def _list_pages(app, pagename, templatename, context, doctree):  # type: ignore[no-untyped-def]
    """Have the theme's list of all pages made from their titles.

    Sphinx would copy the headings and objects of all pages for each page, to drop them at once: a third of its time.
    """
    full = context.get("toctree")
    if full is None:
        return
    titles = _titles_of_pages(app.env)

    def from_titles(**options):  # type: ignore[no-untyped-def]
        if not options.get("titles_only"):
            return full(**options)
        tocs, app.env.tocs = app.env.tocs, titles
        try:
            return full(**options)
        finally:
            app.env.tocs = tocs

    context["toctree"] = from_titles


@cache
def _titles_of_pages(env):  # type: ignore[no-untyped-def]
    """Return the contents of all pages, cut to their titles."""
    return {page: _titles(toc) for page, toc in env.tocs.items()}


def _titles(toc):  # type: ignore[no-untyped-def]
    """Return a copy of a page's contents that has its title and the lists of pages below it."""
    copied = toc.deepcopy()
    for entry in copied.children:
        if len(entry) > 1:
            pages = list(entry.findall(addnodes.toctree))
            if pages:
                entry[1][:] = pages
            else:
                entry.pop(1)
    return copied


def setup(app):  # type: ignore[no-untyped-def]
    """Register the hooks; called by Sphinx."""
    app.connect("missing-reference", _public)
    app.connect("html-page-context", _list_pages, priority=400)  # before the theme's

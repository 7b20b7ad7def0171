"""Renders the templates that lie in `templates/` of a package, and those of core/pages, with Jinja2."""

import functools

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from lingvo_moe.core.console import units

_SHARED = "lingvo_moe.core.pages"


def html(package: str, template: str, **values: object) -> str:
    """A page of a package; all values are text, which is escaped.

    Args:
        package: with dots, e.g. `__package__`.
        template: the file's name in the package's `templates/`.
        **values: by their names in the template, where a name without a value is an error.
    """
    return environment(package, True).get_template(template).render(values)


def markdown(package: str, template: str, **values: object) -> str:
    """A text of a package, into which values are put as they are; otherwise as `html`."""
    return environment(package, False).get_template(template).render(values)


def source(package: str, name: str) -> str:
    """A file of a package's `templates/`, or of the shared ones, as it is."""
    env = environment(package, False)
    assert env.loader
    return env.loader.get_source(env, name)[0]


@functools.cache
def environment(package: str, escape: bool) -> Environment:
    """The templates of a package and the shared ones; `escape` is for pages."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in dict.fromkeys((package, _SHARED))]),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for format_ in (units.size, units.duration, units.quantity):
        environment.filters[format_.__name__] = format_
    return environment

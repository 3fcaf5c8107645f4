"""The HTML page of `detkern verify`: one file that refers to nothing outside itself."""

from __future__ import annotations

from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .. import __version__
from ..vocabulary.operands import VERSION
from .calls import CallSubject
from .pictures import svg
from .properties import Effort, Property
from .results import Result
from .subject import Subject

__all__ = ["page"]


def page(results: list[Result], properties: list[Property], effort: Effort, seconds: float) -> str:
    """The page, from the template report.html.j2."""
    environment = Environment(
        loader=PackageLoader("detkern.cli", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["svg"] = lambda picture: Markup(svg(picture))
    grouped: dict[Subject | CallSubject, list[Result]] = {}
    for result in results:
        grouped.setdefault(result.subject, []).append(result)
    return environment.get_template("report.html.j2").render(
        subjects=grouped,
        properties={item.name: item for item in properties},
        failed=[result for result in results if result.status == "FAILED"],
        compared=sum(result.compared for result in results),
        checks=len(results),
        effort=effort.name,
        seconds=seconds,
        version=__version__,
        generator=VERSION,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )

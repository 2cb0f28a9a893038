"""Matplotlib figures as SVG inside a page: in the page's colours and font, with titles on what is pointed at.

A colour of THEME is one that nothing else has; in the SVG it becomes the page's variable of that name, so that one
drawing suits light, dark and paper.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THEME = {
    "ink": "#010203",
    "muted": "#010204",
    "grid": "#010205",
    "paper": "#010206",
    "accent": "#010207",
    "ok": "#010208",
    "degraded": "#010209",
    "failed": "#01020a",
    "hung": "#01020b",
    "killed": "#01020c",
    "skipped": "#01020d",
    # Of lines that have nothing but their colour to tell them apart.
    **{f"line{i}": f"#0102{16 + i:x}" for i in range(6)},
}
SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.parse_math": False,  # a level may hold a dollar
    "font.size": 11.0,
    "text.color": THEME["ink"],
    "axes.edgecolor": THEME["grid"],
    "axes.labelcolor": THEME["muted"],
    "axes.titlecolor": THEME["ink"],
    "axes.titlesize": 12.0,
    "axes.facecolor": "none",
    "xtick.color": THEME["grid"],
    "ytick.color": THEME["grid"],
    "xtick.labelcolor": THEME["ink"],
    "ytick.labelcolor": THEME["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": THEME["grid"],
    "grid.linewidth": 0.7,
}

_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_IDS = re.compile(r"url\(#([^)]+)\)")


def figure(width: float, height: float) -> Figure:
    """An empty figure of a size in CSS pixels, on no ground of its own."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width / 72, height / 72), dpi=72)
    made.patch.set_visible(False)
    return made


def inline(drawn: Figure, about: str, titles: Mapping[str, str | list[str]] | None = None) -> str:
    """The figure as an <svg> element to put into HTML, `about` being what it shows, for who cannot see it.

    titles: what to tell of an artist when pointed at, by its gid; of a collection, a list with an entry a member.
    """
    out = io.BytesIO()
    with warnings.catch_warnings():  # of letters that its own font lacks: the page's may have them
        warnings.filterwarnings("ignore", "Glyph .* missing")
        drawn.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(_NO_XML.sub("", out.getvalue().decode()))
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    width = root.attrib.pop("width").removesuffix("pt")
    root.attrib.pop("height")
    root.set("style", f"width:{float(width):.0f}px")
    root.set("role", "img")
    root.set("aria-label", about)
    for element in root.iter():
        if (name := element.get("id")) and titles and name in titles:
            _title(element, titles[name])
    _drop_ids(root)
    _drop_empty(root)
    for element in root.iter():
        for name, value in element.attrib.items():
            element.set(name, _themed(name, value))
    return ElementTree.tostring(root, encoding="unicode")


def _title(element: ElementTree.Element, told: str | list[str]) -> None:
    members = [element] if isinstance(told, str) else list(_members(element))
    for member, text in zip(members, [told] if isinstance(told, str) else told, strict=False):
        title = ElementTree.Element(f"{{{SVG}}}title")
        title.text = text
        member.insert(0, title)


def _members(element: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """What a collection drew, in its order; the shapes that it refers to are no members."""
    for child in element:
        if child.tag == f"{{{SVG}}}defs":
            continue
        if child.tag in (f"{{{SVG}}}use", f"{{{SVG}}}path"):
            yield child
        else:
            yield from _members(child)


def _drop_ids(root: ElementTree.Element) -> None:
    """Take off the names that nothing refers to: several figures share a page, and a name must occur once in it."""
    used = {element.get(f"{{{XLINK}}}href", "").lstrip("#") for element in root.iter()}
    used |= {name for element in root.iter() for value in element.attrib.values() for name in _IDS.findall(value)}
    for element in root.iter():
        if element.get("id") not in used:
            element.attrib.pop("id", None)


def _drop_empty(element: ElementTree.Element) -> None:
    """Take out groups that hold nothing, the sheet that would style the whole page, and blanks between elements."""
    for child in list(element):
        _drop_empty(child)
        if child.tag == f"{{{SVG}}}style" or (child.tag == f"{{{SVG}}}g" and not len(child)):
            element.remove(child)
        child.tail = None
    if len(element) and not (element.text or "").strip():
        element.text = None


def _themed(name: str, value: str) -> str:
    """An attribute in the page's colours and font; no finer than a tenth of a pixel, which is a third of the size."""
    if name in ("d", "x", "y", "points", "transform"):
        value = re.sub(r"\.0(?!\d)", "", re.sub(r"(\d+\.\d)\d+", r"\1", value))
        return re.sub(r"\s*([MLCQz])\s*", r"\1", value)
    if name in ("style", "fill", "stroke"):
        value = re.sub(r"font-family: [^;]+; ?|; stroke-dashoffset: 0", "", value)
        value = re.sub(r"font: ([\d.]+)px [^;]+", r"font-size: \1px", value)
        for word, colour in THEME.items():
            value = value.replace(colour, f"var(--{word})")
    return value

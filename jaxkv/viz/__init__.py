"""Pictures of a cache at work, for notebooks, terminals and documentation.

    page_map(cache)                the pages, the block tables and the numbers; what a cache shows of itself in a notebook
    record(model, prompts, ...)    `generate`, and what its block tables looked like after every step
    timeline(recording)            these as a slider
    compare(recording)             the same moment beside contiguous allocation

Each gives a `Picture`: shown in a notebook, `print`ed in a terminal, `save`d as .html, .svg or .txt.

Pictures are drawn from a cache's bookkeeping and from results on the host. They never read keys, values or weights, and nothing in
jaxkv needs them: this package is loaded when something is drawn.
"""

from jaxkv.viz.cache_picture import Picture
from jaxkv.viz.recording import Frame, Recording, compare, page_map, record, timeline

__all__ = ["Frame", "Picture", "Recording", "compare", "page_map", "record", "timeline"]


def __dir__() -> list[str]:
    return __all__

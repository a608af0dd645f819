"""Pictures of a cache: every page in its place and colour, numbers that add up, nothing that sticks out, on any ground."""

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest
from decoders import decoder
from tiny import save_model

import jaxkv
from jaxkv import viz
from jaxkv.cache.report import Bookkeeping, find_faults
from jaxkv.cli.main import main
from jaxkv.viz.cache_picture import MAX_PAGES, colour, picture
from jaxkv.viz.cache_text import cache_text

ROOT = Path(__file__).resolve().parents[2]
SIZES = [(4, 1), (4, 64), (64, 4), (4096, 1), (4096, 64)]


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


render = load_script(ROOT / "docs" / "render.py")


@pytest.fixture(scope="module")
def forked() -> Bookkeeping:
    """Row 0 holds pages 1, 2 and half of 3; row 1 shares 1 and 2 and has copied the rest; row 2 is empty."""
    cache = jaxkv.PagedKVCache.create(decoder().config, num_pages=8, page_size=4, max_seqs=3, max_seq_len=16)
    cache = cache.allocate(jnp.array([10, 0, 0])).advance(jnp.array([10, 0, 0])).fork(0, 1)
    return cache.allocate(jnp.array([0, 1, 0])).advance(jnp.array([0, 1, 0])).bookkeeping()


@pytest.fixture(scope="module")
def recording() -> viz.Recording:
    """Four requests on two rows of a pool that is too small for both at once."""
    return viz.record(
        decoder(), [[3, 1, 4, 1, 5] * 3, [2, 7]], max_new_tokens=9, num_samples=2, max_seqs=2, num_pages=8, page_size=4
    )


def elements(html: str, tag: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(html).findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


@pytest.mark.parametrize("pages, rows", SIZES)
def test_the_made_up_caches_are_consistent(pages: int, rows: int) -> None:
    assert find_faults(render.made_up_cache(pages, rows)) == []


@pytest.mark.parametrize("pages, rows", SIZES)
def test_every_page_is_drawn_once_in_the_map_and_once_in_each_table_that_names_it(pages: int, rows: int) -> None:
    cache = render.made_up_cache(pages, rows)
    paths = elements(picture(cache).html, "path")
    legend = [path for group in elements(picture(cache).html, "g") for path in group]
    boxes = sum(p.get("d").count("M") for p in paths) - sum(p.get("d").count("M") for p in legend)
    used, named = np.count_nonzero(cache.ref_counts), np.count_nonzero(cache.block_tables)
    assert boxes == pages + used + 2 * named, "a box for each, and one more for what is filled of it"


def test_a_page_has_its_owners_colour_up_to_its_fill_level(forked: Bookkeeping) -> None:
    shapes = [(p.get("fill"), p.get("fill-opacity"), p.get("d")) for p in elements(picture(forked).html, "path")]
    full = [d for fill, opacity, d in shapes if fill == colour(0) and opacity == "1"]
    assert re.findall(r"v([\d.]+)", "".join(full)) == ["12", "9"], (
        "half of page 3: 12 of 24 px in the map, 9 of 18 in the table"
    )
    stripes = {fill for fill, _, _ in shapes if fill and fill.startswith("url(#")}
    (pattern,) = elements(picture(forked).html, "pattern")
    assert stripes == {f"url(#{pattern.get('id')})"}, "pages 1 and 2, shared by the same two rows, have the same stripes"
    assert [r.get("fill") for r in pattern] == [colour(0), colour(1)]


def test_the_numbers_add_up(forked: Bookkeeping) -> None:
    first, second = cache_text(forked).splitlines()[:2]
    assert first == "4 of 7 pages used, 3 free, 2 shared"
    assert second == "16 slots, 19% of them empty; 21 tokens (a shared one counts in every row); sharing saves 2 pages"


def test_the_text_shows_pages_owners_and_tables(forked: Bookkeeping) -> None:
    lines = cache_text(forked).splitlines()
    assert "     0 x##ab..." in lines
    assert "a row 0     10 tokens [1* 2* 3] (last 2/4)" in lines
    assert "b row 1     11 tokens [1* 2* 4] (last 3/4)" in lines
    assert "c row 2      0 tokens []" in lines


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("pages, rows", SIZES)
def test_the_text_fits_its_width(pages: int, rows: int, width: int) -> None:
    lines = cache_text(render.made_up_cache(pages, rows), width=width).splitlines()
    tables = lines.index("  block tables: * shared")
    assert max(map(len, lines[tables + 1 :])) <= width
    assert max(len(line) for line in lines[4 : tables - 1]) <= width


def test_more_than_fits_is_counted() -> None:
    cache = render.made_up_cache(MAX_PAGES + 1000, 70)
    drawn = [t.text for t in elements(picture(cache).html, "text")]
    used = int((cache.ref_counts[MAX_PAGES:] > 0).sum())
    assert f"and 1000 more pages, {used} of them used" in drawn
    assert "and 6 more rows" in drawn
    assert "and 6 more rows" in cache_text(cache)


def test_pictures_that_stand_together_share_no_definitions(forked: Bookkeeping) -> None:
    names = [elements(picture(forked, salt=salt).html, "pattern")[0].get("id") for salt in (0, 1)]
    assert names[0] != names[1]


def test_a_cache_shows_itself() -> None:
    cache = jaxkv.PagedKVCache.create(decoder().config, num_pages=4, max_seqs=1, max_seq_len=16)
    assert cache._repr_html_() == viz.page_map(cache).html
    assert "0 of 3 pages used" in repr(viz.page_map(cache))


def test_recording_changes_no_token_and_has_a_frame_for_each_turn(recording: viz.Recording) -> None:
    plain = jaxkv.generate(
        decoder(), [[3, 1, 4, 1, 5] * 3, [2, 7]], max_new_tokens=9, num_samples=2, max_seqs=2, num_pages=8, page_size=4
    )
    np.testing.assert_array_equal(recording.output.tokens, plain.tokens)
    assert int(recording.output.stats.steps) <= len(recording.frames) <= int(recording.output.stats.steps) + 1
    for frame in recording.frames:
        assert find_faults(frame.cache) == []
    seen = {r for frame in recording.frames for r in frame.requests.tolist()}
    assert seen == {-1, 0, 1, 2, 3}


def test_the_timeline_has_every_moment_once_and_shows_the_fullest(recording: viz.Recording) -> None:
    html = viz.timeline(recording, max_frames=5).html
    assert html.count("data-step=") == html.count("<svg") == 5
    assert html.count('display:block">') == 1 and 'max="4"' in html
    assert len(set(re.findall(r'pattern id="([^"]+)"', html))) == html.count("<pattern")
    everything = viz.timeline(recording, max_frames=10_000)
    assert everything.html.count("data-step=") == len(recording.frames)
    assert recording._repr_html_() == viz.timeline(recording).html


def test_a_timeline_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one frame, got 0"):
        viz.timeline([])


def test_contiguous_and_paged_are_compared_at_the_fullest_moment(recording: viz.Recording) -> None:
    frame = recording.fullest
    used = int((frame.cache.ref_counts > 0).sum())
    assert used == max(int((f.cache.ref_counts > 0).sum()) for f in recording.frames)
    first, second = viz.compare(recording).text.splitlines()[:2]
    reserved = 2 * frame.cache.block_tables.shape[1] * 4
    assert first.startswith(f"contiguous: {reserved} slots reserved, {1 - frame.cache.lengths.sum() / reserved:.0%}")
    assert second.startswith(f"paged:      {used * 4} slots taken") and f"{reserved / used / 4:.1f} times" in second


def test_the_output_shows_itself(recording: viz.Recording) -> None:
    drawn = [t.text for t in elements(recording.output._repr_html_(), "text")]
    assert "prompt 1, sample 1" in drawn
    mean = float(np.mean(recording.output.logprobs[1, 1]))
    assert f"9 tokens, {mean:.2f} nats" in drawn


@pytest.mark.parametrize("theme", ["light", "dark", None])
def test_saving(theme: str | None, forked: Bookkeeping, tmp_path: Path) -> None:
    for name in ("a.svg", "a.html", "a.txt"):
        picture(forked).save(tmp_path / name, theme=theme)
    ElementTree.parse(tmp_path / "a.svg")
    assert ("prefers-color-scheme" in (tmp_path / "a.svg").read_text()) == (theme is None)
    assert (tmp_path / "a.txt").read_text() == cache_text(forked) + "\n"


def test_saving_refuses_what_it_cannot_do(forked: Bookkeeping, recording: viz.Recording, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="theme must be 'light', 'dark' or None, got 'blue'"):
        picture(forked).save(tmp_path / "a.svg", theme="blue")
    with pytest.raises(ValueError, match=r"more than one drawing: save it as \.html, not as a\.svg"):
        viz.timeline(recording).save(tmp_path / "a.svg")
    with pytest.raises(ValueError, match=r"saved as \.svg, \.html or \.txt, got a\.png"):
        picture(forked).save(tmp_path / "a.png")


def test_names_fit_the_rows(forked: Bookkeeping) -> None:
    with pytest.raises(ValueError, match="2 names for 3 rows"):
        picture(forked, names=["a", "b"])


@pytest.mark.skipif(render.CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pages, rows", SIZES)
def test_nothing_sticks_out_in_a_browser(pages: int, rows: int, theme: str, tmp_path: Path) -> None:
    picture(render.made_up_cache(pages, rows)).save(tmp_path / "a.html", theme=theme)
    assert render.render(tmp_path / "a.html", tmp_path / "a.png") == []
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.skipif(render.CHROMIUM is None, reason="needs Chromium")
def test_nothing_sticks_out_of_a_run(recording: viz.Recording, tmp_path: Path) -> None:
    output = viz.Picture(recording.output._repr_html_(), "")
    for made in (viz.timeline(recording), viz.compare(recording), output):
        made.save(tmp_path / "a.html")
        assert render.measure(tmp_path / "a.html")[0] == []


@pytest.mark.skipif(render.CHROMIUM is None, reason="needs Chromium")
def test_the_measurement_sees_what_sticks_out(tmp_path: Path) -> None:
    wide = '<svg xmlns="http://www.w3.org/2000/svg" width="100" height="20"><text x="90" y="12">sticks out</text></svg>'
    viz.Picture(wide, "").save(tmp_path / "a.html")
    assert render.measure(tmp_path / "a.html")[0] == ["text sticks out sticks out of its drawing"]


def test_inspect_prints_and_writes(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = save_model(tmp_path / "model")
    arguments = ["inspect", "one prompt", "two", "--model", str(folder), "--max-new-tokens", "6", "--page-size", "4"]
    assert main([*arguments, "--num-samples", "2", "--moments", "3", "--html", str(tmp_path / "a.html")]) == 0
    out = capsys.readouterr().out
    assert out.count("page map:") == 3
    assert re.search(r"^contiguous: \d+ slots reserved, \d+% of them empty$", out, re.MULTILINE)
    assert "data-step" in (tmp_path / "a.html").read_text()
    assert main([*arguments, "--html", "a.pdf"]) == 2
    assert "--html writes an .html file, got 'a.pdf'" in capsys.readouterr().err


def test_a_cache_in_words_leaves_out_its_contents() -> None:
    """Once the repr that notebooks keep beside every picture held all pages: a megabyte for a small model."""
    cache = jaxkv.PagedKVCache.create(decoder().config, num_pages=64, page_size=16, max_seqs=2, max_seq_len=64)
    assert repr(cache).startswith("PagedKVCache(2 rows of up to 64 tokens")
    assert len(repr(cache)) < 200

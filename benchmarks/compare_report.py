"""What `python -m benchmarks.compare` shows: tables for a terminal, and a plot."""

from pathlib import Path
from typing import Any

from benchmarks.engines import OURS
from jaxkv.bench.measure import table

FIGURES = {
    "decode": ("decode_tokens_per_second", "decode_limit", "step_seconds", "decode_share"),
    "prefill": ("prefill_tokens_per_second", "prefill_limit", "prefill_seconds", "prefill_share"),
    "ragged": ("tokens_per_second", "limit", "total_seconds", "share"),
}
"""Of each kind of figure: the speed's name, the limit's, the time's and the share's."""

MARKERS = "oDsv^<>ph*"


def _tokens(cell: dict[str, Any], kind: str) -> int:
    """Tokens that the limit's seconds are for."""
    if kind == "ragged":
        return sum(cell["answer_lengths"])
    return cell["batch_size"] * (cell["prompt_length"] if kind == "prefill" else 1)


def best_peer(cell: dict[str, Any], kind: str) -> tuple[str, float] | None:
    """The fastest other engine and how many times as long as ours it took; None without others."""
    time = FIGURES[kind][2]
    others = {name: found["times_ours"][time] for name, found in cell["engines"].items() if name != OURS}
    if not others or OURS not in cell["engines"]:
        return None
    name = min(others, key=lambda name: others[name])
    return name, others[name]


def _row(cell: dict[str, Any], kind: str, engines: list[str]) -> list[str]:
    speed, limit, _, share = FIGURES[kind]
    found, best = cell["engines"], best_peer(cell, kind)
    bound, ours = cell[limit], found.get(OURS)
    shares = [
        f"{ours[share] * bound[f'{what}_seconds'] / bound['seconds']:.0%}" if ours else "-" for what in ("memory", "arithmetic")
    ]
    return [
        *([str(cell["rows"])] if kind == "ragged" else [str(cell["batch_size"]), str(cell["prompt_length"])]),
        *(f"{found[name][speed]:,.1f}" if name in found else "-" for name in engines),
        f"{best[1]:.2f} {best[0]}" if best else "-",
        f"{_tokens(cell, kind) / bound['seconds']:,.0f}",
        *shares,
    ]


def tables(part: dict[str, Any]) -> list[tuple[str, str]]:
    """Title and table of every kind of figure in one dtype's part of the report."""
    engines, out = list(part["engines"]), []
    for kind in FIGURES:
        cells = [cell for cell in part["cells"] if (cell["kind"] == "ragged") == (kind == "ragged")]
        if not cells:
            continue
        where = ["rows"] if kind == "ragged" else ["batch", "prompt"]
        header = [*where, *engines, "jaxkv to best peer", "limit", "% bandwidth", "% matmul peak"]
        title = f"{kind}, {part['dtype']}, {'new ' if kind == 'ragged' else ''}tokens/s"
        out.append((title, table(header, [_row(cell, kind, engines) for cell in cells])))
    return out


def notes(part: dict[str, Any]) -> list[str]:
    """Equal tokens, and what did not run, a line each."""
    lines = []
    for name in part["engines"]:
        shares = [c["engines"][name]["same_tokens"] for c in part["cells"] if "same_tokens" in c["engines"].get(name, {})]
        if shares and name != OURS:
            lines.append(f"{name}: {min(shares):.1%} to {max(shares):.1%} of its tokens are jaxkv's")
    lines += [f"{name}: not installed ({reason})" for name, reason in part["skipped"].items()]
    lines += [f"{name}: does not load ({reason})" for name, reason in part["failed"].items()]
    for cell in part["cells"]:
        where = (
            f"{cell['rows']} rows"
            if cell["kind"] == "ragged"
            else f"batch {cell['batch_size']}, prompt {cell['prompt_length']}"
        )
        lines += [f"{name}: failed at {where} ({reason})" for name, reason in cell["failed"].items()]
    return lines


def print_report(report: dict[str, Any]) -> None:
    """All tables, to stdout."""
    print(f"{report['model']}, {report['device']}, {report['threads']} threads, median of {report['repeats']} turns")
    for part in report["dtypes"]:
        bandwidth, peak = part["bandwidth_bytes_per_second"] / 1e9, 2 * part["matmul_multiply_adds_per_second"] / 1e9
        print(f"\n{part['dtype']}: memory read at {bandwidth:.1f} GB/s, matrix products at {peak:,.0f} GFLOP/s")
        print(*(f"{name}: {engine['version']}" for name, engine in part["engines"].items()), sep="\n")
        for title, text in tables(part):
            print(f"\n{title}\n{text}")
        print("", *notes(part), sep="\n")
    print(
        "decode: slope between runs of 1 and of more new tokens; prefill: a run of 1; ragged: prefill included. The ratio is the\n"
        "median of the turns' ratios, above 1 where jaxkv is faster. limit: the most that the memory or the matrix products allow,\n"
        "and jaxkv's share of each."
    )


def plot(report: dict[str, Any], path: str | Path) -> None:
    """Speeds as dots, engines beside one another, the limit as a dashed line above each group.

    Args:
      report: of the command.
      path: a picture file; its ending chooses the format.

    Raises:
      ImportError: no matplotlib.
    """
    from matplotlib.figure import Figure

    kinds = [kind for kind in FIGURES if any(title.startswith(kind) for part in report["dtypes"] for title, _ in tables(part))]
    figure = Figure(figsize=(6.5 * len(kinds), 3.6 * len(report["dtypes"])), layout="constrained")
    axes = figure.subplots(len(report["dtypes"]), len(kinds), squeeze=False)
    names = list(dict.fromkeys(name for part in report["dtypes"] for name in part["engines"]))
    for part, line in zip(report["dtypes"], axes):
        for kind, ax in zip(kinds, line):
            _dots(ax, part, kind, names)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)


def _dots(ax: Any, part: dict[str, Any], kind: str, names: list[str]) -> None:
    speed, limit, *_ = FIGURES[kind]
    cells = [cell for cell in part["cells"] if (cell["kind"] == "ragged") == (kind == "ragged")]
    if not cells:
        ax.set_axis_off()
        return
    for i, name in enumerate(names):
        there = [(x, cell["engines"][name][speed]) for x, cell in enumerate(cells) if name in cell["engines"]]
        at = [x - 0.4 + 0.8 * (i + 0.5) / len(names) for x, _ in there]
        look = {"markersize": 9, "zorder": 3} if name == OURS else {"markersize": 6, "alpha": 0.8}
        ax.plot(at, [y for _, y in there], MARKERS[i % len(MARKERS)], label=name, **look)
    for x, cell in enumerate(cells):
        y = _tokens(cell, kind) / cell[limit]["seconds"]
        ax.hlines(y, x - 0.42, x + 0.42, colors="black", linestyles="dashed", linewidth=1, label="limit" if x == 0 else None)
    labels = [f"{c['rows']} rows" if kind == "ragged" else f"{c['batch_size']} x {c['prompt_length']}" for c in cells]
    ax.set_xticks(range(len(cells)), labels)
    ax.set_xlim(-0.5, len(cells) - 0.5)
    ax.set_yscale("log")
    ax.grid(axis="y", which="both", alpha=0.2)
    ax.set_title(f"{kind}, {part['dtype']}, tokens/s" + ("" if kind == "ragged" else ", batch x prompt"), fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)

#!/usr/bin/env python3
"""Write the tables of README.md from the result files: every figure in it comes from results/*.json.

A table stands between `<!-- results/FILE.json -->` (for quality with a part: `results/FILE.json loss`) and `<!-- end -->`.
What is still to be measured stands as a line `TODO: results/FILE.json`, which becomes a table once the file is there.
"""
from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
MARKED = re.compile(r"(<!-- (results/\S+\.json)(?: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)

TODO = re.compile(r"^TODO: (results/\S+\.json)((?: \w+)?)$", re.MULTILINE)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(r) + " |" for r in (head, ["---"] * len(head), *rows))


def _machine(record: dict) -> str:
    m = record["machine"]
    return f"{m['cpu']}, {m['cores']} cores"


def quickstart(record: dict, _part: str) -> str:
    seeds = record["seeds"]
    rows = [[str(s["seed"]), f"{s['n_prompt']:,}", f"{s['n_filled']:,}", f"{s['exact_ms'] / 1000:.1f} s", f"{s['filled_ms'] / 1000:.1f} s",
             f"{s['ratio']:.2f}x", *("yes" if s[f"{arm}_recalls"] else "no" for arm in ("exact", "filled"))] for s in seeds]
    recalled = [sum(s[f"{arm}_recalls"] for s in seeds) for arm in ("exact", "filled")]
    return _table(["seed", "prompt tokens", "filled rows", "exact", "filled", "ratio", "exact recalls", "filled recalls"], rows) + (
        f"\n\nFacts recalled: exact {recalled[0]}, filled {recalled[1]} of {len(seeds)}. "
        f"{record['settings']['maps']}, {record['settings']['threads']} threads; {_machine(record)}.")


def _spread(s: dict) -> str:
    return f"{s['median']:.2f} [{s['min']:.2f}, {s['max']:.2f}]"


def _shares_of_bound(r: dict) -> list[float]:
    """By repetition, of the time that the bound's parts took in it."""
    names = ("lower", "fill sweep 2", "rest", "lower rest", "filled")
    times = zip(*(r["all_seconds"][n] for n in names), strict=True)
    return [(lower + upper + rest - lower_rest + r["t_fill_s"]) / filled for lower, upper, rest, lower_rest, filled in times]


def bench(record: dict, _part: str) -> str:
    shares = [_shares_of_bound(r) for r in record["results"]]
    rows = [[f"{r['n']:,}", str(r["split"]), str(r["tail"]), f"{r['n_exact'] - r['tail']:,} ({r['rows']})", _spread(r["exact_s"]),
             _spread(r["filled_s"]), f"{r['ratio']:.2f}x", f"{100 * r['share_of_bound']:.0f} [{100 * min(s):.0f}, {100 * max(s):.0f}] %",
             f"{r['fill_us_per_row_and_layer']:.2f} µs, {100 * r['fill_share_of_layer']:.1f} %"] for r, s in zip(record["results"], shares, strict=True)]
    s = record["settings"]
    clock = "process CPU time" if s["clock"] == "cpu" else "wall clock"
    head = ["prompt", "S", "T", "exact rows before the tail", "exact, s", "filled, s", "ratio", "of the bound", "fill per row and layer, of a layer"]
    return _table(head, rows) + (
        f"\n\n{s['model']}, {clock}, {s['threads']} thread{'s' * (s['threads'] > 1)}, medians [min, max] of {s['repeats']}; {_machine(record)}.")


def short(record: dict, _part: str) -> str:
    r = record["results"]
    return (f"{record['settings']['model']}, {r['pairs']} pairs of {r['prompts_per_pair']} prompts of {r['n_tokens']} tokens: {100 * r['slowdown']:+.2f} % CPU time with maps loaded, 95 % interval "
            f"[{100 * r['low_95']:+.2f}, {100 * r['high_95']:+.2f}] %.")


def counted(record: dict, _part: str) -> str:
    r = record["results"]
    more = ", ".join(f"{100 * m:+.3f}" for m in r["more"])
    return f"{record['settings']['model']}, {len(r['more'])} prompts of {r['n_tokens']} tokens, each with maps loaded over the same without: {more} % instructions."


def _interval(e: dict, digits: int = 3) -> str:
    return f"{e['value']:+.{digits}f} [{e['low']:+.{digits}f}, {e['high']:+.{digits}f}]"


def serve(record: dict, _part: str) -> str:
    rows, notes = [], []
    for r in record["results"]:
        for arm, a in r["arms"].items():
            gaps = [f"{a['gaps_ms'][k] / 1000:.2f} s" for k in ("p50", "p95", "p99", "longest")]
            ttft = {k: v / 1000 for k, v in a["ttft_ms"].items()}
            rows.append([str(r["users"]), arm, _spread(ttft), _spread(a["tokens_per_s"]), *gaps, f"{a['tokens_equal']:,} of {a['tokens_compared']:,}"])
        c = r["comparison"]
        seconds = {gap: _interval({k: v / 1000 for k, v in c[f"{gap}_gap_difference_ms"].items()}, 2) for gap in ("p99", "longest")}
        notes.append(f"{r['users']} users, {r['newcomers']} newcomers: first token {c['ttft_ratio']['value']:.2f} [{c['ttft_ratio']['low']:.2f}, "
                     f"{c['ttft_ratio']['high']:.2f}] times sooner; fill less off, gap p99 {seconds['p99']} s, longest {seconds['longest']} s.")
    s = record["settings"]
    head = ["users", "newcomer's prompt", "first token, s", "users' tokens/s", "gap p50", "p95", "p99", "longest", "users' tokens as without newcomer"]
    return _table(head, rows) + "\n\n" + " ".join(notes) + (
        f" Medians [min, max], 95 % intervals. {record['model']}, prompts of {s['tokens']:,} tokens, {s['threads']} threads; {_machine(record)}.")


def quality(record: dict, part: str) -> str:
    summary = record[part]["summary"]
    if part == "loss":
        rows = [[arm, f"{s['loss']['value']:.3f}", *(["", ""] if arm == "exact" else [_interval(s["over_exact"]), f"{s['top1']['value']:.3f}"])]
                for arm, s in summary.items()]
        return _table(["arm", "loss", "over exact, nats [95 % over documents]", "top-1 as exact"], rows)
    rows = [[arm, f"{s['hits']} of {s['n']}", f"[{s['share']['low']:.2f}, {s['share']['high']:.2f}]", f"{s['filled_rows']:.0f}",
             f"{s['chosen_rows_median']:.0f}"] for arm, s in summary.items()]
    return _table(["arm", "recalled", "95 %", "filled rows", "rows chosen to be exact"], rows)


RENDER: dict[str, Callable[[dict, str], str]] = {"quickstart": quickstart, "bench-short-instructions": counted, "bench-short": short, "bench-serve": serve, "bench": bench, "quality": quality}


def render(text: str, root: Path) -> str:
    """`text` with every marked table written anew. Raises SystemExit, naming the file, for a result that is missing."""
    def one(m: re.Match) -> str:
        path, name = root / m[2], Path(m[2]).name
        if not path.exists():
            raise SystemExit(f"README.md names {m[2]}, which is not there: measure it first")
        kind = next(k for k in RENDER if name.startswith(k))
        return f"{m[1]}{RENDER[kind](json.loads(path.read_text()), m[3] or '')}\n{m[4]}"

    measured = TODO.sub(lambda m: f"<!-- {m[1]}{m[2]} -->\n<!-- end -->" if (root / m[1]).exists() else m[0], text)
    return MARKED.sub(one, measured)


def main() -> None:
    README.write_text(render(README.read_text(), ROOT))


if __name__ == "__main__":
    sys.exit(main())

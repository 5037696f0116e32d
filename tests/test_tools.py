"""--ridge-maps in llama-completion, llama-cli, llama-perplexity, llama-batched-bench and llama-bench.

Without our flags each tool prints what the unpatched one prints. With them the results are the library's own: the figures
of a pico model with random maps change with every row that is filled.
"""
from __future__ import annotations

import csv
import inspect
import io
import json
import re
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest

import sidecar_files
from ridgefill import lib
from ridgefill.doctor import log
from server_util import SPLIT, TAIL, maps, model  # noqa: F401  (fixtures)

# rows: small batches, so that prompts of a few hundred rows are cut several times
BATCH, UBATCH, SINK = 256, 64, 4
FIXED = ["-b", BATCH, "-ub", UBATCH, "-t", 1]
TOOLS = ("llama-completion", "llama-perplexity", "llama-batched-bench", "llama-bench", "llama-cli")


def run(folder: Path, tool: str, *arguments, ok: bool = True, last: str = "") -> tuple[str, str]:
    """What a tool of a build prints: (standard output, standard error). It must succeed, or fail if not `ok`.

    last: pattern that a whole output matches. Upstream's tools may end before their log is written: such a run is repeated.
    """
    assert tool in TOOLS
    if not (folder / tool).exists():
        pytest.fail(f"expected {folder / tool}, found none: build it with scripts/setup.sh --stock", pytrace=False)
    for _ in range(60):
        p = subprocess.run([folder / tool, *map(str, arguments)], capture_output=True, timeout=300, stdin=subprocess.DEVNULL)
        out, err = p.stdout.decode(errors="surrogateescape"), p.stderr.decode(errors="replace")
        assert (p.returncode == 0) == ok, (p.returncode, out[-2000:], err[-2000:])
        if re.search(last, out + err):
            return out, err
    raise AssertionError(f"{last!r} is not in the output of {tool}:\n{out[-2000:]}\n{err[-2000:]}")


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> Path:
    """Real text that every machine has, without a newline at its end, which tools would strip. About a token a letter."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(inspect.getsource(textwrap)[:1400].strip())
    return path


@pytest.fixture(scope="module")
def damaged_maps(maps, tmp_path_factory) -> Path:
    return sidecar_files.damaged_variants(maps, tmp_path_factory.mktemp("damaged"))["bit_flipped"]


@pytest.fixture(scope="module")
def native_model(model):
    with lib.Model(model) as m:
        yield m


def ridge_lines(err: str) -> list[str]:
    return [line[line.index("ridge: ") :] for line in err.splitlines() if "ridge: " in line]


#
# llama-perplexity
#


class Perplexity:
    """One run over the text: what is printed for each chunk, the final estimate, and the lines about maps."""

    def __init__(self, folder: Path, model: Path, text: Path, *arguments):
        out, err = run(folder, "llama-perplexity", "-m", model, "-f", text, "-ub", UBATCH, "-t", 1, *arguments,
                       last="Final estimate: PPL = .*\n")
        self.chunks = re.findall(r"\[\d+\]\d+\.\d+", out)
        self.final = re.search(r"Final estimate: PPL = .*", err).group()
        self.ppl = float(self.final.split()[4])
        self.ridge = ridge_lines(err)

    @property
    def figures(self):
        assert len(self.chunks) > 1
        return self.chunks, self.final


def filled_of(run: Perplexity) -> tuple[int, int]:
    """(rows filled, rows seen) as the last line says."""
    return tuple(map(int, re.search(r"(\d+) of (\d+) rows filled", run.ridge[-1]).groups()))


# name: chunk, batch, chunks. One chunk per batch; several chunks in one batch; several batches for one chunk
CUTS = {"one": (256, 256, 4), "several_chunks": (256, 1024, 4), "several_batches": (512, 128, 2)}


@pytest.fixture(scope="module", params=CUTS)
def perplexity(request, patched_lib, model, maps, text_file):
    """cut, and perplexity(mode) with or without maps."""
    n_ctx, n_batch, n_chunks = CUTS[request.param]
    flags = ["-c", n_ctx, "-b", n_batch, "--chunks", n_chunks]
    done: dict[str | None, Perplexity] = {}

    def get(mode: str | None, *arguments) -> Perplexity:
        ridge = ["--ridge-maps", maps, "--ridge-mode", mode] if mode else []
        if arguments:
            return Perplexity(patched_lib, model, text_file, *flags, *ridge, *arguments)
        if mode not in done:
            done[mode] = Perplexity(patched_lib, model, text_file, *flags, *ridge)
        return done[mode]

    get.flags, get.cut = flags, request.param
    return get


def test_perplexity_without_maps_is_stock(perplexity, stock_lib, model, text_file):
    stock = Perplexity(stock_lib, model, text_file, *perplexity.flags)
    assert perplexity(None).figures == stock.figures
    assert not perplexity(None).ridge


@pytest.mark.parametrize("mode", ["off", "plumb"])
def test_perplexity_of_exact_modes_is_equal_in_every_digit(perplexity, mode):
    if mode == "plumb" and perplexity.cut == "several_chunks":
        # upstream mixes the chunks of a batch in its ubatches, the sweeps cannot: other sizes, other rounding
        assert perplexity(mode).ppl == pytest.approx(perplexity(None).ppl, rel=1e-3)
    else:
        assert perplexity(mode).figures == perplexity(None).figures
    assert filled_of(perplexity(mode))[0] == 0


@pytest.mark.parametrize("mode", ["fill", "identity", "nofill"])
def test_perplexity_over_filled_rows_differs(perplexity, mode):
    n_ctx, n_batch, n_chunks = CUTS[perplexity.cut]
    assert abs(perplexity(mode).ppl / perplexity(None).ppl - 1) > 2e-3
    # the first half of each chunk but its first rows, and the last row of each batch that ends before the scored half
    n_batch_ends = n_ctx // 2 // n_batch
    assert filled_of(perplexity(mode)) == (n_chunks * (n_ctx // 2 - SINK - n_batch_ends), n_chunks * n_ctx)


def test_perplexity_says_what_is_scored(perplexity):
    last = perplexity("fill").ridge[-1]
    assert "only exact rows are scored" in last and "second half of each chunk" in last
    assert "ran exactly" not in last


def test_perplexity_rows_flag_makes_rows_exact(perplexity):
    n_ctx, _, n_chunks = CUTS[perplexity.cut]
    some = perplexity("fill", "--ridge-rows", "random", "--ridge-budget", 0.25)
    filled, exact = filled_of(some)[0], filled_of(perplexity("fill"))[0]
    assert filled == pytest.approx(0.75 * exact, abs=2 * n_chunks * n_ctx / 128)
    assert some.figures != perplexity("fill").figures


def test_perplexity_is_that_of_the_librarys_own_fill(patched_lib, native_model, model, maps, text_file):
    """Chunks filled and scored through the library, one at a time: rows [first, n_ctx - 1) predict."""
    n_ctx, n_batch, n_chunks = CUTS["one"]
    tool = Perplexity(patched_lib, model, text_file, "-c", n_ctx, "-b", n_batch, "--chunks", n_chunks, "--ridge-maps", maps)
    tokens, first, nll = native_model.tokenize(text_file.read_text()), n_ctx // 2, []
    with lib.Maps(native_model, maps) as m, lib.Context(native_model, n_ctx, n_batch, UBATCH, n_threads=1) as ctx:
        for i in range(n_chunks):
            chunk = tokens[i * n_ctx : (i + 1) * n_ctx]
            ctx.clear()
            p = ctx.prefill(chunk[: first + 1], maps=m, n_tail=1).run()
            assert p.n_done == first
            logits = ctx.decode(chunk[first:], pos0=first, logits="all").astype(np.float64)
            log_z = np.logaddexp.reduce(logits, axis=1)
            nll += [log_z[k] - logits[k, chunk[first + k + 1]] for k in range(n_ctx - 1 - first)]
    assert tool.ppl == pytest.approx(np.exp(np.mean(nll)), rel=1e-5)


def test_perplexity_keeps_going_without_maps_that_are_refused(patched_lib, model, damaged_maps, text_file):
    flags = ["-c", 256, "-b", 256, "--chunks", 3]
    exact = Perplexity(patched_lib, model, text_file, *flags)
    refused = Perplexity(patched_lib, model, text_file, *flags, "--ridge-maps", damaged_maps)
    assert refused.figures == exact.figures
    assert filled_of(refused) == (0, 3 * 256) and "sha256" in refused.ridge[-1]


def test_saved_logits_are_of_the_fill(patched_lib, model, maps, text_file, tmp_path):
    """--save-all-logits with maps, --kl-divergence without: how far the fill is from the exact run."""
    flags = ["-m", model, "-f", text_file, "-c", 256, *FIXED, "--chunks", 3]
    found = {}
    for mode in ("plumb", "fill"):
        saved = tmp_path / mode
        run(patched_lib, "llama-perplexity", *flags, "--ridge-maps", maps, "--ridge-mode", mode, "--save-all-logits", saved)
        out, _ = run(patched_lib, "llama-perplexity", *flags, "--kl-divergence-base", saved, "--kl-divergence",
                     last=r"Mean\s+KLD:.*\n")
        found[mode] = float(re.search(r"Mean\s+KLD:\s+(-?[\d.]+)", out).group(1))
    assert abs(found["plumb"]) < 1e-3 < found["fill"]


#
# llama-completion
#

N_GENERATED = 24


def completion(folder: Path, model: Path, text: Path, *arguments) -> tuple[str, list[str]]:
    """Generated text and the lines about maps."""
    out, err = run(folder, "llama-completion", "-m", model, "-f", text, *FIXED, "-c", 4096, "-no-cnv", "--no-escape", "--temp", 0,
                   "-n", N_GENERATED, "--ignore-eos", "--no-display-prompt", "--no-warmup", *arguments,
                   last="total time")
    return out, ridge_lines(err)


@pytest.fixture(scope="module")
def exact_text(patched_lib, model, text_file) -> str:
    return completion(patched_lib, model, text_file)[0]


def test_completion_without_maps_is_stock(exact_text, stock_lib, model, text_file):
    assert completion(stock_lib, model, text_file)[0] == exact_text
    assert len(exact_text.strip()) > 10


@pytest.mark.parametrize("mode", ["off", "plumb"])
def test_completion_in_exact_modes_is_stock(exact_text, patched_lib, model, maps, text_file, mode):
    text, lines = completion(patched_lib, model, text_file, "--ridge-maps", maps, "--ridge-tail", TAIL, "--ridge-mode", mode)
    assert text == exact_text
    assert f"mode {mode}: 0 of" in lines[-1]


def test_completion_is_that_of_the_librarys_own_fill(exact_text, patched_lib, native_model, model, maps, text_file):
    text, lines = completion(patched_lib, model, text_file, "--ridge-maps", maps, "--ridge-tail", TAIL)
    tokens = native_model.tokenize(text_file.read_text())
    with lib.Maps(native_model, maps) as m, lib.Context(native_model, 4096, BATCH, UBATCH, n_threads=1) as ctx:
        logits, p = ctx.fill_and_decode(tokens, maps=m, n_tail=TAIL)
        generated = lib.greedy(ctx, logits[-1], N_GENERATED)  # up to an end of text, which the tool goes on behind
    expected = b"".join(native_model.piece(t, special=False) for t in generated).decode(errors="surrogateescape")
    assert len(generated) > N_GENERATED // 2 and text.startswith(expected)
    assert not exact_text.startswith(expected[:4])
    assert f"mode fill: {p.stats['n_filled']} of {len(tokens)} rows filled" in lines[-1]


def test_completion_of_a_short_prompt_runs_exactly(exact_text, patched_lib, model, maps, text_file):
    text, lines = completion(patched_lib, model, text_file, "--ridge-maps", maps, "--ridge-min-prompt", 4000)
    assert text == exact_text
    assert "0 of" in lines[-1] and "fewer than 4000" in lines[-1]


def test_completion_keeps_going_without_maps_that_are_refused(exact_text, patched_lib, model, damaged_maps, text_file):
    text, lines = completion(patched_lib, model, text_file, "--ridge-maps", damaged_maps)
    assert text == exact_text
    assert "0 of" in lines[-1] and "sha256" in lines[-1]


def test_completion_under_a_lora_runs_exactly(exact_text, patched_lib, model, maps, text_file, tmp_path):
    lora = sidecar_files.write_lora(tmp_path / "lora.gguf", arch="llama", n_embd=256)  # adds nothing
    text, lines = completion(patched_lib, model, text_file, "--ridge-maps", maps, "--ridge-tail", TAIL, "--lora", lora)
    assert text == exact_text
    assert "0 of" in lines[-1] and "a LoRA or control vector is active" in lines[-1]


@pytest.mark.parametrize("flags, verdict, says, do", [
    ([], "healthy", "rows were filled", None),
    (["--ridge-mode", "plumb"], "problem", "0 of", "--ridge-mode"),
    (["--ridge-min-prompt", 4000], "problem", "0 of", "--ridge-min-prompt"),
    (None, "problem", "bytes are not those that were written", "Copy, download"),
], ids=["fill", "plumb", "short", "damaged"])
def test_doctor_understands_the_log(patched_lib, model, maps, damaged_maps, text_file, tmp_path, flags, verdict, says, do):
    flags = ["--ridge-maps", damaged_maps] if flags is None else ["--ridge-maps", maps, "--ridge-tail", TAIL, *flags]
    lines = completion(patched_lib, model, text_file, *flags)[1]
    (tmp_path / "tool.log").write_text("\n".join(lines))
    report = log.diagnose(tmp_path / "tool.log")
    assert (report.verdict, says in report.diagnosis) == (verdict, True), report
    assert do in "\n".join(report.do) if do else not report.do


#
# llama-cli
#


def cli(folder: Path, model: Path, text: Path, out: Path, *arguments) -> tuple[str, list[str]]:
    """The answer to a text, and the lines about maps. It comes from the server that llama-cli runs inside itself."""
    _, err = run(folder, "llama-cli", "-m", model, "-f", text, *FIXED, "-c", 4096, "-st", "--temp", 0, "-n", N_GENERATED,
                 "--ignore-eos", "--no-warmup", "-lv", 3, "-o", out, *arguments)
    return out.read_text(errors="surrogateescape"), ridge_lines(err)


def test_cli_fills_its_prompt(patched_lib, model, maps, text_file, tmp_path):
    ridge = ["--ridge-maps", maps, "--ridge-tail", TAIL, "--ridge-mode"]
    exact, lines = cli(patched_lib, model, text_file, tmp_path / "exact.txt")
    assert not lines
    assert cli(patched_lib, model, text_file, tmp_path / "off.txt", *ridge, "off")[0] == exact
    filled, lines = cli(patched_lib, model, text_file, tmp_path / "fill.txt", *ridge, "fill")
    assert int(re.search(r"mode = fill, filled = (\d+)", lines[-1]).group(1)) > 500 and filled != exact


#
# llama-batched-bench
#

TIMED = slice(4, None)  # columns of the table after PP, TG, B, N_KV


def batched_bench(folder: Path, model: Path, *arguments) -> tuple[list[list[str]], list[str]]:
    """Cells of the table, its header first, and the lines about maps."""
    out, err = run(folder, "llama-batched-bench", "-m", model, *FIXED, "-c", 2048, "-npp", 256, "-ntg", 4, "-npl", "1,3", *arguments,
                   last=r"\n\| +256 \| +4 \| +3 \|.*\n")
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    return table, ridge_lines(err)


def test_batched_bench_without_maps_is_stock(stock_lib, patched_lib, model):
    stock, patched = batched_bench(stock_lib, model)[0], batched_bench(patched_lib, model)
    assert [row[:4] for row in patched[0]] == [row[:4] for row in stock] and patched[0][0] == stock[0]
    assert len(stock) == 4 and not patched[1]


@pytest.mark.parametrize("mode", ["fill", "nofill"])
@pytest.mark.parametrize("cache", [[], ["--kv-unified"]], ids=["split", "unified"])
@pytest.mark.parametrize("shared", [[], ["-pps"]], ids=["each", "shared"])
def test_batched_bench_fills_every_prompt(patched_lib, model, maps, mode, cache, shared):
    off = batched_bench(patched_lib, model, *cache, *shared)[0]
    ridge = ["--ridge-maps", maps, "--ridge-tail", TAIL, "--ridge-mode", mode]
    fill, lines = batched_bench(patched_lib, model, *cache, *shared, *ridge)
    assert [row[:4] for row in fill] == [row[:4] for row in off]
    assert all(float(cell) > 0 for row in fill[2:] for cell in row[TIMED])
    n_prompts = 2 if shared else 1 + 3
    assert f"mode {mode}: {n_prompts * (256 - TAIL - SINK)} of {n_prompts * 256} rows filled" in lines[-1]


def test_batched_bench_says_why_a_prompt_ran_exactly(patched_lib, model, maps):
    lines = batched_bench(patched_lib, model, "--ridge-maps", maps, "--ridge-tail", 256)[1]
    assert "0 of 1024 rows filled" in lines[-1] and "a prompt of 256 rows has none before the tail of 256" in lines[-1]


#
# llama-bench
#

UNTIMED = re.compile(r"test_time|avg_|stddev_|samples_")


def bench(folder: Path, model: Path, *arguments, output: str = "json") -> tuple[str, str]:
    return run(folder, "llama-bench", "-m", model, *FIXED, "-r", 2, "-o", output, *arguments)


def bench_rows(folder: Path, model: Path, *arguments) -> list[dict]:
    return json.loads(bench(folder, model, *arguments)[0])


@pytest.mark.parametrize("output", ["csv", "md", "jsonl", "sql"])
def test_bench_without_flags_has_the_columns_of_stock(stock_lib, patched_lib, model, output):
    def shape(folder: Path):
        text = bench(folder, model, "-p", 128, "-n", 2, output=output)[0]
        if output == "csv":
            rows = list(csv.reader(io.StringIO(text)))
            return [[cell for name, cell in zip(rows[0], row) if not UNTIMED.match(name)] for row in rows], rows[0]
        if output == "md":
            lines = text.splitlines()
            return lines[:2], [line.split("|")[:-2] for line in lines[2:4]], lines[4:]
        if output == "jsonl":
            return [[(k, v) for k, v in json.loads(line).items() if not UNTIMED.match(k)] for line in text.splitlines()]
        return text.split("INSERT")[0], len(text.split("INSERT"))

    assert shape(patched_lib) == shape(stock_lib)
    assert "ridge" not in bench(patched_lib, model, "-p", 128, "-n", 0, output=output)[0]


def test_bench_has_off_and_fill_in_one_table(patched_lib, model, maps):
    out, err = bench(patched_lib, model, "-p", 256, "-n", 0, "--ridge-maps", maps, "--ridge-tail", TAIL, output="md")
    header, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    cells = [dict(zip(header, row)) for row in rows[1:]]
    assert [(c["ridge_mode"], c["ridge_filled"], c["test"]) for c in cells] == \
        [("off", "0", "pp256"), ("fill", str(256 - TAIL - SINK), "pp256")]
    assert "runs exactly" not in err


def test_bench_fills_prompt_and_depth(patched_lib, model, maps):
    rows = bench_rows(patched_lib, model, "-p", 192, "-n", 2, "-pg", "128,2", "-d", "0,256",
                      "--ridge-maps", maps, "--ridge-tail", TAIL, "--ridge-mode", "fill,off,plumb")
    found = {(r["n_depth"], r["n_prompt"], r["n_gen"], r["ridge_mode"]): r["ridge_filled"] for r in rows}
    depth = {0: 0, 256: 256 - TAIL - SINK}
    expected = {}
    for d in depth:
        for p, n in ((192, 0), (0, 2), (128, 2)):
            filled = depth[d] + (max(0, p - TAIL - (0 if d else SINK)) if p else 0)
            label = "fill" if filled else "fill (exact)"
            expected |= {(d, p, n, label): filled, (d, p, n, "off"): 0}
            expected[d, p, n, "plumb" if d or p else "plumb (exact)"] = 0
    assert found == expected
    assert all(r["avg_ts"] > 0 for r in rows)


def test_bench_rows_flag(patched_lib, model, maps):
    rows = bench_rows(patched_lib, model, "-p", 256, "-n", 0, "--ridge-maps", maps, "--ridge-tail", TAIL,
                      "--ridge-mode", "fill", "--ridge-rows", "random", "--ridge-budget", 40)
    assert [r["ridge_filled"] for r in rows] == [256 - TAIL - SINK - 40]


def test_bench_marks_rows_that_ran_exactly(patched_lib, model, damaged_maps):
    out, err = bench(patched_lib, model, "-p", 256, "-n", 2, "--ridge-maps", damaged_maps)
    assert [r["ridge_mode"] for r in json.loads(out)] == ["off", "fill (exact)"] * 2
    lines = [line for line in err.splitlines() if "ridge" in line]
    assert len(lines) == 1 and "every prompt runs exactly" in lines[0] and "sha256" in lines[0]


def test_bench_help_names_the_flags(patched_lib):
    out, _ = run(patched_lib, "llama-bench", "--help")
    assert "off,fill" in out and "LLAMA_ARG" not in out
    for flag in ("--ridge-maps FILE", "--ridge-mode", "--ridge-tail N", "--ridge-rows", "--ridge-budget", "--ridge-seed"):
        assert flag in out
    assert "--ridge-min-prompt" not in out


#
# refusals
#

REFUSED = [
    ("llama-perplexity", ["--hellaswag"], ["--ridge-maps", "--hellaswag"]),
    ("llama-perplexity", ["--winogrande"], ["--ridge-maps", "--winogrande"]),
    ("llama-perplexity", ["--multiple-choice"], ["--ridge-maps", "--multiple-choice"]),
    ("llama-perplexity", ["--kl-divergence"], ["--ridge-maps", "--kl-divergence", "--save-all-logits"]),
    ("llama-perplexity", ["--ppl-stride", 64], ["--ridge-maps", "--ppl-stride"]),
    ("llama-perplexity", ["--ridge-tail", 64], ["invalid argument", "--ridge-tail"]),
    ("llama-completion", ["--prompt-cache", "no-such-folder/x.bin"], ["--ridge-maps", "--prompt-cache"]),
    ("llama-completion", ["--grp-attn-n", 2], ["--ridge-maps", "--grp-attn-n"]),
    ("llama-bench", ["-d", "0,64", "--ridge-mode", "off,nofill"], ["nofill", "--n-depth"]),
    ("llama-bench", ["--ridge-mode", "off,sideways"], ["--ridge-mode", "expected off, plumb", "'sideways'"]),
    ("llama-bench", ["--ridge-tail", "0"], ["--ridge-tail", "1 or more", "'0'"]),
    ("llama-bench", ["--ridge-budget", "9"], ["--ridge-budget needs --ridge-rows"]),
    ("llama-bench", ["--ridge-tail"], ["--ridge-tail", "expected a value"]),
]


@pytest.mark.parametrize("tool, flags, names", REFUSED, ids=[f"{t}-{f[0].strip('-')}" for t, f, _ in REFUSED])
def test_flags_that_cannot_work_are_refused_by_name(patched_lib, model, maps, text_file, tool, flags, names):
    text = ["-f", text_file] if tool in ("llama-completion", "llama-perplexity") else []
    out, err = run(patched_lib, tool, "-m", model, *text, "--ridge-maps", maps, *flags, ok=False)
    assert all(name in out + err for name in names), (out[-500:], err[-500:])


@pytest.mark.parametrize("tool", TOOLS)
def test_a_mode_needs_maps(patched_lib, model, text_file, tool):
    text = ["-f", text_file] if tool in ("llama-completion", "llama-perplexity") else []
    out, err = run(patched_lib, tool, "-m", model, *text, "--ridge-mode", "fill", ok=False)
    assert "--ridge-mode fill needs --ridge-maps FILE" in out + err

"""The pico family: prompts ask for what they state, training resumes exactly, and every file holds the same model."""
from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

missing = [name for name in ("torch", "transformers", "tokenizers") if not importlib.util.find_spec(name)]
if missing:
    pytest.skip(f"not installed: {', '.join(missing)} (pip install -e '.[hf]')", allow_module_level=True)

import torch
import transformers

from calibrate_pico import library  # noqa: F401
from ridgefill import lib
from ridgefill.evaluation.facts import FIRST, LAST
from ridgefill.pico import card, data, export, recall, recipes, tasks, tokenizer, train
from ridgefill.pico.model import Pico
from ridgefill.pico.recipes import N_VOCAB, STAGES, PicoError, Shape
from ridgefill.text import Document

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {"llama": Shape(False, 3, 64, 96, 2, 1, 64), "qwen3": Shape(True, 3, 48, 96, 4, 2, 32)}


def prose(seed: int, n: int) -> str:
    """n sentences of made-up words, none of them a name."""
    r = np.random.default_rng(seed)
    words = ["".join(r.choice(list("bcdfgklmnprstv")) + r.choice(list("aeiou")) for _ in range(r.integers(1, 4))) for _ in range(900)]
    return "".join(" ".join(r.choice(words, 9)).capitalize() + ". " for _ in range(n))


@pytest.fixture(scope="module")
def docs() -> list[Document]:
    return [Document(f"{i}.txt", prose(i, 400), f"book {i}", "CC0-1.0", "calibration") for i in range(3)]


@pytest.fixture(scope="module")
def bpe(docs):
    return tokenizer.train(d.text for d in docs)


@pytest.fixture(scope="module")
def corpus(bpe, docs):
    return data.Corpus(bpe, docs, 1024)


def text_of(bpe, sample) -> str:
    return bpe.decode(sample.tokens.tolist(), skip_special_tokens=False)


def stated(text: str) -> dict[str, str]:
    """What a prompt says of each name, read out of its text; names in place of values are followed."""
    name = "([A-Z][a-z]+ [A-Z][a-z]+)"
    said = dict(reversed(re.findall(rf"{name} is \"?(\d+|[a-z ]+?)\"?\.", text)))  # the first statement of each
    for alias, other in re.findall(rf"{name} is that of {name}\.", text):
        said[alias] = said[other]
    return said


def asked(text: str, chat: bool) -> list[tuple[str, str]]:
    """(name, answer) of each question that is answered to its end."""
    if chat:
        return re.findall(r"What is the (?:secret number|password) of ([\w ]+)\? Answer.*?<\|im_end\|>\n<\|im_start\|>assistant\n(.*?)<\|im_end\|>", text)
    return re.findall(r"([A-Z][a-z]+ [A-Z][a-z]+) is \"?(\d+|[a-z ]+?)\"?\.", text)


#
# prompts
#


@pytest.mark.parametrize("i_stage", range(len(STAGES)))
def test_prompts_ask_for_what_they_state(bpe, corpus, i_stage):
    stage, n_hops, n_chats = STAGES[i_stage], 0, 0
    for seed in range(40):
        s = tasks.training_prompt(bpe, np.random.default_rng(seed), stage, corpus.filler)
        text = text_of(bpe, s)
        chat = text.startswith("<|im_start|>")
        n_chats += chat
        said = stated(text.partition("What is")[0] if chat else text)
        if chat:
            assert all(said[name] == answer for name, answer in asked(text, chat))
        assert len(s.tokens) == stage.n_tokens and s.answers
        for first, end in s.answers:
            before = bpe.decode(s.tokens[:first].tolist(), skip_special_tokens=False)
            name = re.findall(r"(\w+ \w+)(?: is|\? Answer)", before)[-1]
            assert bpe.decode(s.tokens[first:end].tolist()) == said[name]
            assert len(re.findall(rf"{name} is", before)) >= 1 + (not chat), "asked before it was stated"
            assert s.answer[first] == tasks.FIRST_WEIGHT and (s.answer[first + 1 : end] == 1).all()
        # weight is on answers and the token behind each, and nowhere else
        rows = {r for first, end in s.answers for r in range(first, end + 1)}
        assert set(np.flatnonzero(s.answer)) - rows == set() and not (s.text & (s.answer > 0)).any()
        for row, source in s.copies:
            assert source <= row and s.tokens[source] == s.tokens[row + 1] and s.answer[row + 1] > 0
        assert {r for r, _ in s.copies} == {r - 1 for first, end in s.answers for r in range(first, end)}
        for row, named in s.hops:
            n_hops += 1
            alias = re.search(r"that of (\w+ \w+)$", bpe.decode(s.tokens[: named + 1].tolist()))
            first, end = next(a for a in s.answers if a[0] == row + 1)
            assert said[alias[1]] == bpe.decode(s.tokens[first:end].tolist())
    assert bool(n_hops) == (stage.hops > 0) and (n_chats > 0) == (stage.chat > 0)


def test_real_text_is_marked_as_such(bpe, corpus, docs):
    s = tasks.training_prompt(bpe, np.random.default_rng(5), STAGES[-1], corpus.filler)
    assert s.text.mean() > 0.3
    known = {x for d in docs for x in d.text.split(". ")}
    marked = bpe.decode(s.tokens[s.text].tolist()).strip()
    assert {x for x in marked.rstrip(".").split(". ")} <= known | {x.strip() for x in known}


def test_heldout_names_are_never_trained_on(bpe, corpus):
    pairs = re.compile(rf"(?:{'|'.join(FIRST)}) (?:{'|'.join(LAST)})")
    seen = set()
    for i, stage in enumerate(STAGES):
        for seed in range(150 if i < 2 else 15):
            s = tasks.training_prompt(bpe, np.random.default_rng(seed), stage, corpus.filler)
            seen |= set(pairs.findall(text_of(bpe, s)))
    held = set()
    for seed in range(60):
        s = tasks.heldout_prompt(bpe, np.random.default_rng(seed), tasks.TASKS["digits of 4"], 512, 0.5, corpus.filler)
        held |= set(pairs.findall(text_of(bpe, s)))
    assert len(seen) > 250 and len(held) > 60 and not seen & held
    assert len(seen | held) <= len(FIRST) * len(LAST) and {n.split()[0] for n in seen} == set(FIRST) and {n.split()[1] for n in seen} == set(LAST)


@pytest.mark.parametrize("name", tasks.TASKS)
@pytest.mark.parametrize("depth", [0.1, 0.9])
def test_heldout_prompts(bpe, corpus, name, depth):
    for seed in range(10):
        s = tasks.heldout_prompt(bpe, np.random.default_rng(seed), tasks.TASKS[name], 512, depth, corpus.filler)
        text = text_of(bpe, s)
        assert 480 < len(s.tokens) <= 512 and text.endswith("<|im_end|>")
        ((asked_for, answer),) = asked(text, True)
        assert stated(text)[asked_for] == answer
        assert len(answer.split()) == 3 if "words" in name else len(answer) == 7
        assert (f"{asked_for} is that of" in text) == ("hops" in name)
        assert abs(text.index(f"{asked_for} is") / text.index("What is") - depth) < 0.15


def test_text_that_is_too_short_is_refused(bpe, docs):
    with pytest.raises(PicoError, match="expected documents with sentences of 100,000 tokens, found none among 3"):
        data.Corpus(bpe, docs, 100_000)
    with pytest.raises(PicoError, match="expected text enough for a vocabulary of 1024 tokens, found \\d+"):
        tokenizer.train(["a few words"])


#
# training
#


@pytest.fixture
def small(monkeypatch):
    """A recipe of few steps in which every second one is followed by a longer stage."""
    made = recipes.Recipe(SHAPES["qwen3"], match=2, hop=1, n_steps=9, n_finish=3, advance=0.0, n_window=2)
    monkeypatch.setitem(recipes.RECIPES, "small", made)
    monkeypatch.setattr(train, "N_LOG", 2)
    monkeypatch.setattr(data, "STEP_TOKENS", 512)
    return made


def test_a_resumed_run_is_the_same(bpe, corpus, small, tmp_path):
    whole = train.Trainer("small", bpe, corpus, tmp_path / "whole")
    assert whole.run()
    for n in (3, 2, None):
        part = train.Trainer("small", bpe, corpus, tmp_path / "parts")
        if n != 3:
            part.load()
        assert part.run(n) == (n is None)
    assert part.at.step == whole.at.step == 9 and part.at.stage == whole.at.stage > 1
    for (name, a), b in zip(whole.model.state_dict().items(), part.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    logs = [[{k: v for k, v in e.items() if k != "seconds"} for e in json.loads((tmp_path / d / "log.json").read_text())] for d in ("whole", "parts")]
    assert logs[0] == logs[1] and [e["step"] for e in logs[0] if "event" in e] == [2, 4, 6]


def test_a_step_lowers_the_loss_of_what_it_saw(bpe, corpus, small, tmp_path):
    t = train.Trainer("small", bpe, corpus, tmp_path)
    b = data.batch(bpe, corpus, t.recipe, STAGES[0], 0, 0)
    before = {k: v.item() for k, v in t.losses(b)[0].items()}
    for _ in range(15):
        t.at = train.Progress()  # the same batch, stage and learning rate again
        t.step()
    after = {k: v.item() for k, v in t.losses(b)[0].items()}
    assert all(after[k] < before[k] for k in ("answer", "text", "copy", "reach")), (before, after)


def test_the_state_of_another_run_is_refused(bpe, corpus, small, tmp_path):
    train.Trainer("small", bpe, corpus, tmp_path).run(1)
    with pytest.raises(PicoError, match="expected the state of a run with the same seed, found another"):
        train.Trainer("small", bpe, corpus, tmp_path, seed=1).load()
    recipes.RECIPES["small"] = dataclasses.replace(small, reward=0.1)
    with pytest.raises(PicoError, match="the same recipe"):
        train.Trainer("small", bpe, corpus, tmp_path).load()
    with pytest.raises(PicoError, match="expected one of pico-qwen3-s, .*found 'pico'"):
        train.Trainer("pico", bpe, corpus, tmp_path)


def test_attended_by_hand():
    # scores of row 2 on rows 0..2 are ln 1, ln 2, ln 5: masses 1/8, 2/8, 5/8; row 3 stands behind it and does not count
    q, k = torch.zeros(1, 2, 4, 4), torch.zeros(1, 1, 4, 4)
    q[0, 0, 2, 0] = 2.0  # over the root of the head size: 1
    k[0, 0, :, 0] = torch.tensor([1.0, 2.0, 5.0, 9.0]).log()
    wanted = torch.zeros(1, 2, 4, dtype=torch.bool)
    wanted[0, 0, [0, 1]] = True
    rows = torch.tensor([[2, 0]])  # the second one is padding
    assert train.attended(q, k, rows, wanted).item() == pytest.approx(-np.log(3 / 8), abs=1e-4)
    wanted[0, 0, 2] = True
    assert train.attended(q, k, rows, wanted).item() == pytest.approx(0, abs=1e-4)


def test_reached_predicts_the_tokens_before(bpe):
    """Heads that read a state in which the tokens 1 to 3 rows before it are written lose nothing; shifted by one they do."""
    tokens = torch.randint(N_VOCAB, (2, 31), generator=torch.Generator().manual_seed(0))
    heads = torch.nn.ModuleList(torch.nn.Linear(3 * N_VOCAB, N_VOCAB, bias=False) for _ in range(3))
    states = torch.zeros(2, 31, 3 * N_VOCAB)
    for i, head in enumerate(heads):
        for t in range(i + 1, 31):
            states[torch.arange(2), t, i * N_VOCAB + tokens[:, t - i - 1]] = 1
        head.weight.data = torch.cat([torch.eye(N_VOCAB) * 30 * (i == j) for j in range(3)], 1)
    assert train.reached(states, tokens, heads).item() < 1e-3
    assert train.reached(states.roll(1, 1), tokens, heads).item() > 5


#
# files
#


@pytest.fixture(scope="module", params=SHAPES)
def exported(request, bpe, tmp_path_factory):
    """(shape, model whose norms are not 1, folder, GGUF)"""
    shape, folder = SHAPES[request.param], tmp_path_factory.mktemp("exported")
    torch.manual_seed(1)
    model = Pico(shape)
    for name, p in model.named_parameters():
        p.data = (p.data * (10 if "embed" in name else 3) if p.ndim == 2 else p.data + 0.3 * torch.randn_like(p)).half().float()
    export.to_transformers(model.state_dict(), shape, bpe, folder)
    export.to_gguf(model.state_dict(), shape, bpe, folder / "m.gguf", "m")
    return shape, model, folder, folder / "m.gguf"


@pytest.fixture(scope="module")
def windows(corpus):
    r = np.random.default_rng(0)
    return [corpus.window(r, 200).tolist() for _ in range(2)]


def test_the_network_is_that_of_transformers(exported, windows):
    shape, model, folder, _ = exported
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert theirs.config.model_type == ("qwen3" if shape.qk_norm else "llama")
    tokens = torch.tensor(windows)
    with torch.no_grad():
        expected, mine = theirs(tokens).logits, model.logits(model(tokens)[0])
    assert expected.std() > 0.5 and (mine - expected).abs().max() < 1e-3 * expected.abs().max()


def test_the_library_says_what_transformers_says(exported, windows):
    shape, _, folder, path = exported
    found = export.agreement(folder, path, windows)
    assert found.mean_kl < 1e-4 and found.n == 400 and found.top1 > 0.98
    with lib.Model(path) as m:
        assert (m.n_layer, m.n_embd, m.n_head_kv, m.head_size, m.n_vocab) == (shape.n_layer, shape.width, shape.n_head_kv, shape.head, N_VOCAB)
        assert m.unsupported() is None


def test_a_file_that_differs_is_refused(exported, bpe, windows, tmp_path):
    shape, model, folder, _ = exported
    state = model.state_dict()
    name = "model.layers.1.self_attn.k_proj.weight"
    other = state | {name: state[name].flip(0)}
    export.to_gguf(other, shape, bpe, tmp_path / "m.gguf", "m")
    with pytest.raises(PicoError, match="expected a mean KL of at most 0.0001 nats to .*, found \\d"):
        export.agreement(folder, tmp_path / "m.gguf", windows)


def test_tokens_are_the_same_everywhere(exported, bpe, docs, corpus):
    _, _, folder, path = exported
    prompt = tasks.heldout_prompt(bpe, np.random.default_rng(3), tasks.TASKS["words of 4"], 512, 0.5, corpus.filler)
    texts = [docs[0].text[:3000], text_of(bpe, prompt), "it's 12,345.67 —\n\n\n  x = [1, 2]  # é\t\r\nWe'LL"]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    with lib.Model(path) as m:
        for text in texts:
            expected = bpe.encode(text).ids
            assert m.tokenize(text, parse_special=True) == expected
            assert theirs(text, add_special_tokens=False)["input_ids"] == expected
            assert m.detokenize(expected, special=True) == text
        messages = [{"role": "user", "content": "What?"}]
        assert m.chat(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert m.is_eog(export.IM_END)


def test_names_are_one_token(bpe):
    assert all(len(bpe.encode(f" {w}").ids) == 1 for w in (*FIRST, *LAST))
    assert bpe.encode(" 4819").tokens == ["Ġ", "4", "8", "1", "9"]


def test_large_files_are_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(bytes(export.MAX_BYTES + 1))
    with pytest.raises(PicoError, match="m.gguf: expected at most 6,000,000 bytes, found 6,000,001"):
        export.check_sizes(tmp_path)


#
# recall and card
#


@pytest.mark.parametrize("fault, hit, first", [(None, True, True), ("end", False, True), ("first", False, False)])
def test_a_hit_is_the_whole_answer_and_its_end(exported, bpe, corpus, monkeypatch, fault, hit, first):
    """A library that answers rightly, but for one token."""

    def decode(self, tokens, logits, **_):
        rows = list(logits)
        said = [*tokens[rows[0] + 1 :].tolist(), export.IM_END]
        if fault:
            said[-1 if fault == "end" else 0] = 99
        return np.eye(N_VOCAB)[said]

    monkeypatch.setattr(lib.Context, "decode", decode)
    records = recall.evaluate(exported[3], bpe, corpus, 2, (512,))
    assert len(records) == 2 * len(tasks.TASKS) and {(r["hit"], r["first"]) for r in records} == {(hit, first)}
    found = recall.summary(records)
    assert [f["task"] for f in found] == list(tasks.TASKS) and all(f["n"] == 2 and f["value"] == hit for f in found)


def test_an_untrained_model_recalls_nothing(exported, bpe, corpus):
    records = recall.evaluate(exported[3], bpe, corpus, 2, (256,))
    assert not any(r["hit"] for r in records) and all(r["n_rows"] <= 256 for r in records)


@pytest.mark.parametrize(
    "step, learned, outcome",
    [(690, True, "The curriculum was run to its end."), (690, False, "The steps ran out"), (689, True, "stopped before its end")],
)
def test_the_card_shows_what_was_measured(docs, step, learned, outcome):
    at = train.Progress(step=step, log=[{"step": 90, "event": "finish", "learned": learned, "digits": 0.5, "seconds": 60.0}], seconds=90.0)
    found = [{"n_tokens": 512, "task": "digits", "first": 0.75, "value": 0.5, "low": 0.1, "high": 0.9, "n": 4}]
    kl = export.Agreement(2e-6, 3e-5, 0.999, 4096)
    text = card.write("pico-llama", recipes.recipe("pico-llama"), 123_456, 0, at, docs, kl, found, "a CPU")
    for expected in ("| 512 | digits | 2 of 4 | [0.100, 0.900] | 0.750 |", "123,456", "2.0e-06", outcome, "| book 0 | CC0-1.0 | 1 |"):
        assert expected in text


@pytest.mark.parametrize(
    "args, message",
    [(["pico"], "expected one of pico-qwen3-s, pico-qwen3-l, pico-llama, found 'pico'"), (["pico-llama", "--text", "/no/such"], "no such file or folder: /no/such")],
)  # fmt: skip
def test_user_errors_are_messages(docs, tmp_path, args, message):
    for d in docs:
        (tmp_path / d.name).write_text(d.text)
    (tmp_path / "sources.json").write_text(json.dumps([{"file": d.name, "source": d.source, "licence": d.licence, "partition": d.partition} for d in docs]))
    command = [sys.executable, ROOT / "scripts" / "train_pico.py", "--text", tmp_path, "--out", tmp_path / "o", "--work", tmp_path / "w", *args]
    p = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert p.returncode != 0 and "Traceback" not in p.stderr and message in p.stderr

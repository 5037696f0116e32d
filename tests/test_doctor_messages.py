"""The doctor's catalogue and the C++ sources hold the same messages, and a message is found again in any line that has it."""
from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpp_messages
from ridgefill.doctor import catalogue

ENTRIES = catalogue.entries()
KNOWN = [e.message for e in ENTRIES] + catalogue.parts()


def test_every_message_of_the_sources_is_in_the_catalogue():
    missing = {m: files for m, files in cpp_messages.everywhere().items() if m not in KNOWN}
    assert not missing, f"say in python/ridgefill/doctor/messages.json what these mean and what to do: {missing}"


def test_every_message_of_the_catalogue_is_in_the_sources():
    stale = set(KNOWN) - cpp_messages.everywhere().keys()
    assert not stale, f"no source prints these any more: {stale}"


def test_each_message_stands_once_with_a_meaning_and_advice():
    assert len(set(KNOWN)) == len(KNOWN)
    for e in ENTRIES:
        assert e.verdict in ("healthy", "warning", "problem") and e.means.endswith(".")
        assert e.do.endswith(".") or (e.verdict == "healthy" and not e.do), e
        assert e.within is None or e.within in KNOWN


def test_every_reason_of_the_server_is_in_the_catalogue():
    """Why a prompt ran exactly: one-word texts, which are no messages."""
    found = {"plumb"}  # the mode, in the place of a reason
    for path in cpp_messages.sources():
        if path.name.startswith("server-ridge") and path.suffix == ".cpp":
            source = path.read_text()
            texts = re.findall(r"reason\s*=(?!=)([^;]*);", source)
            texts += re.findall(r"::reason_for_exact\(.*?^\}", source, re.DOTALL | re.MULTILINE)
            texts += re.findall(r'prompts\[\{ "skipped", .*|\bskip\([^;]*;', source)
            found |= {word for text in texts for word in re.findall(r'"([a-z_]+)"', text)} - {"skipped"}
    assert found == catalogue.reasons().keys()
    for about in catalogue.reasons().values():
        assert about["verdict"] in ("healthy", "problem") and about["means"] and about["do"].endswith(".")


@pytest.mark.parametrize(
    "source, message",
    [
        ('LLAMA_LOG_WARN("%s: the moon is %d\\n", __func__, x);', "the moon is {}"),
        ('return llama_ridge_fail(LLAMA_RIDGE_ERR_FILE, "the moon is %5.1f of"\n    " cheese", f(x, "y"));', "the moon is {} of cheese"),
        ('throw ridge_error("the moon " + ridge_quote(name) + " is gone");', "the moon {} is gone"),
        ('throw ridge_error(ridge_format("the moon has %" PRIu64 " holes, 100 %%", n));', "the moon has {} holes, 100 %"),
        ('throw ridge_error(full ? "the moon is full" : "");', "the moon is full"),
        ('throw std::invalid_argument(std::string("the moon ") + name() + " is gone");', "the moon {} is gone"),
        ('std::ostringstream text; text << "the moon " << (x ? "a" : "b") << " is gone";', "the moon {} is gone"),
        ('const char * f() { return "the moon is gone"; } // "not this one"', "the moon is gone"),
        ('struct { const char * a = { "the moon is gone" }; /* "nor this one" */ };', "the moon is gone"),
        ('RDG_LOG(LOG_WRN, id, task, "the \\"moon\\" is %s\\n", why());', 'the "moon" is {}'),
    ],
)
def test_a_message_is_found_however_it_is_printed(source, message):
    assert cpp_messages.in_text(source) == {message}


def test_a_message_in_a_patch_is_found(tmp_path):
    patch = tmp_path / "x.patch"
    lines = ["--- a/x.cpp", '+++ b/x.cpp of "two words"', "@@ -1,2 +1,3 @@", ' if (x) { log("not ours");', '-log("nor this");']
    patch.write_text("\n".join([*lines, '+    log("the moon"', '+        " is gone");']))
    assert cpp_messages.in_file(patch) == {"the moon is gone"}


def test_what_is_no_message_is_left_out():
    source = 'f("x"); common_arg({"--moon"}, "N", "what the moon is"); o << "# HELP the moon";'
    source += 's = "{\\"moon\\": \\"" + x + "\\", \\"a\\": 1";'
    assert cpp_messages.in_text(source) == set()


# what programs put before a message
PREFIXES = [
    "",
    "0.01.520.865 E llama_ridge_maps_load: ",
    "0.03.000.142 I ",
    "0.02.039.077 I slot  run_exactly: id  0 | task 3 | ridge: ",
    'error while handling argument "--ridge-tail": ',
    "Nov 30 13:00:01 host llama-server[17]: 0.01.520.885 W srv          init: ",
    "ridgefill.errors.RidgeError: ",
]


@settings(max_examples=15)
@given(prefix=st.sampled_from(PREFIXES), data=st.data())
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.message[:40])
def test_a_message_is_found_again_in_a_line(entry, prefix, data):
    word = st.text("abxyz019./-_[]", min_size=1, max_size=8)
    values = tuple(data.draw(word) for _ in range(entry.message.count("{}")))
    text = entry.message.replace("{}", "%s") % values
    if entry.within:
        text = entry.within.replace("{}", text)
    chain = catalogue.explain(prefix + text + "\n")
    assert chain[-1].entry == entry and chain[-1].values == values
    assert [f.entry.message for f in chain] == ([entry.within] if entry.within else []) + [entry.message]


def test_what_a_message_quotes_is_found_in_it():
    line = (
        "0.1 E llama_ridge_maps_load: ridge maps refused: sidecar '/a: b/x.gguf': it is a LoRA adapter, "
        "expected an adapter with adapter.type = 'ridge_maps'"
    )
    assert [f.entry.group for f in catalogue.explain(line)] == ["refused", "refused", "not_maps", "is_lora"]
    line = "ridge: the prompt runs exactly: step 2 of 9: expected 300 free cells in the KV cache for the rest of the prompt, found 12; the rows of this prompt were removed from sequence 1"
    assert [f.entry.group for f in catalogue.explain(line)] == ["prompt_failed", "prompt_failed", "no_space"]
    # what a flag expects is not what the file is
    line = "error: --lora x.gguf: expected a LoRA adapter, found a file of ridge maps; pass it as --ridge-maps"
    assert [f.entry.group for f in catalogue.explain(line)] == ["wrong_flag"]


@pytest.mark.parametrize("line", ["", "llama_model_loader: loaded x.ridge.gguf", "srv init: using 1 slots: expected 2", "the file is damaged"])
def test_other_lines_are_no_messages(line):
    assert catalogue.explain(line) == []

"""Field reports about slot files: what they may hold, what damage does, what a failure leaves. Every request is sent twice."""
from __future__ import annotations

import shutil
import struct
import time
from collections.abc import Iterator

import pytest

from server_util import N, Server, cold, llama_server, prompt_tokens, random_maps, ridge_of
from server_util import maps, model, plain, prompt  # noqa: F401  (fixtures)


@pytest.fixture(scope="module")
def exact_tokens(plain, prompt):
    return plain.completion(prompt, cache_prompt=False)["tokens"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("slots")


@pytest.fixture
def server(model, maps, folder):
    """One for each test: some end it."""
    with Server(model, "--slot-save-path", f"{folder}/", maps=maps) as s:
        yield s


@pytest.fixture
def slot_file(server, prompt, folder):
    """A file of an exact slot, whose slot still holds the prompt."""
    server.completion(prompt, "off", cache_prompt=False)
    server.post("/slots/0?action=save", {"filename": "good.bin"})
    return folder / "good.bin"


def rows_begin(data: bytes) -> int:
    """Where the tokens of a slot file end and the state of its sequence begins."""
    return 12 + 4 * struct.unpack_from("<I", data, 8)[0]


def restore(server, name: str) -> str:
    """Restore slot 0, twice. The message of the error, "" if there was none; the status must be that of a bad request."""
    messages = set()
    for _ in range(2):
        try:
            server.post("/slots/0?action=restore", {"filename": name})
            message = ""
        except llama_server.ServerError as e:
            message = str(e)
            assert "status 400" in message
        messages.add(message)
    assert len(messages) == 1, messages
    return messages.pop()


def assert_exact(server, prompt, tokens, n_cached: int) -> None:
    first, again = (server.completion(prompt, "off") for _ in range(2))
    assert first["timings"]["cache_n"] == n_cached and again["timings"]["cache_n"] == N - 1
    assert first["tokens"] == tokens and ridge_of(again)["cached_filled"] == 0


#
# what a file may hold
#


@pytest.mark.field_report(3, "server-context.cpp", "if (slot->prompt.ridge.has_filled()) {", "if (false) {")
@pytest.mark.field_report(2, "server-context.cpp", "if (slot->prompt.ridge.has_filled()) {", "if (false) {")
def test_field_report_3_a_slot_file_never_brings_fills_to_exact_requests_or_to_other_maps(model, maps, prompt, exact_tokens, tmp_path):
    """Saved under maps A; restored under A, under other maps that took A's name, and without maps."""
    path = shutil.copy(maps, tmp_path / "a.ridge.gguf")
    flags = ["--slot-save-path", f"{tmp_path}/"]
    with Server(model, *flags, maps=path) as s:
        for _ in range(2):
            assert ridge_of(s.completion(prompt, "fill", cache_prompt=False))["filled"] > 0
            try:
                status, message = s.error("/slots/0?action=save", {"filename": "filled.bin"})
                assert status == 400 and "filled" in message
            except AssertionError:
                assert (tmp_path / "filled.bin").exists()
    if not (tmp_path / "filled.bin").exists():
        # the file that a server without the refusal would have written
        return
    shutil.copy(random_maps(model, tmp_path, seed=1), path)
    for used, name in ((maps, "A"), (path, "B"), (None, "none")):
        with Server(model, *flags, maps=used) as s:
            for _ in range(2):
                restore(s, "filled.bin")
                first = s.completion(prompt, "off")
                assert first["timings"]["cache_n"] == 0 and first["tokens"] == exact_tokens, name
            restore(s, "filled.bin")
            assert (ridge_of(s.completion(prompt, "fill"))["cached_filled"] > 0) <= (name == "A"), name


@pytest.fixture(scope="module")
def replaced(model, maps, prompt, tmp_path_factory):
    """A server that slept while its file of maps was replaced: two answers and the hash in /props, before and after."""
    folder = tmp_path_factory.mktemp("replaced")
    path = shutil.copy(maps, folder / "maps.gguf")
    with Server(model, "--sleep-idle-seconds", 1, maps=path) as s:
        seen = []
        for _ in range(2):
            answers = [s.completion(prompt, "fill") for _ in range(2)]
            seen.append((*answers, s.get("/props")["ridge"]["hash"]))
            shutil.copy(random_maps(model, folder, seed=1), path)
            until = time.monotonic() + 60
            while "entering sleeping state" not in s.log_text():
                assert time.monotonic() < until
                time.sleep(0.1)
    return *seen, cold(model, path, prompt, "fill")


@pytest.mark.field_report(2, "llama-ridge-maps.cpp", "maps->hash   = ggml_ridge_sidecar_hash  (sc.get());")
def test_field_report_2_maps_replaced_under_their_name_are_read_anew(replaced):
    """Other fills, nothing of the old ones, and both under a hash of the content."""
    (old, _, hash), (first, again, _), fresh = replaced
    assert ridge_of(first)["cached"] == 0 and first["tokens"] == fresh != old["tokens"]
    assert ridge_of(again)["cached_filled"] == ridge_of(first)["filled"] > 0 and len(hash) == 64


@pytest.mark.xfail(strict=True, reason="/props shows what was loaded at the start: server.cpp calls routes.update_meta() once, not after a sleep")
def test_props_follow_maps_that_were_replaced(replaced):
    (_, _, before), (_, _, after), _ = replaced
    assert before != after


#
# damaged files
#


TAKEN = """upstream takes a file whose state holds other cells than its tokens say (server_context_impl, SERVER_TASK_TYPE_SLOT_RESTORE, has
no check); the next request aborts in pre_decode() or is answered with "Invalid input batch." """
ABORTS = "upstream asserts on it: llama_context::state_seq_load_file, GGML_ASSERT(nread <= state_size), after a read that came short"


@pytest.mark.field_report(4)
def test_field_report_4_a_slot_file_cut_before_its_rows_is_refused(server, slot_file, folder, prompt, exact_tokens):
    """Upstream's check; the server answers, exactly."""
    data = slot_file.read_bytes()
    end = rows_begin(data)
    for cut in (0, 1, 4, 11, 12, 100, end - 1, end, end + 1):
        (folder / "cut.bin").write_bytes(data[:cut])
        assert "Unable to restore slot" in restore(server, "cut.bin"), cut
    assert_exact(server, prompt, exact_tokens, 0)
    assert restore(server, slot_file.name) == ""
    assert_exact(server, prompt, server.completion(prompt, "off")["tokens"], N - 1)


@pytest.mark.field_report(4)
@pytest.mark.xfail(strict=True, reason=ABORTS)
def test_field_report_4_a_slot_file_cut_in_its_rows_is_refused(server, slot_file, folder, prompt, exact_tokens):
    data = slot_file.read_bytes()
    for cut in (len(data) // 2, len(data) - 1):
        (folder / "cut.bin").write_bytes(data[:cut])
        assert "Unable to restore slot" in restore(server, "cut.bin"), cut
    assert_exact(server, prompt, exact_tokens, 0)


def overwritten(data: bytes, places: list[int]) -> Iterator[bytes]:
    """The file with absurd numbers at each place."""
    for at in places:
        for value in (0, 2**31 - 1, 2**32 - 1):
            yield data[:at] + struct.pack("<I", value) + data[at + 4 :]


@pytest.mark.field_report(4)
def test_field_report_4_a_slot_file_of_another_magic_version_or_length_is_refused(server, slot_file, folder, prompt, exact_tokens):
    data = slot_file.read_bytes()
    for damaged in overwritten(data, [0, 4, 8]):
        (folder / "bad.bin").write_bytes(damaged)
        assert "Unable to restore slot" in restore(server, "bad.bin")
    assert_exact(server, prompt, exact_tokens, 0)


@pytest.mark.field_report(4)
@pytest.mark.xfail(strict=True, reason=TAKEN)
def test_field_report_4_a_slot_file_with_other_cells_than_tokens_does_not_end_the_server(server, slot_file, folder, prompt, exact_tokens):
    """Counts of sequences and cells and the first positions, in the state behind the tokens: refused, or of no consequence."""
    data, end = slot_file.read_bytes(), rows_begin(slot_file.read_bytes())
    for damaged in overwritten(data, list(range(end, end + 16, 4))):
        (folder / "bad.bin").write_bytes(damaged)
        restore(server, "bad.bin")
        assert server.completion(prompt, "off")["tokens"] == exact_tokens
    assert_exact(server, prompt, exact_tokens, N - 1)


#
# what a failure leaves
#

LOST = "upstream empties the slot when a restore fails: SERVER_TASK_TYPE_SLOT_RESTORE of server-context.cpp, slot->prompt_clear() in its catch"


@pytest.mark.field_report(5)
@pytest.mark.xfail(strict=True, reason=LOST)
@pytest.mark.parametrize("mode", ["off", "fill"])
@pytest.mark.parametrize("damage", ["cut", "cell"])
def test_field_report_5_a_restore_that_fails_leaves_the_slot_as_it_was(server, slot_file, folder, prompt, mode, damage):
    """A damaged file of another prompt: the slot still holds its own, filled rows and all."""
    data = slot_file.read_bytes()
    other = prompt_tokens(server, N, start=700)
    end = rows_begin(data)
    bad = data[: end + 2] if damage == "cut" else data[:end] + b"\xff" * 8 + data[end + 8 :]
    (folder / "bad.bin").write_bytes(bad)
    before = server.completion(other, mode, cache_prompt=False)
    for _ in range(2):
        assert restore(server, "bad.bin") != ""
        after = server.completion(other, mode)
        assert after["timings"]["cache_n"] == N - 1 and after["tokens"] == before["tokens"]


@pytest.mark.field_report(6)
@pytest.mark.xfail(strict=True, reason=LOST)
def test_field_report_6_a_missing_file_leaves_the_slot_as_it_was(server, prompt):
    for mode in ("off", "fill"):
        before = server.completion(prompt, mode, cache_prompt=False)
        assert "Unable to restore slot" in restore(server, "none.bin")
        after = server.completion(prompt, mode)
        assert after["timings"]["cache_n"] == N - 1 and after["tokens"] == before["tokens"]


@pytest.mark.field_report(6)
def test_field_report_6_an_empty_slot_can_be_saved_erased_and_restored(server, prompt, exact_tokens):
    """A file of no tokens gives an empty slot, also over a filled one; the server answers."""
    for _ in range(2):
        server.post("/slots/0?action=erase", {})
        assert server.post("/slots/0?action=save", {"filename": "empty.bin"})["n_saved"] == 0
    for mode in ("off", "fill"):
        server.completion(prompt, mode, cache_prompt=False)
        restore(server, "empty.bin")
        assert server.completion(prompt, "off")["tokens"] == exact_tokens
        assert ridge_of(server.completion(prompt, "off"))["cached_filled"] == 0

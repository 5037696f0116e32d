"""Field reports about slot files: what they may hold, what damage does, what a failure leaves. Every request is sent twice."""
from __future__ import annotations

import random
import shutil
import struct
import time
from collections.abc import Iterator

import pytest

import sidecar_files
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


def cached(server, prompt, mode: str) -> tuple[int, list[int]]:
    """Filled rows and text of an answer that takes all rows but the last from the slot. Twice, and alike."""
    first, again = (server.completion(prompt, mode) for _ in range(2))
    assert first["timings"]["cache_n"] == again["timings"]["cache_n"] == len(prompt) - 1
    assert first["tokens"] == again["tokens"]
    return ridge_of(again)["cached_filled"], again["tokens"]


#
# what a file may hold
#


@pytest.fixture(scope="module")
def filled_file(model, maps, prompt, folder):
    """A file of a filled slot, and what the slot's server says when the slot itself answers."""
    with Server(model, "--slot-save-path", f"{folder}/", maps=maps) as s:
        first = s.completion(prompt, "fill")
        s.post("/slots/0?action=save", {"filename": "filled.bin"})
        again = s.completion(prompt, "fill")
        assert ridge_of(again)["cached_filled"] == ridge_of(first)["filled"] > 0
        return "filled.bin", again


@pytest.mark.field_report(3, "server-context.cpp", "slot->prompt.ridge = ridge_rows.cells;")
def test_field_report_3_fills_survive_a_slot_file_and_never_go_to_exact_requests(server, folder, prompt, exact_tokens, filled_file):
    """Saved and restored under the same maps, by another server: a filled request goes on, an exact one starts anew."""
    name, wanted = filled_file
    for _ in range(2):
        assert restore(server, name) == ""
        exact = server.completion(prompt, "off")
        assert exact["timings"]["cache_n"] == 0 and exact["tokens"] == exact_tokens
        assert restore(server, name) == ""
        again = server.completion(prompt, "fill")
        assert again["timings"]["cache_n"] == N - 1 and ridge_of(again)["cached_filled"] == ridge_of(wanted)["cached_filled"]
        assert again["tokens"] == wanted["tokens"]
    # a copy of the copy
    restore(server, name)
    server.post("/slots/0?action=save", {"filename": "again.bin"})
    restore(server, "again.bin")
    assert server.completion(prompt, "off")["timings"]["cache_n"] == 0


@pytest.mark.field_report(
    2, "server-ridge.cpp", "std::find(known.begin(), known.end(), made_by) == known.end()", "false"
)
@pytest.mark.field_report(3, "server-ridge.cpp", "const bool filled = file && file->cells.has_filled();", "const bool filled = false;")
@pytest.mark.parametrize("others", ["other maps", "none"])
def test_field_report_3_a_file_of_fills_is_refused_under_other_maps(model, maps, prompt, folder, filled_file, tmp_path, others):
    """By content: the other maps have the name of those that filled it. Without maps all else of slot files is upstream's."""
    path = shutil.copy(random_maps(model, tmp_path, seed=1), tmp_path / maps.name) if others == "other maps" else None
    with Server(model, "--slot-save-path", f"{folder}/", maps=path) as s:
        s.completion(prompt, "off")
        before = cached(s, prompt, "off")
        message = restore(s, filled_file[0])
        assert sidecar_files.sha256(maps.read_bytes()) in message
        assert ("other maps" if path else "found one without") in message
        assert cached(s, prompt, "off") == before


@pytest.mark.field_report(4, "server-ridge.cpp", "return { e.what(), {} };", 'return { maps ? e.what() : "", {} };')
def test_field_report_4_a_damaged_record_is_refused_without_maps_too(model, folder, filled_file):
    """It may have said that rows are filled. A file that is missing is upstream's matter."""
    data = bytearray((folder / filled_file[0]).read_bytes())
    data[-30] ^= 1
    (folder / "bad.bin").write_bytes(data)
    with Server(model, "--slot-save-path", f"{folder}/") as s:
        assert "damaged" in restore(s, "bad.bin")
        assert "Unable to restore slot" in restore(s, "missing.bin")


def test_rows_of_mode_nofill_cannot_be_saved(server, prompt, folder):
    server.completion(prompt, "nofill", cache_prompt=False)
    for _ in range(2):
        status, message = server.error("/slots/0?action=save", {"filename": "nofill.bin"})
        assert status == 501 and "nofill" in message and not (folder / "nofill.bin").exists()
    assert server.completion(prompt, "nofill")["timings"]["cache_n"] == N - 1


@pytest.mark.field_report(3, "server-ridge-cells.cpp", "if (lora != want.adapters) {", "if (false) {")
def test_field_report_3_a_slot_file_knows_its_adapters(model, maps, prompt, tmp_path):
    """By content: rows of a LoRA go with the same one under another name, and with no other."""
    a, b = (sidecar_files.write_lora(tmp_path / f"{name}.gguf", arch="llama", n_embd=256, scale=scale) for name, scale in (("a", 0.3), ("b", 0.1)))
    flags = ["--slot-save-path", f"{tmp_path}/"]
    with Server(model, "--lora", a, *flags, maps=maps) as s:
        assert ridge_of(s.completion(prompt))["reason"] == "lora"
        s.post("/slots/0?action=save", {"filename": "lora.bin"})
    for lora, n_cached in ((shutil.copy(a, tmp_path / "c.gguf"), N - 1), (b, 0)):
        with Server(model, "--lora", lora, *flags, maps=maps) as s:
            for _ in range(2):
                assert restore(s, "lora.bin") == ""
                assert s.completion(prompt)["timings"]["cache_n"] == n_cached


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


@pytest.mark.field_report(2, "server-ridge.cpp", "props = describe();", "props = props.is_null() ? describe() : props;")
def test_field_report_2_props_follow_maps_that_were_replaced(replaced):
    (_, _, before), (_, _, after), _ = replaced
    assert before != after


#
# damaged and foreign files: the slot keeps its rows
#


@pytest.mark.field_report(4, "server-ridge-slot-file.cpp", "if (hash.digest() != end.hash || end.n_record > size - sizeof(end)) {", "if (false) {")
def test_field_report_4_a_slot_file_cut_or_changed_anywhere_is_refused(server, slot_file, folder, prompt):
    """Cut at the borders of its parts and within them; one bit changed there, and absurd numbers where upstream has counts."""
    before = cached(server, prompt, "off")
    data = slot_file.read_bytes()
    rows, record = rows_begin(data), len(data) - 24 - struct.unpack("<Q", data[-24:-16])[0]
    rng = random.Random(0)
    borders = [0, 4, 8, 12, rows, rows + 4, rows + 8, rows + 12, (rows + record) // 2, record, len(data) - 24, len(data) - 16, len(data) - 8]
    places = [*borders, len(data) - 1, *rng.sample(range(len(data)), 8)]
    damaged = [data[:at] for at in [*places, 1, 100, rows + 1, record - 1]]
    damaged += [data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] for at in places]
    damaged += overwritten(data, [0, 4, 8, *range(rows, rows + 16, 4), len(data) - 24])
    damaged += [data + b"x", data + data]
    for bad in damaged:
        (folder / "bad.bin").write_bytes(bad)
        assert "Unable to restore slot" in restore(server, "bad.bin"), len(bad)
    assert cached(server, prompt, "off") == before
    server.post("/slots/0?action=erase", {})
    assert restore(server, slot_file.name) == ""
    assert cached(server, prompt, "off") == before


def overwritten(data: bytes, places: list[int]) -> Iterator[bytes]:
    """The file with absurd numbers at each place."""
    for at in places:
        for value in (0, 2**31 - 1, 2**32 - 1):
            if (bad := data[:at] + struct.pack("<I", value) + data[at + 4 :]) != data:
                yield bad


@pytest.mark.parametrize("kind, names", [
    ("without maps", ["found none", "cut", "without maps"]),
    ("other model", ["another model", "attn_norm.weight: expected"]),
    ("other cache", ["another cache", "k=f16", "k=q8_0"]),
    ("longer", ["at most 2048 rows", "found 21"]),
])  # fmt: skip
@pytest.mark.field_report(4, "server-ridge.cpp", "file->check_made_as(here);")
@pytest.mark.field_report(5, "server-context.cpp", 'if (!ridge_rows.error.empty()) { send_error(task, "Unable to restore slot: " + ridge_rows.error, ERROR_TYPE_INVALID_REQUEST); break; }')
def test_field_report_4_a_slot_file_of_another_server_is_refused(model, maps, server, prompt, folder, pico_model, tmp_path, kind, names):
    arguments, settings = [model], {"maps": maps, "ctx": 2048}
    if kind == "without maps":
        settings["maps"] = None
    if kind == "other model":
        arguments = [pico_model("llama", ftype="f16", seed=1)]
        settings["maps"] = random_maps(arguments[0], tmp_path)
    if kind == "other cache":
        arguments += ["-ctk", "q8_0"]
    if kind == "longer":
        settings["ctx"] = 4096
    with Server(*arguments, "--slot-save-path", f"{folder}/", **settings) as s:
        s.completion(prompt_tokens(s, 2100 if kind == "longer" else 300), "off", n_predict=1)
        s.post("/slots/0?action=save", {"filename": "foreign.bin"})
        if kind == "without maps":
            assert restore(s, "foreign.bin") == ""
    server.completion(prompt, "fill", cache_prompt=False)
    before = cached(server, prompt, "fill")
    message = restore(server, "foreign.bin")
    assert all(name in message for name in names), message
    assert cached(server, prompt, "fill") == before


@pytest.mark.field_report(5, "server-ridge.cpp", "const int32_t n_max = std::min(n_ctx, llama_ridge_n_free(ctx, id_slot, true));", "const int32_t n_max = n_ctx;")
def test_field_report_5_a_restore_that_finds_no_room_leaves_the_slot_as_it_was(model, maps, prompt, tmp_path):
    """One cache for two slots; its own cells count as free, those of the other slot do not."""
    flags = ["--kv-unified", "--no-cache-idle-slots", "--slot-save-path", f"{tmp_path}/"]
    with Server(model, *flags, "-c", 1024, maps=maps, np=2) as s:
        other = prompt_tokens(s, 800, start=700)
        s.completion(prompt, "off", id_slot=0, n_predict=1)
        s.post("/slots/0?action=save", {"filename": "a.bin"})
        assert restore(s, "a.bin") == ""
        s.completion(prompt[:150], "off", id_slot=0, n_predict=1, cache_prompt=False)
        s.completion(other, "off", id_slot=1, n_predict=1)
        message = restore(s, "a.bin")
        assert "expected at most 224 rows" in message and f"found {N}" in message
        for slot, p in ((0, prompt[:150]), (1, other)):
            assert s.completion(p, "off", id_slot=slot, n_predict=1)["timings"]["cache_n"] == len(p) - 1


#
# what a failure leaves
#


@pytest.mark.field_report(5, "server-context.cpp", "const auto ridge_rows = ridge.check_restore(filepath, slot->id, slot->n_ctx);", "const server_ridge::slot_rows ridge_rows;")
@pytest.mark.parametrize("mode", ["off", "fill"])
@pytest.mark.parametrize("damage", ["cut", "cell"])
def test_field_report_5_a_restore_that_fails_leaves_the_slot_as_it_was(server, slot_file, folder, prompt, mode, damage):
    """A damaged file of another prompt: the slot still holds its own, filled rows and all."""
    data = slot_file.read_bytes()
    other = prompt_tokens(server, N, start=700)
    end = rows_begin(data)
    bad = data[: end + 2] if damage == "cut" else data[:end] + b"\xff" * 8 + data[end + 8 :]
    (folder / "bad.bin").write_bytes(bad)
    server.completion(other, mode, cache_prompt=False)
    before = cached(server, other, mode)
    assert restore(server, "bad.bin") != ""
    assert cached(server, other, mode) == before


@pytest.mark.field_report(6, "server-context.cpp", "const auto ridge_rows = ridge.check_restore(filepath, slot->id, slot->n_ctx);", "const server_ridge::slot_rows ridge_rows;")
def test_field_report_6_a_missing_file_leaves_the_slot_as_it_was(server, prompt):
    for mode in ("off", "fill"):
        server.completion(prompt, mode, cache_prompt=False)
        before = cached(server, prompt, mode)
        assert "could not be opened" in restore(server, "none.bin")
        assert cached(server, prompt, mode) == before


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

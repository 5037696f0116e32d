#pragma once

// What a slot file says of its rows. Upstream's format has no place for it, so that it stands at the end of the file, where
// upstream does not read:
//
//   upstream's bytes | this, as JSON | its length, 8 bytes | XXH64 of all bytes before, 8 bytes | "RIDGSLOT"

#include "server-ridge-cells.h"

#include "json.h"

#include <cstdint>
#include <optional>
#include <string>

struct server_ridge_slot_file {
    common_json        model;        // llama_ridge_model_fingerprint()
    std::string        cache;        // llama_ridge_cache_layout()
    int32_t            n_tokens = 0;
    server_ridge_cells cells;

    // Put it behind what the file holds. Throws std::runtime_error if that fails.
    void append_to(const std::string & path) const;

    // Nothing if the file does not end with one. Throws std::runtime_error for a file that cannot be read or whose bytes are
    // not those that were written.
    static std::optional<server_ridge_slot_file> read(const std::string & path);

    // Throws std::runtime_error, which says what was expected and found, unless rows of this model and cache can be put back
    // where the same are `here`
    void check_made_as(const server_ridge_slot_file & here) const;
};

// XXH64 of what a file holds, in hex. Throws std::runtime_error for a file that cannot be read.
std::string server_ridge_file_hash(const std::string & path);

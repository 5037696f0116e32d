#include "server-ridge-slot-file.h"

#include "common.h"
#include "hash/xxhash/xxhash.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <vector>

static constexpr int64_t FORMAT_VERSION = 1;
static constexpr char    MAGIC[9]       = "RIDGSLOT";

// the end of a file; the bytes of the machine, as in upstream's part
struct slot_file_end {
    uint64_t n_record;
    uint64_t hash;
    char     magic[8];
};
static_assert(sizeof(slot_file_end) == 24); // no padding: it is written as it lies in memory

// of the bytes before n_end, and of more
class slot_file_hash {
  public:
    slot_file_hash(std::istream & file, uint64_t n_end) : state(XXH64_createState(), XXH64_freeState) {
        XXH64_reset(state.get(), 0);
        std::vector<char> block(1 << 20);
        file.seekg(0);
        for (uint64_t i = 0; i < n_end; i += block.size()) {
            const size_t n = std::min<uint64_t>(block.size(), n_end - i);
            if (!file.read(block.data(), n)) {
                throw std::runtime_error("the file could not be read to its end");
            }
            add(block.data(), n);
        }
    }

    void add(const void * data, size_t size) { XXH64_update(state.get(), data, size); }

    uint64_t digest() const { return XXH64_digest(state.get()); }

  private:
    std::unique_ptr<XXH64_state_t, decltype(&XXH64_freeState)> state;
};

static std::ifstream open_file(const std::string & path, uint64_t & size) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    const std::streamoff end = file.tellg();
    if (!file || end < 0) {
        throw std::runtime_error("the file could not be opened");
    }
    size = end;
    return file;
}

std::string server_ridge_file_hash(const std::string & path) {
    uint64_t size = 0;
    auto file = open_file(path, size);
    return string_format("%016llx", (unsigned long long) slot_file_hash(file, size).digest());
}

void server_ridge_slot_file::append_to(const std::string & path) const {
    const common_json record = {
        { "format",   FORMAT_VERSION  },
        { "model",    model           },
        { "cache",    cache           },
        { "n_tokens", n_tokens        },
        { "cells",    cells.to_json() },
    };
    const std::string text = record.dump();

    uint64_t size = 0;
    auto in = open_file(path, size);

    slot_file_end end = { text.size(), 0, {} };
    slot_file_hash hash(in, size);
    hash.add(text.data(), text.size());
    hash.add(&end.n_record, sizeof(end.n_record));
    end.hash = hash.digest();
    std::memcpy(end.magic, MAGIC, sizeof(end.magic));

    std::ofstream out(path, std::ios::binary | std::ios::app);
    out.write(text.data(), text.size());
    out.write(reinterpret_cast<const char *>(&end), sizeof(end));
    out.close();
    if (!out) {
        throw std::runtime_error("the file could not be written to its end");
    }
}

std::optional<server_ridge_slot_file> server_ridge_slot_file::read(const std::string & path) {
    uint64_t size = 0;
    auto file = open_file(path, size);

    slot_file_end end = {};
    if (size < sizeof(end) || !file.seekg(size - sizeof(end)) || !file.read(reinterpret_cast<char *>(&end), sizeof(end)) ||
        std::memcmp(end.magic, MAGIC, sizeof(end.magic)) != 0) {
        return std::nullopt;
    }
    const slot_file_hash hash(file, size - sizeof(end) + sizeof(end.n_record));
    if (hash.digest() != end.hash || end.n_record > size - sizeof(end)) {
        throw std::runtime_error("the file is damaged: its bytes are not those that were saved");
    }
    std::string text(end.n_record, '\0');
    file.seekg(size - sizeof(end) - end.n_record);
    file.read(&text[0], text.size());

    const common_json record = common_json::parse(text);
    const int64_t     format = record.at("format").get<int64_t>();
    if (format != FORMAT_VERSION) {
        throw std::runtime_error("its record of rows has the format " + std::to_string(format) + ", expected " + std::to_string(FORMAT_VERSION));
    }
    server_ridge_slot_file res;
    res.model    = record.at("model");
    res.cache    = record.at("cache").get<std::string>();
    res.n_tokens = record.at("n_tokens").get<int32_t>();
    res.cells    = server_ridge_cells::from_json(record.at("cells"));
    return res;
}

// the first value that differs, "" if none does
static std::string difference(const std::string & key, const common_json & expected, const common_json & found) {
    std::string res;
    if (expected.is_object() && found.is_object()) {
        for (const auto & [inner, value] : expected.items()) {
            res = !res.empty() ? res : difference(inner, value, found.contains(inner) ? found.at(inner) : common_json());
        }
    } else if (expected.dump() != found.dump()) {
        res = key + ": expected " + expected.dump() + ", found " + found.dump();
    }
    return res;
}

void server_ridge_slot_file::check_made_as(const server_ridge_slot_file & here) const {
    const std::string other = difference("model", here.model, model);
    if (!other.empty()) {
        throw std::runtime_error("its rows are another model's: " + other);
    }
    if (cache != here.cache) {
        throw std::runtime_error("its rows are another cache's: expected " + here.cache + ", found " + cache);
    }
}

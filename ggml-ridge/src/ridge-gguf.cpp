#include "ridge-gguf.h"

#include "ggml.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdarg>
#include <cstring>
#include <filesystem>

namespace fs = std::filesystem;

// smallest sizes on disk: an empty key with a one-byte value, an empty name with no dimensions
static constexpr uint64_t RIDGE_MIN_KV     = 8 + 4 + 1;
static constexpr uint64_t RIDGE_MIN_TENSOR = 8 + 4 + 4 + 8;

//
// text
//

std::string ridge_format(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    va_list args_again;
    va_copy(args_again, args);
    const int size = vsnprintf(nullptr, 0, fmt, args);
    va_end(args);
    std::string text(size > 0 ? size : 0, '\0');
    vsnprintf(&text[0], text.size() + 1, fmt, args_again);
    va_end(args_again);
    return text;
}

std::string ridge_quote(const std::string & text) {
    std::string out = "'";
    for (size_t i = 0; i < text.size(); ++i) {
        if (i == 64) {
            return out + "...'";
        }
        const unsigned char c = text[i];
        out += c >= 0x20 && c < 0x7f ? std::string(1, c) : ridge_format("\\x%02x", c);
    }
    return out + "'";
}

// well-formed UTF-8 (no overlong forms, no surrogates) without NUL
static bool is_clean_utf8(const std::string & text) {
    for (size_t i = 0; i < text.size();) {
        const unsigned char c = text[i];
        const int      n_more = c < 0x80 ? 0 : c >= 0xc2 && c < 0xe0 ? 1 : (c & 0xf0) == 0xe0 ? 2 : c >= 0xf0 && c < 0xf5 ? 3 : -1;
        if (c == 0 || n_more < 0 || i + n_more >= text.size()) {
            return false;
        }
        uint32_t code = n_more == 0 ? c : c & (0x3f >> n_more);
        for (int k = 1; k <= n_more; ++k) {
            const unsigned char d = text[i + k];
            if ((d & 0xc0) != 0x80) {
                return false;
            }
            code = code << 6 | (d & 0x3f);
        }
        if ((n_more == 2 && (code < 0x800 || (code >= 0xd800 && code < 0xe000))) ||
            (n_more == 3 && (code < 0x10000 || code > 0x10ffff))) {
            return false;
        }
        i += 1 + n_more;
    }
    return true;
}

// bytes of a scalar on disk, 0 for text
static uint64_t type_size(gguf_type type) {
    switch (type) {
        case GGUF_TYPE_UINT8:
        case GGUF_TYPE_INT8:
        case GGUF_TYPE_BOOL:
            return 1;
        case GGUF_TYPE_UINT16:
        case GGUF_TYPE_INT16:
            return 2;
        case GGUF_TYPE_UINT32:
        case GGUF_TYPE_INT32:
        case GGUF_TYPE_FLOAT32:
            return 4;
        case GGUF_TYPE_UINT64:
        case GGUF_TYPE_INT64:
        case GGUF_TYPE_FLOAT64:
            return 8;
        default:
            return 0;
    }
}

static std::string type_text(gguf_type type, bool is_array) {
    return std::string(is_array ? "array of " : "") + gguf_type_name(type);
}

//
// ridge_file
//

ridge_file::ridge_file(const std::string & path) {
    const fs::path  p = fs::u8path(path);
    std::error_code ec;
    const fs::file_status status = fs::status(p, ec);
    if (!fs::exists(status)) {
        throw ridge_error("there is no such file");
    }
    if (!fs::is_regular_file(status)) {
        throw ridge_error(fs::is_directory(status) ? "it is a directory, expected a file" : "it is not a regular file");
    }
    file_size = fs::file_size(p, ec);
    if (ec) {
        throw ridge_error("its size cannot be read: " + ec.message());
    }
    stream.open(p, std::ios::binary);
    if (!stream) {
        throw ridge_error(std::string("it cannot be opened: ") + strerror(errno));
    }
}

void ridge_file::read_to(uint64_t end) {
    if (end <= n_read) {
        return;
    }
    if (end > capacity) {
        // whole files at once, headers in growing chunks
        const uint64_t want = std::min(std::max({ end, 2*capacity, uint64_t(1) << 20 }), file_size);
        std::unique_ptr<uint8_t[], aligned_delete> grown;
        try {
            grown.reset(static_cast<uint8_t *>(::operator new[](want, alignment)));
        } catch (const std::bad_alloc &) {
            throw ridge_error(ridge_format("no memory for %" PRIu64 " bytes of it", want));
        }
        if (n_read > 0) {
            memcpy(grown.get(), bytes.get(), n_read);
        }
        bytes    = std::move(grown);
        capacity = want;
    }
    stream.read(reinterpret_cast<char *>(bytes.get() + n_read), capacity - n_read);
    n_read += stream.gcount();
    if (n_read < capacity) {
        throw ridge_error(ridge_format("reading stopped at byte %" PRIu64 " of %" PRIu64, n_read, file_size));
    }
}

//
// ridge_gguf: cursor
//

const uint8_t * ridge_gguf::take(uint64_t n) {
    if (n > file.size() - pos) {
        throw ridge_error(ridge_format("%s needs %" PRIu64 " bytes at byte %" PRIu64 ", but the file has %" PRIu64 " bytes: "
            "it is truncated or damaged", where.c_str(), n, pos, file.size()));
    }
    file.read_to(pos + n);
    const uint8_t * p = file.data() + pos;
    pos += n;
    return p;
}

uint32_t ridge_gguf::take_u32() {
    uint32_t v;
    memcpy(&v, take(sizeof(v)), sizeof(v));
    return v;
}

uint64_t ridge_gguf::take_u64() {
    uint64_t v;
    memcpy(&v, take(sizeof(v)), sizeof(v));
    return v;
}

// a number of things of at least min_size bytes each, which must fit into the rest of the file
uint64_t ridge_gguf::take_count(uint64_t min_size, const char * of_what) {
    const uint64_t n = take_u64();
    if (n > (file.size() - pos)/min_size) {
        throw ridge_error(ridge_format("%s announces %" PRIu64 " %s, but only %" PRIu64 " bytes follow it: "
            "the file is truncated or damaged", where.c_str(), n, of_what, file.size() - pos));
    }
    return n;
}

std::string ridge_gguf::take_str() {
    const uint64_t n = take_count(1, "bytes of text");
    return std::string(reinterpret_cast<const char *>(take(n)), n);
}

//
// ridge_gguf: container
//

void ridge_gguf::check_magic() {
    const uint64_t    n = std::min<uint64_t>(file.size(), 512);
    file.read_to(n);
    const std::string head(reinterpret_cast<const char *>(file.data()), n);

    if (head.empty()) {
        throw ridge_error("the file is empty, expected a GGUF");
    }
    if (head.compare(0, 4, std::string("GGUF").substr(0, n)) != 0) {
        const bool is_text = std::all_of(head.begin(), head.end(), [](unsigned char c) {
            return (c >= 0x20 && c != 0x7f) || c == '\n' || c == '\r' || c == '\t';
        });
        throw ridge_error(ridge_format("it is %s, expected a GGUF (its first bytes are %s)",
            is_text ? "a text file" : "not a GGUF", ridge_quote(head.substr(0, 4)).c_str()));
    }
}

void ridge_gguf::read_metadata() {
    check_magic();
    take(4);

    const uint32_t version = take_u32();
    if (version == 0x03000000 || version == 0x02000000) {
        throw ridge_error("it is a big-endian GGUF, expected a little-endian one");
    }
    if (version != 3) {
        throw ridge_error(ridge_format("it is a GGUF of version %" PRIu32 ", expected 3", version));
    }
    n_tensors = take_count(1, "tensors"); // what each needs at least is known when the keys have been read
    n_kv      = take_count(RIDGE_MIN_KV, "keys");

    for (uint64_t i = 0; i < n_kv; ++i) {
        where = ridge_format("key %" PRIu64 " of %" PRIu64, i + 1, n_kv);
        read_kv();
    }
}

void ridge_gguf::read_kv() {
    const std::string key = take_str();
    if (key.empty()) {
        throw ridge_error(where + " has an empty name: the file is damaged");
    }
    where = "key " + ridge_quote(key);

    ridge_kv item;
    uint32_t type = take_u32();
    item.is_array = type == GGUF_TYPE_ARRAY;
    if (item.is_array) {
        type = take_u32();
    }
    if (type >= GGUF_TYPE_COUNT || type == GGUF_TYPE_ARRAY) {
        throw ridge_error(ridge_format("%s has the unknown %stype %" PRIu32 ": the file is damaged",
            where.c_str(), item.is_array ? "element " : "", type));
    }
    item.type = gguf_type(type);

    const uint64_t size = type_size(item.type);
    item.n      = item.is_array ? take_count(size ? size : sizeof(uint64_t), "elements") : 1;
    item.offset = pos;
    if (size) {
        take(item.n*size);
    } else {
        for (uint64_t i = 0; i < item.n; ++i) {
            take(take_count(1, "bytes of text"));
        }
    }
    if (!kv.emplace(key, item).second) {
        throw ridge_error(where + " stands twice in the file");
    }
}

void ridge_gguf::read_tensors() {
    if (n_tensors > (file.size() - pos)/RIDGE_MIN_TENSOR) {
        throw ridge_error(ridge_format("the header announces %" PRIu64 " tensors, but only %" PRIu64 " bytes follow its keys: "
            "the file is truncated or damaged", n_tensors, file.size() - pos));
    }
    std::map<std::string, uint64_t> seen;
    for (uint64_t i = 0; i < n_tensors; ++i) {
        where = ridge_format("the entry of tensor %" PRIu64 " of %" PRIu64, i + 1, n_tensors);
        ridge_tensor_info info;
        info.name = take_str();
        where     = "the entry of tensor " + ridge_quote(info.name);
        if (!seen.emplace(info.name, i).second) {
            throw ridge_error("tensor " + ridge_quote(info.name) + " stands twice in the file");
        }
        const uint32_t n_dims = take_u32();
        if (n_dims > GGML_MAX_DIMS) {
            throw ridge_error(ridge_format("tensor %s has %" PRIu32 " dimensions, expected at most %d: the file is damaged",
                ridge_quote(info.name).c_str(), n_dims, GGML_MAX_DIMS));
        }
        for (uint32_t d = 0; d < n_dims; ++d) {
            info.shape.push_back(take_u64());
        }
        info.type   = int32_t(take_u32());
        info.offset = take_u64();
        tensors.push_back(std::move(info));
    }
    header_end = pos;
}

//
// ridge_gguf: values
//

const ridge_kv & ridge_gguf::find(const std::string & key, gguf_type type, bool is_array) const {
    const auto it = kv.find(key);
    if (it == kv.end()) {
        throw ridge_error("key " + ridge_quote(key) + " is missing");
    }
    if (it->second.type != type || it->second.is_array != is_array) {
        throw ridge_error(ridge_format("key %s has the type %s, expected %s", ridge_quote(key).c_str(),
            type_text(it->second.type, it->second.is_array).c_str(), type_text(type, is_array).c_str()));
    }
    return it->second;
}

std::string ridge_gguf::get_str(const std::string & key) const {
    return strings_of(key, find(key, GGUF_TYPE_STRING, false))[0];
}

std::vector<std::string> ridge_gguf::get_strs(const std::string & key) const {
    return strings_of(key, find(key, GGUF_TYPE_STRING, true));
}

std::vector<std::string> ridge_gguf::strings_of(const std::string & key, const ridge_kv & item) const {
    std::vector<std::string> out;
    const uint8_t * p = file.data() + item.offset;
    for (uint64_t i = 0; i < item.n; ++i) {
        uint64_t size;
        memcpy(&size, p, sizeof(size));
        out.emplace_back(reinterpret_cast<const char *>(p) + sizeof(size), size);
        if (!is_clean_utf8(out.back())) {
            throw ridge_error("key " + ridge_quote(key) + " holds text that is not UTF-8: " + ridge_quote(out.back()));
        }
        p += sizeof(size) + size;
    }
    return out;
}

uint64_t ridge_gguf::str_offset(const std::string & key) const {
    return find(key, GGUF_TYPE_STRING, false).offset + sizeof(uint64_t);
}

uint32_t ridge_gguf::get_u32(const std::string & key) const {
    uint32_t v;
    memcpy(&v, file.data() + find(key, GGUF_TYPE_UINT32, false).offset, sizeof(v));
    return v;
}

uint64_t ridge_gguf::get_u64(const std::string & key) const {
    uint64_t v;
    memcpy(&v, file.data() + find(key, GGUF_TYPE_UINT64, false).offset, sizeof(v));
    return v;
}

float ridge_gguf::get_f32(const std::string & key) const {
    float v;
    memcpy(&v, file.data() + find(key, GGUF_TYPE_FLOAT32, false).offset, sizeof(v));
    return v;
}

bool ridge_gguf::get_bool(const std::string & key) const {
    return file.data()[find(key, GGUF_TYPE_BOOL, false).offset] != 0;
}

template <typename T>
static std::vector<T> numbers_at(const ridge_file & file, const ridge_kv & item) {
    std::vector<T> out(item.n);
    if (item.n > 0) {
        memcpy(out.data(), file.data() + item.offset, item.n*sizeof(T));
    }
    return out;
}

std::vector<float> ridge_gguf::get_f32s(const std::string & key) const {
    return numbers_at<float>(file, find(key, GGUF_TYPE_FLOAT32, true));
}

std::vector<uint32_t> ridge_gguf::get_u32s(const std::string & key) const {
    return numbers_at<uint32_t>(file, find(key, GGUF_TYPE_UINT32, true));
}

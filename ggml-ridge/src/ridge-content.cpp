#include "ridge-content.h"

extern "C" {
#include "sha256/sha256.h"
}

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <set>

//
// hashes
//

void ggml_ridge_sha256(const void * data, size_t size, char hex[65]) {
    unsigned char digest[SHA256_DIGEST_SIZE];
    sha256_hash(digest, static_cast<const unsigned char *>(data), size);
    for (int i = 0; i < SHA256_DIGEST_SIZE; ++i) {
        snprintf(hex + 2*i, 3, "%02x", digest[i]);
    }
}

std::string ridge_sha256_hex(const void * data, size_t size) {
    char hex[65];
    ggml_ridge_sha256(data, size, hex);
    return hex;
}

void ridge_check_is_sha256(const std::string & key, const std::string & hex) {
    if (hex.size() != 64 || hex.find_first_not_of("0123456789abcdef") != std::string::npos) {
        throw ridge_error(ridge_format("key '%s' holds %s, expected a sha256 of 64 lower-case hex digits",
            key.c_str(), ridge_quote(hex).c_str()));
    }
}

//
// keys
//

// what a GGUF of another kind is, in words
static std::string kind_of_file(const ridge_gguf & gguf) {
    const auto str = [&](const char * key) {
        const auto it = gguf.kv.find(key);
        const bool is_str = it != gguf.kv.end() && it->second.type == GGUF_TYPE_STRING && !it->second.is_array;
        return is_str ? gguf.get_str(key) : std::string();
    };
    const std::string type = str("general.type");
    const std::string arch = str("general.architecture");
    if (type == "adapter") {
        const std::string adapter = str("adapter.type");
        return adapter == "lora" ? "a LoRA adapter" : "an adapter with adapter.type = " + ridge_quote(adapter);
    }
    if (arch == "controlvector") {
        return "a control vector";
    }
    if (type == "model" || (type.empty() && !arch.empty())) {
        return "a model of architecture " + ridge_quote(arch);
    }
    return type.empty() ? "a GGUF without general.type" : "a GGUF with general.type = " + ridge_quote(type);
}

void ridge_check_kind_of_file(const ridge_gguf & gguf, const char * adapter) {
    const std::string found = kind_of_file(gguf);
    if (found != ridge_format("an adapter with adapter.type = '%s'", adapter)) {
        throw ridge_error(ridge_format("it is %s, expected an adapter with adapter.type = '%s'", found.c_str(), adapter));
    }
    const uint32_t version = gguf.get_u32("ridge.format_version");
    if (version != GGML_RIDGE_FORMAT_VERSION) {
        throw ridge_error(ridge_format("it has the format version %" PRIu32 ", expected %d (key 'ridge.format_version')",
            version, GGML_RIDGE_FORMAT_VERSION));
    }
    if (gguf.has("general.alignment") && gguf.get_u32("general.alignment") != GGUF_DEFAULT_ALIGNMENT) {
        throw ridge_error(ridge_format("its alignment is %" PRIu32 ", expected %d (key 'general.alignment')",
            gguf.get_u32("general.alignment"), GGUF_DEFAULT_ALIGNMENT));
    }
}

int32_t ridge_read_i32(const ridge_gguf & gguf, const char * key, int64_t lo, int64_t hi) {
    const uint32_t v = gguf.get_u32(key);
    if (int64_t(v) < lo || int64_t(v) > hi) {
        throw ridge_error(ridge_format("key '%s' is %" PRIu32 ", expected %" PRId64 " to %" PRId64, key, v, lo, hi));
    }
    return int32_t(v);
}

static ggml_type map_type_from_name(const std::string & name) {
    for (ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0 }) {
        if (name == ggml_type_name(type)) {
            return type;
        }
    }
    throw ridge_error("the map type is " + ridge_quote(name) +
        ", expected 'f32', 'f16', 'q8_0', 'q4_1' or 'q4_0' (key 'ridge.map_type')");
}

// two arrays of equal length: names, and the sha256 of each
ridge_hashes ridge_read_hashes(const ridge_gguf & gguf, const std::string & key) {
    const std::string key_sha256 = key + "_sha256";
    const std::vector<std::string> names  = gguf.get_strs(key);
    const std::vector<std::string> hashes = gguf.get_strs(key_sha256);
    if (names.size() != hashes.size()) {
        throw ridge_error(ridge_format("key '%s' holds %zu hashes, expected %zu: one per name in '%s'",
            key_sha256.c_str(), hashes.size(), names.size(), key.c_str()));
    }
    ridge_hashes out;
    std::set<std::string> seen;
    for (size_t i = 0; i < names.size(); ++i) {
        ridge_check_is_sha256(key_sha256, hashes[i]);
        if (!seen.insert(names[i]).second) {
            throw ridge_error("key '" + key + "' lists " + ridge_quote(names[i]) + " twice");
        }
        out.emplace_back(names[i], hashes[i]);
    }
    return out;
}

void ridge_read_common(ridge_content & content, const ridge_gguf & gguf) {
    content.map_type = map_type_from_name(gguf.get_str("ridge.map_type"));

    for (const char * key : { "general.name", "ridge.calibration.tool" }) {
        gguf.get_str(key);
    }
    for (const char * key : { "ridge.calibration.n_documents", "ridge.calibration.n_heldout_documents" }) {
        gguf.get_u32(key);
    }
    for (const char * key : { "ridge.calibration.n_tokens", "ridge.calibration.n_heldout_tokens", "ridge.calibration.seed" }) {
        gguf.get_u64(key);
    }
    gguf.get_strs("ridge.calibration.sources");
    for (const char * key : { "ridge.calibration.options", "ridge.calibration.heldout_sha256" }) {
        if (gguf.has(key)) {
            gguf.get_strs(key);
        }
    }

    for (const auto & item : ridge_read_hashes(gguf, "ridge.tensors")) {
        content.sha256.insert(item);
    }
    for (const auto & item : gguf.kv) {
        if (item.second.type == GGUF_TYPE_STRING && !item.second.is_array) {
            content.strings[item.first] = gguf.get_str(item.first);
        }
    }
}

// Optional: sha256 of all bytes before the tensor data, taken with '0' for each digit of this value. It finds damage that
// leaves every key well-formed, such as another number of sink rows.
void ridge_check_metadata_hash(const ridge_content & content, const ridge_gguf & gguf, bool required) {
    static const char * key = "ridge.metadata_sha256";
    if (!required && !gguf.has(key)) {
        return;
    }
    const std::string expected = gguf.get_str(key);
    ridge_check_is_sha256(key, expected);
    const uint8_t * begin = content.file.data();
    std::vector<uint8_t> header(begin, begin + gguf.header_end);
    std::fill_n(header.begin() + gguf.str_offset(key), expected.size(), '0');
    const std::string found = ridge_sha256_hex(header.data(), header.size());
    if (found != expected) {
        throw ridge_error(ridge_format("its metadata is damaged: sha256 %.12s..., expected %.12s... (key '%s')",
            found.c_str(), expected.c_str(), key));
    }
}

//
// the model
//

static std::vector<std::string> split_items(const std::string & list) {
    std::vector<std::string> out;
    for (size_t begin = 0; begin < list.size();) {
        const size_t end = std::min(list.find_first_of(" ;\n", begin), list.size());
        out.push_back(list.substr(begin, end - begin));
        begin = end + 1;
    }
    return out;
}

// names the first item in which two key=value lists differ
static void check_hparams(const std::string & found, const std::string & expected) {
    if (found == expected) {
        return;
    }
    std::vector<std::string> a = split_items(found);
    std::vector<std::string> b = split_items(expected);
    a.resize(std::max(a.size(), b.size()), "nothing more");
    b.resize(a.size(), "nothing more");
    const auto at = std::mismatch(a.begin(), a.end(), b.begin());
    throw ridge_error("the hyper-parameters differ: it was made for " + ridge_quote(at.first == a.end() ? found : *at.first) +
        ", the model has " + ridge_quote(at.first == a.end() ? expected : *at.second));
}

void ridge_check_model(const ridge_model_record & found, const ggml_ridge_expect & expect) {
    if (!expect.architecture || !expect.tokenizer_sha256 || !expect.hparams) {
        throw ridge_error("the model to check it against has no architecture, tokenizer hash or hyper-parameters");
    }
    if (found.architecture != expect.architecture) {
        throw ridge_error(ridge_format("it was made for the architecture %s, the model has '%s'",
            ridge_quote(found.architecture).c_str(), expect.architecture));
    }
    if (found.block_count != expect.block_count) {
        throw ridge_error(ridge_format("it was made for a model of %d layers, the model has %d", found.block_count, expect.block_count));
    }
    if (found.embedding_length && found.embedding_length != expect.embedding_length) {
        throw ridge_error(ridge_format("it was made for the embedding length %d, the model has %d",
            found.embedding_length, expect.embedding_length));
    }
    check_hparams(found.hparams, expect.hparams);
    if (found.tokenizer_sha256 != expect.tokenizer_sha256) {
        throw ridge_error(ridge_format("the tokenizers differ: the sidecar was made with one of sha256 %.12s..., "
            "the model has one of %.12s...", found.tokenizer_sha256.c_str(), expect.tokenizer_sha256));
    }
}

//
// tensors
//

static std::string shape_text(const std::vector<uint64_t> & shape) {
    std::string out = "[";
    for (size_t i = 0; i < shape.size(); ++i) {
        out += ridge_format("%s%" PRIu64, i ? ", " : "", shape[i]);
    }
    return out + "]";
}

static std::string type_text(int32_t type) {
    const bool known = type >= 0 && type < GGML_TYPE_COUNT && ggml_type_size(ggml_type(type)) > 0;
    return known ? ggml_type_name(ggml_type(type)) : ridge_format("unknown (%d)", type);
}

// every tensor is one of ours, of the right type and shape, and listed with a hash; none is missing
static void check_tensor_set(
        const ridge_content & content, const ridge_gguf & gguf, const std::vector<ridge_part> & parts, const std::string & what) {
    std::map<std::string, const ridge_tensor_info *> by_name;
    for (const auto & info : gguf.tensors) {
        by_name[info.name] = &info;
    }
    for (const ridge_part & part : parts) {
        const char * name = part.name.c_str();
        const std::vector<uint64_t> shape(part.shape.begin(), part.shape.end());
        const auto it = by_name.find(part.name);
        if (it == by_name.end()) {
            throw ridge_error(ridge_format("tensor '%s' is missing: expected %s", name, what.c_str()));
        }
        if (it->second->type != part.type) {
            throw ridge_error(ridge_format("tensor '%s' has the type %s, expected %s",
                name, type_text(it->second->type).c_str(), ggml_type_name(part.type)));
        }
        if (it->second->shape != shape) {
            throw ridge_error(ridge_format("tensor '%s' has the shape %s, expected %s",
                name, shape_text(it->second->shape).c_str(), shape_text(shape).c_str()));
        }
        if (!content.sha256.count(part.name)) {
            throw ridge_error(ridge_format("tensor '%s' is not listed in key 'ridge.tensors'", name));
        }
        by_name.erase(it);
    }
    if (!by_name.empty()) {
        throw ridge_error(ridge_format("tensor %s does not belong in a sidecar with %s",
            ridge_quote(by_name.begin()->first).c_str(), what.c_str()));
    }
    for (const auto & item : content.sha256) {
        const auto is_it = [&](const ridge_tensor_info & info) { return info.name == item.first; };
        if (std::none_of(gguf.tensors.begin(), gguf.tensors.end(), is_it)) {
            throw ridge_error("key 'ridge.tensors' lists " + ridge_quote(item.first) + ", which is not in the file");
        }
    }
}

// GGUF stores tensors in the order of their entries, each from the next multiple of the alignment on. Returns the file
// offset of each, having checked that all of them lie in the file and nothing else does.
static std::vector<uint64_t> check_layout(const ridge_content & content, const ridge_gguf & gguf) {
    const uint64_t data_begin = GGML_PAD(gguf.header_end, GGUF_DEFAULT_ALIGNMENT);
    const uint64_t file_size  = content.file.size();

    std::vector<uint64_t> out;
    uint64_t    next = 0;
    std::string last = "header";
    for (const auto & info : gguf.tensors) {
        const char * name = info.name.c_str();
        if (info.offset % GGUF_DEFAULT_ALIGNMENT != 0) {
            throw ridge_error(ridge_format("tensor '%s' is misaligned: its offset is %" PRIu64 ", expected a multiple of %d",
                name, info.offset, GGUF_DEFAULT_ALIGNMENT));
        }
        if (info.offset != next) {
            throw ridge_error(ridge_format("tensor '%s' has the offset %" PRIu64 ", expected %" PRIu64 ": it %s", name,
                info.offset, next, info.offset < next ? "overlaps others" : "leaves a gap or lies outside the file"));
        }
        const ggml_type type  = ggml_type(info.type);
        const uint64_t  bytes = ggml_row_size(type, info.shape[0])*(info.shape.size() > 1 ? info.shape[1] : 1);
        const uint64_t  begin = data_begin + info.offset;
        if (begin > file_size || bytes > file_size - begin) {
            throw ridge_error(ridge_format("tensor '%s' ends at byte %" PRIu64 ", but the file has %" PRIu64 " bytes: "
                "it is truncated", name, begin + bytes, file_size));
        }
        out.push_back(begin);
        next = info.offset + GGML_PAD(bytes, GGUF_DEFAULT_ALIGNMENT);
        last = "tensor '" + info.name + "'";
    }
    if (data_begin + next != file_size) {
        throw ridge_error(ridge_format("the file has %" PRIu64 " bytes, expected %" PRIu64 " with the padding of %s: it %s",
            file_size, data_begin + next, last.c_str(), file_size < data_begin + next ? "is truncated" : "goes on after its end"));
    }
    return out;
}

static void check_padding(const ridge_content & content, uint64_t begin, uint64_t end, const std::string & after) {
    for (uint64_t i = begin; i < end; ++i) {
        if (content.file.data()[i] != 0) {
            throw ridge_error(ridge_format("byte %" PRIu64 " in the padding after %s is %d, expected 0: the file is damaged",
                i, after.c_str(), content.file.data()[i]));
        }
    }
}

static bool is_finite_f16(const uint8_t * p) {
    return (p[1] & 0x7c) != 0x7c;
}

// can the numbers at p, which are all that decides whether a value or block is finite, be used?
static bool is_finite(ggml_type type, const uint8_t * p) {
    switch (type) {
        case GGML_TYPE_F32: {
            float x;
            memcpy(&x, p, sizeof(x));
            return std::isfinite(x);
        }
        case GGML_TYPE_Q4_1: // scale, then least value
            return is_finite_f16(p) && is_finite_f16(p + 2);
        default: // the value itself, or the scale at the start of a block
            return is_finite_f16(p);
    }
}

// Not ggml_validate_row_data(): it prints lines of its own and cannot say which value.
static void check_finite(const ggml_tensor * t) {
    const uint8_t * p = static_cast<const uint8_t *>(t->data);
    const size_t    n = ggml_nbytes(t)/ggml_type_size(t->type);
    for (size_t i = 0; i < n; ++i, p += ggml_type_size(t->type)) {
        if (!is_finite(t->type, p)) {
            const int64_t at = int64_t(i)*ggml_blck_size(t->type);
            throw ridge_error(ridge_format("tensor '%s' holds a %s that is not finite at row %" PRId64 ", column %" PRId64,
                t->name, ggml_is_quantized(t->type) ? "block" : "value", at/t->ne[0], at%t->ne[0]));
        }
    }
}

void ridge_read_tensors(ridge_content & content, const ridge_gguf & gguf, const std::vector<ridge_part> & parts, const std::string & what) {
    check_tensor_set(content, gguf, parts, what);
    const std::vector<uint64_t> offsets = check_layout(content, gguf);

    content.file.read_to(content.file.size());
    check_padding(content, gguf.header_end, GGML_PAD(gguf.header_end, GGUF_DEFAULT_ALIGNMENT), "the header");

    content.ctx.reset(ggml_init({ ggml_tensor_overhead()*gguf.tensors.size(), nullptr, /*.no_alloc =*/ true }));
    if (!content.ctx) {
        throw ridge_error("no memory for its tensors");
    }
    for (size_t i = 0; i < offsets.size(); ++i) {
        const ridge_tensor_info & info = gguf.tensors[i];
        const std::vector<int64_t> shape(info.shape.begin(), info.shape.end());
        ggml_tensor * t = ggml_new_tensor(content.ctx.get(), ggml_type(info.type), int(shape.size()), shape.data());
        ggml_set_name(t, info.name.c_str());
        t->data = const_cast<uint8_t *>(content.file.data()) + offsets[i];
        content.tensors[info.name] = t;

        const std::string found    = ridge_sha256_hex(t->data, ggml_nbytes(t));
        const std::string expected = content.sha256.at(info.name);
        if (found != expected) {
            throw ridge_error(ridge_format("tensor '%s' is damaged: its sha256 is %.12s..., expected %.12s...",
                t->name, found.c_str(), expected.c_str()));
        }
        check_finite(t);
        const uint64_t end = offsets[i] + ggml_nbytes(t);
        check_padding(content, end, GGML_PAD(end, GGUF_DEFAULT_ALIGNMENT), "tensor '" + info.name + "'");
    }
    content.hash = ridge_sha256_hex(content.file.data(), content.file.size());
}

void ridge_report(char * err, size_t err_size, const std::string & text) {
    if (err && err_size > 0) {
        snprintf(err, err_size, "%s", text.c_str());
        std::replace_if(err, err + strlen(err), [](unsigned char c) { return c < 0x20; }, '?');
    }
}

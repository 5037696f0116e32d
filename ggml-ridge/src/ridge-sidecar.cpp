#include "ggml-ridge.h"
#include "ridge-gguf.h"

#include "ggml-cpp.h"

extern "C" {
#include "sha256/sha256.h"
}

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <memory>
#include <set>

// one tensor of a map
struct ridge_part {
    const char *         name;
    ggml_type            type;
    std::vector<int64_t> shape;
};

struct ggml_ridge_sidecar {
    explicit ggml_ridge_sidecar(const std::string & path) : file(path) {}

    ridge_file       file; // holds the data of the tensors
    ggml_context_ptr ctx;

    std::string hash;
    std::string kind;
    std::string arch;
    ggml_type   map_type;

    int32_t split     = 0;
    int32_t n_layer   = 0;
    int32_t n_embd    = 0;
    int32_t n_tail    = 0;
    int32_t n_sink    = 0;
    int32_t rank      = 0; // of kind input_lr
    int32_t file_type = -1;

    // widths of the rows of K and V that the maps of layers split + 1 to n_layer - 1 write; empty where they predict inputs
    std::vector<uint32_t> k_length;
    std::vector<uint32_t> v_length;

    std::map<std::string, std::string>               strings; // all string keys
    std::vector<std::pair<std::string, std::string>> anchors; // name, sha256
    std::map<std::string, std::string>               sha256;  // of each tensor

    std::map<std::string, std::vector<ggml_tensor *>> tensors; // by part, of layers split + 1 to n_layer - 1

    bool predicts_kv() const {
        return kind == "kv" || kind == "kv_prev";
    }

    // what the map of layer il consists of
    std::vector<ridge_part> parts(int32_t il) const {
        const size_t  i     = il - split - 1;
        const int64_t n_in  = kind == "kv_prev" ? 2*int64_t(n_embd) : n_embd;
        const int64_t n_out = predicts_kv() ? int64_t(k_length[i]) + v_length[i] : n_embd;
        const ridge_part bias = { "bias", GGML_TYPE_F32, { n_out } };
        if (kind == "input_lr") {
            return { { "down", map_type, { n_in, rank } }, { "up", map_type, { rank, n_out } }, bias };
        }
        return { { "weight", map_type, { n_in, n_out } }, bias };
    }

    int32_t length(const std::vector<uint32_t> & lengths, int32_t il) const {
        return !lengths.empty() && il > split && il < n_layer ? lengths[il - split - 1] : 0;
    }

    const ggml_tensor * tensor(const char * part, int32_t il) const {
        const auto it = tensors.find(part);
        return it != tensors.end() && il > split && il < n_layer ? it->second[il - split - 1] : nullptr;
    }
};

// the same, while the file is being checked
struct sidecar_reader {
    explicit sidecar_reader(const std::string & path)
        : sc(new ggml_ridge_sidecar(path)), gguf(sc->file) {}

    std::unique_ptr<ggml_ridge_sidecar> sc;
    ridge_gguf                          gguf;
};

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

static std::string sha256_hex(const void * data, size_t size) {
    char hex[65];
    ggml_ridge_sha256(data, size, hex);
    return hex;
}

static void check_is_sha256(const std::string & key, const std::string & hex) {
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

static void check_kind_of_file(const ridge_gguf & gguf) {
    const std::string found = kind_of_file(gguf);
    if (found != "an adapter with adapter.type = 'ridge_maps'") {
        throw ridge_error("it is " + found + ", expected an adapter with adapter.type = 'ridge_maps'");
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

static int32_t read_i32(const ridge_gguf & gguf, const char * key, int64_t lo, int64_t hi) {
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

// rows of matrices are whole blocks
static void check_blocks(const ggml_ridge_sidecar & sc, const char * what, int32_t n) {
    const int64_t n_block = ggml_blck_size(sc.map_type);
    if (n % n_block != 0) {
        throw ridge_error(ridge_format("the %s %d is no multiple of %" PRId64 ", the block of map type '%s'",
            what, n, n_block, ggml_type_name(sc.map_type)));
    }
}

static void check_count(const ggml_ridge_sidecar & sc, const char * key, size_t found) {
    const int32_t n_maps = sc.n_layer - 1 - sc.split;
    if (found != size_t(n_maps)) {
        throw ridge_error(ridge_format("key '%s' holds %zu numbers, expected %d: one per layer %d to %d",
            key, found, n_maps, sc.split + 1, sc.n_layer - 1));
    }
}

static std::vector<uint32_t> read_lengths(const ggml_ridge_sidecar & sc, const ridge_gguf & gguf, const char * key) {
    std::vector<uint32_t> res = gguf.get_u32s(key);
    check_count(sc, key, res.size());
    for (size_t i = 0; i < res.size(); ++i) {
        if (res[i] < 1 || res[i] > INT32_MAX) {
            throw ridge_error(ridge_format("key '%s' is %" PRIu32 " for layer %zu, expected 1 to %d",
                key, res[i], sc.split + 1 + i, INT32_MAX));
        }
    }
    return res;
}

// one finite number per mapped layer, at least lo and at most hi
static void check_per_layer(const ggml_ridge_sidecar & sc, const ridge_gguf & gguf, const char * key, float lo, float hi) {
    const std::vector<float> v = gguf.get_f32s(key);
    check_count(sc, key, v.size());
    for (size_t i = 0; i < v.size(); ++i) {
        if (!std::isfinite(v[i]) || v[i] < lo || v[i] > hi) {
            throw ridge_error(ridge_format("key '%s' is %g for layer %zu, expected a finite number from %g to %g",
                key, v[i], sc.split + 1 + i, lo, hi));
        }
    }
}

// Optional: what was measured of the file after it was written. Scores of its maps on held-out text.
static void check_scores(const ggml_ridge_sidecar & sc, const ridge_gguf & gguf) {
    static const struct { const char * key; float lo; float hi; } scores[] = {
        { "ridge.score.r2_input",  -HUGE_VALF, 1.0f      },
        { "ridge.score.r2_k",      -HUGE_VALF, 1.0f      },
        { "ridge.score.r2_v",      -HUGE_VALF, 1.0f      },
        { "ridge.score.norm_k",          0.0f, HUGE_VALF },
        { "ridge.score.norm_v",          0.0f, HUGE_VALF },
        { "ridge.score.attention",      -1.0f, 1.0f      },
    };
    bool any = false;
    for (const auto & score : scores) {
        if (gguf.has(score.key)) {
            check_per_layer(sc, gguf, score.key, score.lo, score.hi);
            any = true;
        }
    }
    if (any) {
        gguf.get_u64("ridge.score.n_tokens");
        gguf.get_u32("ridge.score.n_documents");
        gguf.get_strs("ridge.score.sources");
    }
}

// Optional: a prompt, and the likeliest tokens behind its last rows once it was filled.
static void check_selftest(const ridge_gguf & gguf) {
    static const size_t n_top = 5; // of each row
    const char * keys[] = { "ridge.selftest.tokens", "ridge.selftest.tail", "ridge.selftest.file_type", "ridge.selftest.top_tokens", "ridge.selftest.top_logits" };
    if (std::none_of(std::begin(keys), std::end(keys), [&](const char * key) { return gguf.has(key); })) {
        return;
    }
    const size_t n_tokens = gguf.get_u32s("ridge.selftest.tokens").size();
    const size_t n_tail   = read_i32(gguf, "ridge.selftest.tail", 1, INT32_MAX);
    const size_t n        = gguf.get_u32s("ridge.selftest.top_tokens").size();
    gguf.get_u32("ridge.selftest.file_type");
    const std::vector<float> logits = gguf.get_f32s("ridge.selftest.top_logits");
    if (n_tail >= n_tokens) {
        throw ridge_error(ridge_format("key 'ridge.selftest.tail' is %zu, expected less than the %zu tokens", n_tail, n_tokens));
    }
    if (n == 0 || n % n_top != 0 || n/n_top > n_tail) {
        throw ridge_error(ridge_format("key 'ridge.selftest.top_tokens' holds %zu tokens, expected %zu for each of some of the last %zu rows",
            n, n_top, n_tail));
    }
    if (logits.size() != n) {
        throw ridge_error(ridge_format("key 'ridge.selftest.top_logits' holds %zu numbers, expected %zu: one per token in "
            "'ridge.selftest.top_tokens'", logits.size(), n));
    }
    if (!std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); })) {
        throw ridge_error("key 'ridge.selftest.top_logits' holds a number that is not finite");
    }
}

// two arrays of equal length: names, and the sha256 of each
static std::vector<std::pair<std::string, std::string>> read_hashes(const ridge_gguf & gguf, const std::string & key) {
    const std::string key_sha256 = key + "_sha256";
    const std::vector<std::string> names  = gguf.get_strs(key);
    const std::vector<std::string> hashes = gguf.get_strs(key_sha256);
    if (names.size() != hashes.size()) {
        throw ridge_error(ridge_format("key '%s' holds %zu hashes, expected %zu: one per name in '%s'",
            key_sha256.c_str(), hashes.size(), names.size(), key.c_str()));
    }
    std::vector<std::pair<std::string, std::string>> out;
    std::set<std::string> seen;
    for (size_t i = 0; i < names.size(); ++i) {
        check_is_sha256(key_sha256, hashes[i]);
        if (!seen.insert(names[i]).second) {
            throw ridge_error("key '" + key + "' lists " + ridge_quote(names[i]) + " twice");
        }
        out.emplace_back(names[i], hashes[i]);
    }
    return out;
}

// Optional: how much of the row before there is in the K of maps of kind kv_prev.
static void check_prev_share(const ggml_ridge_sidecar & sc, const ridge_gguf & gguf) {
    static const char * key = "ridge.prev_share";
    if (!gguf.has(key)) {
        return;
    }
    const float share = gguf.get_f32(key);
    if (sc.kind != "kv_prev" || !(share >= 0.0f && share <= 1.0f)) {
        throw ridge_error(ridge_format("key '%s' is %g for maps of kind %s, expected 0 to 1, for kind kv_prev", key, share, sc.kind.c_str()));
    }
}

static void read_keys(ggml_ridge_sidecar & sc, const ridge_gguf & gguf) {
    sc.kind = gguf.get_str("ridge.kind");
    if (sc.kind != "input" && sc.kind != "input_lr" && !sc.predicts_kv()) {
        throw ridge_error("the kind of its maps is " + ridge_quote(sc.kind) +
            ", expected 'input', 'input_lr', 'kv' or 'kv_prev' (key 'ridge.kind')");
    }
    sc.map_type  = map_type_from_name(gguf.get_str("ridge.map_type"));
    sc.arch      = gguf.get_str("general.architecture");
    sc.n_layer   = read_i32(gguf, "ridge.block_count", 3, INT32_MAX);
    sc.split     = read_i32(gguf, "ridge.split", 1, sc.n_layer - 2);
    sc.n_embd    = read_i32(gguf, "ridge.embedding_length", 1, INT32_MAX);
    sc.n_sink    = read_i32(gguf, "ridge.sink_rows", 0, INT32_MAX);
    sc.n_tail    = read_i32(gguf, "ridge.tail", 1, INT32_MAX);
    sc.file_type = int32_t(gguf.get_u32("ridge.model.file_type")); // all bits set: unknown

    check_blocks(sc, "embedding length", sc.n_embd);
    if (sc.kind == "input_lr") {
        sc.rank = read_i32(gguf, "ridge.rank", 1, sc.n_embd);
        check_blocks(sc, "rank", sc.rank);
    }

    if (sc.predicts_kv()) {
        sc.k_length = read_lengths(sc, gguf, "ridge.k_length");
        sc.v_length = read_lengths(sc, gguf, "ridge.v_length");
    }
    for (const char * part : { "", "_k", "_v" }) {
        if ((*part != '\0') == sc.predicts_kv()) {
            check_per_layer(sc, gguf, (std::string("ridge.lambda") + part).c_str(), 0.0f, HUGE_VALF);
            check_per_layer(sc, gguf, (std::string("ridge.r2")     + part).c_str(), -HUGE_VALF, 1.0f);
        }
    }

    check_scores(sc, gguf);
    check_selftest(gguf);

    check_is_sha256("ridge.model.tokenizer_sha256", gguf.get_str("ridge.model.tokenizer_sha256"));

    for (const char * key : { "general.name", "ridge.model.hparams", "ridge.model.name", "ridge.calibration.tool" }) {
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
    check_prev_share(sc, gguf);

    sc.anchors = read_hashes(gguf, "ridge.model.anchors");
    for (const auto & item : read_hashes(gguf, "ridge.tensors")) {
        sc.sha256.insert(item);
    }
    for (const auto & item : gguf.kv) {
        if (item.second.type == GGUF_TYPE_STRING && !item.second.is_array) {
            sc.strings[item.first] = gguf.get_str(item.first);
        }
    }
}

// Optional: sha256 of all bytes before the tensor data, taken with '0' for each digit of this value. It finds damage that
// leaves every key well-formed, such as another number of sink rows.
static void check_metadata_hash(sidecar_reader & r) {
    static const char * key = "ridge.metadata_sha256";
    if (!r.gguf.has(key)) {
        return;
    }
    const std::string expected = r.gguf.get_str(key);
    check_is_sha256(key, expected);
    const uint8_t * begin = r.sc->file.data();
    std::vector<uint8_t> header(begin, begin + r.gguf.header_end);
    std::fill_n(header.begin() + r.gguf.str_offset(key), expected.size(), '0');
    const std::string found = sha256_hex(header.data(), header.size());
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

static void check_model(const ggml_ridge_sidecar & sc, const ggml_ridge_expect & expect) {
    if (!expect.architecture || !expect.tokenizer_sha256 || !expect.hparams) {
        throw ridge_error("the model to check it against has no architecture, tokenizer hash or hyper-parameters");
    }
    if (sc.arch != expect.architecture) {
        throw ridge_error(ridge_format("it was made for the architecture %s, the model has '%s'",
            ridge_quote(sc.arch).c_str(), expect.architecture));
    }
    if (sc.n_layer != expect.block_count) {
        throw ridge_error(ridge_format("it was made for a model of %d layers, the model has %d", sc.n_layer, expect.block_count));
    }
    if (sc.n_embd != expect.embedding_length) {
        throw ridge_error(ridge_format("it was made for the embedding length %d, the model has %d",
            sc.n_embd, expect.embedding_length));
    }
    check_hparams(sc.strings.at("ridge.model.hparams"), expect.hparams);
    const std::string & tokenizer = sc.strings.at("ridge.model.tokenizer_sha256");
    if (tokenizer != expect.tokenizer_sha256) {
        throw ridge_error(ridge_format("the tokenizers differ: the sidecar was made with one of sha256 %.12s..., "
            "the model has one of %.12s...", tokenizer.c_str(), expect.tokenizer_sha256));
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
static void check_tensor_set(const ggml_ridge_sidecar & sc, const ridge_gguf & gguf) {
    std::map<std::string, const ridge_tensor_info *> by_name;
    for (const auto & info : gguf.tensors) {
        by_name[info.name] = &info;
    }
    const auto check = [&](int32_t il, const ridge_part & part) {
        const std::string name = ridge_format("blk.%d.ridge.%s", il, part.name);
        const std::vector<uint64_t> shape(part.shape.begin(), part.shape.end());
        const auto it = by_name.find(name);
        if (it == by_name.end()) {
            throw ridge_error(ridge_format("tensor '%s' is missing: expected maps for layers %d to %d",
                name.c_str(), sc.split + 1, sc.n_layer - 1));
        }
        if (it->second->type != part.type) {
            throw ridge_error(ridge_format("tensor '%s' has the type %s, expected %s",
                name.c_str(), type_text(it->second->type).c_str(), ggml_type_name(part.type)));
        }
        if (it->second->shape != shape) {
            throw ridge_error(ridge_format("tensor '%s' has the shape %s, expected %s",
                name.c_str(), shape_text(it->second->shape).c_str(), shape_text(shape).c_str()));
        }
        if (!sc.sha256.count(name)) {
            throw ridge_error(ridge_format("tensor '%s' is not listed in key 'ridge.tensors'", name.c_str()));
        }
        by_name.erase(it);
    };
    for (int32_t il = sc.split + 1; il < sc.n_layer; ++il) {
        for (const ridge_part & part : sc.parts(il)) {
            check(il, part);
        }
    }
    if (!by_name.empty()) {
        throw ridge_error(ridge_format("tensor %s does not belong in a sidecar with maps for layers %d to %d",
            ridge_quote(by_name.begin()->first).c_str(), sc.split + 1, sc.n_layer - 1));
    }
    for (const auto & item : sc.sha256) {
        const auto is_it = [&](const ridge_tensor_info & info) { return info.name == item.first; };
        if (std::none_of(gguf.tensors.begin(), gguf.tensors.end(), is_it)) {
            throw ridge_error("key 'ridge.tensors' lists " + ridge_quote(item.first) + ", which is not in the file");
        }
    }
}

// GGUF stores tensors in the order of their entries, each from the next multiple of the alignment on. Returns the file
// offset of each, having checked that all of them lie in the file and nothing else does.
static std::vector<uint64_t> check_layout(const ggml_ridge_sidecar & sc, const ridge_gguf & gguf) {
    const uint64_t data_begin = GGML_PAD(gguf.header_end, GGUF_DEFAULT_ALIGNMENT);
    const uint64_t file_size  = sc.file.size();

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

static void check_padding(const ggml_ridge_sidecar & sc, uint64_t begin, uint64_t end, const std::string & after) {
    for (uint64_t i = begin; i < end; ++i) {
        if (sc.file.data()[i] != 0) {
            throw ridge_error(ridge_format("byte %" PRIu64 " in the padding after %s is %d, expected 0: the file is damaged",
                i, after.c_str(), sc.file.data()[i]));
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

// under its part and layer: blk.%d.ridge.PART
static void keep(ggml_ridge_sidecar & sc, ggml_tensor * t) {
    const int32_t il = atoi(t->name + strlen("blk."));
    auto & of_part = sc.tensors[strrchr(t->name, '.') + 1];
    of_part.resize(sc.n_layer - 1 - sc.split);
    of_part[il - sc.split - 1] = t;
}

static void read_tensors(sidecar_reader & r) {
    ggml_ridge_sidecar & sc = *r.sc;
    check_tensor_set(sc, r.gguf);
    const std::vector<uint64_t> offsets = check_layout(sc, r.gguf);

    sc.file.read_to(sc.file.size());
    check_padding(sc, r.gguf.header_end, GGML_PAD(r.gguf.header_end, GGUF_DEFAULT_ALIGNMENT), "the header");

    sc.ctx.reset(ggml_init({ ggml_tensor_overhead()*r.gguf.tensors.size(), nullptr, /*.no_alloc =*/ true }));
    if (!sc.ctx) {
        throw ridge_error("no memory for its tensors");
    }
    for (size_t i = 0; i < offsets.size(); ++i) {
        const ridge_tensor_info & info = r.gguf.tensors[i];
        const std::vector<int64_t> shape(info.shape.begin(), info.shape.end());
        ggml_tensor * t = ggml_new_tensor(sc.ctx.get(), ggml_type(info.type), int(shape.size()), shape.data());
        ggml_set_name(t, info.name.c_str());
        t->data = const_cast<uint8_t *>(sc.file.data()) + offsets[i];
        keep(sc, t);

        const std::string found    = sha256_hex(t->data, ggml_nbytes(t));
        const std::string expected = sc.sha256.at(info.name);
        if (found != expected) {
            throw ridge_error(ridge_format("tensor '%s' is damaged: its sha256 is %.12s..., expected %.12s...",
                t->name, found.c_str(), expected.c_str()));
        }
        check_finite(t);
        const uint64_t end = offsets[i] + ggml_nbytes(t);
        check_padding(sc, end, GGML_PAD(end, GGUF_DEFAULT_ALIGNMENT), "tensor '" + info.name + "'");
    }
    sc.hash = sha256_hex(sc.file.data(), sc.file.size());
}

static std::unique_ptr<ggml_ridge_sidecar> sidecar_read(const char * path, const ggml_ridge_expect * expect) {
    sidecar_reader r(path);
    r.gguf.read_metadata();
    check_kind_of_file(r.gguf);
    r.gguf.read_tensors();
    check_metadata_hash(r);
    read_keys(*r.sc, r.gguf);
    if (expect) {
        check_model(*r.sc, *expect);
    }
    read_tensors(r);
    return std::move(r.sc);
}

//
// C API
//

ggml_ridge_sidecar * ggml_ridge_sidecar_load(const char * path, const ggml_ridge_expect * expect, char * err, size_t err_size) {
    path = path ? path : "";
    std::string reason;
    try {
        return sidecar_read(path, expect).release();
    } catch (const std::bad_alloc &) {
        reason = "not enough memory";
    } catch (const std::exception & e) {
        reason = e.what();
    }
    if (err && err_size > 0) {
        snprintf(err, err_size, "sidecar '%s': %s", path, reason.c_str());
        // one line, whatever the path holds
        std::replace_if(err, err + strlen(err), [](unsigned char c) { return c < 0x20; }, '?');
    }
    return nullptr;
}

void ggml_ridge_sidecar_free(ggml_ridge_sidecar * sc) {
    delete sc;
}

const char * ggml_ridge_sidecar_hash     (const ggml_ridge_sidecar * sc) { return sc->hash.c_str(); }
const char * ggml_ridge_sidecar_kind     (const ggml_ridge_sidecar * sc) { return sc->kind.c_str(); }
int32_t      ggml_ridge_sidecar_split    (const ggml_ridge_sidecar * sc) { return sc->split; }
int32_t      ggml_ridge_sidecar_n_layer  (const ggml_ridge_sidecar * sc) { return sc->n_layer; }
int32_t      ggml_ridge_sidecar_n_embd   (const ggml_ridge_sidecar * sc) { return sc->n_embd; }
int32_t      ggml_ridge_sidecar_n_tail   (const ggml_ridge_sidecar * sc) { return sc->n_tail; }
int32_t      ggml_ridge_sidecar_n_sink   (const ggml_ridge_sidecar * sc) { return sc->n_sink; }
int32_t      ggml_ridge_sidecar_rank     (const ggml_ridge_sidecar * sc) { return sc->rank; }
int32_t      ggml_ridge_sidecar_k_length (const ggml_ridge_sidecar * sc, int32_t il) { return sc->length(sc->k_length, il); }
int32_t      ggml_ridge_sidecar_v_length (const ggml_ridge_sidecar * sc, int32_t il) { return sc->length(sc->v_length, il); }
int32_t      ggml_ridge_sidecar_file_type(const ggml_ridge_sidecar * sc) { return sc->file_type; }

const char * ggml_ridge_sidecar_str(const ggml_ridge_sidecar * sc, const char * key) {
    const auto it = sc->strings.find(key);
    return it == sc->strings.end() ? nullptr : it->second.c_str();
}

const char * ggml_ridge_sidecar_anchor(const ggml_ridge_sidecar * sc, int32_t i, const char ** name) {
    if (i < 0 || size_t(i) >= sc->anchors.size()) {
        return nullptr;
    }
    if (name) {
        *name = sc->anchors[i].first.c_str();
    }
    return sc->anchors[i].second.c_str();
}

const ggml_tensor * ggml_ridge_sidecar_weight(const ggml_ridge_sidecar * sc, int32_t il) { return sc->tensor("weight", il); }
const ggml_tensor * ggml_ridge_sidecar_down  (const ggml_ridge_sidecar * sc, int32_t il) { return sc->tensor("down",   il); }
const ggml_tensor * ggml_ridge_sidecar_up    (const ggml_ridge_sidecar * sc, int32_t il) { return sc->tensor("up",     il); }
const ggml_tensor * ggml_ridge_sidecar_bias  (const ggml_ridge_sidecar * sc, int32_t il) { return sc->tensor("bias",   il); }

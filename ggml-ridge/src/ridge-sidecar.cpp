// Sidecars of ridge maps (docs/SIDECAR.md).

#include "ridge-content.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <memory>

struct ggml_ridge_sidecar : ridge_content {
    using ridge_content::ridge_content;

    std::string kind;
    std::string arch;

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

    ridge_hashes anchors;

    bool predicts_kv() const {
        return kind == "kv" || kind == "kv_prev";
    }

    // what the map of layer il consists of
    std::vector<ridge_part> parts(int32_t il) const {
        const size_t  i     = il - split - 1;
        const int64_t n_in  = kind == "kv_prev" ? 2*int64_t(n_embd) : n_embd;
        const int64_t n_out = predicts_kv() ? int64_t(k_length[i]) + v_length[i] : n_embd;
        const ridge_part bias = { name("bias", il), GGML_TYPE_F32, { n_out } };
        if (kind == "input_lr") {
            return { { name("down", il), map_type, { n_in, rank } }, { name("up", il), map_type, { rank, n_out } }, bias };
        }
        return { { name("weight", il), map_type, { n_in, n_out } }, bias };
    }

    static std::string name(const char * part, int32_t il) {
        return ridge_format("blk.%d.ridge.%s", il, part);
    }

    int32_t length(const std::vector<uint32_t> & lengths, int32_t il) const {
        return !lengths.empty() && il > split && il < n_layer ? lengths[il - split - 1] : 0;
    }
};

//
// keys
//

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
    const size_t n_tail   = ridge_read_i32(gguf, "ridge.selftest.tail", 1, INT32_MAX);
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
    ridge_read_common(sc, gguf);

    sc.kind = gguf.get_str("ridge.kind");
    if (sc.kind != "input" && sc.kind != "input_lr" && !sc.predicts_kv()) {
        throw ridge_error("the kind of its maps is " + ridge_quote(sc.kind) +
            ", expected 'input', 'input_lr', 'kv' or 'kv_prev' (key 'ridge.kind')");
    }
    sc.arch      = gguf.get_str("general.architecture");
    sc.n_layer   = ridge_read_i32(gguf, "ridge.block_count", 3, INT32_MAX);
    sc.split     = ridge_read_i32(gguf, "ridge.split", 1, sc.n_layer - 2);
    sc.n_embd    = ridge_read_i32(gguf, "ridge.embedding_length", 1, INT32_MAX);
    sc.n_sink    = ridge_read_i32(gguf, "ridge.sink_rows", 0, INT32_MAX);
    sc.n_tail    = ridge_read_i32(gguf, "ridge.tail", 1, INT32_MAX);
    sc.file_type = int32_t(gguf.get_u32("ridge.model.file_type")); // all bits set: unknown

    check_blocks(sc, "embedding length", sc.n_embd);
    if (sc.kind == "input_lr") {
        sc.rank = ridge_read_i32(gguf, "ridge.rank", 1, sc.n_embd);
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

    ridge_check_is_sha256("ridge.model.tokenizer_sha256", gguf.get_str("ridge.model.tokenizer_sha256"));
    gguf.get_str("ridge.model.hparams");
    gguf.get_str("ridge.model.name");

    check_prev_share(sc, gguf);

    sc.anchors = ridge_read_hashes(gguf, "ridge.model.anchors");
}

static std::unique_ptr<ggml_ridge_sidecar> sidecar_read(const char * path, const ggml_ridge_expect * expect) {
    auto sc = std::make_unique<ggml_ridge_sidecar>(path);
    ridge_gguf gguf(sc->file);
    gguf.read_metadata();
    ridge_check_kind_of_file(gguf, "ridge_maps");
    gguf.read_tensors();
    ridge_check_metadata_hash(*sc, gguf, /*required =*/ false);
    read_keys(*sc, gguf);
    if (expect) {
        ridge_check_model({ sc->arch, sc->strings.at("ridge.model.tokenizer_sha256"), sc->strings.at("ridge.model.hparams"),
            sc->n_layer, sc->n_embd }, *expect);
    }
    std::vector<ridge_part> parts; // no more than it takes to find one that is missing
    for (int32_t il = sc->split + 1; il < sc->n_layer && parts.size() <= gguf.tensors.size(); ++il) {
        for (auto & part : sc->parts(il)) {
            parts.push_back(std::move(part));
        }
    }
    ridge_read_tensors(*sc, gguf, parts, ridge_format("maps for layers %d to %d", sc->split + 1, sc->n_layer - 1));
    return sc;
}

//
// C API
//

ggml_ridge_sidecar * ggml_ridge_sidecar_load(const char * path, const ggml_ridge_expect * expect, char * err, size_t err_size) {
    path = path ? path : "";
    std::string reason;
    auto * sc = ridge_guarded(reason, [&] { return sidecar_read(path, expect).release(); });
    if (!sc) {
        ridge_report(err, err_size, ridge_format("sidecar '%s': %s", path, reason.c_str()));
    }
    return sc;
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

const ggml_tensor * ggml_ridge_sidecar_weight(const ggml_ridge_sidecar * sc, int32_t il) { return sc->tensor(sc->name("weight", il)); }
const ggml_tensor * ggml_ridge_sidecar_down  (const ggml_ridge_sidecar * sc, int32_t il) { return sc->tensor(sc->name("down", il)); }
const ggml_tensor * ggml_ridge_sidecar_up    (const ggml_ridge_sidecar * sc, int32_t il) { return sc->tensor(sc->name("up", il)); }
const ggml_tensor * ggml_ridge_sidecar_bias  (const ggml_ridge_sidecar * sc, int32_t il) { return sc->tensor(sc->name("bias", il)); }

// Mappers (docs/MAPPER.md): the cache of one model from that of another.

#include "ridge-content.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <memory>
#include <numeric>

struct mapper_side {
    ridge_model_record    record;
    std::vector<uint32_t> heads; // of K and V, by layer
    int32_t               key_length   = 0;
    int32_t               value_length = 0;
    std::string           scaling_type;
    std::vector<float>    factors;
    ggml_ridge_rope       rope = {}; // without its pointers

    int64_t head(char what) const {
        return what == 'k' ? key_length : value_length;
    }
};

struct ggml_ridge_mapper : ridge_content {
    using ridge_content::ridge_content;

    mapper_side sides[2];

    int32_t n_sink   = 0;
    int32_t n_tail   = 0;
    bool    previous = false;

    std::map<char, std::vector<std::vector<uint32_t>>> sources; // of 'k' and 'v', by target layer

    static std::string name(const char * part, char what, int32_t il) {
        return ridge_format("blk.%d.mapper.%c.%s", il, what, part);
    }

    int64_t d_in(char what, int32_t il) const {
        const mapper_side & src = sides[GGML_RIDGE_SOURCE];
        int64_t res = 0;
        for (uint32_t s : sources.at(what)[il]) {
            res += src.heads[s]*src.head(what);
        }
        return previous ? 2*res : res;
    }
};

//
// keys
//

static void check_length(const std::string & key, size_t found, size_t expected) {
    if (found != expected) {
        throw ridge_error(ridge_format("key '%s' holds %zu numbers, expected %zu", key.c_str(), found, expected));
    }
}

static std::vector<float> read_finite(const ridge_gguf & gguf, const std::string & key, size_t n) {
    std::vector<float> res = gguf.get_f32s(key);
    check_length(key, res.size(), n);
    if (!std::all_of(res.begin(), res.end(), [](float x) { return std::isfinite(x); })) {
        throw ridge_error("key '" + key + "' holds a number that is not finite");
    }
    return res;
}

static float read_f32(const ridge_gguf & gguf, const std::string & key, float lo) {
    const float x = gguf.get_f32(key);
    if (!std::isfinite(x) || x < lo) {
        throw ridge_error(ridge_format("key '%s' is %g, expected a finite number of at least %g", key.c_str(), x, lo));
    }
    return x;
}

static void read_rope(mapper_side & side, const ridge_gguf & gguf, const std::string & prefix) {
    ggml_ridge_rope & rope = side.rope;

    rope.n_rot          = ridge_read_i32(gguf, (prefix + "dimension_count").c_str(), 0, side.key_length);
    rope.freq_base      = read_f32(gguf, prefix + "freq_base",      1.0f);
    rope.scaling_factor = read_f32(gguf, prefix + "scaling_factor", 1e-6f);
    rope.attn_factor    = read_f32(gguf, prefix + "attn_factor",    1e-6f);
    rope.beta_fast      = read_f32(gguf, prefix + "beta_fast",      0.0f);
    rope.beta_slow      = read_f32(gguf, prefix + "beta_slow",      0.0f);
    rope.log_multiplier = read_f32(gguf, prefix + "log_multiplier", 0.0f);
    rope.n_ctx_orig     = ridge_read_i32(gguf, (prefix + "original_context").c_str(), 0, INT32_MAX);

    side.scaling_type   = gguf.get_str(prefix + "scaling_type");

    const std::string pairs = gguf.get_str(prefix + "pairs");
    if (pairs != "adjacent" && pairs != "halves") {
        throw ridge_error("key '" + prefix + "pairs' is " + ridge_quote(pairs) + ", expected 'adjacent' or 'halves'");
    }
    rope.adjacent = pairs == "adjacent";

    if (rope.n_rot % 2 != 0) {
        throw ridge_error(ridge_format("key '%sdimension_count' is %d, expected an even number", prefix.c_str(), rope.n_rot));
    }
    if (gguf.has(prefix + "factors")) {
        side.factors = read_finite(gguf, prefix + "factors", rope.n_rot/2);
        if (!std::all_of(side.factors.begin(), side.factors.end(), [](float x) { return x > 0.0f; })) {
            throw ridge_error("key '" + prefix + "factors' holds a number that is not positive");
        }
    }
}

static void read_side(mapper_side & side, const ridge_gguf & gguf, const std::string & prefix) {
    side.heads = gguf.get_u32s(prefix + "head_count_kv");
    if (side.heads.empty() || std::any_of(side.heads.begin(), side.heads.end(), [](uint32_t n) { return n < 1 || n > 65536; })) {
        throw ridge_error("key '" + prefix + "head_count_kv' expected 1 to 65536 heads in each of some layers, found others");
    }
    side.key_length   = ridge_read_i32(gguf, (prefix + "key_length").c_str(),   1, 65536);
    side.value_length = ridge_read_i32(gguf, (prefix + "value_length").c_str(), 1, 65536);

    side.record.architecture     = gguf.get_str(prefix + "architecture");
    side.record.tokenizer_sha256 = gguf.get_str(prefix + "tokenizer_sha256");
    side.record.hparams          = gguf.get_str(prefix + "hparams");
    side.record.block_count      = side.heads.size();
    ridge_check_is_sha256(prefix + "tokenizer_sha256", side.record.tokenizer_sha256);
    gguf.get_str(prefix + "name");
    gguf.get_u32(prefix + "file_type");
    ridge_read_hashes(gguf, prefix + "anchors");

    read_rope(side, gguf, prefix + "rope.");
}

// source layers of each target layer
static std::vector<std::vector<uint32_t>> read_sources(const ggml_ridge_mapper & mp, const ridge_gguf & gguf, const std::string & prefix) {
    const uint32_t n_source = mp.sides[GGML_RIDGE_SOURCE].heads.size();
    const size_t   n_target = mp.sides[GGML_RIDGE_TARGET].heads.size();

    const std::vector<uint32_t> counts = gguf.get_u32s(prefix + "n_sources");
    const std::vector<uint32_t> layers = gguf.get_u32s(prefix + "sources");
    check_length(prefix + "n_sources", counts.size(), n_target);
    check_length(prefix + "sources", layers.size(), std::accumulate(counts.begin(), counts.end(), size_t(0)));

    std::vector<std::vector<uint32_t>> res;
    auto begin = layers.begin();
    for (uint32_t n : counts) {
        res.emplace_back(begin, begin + n);
        const auto & of_layer = res.back();
        const bool ascending = std::adjacent_find(of_layer.begin(), of_layer.end(), std::greater_equal<uint32_t>()) == of_layer.end();
        if (n == 0 || !ascending || of_layer.back() >= n_source) {
            throw ridge_error(ridge_format("key '%ssources': expected ascending layers below %" PRIu32 " for layer %zu, found others",
                prefix.c_str(), n_source, res.size() - 1));
        }
        begin += n;
    }
    return res;
}

// what layers were chosen by: records for people
static void check_scores(const ggml_ridge_mapper & mp, const ridge_gguf & gguf, const std::string & prefix) {
    const auto & target = mp.sides[GGML_RIDGE_TARGET].heads;
    const size_t n = target.size();

    read_finite(gguf, prefix + "lambda",       n);
    read_finite(gguf, prefix + "r2_head",      std::accumulate(target.begin(), target.end(), size_t(0)));
    read_finite(gguf, prefix + "r2_single",    n*mp.sides[GGML_RIDGE_SOURCE].heads.size());
    read_finite(gguf, prefix + "r2_by_number", n*gguf.get_u32s(prefix + "tried").size());
}

static void read_keys(ggml_ridge_mapper & mp, const ridge_gguf & gguf) {
    ridge_read_common(mp, gguf);

    mp.n_sink   = ridge_read_i32(gguf, "ridge.sink_rows", 0, INT32_MAX);
    mp.n_tail   = ridge_read_i32(gguf, "ridge.tail", 1, INT32_MAX);
    mp.previous = gguf.get_bool("ridge.previous_row");
    gguf.get_str("ridge.select");

    read_side(mp.sides[GGML_RIDGE_SOURCE], gguf, "ridge.source.");
    read_side(mp.sides[GGML_RIDGE_TARGET], gguf, "ridge.target.");
    for (char what : { 'k', 'v' }) {
        const std::string prefix = ridge_format("ridge.%c.", what);
        mp.sources[what] = read_sources(mp, gguf, prefix);
        check_scores(mp, gguf, prefix);
    }
}

//
// tensors
//

static std::vector<ridge_part> parts_of(const ggml_ridge_mapper & mp) {
    const mapper_side & target = mp.sides[GGML_RIDGE_TARGET];

    std::vector<ridge_part> res;
    for (int32_t il = 0; il < target.record.block_count; ++il) {
        for (char what : { 'k', 'v' }) {
            const int64_t d_out = target.heads[il]*target.head(what);
            const int64_t d_in  = mp.d_in(what, il);
            if (d_in % ggml_blck_size(mp.map_type) != 0) {
                throw ridge_error(ridge_format("the %" PRId64 " features of layer %d are no multiple of %" PRId64 ", the block of map type '%s'",
                    d_in, il, ggml_blck_size(mp.map_type), ggml_type_name(mp.map_type)));
            }
            res.push_back({ mp.name("weight", what, il), mp.map_type,   { d_in, d_out } });
            res.push_back({ mp.name("bias",   what, il), GGML_TYPE_F32, { d_out } });
        }
    }
    return res;
}

static void check_side(const ggml_ridge_mapper & mp, ggml_ridge_role role, const ggml_ridge_expect * expect) {
    if (expect == nullptr) {
        return;
    }
    try {
        ridge_check_model(mp.sides[role].record, *expect);
    } catch (const ridge_error & e) {
        throw ridge_error((role == GGML_RIDGE_SOURCE ? "source: " : "target: ") + std::string(e.what()));
    }
}

static std::unique_ptr<ggml_ridge_mapper> mapper_read(const char * path, const ggml_ridge_expect * source, const ggml_ridge_expect * target) {
    auto mp = std::make_unique<ggml_ridge_mapper>(path);
    ridge_gguf gguf(mp->file);
    gguf.read_metadata();
    ridge_check_kind_of_file(gguf, "kv_mapper");
    gguf.read_tensors();
    ridge_check_metadata_hash(*mp, gguf, /*required =*/ true);
    read_keys(*mp, gguf);
    check_side(*mp, GGML_RIDGE_SOURCE, source);
    check_side(*mp, GGML_RIDGE_TARGET, target);
    ridge_read_tensors(*mp, gguf, parts_of(*mp), ridge_format("maps of K and V for layers 0 to %d",
        mp->sides[GGML_RIDGE_TARGET].record.block_count - 1));
    return mp;
}

//
// C API
//

ggml_ridge_mapper * ggml_ridge_mapper_load(
        const char * path, const ggml_ridge_expect * source, const ggml_ridge_expect * target, char * err, size_t err_size) {
    path = path ? path : "";
    std::string reason;
    auto * mp = ridge_guarded(reason, [&] { return mapper_read(path, source, target).release(); });
    if (!mp) {
        ridge_report(err, err_size, ridge_format("mapper '%s': %s", path, reason.c_str()));
    }
    return mp;
}

void ggml_ridge_mapper_free(ggml_ridge_mapper * mp) {
    delete mp;
}

const char * ggml_ridge_mapper_hash    (const ggml_ridge_mapper * mp) { return mp->hash.c_str(); }
int32_t      ggml_ridge_mapper_n_sink  (const ggml_ridge_mapper * mp) { return mp->n_sink; }
int32_t      ggml_ridge_mapper_n_tail  (const ggml_ridge_mapper * mp) { return mp->n_tail; }
bool         ggml_ridge_mapper_previous(const ggml_ridge_mapper * mp) { return mp->previous; }

int32_t ggml_ridge_mapper_n_layer(const ggml_ridge_mapper * mp, ggml_ridge_role role) {
    return mp->sides[role].record.block_count;
}

int32_t ggml_ridge_mapper_n_head(const ggml_ridge_mapper * mp, ggml_ridge_role role, int32_t il) {
    return mp->sides[role].heads.at(il);
}

int32_t ggml_ridge_mapper_head(const ggml_ridge_mapper * mp, ggml_ridge_role role, char what) {
    return mp->sides[role].head(what);
}

ggml_ridge_rope ggml_ridge_mapper_rope(const ggml_ridge_mapper * mp, ggml_ridge_role role) {
    const mapper_side & side = mp->sides[role];
    ggml_ridge_rope res = side.rope;
    res.scaling_type = side.scaling_type.c_str();
    res.factors      = side.factors.empty() ? nullptr : side.factors.data();
    return res;
}

int32_t ggml_ridge_mapper_sources(const ggml_ridge_mapper * mp, char what, int32_t il, const uint32_t ** layers) {
    const auto & res = mp->sources.at(what).at(il);
    *layers = res.data();
    return res.size();
}

const ggml_tensor * ggml_ridge_mapper_weight(const ggml_ridge_mapper * mp, char what, int32_t il) { return mp->tensor(mp->name("weight", what, il)); }
const ggml_tensor * ggml_ridge_mapper_bias  (const ggml_ridge_mapper * mp, char what, int32_t il) { return mp->tensor(mp->name("bias",   what, il)); }

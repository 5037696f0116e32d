// Mappers inside libllama: whether one was made for two models, how these turn their keys, and its matrices on the devices.

#include "llama-ridge-impl.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>

//
// rotation
//

static const char * const ROLE_NAMES[] = { "source", "target" };

// as the constructor of llama_context works it out when no parameter of the context says otherwise
static llama_ridge_rotation rotation_of(const ggml_ridge_rope & rope) {
    llama_ridge_rotation res;

    res.n_rot       = rope.n_rot;
    res.type        = rope.adjacent ? LLAMA_ROPE_TYPE_NORM : LLAMA_ROPE_TYPE_NEOX;
    res.n_ctx_orig  = rope.n_ctx_orig;
    res.freq_base   = rope.freq_base;
    res.freq_scale  = 1.0f/rope.scaling_factor;
    res.ext_factor  = std::string(rope.scaling_type) == "yarn" ? 1.0f : 0.0f;
    res.attn_factor = rope.attn_factor;
    res.beta_fast   = rope.beta_fast;
    res.beta_slow   = rope.beta_slow;

    if (res.ext_factor != 0.0f) {
        const float log_factor = 0.1f*logf(rope.scaling_factor);
        const auto gain = [&](float mul) { return rope.scaling_factor <= 1.0f ? 1.0f : mul*log_factor + 1.0f; };

        res.attn_factor *= (rope.log_multiplier != 0.0f ? gain(1.0f)/gain(rope.log_multiplier) : gain(1.0f))/(1.0f + log_factor);
    }
    if (rope.factors) {
        res.factors.assign(rope.factors, rope.factors + rope.n_rot/2);
    }

    return res;
}

static std::vector<float> factors_of(const llama_model & model, int32_t n_rot) {
    const auto & layer = model.layers[0];
    const ggml_tensor * t = layer.rope_freqs ? layer.rope_freqs : layer.rope_short;

    std::vector<float> res(t ? n_rot/2 : 0);
    if (t) {
        ggml_backend_tensor_get(t, res.data(), 0, res.size()*sizeof(float));
    }
    return res;
}

struct rope_field {
    const char * name;
    double       expected; // of the model
    double       found;    // in the mapper
};

static bool same(double a, double b) {
    return std::fabs(a - b) <= 1e-6*std::max(std::fabs(a), std::fabs(b));
}

static int32_t check_fields(const char * where, const std::vector<rope_field> & fields) {
    for (const auto & f : fields) {
        if (!same(f.expected, f.found)) {
            return llama_ridge_fail(LLAMA_RIDGE_ERR_FILE, "%s: rope.%s: expected %g, which the model has, found %g",
                    where, f.name, f.expected, f.found);
        }
    }
    return LLAMA_RIDGE_OK;
}

// what a mapper says of the positions of a model against the model itself, by the names of the mapper's keys
static int32_t check_rope(const llama_model & model, const ggml_ridge_rope & rope, const char * role) {
    const auto & hp = model.hparams;

    const bool adjacent = hp.rope_type == LLAMA_ROPE_TYPE_NORM;
    if (!adjacent && hp.rope_type != LLAMA_ROPE_TYPE_NEOX) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_UNSUPPORTED, "%s: expected positions that turn pairs of numbers, found rope type %d",
                role, hp.rope_type);
    }
    if (const int32_t status = check_fields(role, {
            { "dimension_count",  (double) hp.n_rot(),               (double) rope.n_rot      },
            { "freq_base",        hp.rope_freq_base_train,           rope.freq_base           },
            { "scaling_factor",   1.0/hp.rope_freq_scale_train,      rope.scaling_factor      },
            { "attn_factor",      hp.rope_attn_factor,               rope.attn_factor         },
            { "beta_fast",        hp.yarn_beta_fast,                 rope.beta_fast           },
            { "beta_slow",        hp.yarn_beta_slow,                 rope.beta_slow           },
            { "log_multiplier",   hp.rope_yarn_log_mul,              rope.log_multiplier      },
            { "original_context", (double) hp.n_ctx_orig_yarn,       (double) rope.n_ctx_orig },
        })) {
        return status;
    }

    const std::string scaling = llama_rope_scaling_type_name(hp.rope_scaling_type_train);
    if (scaling != rope.scaling_type) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_FILE, "%s: rope.scaling_type: expected '%s', which the model has, found another", role, scaling.c_str());
    }
    if (adjacent != rope.adjacent) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_FILE, "%s: rope.pairs: expected '%s', which the model has, found the other",
                role, adjacent ? "adjacent" : "halves");
    }

    const auto factors = factors_of(model, rope.n_rot);
    const bool equal = rope.factors ? std::equal(factors.begin(), factors.end(), rope.factors) && !factors.empty() : factors.empty();
    if (!equal) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_FILE, "%s: rope.factors: expected the %zu numbers that the model has, found others",
                role, factors.size());
    }

    return LLAMA_RIDGE_OK;
}

//
// load
//

// rows must have the widths of the caches; also what the hyper-parameters' text leaves out
static int32_t check_widths(const llama_model & model, const ggml_ridge_mapper * file, ggml_ridge_role role) {
    for (int32_t il = 0; il < ggml_ridge_mapper_n_layer(file, role); ++il) {
        const int64_t n_head = ggml_ridge_mapper_n_head(file, role, il);
        const int64_t k = n_head*ggml_ridge_mapper_head(file, role, 'k');
        const int64_t v = n_head*ggml_ridge_mapper_head(file, role, 'v');

        if (k != model.hparams.n_embd_k_gqa(il) || v != model.hparams.n_embd_v_gqa(il)) {
            return llama_ridge_fail(LLAMA_RIDGE_ERR_FILE, "%s: layer %d: expected rows of %u and %u values of K and V, which the model has, found %lld and %lld",
                    ROLE_NAMES[role], il, model.hparams.n_embd_k_gqa(il), model.hparams.n_embd_v_gqa(il), (long long) k, (long long) v);
        }
    }
    return LLAMA_RIDGE_OK;
}

static int32_t check_model(const llama_model * model, const ggml_ridge_mapper * file, ggml_ridge_role role) {
    if (model == nullptr) {
        return LLAMA_RIDGE_OK;
    }
    if (const char * reason = llama_ridge_unsupported_model(model)) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_UNSUPPORTED, "%s: %s", ROLE_NAMES[role], reason);
    }
    const int32_t status = check_widths(*model, file, role);

    return status ? status : check_rope(*model, ggml_ridge_mapper_rope(file, role), ROLE_NAMES[role]);
}

static void place_maps(llama_ridge_mapper & mapper, const ggml_ridge_mapper * file, llama_ridge_placer & placer, char what) {
    auto & maps = what == 'k' ? mapper.k : mapper.v;

    maps.resize(ggml_ridge_mapper_n_layer(file, GGML_RIDGE_TARGET));
    for (int32_t il = 0; il < (int32_t) maps.size(); ++il) {
        const uint32_t * layers = nullptr;
        const int32_t n = ggml_ridge_mapper_sources(file, what, il, &layers);

        maps[il].sources.assign(layers, layers + n);
        maps[il].w = placer.matrix(il, ggml_ridge_mapper_weight(file, what, il));
        maps[il].b = placer.vector(il, ggml_ridge_mapper_bias  (file, what, il));
    }
}

static std::unique_ptr<llama_ridge_mapper> make_mapper(const llama_model * source, const llama_model * target, const ggml_ridge_mapper * file) {
    auto mapper = std::make_unique<llama_ridge_mapper>();

    mapper->source   = source;
    mapper->target   = target;
    mapper->n_sink   = ggml_ridge_mapper_n_sink  (file);
    mapper->n_tail   = ggml_ridge_mapper_n_tail  (file);
    mapper->previous = ggml_ridge_mapper_previous(file);
    mapper->hash     = ggml_ridge_mapper_hash    (file);
    mapper->k_head   = ggml_ridge_mapper_head    (file, GGML_RIDGE_SOURCE, 'k');
    mapper->v_head   = ggml_ridge_mapper_head    (file, GGML_RIDGE_SOURCE, 'v');

    for (ggml_ridge_role role : { GGML_RIDGE_SOURCE, GGML_RIDGE_TARGET }) {
        mapper->rotation[role] = rotation_of(ggml_ridge_mapper_rope(file, role));
    }
    for (int32_t il = 0; il < ggml_ridge_mapper_n_layer(file, GGML_RIDGE_SOURCE); ++il) {
        mapper->n_head_source.push_back(ggml_ridge_mapper_n_head(file, GGML_RIDGE_SOURCE, il));
    }

    llama_ridge_placer placer(*target, 4*target->hparams.n_layer()); // weight and bias of K and V
    place_maps(*mapper, file, placer, 'k');
    place_maps(*mapper, file, placer, 'v');

    return placer.upload(mapper->placed, "mapper") ? std::move(mapper) : nullptr;
}

static std::unique_ptr<llama_ridge_mapper> load(const llama_model * source, const llama_model * target, const char * path) {
    const llama_ridge_model_text text_target(*target);
    const llama_ridge_model_text text_source(source ? *source : *target);
    const ggml_ridge_expect expect_target = text_target.expect();
    const ggml_ridge_expect expect_source = text_source.expect();

    char err[1024] = "";
    std::unique_ptr<ggml_ridge_mapper, decltype(&ggml_ridge_mapper_free)> file {
        ggml_ridge_mapper_load(path, source ? &expect_source : nullptr, &expect_target, err, sizeof(err)), ggml_ridge_mapper_free };

    if (!file) {
        llama_ridge_fail(LLAMA_RIDGE_ERR_FILE, "%s", err);
        return nullptr;
    }
    if (check_model(source, file.get(), GGML_RIDGE_SOURCE) || check_model(target, file.get(), GGML_RIDGE_TARGET)) {
        llama_ridge_fail(LLAMA_RIDGE_ERR_FILE, "mapper '%s': %s", path, std::string(llama_ridge_last_error()).c_str());
        return nullptr;
    }

    auto mapper = make_mapper(source, target, file.get());
    if (mapper) {
        LLAMA_LOG_INFO("%s: '%s' maps the cache of %s models with %zu layers to this one of architecture %s with %d; tokenizer %.12s; "
                "%.1f MiB, sha256 %.12s\n", __func__, path, source ? text_source.architecture.c_str() : "its source", mapper->n_head_source.size(),
                expect_target.architecture, expect_target.block_count, expect_target.tokenizer_sha256,
                mapper->placed.size()/1024.0/1024.0, mapper->hash.c_str());
    }

    return mapper;
}

struct llama_ridge_mapper * llama_ridge_mapper_load(
        const struct llama_model * source, const struct llama_model * target, const char * path) {
    std::unique_ptr<llama_ridge_mapper> mapper;
    llama_ridge_guard([&] {
        mapper = load(source, target, path);
        return LLAMA_RIDGE_OK;
    });
    if (!mapper) {
        LLAMA_LOG_ERROR("%s: mapper refused: %s\n", __func__, llama_ridge_last_error());
    }

    return mapper.release();
}

void llama_ridge_mapper_free(struct llama_ridge_mapper * mapper) {
    delete mapper;
}

int32_t      llama_ridge_mapper_n_sink(const struct llama_ridge_mapper * mapper) { return mapper->n_sink; }
int32_t      llama_ridge_mapper_n_tail(const struct llama_ridge_mapper * mapper) { return mapper->n_tail; }
const char * llama_ridge_mapper_hash  (const struct llama_ridge_mapper * mapper) { return mapper->hash.c_str(); }
size_t       llama_ridge_mapper_size  (const struct llama_ridge_mapper * mapper) { return mapper->placed.size(); }

// Sidecars inside libllama: what a model is recognised by, and maps on the devices of their layers.

#include "llama-ridge-impl.h"

#include "ggml-ridge.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>

//
// fingerprint
//

static std::string sha256_hex(const void * data, size_t size) {
    char hex[65];
    ggml_ridge_sha256(data, size, hex);
    return hex;
}

// texts, attributes and merges: two models with this hash cut every text into the same tokens
static std::string tokenizer_sha256(const llama_vocab & vocab) {
    std::string buf = vocab.get_tokenizer_model() + '\0' + vocab.get_tokenizer_pre() + '\0';

    for (uint32_t id = 0; id < vocab.n_tokens(); ++id) {
        buf += vocab.token_get_text(id);
        buf += '\0';
        buf += std::to_string((int) vocab.token_get_attr(id));
        buf += '\n';
    }
    for (const auto & merge : vocab.get_bpe_merges()) {
        buf += merge;
        buf += '\n';
    }

    return sha256_hex(buf.data(), buf.size());
}

// one number if all layers agree, else all of them
template <typename F>
static std::string per_layer(uint32_t n_layer, F get) {
    bool same = true;
    std::string all;
    for (uint32_t il = 0; il < n_layer; ++il) {
        same = same && get(il) == get(0);
        all += (il ? "," : "") + std::to_string(get(il));
    }
    return same ? std::to_string(get(0)) : all;
}

static std::string hparams_text(const llama_model & model) {
    const auto & hp = model.hparams;
    const uint32_t L = hp.n_layer();

    return "head_count="        + per_layer(L, [&](uint32_t il) { return hp.n_head(il); }) +
           ";head_count_kv="    + per_layer(L, [&](uint32_t il) { return hp.n_head_kv(il); }) +
           ";key_length="       + per_layer(L, [&](uint32_t il) { return hp.n_embd_head_k(il); }) +
           ";value_length="     + per_layer(L, [&](uint32_t il) { return hp.n_embd_head_v(il); }) +
           ";feed_forward="     + per_layer(L, [&](uint32_t il) { return hp.n_ff(il); }) +
           ";expert_count="     + std::to_string(hp.n_expert) +
           ";rope_dimensions="  + std::to_string(hp.n_rot()) +
           ";vocab_size="       + std::to_string(model.vocab.n_tokens());
}

static std::string meta_str(const llama_model & model, const char * key) {
    char buf[256];
    return llama_model_meta_val_str(&model, key, buf, sizeof(buf)) >= 0 ? buf : "";
}

static int32_t file_type(const llama_model & model) {
    const std::string s = meta_str(model, "general.file_type");
    return s.empty() ? -1 : std::atoi(s.c_str());
}

static std::string tensor_sha256(const llama_model & model, const std::string & name) {
    const ggml_tensor * t = model.get_tensor(name.c_str());
    if (t == nullptr || t->type != GGML_TYPE_F32) {
        return "";
    }

    std::vector<uint8_t> buf(ggml_nbytes(t));
    ggml_backend_tensor_get(t, buf.data(), 0, buf.size());

    return sha256_hex(buf.data(), buf.size());
}

llama_ridge_model_text::llama_ridge_model_text(const llama_model & model)
    : architecture(model.arch_name()), tokenizer(tokenizer_sha256(model.vocab)), hparams(hparams_text(model)),
      n_layer(model.hparams.n_layer()), n_embd(model.hparams.n_embd) {
}

ggml_ridge_expect llama_ridge_model_text::expect() const {
    return { architecture.c_str(), tokenizer.c_str(), hparams.c_str(), n_layer, n_embd };
}

// norms are F32 in every quantisation of a model, and every fine-tune moves them
static std::vector<std::string> anchor_names(const llama_model & model, int32_t split) {
    return {
        "blk.0.attn_norm.weight",
        "blk." + std::to_string(split) + ".attn_norm.weight",
        "blk." + std::to_string(model.hparams.n_layer() - 1) + ".attn_norm.weight",
        "output_norm.weight",
    };
}

static std::string json_escape(const std::string & s) {
    std::string res;
    for (unsigned char c : s) {
        if (c == '"' || c == '\\') {
            res += '\\';
            res += c;
        } else if (c < 0x20) {
            res += format("\\u%04x", c);
        } else {
            res += c;
        }
    }
    return res;
}

int32_t llama_ridge_model_fingerprint(const struct llama_model * model, int32_t split, char * buf, size_t size) {
    const auto & hp = model->hparams;

    std::string anchors;
    for (const auto & name : anchor_names(*model, split)) {
        const std::string hash = tensor_sha256(*model, name);
        if (!hash.empty()) {
            anchors += format("%s\"%s\": \"%s\"", anchors.empty() ? "" : ", ", name.c_str(), hash.c_str());
        }
    }

    const std::string json =
        "{\"architecture\": \""         + json_escape(model->arch_name()) +
        "\", \"name\": \""              + json_escape(meta_str(*model, "general.name")) +
        "\", \"block_count\": "         + std::to_string(hp.n_layer()) +
        ", \"embedding_length\": "      + std::to_string(hp.n_embd) +
        ", \"head_count\": "            + std::to_string(hp.n_head(0)) +
        ", \"head_count_kv\": "         + std::to_string(hp.n_head_kv(0)) +
        ", \"file_type\": "             + std::to_string(file_type(*model)) +
        ", \"tokenizer_sha256\": \""    + tokenizer_sha256(model->vocab) +
        "\", \"hparams\": \""           + hparams_text(*model) +
        "\", \"anchors\": {"            + anchors + "}}";

    return snprintf(buf, size, "%s", json.c_str());
}

// maps that predict K and V must give rows of the width that the cache holds
static bool check_lengths(const llama_model & model, const ggml_ridge_sidecar * sc, const llama_ridge_maps & maps) {
    for (int32_t il = maps.split + 1; maps.predicts_kv() && il < (int32_t) model.hparams.n_layer(); ++il) {
        const int32_t k = ggml_ridge_sidecar_k_length(sc, il);
        const int32_t v = ggml_ridge_sidecar_v_length(sc, il);

        if (k != (int32_t) model.hparams.n_embd_k_gqa(il) || v != (int32_t) model.hparams.n_embd_v_gqa(il)) {
            llama_ridge_fail(LLAMA_RIDGE_ERR_FILE, "the maps of layer %d give %d and %d values for a row of K and V, the model has %u and %u",
                    il, k, v, model.hparams.n_embd_k_gqa(il), model.hparams.n_embd_v_gqa(il));
            return false;
        }
    }

    return true;
}

static bool place_all(const llama_model & model, const ggml_ridge_sidecar * sc, llama_ridge_maps & maps) {
    const int32_t n_layer = model.hparams.n_layer();

    llama_ridge_placer placer(model, 3*n_layer); // at most three of a layer

    maps.layers.resize(n_layer);
    for (int32_t il = maps.split + 1; il < n_layer; ++il) {
        auto & map = maps.layers[il];

        map.w    = placer.matrix(il, ggml_ridge_sidecar_weight(sc, il));
        map.down = placer.matrix(il, ggml_ridge_sidecar_down  (sc, il));
        map.up   = placer.matrix(il, ggml_ridge_sidecar_up    (sc, il));
        map.b    = placer.vector(il, ggml_ridge_sidecar_bias  (sc, il));
    }

    return placer.upload(maps.placed, "maps");
}

//
// load
//

static void warn_differences(const llama_model & model, const ggml_ridge_sidecar * sc, const char * path) {
    const int32_t ftype = ggml_ridge_sidecar_file_type(sc);
    if (ftype != file_type(model)) {
        LLAMA_LOG_WARN("%s: '%s' was fitted on another quantisation of the model (general.file_type: expected %d, found %d)\n",
                __func__, path, ftype, file_type(model));
    }

    const char * name = ggml_ridge_sidecar_str(sc, "ridge.model.name");
    if (name && name != meta_str(model, "general.name")) {
        LLAMA_LOG_WARN("%s: '%s' was fitted on a model named '%s', found '%s'\n",
                __func__, path, name, meta_str(model, "general.name").c_str());
    }

    const char * anchor = nullptr;
    for (int32_t i = 0; const char * hash = ggml_ridge_sidecar_anchor(sc, i, &anchor); ++i) {
        const std::string found = tensor_sha256(model, anchor);
        if (found != hash) {
            LLAMA_LOG_WARN("%s: '%s' was fitted on other weights (%s: expected sha256 %.12s, found %.12s): a fine-tune, perhaps\n",
                    __func__, path, anchor, hash, found.empty() ? "no such F32 tensor" : found.c_str());
            break;
        }
    }
}

// nullptr and a message where the file is refused
static std::unique_ptr<llama_ridge_maps> load(const llama_model * model, const char * path) {
    const llama_ridge_model_text text(*model);
    const ggml_ridge_expect expect = text.expect();

    char err[1024] = "";
    std::unique_ptr<ggml_ridge_sidecar, decltype(&ggml_ridge_sidecar_free)> sc {
        ggml_ridge_sidecar_load(path, &expect, err, sizeof(err)), ggml_ridge_sidecar_free };

    auto maps = std::make_unique<llama_ridge_maps>();

    if (sc) {
        maps->model  = model;
        maps->split  = ggml_ridge_sidecar_split (sc.get());
        maps->n_tail = ggml_ridge_sidecar_n_tail(sc.get());
        maps->n_sink = ggml_ridge_sidecar_n_sink(sc.get());
        maps->kind   = ggml_ridge_sidecar_kind  (sc.get());
        maps->hash   = ggml_ridge_sidecar_hash  (sc.get());
    } else {
        llama_ridge_fail(LLAMA_RIDGE_ERR_FILE, "%s", err);
    }

    if (!sc || !check_lengths(*model, sc.get(), *maps) || !place_all(*model, sc.get(), *maps)) {
        return nullptr;
    }

    warn_differences(*model, sc.get(), path);
    LLAMA_LOG_INFO("%s: '%s' matches the model: architecture %s, %d layers, width %d, tokenizer %.12s; kind %s, split %d, %.1f MiB, sha256 %.12s\n",
            __func__, path, expect.architecture, expect.block_count, expect.embedding_length, expect.tokenizer_sha256,
            maps->kind.c_str(), maps->split, maps->placed.size()/1024.0/1024.0, maps->hash.c_str());

    return maps;
}

struct llama_ridge_maps * llama_ridge_maps_load(const struct llama_model * model, const char * path) {
    if (const char * reason = llama_ridge_unsupported_model(model)) {
        llama_ridge_fail(LLAMA_RIDGE_ERR_UNSUPPORTED, "%s", reason);
        LLAMA_LOG_ERROR("%s: %s\n", __func__, reason);
        return nullptr;
    }

    std::unique_ptr<llama_ridge_maps> maps;
    llama_ridge_guard([&] {
        maps = load(model, path);
        return LLAMA_RIDGE_OK;
    });
    if (!maps) {
        LLAMA_LOG_ERROR("%s: ridge maps refused: %s\n", __func__, llama_ridge_last_error());
    }

    return maps.release();
}

void llama_ridge_maps_free(struct llama_ridge_maps * maps) {
    delete maps;
}

int32_t      llama_ridge_maps_split (const struct llama_ridge_maps * maps) { return maps->split; }
int32_t      llama_ridge_maps_n_tail(const struct llama_ridge_maps * maps) { return maps->n_tail; }
int32_t      llama_ridge_maps_n_sink(const struct llama_ridge_maps * maps) { return maps->n_sink; }
const char * llama_ridge_maps_kind  (const struct llama_ridge_maps * maps) { return maps->kind.c_str(); }
const char * llama_ridge_maps_hash  (const struct llama_ridge_maps * maps) { return maps->hash.c_str(); }
size_t       llama_ridge_maps_size  (const struct llama_ridge_maps * maps) { return maps->placed.size(); }

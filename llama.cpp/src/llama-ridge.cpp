// The C API of RidgeFill: errors, names, what can be filled, and a look into the cache.

#include "llama-ridge-impl.h"

#include "llama-arch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

//
// errors and names
//

static thread_local std::string g_last_error;

int32_t llama_ridge_fail(int32_t status, const char * fmt, ...) {
    char buf[1024];

    va_list args;
    va_start(args, fmt);
    vsnprintf(buf, sizeof(buf), fmt, args);
    va_end(args);

    g_last_error = buf;

    return status;
}

const char * llama_ridge_last_error(void) {
    return g_last_error.c_str();
}

static const char * const MODE_NAMES[] = { "off", "plumb", "identity", "nofill", "fill", "transfer" };

const char * llama_ridge_mode_name(enum llama_ridge_mode mode) {
    return mode >= LLAMA_RIDGE_MODE_OFF && mode <= LLAMA_RIDGE_MODE_TRANSFER ? MODE_NAMES[mode] : nullptr;
}

int32_t llama_ridge_mode_from_name(const char * name) {
    for (int i = 0; name && i <= LLAMA_RIDGE_MODE_TRANSFER; ++i) {
        if (strcmp(name, MODE_NAMES[i]) == 0) {
            return i;
        }
    }

    return -1;
}

struct llama_ridge_params llama_ridge_default_params(void) {
    return {
        /*.mode   =*/ LLAMA_RIDGE_MODE_FILL,
        /*.split  =*/ -1,
        /*.n_tail =*/ 512,
        /*.n_sink =*/ -1,
        /*.n_step =*/ 0,
    };
}

//
// what can be filled
//

// architectures whose graph calls build_layer_inp() and whose memory is a plain KV cache
static bool arch_has_hook(llm_arch arch) {
    switch (arch) {
        case LLM_ARCH_LLAMA:
        case LLM_ARCH_QWEN2:
        case LLM_ARCH_QWEN3:
        case LLM_ARCH_QWEN3MOE:
        case LLM_ARCH_MISTRAL3:
        case LLM_ARCH_MINIMAX_M2:
        case LLM_ARCH_NANBEIGE:
            return true;
        default:
            return false;
    }
}

const char * llama_ridge_unsupported_model(const struct llama_model * model) {
    static thread_local std::string reason;

    if (!arch_has_hook(model->arch)) {
        reason = format("architecture '%s' cannot be filled (supported: llama, qwen2, qwen3, qwen3moe, mistral3, minimax-m2, nanbeige)",
                model->arch_name().c_str());
        return reason.c_str();
    }
    if (model->hparams.n_pos_per_embd() != 1) {
        reason = format("architecture '%s' has positions in more than one dimension (M-RoPE), which cannot be filled",
                model->arch_name().c_str());
        return reason.c_str();
    }
    if (model->split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        return "tensors split over devices cannot be filled (--split-mode: expected none, layer or row, found tensor)";
    }
    if (model->hparams.n_layer() < 2) {
        reason = format("the model has %u layer, at least 2 are needed", model->hparams.n_layer());
        return reason.c_str();
    }

    return nullptr;
}

const char * llama_ridge_unsupported(const struct llama_context * ctx) {
    auto & lctx = const_cast<llama_context &>(*ctx);

    if (const char * reason = llama_ridge_unsupported_model(&lctx.get_model())) {
        return reason;
    }

    const auto * kv = llama_ridge_access::kv(lctx);
    if (kv == nullptr || llama_ridge_access::shared(*kv)) {
        return "the context's memory is not a plain KV cache (sliding window, recurrent, hybrid or shared memory cannot be filled)";
    }

    const auto & cparams = lctx.get_cparams();
    if (cparams.embeddings) {
        return "the context computes embeddings, which need every layer of every row";
    }
    if (!cparams.causal_attn) {
        return "the context uses non-causal attention";
    }
    if (cparams.training) {
        return "the context is in training";
    }

    return nullptr;
}

//
// the cache
//

int32_t llama_ridge_cache_layout(const struct llama_context * ctx, char * buf, size_t size) {
    const auto * kv = llama_ridge_access::kv(const_cast<llama_context &>(*ctx));
    const auto & c  = ctx->get_cparams();

    return snprintf(buf, size, "%s;rope=%g,%g;yarn=%u,%g,%g,%g,%g", kv ? llama_ridge_access::layout(*kv).c_str() : "",
            c.rope_freq_base, c.rope_freq_scale, c.n_ctx_orig_yarn, c.yarn_ext_factor, c.yarn_attn_factor, c.yarn_beta_fast, c.yarn_beta_slow);
}

int32_t llama_ridge_n_free(const struct llama_context * ctx, llama_seq_id seq_id, bool with_own) {
    auto * kv = llama_ridge_access::kv(const_cast<llama_context &>(*ctx));
    if (kv == nullptr || seq_id < 0 || (uint32_t) seq_id >= kv->get_n_seq_max()) {
        return 0;
    }

    const auto & cells = llama_ridge_access::cells(*kv, seq_id);
    int32_t n = llama_ridge_access::n_free(cells);
    for (uint32_t i = 0; with_own && i < cells.size(); ++i) {
        n += !cells.is_empty(i) && cells.seq_has(i, seq_id) && cells.seq_count(i) == 1;
    }

    return n;
}

int32_t llama_ridge_find_cells(llama_kv_cache & kv, llama_seq_id seq_id, llama_pos p0, llama_pos p1, std::vector<uint32_t> & idx) {
    const auto & cells = llama_ridge_access::cells(kv, seq_id);
    const int64_t n = std::max<int64_t>(0, (int64_t) p1 - p0);
    if (p0 < 0 || n > cells.size()) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "expected positions from 0 on and at most the %u of the cache, found %d to %d",
                cells.size(), p0, p1);
    }
    idx.resize(n);
    size_t n_found = 0;
    for (uint32_t c = 0; c < cells.size(); ++c) {
        if (!cells.is_empty(c) && cells.seq_has(c, seq_id) && cells.pos_get(c) >= p0 && cells.pos_get(c) < p1) {
            idx[cells.pos_get(c) - p0] = c;
            n_found++;
        }
    }
    if (n_found != idx.size()) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "positions %d to %d: expected %zu rows of sequence %d in the cache, found %zu",
                p0, p1, idx.size(), seq_id, n_found);
    }

    return LLAMA_RIDGE_OK;
}

// the same of a layer that may not be there
static int32_t find_cells(
        llama_kv_cache * kv, llama_seq_id seq_id, int32_t il, char what, llama_pos p0, llama_pos p1, std::vector<uint32_t> & idx) {
    if (kv == nullptr || (what != 'k' && what != 'v') || seq_id < 0 || (uint32_t) seq_id >= kv->get_n_seq_max()) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "expected a plain KV cache, 'k' or 'v' and one of its sequences, found %s, '%c' and sequence %d",
                kv ? "one" : "another memory", what, seq_id);
    }
    if (llama_ridge_access::row_size(*kv, il, what) == 0) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "layer %d has no KV cache", il);
    }

    return llama_ridge_find_cells(*kv, seq_id, p0, p1, idx);
}

static int64_t get_kv(
        llama_context * ctx, llama_seq_id seq_id, int32_t il, char what,
        llama_pos p0, llama_pos p1, float * dst, int64_t n_max) {
    llama_kv_cache * kv = llama_ridge_access::kv(*ctx);

    std::vector<uint32_t> idx;
    if (const int32_t status = find_cells(kv, seq_id, il, what, p0, p1, idx)) {
        return status;
    }

    const int64_t n = llama_ridge_access::row_size(*kv, il, what)*idx.size();
    if (dst) {
        if (n > n_max) {
            return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "expected room for %lld floats, found %lld", (long long) n, (long long) n_max);
        }
        ctx->synchronize();
        llama_ridge_access::prepare(*ctx); // pending shifts, and copies of sequences
        llama_ridge_access::read_rows(*kv, seq_id, il, what, idx, dst);
    }

    return n;
}

int64_t llama_ridge_get_kv(
        struct llama_context * ctx, llama_seq_id seq_id, int32_t il, char what,
        llama_pos p0, llama_pos p1, float * dst, int64_t n_max) {
    return llama_ridge_guard([&] { return get_kv(ctx, seq_id, il, what, p0, p1, dst, n_max); });
}

static int32_t copy_kv(
        llama_context * ctx, llama_seq_id seq_src, llama_seq_id seq_dst, int32_t il, char what,
        llama_pos p0, llama_pos p1) {
    llama_kv_cache * kv = llama_ridge_access::kv(*ctx);

    std::vector<uint32_t> src;
    std::vector<uint32_t> dst;
    for (auto [seq_id, idx] : { std::make_pair(seq_src, &src), std::make_pair(seq_dst, &dst) }) {
        if (const int32_t status = find_cells(kv, seq_id, il, what, p0, p1, *idx)) {
            return status;
        }
    }

    const auto & cells = llama_ridge_access::cells(*kv, seq_dst);
    for (uint32_t c : dst) {
        if (cells.seq_count(c) != 1) {
            return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "expected cells of sequence %d alone, found position %d shared by %d sequences",
                    seq_dst, cells.pos_get(c), cells.seq_count(c));
        }
    }
    if (what == 'v' && !llama_ridge_access::copies_v(*kv)) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_UNSUPPORTED, "expected values stored in rows (flash attention), found them transposed");
    }

    ctx->synchronize();
    llama_ridge_access::prepare(*ctx); // a pending copy of the sequence would undo this one
    llama_ridge_access::copy_rows(*kv, seq_src, seq_dst, il, what, src, dst);

    return LLAMA_RIDGE_OK;
}

int32_t llama_ridge_copy_kv(
        struct llama_context * ctx, llama_seq_id seq_src, llama_seq_id seq_dst, int32_t il, char what,
        llama_pos p0, llama_pos p1) {
    return llama_ridge_guard([&] { return copy_kv(ctx, seq_src, seq_dst, il, what, p0, p1); });
}

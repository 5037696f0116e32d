// Access to the KV cache and to the private parts of upstream's classes.

#include "llama-ridge-impl.h"

#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <typeinfo>

// no position is negative, and only models with 2D positions use the field
static constexpr llama_pos RIDGE_NOFILL_MARK = -1;

bool llama_ridge_nofill_get(const llama_kv_cells & cells, uint32_t i) {
    return !cells.is_empty(i) && cells.ext_get(i).x == RIDGE_NOFILL_MARK;
}

void llama_ridge_nofill_set(llama_kv_cells & cells, uint32_t i) {
    llama_kv_cell_ext ext = cells.ext_get(i);
    ext.x = RIDGE_NOFILL_MARK;
    cells.ext_set(i, ext);
}

//
// llama_ridge_kv_context
//

llama_ridge_kv_context::llama_ridge_kv_context(
        llama_kv_cache * kv, llama_kv_cache::slot_info sinfo, llama_ubatch ubatch, llama_ridge_pass pass)
    : llama_kv_cache_context(kv, slot_info_vec_t { std::move(sinfo) }, std::vector<llama_ubatch> { std::move(ubatch) }),
      pass(std::move(pass)) {
}

bool llama_ridge_kv_context::apply() {
    if (pass.type != LLAMA_RIDGE_PASS_UPPER) {
        return llama_kv_cache_context::apply();
    }

    llama_ridge_access::set_n_kv(*this, pass.n_kv);

    return true;
}

//
// llama_ridge_access
//

llama_kv_cache * llama_ridge_access::kv(llama_context & ctx) {
    llama_memory_i * mem = ctx.memory.get();

    // exactly this class: one that builds on it keeps more than K and V
    return mem && typeid(*mem) == typeid(llama_kv_cache) ? static_cast<llama_kv_cache *>(mem) : nullptr;
}

llama_kv_cells & llama_ridge_access::cells(llama_kv_cache & kv, llama_seq_id seq_id) {
    return kv.v_cells[kv.seq_to_stream[seq_id]];
}

bool llama_ridge_access::shared(const llama_kv_cache & kv) {
    return kv.other != nullptr;
}

bool llama_ridge_access::has_lora(const llama_context & ctx) {
    return ctx.loras && !ctx.loras->empty();
}

bool llama_ridge_access::has_cvec(const llama_context & ctx) {
    for (uint32_t il = 0; ctx.cvec && il < ctx.model.hparams.n_layer(); ++il) {
        if (ctx.cvec->tensor_for(il)) {
            return true;
        }
    }

    return false;
}

uint32_t llama_ridge_access::n_free(const llama_kv_cells & cells) {
    return cells.size() - cells.get_used();
}

std::string llama_ridge_access::layout(const llama_kv_cache & kv) {
    const auto & layer = kv.layers[0];

    return format("k=%s;v=%s;v_trans=%d;rotated=%d,%d;layers=%zu;streams=%u", ggml_type_name(layer.k->type),
            layer.v ? ggml_type_name(layer.v->type) : "none", kv.v_trans, kv.attn_rot_k, kv.attn_rot_v, kv.layers.size(), kv.n_stream);
}

void llama_ridge_access::set_n_kv(llama_kv_cache_context & mctx, uint32_t n_kv) {
    mctx.n_kv = n_kv;
}

void llama_ridge_access::mask_nofill(const llama_kv_cache_context & mctx, const llama_ubatch & ubatch, ggml_tensor * mask) {
    GGML_ASSERT(ggml_backend_buffer_is_host(mask->buffer));

    const llama_kv_cache & kv = *mctx.kv;
    const int64_t n_kv = mask->ne[0];

    std::vector<std::vector<uint32_t>> marked(kv.n_stream);
    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        for (uint32_t j = 0; j < n_kv; ++j) {
            if (llama_ridge_nofill_get(kv.v_cells[s], j)) {
                marked[s].push_back(j);
            }
        }
    }

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        for (uint32_t j : marked[kv.seq_to_stream[ubatch.seq_id[i][0]]]) {
            if (mask->type == GGML_TYPE_F16) {
                ((ggml_fp16_t *) mask->data)[i*n_kv + j] = ggml_fp32_to_fp16(-INFINITY);
            } else {
                ((float       *) mask->data)[i*n_kv + j] = -INFINITY;
            }
        }
    }
}

void llama_ridge_access::prepare(llama_context & ctx) {
    ctx.sched_reserve();
    ctx.memory_update(false);
}

ggml_status llama_ridge_access::compute(llama_context & ctx, const llama_ubatch & ubatch, llama_memory_context_i & mctx) {
    // the outputs of the last decode stay valid, and adapters that were set for it do not leak into this prompt
    struct own_state {
        llama_context & ctx;
        uint32_t n_outputs;
        std::unique_ptr<llama_adapter_loras> loras;

        own_state(llama_context & ctx) : ctx(ctx), n_outputs(ctx.n_outputs), loras(std::make_unique<llama_adapter_loras>()) {
            std::swap(ctx.loras, loras);
            ctx.n_outputs = 0;
            // neither graph is the other's: a graph built by decode() looks reusable for this ubatch, and the reverse
            ctx.gf_res_prev_active = nullptr;
        }
        ~own_state() {
            std::swap(ctx.loras, loras);
            ctx.n_outputs = n_outputs;
            ctx.gf_res_prev_active = nullptr;
        }
    } state(ctx);

    if (ctx.t_compute_start_us == 0) {
        ctx.t_compute_start_us = ggml_time_us();
    }

    ggml_status status;
    ctx.process_ubatch(ubatch, LLM_GRAPH_TYPE_DEFAULT, &mctx, status);
    ctx.synchronize();

    return status;
}

void llama_ridge_access::set_nofill(llama_context & ctx, int32_t split) {
    if (ctx.cparams.ridge_nofill != split) {
        ctx.cparams.ridge_nofill = split;
        ctx.gf_res_prev_active = nullptr; // a second mask comes or goes
    }
}

int64_t llama_ridge_access::row_size(const llama_kv_cache & kv, int32_t il, char what) {
    if (kv.map_layer_ids.find(il) == kv.map_layer_ids.end()) {
        return 0;
    }

    return what == 'k' ? kv.hparams.n_embd_k_gqa(il) : kv.hparams.n_embd_v_gqa(il);
}

// the cache holds H x for each block of n_rot values, and H H = I (llama-kv-cache.cpp)
static void derotate(const std::vector<float> & h, int64_t n_rot, float * row, int64_t n) {
    std::vector<float> tmp(n_rot);

    for (int64_t b = 0; b < n; b += n_rot) {
        for (int64_t i = 0; i < n_rot; ++i) {
            double sum = 0.0;
            for (int64_t j = 0; j < n_rot; ++j) {
                sum += (double) h[i*n_rot + j] * row[b + j];
            }
            tmp[i] = sum;
        }
        std::copy(tmp.begin(), tmp.end(), row + b);
    }
}

static int64_t k_rot_size(int64_t n_embd_head) {
    int64_t n_rot = 64;
    while (n_embd_head % (2*n_rot) == 0) {
        n_rot *= 2;
    }
    return n_rot;
}

void llama_ridge_access::read_rows(
        const llama_kv_cache & kv, llama_seq_id seq_id, int32_t il, char what,
        const std::vector<uint32_t> & cells, float * dst) {
    const auto &    layer   = kv.layers[kv.map_layer_ids.at(il)];
    const uint32_t  stream  = kv.seq_to_stream[seq_id];
    const int64_t   n       = row_size(kv, il, what);
    const int64_t   kv_size = kv.get_size();

    ggml_tensor * t = what == 'k' ? layer.k : layer.v;

    const auto to_float = [&](const void * src, float * out, int64_t count) {
        if (t->type == GGML_TYPE_F32) {
            std::copy_n((const float *) src, count, out);
        } else {
            ggml_get_type_traits(t->type)->to_float(src, out, count);
        }
    };

    const bool    trans = what == 'v' && kv.v_trans;
    const bool    rot   = what == 'k' ? kv.attn_rot_k : kv.attn_rot_v;
    const int64_t n_rot = what == 'k' ? k_rot_size(kv.n_embd_head_k_all) : 64;

    std::vector<uint8_t> buf(ggml_row_size(t->type, trans ? kv_size : t->ne[0]));

    for (size_t r = 0; r < cells.size() && !trans; ++r) {
        ggml_backend_tensor_get(t, buf.data(), (stream*kv_size + cells[r])*t->nb[1], buf.size());
        to_float(buf.data(), dst + r*n, n);
    }

    // transposed: one value of all cells after the other
    std::vector<float> col(trans ? kv_size : 0);
    for (int64_t j = 0; j < n && trans; ++j) {
        ggml_backend_tensor_get(t, buf.data(), ggml_row_size(t->type, (stream*t->ne[0] + j)*kv_size), buf.size());
        to_float(buf.data(), col.data(), kv_size);
        for (size_t r = 0; r < cells.size(); ++r) {
            dst[r*n + j] = col[cells[r]];
        }
    }

    for (size_t r = 0; r < cells.size() && rot; ++r) {
        derotate(kv.attn_rot_hadamard.at(n_rot), n_rot, dst + r*n, n);
    }
}

bool llama_ridge_access::copies_v(const llama_kv_cache & kv) {
    return !kv.v_trans;
}

void llama_ridge_access::copy_rows(
        const llama_kv_cache & kv, llama_seq_id seq_src, llama_seq_id seq_dst, int32_t il, char what,
        const std::vector<uint32_t> & src, const std::vector<uint32_t> & dst) {
    const auto & layer = kv.layers[kv.map_layer_ids.at(il)];
    ggml_tensor * t = what == 'k' ? layer.k : layer.v;

    std::vector<uint8_t> row(ggml_row_size(t->type, t->ne[0]));

    const auto offset = [&](llama_seq_id seq_id, uint32_t cell) {
        return ((size_t) kv.seq_to_stream[seq_id]*kv.get_size() + cell)*t->nb[1];
    };
    for (size_t r = 0; r < src.size(); ++r) {
        ggml_backend_tensor_get(t, row.data(), offset(seq_src, src[r]), row.size());
        ggml_backend_tensor_set(t, row.data(), offset(seq_dst, dst[r]), row.size());
    }
}

// Rows of one model's cache from those of another's, as a resumable object (arXiv 2608.03893):
//   K_target = R_target(W_k [R_source^-1(K_source) of the chosen layers] + b_k),   V_target = W_v [V_source ...] + b_v
// A step takes one ubatch of rows through one graph of ggml ops on the target's backends. It computes into free cells, which
// become rows of the sequence when the graph is done.

#include "llama-ridge-impl.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>

struct llama_ridge_transfer : llama_ridge_rows {
    llama_context * ctx_src = nullptr;
    llama_seq_id    seq_src = -1;

    const llama_ridge_mapper * mapper = nullptr;

    llama_pos p1     = 0;
    int32_t   n_step = 0;
    bool      failed = false;

    ggml_backend_sched_ptr sched;

    llama_ridge_transfer_stats stats = {};

    llama_pos next() const { return pos0 + cell.size(); }
    bool      done() const { return next() >= p1; }
};

namespace {

llama_kv_cache & kv_of(llama_context * ctx) {
    return *llama_ridge_access::kv(*ctx);
}

//
// graph
//

// All rows of K or V that a step reads, heads of all layers of the source side by side.
struct source_part {
    explicit source_part(char what) : what(what) {}

    const char what;

    int64_t head = 0;           // size of one

    std::vector<int32_t> first; // of each layer and at the end: its first head

    ggml_tensor * raw = nullptr; // as they lie in the cache
    ggml_tensor * rot = nullptr; // Hadamard matrix of a quantised cache
    ggml_tensor * x   = nullptr; // F32 [head, heads, n]; with the row before, its heads behind those of the row itself

    int32_t n_heads() const { return first.back(); }
};

// Which heads a map reads: an input, the same for every row.
struct map_input {
    const llama_ridge_mapper::map * map;
    const source_part *             part;
    ggml_tensor *                   heads; // I32 [heads, n]
};

// One step and its graph.
struct transfer_step {
    const llama_ridge_transfer & tr;

    llama_pos pos; // of the first row
    int32_t   n;

    std::vector<uint32_t> cells; // of the source: with the row before in front of the others, where it is a feature and there is one

    ggml_context_ptr ctx;
    ggml_cgraph *    gf = nullptr;

    source_part k = source_part('k');
    source_part v = source_part('v');

    std::vector<map_input> maps;

    ggml_tensor * pos_src   = nullptr;
    ggml_tensor * pos_dst   = nullptr;
    ggml_tensor * fac_src   = nullptr;
    ggml_tensor * fac_dst   = nullptr;
    ggml_tensor * k_rot_dst = nullptr;
    ggml_tensor * v_rot_dst = nullptr;
    ggml_tensor * k_idxs    = nullptr;
    ggml_tensor * v_idxs    = nullptr;

    transfer_step(const llama_ridge_transfer & tr, llama_pos pos, int32_t n) : tr(tr), pos(pos), n(n) {}

    llama_pos pos_read() const { return pos - tr.mapper->previous; } // -1: nothing is before the first row
    int32_t   n_read()   const { return n   + tr.mapper->previous; }
};

ggml_tensor * new_input(transfer_step & st, ggml_type type, int64_t ne0, int64_t ne1 = 1) {
    ggml_tensor * t = ggml_new_tensor_2d(st.ctx.get(), type, ne0, ne1);
    ggml_set_input(t);
    return t;
}

// x [head, heads, n]. Backwards it turns by the negative angles, and divides by the gain.
ggml_tensor * turn(transfer_step & st, ggml_tensor * x, ggml_tensor * pos, ggml_tensor * factors, const llama_ridge_rotation & r, bool backwards) {
    if (r.n_rot == 0) {
        return x;
    }
    float attn_factor = r.attn_factor;
    if (backwards) {
        const float gain = attn_factor*(r.ext_factor != 0.0f ? 1.0f + 0.1f*logf(1.0f/r.freq_scale) : 1.0f);
        attn_factor /= gain*gain;
    }
    return ggml_rope_ext(st.ctx.get(), x, pos, factors, r.n_rot, r.type, r.n_ctx_orig,
            r.freq_base, r.freq_scale, r.ext_factor, attn_factor, r.beta_fast, r.beta_slow);
}

// rows as the source's model computed them, keys without rotation
void build_source(transfer_step & st, source_part & part) {
    ggml_context * ctx0 = st.ctx.get();
    const auto & mapper = *st.tr.mapper;
    const auto & kv     = kv_of(st.tr.ctx_src);
    const bool   is_k   = part.what == 'k';

    part.head = is_k ? mapper.k_head : mapper.v_head;
    part.first.push_back(0);
    for (int32_t n_head : mapper.n_head_source) {
        part.first.push_back(part.n_heads() + n_head);
    }

    part.raw = new_input(st, llama_ridge_access::type_of(kv, 0, part.what), part.head*part.n_heads(), st.n_read());
    part.rot = is_k ? kv.build_input_k_rot(ctx0) : kv.build_input_v_rot(ctx0);

    ggml_tensor * x = part.raw->type == GGML_TYPE_F32 ? part.raw : ggml_cast(ctx0, part.raw, GGML_TYPE_F32);
    if (part.rot) {
        x = llama_mul_mat_hadamard(ctx0, x, part.rot);
    }
    x = ggml_reshape_3d(ctx0, x, part.head, part.n_heads(), st.n_read());
    if (is_k) {
        x = turn(st, x, st.pos_src, st.fac_src, mapper.rotation[GGML_RIDGE_SOURCE], /*backwards =*/ true);
    }
    if (mapper.previous) {
        const auto rows = [&](int64_t first) {
            return ggml_view_3d(ctx0, x, x->ne[0], x->ne[1], st.n, x->nb[1], x->nb[2], first*x->nb[2]);
        };
        x = ggml_concat(ctx0, rows(1), rows(0), 1);
    }
    part.x = x;
}

ggml_tensor * predict(transfer_step & st, const llama_ridge_mapper::map & map, const source_part & part) {
    ggml_context * ctx0 = st.ctx.get();

    int64_t n_heads = 0;
    for (uint32_t il : map.sources) {
        n_heads += part.first[il + 1] - part.first[il];
    }
    n_heads *= 1 + st.tr.mapper->previous;

    ggml_tensor * heads = new_input(st, GGML_TYPE_I32, n_heads, st.n);
    st.maps.push_back({ &map, &part, heads });

    ggml_tensor * x = ggml_get_rows(ctx0, part.x, heads);
    x = ggml_reshape_2d(ctx0, x, part.head*n_heads, st.n);

    return ggml_add(ctx0, ggml_mul_mat(ctx0, map.w, x), map.b);
}

// most nodes and leaves of the graph of a step
size_t n_nodes_max(const llama_ridge_mapper & mapper) {
    return 64 + 16*(mapper.k.size() + mapper.v.size());
}

void build_graph(transfer_step & st, const llama_kv_cache::slot_info & sinfo, const llama_ubatch & ubatch) {
    const auto & mapper = *st.tr.mapper;
    const auto & hp     = st.tr.ctx->get_model().hparams;
    const auto & kv     = kv_of(st.tr.ctx);
    const size_t n_max  = n_nodes_max(mapper);

    const ggml_init_params params = { 2*n_max*ggml_tensor_overhead() + ggml_graph_overhead_custom(n_max, false), nullptr, true };
    st.ctx.reset(ggml_init(params));
    st.gf = ggml_new_graph_custom(st.ctx.get(), n_max, false);

    ggml_context * ctx0 = st.ctx.get();

    const auto new_factors = [&](const llama_ridge_rotation & r) {
        return r.factors.empty() ? nullptr : new_input(st, GGML_TYPE_F32, r.factors.size());
    };
    st.pos_src   = new_input(st, GGML_TYPE_I32, st.n_read());
    st.pos_dst   = new_input(st, GGML_TYPE_I32, st.n);
    st.fac_src   = new_factors(mapper.rotation[GGML_RIDGE_SOURCE]);
    st.fac_dst   = new_factors(mapper.rotation[GGML_RIDGE_TARGET]);
    st.k_rot_dst = kv.build_input_k_rot(ctx0);
    st.v_rot_dst = kv.build_input_v_rot(ctx0);
    st.k_idxs    = kv.build_input_k_idxs(ctx0, ubatch);
    st.v_idxs    = kv.build_input_v_idxs(ctx0, ubatch);

    build_source(st, st.k);
    build_source(st, st.v);

    for (int32_t il = 0; il < (int32_t) mapper.k.size(); ++il) {
        ggml_tensor * k = predict(st, mapper.k[il], st.k);
        ggml_tensor * v = predict(st, mapper.v[il], st.v);

        k = ggml_reshape_3d(ctx0, k, hp.n_embd_head_k(il), hp.n_head_kv(il), st.n);
        v = ggml_reshape_3d(ctx0, v, hp.n_embd_head_v(il), hp.n_head_kv(il), st.n);
        k = turn(st, k, st.pos_dst, st.fac_dst, mapper.rotation[GGML_RIDGE_TARGET], /*backwards =*/ false);
        if (st.k_rot_dst) {
            k = llama_mul_mat_hadamard(ctx0, k, st.k_rot_dst);
        }
        if (st.v_rot_dst) {
            v = llama_mul_mat_hadamard(ctx0, v, st.v_rot_dst);
        }

        ggml_build_forward_expand(st.gf, kv.cpy_k(ctx0, k, st.k_idxs, il, sinfo));
        ggml_build_forward_expand(st.gf, kv.cpy_v(ctx0, v, st.v_idxs, il, sinfo));
    }
}

//
// inputs
//

// t may be missing, or of no use to the graph
template<typename T>
void set_input(ggml_tensor * t, const std::vector<T> & values) {
    if (t && t->buffer) {
        ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
    }
}

// rows of all layers, side by side; 0 for the row before position 0
void set_raw(const transfer_step & st, const source_part & part) {
    const auto & kv = kv_of(st.tr.ctx_src);

    const size_t row_size = part.raw->nb[1];
    const size_t n_before = st.n_read() - st.cells.size();

    std::vector<uint8_t> rows(ggml_nbytes(part.raw), 0);
    std::vector<uint8_t> layer;
    for (size_t il = 0; il + 1 < part.first.size(); ++il) {
        const size_t width = ggml_row_size(part.raw->type, part.head*(part.first[il + 1] - part.first[il]));
        const size_t begin = ggml_row_size(part.raw->type, part.head*part.first[il]);

        layer.resize(width*st.cells.size());
        llama_ridge_access::raw_rows(kv, st.tr.seq_src, il, part.what, st.cells, layer.data());
        for (size_t r = 0; r < st.cells.size(); ++r) {
            std::copy_n(layer.data() + r*width, width, rows.data() + (n_before + r)*row_size + begin);
        }
    }
    set_input(part.raw, rows);
}

void set_heads(const transfer_step & st, const map_input & in) {
    std::vector<int32_t> of_row;
    for (int32_t before = 0; before <= (int32_t) st.tr.mapper->previous; ++before) {
        for (uint32_t il : in.map->sources) {
            for (int32_t h = in.part->first[il]; h < in.part->first[il + 1]; ++h) {
                of_row.push_back(before*in.part->n_heads() + h);
            }
        }
    }

    std::vector<int32_t> heads;
    for (int32_t i = 0; i < st.n; ++i) {
        heads.insert(heads.end(), of_row.begin(), of_row.end());
    }
    set_input(in.heads, heads);
}

void set_inputs(const transfer_step & st, const llama_kv_cache::slot_info & sinfo, const llama_ubatch & ubatch) {
    const auto & mapper = *st.tr.mapper;
    const auto & kv_src = kv_of(st.tr.ctx_src);
    const auto & kv_dst = kv_of(st.tr.ctx);

    set_raw(st, st.k);
    set_raw(st, st.v);
    for (const auto & in : st.maps) {
        set_heads(st, in);
    }

    const auto set_pos = [](ggml_tensor * t, llama_pos first, int32_t sign) {
        std::vector<int32_t> pos(t->ne[0]);
        for (size_t i = 0; i < pos.size(); ++i) {
            pos[i] = sign*(first + (int32_t) i);
        }
        set_input(t, pos);
    };
    set_pos(st.pos_src, st.pos_read(), -1);
    set_pos(st.pos_dst, st.pos, 1);

    set_input(st.fac_src, mapper.rotation[GGML_RIDGE_SOURCE].factors);
    set_input(st.fac_dst, mapper.rotation[GGML_RIDGE_TARGET].factors);

    if (st.k.rot)     { kv_src.set_input_k_rot(st.k.rot); }
    if (st.v.rot)     { kv_src.set_input_v_rot(st.v.rot); }
    if (st.k_rot_dst) { kv_dst.set_input_k_rot(st.k_rot_dst); }
    if (st.v_rot_dst) { kv_dst.set_input_v_rot(st.v_rot_dst); }

    kv_dst.set_input_k_idxs(st.k_idxs, &ubatch, sinfo);
    kv_dst.set_input_v_idxs(st.v_idxs, &ubatch, sinfo);
}

// bytes that a step cannot do without
int64_t bytes_of(const transfer_step & st) {
    int64_t res = st.tr.mapper->placed.size() + ggml_nbytes(st.k.raw) + ggml_nbytes(st.v.raw);

    const auto & kv = kv_of(st.tr.ctx);
    for (int32_t il = 0; il < (int32_t) st.tr.mapper->k.size(); ++il) {
        for (char what : { 'k', 'v' }) {
            res += st.n*ggml_row_size(llama_ridge_access::type_of(kv, il, what), llama_ridge_access::row_size(kv, il, what));
        }
    }
    return res;
}

//
// checks
//

int32_t check_context(llama_context & ctx, const char * role, llama_seq_id seq_id) {
    if (const char * reason = llama_ridge_unsupported(&ctx)) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_UNSUPPORTED, "%s: %s", role, reason);
    }
    if (llama_ridge_access::has_lora(ctx) || llama_ridge_access::has_cvec(ctx)) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_UNSUPPORTED, "%s: a LoRA or control vector is active, and the mapper was fitted without it", role);
    }
    if (seq_id < 0 || (uint32_t) seq_id >= kv_of(&ctx).get_n_seq_max()) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "%s: expected a sequence from 0 to %u, found %d", role, kv_of(&ctx).get_n_seq_max() - 1, seq_id);
    }
    return LLAMA_RIDGE_OK;
}

// parameters of a context can turn its keys in another way than the model's own
int32_t check_rotation(const llama_context & ctx, const llama_ridge_rotation & r, const char * role) {
    const auto & c = ctx.get_cparams();

    const struct { const char * name; double expected; double found; } fields[] = {
        { "rope-freq-base",   r.freq_base,   c.rope_freq_base   },
        { "rope-freq-scale",  r.freq_scale,  c.rope_freq_scale  },
        { "yarn-ext-factor",  r.ext_factor,  c.yarn_ext_factor  },
        { "yarn-attn-factor", r.attn_factor, c.yarn_attn_factor },
        { "yarn-beta-fast",   r.beta_fast,   c.yarn_beta_fast   },
        { "yarn-beta-slow",   r.beta_slow,   c.yarn_beta_slow   },
        { "yarn-orig-ctx",    (double) r.n_ctx_orig, (double) c.n_ctx_orig_yarn },
    };
    for (const auto & f : fields) {
        if (std::fabs(f.expected - f.found) > 1e-5*std::max(std::fabs(f.expected), std::fabs(f.found))) {
            return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "%s: --%s: expected %g, with which the mapper was fitted, found %g",
                    role, f.name, f.expected, f.found);
        }
    }
    return LLAMA_RIDGE_OK;
}

int32_t check_models(const llama_context & src, const llama_context & dst, const llama_ridge_mapper & mapper) {
    if (mapper.target != &dst.get_model()) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "target: the mapper was loaded for another model than the context's");
    }
    if (mapper.source != &src.get_model()) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "source: the mapper was loaded for another model than the context's");
    }
    const int32_t status = check_rotation(src, mapper.rotation[GGML_RIDGE_SOURCE], "source");

    return status ? status : check_rotation(dst, mapper.rotation[GGML_RIDGE_TARGET], "target");
}

int32_t check_rows(const llama_ridge_transfer & tr) {
    auto & kv = kv_of(tr.ctx);

    if (kv.seq_pos_max(tr.seq_id) + 1 != tr.pos0) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "first position: expected %d, the end of the target's sequence %d, found %d",
                kv.seq_pos_max(tr.seq_id) + 1, tr.seq_id, tr.pos0);
    }
    if (tr.p1 <= tr.pos0) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "positions: expected at least one row, found %d to %d", tr.pos0, tr.p1);
    }
    if (tr.n_step < 0) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "step: expected 0 or more rows, found %d", tr.n_step);
    }

    std::vector<uint32_t> idx;
    const llama_pos first = tr.mapper->previous ? std::max(0, tr.pos0 - 1) : tr.pos0;
    if (const int32_t status = llama_ridge_find_cells(kv_of(tr.ctx_src), tr.seq_src, first, tr.p1, idx)) {
        return llama_ridge_fail(status, "source: %s", std::string(llama_ridge_last_error()).c_str());
    }

    const uint32_t n_free = llama_ridge_access::n_free(llama_ridge_access::cells(kv, tr.seq_id));
    if (n_free < (uint32_t) (tr.p1 - tr.pos0)) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_NO_SPACE, "target: expected %d free cells in the KV cache, found %u", tr.p1 - tr.pos0, n_free);
    }
    return LLAMA_RIDGE_OK;
}

//
// begin and step
//

int32_t transfer_begin(
        llama_context * ctx_src, llama_seq_id seq_src, llama_context * ctx_dst, llama_seq_id seq_dst,
        const llama_ridge_mapper * mapper, llama_pos p0, llama_pos p1, int32_t n_step, llama_ridge_transfer ** transfer) {
    int32_t status = check_context(*ctx_src, "source", seq_src);
    if (status == LLAMA_RIDGE_OK && !llama_ridge_access::copies_v(kv_of(ctx_src))) {
        status = llama_ridge_fail(LLAMA_RIDGE_ERR_UNSUPPORTED, "source: its values lie transposed, expected them in rows (flash attention)");
    }
    if (status == LLAMA_RIDGE_OK) {
        status = check_context(*ctx_dst, "target", seq_dst);
    }
    if (status == LLAMA_RIDGE_OK) {
        status = check_models(*ctx_src, *ctx_dst, *mapper);
    }
    if (status != LLAMA_RIDGE_OK) {
        return status;
    }

    auto tr = std::make_unique<llama_ridge_transfer>();
    tr->ctx     = ctx_dst;
    tr->seq_id  = seq_dst;
    tr->pos0    = p0;
    tr->ctx_src = ctx_src;
    tr->seq_src = seq_src;
    tr->mapper  = mapper;
    tr->p1      = p1;
    tr->n_step  = n_step;
    if ((status = check_rows(*tr))) {
        return status;
    }

    const int32_t n_ubatch = ctx_dst->n_ubatch();
    tr->n_step = n_step > 0 ? std::min(n_step, n_ubatch) : n_ubatch;
    tr->stats.n_rows = p1 - p0;
    tr->sched.reset(llama_ridge_access::new_sched(*ctx_dst, n_nodes_max(*mapper)));

    *transfer = tr.release();

    return LLAMA_RIDGE_OK;
}

int32_t fail_step(const llama_ridge_transfer & tr, int32_t status, const std::string & what) {
    return llama_ridge_fail(status, "after %zu of %d rows: %s; the rows of this transfer were removed from sequence %d",
            tr.cell.size(), tr.stats.n_rows, what.c_str(), tr.seq_id);
}

int32_t transfer_step_(llama_ridge_transfer & tr) {
    const int64_t t_start = ggml_time_us();

    tr.ctx_src->synchronize();
    llama_ridge_access::prepare(*tr.ctx_src);
    llama_ridge_access::prepare(*tr.ctx);

    auto & kv = kv_of(tr.ctx);
    if (!tr.intact()) {
        return fail_step(tr, LLAMA_RIDGE_ERR_STATE, format("expected the target's sequence %d to end with this transfer at position %d, found it "
                "changed meanwhile, with its end at %d", tr.seq_id, tr.next() - 1, kv.seq_pos_max(tr.seq_id)));
    }

    transfer_step st(tr, tr.next(), std::min(tr.n_step, tr.p1 - tr.next()));
    if (llama_ridge_find_cells(kv_of(tr.ctx_src), tr.seq_src, std::max(st.pos_read(), 0), st.pos + st.n, st.cells)) {
        return fail_step(tr, LLAMA_RIDGE_ERR_STATE, format("source: %s", llama_ridge_last_error()));
    }

    std::vector<llama_pos> pos(st.n);
    for (int32_t i = 0; i < st.n; ++i) {
        pos[i] = st.pos + i;
    }
    const llama_ubatch ubatch = tr.make_ubatch(std::vector<llama_token>(st.n), std::move(pos));

    const auto sinfos = kv.prepare({ ubatch });
    if (sinfos.empty()) {
        return fail_step(tr, LLAMA_RIDGE_ERR_NO_SPACE, format("expected room for %d rows in the KV cache, found none", st.n));
    }
    const auto & sinfo = sinfos[0];

    build_graph(st, sinfo, ubatch);
    ggml_backend_sched_reset(tr.sched.get());
    if (!ggml_backend_sched_alloc_graph(tr.sched.get(), st.gf)) {
        return fail_step(tr, LLAMA_RIDGE_ERR_NO_MEMORY, "could not allocate the buffers of its graph");
    }
    set_inputs(st, sinfo, ubatch);

    const ggml_status computed = ggml_backend_sched_graph_compute(tr.sched.get(), st.gf);
    if (computed != GGML_STATUS_SUCCESS) {
        return fail_step(tr, LLAMA_RIDGE_ERR_COMPUTE, format("the backend could not compute the graph (%s)", ggml_status_to_string(computed)));
    }

    kv.apply_ubatch(sinfo, ubatch);
    tr.cell.insert(tr.cell.end(), sinfo.idxs[0].begin(), sinfo.idxs[0].end());

    tr.stats.n_done   = tr.cell.size();
    tr.stats.n_bytes += bytes_of(st);
    tr.stats.t_us    += ggml_time_us() - t_start;

    return tr.done() ? LLAMA_RIDGE_DONE : LLAMA_RIDGE_OK;
}

} // namespace

int32_t llama_ridge_transfer_begin(
        struct llama_context            * ctx_src,
        llama_seq_id                      seq_src,
        struct llama_context            * ctx_dst,
        llama_seq_id                      seq_dst,
        const struct llama_ridge_mapper * mapper,
        llama_pos                         p0,
        llama_pos                         p1,
        int32_t                           n_step,
        struct llama_ridge_transfer    ** transfer) {
    *transfer = nullptr;

    return llama_ridge_guard([&] {
        return transfer_begin(ctx_src, seq_src, ctx_dst, seq_dst, mapper, p0, p1, n_step, transfer);
    });
}

int32_t llama_ridge_transfer_step(struct llama_ridge_transfer * tr) {
    if (tr->failed) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_STATE, "the transfer has failed or was cancelled");
    }
    if (tr->done()) {
        return LLAMA_RIDGE_DONE;
    }

    const int32_t status = llama_ridge_guard([&] { return transfer_step_(*tr); });
    if (status < 0) {
        llama_ridge_transfer_cancel(tr);
    }

    return status;
}

struct llama_ridge_transfer_stats llama_ridge_transfer_get_stats(const struct llama_ridge_transfer * tr) {
    return tr->stats;
}

void llama_ridge_transfer_cancel(struct llama_ridge_transfer * tr) {
    if (tr->done() || tr->failed) {
        return;
    }

    tr->remove();
    tr->stats.n_done = 0;
    tr->failed = true;
}

void llama_ridge_transfer_free(struct llama_ridge_transfer * tr) {
    if (tr) {
        llama_ridge_transfer_cancel(tr);
        delete tr;
    }
}

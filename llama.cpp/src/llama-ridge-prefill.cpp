// One prompt as a resumable object: two sweeps of at most one ubatch a step (arXiv 2611.09709, figure 5).

#include "llama-ridge-impl.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>

// one ubatch of a sweep: rows are indices into the tokens of the prefill, ascending
struct ridge_step {
    llama_ridge_pass_type type;
    std::vector<int32_t> rows;
};

struct llama_ridge_prefill : llama_ridge_rows {
    const llama_ridge_maps * maps = nullptr;

    llama_ridge_params params;

    std::vector<llama_token> tokens;

    int32_t n_done = 0; // rows for the steps, the others are left to decode()

    std::vector<bool>    exact;    // [n_done]
    std::vector<int32_t> slot;     // [n_done] row of x_split, -1 for filled rows
    std::vector<uint32_t> n_kv;    // [n_done] cells that the ubatch of this row attended over in sweep 1

    std::vector<ridge_step> steps;

    size_t i_step = 0;
    bool   failed = false;

    ggml_context_ptr        ctx_x;
    ggml_backend_buffer_ptr buf_x;
    ggml_tensor *           x_split = nullptr;
    ggml_tensor *           x_prev  = nullptr; // see llama_ridge_pass

    llama_ridge_prefill_stats stats = {};

    bool done() const { return i_step >= steps.size(); }
};

namespace {

// Where upstream cuts a prompt: batches of n_batch, ubatches of n_ubatch within them.
// Returns the first row of each ubatch and n_rows at the end.
std::vector<int32_t> stock_cuts(int32_t n_rows, int32_t n_batch, int32_t n_ubatch) {
    std::vector<int32_t> res;
    for (int32_t b = 0; b < n_rows; b += n_batch) {
        for (int32_t u = b; u < std::min(b + n_batch, n_rows); u += n_ubatch) {
            res.push_back(u);
        }
    }
    res.push_back(n_rows);
    return res;
}

bool needs_prev(const llama_ridge_prefill & pf) {
    return pf.params.mode == LLAMA_RIDGE_MODE_FILL && pf.maps->needs_prev();
}

void plan_rows(llama_ridge_prefill & pf, const int32_t * exact_rows, int32_t n_exact_rows) {
    const int32_t n_rows = pf.tokens.size();
    const int32_t n_sink = pf.params.n_sink;
    const int32_t prefix = std::max(0, n_rows - pf.params.n_tail);

    pf.exact.assign(pf.n_done, pf.params.mode == LLAMA_RIDGE_MODE_PLUMB);
    for (int32_t i = 0; i < pf.n_done; ++i) {
        if (pf.pos0 + i < n_sink || i >= prefix) {
            pf.exact[i] = true;
        }
    }
    // the row before lies in an earlier prompt, and its state was not kept
    if (needs_prev(pf) && pf.pos0 > 0 && pf.n_done > 0) {
        pf.exact[0] = true;
    }
    for (int32_t k = 0; k < n_exact_rows; ++k) {
        if (exact_rows[k] < pf.n_done) {
            pf.exact[exact_rows[k]] = true;
        }
    }

    pf.slot.assign(pf.n_done, -1);
    int32_t n_exact = 0;
    for (int32_t i = 0; i < pf.n_done; ++i) {
        if (pf.exact[i]) {
            pf.slot[i] = n_exact++;
        }
    }

    pf.stats.n_rows   = n_rows;
    pf.stats.n_done   = pf.n_done;
    pf.stats.n_filled = pf.n_done - n_exact;
    pf.stats.n_exact  = n_rows - pf.stats.n_filled;
}

void plan_steps(llama_ridge_prefill & pf, int32_t n_batch, int32_t n_step) {
    const bool fill = pf.params.mode == LLAMA_RIDGE_MODE_FILL || pf.params.mode == LLAMA_RIDGE_MODE_IDENTITY;

    const auto cuts = stock_cuts(pf.tokens.size(), n_batch, n_step);

    for (size_t c = 0; c + 1 < cuts.size() && cuts[c] < pf.n_done; ++c) {
        ridge_step step = { LLAMA_RIDGE_PASS_LOWER, {} };
        bool any_filled = false;
        for (int32_t i = cuts[c]; i < std::min(cuts[c + 1], pf.n_done); ++i) {
            step.rows.push_back(i);
            any_filled = any_filled || !pf.exact[i];
        }
        step.type = fill && any_filled ? LLAMA_RIDGE_PASS_FILL : LLAMA_RIDGE_PASS_LOWER;
        pf.steps.push_back(std::move(step));
    }

    const size_t n_lower = pf.steps.size();
    pf.stats.n_steps_lower = n_lower;

    if (pf.stats.n_filled == 0) {
        // the same shapes as upstream's own ubatches, hence the same bits
        for (size_t c = 0; c < n_lower; ++c) {
            pf.steps.push_back({ LLAMA_RIDGE_PASS_UPPER, pf.steps[c].rows });
        }
    } else {
        for (int32_t i = 0; i < pf.n_done; ++i) {
            if (!pf.exact[i]) {
                continue;
            }
            if (pf.steps.size() == n_lower || (int32_t) pf.steps.back().rows.size() == n_step) {
                pf.steps.push_back({ LLAMA_RIDGE_PASS_UPPER, {} });
            }
            pf.steps.back().rows.push_back(i);
        }
    }

    pf.stats.n_steps = pf.steps.size();
}

// x_S of the exact rows, on the device of the split layer, for as long as the prefill lives
bool alloc_x(llama_ridge_prefill & pf) {
    const auto & model = pf.ctx->get_model();

    const int64_t n_embd  = model.hparams.n_embd;
    const int64_t n_exact = std::count(pf.exact.begin(), pf.exact.end(), true);

    const ggml_init_params params = { 2*ggml_tensor_overhead(), nullptr, true };
    pf.ctx_x.reset(ggml_init(params));

    if (n_exact > 0) {
        pf.x_split = ggml_new_tensor_2d(pf.ctx_x.get(), GGML_TYPE_F32, n_embd, n_exact);
        ggml_set_name(pf.x_split, "ridge_x_split");
    }
    if (needs_prev(pf)) {
        pf.x_prev = ggml_new_tensor_2d(pf.ctx_x.get(), GGML_TYPE_F32, n_embd, 2);
        ggml_set_name(pf.x_prev, "ridge_x_prev");
    }
    if (!pf.x_split && !pf.x_prev) {
        return true;
    }

    auto * buft = ggml_backend_dev_buffer_type(model.dev_layer(pf.params.split));
    pf.buf_x.reset(ggml_backend_alloc_ctx_tensors_from_buft(pf.ctx_x.get(), buft));
    if (!pf.buf_x) {
        return false;
    }
    ggml_backend_buffer_clear(pf.buf_x.get(), 0); // no row comes before the first

    return true;
}

llama_ridge_pass make_pass(const llama_ridge_prefill & pf, const ridge_step & step) {
    const bool upper = step.type == LLAMA_RIDGE_PASS_UPPER;

    llama_ridge_pass pass = { step.type, pf.params.split, nullptr, pf.x_split, nullptr, 0, {}, {}, 0 };

    if (pf.params.mode == LLAMA_RIDGE_MODE_FILL && !upper) {
        pass.maps   = pf.maps;
        pass.x_prev = pf.x_prev;
        pass.i_prev = pf.i_step % 2;
    }

    for (size_t i = 0; i < step.rows.size(); ++i) {
        if (pf.slot[step.rows[i]] >= 0) {
            pass.rows.push_back(pf.slot[step.rows[i]]);
            if (!upper) {
                pass.src.push_back(i);
            }
        }
    }

    // what the ubatch that held the last row saw: the same size in both sweeps, whatever came into the cache since
    if (upper) {
        pass.n_kv = pf.n_kv[step.rows.back()];
    }

    return pass;
}

int32_t fail_step(llama_ridge_prefill & pf, int32_t status, const std::string & what) {
    llama_ridge_prefill_cancel(&pf);

    return llama_ridge_fail(status, "step %d of %d: %s; the rows of this prompt were removed from sequence %d",
            pf.stats.i_step + 1, pf.stats.n_steps, what.c_str(), pf.seq_id);
}

// whether the rows that are not in the cache yet, those of the end of the prompt included, find cells
bool has_space(const llama_ridge_prefill & pf, llama_kv_cache & kv, std::string & what) {
    const uint32_t n_free = llama_ridge_access::n_free(llama_ridge_access::cells(kv, pf.seq_id));
    const uint32_t n_need = pf.tokens.size() - pf.cell.size();

    if (n_free < n_need) {
        what = format("expected %u free cells in the KV cache for the rest of the prompt, found %u", n_need, n_free);
        return false;
    }
    return true;
}

// after sweep 1 of a nofill prefill: the upper layers hold nothing for its filled rows
void mark_nofill(llama_ridge_prefill & pf, llama_kv_cache & kv) {
    auto & cells = llama_ridge_access::cells(kv, pf.seq_id);
    for (int32_t i = 0; i < pf.n_done; ++i) {
        if (!pf.exact[i]) {
            llama_ridge_nofill_set(cells, pf.cell[i]);
        }
    }
    llama_ridge_access::set_nofill(*pf.ctx, pf.params.split);
}

bool any_nofill(llama_kv_cache & kv) {
    for (uint32_t s = 0; s < kv.get_n_seq_max(); ++s) {
        const auto & cells = llama_ridge_access::cells(kv, s);
        for (uint32_t i = 0; i < cells.size(); ++i) {
            if (llama_ridge_nofill_get(cells, i)) {
                return true;
            }
        }
    }
    return false;
}

// fills in defaults; 0 or an error
int32_t check_params(llama_context & ctx, const llama_ridge_maps * maps, llama_ridge_params & p) {
    const int32_t n_layer = ctx.get_model().hparams.n_layer();

    if (llama_ridge_mode_name(p.mode) == nullptr || p.mode == LLAMA_RIDGE_MODE_OFF || p.mode == LLAMA_RIDGE_MODE_TRANSFER) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "mode: expected plumb, identity, nofill or fill, found %d", p.mode);
    }
    if (p.mode == LLAMA_RIDGE_MODE_FILL && maps == nullptr) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "mode fill needs maps, found none");
    }
    if (maps && maps->model != &ctx.get_model()) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "the maps were loaded for another model than the context's");
    }
    if (p.split < 0 && maps) {
        p.split = maps->split;
    }
    if (p.split < 1 || p.split >= n_layer) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "split: expected a layer from 1 to %d, found %d", n_layer - 1, p.split);
    }
    if (p.mode == LLAMA_RIDGE_MODE_FILL && p.split != maps->split) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "split: the maps were fitted for layer %d, found %d", maps->split, p.split);
    }
    if (p.n_tail < 1) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "tail: expected at least 1 row, found %d", p.n_tail);
    }
    if (p.n_sink < 0) {
        p.n_sink = maps ? maps->n_sink : 4;
    }
    if (p.n_step < 0) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "step: expected 0 or more rows, found %d", p.n_step);
    }

    return LLAMA_RIDGE_OK;
}

int32_t check_rows(
        llama_context & ctx, llama_kv_cache & kv, llama_seq_id seq_id, llama_pos pos0,
        const llama_token * tokens, int32_t n_tokens, const int32_t * exact_rows, int32_t n_exact_rows) {
    if (seq_id < 0 || (uint32_t) seq_id >= kv.get_n_seq_max()) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "sequence: expected 0 to %u, found %d", kv.get_n_seq_max() - 1, seq_id);
    }
    if (kv.seq_pos_max(seq_id) + 1 != pos0) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "first position: expected %d, the end of sequence %d, found %d",
                kv.seq_pos_max(seq_id) + 1, seq_id, pos0);
    }
    if (n_tokens < 1) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "tokens: expected at least 1, found %d", n_tokens);
    }

    const int32_t n_vocab = ctx.get_model().vocab.n_tokens();
    for (int32_t i = 0; i < n_tokens; ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab) {
            return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT, "token %d: expected 0 to %d, found %d", i, n_vocab - 1, tokens[i]);
        }
    }
    for (int32_t k = 0; k < n_exact_rows; ++k) {
        if (exact_rows[k] < 0 || exact_rows[k] >= n_tokens || (k > 0 && exact_rows[k] <= exact_rows[k - 1])) {
            return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT,
                    "exact row %d: expected ascending indices from 0 to %d, found %d", k, n_tokens - 1, exact_rows[k]);
        }
    }

    return LLAMA_RIDGE_OK;
}

// the marks of an earlier nofill prompt may be gone by now; two splits cannot share one mask
int32_t check_nofill(llama_context & ctx, llama_kv_cache & kv, const llama_ridge_params & p) {
    const int32_t split = ctx.get_cparams().ridge_nofill;
    if (split < 0) {
        return LLAMA_RIDGE_OK;
    }
    if (!any_nofill(kv)) {
        llama_ridge_access::set_nofill(ctx, -1);
        return LLAMA_RIDGE_OK;
    }
    if (p.mode == LLAMA_RIDGE_MODE_NOFILL && p.split != split) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_ARGUMENT,
                "split: the cache holds rows of mode nofill at layer %d, found %d", split, p.split);
    }
    return LLAMA_RIDGE_OK;
}

} // namespace

static int32_t prefill_begin(
        llama_context          * ctx,
        const llama_ridge_maps * maps,
        llama_ridge_params       params,
        llama_seq_id             seq_id,
        llama_pos                pos0,
        const llama_token      * tokens,
        int32_t                  n_tokens,
        const int32_t          * exact_rows,
        int32_t                  n_exact_rows,
        llama_ridge_prefill   ** prefill) {
    if (const char * reason = llama_ridge_unsupported(ctx)) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_UNSUPPORTED, "%s", reason);
    }
    if (llama_ridge_access::has_lora(*ctx) || llama_ridge_access::has_cvec(*ctx)) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_UNSUPPORTED,
                "a LoRA or control vector is active, and the maps were fitted without it");
    }

    llama_kv_cache & kv = *llama_ridge_access::kv(*ctx);

    int32_t status = check_params(*ctx, maps, params);
    if (status == LLAMA_RIDGE_OK) {
        status = check_rows(*ctx, kv, seq_id, pos0, tokens, n_tokens, exact_rows, n_exact_rows);
    }
    if (status == LLAMA_RIDGE_OK) {
        status = check_nofill(*ctx, kv, params);
    }
    if (status != LLAMA_RIDGE_OK) {
        return status;
    }

    auto pf = std::make_unique<llama_ridge_prefill>();

    pf->ctx    = ctx;
    pf->maps   = maps;
    pf->params = params;
    pf->seq_id = seq_id;
    pf->pos0   = pos0;
    pf->tokens.assign(tokens, tokens + n_tokens);

    std::string what;
    if (!has_space(*pf, kv, what)) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_NO_SPACE, "%s", what.c_str());
    }

    const int32_t n_batch  = ctx->n_batch();
    const int32_t n_ubatch = ctx->n_ubatch();
    const int32_t n_step   = params.n_step > 0 ? std::min(params.n_step, n_ubatch) : n_ubatch;

    // the end of the prompt is upstream's: the ubatch in which it computes the last row, when filling the tail of it
    const auto cuts = stock_cuts(n_tokens, n_batch, n_ubatch);
    pf->n_done = cuts[cuts.size() - 2];
    if (params.mode != LLAMA_RIDGE_MODE_PLUMB) {
        pf->n_done = std::max(pf->n_done, n_tokens - params.n_tail);
    }

    plan_rows (*pf, exact_rows, n_exact_rows);
    plan_steps(*pf, n_batch, n_step);

    pf->n_kv.resize(pf->n_done);

    if (!alloc_x(*pf)) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_NO_MEMORY, "could not allocate %.1f MiB for the hidden states of the exact rows",
                std::count(pf->exact.begin(), pf->exact.end(), true)*4.0*ctx->get_model().hparams.n_embd/1024/1024);
    }

    *prefill = pf.release();

    return LLAMA_RIDGE_OK;
}

int32_t llama_ridge_prefill_begin(
        struct llama_context          * ctx,
        const struct llama_ridge_maps * maps,
        struct llama_ridge_params       params,
        llama_seq_id                    seq_id,
        llama_pos                       pos0,
        const llama_token             * tokens,
        int32_t                         n_tokens,
        const int32_t                 * exact_rows,
        int32_t                         n_exact_rows,
        struct llama_ridge_prefill   ** prefill) {
    *prefill = nullptr;

    return llama_ridge_guard([&] {
        return prefill_begin(ctx, maps, params, seq_id, pos0, tokens, n_tokens, exact_rows, n_exact_rows, prefill);
    });
}

// place the rows of a sweep 1 step; empty if the cache is full
static llama_kv_cache::slot_info place_lower(llama_kv_cache & kv, const llama_ubatch & ubatch) {
    const auto sinfos = kv.prepare({ ubatch });
    return sinfos.empty() ? llama_kv_cache::slot_info {} : sinfos[0];
}

static llama_kv_cache::slot_info place_upper(const llama_ridge_prefill & pf, const llama_kv_cache & kv, const std::vector<int32_t> & rows) {
    const uint32_t stream = kv.get_stream(pf.seq_id);

    llama_kv_cache::slot_info res = { stream, stream, { (llama_seq_id) stream }, { {} } };
    for (int32_t i : rows) {
        res.idxs[0].push_back(pf.cell[i]);
    }

    return res;
}

static int32_t prefill_step(llama_ridge_prefill * pf) {
    const int64_t t_start = ggml_time_us();

    llama_kv_cache & kv = *llama_ridge_access::kv(*pf->ctx);
    llama_ridge_access::prepare(*pf->ctx);

    if (!pf->intact()) {
        return fail_step(*pf, LLAMA_RIDGE_ERR_STATE, format("expected sequence %d to end with this prompt at position %d, found it changed "
                "meanwhile, with its end at %d", pf->seq_id, pf->pos0 + (llama_pos) pf->cell.size() - 1, kv.seq_pos_max(pf->seq_id)));
    }
    if (llama_ridge_access::has_cvec(*pf->ctx)) {
        return fail_step(*pf, LLAMA_RIDGE_ERR_STATE, "expected no control vector, found one that was set meanwhile");
    }
    std::string what;
    if (!has_space(*pf, kv, what)) {
        return fail_step(*pf, LLAMA_RIDGE_ERR_NO_SPACE, what);
    }

    const ridge_step & step = pf->steps[pf->i_step];
    const bool upper = step.type == LLAMA_RIDGE_PASS_UPPER;

    std::vector<llama_token> tokens;
    std::vector<llama_pos>   pos;
    for (int32_t i : step.rows) {
        tokens.push_back(pf->tokens[i]);
        pos   .push_back(pf->pos0 + i);
    }
    const llama_ubatch ubatch = pf->make_ubatch(std::move(tokens), std::move(pos));

    const auto sinfo = upper ? place_upper(*pf, kv, step.rows) : place_lower(kv, ubatch);
    if (sinfo.empty()) {
        return fail_step(*pf, LLAMA_RIDGE_ERR_NO_SPACE, format("expected room for %zu rows in the KV cache, found none", step.rows.size()));
    }
    if (!upper) { // before they are there: a step that fails takes them out again
        pf->cell.insert(pf->cell.end(), sinfo.idxs[0].begin(), sinfo.idxs[0].end());
    }

    llama_ridge_kv_context mctx(&kv, sinfo, ubatch, make_pass(*pf, step));

    const ggml_status computed = llama_ridge_access::compute(*pf->ctx, ubatch, mctx);
    if (computed != GGML_STATUS_SUCCESS) {
        return fail_step(*pf, computed == GGML_STATUS_ALLOC_FAILED ? LLAMA_RIDGE_ERR_NO_MEMORY : LLAMA_RIDGE_ERR_COMPUTE,
                format("the backend could not compute the graph (%s)", ggml_status_to_string(computed)));
    }

    if (!upper) {
        for (int32_t i : step.rows) {
            pf->n_kv[i] = mctx.get_n_kv();
        }
    }

    pf->i_step++;
    pf->stats.i_step = pf->i_step;
    (upper ? pf->stats.t_upper_us : pf->stats.t_lower_us) += ggml_time_us() - t_start;

    if ((int32_t) pf->i_step == pf->stats.n_steps_lower && pf->params.mode == LLAMA_RIDGE_MODE_NOFILL && pf->stats.n_filled > 0) {
        mark_nofill(*pf, kv);
    }

    return pf->done() ? LLAMA_RIDGE_DONE : LLAMA_RIDGE_OK;
}

int32_t llama_ridge_prefill_step(struct llama_ridge_prefill * pf) {
    if (pf->failed) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_STATE, "the prefill has failed or was cancelled");
    }
    if (pf->done()) {
        return LLAMA_RIDGE_DONE;
    }

    const int32_t status = llama_ridge_guard([&] { return prefill_step(pf); });
    if (status < 0) {
        llama_ridge_prefill_cancel(pf); // where an exception came before
    }

    return status;
}

int32_t llama_ridge_prefill_n_done(const struct llama_ridge_prefill * pf) {
    return pf->n_done;
}

int32_t llama_ridge_prefill_filled(const struct llama_ridge_prefill * pf, int32_t * rows, int32_t n_max) {
    int32_t n = 0;
    for (int32_t i = 0; i < pf->n_done; ++i) {
        if (!pf->exact[i]) {
            if (n < n_max) {
                rows[n] = i;
            }
            n++;
        }
    }
    return n;
}

struct llama_ridge_prefill_stats llama_ridge_prefill_get_stats(const struct llama_ridge_prefill * pf) {
    return pf->stats;
}

void llama_ridge_prefill_cancel(struct llama_ridge_prefill * pf) {
    if (pf->done() || pf->failed) {
        return;
    }

    pf->remove();
    pf->failed = true;
}

void llama_ridge_prefill_free(struct llama_ridge_prefill * pf) {
    if (pf) {
        llama_ridge_prefill_cancel(pf);
        delete pf;
    }
}

// Graph construction of RidgeFill: the hook at each layer's input, the pruning of what nobody needs, and the mask of
// the nofill mode. Everything is built from ggml ops, so that every backend runs it.

#include "llama-ridge-impl.h"

#include "llama-graph.h"
#include "llama-impl.h"

namespace {

// indices of the rows that are kept at the split, and what the maps of the layers above read
class llm_graph_input_ridge : public llm_graph_input_i {
public:
    llm_graph_input_ridge(const llama_ridge_pass & pass) : pass(pass) {}

    void set_input(const llama_ubatch * ubatch) override {
        GGML_UNUSED(ubatch);

        if (src) {
            ggml_backend_tensor_set(src, pass.src.data(), 0, ggml_nbytes(src));
        }
        if (rows) {
            ggml_backend_tensor_set(rows, pass.rows.data(), 0, ggml_nbytes(rows));
        }
        if (last) {
            const int32_t i_next = 1 - pass.i_prev;
            ggml_backend_tensor_set(last, &i_next, 0, ggml_nbytes(last));
        }
    }

    ggml_tensor * src  = nullptr; // I32 [n_keep]
    ggml_tensor * rows = nullptr; // I32 [n_keep]
    ggml_tensor * last = nullptr; // I32 [1]

    ggml_tensor * features = nullptr; // F32 [n_in, n_tokens], for maps that predict K and V

private:
    const llama_ridge_pass pass;
};

// the attention mask of the layers that do not see marked cells
class llm_graph_input_ridge_mask : public llm_graph_input_i {
public:
    llm_graph_input_ridge_mask(const llama_cparams & cparams, const llama_kv_cache_context * mctx)
        : cparams(cparams), mctx(mctx) {}

    void set_input(const llama_ubatch * ubatch) override {
        mctx->set_input_kq_mask(mask, ubatch, cparams.causal_attn);
        llama_ridge_access::mask_nofill(*mctx, *ubatch, mask);
    }

    bool can_reuse(const llm_graph_params & params) override {
        mctx = static_cast<const llama_kv_cache_context *>(params.mctx);

        const uint32_t n_stream = params.cparams.kv_unified ? 1 : params.ubatch.n_seqs_unq;

        return mask->ne[0] == mctx->get_n_kv() &&
               mask->ne[1] == params.ubatch.n_tokens/n_stream &&
               mask->ne[3] == n_stream;
    }

    ggml_tensor * mask = nullptr; // F16/F32, as the ordinary mask

private:
    const llama_cparams cparams;

    const llama_kv_cache_context * mctx;
};

template <typename T>
T * find_input(const llm_graph_result & res) {
    for (const auto & input : res.inputs) {
        if (auto * found = dynamic_cast<T *>(input.get())) {
            return found;
        }
    }
    return nullptr;
}

ggml_tensor * new_index(ggml_context * ctx, int64_t n, const char * name) {
    ggml_tensor * res = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n);
    ggml_set_input(res);
    ggml_set_name(res, name);
    return res;
}

// keep x_S of the ubatch's exact rows for the upper sweep
void build_store(ggml_context * ctx, ggml_cgraph * gf, const llama_ridge_pass & pass, llm_graph_input_ridge & inp, ggml_tensor * x) {
    if (pass.rows.empty()) {
        return;
    }

    inp.rows = new_index(ctx, pass.rows.size(), "ridge_rows");

    if ((int64_t) pass.src.size() < x->ne[1]) {
        inp.src = new_index(ctx, pass.src.size(), "ridge_src");
        x = ggml_get_rows(ctx, x, inp.src);
    }

    ggml_build_forward_expand(gf, ggml_set_rows(ctx, pass.x_split, x, inp.rows));
}

// What maps that predict K and V read: x_S over its root mean square, and for kv_prev the same of the row before.
ggml_tensor * build_features(ggml_context * ctx, ggml_cgraph * gf, const llama_ridge_pass & pass, llm_graph_input_ridge & inp, ggml_tensor * x, float eps) {
    const int64_t n = x->ne[1];

    x = ggml_rms_norm(ctx, x, eps);

    if (pass.x_prev == nullptr) {
        return x;
    }

    // the old state is read and the new one written in one graph that does not order the two: they lie apart
    ggml_tensor * first = ggml_view_2d(ctx, pass.x_prev, x->ne[0], 1, pass.x_prev->nb[1], pass.i_prev*pass.x_prev->nb[1]);
    ggml_tensor * prev  = n == 1 ? first : ggml_concat(ctx, first, ggml_view_2d(ctx, x, x->ne[0], n - 1, x->nb[1], 0), 1);
    ggml_tensor * last  = ggml_view_2d(ctx, x, x->ne[0], 1, x->nb[1], (n - 1)*x->nb[1]);

    inp.last = new_index(ctx, 1, "ridge_last");
    ggml_build_forward_expand(gf, ggml_set_rows(ctx, pass.x_prev, last, inp.last));

    return ggml_concat(ctx, x, prev, 0);
}

// What a map predicts of features x, arXiv 2611.09709 section 2.2: A x + b, where kind input_lr has A = I + up down.
ggml_tensor * build_map(ggml_context * ctx, const llama_ridge_maps::layer & map, ggml_tensor * x) {
    // a state that was not normalised may be out of the range of half precision
    const auto mul = [&](ggml_tensor * w, ggml_tensor * v) {
        ggml_tensor * res = ggml_mul_mat(ctx, w, v);
        ggml_prec_set_acc(res, GGML_PREC_F32);
        return res;
    };
    ggml_tensor * y = map.w ? mul(map.w, x) : ggml_add(ctx, mul(map.up, mul(map.down, x)), x);

    return ggml_add(ctx, y, map.b);
}

// rows of the map's output from `offset` on, in the shape of what they stand in for: [head, n_head, rows] or [n, rows]
ggml_tensor * view_like(ggml_context * ctx, ggml_tensor * kv, const ggml_tensor * like, int64_t offset) {
    const int64_t n_tokens = kv->ne[1];
    const int64_t n        = ggml_nelements(like)/n_tokens;

    if (like->ne[0] == n && like->ne[1] == n_tokens) {
        return ggml_cont(ctx, ggml_view_2d(ctx, kv, n, n_tokens, kv->nb[1], offset*kv->nb[0]));
    }

    return ggml_view_3d(ctx, kv, like->ne[0], like->ne[1], n_tokens, like->ne[0]*kv->nb[0], kv->nb[1], offset*kv->nb[0]);
}

} // namespace

ggml_tensor * llm_graph_context::build_layer_inp(ggml_tensor * inpL, int il) const {
    res->t_layer_inp[il] = inpL;

    const auto * mctx_ridge = dynamic_cast<const llama_ridge_kv_context *>(mctx);
    if (mctx_ridge == nullptr) {
        return inpL;
    }

    const auto & pass = mctx_ridge->get_pass();

    if (il < pass.split) {
        return inpL;
    }

    if (il == pass.split) {
        auto inp = std::make_unique<llm_graph_input_ridge>(pass);

        if (pass.type == LLAMA_RIDGE_PASS_UPPER) {
            // the lower layers ran in the first sweep: start over from what they left
            ggml_graph_clear(gf);

            inp->rows = new_index(ctx0, pass.rows.size(), "ridge_rows");
            inpL = ggml_get_rows(ctx0, pass.x_split, inp->rows);
        } else {
            ggml_build_forward_expand(gf, inpL); // marks the border, see build_ridge_finish()
            build_store(ctx0, gf, pass, *inp, inpL);

            if (pass.maps && pass.maps->predicts_kv()) {
                inp->features = build_features(ctx0, gf, pass, *inp, inpL, hparams.f_norm_rms_eps);
            }
        }

        res->add_input(std::move(inp)); // it is never reusable, so the graph is not either
    } else if (pass.type == LLAMA_RIDGE_PASS_FILL) {
        inpL = res->t_layer_inp[pass.split];

        if (pass.maps && !pass.maps->predicts_kv()) {
            inpL = build_map(ctx0, pass.maps->layers[il], inpL);
        }
    }

    cb(inpL, "ridge_inp", il);
    res->t_layer_inp[il] = inpL;

    return inpL;
}

// Maps of the kinds kv and kv_prev predict what the projections would have given; norms and RoPE stay the model's own.
void llm_graph_context::build_ridge_kv(ggml_tensor *& Kcur, ggml_tensor *& Vcur, int il) const {
    const auto * mctx_ridge = dynamic_cast<const llama_ridge_kv_context *>(mctx);
    if (mctx_ridge == nullptr) {
        return;
    }

    const auto & pass = mctx_ridge->get_pass();

    if (pass.type != LLAMA_RIDGE_PASS_FILL || il <= pass.split || !pass.maps || !pass.maps->predicts_kv()) {
        return;
    }

    ggml_tensor * kv = build_map(ctx0, pass.maps->layers[il], find_input<llm_graph_input_ridge>(*res)->features);
    cb(kv, "ridge_kv", il);

    Kcur = view_like(ctx0, kv, Kcur, 0);
    Vcur = view_like(ctx0, kv, Vcur, ggml_nelements(Kcur)/n_tokens);
}

// A pass exists for what it writes: cache rows and x_S. Keep those writes and what they need; queries, attention, FFN,
// experts and logits of the other layers vanish because nothing needs them, whatever the architecture.
void llm_graph_context::build_ridge_finish() const {
    const auto * mctx_ridge = dynamic_cast<const llama_ridge_kv_context *>(mctx);
    if (mctx_ridge == nullptr) {
        return;
    }

    const auto & pass = mctx_ridge->get_pass();

    std::vector<ggml_tensor *> roots;
    bool below_split = true;

    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        ggml_tensor * node = ggml_graph_node(gf, i);

        below_split = below_split && node != res->t_layer_inp[pass.split];

        // nodes without the flag belong to a branch that was not selected
        if (node->op != GGML_OP_SET_ROWS || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) {
            continue;
        }

        if (pass.type != LLAMA_RIDGE_PASS_LOWER || below_split || pass.is_write(node)) {
            roots.push_back(node);
        }
    }

    ggml_graph_clear(gf);

    // in the old order: layer l reads the cache after its own writes, and no edge of the graph says so
    for (ggml_tensor * root : roots) {
        ggml_build_forward_expand(gf, root);
    }

    // set_inputs() fills every input, so every input must be allocated
    for (ggml_tensor * t = ggml_get_first_tensor(ctx0); t != nullptr; t = ggml_get_next_tensor(ctx0, t)) {
        if (t->flags & GGML_TENSOR_FLAG_INPUT) {
            ggml_build_forward_expand(gf, t);
        }
    }
}

ggml_tensor * llm_graph_context::build_ridge_kq_mask(llm_graph_input_attn_kv * inp, int il) const {
    if (cparams.ridge_nofill < 0 || il < cparams.ridge_nofill) {
        return inp->get_kq_mask();
    }

    if (const auto * found = find_input<llm_graph_input_ridge_mask>(*res)) {
        return found->mask;
    }

    auto cur = std::make_unique<llm_graph_input_ridge_mask>(cparams, inp->mctx);

    cur->mask = ggml_dup_tensor(ctx0, inp->self_kq_mask);
    ggml_set_input(cur->mask);
    ggml_set_name(cur->mask, "ridge_kq_mask");

    return static_cast<llm_graph_input_ridge_mask *>(res->add_input(std::move(cur)))->mask;
}

#pragma once

// Internal structures of RidgeFill inside libllama. See llama-ridge.h for the terms.

#include "llama-ridge.h"

#include "llama-kv-cache.h"

#include "ggml-cpp.h"
#include "ggml-ridge.h"

#include <exception>
#include <map>
#include <new>
#include <string>
#include <vector>

struct llama_model;
struct llama_context;

// Tensors of ours on the devices of a model.
struct llama_ridge_placed {
    std::vector<ggml_context_ptr>        ctxs;
    std::vector<ggml_backend_buffer_ptr> bufs;

    size_t size() const;
};

// Decides where tensors of a sidecar lie: beside the layer that they belong to.
class llama_ridge_placer {
public:
    llama_ridge_placer(const llama_model & model, size_t n_tensors_max) : model(model), n_max(n_tensors_max) {}

    // The tensor to use in place of `host`, which has no data before upload(); nullptr for nullptr. Matrices lie where they are
    // multiplied by fastest.
    ggml_tensor * matrix(int32_t il, const ggml_tensor * host);
    ggml_tensor * vector(int32_t il, const ggml_tensor * host);

    // Allocate and fill. False with a message for llama_ridge_last_error() when there is no memory.
    bool upload(llama_ridge_placed & placed, const char * what);

private:
    struct alloc {
        std::vector<std::pair<ggml_tensor *, const ggml_tensor *>> tensors; // placed, host
        ggml_context_ptr ctx;

        size_t size() const;
    };

    ggml_tensor * place(ggml_backend_buffer_type_t buft, const ggml_tensor * host);

    const llama_model & model;
    const size_t        n_max;

    std::map<ggml_backend_buffer_type_t, alloc> allocs;
};

// What a sidecar is checked against.
struct llama_ridge_model_text {
    explicit llama_ridge_model_text(const llama_model & model);

    ggml_ridge_expect expect() const; // borrows the strings

    std::string architecture;
    std::string tokenizer; // sha256
    std::string hparams;
    int32_t     n_layer;
    int32_t     n_embd;
};

// A sidecar on the devices of its layers.
struct llama_ridge_maps {
    struct layer {
        // see ggml_ridge_sidecar_weight()
        ggml_tensor * w    = nullptr; // [n_in, n_out]; or, of kind input_lr,
        ggml_tensor * down = nullptr; // [n_in, rank]
        ggml_tensor * up   = nullptr; // [rank, n_out]
        ggml_tensor * b    = nullptr; // [n_out]
    };

    const llama_model * model = nullptr;

    int32_t split  = -1;
    int32_t n_tail = 0;
    int32_t n_sink = 0;

    std::string kind;
    std::string hash;

    bool predicts_kv() const { return kind == "kv" || kind == "kv_prev"; }
    bool needs_prev()  const { return kind == "kv_prev"; }

    std::vector<layer> layers; // [n_layer], set for il > split

    llama_ridge_placed placed;
};

// How a model turns its keys, as ggml_rope_ext() takes it.
struct llama_ridge_rotation {
    int32_t n_rot      = 0;
    int32_t type       = 0;
    int32_t n_ctx_orig = 0;

    float freq_base   = 0.0f;
    float freq_scale  = 1.0f;
    float ext_factor  = 0.0f;
    float attn_factor = 1.0f;
    float beta_fast   = 0.0f;
    float beta_slow   = 0.0f;

    std::vector<float> factors; // [n_rot/2] or empty
};

// A mapper on the devices of the target's layers.
struct llama_ridge_mapper {
    struct map {
        std::vector<uint32_t> sources; // layers of the source, ascending

        ggml_tensor * w = nullptr; // [d_in, d_out]
        ggml_tensor * b = nullptr; // [d_out]
    };

    const llama_model * source = nullptr; // nullptr: not known when it was loaded
    const llama_model * target = nullptr;

    int32_t n_sink   = 0;
    int32_t n_tail   = 0;
    bool    previous = false;

    std::string hash;

    llama_ridge_rotation rotation[2]; // of the source and the target

    std::vector<int32_t> n_head_source; // of K and V, by layer of the source
    int32_t k_head = 0;                 // size of a head there
    int32_t v_head = 0;

    std::vector<map> k; // by layer of the target
    std::vector<map> v;

    llama_ridge_placed placed;
};

// Which part of the model one ubatch of a prefill runs.
enum llama_ridge_pass_type {
    LLAMA_RIDGE_PASS_LOWER, // layers below S, all rows; keep x_S of the exact ones
    LLAMA_RIDGE_PASS_FILL,  // as LOWER, and write the K/V of layers S.. from predicted inputs
    LLAMA_RIDGE_PASS_UPPER, // layers from S on for exact rows, from the kept x_S
};

struct llama_ridge_pass {
    llama_ridge_pass_type type;

    int32_t split;

    const llama_ridge_maps * maps; // FILL: nullptr predicts x_S itself (identity)

    ggml_tensor * x_split; // F32 [n_embd, n_exact rows], nullptr if no row is exact

    // F32 [n_embd, 2], nullptr unless the maps need it: the normalised state of the last row of the step before in column
    // i_prev, room for this step's last row in the other
    ggml_tensor * x_prev;
    int32_t       i_prev;

    std::vector<int32_t> rows; // rows of x_split: written by LOWER and FILL, read by UPPER, in ubatch order
    std::vector<int32_t> src;  // LOWER and FILL: which rows of the ubatch they are

    uint32_t n_kv; // UPPER: number of cells to attend over

    bool is_write(const ggml_tensor * node) const { // into what a prefill keeps beside the cache
        return node->src[2] == x_split || node->src[2] == x_prev;
    }
};

// Memory context of one ubatch of a prefill. Models see an ordinary llama_kv_cache_context.
class llama_ridge_kv_context : public llama_kv_cache_context {
public:
    llama_ridge_kv_context(
            llama_kv_cache * kv, llama_kv_cache::slot_info sinfo, llama_ubatch ubatch, llama_ridge_pass pass);

    // LOWER and FILL emplace the ubatch into its cells. UPPER writes to cells that are in place already: emplacing again
    // would purge all earlier positions of the sequence, so it changes no cell.
    bool apply() override;

    const llama_ridge_pass & get_pass() const { return pass; }

private:
    llama_ridge_pass pass;
};

// The one door to the private parts of upstream's classes (friend of llama_context, llama_kv_cache and its context).
struct llama_ridge_access {
    static llama_kv_cache * kv(llama_context & ctx); // nullptr if the memory is anything but one plain KV cache

    static llama_kv_cells & cells (llama_kv_cache & kv, llama_seq_id seq_id);
    static bool             shared(const llama_kv_cache & kv); // the cells belong to another cache
    static bool             has_lora(const llama_context & ctx);
    static bool             has_cvec(const llama_context & ctx); // a control vector
    static uint32_t         n_free(const llama_kv_cells & cells);
    static std::string      layout(const llama_kv_cache & kv); // how rows lie in it, "name=value;..."

    static void set_n_kv(llama_kv_cache_context & mctx, uint32_t n_kv);

    // in an attention mask of mctx, -inf for every cell that is marked
    static void mask_nofill(const llama_kv_cache_context & mctx, const llama_ubatch & ubatch, ggml_tensor * mask);

    // Apply pending shifts and copies, and have the scheduler reserved.
    static void prepare(llama_context & ctx);

    // Compute one ubatch without outputs, adapters or graph reuse, and wait for it.
    static ggml_status compute(llama_context & ctx, const llama_ubatch & ubatch, llama_memory_context_i & mctx);

    // Layers from `split` on do not see marked cells; -1: there are none.
    static void set_nofill(llama_context & ctx, int32_t split);

    // number of floats in one row of K (what = 'k') or V ('v') of a layer, 0 if the cache does not hold the layer
    static int64_t row_size(const llama_kv_cache & kv, int32_t il, char what);

    // read rows as f32, de-rotated: dst[cells.size()][row_size]
    static void read_rows(
            const llama_kv_cache & kv, llama_seq_id seq_id, int32_t il, char what,
            const std::vector<uint32_t> & cells, float * dst);

    // copy the stored bytes of rows between cells of one layer; values only if they lie in rows
    // rows as they lie in the cache, which must hold V in rows, too
    static ggml_type type_of (const llama_kv_cache & kv, int32_t il, char what);
    static void      raw_rows(const llama_kv_cache & kv, llama_seq_id seq_id, int32_t il, char what, const std::vector<uint32_t> & cells, uint8_t * dst);

    // backends of the context, for graphs beside the model's
    static ggml_backend_sched_t new_sched(llama_context & ctx, size_t n_nodes);

    static bool copies_v(const llama_kv_cache & kv);
    static void copy_rows(
            const llama_kv_cache & kv, llama_seq_id seq_src, llama_seq_id seq_dst, int32_t il, char what,
            const std::vector<uint32_t> & src, const std::vector<uint32_t> & dst);
};

// Rows pos0, pos0 + 1, ... of a sequence that we put into a cache.
struct llama_ridge_rows {
    llama_context * ctx = nullptr;

    llama_seq_id seq_id = -1;
    llama_pos    pos0   = 0;

    std::vector<uint32_t> cell; // where each lies

    // still there and at the end of the sequence, in cells that no other sequence shares
    bool intact() const;

    // Take these rows out of the cache and no others, whatever the sequence holds by now.
    void remove();

    llama_ubatch make_ubatch(std::vector<llama_token> tokens, std::vector<llama_pos> pos) const;

private:
    bool holds(const llama_kv_cells & cells, size_t i) const;
};

// A cell that layers from cparams.ridge_nofill on do not see. The mark lives in a field that only 2D positions use
// (models with those are refused), so that it follows the cell through every operation and is gone when the cell is.
bool llama_ridge_nofill_get(const llama_kv_cells & cells, uint32_t i);
void llama_ridge_nofill_set(      llama_kv_cells & cells, uint32_t i);

// cells of positions [p0, p1) of a sequence, or a failure that names what is missing
int32_t llama_ridge_find_cells(llama_kv_cache & kv, llama_seq_id seq_id, llama_pos p0, llama_pos p1, std::vector<uint32_t> & idx);

// remember a message for llama_ridge_last_error(); returns status
#ifdef __GNUC__
__attribute__((format(printf, 2, 3)))
#endif
int32_t llama_ridge_fail(int32_t status, const char * fmt, ...);

// Nothing may leave the C API by an exception: returns what f() returns, or the status of the failure.
template<typename F>
int64_t llama_ridge_guard(F && f) {
    try {
        return f();
    } catch (const std::bad_alloc &) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_NO_MEMORY, "not enough memory");
    } catch (const std::exception & e) {
        return llama_ridge_fail(LLAMA_RIDGE_ERR_COMPUTE, "%s", e.what());
    }
}

#pragma once

// Internal structures of RidgeFill inside libllama. See llama-ridge.h for the terms.

#include "llama-ridge.h"

#include "llama-kv-cache.h"

#include "ggml-cpp.h"

#include <exception>
#include <new>
#include <string>
#include <vector>

struct llama_model;
struct llama_context;

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

    std::vector<ggml_context_ptr>        ctxs;
    std::vector<ggml_backend_buffer_ptr> bufs;

    size_t size() const;
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
    static bool copies_v(const llama_kv_cache & kv);
    static void copy_rows(
            const llama_kv_cache & kv, llama_seq_id seq_src, llama_seq_id seq_dst, int32_t il, char what,
            const std::vector<uint32_t> & src, const std::vector<uint32_t> & dst);
};

// A cell that layers from cparams.ridge_nofill on do not see. The mark lives in a field that only 2D positions use
// (models with those are refused), so that it follows the cell through every operation and is gone when the cell is.
bool llama_ridge_nofill_get(const llama_kv_cells & cells, uint32_t i);
void llama_ridge_nofill_set(      llama_kv_cells & cells, uint32_t i);

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

#pragma once

// RidgeFill inside libllama: prefill a long prompt without running the upper layers for most of its rows.
//
// Terms (arXiv 2611.09709, section 2.1; docs/HOW-IT-WORKS.md):
//   row            one token of a prompt, at one position of one sequence
//   split layer S  layers 0..S-1 run for every row; layers S..L-1 run for exact rows only
//   tail T         the last T rows of the prompt, always exact
//   sink rows      the first rows of the sequence, always exact
//   filled row     its K/V in layers S+1..L-1 come from a predicted layer input (layer S reads the true one)
//
// A prefill is a resumable object. Each step runs at most one ubatch, so that a caller with other sequences to serve
// can decode them between two steps. When the last step is done, the first llama_ridge_prefill_n_done() rows are in the
// cache and the rest (never empty) goes through llama_decode() as usual: logits, sampling and outputs are upstream's.
//
// Plain C. No function throws. A function that fails returns NULL or a negative llama_ridge_status and leaves a message
// for people in llama_ridge_last_error(), which names what was expected and what was found.

#include "llama.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

    struct llama_ridge_maps;    // a sidecar, checked against a model and placed on the devices of its layers
    struct llama_ridge_prefill; // one prompt on its way into the cache

    struct llama_ridge_mapper;   // a mapper, checked against its models and placed on the devices of the target's layers
    struct llama_ridge_transfer; // rows on their way from one model's cache to another's

    enum llama_ridge_status {
        LLAMA_RIDGE_OK              =  0,
        LLAMA_RIDGE_DONE            =  1, // prefill_step: nothing is left to do
        LLAMA_RIDGE_ERR_ARGUMENT    = -1, // a parameter is out of range; nothing was changed
        LLAMA_RIDGE_ERR_UNSUPPORTED = -2, // this model, memory or context cannot be filled; nothing was changed
        LLAMA_RIDGE_ERR_NO_SPACE    = -3, // too few free cells for the rest of the prompt; its rows were removed from the cache
        LLAMA_RIDGE_ERR_COMPUTE     = -4, // the backend failed; the rows of this prefill were removed from the cache
        LLAMA_RIDGE_ERR_STATE       = -5, // the cache was changed under the prefill; its rows were removed
        LLAMA_RIDGE_ERR_FILE        = -6, // the sidecar was refused
        LLAMA_RIDGE_ERR_NO_MEMORY   = -7, // an allocation failed; the rows of this prefill were removed from the cache
    };

    enum llama_ridge_mode {
        LLAMA_RIDGE_MODE_OFF      = 0,
        LLAMA_RIDGE_MODE_PLUMB    = 1, // both sweeps with every row exact: logits are bitwise those of llama_decode()
        LLAMA_RIDGE_MODE_IDENTITY = 2, // layer input predicted by the split state itself (POP's fill)
        LLAMA_RIDGE_MODE_NOFILL   = 3, // filled rows are invisible to layers S..L-1, while generating too
        LLAMA_RIDGE_MODE_FILL     = 4, // layer input predicted by the maps of the sidecar
        LLAMA_RIDGE_MODE_TRANSFER = 5, // not of a prefill: rows come from another model's cache, see llama_ridge_transfer_begin()
    };

    struct llama_ridge_params {
        enum llama_ridge_mode mode;

        int32_t split;     // S, 1 <= S <= L-1; -1 takes the sidecar's. With maps it must equal the sidecar's
        int32_t n_tail;    // T >= 1, rows
        int32_t n_sink;    // rows of the sequence (positions 0..n_sink-1) that are always exact; -1 takes the sidecar's, or 4
        int32_t n_step;    // most rows per step; 0 or more than n_ubatch means n_ubatch
    };

    struct llama_ridge_prefill_stats {
        int32_t n_rows;    // rows of the prompt given to prefill_begin
        int32_t n_filled;  // rows whose upper layers are (to be) filled
        int32_t n_exact;   // rows exact by choice, sink or tail, those left to llama_decode() included
        int32_t n_done;    // rows in the cache when the last step is done
        int32_t n_steps;   // steps in all
        int32_t i_step;    // steps done
        int32_t n_steps_lower;  // steps of sweep 1 (lower layers and fill)
        int64_t t_lower_us;     // time in sweep 1
        int64_t t_upper_us;     // time in sweep 2
    };

    LLAMA_API struct llama_ridge_params llama_ridge_default_params(void);

    // "off", "plumb", "identity", "nofill", "fill", "transfer"; NULL / -1 for an unknown one
    LLAMA_API const char * llama_ridge_mode_name(enum llama_ridge_mode mode);
    LLAMA_API int32_t      llama_ridge_mode_from_name(const char * name);

    // message of the last failure on this thread, "" if there was none
    LLAMA_API const char * llama_ridge_last_error(void);

    // NULL if the model can be filled, else the reason in a sentence that names the architecture or the memory
    LLAMA_API const char * llama_ridge_unsupported_model(const struct llama_model * model);
    LLAMA_API const char * llama_ridge_unsupported(const struct llama_context * ctx);

    //
    // maps
    //

    // Read and check a sidecar (docs/SIDECAR.md). NULL when it is refused: the caller goes on without it, exactly.
    // Logs one line on success, and a warning where quantisation, name or anchor tensors differ.
    LLAMA_API struct llama_ridge_maps * llama_ridge_maps_load(const struct llama_model * model, const char * path);
    LLAMA_API void                      llama_ridge_maps_free(struct llama_ridge_maps * maps);

    LLAMA_API int32_t      llama_ridge_maps_split    (const struct llama_ridge_maps * maps);
    LLAMA_API int32_t      llama_ridge_maps_n_tail   (const struct llama_ridge_maps * maps); // recommended T
    LLAMA_API int32_t      llama_ridge_maps_n_sink   (const struct llama_ridge_maps * maps);
    LLAMA_API const char * llama_ridge_maps_kind     (const struct llama_ridge_maps * maps); // "input", "input_lr", "kv" or "kv_prev"
    LLAMA_API const char * llama_ridge_maps_hash     (const struct llama_ridge_maps * maps); // sha256 of the content, hex
    LLAMA_API size_t       llama_ridge_maps_size     (const struct llama_ridge_maps * maps); // bytes on the devices

    // What a sidecar records of its model: one JSON object with the keys of docs/SIDECAR.md ("architecture",
    // "block_count", "embedding_length", "head_count", "head_count_kv", "tokenizer_sha256", "hparams", "file_type",
    // "name", "anchors": {name: sha256}). Returns the length of the text, as snprintf does; `split` picks the anchors.
    LLAMA_API int32_t llama_ridge_model_fingerprint(const struct llama_model * model, int32_t split, char * buf, size_t size);

    //
    // prefill
    //

    // Begin to put rows [pos0, pos0 + n_tokens) of sequence seq_id into the cache. pos0 must be the sequence's next
    // position (0 for an empty one). exact_rows: sorted, unique indices into tokens that run every layer; sink and tail
    // rows need not be listed. maps may be NULL except in mode FILL. Changes nothing but the cache of seq_id.
    LLAMA_API int32_t llama_ridge_prefill_begin(
            struct llama_context          * ctx,
            const struct llama_ridge_maps * maps,
            struct llama_ridge_params       params,
            llama_seq_id                    seq_id,
            llama_pos                       pos0,
            const llama_token             * tokens,
            int32_t                         n_tokens,
            const int32_t                 * exact_rows,
            int32_t                         n_exact_rows,
            struct llama_ridge_prefill   ** prefill);

    // Run one step. LLAMA_RIDGE_OK: call again; LLAMA_RIDGE_DONE: all is in the cache; negative: the prefill failed, its
    // rows are gone from the cache and only prefill_free() may follow. Other sequences may be decoded between two steps; this
    // one may be removed or cleared, but not copied, shifted or decoded into.
    LLAMA_API int32_t llama_ridge_prefill_step(struct llama_ridge_prefill * prefill);

    // rows that the steps put into the cache; tokens[n_done..n_tokens) go to llama_decode() afterwards
    LLAMA_API int32_t llama_ridge_prefill_n_done(const struct llama_ridge_prefill * prefill);

    // indices into tokens of the filled rows, ascending; returns their number and writes at most n_max of them
    LLAMA_API int32_t llama_ridge_prefill_filled(const struct llama_ridge_prefill * prefill, int32_t * rows, int32_t n_max);

    LLAMA_API struct llama_ridge_prefill_stats llama_ridge_prefill_get_stats(const struct llama_ridge_prefill * prefill);

    // Stop wherever it is and remove the rows of this prefill from the cache, which is then as it was before begin.
    // The object stays valid for stats and free.
    LLAMA_API void llama_ridge_prefill_cancel(struct llama_ridge_prefill * prefill);

    // Free the object. The cache keeps the rows if the prefill is done; an unfinished one is cancelled first.
    LLAMA_API void llama_ridge_prefill_free(struct llama_ridge_prefill * prefill);

    //
    // transfer: rows of one model's cache from those of another's (arXiv 2608.03893; docs/MAPPER.md)
    //

    // Read and check a mapper against the model whose cache is written and, unless it is NULL, the one whose cache is read:
    // tokenizer, hyper-parameters, and all that decides how keys are turned. NULL when it is refused. Logs one line on success.
    LLAMA_API struct llama_ridge_mapper * llama_ridge_mapper_load(
            const struct llama_model * source, const struct llama_model * target, const char * path);
    LLAMA_API void                        llama_ridge_mapper_free(struct llama_ridge_mapper * mapper);

    LLAMA_API int32_t      llama_ridge_mapper_n_sink(const struct llama_ridge_mapper * mapper); // first rows that the target should run itself
    LLAMA_API int32_t      llama_ridge_mapper_n_tail(const struct llama_ridge_mapper * mapper); // last rows of a prompt likewise
    LLAMA_API const char * llama_ridge_mapper_hash  (const struct llama_ridge_mapper * mapper); // sha256 of the content, hex
    LLAMA_API size_t       llama_ridge_mapper_size  (const struct llama_ridge_mapper * mapper); // bytes on the devices

    struct llama_ridge_transfer_stats {
        int32_t n_rows;  // rows to transfer
        int32_t n_done;  // rows that are in the target's cache
        int64_t n_bytes; // read and written so far: the source's rows, the mapper once a step, the target's rows
        int64_t t_us;    // time in steps
    };

    // Begin to put rows [p0, p1) of a sequence of ctx_src, mapped, into a sequence of ctx_dst whose next position is p0.
    // n_step: most rows per step; 0 or more than the n_ubatch of ctx_dst means that. Changes no cache.
    LLAMA_API int32_t llama_ridge_transfer_begin(
            struct llama_context            * ctx_src,
            llama_seq_id                      seq_src,
            struct llama_context            * ctx_dst,
            llama_seq_id                      seq_dst,
            const struct llama_ridge_mapper * mapper,
            llama_pos                         p0,
            llama_pos                         p1,
            int32_t                           n_step,
            struct llama_ridge_transfer    ** transfer);

    // Map and write the next rows, which appear in the cache when all of them are written. Returns as llama_ridge_prefill_step()
    // does; where it fails, the rows of this transfer are gone from the target's cache, and the source's is never changed.
    LLAMA_API int32_t llama_ridge_transfer_step(struct llama_ridge_transfer * transfer);

    LLAMA_API struct llama_ridge_transfer_stats llama_ridge_transfer_get_stats(const struct llama_ridge_transfer * transfer);

    // Stop wherever it is and remove the rows of this transfer, as llama_ridge_prefill_cancel() does.
    LLAMA_API void llama_ridge_transfer_cancel(struct llama_ridge_transfer * transfer);

    // Free the object. The cache keeps the rows if the transfer is done; an unfinished one is cancelled first.
    LLAMA_API void llama_ridge_transfer_free(struct llama_ridge_transfer * transfer);

    //
    // the cache as a whole
    //

    // What rows of the cache depend on beside the model and the prompt, as one line "name=value;...": rows that were saved
    // can be put back where this text is the same. Returns the length of the text, as snprintf does.
    LLAMA_API int32_t llama_ridge_cache_layout(const struct llama_context * ctx, char * buf, size_t size);

    // Cells that are free for rows of a sequence; with_own: as if the sequence were removed first. Of a memory that is no
    // plain KV cache, 0.
    LLAMA_API int32_t llama_ridge_n_free(const struct llama_context * ctx, llama_seq_id seq_id, bool with_own);

    //
    // the rows of the cache, for tests and for `ridgefill tune`
    //

    // Copy the K (what = 'k') or V ('v') rows of one layer for positions [p0, p1) of a sequence, as f32, de-rotated when
    // the cache is rotated: [n_rows][n_head_kv * head_size], row-major. dst may be NULL to ask for the number of floats.
    LLAMA_API int64_t llama_ridge_get_kv(
            struct llama_context * ctx, llama_seq_id seq_id, int32_t il, char what,
            llama_pos p0, llama_pos p1, float * dst, int64_t n_max);

    // Copy the K (what = 'k') or V ('v') rows of one layer for positions [p0, p1) from one sequence to another, which must
    // hold these positions in cells of its own. A splice: what the second sequence gives from then on tells what this layer's
    // rows matter. Nothing keeps track of it. Values are copied only where they lie in rows (flash attention).
    LLAMA_API int32_t llama_ridge_copy_kv(
            struct llama_context * ctx, llama_seq_id seq_src, llama_seq_id seq_dst, int32_t il, char what,
            llama_pos p0, llama_pos p1);

#ifdef __cplusplus
}
#endif

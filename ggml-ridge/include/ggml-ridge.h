#pragma once

// ggml-ridge: what RidgeFill needs of ggml and gguf alone, without libllama.
//   sidecar    read and check a GGUF of ridge maps (docs/SIDECAR.md)
//   mapper     the same of a GGUF that maps one model's cache to another's (docs/MAPPER.md)
//   selectors  which rows of a prompt run exactly
// Plain C. Functions that fail return NULL or -1 and write a message for people into err.

#include "ggml.h"
#include "ggml-backend.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef _WIN32
#    ifdef GGML_RIDGE_BUILD
#        define GGML_RIDGE_API __declspec(dllexport)
#    else
#        define GGML_RIDGE_API __declspec(dllimport)
#    endif
#else
#    define GGML_RIDGE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

    #define GGML_RIDGE_FORMAT_VERSION 1

    //
    // sidecar
    //

    struct ggml_ridge_sidecar; // metadata and host copies of the tensors, fully checked

    // What a sidecar is checked against. Strings are borrowed.
    struct ggml_ridge_expect {
        const char * architecture;
        const char * tokenizer_sha256;
        const char * hparams;          // canonical text of the model's hyper-parameters
        int32_t      block_count;      // L
        int32_t      embedding_length; // d
    };

    // Open path and check everything: container, types, shapes, bounds, hashes, finite content, and, unless expect is
    // NULL, that it was made for this model. Reads the whole file; never maps it. Never aborts on a malformed file.
    // A refusal is one line in err: "sidecar 'PATH': what was found, what was expected".
    GGML_RIDGE_API struct ggml_ridge_sidecar * ggml_ridge_sidecar_load(
            const char * path, const struct ggml_ridge_expect * expect, char * err, size_t err_size);
    GGML_RIDGE_API void ggml_ridge_sidecar_free(struct ggml_ridge_sidecar * sc);

    GGML_RIDGE_API const char * ggml_ridge_sidecar_hash    (const struct ggml_ridge_sidecar * sc); // sha256 of the file, hex
    GGML_RIDGE_API const char * ggml_ridge_sidecar_kind    (const struct ggml_ridge_sidecar * sc); // "input", "input_lr", "kv" or "kv_prev"
    GGML_RIDGE_API int32_t      ggml_ridge_sidecar_split   (const struct ggml_ridge_sidecar * sc);
    GGML_RIDGE_API int32_t      ggml_ridge_sidecar_n_layer (const struct ggml_ridge_sidecar * sc);
    GGML_RIDGE_API int32_t      ggml_ridge_sidecar_n_embd  (const struct ggml_ridge_sidecar * sc);
    GGML_RIDGE_API int32_t      ggml_ridge_sidecar_n_tail  (const struct ggml_ridge_sidecar * sc);
    GGML_RIDGE_API int32_t      ggml_ridge_sidecar_n_sink  (const struct ggml_ridge_sidecar * sc);
    GGML_RIDGE_API int32_t      ggml_ridge_sidecar_file_type(const struct ggml_ridge_sidecar * sc); // of the model it was fitted on, -1 if unknown
    GGML_RIDGE_API int32_t      ggml_ridge_sidecar_rank    (const struct ggml_ridge_sidecar * sc); // of kind input_lr, 0 of the others

    // width of the rows of K and V that the map of layer il writes; 0 where maps predict inputs, and for layers without a map
    GGML_RIDGE_API int32_t      ggml_ridge_sidecar_k_length (const struct ggml_ridge_sidecar * sc, int32_t il);
    GGML_RIDGE_API int32_t      ggml_ridge_sidecar_v_length (const struct ggml_ridge_sidecar * sc, int32_t il);

    // value of a string key, or NULL
    GGML_RIDGE_API const char * ggml_ridge_sidecar_str(const struct ggml_ridge_sidecar * sc, const char * key);

    // expected sha256 (hex) of the i-th anchor tensor of the model, NULL past the end
    GGML_RIDGE_API const char * ggml_ridge_sidecar_anchor(const struct ggml_ridge_sidecar * sc, int32_t i, const char ** name);

    // Host tensors of layer il (split < il < n_layer), else NULL: weight [n_in, n_out] of the map type, bias [n_out] f32.
    // Kind input_lr has no weight but down [n_embd, rank] and up [rank, n_embd], of the map type.
    //   input     n_in = n_out = n_embd        from the hidden state at the split to the layer's input
    //   input_lr  up (down x) + x + bias       the same
    //   kv        n_in = n_embd                from the RMS-normalised state to the layer's K (first) and V, before norms
    //             n_out = k_length + v_length  of K and RoPE
    //   kv_prev   n_in = 2*n_embd              the same from the row's own state and its predecessor's
    GGML_RIDGE_API const struct ggml_tensor * ggml_ridge_sidecar_weight(const struct ggml_ridge_sidecar * sc, int32_t il);
    GGML_RIDGE_API const struct ggml_tensor * ggml_ridge_sidecar_down  (const struct ggml_ridge_sidecar * sc, int32_t il);
    GGML_RIDGE_API const struct ggml_tensor * ggml_ridge_sidecar_up    (const struct ggml_ridge_sidecar * sc, int32_t il);
    GGML_RIDGE_API const struct ggml_tensor * ggml_ridge_sidecar_bias  (const struct ggml_ridge_sidecar * sc, int32_t il);

    //
    // mapper
    //

    struct ggml_ridge_mapper; // metadata and host copies of the tensors, fully checked

    enum ggml_ridge_role {
        GGML_RIDGE_SOURCE = 0, // the model whose cache is read
        GGML_RIDGE_TARGET = 1, // the model whose cache is written
    };

    // What a mapper records of the positions of one of its models.
    struct ggml_ridge_rope {
        int32_t      n_rot;            // rotated numbers of each head, the first ones
        float        freq_base;
        const char * scaling_type;     // "none", "linear", "yarn" or "longrope"
        float        scaling_factor;   // by which the context was stretched
        float        attn_factor;      // gain on rotated numbers besides YaRN's own
        float        beta_fast;        // this and the next three are YaRN's
        float        beta_slow;
        float        log_multiplier;
        int32_t      n_ctx_orig;       // tokens
        bool         adjacent;         // rotated pairs are side by side, else n_rot/2 apart
        const float * factors;         // [n_rot/2] divisors of the frequencies, or NULL
    };

    // As ggml_ridge_sidecar_load(). Either expectation may be NULL; their embedding lengths are not looked at.
    GGML_RIDGE_API struct ggml_ridge_mapper * ggml_ridge_mapper_load(
            const char * path, const struct ggml_ridge_expect * source, const struct ggml_ridge_expect * target, char * err, size_t err_size);
    GGML_RIDGE_API void ggml_ridge_mapper_free(struct ggml_ridge_mapper * mp);

    GGML_RIDGE_API const char * ggml_ridge_mapper_hash    (const struct ggml_ridge_mapper * mp); // sha256 of the file, hex
    GGML_RIDGE_API int32_t      ggml_ridge_mapper_n_sink  (const struct ggml_ridge_mapper * mp);
    GGML_RIDGE_API int32_t      ggml_ridge_mapper_n_tail  (const struct ggml_ridge_mapper * mp);
    GGML_RIDGE_API bool         ggml_ridge_mapper_previous(const struct ggml_ridge_mapper * mp); // whether maps read the row before, too

    GGML_RIDGE_API int32_t      ggml_ridge_mapper_n_layer (const struct ggml_ridge_mapper * mp, enum ggml_ridge_role role);
    GGML_RIDGE_API int32_t      ggml_ridge_mapper_n_head  (const struct ggml_ridge_mapper * mp, enum ggml_ridge_role role, int32_t il);
    GGML_RIDGE_API int32_t      ggml_ridge_mapper_head    (const struct ggml_ridge_mapper * mp, enum ggml_ridge_role role, char what); // size of a head of K or V
    GGML_RIDGE_API struct ggml_ridge_rope ggml_ridge_mapper_rope(const struct ggml_ridge_mapper * mp, enum ggml_ridge_role role);

    // source layers, ascending, that target layer il reads; returns their number
    GGML_RIDGE_API int32_t      ggml_ridge_mapper_sources (const struct ggml_ridge_mapper * mp, char what, int32_t il, const uint32_t ** layers);

    // [d_in, d_out] of the map type and [d_out] F32, of 'k' (without rotation) or 'v' of target layer il
    GGML_RIDGE_API const struct ggml_tensor * ggml_ridge_mapper_weight(const struct ggml_ridge_mapper * mp, char what, int32_t il);
    GGML_RIDGE_API const struct ggml_tensor * ggml_ridge_mapper_bias  (const struct ggml_ridge_mapper * mp, char what, int32_t il);

    // sha256 of a buffer as 64 lower-case hex digits and a NUL
    GGML_RIDGE_API void ggml_ridge_sha256(const void * data, size_t size, char hex[65]);

    //
    // row selectors: write sorted, unique row indices of [row0, row1) into rows, return their number
    //

    enum ggml_ridge_selector {
        GGML_RIDGE_SELECT_NONE   = 0,
        GGML_RIDGE_SELECT_RANDOM = 1,
        GGML_RIDGE_SELECT_DIGITS = 2,
    };

    // -1 for an unknown name
    GGML_RIDGE_API int32_t      ggml_ridge_selector_from_name(const char * name);
    GGML_RIDGE_API const char * ggml_ridge_selector_name(int32_t selector);

    // budget: 0 < b < 1 is a share of the rows, b >= 1 a number of rows, 0 no rows for random and no limit for digits.
    // Rounded to the nearest number, but a budget above 0 gives at least one row (0 would mean no limit for digits) and
    // at most n_rows. -1 if it is negative or not finite
    GGML_RIDGE_API int32_t ggml_ridge_budget_rows(float budget, int32_t n_rows);

    // n rows (all, if there are fewer) drawn without replacement, the same for the same seed on every platform; -1 if row0
    // or n is negative
    GGML_RIDGE_API int32_t ggml_ridge_select_random(int32_t row0, int32_t row1, int32_t n, uint64_t seed, int32_t * rows);

    // every row whose text holds an ASCII digit, and the row behind each run of them: from it a reader knows where the
    // number ends. The last n_max of them (n_max <= 0: no limit); -1 if row0 is negative.
    // pieces and piece_len are indexed by row: row0 to row1 - 1 are read
    GGML_RIDGE_API int32_t ggml_ridge_select_digits(
            int32_t row0, int32_t row1, const char * const * pieces, const int32_t * piece_len, int32_t n_max, int32_t * rows);

#ifdef __cplusplus
}
#endif

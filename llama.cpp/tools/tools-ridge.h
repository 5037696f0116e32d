#pragma once

// RidgeFill in the tools that read whole prompts: llama-completion, llama-perplexity, llama-batched-bench and llama-bench.
// The sweeps of a prompt run one after another, then the tool decodes the rows that they leave: the end of the prompt,
// its logits and whatever comes after are upstream's.

#include "common.h"
#include "llama-ridge.h"

#include <string>
#include <vector>

class tools_ridge {
  public:
    // Load the maps, if the flags name any. Where they are refused every row runs exactly, and one line of the log says why.
    // note: what the last line of the log adds, see the destructor
    tools_ridge(llama_context * ctx, const common_ridge_params & flags, const char * note = "");

    // llama-perplexity's: the scored rows are the exact tail
    static tools_ridge for_perplexity(llama_context * ctx, common_ridge_params flags);

    // if the flags name maps and note is not NULL: log what became of the rows
    ~tools_ridge();

    tools_ridge(const tools_ridge &) = delete;

    // Put rows of a prompt into the cache: n_done of the result, from the first on. The others are left to decode; all of
    // them, and the result is zero, where the prompt runs exactly.
    llama_ridge_prefill_stats fill(llama_seq_id seq_id, llama_pos pos0, const llama_tokens & tokens);

    // The first prompt of an empty cache, if it has --ridge-min-prompt rows. Returns the rows that are in the cache.
    llama_tokens fill_prompt(const llama_tokens & tokens);

    // The prompt of every sequence in a batch: its rows up to the first one with an output. Takes the rows that are in the
    // cache out of the batch.
    void fill(common_batch & batch);

    // where row i of the batch that fill() was given is now
    int32_t index(int32_t i) const { return moved.empty() ? i : moved[i]; }

    // why prompts ran exactly, empty if none did
    const std::string & reason() const { return why_exact; }

  private:
    llama_context    * ctx;
    llama_ridge_maps * maps = nullptr; // nullptr: every row runs exactly

    common_ridge_params flags;
    llama_ridge_params  params;

    const char * note;
    std::string  why_exact;

    std::vector<int32_t> moved; // by index in the batch that was given, empty: no row has moved

    int64_t n_rows   = 0; // seen
    int64_t n_filled = 0; // of which were filled
};

#pragma once

// The rows of one prompt on their way into a slot's cache, step by step: predicted by maps, or mapped from the cache of
// another model.

#include "llama-ridge.h"

#include <memory>
#include <string>
#include <vector>

class server_ridge_work {
  public:
    // an unfinished one takes its rows out of the cache
    virtual ~server_ridge_work() = default;

    // as llama_ridge_prefill_step()
    virtual int32_t step() = 0;

    // why the last step failed
    virtual std::string error() const { return llama_ridge_last_error(); }

    // where rows do not pass twice: "lower" is the source's time, "upper" the target's
    virtual llama_ridge_prefill_stats stats() const = 0;

    // indices of the filled rows into the new rows of the prompt, ascending
    virtual std::vector<int32_t> filled() const = 0;
};

// Sets `work` or returns a negative status as llama_ridge_prefill_begin() does.
int32_t server_ridge_begin_prefill(
        llama_context * ctx, const llama_ridge_maps * maps, const llama_ridge_params & params, llama_seq_id seq_id,
        llama_pos pos0, const std::vector<llama_token> & tokens, const std::vector<int32_t> & exact_rows,
        std::unique_ptr<server_ridge_work> & work);

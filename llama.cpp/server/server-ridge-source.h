#pragma once

// The other model of a server, which runs long prompts in the place of its own: model, context and mapper.

#include "server-ridge-work.h"

#include "common.h"

#include "llama-cpp.h"

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

class server_ridge_source {
  public:
    // nullptr and a message if the model or the mapper cannot be used
    static std::unique_ptr<server_ridge_source> load(llama_context * ctx_target, const common_params & params, std::string & message);

    const llama_ridge_mapper * get_mapper() const { return mapper.get(); }

    // Rows [n_past, n_tokens - n_tail) of a prompt for the target's sequence `seq_id`, which holds the rows before: the first
    // n_sink rows of the sequence by the target, the others mapped. The source keeps what it ran, in a sequence of the same id.
    int32_t begin(
            llama_context * ctx_target, llama_seq_id seq_id, const std::vector<llama_token> & tokens, int32_t n_past,
            int32_t n_tail, int32_t n_step, std::unique_ptr<server_ridge_work> & work);

  private:
    friend class transfer_work;

    struct free_mapper {
        void operator()(llama_ridge_mapper * p) const { llama_ridge_mapper_free(p); }
    };

    llama_model_ptr   model;
    llama_context_ptr ctx;

    std::unique_ptr<llama_ridge_mapper, free_mapper> mapper;

    std::map<llama_seq_id, std::vector<llama_token>> held; // tokens of each sequence of the source's cache
    std::set<llama_seq_id> working;                        // those of which rows are being mapped

    // Run tokens of a prompt that the sequence lacks, at most n of them. 0, or as llama_decode().
    int32_t run(llama_seq_id seq_id, const std::vector<llama_token> & tokens, int32_t n);
};

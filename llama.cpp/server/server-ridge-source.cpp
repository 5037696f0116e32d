#include "server-ridge-source.h"

#include <algorithm>

// rows of tokens [first, last) without outputs
static int32_t decode_rows(llama_context * ctx, llama_seq_id seq_id, const std::vector<llama_token> & tokens, int32_t first, int32_t last) {
    common_batch batch(ctx);
    for (int32_t i = first; i < last; i++) {
        batch.add(tokens[i], i, seq_id, false);
    }
    return llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get());
}

std::unique_ptr<server_ridge_source> server_ridge_source::load(llama_context * ctx_target, const common_params & params, std::string & message) {
    auto res = std::make_unique<server_ridge_source>();

    common_params own = params;
    own.model.path      = params.ridge.source;
    own.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED; // a transfer reads values that lie in rows

    res->model.reset(llama_model_load_from_file(own.model.path.c_str(), common_model_params_to_llama(own)));
    if (!res->model) {
        message = "the model " + own.model.path + " could not be loaded";
        return nullptr;
    }
    res->ctx.reset(llama_init_from_model(res->model.get(), common_context_params_to_llama(own)));
    if (!res->ctx) {
        message = "no context could be made for the model " + own.model.path;
        return nullptr;
    }
    res->mapper.reset(llama_ridge_mapper_load(res->model.get(), llama_get_model(ctx_target), params.ridge.mapper.c_str()));
    if (!res->mapper) {
        message = llama_ridge_last_error();
        return nullptr;
    }
    return res;
}

int32_t server_ridge_source::run(llama_seq_id seq_id, const std::vector<llama_token> & tokens, int32_t n) {
    auto & rows = held[seq_id];

    const int32_t n_common = std::mismatch(rows.begin(), rows.end(), tokens.begin(), tokens.end()).first - rows.begin();
    if (n_common < (int32_t) rows.size()) {
        llama_memory_seq_rm(llama_get_memory(ctx.get()), seq_id, n_common, -1);
        rows.resize(n_common);
    }
    const int32_t last = std::min<int32_t>(n_common + n, tokens.size());

    int32_t status = decode_rows(ctx.get(), seq_id, tokens, n_common, last);
    if (status == 1) { // no room: what it keeps of sequences that nobody works on may go
        for (auto & [id, other] : held) {
            if (!working.count(id)) {
                llama_memory_seq_rm(llama_get_memory(ctx.get()), id, -1, -1);
                other.clear();
            }
        }
        status = decode_rows(ctx.get(), seq_id, tokens, n_common, last);
    }
    if (status == 0) {
        rows.assign(tokens.begin(), tokens.begin() + last);
    } else {
        llama_memory_seq_rm(llama_get_memory(ctx.get()), seq_id, n_common, -1);
    }
    return status;
}

class transfer_work : public server_ridge_work {
  public:
    transfer_work(server_ridge_source & source, llama_context * ctx, llama_seq_id seq_id, std::vector<llama_token> prefix, int32_t n_past, int32_t n_step)
        : source(source), ctx(ctx), seq_id(seq_id), prefix(std::move(prefix)), n_past(n_past),
          n_own(std::max(n_past, std::min<int32_t>(llama_ridge_mapper_n_sink(source.get_mapper()), this->prefix.size()))), n_step(n_step) {
        source.working.insert(seq_id);

        const int32_t n_rows = this->prefix.size();
        const auto steps = [&](int32_t n) { return (n + n_step - 1)/n_step; };

        n_at = n_past;

        res.n_rows   = n_rows - n_past;
        res.n_filled = n_rows - n_own;
        res.n_exact  = n_own  - n_past;
        res.n_done   = n_rows - n_past;
        res.n_steps_lower = steps(n_rows);
        res.n_steps       = steps(n_rows) + (n_own > n_past) + steps(n_rows - n_own);
    }

    ~transfer_work() override {
        source.working.erase(seq_id);
        const bool done = transfer && llama_ridge_transfer_get_stats(transfer).n_done == res.n_filled;
        llama_ridge_transfer_free(transfer);
        if (!done && n_at > n_past) {
            llama_memory_seq_rm(llama_get_memory(ctx), seq_id, n_past, -1);
        }
    }

    int32_t step() override {
        const int64_t t_start = ggml_time_us();
        const bool lower = !source_has_prefix();
        const int32_t status = lower ? run_source() : n_at < n_own ? run_own() : run_transfer();
        (lower ? res.t_lower_us : res.t_upper_us) += ggml_time_us() - t_start;
        res.i_step += status >= 0;
        return status;
    }

    std::string error() const override { return failed.empty() ? server_ridge_work::error() : failed; }

    llama_ridge_prefill_stats stats() const override { return res; }

    std::vector<int32_t> filled() const override {
        std::vector<int32_t> rows;
        for (int32_t i = n_own; i < (int32_t) prefix.size(); i++) {
            rows.push_back(i - n_past);
        }
        return rows;
    }

  private:
    server_ridge_source & source;

    llama_context * const ctx;
    const llama_seq_id    seq_id;

    const std::vector<llama_token> prefix; // the prompt without its tail

    const int32_t n_past;
    const int32_t n_own; // rows before are the target's
    const int32_t n_step;

    int32_t n_at; // end of the rows that the target ran here
    llama_ridge_transfer * transfer = nullptr;
    llama_ridge_prefill_stats res = {};
    std::string failed; // what a model could not run

    bool source_has_prefix() const {
        const auto it = source.held.find(seq_id);
        return it != source.held.end() && it->second.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), it->second.begin());
    }

    int32_t run_source() {
        const int32_t status = source.run(seq_id, prefix, n_step);
        if (status != 0) {
            failed = "the source could not run rows of the prompt (status " + std::to_string(status) + ")";
        }
        return status == 0 ? LLAMA_RIDGE_OK : LLAMA_RIDGE_ERR_COMPUTE;
    }

    int32_t run_own() {
        llama_set_embeddings(ctx, false);
        const int32_t status = decode_rows(ctx, seq_id, prefix, n_past, n_own);
        if (status == 0) {
            n_at = n_own;
        } else {
            failed = "the first rows of the prompt could not be run (status " + std::to_string(status) + ")";
        }
        return status == 0 ? LLAMA_RIDGE_OK : status == 1 ? LLAMA_RIDGE_ERR_NO_SPACE : LLAMA_RIDGE_ERR_COMPUTE;
    }

    int32_t run_transfer() {
        if (!transfer) {
            const int32_t status = llama_ridge_transfer_begin(source.ctx.get(), seq_id, ctx, seq_id, source.get_mapper(), n_own, prefix.size(), n_step, &transfer);
            if (status < 0) {
                return status;
            }
        }
        return llama_ridge_transfer_step(transfer);
    }
};

int32_t server_ridge_source::begin(
        llama_context * ctx_target, llama_seq_id seq_id, const std::vector<llama_token> & tokens, int32_t n_past,
        int32_t n_tail, int32_t n_step, std::unique_ptr<server_ridge_work> & work) {
    std::vector<llama_token> prefix(tokens.begin(), tokens.end() - std::min<int32_t>(n_tail, tokens.size()));
    const int32_t n_ubatch = llama_n_ubatch(ctx_target);

    work = std::make_unique<transfer_work>(*this, ctx_target, seq_id, std::move(prefix), n_past, n_step > 0 ? std::min(n_step, n_ubatch) : n_ubatch);

    return LLAMA_RIDGE_OK;
}

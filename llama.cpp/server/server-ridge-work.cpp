#include "server-ridge-work.h"

namespace {

class prefill_work : public server_ridge_work {
  public:
    explicit prefill_work(llama_ridge_prefill * prefill) : prefill(prefill) {}

    int32_t step() override { return llama_ridge_prefill_step(prefill.get()); }

    llama_ridge_prefill_stats stats() const override { return llama_ridge_prefill_get_stats(prefill.get()); }

    std::vector<int32_t> filled() const override {
        std::vector<int32_t> rows(stats().n_filled);
        llama_ridge_prefill_filled(prefill.get(), rows.data(), rows.size());
        return rows;
    }

  private:
    struct free_prefill {
        void operator()(llama_ridge_prefill * p) const { llama_ridge_prefill_free(p); }
    };

    std::unique_ptr<llama_ridge_prefill, free_prefill> prefill;
};

} // namespace

int32_t server_ridge_begin_prefill(
        llama_context * ctx, const llama_ridge_maps * maps, const llama_ridge_params & params, llama_seq_id seq_id,
        llama_pos pos0, const std::vector<llama_token> & tokens, const std::vector<int32_t> & exact_rows,
        std::unique_ptr<server_ridge_work> & work) {
    llama_ridge_prefill * prefill = nullptr;
    const int32_t status = llama_ridge_prefill_begin(ctx, maps, params, seq_id, pos0,
            tokens.data(), tokens.size(), exact_rows.data(), exact_rows.size(), &prefill);
    if (prefill) {
        work = std::make_unique<prefill_work>(prefill);
    }
    return status;
}

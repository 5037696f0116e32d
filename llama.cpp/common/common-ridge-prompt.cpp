#include "common-ridge-prompt.h"

#include "common.h"
#include "ggml-ridge.h"

#include <algorithm>
#include <string>

llama_ridge_mode common_ridge_mode(const common_ridge_params & params) {
    if (params.mode >= 0) {
        return (llama_ridge_mode) params.mode;
    }
    return !params.maps.empty() ? LLAMA_RIDGE_MODE_FILL : !params.mapper.empty() ? LLAMA_RIDGE_MODE_TRANSFER : LLAMA_RIDGE_MODE_OFF;
}

int64_t common_ridge_min_prompt(const common_ridge_params & params, int32_t n_tail) {
    return params.n_min_prompt >= 0 ? params.n_min_prompt : 2*(int64_t) n_tail;
}

std::vector<int32_t> common_ridge_select_rows(
        const common_ridge_params & params, const llama_context * ctx,
        const std::vector<llama_token> & tokens, int32_t row0, int32_t row1) {
    if (row0 >= row1 || params.rows == GGML_RIDGE_SELECT_NONE) {
        return {};
    }
    const int32_t n_max = ggml_ridge_budget_rows(params.budget, row1 - row0);

    std::vector<int32_t> rows(row1 - row0);
    int32_t n_rows = 0;

    if (params.rows == GGML_RIDGE_SELECT_RANDOM) {
        n_rows = ggml_ridge_select_random(row0, row1, n_max, params.seed, rows.data());
    } else {
        std::vector<std::string>  texts (row1);
        std::vector<const char *> pieces(row1);
        std::vector<int32_t>      sizes (row1);
        for (int32_t i = row0; i < row1; i++) {
            texts [i] = common_token_to_piece(ctx, tokens[i]);
            pieces[i] = texts[i].data();
            sizes [i] = texts[i].size();
        }
        n_rows = ggml_ridge_select_digits(row0, row1, pieces.data(), sizes.data(), n_max, rows.data());
    }
    rows.resize(std::max(0, n_rows));
    return rows;
}

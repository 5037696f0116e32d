// Rows that we put into a cache, and how to take them out again.

#include "llama-ridge-impl.h"

#include "llama-context.h"

#include <algorithm>

bool llama_ridge_rows::holds(const llama_kv_cells & cells, size_t i) const {
    const uint32_t c = cell[i];
    return !cells.is_empty(c) && cells.seq_has(c, seq_id) && cells.pos_get(c) == pos0 + (llama_pos) i;
}

bool llama_ridge_rows::intact() const {
    auto & kv = *llama_ridge_access::kv(*ctx);
    const auto & cells = llama_ridge_access::cells(kv, seq_id);

    if (kv.seq_pos_max(seq_id) != pos0 + (llama_pos) cell.size() - 1) {
        return false;
    }
    for (size_t i = 0; i < cell.size(); ++i) {
        if (!holds(cells, i) || cells.seq_count(cell[i]) != 1) {
            return false;
        }
    }

    return true;
}

void llama_ridge_rows::remove() {
    const auto & cells = llama_ridge_access::cells(*llama_ridge_access::kv(*ctx), seq_id);

    for (size_t i = 0; i < cell.size(); ) {
        size_t n = 0;
        while (i + n < cell.size() && holds(cells, i + n)) {
            n++;
        }
        if (n > 0) {
            ctx->get_memory()->seq_rm(seq_id, pos0 + i, pos0 + i + n);
        }
        i += std::max<size_t>(n, 1);
    }
    cell.clear();
}

llama_ubatch llama_ridge_rows::make_ubatch(std::vector<llama_token> tokens, std::vector<llama_pos> pos) const {
    const uint32_t n = pos.size();
    const bool unified = ctx->get_cparams().kv_unified;

    auto data = std::make_shared<llama_ubatch::data_t>();

    data->seq_id_unq  = { seq_id };
    data->seq_idx     = std::vector<int32_t>(LLAMA_MAX_SEQ, -1);
    data->seq_idx[seq_id] = 0;
    data->seq_id_data = std::vector<llama_seq_id>(n, seq_id);
    data->n_seq_id    = std::vector<int32_t>(n, 1);
    data->output      = std::vector<int8_t>(n, 0);
    data->token       = std::move(tokens);
    data->pos         = std::move(pos);

    for (uint32_t i = 0; i < n; ++i) {
        data->seq_id    .push_back(&data->seq_id_data[i]);
        data->batch_idxs.push_back(i);
    }

    // as the memory's own split would make it: one sequence per token in a unified cache, one long sequence otherwise
    return {
        /*.b_equal_seqs =*/ !unified,
        /*.n_tokens     =*/ n,
        /*.n_seq_tokens =*/ unified ? 1 : n,
        /*.n_seqs       =*/ unified ? n : 1,
        /*.n_seqs_unq   =*/ 1,
        /*.n_pos        =*/ 1,
        /*.token        =*/ data->token.data(),
        /*.embd         =*/ nullptr,
        /*.pos          =*/ data->pos.data(),
        /*.n_seq_id     =*/ data->n_seq_id.data(),
        /*.seq_id       =*/ data->seq_id.data(),
        /*.seq_id_unq   =*/ data->seq_id_unq.data(),
        /*.seq_idx      =*/ data->seq_idx.data(),
        /*.output       =*/ data->output.data(),
        /*.data         =*/ std::move(data),
    };
}

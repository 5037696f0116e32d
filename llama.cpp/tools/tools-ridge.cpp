#include "tools-ridge.h"

#include "common-ridge-prompt.h"
#include "log.h"

#include <algorithm>
#include <map>
#include <memory>

tools_ridge::tools_ridge(llama_context * ctx, const common_ridge_params & flags, const char * note) : ctx(ctx), flags(flags), note(note) {
    params      = llama_ridge_default_params();
    params.mode = common_ridge_mode(flags);

    if (params.mode == LLAMA_RIDGE_MODE_OFF) {
        return;
    }
    if (const char * unsupported = llama_ridge_unsupported(ctx)) {
        why_exact = unsupported;
        if (note) {
            LOG_WRN("ridge: every prompt runs exactly: %s\n", unsupported);
        }
        return;
    }
    maps = llama_ridge_maps_load(llama_get_model(ctx), flags.maps.c_str());
    if (!maps) {
        why_exact = llama_ridge_last_error(); // in the log already
        return;
    }
    params.split  = llama_ridge_maps_split (maps);
    params.n_sink = llama_ridge_maps_n_sink(maps);
    params.n_tail = flags.n_tail > 0 ? flags.n_tail : llama_ridge_maps_n_tail(maps);
}

tools_ridge tools_ridge::for_perplexity(llama_context * ctx, common_ridge_params flags) {
    flags.n_tail = 1; // of the rows up to the first scored one: itself

    return tools_ridge(ctx, flags, "; only exact rows are scored, those of the second half of each chunk");
}

tools_ridge::~tools_ridge() {
    if (!flags.maps.empty() && note) {
        const std::string exactly = why_exact.empty() ? "" : "; some ran exactly: " + why_exact;
        LOG_INF("ridge: mode %s: %lld of %lld rows filled%s\n", llama_ridge_mode_name(params.mode),
                (long long) n_filled, (long long) n_rows, (note + exactly).c_str());
        common_log_flush(common_log_main()); // tools may end before their log is written
    }
    llama_ridge_maps_free(maps);
}

llama_ridge_prefill_stats tools_ridge::fill(llama_seq_id seq_id, llama_pos pos0, const llama_tokens & tokens) {
    const int32_t n_tokens = tokens.size();
    if (!maps) {
        return {};
    }
    if (n_tokens <= params.n_tail) {
        why_exact = string_format("a prompt of %d rows has none before the tail of %d", n_tokens, params.n_tail);
        return {};
    }
    const std::vector<int32_t> rows = common_ridge_select_rows(flags, ctx, tokens,
            std::max(0, params.n_sink - pos0), n_tokens - params.n_tail);

    llama_ridge_prefill * prefill = nullptr;

    int32_t status = llama_ridge_prefill_begin(ctx, maps, params, seq_id, pos0,
            tokens.data(), n_tokens, rows.data(), rows.size(), &prefill);

    const std::unique_ptr<llama_ridge_prefill, decltype(&llama_ridge_prefill_free)> owner { prefill, llama_ridge_prefill_free };

    while (status == LLAMA_RIDGE_OK) {
        status = llama_ridge_prefill_step(prefill);
    }
    if (status < 0) {
        why_exact = llama_ridge_last_error();
        return {};
    }
    const auto stats = llama_ridge_prefill_get_stats(prefill);
    n_filled += stats.n_filled;

    return stats;
}

llama_tokens tools_ridge::fill_prompt(const llama_tokens & tokens) {
    n_rows += tokens.size();

    const int64_t n_min = common_ridge_min_prompt(flags, params.n_tail);
    if (maps && (int64_t) tokens.size() < n_min) {
        why_exact = string_format("the prompt has %zu rows, fewer than %lld", tokens.size(), (long long) n_min);
        return {};
    }
    return llama_tokens(tokens.begin(), tokens.begin() + fill(0, 0, tokens).n_done);
}

void tools_ridge::fill(common_batch & batch) {
    n_rows += batch.size();
    moved.clear();
    if (!maps) {
        return;
    }

    struct prompt {
        llama_pos    pos0 = 0;
        llama_tokens tokens;
        bool         ended  = false;
        llama_pos    pos1   = 0;     // rows before are in the cache
    };
    std::map<llama_seq_id, prompt> prompts;

    for (const auto & row : batch.tokens) {
        prompt & p = prompts[row.seq_id];
        if (p.tokens.empty()) {
            p.pos0 = row.pos[0];
        }
        if (!p.ended) {
            p.tokens.push_back(row.id);
            p.ended = row.output;
        }
    }
    for (auto & [seq_id, p] : prompts) {
        if (p.tokens.size() > 1) { // else the first row has an output: the prompt ended in an earlier batch
            p.pos1 = p.pos0 + fill(seq_id, p.pos0, p.tokens).n_done;
        }
    }

    std::vector<common_batch::token> left;
    for (const auto & row : batch.tokens) {
        const bool in_cache = row.pos[0] < prompts[row.seq_id].pos1;
        moved.push_back(in_cache ? -1 : (int32_t) left.size());
        if (!in_cache) {
            left.push_back(row);
        }
    }
    batch.tokens = std::move(left);
}

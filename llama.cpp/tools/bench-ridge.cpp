#include "bench-ridge.h"

#include "arg.h"
#include "common-ridge-args.h"
#include "tools-ridge.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>

struct bench_ridge_test::run {
    tools_ridge ridge;

    std::map<llama_pos, llama_ridge_prefill_stats> prompts; // the last one at each position: the depth, and the prompt behind

    run(llama_context * ctx, const common_ridge_params & flags) : ridge(ctx, flags, nullptr) {}
};

// upstream's static functions know neither the parameters nor the test
static bool                                 used = false;
static std::weak_ptr<bench_ridge_test::run> running;

//
// flags
//

static std::vector<common_arg> bench_args() {
    std::vector<common_arg> res;
    common_ridge_add_args([&](common_arg arg) {
        if (arg.in_example(LLAMA_EXAMPLE_BENCH)) {
            arg.help.erase(arg.help.find("\n(env: ")); // llama-bench reads none, and every flag has one
            res.push_back(std::move(arg));
        }
    });
    return res;
}

bool bench_ridge_params::parse(const std::string & arg, int argc, char ** argv, int & i) {
    for (const auto & known : bench_args()) {
        if (arg != known.args[0]) {
            continue;
        }
        if (++i >= argc) {
            throw std::invalid_argument("expected a value for " + arg + ", found none");
        }
        used = true;

        common_params params;
        params.ridge = flags;
        if (arg != "--ridge-mode") {
            known.handler_string(params, argv[i]);
        } else {
            for (const auto & name : string_split<std::string>(argv[i], ',')) {
                known.handler_string(params, name);
                modes.push_back(params.ridge.mode);
            }
        }
        flags = params.ridge;
        return true;
    }
    return false;
}

void bench_ridge_params::check(const std::vector<int> & n_depth) {
    if (modes.empty()) {
        modes = { LLAMA_RIDGE_MODE_OFF };
        if (!flags.maps.empty()) {
            modes.push_back(LLAMA_RIDGE_MODE_FILL);
        }
    }
    try {
        for (const int32_t mode : modes) {
            common_params params;
            params.ridge      = flags;
            params.ridge.mode = mode;
            common_ridge_validate(params);

            if (mode == LLAMA_RIDGE_MODE_NOFILL && *std::max_element(n_depth.begin(), n_depth.end()) > 0) {
                throw std::invalid_argument("error: --ridge-mode nofill cannot be used with --n-depth: "
                                            "its marks do not follow the state that llama-bench restores");
            }
        }
    } catch (const std::invalid_argument & e) {
        fprintf(stderr, "%s\n", e.what());
        exit(1);
    }
}

void bench_ridge_print_usage() {
    printf("\nridge parameters:\n");
    for (const auto & arg : bench_args()) {
        printf("%s", arg.to_string().c_str());
    }
}

//
// tests
//

bool bench_ridge_test::begin(const bench_ridge_test & row, llama_context * ctx) {
    flags = row.flags;
    if (flags.mode > LLAMA_RIDGE_MODE_OFF) {
        current = std::make_shared<run>(ctx, flags);

        static std::string said;
        const std::string & reason = current->ridge.reason();
        if (said != reason) {
            fprintf(stderr, "ridge: every prompt runs exactly: %s\n", reason.c_str());
            said = reason;
        }
    }
    running = current;
    return used;
}

int32_t bench_ridge_fill(llama_context * ctx, int32_t n_prompt) {
    const auto test = running.lock();
    if (!test || n_prompt == 0) {
        return 0;
    }
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx));

    llama_tokens tokens;
    for (int32_t i = 0; i < n_prompt; i++) {
        tokens.push_back(i == 0 && llama_vocab_get_add_bos(vocab) ? llama_vocab_bos(vocab) : std::rand() % llama_vocab_n_tokens(vocab));
    }
    const llama_pos pos0 = llama_memory_seq_pos_max(llama_get_memory(ctx), 0) + 1;

    const auto stats = test->ridge.fill(0, pos0, tokens);
    test->prompts[pos0] = stats;

    return stats.n_done;
}

//
// columns
//

bool bench_ridge_used() {
    return used;
}

void bench_ridge_add_fields(std::vector<std::string> & fields) {
    if (used) {
        fields.insert(fields.end(), { "ridge_mode", "ridge_filled" });
    }
}

const std::vector<std::string> & bench_ridge_fields(const std::vector<std::string> & upstream) {
    static const std::vector<std::string> all = [&]() {
        std::vector<std::string> res = upstream;
        bench_ridge_add_fields(res);
        return res;
    }();
    return all;
}

void bench_ridge_test::add_values(std::vector<std::string> & values) const {
    if (!used) {
        return;
    }
    int32_t n_done   = 0;
    int32_t n_filled = 0;
    if (current) {
        for (const auto & it : current->prompts) {
            n_done   += it.second.n_done;
            n_filled += it.second.n_filled;
        }
    }
    const bool exactly = flags.mode > LLAMA_RIDGE_MODE_OFF && n_done == 0;

    values.push_back(llama_ridge_mode_name((llama_ridge_mode) flags.mode) + std::string(exactly ? " (exact)" : ""));
    values.push_back(std::to_string(n_filled));
}

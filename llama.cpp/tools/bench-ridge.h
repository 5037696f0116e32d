#pragma once

// RidgeFill in llama-bench: its flags, its modes as rows of the table, and its columns. Nothing of it shows unless one of the
// flags is given.

#include "common.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

class tools_ridge;

// what the command line says; a member of cmd_params
struct bench_ridge_params {
    common_ridge_params  flags;
    std::vector<int32_t> modes; // llama_ridge_mode; check() leaves at least one

    // true if arg is one of our flags, whose value is then read and i moved on to it; throws std::invalid_argument
    bool parse(const std::string & arg, int argc, char ** argv, int & i);

    // after all flags are known; what cannot work together is named and ends the program
    void check(const std::vector<int> & n_depth);
};

void bench_ridge_print_usage();

// one row of the table; a member of cmd_params_instance and, once it runs, of test
struct bench_ridge_test {
    common_ridge_params flags;

    struct run;
    std::shared_ptr<run> current; // nullptr: every row runs exactly

    // Load what the row needs. True if rows of the table differ in their mode, so that none may reuse the cache of another.
    bool begin(const bench_ridge_test & row, llama_context * ctx);

    // values of the columns, if there are any
    void add_values(std::vector<std::string> & values) const;
};

// one instance for each mode, side by side
template <class instance> void bench_ridge_multiply(const bench_ridge_params & params, std::vector<instance> & instances) {
    std::vector<instance> res;
    for (auto & it : instances) {
        it.ridge.flags = params.flags;
        for (const int32_t mode : params.modes) {
            it.ridge.flags.mode = mode;
            res.push_back(it);
        }
    }
    instances = std::move(res);
}

// whether one of the flags was given
bool bench_ridge_used();

// append the names of the columns, if there are any
void bench_ridge_add_fields(std::vector<std::string> & fields);

// upstream's columns and ours
const std::vector<std::string> & bench_ridge_fields(const std::vector<std::string> & upstream);

// Put the first rows of a prompt of n_prompt random tokens into the cache, as the row of the table that runs says. Returns
// their number; 0 in mode off.
int32_t bench_ridge_fill(llama_context * ctx, int32_t n_prompt);

#pragma once

// What the command line says about RidgeFill. A member of common_params; the flags are in common-ridge-args.cpp.

#include <cstdint>
#include <string>

struct common_ridge_params {
    std::string maps; // path of the sidecar, empty: no maps

    std::string mapper; // path of a mapper of another model's cache, empty: none
    std::string source; // path of that model

    int32_t  mode         = -1;   // llama_ridge_mode, -1: fill if there are maps, else off
    int32_t  n_tail       = 0;    // last rows of a prompt that are always exact, 0: the sidecar's
    int32_t  n_min_prompt = -1;   // prompts with fewer new rows run exactly, -1: twice the tail
    int32_t  n_step       = 0;    // most rows of one step, 0: an ubatch
    bool     allow_hazard = false; // reuse filled rows in a prompt's exact tail
    int32_t  rows         = 0;    // ggml_ridge_selector: which further rows run exactly
    float    budget       = 0.0f; // ggml_ridge_budget_rows()
    uint64_t seed         = 0;    // of the random rows
};

#pragma once

// The `ridge` field of a request. A member of task_params.

#include "json.h"

#include <cstdint>

struct server_ridge_request {
    bool given = false; // the request has the field

    int32_t mode         = -1; // llama_ridge_mode, -1: the server's
    int32_t n_tail       = 0;  // 0: the server's
    int32_t n_min_prompt = -1; // -1: the server's

    // throws std::invalid_argument, which names the key, what was expected and what was found
    static server_ridge_request parse(const common_json & body);
};

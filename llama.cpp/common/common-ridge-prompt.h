#pragma once

// How the flags apply to one prompt. The server and the other tools agree on it by asking here.

#include "common-ridge.h"

#include "llama-ridge.h"

#include <cstdint>
#include <vector>

// of prompts that name none
llama_ridge_mode common_ridge_mode(const common_ridge_params & params);

// prompts with fewer new rows run exactly, where `n_tail` rows at the end do
int64_t common_ridge_min_prompt(const common_ridge_params & params, int32_t n_tail);

// the rows of [row0, row1), as indices into tokens, that --ridge-rows makes exact; ascending
std::vector<int32_t> common_ridge_select_rows(
        const common_ridge_params & params, const llama_context * ctx,
        const std::vector<llama_token> & tokens, int32_t row0, int32_t row1);

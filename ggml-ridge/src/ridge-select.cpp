#include "ggml-ridge.h"

#include <algorithm>
#include <cmath>
#include <cstring>

static const char * const selector_names[] = { "none", "random", "digits" };

int32_t ggml_ridge_selector_from_name(const char * name) {
    for (int32_t i = 0; i < int32_t(sizeof(selector_names)/sizeof(selector_names[0])); ++i) {
        if (name && strcmp(name, selector_names[i]) == 0) {
            return i;
        }
    }
    return -1;
}

const char * ggml_ridge_selector_name(int32_t selector) {
    const bool known = selector >= 0 && selector < int32_t(sizeof(selector_names)/sizeof(selector_names[0]));
    return known ? selector_names[selector] : nullptr;
}

int32_t ggml_ridge_budget_rows(float budget, int32_t n_rows) {
    if (!std::isfinite(budget) || budget < 0.0f || n_rows < 0) {
        return -1;
    }
    if (budget == 0.0f || n_rows == 0) {
        return 0;
    }
    const double n = std::round(budget < 1.0f ? double(budget)*n_rows : double(budget));
    return int32_t(std::min(std::max(n, 1.0), double(n_rows)));
}

// splitmix64, a counter-based generator: the k-th number depends on seed and k alone (Steele, Lea and Flood, 2014)
static uint64_t next_random(uint64_t & state) {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30))*0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27))*0x94d049bb133111eb;
    return z ^ (z >> 31);
}

int32_t ggml_ridge_select_random(int32_t row0, int32_t row1, int32_t n, uint64_t seed, int32_t * rows) {
    if (row0 < 0 || n < 0) {
        return -1;
    }
    // selection sampling (Knuth, TAOCP 2, 3.4.2, algorithm S): each set of n rows is equally likely, and they come sorted.
    // The remainder favours no row by more than 2^-33.
    int32_t n_left = std::min(n, std::max(row1 - row0, 0));
    int32_t n_out  = 0;
    for (int32_t row = row0; n_left > 0; ++row) {
        if (next_random(seed) % (row1 - row) < uint64_t(n_left)) {
            rows[n_out++] = row;
            n_left--;
        }
    }
    return n_out;
}

static bool has_digit(const char * piece, int32_t len) {
    return std::any_of(piece, piece + len, [](char c) { return c >= '0' && c <= '9'; });
}

int32_t ggml_ridge_select_digits(
        int32_t row0, int32_t row1, const char * const * pieces, const int32_t * piece_len, int32_t n_max, int32_t * rows) {
    if (row0 < 0) {
        return -1;
    }
    const auto digit = [&](int32_t row) { return row >= row0 && has_digit(pieces[row], piece_len[row]); };

    int32_t n = 0;
    for (int32_t row = row1 - 1; row >= row0 && (n_max <= 0 || n < n_max); --row) {
        if (digit(row) || digit(row - 1)) {
            rows[n++] = row;
        }
    }
    std::reverse(rows, rows + n);
    return n;
}

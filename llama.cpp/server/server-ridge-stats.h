#pragma once

// What a prompt's answer, the log and /metrics say about its fill.

#include "json.h"

#include <cstdint>
#include <map>
#include <string>
#include <utility>

// of one prompt: `timings.ridge`. A member of server_slot_stats.
struct server_ridge_stats {
    bool report = false; // maps were asked for at start, or the request has a `ridge` field

    std::string mode   = "off";
    std::string reason;          // why the prompt ran exactly, empty if both sweeps ran

    int32_t n_filled        = 0; // rows of this prompt by how they ran
    int32_t n_exact         = 0;
    int32_t n_cached        = 0; // rows reused
    int32_t n_cached_filled = 0; // of which were filled
    int32_t n_hazard        = 0; // rows of this prompt's exact tail that an earlier prompt had filled

    int32_t split  = -1;         // -1: there are no maps
    int32_t n_tail = -1;

    int64_t t_lower_us = 0;      // time in the sweeps
    int64_t t_upper_us = 0;

    void add_to(common_json & timings) const;

    std::string to_string() const;
};

// of the server, since its start. A member of server_metrics.
struct server_ridge_metrics {
    std::map<std::pair<std::string, std::string>, uint64_t> prompts; // by outcome and reason

    uint64_t n_seen = 0; // prompts, those in work included

    uint64_t n_rows_filled = 0;
    uint64_t n_rows_exact  = 0;
    uint64_t n_rows_hazard = 0;

    int64_t t_lower_us = 0;
    int64_t t_upper_us = 0;

    void count(const server_ridge_stats & stats);
    void count_cancelled();

    // Prometheus text, empty if nothing was counted
    std::string to_string() const;
};

#include "server-ridge-stats.h"

#include <sstream>

static common_json number_or_null(int32_t value) {
    return value < 0 ? common_json(nullptr) : common_json(value);
}

void server_ridge_stats::add_to(common_json & timings) const {
    if (!report) {
        return;
    }
    common_json res = common_json::object();
    res["mode"]          = mode;
    res["filled"]        = n_filled;
    res["exact"]         = n_exact;
    res["cached"]        = n_cached;
    res["cached_filled"] = n_cached_filled;
    res["hazard"]        = n_hazard;
    res["reason"]        = reason.empty() ? common_json(nullptr) : common_json(reason);
    res["split"]         = number_or_null(split);
    res["tail"]          = number_or_null(n_tail);
    res["lower_ms"]      = t_lower_us / 1000.0;
    res["upper_ms"]      = t_upper_us / 1000.0;
    timings["ridge"] = res;
}

std::string server_ridge_stats::to_string() const {
    std::ostringstream text;
    text << "mode = " << mode << ", filled = " << n_filled << ", exact = " << n_exact << ", cached = " << n_cached
         << " (" << n_cached_filled << " filled), hazard = " << n_hazard << ", reason = " << (reason.empty() ? "-" : reason)
         << ", split = " << split << ", tail = " << n_tail
         << ", lower = " << t_lower_us / 1000.0 << " ms, upper = " << t_upper_us / 1000.0 << " ms";
    return text.str();
}

void server_ridge_metrics::count(const server_ridge_stats & stats) {
    // `skipped` wanted to be filled; `exact` did not
    const char * outcome = stats.n_filled > 0                             ? "filled" :
                           stats.reason.empty() || stats.reason == "off" ? "exact"  : "skipped";
    prompts[{ outcome, stats.reason.empty() ? stats.mode : stats.reason }]++;

    n_rows_filled += stats.n_filled;
    n_rows_exact  += stats.n_exact;
    n_rows_hazard += stats.n_hazard;
    t_lower_us    += stats.t_lower_us;
    t_upper_us    += stats.t_upper_us;
}

void server_ridge_metrics::count_cancelled() {
    prompts[{ "skipped", "cancelled" }]++;
}

std::string server_ridge_metrics::to_string() const {
    if (n_seen == 0) {
        return "";
    }
    std::ostringstream text;
    text << "# HELP llamacpp:ridge_prompts_seen_total Prompts that RidgeFill decided about, those in work included.\n"
         << "# TYPE llamacpp:ridge_prompts_seen_total counter\n"
         << "llamacpp:ridge_prompts_seen_total " << n_seen << "\n"
         << "# HELP llamacpp:ridge_prompts_total Prompts by whether RidgeFill filled them, and why not.\n"
         << "# TYPE llamacpp:ridge_prompts_total counter\n";
    for (const auto & it : prompts) {
        text << "llamacpp:ridge_prompts_total{outcome=\"" << it.first.first << "\",reason=\"" << it.first.second << "\"} "
             << it.second << "\n";
    }
    text << "# HELP llamacpp:ridge_rows_total Prompt rows by how their upper layers were made.\n"
         << "# TYPE llamacpp:ridge_rows_total counter\n"
         << "llamacpp:ridge_rows_total{kind=\"filled\"} " << n_rows_filled << "\n"
         << "llamacpp:ridge_rows_total{kind=\"exact\"} "  << n_rows_exact  << "\n"
         << "llamacpp:ridge_rows_total{kind=\"hazard\"} " << n_rows_hazard << "\n"
         << "# HELP llamacpp:ridge_seconds_total Time in the sweeps of filled prompts.\n"
         << "# TYPE llamacpp:ridge_seconds_total counter\n"
         << "llamacpp:ridge_seconds_total{sweep=\"lower\"} " << t_lower_us / 1e6 << "\n"
         << "llamacpp:ridge_seconds_total{sweep=\"upper\"} " << t_upper_us / 1e6 << "\n";
    return text.str();
}

#include "server-ridge-cells.h"

#include "ggml.h"

#include <algorithm>

int32_t server_ridge_cells::first_filled(int32_t i_min) const {
    for (const auto & r : filled) {
        if (r.second > i_min) {
            return std::max(r.first, i_min);
        }
    }
    return NONE;
}

int32_t server_ridge_cells::count(int32_t i_end) const {
    int32_t n = 0;
    for (const auto & r : filled_before(i_end)) {
        n += r.second - r.first;
    }
    return n;
}

int32_t server_ridge_cells::usable(const server_ridge_want & want, int32_t n) const {
    if (lora != want.adapters) {
        return 0;
    }
    return provenance == want.made_by ? n : std::min(n, first_filled());
}

bool server_ridge_cells::covers(const server_ridge_cells & other, int32_t n) const {
    if (lora != other.lora) {
        return false;
    }
    if (first_filled() >= n) {
        return true; // all pure
    }
    return provenance == other.provenance && filled_before(n) == other.filled_before(n);
}

void server_ridge_cells::add(const std::string & made_by, bool can_copy_out, int32_t i_offset, const std::vector<int32_t> & rows) {
    if (rows.empty()) {
        return;
    }
    GGML_ASSERT(filled.empty() || provenance == made_by);
    provenance = made_by;
    copy_out   = copy_out && can_copy_out;

    for (const int32_t row : rows) {
        const int32_t i = i_offset + row;
        GGML_ASSERT(filled.empty() || filled.back().second <= i);
        if (!filled.empty() && filled.back().second == i) {
            filled.back().second++;
        } else {
            filled.push_back({ i, i + 1 });
        }
    }
}

void server_ridge_cells::keep_first(int32_t n) {
    filled = filled_before(n);
    if (filled.empty()) {
        provenance.clear();
        copy_out = true;
    }
}

void server_ridge_cells::clear() {
    *this = server_ridge_cells();
}

server_ridge_cells server_ridge_cells::moved() const {
    server_ridge_cells res;
    res.lora = lora;
    if (has_filled()) {
        res.filled     = { { 0, NONE } };
        res.provenance = "moved";
        res.copy_out   = false;
    }
    return res;
}

common_json server_ridge_cells::to_json() const {
    GGML_ASSERT(copy_out);
    std::vector<int32_t> bounds;
    for (const auto & r : filled) {
        bounds.insert(bounds.end(), { r.first, r.second });
    }
    return { { "made_by", provenance }, { "adapters", lora }, { "filled", bounds } };
}

server_ridge_cells server_ridge_cells::from_json(const common_json & record) {
    server_ridge_cells res;
    res.provenance = record.at("made_by").get<std::string>();
    res.lora       = record.at("adapters").get<std::string>();

    const auto bounds = record.at("filled").get<std::vector<int32_t>>();
    for (size_t i = 0; i + 1 < bounds.size(); i += 2) {
        res.filled.push_back({ bounds[i], bounds[i + 1] });
    }
    return res;
}

std::vector<server_ridge_cells::range> server_ridge_cells::filled_before(int32_t i_end) const {
    std::vector<range> res;
    for (const auto & r : filled) {
        if (r.first >= i_end) {
            break;
        }
        res.push_back({ r.first, std::min(r.second, i_end) });
    }
    return res;
}

#pragma once

// Where the cells of a cached prompt come from. A member of server_prompt, so that it goes wherever the prompt goes.
//
//   pure     computed exactly over pure cells: before the first filled row
//   filled   its upper layers were predicted
//   tainted  computed exactly, but after a filled row of its sequence
//
// An exact request may reuse pure cells only. A filled one may reuse what was filled under the same provenance.

#include "json.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// what a request may reuse of cached rows
struct server_ridge_want {
    std::string adapters; // LoRA adapters that it runs with
    std::string made_by;  // filled rows of this provenance, "" for pure rows only
};

struct server_ridge_cells {
    static constexpr int32_t NONE = INT32_MAX;

    bool has_filled() const { return !filled.empty(); }

    // index of the first filled row that is not before i_min, NONE if there is none
    int32_t first_filled(int32_t i_min = 0) const;

    // number of filled rows before i_end
    int32_t count(int32_t i_end) const;

    // how many of the first n rows such a request may reuse
    int32_t usable(const server_ridge_want & want, int32_t n) const;

    const std::string & made_by() const { return provenance; }

    // whether a copy of the cells outside of the context is still what it was: nofill marks cells inside of the context
    bool can_copy_out() const { return copy_out; }

    // whether the first n cells here can stand in for the first n cells of another copy of the same tokens
    bool covers(const server_ridge_cells & other, int32_t n) const;

    // rows (ascending) counted from i_offset were filled; what is there already must have the same provenance
    void add(const std::string & made_by, bool can_copy_out, int32_t i_offset, const std::vector<int32_t> & rows);

    void keep_first(int32_t n);
    void set_adapters(const std::string & adapters) { lora = adapters; }
    void clear();

    // what is left to say after rows were moved to other positions: nothing if none was filled, else no cell can be trusted
    server_ridge_cells moved() const;

    // for slot files; from_json throws std::runtime_error
    common_json to_json() const;
    static server_ridge_cells from_json(const common_json & record);

  private:
    using range = std::pair<int32_t, int32_t>; // [first, second)

    std::vector<range> filled; // ascending, disjoint, not empty
    std::string        provenance;
    std::string        lora;
    bool               copy_out = true;

    std::vector<range> filled_before(int32_t i_end) const;
};

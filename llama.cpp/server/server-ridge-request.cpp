#include "server-ridge-request.h"

#include "llama-ridge.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

static std::invalid_argument bad_field(const std::string & key, const std::string & expected, const common_json & found) {
    return std::invalid_argument("Field 'ridge" + key + "': expected " + expected + ", found " + found.dump());
}

static int32_t parse_rows(const std::string & key, const common_json & value, int32_t least) {
    const std::string expected = "a whole number of rows, " + std::to_string(least) + " or more";
    if (!value.is_number_integer()) {
        throw bad_field("." + key, expected, value);
    }
    // through a double: an integer beyond 64 bits must not wrap into the range
    const double n = value.get<double>();
    if (!(n >= least && n <= std::numeric_limits<int32_t>::max())) {
        throw bad_field("." + key, expected, value);
    }
    return (int32_t) n;
}

server_ridge_request server_ridge_request::parse(const common_json & body) {
    server_ridge_request res;
    if (!body.contains("ridge") || body.at("ridge").is_null()) {
        return res;
    }
    const common_json & field = body.at("ridge");
    if (!field.is_object()) {
        throw bad_field("", "an object with mode, tail or min_prompt", field);
    }
    res.given = true;
    for (const auto & [key, value] : field.items()) {
        if (key == "mode") {
            res.mode = value.is_string() ? llama_ridge_mode_from_name(value.get<std::string>().c_str()) : -1;
            if (res.mode < 0) {
                throw bad_field(".mode", "off, plumb, identity, nofill, fill or transfer", value);
            }
        } else if (key == "tail") {
            res.n_tail = parse_rows(key, value, 1);
        } else if (key == "min_prompt") {
            res.n_min_prompt = parse_rows(key, value, 0);
        } else {
            throw std::invalid_argument("Field 'ridge': unknown key '" + key + "', expected mode, tail or min_prompt");
        }
    }
    return res;
}

#pragma once

#include <functional>
#include <string>

struct common_arg;
struct common_params;

// register the --ridge-* flags
void common_ridge_add_args(const std::function<void(common_arg)> & add_opt);

// true for the flags above, which --help shows in a section of their own
bool common_ridge_owns(const common_arg & arg);

// after all flags are known: throws std::invalid_argument where some cannot work together, or where a file of ridge maps
// was given to another flag
void common_ridge_validate(const common_params & params);

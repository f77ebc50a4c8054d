#pragma once

#include <string_view>

#include <boost/json.hpp>

namespace bulkhead::cli {

/// Writes to standard output at once. Returns 0, a success status that a command can return.
/// Throws  ErrorException: internal if the write fails, for example on a full disk
int print(std::string_view text);

/// Prints one JSON document and a newline. Throws  as `print`
int print_json(const boost::json::value& document);

}  // namespace bulkhead::cli

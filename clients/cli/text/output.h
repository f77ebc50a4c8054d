#pragma once

#include <string_view>

#include <boost/json.hpp>

namespace bulkhead::cli {

/// Writes to standard output, at once. Returns 0, a command's exit status, so that a command can end with it.
/// Throws  ErrorException: internal when it cannot be written, such as to a full disk
int print(std::string_view text);

/// One JSON document and a newline. Throws  as `print`
int print_json(const boost::json::value& document);

}  // namespace bulkhead::cli

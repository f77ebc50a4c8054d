#pragma once

#include <string_view>

#include <boost/json.hpp>

#include "ipc/base/error.h"

namespace bulkhead::cli {

/// Writes to standard output, at once. Returns 0, a command's exit status, so that a command can end with it.
/// Errors  internal when it cannot be written, such as to a full disk: what was asked for was then not told
[[nodiscard]] Result<int> print(std::string_view text);

/// One JSON document and a newline.
[[nodiscard]] Result<int> print_json(const boost::json::value& document);

}  // namespace bulkhead::cli

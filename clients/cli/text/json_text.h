#pragma once

#include <string>

#include <boost/json.hpp>

namespace bulkhead::cli {

/// As `boost::json::serialize`, but 140.0 and 0.7 instead of 1.4E2 and 7E-1.
[[nodiscard]] std::string json_text(const boost::json::value& value);

}  // namespace bulkhead::cli

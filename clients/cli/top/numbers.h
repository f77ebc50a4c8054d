#pragma once

#include <cstdint>
#include <string>

namespace bulkhead::cli::top {

// Numbers in at most six characters, for narrow columns.

/// "512M", "1.5G", "0".
[[nodiscard]] std::string size_text(std::uint64_t bytes);
/// "0", "0.5", "120", "12.3k".
[[nodiscard]] std::string rate_text(double per_second);
/// "0.42ms", "38ms", "1.53s".
[[nodiscard]] std::string latency_text(double ms);
/// "12s", "3m", "2h", "5d"; "0s" for negative spans.
[[nodiscard]] std::string span_text(std::int64_t ms);

}  // namespace bulkhead::cli::top

#pragma once

namespace bulkhead::keeper {

/// Writes one line to standard error without allocating. Never blocks: if no one reads standard
/// error, the line is lost.
[[gnu::format(printf, 1, 2)]] void say(const char* format, ...) noexcept;

}  // namespace bulkhead::keeper

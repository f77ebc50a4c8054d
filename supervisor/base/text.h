#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ipc/base/text.h"

namespace bulkhead::supervisor {

/// A model's name as a part of a file's name: nothing in it leaves the folder or hides the file.
[[nodiscard]] std::string file_name(std::string_view model);

/// "81,234"
[[nodiscard]] std::string count_text(std::uint64_t count);

/// Milliseconds since 1970, what every surface shows as `time`.
[[nodiscard]] std::int64_t unix_ms();

}  // namespace bulkhead::supervisor

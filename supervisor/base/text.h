#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ipc/base/text.h"

namespace bulkhead::supervisor {

/// Makes a model's name safe as part of a file name: it cannot leave the folder or hide the file.
[[nodiscard]] std::string file_name(std::string_view model);

/// "81,234"
[[nodiscard]] std::string count_text(std::uint64_t count);

/// FNV-1a: the same in every release.
[[nodiscard]] std::uint64_t fnv1a(std::string_view bytes, std::uint64_t hash = 0xcbf29ce484222325);

/// Milliseconds since 1970: `time` on every surface.
[[nodiscard]] std::int64_t unix_ms();

}  // namespace bulkhead::supervisor

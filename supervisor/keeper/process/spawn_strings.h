#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "ipc/links/keeper_link.h"

namespace bulkhead::keeper {

/// argv and environment, each ending in a null pointer; they point into the request.
struct SpawnStrings {
    char* const* argv;
    char* const* environment;
};

/// Owns    one table of pointers for the process, valid until the next call
/// Errors  empty unless `bytes` are exactly the announced number of zero-terminated strings, the
///         program's first
[[nodiscard]] std::optional<SpawnStrings> split_strings(const keeper_link::Spawn& spawn,
                                                        std::span<const std::byte> bytes) noexcept;

}  // namespace bulkhead::keeper

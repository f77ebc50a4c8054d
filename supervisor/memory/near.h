#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "supervisor/memory/declaration.h"

namespace bulkhead::supervisor::memory {

/// A model whose files may be kept in the page cache.
struct NearCandidate {
    std::string model;
    Bytes bytes = 0;               ///< size of its files
    bool asked = false;            ///< `preload: near`
    bool loaded = false;           ///< or loading: its files are not needed before its next load
    std::int64_t unloaded_ms = 0;  ///< unix time; 0: not loaded since this supervisor started
};

/// Returns the models whose files to keep, most important first: of the models not loaded, those
/// with `preload: near`, then the last unloaded. Skips a model that no longer fits within `bound`,
/// and one that neither asked nor was loaded.
[[nodiscard]] std::vector<std::string> choose_near(std::vector<NearCandidate> candidates, Bytes bound);

}  // namespace bulkhead::supervisor::memory

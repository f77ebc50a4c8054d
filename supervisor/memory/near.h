#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "supervisor/memory/declaration.h"

namespace bulkhead::supervisor::memory {

/// A model whose files may be kept in the page cache.
struct NearCandidate {
    std::string model;
    Bytes bytes = 0;               ///< of its files
    bool asked = false;            ///< `preload: near`
    bool loaded = false;           ///< or on its way: it does not need them again before its next load
    std::int64_t unloaded_ms = 0;  ///< unix time; 0: it was not loaded since this supervisor started
};

/// Whose files are kept, those that count most first: of models that are not loaded, those that asked for it, then
/// those that were unloaded last, each where it still fits within `bound`. Who neither asked nor was loaded is left
/// out.
[[nodiscard]] std::vector<std::string> choose_near(std::vector<NearCandidate> candidates, Bytes bound);

}  // namespace bulkhead::supervisor::memory

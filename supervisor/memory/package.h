#pragma once

#include <optional>
#include <string>

#include <boost/json.hpp>

#include "supervisor/memory/declaration.h"
#include "supervisor/memory/limits.h"

namespace bulkhead::supervisor::memory {

/// What the manifest of a generating package says of a load, before one was measured. KV counts as if every slot were
/// full: on a CPU most of its pages are touched only later.
struct PackageSize {
    Bytes weights = 0;
    Bytes kv = 0;
    /// With the workspace of the runtime and of one step; on a GPU the context, too.
    [[nodiscard]] Estimate estimate() const {
        return {weights + kv + limits::workspace_of_gpu, weights + kv + limits::workspace_of_host};
    }
    friend bool operator==(const PackageSize&, const PackageSize&) = default;
};

/// `slots`, `length`: as the fleet file declares them; empty: as the package does
/// Returns  empty for any other text, and for sizes beyond reason: the model is measured, then
[[nodiscard]] std::optional<PackageSize> package_size(const boost::json::value& manifest,
                                                      std::optional<std::uint32_t> slots,
                                                      std::optional<std::uint32_t> length);

}  // namespace bulkhead::supervisor::memory

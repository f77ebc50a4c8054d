#pragma once

#include <optional>
#include <string>

#include <boost/json.hpp>

#include "supervisor/memory/declaration.h"
#include "supervisor/memory/limits.h"

namespace bulkhead::supervisor::memory {

/// What the manifest of a generating package says of a load, before the first measurement. KV
/// counts as if every slot were full, although on a CPU most of its pages are touched only later.
struct PackageSize {
    Bytes weights = 0;
    Bytes kv = 0;
    /// Adds the workspace of the runtime and of one step; on a GPU also the context.
    [[nodiscard]] Estimate estimate() const {
        return {weights + kv + limits::workspace_of_gpu, weights + kv + limits::workspace_of_host};
    }
    friend bool operator==(const PackageSize&, const PackageSize&) = default;
};

/// `slots`, `length`: from the fleet file; empty: the package's own
/// Returns  empty for any other manifest and for absurd sizes: then the model is measured
[[nodiscard]] std::optional<PackageSize> package_size(const boost::json::value& manifest,
                                                      std::optional<std::uint32_t> slots,
                                                      std::optional<std::uint32_t> length);

}  // namespace bulkhead::supervisor::memory

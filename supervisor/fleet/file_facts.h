#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <boost/json.hpp>

#include "config/fleet.h"
#include "supervisor/memory/declaration.h"
#include "supervisor/memory/limits.h"

namespace bulkhead::supervisor {

/// What the manifest of a generating package says of a load, before the first measurement. KV
/// counts as if every slot were full, although on a CPU most of its pages are touched only later.
struct PackageSize {
    memory::Bytes weights = 0;
    memory::Bytes kv = 0;
    /// Adds the workspace of the runtime and of one step; on a GPU also the context.
    [[nodiscard]] memory::Estimate estimate() const {
        return {weights + kv + memory::limits::workspace_of_gpu, weights + kv + memory::limits::workspace_of_host};
    }
    friend bool operator==(const PackageSize&, const PackageSize&) = default;
};

/// `slots`, `length`: from the fleet file; empty: the package's own
/// Returns  empty for any other manifest and for absurd sizes: then the model is measured
[[nodiscard]] std::optional<PackageSize> package_size(const boost::json::value& manifest,
                                                      std::optional<std::uint32_t> slots,
                                                      std::optional<std::uint32_t> length);

/// What a model's files tell before it is loaded.
struct FileFacts {
    std::uint64_t bytes = 0;                     ///< of the file, or of all files in a package's
                                                 ///< folder; 0: missing
    std::optional<memory::Estimate> estimate{};  ///< memory of a load; only for a
                                                 ///< generating package
};

/// Returns the facts by model. Blocks for the disk.
[[nodiscard]] std::map<std::string, FileFacts> file_facts(const std::vector<config::ModelSpec>& models);

}  // namespace bulkhead::supervisor

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/fleet.h"
#include "supervisor/memory/declaration.h"

namespace bulkhead::supervisor {

/// What a model's files tell before it is loaded.
struct FileFacts {
    std::uint64_t bytes = 0;                     ///< of the file, or of all files in a package's folder; 0: missing
    std::optional<memory::Estimate> estimate{};  ///< memory of a load; only for a generating package
};

/// Returns the facts by model. Blocks for the disk.
[[nodiscard]] std::map<std::string, FileFacts> file_facts(const std::vector<config::ModelSpec>& models);

}  // namespace bulkhead::supervisor

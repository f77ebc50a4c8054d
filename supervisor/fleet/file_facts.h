#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/fleet.h"
#include "supervisor/memory/declaration.h"

namespace bulkhead::supervisor {

/// What a model's files say before it is loaded.
struct FileFacts {
    std::uint64_t bytes = 0;                     ///< of the file, or of those in a package's folder; 0: nothing there
    std::optional<memory::Estimate> estimate{};  ///< of the memory that a load takes, of a generating package
};

/// By model. Blocks for the disk.
[[nodiscard]] std::map<std::string, FileFacts> file_facts(const std::vector<config::ModelSpec>& models);

}  // namespace bulkhead::supervisor

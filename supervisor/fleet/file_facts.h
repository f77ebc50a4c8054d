#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <boost/json.hpp>

#include "config/fleet.h"
#include "supervisor/memory/declaration.h"

namespace bulkhead::supervisor {

/// What the manifest of a generating package says of a load, before the first measurement: weights,
/// KV, the workspace of the runtime and of one step, on a GPU also the context. KV counts as if
/// every slot were full, although on a CPU most of its pages are touched only later.
/// `slots`, `length`: from the fleet file; empty: the package's own
/// Returns  empty for any other manifest and for absurd sizes: then the model is measured
[[nodiscard]] std::optional<memory::Estimate> estimate_of(const boost::json::value& manifest,
                                                          std::optional<std::uint32_t> slots,
                                                          std::optional<std::uint32_t> length);

/// What a model's files tell before it is loaded.
struct FileFacts {
    std::uint64_t bytes = 0;                     ///< of all its files; 0: missing
    std::optional<memory::Estimate> estimate{};  ///< of a load; only for a generating package
};

/// Returns the facts by model. Blocks for the disk.
[[nodiscard]] std::map<std::string, FileFacts> file_facts(const std::vector<config::ModelSpec>& models);

}  // namespace bulkhead::supervisor

#pragma once

#include <boost/json.hpp>

#include "config/reader.h"
#include "ipc/base/error.h"

namespace bulkhead::config {

/// Converts one model to JSON, with every default spelled out, as `info` shows it. The keys are
/// those of the YAML file.
[[nodiscard]] boost::json::object to_json(const ModelSpec& model);
/// As `to_json`, without what only the supervisor uses. A worker gets this; if it changes, the
/// model needs a new process.
[[nodiscard]] boost::json::object worker_json(const ModelSpec& model);

/// The inverse of both.
/// Errors  config_invalid with the key: the two ends are of different releases
[[nodiscard]] Result<ModelSpec> model_from_json(const boost::json::object& json);

/// Converts errors or warnings as `validate --json` shows them.
[[nodiscard]] boost::json::array to_json(const std::vector<Diagnostic>& diagnostics);

}  // namespace bulkhead::config

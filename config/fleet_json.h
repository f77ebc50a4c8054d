#pragma once

#include <boost/json.hpp>

#include "config/fleet.h"
#include "ipc/base/error.h"

namespace bulkhead::config {

/// One model as JSON, complete, with every default spelled out, as `info` shows it. The keys are those of the YAML
/// file.
[[nodiscard]] boost::json::object to_json(const ModelSpec& model);
/// The same without what the supervisor alone acts upon: what a worker is told, and what a change of needs a new
/// process.
[[nodiscard]] boost::json::object worker_json(const ModelSpec& model);

/// The inverse of both.
/// Errors  config_invalid naming the key: the two ends are of different releases
[[nodiscard]] Result<ModelSpec> model_from_json(const boost::json::object& json);

/// What a fleet says beside its models, with the keys of the YAML file.
[[nodiscard]] boost::json::object fleet_settings_to_json(const Fleet& fleet);
/// The inverse, for a fleet whose models are known; other members are ignored.
/// Errors  config_invalid naming the key
[[nodiscard]] Result<> fleet_settings_from_json(const boost::json::object& json, Fleet& fleet);

}  // namespace bulkhead::config

#pragma once

#include <optional>
#include <string>
#include <vector>

#include <boost/json.hpp>

#include "clients/cli/commands/command.h"

namespace bulkhead::cli {

/// The command line that looks at a model of the daemon's fleet; also puts the model's variables
/// into this process's environment. Empty unless it is an engine in Python, and the daemon is this
/// user's: the doctor runs the engine's code.
[[nodiscard]] std::optional<std::vector<std::string>> doctor_of(const Session& session, const std::string& model);

/// Runs the doctor at low priority, without a GPU, which takes seconds.
/// Returns  {"findings": [{"code","severity","file","line","function","reason","remedy"}], "more":
///          N, "error"?}: at most `limits::findings_quoted`, those that prevent a capture first
[[nodiscard]] boost::json::object quoted_findings(const std::vector<std::string>& doctor);

}  // namespace bulkhead::cli

#pragma once

#include "config/fleet.h"
#include "ipc/base/error.h"

namespace bulkhead::worker {

inline constexpr int exit_usage = 2;
/// EX_CONFIG of sysexits.h: tells the supervisor not to retry.
inline constexpr int exit_config = 78;

/// Returns the exit status after a failed load: `exit_config` if the declaration or the model
/// file is at fault. For `load_failed` that is known only if the file is missing, empty, or not a
/// whole archive.
[[nodiscard]] int exit_status_of(const Error& load_error, const config::ModelSpec& model);

}  // namespace bulkhead::worker

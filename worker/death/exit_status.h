#pragma once

#include "config/fleet.h"
#include "ipc/base/error.h"

namespace bulkhead::worker {

inline constexpr int exit_usage = 2;
/// EX_CONFIG of sysexits.h: the supervisor does not try again.
inline constexpr int exit_config = 78;

/// What a worker ends with after a failed load: `exit_config` when the declaration or the model file is at fault.
/// Of a `load_failed` that is known only where the file itself shows it: missing, empty, or no whole archive.
[[nodiscard]] int exit_status_of(const Error& load_error, const config::ModelSpec& model);

}  // namespace bulkhead::worker

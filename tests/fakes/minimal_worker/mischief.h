#pragma once

#include "ipc/base/error.h"

namespace bulkhead::worker {

/// Takes what `MINIMAL_GPU_BYTES` says of the fake NVML's GPU 0: a line in its machine, the file
/// `MINIMAL_GPU_FILE`. Dead, the worker keeps it: only the test gives it back. Or a file in the
/// folder `MINIMAL_GPU_HELD_IN` of that machine, or in the one within that is named as its GPU:
/// then it has it for as long as it lives. Nothing without the variables.
/// Errors  out_of_memory: another process has some of the former kind, so the grant came too early
[[nodiscard]] Result<> occupy_fake_gpu();

/// `MINIMAL_GPU_CONTEXT` in that folder, as `occupy_fake_gpu` does; a load replaces it.
[[nodiscard]] Result<> occupy_context();

/// Leaves a grandchild in a session of its own that sleeps for ever, and prints "pid N is the
/// grandchild": `MINIMAL_CHILD` is `setsid`, or `bare` for one without the environment.
void leave_a_child();

}  // namespace bulkhead::worker

#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "ipc/base/error.h"

namespace bulkhead {

/// A program to start as a child. It inherits only the environment: no input, no descriptors but
/// its output, no blocked or ignored signals.
struct Program {
    std::string path;
    std::vector<std::string> arguments;  ///< the first is its name
    int output = -1;
    int errors = -1;
    bool detached = false;  ///< own session, in "/": keeps no file system busy
};

/// Errors  system errors
[[nodiscard]] Result<pid_t> start(const Program& program);

}  // namespace bulkhead

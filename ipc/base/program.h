#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "ipc/base/error.h"

namespace bulkhead {

/// A program to start as a child that has nothing of this process but its environment: no input, no descriptor but its
/// output, no blocked or ignored signal.
struct Program {
    std::string path;
    std::vector<std::string> arguments;  ///< the first is its name
    int output = -1;
    int errors = -1;
    bool detached = false;  ///< in a session of its own, and in "/": it keeps no file system busy
};

/// Errors  system errors
[[nodiscard]] Result<pid_t> start(const Program& program);

}  // namespace bulkhead

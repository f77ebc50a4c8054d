#pragma once

#include <string>
#include <vector>

namespace bulkhead::supervisor {

/// The frames of the thread that died, as Python's `faulthandler` wrote them among these lines: "speak (engine.py:31)",
/// innermost first; empty: it wrote none. They are what a dying process printed, and no more.
[[nodiscard]] std::vector<std::string> python_frames(const std::vector<std::string>& log);

}  // namespace bulkhead::supervisor

#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bulkhead::supervisor {

/// Of the line with which Python's `faulthandler` begins, "Fatal Python error: Segmentation fault"; empty: of another.
[[nodiscard]] std::optional<int> fatal_signal(std::string_view line);

/// The frames of the thread that died, as `faulthandler` wrote them among these lines: "speak (engine.py:31)",
/// innermost first; empty: it wrote none.
[[nodiscard]] std::vector<std::string> python_frames(const std::vector<std::string>& lines);

}  // namespace bulkhead::supervisor

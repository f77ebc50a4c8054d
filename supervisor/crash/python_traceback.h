#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bulkhead::supervisor {

/// Returns the signal in `faulthandler`'s line "Fatal Python error: Segmentation fault"; empty for other lines.
[[nodiscard]] std::optional<int> fatal_signal(std::string_view line);

/// Returns the frames of the thread that died from the lines of `faulthandler`: "speak
/// (engine.py:31)", innermost first; empty: there are none.
[[nodiscard]] std::vector<std::string> python_frames(const std::vector<std::string>& lines);

}  // namespace bulkhead::supervisor

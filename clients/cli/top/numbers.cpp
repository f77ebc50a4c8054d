#include "clients/cli/top/numbers.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

namespace bulkhead::cli::top {

std::string size_text(std::uint64_t bytes) {
    constexpr std::array units{"K", "M", "G", "T"};
    if (bytes == 0) return "0";
    double value = static_cast<double>(bytes) / 1024;
    std::size_t unit = 0;
    for (; value >= 999.5 && unit + 1 < units.size(); ++unit) value /= 1024;
    return value < 9.95 && unit >= 2 ? fmt::format("{:.1f}{}", value, units[unit])
                                     : fmt::format("{:.0f}{}", value, units[unit]);
}

std::string rate_text(double per_second) {
    if (per_second == 0) return "0";
    if (per_second < 99.95) return fmt::format("{:.1f}", per_second);
    if (per_second < 9'999.5) return fmt::format("{:.0f}", per_second);
    return per_second < 99'950 ? fmt::format("{:.1f}k", per_second / 1000)
                               : fmt::format("{:.0f}k", std::min(per_second / 1000, 99'999.0));
}

std::string latency_text(double ms) {
    if (ms < 0.995) return fmt::format("{:.2f}ms", ms);
    if (ms < 9.95) return fmt::format("{:.1f}ms", ms);
    if (ms < 999.5) return fmt::format("{:.0f}ms", ms);
    return ms < 9'995 ? fmt::format("{:.2f}s", ms / 1000) : fmt::format("{:.0f}s", std::min(ms / 1000, 99'999.0));
}

std::string span_text(std::int64_t ms) {
    const std::int64_t seconds = std::max<std::int64_t>(ms, 0) / 1000;
    if (seconds < 100) return fmt::format("{}s", seconds);
    if (seconds < 100 * 60) return fmt::format("{}m", seconds / 60);
    if (seconds < 48 * 3600) return fmt::format("{}h", seconds / 3600);
    return fmt::format("{}d", seconds / 86'400);
}

}  // namespace bulkhead::cli::top

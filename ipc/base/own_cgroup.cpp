#include "ipc/base/own_cgroup.h"

#include <algorithm>
#include <string>
#include <vector>

namespace bulkhead {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
    std::vector<std::string_view> parts;
    while (!text.empty()) {
        const std::size_t end = text.find(separator);
        parts.push_back(text.substr(0, end));
        text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    }
    return parts;
}

bool lists(std::string_view list, std::string_view name) {
    const auto parts = split(list, ',');
    return std::ranges::find(parts, name) != parts.end();
}

/// mountinfo writes a space in a path as \040, and so on.
std::string unescape_octal(std::string_view text) {
    std::string out;
    for (std::size_t i = 0; i < text.size(); ++i) {
        const auto digit = [&](std::size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '7'; };
        if (text[i] == '\\' && digit(i + 1) && digit(i + 2) && digit(i + 3)) {
            out += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0'));
            i += 3;
        } else {
            out += text[i];
        }
    }
    return out;
}

/// Returns the path after "4:memory:", or after "0::"; empty if there is none.
std::string_view path_in(std::string_view cgroup, std::string_view controller) {
    for (const std::string_view line : split(cgroup, '\n')) {
        const std::size_t controllers = line.find(':') + 1;
        const std::size_t path = line.find(":/", controllers) + 1;
        if (controllers == 0 || path == 0) continue;
        const std::string_view named = line.substr(controllers, path - 1 - controllers);
        if (controller.empty() ? line.substr(0, path) == "0::" : lists(named, controller)) return line.substr(path);
    }
    return {};
}

/// The format of a line: id parent device root mount-point options… - type source options
bool mounts(std::string_view behind_dash, std::string_view controller) {
    const auto words = split(behind_dash, ' ');
    if (controller.empty()) return !words.empty() && words[0] == "cgroup2";
    return words.size() >= 3 && words[0] == "cgroup" && lists(words[2], controller);
}

}  // namespace

std::optional<std::filesystem::path> own_cgroup(std::string_view mountinfo, std::string_view cgroup,
                                                std::string_view controller) {
    const std::string_view own = path_in(cgroup, controller);
    if (own.empty()) return std::nullopt;
    for (const std::string_view line : split(mountinfo, '\n')) {
        const std::size_t dash = line.find(" - ");
        if (dash == std::string_view::npos || !mounts(line.substr(dash + 3), controller)) continue;
        const auto words = split(line.substr(0, dash), ' ');
        if (words.size() < 6) continue;
        // A container may mount a part of the hierarchy: only what lies below that root is visible.
        const auto below = std::filesystem::path{own}.lexically_relative(unescape_octal(words[3]));
        if (below.empty() || *below.begin() == "..") continue;
        const std::filesystem::path mount_point = unescape_octal(words[4]);
        return below == "." ? mount_point : mount_point / below;
    }
    return std::nullopt;
}

}  // namespace bulkhead

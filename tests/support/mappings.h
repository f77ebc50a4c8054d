#pragma once

#include <sys/types.h>

#include <cstddef>
#include <fstream>
#include <string>
#include <string_view>

namespace bulkhead::test {

/// How many lines of /proc/PID/maps hold `text`; of this process without a pid.
inline std::size_t mappings(std::string_view text, pid_t pid = 0) {
    std::ifstream maps{"/proc/" + (pid == 0 ? "self" : std::to_string(pid)) + "/maps"};
    std::size_t count = 0;
    for (std::string line; std::getline(maps, line);) count += line.find(text) != std::string::npos;
    return count;
}

}  // namespace bulkhead::test

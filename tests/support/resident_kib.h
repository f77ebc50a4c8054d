#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "tests/support/file_text.h"

namespace bulkhead::test {

/// Resident memory of a process; 0 where it has ended.
inline std::int64_t resident_kib(pid_t pid) {
    const std::string status = file_text("/proc/" + std::to_string(pid) + "/status");
    const std::size_t at = status.find("VmRSS:");
    return at == std::string::npos ? 0 : std::stoll(status.substr(at + 6));
}

}  // namespace bulkhead::test

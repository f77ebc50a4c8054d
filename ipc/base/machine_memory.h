#pragma once

#include <cstdint>

namespace bulkhead {

/// "MemTotal" and "MemAvailable" of this machine, in bytes; 0 if unreadable.
struct MachineMemory {
    std::uint64_t total = 0;
    std::uint64_t available = 0;
};
[[nodiscard]] MachineMemory read_machine_memory();

}  // namespace bulkhead

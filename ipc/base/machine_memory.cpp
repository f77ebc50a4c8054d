#include "ipc/base/machine_memory.h"

#include <fstream>
#include <string>

namespace bulkhead {

MachineMemory read_machine_memory() {
    MachineMemory memory;
    std::ifstream file{"/proc/meminfo"};
    std::string name, unit;
    for (std::uint64_t kib = 0; file >> name >> kib && std::getline(file, unit);) {
        if (name == "MemTotal:") memory.total = kib * 1024;
        if (name == "MemAvailable:") memory.available = kib * 1024;
    }
    return memory;
}

}  // namespace bulkhead

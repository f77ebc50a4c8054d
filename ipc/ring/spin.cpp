#include "ipc/ring/spin.h"

#include <sched.h>

namespace bulkhead {

std::chrono::microseconds spin_allowed(std::chrono::microseconds asked, SpinSide side) {
    cpu_set_t mask;
    // On more CPUs than the set has bits for, this fails, and there is room enough.
    const int cpus = ::sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : CPU_SETSIZE;
    const int needed = side == SpinSide::client ? 2 : 3;
    return cpus >= needed ? asked : std::chrono::microseconds{0};
}

}  // namespace bulkhead
